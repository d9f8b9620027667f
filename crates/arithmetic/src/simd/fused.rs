//! Computes `a · b + c` with one rounding, for instruction sets without a fused multiply-add.
//!
//! The product of two f32 is exact in f64. The sum is rounded to f64 and then to f32. The result is
//! the f32 nearest to the exact sum, unless the first rounding ends halfway between two f32. Then
//! the discarded part decides, but the second rounding no longer sees it. Such sums are doubtful,
//! and [`exactly`] computes them again.

use super::vectors::LANES;

/// Left shift applied to both 32-bit halves of an f64 before the comparison with [`LEAST`].
pub(super) const SHIFT: u32 = 3;
/// Lower bounds on the shifted, signed halves of an f64 that is sure to round correctly.
///
/// After the shift, the lower half holds the 29 bits that an f32 lacks. The midpoint between two normal
/// f32, a one and 28 zeros, is its smallest value. The upper half then begins with the lowest nine bits of
/// the exponent. They are -126 for 2^-125, and less for smaller sums down to 2^-255, where midpoints are
/// elsewhere because the f32 is denormal. Even smaller sums compare as greater and round to zero. A sum
/// of zero is exact, since no product is that small.
pub(super) const LEAST: [i32; 2] = [i32::MIN + 1, -126 << 23];

/// Whether rounding this f64 sum to f32 may differ from rounding the exact sum.
#[cfg(any(test, not(all(target_arch = "wasm32", target_feature = "simd128"))))]
#[inline(always)]
fn is_doubtful(sum: f64) -> bool {
    let bits = sum.to_bits();
    #[expect(clippy::cast_possible_truncation, reason = "both halves are needed")]
    let (low, high) = (bits as i32, (bits >> 32) as i32);
    (low << SHIFT < LEAST[0]) | (high << SHIFT < LEAST[1])
}

/// Computes `a · b + c` in each lane, rounded once.
///
/// Not inlined, because it would dominate the kernels' machine code and compile time.
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
    #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
    let nearest = sum as f32;
    nearest
}

/// Computes [`multiply_add`] exactly for all inputs, including doubtful sums.
///
/// Rounds to odd in f64, after which rounding to f32 is correct. Source: S. Boldo and G. Melquiond,
/// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
/// Transactions on Computers 57, 2008.
#[cold]
#[inline(never)]
pub(super) fn exactly(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| {
        let (product, c) = (f64::from(a[lane]) * f64::from(b[lane]), f64::from(c[lane]));
        let sum = product + c;
        // Rounding error of the sum (Møller and Knuth); NaN where the sum is not finite.
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
