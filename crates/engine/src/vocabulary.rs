//! Vocabulary of a model: encoding, decoding, start token and padding rows.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{GenerationConfig, decode};
use candle_gpt2_weights::{
    CharacterCheck, Checkpoint, TextEncoder, Tokenizer, WeightsError, encode, encode_piece,
    encode_with_places, largest_foreign_token, ordinary_token, token_bytes,
};

use crate::EngineError;

/// Tokens of a model, available without loading its weights.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let vocabulary = opened.vocabulary();
/// let ids = vocabulary.encode("Good night, good night!")?;
/// let bytes: Vec<u8> = ids.iter().flat_map(|id| vocabulary.token_bytes(*id)).collect();
/// assert_eq!(bytes, b"Good night, good night!");
/// assert!(vocabulary.padding().is_empty(), "every row is a token");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("AutoTokenizer", "GPT2TokenizerFast"))]
pub struct Vocabulary {
    config: Gpt2Config,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Check for characters that the tokenizer may drop.
    check: Option<CharacterCheck>,
    /// Encoder for long texts, built on first use.
    encoder: Arc<OnceLock<TextEncoder<'static>>>,
    /// Folder that was searched for a tokenizer.
    folder: PathBuf,
    /// Unsupported tokenizer file in that folder, if no tokenizer was found.
    other_tokenizer: Option<String>,
    padding: Vec<u32>,
    /// Chat template; an error affects only callers that use chat.
    chat_template: Arc<Result<Option<String>, WeightsError>>,
}

impl Vocabulary {
    /// Creates the vocabulary of a checkpoint, with its tokenizer if there is one.
    pub fn new(checkpoint: &Checkpoint, tokenizer: Option<Tokenizer>) -> Self {
        Self {
            config: checkpoint.config().clone(),
            padding: checkpoint.padding_token_ids(tokenizer.as_ref()),
            check: tokenizer.as_ref().and_then(CharacterCheck::new),
            tokenizer: tokenizer.map(Arc::new),
            encoder: Arc::default(),
            folder: checkpoint.folder().to_owned(),
            other_tokenizer: None,
            chat_template: Arc::new(checkpoint.chat_template()),
        }
    }

    /// Reads the tokenizer from the given path, or by default from the checkpoint if it has one.
    pub(crate) fn read(checkpoint: &Checkpoint, tokenizer: Option<&Path>) -> Result<Self, EngineError> {
        match checkpoint.tokenizer(tokenizer) {
            Err(WeightsError::NoTokenizer { folder, found }) => {
                Ok(Self { folder, other_tokenizer: found, ..Self::new(checkpoint, None) })
            }
            read => Ok(Self::new(checkpoint, Some(read?))),
        }
    }

    /// Configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Returns the tokenizer for callers that require one.
    ///
    /// # Errors
    /// If there is no tokenizer.
    pub fn required_tokenizer(&self) -> Result<&Arc<Tokenizer>, EngineError> {
        let missing =
            || WeightsError::NoTokenizer { folder: self.folder.clone(), found: self.other_tokenizer.clone() };
        Ok(self.tokenizer.as_ref().ok_or_else(missing)?)
    }

    /// Rows of the vocabulary without a token.
    pub fn padding(&self) -> &[u32] {
        &self.padding
    }

    /// Jinja template that converts a conversation to a prompt, if the checkpoint has one.
    ///
    /// The template is a program by the author of the checkpoint. Treat it as untrusted input.
    ///
    /// # Errors
    /// If the file of the template cannot be used.
    pub fn chat_template(&self) -> Result<Option<&str>, &WeightsError> {
        self.chat_template.as_ref().as_ref().map(Option::as_deref)
    }

