//! Progress and interruption of reading and writing.

use crate::WeightsError;

/// Elements that are worked on between two checks for an interruption, and that are held at once if possible: 4 MiB in f32.
pub(crate) const PIECE: usize = 1 << 20;

/// Receives the progress of a long job with a checkpoint's files. A function of the number of bytes is one that never ends the job
/// early.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use candle_gpt2_weights::ReadProgress;
///
/// let total = AtomicU64::new(0);
/// let progress = |bytes: u64| {
///     total.fetch_add(bytes, Ordering::Relaxed);
/// };
/// progress.advance(5);
/// progress.advance(7);
/// assert_eq!(total.into_inner(), 12);
/// ```
pub trait ReadProgress: Sync {
    /// `bytes` more were read since the last call. Any thread may call it.
    fn advance(&self, bytes: u64);

    /// Whether the job is to end with [`WeightsError::Interrupted`]. It is called on the thread that began the job, between two
    /// tensors or two pieces of one; once true, it should stay true.
    fn is_interrupted(&self) -> bool {
        false
    }
}

impl<F: Fn(u64) + Sync> ReadProgress for F {
    fn advance(&self, bytes: u64) {
        self(bytes);
    }
}

/// An error if the job is to end.
pub(crate) fn check_interrupted(progress: &dyn ReadProgress) -> Result<(), WeightsError> {
    if progress.is_interrupted() { Err(WeightsError::Interrupted) } else { Ok(()) }
}

/// What an error of candle's means: an interruption may have come through it.
pub(crate) fn of_candle(progress: &dyn ReadProgress, error: candle_core::Error) -> WeightsError {
    if progress.is_interrupted() { WeightsError::Interrupted } else { error.into() }
}
