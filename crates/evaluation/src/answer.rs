//! A model's result for an item: a line of the log, sufficient to recompute every metric.

use serde::{Deserialize, Serialize};

use crate::EvaluationError;

/// A model's result for one item.
///
/// [`Prepared::evaluate`](crate::Prepared::evaluate) returns it.
/// [`logged_results`](crate::logged_results) reads it from a line of the log.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    /// Index of the item in the data, from 0.
    pub index: usize,
    /// Item id, if the data provides one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub id: Option<String>,
    /// Group in the data that the item counts toward.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub group: Option<String>,
    /// Digest of the item's tokens: [`Item::token_digest`](crate::Item::token_digest).
    pub asked: String,
    /// Number of tokens before the first scored or generated token.
    pub context_tokens: usize,
    /// Results of the scored choices.
    pub choices: Vec<ChoiceResult>,
    /// Index of the correct choice.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gold: Option<usize>,
    /// Index of the best choice by each measure, if there are several choices.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub predicted: Option<Predicted>,
    /// Expected word and generated word.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub words: Option<[String; 2]>,
    /// Whether the item counts as correct in `acc`; absent for texts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub correct: Option<bool>,
}

impl ItemResult {
    /// Returns `self` if it equals `now` up to rounding differences between instruction sets.
    ///
    /// # Errors
    /// Returns [`EvaluationError::OtherResult`] if the results differ.
    pub(crate) fn if_like(self, now: &Self) -> Result<Self, EvaluationError> {
        let sums = self.choices.iter().zip(&now.choices).map(|(a, b)| (a.logprob, b.logprob));
        if self.words == now.words && is_like(sums) {
            return Ok(self);
        }
        Err(EvaluationError::OtherResult { index: self.index })
    }
}

/// Whether paired log-probabilities differ by no more than rounding.
pub(crate) fn is_like(mut pairs: impl Iterator<Item = (f64, f64)>) -> bool {
    /// Relative tolerance.
    ///
    /// Results on different CPUs with the same weights differ less. Quantizing to 4 bits changes them more.
    const RELATIVE: f64 = 1e-4;
    pairs.all(|(a, b)| a == b || (a - b).abs() <= RELATIVE * a.abs().max(1.0))
}

/// A model's result for a choice.
///
/// ```
/// use candle_gpt2_evaluation::{ChoiceResult, Predicted};
///
/// let choice = |logprob, tokens, bytes| ChoiceResult { logprob, tokens, bytes, characters: bytes, ..ChoiceResult::default() };
/// let best = Predicted::of(&[choice(-6.0, 2, 4), choice(-7.0, 7, 7)]);
/// assert_eq!((best.sum, best.per_token, best.per_byte), (0, 1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChoiceResult {
    /// Natural logarithm of the choice's probability.
    #[serde(with = "crate::number")]
    pub logprob: f64,
    /// Number of scored tokens.
    pub tokens: usize,
    /// Number of Unicode characters that the score is divided by.
    pub characters: usize,
    /// Number of UTF-8 bytes that the score is divided by.
    pub bytes: usize,
    /// Number of words that the score is divided by, if the protocol counts words.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub words: Option<usize>,
    /// Whether every token is the most probable one at its position; ties go to the first token.
    pub is_greedy: bool,
    /// Sum of the squared log-probabilities of the tokens.
    #[serde(with = "crate::number")]
    pub squares: f64,
}

/// Index of the best choice by each measure; ties go to the first choice.
///
/// See [`ChoiceResult`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predicted {
    /// Best by log-probability.
    pub sum: usize,
    /// Best by log-probability per character.
    pub per_character: usize,
    /// Best by log-probability per token.
    pub per_token: usize,
    /// Best by log-probability per byte.
    pub per_byte: usize,
}

impl Predicted {
    /// Finds the best choice by each measure.
    pub fn of(choices: &[ChoiceResult]) -> Self {
        let best = |measure: fn(&ChoiceResult) -> f64| {
            candle_gpt2_generation::first_best(choices.iter().map(measure))
        };
        Self {
            sum: best(|choice| choice.logprob),
            per_character: best(|choice| choice.logprob / choice.characters as f64),
            per_token: best(|choice| choice.logprob / choice.tokens as f64),
            per_byte: best(|choice| choice.logprob / choice.bytes as f64),
        }
    }
}
