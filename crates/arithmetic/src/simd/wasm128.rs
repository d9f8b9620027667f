//! WebAssembly's simd128: sixteen lanes in four registers.
//!
//! Every current browser supports it.
//!
//! A module with an instruction that a browser lacks does not load at all, so the target feature `simd128`
//! selects the instructions at build time. Multiplication and addition are two instructions that each round,
//! where other processors round once. Sums of products are computed in f64 to round once, except with f32
//! weights, where this would be many times slower. Relaxed instructions are not used, because their results
//! differ between machines.

#![expect(unsafe_code, reason = "loads and stores take pointers")]

use std::arch::wasm32::*;
use std::hint::black_box;

use super::fused;
use super::job::{F32Job, Job, Simd};
use super::math;
use super::vectors::{BYTE_LINES, ByteGroup, ByteLines, GROUP, LANES, TileJob, Vectors, WordGroup, Work};
use crate::simd::Sums;

/// Number of rows per tile.
///
/// On x86-64, engines have 15 free registers. Eight accumulate in an integer tile of several rows.
const TILE_ROWS: usize = 4;
const TILE_PANELS: usize = 1;
const INTEGER_TILE_ROWS: usize = 4;
/// Size of a register in bytes.
const REGISTER_BYTES: usize = 16;

/// Constant 1.5 · 2^23; adding it to a small integer in f32 leaves that integer in the low bits.
///
/// One unit in the last place of this constant is 1, and the integers are in two's complement.
const INTEGERS_IN_LOW_BITS: f32 = 12_582_912.0;

/// Instruction set, supported wherever a module compiled with this file loads.
///
/// If `ONCE` is true, multiply-adds are rounded once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wasm128<const ONCE: bool>(pub(super) ());

/// Lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
type Floats = [v128; 4];
type Integers = [v128; 4];

impl Wasm128<true> {
    pub(super) fn detect() -> Option<Self> {
        Some(Self(()))
    }
}

/// Applies a lanewise operation to all quarters.
macro_rules! lanewise {
    ($intrinsic:path, $($operand:expr),+) => {
        [
            $intrinsic($($operand[0]),+),
            $intrinsic($($operand[1]),+),
            $intrinsic($($operand[2]),+),
            $intrinsic($($operand[3]),+),
        ]
    };
}

/// Computes two lanes of `a · b + c` from operands widened to f64.
#[inline(always)]
fn wide_sums(a: v128, b: v128, c: v128) -> v128 {
    f64x2_add(f64x2_mul(a, b), c)
}

/// Widens both halves of a register to f64.
#[inline(always)]
fn widened(x: v128) -> [v128; 2] {
    [f64x2_promote_low_f32x4(x), f64x2_promote_low_f32x4(i32x4_shuffle::<2, 3, 2, 3>(x, x))]
}

/// Computes `a · b + c` through f64, as in [`fused`].
#[inline(always)]
fn multiply_add(a: Floats, b: Floats, c: Floats) -> Floats {
    let mut rounded = c;
    let mut least = i32x4_splat(i32::MAX);
    for quarter in 0..4 {
        let ([a, a2], [b, b2], [c, c2]) = (widened(a[quarter]), widened(b[quarter]), widened(c[quarter]));
        let (low, high) = (wide_sums(a, b, c), wide_sums(a2, b2, c2));
        rounded[quarter] =
            i32x4_shuffle::<0, 1, 4, 5>(f32x4_demote_f64x2_zero(low), f32x4_demote_f64x2_zero(high));
        let halves = [i32x4_shl(low, fused::SHIFT), i32x4_shl(high, fused::SHIFT)];
        least = i32x4_min(least, i32x4_min(halves[0], halves[1]));
    }
    if is_doubtful(least) { exactly(a, b, c) } else { rounded }
}

/// Whether the smallest shifted halves indicate a sum that may be rounded incorrectly.
#[inline(always)]
fn is_doubtful(least: v128) -> bool {
    let [low, high] = fused::LEAST;
    v128_any_true(i32x4_lt(least, i32x4(low, high, low, high)))
}

