//! Adapter that reports the progress of reading a checkpoint.

use candle_gpt2_weights::ReadProgress;

use crate::{Progress, Reporter, Silent, Unit};

/// Interruptible job that reads a known number of bytes and reports its progress.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, ReadJob, Silent};
///
/// let checkpoint = ModelOptions::default().open_checkpoint(&Silent)?;
/// let bytes = checkpoint.files().map(|(_, bytes)| bytes).sum();
/// let job = ReadJob::new(&Silent, "reading", bytes);
/// let statistics = checkpoint.statistics(0, &job)?.ok_or("no weights")?;
/// assert!(statistics.mean.abs() < 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReadJob<'a> {
    reporter: &'a dyn Reporter,
    bar: Box<dyn Progress>,
}

impl<'a> ReadJob<'a> {
    /// Starts a job of `bytes` bytes that ends when the value is dropped.
    pub fn new(reporter: &'a dyn Reporter, what: &str, bytes: u64) -> Self {
        Self { reporter, bar: reporter.start(what, bytes, Unit::Bytes) }
    }

    /// Creates a job that the reporter can interrupt but whose progress is not shown.
    pub fn without_progress(reporter: &'a dyn Reporter) -> Self {
        Self { reporter, bar: Box::new(Silent) }
    }
}

impl std::fmt::Debug for ReadJob<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadJob").finish_non_exhaustive()
    }
}

impl ReadProgress for ReadJob<'_> {
    fn advance(&self, bytes: u64) {
        self.bar.advance(bytes);
    }

    fn is_interrupted(&self) -> bool {
        self.reporter.is_interrupted()
    }
}
