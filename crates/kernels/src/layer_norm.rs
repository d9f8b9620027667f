//! Layer normalisation over the last axis: `y = (x - μ) / sqrt(σ² + ε) · γ + β`, with `σ² = mean((x - μ)²)`.
//!
//! The variance takes two passes: with GPT-2's large outlier channels, `E[x²] - E[x]²` loses its digits.
//! On the CPU, and where no gradient is asked for, one kernel does both passes over a row while it is in the nearest cache.
//! (Article 003 prints `σ = sqrt(mean(x))`, without the squared deviation and without ε; that is a slip.)

use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Result, Shape, Tensor};

use crate::ParameterSource;
use crate::parallel::{Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Simd};

/// Rows of a part of the output.
const PART_ROWS: usize = 16;

use crate::training::{self, is_trained_on_cpu};

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
    pub fn load(width: usize, epsilon: f64, vb: &impl ParameterSource) -> Result<Self> {
        Ok(Self::new(vb.parameter(width, "weight")?, Some(vb.parameter(width, "bias")?), epsilon))
    }

    /// Normalises every row of the last axis. Half-precision input is normalised in f32 and rounded once.
    ///
    /// # Shapes
    /// `x` `(…, width)`; returns the same shape and dtype.
    ///
    /// # Errors
    /// When the last axis of `x` has another width than the norm.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) if is_trained_on_cpu(x) => training::layer_norm(x, &self.weight, bias, self.epsilon),
            Some(bias) if self.is_fused(x, bias) => {
                let op = FusedLayerNorm { epsilon: self.epsilon };
                x.contiguous()?.apply_op3_no_bwd(&self.weight, bias, &op)
            }
            _ => self.forward_composed(x),
        }
    }

    /// Whether the kernel can be used: f32 on the CPU, no gradient wanted, shapes that fit.
    fn is_fused(&self, x: &Tensor, bias: &Tensor) -> bool {
        let plain = |x: &Tensor| x.dtype() == DType::F32 && x.device().is_cpu() && !x.track_op();
        let width = x.dims().last().copied().unwrap_or(0);
        let fits = |parameter: &Tensor| parameter.dims() == [width] && parameter.is_contiguous();
        width > 0 && [x, &self.weight, bias].into_iter().all(plain) && fits(&self.weight) && fits(bias)
    }

    /// The norm from candle's own operations: any device and type, with gradients.
    fn forward_composed(&self, x: &Tensor) -> Result<Tensor> {
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

/// The kernel; its inputs are contiguous f32 tensors that fit.
struct FusedLayerNorm {
    epsilon: f64,
}

impl CustomOp3 for FusedLayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = contiguous(x, x_layout)?;
        let (weight, bias) = (contiguous(weight, weight_layout)?, contiguous(bias, bias_layout)?);
        #[expect(clippy::cast_possible_truncation, reason = "added to an f32 variance")]
        let epsilon = self.epsilon as f32;
        let y = layer_norm(x, weight, bias, epsilon, InstructionSet::detected());
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }
}

fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (start, end) = layout.contiguous_offsets().unwrap_or_default();
    Ok(&storage.as_slice::<f32>()?[start..end])
}

/// Normalises rows as wide as `weight` and `bias`.
fn layer_norm(
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    epsilon: f32,
    instructions: InstructionSet,
) -> Vec<f32> {
    let row_len = weight.len();
    let mut y = vec![0.0; x.len()];
    for_each_part(&mut y, Parts { row_len, rows: PART_ROWS, columns: row_len }, |mut part| {
        for row in 0..part.rows() {
            let x = &x[(part.first_row + row) * row_len..][..row_len];
            instructions.run(NormRow { x, weight, bias, epsilon, y: part.row(row) });
        }
    });
    y
}

/// One row.
struct NormRow<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    epsilon: f32,
    y: &'a mut [f32],
}

impl Job for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.x.len() as f32;
        let (vectors, rest) = self.x.as_chunks::<LANES>();
        let mut sum = simd.splat(0.0);
        for vector in vectors {
            sum = simd.add(sum, simd.load(vector));
        }
        let mean = (simd.sum(sum) + rest.iter().sum::<f32>()) / width;
        let means = simd.splat(mean);
        let mut squares = simd.splat(0.0);
        for vector in vectors {
            let centered = simd.sub(simd.load(vector), means);
            squares = simd.mul_add(centered, centered, squares);
        }
        let rest_squares: f32 = rest.iter().map(|x| (x - mean) * (x - mean)).sum();
        let deviation = ((simd.sum(squares) + rest_squares) / width + self.epsilon).sqrt();
        let deviations = simd.splat(deviation);

        let (weights, weights_rest) = self.weight.as_chunks::<LANES>();
        let (biases, biases_rest) = self.bias.as_chunks::<LANES>();
        let (outputs, outputs_rest) = self.y.as_chunks_mut::<LANES>();
        for (((x, weight), bias), y) in vectors.iter().zip(weights).zip(biases).zip(outputs) {
            let normalized = simd.div(simd.sub(simd.load(x), means), deviations);
            simd.store(simd.mul_add(normalized, simd.load(weight), simd.load(bias)), y);
        }
        for (((x, weight), bias), y) in rest.iter().zip(weights_rest).zip(biases_rest).zip(outputs_rest) {
            *y = (x - mean) / deviation * weight + bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::random::noise;

    #[test]
    fn the_kernel_equals_the_composition() {
        for width in [1, 2, 15, 16, 24, 768, 1601] {
            for rows in [1, 3, 40] {
                let x = noise(rows * width, 1, 3.0, 2.0);
                let (weight, bias) = (noise(width, 2, 1.0, 1.0), noise(width, 3, 0.0, 1.0));
                let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap();
                let norm = LayerNorm::new(tensor(&weight), Some(tensor(&bias)), 1e-5);
                let expected = norm.forward_composed(&tensor(&x).reshape((rows, width)).unwrap()).unwrap();
                let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for instructions in InstructionSet::available() {
                    let y = layer_norm(&x, &weight, &bias, 1e-5, instructions);
                    for (y, expected) in y.iter().zip(&expected) {
                        // The mean of values near 3 is rounded to 2e-7 and divided by a deviation of about 0.6.
                        assert!((y - expected).abs() < 3e-6, "{instructions:?} {width}: {y} for {expected}");
                    }
                }
            }
        }
    }

    /// Rows with NaN, infinite, huge and denormal values, and rows without any difference, in vectors and behind the last one.
    #[test]
    fn special_rows_are_those_of_the_composition() {
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
            for instructions in InstructionSet::available() {
                let y = layer_norm(&x, &weight, &bias, 1e-5, instructions);
                for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                    let is_same = y.is_nan() == expected.is_nan() && (y - expected).abs().max(0.0) < 3e-6;
                    let (row, value) = (index / width, x[index]);
                    assert!(is_same, "{instructions:?} {width}: row {row}, {y} for {expected}, of {value:e}");
                }
            }
        }
    }
}
