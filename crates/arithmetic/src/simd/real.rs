//! The two element types of training, and vectors of them: one source for both.
//!
//! Models are trained in f32, with the vectors of [`Simd`]. Gradients are checked against finite differences in f64, in
//! plain Rust: what is checked there is the very code that trains.

use candle_core::{CpuStorage, WithDType};

use super::product::{Tile, compute_tile};
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::vector_math;

/// f32 or f64.
pub(crate) trait Real: WithDType {
    const ZERO: Self;
    const ONE: Self;
    /// Negative infinity.
    const LOWEST: Self;

    /// The nearest number of this type.
    fn of(value: f64) -> Self;

    /// Rows and panels of the tile in which products are computed here.
    fn tile_size() -> (usize, usize);

    /// The square root.
    fn root(self) -> Self;

    /// The elements of a storage of this type.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;

    /// Does the work with the best instructions of this processor.
    fn vectorized<W: Work<Self>>(work: W) -> W::Output;
}

/// Work over vectors. `run` and everything it calls must be `#[inline(always)]`, as in a [`Job`].
pub(crate) trait Work<T> {
    /// What comes out.
    type Output;

    fn run<V: Vectors<Real = T>>(self, v: V) -> Self::Output;
}

/// Vectors of sixteen values and what the operations of training do with them.
pub(crate) trait Vectors: Copy {
    /// Type of a value.
    type Real: Real;
    /// Sixteen values.
    type Vector: Copy;
    /// Rows of a tile.
    const TILE_ROWS: usize;
    /// Panels of a tile.
    const TILE_PANELS: usize;

