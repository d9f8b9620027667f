//! Storage element types: f32 and f16.

use half::f16;

use crate::large_pages::ZeroBits;
use crate::simd::PanelLine;
use crate::simd::{LANES, Simd};

/// Storage element: `f32`, or `u16` for the bits of an f16.
pub(crate) trait Element: ZeroBits + Default + Send + Sync + 'static {
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Vector;
    fn store<S: Simd>(simd: S, values: S::Vector, to: &mut [Self; LANES]);
    fn to_f32(self) -> f32;
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
        f16::from_bits(self).to_f32_const()
    }
}

impl<S: Simd, E: Element> PanelLine<S> for [E; LANES] {
    #[inline(always)]
    fn load(&self, simd: S) -> S::Vector {
        E::load(simd, self)
    }
}
