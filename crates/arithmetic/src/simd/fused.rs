//! `a · b + c` rounded once, for instruction sets without an instruction for it.
//!
//! The product of two f32 is exact in f64, and the sum is rounded to f64 and then to f32. That is the number nearest to the exact sum
//! unless the first rounding ends in the middle between two f32: then what it took away decides, and the second rounding no longer
//! knows it. Such sums are doubtful, and computed again by [`exactly`].

use super::vectors::LANES;

/// How far both halves of an f64 are shifted to the left, as integers of 32 bits, before they are compared with [`LEAST`].
pub(super) const SHIFT: u32 = 3;
/// What the lower and the upper half of an f64 are at least, shifted and with a sign, if it is surely rounded rightly.
///
/// The 29 bits that an f32 lacks fill the lower half, and a one and 28 zeros, the middle between two normal f32, are its smallest
/// number. The upper half begins with the lowest nine bits of the exponent then, which are -126 for 2^-125, and smaller for what lies
/// below it down to 2^-255: there the middles are elsewhere. Zero is exact, since no product is that small, and greater.
pub(super) const LEAST: [i32; 2] = [i32::MIN + 1, -126 << 23];

/// Whether the sum in f64 may become another f32 than the exact sum.
#[cfg(any(test, not(all(target_arch = "wasm32", target_feature = "simd128"))))]
#[inline(always)]
fn is_doubtful(sum: f64) -> bool {
    let bits = sum.to_bits();
    #[expect(clippy::cast_possible_truncation, reason = "both halves are asked for")]
    let (low, high) = (bits as i32, (bits >> 32) as i32);
    (low << SHIFT < LEAST[0]) | (high << SHIFT < LEAST[1])
}

/// `a · b + c` of each lane. Inlined, it would be most of the kernels' machine code and of the time to compile them.
#[cfg(any(test, not(all(target_arch = "wasm32", target_feature = "simd128"))))]
#[inline(never)]
pub(super) fn multiply_add(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    let mut sums = [0.0; LANES];
    for lane in 0..LANES {
        sums[lane] = f64::from(a[lane]) * f64::from(b[lane]) + f64::from(c[lane]);
    }
    let (mut rounded, mut any) = (*c, false);
    for lane in 0..LANES {
        rounded[lane] = nearest(sums[lane]);
        any |= is_doubtful(sums[lane]);
    }
    if any { exactly(a, b, c) } else { rounded }
}

#[inline(always)]
fn nearest(sum: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
    let nearest = sum as f32;
    nearest
}

/// The same, whatever the numbers: rounded to odd in f64, from which f32 is rounded rightly. (S. Boldo and G. Melquiond, "Emulation
/// of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57, 2008.)
#[cold]
#[inline(never)]
pub(super) fn exactly(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| {
        let (product, c) = (f64::from(a[lane]) * f64::from(b[lane]), f64::from(c[lane]));
        let sum = product + c;
        // What the sum lost (Møller and Knuth); NaN where it is not finite.
        let of_c = sum - product;
        let lost = (product - (sum - of_c)) + (c - of_c);
        let is_inexact = lost != 0.0 && !lost.is_nan();
        let bits = sum.to_bits();
        nearest(match bits & 1 {
            0 if is_inexact && (lost > 0.0) == (sum > 0.0) => f64::from_bits(bits + 1),
            0 if is_inexact => f64::from_bits(bits - 1),
            _ => sum,
        })
    })
}
