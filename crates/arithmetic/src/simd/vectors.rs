//! The vocabulary in which the kernels are written: sixteen values at a time, whatever the processor.
//!
//! A kernel is [`Work`] on any number, or a [`Job`](super::Job) on f32, written once over these traits. Sixteen lanes are one register of
//! AVX-512, two of AVX2, four of NEON, and an array in portable code. A value of a [`Simd`](super::Simd) type proves that the processor
//! has those instructions; that is what makes calling them sound.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub, SubAssign};

/// Lanes of a vector: the width of a panel.
pub(crate) const LANES: usize = 16;
/// Panels of the widest tile of any instruction set.
pub(crate) const MAX_TILE_PANELS: usize = 4;

/// Inputs that share a scale, if weights and activations are integers.
pub(crate) const GROUP: usize = 32;
/// Inputs in a line of bytes.
pub(crate) const BYTE_INPUTS: usize = 4;
/// Lines of bytes that hold a group of inputs of a panel, four each.
pub(crate) const BYTE_LINES: usize = GROUP / BYTE_INPUTS;
/// What is added to small integers, from -32 to 31, so that they are bytes.
pub(crate) const SMALL_OFFSET: u8 = 32;
/// The bytes of a group of inputs of a panel: lines of four inputs, lane by lane.
pub(crate) type ByteLines = [[u8; BYTE_INPUTS * LANES]; BYTE_LINES];

/// The integers of a group of inputs of a panel in 16 bits, and their scales: lines of two inputs, the first and the third of four or
/// the second and the fourth, lane by lane.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct WordGroup {
    /// The integers.
    pub(crate) lines: [[i16; 2 * LANES]; GROUP / 2],
    /// What they are multiplied by.
    pub(crate) scales: [f32; LANES],
}

/// Sixteen values at the start of a cache line, so that loading them touches one line only.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// Four integers from -127 to 127: in bytes each, or in 16 bits if bytes cannot be multiplied.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub(crate) type Four = i32;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(crate) type Four = i64;

/// The place of each of the four, counted from the lowest bits. Bytes come in pairs of 16 bits, so that a mask and a shift widen the first
/// and the third, and the second and the fourth.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
const PLACES: [u32; BYTE_INPUTS] = [0, 1, 2, 3];
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
const PLACES: [u32; BYTE_INPUTS] = [0, 2, 1, 3];

/// Bits of each.
const BITS_OF_FOUR: u32 = Four::BITS / 4;

/// These integers as [`Four`].
#[inline(always)]
pub(crate) fn four(integers: [i8; BYTE_INPUTS]) -> Four {
    let mut bits = 0;
    for (integer, place) in integers.into_iter().zip(PLACES) {
        bits |= (Four::from(integer) & ((1 << BITS_OF_FOUR) - 1)) << (BITS_OF_FOUR * place);
    }
    bits
}

/// The integers of [`four`].
#[inline(always)]
pub(crate) fn each_of(four: Four) -> [i32; BYTE_INPUTS] {
    PLACES.map(|place| {
        #[expect(clippy::cast_possible_truncation, reason = "the lowest byte is the integer")]
        let integer = (four >> (BITS_OF_FOUR * place)) as i8;
        i32::from(integer)
    })
}

/// 32 numbers as integers of 8 bits with one scale.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ByteGroup {
    /// The integers.
    pub(crate) quants: [Four; BYTE_LINES],
    /// What a sum of products with weights that have 128 added starts from: -128 times the sum of the integers.
    pub(crate) start: i32,
    /// What an integer is multiplied by; NaN if a number is not finite.
    pub(crate) scale: f32,
}

impl ByteGroup {
    /// What a sum starts from if `offset`, a power of two, has been added to the weights.
    #[inline(always)]
    pub(crate) fn start(&self, offset: u8) -> i32 {
        self.start / i32::from(128 / offset)
    }
}

impl Default for ByteGroup {
    #[inline(always)]
    fn default() -> Self {
        Self { quants: [0; BYTE_LINES], start: 0, scale: 0.0 }
    }
}

