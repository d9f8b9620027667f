//! Sixteen f32 at a time, whatever the processor: the vocabulary in which the fast kernels are written.
//!
//! A kernel is a [`Job`], written once over the trait [`Simd`]. [`InstructionSet::run`] compiles it for every instruction
//! set and calls the one that was detected, so the released program needs no `target-cpu`. Sixteen lanes are one
//! register of AVX-512, two of AVX2, and an array in portable code. A value of a [`Simd`] type proves that the processor
//! has those instructions; that is what makes calling them sound.

use std::sync::OnceLock;

use crate::attention::RowTile;
use crate::packed::Tile;
use crate::training;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

/// Lanes of a vector: the width of a panel of packed weights.
pub(crate) const LANES: usize = 16;

/// Sixteen values at the start of a cache line, so that loading them touches one line only.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// Vectors of sixteen f32 and what the kernels do with them.
///
/// `min` and `max` return their second operand where either is NaN, as x86 does; the kernels put the value that has to
/// survive there.
pub(crate) trait Simd: Copy {
    /// Sixteen f32.
    type Floats: Copy;

    fn splat(self, value: f32) -> Self::Floats;
    fn load(self, values: &[f32; LANES]) -> Self::Floats;
    fn load_f16(self, bits: &[u16; LANES]) -> Self::Floats;
    fn store(self, values: Self::Floats, to: &mut [f32; LANES]);
    /// To the nearest f16, ties to even.
    fn store_f16(self, values: Self::Floats, to: &mut [u16; LANES]);
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`, rounded once where the processor can.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The square root.
    fn root(self, a: Self::Floats) -> Self::Floats;
    /// The nearest integers, ties to even.
    fn round(self, a: Self::Floats) -> Self::Floats;
    /// `2^n` for integers from -127 (which gives 0) to 127; anything for other values.
    fn power_of_two(self, n: Self::Floats) -> Self::Floats;
    /// Signed bytes: vector `j` holds byte `j` of every group of four.
    fn load_bytes(self, bytes: &[i8; 4 * LANES]) -> [Self::Floats; 4];
    /// Signed halves of bytes, stored with 8 added: vector `j` holds the low half of byte `j` of every group of four, vector
    /// `4 + j` the high half.
    fn load_nibbles(self, bytes: &[u8; 4 * LANES]) -> [Self::Floats; 8];
    /// The inverse of [`Simd::load_bytes`] for integers from -128 to 127; anything for other values.
    fn store_bytes(self, values: [Self::Floats; 4], to: &mut [i8; 4 * LANES]);
    /// The inverse of [`Simd::load_nibbles`] for integers from -8 to 7; anything for other values.
    fn store_nibbles(self, values: [Self::Floats; 8], to: &mut [u8; 4 * LANES]);
    /// Sum of the lanes, added in halves.
    fn sum(self, a: Self::Floats) -> f32;
    /// Largest lane.
    fn largest(self, a: Self::Floats) -> f32;
    /// One product of a tile of activations with panels of weights, in the tile size that fills this instruction set's
    /// registers.
    fn tile(self, tile: Tile<'_, '_>);
    /// The same for rows that are not laid out in tiles: `store` is given row, panel and sums.
    fn multiply<'r, I: Fn(usize) -> &'r [f32]>(
        self,
        tile: RowTile<'_, I>,
        store: impl FnMut(usize, usize, Self::Floats),
    );
    /// One tile of a product of training.
    fn training_tile(self, tile: training::Tile<'_, '_, f32>);
    /// Rows of the tile that [`Simd::tile`] computes.
    const TILE_ROWS: usize;
    /// Panels of the tile that [`Simd::tile`] computes.
    const TILE_PANELS: usize;
}

/// A computation over vectors of any instruction set.
///
/// `run` and everything it calls must be `#[inline(always)]`: only what is inlined into [`InstructionSet::run`]'s
/// functions is compiled for their instruction set.
pub(crate) trait Job {
    /// What it returns.
    type Output;

    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// Plain Rust, on every processor.
    Portable,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl InstructionSet {
    /// The fastest one here, detected once.
    pub(crate) fn detected() -> Self {
        static DETECTED: OnceLock<InstructionSet> = OnceLock::new();
        *DETECTED.get_or_init(|| Self::available().pop().unwrap_or(Self::Portable))
    }

    /// All that this processor has, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(avx2::Avx2::detect().map(Self::Avx2));
            sets.extend(avx512::Avx512::detect().map(Self::Avx512));
        }
        sets
    }

    /// Runs `job` with these instructions.
    pub(crate) fn run<J: Job>(self, job: J) -> J::Output {
        match self {
            Self::Portable => job.run(portable::Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(job),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(job),
        }
    }

    /// Rows of this instruction set's tile.
    pub(crate) fn tile_rows(self) -> usize {
        match self {
            Self::Portable => portable::Portable::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => avx2::Avx2::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => avx512::Avx512::TILE_ROWS,
        }
    }
}
