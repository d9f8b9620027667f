//! Layer normalisation over the last axis: `y = (x - μ) / sqrt(σ² + ε) · γ + β`, with `σ² = mean((x - μ)²)`.
//!
//! The variance takes two passes: with GPT-2's large outlier channels, `E[x²] - E[x]²` loses its digits.
//! (Article 003 prints `σ = sqrt(mean(x))`, without the squared deviation and without ε; that is a slip.)

use candle_core::{D, DType, Result, Tensor};
use candle_nn::VarBuilder;

use crate::training::{is_trained_on_cpu, layer_norm};

/// Layer normalisation with a learned scale and, optionally, a learned shift.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    epsilon: f64,
}

impl LayerNorm {
    /// A norm from its tensors: `weight` and `bias` of shape `(width)`; `epsilon` is added to the variance.
    pub fn new(weight: Tensor, bias: Option<Tensor>, epsilon: f64) -> Self {
        Self { weight, bias, epsilon }
    }

    /// A norm from the parameters `weight` and `bias` below the path of `vb`.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(width: usize, epsilon: f64, vb: &VarBuilder) -> Result<Self> {
        Ok(Self::new(vb.get(width, "weight")?, Some(vb.get(width, "bias")?), epsilon))
    }

    /// Normalises every row of the last axis. Half-precision input is normalised in f32 and rounded once.
    ///
    /// # Shapes
    /// `x` `(…, width)`; returns the same shape and dtype.
    ///
    /// # Errors
    /// When the last axis of `x` has another width than the norm.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if let (true, Some(bias)) = (is_trained_on_cpu(x), &self.bias) {
            return layer_norm(x, &self.weight, bias, self.epsilon);
        }
        let dtype = x.dtype();
        let x = match dtype {
            DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
            _ => x.clone(),
        };
        let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
        let normalized = centered.broadcast_div(&(variance + self.epsilon)?.sqrt()?)?.to_dtype(dtype)?;
        let scaled = normalized.broadcast_mul(&self.weight)?;
        match &self.bias {
            Some(bias) => scaled.broadcast_add(bias),
            None => Ok(scaled),
        }
    }

    /// Number of trainable values: scale and shift.
    pub fn parameter_count(&self) -> usize {
        self.weight.elem_count() + self.bias.as_ref().map_or(0, Tensor::elem_count)
    }
}
