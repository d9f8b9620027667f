//! Seeded random numbers from ChaCha with 8 rounds, identical on every platform.
//!
//! Sampling and initialization use this generator. Dropout takes its seeds from it but is itself
//! counter-based. The ChaCha specification defines the stream, and uniform samples are exact conversions of
//! its bits. Normal samples use the logarithm and cosine of `libm`, which are plain Rust.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Mixes the bits of a number so that similar inputs give unrelated outputs.
///
/// Different inputs always give different outputs. Source: the output function of SplitMix64 (Steele, Lea and
/// Flood, 2014).
///
/// ```
/// use candle_gpt2_arithmetic::mix_bits;
///
/// // The first number of SplitMix64 with the seed 0.
/// assert_eq!(mix_bits(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
/// ```
pub fn mix_bits(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Seeded, portable stream of random numbers (ChaCha8).
///
/// ```
/// use candle_gpt2_arithmetic::RandomStream;
///
/// let samples = |mut stream: RandomStream| [stream.below(1 << 40), stream.below(1 << 40)];
/// assert_eq!(samples(RandomStream::new(7)), samples(RandomStream::new(7)));
/// assert_ne!(samples(RandomStream::with_stream(7, 1)), samples(RandomStream::with_stream(7, 2)));
/// ```
#[derive(Debug, Clone)]
pub struct RandomStream(ChaCha8Rng);

impl RandomStream {
    /// Creates the stream for `seed`.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Creates an independent stream under the same seed, for example for one row of a batch.
    pub fn with_stream(seed: u64, stream: u64) -> Self {
        let mut generator = Self::new(seed);
        generator.0.set_stream(stream);
        generator
    }

    /// Samples from the uniform distribution on `[0, 1)`, with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
        (self.0.next_u64() >> 11) as f64 * UNIT
    }

    /// Returns 64 random bits, for example to seed another stream.
    pub fn seed(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Samples an integer from 0 to `bound - 1`; `bound` must be at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        // Takes the high half of a 128-bit product. The bias is bound / 2^64.
        let product = u128::from(self.0.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or_default()
    }

    /// Samples from the standard normal distribution (Box-Muller).
    pub fn normal(&mut self) -> f64 {
        // 1 - u is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * libm::log(1.0 - self.uniform())).sqrt();
        radius * libm::cos(std::f64::consts::TAU * self.uniform())
    }
}

/// Returns test values, uniformly distributed in an interval of `width` around `center`.
#[cfg(test)]
pub(crate) fn noise(count: usize, seed: u64, center: f64, width: f64) -> Vec<f32> {
    let mut generator = RandomStream::new(seed);
    #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
    (0..count).map(|_| (center + width * (generator.uniform() - 0.5)) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the first block of ChaCha8 under the all-zero key.
    ///
    /// The expected bytes are an eSTREAM test vector (set 1 of draft-strombergson-chacha-test-vectors-01,
    /// TC1). The test therefore pins the algorithm, not this implementation's output.
    #[test]
    fn stream_is_chacha8() {
        let mut generator = RandomStream(ChaCha8Rng::from_seed([0; 32]));
        let mut bytes = [0u8; 16];
        generator.0.fill_bytes(&mut bytes);
        assert_eq!(
            bytes,
            [0x3e, 0x00, 0xef, 0x2f, 0x89, 0x5f, 0x40, 0xd6, 0x7f, 0x5b, 0xb8, 0xe8, 0x1f, 0x09, 0xa5, 0xa1]
        );
    }

    #[test]
    fn seeds_and_streams_are_distinct_and_reproducible() {
        let first = |mut generator: RandomStream| [generator.uniform(), generator.uniform()];
        assert_eq!(first(RandomStream::new(1)), first(RandomStream::new(1)));
        assert_ne!(first(RandomStream::new(1)), first(RandomStream::new(2)));
        assert_ne!(first(RandomStream::with_stream(1, 1)), first(RandomStream::with_stream(1, 2)));
        assert_eq!(first(RandomStream::with_stream(1, 0)), first(RandomStream::new(1)));
    }

    /// Checks the means and the variance to within five standard errors.
    ///
    /// With 100,000 samples, the mean of the uniform distribution has a standard error of 0.0009, and the
    /// mean of the normal distribution has one of 0.0032.
    #[test]
    fn uniform_and_normal_moments_are_correct() {
        const DRAWS: usize = 100_000;
        let mut generator = RandomStream::new(3);
        let uniform: f64 = (0..DRAWS).map(|_| generator.uniform()).sum::<f64>() / DRAWS as f64;
        assert!((uniform - 0.5).abs() < 0.005, "mean of the uniform samples: {uniform}");
        let normal: Vec<f64> = (0..DRAWS).map(|_| generator.normal()).collect();
        let mean = normal.iter().sum::<f64>() / DRAWS as f64;
        let variance = normal.iter().map(|value| value * value).sum::<f64>() / DRAWS as f64;
        assert!(mean.abs() < 0.016, "mean of the normal samples: {mean}");
        // The square of a standard normal variable has variance 2, so the standard error is 0.0045 here.
        assert!((variance - 1.0).abs() < 0.023, "variance of the normal samples: {variance}");
    }
}
