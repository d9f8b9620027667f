//! Sinusoidal position embeddings.
//!
//! They are `e[t, 2i] = sin(t / 10000^(2i/D))` and `e[t, 2i+1] = cos(t / 10000^(2i/D))`.
//!
//! Source: "Attention Is All You Need" (arXiv:1706.03762, section 3.5). A shift by `k` tokens rotates each
//! pair `(2i, 2i+1)` by the fixed angle `k / 10000^(2i/D)`, which is the reason for this form.

use candle_core::{Device, Result, Tensor};

use crate::AttentionError;

/// Base of the wavelengths in the paper.
const BASE: f64 = 10_000.0;

/// Table of sinusoidal position vectors.
///
/// ```
/// use candle_core::Device;
/// use candle_gpt2_attention::SinusoidalPositions;
///
/// let positions = SinusoidalPositions::new(5, 4, &Device::Cpu)?;
/// assert_eq!(positions.table().to_vec2::<f32>()?[0], [0., 1., 0., 1.], "sin 0 and cos 0");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SinusoidalPositions {
    table: Tensor,
}

impl SinusoidalPositions {
    /// Computes the vectors of positions `0..context_length` in f64 and rounds them to f32.
    ///
    /// # Errors
    /// If a size is zero, or allocation on the device fails.
    pub fn new(context_length: usize, width: usize, device: &Device) -> Result<Self> {
        if context_length == 0 || width == 0 {
            return Err(AttentionError::ZeroSize { name: "length or width of the position table" }.into());
        }
        let angle = |position: usize, channel: usize| {
            position as f64 / libm::pow(BASE, (channel - channel % 2) as f64 / width as f64)
        };
        let value = |position, channel| {
            let angle: f64 = angle(position, channel);
            if channel % 2 == 0 { libm::sin(angle) } else { libm::cos(angle) }
        };
        let values: Vec<f64> = (0..context_length)
            .flat_map(|position| (0..width).map(move |channel| value(position, channel)))
            .collect();
        let table = Tensor::from_vec(values, (context_length, width), &Device::Cpu)?;
        Ok(Self { table: table.to_dtype(candle_core::DType::F32)?.to_device(device)? })
    }

    /// Adds the vectors of positions `first..first + T` to embeddings.
    ///
    /// # Shapes
    /// `x` `(…, T, D)`; returns the same shape.
    ///
    /// # Errors
    /// If the positions exceed the table, or the width does not match.
    pub fn forward(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let tokens = x.dim(candle_core::D::Minus2)?;
        x.broadcast_add(&self.table.narrow(0, first, tokens)?.to_dtype(x.dtype())?)
    }

    /// Table of position vectors, `(context_length, D)`.
    pub fn table(&self) -> &Tensor {
        &self.table
    }
}