/// Computes [`multiply_add`] exactly for all inputs, including doubtful sums.
#[cold]
#[inline(never)]
fn exactly(a: Floats, b: Floats, c: Floats) -> Floats {
    let simd = Wasm128::<true>(());
    let mut lanes = [[0.0; LANES]; 3];
    for (values, lanes) in [a, b, c].into_iter().zip(&mut lanes) {
        simd.store(values, lanes);
    }
    simd.load(&fused::exactly(&lanes[0], &lanes[1], &lanes[2]))
}

/// Returns vectors with each lane's integer in the low bits.
#[inline(always)]
fn integers(a: Floats) -> Integers {
    let last_place = [f32x4_splat(INTEGERS_IN_LOW_BITS); 4];
    lanewise!(f32x4_add, a, last_place)
}

/// Returns the lowest byte of each of the sixteen lanes.
#[inline(always)]
fn lowest_bytes(a: Integers) -> v128 {
    let byte = [i32x4_splat(0xff); 4];
    let [a, b, c, d] = lanewise!(v128_and, a, byte);
    u8x16_narrow_i16x8(i16x8_narrow_i32x4(a, b), i16x8_narrow_i32x4(c, d))
}

/// Loads sixteen bytes.
#[inline(always)]
fn load(bytes: &[u8; REGISTER_BYTES]) -> v128 {
    // SAFETY: the array has 16 bytes, and the load needs no alignment.
    unsafe { v128_load(bytes.as_ptr().cast()) }
}

#[inline(always)]
fn store(values: v128, to: &mut [u8; REGISTER_BYTES]) {
    // SAFETY: the array has 16 bytes, and the store needs no alignment.
    unsafe { v128_store(to.as_mut_ptr().cast(), values) }
}

/// Combines the lowest bytes of four vectors: byte `j` of each integer comes from vector `j`.
#[inline(always)]
fn join_bytes(integers: [v128; 4]) -> v128 {
    let byte = i32x4_splat(0xff);
    let [a, b, c, d] = integers;
    let low = v128_or(v128_and(a, byte), i32x4_shl(v128_and(b, byte), 8));
    v128_or(low, v128_or(i32x4_shl(v128_and(c, byte), 16), i32x4_shl(d, 24)))
}

/// Converts eight f16 to f32.
///
/// A float with the exponent and mantissa bits of an f16 is 2^-112 times the f16's
/// value. Multiplying by 2^112 is exact.
#[inline(always)]
fn from_f16(bits: v128) -> [v128; 2] {
    let magnitude = v128_and(bits, i16x8_splat(0x7fff));
    // If all five exponent bits of an f16 are set, all eight exponent bits of the f32 must be set.
    let is_not_finite = i16x8_gt(magnitude, i16x8_splat(0x7bff));
    let high = v128_and(i16x8_shr(bits, 3), i16x8_splat(0x8fff_u16.cast_signed()));
    let high = v128_or(high, v128_and(is_not_finite, i16x8_splat(0x7000)));
    let low = i16x8_shl(bits, 13);
    let first = i16x8_shuffle::<0, 8, 1, 9, 2, 10, 3, 11>(low, high);
    let second = i16x8_shuffle::<4, 12, 5, 13, 6, 14, 7, 15>(low, high);
    [first, second].map(|quarter| f32x4_mul(quarter, f32x4_splat(2f32.powi(112))))
}

