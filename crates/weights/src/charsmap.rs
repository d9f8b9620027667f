//! SentencePiece's `precompiled_charsmap`: a trie of keys and their replacements.
//!
//! Layout: the trie's size in bytes, its 32-bit units, then the replacements, each terminated by a zero
//! byte. The trie is a double array of the Darts-clone library. Source:
//! `Normalizer::DecodePrecompiledCharsMap` in sentencepiece's `normalizer.cc`.

use std::mem::size_of;

/// Maximum size of a map; the one for NFKC with case folding is 310 kB.
const MAX_BYTES: usize = 2 << 20;
/// Maximum length of a key in bytes. Unicode's keys have at most 18 bytes.
const MAX_KEY_BYTES: usize = 128;
/// Maximum length of a replacement in bytes. Unicode's replacements have at most 33 bytes.
const MAX_REPLACEMENT_BYTES: usize = 1024;
/// Maximum number of visits per trie unit.
///
/// Units shared by several keys are visited once for each key length.
const MAX_VISITS: usize = 4;
/// Size of the block of units that contains all children of a node.
const BLOCK: usize = 256;

/// Validated character map.
#[derive(Debug, Clone)]
pub(crate) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
    growth: CharsmapGrowth,
}

/// Worst-case growth of a text that passes through a map, per input byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CharsmapGrowth {
    pub(crate) total: f64,
    /// Maximum occurrences of any single ASCII character in the output, per input byte.
    pub(crate) ascii: f64,
}

impl Charsmap {
    /// Parses a map and checks that every key's replacement exists.
    ///
    /// # Errors
    /// If the map is corrupt or too large. The message starts with a verb.
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("has {} bytes, more than the limit of {MAX_BYTES}", bytes.len()));
        }
        let (size, rest) = bytes.split_first_chunk().ok_or("ends before the size of its trie")?;
        let size = u32::from_le_bytes(*size) as usize;
        let (units, replacements) = rest
            .split_at_checked(size)
            .ok_or_else(|| format!("declares a trie of {size} bytes, but only {} follow", rest.len()))?;
        let (units, remainder) = units.as_chunks::<{ size_of::<u32>() }>();
        if !remainder.is_empty() || units.is_empty() {
            return Err(format!("has a trie of {size} bytes; expected a positive multiple of 4"));
        }
        let units = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        let replacements = str::from_utf8(replacements)
            .map_err(|error| format!("has replacements that are not UTF-8: {error}"))?;
        let growth = CharsmapGrowth { total: 1.0, ascii: 1.0 };
        let mut map = Self { units, replacements: replacements.to_owned(), growth };
        map.growth = map.check()?;
        Ok(map)
    }

    pub(crate) fn growth(&self) -> CharsmapGrowth {
        self.growth
    }

    /// Returns the length of the longest key at the start of `text`, and its replacement.
    pub(crate) fn longest_match(&self, text: &[u8]) -> Option<(usize, &str)> {
        let mut index = offset(self.unit(0)?);
        let mut found = None;
        for (byte, length) in text.iter().zip(1..) {
            let unit = self.unit(index ^ usize::from(*byte))?;
            if label(unit) != u32::from(*byte) {
                break;
            }
            index ^= usize::from(*byte) ^ offset(unit);
            if has_value(unit) {
                found = Some((length, self.unit(index)?));
            }
        }
        let (length, unit) = found?;
        Some((length, self.replacement(unit)?))
    }

    fn unit(&self, index: usize) -> Option<u32> {
        self.units.get(index).copied()
    }

    /// Returns the replacement that a value unit refers to.
    fn replacement(&self, unit: u32) -> Option<&str> {
        /// Mask that clears the value bit.
        const VALUE: u32 = u32::MAX >> 1;
        let start = (unit & VALUE) as usize;
        let rest = self.replacements.get(start..)?.as_bytes();
        let length = rest.iter().take(MAX_REPLACEMENT_BYTES + 1).position(|byte| *byte == 0)?;
        self.replacements.get(start..start + length)
    }

    /// Validates all keys of the trie, walking it level by level.
    ///
    /// A corrupt trie may contain cycles, or refer to units outside itself, on which the tokenizers library
    /// panics.
    fn check(&self) -> Result<CharsmapGrowth, String> {
        let mut growth = CharsmapGrowth { total: 1.0, ascii: 1.0 };
        // Key length at the last visit of each unit.
        let mut visited = vec![0; self.units.len()];
        let mut nodes = vec![offset(self.units[0])];
        let mut visits = 0;
        for length in 1.. {
            let mut next = Vec::new();
            for node in nodes {
                let outside = || format!("has a node with children outside its {} units", self.units.len());
                let start = node - node % BLOCK;
                let block = self.units.get(start..start + BLOCK).ok_or_else(outside)?;
                for label_byte in 1..=u8::MAX {
                    let child = (node % BLOCK) ^ usize::from(label_byte);
                    let unit = block[child];
                    if label(unit) != u32::from(label_byte) || visited[start + child] == length {
                        continue;
                    }
                    visited[start + child] = length;
                    visits += 1;
                    let inner = (start + child) ^ offset(unit);
                    if has_value(unit) {
                        let value = self.unit(inner).and_then(|unit| self.replacement(unit));
                        let missing = || {
                            format!(
                                "has a key whose replacement is missing or exceeds {MAX_REPLACEMENT_BYTES} bytes"
                            )
                        };
                        growth.add(length, value.ok_or_else(missing)?);
                    }
                    next.push(inner);
                }
            }
            // Leaves are separate nodes without children.
            if next.is_empty() {
                break;
            }
            if length > MAX_KEY_BYTES || visits > MAX_VISITS * self.units.len() {
                return Err(format!("has a cycle, or keys of more than {MAX_KEY_BYTES} bytes"));
            }
            nodes = next;
        }
        Ok(growth)
    }
}

impl CharsmapGrowth {
    #[expect(clippy::cast_precision_loss, reason = "a ratio that is compared with a small limit")]
    fn add(&mut self, length: usize, replacement: &str) {
        let ratio = |bytes: usize| bytes as f64 / length as f64;
        self.total = self.total.max(ratio(replacement.len()));
        let mut counts = [0; 128];
        for byte in replacement.bytes().filter(u8::is_ascii) {
            counts[usize::from(byte)] += 1;
        }
        self.ascii = self.ascii.max(ratio(counts.into_iter().max().unwrap_or(0)));
    }
}

/// Returns the byte of a unit, including the value bit so that a value unit matches no byte.
fn label(unit: u32) -> u32 {
    unit & (1 << 31 | 0xff)
}

fn has_value(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

/// Returns the offset of the child units, which is XORed with the unit's own index.
fn offset(unit: u32) -> usize {
    (unit as usize >> 10) << ((unit & 1 << 9) >> 6)
}
