//! Operations on each element: sums, dropout, GELU; and the sums of columns.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::arithmetic::{Real, Vectors, Work};
use super::operation::{Operation, Sums, record};
use super::{for_real, is_cpu_float, is_trained_on_cpu, with_elements};
use crate::parallel::{Parts, for_each_part};
use crate::simd::LANES;
use crate::vector_math;

/// Values that one task works on: what fits into the first cache twice.
const BLOCK: usize = 1 << 13;
/// Columns that one task sums up.
const COLUMN_BLOCK: usize = 8 * LANES;
/// Rows that are summed by themselves before they join the total, which keeps the rounding error small.
const ROW_BLOCK: usize = 64;

/// A function of `N` vectors.
pub(super) trait Lanewise<T, const N: usize>: Copy + Sync {
    fn apply<V: Vectors<Real = T>>(self, v: V, inputs: [V::Vector; N]) -> V::Vector;
}

/// A function of the elements of slices that are as long as the output, which is written.
pub(super) fn map_to<T: Real, const N: usize>(
    function: impl Lanewise<T, N>,
    inputs: [&[T]; N],
    output: &mut [T],
) {
    let len = output.len();
    assert!(inputs.iter().all(|input| input.len() == len), "slices of different lengths");
    for_each_part(output, Parts { row_len: 1, rows: BLOCK, columns: 1 }, |mut part| {
        let range = part.first_row..part.first_row + part.rows();
        let inputs = inputs.map(|input| &input[range.clone()]);
        T::vectorized(Map { function, inputs, output: part.all() });
    });
}

fn map<T: Real, const N: usize>(function: impl Lanewise<T, N>, inputs: [&[T]; N]) -> Vec<T> {
    let mut output = vec![T::ZERO; inputs.first().map_or(0, |input| input.len())];
    map_to(function, inputs, &mut output);
    output
}

struct Map<'a, T, F, const N: usize> {
    function: F,
    inputs: [&'a [T]; N],
    output: &'a mut [T],
}

impl<T: Real, F: Lanewise<T, N>, const N: usize> Work<T> for Map<'_, T, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { function, inputs, output } = self;
        let (vectors, rest) = output.as_chunks_mut::<LANES>();
        let chunks = inputs.map(|input| input.as_chunks::<LANES>());
        for (index, output) in vectors.iter_mut().enumerate() {
            let mut given = [v.splat(T::ZERO); N];
            for (given, chunk) in given.iter_mut().zip(&chunks) {
                *given = v.load(&chunk.0[index]);
            }
            v.store(function.apply(v, given), output);
        }
        let mut given = [v.splat(T::ZERO); N];
        for (given, chunk) in given.iter_mut().zip(&chunks) {
            *given = v.load_first(chunk.1, T::ZERO);
        }
        v.store_first(function.apply(v, given), rest);
    }
}

/// Adds `values` to `sums`.
pub(super) fn add_to<T: Real>(sums: &mut [T], values: &[T]) {
    struct AddTo<'a, T>(&'a mut [T], &'a [T]);
    impl<T: Real> Work<T> for AddTo<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = T>>(self, v: V) {
            for (sum, value) in self.0.chunks_mut(LANES).zip(self.1.chunks(LANES)) {
                let zero = T::ZERO;
                v.store_first(v.add(v.load_first(sum, zero), v.load_first(value, zero)), sum);
            }
        }
    }
    for_each_part(sums, Parts { row_len: 1, rows: BLOCK, columns: 1 }, |mut part| {
        let range = part.first_row..part.first_row + part.rows();
        T::vectorized(AddTo(part.all(), &values[range]));
    });
}

/// `x + y`, as a residual stream adds what a layer gives.
///
/// # Errors
/// When the shapes differ.
pub fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    fn forward<T: Real>(x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let sums = with_elements::<T, 2, _>([x, y], |[x, y]| Ok(map(Plus, [x, y])))?;
        record(&[x, y], sums, x.shape(), Plus)
    }
    if (is_trained_on_cpu(x) || is_trained_on_cpu(y)) && x.shape() == y.shape() && x.dtype() == y.dtype() {
        return for_real!(x.dtype(), forward(x, y));
    }
    x + y
}

#[derive(Clone, Copy)]
struct Plus;

impl<T: Real> Lanewise<T, 2> for Plus {
    #[inline(always)]
    fn apply<V: Vectors<Real = T>>(self, v: V, [x, y]: [V::Vector; 2]) -> V::Vector {
        v.add(x, y)
    }
}

impl Operation for Plus {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        inputs.iter().try_for_each(|input| sums.share(input, gradient))
    }
}

/// The tanh form of GELU of every element, on the CPU.
pub(crate) fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    fn forward<T: Real>(x: &Tensor) -> Result<Tensor> {
        let y = with_elements::<T, 1, _>([x], |[x]| Ok(map(Gelu, [x])))?;
        record(&[x], y, x.shape(), Gelu)
    }
    for_real!(x.dtype(), forward(x))
}

