//! A loaded model together with everything that generation needs.

use std::sync::{Arc, Mutex};

use candle_core::Device;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Observer};
use candle_gpt2_generation::{GenerationConfig, GenerationError, TextGenerator};

use crate::{Defaults, EncoderStates, EngineError, Vocabulary, system_clock};

/// A model in memory with its tokenizer and generation defaults.
///
/// A clone shares all of them.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_generation::GenerationConfig;
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// assert_eq!((model.weight_type(), model.config().n_layer), ("q8", 7));
/// let prompt = model.vocabulary().encode("One day")?;
/// let greedy = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
/// let text = |model: &candle_gpt2_engine::LoadedModel| -> Result<String, Box<dyn std::error::Error>> {
///     Ok(model.text_generator(&prompt, &greedy)?.collect::<Result<_, _>>()?)
/// };
/// assert_eq!(text(&model)?, text(&model.clone())?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct LoadedModel {
    model: Gpt2LMHeadModel,
    assistant: Option<Gpt2LMHeadModel>,
    vocabulary: Arc<Vocabulary>,
    defaults: Arc<Result<Defaults, String>>,
    weights: &'static str,
}

impl LoadedModel {
    pub(crate) fn new(
        model: Gpt2LMHeadModel,
        assistant: Option<Gpt2LMHeadModel>,
        vocabulary: Arc<Vocabulary>,
        defaults: Result<Defaults, String>,
        weights: &'static str,
    ) -> Self {
        Self { model, assistant, vocabulary, defaults: Arc::new(defaults), weights }
    }

    /// Returns the model with an observer attached to every forward pass.
    ///
    /// See [`Gpt2LMHeadModel::observed_by`].
    pub fn observed_by(self, observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        Self { model: self.model.observed_by(observer), ..self }
    }

    /// Returns the model with encoder hidden states that every forward pass attends to.
    ///
    /// The assistant model does not use them. See [`Gpt2LMHeadModel::with_encoder_states`].
    ///
    /// # Errors
    /// If the states do not fit the model, or the device lacks memory for their keys and values.
    pub fn with_encoder_states(self, states: &EncoderStates) -> Result<Self, EngineError> {
        let model = self.model.with_encoder_states(states.tensor()).map_err(GenerationError::from)?;
        Ok(Self { model, ..self })
    }

    /// Returns the language model itself.
    pub fn model(&self) -> &Gpt2LMHeadModel {
        &self.model
    }

    /// Weight type, such as `q8`: the requested type, otherwise the stored one.
    pub fn weight_type(&self) -> &'static str {
        self.weights
    }

    /// Assistant model that drafts tokens, if there is one.
    pub fn assistant(&self) -> Option<&Gpt2LMHeadModel> {
        self.assistant.as_ref()
    }

    /// Configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        self.model.config()
    }

    /// Device that the model runs on.
    pub fn device(&self) -> &Device {
        self.model.device()
    }

    /// Vocabulary of the model.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Generation defaults from the checkpoint.
    ///
    /// # Errors
    /// If `generation_config.json` cannot be used.
    pub fn defaults(&self) -> Result<&Defaults, EngineError> {
        self.defaults.as_ref().as_ref().map_err(|what| EngineError::Defaults { what: what.clone() })
    }

    /// Generates a completion, piece by piece.
    ///
    /// `config` must be [complete](Defaults::complete). The system clock, if there is one, measures
    /// [`max_time`](GenerationConfig::max_time); [`TextGenerator::with_clock`] replaces it.
    ///
    /// # Errors
    /// If there is no tokenizer, or the configuration or the prompt does not fit the model.
    pub fn text_generator(
        &self,
        prompt: &[u32],
        config: &GenerationConfig,
    ) -> Result<TextGenerator, EngineError> {
        let tokenizer = self.vocabulary.required_tokenizer()?;
        let text = TextGenerator::new(&self.model, prompt, config, Arc::clone(tokenizer))?;
        let text = match system_clock() {
            Some(clock) => text.with_clock(clock),
            None => text,
        };
        Ok(match &self.assistant {
            Some(assistant) => text.with_assistant(assistant)?,
            None => text,
        })
    }
}
