//! Self-attention of new tokens whose positions are read from device memory.
//!
//! Other functions take positions as host values. Reading them from device memory lets one
//! [`Recording`](crate::Recording) of a step serve all steps.

use candle_core::{DType, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;

use super::kv_memory::KvMemory;
use super::linear::Linear;
use super::matrix::Matrix;
use crate::cuda;
use crate::error::KernelError;

/// Causal self-attention of `T` new tokens for each row, at consecutive `positions`.
///
/// `projection` computes the queries, keys and values, concatenated. Keys and values are written to `memory`,
/// and a query sees all keys up to its own position.
///
/// An NVIDIA GPU reads only the first position of each row, so positions that are not consecutive give an
/// unspecified result. A row without capacity for its tokens overwrites its last tokens there.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_arithmetic::KvSlot;
/// use candle_gpt2_kernels::{KvMemory, Linear, step_attention};
///
/// let projection = Linear::new(Tensor::ones((3 * 6, 4), DType::F32, &Device::Cpu)?, None)?;
/// let memory = KvMemory::new(2, 3, 16, DType::F32, &Device::Cpu)?; // two heads of width 3
/// let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu)?;
/// let positions = Tensor::new(&[[0u32, 1]], &Device::Cpu)?;
/// let slots = KvSlot::side_by_side(1, 16);
/// let context = step_attention(&projection, &x, &memory, &slots, 0.5, &positions)?;
/// assert_eq!(context.to_vec3::<f32>()?, [[[4.; 6]; 2]], "both tokens see the same values");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `x` `(B, T, C)`; `projection` maps `C` to `3 · H · D`; one slot for each row, adjacent on a GPU;
/// `positions` `(B, T)` of u32. Returns the concatenated contexts of the heads, `(B, T, H · D)`.
///
/// # Errors
/// If the shapes do not match. On devices other than NVIDIA GPUs, also if a row has no capacity for its
/// tokens.
///
/// On an NVIDIA GPU, also in these cases:
///
/// - The projection has no bias, or a gradient is needed.
/// - A head is wider than 256.
/// - [`open_cuda`](crate::open_cuda) has not opened the device, so it may have several streams.
/// - The weight is neither contiguous nor a transposed view of a contiguous tensor.
/// - The slots are not adjacent, or `positions` is not contiguous.
/// - A row has more new tokens than its slot holds, or all rows together have more than 65,535.
/// - The dtypes differ or are not f32, f16 or bf16.
pub fn step_attention(
    projection: &Linear,
    x: &Tensor,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f64,
    positions: &Tensor,
) -> Result<Tensor> {
    let (batch, heads, head_dim) = (slots.len(), memory.num_heads(), memory.head_dim());
    let refused = || {
        let capacity = slots.first().map_or(0, |slot| slot.capacity);
        let memory = (vec![batch, heads, capacity, head_dim], memory.dtype());
        let tokens = (x.dims().to_vec(), x.dtype());
        KernelError::NotAStep { tokens, positions: positions.dims().to_vec(), memory }
    };
    if x.device().is_cuda() {
        let (Matrix::Dense(weight), Some(bias)) = (projection.weight(), projection.bias()) else {
            return Err(refused().into());
        };
        let Some([keys, values]) = memory.side_by_side(slots)? else { return Err(refused().into()) };
        let context = cuda::step_attention([x, weight, bias], [&keys, &values], scale, positions)?;
        return context.ok_or_else(|| refused().into());
    }
    let (rows, tokens) = positions.dims2()?;
    if x.dims().split_last().map(|(_, rows)| rows) != Some(&[batch, tokens])
        || rows != batch
        || tokens == 0
        || !memory.has_kernel()
        || projection.out_features() != 3 * heads * head_dim
    {
        return Err(refused().into());
    }
    let projected = projection.forward(x)?.reshape((batch, tokens, 3 * heads, head_dim))?.transpose(1, 2)?;
    let third = |index: usize| projected.narrow(1, index * heads, heads); // (B, H, T, D)
    let places = positions.to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>()?;
    let firsts: Vec<usize> = places.iter().step_by(tokens).map(|first| *first as usize).collect();
    memory.write(slots, [&third(1)?, &third(2)?], &firsts)?;
    let seen: Vec<_> = places.iter().map(|place| 0..*place as usize + 1).collect();
    let context = memory.attention(&third(0)?, slots, scale, &seen)?; // (B, H, T, D)
    context.transpose(1, 2)?.reshape((batch, tokens, heads * head_dim))
}
