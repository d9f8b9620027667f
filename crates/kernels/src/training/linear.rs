//! Products of linear layers, with and without an adapter, and their gradients.
//!
//! The gradients of `y = x Wᵀ + b` are `dx = dy W`, `dW = dyᵀ x` and, for the bias, the column sums of `dy`.
//! A layer with an adapter has a frozen base weight.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::{LowRank, LowRankGradients, MatrixView, PackedMatrix};

use super::composed::with_width;
use super::float::{CpuFloat, FloatOperation, for_float, on_cpu, with_elements};
use super::operation::record;
use crate::per_thread::Sums;

/// Computes the outputs of `x Wᵀ + b` in the range `outputs`.
///
/// # Shapes
/// `x` `(…, in)`, `weight` `(out, in)`, `bias` `(out)`; returns `(…, outputs.len())`. Callers must check the
/// shapes.
pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    outputs: Range<usize>,
) -> Result<Tensor> {
    fn forward<T: CpuFloat>(
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        outputs: Range<usize>,
    ) -> Result<Tensor> {
        let stored = Stored::of(weight)?;
        let tensors = [x, &stored.tensor, bias.unwrap_or(&stored.tensor)];
        let y = with_elements::<T, 3, _>(tensors, |[x, weight, values]| {
            let weight = stored.rows(weight, &outputs)?;
            let bias = bias.map(|_| &values[outputs.clone()]);
            Ok(T::product(rows_of(x, weight.columns()), weight.transposed(), bias))
        })?;
        let shape = with_width(x, outputs.len());
        match bias {
            Some(bias) => record(&[x, weight, bias], on_cpu(y), shape, Linear { outputs }),
            None => record(&[x, weight], on_cpu(y), shape, Linear { outputs }),
        }
    }
    for_float!(x.dtype(), forward(x, weight, bias, outputs))
}

/// Weight in its memory layout: `(out, in)`, or `(in, out)` as in checkpoints.
///
/// A layer views an `(in, out)` weight transposed.
struct Stored {
    tensor: Tensor,
    is_transposed: bool,
}

impl Stored {
    fn of(weight: &Tensor) -> Result<Self> {
        let transposed = weight.t()?;
        let is_transposed = !weight.is_contiguous() && transposed.is_contiguous();
        Ok(Self { tensor: if is_transposed { transposed } else { weight.clone() }, is_transposed })
    }

    /// View of a range of rows in the weight `(out, in)`.
    fn rows<'a, T>(&self, values: &'a [T], rows: &Range<usize>) -> Result<MatrixView<'a, T>> {
        let (height, width) = self.tensor.dims2()?;
        let view = MatrixView::new(values, height, width);
        let weight = if self.is_transposed { view.transposed() } else { view };
        Ok(weight.some_rows(rows.start, rows.len()))
    }
}

/// Views values as rows of `width` elements.
fn rows_of<T>(values: &[T], width: usize) -> MatrixView<'_, T> {
    MatrixView::new(values, values.len() / width.max(1), width)
}

struct Linear {
    outputs: Range<usize>,
}

impl FloatOperation for Linear {
    const NAME: &str = "linear";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let outputs = &self.outputs;
        let (x, weight) = (&inputs[0], &inputs[1]);
        let in_features = weight.dim(1)?;
        let stored = Stored::of(weight)?;
        with_elements::<T, 3, _>(
            [x, &stored.tensor, gradient],
            |[x_values, weight_values, gradient_values]| {
                let gradient = rows_of(gradient_values, outputs.len());
                let weight_rows = stored.rows(weight_values, outputs)?;
                sums.update::<T>(weight, |sum, is_fresh| {
                    let sum = part_of(sum, outputs, in_features, is_fresh);
                    T::product_to(gradient.transposed(), rows_of(x_values, in_features), sum, is_fresh);
                })?;
                if let Some(bias) = inputs.get(2) {
                    sums.update::<T>(bias, |sum, is_fresh| {
                        T::sum_columns(gradient_values, part_of(sum, outputs, 1, is_fresh), is_fresh);
                    })?;
                }
                sums.update::<T>(x, |sum, is_fresh| {
                    T::product_to(gradient, weight_rows, sum, is_fresh);
                })
            },
        )
    }
}

/// Returns a range of rows in a gradient sum, `width` wide; other rows of a fresh sum are zeroed.
fn part_of<'a, T: CpuFloat>(
    sum: &'a mut [T],
    rows: &Range<usize>,
    width: usize,
    is_fresh: bool,
) -> &'a mut [T] {
    let part = rows.start * width..rows.end * width;
    if is_fresh {
        sum[..part.start].fill(T::ZERO);
        sum[part.end..].fill(T::ZERO);
    }
    &mut sum[part]
}

/// Frozen weight `(out, in)`.
#[derive(Clone)]
pub(crate) enum FixedWeight {
    Dense(Tensor),
    Packed(Arc<PackedMatrix>),
}

/// Trainable adapter of a frozen weight; the effective weight is `W + scale · b a`.
pub(crate) struct Adapter<'a> {
    /// Matrix `(rank, in)`.
    pub(crate) a: &'a Tensor,
    /// Matrix `(out, rank)`.
    pub(crate) b: &'a Tensor,
    pub(crate) scale: f64,
}

