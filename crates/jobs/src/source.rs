//! A job's data files for any task, and their conversion to training data.

use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, HeadKind, ProblemType};
use candle_gpt2_engine::Reporter;
use candle_gpt2_weights::Tokenizer;

use crate::activation_data::ActivationFolder;
use crate::row_data::{Assignment, RowFiles};
use crate::text_data::{TextSource, trained_tokenizer};
use crate::{ClassWeights, Hyperparameters, Task, TrainOptions, TrainingData, TrainingError};

/// Data files.
#[expect(clippy::large_enum_variant, reason = "a training run has only one")]
pub(crate) enum Source {
    /// Texts, or texts already encoded as tokens.
    Texts(TextSource),
    /// Rows with labels or answers.
    Rows(RowFiles),
    /// Activations, and the fraction to hold out.
    Activations(ActivationFolder, f64),
}

impl Source {
    /// Opens the files for the task.
    ///
    /// # Errors
    /// Fails if a file cannot be read or has unexpected contents.
    pub(crate) fn open(paths: &[PathBuf], options: &TrainOptions) -> Result<Self, TrainingError> {
        match options.task {
            Task::Dictionary if matches!(paths, [folder] if ActivationFolder::is_activation_folder(folder)) =>
            {
                options.check_of_activations()?;
                Ok(Self::Activations(ActivationFolder::open(&paths[0])?, options.held_out))
            }
            Task::Text | Task::Dictionary => Ok(Self::Texts(TextSource::open(paths, options.held_out)?)),
            task => Ok(Self::Rows(RowFiles::read(paths, task, options.held_out)?)),
        }
    }

    /// Returns the tokenizer for a new model; `name` is the configuration's name in messages.
    ///
    /// # Errors
    /// Fails if a text cannot be read, if there are too few words, or if the reporter interrupts it.
    pub(crate) fn tokenizer(
        &self,
        (config, name): (&Gpt2Config, String),
        reporter: &dyn Reporter,
    ) -> Result<Tokenizer, TrainingError> {
        match self {
            Self::Texts(texts) => texts.tokenizer((config, name), reporter),
            Self::Rows(files) => {
                let texts = files.texts().map(|text| Ok(text.to_owned()));
                trained_tokenizer(texts, (config, name), reporter)
            }
            Self::Activations(..) => Err(TrainingError::Call {
                what: "a tokenizer cannot be trained on stored activations; use the tokenizer of the checkpoint that produced them".into(),
            }),
        }
    }

    /// Returns the configuration with the head that the task trains.
    ///
    /// # Errors
    /// Fails if the model has a different head, or if there are too few or too many labels.
    pub(crate) fn with_head(&self, config: Gpt2Config) -> Result<Gpt2Config, TrainingError> {
        let (task, is_fitting, trains) = match self {
            Self::Rows(files) if files.task() == Task::Classify => {
                let is_classifier = config.head == HeadKind::SequenceClassification
                    && config.problem() == ProblemType::SingleLabelClassification;
                let is_fitting = is_classifier || config.head == HeadKind::LanguageModel;
                (
                    Task::Classify,
                    is_fitting,
                    "language models (adding a classification head) and classifiers with one label per text",
                )
            }
            Self::Rows(files) => (files.task(), config.head == HeadKind::LanguageModel, "language models"),
            Self::Texts(_) => (Task::Text, config.head == HeadKind::LanguageModel, "language models"),
            Self::Activations(..) => {
                (Task::Dictionary, config.head == HeadKind::LanguageModel, "dictionaries for language models")
            }
        };
        if !is_fitting {
            let problem =
                config.problem_type.map_or(String::new(), |problem| format!(" ({})", problem.name()));
            let what = format!(
                "`task` {task} trains {trains}; this model is a {}{problem}",
                config.head.class_name()
            );
            return Err(TrainingError::Call { what });
        }
        match self {
            Self::Texts(_) | Self::Activations(..) => Ok(config),
            Self::Rows(files) => files.with_head(config),
        }
    }

    /// Returns the labels and held-out flags of the rows, or `None` if the data has no rows.
    ///
    /// # Errors
    /// Fails if a row has a label that the model lacks.
    pub(crate) fn assignment(&self, config: &Gpt2Config) -> Result<Option<Assignment>, TrainingError> {
        match self {
            Self::Texts(_) | Self::Activations(..) => Ok(None),
            Self::Rows(files) => files.assign(&config.id2label).map(Some),
        }
    }

    /// Returns the length of the longest example, at most `context` tokens.
    pub(crate) fn longest(&self, context: usize) -> usize {
        match self {
            Self::Texts(_) | Self::Activations(..) => context,
            Self::Rows(files) => files.longest().min(context),
        }
    }

    /// Encodes the data as tokens; the tokens of texts are written to `folder`.
    ///
    /// # Errors
    /// Fails if data cannot be encoded or written, is too short or too long, or if the reporter
    /// interrupts it.
    pub(crate) fn encode(
        &self,
        assignment: Option<&Assignment>,
        encoder: (&Tokenizer, &Gpt2Config),
        hyperparameters: &Hyperparameters,
        folder: &Path,
        reporter: &dyn Reporter,
    ) -> Result<TrainingData, TrainingError> {
        match (self, assignment) {
            (Self::Rows(files), Some(assignment)) => {
                files.encode(assignment, encoder, hyperparameters, reporter)
            }
            (Self::Rows(files), None) => {
                files.encode(&files.assign(&encoder.1.id2label)?, encoder, hyperparameters, reporter)
            }
            (Self::Texts(texts), _) => texts.training_data(encoder, hyperparameters, folder, reporter),
            (Self::Activations(activations, held_out), _) => {
                activations.training_data(encoder.1, hyperparameters, *held_out)
            }
        }
    }
}

/// Returns the loss weight for each label, if requested.
///
/// # Errors
/// Fails if a weight is set for an unknown label.
pub(crate) fn class_weights(
    asked: Option<&ClassWeights>,
    assignment: Option<&Assignment>,
    config: &Gpt2Config,
) -> Result<Option<Vec<f64>>, TrainingError> {
    let weights =
        asked.zip(assignment).map(|(asked, assignment)| assignment.weights(asked, &config.id2label));
    weights.transpose()
}
