//! Messages and locations of panics, for programs that report them.

use std::any::Any;
use std::collections::VecDeque;
use std::panic;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of stored panics.
///
/// Libraries catch some of their own panics, whose messages are never retrieved.
const MAX_STORED_PANICS: usize = 16;

static PANICS: Mutex<VecDeque<PanicRecord>> = Mutex::new(VecDeque::new());

struct PanicRecord {
    message: String,
    location: String,
}

fn stored_panics() -> MutexGuard<'static, VecDeque<PanicRecord>> {
    // The queue is valid even if a thread panicked while it held the lock.
    PANICS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Silences panics and stores their messages for [`panic_message`].
///
/// The code that catches a panic reports it. Programs call this at the beginning of `main`.
pub fn keep_panics() {
    panic::set_hook(Box::new(|panic| {
        let message = message_of(panic.payload());
        let location = panic.location().map_or_else(String::new, |location| format!(", at {location}"));
        let mut panics = stored_panics();
        if panics.len() == MAX_STORED_PANICS {
            panics.pop_front();
        }
        panics.push_back(PanicRecord { message, location });
    }));
}

/// Returns the message of a caught panic, with its location if [`keep_panics`] was called.
///
/// The panic may come from any thread.
///
/// ```
/// use candle_gpt2_engine::process::{keep_panics, panic_message};
///
/// keep_panics();
/// let payload = std::panic::catch_unwind(|| panic!("no {}", "room")).unwrap_err();
/// assert!(panic_message(payload.as_ref()).starts_with("no room, at "));
/// ```
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    let message = message_of(payload);
    let mut panics = stored_panics();
    let last = panics.iter().rposition(|record| record.message == message);
    let location = last.and_then(|last| panics.remove(last)).map(|record| record.location);
    message + &location.unwrap_or_default()
}

fn message_of(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}
