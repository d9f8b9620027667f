//! Work on rows: generation, scoring and classification.

use std::slice;

use candle_gpt2_generation::{
    GenerationConfig, GenerationError, LogitsProcessor, Score, StopReason, default_stride, score,
};
use serde::Serialize;

use super::Rows;
use crate::{CLASSIFIED_AT_ONCE, Classifier, Completion, EngineError, Job, LoadedModel, Question, Reporter};

impl Rows<'_, Vec<u32>> {
    /// Generates completions for every row, `batch_size` sequences at a time.
    ///
    /// # Errors
    /// If the KV cache does not fit in the free memory, the device fails, or a line cannot be written.
    pub fn generate(
        &mut self,
        model: &LoadedModel,
        batch_size: usize,
        config: &GenerationConfig,
        processors: &[LogitsProcessor],
        reporter: &dyn Reporter,
    ) -> Result<(), EngineError> {
        let mut continued = Continued { rows: self, indices: Vec::new(), processors };
        model.generate(&mut continued, batch_size, config, reporter)
    }

    /// Scores every row; [`ScoredText::of`] explains `stride` and `top`.
    ///
    /// # Errors
    /// If the device fails, or a line cannot be written.
    pub fn score(
        &mut self,
        model: &LoadedModel,
        stride: Option<usize>,
        top: usize,
    ) -> Result<(), EngineError> {
        while let Some((index, ids)) = self.next_row()? {
            let scored = of_row(ScoredText::of(model, &ids, stride, top, &|_| {}))?;
            self.answer(index, scored)?;
        }
        Ok(())
    }
}

impl Rows<'_, Question> {
    /// Classifies every row, in batches of `batch_size` or [`CLASSIFIED_AT_ONCE`].
    ///
    /// # Errors
    /// If the device fails, or a line cannot be written.
    pub fn classify(
        &mut self,
        classifier: &Classifier,
        batch_size: Option<usize>,
    ) -> Result<(), EngineError> {
        let size = batch_size.unwrap_or(CLASSIFIED_AT_ONCE).max(1);
        self.begin_at_whole_batch(size);
        while self.next < self.lines.len() {
            let (indices, questions): (Vec<_>, Vec<_>) = self.next_rows(size)?.into_iter().unzip();
            match classifier.classify(&questions) {
                Ok(classified) => {
                    let mut answers = indices.into_iter().zip(classified);
                    answers.try_for_each(|(index, answer)| self.answer(index, Ok(answer)))?;
                }
                // Classifies the rows one by one to find those that fail.
                Err(_) => {
                    for (index, question) in indices.into_iter().zip(&questions) {
                        let classified = of_row(classifier.classify(slice::from_ref(question)))?;
                        self.answer(index, classified.map(|classified| classified.into_iter().next()))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Separates a row's own error from a device failure, which would affect every other row too.
fn of_row<A>(computed: Result<A, EngineError>) -> Result<Result<A, EngineError>, EngineError> {
    match computed {
        Err(error @ EngineError::Generation(GenerationError::Candle(_))) => Err(error),
        computed => Ok(computed),
    }
}

/// Job that generates completions for rows.
struct Continued<'a, 'r> {
    rows: &'a mut Rows<'r, Vec<u32>>,
    /// Row index of each prompt.
    indices: Vec<usize>,
    processors: &'a [LogitsProcessor],
}

impl Job for Continued<'_, '_> {
    type Error = EngineError;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
        Ok(self.rows.next_row()?.map(|(index, ids)| {
            self.indices.push(index);
            ids
        }))
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Completion>, GenerationError>,
    ) -> Result<(), EngineError> {
        // A partial completion is not a result; a resumed job generates it again.
        let is_whole = |text: &Completion| text.stop_reason != StopReason::Interrupted;
        if texts.as_ref().is_ok_and(|texts| !texts.iter().all(is_whole)) {
            return Err(EngineError::Interrupted);
        }
        self.rows.answer(self.indices[prompt], texts.map(PromptCompletions::from).map_err(EngineError::from))
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.processors.to_vec()
    }
}

/// Completions for a prompt as JSON: the fields of a single completion, or a list `sequences`.
///
/// [`Rows::generate`] writes them for each row of a [`RowsJob`](crate::RowsJob).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PromptCompletions {
    /// A single completion.
    One(Completion),
    /// Several completions, or none.
    Several {
        /// Completions in order.
        sequences: Vec<Completion>,
    },
}

impl From<Vec<Completion>> for PromptCompletions {
    fn from(mut texts: Vec<Completion>) -> Self {
        match (texts.len(), texts.pop()) {
            (1, Some(text)) => Self::One(text),
            (_, last) => {
                texts.extend(last);
                Self::Several { sequences: texts }
            }
        }
    }
}

/// Log-probabilities and loss for a text, in natural logarithms.
///
/// [`Rows::score`] writes them for each row of a [`RowsJob`](crate::RowsJob).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoredText {
    /// Log-probability of each token; absent for the first one.
    pub logprobs: Vec<Option<f64>>,
    /// Mean negative log-probability, in nats.
    pub loss: f64,
    /// Exponential of the loss.
    pub perplexity: f64,
    /// Most probable tokens at each position, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Vec<TokenLogprob>>,
}

/// A candidate token at a position.
///
/// Part of a [`ScoredText`] that a [`RowsJob`](crate::RowsJob) writes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Text of the token; absent without a tokenizer.
    pub token: Option<String>,
    /// Log-probability of the token.
    pub logprob: f64,
}

impl ScoredText {
    /// Scores a text and reports the `top` most probable tokens at each position.
    ///
    /// A text longer than the context is scored in windows that begin every `stride` tokens, by default half
    /// the context. `on_tokens` is called with the number of scored tokens.
    ///
    /// # Errors
    /// If the text has too few tokens or an id outside the vocabulary, `stride` is out of range, or a logit
    /// is not finite.
    pub fn of(
        model: &LoadedModel,
        ids: &[u32],
        stride: Option<usize>,
        top: usize,
        on_tokens: &dyn Fn(u64),
    ) -> Result<Self, EngineError> {
        let stride = stride.unwrap_or(default_stride(model.config()));
        let scored = score(model.model(), ids, stride, top, on_tokens)?;
        let perplexity = scored.perplexity();
        let Score { logprobs, alternatives, loss } = scored;
        let token = |(id, logprob)| {
            let token = model.vocabulary().decode(&[id], false).ok();
            TokenLogprob { id, token, logprob }
        };
        let places = alternatives.into_iter().filter(|_| top > 0);
        let alternatives = places.map(|place| place.into_iter().map(token).collect()).collect();
        Ok(Self { logprobs, loss, perplexity, alternatives })
    }
}
