//! What a feature is active for: its strongest texts, texts of every strength, and how often it has which strength.
//!
//! Texts come one after the other, and what is kept of them is bounded: of each feature some of the strongest texts and a sample of all
//! that it is active in. A text counts once, with the token where the feature is strongest. The first token of a text is left out, as in
//! the training of dictionaries: its activations are many times larger than all others.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_gpt2_arithmetic::mix_bits;

/// Bins of a histogram at most.
const BINS: usize = 16;
/// Tokens of an example before the strongest one, and after it.
const CONTEXT: (usize, usize) = (16, 8);
/// Parts of the sample, by strength.
const QUARTERS: usize = 4;

/// Examples of some features of a dictionary, in the making.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_interpret::FeatureExamples;
///
/// let mut examples = FeatureExamples::new(vec![1], 5); // of feature 1, five strongest texts
/// let latents = Tensor::new(&[[9f32, 9.], [0., 0.5], [0., 2.]], &Device::Cpu)?; // (tokens, features)
/// examples.add(&[10, 11, 12], &latents)?;
/// assert_eq!(examples.tokens(), 2, "all but the first");
/// let found = examples.finish().remove(0);
/// assert_eq!((found.active, found.largest), (2, 2.0));
/// let text = &found.strongest[0];
/// assert_eq!((&text.ids[..], &text.activations[..], text.strongest), (&[10, 11, 12][..], &[0.0, 0.5, 2.0][..], 2));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct FeatureExamples {
    /// How many of the strongest texts are kept, and how many of each quarter.
    count: usize,
    features: Vec<Collected>,
    tokens: u64,
    texts: usize,
}

/// A feature in texts. [`FeatureExamples::finish`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureSummary {
    /// Its number in the dictionary.
    pub feature: usize,
    /// Tokens at which it is not 0.
    pub active: u64,
    /// Texts in which it is not 0.
    pub texts: u64,
    /// Its least activation that is not 0; 0 where there is none.
    pub least: f32,
    /// Its largest activation.
    pub largest: f32,
    /// How often it has which activation.
    pub histogram: Histogram,
    /// The texts in which it is strongest, the strongest first.
    pub strongest: Vec<FeatureExample>,
    /// Of the texts in which it is active, a sample of each quarter by its strength there, the strongest quarter first. Empty where all
    /// of them are among the strongest.
    pub quarters: Vec<Vec<FeatureExample>>,
}

/// A part of a text in which a feature is active. Part of a [`FeatureSummary`], as the example of [`FeatureExamples`] shows.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureExample {
    /// Which of the texts it is from, in their order.
    pub text: usize,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// The activation at each of them; 0 at the first token of the text.
    pub activations: Vec<f32>,
    /// The place among them where the feature is strongest in the whole text.
    pub strongest: usize,
}

/// How many values are in bins of equal width from 0 on. Part of a [`FeatureSummary`].
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
    /// Width of a bin, a power of 2; 0 without values.
    pub width: f32,
    counts: [u64; BINS],
}

/// What is known of a feature so far.
#[derive(Debug)]
struct Collected {
    summary: FeatureSummary,
    /// A sample of the texts: those with the least priorities, which are sorted.
    sample: Vec<(u64, FeatureExample)>,
}

impl FeatureExamples {
    /// Of these features; `count` texts are kept of the strongest, and as many of each quarter.
    pub fn new(features: Vec<usize>, count: usize) -> Self {
        let collected = |feature| Collected {
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
        Self { count, features: features.into_iter().map(collected).collect(), tokens: 0, texts: 0 }
    }

    /// Bytes that so many features may take, with `count` texts of the strongest and of each quarter.
    ///
    /// ```
    /// use candle_gpt2_interpret::FeatureExamples;
    ///
    /// assert_eq!(FeatureExamples::most_bytes(1000, 5), 2 * FeatureExamples::most_bytes(500, 5));
    /// ```
    pub fn most_bytes(features: usize, count: usize) -> u64 {
        let tokens = CONTEXT.0 + 1 + CONTEXT.1;
        let example = size_of::<(u64, FeatureExample)>() + tokens * (size_of::<u32>() + size_of::<f32>());
        let examples = (1 + QUARTERS as u64).saturating_mul(count as u64);
        examples
            .saturating_mul(example as u64)
            .saturating_add(size_of::<Collected>() as u64)
            .saturating_mul(features as u64)
    }

    /// Tokens that were seen; the first of each text is not among them.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Texts that were seen.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Adds a text.
    ///
    /// # Shapes
    /// `latents` `(T, F)` of the `T` tokens of the text.
    ///
    /// # Errors
    /// When the shape is another, the dictionary has not so many latents, or an activation is not finite.
    pub fn add(&mut self, ids: &[u32], latents: &Tensor) -> Result<()> {
        let (tokens, width) = latents.dims2()?;
        if tokens != ids.len() {
            bail!("a text of {} tokens cannot have the latents of {tokens}", ids.len());
        }
        if let Some(found) = self.features.iter().find(|found| found.summary.feature >= width) {
            bail!("there is no latent {} among {width}, counted from 0", found.summary.feature);
        }
        let latents = latents.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?;
        let latents = latents.to_vec1::<f32>()?;
        let text = self.texts;
        for found in &mut self.features {
            let feature = found.summary.feature;
            let column = || latents.iter().skip(feature).step_by(width).copied().enumerate().skip(1);
            if let Some((token, value)) = column().find(|(_, value)| !value.is_finite()) {
                bail!("latent {feature} is {value} at token {token}");
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

    /// What was found, in the order of the features.
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
    /// The activation where the feature is strongest.
    pub fn activation(&self) -> f32 {
        self.activations[self.strongest]
    }
}

impl Collected {
    /// Keeps a text among the strongest and in the sample, where it belongs there. Of equal ones the earlier text is kept.
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
    /// Counts a positive value; where it lies beyond the last bin, bins become twice as wide.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the number of a bin is small"
    )]
    pub fn add(&mut self, value: f32) {
        const BITS: i32 = BINS.ilog2() as i32;
        if self.width == 0.0 {
            // The value is below 2 to this power, and at least half of that; smaller widths than this are not normal numbers.
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

    /// How many values each bin has, up to the last one that has any.
    pub fn counts(&self) -> &[u64] {
        let end = self.counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        &self.counts[..end]
    }
}

/// A number that depends on both and looks random, so that the texts with the least are a sample of all.
fn priority(feature: usize, text: usize) -> u64 {
    mix_bits(mix_bits(feature as u64).wrapping_add(text as u64))
}
