//! Multi-head attention with an output projection: `Concat(head_1, …, head_H) W_o`, each head attending by itself.
//!
//! Source: "Attention Is All You Need" (arXiv:1706.03762, section 3.2.2); "Build a Large Language Model (From Scratch)"
//! (Raschka, 2024, section 3.6.2: separate projections, causal); PyTorch's `nn.MultiheadAttention` (fused projection).

use candle_core::{D, Result, Tensor};
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource, add, step_attention};

use crate::error::expect_sizes;
use crate::{AttentionError, AttentionMask, KvCache, Observer, Pass, ScaledDotProduct, Site, SiteKind};

/// Axis of the batch in a `(B, T, d_in)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the tokens in a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;
/// Axis of the heads in a `(B, H, T, D)` tensor.
const HEAD_DIM: usize = 1;
/// Axis of the heads in a `(B, T, H, d_out)` tensor.
const RESULT_HEAD_DIM: usize = 2;

/// How wide each head is.
///
/// The words are those of "Transformers from scratch" (Bloem, 2019, "Narrow and wide self-attention"): a head is narrow that
/// gets one slice of the input vector and wide that gets the whole vector. A narrow head of that strict kind is
/// [`HeadWidth::Narrow`] with block-diagonal projections; GPT-2 and PyTorch use the narrow width with full projections, so that
/// each head sees the whole input at the same cost. A choice of [`MultiHeadAttentionConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadWidth {
    /// The heads share the output width: `D = d_out / H`.
    #[default]
    Narrow,
    /// Each head has the whole output width, `D = d_out`, and the output projection brings `H · d_out` back to it.
    Wide,
}

/// Where the query, key and value projections are kept. A choice of [`MultiHeadAttentionConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProjectionLayout {
    /// Three parameters, `W_query.weight`, `W_key.weight`, `W_value.weight` (and `.bias`), as in "Build a Large
    /// Language Model (From Scratch)".
    #[default]
    Separate,
    /// One parameter for all three, `in_proj_weight` (and `in_proj_bias`), as in PyTorch's `nn.MultiheadAttention`.
    Fused,
}

/// Sizes and options of a [`MultiHeadAttention`] that is built from named parameters.
#[derive(Debug, Clone)]
pub struct MultiHeadAttentionConfig {
    /// Width of the input (and of the memory in cross-attention).
    pub d_in: usize,
    /// Width of the output.
    pub d_out: usize,
    /// Number of heads, `H`.
    pub num_heads: usize,
    /// Width of each head.
    pub head_width: HeadWidth,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Where the query, key and value projections are kept.
    pub projection: ProjectionLayout,
    /// Dropout rate on the attention weights, in training.
    pub dropout: f64,
}

impl MultiHeadAttentionConfig {
    /// Narrow heads, separate projections without biases, no dropout: the defaults of "Build a Large Language Model
    /// (From Scratch)".
    pub fn new(d_in: usize, d_out: usize, num_heads: usize) -> Self {
        Self {
            d_in,
            d_out,
            num_heads,
            head_width: HeadWidth::Narrow,
            qkv_bias: false,
            projection: ProjectionLayout::Separate,
            dropout: 0.0,
        }
    }
}

/// The projections of the input to queries, keys and values, each `H · D` wide.
/// [`MultiHeadAttention::new`] makes a layer of them, [`MultiHeadAttention::load`] reads them.
#[derive(Debug, Clone)]
pub enum QkvProjection {
    /// One layer each.
    Separate {
        /// To the queries.
        query: Linear,
        /// To the keys.
        key: Linear,
        /// To the values.
        value: Linear,
    },
    /// One layer whose output holds queries, keys and values side by side, each a third.
    Fused(Linear),
    /// One layer to the queries, and one whose output holds keys and values side by side, each a half: GPT-2's cross-attention.
    FusedMemory {
        /// To the queries.
        query: Linear,
        /// To keys and values.
        key_value: Linear,
    },
}

