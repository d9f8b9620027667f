//! The memory in which requests encode their texts: a semaphore in bytes.
//!
//! A tokenizer takes up to some hundred bytes for each byte of a text. Long texts therefore wait for each other, however many
//! threads read requests.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::ApiError;

/// Memory of all texts that are encoded concurrently.
const ALL_BYTES: usize = 96 << 20;
/// Largest memory of one text. One that takes more than [`ALL_BYTES`] is encoded alone.
const MAX_BYTES: usize = 192 << 20;
/// Texts that take less need no permit: there are few threads.
const SMALL_BYTES: usize = 8 << 20;
/// Longest wait for the memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time after which a client should retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Counts the memory of the texts that are encoded.
#[derive(Debug)]
pub(crate) struct EncodingMemory {
    /// Free bytes.
    free: Mutex<usize>,
    freed: Condvar,
}

/// Memory for one text, free again when dropped.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    memory: &'a EncodingMemory,
    bytes: usize,
}

impl EncodingMemory {
    pub(crate) fn new() -> Self {
        Self { free: Mutex::new(ALL_BYTES), freed: Condvar::new() }
    }

    /// Whether a text fits at all that takes `bytes`.
    pub(crate) fn fits(bytes: usize) -> bool {
        bytes <= MAX_BYTES
    }

    /// Waits until there is memory to encode a text that takes `bytes`.
    pub(crate) fn acquire(&self, bytes: usize, text: &str, path: &str) -> Result<Permit<'_>, ApiError> {
        if !Self::fits(bytes) {
            let message = format!(
                "{path}: this model's tokenizer may take {} MB of memory for a text of {} bytes, the limit is {} MB; split \
                 the text",
                bytes >> 20,
                text.len(),
                MAX_BYTES >> 20
            );
            return Err(ApiError::invalid(message).with_param(path).with_code("text_too_long"));
        }
        self.reserve(bytes)
    }

    fn reserve(&self, bytes: usize) -> Result<Permit<'_>, ApiError> {
        let busy = || {
            let message = "there is no memory to encode the text; try again later";
            ApiError::busy(503, message, "encoding_memory_busy", RETRY_AFTER)
        };
        if bytes <= SMALL_BYTES {
            return Ok(Permit { memory: self, bytes: 0 });
        }
        let permitted = bytes.min(ALL_BYTES);
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(free, PATIENCE, |free| *free < permitted);
        let (mut free, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && *free < permitted {
            return Err(busy());
        }
        *free -= permitted;
        drop(free);
        let permit = Permit { memory: self, bytes: permitted };
        // The process would abort in the middle of the text where its address space is limited.
        let is_available = Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
        if is_available { Ok(permit) } else { Err(busy()) }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.memory.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn texts_wait_for_the_memory_of_others() {
        let memory = EncodingMemory::new();
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| {
                    let permit = memory.reserve(ALL_BYTES / 3).unwrap();
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(2));
                    now.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                });
            }
        });
        assert!(most.into_inner() <= 3);
        assert_eq!(*memory.free.lock().unwrap(), ALL_BYTES);
    }

    #[test]
    fn a_text_that_takes_more_than_all_memory_is_encoded_alone() {
        let memory = EncodingMemory::new();
        let permit = memory.reserve(ALL_BYTES + 1).unwrap();
        assert_eq!(*memory.free.lock().unwrap(), 0);
        drop(permit);
        assert_eq!(*memory.free.lock().unwrap(), ALL_BYTES);
    }

    #[test]
    fn memory_that_the_system_does_not_have_is_refused() {
        let error = EncodingMemory::new().reserve(usize::MAX >> 1).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("encoding_memory_busy")));
    }
}
