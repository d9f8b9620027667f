//! From logits to a token: the processors change the logits, the sampler picks.

use candle_gpt2_arithmetic::RandomStream;

use crate::probabilities::{Probabilities, largest};
use crate::tally::Tally;
use crate::{GenerationConfig, GenerationError, History, LogitsProcessor};

/// Picks the tokens of a text from logits. It remembers what its processors count, so that the cost of a token does not grow
/// with the text; a history that does not continue the last one is counted anew.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, History, LogitsProcessor, Sampler};
///
/// let config = GenerationConfig { do_sample: true, top_k: 2, seed: 7, ..GenerationConfig::default() };
/// let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
/// let id = sampler.sample(History { ids: &[1], prompt_len: 1 }, &mut [3.0, 1.0, 2.0, 0.0])?;
/// assert!([0, 2].contains(&id));
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("LogitsProcessor", "Sampling"))]
pub struct Sampler {
    processors: Vec<LogitsProcessor>,
    tally: Tally,
    /// Samples the token; absent if the most probable one is taken.
    generator: Option<RandomStream>,
}

impl Sampler {
    /// A sampler for these options, which [`GenerationConfig::check`] accepts, with these processors; usually
    /// [`LogitsProcessor::of_config`]. Texts of one prompt are sampled from different `stream`s of the same seed.
    pub fn new(config: &GenerationConfig, processors: Vec<LogitsProcessor>, stream: u64) -> Self {
        let generator = config.do_sample.then(|| RandomStream::with_stream(config.seed, stream));
        Self {
            tally: Tally::new(processors.iter().filter_map(LogitsProcessor::ngram_size)),
            processors,
            generator,
        }
    }

    /// Picks the next token; `logits` has one entry for each token of the vocabulary and is changed on the way. Of
    /// equal logits the smallest id is the most probable.
    ///
    /// # Errors
    /// When a logit is NaN or `+inf`, or none is left.
    pub fn sample(&mut self, history: History<'_>, logits: &mut [f32]) -> Result<u32, GenerationError> {
        let largest = self.process(history, logits)?;
        let token = match &mut self.generator {
            None => first(logits, largest),
            Some(generator) => Probabilities::of(logits).draw(generator.uniform()),
        };
        token
            .and_then(|token| u32::try_from(token).ok())
            .ok_or_else(|| LogitsProcessor::no_token_left(&self.processors, history))
    }

    /// The probability of each token to be picked next: 0 for those that the processors exclude; if the most probable one is
    /// taken, 1 for that one. Nothing is drawn; `logits` is changed as by [`Sampler::sample`].
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn probabilities(
        &mut self,
        history: History<'_>,
        logits: &mut [f32],
    ) -> Result<Vec<f64>, GenerationError> {
        let largest = self.process(history, logits)?;
        let mut probabilities = vec![0.0; logits.len()];
        match self.generator {
            None => first(logits, largest).into_iter().for_each(|token| probabilities[token] = 1.0),
            Some(_) => Probabilities::of(logits).fill(&mut probabilities),
        }
        Ok(probabilities)
    }

    /// Applies the processors; returns the largest logit left.
    fn process(&mut self, history: History<'_>, logits: &mut [f32]) -> Result<f32, GenerationError> {
        self.tally.follow(history);
        let (processors, tally) = (&self.processors, &self.tally);
        process_by(processors, history, logits, |processor, row| {
            processor.process_counted(history, tally, row)
        })
    }
}

/// The first token of this logit.
fn first(logits: &[f32], largest: f32) -> Option<usize> {
    logits.iter().position(|logit| *logit == largest)
}

/// Applies the processors to logits that are numbers, checks that they leave a token, and returns the largest logit left.
pub(crate) fn process(
    processors: &[LogitsProcessor],
    history: History<'_>,
    logits: &mut [f32],
) -> Result<f32, GenerationError> {
    process_by(processors, history, logits, |processor, row| processor.process(history, row))
}

fn process_by(
    processors: &[LogitsProcessor],
    history: History<'_>,
    logits: &mut [f32],
    apply: impl Fn(&LogitsProcessor, &mut [f32]) -> Result<(), GenerationError>,
) -> Result<f32, GenerationError> {
    let unprocessed = largest(logits);
    let has_nan = logits.iter().fold(false, |found, logit| found | logit.is_nan());
    if has_nan || unprocessed.is_infinite() {
        return Err(GenerationError::NotFinite);
    }
    if processors.is_empty() {
        return Ok(unprocessed);
    }
    for processor in processors {
        apply(processor, logits)?;
    }
    match largest(logits) {
        f32::NEG_INFINITY => Err(LogitsProcessor::no_token_left(processors, history)),
        largest => Ok(largest),
    }
}
