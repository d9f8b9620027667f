//! Multi-head attention with an output projection: `Concat(head_1, …, head_H) W_o`, each head attending by itself.
//!
//! Source: "Attention Is All You Need" (arXiv:1706.03762, section 3.2.2); "Build a Large Language Model (From Scratch)"
//! (Raschka, 2024, section 3.6.2: separate projections, causal); PyTorch's `nn.MultiheadAttention` (fused projection).
//! Letters in shapes: `B` batch, `T` tokens, `S` tokens that are attended to, `H` heads, `D` width of a head, `d_in`, `d_out` widths.

use candle_core::{D, Result, Tensor};
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource, add, heads_of, step_attention};

use crate::pass::Kept;
use crate::projection::{divided_width, expect_width};
use crate::{
    AttentionError, AttentionMask, KvCache, MultiHeadAttentionConfig, Pass, Placement, QkvProjection,
    ScaledDotProduct, SiteKind,
};

/// Axis of the batch in a `(B, T, d_in)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the heads in a `(B, T, H, …)` tensor.
const RESULT_HEAD_DIM: usize = 2;

/// The keys and values of encoder states (the memory), computed once by [`MultiHeadAttention::memory`] for several passes.
#[derive(Debug, Clone)]
pub struct AttentionMemory(Vec<Tensor>);

/// Multi-head attention over a sequence, or from one sequence over another.
#[derive(Debug, Clone)]
#[doc(alias("GPT2Attention", "CausalSelfAttention", "MultiheadAttention"))]
pub struct MultiHeadAttention {
    projection: QkvProjection,
    out_proj: Linear,
    num_heads: usize,
    head_dim: usize,
    attention: ScaledDotProduct,
    /// The mask of `Module::forward`; functions that take a mask ignore it.
    pub(crate) mask: AttentionMask,
}

impl MultiHeadAttention {
    /// A layer from its projections; `out_proj` takes `H · D` to the output width. The scale is `1 / sqrt(D)`.
    ///
    /// # Errors
    /// When the number of heads does not divide the projections' width, or the widths of the layers do not match.
    pub fn new(projection: QkvProjection, out_proj: Linear, num_heads: usize) -> Result<Self> {
        let width = projection.width()?;
        let head_dim = divided_width(width, num_heads)?;
        expect_width("the output projection's input", width, out_proj.in_features())?;
        let (attention, mask) = (ScaledDotProduct::new(head_dim), AttentionMask::Bidirectional);
        Ok(Self { projection, out_proj, num_heads, head_dim, attention, mask })
    }

    /// A layer from the named parameters below the path of `vb`: those of [`ProjectionLayout`](crate::ProjectionLayout), and
    /// `out_proj.weight` and `out_proj.bias`.
    ///
    /// # Errors
    /// When the number of heads does not divide `d_out`, or a parameter is missing or has another shape.
    pub fn load(config: &MultiHeadAttentionConfig, vb: impl ParameterSource) -> Result<Self> {
        let (projection, width) = QkvProjection::load(config, &vb)?;
        let out_proj = Linear::load(width, config.d_out, true, vb.below("out_proj"))?;
        Ok(Self::new(projection, out_proj, config.num_heads)?.with_dropout(config.dropout))
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

    /// The same layer with a mask for its use as a [`Module`](candle_nn::Module); without one every token sees every other.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_gpt2_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_nn::{Module, VarBuilder, VarMap};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::new(6, 6, 2), vb)?;
    /// let x = Tensor::randn(0f32, 1., (1, 3, 6), &Device::Cpu)?;
    /// let causal = layer.clone().with_mask(AttentionMask::Causal).forward(&x)?;
    /// assert_eq!(causal.to_vec3::<f32>()?, layer.forward_masked(&x, &AttentionMask::Causal)?.to_vec3::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_mask(mut self, mask: AttentionMask) -> Self {
        self.mask = mask;
        self
    }

