//! Multi-head attention with an output projection: `Concat(head_1, …, head_H) W_o`.
//!
//! Sources: "Attention Is All You Need" (arXiv:1706.03762, section 3.2.2); "Build a Large Language Model
//! (From Scratch)" (Raschka, 2024, section 3.6.2: separate projections, causal); PyTorch's
//! `nn.MultiheadAttention` (fused projection).
//!
//! Letters in shapes: `B` batch, `T` query tokens, `S` key tokens, `H` heads, `D` head width, `d_in` input
//! width, `d_out` output width.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{KvDType, Linear, ParameterSize, ParameterSource, add, heads_of, step_attention};

use crate::pass::LastValue;
use crate::projection::{divided_width, expect_width};
use crate::scaled_dot_product::expect_constant;
use crate::{
    AttentionError, AttentionMask, AttentionMemory, KvCache, KvCacheShape, MultiHeadAttentionConfig, Pass,
    Placement, QkvProjection, ScaledDotProduct, SiteKind,
};

/// Batch axis of a `(B, T, d_in)` tensor.
const BATCH_DIM: usize = 0;
/// Head axis of a `(B, T, H, …)` tensor.
const RESULT_HEAD_DIM: usize = 2;

/// Multi-head self-attention, or cross-attention from one sequence to another.
#[derive(Debug, Clone)]
#[doc(alias("GPT2Attention", "CausalSelfAttention", "MultiheadAttention"))]
pub struct MultiHeadAttention {
    projection: QkvProjection,
    out_proj: Linear,
    num_heads: usize,
    head_dim: usize,
    attention: ScaledDotProduct,
    /// Mask for `Module::forward`; functions that take a mask ignore this one.
    pub(crate) mask: AttentionMask,
}

impl MultiHeadAttention {
    /// Creates a layer from its projections, with the scale `1 / sqrt(D)`.
    ///
    /// `out_proj` maps `H · D` to the output width.
    ///
    /// # Errors
    /// If the number of heads does not divide the projections' width, or the widths of the layers do not
    /// match.
    pub fn new(projection: QkvProjection, out_proj: Linear, num_heads: usize) -> Result<Self> {
        let width = projection.width()?;
        let head_dim = divided_width(width, num_heads)?;
        expect_width("the output projection's input", width, out_proj.in_features())?;
        let (attention, mask) = (ScaledDotProduct::new(head_dim), AttentionMask::Bidirectional);
        Ok(Self { projection, out_proj, num_heads, head_dim, attention, mask })
    }

    /// Loads a layer from the named parameters under the path of `vb`.
    ///
    /// [`ProjectionLayout`](crate::ProjectionLayout) lists their names.
    ///
    /// # Errors
    /// If the number of heads does not divide `d_out`, or a parameter is missing or has the wrong shape.
    pub fn load(config: &MultiHeadAttentionConfig, vb: impl ParameterSource) -> Result<Self> {
        let (projection, out_proj) = QkvProjection::load(config, vb)?;
        Ok(Self::new(projection, out_proj, config.num_heads)?.with_dropout(config.dropout))
    }

