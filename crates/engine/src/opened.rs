//! A checkpoint that has been opened and checked, before its weights are read.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_weights::{Checkpoint, GivenFiles};

use crate::options::with_notes_reported;
use crate::{
    Classifier, Defaults, EncoderStates, EngineError, LoadedModel, MemoryNeeded, ModelOptions, ReadJob,
    Reporter, Vocabulary,
};

/// A model whose weights have not been read yet.
///
/// Requests can be checked against it before the slow loading begins.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// assert_eq!(opened.config().n_positions, 512);
/// assert!(opened.memory_needed()?.total() < 64 << 20);
/// let prompt = opened.vocabulary().encode("Good night")?; // an invalid prompt fails here
/// let model = opened.load(&Silent)?;
/// assert!(prompt.len() < model.config().n_positions);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Opened {
    options: ModelOptions,
    device: Device,
    checkpoint: Checkpoint,
    /// Checkpoint of the assistant model.
    assistant: Option<Checkpoint>,
    /// Encoder hidden states for cross-attention.
    encoder_states: Option<EncoderStates>,
    vocabulary: Arc<Vocabulary>,
    /// Generation defaults; an error affects only callers that generate.
    defaults: Result<Defaults, String>,
}

impl ModelOptions {
    /// Opens the device and the checkpoint of a language model, without reading the weights.
    ///
    /// Checks that the checkpoint contains every tensor, and reads the tokenizer if there is one.
    ///
    /// # Errors
    /// If the device, the checkpoint or the tokenizer cannot be used, or they do not match. If the model is a
    /// classifier.
    pub fn open(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.language_model()
    }

    /// Opens a model with a classification head; see [`Classifier`].
    ///
    /// Everything else is the same as in [`ModelOptions::open`].
    ///
    /// # Errors
    /// Same as [`ModelOptions::open`], except that the model must have a classification head.
    pub fn open_classifier(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.classifier()
    }

    /// Opens a model with any head; the configuration names the head.
    ///
    /// Everything else is the same as in [`ModelOptions::open`].
    ///
    /// # Errors
    /// Same as [`ModelOptions::open`], except that classifiers are accepted.
    pub fn open_any(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let device = self.open_device(reporter)?;
        let checkpoint = self.open_checkpoint(reporter)?;
        self.opened(device, checkpoint, reporter)
    }

    /// Opens a model from supplied files; `model` is ignored.
    ///
    /// Everything else is the same as in [`ModelOptions::open`].
    ///
    /// # Errors
    /// Same as [`ModelOptions::open`].
    pub fn open_given(&self, files: GivenFiles, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let checkpoint =
            Checkpoint::open_given(files, &self.open_options(), &ReadJob::without_progress(reporter))?;
        self.open_with(with_notes_reported(checkpoint, reporter)?, reporter)
    }

    /// Opens a model from a checkpoint that is already open; `model` and `n_head` are ignored.
    ///
    /// Everything else is the same as in [`ModelOptions::open`].
    ///
    /// # Errors
    /// Same as [`ModelOptions::open`].
    pub fn open_with(&self, checkpoint: Checkpoint, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.opened(self.open_device(reporter)?, checkpoint, reporter)?.language_model()
    }

    fn opened(
        &self,
        device: Device,
        checkpoint: Checkpoint,
        reporter: &dyn Reporter,
    ) -> Result<Opened, EngineError> {
        let named = |model: &PathBuf| Self {
            model: model.clone(),
            adapter: Vec::new(),
            n_head: None,
            ..self.clone()
        };
        let assistant = self.assistant_model.as_ref().map(named);
        let assistant = assistant.map(|options| options.open_checkpoint(reporter)).transpose()?;
        let states = self.encoder_states.as_deref();
        let states = states.map(|path| EncoderStates::read(path, checkpoint.config())).transpose()?;
        let opened = Opened::new(self.clone(), device, checkpoint, assistant, states)?;
        opened.vocabulary.foreign_note().iter().for_each(|note| reporter.note(note));
        Ok(opened)
    }
}

