//! Random values for tests.

use candle_gpt2_arithmetic::RandomStream;

/// Returns random test values, uniformly distributed in an interval of `width` around `center`.
pub(crate) fn noise(count: usize, seed: u64, center: f64, width: f64) -> Vec<f32> {
    let mut generator = RandomStream::new(seed);
    #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
    (0..count).map(|_| (center + width * (generator.uniform() - 0.5)) as f32).collect()
}