    /// Encodes a text, including the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// If there is no tokenizer, it cannot encode the text, or the model lacks one of the tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let ids = match self.needs_encoder(text) {
            true => self.encoder()?.encode(text, true)?,
            false => encode(self.required_tokenizer()?, text)?,
        };
        self.check_ids(ids)
    }

    /// Encodes part of a text, without special tokens around it.
    ///
    /// # Errors
    /// Same as [`Vocabulary::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let ids = match self.needs_encoder(text) {
            true => self.encoder()?.encode(text, false)?,
            false => encode_piece(self.required_tokenizer()?, text)?,
        };
        self.check_ids(ids)
    }

    /// Note on the first character that the tokenizer drops because it has no token for it.
    ///
    /// ```
    /// use candle_gpt2_engine::{ModelOptions, Silent};
    ///
    /// let opened = ModelOptions::default().open(&Silent)?;
    /// assert_eq!(opened.vocabulary().lost_note("all bytes have tokens: é"), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lost_note(&self, text: &str) -> Option<String> {
        let lost = self.check.as_ref()?.first_lost(self.tokenizer.as_ref()?, text)?;
        Some(lost.to_string())
    }

    /// Note on tokenizer tokens that the model lacks; texts containing them are rejected.
    pub fn foreign_note(&self) -> Option<String> {
        let (id, token) = largest_foreign_token(self.tokenizer.as_ref()?, self.config.vocab_size)?;
        let vocab_size = self.config.vocab_size;
        Some(format!(
            "the tokenizer does not match the model: it has token id {id} (`{token}`), but the vocabulary has \
             {vocab_size} tokens; texts with such tokens are rejected"
        ))
    }

    /// Returns the encoder that [`Vocabulary::encode`] uses for long texts; the first call builds it.
    ///
    /// # Errors
    /// If there is no tokenizer.
    pub fn encoder(&self) -> Result<&TextEncoder<'static>, EngineError> {
        let tokenizer = self.required_tokenizer()?;
        Ok(self.encoder.get_or_init(|| TextEncoder::shared(Arc::clone(tokenizer))))
    }

    /// Whether a text needs the encoder, which takes some time to build.
    fn needs_encoder(&self, text: &str) -> bool {
        /// Maximum length of a text encoded by the `tokenizers` library alone, in bytes.
        const MAX_SHORT_BYTES: usize = 4096;
        text.len() > MAX_SHORT_BYTES || self.tokenizer.as_deref().is_some_and(TextEncoder::is_needed)
    }

    /// Encodes a text and returns the character range of each token; see [`encode_with_places`].
    ///
    /// # Errors
    /// Same as [`Vocabulary::encode`].
    pub(crate) fn encode_with_places(
        &self,
        text: &str,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>), EngineError> {
        let (ids, char_ranges) = match self.tokenizer.as_deref().is_some_and(TextEncoder::is_needed) {
            true => self.encoder()?.encode_with_places(text)?,
            false => encode_with_places(self.required_tokenizer()?, text)?,
        };
        Ok((self.check_ids(ids)?, char_ranges))
    }

    /// Returns the tokenizer's ids unchanged if the model has all of them.
    pub(crate) fn check_ids(&self, ids: Vec<u32>) -> Result<Vec<u32>, EngineError> {
        match ids.iter().find(|id| !self.config.has_token(**id)) {
            Some(id) => Err(EngineError::ForeignTokenizer { id: *id, vocab_size: self.config.vocab_size }),
            None => Ok(ids),
        }
    }

    /// Decodes token ids; see [`decode`](candle_gpt2_generation::decode).
    ///
    /// # Errors
    /// If there is no tokenizer, or its decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, EngineError> {
        Ok(decode(self.required_tokenizer()?, ids, skip_special_tokens)?)
    }

    /// Returns a token's bytes, possibly part of a character; `#` and the id if there is no tokenizer.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.as_ref().and_then(|tokenizer| token_bytes(tokenizer, id));
        bytes.unwrap_or_else(|| format!("#{id}").into_bytes())
    }

    /// Replaces an empty list of ids with the start token, if the vocabulary has a start token.
    pub fn start_if_empty(&self, ids: Vec<u32>) -> Vec<u32> {
        if ids.is_empty() { self.config.start_token().into_iter().collect() } else { ids }
    }

    /// Prepares the prompt passed to a model for the given ids.
    ///
    /// An empty prompt becomes the start token. A prompt longer than the context is truncated.
    ///
    /// # Errors
    /// If there is neither a prompt nor a start token, an id is outside the vocabulary, or `config` forbids
    /// truncation.
    pub fn prompt(&self, ids: Vec<u32>, config: &GenerationConfig) -> Result<Vec<u32>, EngineError> {
        Ok(config.fit_prompt(&self.start_if_empty(ids), &self.config)?)
    }

    /// Notes on end tokens that are ordinary tokens; notes are not errors.
    pub fn notes(&self, config: &GenerationConfig) -> Vec<String> {
        let note = |id: &u32| {
            let text = ordinary_token(self.tokenizer.as_ref()?, *id)?;
            Some(format!(
                "eos_token_id {id} is the ordinary token {text:?}; completions will end at this token"
            ))
        };
        config.eos_token_id.iter().filter_map(note).collect()
    }

    /// Looks up the id of a special token, such as the end of text, by its text.
    pub(crate) fn special_token(&self, text: &str) -> Option<u32> {
        let tokenizer = self.tokenizer.as_ref()?;
        tokenizer.token_to_id(text).filter(|id| ordinary_token(tokenizer, *id).is_none())
    }
}
