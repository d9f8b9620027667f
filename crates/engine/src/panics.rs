//! What panics said and where, for a program that reports them itself.

use std::any::Any;
use std::collections::VecDeque;
use std::panic;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Panics that are kept until they are asked for: libraries catch some of their own, which are never asked for.
const MOST_KEPT: usize = 16;

static KEPT: Mutex<VecDeque<Kept>> = Mutex::new(VecDeque::new());

struct Kept {
    message: String,
    place: String,
}

fn kept() -> MutexGuard<'static, VecDeque<Kept>> {
    // The queue is whole at any moment.
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes panics print nothing from here on: the code that catches one reports what [`panic_message`] returns. For a program, at
/// the beginning of `main`.
pub fn keep_panics() {
    panic::set_hook(Box::new(|panic| {
        let message = message_of(panic.payload());
        let place = panic.location().map_or_else(String::new, |place| format!(", at {place}"));
        let mut kept = kept();
        if kept.len() == MOST_KEPT {
            kept.pop_front();
        }
        kept.push_back(Kept { message, place });
    }));
}

/// The message of a caught panic; after [`keep_panics`] also its place, on any thread.
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
    let mut kept = kept();
    let last = kept.iter().rposition(|kept| kept.message == message);
    let place = last.and_then(|last| kept.remove(last)).map(|kept| kept.place);
    message + &place.unwrap_or_default()
}

fn message_of(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}