impl Opened {
    fn new(
        options: ModelOptions,
        device: Device,
        checkpoint: Checkpoint,
        assistant: Option<Checkpoint>,
        encoder_states: Option<EncoderStates>,
    ) -> Result<Self, EngineError> {
        checkpoint.check()?;
        if let Some(assistant) = &assistant {
            assistant.check_language_model()?;
            assistant.check()?;
            let [vocab_size, found] = [&checkpoint, assistant].map(|opened| opened.config().vocab_size);
            if found != vocab_size {
                return Err(GenerationError::AssistantVocabulary { vocab_size, found }.into());
            }
        }
        let vocabulary = Arc::new(Vocabulary::read(&checkpoint, options.tokenizer.as_deref())?);
        let defaults = Defaults::of(&checkpoint, Arc::clone(&vocabulary)).map_err(|error| error.to_string());
        Ok(Self { options, device, checkpoint, assistant, encoder_states, vocabulary, defaults })
    }

    /// Rejects a model without a language-model head.
    fn language_model(self) -> Result<Self, EngineError> {
        self.checkpoint.check_language_model()?;
        Ok(self)
    }

    /// Rejects a model without a classification head.
    fn classifier(self) -> Result<Self, EngineError> {
        self.checkpoint.check_classifier()?;
        Ok(self)
    }

    /// Configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        self.checkpoint.config()
    }

    /// Device that the model will run on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Vocabulary of the model.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Weight type after loading, such as `q8`: the requested type, otherwise the stored one.
    pub fn weight_type(&self) -> &'static str {
        self.options.weight_type(&self.checkpoint, &self.device)
    }

    /// Returns [`ModelOptions::unpacked_note`] for this checkpoint.
    pub fn unpacked_note(&self) -> Option<String> {
        self.options.unpacked_note(&self.checkpoint, &self.device)
    }

    /// Memory that the model needs on the CPU, including an assistant model.
    ///
    /// # Errors
    /// If the CPU does not support the type of the weights.
    pub fn memory_needed(&self) -> Result<MemoryNeeded, EngineError> {
        let needed = self.options.memory_of(&self.checkpoint)?;
        let assistant =
            self.assistant.as_ref().map(|assistant| self.options.memory_of(assistant)).transpose()?;
        Ok(assistant.map_or(needed, |assistant| needed.with(assistant)))
    }

    /// Generation defaults from the checkpoint.
    ///
    /// # Errors
    /// If `generation_config.json` cannot be used.
    pub fn defaults(&self) -> Result<&Defaults, EngineError> {
        self.defaults.as_ref().map_err(|what| EngineError::Defaults { what: what.clone() })
    }

    /// Reads the weights of a classifier.
    ///
    /// # Errors
    /// Same as [`Opened::load`], except that the model must have a classification head.
    pub fn load_classifier(self, reporter: &dyn Reporter) -> Result<Classifier, EngineError> {
        let weights = self.weight_type();
        self.options.load_classifier(&self.checkpoint, &self.device, self.vocabulary, weights, reporter)
    }

    /// Reads the weights.
    ///
    /// # Errors
    /// If the weights cannot be read, the device lacks memory for them, the model is not a language model, or
    /// `reporter` interrupts the job ([`EngineError::is_interrupted`]).
    pub fn load(self, reporter: &dyn Reporter) -> Result<LoadedModel, EngineError> {
        let model = self.options.load(&self.checkpoint, &self.device, reporter)?;
        let load = |checkpoint: &Checkpoint| self.options.load(checkpoint, &self.device, reporter);
        let assistant = self.assistant.as_ref().map(load).transpose()?;
        let weights = self.weight_type();
        let loaded = LoadedModel::new(model, assistant, self.vocabulary, self.defaults, weights);
        match &self.encoder_states {
            Some(states) => loaded.with_encoder_states(states),
            None => Ok(loaded),
        }
    }
}
