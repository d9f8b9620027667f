//! Checks every operation of every instruction set against the portable one, lane by lane.

use half::f16;

use super::portable::Portable;
use super::vectors::*;
use super::*;
use crate::{QUICK_GELU_FACTOR, RandomStream};

const PORTABLE: InstructionSet = InstructionSet::Portable(Portable);

/// Floats of every kind: ordinary, ties, non-finite, denormal, and the limits of f32 and f16.
const SPECIAL: [f32; 2 * LANES] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    3.499_999_8,
    1.0 / 3.0,
    -1e-3,
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    1e-40,
    -1e-45,
    8_388_609.0,
    -8_388_607.5,
    4_194_304.5,
    65_504.0,
    65_519.0,
    65_520.0,
    -65_536.0,
    6.1e-5,
    6e-8,
    2.98e-8,
    -2.99e-8,
    2_049.0,
    2_051.0,
];

fn is_same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Checks that every instruction set gives the portable result of `job`; all NaNs count as equal.
fn compare(job: impl Job<Output = Vec<f32>> + Copy) {
    let expected = PORTABLE.run(job);
    for instructions in InstructionSet::available() {
        let found = instructions.run(job);
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.into_iter().zip(&expected).enumerate() {
            assert!(is_same(found, *expected), "{instructions:?}, value {index}: {found:e} vs. {expected:e}");
        }
    }
}

/// Returns all pairs of special values, sixteen first and sixteen second operands at a time.
fn pairs() -> impl Iterator<Item = ([f32; LANES], [f32; LANES])> {
    (0..SPECIAL.len()).flat_map(|shift| {
        SPECIAL.as_chunks().0.iter().enumerate().map(move |(index, a)| {
            (*a, std::array::from_fn(|lane| SPECIAL[(index * LANES + lane + shift) % SPECIAL.len()]))
        })
    })
}

#[inline(always)]
fn stored<S: Simd>(simd: S, values: S::Vector) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    simd.store(values, &mut lanes);
    lanes
}

#[derive(Clone, Copy)]
struct Lanewise([f32; LANES], [f32; LANES]);

impl Job for Lanewise {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let (a, b) = (simd.load(&self.0), simd.load(&self.1));
        let splat = simd.splat(self.0[3]);
        let results = [
            simd.add(a, b),
            simd.sub(a, b),
            simd.mul(a, b),
            simd.div(a, b),
            simd.min(a, b),
            simd.max(a, b),
            simd.root(a),
            simd.round(a),
            simd.add(splat, b),
            simd.add_where_greater(simd.splat(1.0), a, b, splat),
        ];
        results.map(|values| stored(simd, values)).as_flattened().to_vec()
    }
}

#[test]
fn lanewise_operations_equal_the_portable_set() {
    pairs().for_each(|(a, b)| compare(Lanewise(a, b)));
}

#[derive(Clone, Copy)]
struct MulAdd([f32; LANES], [f32; LANES], [f32; LANES]);

impl Job for MulAdd {
    type Output = [f32; LANES];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
        stored(simd, simd.mul_add(simd.load(&self.0), simd.load(&self.1), simd.load(&self.2)))
    }
}

/// Checks the results against `libm`'s `fmaf`, which computes in integers.
fn assert_rounded_once(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) {
    for instructions in InstructionSet::available() {
        for (lane, found) in instructions.run(MulAdd(a, b, c)).into_iter().enumerate() {
            let (a, b, c) = (a[lane], b[lane], c[lane]);
            let expected = libm::fmaf(a, b, c);
            assert!(
                is_same(found, expected),
                "{instructions:?}: {a:e} · {b:e} + {c:e} = {found:e}, not {expected:e}"
            );
        }
    }
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "half of the random bits are enough")]
fn multiply_add_rounds_once() {
    for ((a, b), c) in pairs().flat_map(|pair| [1.0, -1e30, f32::INFINITY].map(|c| (pair, [c; LANES]))) {
        assert_rounded_once(a, b, c);
    }
    for (a, b) in pairs() {
        assert_rounded_once(a, b, pairs().nth(7).unwrap().0);
        assert_rounded_once(a, b, b);
    }
    // Arbitrary bits, and exponents close enough for products and addends to overlap.
    let mut random = RandomStream::new(1);
    let any = |random: &mut RandomStream| f32::from_bits(random.seed() as u32);
    let near = |random: &mut RandomStream, exponent: u32| {
        let bits = random.seed() as u32;
        let exponent = (exponent + bits % 61).min(254);
        // Numbers with few significant digits produce ties.
        let digits = [0x7f_ffff, 0x7f_f000, 0x7f_0000][(bits >> 8) as usize % 3];
        f32::from_bits(exponent << 23 | bits & digits | bits & 1 << 31)
    };
    for round in 0..1 << 15 {
        assert_rounded_once(
            std::array::from_fn(|_| any(&mut random)),
            std::array::from_fn(|_| any(&mut random)),
            std::array::from_fn(|_| any(&mut random)),
        );
        // The last pair of exponents is near the smallest numbers, 2^-149 to 2^-89.
        let (factor_exponent, addend_exponent) = [(97, 67), (127, 127), (64, 1), (40, 0)][round % 4];
        assert_rounded_once(
            std::array::from_fn(|_| near(&mut random, factor_exponent)),
            std::array::from_fn(|_| near(&mut random, factor_exponent)),
            std::array::from_fn(|_| near(&mut random, addend_exponent)),
        );
    }
}

