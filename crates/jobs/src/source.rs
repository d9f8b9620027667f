//! The data files of a job, whatever the task, on their way to what a training learns from.

use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, HeadKind, ProblemType};
use candle_gpt2_engine::Reporter;
use candle_gpt2_weights::Tokenizer;

use crate::activation_data::ActivationFolder;
use crate::row_data::{Assignment, RowFiles};
use crate::text_data::{TextSource, trained_tokenizer};
use crate::{ClassWeights, Hyperparameters, Task, TrainOptions, TrainingData, TrainingError};

/// Data files.
#[expect(clippy::large_enum_variant, reason = "a training has one")]
pub(crate) enum Source {
    /// Of texts, or of their tokens.
    Texts(TextSource),
    /// Of rows.
    Rows(RowFiles),
    /// Activations of texts, of which a share is held out.
    Activations(ActivationFolder, f64),
}

impl Source {
    /// Opens the files of the task.
    ///
    /// # Errors
    /// When a file cannot be read, or holds something else.
    pub(crate) fn open(paths: &[PathBuf], options: &TrainOptions) -> Result<Self, TrainingError> {
        match options.task {
            Task::Dictionary if matches!(paths, [folder] if ActivationFolder::is_one(folder)) => {
                options.check_of_activations()?;
                Ok(Self::Activations(ActivationFolder::open(&paths[0])?, options.held_out))
            }
            Task::Text | Task::Dictionary => Ok(Self::Texts(TextSource::open(paths, options.held_out)?)),
            task => Ok(Self::Rows(RowFiles::read(paths, task, options.held_out)?)),
        }
    }

    /// The tokenizer of a model that is made anew. `name` is what messages call the configuration.
    ///
    /// # Errors
    /// When a text cannot be read, there are too few words, or the reporter interrupts it.
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
                what: "activations are of a checkpoint, which has its tokenizer".into(),
            }),
        }
    }

    /// The configuration with the head that the task trains.
    ///
    /// # Errors
    /// When the model has another head, or the labels are too few or too many.
    pub(crate) fn with_head(&self, config: Gpt2Config) -> Result<Gpt2Config, TrainingError> {
        let (task, is_fitting, trains) = match self {
            Self::Rows(files) if files.task() == Task::Classify => {
                let is_classifier = config.head == HeadKind::SequenceClassification
                    && config.problem() == ProblemType::SingleLabelClassification;
                let is_fitting = is_classifier || config.head == HeadKind::LanguageModel;
                (
                    Task::Classify,
                    is_fitting,
                    "language models, which get a head, and classifiers of one label for each text",
                )
            }
            Self::Rows(files) => (files.task(), config.head == HeadKind::LanguageModel, "language models"),
            Self::Texts(_) => (Task::Text, config.head == HeadKind::LanguageModel, "language models"),
            Self::Activations(..) => {
                (Task::Dictionary, config.head == HeadKind::LanguageModel, "dictionaries of language models")
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

    /// Which label each row has, and which rows are held out; `None` of texts.
    ///
    /// # Errors
    /// When a row has a label that the model does not have.
    pub(crate) fn assignment(&self, config: &Gpt2Config) -> Result<Option<Assignment>, TrainingError> {
        match self {
            Self::Texts(_) | Self::Activations(..) => Ok(None),
            Self::Rows(files) => files.assign(&config.id2label).map(Some),
        }
    }

    /// The longest example, of at most `context` tokens.
    pub(crate) fn longest(&self, context: usize) -> usize {
        match self {
            Self::Texts(_) | Self::Activations(..) => context,
            Self::Rows(files) => files.longest().min(context),
        }
    }

    /// All of it as tokens; those of texts are written to `folder`.
    ///
    /// # Errors
    /// When something cannot be encoded or written, is too short or too long, or the reporter interrupts it.
    pub(crate) fn encode(
        &self,
        assignment: Option<&Assignment>,
        encoder: (&Tokenizer, &Gpt2Config),
        numbers: &Hyperparameters,
        folder: &Path,
        reporter: &dyn Reporter,
    ) -> Result<TrainingData, TrainingError> {
        match (self, assignment) {
            (Self::Rows(files), Some(assignment)) => files.encode(assignment, encoder, numbers, reporter),
            (Self::Rows(files), None) => {
                files.encode(&files.assign(&encoder.1.id2label)?, encoder, numbers, reporter)
            }
            (Self::Texts(texts), _) => texts.training_data(encoder, numbers, folder, reporter),
            (Self::Activations(activations, held_out), _) => {
                activations.training_data(encoder.1, numbers, *held_out)
            }
        }
    }
}

/// What the rows of each label count, if weights are asked for.
///
/// # Errors
/// When a weight is of a label that is not there.
pub(crate) fn class_weights(
    asked: Option<&ClassWeights>,
    assignment: Option<&Assignment>,
    config: &Gpt2Config,
) -> Result<Option<Vec<f64>>, TrainingError> {
    let weights =
        asked.zip(assignment).map(|(asked, assignment)| assignment.weights(asked, &config.id2label));
    weights.transpose()
}
