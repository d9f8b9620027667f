//! Incremental decoding of token ids that never shows part of a character or stop string.
//!
//! A byte-level token may end inside a multi-byte character. Such a tail decodes to U+FFFD. It is held
//! back until the next token completes the character, or shows that there is none. With byte fallback,
//! bytes are held back until a token of another kind follows. A possible beginning of a stop string is
//! held back too.
//!
//! The concatenated pieces equal the result of [`decode`] for all ids at once, up to the first stop
//! string. The cost of a token does not depend on the length of the text.

use std::ops::Deref;

use tokenizers::Tokenizer;

use crate::GenerationError;
use crate::decode::{decode, is_fallback_byte};
use crate::stop_strings::StopStrings;

/// Replacement for an incomplete or invalid byte sequence.
const REPLACEMENT: char = '\u{FFFD}';
/// Window length in ids above which the window is shortened; limits the text to decode per token.
const LONGEST_WINDOW: usize = 32;
/// Number of ids that remain in the shortened window.
///
/// Four ids suffice for the longest character, which has four bytes.
const KEPT_IDS: usize = 4;

/// Decodes ids into pieces of text; `T` is a pointer to the tokenizer.
///
/// ```
/// use candle_gpt2_generation::TextStream;
/// use candle_gpt2_weights::{Tokenizer, encode};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// let ids = encode(&tokenizer, "café")?;
/// let mut stream = TextStream::new(&tokenizer);
/// let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect::<Result<_, _>>()?;
/// assert_eq!(pieces.last().map(String::as_str), Some("é"), "characters are never split");
/// assert_eq!(pieces.concat(), "café");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub struct TextStream<T> {
    tokenizer: T,
    window: Vec<u32>,
    /// Number of bytes in the window's text that have already been returned.
    emitted: usize,
    stop_strings: StopStrings,
}

impl<T: Deref<Target = Tokenizer>> TextStream<T> {
    /// Creates an empty stream; special tokens, such as the end of the text, produce no text.
    pub fn new(tokenizer: T) -> Self {
        Self { tokenizer, window: Vec::new(), emitted: 0, stop_strings: StopStrings::new(&[]) }
    }

    /// Ends the stream before the first of these strings; empty strings are ignored.
    pub fn with_stop_strings(mut self, stop_strings: &[String]) -> Self {
        self.stop_strings = StopStrings::new(stop_strings);
        self
    }

    /// Appends context, such as a prompt; special tokens in the context appear by name.
    ///
    /// Returns the text up to the last complete character; the next ids complete the rest. This text is not
    /// searched for stop strings.
    ///
    /// ```
    /// use candle_gpt2_generation::TextStream;
    /// use candle_gpt2_weights::{Tokenizer, encode};
    ///
    /// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
    /// let ids = encode(&tokenizer, "a §")?;
    /// let (prompt, rest) = ids.split_at(ids.len() - 1);
    /// let mut stream = TextStream::new(&tokenizer);
    /// assert_eq!(stream.follow(prompt)?, "a ");
    /// assert_eq!(stream.push(rest[0])?, "§");
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode the ids.
    pub fn follow(&mut self, ids: &[u32]) -> Result<String, GenerationError> {
        ids.iter().map(|id| self.complete_characters(*id)).collect()
    }

    /// Returns whether a stop string was found; no text follows it.
    pub fn is_stopped(&self) -> bool {
        self.stop_strings.is_found()
    }

    /// Returns the text that token `id` completes; empty in the middle of a character.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode the ids.
    pub fn push(&mut self, id: u32) -> Result<String, GenerationError> {
        if self.is_special(id) {
            return Ok(String::new());
        }
        let piece = self.complete_characters(id)?;
        Ok(self.stop_strings.push(&piece))
    }

    /// Returns the held-back text: an incomplete character and a possible start of a stop string.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode the ids.
    pub fn finish(mut self) -> Result<String, GenerationError> {
        let text = self.decode(&self.window)?;
        let shown = self.stop_strings.push(text.get(self.emitted..).unwrap_or_default());
        Ok(shown + &self.stop_strings.finish())
    }

    fn complete_characters(&mut self, id: u32) -> Result<String, GenerationError> {
        if self.tokenizer.id_to_token(id).is_none() {
            return Ok(String::new());
        }
        self.window.push(id);
        if is_fallback_byte(&self.tokenizer, id) {
            return Ok(String::new());
        }
        let text = self.decode(&self.window)?;
        let complete = complete(&text);
        let piece = complete.get(self.emitted..).unwrap_or_default().to_owned();
        self.emitted = self.emitted.max(complete.len());
        if self.window.len() > LONGEST_WINDOW {
            self.shorten_window(&text)?;
        }
        Ok(piece)
    }

