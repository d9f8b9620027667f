//! AVX-512: sixteen lanes are one register.

#![expect(unsafe_code, reason = "instructions that not every processor has are unsafe to call")]

use std::arch::x86_64::*;

use super::{Job, LANES, Simd};
use crate::attention::{RowTile, multiply_rows};
use crate::packed::{Tile, compute_tile};
use crate::training;

/// Proof that the processor has AVX-512 F, BW, DQ and VL: only [`Avx512::detect`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }

    pub(super) fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn compiled<J: Job>(job: J, simd: Avx512) -> J::Output {
            job.run(simd)
        }
        // SAFETY: `self` exists, so the processor has the features that `compiled` is compiled for.
        unsafe { compiled(job, self) }
    }
}

impl Simd for Avx512 {
    type Floats = __m512;
    // 24 of the 32 registers accumulate; activations come from memory with the multiplication.
    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        // SAFETY: AVX-512 as `self` exists; the array has sixteen values, and the load needs no alignment.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> __m512 {
        // SAFETY: AVX-512 as `self` exists; the array has sixteen u16, and the load needs no alignment.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store(self, values: __m512, to: &mut [f32; LANES]) {
        // SAFETY: AVX-512 as `self` exists; the array has sixteen values, and the store needs no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
    }

    #[inline(always)]
    fn store_f16(self, values: __m512, to: &mut [u16; LANES]) {
        // SAFETY: AVX-512 as `self` exists; the array has sixteen u16, and the store needs no alignment.
        unsafe {
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn root(self, a: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_sqrt_ps(a) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn power_of_two(self, n: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[i8; 4 * LANES]) -> [__m512; 4] {
        // SAFETY: AVX-512 as `self` exists; the array has 64 bytes, and the load needs no alignment.
        unsafe {
            let four = _mm512_loadu_si512(bytes.as_ptr().cast());
            // Shifting left and back right spreads the sign of the byte that was at the top.
            let float = |top: __m512i| _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top));
            [
                float(_mm512_slli_epi32::<24>(four)),
                float(_mm512_slli_epi32::<16>(four)),
                float(_mm512_slli_epi32::<8>(four)),
                float(four),
            ]
        }
    }

    #[inline(always)]
    fn load_nibbles(self, bytes: &[u8; 4 * LANES]) -> [__m512; 8] {
        // SAFETY: AVX-512 as `self` exists; the array has 64 bytes, and the load needs no alignment.
        unsafe {
            let eight = _mm512_loadu_si512(bytes.as_ptr().cast());
            // Sixteen values fit into a register, and the permutation looks at the lowest four bits only.
            let values = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            let float = |bottom: __m512i| _mm512_permutexvar_ps(bottom, values);
            [
                float(eight),
                float(_mm512_srli_epi32::<8>(eight)),
                float(_mm512_srli_epi32::<16>(eight)),
                float(_mm512_srli_epi32::<24>(eight)),
                float(_mm512_srli_epi32::<4>(eight)),
                float(_mm512_srli_epi32::<12>(eight)),
                float(_mm512_srli_epi32::<20>(eight)),
                float(_mm512_srli_epi32::<28>(eight)),
            ]
        }
    }

    #[inline(always)]
    fn store_bytes(self, values: [__m512; 4], to: &mut [i8; 4 * LANES]) {
        // SAFETY: AVX-512 as `self` exists; the array has 64 bytes, and the store needs no alignment.
        unsafe {
            let byte = _mm512_set1_epi32(0xff);
            let bits = |index: usize| _mm512_and_si512(_mm512_cvtps_epi32(values[index]), byte);
            let low = _mm512_or_si512(bits(0), _mm512_slli_epi32::<8>(bits(1)));
            let high = _mm512_or_si512(_mm512_slli_epi32::<16>(bits(2)), _mm512_slli_epi32::<24>(bits(3)));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_or_si512(low, high));
        }
    }

    #[inline(always)]
    fn store_nibbles(self, values: [__m512; 8], to: &mut [u8; 4 * LANES]) {
        // SAFETY: AVX-512 as `self` exists; the array has 64 bytes, and the store needs no alignment.
        unsafe {
            let bits =
                |index: usize| _mm512_add_epi32(_mm512_cvtps_epi32(values[index]), _mm512_set1_epi32(8));
            let byte = |index: usize| _mm512_or_si512(bits(index), _mm512_slli_epi32::<4>(bits(index + 4)));
            let low = _mm512_or_si512(byte(0), _mm512_slli_epi32::<8>(byte(1)));
            let high = _mm512_or_si512(_mm512_slli_epi32::<16>(byte(2)), _mm512_slli_epi32::<24>(byte(3)));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_or_si512(low, high));
        }
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    fn tile(self, tile: Tile<'_, '_>) {
        compute_tile::<Self, { Self::TILE_ROWS }, { Self::TILE_PANELS }>(self, tile);
    }

    #[inline(always)]
    fn training_tile(self, tile: training::Tile<'_, '_, f32>) {
        training::compute_tile::<Self, { Self::TILE_ROWS }, { Self::TILE_PANELS }>(self, tile);
    }

    #[inline(always)]
    fn multiply<'r, I: Fn(usize) -> &'r [f32]>(
        self,
        tile: RowTile<'_, I>,
        store: impl FnMut(usize, usize, __m512),
    ) {
        multiply_rows::<Self, I, { Self::TILE_ROWS }, { Self::TILE_PANELS }>(self, tile, store);
    }
}
