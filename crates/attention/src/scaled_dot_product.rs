//! `softmax(scale · Q Kᵀ + mask) V`, and the choice of its implementation.
//!
//! ```text
//! KvMemory::attention      over a KV cache on a CPU, in f32, f16 and q8
//! heads_attention          without a cache, on a CPU: bit-identical to KvMemory::attention;
//!                          in training, on any device: with dropout and gradients
//! prefix_attention_on_gpu  on an NVIDIA GPU, if every query sees a prefix of the keys
//! attention_reference      all other cases, such as observers and other dtypes; the tests' reference
//! ```

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_kernels::{
    AttentionStage, HeadsAttention, WIDEST_SINGLE_QUERY, attention_reference, has_cpu_kernels,
    heads_attention, heads_of, is_without_gradients, prefix_attention_on_gpu,
};

use crate::error::expect_sizes;
use crate::mask::{AttentionMask, RowKeys};
use crate::pass::Pass;
use crate::{AttentionError, KvCache, SiteKind};

/// Head axis of a `(B, H, T, D)` tensor.
const HEAD_DIM: usize = 1;
/// Token axis of a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Scaled dot-product attention, with a scale for the scores and dropout on the weights.
///
/// Scores and softmax are computed in f32 or f64, independent of the dtype of queries and keys.
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
/// // The second token of the first head gets the mean of the first two values.
/// assert_eq!(context.get(0)?.get(0)?.get(1)?.to_vec1::<f32>()?, [2., 3., 4., 5.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ScaledDotProduct {
    /// Factor applied to `Q Kᵀ`, usually `1 / sqrt(D)`.
    ///
    /// With queries and keys of unit variance, the products have variance `D`, and the factor restores a
    /// variance of 1 ("Attention Is All You Need", arXiv:1706.03762, section 3.2.1).
    pub scale: f64,
    /// Dropout rate of the attention weights in training.
    pub dropout: f64,
}

impl ScaledDotProduct {
    /// Creates attention for heads of width `head_dim`: scale `1 / sqrt(head_dim)`, no dropout.
    pub fn new(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), dropout: 0.0 }
    }

    /// Computes attention of queries over keys and values.
    ///
    /// The pass's observer can see [`SiteKind::AttnScores`] and [`SiteKind::Pattern`].
    ///
    /// # Shapes
    /// `q` `(B, H, T, D)`, `k` `(B, H, S, D)`, `v` `(B, H, S, Dv)`; returns `(B, H, T, Dv)`. `past_lengths`
    /// has the number of tokens before these queries for each row, or is empty without a cache.
    ///
    /// # Errors
    /// If the shapes do not match, or a size is 0: a softmax over no keys is undefined.
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
            // Concatenates the heads of queries, keys and values, each to `(B, T, H · D)`.
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

    /// Appends the keys and values of new tokens to a cache and computes attention over the cache.
    ///
    /// The pass's observer can see [`SiteKind::AttnScores`] and [`SiteKind::Pattern`].
    ///
    /// # Shapes
    /// `q`, and the new `keys` and `values` `(B, H, T, D)`; returns `(B, H, T, D)`.
    ///
    /// # Errors
    /// If the shapes do not match the cache, a size is 0, a row would exceed its capacity, the pass is in
    /// training, or an input tracks gradients outside
    /// [`without_gradients`](candle_gpt2_kernels::without_gradients). The cache is then unchanged.
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
        expect_constant(q.track_op() || keys.track_op() || values.track_op())?;
        expect_some([q, keys, values])?;
        if matches!(mask, AttentionMask::CausalRows(_)) {
            return Err(AttentionError::PackedWithCache.into());
        }
        let past_lengths = cache.lengths().to_vec();
        cache.append(keys, values)?;
        let context = self.over_cache(q, mask, &past_lengths, cache, pass);
        or_restored(context, &past_lengths, cache)
    }

    /// Computes attention over a cache that already contains the queries' tokens.
    ///
    /// `past_lengths` has the number of tokens before them in each row.
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
        // The single-query kernel reads nothing beyond a row's own tokens, so ragged rows need no copy.
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

    /// Returns the heads' concatenated outputs, given projections as [`heads_attention`] takes them.
    ///
    /// With a cache, the projections belong to the new tokens.
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

    /// Computes [`Self::attend`] for packed rows, `(1, T_1 + … + T_B, n · H · D)`.
    ///
    /// Each packed row continues its row in the cache. Consecutive rows of equal length are
    /// computed together.
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

    /// Parameters for the attention functions of `candle-gpt2-kernels`.
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

    /// Whether [`heads_attention`] supports these tensors, without a cache.
    ///
    /// They must have one dtype, and no observer may want the weights.
    fn has_kernel(&self, tensors: &[&Tensor], visible: &[Range<usize>], pass: &Pass) -> bool {
        let dtype = tensors[0].dtype();
        let serves = |x: &&Tensor| x.dtype() == dtype && (has_cpu_kernels(x) || pass.is_training());
        let has_scale = self.scale > 0.0 && self.scale.is_finite();
        let sees = visible.iter().all(|seen| !seen.is_empty());
        has_scale && sees && !shows_weights(pass) && tensors.iter().all(serves)
    }

    /// Computes attention on an NVIDIA GPU; `None` if the kernels do not apply.
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

    /// Whether the attention weights have no dropout and are not observed.
    fn is_fused(&self, pass: &Pass) -> bool {
        let is_dropped = pass.is_training() && self.dropout > 0.0;
        !is_dropped && !shows_weights(pass)
    }
}

/// Rejects a cache if gradients would have to pass through it.
pub(crate) fn expect_constant(tracks_gradients: bool) -> Result<()> {
    if tracks_gradients && !is_without_gradients() {
        return Err(AttentionError::CacheWithGradients.into());
    }
    Ok(())
}

/// Rejects empty queries, keys and values, `(B, H, …, D)`.
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

/// Whether the observer wants intermediates that the fused kernels do not return.
fn shows_weights(pass: &Pass) -> bool {
    pass.wants(SiteKind::AttnScores) || pass.wants(SiteKind::Pattern)
}

/// Returns `result`; if it is an error, truncates the cached rows to their previous lengths.
fn or_restored<T>(result: Result<T>, past_lengths: &[usize], cache: &mut KvCache) -> Result<T> {
    if result.is_err() {
        for (row, kept) in past_lengths.iter().enumerate() {
            cache.truncate(row, *kept)?;
        }
    }
    result
}