/// Checks sums that double rounding gets wrong.
///
/// The first rounding ends at a tie between two f32, and the second one then goes the wrong way. `c` is an
/// f32, and the product is slightly more or less than half a unit in its last place.
#[test]
fn multiply_add_avoids_double_rounding() {
    let ulp = |exponent: i32| libm::ldexpf(1.0, exponent);
    for exponent in (-126..=120).step_by(3) {
        // (1 + 2^-23)(1 - 2^-23) = 1 - 2^-46, and (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: half a unit in the last
        // place, and slightly more or less.
        for (x, y) in [
            (1.0 + ulp(-23), 1.0 - ulp(-23)),
            (1.0 + ulp(-12), 1.0 + ulp(-12)),
            (1.0 - ulp(-24), 1.0 + ulp(-23)),
        ] {
            for digits in [0, 1, 2, 3, 0x7f_fffe, 0x7f_ffff] {
                let c = f32::from_bits(((exponent + 127) as u32) << 23 | digits);
                let half = exponent - 24;
                let (left, right) = (half / 2, half - half / 2);
                let (a, b) = (x * ulp(left), y * ulp(right));
                let signs = [(a, c), (-a, c), (a, -c), (-a, -c)];
                let signed = |lane: usize| signs[lane % 4];
                assert_rounded_once(
                    std::array::from_fn(|lane| signed(lane).0),
                    [b; LANES],
                    std::array::from_fn(|lane| signed(lane).1),
                );
            }
        }
    }
    // Below the smallest normal number, the midpoints are elsewhere.
    for digits in [1, 2, 3, 4, 0x40_0000, 0x7f_fffe, 0x7f_ffff] {
        for extra in [0, 1, 2, 3, 5, 0x3f_ffff] {
            let c = f32::from_bits(digits);
            let (a, b) = (f32::from_bits(0x3f80_0000 | extra) * ulp(-75), (1.0 + ulp(-23)) * ulp(-75));
            assert_rounded_once([a; LANES], [b; LANES], [c; LANES]);
            assert_rounded_once([-a; LANES], [b; LANES], [c; LANES]);
        }
    }
}

#[derive(Clone, Copy)]
struct Activations([f32; LANES]);

impl Job for Activations {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let x = simd.load(&self.0);
        let results = [
            gelu_tanh(simd, x),
            gelu_tanh_slope(simd, x),
            gelu_erf(simd, x),
            gelu_erf_slope(simd, x),
            swish(simd, x, QUICK_GELU_FACTOR),
            swish_slope(simd, x, QUICK_GELU_FACTOR),
            tanh(simd, x),
            tanh_slope(simd, x),
            simd.exp(x),
        ];
        results.map(|values| stored(simd, values)).as_flattened().to_vec()
    }
}

#[test]
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "only sixteen lanes")]
fn exp_and_activations_equal_the_portable_set() {
    SPECIAL.as_chunks().0.iter().for_each(|x| compare(Activations(*x)));
    for first in (-4000..4000).step_by(LANES) {
        compare(Activations(std::array::from_fn(|lane| (first + lane as i32) as f32 * 0.0237)));
    }
}

