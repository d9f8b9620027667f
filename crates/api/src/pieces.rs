//! Bytes and text of the tokens in responses.

use std::fmt::{self, Write};
use std::str::from_utf8;
use std::sync::Arc;

use candle_gpt2_engine::{EngineError, Vocabulary};
use candle_gpt2_generation::TextStream;
use candle_gpt2_weights::Tokenizer;

/// Bytes of every token in a vocabulary; also decodes token sequences.
pub(crate) struct Pieces {
    vocabulary: Arc<Vocabulary>,
    bytes: Vec<u8>,
    /// End offset of each token's bytes, where the next token's bytes begin.
    ends: Vec<usize>,
    /// Whether generated text omits the token; true for special tokens.
    is_hidden: Vec<bool>,
    longest: usize,
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pieces of {} tokens", self.ends.len())
    }
}

impl Pieces {
    pub(crate) fn new(vocabulary: &Arc<Vocabulary>) -> Self {
        let ids = 0..u32::try_from(vocabulary.config().vocab_size).unwrap_or(u32::MAX);
        let (mut bytes, mut ends, mut longest) = (Vec::new(), Vec::new(), 1);
        for id in ids.clone() {
            let written = vocabulary.token_bytes(id);
            longest = longest.max(written.len());
            bytes.extend(written);
            ends.push(bytes.len());
        }
        // Same rule as in `TextStream`. Without a tokenizer, tokens have no text and are all hidden.
        let is_hidden = |id| {
            let tokenizer = vocabulary.tokenizer()?;
            let token = tokenizer.id_to_token(id)?;
            Some(tokenizer.get_added_vocabulary().is_special_token(&token))
        };
        let is_hidden = ids.map(|id| is_hidden(id).unwrap_or(true)).collect();
        Self { vocabulary: Arc::clone(vocabulary), bytes, ends, is_hidden, longest }
    }

    /// Creates a text stream; `None` without a tokenizer.
    pub(crate) fn stream(&self) -> Option<TextStream<Arc<Tokenizer>>> {
        self.vocabulary.tokenizer().map(|tokenizer| TextStream::new(Arc::clone(tokenizer)))
    }

    /// Bytes of a token; for a special token, the bytes of its name.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let Ok(index) = usize::try_from(id) else { return &[] };
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let end = self.ends.get(index).copied().unwrap_or(start);
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// Bytes that a token adds to generated text.
    pub(crate) fn shown(&self, id: u32) -> &[u8] {
        if self.is_hidden(id) { &[] } else { self.bytes(id) }
    }

    /// Whether a token adds nothing to generated text.
    pub(crate) fn is_hidden(&self, id: u32) -> bool {
        usize::try_from(id).ok().and_then(|index| self.is_hidden.get(index)).copied().unwrap_or(true)
    }

    /// Maximum number of bytes in a token.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Decodes tokens, including the names of special tokens.
    ///
    /// # Errors
    /// If there is no tokenizer or decoding fails.
    pub(crate) fn text(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.vocabulary.decode(ids, false)
    }

    /// Decodes tokens but skips special tokens, as in generated text.
    ///
    /// # Errors
    /// If there is no tokenizer or decoding fails.
    pub(crate) fn shown_text(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.vocabulary.decode(ids, true)
    }
}

/// Display name of a token: its text, or OpenAI's `bytes:\xe9\x80` form for incomplete characters.
pub(crate) fn name(bytes: &[u8]) -> String {
    match from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut name, byte| {
            // Writing to a string cannot fail.
            let _ = write!(name, "\\x{byte:02x}");
            name
        }),
    }
}

/// Counts the characters in a text whose bytes arrive token by token.
#[derive(Debug, Clone, Default)]
pub(crate) struct CharCounter {
    chars: usize,
    /// Bytes of an incomplete character.
    begun: Vec<u8>,
}

impl CharCounter {
    /// Adds a token's bytes and returns the character offset where the token starts.
    ///
    /// All parts of a character have the same offset.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> usize {
        let Some(first) = bytes.first() else { return self.chars };
        if !self.begun.is_empty() {
            let extended = [&self.begun, std::slice::from_ref(first)].concat();
            if from_utf8(&extended).is_err_and(|error| error.error_len().is_some()) {
                self.finish();
            }
        }
        let offset = self.chars;
        self.begun.extend(bytes);
        loop {
            let (valid, wrong) = match from_utf8(&self.begun) {
                Ok(text) => {
                    self.chars += text.chars().count();
                    self.begun.clear();
                    return offset;
                }
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            let whole = self.begun.get(..valid).and_then(|whole| from_utf8(whole).ok());
            self.chars += whole.map_or(0, |whole| whole.chars().count()) + usize::from(wrong.is_some());
            self.begun.drain(..valid + wrong.unwrap_or(0));
            if wrong.is_none() {
                return offset;
            }
        }
    }

    /// Creates a counter for the text that follows, starting with this counter's incomplete character.
    pub(crate) fn continued(&self) -> Self {
        Self { chars: 0, begun: self.begun.clone() }
    }

    /// Number of complete characters.
    pub(crate) fn chars(&self) -> usize {
        self.chars
    }

    /// Ends the text, counting an incomplete character as one U+FFFD, and returns the character count.
    pub(crate) fn finish(&mut self) -> usize {
        self.chars += usize::from(!self.begun.is_empty());
        self.begun.clear();
        self.chars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(tokens: &[&[u8]]) -> (Vec<usize>, usize) {
        let mut counter = CharCounter::default();
        let offsets = tokens.iter().map(|token| counter.push(token)).collect();
        (offsets, counter.finish())
    }

    #[test]
    fn tokens_of_one_character_share_its_offset() {
        assert_eq!(offsets(&[b"ab", b"c"]), (vec![0, 2], 3));
        let (character, emoji) = ("中".as_bytes(), "😀".as_bytes());
        assert_eq!(offsets(&[b"a", &character[..2], &character[2..], b"b"]), (vec![0, 1, 1, 2], 3));
        assert_eq!(
            offsets(&[&emoji[..1], &emoji[1..2], &emoji[2..], "é".as_bytes(), b"x"]),
            (vec![0, 0, 0, 1, 2], 3)
        );
        // A token may complete one character and begin the next.
        assert_eq!(offsets(&[&[0xe4, 0xb8], &[0xad, b'a', 0xc3], &[0xa9], b"!"]), (vec![0, 0, 2, 3], 4));
    }

    #[test]
    fn character_count_matches_lossy_decoding() {
        // Tests every sequence of four of these bytes, split into tokens of one, two and three bytes.
        let bytes = [b'a', 0x80, 0xbf, 0xc3, 0xe4, 0xed, 0xf0, 0x9f, 0xff];
        for number in 0..bytes.len().pow(4) {
            let text: Vec<u8> =
                (0..4).map(|digit| bytes[number / bytes.len().pow(digit) % bytes.len()]).collect();
            let chars = String::from_utf8_lossy(&text).chars().count();
            for size in [1, 2, 3] {
                let tokens: Vec<&[u8]> = text.chunks(size).collect();
                let (offsets, counted) = offsets(&tokens);
                assert_eq!(counted, chars, "{text:x?} by {size}");
                assert!(offsets.is_sorted(), "{text:x?} by {size}: {offsets:?}");
            }
        }
    }

    #[test]
    fn invalid_utf8_tokens_are_named_by_their_bytes() {
        assert_eq!(name(&[0xe9, 0x80]), "bytes:\\xe9\\x80");
        assert_eq!(name("é".as_bytes()), "é");
        assert_eq!(name(b""), "");
    }
}