/// Rounds four f32 to the nearest f16 (ties to even), stored in the low bits of each lane.
///
/// Adding a power of two that is 2^13 times the value's own power of two rounds the value to eleven bits and
/// leaves these bits lowest.
#[inline(always)]
fn to_f16(values: v128) -> v128 {
    let twice = i32x4_shl(values, 1);
    let magnitude = f32x4_abs(values);
    // Values beyond the largest f16 become infinite.
    let magnitude =
        f32x4_mul(f32x4_mul(magnitude, f32x4_splat(2f32.powi(112))), f32x4_splat(2f32.powi(-110)));
    // Denormal f16 have the same exponent as the smallest normal f16.
    let exponent = u32x4_max(v128_and(twice, u32x4_splat(0xff00_0000)), u32x4_splat(0x7100_0000));
    let rounding = i32x4_add(u32x4_shr(exponent, 1), i32x4_splat(0x0780_0000));
    let rounded = f32x4_add(rounding, magnitude);
    let exponent = v128_and(u32x4_shr(rounded, 13), i32x4_splat(0x7c00));
    let bits = i32x4_add(exponent, v128_and(rounded, i32x4_splat(0x0fff)));
    let bits = v128_bitselect(i32x4_splat(0x7e00), bits, f32x4_ne(values, values));
    v128_or(bits, v128_and(u32x4_shr(values, 16), i32x4_splat(0x8000)))
}

/// Returns `pointer.add(count)`, applying an all-ones mask whose value the compiler does not know.
///
/// If the compiler knows how pointers advance, it computes a step's addresses with separate instructions
/// instead of load offsets. It also keeps the products of several steps in registers.
#[inline(always)]
fn next<T>(pointer: *const T, count: usize, mask: usize) -> *const T {
    let next = pointer.expose_provenance().wrapping_add(count * size_of::<T>());
    std::ptr::with_exposed_provenance(next & mask)
}

/// Computes each row's scaled sums over all groups.
///
/// Covers the quarters of the outputs starting at quarter `first`.
#[inline(always)]
fn word_quarters<const ROWS: usize, const QUARTERS: usize>(
    groups: &[WordGroup],
    rows: &[[ByteGroup; ROWS]],
    first: usize,
) -> [[v128; QUARTERS]; ROWS] {
    let mask = black_box(usize::MAX);
    let steps = black_box(GROUP / 2);
    let mut sums = [[f32x4_splat(0.0); QUARTERS]; ROWS];
    for (group, rows) in groups.iter().zip(rows) {
        let mut products = [[i32x4_splat(0); QUARTERS]; ROWS];
        let mut line = group.lines.as_ptr().cast::<v128>().wrapping_add(first);
        let mut pairs = rows.as_ptr().cast::<u32>();
        for _ in 0..steps {
            let mut weights = [i32x4_splat(0); QUARTERS];
            for quarter in 0..QUARTERS {
                // SAFETY: the quarter is inside the line of these inputs.
                weights[quarter] = unsafe { v128_load(line.add(quarter)) };
            }
            for row in 0..ROWS {
                // SAFETY: each row's group begins with its integers, two in 32 bits.
                let pair = unsafe { v128_load32_splat(pairs.byte_add(row * size_of::<ByteGroup>())) };
                for quarter in 0..QUARTERS {
                    let product = i32x4_dot_i16x8(weights[quarter], pair);
                    products[row][quarter] = i32x4_add(products[row][quarter], product);
                }
            }
            line = next(line, 4, mask);
            pairs = next(pairs, 1, mask);
        }
        let (scales, _) = group.scales.as_chunks::<4>();
        for row in 0..ROWS {
            let scale = f32x4_splat(rows[row].scale);
            for quarter in 0..QUARTERS {
                let [a, b, c, d] = scales[first + quarter];
                let product = f32x4_mul(f32x4_convert_i32x4(products[row][quarter]), f32x4(a, b, c, d));
                sums[row][quarter] = f32x4_add(sums[row][quarter], f32x4_mul(product, scale));
            }
        }
    }
    sums
}

