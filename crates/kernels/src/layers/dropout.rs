//! Dropout from a seeded generator: candle's own cannot be seeded on the CPU.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::RandomStream;

use crate::error::KernelError;
use crate::training::{apply_drawn, apply_dropout, drawn_on_gpu};

/// Sets each element to zero with probability `rate` and divides the others by `1 - rate`, so that the expected
/// value stays.
///
/// The draws are made in the order of the elements, so the same generator state gives the same mask on every CPU; a GPU draws by
/// itself, from a seed of the generator's.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{RandomStream, dropout};
///
/// let x = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
/// let dropped = dropout(&x, 0.75, &mut RandomStream::new(7))?.to_vec1::<f32>()?;
/// assert!(dropped.iter().all(|value| [0., 4.].contains(value)));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When `rate` is outside `[0, 1]`.
pub fn dropout(x: &Tensor, rate: f64, generator: &mut RandomStream) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&rate) {
        return Err(KernelError::DropoutRate { found: rate }.into());
    }
    if rate == 0.0 {
        return Ok(x.clone());
    }
    if rate == 1.0 {
        return x.zeros_like();
    }
    let scale = 1.0 / (1.0 - rate);
    if !x.device().is_cpu() {
        return apply_drawn(x, drawn_on_gpu(x.shape(), rate, generator.seed(), x.device())?, scale);
    }
    let mut kept = vec![false; x.elem_count()];
    generator.fill_kept(rate, &mut kept);
    apply_dropout(x, kept, scale)
}
