//! Vectors as arrays, for processors without a file of their own and as the oracle of the others.

use half::f16;

use super::arrays::arrays;
use super::job::{Job, Simd};
use super::math;
use super::vectors::{BYTE_LINES, ByteGroup, ByteLines, Four, LANES, TileJob, Vectors, Work, each_of};

/// Plain Rust.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Portable;

impl Portable {
    pub(super) fn detect() -> Option<Self> {
        Some(Self)
    }
}

type Floats = [f32; LANES];
type Integers = [i32; LANES];

#[inline(always)]
fn zip(a: Floats, b: Floats, f: impl Fn(f32, f32) -> f32) -> Floats {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// Adds the products of four activations, a byte each, with four bytes of every lane.
#[inline(always)]
fn add_products(weights: &[u8; 4 * LANES], quants: Four, sums: &mut Integers) {
    let quants = each_of(quants);
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
    const INTEGER_TILE_ROWS: usize = 2;

    fn run<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1; else Self::INTEGER_TILE_ROWS => 1)
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        *to = values.map(|value| f16::from_f32(value).to_bits());
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn add_where_greater(self, sum: Floats, a: Floats, b: Floats, addend: Floats) -> Floats {
        std::array::from_fn(|lane| if a[lane] > b[lane] { sum[lane] + addend[lane] } else { sum[lane] })
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        a.map(f32::round_ties_even)
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        #[expect(clippy::cast_possible_truncation, reason = "n is an integer of this range by contract")]
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "integers of this range by contract"
    )]
    fn store_bytes(self, values: [Floats; 4], to: &mut [u8; 4 * LANES]) {
        *to = std::array::from_fn(|index| values[index % 4][index / 4] as u8);
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "integers of this range by contract"
    )]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let nibble = |index: usize, lane: usize| values[index][lane] as u8;
        *to =
            std::array::from_fn(|index| nibble(index % 4, index / 4) | nibble(4 + index % 4, index / 4) << 4);
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "integers of this range by contract")]
    fn store_signed_bytes(self, values: Floats, to: &mut [i8; LANES]) {
        *to = values.map(|value| value.round_ties_even() as i8);
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Floats {
        bytes.map(|byte| f32::from(byte.cast_signed()))
    }

    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "sums of products of bytes are below 2^24")]
    fn to_floats(self, values: Integers) -> Floats {
        values.map(|value| value as f32)
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
        // Without their sign, floats are ordered as the integers of the same bits, NaN last.
        let largest = a.iter().chain(&b).fold(0, |largest, value| value.abs().to_bits().max(largest));
        f32::from_bits(largest)
    }
}