    fn splat(self, value: Self::Real) -> Self::Vector;
    fn load(self, values: &[Self::Real; LANES]) -> Self::Vector;
    fn store(self, values: Self::Vector, to: &mut [Self::Real; LANES]);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a · b + c`.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// As [`Simd::max`].
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn root(self, a: Self::Vector) -> Self::Vector;
    fn exp(self, a: Self::Vector) -> Self::Vector;
    /// Sum of the lanes.
    fn sum(self, a: Self::Vector) -> Self::Real;
    /// Largest lane.
    fn largest(self, a: Self::Vector) -> Self::Real;
    /// One tile of a product.
    fn tile(self, tile: Tile<'_, '_, Self::Real>);

    /// Up to sixteen values, filled up with `filling`.
    #[inline(always)]
    fn load_first(self, values: &[Self::Real], filling: Self::Real) -> Self::Vector {
        if let Some(whole) = values.first_chunk() {
            return self.load(whole);
        }
        let mut whole = [filling; LANES];
        whole[..values.len()].copy_from_slice(values);
        self.load(&whole)
    }

    /// Stores as many lanes as there is room for.
    #[inline(always)]
    fn store_first(self, values: Self::Vector, to: &mut [Self::Real]) {
        if let Some(whole) = to.first_chunk_mut() {
            self.store(values, whole);
            return;
        }
        let mut whole = [Self::Real::ZERO; LANES];
        self.store(values, &mut whole);
        to.copy_from_slice(&whole[..to.len()]);
    }
}

impl<S: Simd> Vectors for S {
    type Real = f32;
    type Vector = S::Floats;
    const TILE_ROWS: usize = <S as Simd>::TILE_ROWS;
    const TILE_PANELS: usize = <S as Simd>::TILE_PANELS;

    #[inline(always)]
    fn splat(self, value: f32) -> S::Floats {
        Simd::splat(self, value)
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> S::Floats {
        Simd::load(self, values)
    }

    #[inline(always)]
    fn store(self, values: S::Floats, to: &mut [f32; LANES]) {
        Simd::store(self, values, to);
    }

    #[inline(always)]
    fn add(self, a: S::Floats, b: S::Floats) -> S::Floats {
        Simd::add(self, a, b)
    }

    #[inline(always)]
    fn sub(self, a: S::Floats, b: S::Floats) -> S::Floats {
        Simd::sub(self, a, b)
    }

    #[inline(always)]
    fn mul(self, a: S::Floats, b: S::Floats) -> S::Floats {
        Simd::mul(self, a, b)
    }

    #[inline(always)]
    fn div(self, a: S::Floats, b: S::Floats) -> S::Floats {
        Simd::div(self, a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: S::Floats, b: S::Floats, c: S::Floats) -> S::Floats {
        Simd::mul_add(self, a, b, c)
    }

    #[inline(always)]
    fn max(self, a: S::Floats, b: S::Floats) -> S::Floats {
        Simd::max(self, a, b)
    }

    #[inline(always)]
    fn root(self, a: S::Floats) -> S::Floats {
        Simd::root(self, a)
    }

    #[inline(always)]
    fn exp(self, a: S::Floats) -> S::Floats {
        vector_math::exp(self, a)
    }

    #[inline(always)]
    fn sum(self, a: S::Floats) -> f32 {
        Simd::sum(self, a)
    }

    #[inline(always)]
    fn largest(self, a: S::Floats) -> f32 {
        Simd::largest(self, a)
    }

    #[inline(always)]
    fn tile(self, tile: Tile<'_, '_, f32>) {
        self.training_tile(tile);
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[expect(clippy::cast_possible_truncation, reason = "training computes in f32")]
    fn of(value: f64) -> Self {
        value as Self
    }

    fn tile_size() -> (usize, usize) {
        struct Size;
        impl Work<f32> for Size {
            type Output = (usize, usize);

            #[inline(always)]
            fn run<V: Vectors<Real = f32>>(self, _: V) -> (usize, usize) {
                (V::TILE_ROWS, V::TILE_PANELS)
            }
        }
        Self::vectorized(Size)
    }

    fn root(self) -> Self {
        self.sqrt()
    }

    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(values) = storage { Some(values) } else { None }
    }

    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        InstructionSet::detected().run(OfFloats(work))
    }
}

/// Work on f32.
pub(super) struct OfFloats<W>(pub(super) W);

impl<W: Work<f32>> Job for OfFloats<W> {
    type Output = W::Output;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> W::Output {
        self.0.run(simd)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    fn of(value: f64) -> Self {
        value
    }

    fn tile_size() -> (usize, usize) {
        (Doubles::TILE_ROWS, Doubles::TILE_PANELS)
    }

    fn root(self) -> Self {
        self.sqrt()
    }

    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F64(values) = storage { Some(values) } else { None }
    }

    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        work.run(Doubles)
    }
}

/// Sixteen f64 in plain Rust.
#[derive(Clone, Copy)]
struct Doubles;

fn zip(a: [f64; LANES], b: [f64; LANES], f: impl Fn(f64, f64) -> f64) -> [f64; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Vectors for Doubles {
    type Real = f64;
    type Vector = [f64; LANES];
    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;

    fn splat(self, value: f64) -> Self::Vector {
        [value; LANES]
    }

    fn load(self, values: &[f64; LANES]) -> Self::Vector {
        *values
    }

    fn store(self, values: Self::Vector, to: &mut [f64; LANES]) {
        *to = values;
    }

    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a + b)
    }

    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a - b)
    }

    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a * b)
    }

    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a / b)
    }

    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        self.add(self.mul(a, b), c)
    }

    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    fn root(self, a: Self::Vector) -> Self::Vector {
        a.map(f64::sqrt)
    }

    fn exp(self, a: Self::Vector) -> Self::Vector {
        a.map(f64::exp)
    }

    fn sum(self, a: Self::Vector) -> f64 {
        a.into_iter().sum()
    }

    fn largest(self, a: Self::Vector) -> f64 {
        a.into_iter().fold(f64::NEG_INFINITY, f64::max)
    }

    fn tile(self, tile: Tile<'_, '_, f64>) {
        compute_tile::<Self, { Self::TILE_ROWS }, { Self::TILE_PANELS }>(self, tile);
    }
}