/// A number to compute with: f32, or f64 if gradients are checked. [`Float`](crate::Float) computes with it.
pub trait Number:
    Copy
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Negative infinity.
    const LOWEST: Self;

    /// The nearest number of this type.
    fn of(value: f64) -> Self;
    /// The same number.
    fn to_f64(self) -> f64;
    /// The square root.
    fn root(self) -> Self;
    /// The error function.
    fn error_function(self) -> Self;
    /// The hyperbolic tangent.
    fn hyperbolic_tangent(self) -> Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
    fn of(value: f64) -> Self {
        value as Self
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }

    fn error_function(self) -> Self {
        libm::erff(self)
    }

    fn hyperbolic_tangent(self) -> Self {
        libm::tanhf(self)
    }
}

impl Number for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }

    fn error_function(self) -> Self {
        libm::erf(self)
    }

    fn hyperbolic_tangent(self) -> Self {
        libm::tanh(self)
    }
}

/// The lanes of which sums are added in one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lanes {
    All,
    FirstHalf,
    SecondHalf,
}

/// Vectors of sixteen numbers and what the kernels do with them.
///
/// `min` and `max` return their second operand if either is NaN, as x86 does; the kernels put the value that has to
/// survive there.
pub(crate) trait Vectors: Copy {
    /// Type of a lane.
    type Real: Number;
    /// Sixteen of them.
    type Vector: Copy;
    /// Rows and panels of the highest tile.
    const TILE_ROWS: usize;
    const TILE_PANELS: usize;
    /// Rows from which on the sums of a tile are added in two passes, for half of the lanes each, if all do not fit into the
    /// registers.
    const ROWS_IN_HALVES: usize = usize::MAX;

    fn splat(self, value: Self::Real) -> Self::Vector;
    fn load(self, values: &[Self::Real; LANES]) -> Self::Vector;
    fn store(self, values: Self::Vector, to: &mut [Self::Real; LANES]);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a · b + c`, rounded once if the processor can.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The same in some of the lanes, and `c` in the others.
    #[inline(always)]
    fn mul_add_in(self, _: Lanes, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        self.mul_add(a, b, c)
    }
    /// A count, hidden from the compiler if the loops that it would unroll need more registers than there are.
    #[inline(always)]
    fn unknown(self, count: usize) -> usize {
        count
    }
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The square root.
    fn root(self, a: Self::Vector) -> Self::Vector;
    /// The exponential function.
    fn exp(self, a: Self::Vector) -> Self::Vector;
    /// Sum of the lanes; in halves if lanes are f32.
    fn sum(self, a: Self::Vector) -> Self::Real;
    /// Largest lane.
    fn largest(self, a: Self::Vector) -> Self::Real;

    /// Runs `job` for a tile of `height` rows, which is 1, 2, 4 or [`Vectors::TILE_ROWS`], with as many panels as fill the
    /// registers.
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output;

    /// Does `work` in a function of its own, which is compiled once for all places that call it: what is large and used in
    /// several of them.
    fn call<W: Work<Self::Real>>(self, work: W) -> W::Output;

    /// The transpose of sixteen values of each of sixteen rows, from `first` on.
    #[inline(always)]
    fn transpose(
        self,
        rows: &[&[Self::Real]; LANES],
        first: usize,
        to: &mut [Line<[Self::Real; LANES]>; LANES],
    ) {
        for lane in 0..LANES {
            let row = &rows[lane][first..first + LANES];
            for index in 0..LANES {
                to[index].0[lane] = row[index];
            }
        }
    }

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
        for lane in 0..to.len() {
            to[lane] = whole[lane];
        }
    }
}

/// A computation over vectors of any number; for `run` the same holds as in a [`Job`](super::Job).
pub(crate) trait Work<T> {
    /// What it returns.
    type Output;

    fn run<V: Vectors<Real = T>>(self, v: V) -> Self::Output;
}

/// What is computed for a tile of some rows and panels in registers.
pub(crate) trait TileJob<V: Vectors> {
    /// What it returns.
    type Output;

    fn run<const ROWS: usize, const PANELS: usize>(self, v: V) -> Self::Output;
}

/// The height of a tile for so many rows, where the highest has `full`: the lowest that holds them.
#[inline(always)]
pub(crate) const fn tile_height(rows: usize, full: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 | 4 if full > 4 => 4,
        _ => full,
    }
}
