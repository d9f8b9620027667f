//! Where the heads of a batch have their values.

/// Room of one row in a memory `(N, H · D)`, which holds `N` tokens: `capacity` of them from token `start` on, laid out as
/// `(H, capacity, D)`.
///
/// So rows of one memory need not lie side by side or have the same room, and rows that do are a tensor `(B, H, S, D)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// The first token.
    pub start: usize,
    /// Tokens.
    pub capacity: usize,
}

impl KvSlot {
    /// The slots of `batch` rows side by side.
    pub fn side_by_side(batch: usize, capacity: usize) -> Vec<Self> {
        (0..batch).map(|row| Self { start: row * capacity, capacity }).collect()
    }

    /// Whether it lies in a memory for so many tokens.
    pub fn is_in(self, tokens: usize) -> bool {
        self.start.checked_add(self.capacity).is_some_and(|end| end <= tokens)
    }
}

/// Values of some heads of some rows of a batch, those of a token and head, `D`, in one piece.
#[derive(Debug, Clone)]
pub struct Heads<'a, E = f32> {
    pub(super) values: &'a [E],
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
}

impl<'a, E> Heads<'a, E> {
    /// Those of a tensor `(B, H, T, D)` that begins with the first value, by its sizes and the strides of the first three axes;
    /// the values of a token lie side by side.
    pub fn strided(values: &'a [E], sizes: [usize; 4], strides: [usize; 3]) -> Self {
        let [batch, heads, tokens, head_dim] = sizes;
        let [batch_stride, head_stride, token_stride] = strides;
        let row = |row| HeadsOfRow { start: row * batch_stride, head_stride, tokens };
        Self { values, rows: (0..batch).map(row).collect(), heads, tokens, head_dim, token_stride }
    }

    /// Those of rows that have slots in a memory `(N, H · D)`, of each row as many tokens as `tokens` says.
    pub fn in_slots(
        values: &'a [E],
        slots: &[KvSlot],
        (heads, head_dim): (usize, usize),
        tokens: impl Fn(usize) -> usize,
    ) -> Self {
        let row = |(row, slot): (usize, &KvSlot)| HeadsOfRow {
            start: slot.start * heads * head_dim,
            head_stride: slot.capacity * head_dim,
            tokens: tokens(row),
        };
        let rows: Vec<_> = slots.iter().enumerate().map(row).collect();
        let tokens = rows.iter().map(|row| row.tokens).max().unwrap_or(0);
        Self { values, rows, heads, tokens, head_dim, token_stride: head_dim }
    }

    /// The same places in other values.
    pub(super) fn with_values<'b, O>(&self, values: &'b [O]) -> Heads<'b, O> {
        let Self { heads, tokens, head_dim, token_stride, .. } = *self;
        Heads { values, rows: self.rows.clone(), heads, tokens, head_dim, token_stride }
    }

    /// Tokens of a row of the batch.
    pub(super) fn tokens_of(&self, batch: usize) -> usize {
        self.rows[batch].tokens
    }

    /// Values of a token and head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// One head of a row of the batch.
    #[inline(always)]
    pub(super) fn head(&self, batch: usize, head: usize) -> Head<'a, E> {
        let HeadsOfRow { start, head_stride, tokens } = self.rows[batch];
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
pub(super) struct Head<'a, E = f32> {
    values: &'a [E],
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
    token_stride: usize,
}

impl<'a, E> Head<'a, E> {
    #[inline(always)]
    pub(super) fn row(&self, token: usize) -> &'a [E] {
        &self.values[token * self.token_stride..][..self.head_dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_know_where_they_end() {
        assert_eq!(
            KvSlot::side_by_side(2, 3),
            [KvSlot { start: 0, capacity: 3 }, KvSlot { start: 3, capacity: 3 }]
        );
        let slot = KvSlot { start: 3, capacity: 3 };
        assert!(slot.is_in(6) && !slot.is_in(5));
        assert!(!KvSlot { start: 1, capacity: usize::MAX }.is_in(6));
    }
}
