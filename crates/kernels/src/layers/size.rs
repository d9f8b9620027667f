//! Parameter counts and memory sizes of layers and models.

use std::iter::Sum;
use std::ops::Add;

use candle_core::Tensor;

/// Size of the parameters of a layer, or of a model as the sum of its layers.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{LayerNorm, ParameterSize};
///
/// let ones = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// let size = LayerNorm::new(ones.clone(), Some(ones), 1e-5).size();
/// assert_eq!(size, ParameterSize { count: 8, trainable: 0, bytes: 32 });
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParameterSize {
    /// Number of distinct parameters, excluding adapters.
    pub count: usize,
    /// Number of trainable parameters, including adapters.
    pub trainable: usize,
    /// Bytes in memory, in the dtype and layout of each parameter, including adapters.
    pub bytes: usize,
}

impl From<&Tensor> for ParameterSize {
    fn from(tensor: &Tensor) -> Self {
        let count = tensor.elem_count();
        let trainable = if tensor.track_op() { count } else { 0 };
        Self { count, trainable, bytes: count * tensor.dtype().size_in_bytes() }
    }
}

impl Add for ParameterSize {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            trainable: self.trainable + other.trainable,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl Sum for ParameterSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), Self::add)
    }
}
