//! Which keys a query may see. The polarity of a mask is settled here and nowhere else.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::AttentionError;

/// Which keys each query may see.
///
/// Positions are absolute: with `past` tokens in the cache, query `i` is at position `past + i`, key `j` at `j`.
#[derive(Debug, Clone)]
pub enum AttentionMask {
    /// Every query sees every key.
    Bidirectional,
    /// A query sees the keys up to its own position.
    Causal,
    /// Texts of these lengths, of at least one token each, lie one after the other, queries and keys alike: a query sees the keys of
    /// its own text up to its own position. Only pairs of one text are computed, but for an observer, who is shown the weights of
    /// all pairs. Without a cache.
    CausalRows(Arc<[usize]>),
    /// A query sees the `before` keys before its position, its own, and the `after` keys after it.
    ///
    /// The restricted attention of "Attention Is All You Need" (section 4) with radius `r` is `Window { before: r, after: r }`; a causal sliding
    /// window has `after: 0`. Only the band is computed, so the cost is linear in the length, but for an observer, who is
    /// shown the weights of all pairs, and with a cache anywhere but on the CPU.
    Window {
        /// Visible keys before the query's position.
        before: usize,
        /// Visible keys after the query's position.
        after: usize,
    },
    /// This tensor is added to the scores, broadcast to `(B, H, T, S)`: 0 leaves a key visible, `-inf` hides it,
    /// anything else shifts its score. A row that hides every key yields NaN, as in PyTorch.
    Additive(Tensor),
}

/// Where the queries of a row are among its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowKeys {
    /// Position of the first query, counted from the first key.
    pub(crate) first_query: usize,
    /// Keys that belong to the row; those after belong to longer rows of the batch.
    pub(crate) key_count: usize,
}

impl RowKeys {
    /// Rows that held so many tokens before these queries, which are the last of their keys; without any, one row with all keys.
    pub(crate) fn of_rows(past_lengths: &[usize], query_len: usize, key_len: usize) -> Vec<Self> {
        if past_lengths.is_empty() {
            return vec![Self { first_query: 0, key_count: key_len }];
        }
        let row = |past: &usize| Self { first_query: *past, key_count: past.saturating_add(query_len) };
        past_lengths.iter().map(row).collect()
    }
}

impl AttentionMask {
    /// For each query the keys that it sees, which may be none: of `T` queries if all rows are alike, else of `B · T`.
    ///
    /// `rows` has one entry for each row of the batch, or a single one that holds for all.
    ///
    /// # Errors
    /// When the texts of [`AttentionMask::CausalRows`] are not those of the queries and keys.
    pub(crate) fn visible(
        &self,
        query_len: usize,
        key_len: usize,
        rows: &[RowKeys],
    ) -> Result<Vec<Range<usize>>> {
        let of_texts = match self {
            Self::CausalRows(lengths) => {
                let tokens = lengths.iter().sum();
                if [query_len, key_len] != [tokens; 2] {
                    return Err(AttentionError::Rows { tokens, queries: query_len, keys: key_len }.into());
                }
                keys_of_rows(lengths)
            }
            _ => Vec::new(),
        };
        let seen = |row: &RowKeys, query: usize| {
            let position = row.first_query + query;
            let Range { start, end } = match self {
                Self::Bidirectional | Self::Additive(_) => 0..key_len,
                Self::Causal => 0..position + 1,
                Self::CausalRows(_) => of_texts.get(position).cloned().unwrap_or(0..0),
                Self::Window { before, after } => {
                    position.saturating_sub(*before)..position.saturating_add(*after).saturating_add(1)
                }
            };
            let end = end.min(row.key_count).min(key_len);
            start.min(end)..end
        };
        let is_one = rows.windows(2).all(|pair| pair[0] == pair[1]);
        let rows = if is_one { &rows[..rows.len().min(1)] } else { rows };
        Ok(rows.iter().flat_map(|row| (0..query_len).map(move |query| seen(row, query))).collect())
    }

