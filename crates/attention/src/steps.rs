//! Attention step by step, following chapter 3 of "Build a Large Language Model (From Scratch)".
//!
//! 1. [`simple_self_attention`]: dot products, softmax and weighted sums, without parameters (§3.3).
//! 2. [`SelfAttention`]: queries, keys and values from trainable projections (§3.4).
//! 3. [`mask_by_renormalizing`] and [`mask_with_negative_infinity`]: two ways to hide the future, with equal
//!    results (§3.5.1).
//! 4. [`CausalAttention`]: the masked layer, for batches and with dropout (§3.5.3).
//! 5. [`StackedHeads`]: several such layers, with concatenated outputs (§3.6.1). The next step (§3.6.2) is
//!    [`MultiHeadAttention`](crate::MultiHeadAttention).
//!
//! The source is Raschka's book (2024). This code is meant to be read, so each step uses the plainest form.
//! It does not copy one mistake of the book: `SelfAttention_v2` takes the softmax over `dim=1`, which is the
//! last axis only without a batch.

use candle_core::{D, Result, Tensor};
use candle_gpt2_kernels::{Linear, ParameterSource};
use candle_nn::ops::softmax;

use crate::{AttentionMask, Pass, ScaledDotProduct};

/// Intermediate results of [`simple_self_attention`], which has no trainable weights.
#[derive(Debug, Clone)]
pub struct SimpleSelfAttention {
    /// Dot products of every token with every other, `(T, T)`.
    pub scores: Tensor,
    /// Softmax over each row of the scores, `(T, T)`.
    pub weights: Tensor,
    /// Weighted sums of the inputs, `(T, d)`.
    pub context: Tensor,
}

/// Computes attention without trainable weights (§3.3): dot products between all tokens.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_attention::steps::simple_self_attention;
///
/// let inputs = Tensor::new(&[[1f32, 0.], [0., 2.], [1., 1.]], &Device::Cpu)?;
/// let attention = simple_self_attention(&inputs)?;
/// assert_eq!(attention.scores.to_vec2::<f32>()?, [[1., 0., 1.], [0., 4., 2.], [1., 2., 2.]]);
/// assert_eq!(attention.context.dims(), [3, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `inputs` `(T, d)`.
///
/// # Errors
/// If `inputs` is not a matrix.
pub fn simple_self_attention(inputs: &Tensor) -> Result<SimpleSelfAttention> {
    let scores = inputs.matmul(&inputs.t()?)?; // (T, T)
    let weights = softmax(&scores, D::Minus1)?;
    let context = weights.matmul(inputs)?; // (T, d)
    Ok(SimpleSelfAttention { scores, weights, context })
}

/// Computes the dot product of two vectors, which measures how well their directions agree.
///
/// The dot product is the sum of the elementwise products.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_attention::steps::dot_product;
///
/// let (a, b) = (Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?, Tensor::new(&[4f32, 5., 6.], &Device::Cpu)?);
/// assert_eq!(dot_product(&a, &b)?.to_scalar::<f32>()?, 32.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `a` and `b` `(d)`; returns a scalar.
///
/// # Errors
/// If the lengths differ.
pub fn dot_product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    (a * b)?.sum_all()
}

/// Divides values by their sum (§3.3.1), the book's first attempt at weights.
///
/// Negative scores break it, which is the reason to use softmax.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_attention::steps::normalize_by_sum;
///
/// let scores = Tensor::new(&[1f32, 3., 4.], &Device::Cpu)?;
/// assert_eq!(normalize_by_sum(&scores)?.to_vec1::<f32>()?, [0.125, 0.375, 0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `scores` `(…, T)`; returns the same shape.
///
/// # Errors
/// If candle does not support the dtype.
pub fn normalize_by_sum(scores: &Tensor) -> Result<Tensor> {
    scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)
}

/// Computes `exp(x) / Σ exp(x)` without subtracting the maximum (§3.3.1).
///
/// In f32, it overflows if a score exceeds about 88. All other code uses a softmax that subtracts the largest
/// score first.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_attention::steps::softmax_naive;
///
/// let weights = |scores: &[f32]| softmax_naive(&Tensor::new(scores, &Device::Cpu)?)?.to_vec1::<f32>();
/// assert_eq!(weights(&[0., 0.])?, [0.5, 0.5]);
/// assert!(weights(&[0., 100.])?[1].is_nan(), "exp(100) is beyond f32");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `scores` `(…, T)`; returns the same shape.
///
/// # Errors
/// If candle does not support the dtype.
pub fn softmax_naive(scores: &Tensor) -> Result<Tensor> {
    normalize_by_sum(&scores.exp()?)
}