impl QkvProjection {
    /// Queries, keys and values of `x`, as the layers give them: all three side by side in one tensor, queries and then keys and
    /// values in two, or each in its own, `(B, T, …)`.
    fn of_itself(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Fused(layer) => Ok(vec![layer.forward(x)?]),
            _ => self.over(x, &self.memory(x)?),
        }
    }

    /// Queries of `x`, and keys and values that [`QkvProjection::memory`] gave, in two or three tensors.
    fn over(&self, x: &Tensor, memory: &[Tensor]) -> Result<Vec<Tensor>> {
        let queries = match self {
            Self::Separate { query, .. } | Self::FusedMemory { query, .. } => query.forward(x)?,
            Self::Fused(layer) => layer.forward_outputs(x, 0..layer.out_features() / 3)?,
        };
        Ok([&[queries], memory].concat())
    }

    /// Keys and values of `memory`, side by side in one tensor or each in its own, `(B, S, …)`.
    fn memory(&self, memory: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Separate { key, value, .. } => Ok(vec![key.forward(memory)?, value.forward(memory)?]),
            Self::FusedMemory { key_value, .. } => Ok(vec![key_value.forward(memory)?]),
            Self::Fused(layer) => {
                let width = layer.out_features() / 3;
                Ok(vec![layer.forward_outputs(memory, width..3 * width)?])
            }
        }
    }

    /// Width of queries, of keys and of values, `H · D`.
    fn width(&self) -> Result<usize> {
        match self {
            Self::Separate { query, key, value } => {
                for (what, layer) in [("the key projection", key), ("the value projection", value)] {
                    expect_width(what, query.out_features(), layer.out_features())?;
                }
                Ok(query.out_features())
            }
            Self::Fused(layer) => {
                expect_width("the fused projection", layer.out_features() / 3 * 3, layer.out_features())?;
                Ok(layer.out_features() / 3)
            }
            Self::FusedMemory { query, key_value } => {
                let what = "the projection to keys and values";
                expect_width(what, 2 * query.out_features(), key_value.out_features())?;
                Ok(query.out_features())
            }
        }
    }

    fn layers(&self) -> Vec<&Linear> {
        match self {
            Self::Separate { query, key, value } => vec![query, key, value],
            Self::Fused(layer) => vec![layer],
            Self::FusedMemory { query, key_value } => vec![query, key_value],
        }
    }

    fn size(&self) -> ParameterSize {
        self.layers().into_iter().map(Linear::size).sum()
    }
}

/// The keys and values of a memory, as [`MultiHeadAttention::memory`] gives them: what several passes over one memory share.
#[derive(Debug, Clone)]
pub struct AttentionMemory(Vec<Tensor>);

/// Multi-head attention over a sequence, or from one sequence over another.
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    projection: QkvProjection,
    out_proj: Linear,
    num_heads: usize,
    head_dim: usize,
    attention: ScaledDotProduct,
}

impl MultiHeadAttention {
    /// A layer from its projections; `out_proj` takes `H · D` to the output width. The scale is `1 / sqrt(D)`.
    ///
    /// # Errors
    /// When the number of heads does not divide the projections' width, or the layers do not fit to each other.
    pub fn new(projection: QkvProjection, out_proj: Linear, num_heads: usize) -> Result<Self> {
        let width = projection.width()?;
        let head_dim = divided_width(width, num_heads)?;
        expect_width("the output projection's input", width, out_proj.in_features())?;
        Ok(Self { projection, out_proj, num_heads, head_dim, attention: ScaledDotProduct::new(head_dim) })
    }

    /// A layer from the named parameters below the path of `vb`: those of [`ProjectionLayout`], and
    /// `out_proj.weight` and `out_proj.bias`.
    ///
    /// # Errors
    /// When the number of heads does not divide `d_out`, or a parameter is missing or has another shape.
    pub fn load(config: &MultiHeadAttentionConfig, vb: impl ParameterSource) -> Result<Self> {
        let MultiHeadAttentionConfig { d_in, d_out, num_heads, qkv_bias, .. } = *config;
        let width = match config.head_width {
            HeadWidth::Narrow => d_out,
            HeadWidth::Wide => d_out * num_heads,
        };
        divided_width(width, num_heads)?;
        let projection = match config.projection {
            ProjectionLayout::Separate => {
                let layer = |name: &str| Linear::load(d_in, width, qkv_bias, vb.below(name));
                QkvProjection::Separate {
                    query: layer("W_query")?,
                    key: layer("W_key")?,
                    value: layer("W_value")?,
                }
            }
            ProjectionLayout::Fused => {
                let names = ["in_proj_weight", "in_proj_bias"];
                QkvProjection::Fused(Linear::load_named(d_in, 3 * width, names, qkv_bias, vb.clone())?)
            }
        };
        let out_proj = Linear::load(width, d_out, true, vb.below("out_proj"))?;
        Ok(Self::new(projection, out_proj, num_heads)?.with_dropout(config.dropout))
    }

