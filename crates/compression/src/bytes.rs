//! Conversion of arbitrary bytes to tokens and back.
//!
//! Valid UTF-8 goes through the tokenizer, and everything else is encoded byte by byte. Special tokens are
//! never produced: `<|endoftext|>` in a text is encoded character by character.
//!
//! The tokenizer's output is compared with the text. A tokenizer that changes the text, for example with a
//! normalizer, therefore costs compression but never loses a byte.

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_weights::{Tokenizer, encode_piece};

use crate::CompressionError;

/// Number of byte values.
const BYTES: usize = 256;

/// Mapping between bytes and tokens.
pub(crate) struct ByteTokens {
    tokenizer: Tokenizer,
    /// Bytes of each token, by id.
    bytes: Vec<Vec<u8>>,
    /// Token for each byte.
    byte_tokens: Vec<u32>,
}

impl ByteTokens {
    /// Creates the mapping for a model's vocabulary.
    ///
    /// # Errors
    /// If the model has no tokenizer, or if a byte has no token.
    pub(crate) fn new(vocabulary: &Vocabulary) -> Result<Self, CompressionError> {
        let mut tokenizer = Tokenizer::clone(vocabulary.required_tokenizer()?);
        tokenizer.set_encode_special_tokens(true);
        let ids = 0..u32::try_from(vocabulary.config().vocab_size).unwrap_or(u32::MAX);
        let is_token = |id: &u32| tokenizer.id_to_token(*id).is_some();
        let bytes_of = |id| if is_token(&id) { vocabulary.token_bytes(id) } else { Vec::new() };
        let bytes: Vec<Vec<u8>> = ids.map(bytes_of).collect();
        let mut byte_tokens = vec![None; BYTES];
        for (id, bytes) in (0..).zip(&bytes) {
            if let [byte] = bytes[..] {
                byte_tokens[usize::from(byte)].get_or_insert(id);
            }
        }
        let byte_tokens = (0..=u8::MAX)
            .zip(byte_tokens)
            .map(|(byte, id)| id.ok_or(CompressionError::MissingByteToken { byte }));
        let byte_tokens = byte_tokens.collect::<Result<_, _>>()?;
        Ok(Self { tokenizer, bytes, byte_tokens })
    }

    /// Returns the bytes of every id, or no bytes if the id is not a token.
    pub(crate) fn all(&self) -> &[Vec<u8>] {
        &self.bytes
    }

    /// Returns the bytes of a token in the vocabulary.
    pub(crate) fn bytes_of(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// Encodes bytes as tokens.
    pub(crate) fn encode(&self, bytes: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        for chunk in bytes.utf8_chunks() {
            match self.encode_text(chunk.valid()) {
                Some(text) => ids.extend(text),
                None => self.extend_by_bytes(&mut ids, chunk.valid().as_bytes()),
            }
            self.extend_by_bytes(&mut ids, chunk.invalid());
        }
        ids
    }

    /// Tokenizes a text; returns `None` if the tokens do not decode to the same bytes.
    fn encode_text(&self, text: &str) -> Option<Vec<u32>> {
        let ids = encode_piece(&self.tokenizer, text).ok()?;
        let mut rest = text.as_bytes();
        for id in &ids {
            rest = rest.strip_prefix(self.bytes_of(*id)).filter(|_| !self.bytes_of(*id).is_empty())?;
        }
        rest.is_empty().then_some(ids)
    }

    fn extend_by_bytes(&self, ids: &mut Vec<u32>, bytes: &[u8]) {
        ids.extend(bytes.iter().map(|byte| self.byte_tokens[usize::from(*byte)]));
    }
}
