//! Attention masks, which alone determine the keys that each query sees.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::AttentionError;

/// Attention mask: the keys that each query may see.
///
/// Positions are absolute: with `past` tokens in the cache, query `i` is at position `past + i` and key `j`
/// at position `j`.
#[derive(Debug, Clone)]
pub enum AttentionMask {
    /// Every query sees every key.
    Bidirectional,
    /// A query sees the keys up to its own position.
    Causal,
    /// Packed rows: a query sees the keys of its own row up to its own position.
    ///
    /// The rows have these lengths, at least one token each, and are packed one after another, in queries and
    /// keys alike. Only pairs within a row are computed, unless an observer wants the weights, which cover all
    /// pairs. This mask does not support a cache.
    CausalRows(Arc<[usize]>),
    /// A query sees `before` keys before its position, its own key, and `after` keys after it.
    ///
    /// The restricted attention of "Attention Is All You Need" (section 4) with radius `r` is `Window {
    /// before: r, after: r }`; a causal sliding window has `after: 0`.
    ///
    /// Only the band is computed, so the cost is linear in the length. The exceptions are an observer of the
    /// weights, which cover all pairs, and a cache on a device other than the CPU.
    Window {
        /// Number of visible keys before the query's position.
        before: usize,
        /// Number of visible keys after the query's position.
        after: usize,
    },
    /// Tensor added to the scores, broadcast to `(B, H, T, S)`.
    ///
    /// A value of 0 leaves a key visible, `-inf` hides it, and any other value shifts its score. A query whose
    /// keys are all at `-inf` gives NaN, as in PyTorch, and its NaN reaches the other queries of the next
    /// layer. Integers are rejected; [`AttentionMask::hiding`] converts them.
    Additive(Tensor),
}

/// Position of a row's queries among its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowKeys {
    /// Position of the first query, relative to the first key.
    pub(crate) first_query: usize,
    /// Number of keys that belong to the row; later keys belong to longer rows in the batch.
    pub(crate) key_count: usize,
}

impl RowKeys {
    /// Returns one entry for each past length; a row's queries are its last tokens.
    ///
    /// Without past lengths, one entry with all keys applies to all rows.
    pub(crate) fn of_rows(past_lengths: &[usize], query_len: usize, key_len: usize) -> Vec<Self> {
        if past_lengths.is_empty() {
            return vec![Self { first_query: 0, key_count: key_len }];
        }
        let row = |past: &usize| Self { first_query: *past, key_count: past.saturating_add(query_len) };
        past_lengths.iter().map(row).collect()
    }
}

impl AttentionMask {
    /// Converts an integer mask: 0 leaves a key visible, and any other value hides it.
    ///
    /// Masks in candle's examples and in PyTorch's `nn.MultiheadAttention` have this polarity. To invert a
    /// mask in which ones are visible, such as transformers' `attention_mask`, pass `mask.eq(0.)?`. Hidden keys
    /// get the lowest f32, as in transformers, so padding that sees only padding gives finite values.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_gpt2_attention::AttentionMask;
    ///
    /// let mask = AttentionMask::hiding(&Tensor::new(&[[0u8, 1], [0, 0]], &Device::Cpu)?)?;
    /// let AttentionMask::Additive(scores) = mask else { unreachable!() };
    /// assert_eq!(scores.to_vec2::<f32>()?, [[0., f32::MIN], [0., 0.]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Shapes
    /// `mask` broadcasts to `(B, H, T, S)`.
    ///
    /// # Errors
    /// If the mask is on a device that does not support its dtype.
    pub fn hiding(mask: &Tensor) -> Result<Self> {
        let hidden = Tensor::full(f32::MIN, mask.shape(), mask.device())?;
        mask.ne(0f64)?.where_cond(&hidden, &hidden.zeros_like()?).map(Self::Additive)
    }