/// Checks that the thread's mode does not affect results and is left unchanged.
///
/// The thread's mode treats denormal numbers as zeros and rounds downward.
#[test]
fn results_do_not_depend_on_the_thread_mode() {
    let small = 3e-39; // a denormal number
    let values = std::array::from_fn(|lane| (lane as f32 + 0.1) / 3.0);
    let (a, b, c) = ([1e-20; LANES], [7e-20; LANES], [small; LANES]);
    for instructions in InstructionSet::available() {
        let compute = || {
            let sums = instructions.run(MulAdd(a, b, c)).into_iter();
            let quotients = instructions.run(Lanewise(values, [small; LANES])).into_iter();
            let all = sums.chain(quotients).chain(instructions.run(Activations(values)));
            let rounded = rounded_to_nearest(|| std::hint::black_box(small) * std::hint::black_box(0.7));
            all.chain([rounded]).map(f32::to_bits).collect::<Vec<_>>()
        };
        let expected = compute();
        let own = mode::control();
        mode::set_control(own | mode::CHANGED);
        // Some processors lack some of these bits.
        let changed = mode::control() & mode::CHANGED;
        let found = compute();
        let after = mode::control();
        mode::set_control(own);
        assert_eq!(found, expected, "{instructions:?}");
        // Only exception bits may differ.
        assert_eq!(after & mode::CHANGED, changed, "{instructions:?}");
        assert!(mode::CHANGED == 0 || changed != own & mode::CHANGED);
    }
}

#[derive(Clone, Copy)]
struct Powers(i16);

impl Job for Powers {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        stored(simd, simd.power_of_two(simd.splat(f32::from(self.0)))).to_vec()
    }
}

#[test]
fn powers_of_two_are_exact() {
    for exponent in -127..=127 {
        compare(Powers(exponent));
        let expected = if exponent == -127 { 0.0 } else { f32::from(exponent).exp2() };
        assert_eq!(PORTABLE.run(Powers(exponent)), [expected; LANES]);
    }
}

#[derive(Clone, Copy)]
struct FromHalves([u16; LANES]);

impl Job for FromHalves {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        stored(simd, simd.load_f16(&self.0)).to_vec()
    }
}

#[derive(Clone, Copy)]
struct FromBytes([u8; LANES]);

impl Job for FromBytes {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        stored(simd, simd.load_signed_bytes(&self.0)).to_vec()
    }
}

#[test]
fn signed_bytes_are_exact() {
    for first in (0..=240).step_by(16) {
        let bytes = std::array::from_fn(|lane| first + u8::try_from(lane).unwrap());
        compare(FromBytes(bytes));
        let expected: Vec<f32> = bytes.iter().map(|byte| f32::from(byte.cast_signed())).collect();
        assert_eq!(PORTABLE.run(FromBytes(bytes)), expected);
    }
}

#[derive(Clone, Copy)]
struct ToHalves([f32; LANES]);

impl Job for ToHalves {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut halves = [0; LANES];
        simd.store_f16(simd.load(&self.0), &mut halves);
        halves.map(|bits| f16::from_bits(bits).to_f32()).to_vec()
    }
}

#[test]
fn f16_conversion_is_exact_and_rounds_ties_to_even() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for bits in halves.as_chunks().0 {
        compare(FromHalves(*bits));
        // The f16 itself, the midpoint to the next one, and slightly less and more than the midpoint.
        let middle = bits.map(|bits| (f16::from_bits(bits).to_f32().to_bits()) + (1 << 12));
        for floats in [
            middle.map(|bits| bits - (1 << 12)),
            middle,
            middle.map(|bits| bits - 1),
            middle.map(|bits| bits + 1),
        ] {
            compare(ToHalves(floats.map(f32::from_bits)));
        }
    }
    SPECIAL.as_chunks().0.iter().for_each(|values| compare(ToHalves(*values)));
}

/// Job over integers from 0 to 255 and a table.
#[derive(Clone, Copy)]
struct Bytes([u8; 4 * LANES], [u8; 16]);

impl Job for Bytes {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let floats = |bytes: [u8; LANES]| simd.load(&bytes.map(f32::from));
        let vectors: [[u8; LANES]; 4] =
            std::array::from_fn(|byte| std::array::from_fn(|lane| self.0[4 * lane + byte]));
        let (mut bytes, mut nibbles, mut signed) = ([0; 4 * LANES], [0; 4 * LANES], [[0; LANES]; 4]);
        simd.store_bytes(vectors.map(floats), &mut bytes);
        let halves = [0, 1, 2, 3, 4, 5, 6, 7]
            .map(|index| floats(vectors[index % 4].map(|byte| (byte >> (index / 4 * 4)) & 15)));
        simd.store_nibbles(halves, &mut nibbles);
        assert_eq!((bytes, nibbles), (self.0, self.0));
        for (signed, vector) in signed.iter_mut().zip(&vectors) {
            simd.store_signed_bytes(simd.sub(floats(*vector), simd.splat(128.0)), signed);
        }
        let mut entries = [[0; 4 * LANES]; 2];
        simd.look_up_nibbles(&self.0, &self.1, &mut entries);
        let signed = signed.as_flattened().iter().map(|value| f32::from(*value));
        signed.chain(entries.as_flattened().iter().map(|entry| f32::from(*entry))).collect()
    }
}

