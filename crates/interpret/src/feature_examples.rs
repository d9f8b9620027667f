//! Activating examples of features: strongest texts, a sample across strengths, and a histogram.
//!
//! Texts are added one after another, and memory is bounded: each feature keeps some of its strongest texts
//! and a sample of all texts that activate it. A text counts once, at the token with the strongest
//! activation. The first token of each text is ignored, as in dictionary training, because its
//! activations are far larger than all others.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_gpt2_arithmetic::mix_bits;

/// Maximum number of histogram bins.
const BINS: usize = 16;
/// Numbers of tokens in an example before and after its strongest token.
const CONTEXT: (usize, usize) = (16, 8);
/// Number of groups that the sample is split into by strength.
const QUARTERS: usize = 4;

/// Collector of examples for selected features of a dictionary.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_interpret::FeatureExamples;
///
/// let mut examples = FeatureExamples::new(vec![1], 5); // of feature 1, five strongest texts
/// let latents = Tensor::new(&[[9f32, 9.], [0., 0.5], [0., 2.]], &Device::Cpu)?; // (tokens, features)
/// examples.add(&[10, 11, 12], &latents)?;
/// assert_eq!(examples.tokens(), 2, "all tokens but the first");
/// let found = examples.finish().remove(0);
/// assert_eq!((found.active, found.largest), (2, 2.0));
/// let text = &found.strongest[0];
/// assert_eq!((&text.ids[..], &text.activations[..], text.strongest), (&[10, 11, 12][..], &[0.0, 0.5, 2.0][..], 2));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct FeatureExamples {
    /// Maximum number of strongest texts, and of sampled texts in each quarter of activations.
    count: usize,
    features: Vec<FeatureAccumulator>,
    tokens: u64,
    texts: usize,
}

/// Statistics and examples of one feature, from [`FeatureExamples::finish`].
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureSummary {
    /// Index of the feature in the dictionary.
    pub feature: usize,
    /// Number of tokens with a nonzero activation.
    pub active: u64,
    /// Number of texts with a nonzero activation.
    pub texts: u64,
    /// Smallest nonzero activation; 0 if there is none.
    pub least: f32,
    /// Largest activation.
    pub largest: f32,
    /// Histogram of the nonzero activations.
    pub histogram: Histogram,
    /// Texts with the strongest activations, in descending order.
    pub strongest: Vec<FeatureExample>,
    /// Sampled activating texts, in quarters by strength, strongest quarter first.
    ///
    /// Empty if `strongest` already contains all of them.
    pub quarters: Vec<Vec<FeatureExample>>,
}

/// Excerpt of text in which a feature is active.
///
/// Part of a [`FeatureSummary`]; [`FeatureExamples`] has an example.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureExample {
    /// Index of the text, in insertion order.
    pub text: usize,
    /// Tokens of the excerpt.
    pub ids: Vec<u32>,
    /// Activation at each token; 0 at the first token of the text.
    pub activations: Vec<f32>,
    /// Index in the excerpt of the token with the text's strongest activation.
    pub strongest: usize,
}

/// Histogram of positive values in equal-width bins starting at 0. Part of a [`FeatureSummary`].
///
/// ```
/// use candle_gpt2_interpret::Histogram;
///
/// let mut histogram = Histogram::default();
/// [1.0, 1.5, 15.0].into_iter().for_each(|value| histogram.add(value));
/// assert_eq!((histogram.width, histogram.counts()), (1.0, &[0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1][..]));
/// histogram.add(16.0); // twice as wide
/// assert_eq!((histogram.width, histogram.counts()), (2.0, &[2, 0, 0, 0, 0, 0, 0, 1, 1][..]));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Histogram {
    /// Width of a bin, a power of 2; 0 if empty.
    pub width: f32,
    counts: [u64; BINS],
}

/// Running statistics of a feature.
#[derive(Debug)]
struct FeatureAccumulator {
    summary: FeatureSummary,
    /// Random sample of the texts: those with the smallest priorities, in ascending order.
    sample: Vec<(u64, FeatureExample)>,
}

impl FeatureExamples {
    /// Creates a collector for these features.
    ///
    /// It keeps `count` of the strongest texts and `count` texts in each quarter.
    pub fn new(features: Vec<usize>, count: usize) -> Self {
        let accumulator = |feature| FeatureAccumulator {
            summary: FeatureSummary {
                feature,
                active: 0,
                texts: 0,
                least: 0.0,
                largest: 0.0,
                histogram: Histogram::default(),
                strongest: Vec::new(),
                quarters: Vec::new(),
            },
            sample: Vec::new(),
        };
        Self { count, features: features.into_iter().map(accumulator).collect(), tokens: 0, texts: 0 }
    }

    /// Returns the maximum memory for this number of features and texts, in bytes.
    ///
    /// `count` is the number of strongest texts and of texts per quarter.
    ///
    /// ```
    /// use candle_gpt2_interpret::FeatureExamples;
    ///
    /// assert_eq!(FeatureExamples::max_bytes(1000, 5), 2 * FeatureExamples::max_bytes(500, 5));
    /// ```
    pub fn max_bytes(features: usize, count: usize) -> u64 {
        let tokens = CONTEXT.0 + 1 + CONTEXT.1;
        let example = size_of::<(u64, FeatureExample)>() + tokens * (size_of::<u32>() + size_of::<f32>());
        let examples = (1 + QUARTERS as u64).saturating_mul(count as u64);
        examples
            .saturating_mul(example as u64)
            .saturating_add(size_of::<FeatureAccumulator>() as u64)
            .saturating_mul(features as u64)
    }