    /// Sets the scale of the scores; the default is `1 / sqrt(D)`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.attention.scale = scale;
        self
    }

    /// Sets the dropout rate of the attention weights in training.
    pub fn with_dropout(mut self, rate: f64) -> Self {
        self.attention.dropout = rate;
        self
    }

    /// Sets the mask for use as a [`Module`](candle_nn::Module); by default every token sees every other.
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

    /// Computes self-attention under a mask, with gradients but without dropout or a cache.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward_masked(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        self.forward_with(x, None, mask, None, &mut Pass::inference())
    }

    /// Computes attention from `x` to `memory`, or to `x` itself; also returns the attention weights.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `memory` `(B, S, d_in)`; returns the output `(B, T, d_out)` and the weights `(B,
    /// H, T, S)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        memory: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<(Tensor, Tensor)> {
        let mut weights = LastValue::of(SiteKind::Pattern);
        let mut pass = Pass::inference().observed_by(&mut weights);
        let output = self.forward_with(x, memory, mask, None, &mut pass)?;
        let weights =
            weights.value.ok_or_else(|| candle_core::Error::msg("no attention weights were computed"))?;
        Ok((output, weights))
    }

    /// Computes self-attention or, with `memory`, cross-attention, in inference or training.
    ///
    /// Self-attention may use a cache of this layer's earlier tokens. The pass's observer can see queries,
    /// keys, values, scores, pattern and [`SiteKind::Z`].
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `memory` `(B, S, d_in)`; returns `(B, T, d_out)`. Row `b` of `x` follows the
    /// `cache.lengths()[b]` tokens in the cache.
    ///
    /// # Errors
    /// If the shapes do not match, or the cache is full. Also if a cache is used with a memory, in training, or
    /// while `x` or a projection tracks gradients: see
    /// [`without_gradients`](candle_gpt2_kernels::without_gradients).
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

    /// Computes self-attention and returns `residual + dropout(output)`, with dropout rate `rate`.
    ///
    /// This is the attention part of a model's block. The pass's observer can see the intermediates of
    /// [`MultiHeadAttention::forward_with`], then [`SiteKind::Result`] and [`SiteKind::AttnOut`].
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `residual` `(B, T, d_out)`; returns `(B, T, d_out)`. The cache has the same role
    /// as in [`MultiHeadAttention::forward_with`].
    ///
    /// # Errors
    /// Same as [`MultiHeadAttention::forward_with`], and if `rate` is outside `[0, 1]`.
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

    /// Computes each head's output, without the bias of the output projection.
    ///
    /// Maps `z` `(B, T, H · D)` to `(B, T, H, d_out)`.
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

    /// Shows queries, keys and values to the observer; returns the tensors to use, `(B, T, H · D)`.
    fn shown(&self, projections: &[Tensor], pass: &mut Pass) -> Result<Vec<Tensor>> {
        let heads = heads_of(&projections.iter().collect::<Vec<_>>(), self.num_heads)?;
        let kinds = [SiteKind::Q, SiteKind::K, SiteKind::V];
        let shown = |(kind, x): (_, Tensor)| {
            pass.show(kind, x.transpose(1, 2)?.contiguous()?)?.flatten_from(RESULT_HEAD_DIM) // (B, T, H, D)
        };
        kinds.into_iter().zip(heads).map(shown).collect()
    }

    /// Computes [`Self::attend`] and passes its result to the observer.
    pub(crate) fn context(
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

    /// Computes the concatenated outputs of the heads, `(B, T, H · D)`, before the output projection.
    ///
    /// A recorded step on a GPU reads the positions of its tokens from device memory
    /// ([`Placement::OnDevice`]).
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
        self.projection.expect_input(x)?;
        let placement = pass.placement().clone();
        if let Placement::OnDevice(positions) = &placement {
            let (QkvProjection::Fused(layer), Some(cache), AttentionMask::Causal, true) =
                (&self.projection, cache, mask, pass.is_inference())
            else {
                return Err(AttentionError::NotAStep.into());
            };
            expect_constant(x.track_op() || layer.size().trainable > 0)?;
            cache.expect(x.dim(BATCH_DIM)?, self.num_heads, self.head_dim)?;
            return step_attention(layer, x, cache.memory(), &cache.slots(), self.attention.scale, positions);
        }
        let mut projections = match memory {
            Some(memory) => self.projection.over(x, memory)?,
            None => self.projection.of_itself(x)?,
        };
        if [SiteKind::Q, SiteKind::K, SiteKind::V].into_iter().any(|kind| pass.wants(kind)) {
            projections = self.shown(&projections, pass)?;
        }
        match (cache, &placement) {
            // Packed rows that continue cached rows are always causal.
            (Some(cache), Placement::Rows(lengths)) => {
                self.attention.attend_rows(&projections, self.num_heads, (lengths, mask), cache, pass)
            }
            (cache, _) => self.attention.attend(&projections, self.num_heads, mask, cache, pass),
        }
    }

    /// Creates an empty cache for `batch` sequences of up to `capacity` tokens each, on the layer's device.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_gpt2_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, Pass};
    /// use candle_nn::VarBuilder;
    ///
    /// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::new(6, 6, 2), vb)?;
    /// let mut cache = layer.new_cache(1, 16, DType::F32)?;
    /// for tokens in [3, 1, 1] {
    ///     let x = Tensor::ones((1, tokens, 6), DType::F32, &Device::Cpu)?;
    ///     layer.forward_with(&x, None, &AttentionMask::Causal, Some(&mut cache), &mut Pass::inference())?;
    /// }
    /// assert_eq!(cache.lengths(), [5]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If allocation fails, or the device does not support the storage type.
    pub fn new_cache(&self, batch: usize, capacity: usize, dtype: impl Into<KvDType>) -> Result<KvCache> {
        let shape = KvCacheShape { batch, num_heads: self.num_heads, capacity, head_dim: self.head_dim };
        KvCache::new(shape, dtype, self.out_proj.device())
    }

    /// Number of parameters in the input and output projections, including biases.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// Size of the input and output projections, including biases.
    pub fn size(&self) -> ParameterSize {
        self.projection.size() + self.out_proj.size()
    }

    /// Query, key and value projections.
    pub fn projection(&self) -> &QkvProjection {
        &self.projection
    }

    /// Output projection from `H · D` to the output width.
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
