//! AVX2 with FMA and F16C: sixteen lanes in two registers of eight.

#![expect(unsafe_code, reason = "intrinsics that some processors lack are unsafe to call")]

use std::arch::x86_64::*;

use super::job::{F32Job, Job, Simd};
use super::math;
use super::vectors::{BYTE_LINES, ByteGroup, ByteLines, LANES, Line, SMALL_OFFSET, TileJob, Vectors, Work};

/// Tile size: 12 of 16 registers accumulate, two hold weights, and one holds an activation.
const TILE_ROWS: usize = 6;
const TILE_PANELS: usize = 1;
/// Number of rows in an integer tile on processors without VNNI.
///
/// Four of the registers then hold weights.
const INTEGER_TILE_ROWS: usize = 4;
/// Number of rows in an integer tile on processors with VNNI.
const VNNI_TILE_ROWS: usize = 6;

/// Proof that the processor supports AVX2, FMA and F16C, plus AVX-VNNI if `VNNI` is true.
///
/// Only [`Avx2::detect`] creates one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// Lanes 0 to 7 and 8 to 15.
type Floats = [__m256; 2];
type Integers = [__m256i; 2];

impl<const VNNI: bool> Avx2<VNNI> {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        has_all.then_some(Self(()))
    }
}

/// Loads both halves of a line of sixteen four-byte values.
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
unsafe fn load_line(line: &[u8; 4 * LANES]) -> Integers {
    let start = line.as_ptr().cast::<__m256i>();
    // SAFETY: the caller guarantees AVX2. Both halves of 32 bytes lie within the
    // array, and the load needs no alignment.
    unsafe { [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))] }
}

/// Applies a lanewise operation to both halves.
///
/// A closure might not be inlined and would then be compiled without these instructions.
macro_rules! lanewise {
    ($intrinsic:path, $($operand:expr),+) => {
        // SAFETY: `self` proves that the processor supports AVX2, FMA and F16C.
        unsafe { [$intrinsic($($operand[0]),+), $intrinsic($($operand[1]),+)] }
    };
}

/// Combines the lowest bytes of four vectors: byte `j` of each integer comes from vector `j`.
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
unsafe fn join_bytes(integers: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let low = _mm256_or_si256(integers[0], _mm256_slli_epi32::<8>(integers[1]));
        let high =
            _mm256_or_si256(_mm256_slli_epi32::<16>(integers[2]), _mm256_slli_epi32::<24>(integers[3]));
        _mm256_or_si256(low, high)
    }
}

/// Returns the floats' bits without the sign; they order like the magnitudes, with NaN largest.
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
unsafe fn magnitude_bits(x: __m256) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe { _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX)) }
}

