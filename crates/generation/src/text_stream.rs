//! Text from token ids as they come, without ever showing a part of a character.
//!
//! A byte-level token may end inside a multi-byte character. Such a tail decodes to U+FFFD, and is held back until
//! the next token completes it, or shows that it never was a character. The pieces, put together, are exactly what
//! decoding all ids at once gives.

use tokenizers::Tokenizer;

use crate::GenerationError;

/// What an incomplete or impossible byte sequence decodes to.
const REPLACEMENT: char = '\u{FFFD}';
/// Ids after which the beginning of the window is dropped, so that a long text is not decoded again at every token.
const LONGEST_WINDOW: usize = 32;
/// Ids that stay in the window then: enough for the longest character, which has four bytes.
const KEPT_IDS: usize = 4;

/// Decodes ids into pieces of text.
pub struct TextStream<'tokenizer> {
    tokenizer: &'tokenizer Tokenizer,
    window: Vec<u32>,
    /// Bytes of the window's text that were given out.
    emitted: usize,
}

impl<'tokenizer> TextStream<'tokenizer> {
    /// A stream that starts with nothing. Special tokens, such as the end of the text, give no text.
    pub fn new(tokenizer: &'tokenizer Tokenizer) -> Self {
        Self { tokenizer, window: Vec::new(), emitted: 0 }
    }

    /// The text that token `id` completes; often a word, empty in the middle of a character.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String, GenerationError> {
        self.window.push(id);
        let text = self.decode(&self.window)?;
        let complete = text.strip_suffix(REPLACEMENT).unwrap_or(&text);
        let piece = complete.get(self.emitted..).unwrap_or_default().to_owned();
        self.emitted = self.emitted.max(complete.len());
        if self.window.len() > LONGEST_WINDOW && complete.len() == text.len() {
            let tail = self.window[self.window.len() - KEPT_IDS..].to_vec();
            let tail_text = self.decode(&tail)?;
            // Dropping ids must not change what the others decode to.
            if text.ends_with(&tail_text) && !tail_text.starts_with(REPLACEMENT) {
                (self.window, self.emitted) = (tail, tail_text.len());
            }
        }
        Ok(piece)
    }

    /// What was held back when the text ended: at most one U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    pub fn finish(self) -> Result<String, GenerationError> {
        Ok(self.decode(&self.window)?.get(self.emitted..).unwrap_or_default().to_owned())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, GenerationError> {
        self.tokenizer.decode(ids, true).map_err(|error| GenerationError::Decode(error.to_string()))
    }
}
