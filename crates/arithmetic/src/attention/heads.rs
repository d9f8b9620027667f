//! Memory layout of a batch's heads.

use std::ops::Range;

use crate::simd::LANES;

/// Location of one row in a KV cache: `capacity` tokens starting at token `start`, head by head.
///
/// Rows in one memory need not be adjacent and may differ in capacity. Adjacent rows of equal capacity form
/// a tensor `(B, H, S, D)`.
///
/// ```
/// use candle_gpt2_arithmetic::KvSlot;
///
/// let slots = KvSlot::side_by_side(2, 19);
/// assert_eq!(slots[1], KvSlot { start: 32, capacity: 19 });
/// assert_eq!(slots[1].room(), 32);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// Index of the first token; a multiple of 16.
    pub start: usize,
    /// Maximum number of tokens in the slot.
    pub capacity: usize,
}

impl KvSlot {
    /// Returns the slots of `batch` consecutive rows.
    pub fn side_by_side(batch: usize, capacity: usize) -> Vec<Self> {
        let room = Self::room_of(capacity);
        (0..batch).map(|row| Self { start: row.saturating_mul(room), capacity }).collect()
    }

    /// Returns the size of a slot in tokens: its capacity rounded up to whole panels of 16.
    #[inline(always)]
    pub const fn room_of(capacity: usize) -> usize {
        match capacity.checked_next_multiple_of(LANES) {
            Some(room) => room,
            None => usize::MAX,
        }
    }

    /// Rounds `tokens` down to whole panels of 16.
    pub const fn whole_panels(tokens: usize) -> usize {
        tokens / LANES * LANES
    }

    /// Returns the size of this slot in tokens, including padding.
    #[inline(always)]
    pub const fn room(self) -> usize {
        Self::room_of(self.capacity)
    }

    /// Whether the slot is aligned and lies within a memory of `tokens` tokens.
    pub fn is_in(self, tokens: usize) -> bool {
        let end = self.start.checked_add(self.room());
        self.start.is_multiple_of(LANES) && end.is_some_and(|end| end <= tokens)
    }
}

/// View of selected heads and rows of a batch; each token's `D` values in a head are contiguous.
///
/// [`slot_attention`](crate::slot_attention) takes its queries in this form.
#[derive(Debug, Clone)]
pub struct Heads<'a> {
    values: &'a [f32],
    /// Memory location of each batch row.
    pub(super) rows: Vec<HeadsOfRow>,
    pub(super) heads: usize,
    /// Maximum number of tokens in a row.
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
    /// Distance between consecutive tokens, in values.
    token_stride: usize,
}

/// Memory location of one batch row's heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadsOfRow {
    start: usize,
    /// Distance between consecutive heads, in values.
    head_stride: usize,
    tokens: usize,
    /// Total number of tokens in the rows before this one.
    first: usize,
}

impl<'a> Heads<'a> {
    /// Views a tensor `(B, H, T, D)` given its sizes and the strides of its first three axes.
    ///
    /// The tensor begins with the first value, and the values of a token are contiguous.
    pub fn strided(values: &'a [f32], sizes: [usize; 4], strides: [usize; 3]) -> Self {
        let [batch, heads, tokens, head_dim] = sizes;
        let [batch_stride, head_stride, token_stride] = strides;
        let row = |row| HeadsOfRow { start: row * batch_stride, head_stride, tokens, first: row * tokens };
        Self { values, rows: (0..batch).map(row).collect(), heads, tokens, head_dim, token_stride }
    }

    /// Splits each row into consecutive rows of the given lengths.
    ///
    /// # Panics
    /// Panics if the lengths add up to more tokens than a row has.
    #[must_use]
    pub fn cut(mut self, lengths: &[usize]) -> Self {
        let tokens: usize = lengths.iter().sum();
        let mut rows = Vec::with_capacity(self.rows.len() * lengths.len());
        let mut first = 0;
        for row in &self.rows {
            assert!(
                tokens <= row.tokens,
                "rows of {lengths:?} tokens do not fit into a row of {} tokens",
                row.tokens
            );
            let mut start = row.start;
            for tokens in lengths {
                rows.push(HeadsOfRow { start, tokens: *tokens, first, ..*row });
                start += tokens * self.token_stride;
                first += tokens;
            }
        }
        self.tokens = lengths.iter().copied().max().unwrap_or(0);
        Self { rows, ..self }
    }

    /// Returns a view of one token in each row.
    #[cfg(test)]
    pub(super) fn token(&self, token: usize) -> Self {
        let row = |(index, row): (usize, &HeadsOfRow)| HeadsOfRow {
            start: row.start + token * self.token_stride,
            tokens: 1,
            first: index,
            ..*row
        };
        Self { rows: self.rows.iter().enumerate().map(row).collect(), tokens: 1, ..self.clone() }
    }

    /// Returns the number of tokens in a batch row.
    #[inline(always)]
    pub(super) fn tokens_of(&self, batch: usize) -> usize {
        self.rows[batch].tokens
    }

    /// Returns the total number of tokens in all rows.
    pub(super) fn all_tokens(&self) -> usize {
        self.rows.last().map_or(0, |row| row.first + row.tokens)
    }

    /// Returns the range of a row's tokens among the tokens of all rows.
    #[inline(always)]
    pub(super) fn tokens_in(&self, batch: usize) -> Range<usize> {
        let HeadsOfRow { first, tokens, .. } = self.rows[batch];
        first..first + tokens
    }

    /// Converts a token's index over all rows to a row and an index within that row.
    #[inline(always)]
    pub(super) fn place_of(&self, token: usize) -> (usize, usize) {
        // Hand-written binary search: a library call would not be compiled for this instruction set.
        let (mut batch, mut end) = (0, self.rows.len() - 1);
        while batch < end {
            let middle = (batch + end) / 2;
            let HeadsOfRow { first, tokens, .. } = self.rows[middle];
            if first + tokens <= token {
                batch = middle + 1;
            } else {
                end = middle;
            }
        }
        (batch, token - self.rows[batch].first)
    }

    /// Returns the number of values per token and head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns one head of a batch row.
    #[inline(always)]
    pub(super) fn head(&self, batch: usize, head: usize) -> Head<'a> {
        let HeadsOfRow { start, head_stride, tokens, .. } = self.rows[batch];
        Head {
            values: &self.values[start + head * head_stride..],
            tokens,
            head_dim: self.head_dim,
            token_stride: self.token_stride,
        }
    }
}

/// Values of a head, token by token.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    values: &'a [f32],
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
    token_stride: usize,
}

impl<'a> Head<'a> {
    #[inline(always)]
    pub(super) fn row(&self, token: usize) -> &'a [f32] {
        &self.values[token * self.token_stride..][..self.head_dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_bounds_are_checked() {
        let slots = KvSlot::side_by_side(2, 19);
        assert_eq!(slots, [KvSlot { start: 0, capacity: 19 }, KvSlot { start: 32, capacity: 19 }]);
        assert!(slots[1].is_in(64) && !slots[1].is_in(63));
        assert!(!KvSlot { start: 8, capacity: 3 }.is_in(64), "not at the start of a panel");
        for capacity in [usize::MAX, usize::MAX - 15] {
            assert!(!KvSlot { start: 16, capacity }.is_in(64));
        }
    }
}
