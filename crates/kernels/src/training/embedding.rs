//! Embedding tables: rows by token ID, and consecutive rows for positions.
//!
//! Gradients reach only the rows that were looked up.

use candle_core::{DType, Result, Tensor};

use super::composed::column_sums;
use super::float::{CpuFloat, FloatOperation, for_float, on_cpu, with_elements};
use super::operation::{record, record_tensor};
use crate::cuda;
use crate::error::KernelError;
use crate::per_thread::{Operation, Sums, has_cpu_kernels};

/// Rejects IDs that are out of range for a table with `rows` rows.
///
/// [`Linear::embedding`](crate::Linear::embedding) makes the same check. IDs on a GPU are read back.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::expect_ids;
///
/// let ids = Tensor::new(&[[0u32, 10]], &Device::Cpu)?;
/// assert!(expect_ids(&ids, 11).is_ok());
/// assert!(expect_ids(&ids, 10).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If an ID is out of range, or `ids` does not hold integers.
pub fn expect_ids(ids: &Tensor, rows: usize) -> Result<()> {
    row_indices(ids, rows).map(drop)
}

/// Row indices for `ids`, all below `rows`.
pub(crate) fn row_indices(ids: &Tensor, rows: usize) -> Result<Vec<usize>> {
    let flat = ids.flatten_all()?;
    let index = |id: i64| match usize::try_from(id) {
        Ok(index) if index < rows => Ok(index),
        _ => Err(KernelError::NoSuchRow { row: id, rows }.into()),
    };
    match flat.dtype() {
        DType::U8 | DType::I64 => flat.to_dtype(DType::I64)?.to_vec1()?.into_iter().map(index).collect(),
        _ => flat.to_vec1::<u32>()?.into_iter().map(|id| index(id.into())).collect(),
    }
}

/// Looks up table rows by ID on the CPU.
///
/// # Shapes
/// `table` `(rows, width)`, `ids` of any shape; returns that shape followed by `width`.
pub(crate) fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    fn forward<T: CpuFloat>(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (rows, width) = table.dims2()?;
        let row_indices = row_indices(ids, rows)?;
        let values = with_elements::<T, 1, _>([table], |[table]| Ok(T::rows(table, width, &row_indices)))?;
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        record(&[table], on_cpu(values), shape, Rows { row_indices })
    }
    for_float!(table.dtype(), forward(table, ids))
}

/// Looks up table rows by ID on a GPU; `row_indices` are the same indices on the host.
///
/// # Shapes
/// Same as [`embedding`].
pub(crate) fn embedding_on_gpu(table: &Tensor, ids: &Tensor, row_indices: Vec<usize>) -> Result<Tensor> {
    let values = table.detach().embedding(&ids.flatten_all()?)?;
    let values = values.reshape([ids.dims(), &[table.dim(1)?]].concat())?;
    record_tensor(&[table], values, RowsOnGpu { row_indices })
}

struct RowsOnGpu {
    row_indices: Vec<usize>,
}

impl Operation for RowsOnGpu {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (table, gradient) = (&inputs[0], gradient.detach());
        let (rows, width) = table.dims2()?;
        match cuda::add_rows(&gradient, &self.row_indices, rows)? {
            Some(found) => sums.add(table, found),
            None => {
                let ids = self
                    .row_indices
                    .iter()
                    .map(|index| u32::try_from(*index).map_err(candle_core::Error::wrap));
                let ids = Tensor::new(ids.collect::<Result<Vec<_>>>()?, table.device())?;
                let gradient = gradient.reshape((self.row_indices.len(), width))?;
                sums.add(table, table.detach().zeros_like()?.index_add(&ids, &gradient, 0)?)
            }
        }
    }
}

struct Rows {
    row_indices: Vec<usize>,
}

impl FloatOperation for Rows {
    const NAME: &str = "embedding";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let table = &inputs[0];
        let (_, width) = table.dims2()?;
        with_elements::<T, 1, _>([gradient], |[gradient]| {
            sums.update::<T>(table, |sum, is_fresh| {
                if is_fresh {
                    sum.fill(T::ZERO);
                }
                T::add_rows(sum, width, &self.row_indices, gradient);
            })
        })
    }
}

/// Adds consecutive rows of a table, starting at row `first`, to each sequence of `x`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::add_positions;
///
/// let x = Tensor::zeros((1, 2, 3), DType::F32, &Device::Cpu)?;
/// let table = Tensor::arange(0f32, 15., &Device::Cpu)?.reshape((5, 3))?;
/// assert_eq!(add_positions(&x, &table, 3)?.to_vec3::<f32>()?, [[[9., 10., 11.], [12., 13., 14.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `x` `(B, T, C)`, `table` `(rows, C)`; returns the shape of `x`.
///
/// # Errors
/// If the widths differ, or the table has too few rows.
pub fn add_positions(x: &Tensor, table: &Tensor, first: usize) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, table: &Tensor, first: usize) -> Result<Tensor> {
        let positions = table.narrow(0, first, x.dim(1)?)?;
        let values =
            with_elements::<T, 2, _>([x, &positions], |[x, positions]| Ok(T::add_to_each(x, positions)))?;
        record(&[x, table], on_cpu(values), x.shape(), Positions { first })
    }
    let (_, tokens, width) = x.dims3()?;
    if has_cpu_kernels(x) && x.dtype() == table.dtype() && table.dim(1)? == width {
        return for_float!(x.dtype(), forward(x, table, first));
    }
    if x.dtype() == table.dtype() && table.dim(1)? == width {
        let y = x.detach().broadcast_add(&table.detach().narrow(0, first, tokens)?)?;
        return record_tensor(&[x, table], y, ComposedPositions { first });
    }
    x.broadcast_add(&table.narrow(0, first, tokens)?)
}

/// Position embeddings composed of candle operations.
struct ComposedPositions {
    first: usize,
}

impl Operation for ComposedPositions {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (x, table, first) = (&inputs[0], &inputs[1], self.first);
        let (batch, tokens, width) = x.dims3()?;
        if sums.wants(table) {
            let of_sequences = gradient.detach().contiguous()?.reshape((batch, tokens * width))?;
            let of_rows = column_sums(&of_sequences)?.reshape((tokens, width))?;
            sums.add(table, of_rows.pad_with_zeros(0, first, table.dim(0)? - first - tokens)?)?;
        }
        sums.share(x, gradient)
    }
}

struct Positions {
    first: usize,
}

impl FloatOperation for Positions {
    const NAME: &str = "positions";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (x, table, first) = (&inputs[0], &inputs[1], self.first);
        let (_, tokens, width) = x.dims3()?;
        with_elements::<T, 1, _>([gradient], |[gradient]| {
            sums.update::<T>(table, |sum, is_fresh| {
                if is_fresh {
                    sum.fill(T::ZERO);
                }
                let sum = &mut sum[first * width..(first + tokens) * width];
                gradient.chunks((tokens * width).max(1)).for_each(|sequence| T::add_to(sum, sequence));
            })
        })?;
        sums.share(x, gradient)
    }
}