/// Hides the future after the softmax (§3.5.1, first method).
///
/// It zeroes the weights above the diagonal, then divides each row by its sum.
/// [`mask_with_negative_infinity`] gives the same result in one fewer step.
///
/// # Shapes
/// `weights` `(…, T, T)`; returns the same shape.
///
/// # Errors
/// If the last two axes differ.
pub fn mask_by_renormalizing(weights: &Tensor) -> Result<Tensor> {
    let tokens = weights.dim(D::Minus1)?;
    let lower = Tensor::tril2(tokens, weights.dtype(), weights.device())?;
    normalize_by_sum(&weights.broadcast_mul(&lower)?)
}

/// Hides the future before the softmax (§3.5.1, second method).
///
/// It sets the scores above the diagonal to `-inf`.
///
/// ```
/// use candle_core::{D, Device, Tensor};
/// use candle_gpt2_attention::steps::{mask_by_renormalizing, mask_with_negative_infinity};
/// use candle_nn::ops::softmax;
///
/// let scores = Tensor::new(&[[1f32, 2., 3.], [4., 4., 6.], [7., 8., 9.]], &Device::Cpu)?;
/// let before = softmax(&mask_with_negative_infinity(&scores)?, D::Minus1)?.to_vec2::<f32>()?;
/// let after = mask_by_renormalizing(&softmax(&scores, D::Minus1)?)?.to_vec2::<f32>()?;
/// assert_eq!(before[1], [0.5, 0.5, 0.]);
/// assert!((before[2][0] - after[2][0]).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `scores` `(…, T, T)`; returns the same shape.
///
/// # Errors
/// If the last two axes differ.
pub fn mask_with_negative_infinity(scores: &Tensor) -> Result<Tensor> {
    let tokens = scores.dim(D::Minus1)?;
    let visible =
        Tensor::tril2(tokens, candle_core::DType::U8, scores.device())?.broadcast_as(scores.shape())?;
    let hidden = Tensor::new(f32::NEG_INFINITY, scores.device())?.to_dtype(scores.dtype())?;
    visible.where_cond(scores, &hidden.broadcast_as(scores.shape())?)
}

/// Self-attention with trainable projections (§3.4), without a mask.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::steps::SelfAttention;
///
/// let matrix = Tensor::eye(2, DType::F32, &Device::Cpu)?;
/// let layer = SelfAttention::from_matrices(&matrix, &matrix, &matrix)?;
/// let x = Tensor::new(&[[1f32, 0.], [1., 0.], [1., 0.]], &Device::Cpu)?;
/// // With three equal tokens, all weights are equal, and the mean of the tokens is the token itself.
/// assert!(layer.weights(&x)?.flatten_all()?.to_vec1::<f32>()?.iter().all(|w| (w - 1. / 3.).abs() < 1e-6));
/// assert_eq!(layer.forward(&x)?.dims(), [3, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
}

impl SelfAttention {
    /// Creates a layer from matrices that multiply as `x W`: the book's `SelfAttention_v1`.
    ///
    /// # Shapes
    /// Each matrix is `(d_in, d_out)`.
    ///
    /// # Errors
    /// If they are not matrices.
    pub fn from_matrices(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Self> {
        // nn.Linear stores the transpose, which answers exercise 3.1.
        let layer = |matrix: &Tensor| Linear::new(matrix.t()?, None);
        Ok(Self { query: layer(query)?, key: layer(key)?, value: layer(value)? })
    }

    /// Creates a layer from linear layers: the book's `SelfAttention_v2`.
    pub fn from_linear(query: Linear, key: Linear, value: Linear) -> Self {
        Self { query, key, value }
    }

    /// Loads `W_query.weight`, `W_key.weight` and `W_value.weight` under the path of `vb`.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    pub fn load(d_in: usize, d_out: usize, vb: impl ParameterSource) -> Result<Self> {
        let layer = |name: &str| Linear::load(d_in, d_out, false, vb.below(name));
        Ok(Self::from_linear(layer("W_query")?, layer("W_key")?, layer("W_value")?))
    }

    /// Returns the query, key and value projections as matrices that multiply as `x W`.
    ///
    /// With [`SelfAttention::from_matrices`], this is exercise 3.1's transfer from `v2` to `v1`.
    ///
    /// # Errors
    /// If candle cannot transpose them.
    pub fn matrices(&self) -> Result<[Tensor; 3]> {
        let matrix = |layer: &Linear| layer.weight().to_tensor()?.t()?.contiguous();
        Ok([matrix(&self.query)?, matrix(&self.key)?, matrix(&self.value)?])
    }

