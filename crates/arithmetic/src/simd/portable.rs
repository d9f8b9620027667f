//! Vectors as arrays, for processors without their own file and as the reference for all others.

use half::f16;

use super::arrays::arrays;
use super::fused;
use super::job::{Job, Simd};
use super::math;
use super::vectors::{
    BYTE_LINES, ByteGroup, ByteLines, LANES, QuantQuad, TileJob, Vectors, Work, unpack_quad,
};

/// Whether every processor that the target supports has a fused multiply-add instruction.
///
/// Without one, the `mul_add` of f32 is a library call, and [`fused::multiply_add`] is faster.
const HAS_FUSED: bool = cfg!(any(
    target_feature = "fma",
    target_arch = "aarch64",
    target_arch = "loongarch64",
    target_arch = "powerpc64",
    target_arch = "riscv64",
    target_arch = "s390x"
));

/// Instruction set implemented in plain Rust.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Portable;

impl Portable {
    #[expect(clippy::unnecessary_wraps, reason = "other instruction sets may be unavailable")]
    pub(super) fn detect() -> Option<Self> {
        Some(Self)
    }
}

/// Number of rows in the tallest integer tile.
const INTEGER_TILE_ROWS: usize = 2;

type Floats = [f32; LANES];
type Integers = [i32; LANES];

/// Multiplies four one-byte activations by the four bytes of each lane and adds the products.
#[inline(always)]
fn add_products(weights: &[u8; 4 * LANES], quants: QuantQuad, sums: &mut Integers) {
    let quants = unpack_quad(quants);
    for (sum, weights) in sums.iter_mut().zip(weights.as_chunks::<4>().0) {
        for (weight, quant) in weights.iter().zip(quants) {
            *sum += i32::from(*weight) * quant;
        }
    }
}

impl Vectors for Portable {
    type Real = f32;
    type Vector = Floats;
    arrays!(f32);

    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        if !HAS_FUSED {
            return fused::multiply_add(&a, &b, &c);
        }
        let mut sums = c;
        for lane in 0..LANES {
            sums[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        sums
    }

    #[inline(always)]
    fn sum(self, mut a: Floats) -> f32 {
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                a[lane] += a[lane + half];
            }
        }
        a[0]
    }

    #[inline(always)]
    fn exp(self, a: Floats) -> Floats {
        math::exp(self, a)
    }
}

impl Simd for Portable {
    type Integers = Integers;
    const INTEGER_TILE_ROWS: usize = INTEGER_TILE_ROWS;

    fn run<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1; else INTEGER_TILE_ROWS => 1)
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        let mut results = [0.0; LANES];
        for lane in 0..LANES {
            results[lane] = f16::from_bits(bits[lane]).to_f32();
        }
        results
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        *to = values.map(|value| f16::from_f32(value).to_bits());
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        let mut results = b;
        for lane in 0..LANES {
            results[lane] = if a[lane] < b[lane] { a[lane] } else { b[lane] };
        }
        results
    }

    #[inline(always)]
    fn add_where_greater(self, sum: Floats, a: Floats, b: Floats, addend: Floats) -> Floats {
        let mut results = sum;
        for lane in 0..LANES {
            results[lane] = if a[lane] > b[lane] { sum[lane] + addend[lane] } else { sum[lane] };
        }
        results
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        let mut results = a;
        for lane in 0..LANES {
            results[lane] = a[lane].round_ties_even();
        }
        results
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        let mut results = n;
        for lane in 0..LANES {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the contract requires an integer in this range"
            )]
            let integer = n[lane] as i32;
            results[lane] = f32::from_bits((integer.wrapping_add(127) as u32) << 23);
        }
        results
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the contract requires integers in this range"
    )]
    fn store_bytes(self, values: [Floats; 4], to: &mut [u8; 4 * LANES]) {
        *to = std::array::from_fn(|index| values[index % 4][index / 4] as u8);
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the contract requires integers in this range"
    )]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let nibble = |index: usize, lane: usize| values[index][lane] as u8;
        *to =
            std::array::from_fn(|index| nibble(index % 4, index / 4) | nibble(4 + index % 4, index / 4) << 4);
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the contract requires integers in this range")]
    fn store_signed_bytes(self, values: Floats, to: &mut [i8; LANES]) {
        *to = values.map(|value| value.round_ties_even() as i8);
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Floats {
        let mut results = [0.0; LANES];
        for lane in 0..LANES {
            results[lane] = f32::from(bytes[lane].cast_signed());
        }
        results
    }

    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "sums of products of bytes are below 2^24")]
    fn to_floats(self, values: Integers) -> Floats {
        let mut results = [0.0; LANES];
        for lane in 0..LANES {
            results[lane] = values[lane] as f32;
        }
        results
    }

    #[inline(always)]
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]) {
        to[0] = bytes.map(|byte| table[usize::from(byte & 15)]);
        to[1] = bytes.map(|byte| table[usize::from(byte >> 4)]);
    }

    #[inline(always)]
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[Integers; PANELS]; ROWS] {
        let mut sums = [[[0; LANES]; PANELS]; ROWS];
        for row in 0..ROWS {
            for panel in 0..PANELS {
                sums[row][panel] = [rows[row].start(offset); LANES];
                for line in 0..BYTE_LINES {
                    add_products(&panels[panel][line], rows[row].quants[line], &mut sums[row][panel]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn largest_magnitude(self, a: Floats, b: Floats) -> f32 {
        // Without the sign, floats order like integers with the same bits. NaN is the largest.
        let largest = a.iter().chain(&b).fold(0, |largest, value| value.abs().to_bits().max(largest));
        f32::from_bits(largest)
    }
}