/// Returns the sequence `first`, `first + step`, and so on.
fn progression<const COUNT: usize>(first: u8, step: u8) -> [u8; COUNT] {
    let mut next = first;
    std::array::from_fn(|_| {
        let value = next;
        next = value.wrapping_add(step);
        value
    })
}

#[test]
fn bytes_round_trip_at_every_position() {
    let table = progression(7, 29);
    for first in 0..=u8::MAX {
        compare(Bytes(progression(first, 37), table));
    }
    // Byte 2 of group 5 is 66 = 4 · 16 + 2.
    let read = PORTABLE.run(Bytes(progression(0, 3), table));
    let (low, high) = (4 * LANES, 8 * LANES);
    assert_eq!((read[2 * LANES + 5], read[low + 22], read[high + 22]), (-62.0, 65.0, 123.0));
}

#[derive(Clone, Copy)]
struct AcrossLanes([f32; LANES]);

impl Job for AcrossLanes {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let values = simd.load(&self.0);
        vec![simd.sum(values), simd.largest(values), simd.largest_magnitude(values, simd.splat(0.0))]
    }
}

#[test]
fn reductions_cover_every_lane() {
    // Sums of integers are exact in any order.
    let lanes: [f32; LANES] = std::array::from_fn(|lane| (lane * lane) as f32 - 300.0);
    for shift in 0..LANES {
        let mut values = lanes;
        values.rotate_right(shift);
        compare(AcrossLanes(values));
        assert_eq!(PORTABLE.run(AcrossLanes(values)), [1240.0 - 4800.0, -75.0, 300.0]);
        values[shift] = f32::INFINITY;
        compare(AcrossLanes(values));
        values[(shift + 1) % LANES] = f32::NEG_INFINITY;
        compare(AcrossLanes(values));
        for instructions in InstructionSet::available() {
            values[shift] = f32::NAN;
            let found = instructions.run(AcrossLanes(values));
            assert!(found[0].is_nan() && found[2].is_nan(), "{instructions:?}: {found:?}");
        }
    }
}

#[test]
fn row_blocks_are_transposed() {
    #[derive(Clone, Copy)]
    struct Transpose;
    impl Job for Transpose {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut values = [[0f32; LANES + 3]; LANES];
            for row in 0..LANES {
                for column in 0..LANES + 3 {
                    values[row][column] = (100 * row + column) as f32;
                }
            }
            let mut rows: [&[f32]; LANES] = [&[]; LANES];
            for row in 0..LANES {
                rows[row] = &values[row];
            }
            let mut to = [Line([0f32; LANES]); LANES];
            simd.transpose(&rows, 3, &mut to);
            let mut all = Vec::new();
            for line in 0..LANES {
                all.extend_from_slice(&to[line].0);
            }
            all
        }
    }
    let expected: Vec<f32> =
        (0..LANES).flat_map(|column| (0..LANES).map(move |row| (100 * row + column + 3) as f32)).collect();
    assert_eq!(PORTABLE.run(Transpose), expected);
    compare(Transpose);
}

/// Checks that 16-bit sums do not overflow for bytes and integers at their limits.
#[test]
fn byte_sums_are_exact_at_their_limits() {
    #[derive(Clone, Copy)]
    struct SumBytes {
        weight: u8,
        x: i8,
        offset: u8,
    }
    impl Job for SumBytes {
        type Output = Vec<f32>;
        const MULTIPLIES_BYTES: bool = true;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f32> {
            let bytes = [[self.weight; BYTE_INPUTS * LANES]; BYTE_LINES];
            let start = -128 * 32 * i32::from(self.x);
            let row = ByteGroup { quants: [pack_quad([self.x; 4]); 8], start, scale: 1.0 };
            let [[sums]] = simd.byte_sums([&bytes], &[row], self.offset);
            let mut values = [0.0; LANES];
            simd.store(simd.to_floats(sums), &mut values);
            values.to_vec()
        }
    }
    for (offset, weights) in [(128, [1, 128, 255]), (SMALL_OFFSET, [0, 32, 63])] {
        for weight in weights {
            for x in [-127, 0, 1, 127] {
                let sums = SumBytes { weight, x, offset };
                let expected = 32.0 * (f32::from(weight) - f32::from(offset)) * f32::from(x);
                assert_eq!(PORTABLE.run(sums), [expected; LANES], "{weight} times {x}");
                compare(sums);
            }
        }
    }
}
