//! Text from token ids as they come, without ever showing a part of a character or of a stop string.
//!
//! A byte-level token may end inside a multi-byte character. Such a tail decodes to U+FFFD, and is held back until
//! the next token completes it, or shows that it never was a character. The pieces, put together, are exactly what
//! decoding all ids at once gives, up to the first stop string. What could be the beginning of one is held back too.

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
    stop_strings: Vec<String>,
    /// Complete characters that may be the beginning of a stop string.
    held: String,
    is_stopped: bool,
}

impl<'tokenizer> TextStream<'tokenizer> {
    /// A stream that starts with nothing. Special tokens, such as the end of the text, give no text.
    pub fn new(tokenizer: &'tokenizer Tokenizer) -> Self {
        Self {
            tokenizer,
            window: Vec::new(),
            emitted: 0,
            stop_strings: Vec::new(),
            held: String::new(),
            is_stopped: false,
        }
    }

    /// The same stream, ending in front of the first of these texts; empty ones are never found.
    pub fn with_stop_strings(mut self, stop_strings: &[String]) -> Self {
        self.stop_strings = stop_strings.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        self
    }

    /// Whether a stop string was found; nothing comes behind it.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// The text that token `id` completes; often a word, empty in the middle of a character.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String, GenerationError> {
        let piece = self.complete_characters(id)?;
        Ok(self.up_to_stop_string(&piece))
    }

    /// What was held back when the text ended: at most one U+FFFD, and what began like a stop string.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    pub fn finish(mut self) -> Result<String, GenerationError> {
        let rest = self.decode(&self.window)?.get(self.emitted..).unwrap_or_default().to_owned();
        let mut text = self.up_to_stop_string(&rest);
        if !self.is_stopped {
            text.push_str(&self.held);
        }
        Ok(text)
    }

    fn up_to_stop_string(&mut self, piece: &str) -> String {
        if self.is_stopped {
            return String::new();
        }
        self.held.push_str(piece);
        let found = self.stop_strings.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let shown = found.unwrap_or_else(|| self.held.len() - self.beginning_of_stop_string());
        self.is_stopped = found.is_some();
        let rest = self.held.split_off(shown);
        std::mem::replace(&mut self.held, rest)
    }

    /// Bytes at the end of the held text that a stop string begins with.
    fn beginning_of_stop_string(&self) -> usize {
        let longest = self.stop_strings.iter().map(String::len).max().unwrap_or(0);
        let mut starts = self.held.char_indices().map(|(start, _)| start);
        let begins =
            |start: &usize| self.stop_strings.iter().any(|stop| stop.starts_with(&self.held[*start..]));
        let start = starts.find(|start| self.held.len() - start < longest && begins(start));
        start.map_or(0, |start| self.held.len() - start)
    }

    fn complete_characters(&mut self, id: u32) -> Result<String, GenerationError> {
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

    fn decode(&self, ids: &[u32]) -> Result<String, GenerationError> {
        self.tokenizer.decode(ids, true).map_err(|error| GenerationError::Decode(error.to_string()))
    }
}
