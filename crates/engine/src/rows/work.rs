//! The work on rows: texts that continue them, their labels, their scores.

use std::slice;

use candle_gpt2_generation::{
    GenerationConfig, GenerationError, LogitsProcessor, Score, StopReason, default_stride, score,
};
use serde::Serialize;

use super::Rows;
use crate::{CLASSIFIED_AT_ONCE, Classifier, EngineError, Job, LoadedModel, Question, Reporter, Text};

impl Rows<'_, Vec<u32>> {
    /// Continues every row, `batch_size` texts at a time.
    ///
    /// # Errors
    /// When there is no room for the texts, the device fails, or a line cannot be written.
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

    /// Scores every row; for `stride` and `top` see [`ScoredText::of`].
    ///
    /// # Errors
    /// When the device fails, or a line cannot be written.
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
    /// Classifies every row, `batch_size` at a time or [`CLASSIFIED_AT_ONCE`].
    ///
    /// # Errors
    /// When the device fails, or a line cannot be written.
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
                // Which of them is at fault is seen when each is alone.
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

/// Whether an error is a row's: a device that fails would fail for every other one too.
fn of_row<A>(computed: Result<A, EngineError>) -> Result<Result<A, EngineError>, EngineError> {
    match computed {
        Err(error @ EngineError::Generation(GenerationError::Candle(_))) => Err(error),
        computed => Ok(computed),
    }
}

/// Rows that become texts.
struct Continued<'a, 'r> {
    rows: &'a mut Rows<'r, Vec<u32>>,
    /// The index of the row of each prompt that was given.
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
        texts: Result<Vec<Text>, GenerationError>,
    ) -> Result<(), EngineError> {
        // What an interruption left of a text is no answer: a resumed job makes it anew.
        let is_whole = |text: &Text| text.stop_reason != StopReason::Interrupted;
        if texts.as_ref().is_ok_and(|texts| !texts.iter().all(is_whole)) {
            return Err(EngineError::Interrupted);
        }
        self.rows.answer(self.indices[prompt], texts.map(PromptTexts::from).map_err(EngineError::from))
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.processors.to_vec()
    }
}

/// The texts of a prompt as JSON: the fields of one, or a list `sequences` of several.
///
/// Written of each row by [`Rows::generate`], in a [`RowsJob`](crate::RowsJob).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PromptTexts {
    /// One.
    One(Text),
    /// Several, or none.
    Several {
        /// In their order.
        sequences: Vec<Text>,
    },
}

impl From<Vec<Text>> for PromptTexts {
    fn from(mut texts: Vec<Text>) -> Self {
        match (texts.len(), texts.pop()) {
            (1, Some(text)) => Self::One(text),
            (_, last) => {
                texts.extend(last);
                Self::Several { sequences: texts }
            }
        }
    }
}

/// How probable a text is. Logarithms are natural.
///
/// Written of each row by [`Rows::score`], in a [`RowsJob`](crate::RowsJob).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoredText {
    /// Of each token; the first one has none.
    pub logprobs: Vec<Option<f64>>,
    /// Their mean with its sign turned, in nats.
    pub loss: f64,
    /// `e` to the loss.
    pub perplexity: f64,
    /// The most probable tokens at each place, if they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Vec<TokenLogprob>>,
}

/// A candidate token at a position.
///
/// Part of a [`ScoredText`] that a [`RowsJob`](crate::RowsJob) writes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// Its id.
    pub id: u32,
    /// Its text; absent without a tokenizer.
    pub token: Option<String>,
    /// Logarithm of its probability.
    pub logprob: f64,
}

impl ScoredText {
    /// The score of a text, with the `top` most probable tokens at each place. A text that is longer than the context is scored in
    /// windows that begin every `stride` tokens, by default every half of it. `on_tokens` is called with the number of tokens scored.
    ///
    /// # Errors
    /// When the text has too few tokens, or one outside the vocabulary, `stride` is out of range, or the logits are not numbers.
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
