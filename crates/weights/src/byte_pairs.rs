//! GPT-2's byte pair encoding of one word: the pair of neighbouring tokens whose merge has the lowest rank is joined, the first of
//! several, until none is left.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Words of at most this many bytes are searched through for the best pair; longer ones keep their pairs in order.
const SHORT: usize = 48;
/// A pair that no merge joins.
const NO_RANK: u32 = u32::MAX;

/// The merges of a vocabulary.
pub(crate) struct BytePairs {
    /// The token of each byte.
    bytes: [u32; 256],
    /// By hash, see [`Self::place`]: a table with empty slots.
    merges: Vec<Merge>,
}

#[derive(Debug, Clone, Copy)]
struct Merge {
    pair: (u32, u32),
    /// [`NO_RANK`] in an empty slot.
    rank: u32,
    token: u32,
}

/// Room for the making of a word.
#[derive(Debug, Default)]
pub(crate) struct Parts(Vec<Part>);

/// A token in the making of a word: the token, and the merge with the one after it.
#[derive(Debug, Clone, Copy)]
struct Part {
    token: u32,
    rank: u32,
    merged: u32,
    /// In long words, the neighbours' places; no place of the word if there is none.
    before: usize,
    after: usize,
}

impl BytePairs {
    /// The merges in their order, each with the token that it makes.
    pub(crate) fn new(bytes: [u32; 256], merges: impl ExactSizeIterator<Item = ((u32, u32), u32)>) -> Self {
        let empty = Merge { pair: (0, 0), rank: NO_RANK, token: 0 };
        // A quarter is taken at most, so that what is not there is soon known.
        let slots = (4 * merges.len()).next_power_of_two();
        let mut table = Self { bytes, merges: vec![empty; slots] };
        for (rank, (pair, token)) in (0..NO_RANK).zip(merges) {
            let place = table.place(pair);
            table.merges[place] = Merge { pair, rank, token };
        }
        table
    }

    /// Where the merge of a pair is, or would be.
    #[inline]
    fn place(&self, pair: (u32, u32)) -> usize {
        let key = u64::from(pair.0) << 32 | u64::from(pair.1);
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let last = self.merges.len() - 1;
        let mut place = (mixed >> 32) as usize & last;
        while self.merges[place].rank != NO_RANK && self.merges[place].pair != pair {
            place = (place + 1) & last;
        }
        place
    }

    /// Rank and token of a merge; [`NO_RANK`] if there is none.
    #[inline]
    fn merge(&self, first: u32, second: u32) -> (u32, u32) {
        let merge = &self.merges[self.place((first, second))];
        (merge.rank, merge.token)
    }

    /// Appends the tokens of a word.
    pub(crate) fn encode(&self, word: &[u8], parts: &mut Parts, tokens: &mut Vec<u32>) {
        let of_byte = |byte: &u8| self.bytes[usize::from(*byte)];
        let parts = &mut parts.0;
        parts.clear();
        parts.reserve(word.len());
        for (place, byte) in word.iter().enumerate() {
            let token = of_byte(byte);
            let (rank, merged) = match word.get(place + 1) {
                Some(next) => self.merge(token, of_byte(next)),
                None => (NO_RANK, 0),
            };
            parts.push(Part { token, rank, merged, before: place.wrapping_sub(1), after: place + 1 });
        }
        if parts.len() <= SHORT {
            self.join_short(parts)
        } else {
            self.join_long(parts)
        }
        tokens.extend(parts.iter().map(|part| part.token));
    }

    fn join_short(&self, parts: &mut Vec<Part>) {
        while let Some((place, rank)) =
            parts.iter().map(|part| part.rank).enumerate().min_by_key(|(_, rank)| *rank)
            && rank != NO_RANK
        {
            let token = parts[place].merged;
            parts.remove(place + 1);
            parts[place].token = token;
            let merge = parts.get(place + 1).map_or((NO_RANK, 0), |next| self.merge(token, next.token));
            (parts[place].rank, parts[place].merged) = merge;
            if let Some(before) = place.checked_sub(1) {
                (parts[before].rank, parts[before].merged) = self.merge(parts[before].token, token);
            }
        }
    }

    fn join_long(&self, parts: &mut Vec<Part>) {
        let count = parts.len();
        let pairs = parts.iter().enumerate().filter(|(_, part)| part.rank != NO_RANK);
        let mut queue: BinaryHeap<_> = pairs.map(|(place, part)| Reverse((part.rank, place))).collect();
        while let Some(Reverse((rank, place))) = queue.pop() {
            // The pair may have changed since it was queued; its rank would be another one.
            if parts[place].rank != rank {
                continue;
            }
            let (token, joined) = (parts[place].merged, parts[place].after);
            let after = parts[joined].after;
            // No pair begins at a part that is joined to the one before.
            parts[joined].rank = NO_RANK;
            (parts[place].token, parts[place].after) = (token, after);
            if after < count {
                parts[after].before = place;
            }
            let before = parts[place].before;
            for (first, second) in [(place, after), (before, place)] {
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
        let mut place = 0;
        let mut kept = 0;
        while place < count {
            parts[kept] = parts[place];
            place = parts[kept].after;
            kept += 1;
        }
        parts.truncate(kept);
    }
}

/// Byte that a character of GPT-2's alphabet stands for.
///
/// Visible characters stand for themselves; those from U+0100 stand for the remaining bytes in order. Source: `bytes_to_unicode` of OpenAI's `encoder.py`.
pub(crate) fn byte_of(written: char) -> Option<u8> {
    let is_seen = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(written).checked_sub(0x100) {
        None => u8::try_from(u32::from(written)).ok().filter(is_seen),
        Some(place) => (0..=u8::MAX).filter(|byte| !is_seen(byte)).nth(place as usize),
    }
}
