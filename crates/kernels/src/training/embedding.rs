//! Rows of a table: token embeddings by id, and position embeddings one after the other. Gradients reach those rows alone.

use candle_core::{Result, Tensor};

use super::arithmetic::Real;
use super::elementwise::add_to;
use super::operation::{Operation, Sums, record};
use super::{for_real, is_cpu_float, with_elements};
use crate::KernelError;

/// The rows `ids` of a table on the CPU.
///
/// # Shapes
/// `table` `(rows, width)`, `ids` of any shape; returns that shape with `width` after it.
pub(crate) fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    fn forward<T: Real>(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (rows, width) = table.dims2()?;
        let places: Vec<usize> =
            ids.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|id| id as usize).collect();
        if let Some(row) = places.iter().find(|id| **id >= rows) {
            return Err(KernelError::NoSuchRow { row: *row, rows }.into());
        }
        let values = with_elements::<T, 1, _>([table], |[table]| {
            Ok(places.iter().flat_map(|row| &table[row * width..(row + 1) * width]).copied().collect())
        })?;
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        record::<T>(&[table], values, shape, Rows { places })
    }
    for_real!(table.dtype(), forward(table, ids))
}

struct Rows {
    places: Vec<usize>,
}

impl Operation for Rows {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(
            places: &[usize],
            table: &Tensor,
            gradient: &Tensor,
            sums: &mut Sums,
        ) -> Result<()> {
            let (_, width) = table.dims2()?;
            with_elements::<T, 1, _>([gradient], |[gradient]| {
                sums.update::<T>(table, |sum, is_fresh| {
                    if is_fresh {
                        sum.fill(T::ZERO);
                    }
                    for (row, gradient) in places.iter().zip(gradient.chunks_exact(width.max(1))) {
                        let sum = &mut sum[row * width..(row + 1) * width];
                        sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += *gradient);
                    }
                })
            })
        }
        let table = &inputs[0];
        for_real!(table.dtype(), backward(&self.places, table, gradient, sums))
    }
}

/// `x` with the rows of a table from `first` on added to each text.
///
/// # Shapes
/// `x` `(B, T, C)`, `table` `(rows, C)`; returns the shape of `x`.
///
/// # Errors
/// When the widths differ, or the table ends before the texts do.
pub fn add_positions(x: &Tensor, table: &Tensor, first: usize) -> Result<Tensor> {
    fn forward<T: Real>(x: &Tensor, table: &Tensor, first: usize) -> Result<Tensor> {
        let mut values = with_elements::<T, 1, _>([x], |[x]| Ok(x.to_vec()))?;
        let positions = table.narrow(0, first, x.dim(1)?)?;
        with_elements::<T, 1, _>([&positions], |[positions]| {
            values.chunks_mut(positions.len().max(1)).for_each(|text| add_to(text, positions));
            Ok(())
        })?;
        record(&[x, table], values, x.shape(), Positions { first })
    }
    let (_, tokens, width) = x.dims3()?;
    if is_cpu_float(x) && x.dtype() == table.dtype() && table.dim(1)? == width {
        return for_real!(x.dtype(), forward(x, table, first));
    }
    x.broadcast_add(&table.narrow(0, first, tokens)?)
}

struct Positions {
    first: usize,
}

impl Operation for Positions {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(
            (x, table): (&Tensor, &Tensor),
            first: usize,
            gradient: &Tensor,
            sums: &mut Sums,
        ) -> Result<()> {
            let (_, tokens, width) = x.dims3()?;
            with_elements::<T, 1, _>([gradient], |[gradient]| {
                sums.update::<T>(table, |sum, is_fresh| {
                    if is_fresh {
                        sum.fill(T::ZERO);
                    }
                    let sum = &mut sum[first * width..(first + tokens) * width];
                    gradient.chunks((tokens * width).max(1)).for_each(|text| add_to(sum, text));
                })
            })
        }
        let (x, table) = (&inputs[0], &inputs[1]);
        for_real!(x.dtype(), backward((x, table), self.first, gradient, sums))?;
        sums.share(x, gradient)
    }
}
