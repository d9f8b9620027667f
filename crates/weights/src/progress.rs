//! Progress reporting and interruption for reads and writes.

use crate::WeightsError;

/// Number of elements processed between two interruption checks: 4 MiB in f32.
///
/// If possible, this is also the number of elements held in memory at a time.
pub(crate) const PIECE: usize = 1 << 20;

/// Progress callback for long-running jobs on checkpoint files.
///
/// A closure that takes a byte count implements it and never interrupts the job.
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
    /// Reports that `bytes` more bytes have been read since the last call. Any thread may call it.
    fn advance(&self, bytes: u64);

    /// Whether to end the job with [`WeightsError::Interrupted`].
    ///
    /// The thread that started the job calls it between tensors or between parts of a tensor. Once true, it
    /// should stay true.
    fn is_interrupted(&self) -> bool {
        false
    }
}

impl<F: Fn(u64) + Sync> ReadProgress for F {
    fn advance(&self, bytes: u64) {
        self(bytes);
    }
}

/// Fails if the job should be interrupted.
pub(crate) fn check_interrupted(progress: &dyn ReadProgress) -> Result<(), WeightsError> {
    if progress.is_interrupted() { Err(WeightsError::Interrupted) } else { Ok(()) }
}

/// Converts an error from candle, or reports the interruption that caused it.
pub(crate) fn of_candle(progress: &dyn ReadProgress, error: candle_core::Error) -> WeightsError {
    if progress.is_interrupted() { WeightsError::Interrupted } else { error.into() }
}