/// Computes each row's sums of products within a group.
///
/// Covers the quarters of the outputs starting at quarter `first`.
#[inline(always)]
fn byte_quarters<const ROWS: usize, const QUARTERS: usize>(
    lines: &ByteLines,
    rows: &[ByteGroup; ROWS],
    offset: u8,
    first: usize,
) -> [[v128; QUARTERS]; ROWS] {
    let mask = black_box(usize::MAX);
    // If the compiler knew these constants, it would rebuild them at each step.
    let low_bytes = u16x8_shr(i8x16_splat(black_box(-1)), 8);
    let mut sums = [[i32x4_splat(0); QUARTERS]; ROWS];
    for row in 0..ROWS {
        sums[row] = [i32x4_splat(rows[row].start(offset)); QUARTERS];
    }
    let mut line = lines.as_ptr().cast::<v128>().wrapping_add(first);
    let mut pairs = rows.as_ptr().cast::<u32>();
    for _ in 0..black_box(BYTE_LINES) {
        let mut weights = [[i32x4_splat(0); 2]; QUARTERS];
        for quarter in 0..QUARTERS {
            // SAFETY: the quarter is inside the line of these inputs.
            let bytes = unsafe { v128_load(line.add(quarter)) };
            weights[quarter] = [v128_and(bytes, low_bytes), u16x8_shr(bytes, 8)];
        }
        for row in 0..ROWS {
            for pair in 0..2 {
                // SAFETY: each row's group begins with its integers, two in 32 bits.
                let x = unsafe { v128_load32_splat(pairs.byte_add(row * size_of::<ByteGroup>()).add(pair)) };
                for quarter in 0..QUARTERS {
                    let product = i32x4_dot_i16x8(weights[quarter][pair], x);
                    sums[row][quarter] = i32x4_add(sums[row][quarter], product);
                }
            }
        }
        line = next(line, 4, mask);
        pairs = next(pairs, 2, mask);
    }
    sums
}

impl<const ONCE: bool> Vectors for Wasm128<ONCE> {
    type Real = f32;
    type Vector = Floats;
    const TILE_ROWS: usize = TILE_ROWS;
    const TILE_PANELS: usize = TILE_PANELS;

    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        [f32x4_splat(value); 4]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Floats {
        let start = values.as_ptr().cast::<v128>();
        // SAFETY: the array has 64 bytes, and the loads need no alignment.
        unsafe {
            [v128_load(start), v128_load(start.add(1)), v128_load(start.add(2)), v128_load(start.add(3))]
        }
    }

    #[inline(always)]
    fn store(self, values: Floats, to: &mut [f32; LANES]) {
        let start = to.as_mut_ptr().cast::<v128>();
        // SAFETY: the array has 64 bytes, and the stores need no alignment.
        unsafe {
            v128_store(start, values[0]);
            v128_store(start.add(1), values[1]);
            v128_store(start.add(2), values[2]);
            v128_store(start.add(3), values[3]);
        }
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        lanewise!(f32x4_add, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        lanewise!(f32x4_sub, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        lanewise!(f32x4_mul, a, b)
    }

    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        lanewise!(f32x4_div, a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        if ONCE { multiply_add(a, b, c) } else { self.add(self.mul(a, b), c) }
    }

    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        // `pmax` returns its first operand if either is NaN.
        lanewise!(f32x4_pmax, b, a)
    }

    #[inline(always)]
    fn root(self, a: Floats) -> Floats {
        lanewise!(f32x4_sqrt, a)
    }

    #[inline(always)]
    fn exp(self, a: Floats) -> Floats {
        math::exp(self, a)
    }

    #[inline(always)]
    fn sum(self, a: Floats) -> f32 {
        let four = f32x4_add(f32x4_add(a[0], a[2]), f32x4_add(a[1], a[3]));
        let two = f32x4_add(four, i32x4_shuffle::<2, 3, 2, 3>(four, four));
        f32x4_extract_lane::<0>(two) + f32x4_extract_lane::<1>(two)
    }

    #[inline(always)]
    fn largest(self, a: Floats) -> f32 {
        let four = f32x4_pmax(f32x4_pmax(a[0], a[2]), f32x4_pmax(a[1], a[3]));
        let two = f32x4_pmax(four, i32x4_shuffle::<2, 3, 2, 3>(four, four));
        f32x4_extract_lane::<0>(f32x4_pmax(two, i32x4_shuffle::<1, 1, 1, 1>(two, two)))
    }

    #[inline(never)]
    fn call<W: Work<f32>>(self, work: W) -> W::Output {
        self.run(F32Job(work))
    }

    #[inline(always)]
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 2, 2 => 1; else TILE_ROWS => TILE_PANELS)
    }
}

