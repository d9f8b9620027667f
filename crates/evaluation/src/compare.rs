//! Item-by-item comparison of two runs: flipped answers and paired differences.
//!
//! Two models with equal accuracy can disagree on many answers. On the same items, the standard error of
//! the difference is far smaller than the standard errors of the two metrics suggest.

use serde::Serialize;

use crate::ItemResult;

/// Item-by-item comparison of two runs.
///
/// ```
/// use candle_gpt2_evaluation::{Comparison, ItemResult};
///
/// let result = |index, correct| ItemResult { index, correct: Some(correct), ..ItemResult::default() };
/// let this = [result(0, true), result(1, true), result(2, false)];
/// let other = [result(0, true), result(1, false), result(2, false)];
/// let compared = Comparison::new("items.jsonl".into(), "gpt2, f32".into(), &this, &other);
/// let flips = &compared.answers[0];
/// assert_eq!((flips.n11, flips.n10, flips.n01, flips.n00), (1, 1, 0, 1));
/// assert!((flips.difference.difference - 1.0 / 3.0).abs() < 1e-12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Path of the other run's log.
    pub path: String,
    /// Summary of the other run; see [`LogHead::run`](crate::LogHead::run).
    pub run: String,
    /// Number of compared items.
    pub items: usize,
    /// Agreement between the two runs' answers, for each measure that selects an answer.
    pub answers: Vec<Flips>,
    /// Mean difference in log-probability per item, this run minus the other, in nats.
    ///
    /// Absent unless every item has exactly one choice.
    pub logprob: Option<PairedDifference>,
}

/// Counts of items that both runs, one run or neither run answered correctly.
///
/// Part of a [`Comparison`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Flips {
    /// Measure that selects the answer.
    ///
    /// With several choices, it is `sum`, `per_character`, `per_token` or `per_byte`; otherwise it is
    /// `correct`.
    pub measure: &'static str,
    /// Number of items that both runs answer correctly.
    pub n11: usize,
    /// Number of items that only this run answers correctly.
    pub n10: usize,
    /// Number of items that only the other run answers correctly.
    pub n01: usize,
    /// Number of items that neither run answers correctly.
    pub n00: usize,
    /// Number of items with different answers in the two runs, correct or not.
    pub changed: usize,
    /// Accuracy of this run minus the accuracy of the other.
    #[serde(flatten)]
    pub difference: PairedDifference,
}

/// Mean of paired differences, with its standard error.
///
/// Part of a [`Comparison`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PairedDifference {
    /// Mean of the differences.
    #[serde(serialize_with = "crate::number::serialize")]
    pub difference: f64,
    /// Standard error: the standard deviation of the differences over the square root of their count.
    #[serde(serialize_with = "crate::number::optional::serialize")]
    pub stderr: Option<f64>,
}

/// Answer to an item, and whether it is correct.
type Answer = (usize, bool);