    /// Drops the beginning of the window if no character spans the cut; `text` is the window's text.
    fn shorten_window(&mut self, text: &str) -> Result<(), GenerationError> {
        let (dropped, kept) = self.window.split_at(self.window.len() - KEPT_IDS);
        let kept_text = self.decode(kept)?;
        let is_ending = !kept_text.is_empty() && text.ends_with(&kept_text);
        // An invalid beginning may be the rest of a character. In that case, decoding the two parts
        // separately gives different text than decoding the whole.
        let is_whole = !kept_text.starts_with(REPLACEMENT) || self.decode(dropped)? + &kept_text == text;
        if is_ending && is_whole {
            (self.emitted, self.window) = (complete(&kept_text).len(), kept.to_vec());
        } else if kept_text.is_empty() {
            self.drop_middle(text)?;
        }
        Ok(())
    }

    /// Drops ids from the middle of the window.
    ///
    /// SentencePiece drops spaces at the beginning of the text, so the window cannot consist of spaces alone.
    fn drop_middle(&mut self, text: &str) -> Result<(), GenerationError> {
        let rest = &self.window[KEPT_IDS..];
        let head = &self.window[..KEPT_IDS];
        let kept = [head, &rest[rest.len() - KEPT_IDS..]].concat();
        let (head_text, kept_text) = (self.decode(head)?, self.decode(&kept)?);
        let dropped = text.len().checked_sub(kept_text.len());
        let is_same = kept_text.strip_prefix(&*head_text).is_some_and(|tail| text.ends_with(tail));
        if let Some(emitted) = dropped.and_then(|dropped| self.emitted.checked_sub(dropped))
            && is_same
            && text.starts_with(&*head_text)
        {
            (self.emitted, self.window) = (emitted, kept);
        }
        Ok(())
    }

    fn is_special(&self, id: u32) -> bool {
        let added = self.tokenizer.get_added_vocabulary();
        self.tokenizer.id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    fn decode(&self, ids: &[u32]) -> Result<String, GenerationError> {
        decode(&self.tokenizer, ids, false)
    }
}

/// Returns the text without a trailing U+FFFD, because the next bytes may replace it.
fn complete(text: &str) -> &str {
    text.strip_suffix(REPLACEMENT).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use candle_gpt2_testing::fixture_path;
    use candle_gpt2_weights::load_tokenizer;

    use super::*;

    /// Maximum number of ids in the window.
    ///
    /// An incomplete character can delay the cut by up to [`KEPT_IDS`] ids.
    const WINDOW_BOUND: usize = LONGEST_WINDOW + KEPT_IDS;

    fn streamed_in_a_short_window(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = TextStream::new(tokenizer);
        let mut streamed = String::new();
        for id in ids {
            streamed.push_str(&stream.push(*id).unwrap());
            assert!(stream.window.len() <= WINDOW_BOUND, "{} ids", stream.window.len());
        }
        streamed + &stream.finish().unwrap()
    }

    /// Tests bytes that never form characters: repeated, in order, or separated by textless tokens.
    #[test]
    fn window_stays_short_for_invalid_bytes() {
        let tokenizer = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
        let ids_of_parts: Vec<u32> = (0..tokenizer.get_vocab_size(true).try_into().unwrap())
            .filter(|id| tokenizer.decode(&[*id], true).unwrap() == "\u{FFFD}")
            .collect();
        assert_eq!(ids_of_parts.len(), 128, "one token for every byte above 127");
        let special = 0;
        assert_eq!(tokenizer.decode(&[special], true).unwrap(), "");
        let no_token = u32::MAX;
        let cases: Vec<Vec<u32>> = ids_of_parts
            .iter()
            .step_by(16)
            .map(|id| vec![*id])
            .chain([
                ids_of_parts.clone(),
                ids_of_parts.iter().rev().copied().collect(),
                ids_of_parts[ids_of_parts.len() - 4..].to_vec(),
            ])
            .collect();
        for pattern in cases {
            for between in [None, Some(special), Some(no_token)] {
                let ids = pattern.iter().cycle().flat_map(|id| [Some(*id), between]).flatten();
                let ids: Vec<u32> = ids.take(10_000).collect();
                let streamed = streamed_in_a_short_window(&tokenizer, &ids);
                assert!(streamed == tokenizer.decode(&ids, true).unwrap(), "{pattern:?}, {between:?}");
            }
        }
        // Special tokens at the end do not push out the first byte, which can still become a character.
        let mut stream = TextStream::new(&tokenizer);
        stream.push(ids_of_parts[0]).unwrap();
        (0..100).for_each(|_| assert_eq!(stream.push(special).unwrap(), ""));
        assert_eq!(stream.window.len(), 1);
    }

    /// SentencePiece drops leading spaces, so a window of spaces alone has no text.
    #[test]
    fn window_stays_short_in_runs_of_spaces() {
        for name in ["unigram.model", "unigram_bytes.model", "bpe.model", "bpe_bytes.model"] {
            let tokenizer = load_tokenizer(fixture_path("tokenizers").join(name)).unwrap();
            let id = |token: &str| tokenizer.token_to_id(token).unwrap();
            let spaces = std::iter::repeat_n(id("\u{2581}"), 500);
            for first in [None, Some(id("e"))] {
                let ids: Vec<u32> = first.into_iter().chain(spaces.clone()).chain([id("r")]).collect();
                let streamed = streamed_in_a_short_window(&tokenizer, &ids);
                assert_eq!(streamed, decode(&tokenizer, &ids, true).unwrap(), "{name}");
            }
        }
    }
}
