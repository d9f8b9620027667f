//! Layer normalization over the last axis: `y = (x - μ) / sqrt(σ² + ε) · γ + β`.
//!
//! The variance is `σ² = mean((x - μ)²)`, computed in two passes. With GPT-2's large outlier channels,
//! `E[x²] - E[x]²` would lose its significant digits. On the CPU, one kernel makes both passes over a row
//! while it is in the L1 cache, and has its own backward pass.
//!
//! Source: "Layer Normalization" (arXiv:1607.06450, section 3).

use candle_core::{D, DType, Result, Tensor};
use candle_nn::Init;

use super::parameters::ParameterSource;
use super::size::ParameterSize;
use crate::{KernelError, cuda, training};

/// Layer normalization with a learned scale and an optional learned shift.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::LayerNorm;
///
/// let norm = LayerNorm::new(Tensor::ones(4, DType::F32, &Device::Cpu)?, None, 0.0);
/// let x = Tensor::new(&[[1f32, 1., 5., 5.]], &Device::Cpu)?; // mean 3, standard deviation 2
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[-1., -1., 1., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("ln_1", "ln_f"))]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    epsilon: f64,
}

impl LayerNorm {
    /// Creates a norm from `weight` and `bias`, both `(width)`; `epsilon` is added to the variance.
    pub fn new(weight: Tensor, bias: Option<Tensor>, epsilon: f64) -> Self {
        Self { weight, bias, epsilon }
    }