impl<const ONCE: bool> Simd for Wasm128<ONCE> {
    type Integers = Integers;
    const INTEGER_TILE_ROWS: usize = INTEGER_TILE_ROWS;

    #[inline(never)]
    fn run<J: Job>(self, job: J) -> J::Output {
        if J::MULTIPLIES_F32 { job.run(Wasm128::<false>(())) } else { job.run(Wasm128::<true>(())) }
    }

    #[inline(always)]
    fn in_integer_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1, 2 => 1; else INTEGER_TILE_ROWS => 1)
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Floats {
        let start = bits.as_ptr().cast::<v128>();
        // SAFETY: the array has 32 bytes, and the loads need no alignment.
        let [low, high] = unsafe { [v128_load(start), v128_load(start.add(1))] };
        let ([a, b], [c, d]) = (from_f16(low), from_f16(high));
        [a, b, c, d]
    }

    #[inline(always)]
    fn store_f16(self, values: Floats, to: &mut [u16; LANES]) {
        let [a, b, c, d] = values;
        let start = to.as_mut_ptr().cast::<v128>();
        // SAFETY: the array has 32 bytes, and the stores need no alignment.
        unsafe {
            v128_store(start, u16x8_narrow_i32x4(to_f16(a), to_f16(b)));
            v128_store(start.add(1), u16x8_narrow_i32x4(to_f16(c), to_f16(d)));
        }
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        lanewise!(f32x4_pmin, b, a)
    }

    #[inline(always)]
    fn add_where_greater(self, sum: Floats, a: Floats, b: Floats, addend: Floats) -> Floats {
        let is_greater = lanewise!(f32x4_gt, a, b);
        self.add(sum, lanewise!(v128_and, is_greater, addend))
    }

    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        lanewise!(f32x4_nearest, a)
    }

    #[inline(always)]
    fn power_of_two(self, n: Floats) -> Floats {
        // All bits above the exponent are shifted out of the register.
        let bias = [f32x4_splat(INTEGERS_IN_LOW_BITS + 127.0); 4];
        lanewise!(f32x4_add, n, bias).map(|n| i32x4_shl(n, 23))
    }

    #[inline(always)]
    fn store_bytes(self, values: [Floats; 4], to: &mut [u8; 4 * LANES]) {
        let [a, b, c, d] = values.map(integers);
        for (quarter, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
            store(join_bytes([a[quarter], b[quarter], c[quarter], d[quarter]]), to);
        }
    }

    #[inline(always)]
    fn store_nibbles(self, values: [Floats; 8], to: &mut [u8; 4 * LANES]) {
        let nibbles = values.map(integers);
        let nibble = i32x4_splat(15);
        for (quarter, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
            let mut bytes = [nibble; 4];
            for byte in 0..4 {
                let low = v128_and(nibbles[byte][quarter], nibble);
                bytes[byte] = v128_or(low, i32x4_shl(nibbles[byte + 4][quarter], 4));
            }
            store(join_bytes(bytes), to);
        }
    }

    #[inline(always)]
    fn store_signed_bytes(self, values: Floats, to: &mut [i8; LANES]) {
        // SAFETY: the array has 16 bytes, and the store needs no alignment.
        unsafe { v128_store(to.as_mut_ptr().cast(), lowest_bytes(integers(values))) }
    }

    #[inline(always)]
    fn load_signed_bytes(self, bytes: &[u8; LANES]) -> Floats {
        let bytes = load(bytes);
        let (low, high) = (i16x8_extend_low_i8x16(bytes), i16x8_extend_high_i8x16(bytes));
        self.to_floats([
            i32x4_extend_low_i16x8(low),
            i32x4_extend_high_i16x8(low),
            i32x4_extend_low_i16x8(high),
            i32x4_extend_high_i16x8(high),
        ])
    }

    #[inline(always)]
    fn to_floats(self, values: Integers) -> Floats {
        lanewise!(f32x4_convert_i32x4, values)
    }

    #[inline(always)]
    fn look_up_nibbles(self, bytes: &[u8; 4 * LANES], table: &[u8; 16], to: &mut [[u8; 4 * LANES]; 2]) {
        let [low, high] = to.each_mut().map(|line| line.as_chunks_mut::<REGISTER_BYTES>().0);
        let table = load(table);
        for (quarter, bytes) in bytes.as_chunks::<REGISTER_BYTES>().0.iter().enumerate() {
            let (bytes, nibble) = (load(bytes), i8x16_splat(15));
            store(i8x16_swizzle(table, v128_and(bytes, nibble)), &mut low[quarter]);
            store(i8x16_swizzle(table, v128_and(u16x8_shr(bytes, 4), nibble)), &mut high[quarter]);
        }
    }

    #[inline(always)]
    fn byte_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&ByteLines; PANELS],
        rows: &[ByteGroup; ROWS],
        offset: u8,
    ) -> [[Integers; PANELS]; ROWS] {
        let mut sums = [[[i32x4_splat(0); 4]; PANELS]; ROWS];
        for panel in 0..PANELS {
            if ROWS == 1 {
                let of_all = byte_quarters::<ROWS, 4>(panels[panel], rows, offset, 0);
                for row in 0..ROWS {
                    sums[row][panel] = of_all[row];
                }
                continue;
            }
            // With several rows, the sums for one half fill the registers.
            for half in 0..2 {
                let of_half = byte_quarters::<ROWS, 2>(panels[panel], rows, offset, 2 * half);
                for row in 0..ROWS {
                    [sums[row][panel][2 * half], sums[row][panel][2 * half + 1]] = of_half[row];
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn widen(self, bytes: &ByteLines, offset: u8, to: &mut [[i16; 2 * LANES]; GROUP / 2]) {
        let offset = i16x8_splat(i16::from(offset));
        let (to, _) = to.as_flattened_mut().as_chunks_mut::<8>();
        for (index, bytes) in bytes.as_flattened().as_chunks().0.iter().enumerate() {
            let bytes = load(bytes);
            let first = i16x8_sub(v128_and(bytes, i16x8_splat(0xff)), offset);
            let second = i16x8_sub(u16x8_shr(bytes, 8), offset);
            let place = index / 4 * 8 + index % 4;
            // SAFETY: the arrays have 16 bytes, and the stores need no alignment.
            unsafe {
                v128_store(to[place].as_mut_ptr().cast(), first);
                v128_store(to[place + 4].as_mut_ptr().cast(), second);
            }
        }
    }

    #[inline(always)]
    fn word_sums<const ROWS: usize, const PANELS: usize>(
        self,
        panels: [&[WordGroup]; PANELS],
        rows: &[[ByteGroup; ROWS]],
    ) -> Sums<Self, ROWS, PANELS> {
        let mut sums = [[self.splat(0.0); PANELS]; ROWS];
        for panel in 0..PANELS {
            for half in 0..2 {
                let of_half = word_quarters::<ROWS, 2>(panels[panel], rows, 2 * half);
                for row in 0..ROWS {
                    [sums[row][panel][2 * half], sums[row][panel][2 * half + 1]] = of_half[row];
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn largest_magnitude(self, a: Floats, b: Floats) -> f32 {
        // Without the sign, floats order like integers with the same bits. NaN is the largest.
        let (a, b) = (lanewise!(f32x4_abs, a), lanewise!(f32x4_abs, b));
        let [a, b, c, d] = lanewise!(i32x4_max, a, b);
        let four = i32x4_max(i32x4_max(a, b), i32x4_max(c, d));
        let two = i32x4_max(four, i32x4_shuffle::<2, 3, 2, 3>(four, four));
        f32x4_extract_lane::<0>(i32x4_max(two, i32x4_shuffle::<1, 1, 1, 1>(two, two)))
    }
}
