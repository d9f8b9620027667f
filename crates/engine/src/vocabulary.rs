//! The tokens of a model: text to ids and back, the token that texts begin with, the rows that are no tokens.

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

/// A model's tokens, which are known without its weights.
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
    /// The characters that the tokenizer may drop.
    check: Option<CharacterCheck>,
    /// Built for the first long text.
    encoder: Arc<OnceLock<TextEncoder<'static>>>,
    /// Where a tokenizer was looked for.
    folder: PathBuf,
    /// A file there that may be one, if none was found.
    other_tokenizer: Option<String>,
    padding: Vec<u32>,
    /// What is wrong with it matters to those who hold conversations only.
    chat_template: Arc<Result<Option<String>, WeightsError>>,
}

impl Vocabulary {
    /// The vocabulary of a checkpoint, with its tokenizer if there is one.
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

    /// The same with the tokenizer read, from this path or the checkpoint's own; there may be none.
    pub(crate) fn read(checkpoint: &Checkpoint, tokenizer: Option<&Path>) -> Result<Self, EngineError> {
        match checkpoint.tokenizer(tokenizer) {
            Err(WeightsError::NoTokenizer { folder, found }) => {
                Ok(Self { folder, other_tokenizer: found, ..Self::new(checkpoint, None) })
            }
            read => Ok(Self::new(checkpoint, Some(read?))),
        }
    }

    /// The configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The tokenizer, for what cannot do without.
    ///
    /// # Errors
    /// When there is none.
    pub fn required_tokenizer(&self) -> Result<&Arc<Tokenizer>, EngineError> {
        let missing =
            || WeightsError::NoTokenizer { folder: self.folder.clone(), found: self.other_tokenizer.clone() };
        Ok(self.tokenizer.as_ref().ok_or_else(missing)?)
    }

    /// Rows of the vocabulary that are no tokens.
    pub fn padding(&self) -> &[u32] {
        &self.padding
    }

    /// The Jinja template that makes a prompt of a conversation, if the checkpoint has one. It is the checkpoint's author's: a
    /// program, to be run with care.
    ///
    /// # Errors
    /// When its file cannot be used.
    pub fn chat_template(&self) -> Result<Option<&str>, &WeightsError> {
        self.chat_template.as_ref().as_ref().map(Option::as_deref)
    }

    /// Token ids of a text, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// If there is no tokenizer, it cannot encode the text, or the model lacks one of the tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let ids = match self.needs_encoder(text) {
            true => self.encoder()?.encode(text, true)?,
            false => encode(self.required_tokenizer()?, text)?,
        };
        self.own(ids)
    }

    /// Token ids of a part of a text, without special tokens around it.
    ///
    /// # Errors
    /// Same as [`Vocabulary::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let ids = match self.needs_encoder(text) {
            true => self.encoder()?.encode(text, false)?,
            false => encode_piece(self.required_tokenizer()?, text)?,
        };
        self.own(ids)
    }

    /// The note on the first character of a text that the tokenizer has no token for and leaves out.
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

    /// The note on tokens that the tokenizer has and the model lacks: texts with them are refused.
    pub fn foreign_note(&self) -> Option<String> {
        let (id, token) = largest_foreign_token(self.tokenizer.as_ref()?, self.config.vocab_size)?;
        let vocab_size = self.config.vocab_size;
        Some(format!(
            "the tokenizer has the token id {id} (`{token}`), the vocabulary {vocab_size} tokens: they do not belong together, and \
             texts with such tokens are refused"
        ))
    }

    /// Encoder that [`Vocabulary::encode`] uses for long texts. The first call builds it.
    ///
    /// # Errors
    /// If there is no tokenizer.
    pub fn encoder(&self) -> Result<&TextEncoder<'static>, EngineError> {
        let tokenizer = self.required_tokenizer()?;
        Ok(self.encoder.get_or_init(|| TextEncoder::shared(Arc::clone(tokenizer))))
    }

    /// Whether a text is worth the encoder, which takes some time to build.
    fn needs_encoder(&self, text: &str) -> bool {
        /// Longest text for the library alone.
        const MAX_SHORT_BYTES: usize = 4096;
        text.len() > MAX_SHORT_BYTES || self.tokenizer.as_deref().is_some_and(TextEncoder::is_needed)
    }

    /// The same with the characters of the text that each token stands for, see [`encode_with_places`].
    ///
    /// # Errors
    /// As [`Vocabulary::encode`].
    pub(crate) fn encode_with_places(
        &self,
        text: &str,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>), EngineError> {
        let (ids, places) = match self.tokenizer.as_deref().is_some_and(TextEncoder::is_needed) {
            true => self.encoder()?.encode_with_places(text)?,
            false => encode_with_places(self.required_tokenizer()?, text)?,
        };
        Ok((self.own(ids)?, places))
    }

    /// These tokens of the tokenizer, if the model has them.
    pub(crate) fn own(&self, ids: Vec<u32>) -> Result<Vec<u32>, EngineError> {
        match ids.iter().find(|id| !self.config.has_token(**id)) {
            Some(id) => Err(EngineError::ForeignTokenizer { id: *id, vocab_size: self.config.vocab_size }),
            None => Ok(ids),
        }
    }

    /// Text of `ids`; see [`decode`](candle_gpt2_generation::decode).
    ///
    /// # Errors
    /// If there is no tokenizer, or its decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, EngineError> {
        Ok(decode(self.required_tokenizer()?, ids, skip_special_tokens)?)
    }

    /// The bytes of a token, which may be a part of a character; without a tokenizer its number.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.as_ref().and_then(|tokenizer| token_bytes(tokenizer, id));
        bytes.unwrap_or_else(|| format!("#{id}").into_bytes())
    }

    /// The ids themselves, or the token that begins texts if there are none and the vocabulary has it.
    pub fn start_if_empty(&self, ids: Vec<u32>) -> Vec<u32> {
        if ids.is_empty() { self.config.start_token().into_iter().collect() } else { ids }
    }

    /// The prompt that a model gets for these ids: the token that begins texts if there are none, and the part that is
    /// kept of what is longer than the context.
    ///
    /// # Errors
    /// When there is nothing to start from, an id is outside the vocabulary, or `config` keeps no part of a long prompt.
    pub fn prompt(&self, ids: Vec<u32>, config: &GenerationConfig) -> Result<Vec<u32>, EngineError> {
        Ok(config.fit_prompt(&self.start_if_empty(ids), &self.config)?)
    }

    /// Notes on a configuration's end tokens that are ordinary tokens; none is an error.
    pub fn notes(&self, config: &GenerationConfig) -> Vec<String> {
        let note = |id: &u32| {
            let text = ordinary_token(self.tokenizer.as_ref()?, *id)?;
            Some(format!("eos_token_id {id} is the ordinary token {text:?}; texts will end with it"))
        };
        config.eos_token_id.iter().filter_map(note).collect()
    }

    /// The token that a text names, if it is one with a meaning of its own, such as the end of a text.
    pub(crate) fn special_token(&self, text: &str) -> Option<u32> {
        let tokenizer = self.tokenizer.as_ref()?;
        tokenizer.token_to_id(text).filter(|id| ordinary_token(tokenizer, *id).is_none())
    }
}
