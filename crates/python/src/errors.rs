//! Conversion of errors to Python exceptions.
//!
//! A missing file raises `FileNotFoundError`, an invalid argument `ValueError` or `TypeError`, and everything
//! else `Gpt2Error`. Each message is the text that the program prints.

use std::error::Error;
use std::ffi::CString;
use std::io;

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

fn from_error(error: &(dyn Error + 'static), is_usage: bool) -> Failure {
    if is_usage { value_error(message(error)) } else { gpt2_error(message(error)) }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Weights(error) => error.into(),
            EngineError::Generation(error) => error.into(),
            error => from_error(&error, error.is_usage()),
        }
    }
}

impl From<WeightsError> for Failure {
    fn from(error: WeightsError) -> Self {
        let is_missing = match &error {
            WeightsError::NotFound { .. }
            | WeightsError::NoConfig { .. }
            | WeightsError::NoWeights { .. } => true,
            WeightsError::Read { error, .. } => error.kind() == io::ErrorKind::NotFound,
            _ => false,
        };
        let is_usage = matches!(
            error,
            WeightsError::NotOnCpu { .. }
                | WeightsError::NotOnGpu { .. }
                | WeightsError::NoTokenizer { .. }
                | WeightsError::Encode { .. }
                | WeightsError::UnsupportedHead { .. }
        );
        match is_missing {
            true => Self(PyFileNotFoundError::new_err(message(&error))),
            false => from_error(&error, is_usage),
        }
    }
}

impl From<GenerationError> for Failure {
    fn from(error: GenerationError) -> Self {
        from_error(&error, error.is_usage())
    }
}

impl From<CompressionError> for Failure {
    fn from(error: CompressionError) -> Self {
        match error {
            CompressionError::Engine(error) => error.into(),
            error => from_error(&error, error.is_usage()),
        }
    }
}

impl From<EvaluationError> for Failure {
    fn from(error: EvaluationError) -> Self {
        match error {
            EvaluationError::Engine(error) => error.into(),
            EvaluationError::File { ref cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
                Self(PyFileNotFoundError::new_err(error.to_string()))
            }
            error => from_error(&error, error.is_usage()),
        }
    }
}

impl From<InterpretError> for Failure {
    fn from(error: InterpretError) -> Self {
        from_error(&error, error.is_usage())
    }
}

impl From<LookError> for Failure {
    fn from(error: LookError) -> Self {
        match error {
            LookError::Engine(error) => error.into(),
            LookError::Weights(error) => error.into(),
            LookError::Compute(error) => error.into(),
            LookError::Read { error: ref missing, .. } if missing.kind() == io::ErrorKind::NotFound => {
                Self(PyFileNotFoundError::new_err(message(&error)))
            }
            error => from_error(&error, error.is_usage()),
        }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        // Callers own the model, so include the internal cause.
        match error.cause() {
            Some(cause) => gpt2_error(cause),
            None => from_error(&error, error.status() < 500),
        }
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        from_error(&error, false)
    }
}

impl From<GrammarError> for Failure {
    fn from(error: GrammarError) -> Self {
        from_error(&error, true)
    }
}

impl From<SiteError> for Failure {
    fn from(error: SiteError) -> Self {
        from_error(&error, true)
    }
}

impl From<JobError> for Failure {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Training(error) => error.into(),
            JobError::Engine(error) => error.into(),
            JobError::Generation(error) => error.into(),
            error => from_error(&error, error.is_usage()),
        }
    }
}

impl From<TrainingError> for Failure {
    fn from(error: TrainingError) -> Self {
        match error {
            TrainingError::Weights(error) => error.into(),
            error => {
                let is_missing = matches!(
                    &error,
                    TrainingError::File { error, .. } if error.kind() == io::ErrorKind::NotFound
                );
                match is_missing {
                    true => Self(PyFileNotFoundError::new_err(message(&error))),
                    false => from_error(&error, error.is_usage()),
                }
            }
        }
    }
}

impl From<PictureError> for Failure {
    fn from(error: PictureError) -> Self {
        from_error(&error, true)
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
