//! Elementwise operations (sums and activations), and column sums.

use crate::simd::{self, LANES, Number, Real, Vectors, Work};
use crate::threads::{Parts, computed_in_parts, for_each_part};

/// Factor in quick GELU, an [`Elementwise`] function (arXiv:1606.08415, section 2).
pub const QUICK_GELU_FACTOR: f64 = 1.702;
/// Values per task: 32 KiB in f32.
const BLOCK: usize = 1 << 13;
/// Columns per task.
const COLUMN_BLOCK: usize = 8 * LANES;
/// Number of rows that are summed before being added to the total, to limit rounding errors.
const ROW_BLOCK: usize = 64;
/// Partition of values into consecutive blocks.
const BLOCKS: Parts = Parts { row_len: 1, rows: BLOCK, columns: 1 };

/// Function of `N` vectors.
trait Lanewise<T, const N: usize>: Copy + Sync {
    fn apply<V: Vectors<Real = T>>(self, v: V, inputs: [V::Vector; N]) -> V::Vector;
}

/// Applies a function elementwise to slices of the same length.
fn map<T: Real, const N: usize>(function: impl Lanewise<T, N>, inputs: [&[T]; N]) -> Vec<T> {
    let len = inputs.first().map_or(0, |input| input.len());
    assert!(inputs.iter().all(|input| input.len() == len), "the input slices have different lengths");
    computed_in_parts(len, BLOCKS, |mut part| {
        let range = part.first_row..part.first_row + part.rows();
        let inputs = inputs.map(|input| &input[range.clone()]);
        T::vectorized(Map { function, inputs, output: part.all() });
    })
}

struct Map<'a, T, F, const N: usize> {
    function: F,
    inputs: [&'a [T]; N],
    output: &'a mut [T],
}

impl<T: Number, F: Lanewise<T, N>, const N: usize> Work<T> for Map<'_, T, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { function, inputs, output } = self;
        let (vectors, rest) = output.as_chunks_mut::<LANES>();
        let done = vectors.len() * LANES;
        for (index, output) in vectors.iter_mut().enumerate() {
            let mut operands = [v.splat(T::ZERO); N];
            for input in 0..N {
                operands[input] = v.load_first(&inputs[input][index * LANES..], T::ZERO);
            }
            v.store(function.apply(v, operands), output);
        }
        let mut operands = [v.splat(T::ZERO); N];
        for input in 0..N {
            operands[input] = v.load_first(&inputs[input][done..], T::ZERO);
        }
        v.store_first(function.apply(v, operands), rest);
    }
}

#[derive(Clone, Copy)]
struct Plus;

impl<T: Number> Lanewise<T, 2> for Plus {
    #[inline(always)]
    fn apply<V: Vectors<Real = T>>(self, v: V, [x, y]: [V::Vector; 2]) -> V::Vector {
        v.add(x, y)
    }
}

pub(super) fn add<T: Real>(x: &[T], y: &[T]) -> Vec<T> {
    map(Plus, [x, y])
}

/// Elementwise function, compiled with its backward pass for one type.
///
/// ```
/// use candle_gpt2_arithmetic::{ElementFunction, Float};
///
/// let relu = f64::elementwise(ElementFunction::Relu);
/// assert_eq!((relu.forward)(&[-1., 3.]), [0., 3.]);
/// assert_eq!((relu.backward)(&[-1., 3.], &[10., 20.]), [0., 20.]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Elementwise<T> {
    /// Forward pass: applies the function to every element.
    pub forward: fn(&[T]) -> Vec<T>,
    /// Backward pass: the gradient of the argument, from the argument and the output gradient.
    ///
    /// Panics if the lengths differ.
    pub backward: fn(&[T], &[T]) -> Vec<T>,
}

