//! Memory budget for tokenizing requests: a semaphore counted in bytes.
//!
//! A tokenizer needs up to a few hundred bytes for each byte of text. Long texts therefore wait for one
//! another, no matter how many threads read requests.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::ApiError;

/// Memory limit for all texts that are encoded concurrently.
const ALL_BYTES: usize = 96 << 20;
/// Memory limit for one text. A text that needs more than [`ALL_BYTES`] is encoded alone.
const MAX_BYTES: usize = 192 << 20;
/// Maximum memory that needs no permit; the number of threads bounds the total for such texts.
const SMALL_BYTES: usize = 8 << 20;
/// Maximum wait for memory.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Retry delay for clients.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Semaphore for the memory that encoding needs.
#[derive(Debug)]
pub(crate) struct EncodingMemory {
    /// Number of bytes available for permits.
    free: Mutex<usize>,
    freed: Condvar,
}

/// Memory permit for one text, released on drop.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    memory: &'a EncodingMemory,
    bytes: usize,
}

impl EncodingMemory {
    pub(crate) fn new() -> Self {
        Self { free: Mutex::new(ALL_BYTES), freed: Condvar::new() }
    }

    /// Whether a text that needs `bytes` can be encoded at all.
    pub(crate) fn fits(bytes: usize) -> bool {
        bytes <= MAX_BYTES
    }

    /// Waits until enough memory is free to encode a text that needs `bytes`.
    pub(crate) fn acquire(&self, bytes: usize, text: &str, path: &str) -> Result<Permit<'_>, ApiError> {
        if !Self::fits(bytes) {
            let message = format!(
                "{path}: this model's tokenizer may need {} MB of memory for a text of {} bytes, more than the limit of {} MB; \
                 split the text",
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
            let message = "not enough free memory to tokenize the text; try again later";
            ApiError::busy(503, message, "encoding_memory_busy", RETRY_AFTER)
        };
        if bytes <= SMALL_BYTES {
            return Ok(Permit { memory: self, bytes: 0 });
        }
        let permitted = bytes.min(ALL_BYTES);
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(free, MAX_WAIT, |free| *free < permitted);
        let (mut free, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && *free < permitted {
            return Err(busy());
        }
        *free -= permitted;
        drop(free);
        let permit = Permit { memory: self, bytes: permitted };
        // If the address space is limited, encoding could otherwise abort the process.
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
    fn reservations_wait_for_free_memory() {
        let memory = EncodingMemory::new();
        let (active, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| {
                    let permit = memory.reserve(ALL_BYTES / 3).unwrap();
                    peak.fetch_max(active.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(2));
                    active.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                });
            }
        });
        assert!(peak.into_inner() <= 3);
        assert_eq!(*memory.free.lock().unwrap(), ALL_BYTES);
    }

    #[test]
    fn oversized_reservation_takes_all_memory() {
        let memory = EncodingMemory::new();
        let permit = memory.reserve(ALL_BYTES + 1).unwrap();
        assert_eq!(*memory.free.lock().unwrap(), 0);
        drop(permit);
        assert_eq!(*memory.free.lock().unwrap(), ALL_BYTES);
    }

    #[test]
    fn reservation_beyond_system_memory_is_rejected() {
        let error = EncodingMemory::new().reserve(usize::MAX >> 1).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("encoding_memory_busy")));
    }
}
