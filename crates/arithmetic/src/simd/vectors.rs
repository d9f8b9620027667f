//! The vocabulary in which the kernels are written: sixteen values at a time, whatever the processor.
//!
//! A kernel is a [`Job`] on f32 or [`Work`] on any number, written once over these traits. Sixteen lanes are one register of
//! AVX-512, two of AVX2, four of NEON, and an array in portable code. A value of a [`Simd`] type proves that the processor
//! has those instructions; that is what makes calling them sound.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub, SubAssign};

use crate::tile::{Interleaved, Sums, sum_products};

/// Lanes of a vector: the width of a panel.
pub(crate) const LANES: usize = 16;
/// Panels of the widest tile of any instruction set.
pub(crate) const MAX_TILE_PANELS: usize = 4;

/// Inputs that share a scale, where weights and activations are integers.
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

/// Four integers from -127 to 127: in bytes each, or in 16 bits where bytes cannot be multiplied.
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
    /// What an integer is multiplied by; NaN where a number is not finite.
    pub(crate) scale: f32,
}

impl ByteGroup {
    /// What a sum starts from where `offset`, a power of two, has been added to the weights.
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

/// A number to compute with: f32, or f64 where gradients are checked. [`Float`](crate::Float) computes with it.
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
/// `min` and `max` return their second operand where either is NaN, as x86 does; the kernels put the value that has to
/// survive there.
pub(crate) trait Vectors: Copy {
    /// Type of a lane.
    type Real: Number;
    /// Sixteen of them.
    type Vector: Copy;
    /// Rows and panels of the highest tile.
    const TILE_ROWS: usize;
    const TILE_PANELS: usize;
    /// Rows from which on the sums of a tile are added in two passes, for half of the lanes each: where all do not fit into the
    /// registers.
    const ROWS_IN_HALVES: usize = usize::MAX;

