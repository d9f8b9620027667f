//! What goes wrong, as exceptions: a file that is not there is a `FileNotFoundError`, a wrong argument a `ValueError`, and
//! everything else a `Gpt2Error`; each with the text that the program prints.

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
    "What a model, a machine or a file does not allow, although the call was right."
);

/// Options whose names Python keeps for itself, so that its keywords end in an underscore.
pub(crate) const RESERVED: [&str; 3] = ["as", "from", "with"];

/// An error on its way to Python.
#[derive(Debug)]
pub(crate) struct Failure(PyErr);

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A call with a wrong argument.
pub(crate) fn wrong_value(what: impl Into<String>) -> Failure {
    Failure(PyValueError::new_err(what.into()))
}

/// A call with an argument of the wrong type, or one that there is not.
pub(crate) fn wrong_type(what: impl Into<String>) -> Failure {
    Failure(PyTypeError::new_err(what.into()))
}

/// A right call that failed.
pub(crate) fn failed(what: impl Into<String>) -> Failure {
    Failure(Gpt2Error::new_err(what.into()))
}

impl Failure {
    /// The same with a line that says where it happened.
    pub(crate) fn with_note(self, py: Python<'_>, note: &str) -> Self {
        // An exception that takes no notes is told without.
        let _ = self.0.value(py).call_method1("add_note", (note,));
        self
    }

    /// The exception as a value, in place of what was asked for; what ends the process, such as Ctrl-C, is raised.
    pub(crate) fn in_place(self, py: Python<'_>) -> Result<Bound<'_, PyAny>> {
        match self.0.is_instance_of::<PyException>(py) {
            true => Ok(self.into_exception(py).into_bound(py)),
            false => Err(self),
        }
    }

    /// The exception.
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

/// The error with its causes, and with options as keywords.
fn message(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    let keyword = |message: String, option| message.replace(&format!("`{option}`"), &format!("`{option}_`"));
    RESERVED.into_iter().fold(message, keyword)
}

fn of(error: &dyn Error, is_usage: bool) -> Failure {
    if is_usage { wrong_value(message(error)) } else { failed(message(error)) }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Weights(error) => error.into(),
            EngineError::Generation(error) => error.into(),
            error => of(&error, error.is_usage()),
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
                | WeightsError::OtherHead { .. }
        );
        match is_missing {
            true => Self(PyFileNotFoundError::new_err(message(&error))),
            false => of(&error, is_usage),
        }
    }
}

impl From<GenerationError> for Failure {
    fn from(error: GenerationError) -> Self {
        of(&error, error.is_usage())
    }
}

impl From<CompressionError> for Failure {
    fn from(error: CompressionError) -> Self {
        match error {
            CompressionError::Engine(error) => error.into(),
            error => of(&error, error.is_usage()),
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
            error => of(&error, error.is_usage()),
        }
    }
}

impl From<InterpretError> for Failure {
    fn from(error: InterpretError) -> Self {
        of(&error, error.is_usage())
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
            error => of(&error, error.is_usage()),
        }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        // Callers own the model, and may know what went wrong inside.
        match error.cause() {
            Some(cause) => failed(cause),
            None => of(&error, error.status() < 500),
        }
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        of(&error, false)
    }
}

impl From<GrammarError> for Failure {
    fn from(error: GrammarError) -> Self {
        of(&error, true)
    }
}

impl From<SiteError> for Failure {
    fn from(error: SiteError) -> Self {
        of(&error, true)
    }
}

impl From<JobError> for Failure {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Training(error) => error.into(),
            JobError::Engine(error) => error.into(),
            JobError::Generation(error) => error.into(),
            error => of(&error, error.is_usage()),
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
                    false => of(&error, error.is_usage()),
                }
            }
        }
    }
}

impl From<PictureError> for Failure {
    fn from(error: PictureError) -> Self {
        of(&error, true)
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        // After the first line may be a backtrace.
        failed(error.to_string().lines().next().unwrap_or_default())
    }
}

/// Raises a note as a warning.
pub(crate) fn warn(py: Python<'_>, note: &str) -> Result<()> {
    // A text with a zero in it is cut there.
    let note = CString::new(note.split('\0').next().unwrap_or_default()).unwrap_or_default();
    Ok(PyErr::warn(py, &py.get_type::<PyUserWarning>(), &note, 1)?)
}
