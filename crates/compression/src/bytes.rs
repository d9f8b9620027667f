//! Any bytes as tokens of a model, and back: valid UTF-8 by the tokenizer, everything else byte by byte.
//!
//! Special tokens are never met: `<|endoftext|>` in a text is what its characters are. What the tokenizer makes of a text is
//! compared with the text, so one that changes it (by a normalizer, say) costs size and never a byte.

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_weights::{Tokenizer, encode_piece};

use crate::CompressionError;

/// Values of a byte.
const BYTES: usize = 256;

/// The tokens of bytes.
pub(crate) struct ByteTokens {
    tokenizer: Tokenizer,
    /// What each id stands for.
    bytes: Vec<Vec<u8>>,
    /// The token of each byte alone.
    of_byte: Vec<u32>,
}

impl ByteTokens {
    /// Those of a model.
    ///
    /// # Errors
    /// When it has no tokenizer, or one without a token for each byte.
    pub(crate) fn new(vocabulary: &Vocabulary) -> Result<Self, CompressionError> {
        let mut tokenizer = Tokenizer::clone(vocabulary.required_tokenizer()?);
        tokenizer.set_encode_special_tokens(true);
        let ids = 0..u32::try_from(vocabulary.config().vocab_size).unwrap_or(u32::MAX);
        let is_token = |id: &u32| tokenizer.id_to_token(*id).is_some();
        let bytes_of = |id| if is_token(&id) { vocabulary.token_bytes(id) } else { Vec::new() };
        let bytes: Vec<Vec<u8>> = ids.map(bytes_of).collect();
        let mut of_byte = vec![None; BYTES];
        for (id, bytes) in (0..).zip(&bytes) {
            if let [byte] = bytes[..] {
                of_byte[usize::from(byte)].get_or_insert(id);
            }
        }
        let of_byte =
            (0..=u8::MAX).zip(of_byte).map(|(byte, id)| id.ok_or(CompressionError::NoTokenOfByte { byte }));
        let of_byte = of_byte.collect::<Result<_, _>>()?;
        Ok(Self { tokenizer, bytes, of_byte })
    }

    /// The bytes of each id, none of those that are no tokens.
    pub(crate) fn all(&self) -> &[Vec<u8>] {
        &self.bytes
    }

    /// The bytes of a token of the vocabulary.
    pub(crate) fn bytes_of(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// The tokens that stand for these bytes.
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

    /// The tokenizer's tokens of a text, if they stand for the very text.
    fn encode_text(&self, text: &str) -> Option<Vec<u32>> {
        let ids = encode_piece(&self.tokenizer, text).ok()?;
        let mut rest = text.as_bytes();
        for id in &ids {
            rest = rest.strip_prefix(self.bytes_of(*id)).filter(|_| !self.bytes_of(*id).is_empty())?;
        }
        rest.is_empty().then_some(ids)
    }

    fn extend_by_bytes(&self, ids: &mut Vec<u32>, bytes: &[u8]) {
        ids.extend(bytes.iter().map(|byte| self.of_byte[usize::from(*byte)]));
    }
}
