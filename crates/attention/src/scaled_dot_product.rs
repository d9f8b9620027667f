//! `softmax(scale · Q Kᵀ + mask) V`: the one place that chooses how attention is computed.
//!
//! ```text
//! KvMemory::attention      over a cache on a CPU, whatever type it holds
//! heads_attention          without a cache: on a CPU with the bits of the above; in training, with dropout and a way back, on any device
//! prefix_attention_on_gpu  on an NVIDIA GPU, if every query sees the first keys
//! attention_reference      everything else: for observers, in other types; the others are tested against it
//! ```

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_kernels::{
    AttentionStage, HeadsAttention, WIDEST_SINGLE_QUERY, attention_reference, has_cpu_kernels,
    heads_attention, heads_of, prefix_attention_on_gpu,
};

use crate::error::expect_sizes;
use crate::mask::{AttentionMask, RowKeys};
use crate::pass::Pass;
use crate::{AttentionError, KvCache, SiteKind};

/// Axis of the heads in a `(B, H, T, D)` tensor.
const HEAD_DIM: usize = 1;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// How the scores are formed: scale, and dropout on the weights. Scores and softmax are computed in f32 at least, whatever the
/// type of queries and keys.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::{AttentionMask, Pass, ScaledDotProduct};
///
/// let q = Tensor::zeros((1, 3, 5, 4), DType::F32, &Device::Cpu)?; // (B, H, T, D)
/// let v = Tensor::arange(0f32, 60., &Device::Cpu)?.reshape((1, 3, 5, 4))?;
/// let attention = ScaledDotProduct::new(4);
/// assert_eq!(attention.scale, 0.5);
/// let context = attention.forward(&q, &q, &v, &AttentionMask::Causal, &[], &mut Pass::inference())?;
/// // The second token of the first head: the mean of the first two values.
/// assert_eq!(context.get(0)?.get(0)?.get(1)?.to_vec1::<f32>()?, [2., 3., 4., 5.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ScaledDotProduct {
    /// Factor on `Q Kᵀ`, usually `1 / sqrt(D)`: with unit-variance queries and keys the products have variance `D`,
    /// and the factor brings it back to 1 ("Attention Is All You Need", arXiv:1706.03762, section 3.2.1).
    pub scale: f64,
    /// Dropout rate on the attention weights, in training.
    pub dropout: f64,
}

