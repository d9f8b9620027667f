//! Vectors of sixteen values, the vocabulary of the kernels on every processor.
//!
//! A kernel is [`Work`] on any number type, or a [`Job`](super::Job) on f32, written once over these
//! traits. Sixteen lanes are one register of AVX-512, two of AVX2, four of NEON, and an array in
//! portable code. A value of a [`Simd`](super::Simd) type proves that the processor has those
//! instructions, which makes it sound to call them.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub, SubAssign};

/// Lanes of a vector, and width of a panel.
pub(crate) const LANES: usize = 16;
/// Panels of the widest tile of any instruction set.
pub(crate) const MAX_TILE_PANELS: usize = 4;

/// Inputs that share a scale when weights and activations are integers.
pub(crate) const GROUP: usize = 32;
/// Inputs in a line of bytes.
pub(crate) const BYTE_INPUTS: usize = 4;
/// Lines of bytes in a group of inputs of a panel, with four inputs each.
pub(crate) const BYTE_LINES: usize = GROUP / BYTE_INPUTS;
/// Offset that turns small integers, from -32 to 31, into unsigned bytes.
pub(crate) const SMALL_OFFSET: u8 = 32;
/// Bytes of a group of inputs of a panel: lines of four inputs, lane by lane.
pub(crate) type ByteLines = [[u8; BYTE_INPUTS * LANES]; BYTE_LINES];

/// Integers of a group of inputs of a panel in 16 bits, and their scales.
///
/// Each line has two inputs, lane by lane: the first and third of four inputs, or the second and fourth.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct WordGroup {
    /// Integers, in lines of two inputs.
    pub(crate) lines: [[i16; 2 * LANES]; GROUP / 2],
    /// Scale of each output.
    pub(crate) scales: [f32; LANES],
}

/// Sixteen values at the start of a cache line, so that loading them touches one line only.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// Four integers from -127 to 127, in 8 bits each, or in 16 bits if bytes cannot be multiplied.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub(crate) type QuantQuad = i32;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(crate) type QuantQuad = i64;

/// Position of each of the four integers, counted from the lowest bits.
///
/// WebAssembly widens bytes in pairs of 16 bits. A mask widens the first and third byte, and a shift the
/// second and fourth, so the integers have the same order.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
const PLACES: [u32; BYTE_INPUTS] = [0, 1, 2, 3];
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
const PLACES: [u32; BYTE_INPUTS] = [0, 2, 1, 3];

/// Bits of each of the four integers.
const QUAD_BITS: u32 = QuantQuad::BITS / 4;

/// Packs these integers into a [`QuantQuad`].
#[inline(always)]
pub(crate) fn pack_quad(integers: [i8; BYTE_INPUTS]) -> QuantQuad {
    let mut bits = 0;
    for (integer, place) in integers.into_iter().zip(PLACES) {
        bits |= (QuantQuad::from(integer) & ((1 << QUAD_BITS) - 1)) << (QUAD_BITS * place);
    }
    bits
}

/// Unpacks the integers of a [`QuantQuad`].
#[inline(always)]
pub(crate) fn unpack_quad(quad: QuantQuad) -> [i32; BYTE_INPUTS] {
    PLACES.map(|place| {
        #[expect(clippy::cast_possible_truncation, reason = "the lowest byte is the integer")]
        let integer = (quad >> (QUAD_BITS * place)) as i8;
        i32::from(integer)
    })
}

/// Group of 32 numbers as 8-bit integers with one scale.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ByteGroup {
    /// Integers, four in each element.
    pub(crate) quants: [QuantQuad; BYTE_LINES],
    /// Start value of a sum over weights with 128 added: -128 times the sum of the integers.
    pub(crate) start: i32,
    /// Factor of the integers; NaN if a number is not finite.
    pub(crate) scale: f32,
}

impl ByteGroup {
    /// Returns the start value of a sum over weights with `offset`, a power of two, added.
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

/// Number type of computations: f32, or f64 to check gradients.
///
/// See [`Float`](crate::Float) for computations on it.
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

    /// Returns the nearest number of this type.
    fn of(value: f64) -> Self;
    /// Returns the same number as f64.
    fn to_f64(self) -> f64;
    /// Returns the square root.
    fn root(self) -> Self;
    /// Returns the error function.
    fn error_function(self) -> Self;
    /// Returns the hyperbolic tangent.
    fn hyperbolic_tangent(self) -> Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
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

/// Vectors of sixteen numbers and the operations of the kernels.
///
/// `min` and `max` return their second operand if either is NaN, like x86. Kernels pass the value that must
/// survive as the second operand.
pub(crate) trait Vectors: Copy {
    /// Number type of a lane.
    type Real: Number;
    /// Vector of sixteen lanes.
    type Vector: Copy;
    /// Rows and panels of the tallest tile.
    const TILE_ROWS: usize;
    const TILE_PANELS: usize;

    fn splat(self, value: Self::Real) -> Self::Vector;
    fn load(self, values: &[Self::Real; LANES]) -> Self::Vector;
    fn store(self, values: Self::Vector, to: &mut [Self::Real; LANES]);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Computes `a · b + c`.
    ///
    /// Results in f32 are rounded once, except on WebAssembly in jobs that multiply f32 weights.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Returns `count`, hidden from the compiler where unrolling a loop would need too many registers.
    #[inline(always)]
    fn unknown(self, count: usize) -> usize {
        count
    }
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Computes the square root.
    fn root(self, a: Self::Vector) -> Self::Vector;
    /// Computes the exponential function.
    fn exp(self, a: Self::Vector) -> Self::Vector;
    /// Sums the lanes, in halves if they are f32.
    fn sum(self, a: Self::Vector) -> Self::Real;
    /// Returns the largest lane.
    fn largest(self, a: Self::Vector) -> Self::Real;

    /// Runs `job` for a tile of `height` rows, with the number of panels that fill the registers.
    ///
    /// The height must be 1, 2, 4 or [`Vectors::TILE_ROWS`].
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output;

    /// Runs `work` in a separate function, which is compiled once for all call sites.
    ///
    /// Large kernels with several callers use it.
    fn call<W: Work<Self::Real>>(self, work: W) -> W::Output;

    /// Transposes sixteen values of each of sixteen rows, starting at column `first`.
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

    /// Loads up to sixteen values, padded with `filling`.
    #[inline(always)]
    fn load_first(self, values: &[Self::Real], filling: Self::Real) -> Self::Vector {
        if let Some(whole) = values.first_chunk() {
            return self.load(whole);
        }
        let mut whole = [filling; LANES];
        whole[..values.len()].copy_from_slice(values);
        self.load(&whole)
    }

    /// Stores the lanes that fit into `to`.
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

/// Computation over vectors of any number type.
///
/// `run` must follow the inlining rule of [`Job`](super::Job).
pub(crate) trait Work<T> {
    /// Result of the work.
    type Output;

    fn run<V: Vectors<Real = T>>(self, v: V) -> Self::Output;
}

/// Computation for a tile of rows and panels in registers.
pub(crate) trait TileJob<V: Vectors> {
    /// Result of the job.
    type Output;

    fn run<const ROWS: usize, const PANELS: usize>(self, v: V) -> Self::Output;
}

/// Returns the tile height for `rows` rows if the tallest tile has `full` rows.
///
/// It is the lowest height that holds the rows, or `full` for many rows.
#[inline(always)]
pub(crate) const fn tile_height(rows: usize, full: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 | 4 if full > 4 => 4,
        _ => full,
    }
}
