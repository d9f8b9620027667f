//! `softmax(scale · Q Kᵀ + mask) V`: the one place where attention itself is computed.
//!
//! Where nobody looks at the weights, a CPU has two kernels: one over caches in any type, and one over projections, with dropout,
//! masks that are added, and a way back; training on other devices takes the composition that is tested against the latter, which
//! draws the same dropout. Elsewhere a window without a cache goes block by block along the band, so its cost grows with `T · (before + after)` and not
//! with `T · S`, and rows that lie in one text one by one. Everything else takes the dense products below, which are the reference of all.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_kernels::{
    HeadsAttention, WIDEST_SINGLE_QUERY, has_cpu_kernels, heads_attention, prefix_attention_on_gpu, softmax,
};

use crate::error::expect_sizes;
use crate::mask::{AttentionMask, RowKeys};
use crate::pass::Pass;
use crate::{KvCache, SiteKind};

/// Axis of the heads in a `(B, H, T, D)` tensor.
const HEAD_DIM: usize = 1;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;
/// Fewest queries in a block of the band: smaller products cost more in calls than they save in arithmetic.
const MIN_BAND_BLOCK: usize = 32;

/// How the scores are formed: scale, and dropout on the weights. Scores and softmax are computed in f32 at least, whatever the
/// type of queries and keys: in f16 they could leave its range, in bf16 they would be 2^-9 of themselves off.
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
        let (batch, num_heads, query_len, _) = q.dims4()?;
        let key_len = k.dim(TOKEN_DIM)?;
        expect_some([q, k, v])?;
        let row = |past: &usize| RowKeys { first_query: *past, key_count: past + query_len };
        let mut rows: Vec<_> = past_lengths.iter().map(row).collect();
        if rows.is_empty() {
            rows.push(RowKeys { first_query: 0, key_count: key_len });
        }
        if past_lengths.is_empty()
            && let Some(visible) = self.seen_by_kernel(&[q, k, v], mask, (query_len, key_len), pass)
        {
            // Each `(B, T, H · D)`, the heads side by side.
            let side_by_side = |x: &Tensor| x.transpose(HEAD_DIM, TOKEN_DIM)?.flatten_from(TOKEN_DIM);
            let (q, k, v) = (side_by_side(q)?, side_by_side(k)?, side_by_side(v)?);
            let context = self.of_projections(&[q, k, v], num_heads, visible, mask, pass)?;
            return context.reshape((batch, query_len, num_heads, ()))?.transpose(HEAD_DIM, TOKEN_DIM);
        }
        if self.is_fused_on_gpu(q, pass)
            && let Some(visible) = mask.visible_prefixes(batch, query_len, key_len, &rows)
            && let Some(context) = prefix_attention_on_gpu(q, k, v, self.scale, &visible)?
        {
            return Ok(context);
        }
        if let AttentionMask::CausalRows(lengths) = mask
            && !shows_weights(pass)
        {
            return self.row_by_row([q, k, v], lengths, pass);
        }
        if let AttentionMask::Window { before, after } = mask
            && past_lengths.is_empty()
            && !shows_weights(pass)
            && before.saturating_add(*after) < key_len
        {
            return self.band(&q.contiguous()?, &k.contiguous()?, v, mask, (*before, *after), pass);
        }
        let additive = mask.additive(query_len, key_len, &rows, q.device())?;
        self.dense(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, additive.as_ref(), pass)
    }

    /// Attention of the queries of new tokens over a cache, which gains their keys and values first.
    ///
    /// Shows [`SiteKind::AttnScores`] and [`SiteKind::Pattern`] to the observer of the pass.
    ///
    /// # Shapes
    /// `q`, and the new `keys` and `values` `(B, H, T, D)`; returns `(B, H, T, D)`.
    ///
    /// # Errors
    /// When the shapes are not those of the cache, a size is 0, or a row has no room; the cache is then unchanged.
    pub fn forward_cached(
        &self,
        q: &Tensor,
        [keys, values]: [&Tensor; 2],
        mask: &AttentionMask,
        cache: &mut KvCache,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let past_lengths = cache.lengths().to_vec();
        expect_some([q, keys, values])?;
        cache.append(keys, values)?;
        let (batch, _, query_len, head_dim) = q.dims4()?;
        let key_len = cache.lengths().iter().copied().max().unwrap_or(0);
        let row = |past: &usize| RowKeys { first_query: *past, key_count: past + query_len };
        let rows: Vec<_> = past_lengths.iter().map(row).collect();
        let memory = cache.memory();
        if memory.has_kernel()
            && self.is_fused(q, pass)
            && let Some(visible) = mask.visible_keys(batch, query_len, key_len, &rows)
        {
            return memory.attention(q, &cache.slots(), self.scale, &visible);
        }
        // The kernel for one query reads nothing after a row's own tokens, so rows of other lengths are not copied for it.
        if query_len == 1
            && head_dim <= WIDEST_SINGLE_QUERY
            && self.is_fused_on_gpu(q, pass)
            && let Some([keys, values]) = cache.views()?
            && let Some(visible) = mask.visible_prefixes(batch, query_len, key_len, &rows)
            && let Some(context) = prefix_attention_on_gpu(q, &keys, &values, self.scale, &visible)?
        {
            return Ok(context);
        }
        let [keys, values] = cache.tensors()?;
        self.forward(q, &keys, &values, mask, &past_lengths, pass)
    }

    /// What the heads say, side by side, where it is computed from the projections as they are: by the CPU's kernel, and in
    /// training.
    ///
    /// # Shapes
    /// `projections` as [`heads_attention`] takes them; returns `(B, T, H · D)`.
    pub(crate) fn forward_projected(
        &self,
        projections: &[Tensor],
        num_heads: usize,
        mask: &AttentionMask,
        pass: &mut Pass,
    ) -> Result<Option<Tensor>> {
        let tensors: Vec<&Tensor> = projections.iter().collect();
        let [Some(first), Some(last)] = [tensors.first(), tensors.last()] else { return Ok(None) };
        let lengths = (first.dim(1)?, last.dim(1)?);
        expect_sizes(&[
            ("number of rows", first.dim(0)?),
            ("number of queries", lengths.0),
            ("number of keys", lengths.1),
        ])?;
        let Some(visible) = self.seen_by_kernel(&tensors, mask, lengths, pass) else { return Ok(None) };
        self.of_projections(projections, num_heads, visible, mask, pass).map(Some)
    }

    fn of_projections(
        &self,
        projections: &[Tensor],
        num_heads: usize,
        visible: Vec<Range<usize>>,
        mask: &AttentionMask,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let added = match mask {
            AttentionMask::Additive(added) => Some(added.clone()),
            _ => None,
        };
        let dropout = pass.attention_dropout(self.dropout)?;
        let attention = HeadsAttention { heads: num_heads, scale: self.scale, visible, added, dropout };
        heads_attention(&projections.iter().collect::<Vec<_>>(), attention)
    }

    /// For each query the keys that it sees, where the CPU's kernel without a cache computes the same, or in training its
    /// composition: tensors of one type, and nobody who looks.
    fn seen_by_kernel(
        &self,
        tensors: &[&Tensor],
        mask: &AttentionMask,
        (query_len, key_len): (usize, usize),
        pass: &Pass,
    ) -> Option<Vec<Range<usize>>> {
        let dtype = tensors[0].dtype();
        let serves = |x: &&Tensor| x.dtype() == dtype && (has_cpu_kernels(x) || pass.is_training());
        let has_scale = self.scale > 0.0 && self.scale.is_finite();
        if !tensors.iter().all(serves) || !has_scale || shows_weights(pass) {
            return None;
        }
        match mask {
            AttentionMask::Additive(added) if added.track_op() || key_len == 0 => None,
            AttentionMask::Additive(_) => Some(vec![0..key_len; query_len]),
            _ => mask.visible_keys(1, query_len, key_len, &[RowKeys { first_query: 0, key_count: key_len }]),
        }
    }

    /// Whether the CPU's kernel over a cache computes the same: f32 on the CPU, no gradient, no dropout, nobody who looks.
    fn is_fused(&self, q: &Tensor, pass: &Pass) -> bool {
        let is_dropped = pass.is_training() && self.dropout > 0.0;
        !is_dropped && !shows_weights(pass) && is_plain(q)
    }

    /// Whether a GPU's kernels may compute it: no dropout, nobody who looks.
    fn is_fused_on_gpu(&self, q: &Tensor, pass: &Pass) -> bool {
        let is_dropped = pass.is_training() && self.dropout > 0.0;
        q.device().is_cuda() && !is_dropped && !shows_weights(pass)
    }

    /// All queries against all keys, with `additive` `(B|1, H|1, T, S)` added to the scores.
    fn dense(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        additive: Option<&Tensor>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let dtype = q.dtype();
        let v = &v.to_dtype(dtype)?;
        let score_dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let (q, k) = (q.to_dtype(score_dtype)?, k.to_dtype(score_dtype)?);
        let mut scores = (q.matmul(&k.t()?)? * self.scale)?; // (B, H, T, S)
        if let Some(additive) = additive {
            scores = scores.broadcast_add(&additive.to_dtype(scores.dtype())?)?;
        }
        let scores = pass.show(SiteKind::AttnScores, scores)?;
        let weights = softmax(&scores, D::Minus1)?.to_dtype(dtype)?;
        let weights = pass.show(SiteKind::Pattern, weights)?;
        pass.dropout(weights, self.dropout)?.matmul(v)
    }

    /// The rows of one text, each by itself.
    fn row_by_row(&self, [q, k, v]: [&Tensor; 3], lengths: &[usize], pass: &mut Pass) -> Result<Tensor> {
        let mut first = 0;
        let mut outputs = Vec::with_capacity(lengths.len());
        for length in lengths {
            let [q, k, v] = [q, k, v].map(|x| x.narrow(TOKEN_DIM, first, *length));
            outputs.push(self.forward(&q?, &k?, &v?, &AttentionMask::Causal, &[], pass)?);
            first += length;
        }
        Tensor::cat(&outputs, TOKEN_DIM)
    }

    /// The band of a window: blocks of queries, each against the keys that any of them may see.
    fn band(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &AttentionMask,
        (before, after): (usize, usize),
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let (query_len, key_len) = (q.dim(TOKEN_DIM)?, k.dim(TOKEN_DIM)?);
        let block = (before + after).max(MIN_BAND_BLOCK);
        let mut outputs = Vec::with_capacity(query_len.div_ceil(block));
        for first_query in (0..query_len).step_by(block) {
            let queries = block.min(query_len - first_query);
            // Queries after the last key keep one key, which the mask hides, as the dense path would.
            let first_key = first_query.saturating_sub(before).min(key_len - 1);
            let end_key = (first_query + queries + after).min(key_len);
            let keys = end_key.max(first_key + 1) - first_key;
            let row = RowKeys { first_query: first_query - first_key, key_count: keys };
            let additive = mask.additive(queries, keys, &[row], q.device())?;
            outputs.push(self.dense(
                &q.narrow(TOKEN_DIM, first_query, queries)?.contiguous()?,
                &k.narrow(TOKEN_DIM, first_key, keys)?,
                &v.narrow(TOKEN_DIM, first_key, keys)?.contiguous()?,
                additive.as_ref(),
                pass,
            )?);
        }
        Tensor::cat(&outputs, TOKEN_DIM)
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

/// Whether somebody looks at what the kernels keep to themselves.
fn shows_weights(pass: &Pass) -> bool {
    pass.wants(SiteKind::AttnScores) || pass.wants(SiteKind::Pattern)
}

/// Whether a tensor is in f32 on the CPU, and no gradient goes through it.
fn is_plain(x: &Tensor) -> bool {
    x.dtype() == DType::F32 && x.device().is_cpu() && !x.track_op()
}
