//! Dropout from a seeded generator: candle's own cannot be seeded on the CPU.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, RandomStream};

use crate::error::KernelError;
use crate::training::apply_dropout;

/// Sets each element to zero with probability `rate` and divides the others by `1 - rate`, so that the expected
/// value stays.
///
/// The generator gives a seed, from which all threads draw: the same state of it gives the same mask on every CPU and every NVIDIA
/// GPU. An Apple GPU draws by itself, from the same seed.
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
    apply_dropout(x, Dropout { rate, seed: generator.seed() })
}
