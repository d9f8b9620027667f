//! Cache of recently encoded words; nearly every word in a text is a repetition.

use std::collections::HashMap;
use std::ops::Range;

use crate::byte_pairs::{BytePairs, Parts};

/// Maximum length of a short word in bytes. Its bytes serve as the cache key.
const SHORT_WORD: usize = 15;
/// Maximum length of a cached word, in bytes.
const MAX_CACHED_BYTES: usize = 128;
/// Maximum number of tokens stored inside a slot.
const INSIDE: usize = 3;
/// Number of slots for short words.
const SLOTS: usize = 1 << 16;
/// Maximum number of tokens stored outside the slots; with [`SLOTS`], the cache takes 3 MiB.
const OUTSIDE: usize = 1 << 18;
/// Maximum number of cached long words.
const LONG_WORDS: usize = 1 << 13;

/// Word encoder that caches the tokens of all but the longest words.
pub(crate) struct WordCache {
    short: Vec<Slot>,
    long: HashMap<Box<[u8]>, Range<usize>>,
    outside: Vec<u32>,
    parts: Parts,
}

/// Slot of a short word. A later word with the same hash replaces it.
#[derive(Clone, Copy)]
struct Slot {
    /// Bytes of the word, with the length in the highest byte; 0 if the slot is empty.
    word: u128,
    /// Number of tokens. Above [`INSIDE`], `tokens[0]` is the index of the first one in `outside`.
    count: u32,
    tokens: [u32; INSIDE],
}

impl WordCache {
    /// Upper bound on the memory of an empty cache, in bytes.
    pub(crate) const BYTES: usize = 4 << 20;

    pub(crate) fn new() -> Self {
        let empty = Slot { word: 0, count: 0, tokens: [0; INSIDE] };
        Self { short: vec![empty; SLOTS], long: HashMap::new(), outside: Vec::new(), parts: Parts::default() }
    }

    /// Appends the tokens of the word `start..end` of the text.
    #[inline]
    pub(crate) fn encode(
        &mut self,
        pairs: &BytePairs,
        text: &[u8],
        start: usize,
        end: usize,
        tokens: &mut Vec<u32>,
    ) {
        if end - start > SHORT_WORD {
            return self.encode_long(pairs, &text[start..end], tokens);
        }
        let word = bytes_of(text, start, end);
        let slot = &self.short[slot_index(word)];
        if slot.word != word {
            return self.encode_new(pairs, word, &text[start..end], tokens);
        }
        match slot.count as usize {
            1 => tokens.push(slot.tokens[0]),
            2 => tokens.extend_from_slice(&slot.tokens[..2]),
            INSIDE => tokens.extend_from_slice(&slot.tokens),
            count => {
                let first = slot.tokens[0] as usize;
                tokens.extend_from_slice(&self.outside[first..first + count]);
            }
        }
    }

    #[cold]
    fn encode_new(&mut self, pairs: &BytePairs, word: u128, bytes: &[u8], tokens: &mut Vec<u32>) {
        let first = tokens.len();
        pairs.encode(bytes, &mut self.parts, tokens);
        let found = &tokens[first..];
        let mut stored = [0; INSIDE];
        match stored.get_mut(..found.len()) {
            Some(stored) => stored.copy_from_slice(found),
            None => {
                let range = self.store(found);
                let Ok(start) = u32::try_from(range.start) else { return };
                stored[0] = start;
            }
        }
        // A word has at most one token per byte.
        let Ok(count) = u32::try_from(found.len()) else { return };
        self.short[slot_index(word)] = Slot { word, count, tokens: stored };
    }

    fn encode_long(&mut self, pairs: &BytePairs, word: &[u8], tokens: &mut Vec<u32>) {
        if let Some(range) = self.long.get(word) {
            return tokens.extend_from_slice(&self.outside[range.clone()]);
        }
        let first = tokens.len();
        pairs.encode(word, &mut self.parts, tokens);
        if word.len() <= MAX_CACHED_BYTES {
            let range = self.store(&tokens[first..]);
            self.long.insert(word.into(), range);
        }
    }

    /// Stores the tokens of a word; if the cache is full, it is cleared first.
    ///
    /// The number of long words has its own limit, because `long` also holds their bytes.
    fn store(&mut self, tokens: &[u32]) -> Range<usize> {
        if self.outside.len() + tokens.len() > OUTSIDE || self.long.len() >= LONG_WORDS {
            *self = Self::new();
        }
        let first = self.outside.len();
        self.outside.extend_from_slice(tokens);
        first..self.outside.len()
    }
}

/// Packs the bytes of a short word into an integer.
#[inline]
fn bytes_of(text: &[u8], start: usize, end: usize) -> u128 {
    let length = end - start;
    let bytes = match text.get(start..).and_then(|rest| rest.first_chunk::<16>()) {
        Some(chunk) => u128::from_le_bytes(*chunk) & ((1 << (8 * length)) - 1),
        // Near the end of the text, fewer than 16 bytes remain.
        None => text[start..end].iter().rev().fold(0, |bytes, byte| bytes << 8 | u128::from(*byte)),
    };
    bytes | (length as u128) << (8 * SHORT_WORD)
}

/// Returns the slot index of a short word.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a hash of both halves")]
fn slot_index(word: u128) -> usize {
    let folded = (word as u64) ^ ((word >> 64) as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (u64::BITS - SLOTS.trailing_zeros())) as usize
}
