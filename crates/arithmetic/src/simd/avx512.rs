//! AVX-512: sixteen lanes in one register.

#![expect(unsafe_code, reason = "intrinsics that some processors lack are unsafe to call")]

use std::arch::x86_64::*;

use super::job::{F32Job, Job, Simd};
use super::tiles::{ByteProducts, Pairs, TILE_ROWS as AMX_ROWS};
use super::vectors::{
    BYTE_LINES, ByteGroup, ByteLines, LANES, Line, SMALL_OFFSET, TileJob, Vectors, Work, tile_height,
};
use super::{avx2, math};

/// Rows and panels of a tile: 24 of 32 registers accumulate.
///
/// Multiplications take the activations directly from memory.
const TILE_ROWS: usize = 12;
const TILE_PANELS: usize = 2;
/// Intermediate tile height, for products of few rows.
///
/// With 12 rows, a third of the work for eight rows would be wasted.
const MIDDLE_ROWS: usize = 8;
/// Rows of an integer tile.
///
/// Twelve registers hold the sums of a group, twelve those of all groups, and six operands and scales.
const INTEGER_TILE_ROWS: usize = 6;

/// Proof that the processor supports AVX-512 F, BW, DQ and VL, and the byte products of `B`.
///
/// Only [`Avx512::detect`] creates one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512<B>(B);

impl<B: ByteProducts> Avx512<B> {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        if has_all { B::detect().map(Self) } else { None }
    }
}

/// Combines the lowest bytes of four vectors: byte `j` of each integer comes from vector `j`.
///
/// # Safety
/// The processor must support AVX-512 F.
#[inline(always)]
unsafe fn join_bytes(integers: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller guarantees AVX-512 F.
    unsafe {
        let low = _mm512_or_si512(integers[0], _mm512_slli_epi32::<8>(integers[1]));
        let high =
            _mm512_or_si512(_mm512_slli_epi32::<16>(integers[2]), _mm512_slli_epi32::<24>(integers[3]));
        _mm512_or_si512(low, high)
    }
}

/// Returns the floats' bits without the sign; they order like the magnitudes, with NaN largest.
///
/// # Safety
/// The processor must support AVX-512 F.
#[inline(always)]
unsafe fn magnitude_bits(x: __m512) -> __m512i {
    // SAFETY: the caller guarantees AVX-512 F.
    unsafe { _mm512_castps_si512(_mm512_abs_ps(x)) }
}

impl<B: ByteProducts> Vectors for Avx512<B> {
    type Real = f32;
    type Vector = __m512;
    const TILE_ROWS: usize = TILE_ROWS;
    const TILE_PANELS: usize = TILE_PANELS;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        // SAFETY: both types have 64 bytes, and any bits are valid floats.
        unsafe { std::mem::transmute::<[f32; LANES], __m512>(*values) }
    }

    #[inline(always)]
    fn store(self, values: __m512, to: &mut [f32; LANES]) {
        // SAFETY: both types have 64 bytes, and any bits are valid floats.
        *to = unsafe { std::mem::transmute::<__m512, [f32; LANES]>(values) };
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn root(self, a: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_sqrt_ps(a) }
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    fn transpose(self, rows: &[&[f32]; LANES], first: usize, to: &mut [Line<[f32; LANES]>; LANES]) {
        // SAFETY: `self` proves that the processor supports AVX-512, which includes AVX.
        unsafe { avx2::transpose(rows, first, to) }
    }

    #[inline(always)]
    fn exp(self, a: __m512) -> __m512 {
        math::exp(self, a)
    }

    #[inline(never)]
    fn call<W: Work<f32>>(self, work: W) -> W::Output {
        self.run(F32Job(work))
    }

    #[inline(always)]
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 4, 2 => 4, TILE_ROWS => TILE_PANELS; else 4 => 2)
    }
}

impl<B: ByteProducts> Simd for Avx512<B> {
    type Integers = __m512i;
    const INTEGER_TILE_ROWS: usize = INTEGER_TILE_ROWS;

    #[inline(always)]
    fn product_height(rows: usize) -> usize {
        match rows {
            5..=MIDDLE_ROWS => MIDDLE_ROWS,
            _ => tile_height(rows, TILE_ROWS),
        }
    }

