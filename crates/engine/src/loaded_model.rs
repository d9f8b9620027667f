//! A loaded model with everything that generating needs, owned: a face keeps it as long as it likes.

use std::sync::Arc;

use candle_core::Device;
use gpt2::{Gpt2Config, Gpt2LMHead};
use gpt2_generation::{GenerationConfig, SearchMode, TextGenerator};

use crate::{Defaults, EngineError, Vocabulary, memory};

/// A model in memory with its tokenizer and its defaults. A clone shares them all.
#[derive(Debug, Clone)]
pub struct LoadedModel {
    model: Gpt2LMHead,
    vocabulary: Arc<Vocabulary>,
    defaults: Arc<Result<Defaults, String>>,
}

impl LoadedModel {
    pub(crate) fn new(
        model: Gpt2LMHead,
        vocabulary: Arc<Vocabulary>,
        defaults: Result<Defaults, String>,
    ) -> Self {
        Self { model, vocabulary, defaults: Arc::new(defaults) }
    }

    /// The model itself.
    pub fn model(&self) -> &Gpt2LMHead {
        &self.model
    }

    /// Its configuration.
    pub fn config(&self) -> &Gpt2Config {
        self.model.config()
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        self.model.device()
    }

    /// Its tokens.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// How it generates where a request says nothing else.
    ///
    /// # Errors
    /// When `generation_config.json` cannot be used.
    pub fn defaults(&self) -> Result<&Defaults, EngineError> {
        self.defaults.as_ref().as_ref().map_err(|what| EngineError::Defaults { what: what.clone() })
    }

    /// One text, piece by piece as it is made. `config` is [complete](Defaults::complete).
    ///
    /// # Errors
    /// When there is no tokenizer, or the configuration or the prompt does not fit the model.
    pub fn text_generator(
        &self,
        prompt: &[u32],
        config: &GenerationConfig,
    ) -> Result<TextGenerator, EngineError> {
        let tokenizer = self.vocabulary.required_tokenizer()?;
        Ok(TextGenerator::new(&self.model, prompt, config, Arc::clone(tokenizer))?)
    }

    /// Checks that there is room for the keys and values of texts that are made at once: as many as `texts`, or the rows of
    /// a search, each of a prompt of up to `prompt_len` tokens and what `config` lets follow. Where the system does not say
    /// how much memory is free, nothing is checked.
    ///
    /// # Errors
    /// When there is not.
    pub fn check_room(
        &self,
        texts: usize,
        prompt_len: usize,
        config: &GenerationConfig,
    ) -> Result<(), EngineError> {
        let rows = match config.search_mode() {
            SearchMode::TokenByToken => texts,
            SearchMode::Beams => config.num_beams,
            SearchMode::Contrastive => config.top_k,
        };
        let tokens = prompt_len.saturating_add(config.max_new_tokens);
        memory::check_room((rows, tokens), self.config(), self.model.kv_dtype(), self.device())
    }
}
