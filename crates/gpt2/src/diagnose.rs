//! Common contract of errors, from which programs derive exit codes, statuses and exceptions.

use std::borrow::Cow;
use std::error::Error;
use std::io;

/// Kind of an error, which determines exit codes, HTTP statuses and exceptions.
///
/// ```
/// use std::io;
///
/// use candle_gpt2::ErrorKind;
///
/// let missing = io::Error::from(io::ErrorKind::NotFound);
/// assert_eq!(ErrorKind::of_io(&missing), ErrorKind::NotFound);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An option or argument is invalid or does not fit the model.
    Usage,
    /// The model cannot take this input.
    Input,
    /// A file does not exist.
    NotFound,
    /// The job was interrupted, which is not a failure.
    Interrupted,
    /// A file, the model, the machine or the network is at fault.
    Failed,
}

impl ErrorKind {
    /// Whether the caller's options or arguments are at fault.
    pub fn is_usage(self) -> bool {
        self == Self::Usage
    }

    /// Returns [`ErrorKind::NotFound`] or [`ErrorKind::Failed`] for an error from the operating system.
    pub fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            _ => Self::Failed,
        }
    }
}

/// Error that knows its kind and suggests what to try.
///
/// ```
/// use std::borrow::Cow;
///
/// use candle_gpt2::{Diagnose, ErrorKind};
///
/// #[derive(Debug, thiserror::Error)]
/// #[error("port {0} is in use")]
/// struct PortInUse(u16);
///
/// impl Diagnose for PortInUse {
///     fn kind(&self) -> ErrorKind {
///         ErrorKind::Failed
///     }
///
///     fn hint(&self) -> Option<Cow<'static, str>> {
///         Some("`port`".into())
///     }
/// }
///
/// assert!(!PortInUse(80).kind().is_usage());
/// ```
pub trait Diagnose: Error {
    /// Returns the kind.
    fn kind(&self) -> ErrorKind;

    /// Returns the option at fault, if there is exactly one.
    fn option(&self) -> Option<&'static str> {
        None
    }

    /// Returns what to try, separated by commas; names of options are in backquotes.
    fn hint(&self) -> Option<Cow<'static, str>> {
        None
    }
}
