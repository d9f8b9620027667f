//! Seeded dropout; candle's own cannot be seeded on the CPU.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, RandomStream};

use crate::error::KernelError;
use crate::training::apply_dropout;

/// Zeroes each element with probability `rate` and scales the others by `1 / (1 - rate)`.
///
/// The scale keeps the expected value of each element.
///
/// The generator supplies one seed for all threads. The same generator state gives the same mask on every
/// device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_arithmetic::RandomStream;
/// use candle_gpt2_kernels::dropout;
///
/// let x = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
/// let dropped = dropout(&x, 0.75, &mut RandomStream::new(7))?.to_vec1::<f32>()?;
/// assert!(dropped.iter().all(|value| [0., 4.].contains(value)));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `rate` is outside `[0, 1]`.
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
    apply_dropout(x, Dropout { rate, seed: generator.seed() })
}
