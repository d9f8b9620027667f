//! Exponential and activation functions on sixteen values at a time.
//!
//! `exp(x) = 2^n · exp(r)` with `n = round(x / ln 2)` and `r = x - n ln 2` in two parts (Cody and Waite), so
//! that `|r| ≤ ln 2 / 2`. There, eight terms of the Taylor series leave a relative error below 8e-9. The
//! result is accurate to two units in the last place down to 2^-125.5. Smaller results become 0, whereas the
//! library function returns the smallest normal numbers and denormal numbers.

use super::job::Simd;
use super::vectors::{LANES, Number, Vectors};

/// Input above which `exp` overflows f32.
const EXP_LARGEST: f32 = 88.8;
/// Lower bound that inputs are clamped to; its result is 0, like all results below 2^-125.5.
///
/// At this input, half of the power of two is 2^-127, which counts as zero.
const EXP_SMALLEST: f32 = -87.6;
/// High part of ln 2, with few enough digits that multiplying it by `n` is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
/// Low part of ln 2.
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of the Taylor series: 1/7!, …, 1/2!, 1/1!, 1/0!.
const EXP_SERIES: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
/// Linear coefficient `-2 sqrt(2/π)`; the tanh in GELU becomes a sigmoid of twice its argument.
const GELU_LINEAR: f64 = -1.595_769_121_605_731;
/// Cubic coefficient `-2 sqrt(2/π) · 0.044715`.
const GELU_CUBIC: f64 = GELU_LINEAR * 0.044_715;
/// Density of the standard normal distribution at 0, `1 / sqrt(2π)`.
const NORMAL_DENSITY: f64 = 0.398_942_280_401_432_7;

/// Computes `exp(x)` in each lane; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let x = simd.max(simd.splat(EXP_SMALLEST), simd.min(simd.splat(EXP_LARGEST), x));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.mul_add(n, simd.splat(-LN_2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN_2_LOW), r);
    let [first, rest @ ..] = EXP_SERIES;
    let mut series = simd.splat(first);
    for coefficient in rest {
        series = simd.mul_add(series, r, simd.splat(coefficient));
    }
    // 2^128 overflows f32, but half of it does not. The doubling then overflows only where it should.
    let half = simd.power_of_two(simd.sub(n, simd.splat(1.0)));
    simd.mul(simd.mul(series, half), simd.splat(2.0))
}

/// Tanh approximation of GELU, `0.5 x (1 + tanh(u))` with `u = sqrt(2/π) (x + 0.044715 x³)`.
///
/// Computed in the equivalent form `x / (1 + exp(-2u))`.
#[inline(always)]
pub(crate) fn gelu_tanh<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    v.div(x, gelu_denominator(v, x))
}

/// Derivative of [`gelu_tanh`]: `s + x s (1 - s) 2u'` with `s = 1 / (1 + exp(-2u))`.
#[inline(always)]
pub(crate) fn gelu_tanh_slope<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let constant = |value: f64| v.splat(V::Real::of(value));
    let one = constant(1.0);
    let s = v.div(one, gelu_denominator(v, x));
    let twice_u_slope = v.mul_add(v.mul(x, x), constant(-3.0 * GELU_CUBIC), constant(-GELU_LINEAR));
    v.mul_add(v.mul(v.mul(x, s), v.sub(one, s)), twice_u_slope, s)
}

/// Denominator of [`gelu_tanh`], `1 + exp(-2u)`.
#[inline(always)]
fn gelu_denominator<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let constant = |value: f64| v.splat(V::Real::of(value));
    let factor = v.mul_add(v.mul(x, x), constant(GELU_CUBIC), constant(GELU_LINEAR));
    v.add(constant(1.0), v.exp(v.mul(x, factor)))
}

/// Scaled swish function, `x sigmoid(factor x)`.
#[inline(always)]
pub(crate) fn swish<V: Vectors>(v: V, x: V::Vector, factor: f64) -> V::Vector {
    v.div(x, swish_denominator(v, x, factor))
}

/// Derivative of [`swish`]: `s + factor x s (1 - s)` with `s = sigmoid(factor x)`.
#[inline(always)]
pub(crate) fn swish_slope<V: Vectors>(v: V, x: V::Vector, factor: f64) -> V::Vector {
    let one = v.splat(V::Real::ONE);
    let s = v.div(one, swish_denominator(v, x, factor));
    let scaled = v.mul(x, v.splat(V::Real::of(factor)));
    v.mul_add(v.mul(scaled, s), v.sub(one, s), s)
}

/// Denominator of [`swish`], `1 + exp(-factor x)`.
#[inline(always)]
fn swish_denominator<V: Vectors>(v: V, x: V::Vector, factor: f64) -> V::Vector {
    v.add(v.splat(V::Real::ONE), v.exp(v.mul(x, v.splat(V::Real::of(-factor)))))
}

