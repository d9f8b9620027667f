//! Job errors.

use std::borrow::Cow;
use std::path::PathBuf;

use candle_core::Error as CandleError;
use candle_gpt2::{ConfigError, Diagnose, ErrorKind};
use candle_gpt2_engine::EngineError;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_training::TrainingError;
use candle_gpt2_weights::WeightsError;
use thiserror::Error;

/// Reason why a job cannot start or continue.
///
/// [`TrainJob`](crate::TrainJob) and [`TokenizeJob`](crate::TokenizeJob) return it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JobError {
    /// An error during training, or in the options, data or files.
    #[error(transparent)]
    Training(#[from] TrainingError),
    /// The loss curve cannot be drawn.
    #[error("{path}: the loss curve cannot be drawn: {what}")]
    Curve {
        /// Path of the picture.
        path: PathBuf,
        /// Reason.
        what: String,
    },
    /// The initial checkpoint cannot be opened.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A sample cannot be generated.
    #[error(transparent)]
    Generation(#[from] GenerationError),
}

impl JobError {
    /// Whether the job was interrupted, in any phase.
    pub fn is_interrupted(&self) -> bool {
        self.kind() == ErrorKind::Interrupted
    }

    /// Whether this is a usage error rather than a failed job.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for JobError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Training(error) => error.kind(),
            Self::Engine(error) => error.kind(),
            Self::Generation(error) => error.kind(),
            Self::Curve { .. } => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::Training(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Generation(error) => error.hint(),
            Self::Curve { .. } => None,
        }
    }
}

impl From<WeightsError> for JobError {
    fn from(error: WeightsError) -> Self {
        TrainingError::from(error).into()
    }
}

impl From<ConfigError> for JobError {
    fn from(error: ConfigError) -> Self {
        TrainingError::from(error).into()
    }
}

impl From<CandleError> for JobError {
    fn from(error: CandleError) -> Self {
        TrainingError::from(error).into()
    }
}
