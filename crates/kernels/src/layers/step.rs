//! Self-attention of one new token for each row whose places are read from the device's memory, where other functions take
//! numbers: so a [`Recording`](crate::Recording) of a step serves all steps.

use candle_core::{DType, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;

use super::kv_memory::KvMemory;
use super::linear::Linear;
use super::matrix::Matrix;
use crate::cuda;
use crate::error::KernelError;

/// Causal self-attention of a new token of each row after the `lengths[b]` tokens that memory holds: `projection` gives its
/// query, key and value, side by side; key and value are written into memory, and the query sees all keys up to its own.
///
/// On an NVIDIA GPU a row without room overwrites its last token.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{KvMemory, KvSlot, Linear, step_attention};
///
/// let projection = Linear::new(Tensor::ones((3 * 6, 4), DType::F32, &Device::Cpu)?, None)?;
/// let memory = KvMemory::new(2, 3, 16, DType::F32, &Device::Cpu)?; // two heads of width 3
/// let x = Tensor::ones((1, 1, 4), DType::F32, &Device::Cpu)?;
/// let lengths = Tensor::new(&[0u32], &Device::Cpu)?;
/// let slots = KvSlot::side_by_side(1, 16);
/// let context = step_attention(&projection, &x, &memory, &slots, 0.5, &lengths)?;
/// assert_eq!(context.to_vec3::<f32>()?, [[[4.; 6]]], "the first token sees its own value");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `x` `(B, 1, C)`; `projection` `C` to `3 · H · D`; a slot for each row, on a GPU side by side; `lengths` `(B)` of u32. Returns the heads' contexts side by side, `(B, 1, H · D)`.
///
/// # Errors
/// When the shapes are not these, or, elsewhere than on an NVIDIA GPU, a row has no room; on an NVIDIA GPU also for a
/// projection without bias, if a gradient is wanted, for heads wider than 256, and for types that differ or are other than
/// f32, f16 and bf16.
pub fn step_attention(
    projection: &Linear,
    x: &Tensor,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f64,
    lengths: &Tensor,
) -> Result<Tensor> {
    let (batch, heads, head_dim) = (slots.len(), memory.num_heads(), memory.head_dim());
    let refused = || {
        let capacity = slots.first().map_or(0, |slot| slot.capacity);
        let memory = (vec![batch, heads, capacity, head_dim], memory.dtype());
        KernelError::NotAStep { token: (x.dims().to_vec(), x.dtype()), memory }
    };
    if x.device().is_cuda() {
        let (Matrix::Dense(weight), Some(bias)) = (projection.weight(), projection.bias()) else {
            return Err(refused().into());
        };
        let Some([keys, values]) = memory.side_by_side(slots)? else { return Err(refused().into()) };
        let context = cuda::step_attention([x, weight, bias], [&keys, &values], scale, lengths)?;
        return context.ok_or_else(|| refused().into());
    }
    if x.dims().get(1) != Some(&1)
        || !memory.has_kernel()
        || projection.out_features() != 3 * heads * head_dim
    {
        return Err(refused().into());
    }
    let projected = projection.forward(x)?.reshape((batch, 3 * heads, 1, head_dim))?;
    let third = |index: usize| projected.narrow(1, index * heads, heads); // (B, H, 1, D)
    let lengths = lengths.to_dtype(DType::U32)?.to_vec1::<u32>()?;
    let places: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    memory.write(slots, [&third(1)?, &third(2)?], &places)?;
    let seen: Vec<_> = places.iter().map(|place| 0..place + 1).collect();
    let context = memory.attention(&third(0)?, slots, scale, &seen)?; // (B, H, 1, D)
    context.reshape((batch, 1, heads * head_dim))
}
