//! AVX2 with FMA and F16C: sixteen lanes are two registers of eight.

#![expect(unsafe_code, reason = "instructions that not every processor has are unsafe to call")]

use std::arch::x86_64::*;

use super::{Job, LANES, Simd};
use crate::attention::{RowTile, multiply_rows};
use crate::packed::{Tile, compute_tile};
use crate::training;

/// Proof that the processor has AVX2, FMA and F16C: only [`Avx2::detect`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

/// Lanes 0 to 7 and 8 to 15.
type Floats = [__m256; 2];

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }

    pub(super) fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<J: Job>(job: J, simd: Avx2) -> J::Output {
            job.run(simd)
        }
        // SAFETY: `self` exists, so the processor has the features that `compiled` is compiled for.
        unsafe { compiled(job, self) }
    }
}

/// Both halves of a lanewise operation.
macro_rules! lanewise {
    ($intrinsic:ident, $($operand:expr),+) => {
        // SAFETY: `self` exists, so the processor has AVX2, FMA and F16C.
        unsafe { [$intrinsic($($operand[0]),+), $intrinsic($($operand[1]),+)] }
    };
}

impl Simd for Avx2 {
    type Floats = Floats;
    // 12 of the 16 registers accumulate; two hold the weights and one an activation.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;

    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Floats {
        let start = values.as_ptr();
        // SAFETY: AVX as `self` exists; both halves lie within the array, and the load needs no alignment.
        unsafe { [_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(LANES / 2))] }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        let start = bits.as_ptr().cast::<__m128i>();
        // SAFETY: F16C as `self` exists; both halves of eight u16 lie within the array, and the load needs no alignment.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(start)), _mm256_cvtph_ps(_mm_loadu_si128(start.add(1)))] }
    }

    #[inline(always)]
    fn store(self, values: Floats, to: &mut [f32; LANES]) {
        let start = to.as_mut_ptr();
        // SAFETY: AVX as `self` exists; both halves lie within the array, and the store needs no alignment.
        unsafe {
            _mm256_storeu_ps(start, values[0]);
            _mm256_storeu_ps(start.add(LANES / 2), values[1]);
        }
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        let start = to.as_mut_ptr().cast::<__m128i>();
        // SAFETY: F16C as `self` exists; both halves of eight u16 lie within the array, and the store needs no alignment.
        unsafe {
            _mm_storeu_si128(start, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[0]));
            _mm_storeu_si128(start.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[1]));
        }
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        lanewise!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn root(self, a: Floats) -> Floats {
        lanewise!(_mm256_sqrt_ps, a)
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        // SAFETY: `self` exists, so the processor has AVX.
        a.map(|a| unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) })
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        // SAFETY: `self` exists, so the processor has AVX2.
        n.map(|n| unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        })
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[i8; 4 * LANES]) -> [Floats; 4] {
        let start = bytes.as_ptr().cast::<__m256i>();
        // SAFETY: AVX2 as `self` exists; both halves of 32 bytes lie within the array, and the load needs no alignment.
        unsafe {
            let halves = [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))];
            // Shifting left and back right spreads the sign of the byte that was at the top.
            let float = |top: __m256i| _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top));
            [
                halves.map(|four| float(_mm256_slli_epi32::<24>(four))),
                halves.map(|four| float(_mm256_slli_epi32::<16>(four))),
                halves.map(|four| float(_mm256_slli_epi32::<8>(four))),
                halves.map(float),
            ]
        }
    }

    #[inline(always)]
    fn load_nibbles(self, bytes: &[u8; 4 * LANES]) -> [Floats; 8] {
        let start = bytes.as_ptr().cast::<__m256i>();
        // SAFETY: AVX2 as `self` exists; both halves of 32 bytes lie within the array, and the load needs no alignment.
        unsafe {
            // With the top bit turned, `q + 8` is `q` as a signed number of four bits.
            let turned = _mm256_set1_epi8(0x88_u8.cast_signed());
            let halves = [start, start.add(1)].map(|half| _mm256_xor_si256(_mm256_loadu_si256(half), turned));
            let float = |top: __m256i| _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top));
            [
                halves.map(|eight| float(_mm256_slli_epi32::<28>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<20>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<12>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<4>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<24>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<16>(eight))),
                halves.map(|eight| float(_mm256_slli_epi32::<8>(eight))),
                halves.map(float),
            ]
        }
    }

    #[inline(always)]
    fn store_bytes(self, values: [Floats; 4], to: &mut [i8; 4 * LANES]) {
        let start = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: AVX2 as `self` exists; both halves of 32 bytes lie within the array, and the store needs no alignment.
        unsafe {
            let byte = _mm256_set1_epi32(0xff);
            for (half, to) in [start, start.add(1)].into_iter().enumerate() {
                let bits = |index: usize| _mm256_and_si256(_mm256_cvtps_epi32(values[index][half]), byte);
                let low = _mm256_or_si256(bits(0), _mm256_slli_epi32::<8>(bits(1)));
                let high =
                    _mm256_or_si256(_mm256_slli_epi32::<16>(bits(2)), _mm256_slli_epi32::<24>(bits(3)));
                _mm256_storeu_si256(to, _mm256_or_si256(low, high));
            }
        }
    }

    #[inline(always)]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let start = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: AVX2 as `self` exists; both halves of 32 bytes lie within the array, and the store needs no alignment.
        unsafe {
            for (half, to) in [start, start.add(1)].into_iter().enumerate() {
                let bits = |index: usize| {
                    _mm256_add_epi32(_mm256_cvtps_epi32(values[index][half]), _mm256_set1_epi32(8))
                };
                let byte =
                    |index: usize| _mm256_or_si256(bits(index), _mm256_slli_epi32::<4>(bits(index + 4)));
                let low = _mm256_or_si256(byte(0), _mm256_slli_epi32::<8>(byte(1)));
                let high =
                    _mm256_or_si256(_mm256_slli_epi32::<16>(byte(2)), _mm256_slli_epi32::<24>(byte(3)));
                _mm256_storeu_si256(to, _mm256_or_si256(low, high));
            }
        }
    }

    #[inline(always)]
    fn sum(self, a: Floats) -> f32 {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe {
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn largest(self, a: Floats) -> f32 {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
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
        store: impl FnMut(usize, usize, Floats),
    ) {
        multiply_rows::<Self, I, { Self::TILE_ROWS }, { Self::TILE_PANELS }>(self, tile, store);
    }
}
