//! Which keys a query may see. The polarity of a mask is settled here and nowhere else.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

/// Which keys each query may see.
///
/// Positions are absolute: with `past` tokens in the cache, query `i` stands at position `past + i`, key `j` at `j`.
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

/// Where the queries of a row stand among its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowKeys {
    /// Position of the first query, counted from the first key.
    pub(crate) first_query: usize,
    /// Keys that belong to the row; those after belong to longer rows of the batch.
    pub(crate) key_count: usize,
}

impl AttentionMask {
    /// For each query of each row of the batch the number of keys that it sees, where these are the first ones and at least
    /// one; `None` where they are others.
    ///
    /// `rows` is as in [`AttentionMask::additive`].
    pub(crate) fn visible_prefixes(
        &self,
        batch: usize,
        query_len: usize,
        key_len: usize,
        rows: &[RowKeys],
    ) -> Option<Vec<usize>> {
        let seen = |row: &RowKeys, query: usize| match self {
            Self::Bidirectional => Some(row.key_count.min(key_len)),
            Self::Causal => Some((row.first_query + query + 1).min(row.key_count).min(key_len)),
            Self::CausalRows(_) | Self::Window { .. } | Self::Additive(_) => None,
        };
        let row_of = |index: usize| rows.get(index).or(rows.first());
        let queries = (0..batch).flat_map(|row| (0..query_len).map(move |query| (row, query)));
        queries.map(|(row, query)| seen(row_of(row)?, query).filter(|keys| *keys > 0)).collect()
    }

    /// For each query of each row of the batch the keys that it sees, where they lie side by side and are at least one; `None`
    /// where they do not.
    ///
    /// `rows` is as in [`AttentionMask::additive`].
    pub(crate) fn visible_keys(
        &self,
        batch: usize,
        query_len: usize,
        key_len: usize,
        rows: &[RowKeys],
    ) -> Option<Vec<Range<usize>>> {
        if let Self::CausalRows(lengths) = self {
            let tokens: usize = lengths.iter().sum();
            let is_all = lengths.iter().all(|length| *length > 0) && (tokens, tokens) == (query_len, key_len);
            return is_all.then(|| keys_of_rows(lengths));
        }
        let Self::Window { before, after } = self else {
            let prefixes = self.visible_prefixes(batch, query_len, key_len, rows)?;
            return Some(prefixes.into_iter().map(|keys| 0..keys).collect());
        };
        let seen = |row: &RowKeys, query: usize| {
            let position = row.first_query + query;
            let end = position.saturating_add(*after).saturating_add(1).min(row.key_count).min(key_len);
            position.saturating_sub(*before)..end
        };
        let row_of = |index: usize| rows.get(index).or(rows.first());
        let queries = (0..batch).flat_map(|row| (0..query_len).map(move |query| (row, query)));
        queries.map(|(row, query)| Some(seen(row_of(row)?, query)).filter(|keys| !keys.is_empty())).collect()
    }

