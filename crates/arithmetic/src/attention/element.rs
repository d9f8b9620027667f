//! What keys and values may be held in.

use half::f16;

use crate::simd::{LANES, Simd};

/// What keys and values are held in: f32, or the bits of f16.
pub(crate) trait Element: Copy + Default + Send + Sync {
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Vector;
    fn store<S: Simd>(simd: S, values: S::Vector, to: &mut [Self; LANES]);
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Vector {
        simd.load(values)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, values: S::Vector, to: &mut [Self; LANES]) {
        simd.store(values, to);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Vector {
        simd.load_f16(values)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, values: S::Vector, to: &mut [Self; LANES]) {
        simd.store_f16(values, to);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::from_bits(self).to_f32()
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value).to_bits()
    }
}