    /// Attention scores before scaling and softmax, `Q Kᵀ`.
    ///
    /// # Shapes
    /// `x` `(…, T, d_in)`; returns `(…, T, T)`.
    ///
    /// # Errors
    /// If the width of `x` does not match.
    pub fn scores(&self, x: &Tensor) -> Result<Tensor> {
        self.query.forward(x)?.matmul(&self.key.forward(x)?.t()?)
    }

    /// Attention weights, `softmax(Q Kᵀ / sqrt(d_out))`.
    ///
    /// # Shapes
    /// `x` `(…, T, d_in)`; returns `(…, T, T)`.
    ///
    /// # Errors
    /// If the width of `x` does not match.
    pub fn weights(&self, x: &Tensor) -> Result<Tensor> {
        softmax(&(self.scores(x)? * self.scale())?, D::Minus1)
    }

    /// Context vectors, `softmax(Q Kᵀ / sqrt(d_out)) V`.
    ///
    /// # Shapes
    /// `x` `(…, T, d_in)`; returns `(…, T, d_out)`.
    ///
    /// # Errors
    /// If the width of `x` does not match.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.weights(x)?.matmul(&self.value.forward(x)?)
    }

    fn scale(&self) -> f64 {
        ScaledDotProduct::new(self.key.out_features()).scale
    }
}

/// Causal self-attention on batches, with dropout on the weights (§3.5.3).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::{Pass, steps::{CausalAttention, SelfAttention}};
///
/// let matrix = Tensor::eye(2, DType::F32, &Device::Cpu)?;
/// let layer = CausalAttention::new(SelfAttention::from_matrices(&matrix, &matrix, &matrix)?, 0.0);
/// let x = Tensor::new(&[[[1f32, 5.], [3., 2.], [4., 6.]]], &Device::Cpu)?;
/// let context = layer.forward(&x, &mut Pass::inference())?.to_vec3::<f32>()?;
/// assert_eq!(context[0][0], [1., 5.], "the first token sees only itself");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CausalAttention {
    attention: SelfAttention,
    dropout: f64,
}

impl CausalAttention {
    /// Creates a layer from projections and a dropout rate for training.
    pub fn new(attention: SelfAttention, dropout: f64) -> Self {
        Self { attention, dropout }
    }

    /// Computes the context vectors of a batch.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        let scores = (self.attention.scores(x)? * self.attention.scale())?; // (B, T, T)
        let weights = softmax(&mask_with_negative_infinity(&scores)?, D::Minus1)?;
        pass.dropout(weights, self.dropout)?.matmul(&self.attention.value.forward(x)?)
    }
}

/// Several heads with concatenated outputs: the book's `MultiHeadAttentionWrapper`.
///
/// Each head is a separate [`CausalAttention`]. [`MultiHeadAttention`](crate::MultiHeadAttention) computes
/// the same with a single product; its weight stacks the rows of all heads' projections.
#[derive(Debug, Clone)]
pub struct StackedHeads {
    heads: Vec<CausalAttention>,
}

impl StackedHeads {
    /// Creates a layer from its heads.
    pub fn new(heads: Vec<CausalAttention>) -> Self {
        Self { heads }
    }

    /// Computes the heads' context vectors and concatenates them.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`; returns `(B, T, H · d_out)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        let contexts = self.heads.iter().map(|head| head.forward(x, pass)).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&contexts, D::Minus1)
    }
}

/// Computes attention of one query vector over keys and values (§3.4.1).
///
/// This is the step from a dot product to a context vector.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_attention::steps::attend_one;
///
/// let query = Tensor::new(&[0f32, 0.], &Device::Cpu)?; // equally similar to every key
/// let keys = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.], [7., 8.]], &Device::Cpu)?;
/// let values = Tensor::new(&[[1f32, 0., 0.], [3., 0., 2.], [0., 4., 2.], [0., 4., 4.]], &Device::Cpu)?;
/// assert_eq!(attend_one(&query, &keys, &values)?.to_vec1::<f32>()?, [1., 2., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `query` `(d)`, `keys` `(T, d)`, `values` `(T, d_v)`; returns `(d_v)`.
///
/// # Errors
/// If the shapes do not match.
pub fn attend_one(query: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
    let in_batch = |x: &Tensor| x.unsqueeze(0)?.unsqueeze(0);
    let (q, k, v) = (in_batch(&query.unsqueeze(0)?)?, in_batch(keys)?, in_batch(values)?); // (1, 1, T, d)
    let attention = ScaledDotProduct::new(query.dim(0)?);
    attention.forward(&q, &k, &v, &AttentionMask::Bidirectional, &[], &mut Pass::inference())?.flatten_all()
}
