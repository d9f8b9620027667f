//! Sixteen f32 at a time, whatever the processor: the vocabulary in which the fast kernels are written.
//!
//! A kernel is a [`Job`], written once over the trait [`Simd`]. [`InstructionSet::run`] compiles it for every instruction
//! set and calls the one that was detected, so the released program needs no `target-cpu`. Sixteen lanes are one
//! register of AVX-512, two of AVX2, four of NEON, and an array in portable code. A value of a [`Simd`] type proves that the
//! processor has those instructions; that is what makes calling them sound.

use std::sync::OnceLock;

use crate::attention::RowTile;
use crate::packed::{FloatTile, IntegerTile, QuantizedGroup};
use crate::training;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

/// Lanes of a vector: the width of a panel of packed weights.
pub(crate) const LANES: usize = 16;
/// Panels of the widest tile of any instruction set.
pub(crate) const MAX_TILE_PANELS: usize = 2;

/// Lines of bytes that hold 32 inputs of a panel, four each.
pub(crate) const BYTE_LINES: usize = 8;
/// The bytes of 32 inputs of a panel: lines of four inputs, lane by lane.
pub(crate) type ByteLines = [[u8; 4 * LANES]; BYTE_LINES];

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
    /// Sixteen i32.
    type Integers: Copy;

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
    /// `sum + addend` where `a > b`, else `sum`.
    fn add_where_greater(
        self,
        sum: Self::Floats,
        a: Self::Floats,
        b: Self::Floats,
        addend: Self::Floats,
    ) -> Self::Floats;
    /// The nearest integers, ties to even.
    fn round(self, a: Self::Floats) -> Self::Floats;
    /// `2^n` for integers from -127 (which gives 0) to 127; anything for other values.
    fn power_of_two(self, n: Self::Floats) -> Self::Floats;
    /// Integers from 0 to 255 as bytes, anything for other values: vector `j` goes to byte `j` of every group of four.
    fn store_bytes(self, values: [Self::Floats; 4], to: &mut [u8; 4 * LANES]);
    /// Integers from 0 to 15 as halves of bytes, anything for other values: vector `j` goes to the low half of byte `j` of
    /// every group of four, vector `4 + j` to the high half.
    fn store_nibbles(self, values: [Self::Floats; 8], to: &mut [u8; 4 * LANES]);
    /// Integers from -128 to 127 as bytes, anything for other values.
    fn store_signed_bytes(self, values: Self::Floats, to: &mut [i8; LANES]);
    fn to_floats(self, values: Self::Integers) -> Self::Floats;
    /// The entries of a table for halves of bytes: those of the low halves go to the first line, those of the high halves to
    /// the second.
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]);
    /// For each row and panel the sums over 32 inputs of `(w - 128) · x`, with the bytes of the panel as `w`, 1 to 255
    /// each, and the row's quants as `x`.
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[QuantizedGroup; ROWS],
    ) -> [[Self::Integers; PANELS]; ROWS];
    /// Sum of the lanes, added in halves.
    fn sum(self, a: Self::Floats) -> f32;
    /// Lane `i` is the sum of the lanes of vector `i`.
    fn sums(self, vectors: [Self::Floats; LANES]) -> Self::Floats;
    /// Largest lane.
    fn largest(self, a: Self::Floats) -> f32;
    /// Largest magnitude in either vector, NaN where one lane is.
    fn largest_magnitude(self, a: Self::Floats, b: Self::Floats) -> f32;
    /// One product of a tile of activations with panels of weights, in the tile size that fills this instruction set's
    /// registers.
    fn tile(self, tile: FloatTile<'_, '_>);
    /// The same with integers.
    fn integer_tile(self, tile: IntegerTile<'_, '_>);
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
    /// Rows of the tile that [`Simd::integer_tile`] computes; its panels are as many as those of [`Simd::tile`].
    const INTEGER_TILE_ROWS: usize;
}

/// A vector of the first sixteen values, filled up with zeros where there are fewer.
#[inline(always)]
pub(crate) fn load_first<S: Simd>(simd: S, values: &[f32]) -> S::Floats {
    if let Some(whole) = values.first_chunk() {
        return simd.load(whole);
    }
    let mut whole = [0.0; LANES];
    whole[..values.len()].copy_from_slice(values);
    simd.load(&whole)
}

/// Stores as many lanes as there is room for.
#[inline(always)]
pub(crate) fn store_first<S: Simd>(simd: S, values: S::Floats, to: &mut [f32]) {
    if let Some(whole) = to.first_chunk_mut() {
        simd.store(values, whole);
        return;
    }
    let mut whole = [0.0; LANES];
    simd.store(values, &mut whole);
    to.copy_from_slice(&whole[..to.len()]);
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
    Avx2(avx2::Avx2<false>),
    /// AVX2 with FMA, F16C and AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(avx2::Avx2<true>),
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<false>),
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(avx512::Avx512<true>),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon<false>),
    /// NEON with dot products of bytes.
    #[cfg(target_arch = "aarch64")]
    NeonDot(neon::Neon<true>),
}

static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();

impl InstructionSet {
    /// The fastest one here, or the one that was chosen before the first computation.
    pub(crate) fn detected() -> Self {
        *CHOSEN.get_or_init(|| Self::available().pop().unwrap_or(Self::Portable))
    }

    /// Makes [`InstructionSet::detected`] return this one; returns whether it could.
    pub(crate) fn choose(self) -> bool {
        *CHOSEN.get_or_init(|| self) == self
    }

    /// All that this processor has, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        let sets = [
            Some(Self::Portable),
            #[cfg(target_arch = "x86_64")]
            avx2::Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            avx2::Avx2::detect().map(Self::Avx2Vnni),
            #[cfg(target_arch = "x86_64")]
            avx512::Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            avx512::Avx512::detect().map(Self::Avx512Vnni),
            #[cfg(target_arch = "aarch64")]
            neon::Neon::detect().map(Self::Neon),
            #[cfg(target_arch = "aarch64")]
            neon::Neon::detect().map(Self::NeonDot),
        ];
        sets.into_iter().flatten().collect()
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(_) => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot(_) => "neon-dot",
        }
    }

    /// Runs `job` with these instructions.
    pub(crate) fn run<J: Job>(self, job: J) -> J::Output {
        match self {
            Self::Portable => job.run(portable::Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(job),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(simd) => simd.run(job),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(job),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(simd) => simd.run(job),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => simd.run(job),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot(simd) => simd.run(job),
        }
    }

    /// Rows of this instruction set's tile.
    pub(crate) fn tile_rows(self) -> usize {
        struct TileRows;
        impl Job for TileRows {
            type Output = usize;

            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::TILE_ROWS
            }
        }
        self.run(TileRows)
    }
}
