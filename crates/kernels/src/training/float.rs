//! Element types of CPU training, and access to their values in candle's storage.

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use candle_gpt2_arithmetic::{Attention, Epilogue, Float, PackedMatrix, PanelBias, sequence_attention};

use crate::per_thread::{Operation, Sums};

/// Calls a generic function with the element type of a tensor: f32 or f64.
macro_rules! for_float {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            candle_core::DType::F32 => $function::<f32>($($argument),*),
            candle_core::DType::F64 => $function::<f64>($($argument),*),
            other => Err(candle_core::Error::UnsupportedDTypeForOp(other, "training operation").bt()),
        }
    };
}
pub(super) use for_float;

/// Element type of CPU training: f32 or f64.
pub(crate) trait CpuFloat: Float + WithDType {
    /// Returns the values of a storage for writing, if the storage has this dtype.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;

    /// Product with a packed weight, plus the bias if there is one.
    fn packed_product(weight: &PackedMatrix, x: &[Self], bias: Option<&[Self]>) -> Result<Vec<Self>>;

    /// Attention of all heads, or `None` if the keys and values cannot be allocated.
    fn attention_of_sequences(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Option<Vec<Self>> {
        Some(Self::attention(qkv, attention))
    }

    /// Unpacked values of a packed weight, `(out, in)`.
    fn expanded(weight: &PackedMatrix) -> Result<Vec<Self>>;
}

impl CpuFloat for f32 {
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }

    fn packed_product(weight: &PackedMatrix, x: &[Self], bias: Option<&[Self]>) -> Result<Vec<Self>> {
        let bias = bias.map(PanelBias::new);
        let rows = x.len() / weight.in_features().max(1);
        Ok(weight.product(x, rows, Epilogue { bias: bias.as_ref(), ..Epilogue::default() }))
    }

    fn attention_of_sequences(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Option<Vec<Self>> {
        match attention {
            // Bit-identical to attention over a KV cache.
            Attention { added: None, dropout: None, .. } => sequence_attention(qkv, attention),
            _ => Some(Self::attention(qkv, attention)),
        }
    }

    fn expanded(weight: &PackedMatrix) -> Result<Vec<Self>> {
        Ok(weight.rows(&(0..weight.out_features()).collect::<Vec<_>>()))
    }
}

impl CpuFloat for f64 {
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        match storage {
            CpuStorage::F64(values) => Some(values),
            _ => None,
        }
    }

    fn packed_product(_: &PackedMatrix, _: &[Self], _: Option<&[Self]>) -> Result<Vec<Self>> {
        candle_core::bail!("packed weights do not support f64; convert the input to f32")
    }

    fn expanded(_: &PackedMatrix) -> Result<Vec<Self>> {
        candle_core::bail!("packed weights do not support f64; convert the input to f32")
    }
}

/// [`Operation`] on a CPU whose backward pass runs in the dtype of its gradient.
pub(super) trait FloatOperation: Send + Sync + 'static {
    /// Name for error messages.
    const NAME: &str;

    /// Adds a gradient to `sums` for each input that needs one.
    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()>;
}

impl<O: FloatOperation> Operation for O {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: CpuFloat>(
            operation: &impl FloatOperation,
            inputs: &[Tensor],
            gradient: &Tensor,
            sums: &mut Sums,
        ) -> Result<()> {
            operation.backward::<T>(inputs, gradient, sums)
        }
        for_float!(gradient.dtype(), backward(self, inputs, gradient, sums))
    }
}

/// Wraps values in candle's CPU storage.
pub(super) fn on_cpu<T: CpuFloat>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

/// Elements of a contiguous storage; errors name the operation `op`.
pub(crate) fn elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<&'a [T]> {
    let all = T::cpu_storage_as_slice(storage)?;
    let range = layout.contiguous_offsets().and_then(|(start, end)| all.get(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op }.bt())
}

/// Mutable elements of a contiguous storage.
pub(super) fn elements_mut<'a, T: CpuFloat>(
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<&'a mut [T]> {
    let range = layout.contiguous_offsets();
    let elements = T::values_mut(storage).zip(range).and_then(|(all, (start, end))| all.get_mut(start..end));
    elements.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "training operation" }.bt())
}

/// Calls `work` with the elements of CPU tensors, which are made contiguous first.
pub(super) fn with_elements<T: CpuFloat, const N: usize, R>(
    tensors: [&Tensor; N],
    work: impl FnOnce([&[T]; N]) -> Result<R>,
) -> Result<R> {
    with_slices(&tensors, |slices| {
        let mut elements: [&[T]; N] = [&[]; N];
        elements.copy_from_slice(slices);
        work(elements)
    })
}

/// Like [`with_elements`], for a number of tensors that is known only at run time.
pub(super) fn with_slices<T: CpuFloat, R>(
    tensors: &[&Tensor],
    work: impl FnOnce(&[&[T]]) -> Result<R>,
) -> Result<R> {
    let kept: Vec<Tensor> = tensors.iter().map(|tensor| tensor.contiguous()).collect::<Result<_>>()?;
    let guards: Vec<_> = kept.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = Vec::with_capacity(kept.len());
    for (storage, layout) in &guards {
        slices.push(elements(on_the_cpu(storage)?, layout, "training operation")?);
    }
    work(&slices)
}

/// CPU storage, or an error if the storage is not on the CPU.
pub(super) fn on_the_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => candle_core::bail!("this training operation runs only on the CPU"),
    }
}
