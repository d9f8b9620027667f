//! Where the heads of a batch have their values.

use std::ops::Range;

use crate::simd::LANES;

/// Room of one row in a KV cache: `capacity` tokens from token `start` on, head by head.
///
/// So rows of one memory need not lie side by side or have the same room, and in a tensor rows that do are `(B, H, S, D)`.
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
    /// The first token, a multiple of 16.
    pub start: usize,
    /// Tokens.
    pub capacity: usize,
}

impl KvSlot {
    /// The slots of `batch` rows side by side.
    pub fn side_by_side(batch: usize, capacity: usize) -> Vec<Self> {
        let room = Self::room_of(capacity);
        (0..batch).map(|row| Self { start: row.saturating_mul(room), capacity }).collect()
    }

    /// Tokens of memory that a slot takes: whole panels of 16.
    #[inline(always)]
    pub const fn room_of(capacity: usize) -> usize {
        match capacity.checked_next_multiple_of(LANES) {
            Some(room) => room,
            None => usize::MAX,
        }
    }

    /// The largest room of so many tokens or fewer.
    pub const fn whole_panels(tokens: usize) -> usize {
        tokens / LANES * LANES
    }

    /// Tokens of memory that it takes.
    #[inline(always)]
    pub const fn room(self) -> usize {
        Self::room_of(self.capacity)
    }

    /// Whether it lies in a memory for so many tokens.
    pub fn is_in(self, tokens: usize) -> bool {
        let end = self.start.checked_add(self.room());
        self.start.is_multiple_of(LANES) && end.is_some_and(|end| end <= tokens)
    }
}

/// Values of some heads of some rows of a batch, those of a token and head, `D`, in one piece.
/// [`slot_attention`](crate::slot_attention) takes queries so.
#[derive(Debug, Clone)]
pub struct Heads<'a> {
    values: &'a [f32],
    /// One for each row of the batch.
    pub(super) rows: Vec<HeadsOfRow>,
    pub(super) heads: usize,
    /// Most tokens of a row.
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
    /// From one token to the next.
    token_stride: usize,
}

/// Where a row of a batch has its heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadsOfRow {
    start: usize,
    /// From one head to the next.
    head_stride: usize,
    tokens: usize,
    /// Tokens of the rows before it.
    first: usize,
}

impl<'a> Heads<'a> {
    /// Those of a tensor `(B, H, T, D)` that begins with the first value, by its sizes and the strides of the first three axes;
    /// the values of a token lie side by side.
    pub fn strided(values: &'a [f32], sizes: [usize; 4], strides: [usize; 3]) -> Self {
        let [batch, heads, tokens, head_dim] = sizes;
        let [batch_stride, head_stride, token_stride] = strides;
        let row = |row| HeadsOfRow { start: row * batch_stride, head_stride, tokens, first: row * tokens };
        Self { values, rows: (0..batch).map(row).collect(), heads, tokens, head_dim, token_stride }
    }

    /// The same with each row cut into rows of these lengths, which lie one after the other in it.
    ///
    /// # Panics
    /// When a row has fewer tokens.
    #[must_use]
    pub fn cut(mut self, lengths: &[usize]) -> Self {
        let tokens: usize = lengths.iter().sum();
        let mut rows = Vec::with_capacity(self.rows.len() * lengths.len());
        let mut first = 0;
        for row in &self.rows {
            assert!(tokens <= row.tokens, "rows of {lengths:?} in a row of {} tokens", row.tokens);
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

    /// One token of each row.
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

    /// Tokens of a row of the batch.
    #[inline(always)]
    pub(super) fn tokens_of(&self, batch: usize) -> usize {
        self.rows[batch].tokens
    }

    /// Tokens of all rows.
    pub(super) fn all_tokens(&self) -> usize {
        self.rows.last().map_or(0, |row| row.first + row.tokens)
    }

    /// The tokens of a row, counted over all rows.
    #[inline(always)]
    pub(super) fn tokens_in(&self, batch: usize) -> Range<usize> {
        let HeadsOfRow { first, tokens, .. } = self.rows[batch];
        first..first + tokens
    }

    /// The row of a token that is counted over all rows, and its place there.
    #[inline(always)]
    pub(super) fn place_of(&self, token: usize) -> (usize, usize) {
        // By hand: a function of the library would be a call out of the instruction set.
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

    /// Values of a token and head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// One head of a row of the batch.
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

/// The values of a head, token by token.
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
    fn slots_know_where_they_end() {
        let slots = KvSlot::side_by_side(2, 19);
        assert_eq!(slots, [KvSlot { start: 0, capacity: 19 }, KvSlot { start: 32, capacity: 19 }]);
        assert!(slots[1].is_in(64) && !slots[1].is_in(63));
        assert!(!KvSlot { start: 8, capacity: 3 }.is_in(64), "not where a panel begins");
        for capacity in [usize::MAX, usize::MAX - 15] {
            assert!(!KvSlot { start: 16, capacity }.is_in(64));
        }
    }
}
