//! A job with a checkpoint's files, reported to a reporter.

use candle_gpt2_weights::ReadProgress;

use crate::{Progress, Reporter, Silent, Unit};

/// A job that reads a number of bytes: a reporter receives its progress, and may end it.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, Watched};
///
/// let checkpoint = ModelOptions::default().open_checkpoint(&Silent)?;
/// let bytes = checkpoint.files().map(|(_, bytes)| bytes).sum();
/// let watched = Watched::new(&Silent, "reading", bytes);
/// let statistics = checkpoint.statistics(0, &watched)?.ok_or("no weights")?;
/// assert!(statistics.mean.abs() < 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Watched<'a> {
    reporter: &'a dyn Reporter,
    bar: Box<dyn Progress>,
}

impl<'a> Watched<'a> {
    /// A job of `bytes` begins; it ends when this is dropped.
    pub fn new(reporter: &'a dyn Reporter, what: &str, bytes: u64) -> Self {
        Self { reporter, bar: reporter.start(what, bytes, Unit::Bytes) }
    }

    /// A job that the reporter may end, without its progress.
    pub fn unseen(reporter: &'a dyn Reporter) -> Self {
        Self { reporter, bar: Box::new(Silent) }
    }
}

impl std::fmt::Debug for Watched<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}

impl ReadProgress for Watched<'_> {
    fn advance(&self, bytes: u64) {
        self.bar.advance(bytes);
    }

    fn is_interrupted(&self) -> bool {
        self.reporter.is_interrupted()
    }
}
