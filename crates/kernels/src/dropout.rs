//! Dropout from a seeded generator: candle's own cannot be seeded on the CPU.

use candle_core::{Result, Tensor};

use crate::{Generator, KernelError};

/// Sets each element to zero with probability `rate` and divides the others by `1 - rate`, so that the expected
/// value stays.
///
/// The draws are made in the order of the elements, so the same generator state gives the same mask everywhere.
///
/// # Errors
/// When `rate` is outside `[0, 1]`.
pub fn dropout(x: &Tensor, rate: f64, generator: &mut Generator) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&rate) {
        return Err(KernelError::DropoutRate { found: rate }.into());
    }
    if rate == 0.0 {
        return Ok(x.clone());
    }
    if rate == 1.0 {
        return x.zeros_like();
    }
    #[expect(clippy::cast_possible_truncation, reason = "the scale is stored in f32, as the mask is")]
    let kept = (1.0 / (1.0 - rate)) as f32;
    let mask: Vec<f32> =
        (0..x.elem_count()).map(|_| if generator.uniform() < rate { 0.0 } else { kept }).collect();
    x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
}
