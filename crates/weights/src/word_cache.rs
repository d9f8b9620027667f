//! The tokens of the words that were met last: nearly every word of a text was met before.

use std::collections::HashMap;
use std::ops::Range;

use crate::byte_pairs::{BytePairs, Parts};

/// Longest word, in bytes, that is kept by its bytes themselves.
const SHORT_WORD: usize = 15;
/// Longest word that is kept at all.
const LONGEST_KEPT: usize = 128;
/// Tokens of a short word that are kept beside it.
const INSIDE: usize = 3;
/// Short words that are kept.
const SLOTS: usize = 1 << 16;
/// Tokens that are kept for all other words; with [`SLOTS`], the cache takes 3 MiB.
const OUTSIDE: usize = 1 << 18;

/// Joins words to tokens, and keeps those of some.
pub(crate) struct WordCache {
    short: Vec<Slot>,
    long: HashMap<Box<[u8]>, Range<usize>>,
    outside: Vec<u32>,
    parts: Parts,
}

/// A short word: a later one with the same place takes it.
#[derive(Clone, Copy)]
struct Slot {
    /// The bytes, and their number in the last one; 0 if there is no word.
    word: u128,
    /// How many, and the tokens; if they are more than [`INSIDE`], where they begin outside.
    count: u32,
    tokens: [u32; INSIDE],
}

impl WordCache {
    /// Memory of an empty cache.
    pub(crate) const BYTES: usize = 4 << 20;

    pub(crate) fn new() -> Self {
        let empty = Slot { word: 0, count: 0, tokens: [0; INSIDE] };
        Self { short: vec![empty; SLOTS], long: HashMap::new(), outside: Vec::new(), parts: Parts::default() }
    }

    /// Appends the tokens of the word `start..end` of a text.
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
        let slot = &self.short[place_of(word)];
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
        let mut kept = [0; INSIDE];
        match kept.get_mut(..found.len()) {
            Some(kept) => kept.copy_from_slice(found),
            None => {
                let place = self.keep(found);
                let Ok(place) = u32::try_from(place.start) else { return };
                kept[0] = place;
            }
        }
        // At most one for each byte of the word.
        let Ok(count) = u32::try_from(found.len()) else { return };
        self.short[place_of(word)] = Slot { word, count, tokens: kept };
    }

    fn encode_long(&mut self, pairs: &BytePairs, word: &[u8], tokens: &mut Vec<u32>) {
        if let Some(place) = self.long.get(word) {
            return tokens.extend_from_slice(&self.outside[place.clone()]);
        }
        let first = tokens.len();
        pairs.encode(word, &mut self.parts, tokens);
        if word.len() <= LONGEST_KEPT {
            let place = self.keep(&tokens[first..]);
            self.long.insert(word.into(), place);
        }
    }

    /// Keeps the tokens of a word; if there is no room, all are forgotten first.
    fn keep(&mut self, tokens: &[u32]) -> Range<usize> {
        if self.outside.len() + tokens.len() > OUTSIDE {
            *self = Self::new();
        }
        let first = self.outside.len();
        self.outside.extend_from_slice(tokens);
        first..self.outside.len()
    }
}

/// The bytes of a short word as one number.
#[inline]
fn bytes_of(text: &[u8], start: usize, end: usize) -> u128 {
    let length = end - start;
    let bytes = match text.get(start..).and_then(|rest| rest.first_chunk::<16>()) {
        Some(chunk) => u128::from_le_bytes(*chunk) & ((1 << (8 * length)) - 1),
        // Near the end of the text.
        None => text[start..end].iter().rev().fold(0, |bytes, byte| bytes << 8 | u128::from(*byte)),
    };
    bytes | (length as u128) << (8 * SHORT_WORD)
}

/// The place of a short word.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a hash of both halves")]
fn place_of(word: u128) -> usize {
    let folded = (word as u64) ^ ((word >> 64) as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (u64::BITS - SLOTS.trailing_zeros())) as usize
}