    /// The same rule as a tensor to add to scores of shape `(B, H, T, S)`; `None` where it hides nothing.
    ///
    /// `rows` has one entry for each row of the batch, or a single one that holds for all.
    pub(crate) fn additive(
        &self,
        query_len: usize,
        key_len: usize,
        rows: &[RowKeys],
        device: &Device,
    ) -> Result<Option<Tensor>> {
        // One row of the mask serves the whole batch where all rows stand alike.
        let uniform = rows.windows(2).all(|pair| pair[0] == pair[1]);
        let rows = if uniform { &rows[..rows.len().min(1)] } else { rows };
        let of_rows = match self {
            Self::CausalRows(lengths) => keys_of_rows(lengths),
            _ => Vec::new(),
        };
        let visible = |row: &RowKeys, query: usize| {
            let position = row.first_query + query;
            let (start, end) = match self {
                Self::CausalRows(_) => of_rows.get(position).map_or((0, 0), |keys| (keys.start, keys.end)),
                Self::Bidirectional | Self::Additive(_) => (0, key_len),
                Self::Causal => (0, position + 1),
                Self::Window { before, after } => {
                    (position.saturating_sub(*before), position.saturating_add(*after).saturating_add(1))
                }
            };
            (start, end.min(row.key_count).min(key_len))
        };
        let ranges: Vec<_> =
            rows.iter().flat_map(|row| (0..query_len).map(move |query| visible(row, query))).collect();
        let positional = if ranges.iter().all(|range| *range == (0, key_len)) {
            None
        } else {
            let mut scores = vec![f32::NEG_INFINITY; ranges.len() * key_len];
            for (row, (start, end)) in scores.chunks_mut(key_len).zip(ranges) {
                if start < end {
                    row[start..end].fill(0.0);
                }
            }
            Some(Tensor::from_vec(scores, (rows.len(), 1, query_len, key_len), device)?)
        };
        match (self, positional) {
            (Self::Additive(given), Some(positional)) => {
                Ok(Some(positional.broadcast_add(&given.to_dtype(positional.dtype())?)?))
            }
            (Self::Additive(given), None) => Ok(Some(given.clone())),
            (_, positional) => Ok(positional),
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
    use super::*;

    const HIDDEN: f32 = f32::NEG_INFINITY;

    /// The mask for rows that held `past` tokens before the queries, as with a cache.
    fn cached(
        mask: &AttentionMask,
        query_len: usize,
        key_len: usize,
        past: &[usize],
    ) -> Option<Vec<Vec<f32>>> {
        let row = |past: &usize| RowKeys { first_query: *past, key_count: past + query_len };
        let rows: Vec<_> = past.iter().map(row).collect();
        let tensor = mask.additive(query_len, key_len, &rows, &Device::Cpu).unwrap()?;
        Some(tensor.reshape(((), key_len)).unwrap().to_vec2().unwrap())
    }

    #[test]
    fn causal_hides_the_future_at_any_offset() {
        let start = cached(&AttentionMask::Causal, 2, 2, &[0]).expect("a mask");
        assert_eq!(start, [[0.0, HIDDEN], [0.0, 0.0]]);
        let later = cached(&AttentionMask::Causal, 2, 3, &[1, 1]).expect("a mask");
        assert_eq!(later, [[0.0, 0.0, HIDDEN], [0.0, 0.0, 0.0]]);
    }

    #[test]
    fn rows_see_their_own_tokens_alone() {
        let mask = AttentionMask::CausalRows(Arc::new([2, 1]));
        let rows = cached(&mask, 3, 3, &[0]).expect("a mask");
        assert_eq!(rows, [[0.0, HIDDEN, HIDDEN], [0.0, 0.0, HIDDEN], [HIDDEN, HIDDEN, 0.0]]);
        let all = [RowKeys { first_query: 0, key_count: 3 }];
        assert_eq!(mask.visible_keys(1, 3, 3, &all), Some(vec![0..1, 0..2, 2..3]));
        assert_eq!(mask.visible_keys(1, 2, 3, &all), None, "queries that are not all there");
    }

    #[test]
    fn window_keeps_its_band() {
        let mask = AttentionMask::Window { before: 1, after: 0 };
        let band = cached(&mask, 3, 3, &[0]).expect("a mask");
        assert_eq!(band, [[0.0, HIDDEN, HIDDEN], [0.0, 0.0, HIDDEN], [HIDDEN, 0.0, 0.0]]);
    }

    #[test]
    fn ragged_rows_hide_what_only_longer_rows_hold() {
        let expected = vec![vec![0.0, 0.0, HIDDEN], vec![0.0, 0.0, 0.0]];
        assert_eq!(cached(&AttentionMask::Causal, 1, 3, &[1, 2]), Some(expected.clone()));
        assert_eq!(cached(&AttentionMask::Bidirectional, 1, 3, &[1, 2]), Some(expected));
    }

    #[test]
    fn a_mask_that_hides_nothing_is_no_mask() {
        assert_eq!(cached(&AttentionMask::Bidirectional, 1, 4, &[3]), None);
        assert_eq!(cached(&AttentionMask::Causal, 1, 4, &[3, 3]), None, "a decode step of equal rows");
        assert_eq!(cached(&AttentionMask::Window { before: 3, after: usize::MAX }, 1, 4, &[3]), None);
    }
}
