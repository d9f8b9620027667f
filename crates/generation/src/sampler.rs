//! Token selection: logits processors change the logits, then the sampler picks a token.

use candle_gpt2_arithmetic::RandomStream;

use crate::probabilities::{Probabilities, largest};
use crate::tally::Tally;
use crate::{GenerationConfig, GenerationError, History, LogitsProcessor};

/// Picks the next token of a sequence from its logits.
///
/// Keeps the counts that its processors need, so the cost of a token does not grow with the sequence. A
/// history that does not extend the previous one is counted from scratch.
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
    /// Random stream for sampling; `None` for greedy decoding.
    generator: Option<RandomStream>,
}

impl Sampler {
    /// Creates a sampler for a valid configuration.
    ///
    /// `config` must pass [`GenerationConfig::check`]; `processors` usually come from
    /// [`LogitsProcessor::of_config`]. Completions of one prompt use different `stream`s of the same seed.
    pub fn new(config: &GenerationConfig, processors: Vec<LogitsProcessor>, stream: u64) -> Self {
        let generator = config.do_sample.then(|| RandomStream::with_stream(config.seed, stream));
        Self {
            tally: Tally::new(processors.iter().filter_map(LogitsProcessor::ngram_size)),
            processors,
            generator,
        }
    }

    /// Picks the next token and replaces `logits` with the processed logits.
    ///
    /// `logits` has one entry for each token of the vocabulary. Greedy decoding breaks ties in favor of the
    /// smallest id.
    ///
    /// # Errors
    /// Returns an error if a logit is NaN or `+inf`, or if no token is left.
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

    /// Returns the probability that each token is picked next, without picking one.
    ///
    /// Tokens that the processors exclude have probability 0. In greedy decoding, the most probable token
    /// has probability 1. Replaces `logits` with the processed logits, like [`Sampler::sample`].
    ///
    /// # Errors
    /// Returns the same errors as [`Sampler::sample`].
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

    /// Applies the processors and returns the largest remaining logit.
    fn process(&mut self, history: History<'_>, logits: &mut [f32]) -> Result<f32, GenerationError> {
        self.tally.follow(history);
        let (processors, tally) = (&self.processors, &self.tally);
        process_by(processors, history, logits, |processor, row| {
            processor.process_counted(history, tally, row)
        })
    }
}

/// Returns the first token with this logit.
fn first(logits: &[f32], largest: f32) -> Option<usize> {
    logits.iter().position(|logit| *logit == largest)
}

/// Applies the processors and returns the largest remaining logit.
///
/// Returns an error if a logit is NaN or `+inf`, or if the processors leave no token.
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
