//! Generation defaults: `generation_config.json`, and the end tokens from `config.json`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{GenerationConfig, GenerationError, GenerationOptions, SearchMode};
use candle_gpt2_weights::Checkpoint;

use crate::{EngineError, Vocabulary, banned_tokens};

/// Generation defaults for a model.
///
/// If the files request no search, tokens are sampled from the 50 most probable ones.
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
    /// Path of `generation_config.json`, if it exists.
    path: Option<PathBuf>,
    /// Options that `generation_config.json` sets.
    file_options: GenerationOptions,
    /// Model configuration with all end tokens named in the files.
    config_with_file_ends: Gpt2Config,
    vocabulary: Arc<Vocabulary>,
}

impl Defaults {
    /// Reads the files without checking the values, because a request can override them.
    ///
    /// # Errors
    /// If `generation_config.json` cannot be read or requests something unsupported.
    pub fn of(checkpoint: &Checkpoint, vocabulary: Arc<Vocabulary>) -> Result<Self, EngineError> {
        let start = GenerationConfig {
            eos_token_id: checkpoint.config().eos_token_id.clone(),
            ..GenerationConfig::default()
        };
        let (mut config, path, file_options) = match checkpoint.generation_config()? {
            None => (GenerationConfig { do_sample: true, ..start }, None, GenerationOptions::default()),
            Some((path, json)) => {
                let refused = |error| EngineError::Defaults { what: format!("{}: {error}", path.display()) };
                let file_options = GenerationOptions::of_json(&json).map_err(refused)?;
                let searches =
                    start.clone().with_stated(&file_options).search_mode() != SearchMode::TokenByToken;
                let start = GenerationConfig { do_sample: !searches, ..start };
                (start.with_stated(&file_options), Some(path), file_options)
            }
        };
        let config_with_file_ends =
            Gpt2Config { eos_token_id: config.eos_token_id, ..checkpoint.config().clone() };
        config.eos_token_id = config_with_file_ends.end_tokens();
        Ok(Self { config, path, file_options, config_with_file_ends, vocabulary })
    }

    /// Creates the defaults from the model configuration alone, for example for a classifier.
    pub fn of_config(vocabulary: Arc<Vocabulary>) -> Self {
        let config_with_file_ends = vocabulary.config().clone();
        let eos_token_id = config_with_file_ends.end_tokens();
        let config = GenerationConfig { do_sample: true, eos_token_id, ..GenerationConfig::default() };
        Self {
            config,
            path: None,
            file_options: GenerationOptions::default(),
            config_with_file_ends,
            vocabulary,
        }
    }

    /// Settings from the files; apply a request's options, then [complete](Self::complete) the result.
    ///
    /// End tokens outside the vocabulary are dropped: transformers writes its own end token, 50256, next to
    /// vocabularies of any size.
    pub fn config(&self) -> &GenerationConfig {
        &self.config
    }

    /// Options that `generation_config.json` sets, without this crate's defaults.
    pub fn file_options(&self) -> &GenerationOptions {
        &self.file_options
    }

    /// End tokens named in the files, including any outside the vocabulary.
    pub fn end_tokens_in_files(&self) -> &[u32] {
        &self.config_with_file_ends.eos_token_id
    }

    /// Checks the settings from the files.
    ///
    /// # Errors
    /// If `generation_config.json` sets an invalid or unsupported option.
    pub fn check(&self) -> Result<(), EngineError> {
        self.check_request(&self.config)
    }

    /// Applies a request's options to the defaults and [completes](Self::complete) the result.
    ///
    /// # Errors
    /// If [`GenerationOptions::check`] fails, or an option does not fit the model or its files.
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
                let what =
                    format!("`bad_words` needs a tokenizer to encode {word:?}, and this model has none");
                return Err(GenerationError::Option { what }.into());
            }
            config.bad_words_ids.extend(banned_tokens(&self.vocabulary, word)?);
        }
        self.complete(config)
    }

    /// Adds the model's own settings to a request's configuration and validates the result.
    ///
    /// Stop strings that are special tokens become end tokens. Rows of the vocabulary without a token are
    /// suppressed.
    ///
    /// # Errors
    /// If an option is invalid or unsupported. An error in `generation_config.json` is reported as an error
    /// of the file, not of the request.
    pub fn complete(&self, mut config: GenerationConfig) -> Result<GenerationConfig, EngineError> {
        let vocabulary = &self.vocabulary;
        if vocabulary.tokenizer().is_none() && !config.stop_strings.is_empty() {
            return Err(GenerationError::StopStringsWithoutTokenizer.into());
        }
        // A special token decodes to no text, so a stop string could never match it.
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

    /// Notes on a request's end tokens; notes are not errors.
    pub fn notes(&self, config: &GenerationConfig) -> Vec<String> {
        // A request with its own end tokens does not need the end tokens from the files.
        let has_own_ends = match self.config.eos_token_id.as_slice() {
            [] => config.eos_token_id.is_empty(),
            ends => config.eos_token_id.starts_with(ends),
        };
        let foreign = self.config_with_file_ends.end_token_note().filter(|_| has_own_ends);
        foreign.into_iter().chain(self.vocabulary.notes(config)).collect()
    }
}
