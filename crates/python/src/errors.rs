//! Conversion of errors to Python exceptions.
//!
//! A missing file raises `FileNotFoundError`, an invalid argument `ValueError` or `TypeError`, and everything
//! else `Gpt2Error`. Each message is the text that the program prints.

use std::error::Error;
use std::ffi::CString;

use candle_gpt2::{Diagnose, ErrorKind};
use candle_gpt2_api::{ApiError, SetupError};
use candle_gpt2_compression::CompressionError;
use candle_gpt2_engine::EngineError;
use candle_gpt2_evaluation::EvaluationError;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_grammar::GrammarError;
use candle_gpt2_interpret::{InterpretError, SiteError};
use candle_gpt2_jobs::JobError;
use candle_gpt2_kernels::message_with_causes;
use candle_gpt2_look::LookError;
use candle_gpt2_pictures::PictureError;
use candle_gpt2_training::TrainingError;
use candle_gpt2_weights::WeightsError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyFileNotFoundError, PyTypeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;

create_exception!(
    candle_gpt2,
    Gpt2Error,
    PyException,
    "Raised when a valid call fails because of the model, the machine or a file."
);

/// Option names that are Python keywords, so their Python arguments end in an underscore.
pub(crate) const RESERVED: [&str; 3] = ["as", "from", "with"];

/// Error to raise in Python.
#[derive(Debug)]
pub(crate) struct Failure(PyErr);

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Creates an error for an invalid argument.
pub(crate) fn value_error(what: impl Into<String>) -> Failure {
    Failure(PyValueError::new_err(what.into()))
}

/// Creates an error for an unknown argument or one of the wrong type.
pub(crate) fn type_error(what: impl Into<String>) -> Failure {
    Failure(PyTypeError::new_err(what.into()))
}

/// Creates an error for a valid call that failed.
pub(crate) fn gpt2_error(what: impl Into<String>) -> Failure {
    Failure(Gpt2Error::new_err(what.into()))
}

impl Failure {
    /// Adds a note about where the error occurred.
    pub(crate) fn with_note(self, py: Python<'_>, note: &str) -> Self {
        // Exceptions that do not support notes are raised without one.
        let _ = self.0.value(py).call_method1("add_note", (note,));
        self
    }

    /// Returns the exception as a value that takes the place of a result.
    ///
    /// Exceptions that end the process, such as `KeyboardInterrupt`, are still raised.
    pub(crate) fn into_item(self, py: Python<'_>) -> Result<Bound<'_, PyAny>> {
        match self.0.is_instance_of::<PyException>(py) {
            true => Ok(self.into_exception(py).into_bound(py)),
            false => Err(self),
        }
    }

    /// Returns the exception object.
    pub(crate) fn into_exception(self, py: Python<'_>) -> Py<PyAny> {
        self.0.into_value(py).into_any()
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

/// Formats an error and its causes, with option names written as Python arguments.
fn message(error: &(dyn Error + 'static)) -> String {
    let message = message_with_causes(error);
    let keyword = |message: String, option| message.replace(&format!("`{option}`"), &format!("`{option}_`"));
    RESERVED.into_iter().fold(message, keyword)
}

/// Converts an error to the exception of its kind.
fn raised(error: &(impl Diagnose + 'static)) -> Failure {
    let message = message(error);
    match error.kind() {
        ErrorKind::NotFound => Failure(PyFileNotFoundError::new_err(message)),
        ErrorKind::Usage | ErrorKind::Input => value_error(message),
        ErrorKind::Interrupted | ErrorKind::Failed => gpt2_error(message),
    }
}

/// Converts errors by a function.
macro_rules! convert {
    ($convert:expr; $($error:ty),+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                $convert(&error)
            }
        })+
    };
}

convert!(raised; CompressionError, EngineError, EvaluationError, GenerationError, InterpretError, JobError, LookError, SetupError, TrainingError, WeightsError);
convert!(|error| value_error(message(error)); GrammarError, PictureError, SiteError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        // Callers own the model, so include the internal cause.
        match error.cause() {
            Some(cause) => gpt2_error(cause),
            None if error.status() < 500 => value_error(message(&error)),
            None => gpt2_error(message(&error)),
        }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        // The lines after the first may be a backtrace.
        gpt2_error(error.to_string().lines().next().unwrap_or_default())
    }
}

/// Raises a note as a `UserWarning`.
pub(crate) fn warn(py: Python<'_>, note: &str) -> Result<()> {
    // A C string ends at the first NUL character, so cut the note there.
    let note = CString::new(note.split('\0').next().unwrap_or_default()).unwrap_or_default();
    Ok(PyErr::warn(py, &py.get_type::<PyUserWarning>(), &note, 1)?)
}
