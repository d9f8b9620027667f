//! A model's result for an item: the line of the log, from which every metric can be computed again.

use serde::{Deserialize, Serialize};

use crate::EvaluationError;

/// A model's result for one item.
///
/// Given by [`Prepared::evaluate`](crate::Prepared::evaluate), and as a line of the log by [`logged_results`](crate::logged_results).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    /// The item's place in the data, from 0.
    pub index: usize,
    /// Its name, if the data has one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub id: Option<String>,
    /// The part of the data that it counts in.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub group: Option<String>,
    /// Which tokens the model was asked about: [`Item::asked`](crate::Item::asked).
    pub asked: String,
    /// Tokens before the first that was scored or written.
    pub context_tokens: usize,
    /// What was scored.
    pub choices: Vec<ChoiceResult>,
    /// Index of the right choice.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gold: Option<usize>,
    /// Index of the best choice by each measure, if there are several.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub predicted: Option<Predicted>,
    /// The word that was to be written, and the one that was.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub words: Option<[String; 2]>,
    /// Whether it counts as right in `acc`; absent for texts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub correct: Option<bool>,
}

impl ItemResult {
    /// Itself if a model says the same now, but for what other instructions of a processor may round otherwise.
    ///
    /// # Errors
    /// When it says something else.
    pub(crate) fn if_like(self, now: &Self) -> Result<Self, EvaluationError> {
        let sums = self.choices.iter().zip(&now.choices).map(|(a, b)| (a.logprob, b.logprob));
        if self.words == now.words && is_like(sums) {
            return Ok(self);
        }
        Err(EvaluationError::OtherResult { index: self.index })
    }
}

/// Whether log-probabilities differ by rounding at most.
pub(crate) fn is_like(mut pairs: impl Iterator<Item = (f64, f64)>) -> bool {
    /// Weights in integers of 4 bits differ more from others than two processors with the same weights.
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
    /// Natural logarithm of its probability.
    #[serde(with = "crate::number")]
    pub logprob: f64,
    /// Tokens that were scored.
    pub tokens: usize,
    /// Unicode characters that the score is divided by.
    pub characters: usize,
    /// Bytes of UTF-8 that the score is divided by.
    pub bytes: usize,
    /// Words that the score is divided by, if the protocol has them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub words: Option<usize>,
    /// Whether every token is the most probable one at its place, of several the first.
    pub is_greedy: bool,
    /// Sum of the squares of the tokens' log-probabilities.
    #[serde(with = "crate::number")]
    pub squares: f64,
}

/// Index of the best choice by each measure; of equals the first.
///
/// See [`ChoiceResult`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predicted {
    /// By log-probability.
    pub sum: usize,
    /// By log-probability over characters.
    pub per_character: usize,
    /// By log-probability over tokens.
    pub per_token: usize,
    /// By log-probability over bytes.
    pub per_byte: usize,
}

impl Predicted {
    /// The best of these.
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