#[derive(Clone, Copy)]
struct Gelu;

impl<T: Real> Lanewise<T, 1> for Gelu {
    #[inline(always)]
    fn apply<V: Vectors<Real = T>>(self, v: V, [x]: [V::Vector; 1]) -> V::Vector {
        vector_math::gelu_tanh(v, x)
    }
}

/// The gradient of `x` from `x` and the gradient of GELU.
#[derive(Clone, Copy)]
struct GeluGradient;

impl<T: Real> Lanewise<T, 2> for GeluGradient {
    #[inline(always)]
    fn apply<V: Vectors<Real = T>>(self, v: V, [x, gradient]: [V::Vector; 2]) -> V::Vector {
        v.mul(gradient, vector_math::gelu_tanh_slope(v, x))
    }
}

impl Operation for Gelu {
    fn name(&self) -> &'static str {
        "gelu-tanh"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let values = with_elements::<T, 2, _>([x, gradient], |[x, gradient]| {
                Ok(map(GeluGradient, [x, gradient]))
            })?;
            Tensor::from_vec(values, x.shape(), x.device())
        }
        let x = &inputs[0];
        let gradient = for_real!(x.dtype(), backward(x, gradient))?;
        sums.add(x, gradient)
    }
}

/// `x` where `kept` says so, multiplied by `scale`, and zero elsewhere.
pub(crate) fn apply_dropout(x: &Tensor, kept: Vec<bool>, scale: f64) -> Result<Tensor> {
    fn forward<T: Real>(x: &Tensor, mask: Mask) -> Result<Tensor> {
        let y = with_elements::<T, 1, _>([x], |[x]| Ok(mask.applied(x)))?;
        record(&[x], y, x.shape(), mask)
    }
    if is_cpu_float(x) {
        let mask = Mask { kept: kept.into(), scale };
        return for_real!(x.dtype(), forward(x, mask));
    }
    let kept: Vec<u8> = kept.into_iter().map(u8::from).collect();
    (x * Tensor::from_vec(kept, x.shape(), x.device())?.to_dtype(x.dtype())?)? * scale
}

struct Mask {
    kept: Arc<[bool]>,
    scale: f64,
}

impl Mask {
    fn applied<T: Real>(&self, x: &[T]) -> Vec<T> {
        struct Apply<'a, T>(&'a [T], &'a [bool], T, &'a mut [T]);
        impl<T: Real> Work<T> for Apply<'_, T> {
            type Output = ();

            #[inline(always)]
            fn run<V: Vectors<Real = T>>(self, _: V) {
                for ((x, kept), y) in self.0.iter().zip(self.1).zip(self.3) {
                    *y = if *kept { *x * self.2 } else { T::ZERO };
                }
            }
        }
        let scale = T::of(self.scale);
        let mut y = vec![T::ZERO; x.len()];
        for_each_part(&mut y, Parts { row_len: 1, rows: BLOCK, columns: 1 }, |mut part| {
            let range = part.first_row..part.first_row + part.rows();
            T::vectorized(Apply(&x[range.clone()], &self.kept[range], scale, part.all()));
        });
        y
    }
}

impl Operation for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(mask: &Mask, gradient: &Tensor) -> Result<Tensor> {
            let values = with_elements::<T, 1, _>([gradient], |[gradient]| Ok(mask.applied(gradient)))?;
            Tensor::from_vec(values, gradient.shape(), gradient.device())
        }
        let gradient = for_real!(gradient.dtype(), backward(self, gradient))?;
        sums.add(&inputs[0], gradient)
    }
}

/// Adds the sum of each column of a matrix to `totals`, or overwrites them.
pub(super) fn sum_columns<T: Real>(values: &[T], totals: &mut [T], is_fresh: bool) {
    struct SumColumns<'a, T> {
        values: &'a [T],
        width: usize,
        first: usize,
        totals: &'a mut [T],
    }
    impl<T: Real> Work<T> for SumColumns<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = T>>(self, v: V) {
            const VECTORS: usize = COLUMN_BLOCK / LANES;
            let Self { values, width, first, totals } = self;
            let zero = T::ZERO;
            for rows in values.chunks(ROW_BLOCK * width) {
                let mut sums = [v.splat(zero); VECTORS];
                for row in rows.chunks_exact(width) {
                    let columns = row[first..first + totals.len()].chunks(LANES);
                    for (sum, values) in sums.iter_mut().zip(columns) {
                        *sum = v.add(*sum, v.load_first(values, zero));
                    }
                }
                for (total, sum) in totals.chunks_mut(LANES).zip(sums) {
                    v.store_first(v.add(v.load_first(total, zero), sum), total);
                }
            }
        }
    }
    let width = totals.len();
    if is_fresh {
        totals.fill(T::ZERO);
    }
    if width > 0 {
        for_each_part(totals, Parts { row_len: width, rows: 1, columns: COLUMN_BLOCK }, |mut part| {
            let first = part.first_column;
            T::vectorized(SumColumns { values, width, first, totals: part.row(0) });
        });
    }
}