impl ScaledDotProduct {
    /// The usual form for heads of width `head_dim`: scale `1 / sqrt(head_dim)`, no dropout.
    pub fn new(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), dropout: 0.0 }
    }

    /// Attention of queries over keys and values.
    ///
    /// Shows [`SiteKind::AttnScores`] and [`SiteKind::Pattern`] to the observer of the pass.
    ///
    /// # Shapes
    /// `q` `(B, H, T, D)`, `k` `(B, H, S, D)`, `v` `(B, H, S, Dv)`; returns `(B, H, T, Dv)`. `past_lengths` has the
    /// tokens that each row held before these queries, or is empty without a cache.
    ///
    /// # Errors
    /// When the shapes do not fit together, or a size is 0: a softmax over no keys is not defined.
    pub fn forward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &AttentionMask,
        past_lengths: &[usize],
        pass: &mut Pass,
    ) -> Result<Tensor> {
        expect_some([q, k, v])?;
        let (batch, num_heads, query_len, _) = q.dims4()?;
        let rows = RowKeys::of_rows(past_lengths, query_len, k.dim(TOKEN_DIM)?);
        let visible = mask.visible(query_len, k.dim(TOKEN_DIM)?, &rows)?;
        if past_lengths.is_empty() && self.has_kernel(&[q, k, v], &visible, pass) {
            // Each `(B, T, H · D)`, the heads side by side.
            let side_by_side = |x: &Tensor| x.transpose(HEAD_DIM, TOKEN_DIM)?.flatten_from(TOKEN_DIM);
            let (q, k, v) = (side_by_side(q)?, side_by_side(k)?, side_by_side(v)?);
            let context = heads_attention(&[&q, &k, &v], self.of_heads(num_heads, visible, mask, pass)?)?;
            return context.reshape((batch, query_len, num_heads, ()))?.transpose(HEAD_DIM, TOKEN_DIM);
        }
        if let Some(context) = self.on_gpu([q, k, v], mask, &visible, pass)? {
            return Ok(context);
        }
        let attention = self.of_heads(num_heads, visible, mask, pass)?;
        if !shows_weights(pass) {
            return attention_reference([q, k, v], &attention, None);
        }
        let show = &mut |stage, value| {
            let kind = match stage {
                AttentionStage::Scores => SiteKind::AttnScores,
                AttentionStage::Weights => SiteKind::Pattern,
            };
            pass.show(kind, value)
        };
        attention_reference([q, k, v], &attention, Some(show))
    }

    /// Attention of the queries of new tokens over a cache, which gains their keys and values first.
    ///
    /// Shows [`SiteKind::AttnScores`] and [`SiteKind::Pattern`] to the observer of the pass.
    ///
    /// # Shapes
    /// `q`, and the new `keys` and `values` `(B, H, T, D)`; returns `(B, H, T, D)`.
    ///
    /// # Errors
    /// When the shapes are not those of the cache, a size is 0, a row has no room, or the pass is in training; the cache is then unchanged.
    pub fn forward_cached(
        &self,
        q: &Tensor,
        [keys, values]: [&Tensor; 2],
        mask: &AttentionMask,
        cache: &mut KvCache,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        if pass.is_training() {
            return Err(AttentionError::CacheInTraining.into());
        }
        expect_some([q, keys, values])?;
        if matches!(mask, AttentionMask::CausalRows(_)) {
            return Err(AttentionError::PackedWithCache.into());
        }
        let past_lengths = cache.lengths().to_vec();
        cache.append(keys, values)?;
        let context = self.over_cache(q, mask, &past_lengths, cache, pass);
        or_restored(context, &past_lengths, cache)
    }

    /// Attention over a cache that holds the tokens of the queries too, after `past_lengths` others in each row.
    fn over_cache(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        past_lengths: &[usize],
        cache: &KvCache,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let (batch, _, query_len, head_dim) = q.dims4()?;
        let key_len = cache.lengths().iter().copied().max().unwrap_or(0);
        let visible =
            mask.visible(query_len, key_len, &RowKeys::of_rows(past_lengths, query_len, key_len))?;
        let memory = cache.memory();
        let is_plain = q.dtype() == DType::F32 && q.device().is_cpu() && !q.track_op();
        if memory.has_kernel()
            && is_plain
            && self.is_fused(pass)
            && let Some(seen) = mask.seen_of_batch(&visible, batch, query_len)
        {
            return memory.attention(q, &cache.slots(), self.scale, &seen);
        }
        // The kernel for one query reads nothing after a row's own tokens, so rows of other lengths are not copied for it.
        if query_len == 1
            && head_dim <= WIDEST_SINGLE_QUERY
            && let Some([keys, values]) = cache.views()?
            && let Some(context) = self.on_gpu([q, &keys, &values], mask, &visible, pass)?
        {
            return Ok(context);
        }
        let [keys, values] = cache.tensors()?;
        self.forward(q, &keys, &values, mask, past_lengths, pass)
    }

    /// What the heads say, side by side, from queries, keys and values as [`heads_attention`] takes them; with a cache, from
    /// those of the new tokens.
    ///
    /// # Shapes
    /// Returns `(B, T, H · D)`.
    pub(crate) fn attend(
        &self,
        projections: &[Tensor],
        num_heads: usize,
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let tensors: Vec<&Tensor> = projections.iter().collect();
        if let (None, Some(first), Some(last)) = (&cache, projections.first(), projections.last()) {
            let [(batch, query_len, _), (_, key_len, _)] = [first.dims3()?, last.dims3()?];
            expect_sizes(&[
                ("number of rows", batch),
                ("number of queries", query_len),
                ("number of keys", key_len),
            ])?;
            let visible = mask.visible(query_len, key_len, &RowKeys::of_rows(&[], query_len, key_len))?;
            if self.has_kernel(&tensors, &visible, pass) {
                return heads_attention(&tensors, self.of_heads(num_heads, visible, mask, pass)?);
            }
        }
        let [q, k, v] = heads_of(&tensors, num_heads)?;
        let context = match cache {
            Some(cache) => self.forward_cached(&q, [&k, &v], mask, cache, pass)?,
            None => self.forward(&q, &k, &v, mask, &[], pass)?,
        }; // (B, H, T, D)
        context.transpose(HEAD_DIM, TOKEN_DIM)?.flatten_from(TOKEN_DIM)
    }

    /// The same of rows of different lengths, `(1, T_1 + … + T_B, n · H · D)`, each over its own row of the cache. Neighbours of one
    /// length are computed together.
    pub(crate) fn attend_rows(
        &self,
        projections: &[Tensor],
        num_heads: usize,
        (lengths, mask): (&[usize], &AttentionMask),
        cache: &mut KvCache,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        match mask {
            AttentionMask::Causal => (),
            AttentionMask::CausalRows(rows) if **rows == *lengths => (),
            _ => return Err(AttentionError::RowsMask.into()),
        }
        let tokens = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
        if let Some(projection) = projections.first()
            && [projection.dim(0)?, projection.dim(1)?] != [1, tokens]
        {
            let found = projection.dim(0)? * projection.dim(1)?;
            return Err(AttentionError::Rows { tokens, queries: found, keys: found }.into());
        }
        let (rows, found) = (cache.lengths().len(), lengths.len());
        if found != rows {
            return Err(AttentionError::CacheRows { rows, found }.into());
        }
        let past_lengths = cache.lengths().to_vec();
        let contexts = self.contexts_of_rows(projections, num_heads, lengths, cache, pass);
        Tensor::cat(&or_restored(contexts, &past_lengths, cache)?, 1)
    }

    fn contexts_of_rows(
        &self,
        projections: &[Tensor],
        num_heads: usize,
        lengths: &[usize],
        cache: &mut KvCache,
        pass: &mut Pass,
    ) -> Result<Vec<Tensor>> {
        let (mut contexts, mut first_row, mut first_token) = (Vec::new(), 0, 0);
        for alike in lengths.chunk_by(|a, b| a == b) {
            let (batch, length) = (alike.len(), alike[0]);
            let of_rows = |x: &Tensor| {
                let tokens = x.narrow(1, first_token, batch * length)?;
                tokens.reshape((batch, length, x.dim(D::Minus1)?))
            };
            let projections = projections.iter().map(of_rows).collect::<Result<Vec<_>>>()?;
            let context = cache.with_rows(first_row..first_row + batch, |cache| {
                self.attend(&projections, num_heads, &AttentionMask::Causal, Some(cache), pass)
            })?;
            contexts.push(context.reshape((1, batch * length, ()))?);
            (first_row, first_token) = (first_row + batch, first_token + batch * length);
        }
        Ok(contexts)
    }

    /// The description that kernels take.
    fn of_heads(
        &self,
        heads: usize,
        visible: Vec<Range<usize>>,
        mask: &AttentionMask,
        pass: &mut Pass,
    ) -> Result<HeadsAttention> {
        let (added, dropout) = (mask.added().cloned(), pass.attention_dropout(self.dropout)?);
        Ok(HeadsAttention { heads, scale: self.scale, visible, added, dropout })
    }

    /// Whether [`heads_attention`] can serve tensors without a cache: they have one type, and no observer wants the weights.
    fn has_kernel(&self, tensors: &[&Tensor], visible: &[Range<usize>], pass: &Pass) -> bool {
        let dtype = tensors[0].dtype();
        let serves = |x: &&Tensor| x.dtype() == dtype && (has_cpu_kernels(x) || pass.is_training());
        let has_scale = self.scale > 0.0 && self.scale.is_finite();
        let sees = visible.iter().all(|seen| !seen.is_empty());
        has_scale && sees && !shows_weights(pass) && tensors.iter().all(serves)
    }

    /// What the kernels of a GPU give, if they are there for it.
    fn on_gpu(
        &self,
        [q, k, v]: [&Tensor; 3],
        mask: &AttentionMask,
        visible: &[Range<usize>],
        pass: &Pass,
    ) -> Result<Option<Tensor>> {
        if !q.device().is_cuda() || !self.is_fused(pass) {
            return Ok(None);
        }
        let (batch, _, query_len, _) = q.dims4()?;
        let first_keys = |seen: &Range<usize>| (seen.start == 0).then_some(seen.end);
        let seen = mask.seen_of_batch(visible, batch, query_len);
        match seen.and_then(|seen| seen.iter().map(first_keys).collect::<Option<Vec<_>>>()) {
            Some(seen) => prefix_attention_on_gpu(q, k, v, self.scale, &seen),
            None => Ok(None),
        }
    }

    /// Whether no weight is dropped and none is observed.
    fn is_fused(&self, pass: &Pass) -> bool {
        let is_dropped = pass.is_training() && self.dropout > 0.0;
        !is_dropped && !shows_weights(pass)
    }
}

/// Refuses queries, keys and values `(B, H, …, D)` of which there are none.
fn expect_some([q, k, v]: [&Tensor; 3]) -> Result<()> {
    let (batch, num_heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, _) = k.dims4()?;
    let (_, _, _, value_dim) = v.dims4()?;
    expect_sizes(&[
        ("number of rows", batch),
        ("number of heads", num_heads),
        ("number of queries", query_len),
        ("number of keys", key_len),
        ("width of a head", head_dim),
        ("width of a value", value_dim),
    ])
}

/// Whether the observer wants what the fused kernels do not return.
fn shows_weights(pass: &Pass) -> bool {
    pass.wants(SiteKind::AttnScores) || pass.wants(SiteKind::Pattern)
}

/// The result; after an error the cache holds no more tokens than before.
fn or_restored<T>(result: Result<T>, past_lengths: &[usize], cache: &mut KvCache) -> Result<T> {
    if result.is_err() {
        for (row, kept) in past_lengths.iter().enumerate() {
            cache.truncate(row, *kept)?;
        }
    }
    result
}