    /// Returns each query's range of visible keys: `T` ranges if all rows are equal, else `B · T`.
    ///
    /// A range may be empty. `rows` has one entry for each row of the batch, or a single entry for all rows.
    ///
    /// # Errors
    /// If the lengths of [`AttentionMask::CausalRows`] do not add up to the number of queries and keys, or
    /// [`AttentionMask::Additive`] contains integers or does not broadcast to the scores.
    pub(crate) fn visible(
        &self,
        query_len: usize,
        key_len: usize,
        rows: &[RowKeys],
    ) -> Result<Vec<Range<usize>>> {
        let of_texts = match self {
            Self::CausalRows(lengths) => {
                let tokens = lengths.iter().copied().fold(0, usize::saturating_add);
                if [query_len, key_len] != [tokens; 2] {
                    return Err(AttentionError::Rows { tokens, queries: query_len, keys: key_len }.into());
                }
                keys_of_rows(lengths)
            }
            Self::Additive(added) if !added.dtype().is_float() => {
                return Err(AttentionError::MaskDType { found: added.dtype() }.into());
            }
            Self::Additive(added) if !broadcasts(added.dims(), [query_len, key_len]) => {
                let (queries, keys, found) = (query_len, key_len, added.dims().to_vec());
                return Err(AttentionError::MaskShape { queries, keys, found }.into());
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

    /// Expands the result of [`AttentionMask::visible`] to all `B · T` queries.
    ///
    /// Returns `None` if a query sees no key, or the mask adds to the scores.
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

    /// Tensor that the mask adds to the scores.
    pub(crate) fn added(&self) -> Option<&Tensor> {
        match self {
            Self::Additive(added) => Some(added),
            _ => None,
        }
    }
}

/// Whether a mask of this shape has at most four axes, the last two of which broadcast to `scores`.
fn broadcasts(shape: &[usize], scores: [usize; 2]) -> bool {
    shape.len() <= 4
        && shape.iter().rev().zip(scores.iter().rev()).all(|(axis, score)| [1, *score].contains(axis))
}

/// Returns the visible keys of each query, for packed rows of these lengths.
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

    /// Returns the visible keys of each query if the cached rows have `past` tokens.
    fn cached(mask: &AttentionMask, query_len: usize, key_len: usize, past: &[usize]) -> Vec<Range<usize>> {
        mask.visible(query_len, key_len, &RowKeys::of_rows(past, query_len, key_len)).unwrap()
    }

    #[test]
    fn causal_hides_the_future_at_any_offset() {
        assert_eq!(cached(&AttentionMask::Causal, 2, 2, &[0]), [0..1, 0..2]);
        assert_eq!(cached(&AttentionMask::Causal, 2, 3, &[1, 1]), [0..2, 0..3]);
    }

    #[test]
    fn packed_rows_see_only_their_own_tokens() {
        let mask = AttentionMask::CausalRows(Arc::new([2, 1]));
        assert_eq!(cached(&mask, 3, 3, &[0]), [0..1, 0..2, 2..3]);
        let all = [RowKeys { first_query: 0, key_count: 3 }];
        let error = mask.visible(2, 3, &all).unwrap_err().to_string();
        assert!(error.contains("3 tokens in total, but there are 2 queries and 3 keys"), "{error}");
    }

    #[test]
    fn integer_masks_are_rejected_until_converted() {
        let mask = Tensor::new(&[[0u8, 1], [0, 0]], &Device::Cpu).unwrap();
        let rows = RowKeys::of_rows(&[], 2, 2);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let mask = mask.to_dtype(dtype).unwrap();
            let error = AttentionMask::Additive(mask.clone()).visible(2, 2, &rows).unwrap_err();
            let expected = AttentionError::MaskDType { found: dtype };
            assert_eq!(candle_gpt2_kernels::carried(&error), Some(&expected));
            let hiding = AttentionMask::hiding(&mask).unwrap();
            assert_eq!(hiding.visible(2, 2, &rows).unwrap(), [0..2, 0..2]);
            let added = hiding.added().unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(added, [[0.0, f32::MIN], [0.0, 0.0]]);
        }
    }

    #[test]
    fn window_limits_the_visible_keys() {
        let mask = AttentionMask::Window { before: 1, after: 0 };
        assert_eq!(cached(&mask, 3, 3, &[0]), [0..1, 0..2, 1..3]);
        assert_eq!(cached(&mask, 4, 2, &[]), [0..1, 0..2, 1..2, 2..2], "a query past the keys sees no key");
    }

    #[test]
    fn ragged_rows_see_only_their_own_keys() {
        for mask in [AttentionMask::Causal, AttentionMask::Bidirectional] {
            assert_eq!(cached(&mask, 1, 3, &[1, 2]), [0..2, 0..3]);
            assert_eq!(mask.seen_of_batch(&[0..2, 0..3], 2, 1), Some(vec![0..2, 0..3]));
        }
    }

    #[test]
    fn mask_that_hides_nothing_has_a_single_row() {
        let visible = vec![0..4; 1];
        assert_eq!(cached(&AttentionMask::Bidirectional, 1, 4, &[3]), visible);
        assert_eq!(cached(&AttentionMask::Causal, 1, 4, &[3, 3]), visible, "a decode step of equal rows");
        assert_eq!(cached(&AttentionMask::Window { before: 3, after: usize::MAX }, 1, 4, &[3]), visible);
        assert_eq!(AttentionMask::Causal.seen_of_batch(&visible, 2, 1), Some(vec![0..4; 2]));
        let added = AttentionMask::Additive(Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap());
        assert_eq!(added.seen_of_batch(&visible, 2, 1), None);
    }
}
