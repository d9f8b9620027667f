//! Bytes and text of tokens in answers.

use std::fmt::{self, Write};
use std::str::from_utf8;
use std::sync::Arc;

use candle_gpt2_engine::{EngineError, Vocabulary};
use candle_gpt2_generation::TextStream;
use candle_gpt2_weights::Tokenizer;

/// The bytes of every token of a vocabulary, and the text of token sequences.
pub(crate) struct Pieces {
    vocabulary: Arc<Vocabulary>,
    bytes: Vec<u8>,
    /// Where each token's bytes end, which is where the next one's begin.
    ends: Vec<usize>,
    /// Tokens that show nothing where they are generated: those that end texts.
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
        // As a stream of text leaves them out; without a tokenizer there is no text.
        let is_hidden = |id| {
            let tokenizer = vocabulary.tokenizer()?;
            let token = tokenizer.id_to_token(id)?;
            Some(tokenizer.get_added_vocabulary().is_special_token(&token))
        };
        let is_hidden = ids.map(|id| is_hidden(id).unwrap_or(true)).collect();
        Self { vocabulary: Arc::clone(vocabulary), bytes, ends, is_hidden, longest }
    }

    /// A stream of text; `None` without a tokenizer.
    pub(crate) fn stream(&self) -> Option<TextStream<Arc<Tokenizer>>> {
        self.vocabulary.tokenizer().map(|tokenizer| TextStream::new(Arc::clone(tokenizer)))
    }

    /// What a token writes; a special token its name.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let Ok(place) = usize::try_from(id) else { return &[] };
        let start = place.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let end = self.ends.get(place).copied().unwrap_or(start);
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// What a token adds to a text that is generated.
    pub(crate) fn shown(&self, id: u32) -> &[u8] {
        if self.is_hidden(id) { &[] } else { self.bytes(id) }
    }

    /// Whether a token adds nothing to a text that is generated.
    pub(crate) fn is_hidden(&self, id: u32) -> bool {
        usize::try_from(id).ok().and_then(|place| self.is_hidden.get(place)).copied().unwrap_or(true)
    }

    /// The most bytes that a token writes.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// The text of these tokens, with the names of special ones.
    ///
    /// # Errors
    /// If there is no tokenizer, or it cannot decode.
    pub(crate) fn text(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.vocabulary.decode(ids, false)
    }

    /// The text of these tokens where they are generated.
    ///
    /// # Errors
    /// If there is no tokenizer, or it cannot decode.
    pub(crate) fn shown_text(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.vocabulary.decode(ids, true)
    }
}

/// A token as text: what it writes, or, if these are no whole characters, `bytes:\xe9\x80` as OpenAI writes them.
pub(crate) fn name(bytes: &[u8]) -> String {
    match from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut name, byte| {
            // Writing into a string does not fail.
            let _ = write!(name, "\\x{byte:02x}");
            name
        }),
    }
}

/// Counts the characters of a text whose bytes arrive token by token.
#[derive(Debug, Clone, Default)]
pub(crate) struct CharCounter {
    chars: usize,
    /// The beginning of a character.
    begun: Vec<u8>,
}

impl CharCounter {
    /// Takes the bytes of a token, and returns how many characters are before it: all parts of a character have its place.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> usize {
        let Some(first) = bytes.first() else { return self.chars };
        if !self.begun.is_empty() {
            let goes_on = [&self.begun, std::slice::from_ref(first)].concat();
            if from_utf8(&goes_on).is_err_and(|error| error.error_len().is_some()) {
                self.finish();
            }
        }
        let place = self.chars;
        self.begun.extend(bytes);
        loop {
            let (valid, wrong) = match from_utf8(&self.begun) {
                Ok(text) => {
                    self.chars += text.chars().count();
                    self.begun.clear();
                    return place;
                }
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            let whole = self.begun.get(..valid).and_then(|whole| from_utf8(whole).ok());
            self.chars += whole.map_or(0, |whole| whole.chars().count()) + usize::from(wrong.is_some());
            self.begun.drain(..valid + wrong.unwrap_or(0));
            if wrong.is_none() {
                return place;
            }
        }
    }

    /// A counter of the text that follows: a character that was begun belongs to it.
    pub(crate) fn continued(&self) -> Self {
        Self { chars: 0, begun: self.begun.clone() }
    }

    /// Whole characters so far.
    pub(crate) fn chars(&self) -> usize {
        self.chars
    }

    /// Ends the text: what was begun is one U+FFFD. Returns its characters.
    pub(crate) fn finish(&mut self) -> usize {
        self.chars += usize::from(!self.begun.is_empty());
        self.begun.clear();
        self.chars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(tokens: &[&[u8]]) -> (Vec<usize>, usize) {
        let mut counter = CharCounter::default();
        let places = tokens.iter().map(|token| counter.push(token)).collect();
        (places, counter.finish())
    }

    #[test]
    fn parts_of_a_character_have_its_place() {
        assert_eq!(places(&[b"ab", b"c"]), (vec![0, 2], 3));
        let (character, emoji) = ("中".as_bytes(), "😀".as_bytes());
        assert_eq!(places(&[b"a", &character[..2], &character[2..], b"b"]), (vec![0, 1, 1, 2], 3));
        assert_eq!(
            places(&[&emoji[..1], &emoji[1..2], &emoji[2..], "é".as_bytes(), b"x"]),
            (vec![0, 0, 0, 1, 2], 3)
        );
        // What ends in the middle of a character and begins the next one.
        assert_eq!(places(&[&[0xe4, 0xb8], &[0xad, b'a', 0xc3], &[0xa9], b"!"]), (vec![0, 0, 2, 3], 4));
    }

    #[test]
    fn characters_are_counted_as_they_are_decoded() {
        // Every sequence of four of these bytes, in tokens of one byte and of two.
        let bytes = [b'a', 0x80, 0xbf, 0xc3, 0xe4, 0xed, 0xf0, 0x9f, 0xff];
        for number in 0..bytes.len().pow(4) {
            let text: Vec<u8> =
                (0..4).map(|place| bytes[number / bytes.len().pow(place) % bytes.len()]).collect();
            let chars = String::from_utf8_lossy(&text).chars().count();
            for size in [1, 2, 3] {
                let tokens: Vec<&[u8]> = text.chunks(size).collect();
                let (places, counted) = places(&tokens);
                assert_eq!(counted, chars, "{text:x?} by {size}");
                assert!(places.is_sorted(), "{text:x?} by {size}: {places:?}");
            }
        }
    }

    #[test]
    fn what_is_no_text_is_written_as_bytes() {
        assert_eq!(name(&[0xe9, 0x80]), "bytes:\\xe9\\x80");
        assert_eq!(name("é".as_bytes()), "é");
        assert_eq!(name(b""), "");
    }
}