    /// Self-attention under a mask, without dropout and without a cache. Gradients flow.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_masked(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        self.forward_with(x, None, mask, None, &mut Pass::inference())
    }

    /// Attention from `x` over `memory` (over `x` itself if there is none), with the attention weights.
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
        let mut weights = Kept::of(SiteKind::Pattern);
        let mut pass = Pass::inference().observed_by(&mut weights);
        let output = self.forward_with(x, memory, mask, None, &mut pass)?;
        let weights = weights.value.ok_or_else(|| candle_core::Error::msg("no attention was computed"))?;
        Ok((output, weights))
    }

    /// The whole layer: self-attention or, with `memory`, cross-attention; with or without a cache of this layer's
    /// earlier tokens; in inference or training.
    ///
    /// Shows the observer of the pass queries, keys, values, scores, pattern and [`SiteKind::Z`].
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `memory` `(B, S, d_in)`; returns `(B, T, d_out)`. Row `b` of `x` continues after the
    /// `cache.lengths()[b]` tokens of the cache.
    ///
    /// # Errors
    /// When the shapes do not fit, the cache is full, or a cache is given together with a memory or in training.
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

    /// The keys and values of encoder states, to attend to.
    ///
    /// # Shapes
    /// `memory` `(B, S, d_in)`.
    ///
    /// # Errors
    /// If the width does not match.
    pub fn memory(&self, memory: &Tensor) -> Result<AttentionMemory> {
        self.projection.memory(memory).map(AttentionMemory)
    }

    /// `residual + dropout(output)` of attention from `x` over all of a memory, with dropout `rate`. A memory of batch size 1 is
    /// shared by all rows of `x`.
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

    /// `residual + dropout(output)` of self-attention, with dropout `rate`: attention as a block of a model has it.
    ///
    /// Shows the observer of the pass what [`MultiHeadAttention::forward_with`] does, then the results and [`SiteKind::AttnOut`].
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
    /// If the shape does not match.
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
        let heads = heads_of(&projections.iter().collect::<Vec<_>>(), self.num_heads)?;
        let kinds = [SiteKind::Q, SiteKind::K, SiteKind::V];
        let shown = |(kind, x): (_, Tensor)| {
            pass.show(kind, x.transpose(1, 2)?.contiguous()?)?.flatten_from(RESULT_HEAD_DIM) // of (B, T, H, D)
        };
        kinds.into_iter().zip(heads).map(shown).collect()
    }

    /// [`Self::attend`], with its result shown to the observer.
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

    /// Outputs of the heads side by side: the input of the output projection, `(B, T, H · D)`. A recorded step of a GPU
    /// reads the positions of its tokens there ([`Placement::OnDevice`]).
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
        let placement = pass.placement().clone();
        if let Placement::OnDevice(positions) = &placement {
            let (QkvProjection::Fused(layer), Some(cache), AttentionMask::Causal, true) =
                (&self.projection, cache, mask, pass.is_inference())
            else {
                return Err(AttentionError::NotAStep.into());
            };
            cache.expect(x.dim(BATCH_DIM)?, self.num_heads, self.head_dim)?;
            return step_attention(layer, x, cache.memory(), &cache.slots(), self.attention.scale, positions);
        }
        let mut projections = match memory {
            Some(AttentionMemory(memory)) => self.projection.over(x, memory)?,
            None => self.projection.of_itself(x)?,
        };
        if [SiteKind::Q, SiteKind::K, SiteKind::V].into_iter().any(|kind| pass.wants(kind)) {
            projections = self.shown(&projections, pass)?;
        }
        match (cache, &placement) {
            // Rows of several lengths in one text, each after what the cache has of it; they are always causal.
            (Some(cache), Placement::Rows(lengths)) => {
                self.attention.attend_rows(&projections, self.num_heads, (lengths, mask), cache, pass)
            }
            (cache, _) => self.attention.attend(&projections, self.num_heads, mask, cache, pass),
        }
    }

    /// Number of values of the projections and the output projection, biases included.
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