    fn splat(self, value: Self::Real) -> Self::Vector;
    fn load(self, values: &[Self::Real; LANES]) -> Self::Vector;
    fn store(self, values: Self::Vector, to: &mut [Self::Real; LANES]);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a · b + c`, rounded once where the processor can.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The same in some of the lanes, and `c` in the others.
    #[inline(always)]
    fn mul_add_in(self, _: Lanes, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        self.mul_add(a, b, c)
    }
    /// A count, which the compiler does not know where the loops that it would unroll need more registers than there are.
    #[inline(always)]
    fn unknown(self, count: usize) -> usize {
        count
    }
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The square root.
    fn root(self, a: Self::Vector) -> Self::Vector;
    /// The exponential function.
    fn exp(self, a: Self::Vector) -> Self::Vector;
    /// Sum of the lanes; in halves where lanes are f32.
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

/// Vectors of f32, with what packed weights need besides.
pub(crate) trait Simd: Vectors<Real = f32> {
    /// Sixteen i32.
    type Integers: Copy;
    /// Whether an instruction converts f16.
    const CONVERTS_F16: bool = true;
    /// Rows of the highest tile of a product with weights in f32.
    const PRODUCT_ROWS: usize = Self::TILE_ROWS;
    /// Whether [`Simd::sum_lines`] is a loop of its own, for any number of lines.
    const WALKS_LINES: bool = false;
    /// Rows of the highest tile of integers.
    const INTEGER_TILE_ROWS: usize;

    /// Runs a job in a function of its own that is compiled for these instructions, which all who call it share.
    fn run<J: Job>(self, job: J) -> J::Output;

    /// As [`Vectors::in_tile`] for products with weights in f32: `height` is 1, 2, 4 or [`Simd::PRODUCT_ROWS`].
    #[inline(always)]
    fn in_product_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        self.in_tile(height, job)
    }

    /// The same for products of integers: `height` is 1, 2, 4 or [`Simd::INTEGER_TILE_ROWS`].
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output;

    /// As [`sum_products`] for rows that lie step by step, with as many lines of each panel.
    #[inline(always)]
    fn sum_lines<const ROWS: usize, const PANELS: usize>(
        self,
        rows: &[[f32; ROWS]],
        panels: [&[Line<[f32; LANES]>]; PANELS],
    ) -> Sums<Self, ROWS, PANELS> {
        sum_products(self, &Interleaved::<_, ROWS>::new(rows.as_flattened(), rows.len()), panels)
    }

    fn load_f16(self, bits: &[u16; LANES]) -> Self::Vector;
    /// To the nearest f16, ties to even.
    fn store_f16(self, values: Self::Vector, to: &mut [u16; LANES]);
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `sum + addend` where `a > b`, else `sum`.
    fn add_where_greater(
        self,
        sum: Self::Vector,
        a: Self::Vector,
        b: Self::Vector,
        addend: Self::Vector,
    ) -> Self::Vector;
    /// The nearest integers, ties to even.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// `2^n` for integers from -127 (which gives 0) to 127; anything for other values.
    fn power_of_two(self, n: Self::Vector) -> Self::Vector;
    /// Integers from 0 to 255 as bytes, anything for other values: vector `j` goes to byte `j` of every group of four.
    fn store_bytes(self, values: [Self::Vector; 4], to: &mut [u8; 4 * LANES]);
    /// Integers from 0 to 15 as halves of bytes, anything for other values: vector `j` goes to the low half of byte `j` of
    /// every group of four, vector `4 + j` to the high half.
    fn store_nibbles(self, values: [Self::Vector; 8], to: &mut [u8; 4 * LANES]);
    /// Integers from -128 to 127 as bytes, anything for other values.
    fn store_signed_bytes(self, values: Self::Vector, to: &mut [i8; LANES]);
    /// Integers from -128 to 127.
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Self::Vector;
    fn to_floats(self, values: Self::Integers) -> Self::Vector;
    /// The entries of a table for halves of bytes: those of the low halves go to the first line, those of the high halves to
    /// the second.
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]);
    /// For each row and panel the sums over 32 inputs of `(w - offset) · x`, with the bytes of the panel as `w`, and the row's
    /// integers as `x`. The offset is 128 for bytes from 1 to 255, or [`SMALL_OFFSET`] for bytes below 64, of which four
    /// products fit into 16 bits.
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[Self::Integers; PANELS]; ROWS];
    /// The bytes of a group, less their offset, in 16 bits.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    fn widen(self, bytes: &ByteLines, offset: u8, to: &mut [[i16; 2 * LANES]; GROUP / 2]) {
        for input in 0..GROUP {
            for lane in 0..LANES {
                let (line, index) = (input / BYTE_INPUTS, input % BYTE_INPUTS);
                let byte = bytes[line][lane * BYTE_INPUTS + index];
                to[2 * line + index % 2][lane * 2 + index / 2] = i16::from(byte) - i16::from(offset);
            }
        }
    }
    /// For each row and panel the sums of the products of all groups, each of which is multiplied with the scales of the
    /// outputs, and then with that of the row.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    fn word_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&[WordGroup]; PANELS],
        rows: &[[ByteGroup; ROWS]],
    ) -> Sums<Self, ROWS, PANELS> {
        let mut sums = [[self.splat(0.0); PANELS]; ROWS];
        for panel in 0..PANELS {
            for (group, rows) in panels[panel].iter().zip(rows) {
                for row in 0..ROWS {
                    let mut products = [0; LANES];
                    for (line, four) in group.lines.as_chunks::<2>().0.iter().zip(rows[row].quants) {
                        for (index, integer) in each_of(four).into_iter().enumerate() {
                            for lane in 0..LANES {
                                products[lane] += i32::from(line[index % 2][lane * 2 + index / 2]) * integer;
                            }
                        }
                    }
                    let mut floats = [0.0; LANES];
                    for lane in 0..LANES {
                        floats[lane] = products[lane] as f32;
                    }
                    let product = self.mul(self.load(&floats), self.load(&group.scales));
                    let product = self.mul(product, self.splat(rows[row].scale));
                    sums[row][panel] = self.add(sums[row][panel], product);
                }
            }
        }
        sums
    }
    /// Largest magnitude in either vector, NaN where one lane is.
    fn largest_magnitude(self, a: Self::Vector, b: Self::Vector) -> f32;
}

/// A computation over vectors of f32 of any instruction set.
///
/// `run` and everything it calls must be `#[inline(always)]`: only what is inlined into the functions that
/// `InstructionSet::run` calls is compiled for their instruction set.
pub(crate) trait Job {
    /// What it returns.
    type Output;
    /// Whether it multiplies bytes. Other jobs are compiled once for processors that differ in these products only.
    #[allow(dead_code, reason = "only instruction sets that multiply bytes in two ways ask")]
    const MULTIPLIES_BYTES: bool = false;
    /// Whether it multiplies floats that are held as they are computed with. How often these products are rounded is not seen in
    /// texts; what is rounded to integers or halves in between has to be the same number everywhere.
    #[allow(dead_code, reason = "only instruction sets without fused products ask")]
    const MULTIPLIES_FLOATS: bool = false;

    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// A computation over vectors of any number; for `run` the same holds as in a [`Job`].
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

/// Work on f32 as a job.
pub(crate) struct OfFloats<W>(pub(crate) W);

impl<W: Work<f32>> Job for OfFloats<W> {
    type Output = W::Output;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> W::Output {
        self.0.run(simd)
    }
}