    /// Loads a norm from the parameters `weight` and `bias` below the path of `vb`.
    ///
    /// An empty `VarMap` initializes them to ones and zeros.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    pub fn load(width: usize, epsilon: f64, vb: impl ParameterSource) -> Result<Self> {
        let weight = vb.parameter(width, "weight", Init::Const(1.0))?;
        Ok(Self::new(weight, Some(vb.parameter(width, "bias", Init::Const(0.0))?), epsilon))
    }

    /// Normalizes every row of the last axis.
    ///
    /// Half-precision input is normalized in f32 and rounded once.
    ///
    /// # Shapes
    /// `x` `(…, width)`; returns the same shape and dtype.
    ///
    /// # Errors
    /// If the last axis of `x` does not match the norm's width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.dims().last() != Some(&self.width()) {
            return Err(KernelError::NormWidth { expected: self.width(), found: x.dims().to_vec() }.into());
        }
        match &self.bias {
            Some(bias) if self.is_fused(x, bias) => training::layer_norm(x, &self.weight, bias, self.epsilon),
            Some(bias) => {
                if let Some(y) = cuda::layer_norm(x, &self.weight, bias, self.epsilon)? {
                    return Ok(y);
                }
                match training::layer_norm_on_gpu(x, &self.weight, bias, self.epsilon)? {
                    Some(y) => Ok(y),
                    None => self.forward_composed(x),
                }
            }
            None => self.forward_composed(x),
        }
    }

    /// Whether the fused CPU kernel supports this input: on the CPU, one dtype, matching shapes.
    fn is_fused(&self, x: &Tensor, bias: &Tensor) -> bool {
        let width = x.dims().last().copied().unwrap_or(0);
        let fits = |parameter: &Tensor| parameter.dims() == [width] && parameter.dtype() == x.dtype();
        width > 0 && training::has_cpu_kernels(x) && fits(&self.weight) && fits(bias)
    }

    /// Computes the norm with candle's own operations: any device and dtype, with gradients.
    fn forward_composed(&self, x: &Tensor) -> Result<Tensor> {
        let norm = self.clone();
        training::recomputed(x, move |x| {
            let (centered, scale) = norm.centered(x)?;
            norm.scaled(&centered.broadcast_div(&scale)?)?.to_dtype(x.dtype())
        })
    }

    /// First half of the norm: `x - μ` and `sqrt(σ² + ε)`, in f32 for half-precision input.
    ///
    /// # Shapes
    /// `x` `(…, width)`; returns `(…, width)` and `(…, 1)`.
    ///
    /// # Errors
    /// If candle does not support the dtype of `x`.
    pub fn centered(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let x = match x.dtype() {
            DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
            _ => x.clone(),
        };
        let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (variance + self.epsilon)?.sqrt()?;
        Ok((centered, scale))
    }

    /// Second half of the norm: `normalized · γ + β`.
    ///
    /// # Shapes
    /// `normalized` `(…, width)`; returns the same shape.
    ///
    /// # Errors
    /// If the last axis does not match the norm's width.
    pub fn scaled(&self, normalized: &Tensor) -> Result<Tensor> {
        let dtype = normalized.dtype();
        let scaled = normalized.broadcast_mul(&self.weight.to_dtype(dtype)?)?;
        match &self.bias {
            Some(bias) => scaled.broadcast_add(&bias.to_dtype(dtype)?),
            None => Ok(scaled),
        }
    }

    /// Width of the normalized rows.
    pub fn width(&self) -> usize {
        self.weight.elem_count()
    }

    /// Scale `γ`, `(width)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Shift `β`, `(width)`, if the norm has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Size of the scale and the shift.
    pub fn size(&self) -> ParameterSize {
        [Some(&self.weight), self.bias.as_ref()].into_iter().flatten().map(ParameterSize::from).sum()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::noise::noise;

    #[test]
    fn kernel_equals_the_composition() {
        for width in [1, 2, 15, 16, 24, 768, 1601] {
            for rows in [1, 3, 40] {
                let x = noise(rows * width, 1, 3.0, 2.0);
                let (weight, bias) = (noise(width, 2, 1.0, 1.0), noise(width, 3, 0.0, 1.0));
                let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap();
                let norm = LayerNorm::new(tensor(&weight), Some(tensor(&bias)), 1e-5);
                let expected = norm.forward_composed(&tensor(&x).reshape((rows, width)).unwrap()).unwrap();
                let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let y = norm.forward(&tensor(&x).reshape((rows, width)).unwrap()).unwrap();
                let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for (y, expected) in y.iter().zip(&expected) {
                    // The mean of values near 3 is rounded to 2e-7 and divided by a standard deviation of
                    // about 0.6.
                    assert!((y - expected).abs() < 3e-6, "{width}: {y} vs. {expected}");
                }
            }
        }
    }

    /// Covers rows with NaN, infinite, huge and subnormal values, and constant rows.
    ///
    /// Widths cover full vectors and remainders.
    #[test]
    fn kernel_equals_the_composition_for_special_values() {
        const SPECIAL: [f32; 7] =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e30, 1e-40, f32::MIN_POSITIVE];
        for width in [5, 16, 35] {
            let mut x = noise(3 * SPECIAL.len() * width, 1, 3.0, 2.0);
            for (index, (special, rows)) in SPECIAL.into_iter().zip(x.chunks_mut(3 * width)).enumerate() {
                rows[(7 * index + 2) % width] = special;
                rows[width..2 * width].fill(special);
                rows[2 * width..].iter_mut().for_each(|x| *x *= 1e-40);
            }
            let (weight, bias) = (noise(width, 2, 1.0, 1.0), noise(width, 3, 0.0, 1.0));
            let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap();
            let norm = LayerNorm::new(tensor(&weight), Some(tensor(&bias)), 1e-5);
            let expected = norm.forward_composed(&tensor(&x).reshape(((), width)).unwrap()).unwrap();
            let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let y = norm.forward(&tensor(&x).reshape(((), width)).unwrap()).unwrap();
            let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                let is_same = y.is_nan() == expected.is_nan() && (y - expected).abs().max(0.0) < 3e-6;
                let (row, value) = (index / width, x[index]);
                assert!(is_same, "{width}: row {row}, {y} vs. {expected}, of {value:e}");
            }
        }
    }
}
