//! NEON: sixteen lanes in four registers.
//!
//! Every 64-bit ARM processor that can run an operating system supports it.

#![expect(unsafe_code, reason = "intrinsics that some processors lack are unsafe to call")]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::job::{F32Job, Job, Simd};
use super::math;
use super::vectors::{BYTE_LINES, ByteGroup, ByteLines, LANES, TileJob, Vectors, Work};

/// Tile size: 24 of 32 registers accumulate, four hold weights, and four hold activations.
const TILE_ROWS: usize = 6;
const TILE_PANELS: usize = 1;
/// Rows of an integer tile.
///
/// Twelve registers hold the sums of a group, twelve hold the total sums, and the rest hold operands and
/// scales.
const INTEGER_TILE_ROWS: usize = 3;

/// Lanes per register.
const QUARTER: usize = LANES / 4;
/// Size of a register in bytes.
const REGISTER_BYTES: usize = 16;

/// Proof that the processor supports NEON, plus the byte dot product instructions if `DOT` is true.
///
/// Only [`Neon::detect`] creates one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Neon<const DOT: bool>(());

/// Lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
type Floats = [float32x4_t; 4];
type Integers = [int32x4_t; 4];

impl<const DOT: bool> Neon<DOT> {
    pub(super) fn detect() -> Option<Self> {
        // Integers are reinterpreted as registers of bytes, lowest first.
        let has_all = cfg!(target_endian = "little")
            && is_aarch64_feature_detected!("neon")
            && (!DOT || is_aarch64_feature_detected!("dotprod"));
        has_all.then_some(Self(()))
    }

    /// Rounds to the nearest integers, ties to even.
    #[inline(always)]
    fn integers(self, a: Floats) -> Integers {
        // SAFETY: `self` proves that the processor supports NEON.
        a.map(|a| unsafe { vcvtnq_s32_f32(a) })
    }

    /// Stores the lowest byte of vector `j` as byte `j` of each group of four.
    #[inline(always)]
    fn store_lowest(self, integers: [Integers; 4], to: &mut [u8; 4 * LANES]) {
        for (quarter, to) in to.as_chunks_mut::<REGISTER_BYTES>().0.iter_mut().enumerate() {
            // SAFETY: `self` proves NEON. The array has 16 bytes, and the store needs no alignment.
            unsafe {
                // Each step keeps the lower bytes and replaces the higher ones.
                let one = vsliq_n_s32::<8>(integers[0][quarter], integers[1][quarter]);
                let two = vsliq_n_s32::<16>(one, integers[2][quarter]);
                let three = vsliq_n_s32::<24>(two, integers[3][quarter]);
                vst1q_u8(to.as_mut_ptr(), vreinterpretq_u8_s32(three));
            }
        }
    }

    /// Adds the products of four byte pairs (values -127 to 127) to each lane of `sum`.
    #[inline(always)]
    fn add_products(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        if DOT {
            let mut sum = sum;
            // The intrinsic `vdotq_s32` is stable only since Rust 1.98.
            // SAFETY: `self` proves that the processor has the instruction,
            // which only writes the named register.
            unsafe {
                asm!(
                    "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
                    sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            return sum;
        }
        // SAFETY: `self` proves that the processor supports NEON.
        unsafe {
            // The sum of two products fits into 16 bits.
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(a, b)))
        }
    }
}

/// Applies a lanewise operation to all quarters.
macro_rules! lanewise {
    ($intrinsic:ident, $($operand:expr),+) => {
        // SAFETY: `self` proves that the processor supports NEON.
        std::array::from_fn(|quarter| unsafe { $intrinsic($($operand[quarter]),+) })
    };
}