    /// The same layer with another factor on the scores than `1 / sqrt(D)`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.attention.scale = scale;
        self
    }

    /// The same layer with dropout on the attention weights, in training.
    pub fn with_dropout(mut self, rate: f64) -> Self {
        self.attention.dropout = rate;
        self
    }

    /// Self-attention under a mask, for inference and without a cache. As a [`Module`](candle_nn::Module) the layer has no mask.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_masked(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        self.forward_with(x, None, mask, None, &mut Pass::inference())
    }

    /// Attention from `x` over `memory` (over `x` itself where there is none), with the attention weights.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `memory` `(B, S, d_in)`; returns the output `(B, T, d_out)` and the weights `(B, H, T, S)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        memory: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<(Tensor, Tensor)> {
        let mut weights = KeepWeights(None);
        let mut pass = Pass::inference().observed_by(&mut weights);
        let output = self.forward_with(x, memory, mask, None, &mut pass)?;
        let weights = weights.0.ok_or_else(|| candle_core::Error::Msg("no attention was computed".into()))?;
        Ok((output, weights))
    }

    /// The whole layer: self-attention or, with `memory`, cross-attention; with or without a cache of this layer's
    /// earlier tokens; in inference or training.
    ///
    /// Shows the observer of the pass what is from [`SiteKind::Q`] to [`SiteKind::Z`].
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `memory` `(B, S, d_in)`; returns `(B, T, d_out)`. Row `b` of `x` continues after the
    /// `cache.lengths()[b]` tokens of the cache.
    ///
    /// # Errors
    /// When the shapes do not fit, the cache is full, or a cache is given together with a memory.
    pub fn forward_with(
        &self,
        x: &Tensor,
        memory: Option<&Tensor>,
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let memory = memory.map(|memory| self.memory(memory)).transpose()?;
        self.out_proj.forward(&self.context(x, memory.as_ref(), mask, cache, pass)?)
    }

    /// The keys and values of a memory to attend to.
    ///
    /// # Shapes
    /// `memory` `(B, S, d_in)`.
    ///
    /// # Errors
    /// When the width is another.
    pub fn memory(&self, memory: &Tensor) -> Result<AttentionMemory> {
        self.projection.memory(memory).map(AttentionMemory)
    }

    /// `residual + dropout(output)` of attention from `x` over all of a memory, which a batch of one serves for every row; `rate`
    /// is that of the output.
    ///
    /// The observer of the pass is shown nothing: its names mean self-attention.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `residual` `(B, T, d_out)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// When the shapes do not fit, or `rate` is outside `[0, 1]`.
    pub fn add_over_memory(
        &self,
        residual: &Tensor,
        x: &Tensor,
        memory: &AttentionMemory,
        rate: f64,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let mut pass = pass.unobserved();
        let (batch, _, d_in) = x.dims3()?;
        let is_shared = memory.0.iter().all(|tensor| tensor.dims().first() == Some(&1));
        if batch > 1 && is_shared {
            // Queries of all rows side by side, so that the memory is not repeated for each row.
            let flat = residual.reshape((1, (), residual.dim(D::Minus1)?))?;
            let y = self.add_over_memory(&flat, &x.reshape((1, (), d_in))?, memory, rate, &mut pass)?;
            return y.reshape(residual.shape());
        }
        let context = self.context(x, Some(memory), &AttentionMask::Bidirectional, None, &mut pass)?;
        pass.add_to(residual, &self.out_proj, &context, SiteKind::AttnOut, rate)
    }

    /// `residual + dropout(output)` of self-attention, the end of its part of a block; `rate` is that of the output.
    ///
    /// Shows the observer of the pass what is from [`SiteKind::Q`] to [`SiteKind::AttnOut`].
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `residual` `(B, T, d_out)`; returns `(B, T, d_out)`. The cache is as in
    /// [`MultiHeadAttention::forward_with`].
    ///
    /// # Errors
    /// When the shapes do not fit, the cache is full, or `rate` is outside `[0, 1]`.
    pub fn add_to(
        &self,
        residual: &Tensor,
        x: &Tensor,
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        rate: f64,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let context = self.context(x, None, mask, cache, pass)?;
        if !pass.wants(SiteKind::Result) {
            return pass.add_to(residual, &self.out_proj, &context, SiteKind::AttnOut, rate);
        }
        let output = pass.show(SiteKind::Result, self.results(&context)?)?.sum(RESULT_HEAD_DIM)?;
        let output = match self.out_proj.bias() {
            Some(bias) => output.broadcast_add(bias)?,
            None => output,
        };
        let output = pass.show(SiteKind::AttnOut, output)?;
        add(residual, &pass.dropout(output, rate)?)
    }

    /// What each head adds, without the output projection's bias: `(B, T, H, d_out)` of `z` `(B, T, H · D)`.
    ///
    /// # Errors
    /// When the shape is another.
    pub fn results(&self, z: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = z.dims3()?;
        let (heads, width, output) = (self.num_heads, self.head_dim, self.out_proj.out_features());
        let z = z.reshape((batch * tokens, heads, width))?.transpose(0, 1)?.contiguous()?; // (H, B · T, D)
        let weight = self.out_proj.weight().to_tensor()?.reshape((output, heads, width))?;
        let results = z.matmul(&weight.permute((1, 2, 0))?.contiguous()?)?; // (H, B · T, d_out)
        results.transpose(0, 1)?.contiguous()?.reshape((batch, tokens, heads, output))
    }

    /// Queries, keys and values as the observer wants them, each `(B, T, H · D)`.
    fn shown(&self, projections: &[Tensor], pass: &mut Pass) -> Result<Vec<Tensor>> {
        let width = self.num_heads * self.head_dim;
        let mut parts = Vec::new();
        for projection in projections {
            let count = projection.dim(D::Minus1)? / width;
            for part in (0..count).map(|index| projection.narrow(D::Minus1, index * width, width)) {
                let kind = [SiteKind::Q, SiteKind::K, SiteKind::V][parts.len().min(2)];
                let (batch, tokens, _) = projection.dims3()?;
                let heads = part?.reshape((batch, tokens, self.num_heads, self.head_dim))?;
                parts.push(pass.show(kind, heads)?.reshape((batch, tokens, width))?);
            }
        }
        Ok(parts)
    }

    /// What the heads say, shown to the observer, `(B, T, H · D)`.
    fn context(
        &self,
        x: &Tensor,
        memory: Option<&AttentionMemory>,
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let context = self.attend(x, memory, mask, cache, pass)?;
        if !pass.wants(SiteKind::Z) {
            return Ok(context);
        }
        let (batch, tokens, width) = context.dims3()?;
        let heads = context.reshape((batch, tokens, self.num_heads, self.head_dim))?;
        pass.show(SiteKind::Z, heads)?.reshape((batch, tokens, width))
    }

    /// What the heads say, side by side: the input of the output projection, `(B, T, H · D)`.
    fn attend(
        &self,
        x: &Tensor,
        memory: Option<&AttentionMemory>,
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        if memory.is_some() && cache.is_some() {
            return Err(AttentionError::CacheWithMemory.into());
        }
        if let Some(lengths) = pass.lengths() {
            let (QkvProjection::Fused(layer), Some(cache), AttentionMask::Causal, true) =
                (&self.projection, cache, mask, pass.is_inference())
            else {
                return Err(AttentionError::NotAStep.into());
            };
            cache.expect(x.dim(BATCH_DIM)?, self.num_heads, self.head_dim)?;
            return step_attention(layer, x, cache.memory(), &cache.slots(), self.attention.scale, lengths);
        }
        let mut projections = match memory {
            Some(AttentionMemory(memory)) => self.projection.over(x, memory)?,
            None => self.projection.of_itself(x)?,
        };
        if [SiteKind::Q, SiteKind::K, SiteKind::V].into_iter().any(|kind| pass.wants(kind)) {
            projections = self.shown(&projections, pass)?;
        }
        if cache.is_none()
            && let Some(context) =
                self.attention.forward_projected(&projections, self.num_heads, mask, pass)?
        {
            return Ok(context);
        }
        match (cache, pass.rows().map(<[usize]>::to_vec)) {
            (Some(cache), Some(rows)) => self.attend_rows(&projections, &rows, cache, pass),
            (cache, _) => self.attend_heads(&projections, mask, cache, pass),
        }
    }

    /// The same of queries, keys and values `(B, T, n · H · D)`.
    fn attend_heads(
        &self,
        projections: &[Tensor],
        mask: &AttentionMask,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let (heads, attention) = (self.num_heads, &self.attention);
        let mut parts = Vec::new();
        for projection in projections {
            let split = split_heads(projection, self.head_dim)?; // (B, n · H, T, D)
            for part in split.chunk(split.dim(HEAD_DIM)? / heads, HEAD_DIM)? {
                parts.push(part);
            }
        }
        let [q, k, v] = &parts[..] else {
            candle_core::bail!("queries, keys and values in {} parts", parts.len());
        }; // (B, H, T, D)
        let context = match cache {
            Some(cache) => attention.forward_cached(q, [k, v], mask, cache, pass)?,
            None => attention.forward(q, k, v, mask, &[], pass)?,
        }; // (B, H, T, D)
        merge_heads(&context)
    }

    /// The same of rows of different lengths, `(1, T_1 + … + T_B, n · H · D)`, each over its own row of the cache. Neighbours of one
    /// length are computed together.
    fn attend_rows(
        &self,
        projections: &[Tensor],
        lengths: &[usize],
        cache: &mut KvCache,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let (rows, found) = (cache.lengths().len(), lengths.len());
        if found != rows {
            return Err(AttentionError::CacheRows { rows, found }.into());
        }
        let (mut contexts, mut first_row, mut first_token) = (Vec::new(), 0, 0);
        for alike in lengths.chunk_by(|a, b| a == b) {
            let (batch, length) = (alike.len(), alike[0]);
            let of_rows = |x: &Tensor| {
                let tokens = x.narrow(TOKEN_DIM, first_token, batch * length)?;
                tokens.reshape((batch, length, x.dim(D::Minus1)?))
            };
            let projections = projections.iter().map(of_rows).collect::<Result<Vec<_>>>()?;
            let mut some = KvCache::in_memory(cache.memory());
            move_rows(cache, first_row, &mut some, 0, batch)?;
            let context = self.attend_heads(&projections, &AttentionMask::Causal, Some(&mut some), pass);
            // After an error too the cache has all its rows.
            move_rows(&mut some, 0, cache, first_row, batch)?;
            contexts.push(context?.reshape((1, batch * length, ()))?);
            (first_row, first_token) = (first_row + batch, first_token + batch * length);
        }
        Tensor::cat(&contexts, TOKEN_DIM)
    }

    /// Number of trainable values: projections, output projection, and their biases.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// The size of projections, output projection, and their biases.
    pub fn size(&self) -> ParameterSize {
        self.projection.size() + self.out_proj.size()
    }

    /// The projections to queries, keys and values.
    pub fn projection(&self) -> &QkvProjection {
        &self.projection
    }

    /// The output projection, `H · D` to the output width.
    pub fn out_proj(&self) -> &Linear {
        &self.out_proj
    }

    /// Number of heads, `H`.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Width of a head, `D`.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
}

