//! Vectors of sixteen values, the building blocks of the kernels on every processor.
//!
//! A kernel is [`Work`] on any number type, or a [`Job`](super::Job) on f32, written once over these
//! traits. Sixteen lanes take one register with AVX-512, two with AVX2, four with NEON, and an array in
//! portable code. A value of a [`Simd`](super::Simd) type proves that the processor has those
//! instructions, which makes calling them sound.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub, SubAssign};

/// Number of lanes in a vector, which is also the width of a panel.
pub(crate) const LANES: usize = 16;
/// Number of panels in the widest tile of any instruction set.
pub(crate) const MAX_TILE_PANELS: usize = 4;

/// Number of inputs that share a scale when weights and activations are integers.
pub(crate) const GROUP: usize = 32;
/// Inputs per line of bytes.
pub(crate) const BYTE_INPUTS: usize = 4;
/// Lines of bytes per group of inputs, with four inputs each.
pub(crate) const BYTE_LINES: usize = GROUP / BYTE_INPUTS;
/// Offset that turns small integers, from -32 to 31, into unsigned bytes.
pub(crate) const SMALL_OFFSET: u8 = 32;
/// Bytes for one group of inputs in a panel: lines of four inputs, lane by lane.
pub(crate) type ByteLines = [[u8; BYTE_INPUTS * LANES]; BYTE_LINES];

/// Weights of one group of inputs in a panel, as 16-bit integers with scales.
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

/// Sixteen values aligned to a cache line, so that loading them touches only one line.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// Four integers from -127 to 127, in 8 bits each, or 16 bits if bytes cannot be multiplied.
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

/// Number of bits per integer.
const QUAD_BITS: u32 = QuantQuad::BITS / 4;

/// Packs four integers into a [`QuantQuad`].
#[inline(always)]
pub(crate) fn pack_quad(integers: [i8; BYTE_INPUTS]) -> QuantQuad {
    let mut bits = 0;
    for (integer, place) in integers.into_iter().zip(PLACES) {
        bits |= (QuantQuad::from(integer) & ((1 << QUAD_BITS) - 1)) << (QUAD_BITS * place);
    }
    bits
}

/// Unpacks the four integers of a [`QuantQuad`].
#[inline(always)]
pub(crate) fn unpack_quad(quad: QuantQuad) -> [i32; BYTE_INPUTS] {
    PLACES.map(|place| {
        #[expect(clippy::cast_possible_truncation, reason = "the lowest byte is the integer")]
        let integer = (quad >> (QUAD_BITS * place)) as i8;
        i32::from(integer)
    })
}

/// Group of 32 values as 8-bit integers with one scale.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ByteGroup {
    /// Integers, four in each element.
    pub(crate) quants: [QuantQuad; BYTE_LINES],
    /// Initial value for sums over weights with an offset of 128: -128 times the sum of the integers.
    pub(crate) start: i32,
    /// Scale of the integers; NaN if any value is not finite.
    pub(crate) scale: f32,
}

impl ByteGroup {
    /// Returns the initial value for sums over weights with the given offset, a power of two.
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

/// Number type of computations: f32, or f64 for gradient checks.
///
/// [`Float`](crate::Float) provides the computations.
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
    /// Converts the number to f64.
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

/// Vectors of sixteen numbers, and the operations that kernels use.
///
/// `min` and `max` return their second operand if either is NaN, as on x86. Kernels pass the value that must
/// be preserved as the second operand.
pub(crate) trait Vectors: Copy {
    /// Number type of a lane.
    type Real: Number;
    /// Vector of sixteen lanes.
    type Vector: Copy;
    /// Number of rows in the tallest tile.
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
    /// Returns `count`, possibly hidden from the compiler, which could otherwise unroll a loop too far.
    #[inline(always)]
    fn unknown(self, count: usize) -> usize {
        count
    }
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Computes the square root.
    fn root(self, a: Self::Vector) -> Self::Vector;
    /// Computes the exponential function.
    fn exp(self, a: Self::Vector) -> Self::Vector;
    /// Sums the lanes; f32 lanes are added pairwise by halves.
    fn sum(self, a: Self::Vector) -> Self::Real;
    /// Returns the largest lane.
    fn largest(self, a: Self::Vector) -> Self::Real;

    /// Runs `job` for a tile of `height` rows, with enough panels to fill the registers.
    ///
    /// The height must be 1, 2, 4 or [`Vectors::TILE_ROWS`].
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output;

    /// Runs `work` in a separate function, compiled once for all call sites.
    ///
    /// Use it for large kernels with several callers.
    fn call<W: Work<Self::Real>>(self, work: W) -> W::Output;

    /// Transposes a 16 by 16 block of values from sixteen rows, starting at column `first`.
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

    /// Loads up to sixteen values and pads them with `filling`.
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
    /// Result type.
    type Output;

    fn run<V: Vectors<Real = T>>(self, v: V) -> Self::Output;
}

/// Computation on a tile of rows and panels held in registers.
pub(crate) trait TileJob<V: Vectors> {
    /// Result type.
    type Output;

    fn run<const ROWS: usize, const PANELS: usize>(self, v: V) -> Self::Output;
}

/// Returns the tile height for `rows` rows if the tallest tile has `full` rows.
///
/// This is the smallest height that holds the rows, or `full` for many rows.
#[inline(always)]
pub(crate) const fn tile_height(rows: usize, full: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 | 4 if full > 4 => 4,
        _ => full,
    }
}
