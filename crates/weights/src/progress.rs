//! Who hears how far reading and writing are, and says whether to go on.

use crate::WeightsError;

/// Elements that are worked on between two looks for an interruption, and that are held at once where possible: 4 MiB in f32.
pub(crate) const PIECE: usize = 1 << 20;

/// Who hears how far a long job with a checkpoint's files is. A function of the number of bytes is one, for whom nothing ends
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
    /// As many bytes more were read since the last call. Any thread may tell it.
    fn advance(&self, bytes: u64);

    /// Whether the job is to end with [`WeightsError::Interrupted`]. It is asked on the thread that began the job, between two
    /// tensors or two pieces of one, and what it says once it should go on saying.
    fn is_interrupted(&self) -> bool {
        false
    }
}

impl<F: Fn(u64) + Sync> ReadProgress for F {
    fn advance(&self, bytes: u64) {
        self(bytes);
    }
}

/// An error where the job is to end.
pub(crate) fn check_interrupted(progress: &dyn ReadProgress) -> Result<(), WeightsError> {
    if progress.is_interrupted() { Err(WeightsError::Interrupted) } else { Ok(()) }
}

/// What an error of candle's means: an interruption may have come through it.
pub(crate) fn of_candle(progress: &dyn ReadProgress, error: candle_core::Error) -> WeightsError {
    if progress.is_interrupted() { WeightsError::Interrupted } else { error.into() }
}
