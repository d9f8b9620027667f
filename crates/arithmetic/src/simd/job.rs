//! Vectors of f32 with the operations that packed weights need, and the jobs that use them.

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::sums::Sums;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::vectors::{BYTE_INPUTS, GROUP, WordGroup, unpack_quad};
use super::vectors::{ByteGroup, ByteLines, LANES, TileJob, Vectors, Work, tile_height};

/// Vectors of f32, with the additional operations that packed weights need.
pub(crate) trait Simd: Vectors<Real = f32> {
    /// Vector of sixteen i32.
    type Integers: Copy;
    /// Rows of the tallest tile in a product with floating-point weights.
    const PRODUCT_ROWS: usize = Self::TILE_ROWS;
    /// Rows of the tallest tile in an integer product.
    const INTEGER_TILE_ROWS: usize;

    /// Runs a job in a separate function that is compiled for these instructions.
    ///
    /// All callers share that function.
    fn run<J: Job>(self, job: J) -> J::Output;

    /// Returns the tile height for `rows` rows in a product with floating-point weights.
    ///
    /// This is the lowest height that holds the rows, or the full height for many rows.
    #[inline(always)]
    fn product_height(rows: usize) -> usize {
        tile_height(rows, Self::PRODUCT_ROWS)
    }

    /// Returns the tile height for `rows` rows in an integer product.
    #[inline(always)]
    fn integer_height(rows: usize) -> usize {
        tile_height(rows, Self::INTEGER_TILE_ROWS)
    }

    /// Runs `job` like [`Vectors::in_tile`], for a height that [`Simd::product_height`] returned.
    ///
    /// Low tiles stream weights from memory, so they read fewer panels at a
    /// time than would fill the registers.
    #[inline(always)]
    fn in_product_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        self.in_tile(height, job)
    }

    /// Runs `job` like [`Simd::in_product_tile`], for f16 weights, whose lines are half as long.
    #[inline(always)]
    fn in_half_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        self.in_tile(height, job)
    }

    /// Runs `job` like [`Vectors::in_tile`], for a height that [`Simd::integer_height`] returned.
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output;

    /// Prepares any tile registers that products in tiles of `height` rows use.
    #[inline(always)]
    fn begin_tiles(self, _height: usize) {}

    /// Frees any tile registers that [`Simd::begin_tiles`] prepared.
    #[inline(always)]
    fn end_tiles(self, _height: usize) {}

    fn load_f16(self, bits: &[u16; LANES]) -> Self::Vector;
    /// Rounds to the nearest f16, ties to even, and stores the bits.
    fn store_f16(self, values: Self::Vector, to: &mut [u16; LANES]);
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `sum + addend` in lanes where `a > b`, and `sum` in the others.
    fn add_where_greater(
        self,
        sum: Self::Vector,
        a: Self::Vector,
        b: Self::Vector,
        addend: Self::Vector,
    ) -> Self::Vector;
    /// Rounds to the nearest integers, ties to even.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// Computes `2^n` for integers from -127 (which gives 0) to 127.
    ///
    /// The result for other values is unspecified.
    fn power_of_two(self, n: Self::Vector) -> Self::Vector;
    /// Stores integers from 0 to 255 as bytes.
    ///
    /// Vector `j` goes to byte `j` of each group of four. Other values are stored as unspecified bytes.
    fn store_bytes(self, values: [Self::Vector; 4], to: &mut [u8; 4 * LANES]);
    /// Stores integers from 0 to 15 as nibbles.
    ///
    /// Vector `j` goes to the low nibble of byte `j` of each group of four, and vector `4 + j` to the high
    /// nibble. Other values are stored as unspecified nibbles.
    fn store_nibbles(self, values: [Self::Vector; 8], to: &mut [u8; 4 * LANES]);
    /// Stores integers from -128 to 127 as bytes.
    ///
    /// Other values are stored as unspecified bytes.
    fn store_signed_bytes(self, values: Self::Vector, to: &mut [i8; LANES]);
    /// Loads integers from -128 to 127.
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Self::Vector;
    fn to_floats(self, values: Self::Integers) -> Self::Vector;
    /// Looks up each nibble in a table of bytes.
    ///
    /// Entries of the low nibbles go to the first line, and entries of the high nibbles to the second.
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]);
    /// Computes the sums over 32 inputs of `(w - offset) · x` for each row and panel.
    ///
    /// `w` is a byte of the panel, and `x` is an integer of the row. The offset is 128 for bytes from 1 to
    /// 255, or [`SMALL_OFFSET`](super::SMALL_OFFSET) for bytes below 64. The sum of four products with the
    /// latter fits into 16 bits.
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[Self::Integers; PANELS]; ROWS];
    /// Widens the bytes of a group, minus their offset, to 16 bits.
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
    /// Computes the scaled sums of products over all groups, for each row and panel.
    ///
    /// Each group's sum is multiplied by the scales of the outputs, and then by the row's scale.
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
                    for (line, quad) in group.lines.as_chunks::<2>().0.iter().zip(rows[row].quants) {
                        for (index, integer) in unpack_quad(quad).into_iter().enumerate() {
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
    /// Returns the largest magnitude in both vectors, or NaN if a lane is NaN.
    fn largest_magnitude(self, a: Self::Vector, b: Self::Vector) -> f32;
}

/// Computation over f32 vectors of any instruction set.
///
/// `run` and everything it calls must be `#[inline(always)]`. Only code that is inlined into the functions of
/// `InstructionSet::run` is compiled for their instruction set.
pub(crate) trait Job {
    /// Result of the job.
    type Output;
    /// Whether the job multiplies bytes.
    ///
    /// Other jobs are compiled once for all processors that differ only in these products.
    #[allow(dead_code, reason = "unused unless an instruction set can multiply bytes in two ways")]
    const MULTIPLIES_BYTES: bool = false;
    /// Whether the job multiplies f32 weights.
    ///
    /// Without fused multiply-add, these products are rounded twice. The exact computation of other jobs
    /// would take many times as long.
    #[allow(dead_code, reason = "used only by instruction sets without fused multiply-add")]
    const MULTIPLIES_F32: bool = false;

    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Job that runs [`Work`] on f32.
pub(crate) struct F32Job<W>(pub(crate) W);

impl<W: Work<f32>> Job for F32Job<W> {
    type Output = W::Output;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> W::Output {
        self.0.run(simd)
    }
}
