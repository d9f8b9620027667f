//! Tests sinusoidal positions, and the variance of scores divided by sqrt(d).
//!
//! Source: "Attention Is All You Need", sections 3.5 and 3.2.1.

use candle_core::{Device, Result};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_attention::{ScaledDotProduct, SinusoidalPositions};
use candle_gpt2_testing::{pattern, values};

#[test]
fn positions_follow_the_formula() -> Result<()> {
    let table = SinusoidalPositions::new(50, 6, &Device::Cpu)?.table().to_vec2::<f32>()?;
    for (position, channel, expected) in [
        (0, 0, 0.0),
        (0, 1, 1.0),
        (1, 0, 1f64.sin()),
        (1, 1, 1f64.cos()),
        (7, 2, (7.0 / 10_000f64.powf(2.0 / 6.0)).sin()),
        (7, 3, (7.0 / 10_000f64.powf(2.0 / 6.0)).cos()),
        (49, 5, (49.0 / 10_000f64.powf(4.0 / 6.0)).cos()),
    ] {
        let found = f64::from(table[position][channel]);
        assert!(
            (found - expected).abs() < 1e-7,
            "e[{position}, {channel}]: expected {expected}, found {found}"
        );
    }
    Ok(())
}

/// `e[t + k]` is `e[t]` with each pair rotated by an angle that depends only on `k`.
#[test]
fn shift_rotates_every_pair() -> Result<()> {
    let width = 10;
    let table = SinusoidalPositions::new(64, width, &Device::Cpu)?.table().to_vec2::<f32>()?;
    for shift in [1usize, 5, 17] {
        for position in 0..64 - shift {
            for pair in 0..width / 2 {
                let angle = shift as f64 / 10_000f64.powf(2.0 * pair as f64 / width as f64);
                let (sin, cos) =
                    (f64::from(table[position][2 * pair]), f64::from(table[position][2 * pair + 1]));
                let rotated = [sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()];
                for (part, expected) in rotated.iter().enumerate() {
                    let found = f64::from(table[position + shift][2 * pair + part]);
                    assert!(
                        (found - expected).abs() < 1e-6,
                        "shift {shift}, position {position}, pair {pair}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn positions_are_added_from_an_offset() -> Result<()> {
    let positions = SinusoidalPositions::new(8, 4, &Device::Cpu)?;
    let x = pattern(&[2, 3, 4], 2.0, 0);
    let expected = x.broadcast_add(&positions.table().narrow(0, 5, 3)?)?;
    assert_eq!(values(&positions.forward(&x, 5)?), values(&expected));
    assert!(positions.forward(&x, 6).is_err(), "past the end of the table");
    assert!(SinusoidalPositions::new(0, 4, &Device::Cpu).is_err());
    Ok(())
}

/// For independent standard normal q and k, `q · k` has variance d and `q · k / sqrt(d)` variance 1.
///
/// With n samples, the estimated variance of d-term products has a relative standard error of sqrt((2 + 6/d) /
/// n).
#[test]
fn scaling_normalizes_the_variance_of_scores() {
    const DRAWS: usize = 20_000;
    let mut generator = RandomStream::new(0);
    for head_dim in [8usize, 64] {
        let dots: Vec<f64> = (0..DRAWS)
            .map(|_| (0..head_dim).map(|_| generator.normal() * generator.normal()).sum())
            .collect();
        let variance = |factor: f64| {
            let mean = dots.iter().sum::<f64>() * factor / DRAWS as f64;
            dots.iter().map(|dot| (dot * factor - mean).powi(2)).sum::<f64>() / DRAWS as f64
        };
        let five_errors = 5.0 * ((2.0 + 6.0 / head_dim as f64) / DRAWS as f64).sqrt();
        let (before, after) = (variance(1.0), variance(ScaledDotProduct::new(head_dim).scale));
        assert!(
            (before / head_dim as f64 - 1.0).abs() < five_errors,
            "d {head_dim}: variance {before} unscaled"
        );
        assert!((after - 1.0).abs() < five_errors, "d {head_dim}: variance {after} scaled");
    }
}