    /// Returns the number of tokens seen, excluding the first token of each text.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of texts seen.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Adds a text with its latents.
    ///
    /// # Shapes
    /// `latents` is `(T, F)` for the `T` tokens of the text.
    ///
    /// # Errors
    /// If the shape is wrong, if a feature index is out of range, or if an activation is not finite.
    pub fn add(&mut self, ids: &[u32], latents: &Tensor) -> Result<()> {
        let (tokens, width) = latents.dims2()?;
        if tokens != ids.len() {
            bail!("expected latents for {} tokens, found latents for {tokens}", ids.len());
        }
        if let Some(found) = self.features.iter().find(|found| found.summary.feature >= width) {
            bail!(
                "latent {} is out of range; the dictionary has {width} latents, counted from 0",
                found.summary.feature
            );
        }
        let latents = latents.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?;
        let latents = latents.to_vec1::<f32>()?;
        let text = self.texts;
        for found in &mut self.features {
            let feature = found.summary.feature;
            let column = || latents.iter().skip(feature).step_by(width).copied().enumerate().skip(1);
            if let Some((token, value)) = column().find(|(_, value)| !value.is_finite()) {
                bail!("latent {feature} is {value} at token {token}; expected a finite activation");
            }
            let mut strongest = (0, 0.0);
            for (token, value) in column().filter(|(_, value)| *value > 0.0) {
                found.summary.count(value);
                if value > strongest.1 {
                    strongest = (token, value);
                }
            }
            let (token, value) = strongest;
            if value > 0.0 {
                let first = token.saturating_sub(CONTEXT.0);
                let end = (token + 1 + CONTEXT.1).min(tokens);
                let activation =
                    |token: usize| if token == 0 { 0.0 } else { latents[token * width + feature] };
                let example = || FeatureExample {
                    text,
                    ids: ids[first..end].to_vec(),
                    activations: (first..end).map(activation).collect(),
                    strongest: token - first,
                };
                found.keep(value, priority(feature, text), self.count, &example);
            }
        }
        self.texts += 1;
        self.tokens += tokens.saturating_sub(1) as u64;
        Ok(())
    }

    /// Returns the summaries, in the order of the features.
    pub fn finish(self) -> Vec<FeatureSummary> {
        self.features.into_iter().map(|found| found.finish(self.count)).collect()
    }
}

impl FeatureSummary {
    fn count(&mut self, value: f32) {
        self.least = if self.active == 0 { value } else { self.least.min(value) };
        self.largest = self.largest.max(value);
        self.active += 1;
        self.histogram.add(value);
    }
}

impl FeatureExample {
    /// Returns the strongest activation.
    pub fn activation(&self) -> f32 {
        self.activations[self.strongest]
    }
}

impl FeatureAccumulator {
    /// Adds a text to the strongest texts and to the sample if it ranks high enough.
    ///
    /// Ties keep the earlier text.
    fn keep(&mut self, value: f32, priority: u64, count: usize, example: &dyn Fn() -> FeatureExample) {
        let strongest = &mut self.summary.strongest;
        self.summary.texts += 1;
        let place = strongest.partition_point(|kept| kept.activation() >= value);
        if place < count {
            strongest.truncate(count - 1);
            strongest.insert(place, example());
        }
        let place = self.sample.partition_point(|(kept, _)| *kept < priority);
        if place < QUARTERS * count {
            self.sample.truncate(QUARTERS * count - 1);
            self.sample.insert(place, (priority, example()));
        }
    }

    fn finish(self, count: usize) -> FeatureSummary {
        let mut summary = self.summary;
        if summary.texts > count as u64 {
            let mut sample: Vec<FeatureExample> =
                self.sample.into_iter().map(|(_, example)| example).collect();
            sample.sort_by(|a, b| b.activation().total_cmp(&a.activation()).then(a.text.cmp(&b.text)));
            let end = |quarter: usize| quarter * sample.len() / QUARTERS;
            let quarter = |quarter: usize| sample[end(quarter)..end(quarter + 1)].to_vec();
            summary.quarters = (0..QUARTERS).map(quarter).collect();
        }
        summary
    }
}

impl Histogram {
    /// Counts a positive value. A value beyond the last bin doubles the bin width.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bin indices are small")]
    pub fn add(&mut self, value: f32) {
        const BITS: i32 = BINS.ilog2() as i32;
        if self.width == 0.0 {
            // The value is in `[2^(power - 1), 2^power)`. Widths below the minimum would be subnormal.
            let (_, power) = libm::frexpf(value);
            self.width = libm::ldexpf(1.0, power.max(f32::MIN_EXP + BITS) - BITS);
        }
        while value >= self.width * BINS as f32 {
            self.counts = std::array::from_fn(|bin| match 2 * bin {
                pair if pair < BINS => self.counts[pair] + self.counts[pair + 1],
                _ => 0,
            });
            self.width *= 2.0;
        }
        self.counts[(value / self.width) as usize] += 1;
    }

    /// Returns the bin counts, up to the last nonempty bin.
    pub fn counts(&self) -> &[u64] {
        let end = self.counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        &self.counts[..end]
    }
}

/// Pseudorandom priority of each text for a feature; the texts with the smallest form a random sample.
fn priority(feature: usize, text: usize) -> u64 {
    mix_bits(mix_bits(feature as u64).wrapping_add(text as u64))
}