/// Name of a measure, and a function that selects an answer by this measure.
type Measure = (&'static str, fn(&ItemResult) -> Option<Answer>);

const OF_CHOICES: [Measure; 4] = [
    ("sum", |result| answer(result, result.predicted?.sum)),
    ("per_character", |result| answer(result, result.predicted?.per_character)),
    ("per_token", |result| answer(result, result.predicted?.per_token)),
    ("per_byte", |result| answer(result, result.predicted?.per_byte)),
];
const OF_ONE: Measure = ("correct", |result| result.correct.map(|correct| (usize::from(correct), correct)));

fn answer(result: &ItemResult, predicted: usize) -> Option<Answer> {
    result.gold.map(|gold| (predicted, predicted == gold))
}

impl Comparison {
    /// Compares the results of two runs on the same items in the same order.
    pub fn new(path: String, run: String, here: &[ItemResult], there: &[ItemResult]) -> Self {
        let has_choices = here.iter().any(|result| result.predicted.is_some());
        let measures = if has_choices { &OF_CHOICES[..] } else { &[OF_ONE] };
        let answers = measures.iter().filter_map(|measure| Flips::of(*measure, here, there)).collect();
        let only = |result: &ItemResult| match result.choices.as_slice() {
            [only] => Some(only.logprob),
            _ => None,
        };
        let logprobs = here.iter().zip(there).map(|(here, there)| Some(only(here)? - only(there)?));
        let logprobs: Option<Vec<f64>> = logprobs.collect();
        let logprob = logprobs.filter(|logprobs| !logprobs.is_empty());
        let logprob = logprob.map(|logprobs| PairedDifference::of(&logprobs));
        Self { path, run, items: here.len().min(there.len()), answers, logprob }
    }
}

impl Flips {
    /// Counts the flips by a measure; `None` if an item lacks an answer or there are no items.
    fn of((measure, answer): Measure, here: &[ItemResult], there: &[ItemResult]) -> Option<Self> {
        let pairs = here.iter().zip(there).map(|(here, there)| Some((answer(here)?, answer(there)?)));
        let pairs = pairs.collect::<Option<Vec<_>>>().filter(|pairs| !pairs.is_empty())?;
        let count = |here: bool, there: bool| {
            pairs.iter().filter(|pair| (pair.0.1, pair.1.1) == (here, there)).count()
        };
        let share = |is_right: bool| f64::from(u8::from(is_right));
        let differences: Vec<f64> =
            pairs.iter().map(|(here, there)| share(here.1) - share(there.1)).collect();
        Some(Self {
            measure,
            n11: count(true, true),
            n10: count(true, false),
            n01: count(false, true),
            n00: count(false, false),
            changed: pairs.iter().filter(|(here, there)| here.0 != there.0).count(),
            difference: PairedDifference::of(&differences),
        })
    }
}

impl PairedDifference {
    fn of(differences: &[f64]) -> Self {
        let count = differences.len() as f64;
        let mean = differences.iter().sum::<f64>() / count;
        let squares: f64 = differences.iter().map(|difference| (difference - mean).powi(2)).sum();
        let stderr = (differences.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
        Self { difference: mean, stderr }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChoiceResult, Predicted};

    fn choice(logprob: f64) -> ChoiceResult {
        ChoiceResult { logprob, tokens: 1, characters: 1, bytes: 1, ..ChoiceResult::default() }
    }

    fn result(predicted: Option<usize>, correct: Option<bool>, logprobs: &[f64]) -> ItemResult {
        let prediction = |sum| Predicted { sum, per_character: 0, per_token: sum, per_byte: sum };
        let choices = logprobs.iter().copied().map(choice).collect();
        let predicted = predicted.map(prediction);
        ItemResult { choices, gold: Some(1), predicted, correct, ..ItemResult::default() }
    }

    /// Checks the paired differences of five answers; the correct answer is always 1.
    ///
    /// This run answers 1 1 2 0 3 and the other 1 0 1 2 3. The differences are 0 1 -1 0 0, with mean 0
    /// and variance 2 / 4.
    #[test]
    fn flips_are_counted_in_both_directions() {
        let results = |answers: [usize; 5]| answers.map(|answer| result(Some(answer), None, &[0.0, 1.0]));
        let (ours, theirs) = (results([1, 1, 2, 0, 3]), results([1, 0, 1, 2, 3]));
        let compared = Comparison::new("log".into(), "run".into(), &ours, &theirs);
        let measures: Vec<_> = compared.answers.iter().map(|flips| flips.measure).collect();
        assert_eq!(measures, ["sum", "per_character", "per_token", "per_byte"]);
        let Flips { n11, n10, n01, n00, changed, difference, .. } = compared.answers[0];
        assert_eq!(([n11, n10, n01, n00], changed, difference.difference), ([1, 1, 1, 2], 3, 0.0));
        assert!((difference.stderr.unwrap() - (0.5_f64 / 5.0).sqrt()).abs() < 1e-15);
        let same = &compared.answers[1];
        assert_eq!(([same.n11, same.n10, same.n01, same.n00], same.changed), ([0, 0, 0, 5], 0));
        assert_eq!(compared.logprob, None);
    }

    /// Log-probabilities -1 and -4 versus -2 and -2: differences 1 and -2, mean -0.5, variance 4.5.
    #[test]
    fn single_choices_compare_paired_log_probabilities() {
        let ours = [result(None, Some(true), &[-1.0]), result(None, Some(false), &[-4.0])];
        let theirs = [result(None, Some(false), &[-2.0]), result(None, Some(false), &[-2.0])];
        let compared = Comparison::new("log".into(), "run".into(), &ours, &theirs);
        assert_eq!(compared.logprob, Some(PairedDifference { difference: -0.5, stderr: Some(1.5) }));
        assert_eq!(compared.answers.len(), 1);
        let flips = &compared.answers[0];
        assert_eq!(
            (flips.measure, flips.n10, flips.n00, flips.difference.difference),
            ("correct", 1, 1, 0.5)
        );
        let texts = [result(None, None, &[-1.0])];
        assert_eq!(Comparison::new("log".into(), "run".into(), &texts, &texts).answers, []);
    }
}