/// Computes `x Wᵀ + bias` with a packed weight; only `x` gets a gradient.
///
/// # Shapes
/// `x` `(…, in)`, `bias` `(out)`; returns `(…, out)`. Callers must check the shapes and that both dtypes are
/// the same.
pub(crate) fn packed_linear(x: &Tensor, weight: &Arc<PackedMatrix>, bias: Option<&Tensor>) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, weight: &Arc<PackedMatrix>, bias: Option<&Tensor>) -> Result<Tensor> {
        let y = with_elements::<T, 2, _>([x, bias.unwrap_or(x)], |[x, values]| {
            T::packed_product(weight, x, bias.map(|_| values))
        })?;
        let shape = with_width(x, weight.out_features());
        record(&[x], on_cpu(y), shape, PackedLinear(Arc::clone(weight)))
    }
    for_float!(x.dtype(), forward(x, weight, bias))
}

struct PackedLinear(Arc<PackedMatrix>);

impl FloatOperation for PackedLinear {
    const NAME: &str = "packed-linear";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (weight, x) = (&self.0, &inputs[0]);
        if !sums.wants(x) {
            return Ok(());
        }
        let (out_features, in_features) = (weight.out_features(), weight.in_features());
        let expanded = T::expanded(weight)?;
        with_elements::<T, 1, _>([gradient], |[gradient]| {
            sums.update::<T>(x, |sum, is_fresh| {
                let weight = MatrixView::new(&expanded, out_features, in_features);
                T::product_to(rows_of(gradient, out_features), weight, sum, is_fresh);
            })
        })
    }
}

/// Computes `x Wᵀ + scale · (x aᵀ) bᵀ + bias`; only `x`, `a` and `b` get gradients.
///
/// # Shapes
/// `x` `(…, in)`, `bias` `(out)`; returns `(…, out)`. Callers must check the shapes and that all dtypes are
/// the same.
pub(crate) fn adapted_linear(
    x: &Tensor,
    weight: &FixedWeight,
    bias: Option<&Tensor>,
    adapter: &Adapter<'_>,
) -> Result<Tensor> {
    fn forward<T: CpuFloat>(
        x: &Tensor,
        weight: &FixedWeight,
        bias: Option<&Tensor>,
        adapter: &Adapter<'_>,
    ) -> Result<Tensor> {
        let Adapter { a, b, scale } = *adapter;
        let ((rank, in_features), out_features) = (a.dims2()?, b.dim(0)?);
        let y = with_elements::<T, 4, _>([x, a, b, bias.unwrap_or(b)], |[x_values, a, b, values]| {
            let (x, bias) = (rows_of(x_values, in_features), bias.map(|_| values));
            let mut y = match weight {
                FixedWeight::Packed(weight) => T::packed_product(weight, x_values, bias)?,
                FixedWeight::Dense(weight) => with_elements::<T, 1, _>([weight], |[weight]| {
                    let weight = MatrixView::new(weight, out_features, in_features);
                    Ok(T::product(x, weight.transposed(), bias))
                })?,
            };
            T::add_low_rank(&mut y, x, low_rank((a, b), (rank, in_features, out_features), scale));
            Ok(y)
        })?;
        let operation = AdaptedLinear { weight: weight.clone(), scale };
        record(&[x, a, b], on_cpu(y), with_width(x, out_features), operation)
    }
    for_float!(x.dtype(), forward(x, weight, bias, adapter))
}

fn low_rank<'a, T>(
    (a, b): (&'a [T], &'a [T]),
    (rank, in_features, out_features): (usize, usize, usize),
    scale: f64,
) -> LowRank<'a, T> {
    LowRank { a: MatrixView::new(a, rank, in_features), b: MatrixView::new(b, out_features, rank), scale }
}

struct AdaptedLinear {
    weight: FixedWeight,
    scale: f64,
}

impl FloatOperation for AdaptedLinear {
    const NAME: &str = "adapted-linear";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (x, a, b) = (&inputs[0], &inputs[1], &inputs[2]);
        let ((rank, in_features), out_features) = (a.dims2()?, b.dim(0)?);
        let gradients = with_elements::<T, 4, _>([x, a, b, gradient], |[x_values, a, b, gradient]| {
            let adapter = low_rank((a, b), (rank, in_features, out_features), self.scale);
            let gradient = rows_of(gradient, out_features);
            let gradients = T::low_rank_backward(rows_of(x_values, in_features), gradient, adapter);
            if sums.wants(x) {
                let inner = rows_of(&gradients.inner, rank);
                let add = |sums: &mut Sums, weight: &[T]| {
                    sums.update::<T>(x, |sum, is_fresh| {
                        let weight = MatrixView::new(weight, out_features, in_features);
                        T::product_to(gradient, weight, sum, is_fresh);
                        T::product_to(inner, adapter.a, sum, false);
                    })
                };
                match &self.weight {
                    FixedWeight::Packed(weight) => add(sums, &T::expanded(weight)?)?,
                    FixedWeight::Dense(weight) => {
                        with_elements::<T, 1, _>([weight], |[weight]| add(sums, weight))?;
                    }
                }
            }
            Ok(gradients)
        })?;
        let LowRankGradients { a: of_a, b: of_b, .. } = gradients;
        sums.add(a, Tensor::from_vec(of_a, a.shape(), a.device())?)?;
        sums.add(b, Tensor::from_vec(of_b, b.shape(), b.device())?)
    }
}