/// Declares activation functions, each with a function and its derivative on vectors.
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: |$v:ident, $x:ident| $of:expr, $slope:expr;)+) => {
        /// Activation function, compiled by [`Float::elementwise`](crate::Float::elementwise).
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ElementFunction {
            /// ReLU, `max(x, 0)`; NaN stays NaN.
            Relu,
            $($(#[$doc])* $name,)+
        }

        pub(super) fn elementwise<T: Real>(function: ElementFunction) -> Elementwise<T> {
            match function {
                ElementFunction::Relu => relu(),
                $(ElementFunction::$name => {
                    #[derive(Clone, Copy)]
                    struct Function;
                    impl<T: Number> Lanewise<T, 1> for Function {
                        #[inline(always)]
                        fn apply<V: Vectors<Real = T>>(self, $v: V, [$x]: [V::Vector; 1]) -> V::Vector {
                            $of
                        }
                    }
                    #[derive(Clone, Copy)]
                    struct Gradient;
                    impl<T: Number> Lanewise<T, 2> for Gradient {
                        #[inline(always)]
                        fn apply<V: Vectors<Real = T>>(
                            self,
                            $v: V,
                            [$x, gradient]: [V::Vector; 2],
                        ) -> V::Vector {
                            $v.mul(gradient, $slope)
                        }
                    }
                    Elementwise {
                        forward: |x| map(Function, [x]),
                        backward: |x, gradient| map(Gradient, [x, gradient]),
                    }
                })+
            }
        }
    };
}

functions! {
    /// Tanh approximation of GELU.
    GeluTanh: |v, x| simd::gelu_tanh(v, x), simd::gelu_tanh_slope(v, x);
    /// Exact form of GELU, `0.5 x (1 + erf(x / sqrt 2))`.
    GeluErf: |v, x| simd::gelu_erf(v, x), simd::gelu_erf_slope(v, x);
    /// SiLU, `x sigmoid(x)`.
    Silu: |v, x| simd::swish(v, x, 1.0), simd::swish_slope(v, x, 1.0);
    /// Quick GELU, `x sigmoid(f x)` with the [factor `f`](QUICK_GELU_FACTOR).
    QuickGelu: |v, x| simd::swish(v, x, QUICK_GELU_FACTOR), simd::swish_slope(v, x, QUICK_GELU_FACTOR);
    /// Squared ReLU, `max(x, 0)²`.
    Relu2: |v, x| { let y = v.max(v.splat(T::ZERO), x); v.mul(y, y) }, v.mul(v.splat(T::of(2.0)), v.max(v.splat(T::ZERO), x));
    /// Hyperbolic tangent.
    Tanh: |v, x| simd::tanh(v, x), simd::tanh_slope(v, x);
}

/// Returns ReLU and its backward pass.
///
/// The gradient is 0 where `x` is not positive, even if the output gradient is not finite.
fn relu<T: Real>() -> Elementwise<T> {
    #[derive(Clone, Copy)]
    struct Relu;
    impl<T: Number> Lanewise<T, 1> for Relu {
        #[inline(always)]
        fn apply<V: Vectors<Real = T>>(self, v: V, [x]: [V::Vector; 1]) -> V::Vector {
            v.max(v.splat(T::ZERO), x)
        }
    }
    Elementwise { forward: |x| map(Relu, [x]), backward: relu_backward }
}

fn relu_backward<T: Real>(x: &[T], gradient: &[T]) -> Vec<T> {
    struct WherePositive<'a, T>(&'a [T], &'a [T], &'a mut [T]);
    impl<T: Number> Work<T> for WherePositive<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = T>>(self, _: V) {
            for ((x, gradient), y) in self.0.iter().zip(self.1).zip(self.2) {
                *y = if *x > T::ZERO { *gradient } else { T::ZERO };
            }
        }
    }
    assert!(
        x.len() == gradient.len(),
        "expected one gradient value for each of {} values, found {}",
        x.len(),
        gradient.len()
    );
    computed_in_parts(x.len(), BLOCKS, |mut part| {
        let range = part.first_row..part.first_row + part.rows();
        T::vectorized(WherePositive(&x[range.clone()], &gradient[range], part.all()));
    })
}

/// Splits `x` into chunks as long as `addend` and adds `addend` to each chunk.
pub(super) fn add_to_each<T: Real>(x: &[T], addend: &[T]) -> Vec<T> {
    if x.is_empty() {
        return Vec::new();
    }
    assert!(
        x.len().is_multiple_of(addend.len()),
        "cannot split {} values into chunks of {}",
        x.len(),
        addend.len()
    );
    let parts = Parts { row_len: addend.len(), rows: 1, columns: BLOCK };
    computed_in_parts(x.len(), parts, |mut part| {
        let first = part.first_row * addend.len() + part.first_column;
        let inputs = [&x[first..][..part.columns()], &addend[part.first_column..][..part.columns()]];
        T::vectorized(Map { function: Plus, inputs, output: part.row(0) });
    })
}

/// Adds `values` to `sums`.
pub(super) fn add_to<T: Real>(sums: &mut [T], values: &[T]) {
    struct AddTo<'a, T>(&'a mut [T], &'a [T]);
    impl<T: Number> Work<T> for AddTo<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = T>>(self, v: V) {
            for (sum, value) in self.0.chunks_mut(LANES).zip(self.1.chunks(LANES)) {
                let zero = T::ZERO;
                v.store_first(v.add(v.load_first(sum, zero), v.load_first(value, zero)), sum);
            }
        }
    }
    assert!(sums.len() == values.len(), "cannot add {} values to {} sums", values.len(), sums.len());
    for_each_part(sums, BLOCKS, |mut part| {
        let range = part.first_row..part.first_row + part.rows();
        T::vectorized(AddTo(part.all(), &values[range]));
    });
}

/// Multiplies each value by `factor`.
pub(super) fn scale<T: Real>(values: &mut [T], factor: f64) {
    struct Scale<'a, T>(&'a mut [T], T);
    impl<T: Number> Work<T> for Scale<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = T>>(self, v: V) {
            let factor = v.splat(self.1);
            for values in self.0.chunks_mut(LANES) {
                v.store_first(v.mul(v.load_first(values, T::ZERO), factor), values);
            }
        }
    }
    for_each_part(values, BLOCKS, |mut part| T::vectorized(Scale(part.all(), T::of(factor))));
}

/// Sums each column of a matrix and adds the sums to `totals`, or overwrites `totals`.
pub(super) fn sum_columns<T: Real>(values: &[T], totals: &mut [T], is_fresh: bool) {
    struct SumColumns<'a, T> {
        values: &'a [T],
        width: usize,
        first: usize,
        totals: &'a mut [T],
    }
    impl<T: Number> Work<T> for SumColumns<'_, T> {
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
    if width == 0 {
        return;
    }
    assert!(values.len().is_multiple_of(width), "cannot split {} values into rows of {width}", values.len());
    if is_fresh {
        totals.fill(T::ZERO);
    }
    for_each_part(totals, Parts { row_len: width, rows: 1, columns: COLUMN_BLOCK }, |mut part| {
        let first = part.first_column;
        T::vectorized(SumColumns { values, width, first, totals: part.row(0) });
    });
}
