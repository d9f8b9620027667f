//! How long jobs tell how far they are, and what is worth knowing, without printing anything themselves.

/// Who hears of long jobs and of what is worth knowing: a face of the project.
pub trait Reporter: Send + Sync {
    /// A job of `total` things begins; it ends when the answer is dropped.
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress>;

    /// Something worth knowing that is no error.
    fn note(&self, note: &str);

    /// Whether the job is to end early, because the user wants no more of it. It is asked often, on the thread that called, between
    /// two pieces of a tensor or of a download; what it says once it should go on saying until the job has ended. By default
    /// nobody wants that.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// A job that goes on.
pub trait Progress: Send + Sync {
    /// As many things more are done.
    fn advance(&self, by: u64);
}

/// What a job counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things of this name, such as `tokens`.
    Items(&'static str),
}

/// A reporter that keeps everything to itself.
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
