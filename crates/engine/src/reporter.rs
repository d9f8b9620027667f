//! How long jobs report progress and notes, without printing anything themselves.

/// Receives the progress of long jobs, and notes; implemented by each front end.
///
/// ```
/// use std::sync::Mutex;
/// use candle_gpt2_engine::{ModelOptions, Progress, Reporter, Silent, Unit};
///
/// /// Keeps the names of all jobs.
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
    /// A job of `total` things begins; it ends when the answer is dropped.
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress>;

    /// A note for the user, which is not an error.
    fn note(&self, note: &str);

    /// Whether the job is to end early, because the user interrupted it. It is called often, on the calling thread, between two
    /// pieces of a tensor or of a download; once true, it should stay true until the job has ended. By default it is false.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// A running job.
///
/// Given by [`Reporter::start`].
pub trait Progress: Send + Sync {
    /// `by` more of the things are done.
    fn advance(&self, by: u64);
}

/// The unit that a job counts in.
///
/// An argument of [`Reporter::start`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things of this name, such as `tokens`.
    Items(&'static str),
}

/// A reporter that keeps everything to itself.
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
