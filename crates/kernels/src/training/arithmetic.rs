//! The two element types of training, and the way from a plain loop to this processor's vector instructions.

use candle_core::WithDType;

/// f32, in which models are trained, and f64, in which gradients are checked against finite differences.
pub(crate) trait Real: WithDType {
    /// `self · factor + term`, rounded once where `FMA` says that the processor has an instruction for it.
    fn multiply_add<const FMA: bool>(self, factor: Self, term: Self) -> Self;

    /// `e` to this power.
    fn exponential(self) -> Self;

    /// The square root.
    fn root(self) -> Self;

    /// The larger of both.
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

impl Real for f32 {
    #[inline(always)]
    fn multiply_add<const FMA: bool>(self, factor: Self, term: Self) -> Self {
        if FMA { self.mul_add(factor, term) } else { self * factor + term }
    }

    /// `2^n · e^r` with `r` within `±ln 2 / 2`; the relative error is below 2e-7. Without a branch, so that loops over it
    /// become vector code. Below -87 it stays at the smallest normal number.
    #[inline(always)]
    fn exponential(self) -> Self {
        /// Adding this rounds to a whole number, which then stands in the low bits.
        const ROUND: f32 = 12_582_912.0;
        const LN_2_HIGH: f32 = 0.693_359_4;
        const LN_2_LOW: f32 = -2.121_944_4e-4;
        const EXPONENT_OF_ONE: u32 = 127 << 23;
        let x = if self < -87.0 { -87.0 } else { self };
        let x = if x > 88.0 { 88.0 } else { x };
        let rounded = x * std::f32::consts::LOG2_E + ROUND;
        let n = rounded - ROUND;
        let r = x - n * LN_2_HIGH - n * LN_2_LOW;
        // The series of e^r to r^7.
        let mut series = 1.0 / 5040.0;
        for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            series = series * r + coefficient;
        }
        series * Self::from_bits((rounded.to_bits() << 23).wrapping_add(EXPONENT_OF_ONE))
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    #[inline(always)]
    fn multiply_add<const FMA: bool>(self, factor: Self, term: Self) -> Self {
        if FMA { self.mul_add(factor, term) } else { self * factor + term }
    }

    #[inline(always)]
    fn exponential(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}

/// Work that is compiled once for plain processors and once for those with wide vectors.
pub(crate) trait Vectorized {
    /// What comes out.
    type Output;

    /// Does the work; `FMA` says whether fused multiply-adds are instructions here. Marked `#[inline(always)]`, so that it
    /// is compiled for the instruction set that [`vectorized`] chose.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// Does the work with the best instruction set of this processor.
pub(crate) fn vectorized<W: Vectorized>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return pulp::Simd::vectorize(avx2, Wide(work));
    }
    if cfg!(target_arch = "aarch64") { work.run::<true>() } else { work.run::<false>() }
}

/// Work for a processor with fused multiply-adds. A closure would not do: it cannot be told to be inlined, and what is not
/// inlined is compiled for the plain instruction set.
#[cfg(target_arch = "x86_64")]
struct Wide<W>(W);

#[cfg(target_arch = "x86_64")]
impl<W: Vectorized> pulp::WithSimd for Wide<W> {
    type Output = W::Output;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> W::Output {
        self.0.run::<true>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_two_units_in_the_last_place() {
        for step in -8700..=8800 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(x.exponential()) - expected).abs() / expected;
            assert!(error < 2.4e-7, "e^{x}: relative error {error}");
        }
        assert!((-1000f32).exponential() < 1e-37);
        assert!(f32::NAN.exponential().is_nan());
    }
}