impl<const DOT: bool> Vectors for Neon<DOT> {
    type Real = f32;
    type Vector = Floats;
    const TILE_ROWS: usize = TILE_ROWS;
    const TILE_PANELS: usize = TILE_PANELS;

    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        // SAFETY: `self` proves that the processor supports NEON.
        unsafe { [vdupq_n_f32(value); 4] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Floats {
        let quarters = values.as_chunks::<QUARTER>().0;
        // SAFETY: `self` proves NEON. A quarter has four values, and the load needs no alignment.
        std::array::from_fn(|quarter| unsafe { vld1q_f32(quarters[quarter].as_ptr()) })
    }

    #[inline(always)]
    fn store(self, values: Floats, to: &mut [f32; LANES]) {
        for (values, to) in values.into_iter().zip(to.as_chunks_mut::<QUARTER>().0) {
            // SAFETY: `self` proves NEON. A quarter has four values, and the store needs no alignment.
            unsafe { vst1q_f32(to.as_mut_ptr(), values) }
        }
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        lanewise!(vaddq_f32, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        lanewise!(vsubq_f32, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        lanewise!(vmulq_f32, a, b)
    }

    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        lanewise!(vdivq_f32, a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        lanewise!(vfmaq_f32, c, a, b)
    }

    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        let is_greater: [uint32x4_t; 4] = lanewise!(vcgtq_f32, a, b);
        lanewise!(vbslq_f32, is_greater, a, b)
    }

    #[inline(always)]
    fn root(self, a: Floats) -> Floats {
        lanewise!(vsqrtq_f32, a)
    }

    #[inline(always)]
    fn sum(self, a: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports NEON.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }

    #[inline(always)]
    fn largest(self, a: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports NEON.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a[0], a[2]), vmaxnmq_f32(a[1], a[3]))) }
    }

    #[inline(always)]
    fn exp(self, a: Floats) -> Floats {
        math::exp(self, a)
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

impl<const DOT: bool> Simd for Neon<DOT> {
    type Integers = Integers;
    const INTEGER_TILE_ROWS: usize = INTEGER_TILE_ROWS;

    fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "neon")]
        fn compiled<J: Job>(job: J, simd: Neon<false>) -> J::Output {
            job.run(simd)
        }
        #[target_feature(enable = "neon,dotprod")]
        fn compiled_with_dot<J: Job>(job: J, simd: Neon<true>) -> J::Output {
            job.run(simd)
        }
        if DOT && J::MULTIPLIES_BYTES {
            // SAFETY: `self` proves that the processor supports the features of the compiled function.
            return unsafe { compiled_with_dot(job, Neon(())) };
        }
        // SAFETY: as above.
        unsafe { compiled(job, Neon(())) }
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1, 2 => 1; else INTEGER_TILE_ROWS => 1)
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        let quarters = bits.as_chunks::<QUARTER>().0;
        std::array::from_fn(|quarter| {
            let values: float32x4_t;
            // The intrinsic `vcvt_f32_f16` is stable only since Rust 1.94.
            // SAFETY: `self` proves NEON. A quarter has four u16, and the load needs no alignment. The
            // instruction only writes the named register.
            unsafe {
                asm!(
                    "fcvtl {values:v}.4s, {bits:v}.4h",
                    values = lateout(vreg) values, bits = in(vreg) vld1_u16(quarters[quarter].as_ptr()),
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            values
        })
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        for (values, to) in values.into_iter().zip(to.as_chunks_mut::<QUARTER>().0) {
            let bits: uint16x4_t;
            // The intrinsic `vcvt_f16_f32` is stable only since Rust 1.94.
            // SAFETY: `self` proves NEON. A quarter has four u16, and the store needs no alignment. The
            // instruction only writes the named register.
            unsafe {
                asm!(
                    "fcvtn {bits:v}.4h, {values:v}.4s",
                    bits = lateout(vreg) bits, values = in(vreg) values,
                    options(pure, nomem, nostack, preserves_flags)
                );
                vst1_u16(to.as_mut_ptr(), bits);
            }
        }
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        // NEON's own minimum is NaN if either operand is NaN.
        let is_less: [uint32x4_t; 4] = lanewise!(vcltq_f32, a, b);
        lanewise!(vbslq_f32, is_less, a, b)
    }

    #[inline(always)]
    fn add_where_greater(self, sum: Floats, a: Floats, b: Floats, addend: Floats) -> Floats {
        let is_greater: [uint32x4_t; 4] = lanewise!(vcgtq_f32, a, b);
        lanewise!(vbslq_f32, is_greater, self.add(sum, addend), sum)
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        lanewise!(vrndnq_f32, a)
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        // SAFETY: `self` proves that the processor supports NEON.
        self.integers(n)
            .map(|n| unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) })
    }

    #[inline(always)]
    fn store_bytes(self, values: [Floats; 4], to: &mut [u8; 4 * LANES]) {
        self.store_lowest(values.map(|values| self.integers(values)), to);
    }

    #[inline(always)]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let nibbles = values.map(|values| self.integers(values));
        let bytes = std::array::from_fn(|byte| -> Integers {
            let (low, high) = (nibbles[byte], nibbles[4 + byte]);
            // SAFETY: `self` proves that the processor supports NEON.
            std::array::from_fn(|quarter| unsafe { vsliq_n_s32::<4>(low[quarter], high[quarter]) })
        });
        self.store_lowest(bytes, to);
    }

    #[inline(always)]
    fn store_signed_bytes(self, values: Floats, to: &mut [i8; LANES]) {
        let [a, b, c, d] = self.integers(values);
        // SAFETY: `self` proves NEON. The array has 16 bytes, and the store needs no alignment.
        unsafe {
            let low = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
            let high = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Floats {
        // SAFETY: `self` proves NEON. The array has sixteen bytes, and the load needs no alignment.
        unsafe {
            let bytes = vld1q_s8(bytes.as_ptr().cast());
            let halves = [vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))];
            let [low, high] =
                halves.map(|half| [vmovl_s16(vget_low_s16(half)), vmovl_s16(vget_high_s16(half))]);
            [low[0], low[1], high[0], high[1]].map(|quarter| vcvtq_f32_s32(quarter))
        }
    }

    #[inline(always)]
    fn to_floats(self, values: Integers) -> Floats {
        lanewise!(vcvtq_f32_s32, values)
    }

    #[inline(always)]
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]) {
        let [low, high] = to.each_mut().map(|line| line.as_chunks_mut::<REGISTER_BYTES>().0);
        let quarters = bytes.as_chunks::<REGISTER_BYTES>().0.iter().zip(low).zip(high);
        for ((bytes, low), high) in quarters {
            // SAFETY: `self` proves NEON. Each array has 16 bytes, and
            // neither loads nor stores need alignment.
            unsafe {
                let (table, bytes) = (vld1q_u8(table.as_ptr()), vld1q_u8(bytes.as_ptr()));
                vst1q_u8(low.as_mut_ptr(), vqtbl1q_u8(table, vandq_u8(bytes, vdupq_n_u8(15))));
                vst1q_u8(high.as_mut_ptr(), vqtbl1q_u8(table, vshrq_n_u8::<4>(bytes)));
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
        // SAFETY: `self` proves that the processor supports NEON.
        let mut sums = unsafe { [[[vdupq_n_s32(0); 4]; PANELS]; ROWS] };
        for line in 0..BYTE_LINES {
            let weights: [[int8x16_t; 4]; PANELS] = panels.map(|lines| {
                let quarters = lines[line].as_chunks::<REGISTER_BYTES>().0;
                // SAFETY: `self` proves NEON. A quarter has 16 bytes, and the load needs no alignment.
                std::array::from_fn(|quarter| unsafe {
                    let bytes = vld1q_u8(quarters[quarter].as_ptr());
                    // Subtracting either offset gives signed bytes.
                    vreinterpretq_s8_u8(vsubq_u8(bytes, vdupq_n_u8(offset)))
                })
            });
            for row in 0..ROWS {
                // SAFETY: `self` proves that the processor supports NEON.
                let x = unsafe { vreinterpretq_s8_s32(vdupq_n_s32(rows[row].quants[line])) };
                for panel in 0..PANELS {
                    for quarter in 0..4 {
                        let sum = &mut sums[row][panel][quarter];
                        *sum = self.add_products(*sum, weights[panel][quarter], x);
                    }
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn largest_magnitude(self, a: Floats, b: Floats) -> f32 {
        // SAFETY: `self` proves that the processor supports NEON.
        unsafe {
            // Without the sign, floats order like integers with the same bits. NaN is the largest.
            let bits = |x: float32x4_t| vreinterpretq_u32_f32(vabsq_f32(x));
            let either =
                |x: Floats| vmaxq_u32(vmaxq_u32(bits(x[0]), bits(x[1])), vmaxq_u32(bits(x[2]), bits(x[3])));
            f32::from_bits(vmaxvq_u32(vmaxq_u32(either(a), either(b))))
        }
    }
}
