//! GPT-2's byte pair encoding of a single word.
//!
//! Repeatedly merges the adjacent token pair with the lowest rank, leftmost first, until no merge applies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Maximum length in bytes of words merged by linear search; longer words use a heap.
const SHORT: usize = 48;
/// Rank of pairs that have no merge.
const NO_RANK: u32 = u32::MAX;

/// Merges of a vocabulary.
pub(crate) struct BytePairs {
    /// Token for each byte.
    bytes: [u32; 256],
    /// Open-addressing hash table; see [`Self::slot`].
    merges: Vec<Merge>,
}

#[derive(Debug, Clone, Copy)]
struct Merge {
    pair: (u32, u32),
    /// Rank of the merge; [`NO_RANK`] if the slot is empty.
    rank: u32,
    token: u32,
}

/// Scratch buffer for encoding a word.
#[derive(Debug, Default)]
pub(crate) struct Parts(Vec<Part>);

/// Token of a partially merged word, and its possible merge with the next token.
#[derive(Debug, Clone, Copy)]
struct Part {
    token: u32,
    rank: u32,
    merged: u32,
    /// Indices of the neighbors, used only for long words; out of range at the ends of the word.
    before: usize,
    after: usize,
}

impl BytePairs {
    /// Builds the table from the merges in rank order, each with its resulting token.
    pub(crate) fn new(bytes: [u32; 256], merges: impl ExactSizeIterator<Item = ((u32, u32), u32)>) -> Self {
        let empty = Merge { pair: (0, 0), rank: NO_RANK, token: 0 };
        // A load factor of at most 1/4 makes failed lookups fast.
        let slots = (4 * merges.len()).next_power_of_two();
        let mut table = Self { bytes, merges: vec![empty; slots] };
        for (rank, (pair, token)) in (0..NO_RANK).zip(merges) {
            let slot = table.slot(pair);
            table.merges[slot] = Merge { pair, rank, token };
        }
        table
    }

    /// Returns the slot that holds the merge of a pair, or the empty slot where it would go.
    #[inline]
    fn slot(&self, pair: (u32, u32)) -> usize {
        let key = u64::from(pair.0) << 32 | u64::from(pair.1);
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let last = self.merges.len() - 1;
        let mut slot = (mixed >> 32) as usize & last;
        while self.merges[slot].rank != NO_RANK && self.merges[slot].pair != pair {
            slot = (slot + 1) & last;
        }
        slot
    }

    /// Returns the rank and token of a merge; [`NO_RANK`] if the pair has no merge.
    #[inline]
    fn merge(&self, first: u32, second: u32) -> (u32, u32) {
        let merge = &self.merges[self.slot((first, second))];
        (merge.rank, merge.token)
    }

    /// Appends the tokens of a word.
    pub(crate) fn encode(&self, word: &[u8], parts: &mut Parts, tokens: &mut Vec<u32>) {
        let of_byte = |byte: &u8| self.bytes[usize::from(*byte)];
        let parts = &mut parts.0;
        parts.clear();
        parts.reserve(word.len());
        for (index, byte) in word.iter().enumerate() {
            let token = of_byte(byte);
            let (rank, merged) = match word.get(index + 1) {
                Some(next) => self.merge(token, of_byte(next)),
                None => (NO_RANK, 0),
            };
            parts.push(Part { token, rank, merged, before: index.wrapping_sub(1), after: index + 1 });
        }
        if parts.len() <= SHORT {
            self.join_short(parts)
        } else {
            self.join_long(parts)
        }
        tokens.extend(parts.iter().map(|part| part.token));
    }

    fn join_short(&self, parts: &mut Vec<Part>) {
        while let Some((index, rank)) =
            parts.iter().map(|part| part.rank).enumerate().min_by_key(|(_, rank)| *rank)
            && rank != NO_RANK
        {
            let token = parts[index].merged;
            parts.remove(index + 1);
            parts[index].token = token;
            let merge = parts.get(index + 1).map_or((NO_RANK, 0), |next| self.merge(token, next.token));
            (parts[index].rank, parts[index].merged) = merge;
            if let Some(before) = index.checked_sub(1) {
                (parts[before].rank, parts[before].merged) = self.merge(parts[before].token, token);
            }
        }
    }

    fn join_long(&self, parts: &mut Vec<Part>) {
        let count = parts.len();
        let pairs = parts.iter().enumerate().filter(|(_, part)| part.rank != NO_RANK);
        let mut queue: BinaryHeap<_> = pairs.map(|(index, part)| Reverse((part.rank, index))).collect();
        while let Some(Reverse((rank, index))) = queue.pop() {
            // Skips stale entries: if the pair has changed since it was queued, its rank differs.
            if parts[index].rank != rank {
                continue;
            }
            let (token, joined) = (parts[index].merged, parts[index].after);
            let after = parts[joined].after;
            // A part that was merged into its predecessor no longer starts a pair.
            parts[joined].rank = NO_RANK;
            (parts[index].token, parts[index].after) = (token, after);
            if after < count {
                parts[after].before = index;
            }
            let before = parts[index].before;
            for (first, second) in [(index, after), (before, index)] {
                if first >= count {
                    continue;
                }
                let next = parts.get(second).map(|second| second.token);
                let (rank, merged) = next.map_or((NO_RANK, 0), |next| self.merge(parts[first].token, next));
                (parts[first].rank, parts[first].merged) = (rank, merged);
                if rank != NO_RANK {
                    queue.push(Reverse((rank, first)));
                }
            }
        }
        let mut index = 0;
        let mut kept = 0;
        while index < count {
            parts[kept] = parts[index];
            index = parts[kept].after;
            kept += 1;
        }
        parts.truncate(kept);
    }
}

/// Returns the byte that a character of GPT-2's alphabet represents.
///
/// Visible characters represent themselves. Characters from U+0100 up represent the remaining bytes in
/// order. Source: `bytes_to_unicode` of OpenAI's `encoder.py`.
pub(crate) fn byte_of(written: char) -> Option<u8> {
    let is_seen = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(written).checked_sub(0x100) {
        None => u8::try_from(u32::from(written)).ok().filter(is_seen),
        Some(index) => (0..=u8::MAX).filter(|byte| !is_seen(byte)).nth(index as usize),
    }
}