    /// What [`AttentionMask::visible`] gives, for each of the `B · T` queries; `None` if one sees nothing, or sees it with
    /// something added.
    pub(crate) fn seen_of_batch(
        &self,
        visible: &[Range<usize>],
        batch: usize,
        query_len: usize,
    ) -> Option<Vec<Range<usize>>> {
        let is_plain = self.added().is_none() && visible.iter().all(|seen| !seen.is_empty());
        let times = if visible.len() == query_len { batch } else { 1 };
        is_plain.then(|| std::iter::repeat_n(visible, times).flatten().cloned().collect())
    }

    /// What it adds to the scores.
    pub(crate) fn added(&self) -> Option<&Tensor> {
        match self {
            Self::Additive(added) => Some(added),
            _ => None,
        }
    }
}

/// The keys that each query of texts of these lengths sees.
fn keys_of_rows(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut first = 0;
    let of_row = lengths.iter().flat_map(|length| {
        let start = first;
        first += length;
        (start..first).map(move |query| start..query + 1)
    });
    of_row.collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// What is seen by rows that held `past` tokens before the queries, as with a cache.
    fn cached(mask: &AttentionMask, query_len: usize, key_len: usize, past: &[usize]) -> Vec<Range<usize>> {
        mask.visible(query_len, key_len, &RowKeys::of_rows(past, query_len, key_len)).unwrap()
    }

    #[test]
    fn causal_hides_the_future_at_any_offset() {
        assert_eq!(cached(&AttentionMask::Causal, 2, 2, &[0]), [0..1, 0..2]);
        assert_eq!(cached(&AttentionMask::Causal, 2, 3, &[1, 1]), [0..2, 0..3]);
    }

    #[test]
    fn rows_see_their_own_tokens_alone() {
        let mask = AttentionMask::CausalRows(Arc::new([2, 1]));
        assert_eq!(cached(&mask, 3, 3, &[0]), [0..1, 0..2, 2..3]);
        let all = [RowKeys { first_query: 0, key_count: 3 }];
        let refusal = mask.visible(2, 3, &all).unwrap_err().to_string();
        assert!(refusal.contains("texts of 3 tokens in all, found 2 queries and 3 keys"), "{refusal}");
    }

    #[test]
    fn window_keeps_its_band() {
        let mask = AttentionMask::Window { before: 1, after: 0 };
        assert_eq!(cached(&mask, 3, 3, &[0]), [0..1, 0..2, 1..3]);
        assert_eq!(cached(&mask, 4, 2, &[]), [0..1, 0..2, 1..2, 2..2], "a query after the keys sees none");
    }

    #[test]
    fn ragged_rows_hide_what_only_longer_rows_hold() {
        for mask in [AttentionMask::Causal, AttentionMask::Bidirectional] {
            assert_eq!(cached(&mask, 1, 3, &[1, 2]), [0..2, 0..3]);
            assert_eq!(mask.seen_of_batch(&[0..2, 0..3], 2, 1), Some(vec![0..2, 0..3]));
        }
    }

    #[test]
    fn a_mask_that_hides_nothing_is_one_row_for_all() {
        let visible = vec![0..4; 1];
        assert_eq!(cached(&AttentionMask::Bidirectional, 1, 4, &[3]), visible);
        assert_eq!(cached(&AttentionMask::Causal, 1, 4, &[3, 3]), visible, "a decode step of equal rows");
        assert_eq!(cached(&AttentionMask::Window { before: 3, after: usize::MAX }, 1, 4, &[3]), visible);
        assert_eq!(AttentionMask::Causal.seen_of_batch(&visible, 2, 1), Some(vec![0..4; 2]));
        let added = AttentionMask::Additive(Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap());
        assert_eq!(added.seen_of_batch(&visible, 2, 1), None);
    }
}
