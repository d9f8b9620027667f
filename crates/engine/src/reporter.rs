//! Interface for progress and notes; the library itself prints nothing.

/// Receives notes and the progress of long jobs; each front end implements it.
///
/// ```
/// use std::sync::Mutex;
/// use candle_gpt2_engine::{ModelOptions, Progress, Reporter, Silent, Unit};
///
/// /// Records the names of all jobs.
/// #[derive(Default)]
/// struct Jobs(Mutex<Vec<String>>);
///
/// impl Reporter for Jobs {
///     fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
///         self.0.lock().unwrap().push(format!("{what} {total} {unit:?}"));
///         Box::new(Silent)
///     }
///
///     fn note(&self, _: &str) {}
/// }
///
/// let jobs = Jobs::default();
/// ModelOptions::default().open(&Silent)?.load(&jobs)?;
/// assert!(jobs.0.lock().unwrap()[0].ends_with("Bytes"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Reporter: Send + Sync {
    /// Starts a job of `total` units that ends when the returned value is dropped.
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress>;

    /// Reports a note to the user; notes are not errors.
    fn note(&self, note: &str);

    /// Whether the job should stop early because the user interrupted it.
    ///
    /// Jobs call this often, on the calling thread, between pieces of a tensor or a download. Once it returns
    /// true, it should return true until the job has ended. The default is false.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// A running job.
///
/// Returned by [`Reporter::start`].
pub trait Progress: Send + Sync {
    /// Reports that `by` more units are done.
    fn advance(&self, by: u64);
}

/// Unit of a job's progress.
///
/// An argument of [`Reporter::start`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Items with the given name, such as `tokens`.
    Items(&'static str),
}

/// A reporter that discards everything.
///
/// ```
/// use candle_gpt2_engine::{Reporter, Silent, Unit};
///
/// Silent.note("this is printed nowhere");
/// Silent.start("reading", 100, Unit::Bytes).advance(50);
/// assert!(!Silent.is_interrupted());
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn start(&self, _: &str, _: u64, _: Unit) -> Box<dyn Progress> {
        Box::new(Self)
    }

    fn note(&self, _: &str) {}
}

impl Progress for Silent {
    fn advance(&self, _: u64) {}
}