/// Computes [`Vectors::transpose`] in four blocks of eight rows and eight columns.
///
/// # Safety
/// The processor must support AVX.
#[inline(always)]
pub(super) unsafe fn transpose(rows: &[&[f32]; LANES], first: usize, to: &mut [Line<[f32; LANES]>; LANES]) {
    const HALF: usize = LANES / 2;
    for square in 0..4 {
        let (row, column) = (square / 2 * HALF, square % 2 * HALF);
        let mut columns = [[0f32; HALF]; HALF];
        for index in 0..HALF {
            let from = first + column;
            columns[index].copy_from_slice(&rows[row + index][from..from + HALF]);
        }
        // SAFETY: the caller guarantees AVX. Arrays of eight floats and
        // vectors have the same number of bytes.
        let columns = unsafe {
            let x = std::mem::transmute::<[[f32; HALF]; HALF], [__m256; HALF]>(columns);
            let (a, b) = (_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
            let (c, d) = (_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
            let (e, f) = (_mm256_unpacklo_ps(x[4], x[5]), _mm256_unpackhi_ps(x[4], x[5]));
            let (g, h) = (_mm256_unpacklo_ps(x[6], x[7]), _mm256_unpackhi_ps(x[6], x[7]));
            // Gathers four rows of each pair of columns. 0x44 selects the lower halves of
            // both operands, 0xee the upper halves.
            let (p, q) = (_mm256_shuffle_ps::<0x44>(a, c), _mm256_shuffle_ps::<0xee>(a, c));
            let (r, s) = (_mm256_shuffle_ps::<0x44>(b, d), _mm256_shuffle_ps::<0xee>(b, d));
            let (t, u) = (_mm256_shuffle_ps::<0x44>(e, g), _mm256_shuffle_ps::<0xee>(e, g));
            let (v, w) = (_mm256_shuffle_ps::<0x44>(f, h), _mm256_shuffle_ps::<0xee>(f, h));
            let columns = [
                _mm256_permute2f128_ps::<0x20>(p, t),
                _mm256_permute2f128_ps::<0x20>(q, u),
                _mm256_permute2f128_ps::<0x20>(r, v),
                _mm256_permute2f128_ps::<0x20>(s, w),
                _mm256_permute2f128_ps::<0x31>(p, t),
                _mm256_permute2f128_ps::<0x31>(q, u),
                _mm256_permute2f128_ps::<0x31>(r, v),
                _mm256_permute2f128_ps::<0x31>(s, w),
            ];
            std::mem::transmute::<[__m256; HALF], [[f32; HALF]; HALF]>(columns)
        };
        for index in 0..HALF {
            to[column + index].0[row..row + HALF].copy_from_slice(&columns[index]);
        }
    }
}

impl<const VNNI: bool> Vectors for Avx2<VNNI> {
    type Real = f32;
    type Vector = Floats;
    const TILE_ROWS: usize = TILE_ROWS;
    const TILE_PANELS: usize = TILE_PANELS;

    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        // SAFETY: `self` proves that the processor supports AVX.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Floats {
        // SAFETY: both types have 64 bytes, and any bits are valid floats.
        unsafe { std::mem::transmute::<[f32; LANES], Floats>(*values) }
    }

    #[inline(always)]
    fn store(self, values: Floats, to: &mut [f32; LANES]) {
        // SAFETY: both types have 64 bytes, and any bits are valid floats.
        *to = unsafe { std::mem::transmute::<Floats, [f32; LANES]>(values) };
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
    fn unknown(self, count: usize) -> usize {
        std::hint::black_box(count)
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
    fn sum(self, a: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX.
        unsafe {
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn largest(self, a: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX.
        unsafe {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn exp(self, a: Floats) -> Floats {
        math::exp(self, a)
    }

    #[inline(always)]
    fn transpose(self, rows: &[&[f32]; LANES], first: usize, to: &mut [Line<[f32; LANES]>; LANES]) {
        // SAFETY: `self` proves that the processor supports AVX.
        unsafe { transpose(rows, first, to) }
    }

    #[inline(never)]
    fn call<W: Work<f32>>(self, work: W) -> W::Output {
        self.run(F32Job(work))
    }

    #[inline(always)]
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 4, 2 => 2, TILE_ROWS => TILE_PANELS; else 4 => 1)
    }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type Integers = Integers;
    const INTEGER_TILE_ROWS: usize = if VNNI { VNNI_TILE_ROWS } else { INTEGER_TILE_ROWS };

    fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<J: Job>(job: J, simd: Avx2<false>) -> J::Output {
            job.run(simd)
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn compiled_with_vnni<J: Job>(job: J, simd: Avx2<true>) -> J::Output {
            job.run(simd)
        }
        if VNNI && J::MULTIPLIES_BYTES {
            // SAFETY: `self` proves that the processor supports the features of the compiled function.
            return unsafe { compiled_with_vnni(job, Avx2(())) };
        }
        // SAFETY: as above.
        unsafe { compiled(job, Avx2(())) }
    }

    #[inline(always)]
    fn in_product_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1, 2 => 1, TILE_ROWS => TILE_PANELS; else 4 => 1)
    }

    #[inline(always)]
    fn in_half_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 2, 2 => 2, TILE_ROWS => TILE_PANELS; else 4 => 1)
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        match height {
            1 => job.run::<1, 1>(self),
            2 => job.run::<2, 1>(self),
            VNNI_TILE_ROWS if VNNI => job.run::<VNNI_TILE_ROWS, TILE_PANELS>(self),
            _ => job.run::<4, 1>(self),
        }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        // SAFETY: `self` proves F16C. Both types have 32 bytes, and any bits are valid integers.
        unsafe {
            let [low, high] = std::mem::transmute::<[u16; LANES], [__m128i; 2]>(*bits);
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        let start = to.as_mut_ptr().cast::<__m128i>();
        // SAFETY: `self` proves F16C. Both halves of eight u16 lie within the
        // array, and the store needs no alignment.
        unsafe {
            _mm_storeu_si128(start, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[0]));
            _mm_storeu_si128(start.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[1]));
        }
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        lanewise!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn add_where_greater(self, sum: Floats, a: Floats, b: Floats, addend: Floats) -> Floats {
        let is_greater = lanewise!(_mm256_cmp_ps::<_CMP_GT_OQ>, a, b);
        let addend = lanewise!(_mm256_and_ps, is_greater, addend);
        self.add(sum, addend)
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        lanewise!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>, a)
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        // SAFETY: `self` proves that the processor supports AVX2.
        let bias = unsafe { [_mm256_set1_epi32(127); 2] };
        let integers = lanewise!(_mm256_cvtps_epi32, n);
        let exponent = lanewise!(_mm256_add_epi32, integers, bias);
        let bits = lanewise!(_mm256_slli_epi32::<23>, exponent);
        lanewise!(_mm256_castsi256_ps, bits)
    }

    #[inline(always)]
    fn store_bytes(self, values: [Floats; 4], to: &mut [u8; 4 * LANES]) {
        let start = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: `self` proves AVX2. Both halves of 32 bytes lie within the
        // array, and the store needs no alignment.
        unsafe {
            let byte = _mm256_set1_epi32(0xff);
            for half in 0..2 {
                let mut bits = [byte; 4];
                for index in 0..4 {
                    bits[index] = _mm256_and_si256(_mm256_cvtps_epi32(values[index][half]), byte);
                }
                _mm256_storeu_si256(start.add(half), join_bytes(bits));
            }
        }
    }

    #[inline(always)]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let start = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: `self` proves AVX2. Both halves of 32 bytes lie within the
        // array, and the store needs no alignment.
        unsafe {
            for half in 0..2 {
                let mut bytes = [_mm256_setzero_si256(); 4];
                for index in 0..4 {
                    let low = _mm256_cvtps_epi32(values[index][half]);
                    let high = _mm256_slli_epi32::<4>(_mm256_cvtps_epi32(values[index + 4][half]));
                    bytes[index] = _mm256_or_si256(low, high);
                }
                _mm256_storeu_si256(start.add(half), join_bytes(bytes));
            }
        }
    }

    #[inline(always)]
    fn store_signed_bytes(self, values: Floats, to: &mut [i8; LANES]) {
        let [low, high] = lanewise!(_mm256_cvtps_epi32, values);
        // SAFETY: `self` proves AVX2. The array has sixteen bytes, and the store needs no alignment.
        unsafe {
            // Packing works within each half of a register, in the order 0..4, 8..12, 4..8, 12..16.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Floats {
        // SAFETY: `self` proves AVX2. Both types have 16 bytes, and any bits are valid integers.
        unsafe {
            let [low, high] = std::mem::transmute::<[u8; LANES], [i64; 2]>(*bytes);
            let (low, high) = (_mm_cvtsi64_si128(low), _mm_cvtsi64_si128(high));
            self.to_floats([_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)])
        }
    }

    #[inline(always)]
    fn to_floats(self, values: Integers) -> Floats {
        lanewise!(_mm256_cvtepi32_ps, values)
    }

    #[inline(always)]
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]) {
        let [low, high] = to;
        let (low, high) = (low.as_mut_ptr().cast::<__m256i>(), high.as_mut_ptr().cast::<__m256i>());
        // SAFETY: `self` proves AVX2. The table has sixteen bytes, a line two
        // times 32, and neither needs alignment.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let nibble = _mm256_set1_epi8(15);
            let bytes = load_line(bytes);
            for half in 0..2 {
                let first = _mm256_and_si256(bytes[half], nibble);
                let second = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[half]), nibble);
                _mm256_storeu_si256(low.add(half), _mm256_shuffle_epi8(table, first));
                _mm256_storeu_si256(high.add(half), _mm256_shuffle_epi8(table, second));
            }
        }
    }

    #[inline(always)]
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[Integers; PANELS]; ROWS] {
        // SAFETY: `self` proves AVX2, and AVX-VNNI in the branches that use it.
        unsafe {
            let mut sums = [[[_mm256_setzero_si256(); 2]; PANELS]; ROWS];
            if VNNI || offset == SMALL_OFFSET {
                for row in 0..ROWS {
                    sums[row] = [[_mm256_set1_epi32(rows[row].start(offset)); 2]; PANELS];
                }
            }
            if !VNNI && offset == SMALL_OFFSET {
                let ones = _mm256_set1_epi16(1);
                for panel in 0..PANELS {
                    for line in 0..BYTE_LINES / 2 {
                        let first = load_line(&panels[panel][2 * line]);
                        let second = load_line(&panels[panel][2 * line + 1]);
                        for row in 0..ROWS {
                            let x = _mm256_set1_epi32(rows[row].quants[2 * line]);
                            let y = _mm256_set1_epi32(rows[row].quants[2 * line + 1]);
                            for half in 0..2 {
                                // A sum of up to four products of 63 and 127 fits into 16 bits.
                                let pairs = _mm256_maddubs_epi16(first[half], x);
                                let pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(second[half], y));
                                let sum = &mut sums[row][panel][half];
                                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                            }
                        }
                    }
                }
                return sums;
            }
            for panel in 0..PANELS {
                for line in 0..BYTE_LINES {
                    let weights = load_line(&panels[panel][line]);
                    // Without VNNI, two products of an unsigned and a signed byte are added in 16
                    // bits, which is enough only for products of at most 127 · 127. The sign of
                    // the weight therefore moves to the activation.
                    let offset = _mm256_set1_epi8(-128);
                    let signed = [_mm256_xor_si256(weights[0], offset), _mm256_xor_si256(weights[1], offset)];
                    let magnitudes = [_mm256_abs_epi8(signed[0]), _mm256_abs_epi8(signed[1])];
                    for row in 0..ROWS {
                        let x = _mm256_set1_epi32(rows[row].quants[line]);
                        for half in 0..2 {
                            let sum = &mut sums[row][panel][half];
                            *sum = if VNNI {
                                _mm256_dpbusd_avx_epi32(*sum, weights[half], x)
                            } else {
                                let x = _mm256_sign_epi8(x, signed[half]);
                                let pairs = _mm256_maddubs_epi16(magnitudes[half], x);
                                _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                            };
                        }
                    }
                }
            }
            sums
        }
    }

    #[inline(always)]
    fn largest_magnitude(self, a: Floats, b: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports AVX2.
        unsafe {
            let of_a = _mm256_max_epi32(magnitude_bits(a[0]), magnitude_bits(a[1]));
            let of_b = _mm256_max_epi32(magnitude_bits(b[0]), magnitude_bits(b[1]));
            let eight = _mm256_max_epi32(of_a, of_b);
            let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b11_10>(four));
            let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b01>(two));
            f32::from_bits(_mm_cvtsi128_si32(one).cast_unsigned())
        }
    }
}
