//! Adding a bias to every row, with the column sums as its gradient.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::{elements, for_real, is_cpu_float, with_elements};

/// Columns that one task sums up.
const COLUMN_BLOCK: usize = 64;
/// Rows that are summed by themselves before they join the total, which keeps the rounding error small.
const ROW_BLOCK: usize = 64;

/// `rows + bias`.
///
/// # Shapes
/// `rows` `(…, width)`, `bias` `(width)`.
pub(crate) fn add_bias(rows: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if is_cpu_float(rows) {
        rows.contiguous()?.apply_op2(&bias.contiguous()?, AddBias)
    } else {
        rows.broadcast_add(bias)
    }
}

struct AddBias;

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add-bias"
    }

    fn cpu_fwd(
        &self,
        rows: &CpuStorage,
        rows_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn forward<T: Real>(
            rows: &CpuStorage,
            rows_layout: &Layout,
            bias: &CpuStorage,
            bias_layout: &Layout,
        ) -> Result<CpuStorage> {
            let (rows, bias) = (elements::<T>(rows, rows_layout)?, elements::<T>(bias, bias_layout)?);
            let mut sums = Vec::with_capacity(rows.len());
            for row in rows.chunks_exact(bias.len()) {
                sums.extend(row.iter().zip(bias).map(|(value, bias)| *value + *bias));
            }
            Ok(T::to_cpu_storage_owned(sums))
        }
        let sums = for_real!(rows.dtype(), forward(rows, rows_layout, bias, bias_layout))?;
        Ok((sums, rows_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        fn sums<T: Real>(bias: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let width = gradient.dim(D::Minus1)?;
            let sums = with_elements::<T, 1, _>([gradient], |[gradient]| Ok(column_sums(gradient, width)))?;
            Tensor::from_vec(sums, bias.shape(), bias.device())
        }
        let sums = for_real!(gradient.dtype(), sums(bias, gradient))?;
        Ok((Some(gradient.clone()), Some(sums)))
    }
}

/// The sum of each column of a matrix.
fn column_sums<T: Real>(values: &[T], width: usize) -> Vec<T> {
    let mut totals = vec![T::zero(); width];
    totals.par_chunks_mut(COLUMN_BLOCK).enumerate().for_each(|(block, totals)| {
        vectorized(ColumnSums { values, width, first: block * COLUMN_BLOCK, totals });
    });
    totals
}

struct ColumnSums<'a, T> {
    values: &'a [T],
    width: usize,
    first: usize,
    totals: &'a mut [T],
}

impl<T: Real> Vectorized for ColumnSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { values, width, first, totals } = self;
        for rows in values.chunks(ROW_BLOCK * width) {
            let mut sums = [T::zero(); COLUMN_BLOCK];
            for row in rows.chunks_exact(width) {
                for (sum, value) in sums.iter_mut().zip(&row[first..first + totals.len()]) {
                    *sum += *value;
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total += sum;
            }
        }
    }
}
