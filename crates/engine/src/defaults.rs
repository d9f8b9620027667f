//! A checkpoint's defaults for generating: its `generation_config.json`, and the end tokens of `config.json`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{GenerationConfig, GenerationError, GenerationOptions, SearchMode};
use candle_gpt2_weights::Checkpoint;

use crate::{EngineError, Vocabulary, banned_tokens};

/// How a model generates by default. If the files ask for no search, tokens are sampled from the 50 most probable ones.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_generation::GenerationConfig;
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let defaults = opened.defaults()?;
/// assert_eq!((defaults.config().do_sample, defaults.config().top_k), (true, 50));
/// let wrong = GenerationConfig { top_p: 1.5, ..defaults.config().clone() };
/// assert!(defaults.complete(wrong).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Defaults {
    config: GenerationConfig,
    /// The `generation_config.json`, if there is one.
    path: Option<PathBuf>,
    /// What it sets.
    stated: GenerationOptions,
    /// The configuration of the model with the end tokens that the files name.
    as_named: Gpt2Config,
    vocabulary: Arc<Vocabulary>,
}

impl Defaults {
    /// Reads the files. What they say need not be right: a request may say otherwise.
    ///
    /// # Errors
    /// When `generation_config.json` cannot be read, or asks for what cannot be done.
    pub fn of(checkpoint: &Checkpoint, vocabulary: Arc<Vocabulary>) -> Result<Self, EngineError> {
        let start = GenerationConfig {
            eos_token_id: checkpoint.config().eos_token_id.clone(),
            ..GenerationConfig::default()
        };
        let (mut config, path, stated) = match checkpoint.generation_config()? {
            None => (GenerationConfig { do_sample: true, ..start }, None, GenerationOptions::default()),
            Some((path, json)) => {
                let refused = |error| EngineError::Defaults { what: format!("{}: {error}", path.display()) };
                let stated = GenerationOptions::of_json(&json).map_err(refused)?;
                let searches = start.clone().with_stated(&stated).search_mode() != SearchMode::TokenByToken;
                let start = GenerationConfig { do_sample: !searches, ..start };
                (start.with_stated(&stated), Some(path), stated)
            }
        };
        let as_named = Gpt2Config { eos_token_id: config.eos_token_id, ..checkpoint.config().clone() };
        config.eos_token_id = as_named.end_tokens();
        Ok(Self { config, path, stated, as_named, vocabulary })
    }

    /// Those of a model whose files say nothing of generating but in its configuration: of one that generates no texts, say.
    pub fn of_config(vocabulary: Arc<Vocabulary>) -> Self {
        let as_named = vocabulary.config().clone();
        let eos_token_id = as_named.end_tokens();
        let config = GenerationConfig { do_sample: true, eos_token_id, ..GenerationConfig::default() };
        Self { config, path: None, stated: GenerationOptions::default(), as_named, vocabulary }
    }

    /// What the files say, to be changed by a request and then [completed](Self::complete). End tokens that the vocabulary
    /// does not have are left out: transformers writes its own, 50256, beside vocabularies of any size.
    pub fn config(&self) -> &GenerationConfig {
        &self.config
    }

    /// What `generation_config.json` sets, without our own defaults.
    pub fn stated(&self) -> &GenerationOptions {
        &self.stated
    }

    /// The end tokens that the files name, those included that the vocabulary does not have.
    pub fn named_ends(&self) -> &[u32] {
        &self.as_named.eos_token_id
    }

    /// Checks what the files say.
    ///
    /// # Errors
    /// When `generation_config.json` asks for what is wrong or cannot be done.
    pub fn check(&self) -> Result<(), EngineError> {
        self.check_request(&self.config)
    }

    /// The configuration of a request: the defaults, changed by its options, [completed](Self::complete) and checked.
    ///
    /// # Errors
    /// Those of [`GenerationOptions::check`], and if an option does not fit the model or its files.
    ///
    /// ```
    /// use candle_gpt2_engine::{ModelOptions, Silent};
    /// use candle_gpt2_generation::GenerationOptions;
    ///
    /// let opened = ModelOptions::default().open(&Silent)?;
    /// let options = GenerationOptions { max_new_tokens: Some(20), temperature: Some(0.7), ..GenerationOptions::default() };
    /// let config = opened.defaults()?.changed_by(&options)?;
    /// assert_eq!((config.max_new_tokens, config.temperature, config.top_k), (20, 0.7, 50));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn changed_by(&self, options: &GenerationOptions) -> Result<GenerationConfig, EngineError> {
        let mut config = options.applied_to(self.config.clone())?;
        for word in options.bad_words.iter().flatten() {
            if self.vocabulary.tokenizer().is_none() {
                let what = format!("`bad_words` {word:?}: there is no tokenizer to encode it");
                return Err(GenerationError::Option { what }.into());
            }
            config.bad_words_ids.extend(banned_tokens(&self.vocabulary, word)?);
        }
        self.complete(config)
    }

    /// The configuration of a request with what belongs to it on this model, checked: stop strings that are special tokens
    /// end the text as tokens, and rows of the vocabulary that are no tokens are never generated.
    ///
    /// # Errors
    /// When it asks for what is wrong or cannot be done. Errors in `generation_config.json` are reported as errors of the file and
    /// not of the request.
    pub fn complete(&self, mut config: GenerationConfig) -> Result<GenerationConfig, EngineError> {
        let vocabulary = &self.vocabulary;
        if vocabulary.tokenizer().is_none() && !config.stop_strings.is_empty() {
            return Err(GenerationError::StopStringsWithoutTokenizer.into());
        }
        // A special token gives no text to find a stop string in.
        let special = |text: &String| vocabulary.special_token(text);
        config.eos_token_id.extend(config.stop_strings.iter().filter_map(special));
        config.stop_strings.retain(|text| special(text).is_none());
        config.suppress_tokens.extend(vocabulary.padding());
        self.check_request(&config)?;
        Ok(config)
    }

    fn check_request(&self, config: &GenerationConfig) -> Result<(), EngineError> {
        let Err(error) = self.check_all(config) else { return Ok(()) };
        let of_file = self.check_all(&self.config).err();
        match (&self.path, of_file.filter(|of_file| of_file.to_string() == error.to_string())) {
            (Some(path), Some(error)) => {
                Err(EngineError::Defaults { what: format!("{}: {error}", path.display()) })
            }
            _ => Err(error.into()),
        }
    }

    fn check_all(&self, config: &GenerationConfig) -> Result<(), GenerationError> {
        config.check()?;
        config.check_model(self.vocabulary.config())
    }

    /// Notes on the end tokens of a request; none is an error.
    pub fn notes(&self, config: &GenerationConfig) -> Vec<String> {
        // A request with end tokens of its own does not need those of the files.
        let has_own_ends = match self.config.eos_token_id.as_slice() {
            [] => config.eos_token_id.is_empty(),
            ends => config.eos_token_id.starts_with(ends),
        };
        let foreign = self.as_named.end_token_note().filter(|_| has_own_ends);
        foreign.into_iter().chain(self.vocabulary.notes(config)).collect()
    }
}
