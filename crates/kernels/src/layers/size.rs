//! How much there is of a layer's or a model's parameters.

use std::iter::Sum;
use std::ops::Add;

use candle_core::Tensor;

/// The size of parameters: each layer gives its own, a model the sum of its layers'.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{LayerNorm, ParameterSize};
///
/// let ones = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// let size = LayerNorm::new(ones.clone(), Some(ones), 1e-5).size();
/// assert_eq!(size, ParameterSize { count: 8, bytes: 32 });
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParameterSize {
    /// Number of distinct values, without an adapter's.
    pub count: usize,
    /// Bytes that they take in memory, in the type and the layout in which they are held, with an adapter's.
    pub bytes: usize,
}

impl From<&Tensor> for ParameterSize {
    fn from(tensor: &Tensor) -> Self {
        let count = tensor.elem_count();
        Self { count, bytes: count * tensor.dtype().size_in_bytes() }
    }
}

impl Add for ParameterSize {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { count: self.count + other.count, bytes: self.bytes + other.bytes }
    }
}

impl Sum for ParameterSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), Self::add)
    }
}
