//! Scoring of candidate continuations, using the measures of multiple-choice benchmarks.

use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{Continuation, check_continuations, first_best, score_continuations};
use serde::Serialize;

use crate::{EngineError, LoadedModel, Reporter, Unit, Vocabulary};

/// A prompt and its candidate continuations, as token ids.
///
/// ```
/// use candle_gpt2_engine::{Choices, ModelOptions, Silent};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let texts = [" door", " of"].map(String::from);
/// let choices = Choices::new(model.vocabulary(), "Mia opened the", &texts)?;
/// let scored = choices.score(&model, &Silent)?;
/// assert_eq!(scored.choices[scored.best.per_byte].text, " door");
/// assert!(scored.choices[0].sum > scored.choices[1].sum);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Choices {
    prompt_ids: Vec<u32>,
    texts: Vec<String>,
    ids: Vec<Vec<u32>>,
}

/// Scores of all choices.
///
/// Returned by [`Choices::score`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoredChoices {
    /// Prompt tokens that all choices share.
    pub prompt_ids: Vec<u32>,
    /// Choices in input order.
    pub choices: Vec<ScoredChoice>,
    /// Best choice by each measure.
    pub best: BestChoice,
}

/// Score of one choice, in natural logarithms.
///
/// Part of [`ScoredChoices`], which [`Choices::score`] returns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoredChoice {
    /// Text of the choice.
    pub text: String,
    /// Token ids of the choice, including any prompt tokens not shared by all choices.
    pub ids: Vec<u32>,
    /// Log-probability of each token.
    pub logprobs: Vec<f64>,
    /// Sum of `logprobs`.
    pub sum: f64,
    /// Alias of `per_token`.
    pub mean: f64,
    /// Sum divided by the number of tokens.
    pub per_token: f64,
    /// Sum divided by the number of characters, not counting one leading space.
    ///
    /// That space separates the choice from the prompt.
    pub per_character: f64,
    /// Sum divided by the number of UTF-8 bytes, not counting one leading space.
    pub per_byte: f64,
    /// Whether each token is the most probable one at its position; ties go to the lowest id.
    pub is_greedy: bool,
}

/// Zero-based index of the best choice by each measure; ties go to the first choice.
///
/// Part of [`ScoredChoices`], which [`Choices::score`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BestChoice {
    /// Best choice by `sum`.
    pub sum: usize,
    /// Alias of `per_token`.
    pub mean: usize,
    /// Best choice by `per_token`.
    pub per_token: usize,
    /// Best choice by `per_character`.
    pub per_character: usize,
    /// Best choice by `per_byte`.
    pub per_byte: usize,
}

impl Choices {
    /// Encodes a prompt and its choices.
    ///
    /// A token may span the boundary between prompt and choice. Each choice is therefore encoded together
    /// with the prompt. The shared prompt ends where the first of these encodings differs from the prompt's
    /// own tokens.
    ///
    /// # Errors
    /// If there is no tokenizer, or it cannot encode a text.
    pub fn new(vocabulary: &Vocabulary, prompt: &str, texts: &[String]) -> Result<Self, EngineError> {
        let mut prompt_ids = vocabulary.encode(prompt)?;
        let wholes = texts.iter().map(|text| vocabulary.encode(&format!("{prompt}{text}")));
        let mut ids = wholes.collect::<Result<Vec<_>, _>>()?;
        let shared = |ids: &Vec<u32>| ids.iter().zip(&prompt_ids).take_while(|(a, b)| a == b).count();
        let shared = ids.iter().map(shared).min().unwrap_or(0);
        ids.iter_mut().for_each(|ids| *ids = ids.split_off(shared));
        prompt_ids.truncate(shared);
        Ok(Self { prompt_ids: vocabulary.start_if_empty(prompt_ids), texts: texts.to_vec(), ids })
    }

    /// Checks the token counts without loading the model.
    ///
    /// # Errors
    /// If the prompt or a choice has no tokens, or both together exceed the context.
    pub fn check(&self, config: &Gpt2Config) -> Result<(), EngineError> {
        Ok(check_continuations(&self.prompt_ids, &self.ids, config)?)
    }

    /// Scores the choices with a model.
    ///
    /// # Errors
    /// If [`Choices::check`] fails, or a logit is not finite.
    pub fn score(self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<ScoredChoices, EngineError> {
        let Self { prompt_ids, texts, ids } = self;
        let bar = reporter.start("scoring", ids.len() as u64, Unit::Items("choices"));
        let scored = score_continuations(model.model(), &prompt_ids, &ids, &|| bar.advance(1))?;
        let choices = texts.into_iter().zip(ids).zip(scored);
        let choices: Vec<_> =
            choices.map(|((text, ids), scored)| ScoredChoice::new(text, ids, scored)).collect();
        let best = BestChoice::of(&choices);
        Ok(ScoredChoices { prompt_ids, choices, best })
    }
}

impl ScoredChoice {
    fn new(text: String, ids: Vec<u32>, scored: Continuation) -> Self {
        let counted = text.strip_prefix(' ').unwrap_or(&text);
        let per = |count: usize| scored.sum() / count.max(1) as f64;
        let (per_character, per_byte) = (per(counted.chars().count()), per(counted.len()));
        Self {
            text,
            ids,
            sum: scored.sum(),
            mean: scored.mean(),
            per_token: scored.mean(),
            per_character,
            per_byte,
            is_greedy: scored.is_greedy,
            logprobs: scored.logprobs,
        }
    }
}

impl BestChoice {
    fn of(choices: &[ScoredChoice]) -> Self {
        let best = |measure: fn(&ScoredChoice) -> f64| first_best(choices.iter().map(measure));
        Self {
            sum: best(|choice| choice.sum),
            mean: best(|choice| choice.mean),
            per_token: best(|choice| choice.per_token),
            per_character: best(|choice| choice.per_character),
            per_byte: best(|choice| choice.per_byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(text: &str, logprobs: &[f64]) -> ScoredChoice {
        let scored = Continuation { logprobs: logprobs.to_vec(), is_greedy: false };
        ScoredChoice::new(text.into(), vec![0; logprobs.len()], scored)
    }

    #[test]
    fn measures_ignore_one_leading_space() {
        let choice = scored(" né", &[-2.0, -4.0]);
        let measures = (choice.sum, choice.mean, choice.per_token, choice.per_character, choice.per_byte);
        assert_eq!(measures, (-6.0, -3.0, -3.0, -3.0, -2.0));
        assert_eq!(scored(" ", &[-6.0]).per_byte, -6.0, "no division by 0");
        assert_eq!(scored("  a", &[-6.0]).per_byte, -3.0, "one space only");
    }

    #[test]
    fn ties_go_to_the_first_choice() {
        let choices = [scored("abc", &[-3.0]), scored("a", &[-1.0, -2.0]), scored("aé", &[-3.0])];
        let best = BestChoice::of(&choices);
        assert_eq!(best, BestChoice { sum: 0, mean: 1, per_token: 1, per_character: 0, per_byte: 0 });
    }
}