/// Moves `count` rows from `first` on to another cache, where they begin at `place`. Nothing is copied.
fn move_rows(from: &mut KvCache, first: usize, to: &mut KvCache, place: usize, count: usize) -> Result<()> {
    (place..place + count).try_for_each(|place| {
        let (slot, length) = from.remove_row(first)?;
        to.insert_row(place, slot, length)
    })
}

/// A view of `(B, T, H · D)` as `(B, H, T, D)`.
fn split_heads(x: &Tensor, head_dim: usize) -> Result<Tensor> {
    let (batch, tokens, width) = x.dims3()?;
    x.reshape((batch, tokens, width / head_dim, head_dim))?.transpose(1, 2) // (B, H, T, D)
}

fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let (batch, num_heads, tokens, head_dim) = x.dims4()?;
    x.transpose(1, 2)?.reshape((batch, tokens, num_heads * head_dim)) // (B, T, H · D)
}

fn divided_width(width: usize, num_heads: usize) -> Result<usize> {
    expect_sizes(&[("number of heads", num_heads), ("width", width)])?;
    if !width.is_multiple_of(num_heads) {
        return Err(AttentionError::HeadsDoNotDivideWidth { num_heads, width }.into());
    }
    Ok(width / num_heads)
}

fn expect_width(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found != expected {
        return Err(AttentionError::WidthMismatch { what, expected, found }.into());
    }
    Ok(())
}

/// Keeps the attention weights that a pass shows.
struct KeepWeights(Option<Tensor>);

impl Observer for KeepWeights {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Pattern
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.0 = Some(value.clone());
        Ok(value)
    }
}