/// Exact GELU, `0.5 x (1 + erf(x / sqrt 2))`.
#[inline(always)]
pub(crate) fn gelu_erf<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    v.mul(x, normal_distribution(v, x))
}

/// Derivative of [`gelu_erf`]: the normal CDF at `x`, plus `x` times the normal density.
#[inline(always)]
pub(crate) fn gelu_erf_slope<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let constant = |value: f64| v.splat(V::Real::of(value));
    let density = v.mul(constant(NORMAL_DENSITY), v.exp(v.mul(v.mul(x, x), constant(-0.5))));
    v.mul_add(x, density, normal_distribution(v, x))
}

/// Normal CDF, `0.5 (1 + erf(x / sqrt 2))`.
#[inline(always)]
fn normal_distribution<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let constant = |value: f64| v.splat(V::Real::of(value));
    let mut lanes = [V::Real::ZERO; LANES];
    v.store(v.mul(x, constant(std::f64::consts::FRAC_1_SQRT_2)), &mut lanes);
    for lane in 0..LANES {
        lanes[lane] = lanes[lane].error_function();
    }
    v.mul(constant(0.5), v.add(constant(1.0), v.load(&lanes)))
}

/// Hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let mut lanes = [V::Real::ZERO; LANES];
    v.store(x, &mut lanes);
    for lane in 0..LANES {
        lanes[lane] = lanes[lane].hyperbolic_tangent();
    }
    v.load(&lanes)
}

/// Derivative of [`tanh`]: `1 - tanh² x`.
#[inline(always)]
pub(crate) fn tanh_slope<V: Vectors>(v: V, x: V::Vector) -> V::Vector {
    let y = tanh(v, x);
    v.sub(v.splat(V::Real::ONE), v.mul(y, y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{InstructionSet, Job};

    /// Job that applies the exponential function (if the flag is true) or GELU to all values.
    struct Map<'a>(&'a mut [f32], bool);

    impl Job for Map<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            for values in self.0.chunks_mut(LANES) {
                let mut sixteen = [0.0; LANES];
                sixteen[..values.len()].copy_from_slice(values);
                let x = simd.load(&sixteen);
                let y = if self.1 { exp(simd, x) } else { gelu_tanh(simd, x) };
                simd.store(y, &mut sixteen);
                values.copy_from_slice(&sixteen[..values.len()]);
            }
        }
    }

    fn everywhere() -> Vec<f32> {
        let dense = (-10_000..=10_000).map(|step| step as f32 * 0.0095);
        let special =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, -1e-40, 1e30, -1e30, 88.72, 88.73];
        dense.chain(special).collect()
    }

    #[test]
    fn exp_is_within_two_ulps() {
        for set in InstructionSet::available() {
            let mut results = everywhere();
            set.run(Map(&mut results, true));
            for (x, result) in everywhere().into_iter().zip(results) {
                let expected = f64::from(x).exp();
                if x.is_nan() {
                    assert!(result.is_nan(), "{set:?}: exp(NaN) = {result}");
                } else if expected < f64::from(f32::MIN_POSITIVE) * 2.0 {
                    assert!(
                        f64::from(result) <= f64::from(f32::MIN_POSITIVE) * 2.0,
                        "{set:?}: exp({x}) = {result}"
                    );
                } else if expected > 3.402_823_5e38 {
                    assert_eq!(result, f32::INFINITY, "{set:?}: exp({x})");
                } else {
                    let relative = (f64::from(result) - expected).abs() / expected;
                    assert!(
                        relative < 2.0 * f64::from(f32::EPSILON),
                        "{set:?}: exp({x}) = {result}, {relative:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn gelu_equals_its_definition() {
        for set in InstructionSet::available() {
            let mut results = everywhere();
            set.run(Map(&mut results, false));
            for (x, result) in everywhere().into_iter().zip(results) {
                let wide = f64::from(x);
                let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
                let expected = 0.5 * wide * (1.0 + u.tanh());
                if expected.is_nan() {
                    assert!(result.is_nan(), "{set:?}: gelu({x}) = {result}");
                } else if expected.is_infinite() {
                    assert_eq!(f64::from(result), expected, "{set:?}: gelu({x})");
                } else {
                    // The tolerance is relative to x, because near -5 the definition itself loses digits in 1
                    // + tanh.
                    let tolerance = 4.0 * f64::from(f32::EPSILON) * wide.abs().max(1e-30);
                    assert!(
                        (f64::from(result) - expected).abs() <= tolerance,
                        "{set:?}: gelu({x}) = {result}"
                    );
                }
            }
        }
    }
}