    #[inline(always)]
    fn integer_height(rows: usize) -> usize {
        match rows {
            7..=MIDDLE_ROWS => MIDDLE_ROWS,
            _ if B::HAS_TILES && rows > MIDDLE_ROWS => AMX_ROWS,
            _ => tile_height(rows, INTEGER_TILE_ROWS),
        }
    }

    #[inline(always)]
    fn in_product_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1, 2 => 1, 4 => 1, MIDDLE_ROWS => 2; else TILE_ROWS => TILE_PANELS)
    }

    #[inline(always)]
    fn in_half_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 2, 2 => 2, 4 => 2, MIDDLE_ROWS => 2; else TILE_ROWS => TILE_PANELS)
    }

    fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn compiled<J: Job, B: ByteProducts>(job: J, simd: Avx512<B>) -> J::Output {
            job.run(simd)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        fn compiled_with_vnni<J: Job, B: ByteProducts>(job: J, simd: Avx512<B>) -> J::Output {
            job.run(simd)
        }
        // SAFETY: `self` proves that the processor supports the features of the compiled functions.
        unsafe {
            match (J::MULTIPLIES_BYTES, B::HAS_VNNI) {
                (false, _) => compiled(job, Avx512(Pairs)),
                (true, false) => compiled(job, self),
                (true, true) => compiled_with_vnni(job, self),
            }
        }
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        if B::HAS_TILES && height == AMX_ROWS {
            return job.run::<AMX_ROWS, 1>(self);
        }
        tiles!(self, height, job: 1 => 1, 2 => 1, 4 => 1, MIDDLE_ROWS => 1; else INTEGER_TILE_ROWS => TILE_PANELS)
    }

    #[inline(always)]
    fn begin_tiles(self, height: usize) {
        if B::HAS_TILES && height == AMX_ROWS {
            self.0.configure();
        }
    }

    #[inline(always)]
    fn end_tiles(self, height: usize) {
        if B::HAS_TILES && height == AMX_ROWS {
            self.0.release();
        }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> __m512 {
        // SAFETY: `self` proves AVX-512. Both types have 32 bytes, and any bits are valid values.
        unsafe { _mm512_cvtph_ps(std::mem::transmute::<[u16; LANES], __m256i>(*bits)) }
    }

    #[inline(always)]
    fn store_f16(self, values: __m512, to: &mut [u16; LANES]) {
        // SAFETY: `self` proves AVX-512. The array has sixteen u16, and the store needs no alignment.
        unsafe {
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn add_where_greater(self, sum: __m512, a: __m512, b: __m512, addend: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), sum, addend) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn power_of_two(self, n: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }

    #[inline(always)]
    fn store_bytes(self, values: [__m512; 4], to: &mut [u8; 4 * LANES]) {
        // SAFETY: `self` proves AVX-512. The array has 64 bytes, and the store needs no alignment.
        unsafe {
            let byte = _mm512_set1_epi32(0xff);
            let mut bits = [byte; 4];
            for index in 0..4 {
                bits[index] = _mm512_and_si512(_mm512_cvtps_epi32(values[index]), byte);
            }
            _mm512_storeu_si512(to.as_mut_ptr().cast(), join_bytes(bits));
        }
    }

    #[inline(always)]
    fn store_nibbles(self, values: [__m512; 8], to: &mut [u8; 4 * LANES]) {
        // SAFETY: `self` proves AVX-512. The array has 64 bytes, and the store needs no alignment.
        unsafe {
            let mut bytes = [_mm512_setzero_si512(); 4];
            for index in 0..4 {
                let high = _mm512_slli_epi32::<4>(_mm512_cvtps_epi32(values[index + 4]));
                bytes[index] = _mm512_or_si512(_mm512_cvtps_epi32(values[index]), high);
            }
            _mm512_storeu_si512(to.as_mut_ptr().cast(), join_bytes(bytes));
        }
    }

    #[inline(always)]
    fn store_signed_bytes(self, values: __m512, to: &mut [i8; LANES]) {
        // SAFETY: `self` proves AVX-512. The array has sixteen bytes, and the store needs no alignment.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> __m512 {
        // SAFETY: `self` proves AVX-512. Both types have 16 bytes, and any bits are valid values.
        unsafe {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(std::mem::transmute::<[u8; LANES], __m128i>(*bytes)))
        }
    }

    #[inline(always)]
    fn to_floats(self, values: __m512i) -> __m512 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe { _mm512_cvtepi32_ps(values) }
    }

    #[inline(always)]
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]) {
        // SAFETY: `self` proves AVX-512. Lines have 64 bytes, the table sixteen, and neither needs alignment.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            let nibble = _mm512_set1_epi8(15);
            let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
            let low = _mm512_and_si512(bytes, nibble);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble);
            _mm512_storeu_si512(to[0].as_mut_ptr().cast(), _mm512_shuffle_epi8(table, low));
            _mm512_storeu_si512(to[1].as_mut_ptr().cast(), _mm512_shuffle_epi8(table, high));
        }
    }

    #[inline(always)]
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[__m512i; PANELS]; ROWS] {
        // SAFETY: `self` proves AVX-512, and VNNI in the branches that use it. Lines have 64
        // bytes, and loads need no alignment.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
            if B::HAS_TILES
                && let Some(tile) = rows.first_chunk::<AMX_ROWS>()
            {
                for panel in 0..PANELS {
                    let products = self.0.multiply(tile, panels[panel]);
                    for row in 0..ROWS {
                        let start = _mm512_set1_epi32(rows[row].start(offset));
                        let products = _mm512_loadu_si512(products[row].0.as_ptr().cast());
                        sums[row][panel] = _mm512_add_epi32(start, products);
                    }
                }
                return sums;
            }
            if B::HAS_VNNI || offset == SMALL_OFFSET {
                for row in 0..ROWS {
                    sums[row] = [_mm512_set1_epi32(rows[row].start(offset)); PANELS];
                }
            }
            if !B::HAS_VNNI && offset == SMALL_OFFSET {
                for panel in 0..PANELS {
                    for line in 0..BYTE_LINES / 2 {
                        let first = _mm512_loadu_si512(panels[panel][2 * line].as_ptr().cast());
                        let second = _mm512_loadu_si512(panels[panel][2 * line + 1].as_ptr().cast());
                        for row in 0..ROWS {
                            let x = _mm512_set1_epi32(rows[row].quants[2 * line]);
                            let y = _mm512_set1_epi32(rows[row].quants[2 * line + 1]);
                            // A sum of up to four products of 63 and 127 fits into 16 bits.
                            let pairs = _mm512_maddubs_epi16(first, x);
                            let pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(second, y));
                            let products = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
                            sums[row][panel] = _mm512_add_epi32(sums[row][panel], products);
                        }
                    }
                }
                return sums;
            }
            for line in 0..BYTE_LINES {
                let mut weights = [_mm512_setzero_si512(); PANELS];
                for panel in 0..PANELS {
                    weights[panel] = _mm512_loadu_si512(panels[panel][line].as_ptr().cast());
                }
                if B::HAS_VNNI {
                    for row in 0..ROWS {
                        let x = _mm512_set1_epi32(rows[row].quants[line]);
                        for panel in 0..PANELS {
                            let sum = &mut sums[row][panel];
                            *sum = _mm512_dpbusd_epi32(*sum, weights[panel], x);
                        }
                    }
                    continue;
                }
                // Two products of an unsigned and a signed byte are added in 16 bits, which is enough only
                // for products of at most 127 · 127. The sign of the weight therefore moves to the
                // activation.
                let mut magnitudes = weights;
                let mut are_negative = [0; PANELS];
                for panel in 0..PANELS {
                    let signed = _mm512_xor_si512(weights[panel], _mm512_set1_epi8(-128));
                    magnitudes[panel] = _mm512_abs_epi8(signed);
                    are_negative[panel] = _mm512_movepi8_mask(signed);
                }
                for row in 0..ROWS {
                    let x = _mm512_set1_epi32(rows[row].quants[line]);
                    for panel in 0..PANELS {
                        let x = _mm512_mask_sub_epi8(x, are_negative[panel], _mm512_setzero_si512(), x);
                        let pairs = _mm512_maddubs_epi16(magnitudes[panel], x);
                        let products = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
                        sums[row][panel] = _mm512_add_epi32(sums[row][panel], products);
                    }
                }
            }
            sums
        }
    }

    #[inline(always)]
    fn largest_magnitude(self, a: __m512, b: __m512) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX-512.
        unsafe {
            let largest = _mm512_max_epu32(magnitude_bits(a), magnitude_bits(b));
            f32::from_bits(_mm512_reduce_max_epu32(largest))
        }
    }
}
