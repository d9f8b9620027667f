//! Rounding of values to 8-bit integers with a shared scale.
//!
//! Products with integer weights round activations this way, and attention over 8-bit keys rounds queries
//! this way.

use crate::simd::Sums;
use crate::simd::{BYTE_INPUTS, BYTE_LINES, ByteGroup, GROUP, LANES, Simd, pack_quad};

/// Largest magnitude of an 8-bit integer.
pub(crate) const LARGEST_BYTE: f32 = 127.0;
/// Magnitude below which all values in a group count as zero.
///
/// The reciprocal of the group's scale would otherwise overflow to infinity.
const SMALLEST: f32 = 1e-36;

/// Rounds up to 32 activations to a group `a p`: 8-bit integers `p` with one scale `a`.
#[inline(always)]
pub(crate) fn nearest_group<S: Simd>(simd: S, x: &[f32]) -> ByteGroup {
    let mut padded = [0.0; GROUP];
    let whole = if let Some(whole) = x.first_chunk::<GROUP>() {
        whole
    } else {
        padded[..x.len()].copy_from_slice(x);
        &padded
    };
    let (halves, _) = whole.as_chunks::<LANES>();
    let (low, high) = (simd.load(&halves[0]), simd.load(&halves[1]));
    let largest = simd.largest_magnitude(low, high);
    let inverse = if largest < SMALLEST { 0.0 } else { LARGEST_BYTE / largest };
    // A non-finite value must make the scale NaN: infinity times zero is NaN, and so is NaN times zero.
    let scale = largest * (1.0 / LARGEST_BYTE) + largest * 0.0;
    let inverse = simd.splat(inverse);
    let mut bytes = [0; GROUP];
    let (halves, _) = bytes.as_chunks_mut::<LANES>();
    simd.store_signed_bytes(simd.round(simd.mul(low, inverse)), &mut halves[0]);
    simd.store_signed_bytes(simd.round(simd.mul(high, inverse)), &mut halves[1]);
    let mut group = ByteGroup { quants: [0; BYTE_LINES], start: 0, scale };
    let mut sum = 0;
    for (to, integers) in group.quants.iter_mut().zip(bytes.as_chunks::<BYTE_INPUTS>().0) {
        let [a, b, c, d] = *integers;
        *to = pack_quad(*integers);
        sum += i32::from(a) + i32::from(b) + i32::from(c) + i32::from(d);
    }
    group.start = -128 * sum;
    group
}

/// Multiplies a group's integer sums by the output scales and row scales, and adds them to `sums`.
#[inline(always)]
pub(crate) fn add_scaled<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    mut sums: Sums<S, ROWS, PANELS>,
    products: [[S::Integers; PANELS]; ROWS],
    scales: [S::Vector; PANELS],
    rows: &[ByteGroup; ROWS],
) -> Sums<S, ROWS, PANELS> {
    for row in 0..ROWS {
        let scale = simd.splat(rows[row].scale);
        for panel in 0..PANELS {
            // Multiplying the two scales first could overflow to infinity even if the sum of products is
            // zero.
            let product = simd.mul(simd.to_floats(products[row][panel]), scales[panel]);
            // Each step is rounded, so processors without fused multiply-add get
            // the same bits. Everything else is in integers.
            sums[row][panel] = simd.add(sums[row][panel], simd.mul(product, scale));
        }
    }
    sums
}
