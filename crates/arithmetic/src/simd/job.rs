//! Vectors of f32 with what packed weights need besides, and the kernels that are written over them.

use super::sums::{Interleaved, Sums, sum_products};
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::vectors::{BYTE_INPUTS, GROUP, WordGroup, each_of};
use super::vectors::{ByteGroup, ByteLines, LANES, Line, TileJob, Vectors, Work, tile_height};

/// Vectors of f32, with what packed weights need besides.
pub(crate) trait Simd: Vectors<Real = f32> {
    /// Sixteen i32.
    type Integers: Copy;
    /// Rows of the highest tile of a product with weights in f32.
    const PRODUCT_ROWS: usize = Self::TILE_ROWS;
    /// Whether [`Simd::sum_lines`] is a loop of its own, for any number of lines.
    const WALKS_LINES: bool = false;
    /// Rows of the highest tile of integers.
    const INTEGER_TILE_ROWS: usize;

    /// Runs a job in a function of its own that is compiled for these instructions, which all who call it share.
    fn run<J: Job>(self, job: J) -> J::Output;

    /// The height of a tile of a product with weights in floating point, for so many rows: the lowest that holds them, or that for
    /// many.
    #[inline(always)]
    fn product_height(rows: usize) -> usize {
        tile_height(rows, Self::PRODUCT_ROWS)
    }

    /// The same for integers.
    #[inline(always)]
    fn integer_height(rows: usize) -> usize {
        tile_height(rows, Self::INTEGER_TILE_ROWS)
    }

    /// As [`Vectors::in_tile`] for a [`Simd::product_height`]: low tiles are walks through memory, and so walk over fewer panels at
    /// a time than fill the registers.
    #[inline(always)]
    fn in_product_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        self.in_tile(height, job)
    }

    /// The same for weights in f16, whose lines are half as long.
    #[inline(always)]
    fn in_half_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        self.in_tile(height, job)
    }

    /// As [`Vectors::in_tile`] for a [`Simd::integer_height`].
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
    /// integers as `x`. The offset is 128 for bytes from 1 to 255, or [`SMALL_OFFSET`](super::SMALL_OFFSET) for bytes below 64, of which four
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
    /// Largest magnitude in either vector, NaN if one lane is.
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
    /// Whether it multiplies weights in f32. Without fused products these are rounded twice: computed as elsewhere they would take
    /// many times as long.
    #[allow(dead_code, reason = "only instruction sets without fused products ask")]
    const MULTIPLIES_F32: bool = false;

    fn run<S: Simd>(self, simd: S) -> Self::Output;
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
