//! The types of numbers that training computes with, as candle holds them.

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use candle_gpt2_arithmetic::{Attention, Epilogue, Float, PackedMatrix, PanelBias, text_attention};

use crate::per_thread::{Operation, Sums};

/// Runs a generic function for the element type of a tensor: f32 or f64.
macro_rules! for_float {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            candle_core::DType::F32 => $function::<f32>($($argument),*),
            candle_core::DType::F64 => $function::<f64>($($argument),*),
            other => Err(candle_core::Error::UnsupportedDTypeForOp(other, "an operation of training").bt()),
        }
    };
}
pub(super) use for_float;

/// f32 or f64 on a CPU.
pub(crate) trait CpuFloat: Float + WithDType {
    /// The values of a storage of this type.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;

    /// The product with a packed weight, and a bias.
    fn packed_product(weight: &PackedMatrix, x: &[Self], bias: Option<&[Self]>) -> Result<Vec<Self>>;

    /// Attention of all heads; `None` if there is no memory for keys and values.
    fn attention_of_texts(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Option<Vec<Self>> {
        Some(Self::attention(qkv, attention))
    }

    /// The values of a packed weight, `(out, in)`.
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

    fn attention_of_texts(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Option<Vec<Self>> {
        match attention {
            // With the bits of a cache.
            Attention { added: None, dropout: None, .. } => text_attention(qkv, attention),
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
        candle_core::bail!("products with packed weights are computed in f32")
    }

    fn expanded(_: &PackedMatrix) -> Result<Vec<Self>> {
        candle_core::bail!("products with packed weights are computed in f32")
    }
}

/// An [`Operation`] whose backward pass is in the type of its gradient, on a CPU.
pub(super) trait FloatOperation: Send + Sync + 'static {
    /// Name for messages.
    const NAME: &str;

    /// Adds the gradients of the inputs, as far as they are wanted, to the sums.
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

/// Values as candle stores them on a CPU.
pub(super) fn on_cpu<T: CpuFloat>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

/// The elements of a contiguous storage, which `op` reads.
pub(crate) fn elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<&'a [T]> {
    let all = T::cpu_storage_as_slice(storage)?;
    let range = layout.contiguous_offsets().and_then(|(start, end)| all.get(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op }.bt())
}

/// The elements of a contiguous storage, to be changed.
pub(super) fn elements_mut<'a, T: CpuFloat>(
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<&'a mut [T]> {
    let range = layout.contiguous_offsets();
    let elements = T::values_mut(storage).zip(range).and_then(|(all, (start, end))| all.get_mut(start..end));
    elements.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "an operation of training" }.bt())
}

/// Runs `work` on the elements of tensors on the CPU, which are made contiguous first.
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

/// The same for a number of tensors that is known at run time only.
pub(super) fn with_slices<T: CpuFloat, R>(
    tensors: &[&Tensor],
    work: impl FnOnce(&[&[T]]) -> Result<R>,
) -> Result<R> {
    let kept: Vec<Tensor> = tensors.iter().map(|tensor| tensor.contiguous()).collect::<Result<_>>()?;
    let guards: Vec<_> = kept.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = Vec::with_capacity(kept.len());
    for (storage, layout) in &guards {
        slices.push(elements(on_the_cpu(storage)?, layout, "an operation of training")?);
    }
    work(&slices)
}

/// What a storage on the CPU holds.
pub(super) fn on_the_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => candle_core::bail!("an operation of training runs on the CPU only"),
    }
}
