//! A checkpoint that is opened and checked, before its weights are read.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_weights::{Checkpoint, GivenFiles};

use crate::options::with_notes_reported;
use crate::{
    Classifier, Defaults, EncoderStates, EngineError, LoadedModel, MemoryNeeded, ModelOptions, Reporter,
    Vocabulary, Watched,
};

/// A model whose weights are not read yet: requests are checked with it, before the long part begins.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// assert_eq!(opened.config().n_positions, 512);
/// assert!(opened.memory_needed()?.total() < 64 << 20);
/// let prompt = opened.vocabulary().encode("Good night")?; // refused here, if ever
/// let model = opened.load(&Silent)?;
/// assert!(prompt.len() < model.config().n_positions);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Opened {
    options: ModelOptions,
    device: Device,
    checkpoint: Checkpoint,
    /// That of the model that drafts tokens.
    assistant: Option<Checkpoint>,
    /// What the model attends to besides its tokens.
    encoder_states: Option<EncoderStates>,
    vocabulary: Arc<Vocabulary>,
    /// What is wrong with the files' defaults matters to those who generate only.
    defaults: Result<Defaults, String>,
}

impl ModelOptions {
    /// Opens device and checkpoint of a language model, checks that the checkpoint holds every tensor of its model, and reads the
    /// tokenizer if there is one. No weights are read yet.
    ///
    /// # Errors
    /// When one of them cannot be used, they do not go together, or the model is a classifier.
    pub fn open(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.language_model()
    }

    /// As [`ModelOptions::open`], of a model with a head for classifying, see [`Classifier`].
    ///
    /// # Errors
    /// As [`ModelOptions::open`], if the model has no such head.
    pub fn open_classifier(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.classifier()
    }

    /// As [`ModelOptions::open`], of a model with any head: what it is, its configuration says.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_any(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let device = self.open_device(reporter)?;
        let checkpoint = self.open_checkpoint(reporter)?;
        self.opened(device, checkpoint, reporter)
    }

    /// As [`ModelOptions::open`], with a checkpoint whose files are given. `model` is not looked at.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_given(&self, files: GivenFiles, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let checkpoint = Checkpoint::open_given(files, &self.open_options(), &Watched::unseen(reporter))?;
        self.open_with(with_notes_reported(checkpoint, reporter)?, reporter)
    }

    /// As [`ModelOptions::open`], with a checkpoint that is open already. `model` and `n_head` are not looked at.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
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

    /// The same, if it is a language model.
    fn language_model(self) -> Result<Self, EngineError> {
        self.checkpoint.check_language_model()?;
        Ok(self)
    }

    /// The same, if it has a head for classifying.
    fn classifier(self) -> Result<Self, EngineError> {
        self.checkpoint.check_classifier()?;
        Ok(self)
    }

    /// The configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        self.checkpoint.config()
    }

    /// The device that it will run on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its tokens.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// The type that the weights will have in a word, as `q8`: the one that was asked for, otherwise the stored one.
    pub fn weight_type(&self) -> &'static str {
        self.options.weight_type(&self.checkpoint, &self.device)
    }

    /// See [`ModelOptions::unpacked_note`].
    pub fn unpacked_note(&self) -> Option<String> {
        self.options.unpacked_note(&self.checkpoint, &self.device)
    }

    /// The memory that the model needs on the CPU; if another one drafts tokens, that of both.
    ///
    /// # Errors
    /// When the CPU has not the type of the weights.
    pub fn memory_needed(&self) -> Result<MemoryNeeded, EngineError> {
        let needed = self.options.memory_of(&self.checkpoint)?;
        let assistant =
            self.assistant.as_ref().map(|assistant| self.options.memory_of(assistant)).transpose()?;
        Ok(assistant.map_or(needed, |assistant| needed.with(assistant)))
    }

    /// How it generates by default.
    ///
    /// # Errors
    /// When `generation_config.json` cannot be used.
    pub fn defaults(&self) -> Result<&Defaults, EngineError> {
        self.defaults.as_ref().map_err(|what| EngineError::Defaults { what: what.clone() })
    }

    /// Reads the weights of a classifier.
    ///
    /// # Errors
    /// As [`Opened::load`], and when the model has no head for classifying.
    pub fn load_classifier(self, reporter: &dyn Reporter) -> Result<Classifier, EngineError> {
        let weights = self.weight_type();
        self.options.load_classifier(&self.checkpoint, &self.device, self.vocabulary, weights, reporter)
    }

    /// Reads the weights.
    ///
    /// # Errors
    /// When they cannot be read, or the device has no room for them; when `reporter` interrupts it, see
    /// [`EngineError::is_interrupted`]; and when it is no language model.
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
