//! Metrics with standard errors.
//!
//! Without items, functions return no metrics rather than NaN values. A perplexity beyond the range of f64 is
//! infinite and has no standard error.

use std::f64::consts::LN_2;

use serde::Serialize;

use crate::{ChoiceResult, ItemResult};

/// A metric that a protocol reports, named as in lm-evaluation-harness.
///
/// Returned by [`Protocol::measure`](crate::Protocol::measure).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metric {
    /// Name, such as `acc_norm`.
    pub name: &'static str,
    /// Value.
    pub value: f64,
    /// Standard error; absent if the metric has none or there are fewer than two items.
    pub stderr: Option<f64>,
    /// Method of computing the standard error.
    pub stderr_kind: StderrKind,
    /// Number of units averaged over: items, words, bytes or tokens.
    pub count: usize,
}

/// Method of computing a standard error.
///
/// Part of a [`Metric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StderrKind {
    /// `sqrt(p (1 - p) / (n - 1))` for a fraction `p`.
    Binomial,
    /// Delta method: the spread over items, pages or windows, times the derivative of the metric.
    Delta,
    /// No standard error.
    None,
}

impl Metric {
    /// Computes the fraction of true answers.
    pub(crate) fn share(name: &'static str, answers: impl IntoIterator<Item = bool>) -> Option<Self> {
        let (right, count) =
            answers.into_iter().fold((0, 0), |(right, count), is| (right + usize::from(is), count + 1));
        let value = right as f64 / at_least_one(count)?;
        let stderr = variance_divisor(count).map(|less| (value * (1.0 - value) / less).sqrt());
        let stderr_kind = stderr.map_or(StderrKind::None, |_| StderrKind::Binomial);
        Some(Self { name, value, stderr, stderr_kind, count })
    }

    /// Converts nats per unit into a perplexity, `exp(nats)`.
    pub(crate) fn perplexity(name: &'static str, nats: &Ratio) -> Self {
        let value = libm::exp(nats.value);
        let stderr = nats.stderr.map(|stderr| value * stderr);
        nats.metric(name, value, stderr)
    }

    /// Converts nats per unit into bits per unit.
    pub(crate) fn bits(name: &'static str, nats: &Ratio) -> Self {
        nats.metric(name, nats.value / LN_2, nats.stderr.map(|stderr| stderr / LN_2))
    }
}

/// Mean number of nats per unit, over blocks of text or over items.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratio {
    /// Total nats over total units.
    pub(crate) value: f64,
    /// Standard error, from the deviation of each block's nats from `value * units`.
    ///
    /// Formula: `sqrt(n / (n - 1) sum (nats - value units)^2) / sum units`.
    pub(crate) stderr: Option<f64>,
    /// Number of units.
    pub(crate) count: usize,
}

impl Ratio {
    /// Computes the ratio from the nats and units of each block; `None` if there are no units.
    pub(crate) fn of(blocks: impl Iterator<Item = (f64, usize)> + Clone) -> Option<Self> {
        let (nats, count) =
            blocks.clone().fold((0.0, 0), |(nats, count), block| (nats + block.0, count + block.1));
        let units = at_least_one(count)?;
        let value = nats / units;
        let squares: f64 = blocks.clone().map(|(nats, units)| (nats - value * units as f64).powi(2)).sum();
        let blocks = blocks.count();
        let stderr = variance_divisor(blocks).map(|less| (blocks as f64 / less * squares).sqrt() / units);
        Some(Self { value, stderr, count })
    }

    /// Computes the ratio over each result's single choice, in the given units.
    pub(crate) fn of_texts(results: &[ItemResult], units: fn(&ChoiceResult) -> usize) -> Option<Self> {
        Self::of(texts(results).map(|text| (-text.logprob, units(text))))
    }

    /// Computes the ratio per token, with a standard error that treats tokens as independent.
    ///
    /// The standard error is llama.cpp's `sqrt((mean of squares - square of mean) / (n - 1))`.
    pub(crate) fn of_tokens(results: &[ItemResult]) -> Option<Self> {
        let ratio = Self::of_texts(results, |text| text.tokens)?;
        let squares = texts(results).map(|text| text.squares).sum::<f64>() / ratio.count as f64;
        // Rounding can turn a variance of 0 into a negative number.
        let variance = (squares - ratio.value.powi(2)).max(0.0);
        Some(Self { stderr: variance_divisor(ratio.count).map(|less| (variance / less).sqrt()), ..ratio })
    }

    /// Divides the total nats by a different number of units; the result has no standard error.
    pub(crate) fn per(&self, count: usize) -> Option<Self> {
        let scale = self.count as f64 / at_least_one(count)?;
        Some(Self { value: self.value * scale, stderr: None, count })
    }

    /// Creates a metric from this ratio, with the ratio's count.
    pub(crate) fn metric(&self, name: &'static str, value: f64, stderr: Option<f64>) -> Metric {
        let stderr = stderr.filter(|stderr| stderr.is_finite());
        let stderr_kind = stderr.map_or(StderrKind::None, |_| StderrKind::Delta);
        Metric { name, value, stderr, stderr_kind, count: self.count }
    }
}

/// First choice of each result.
pub(crate) fn texts(results: &[ItemResult]) -> impl Iterator<Item = &ChoiceResult> + Clone {
    results.iter().filter_map(|result| result.choices.first())
}

fn at_least_one(count: usize) -> Option<f64> {
    (count > 0).then_some(count as f64)
}

/// `n - 1`, or `None` if it is not positive.
fn variance_divisor(count: usize) -> Option<f64> {
    (count > 1).then(|| (count - 1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tolerance for the rounding errors of a few operations.
    const ROUNDING: f64 = 1e-12;

    #[track_caller]
    fn assert_near(found: Option<f64>, expected: f64) {
        let found = found.unwrap();
        assert!(
            (found - expected).abs() <= ROUNDING * expected.abs().max(1.0),
            "expected {expected}, found {found}"
        );
    }

    fn text(logprob: f64, tokens: usize, squares: f64) -> ItemResult {
        let choice = ChoiceResult { logprob, tokens, squares, ..ChoiceResult::default() };
        ItemResult { choices: vec![choice], ..ItemResult::default() }
    }

    /// 3 of 4 correct: sqrt(0.75 * 0.25 / 3) = 0.25.
    #[test]
    fn fraction_has_the_sample_standard_error() {
        let fraction = Metric::share("acc", [true, true, false, true]).unwrap();
        assert_eq!((fraction.value, fraction.stderr, fraction.count), (0.75, Some(0.25), 4));
        let all = Metric::share("acc", [true; 5]).unwrap();
        assert_eq!((all.value, all.stderr), (1.0, Some(0.0)));
    }

    #[test]
    fn one_item_has_no_stderr_and_zero_items_have_no_metric() {
        assert_eq!(Metric::share("acc", [true]).unwrap().stderr, None);
        assert_eq!(Metric::share("acc", []), None);
        assert_eq!(Ratio::of([(2.0, 4)].into_iter()).unwrap(), Ratio { value: 0.5, stderr: None, count: 4 });
        assert_eq!(Ratio::of(std::iter::empty()), None);
        assert_eq!(Ratio::of([(2.0, 0)].into_iter()), None);
    }

    /// Checks that with one unit per block, the error is the standard error of the mean.
    ///
    /// Nats 1, 2, 6 have the mean 3 and the variance (4 + 1 + 9) / 2 = 7.
    #[test]
    fn one_unit_blocks_have_the_standard_error_of_the_mean() {
        let ratio = Ratio::of([(1.0, 1), (2.0, 1), (6.0, 1)].into_iter()).unwrap();
        assert_eq!((ratio.value, ratio.count), (3.0, 3));
        assert_near(ratio.stderr, (7.0_f64 / 3.0).sqrt());
        let perplexity = Metric::perplexity("perplexity", &ratio);
        assert_near(Some(perplexity.value), 20.085_536_923_187_668);
        assert_near(perplexity.stderr, 20.085_536_923_187_668 * (7.0_f64 / 3.0).sqrt());
    }

    /// Blocks of 4 nats over 2 units and 5 nats over 1 unit: 3 nats per unit.
    ///
    /// The blocks are 2 below and 2 above their expected nats, so the error is sqrt(2 * 8) / 3 = 4 / 3.
    #[test]
    fn blocks_are_weighted_by_their_units() {
        let ratio = Ratio::of([(4.0, 2), (5.0, 1)].into_iter()).unwrap();
        assert_eq!(ratio.value, 3.0);
        assert_near(ratio.stderr, 4.0 / 3.0);
        let bits = Metric::bits("bits_per_byte", &ratio);
        assert_near(Some(bits.value), 4.328_085_122_666_891);
        assert_near(bits.stderr, 1.923_593_387_851_951_5);
        assert_eq!(bits.count, 3);
    }

    /// Texts with token nats 1, 3 and 2, 2: mean 2, mean of squares 18 / 4, error sqrt((4.5 - 4) / 3).
    #[test]
    fn per_token_stderr_matches_llama_cpp() {
        let results = [text(-4.0, 2, 10.0), text(-4.0, 2, 8.0)];
        let ratio = Ratio::of_tokens(&results).unwrap();
        assert_eq!((ratio.value, ratio.count), (2.0, 4));
        assert_near(ratio.stderr, (0.5_f64 / 3.0).sqrt());
    }

    /// A uniform model's tokens have zero variance; a slightly negative rounding result counts as 0.
    #[test]
    fn uniform_model_has_zero_token_stderr() {
        let nats = 6.907_755_278_982_137;
        let results = [text(-3.0 * nats, 3, 3.0 * nats * nats), text(-nats, 1, nats * nats)];
        let ratio = Ratio::of_tokens(&results).unwrap();
        assert!(ratio.stderr.unwrap() < 1e-6, "{ratio:?}");
        assert_near(Some(Metric::perplexity("perplexity", &ratio).value), 1000.0);
    }

    #[test]
    fn overflowing_perplexity_is_infinite_without_stderr() {
        let ratio = Ratio::of([(1000.0, 1), (1001.0, 1)].into_iter()).unwrap();
        let perplexity = Metric::perplexity("word_perplexity", &ratio);
        assert_eq!((perplexity.value, perplexity.stderr), (f64::INFINITY, None));
        let none =
            Metric::perplexity("perplexity", &Ratio::of([(f64::INFINITY, 1), (1.0, 1)].into_iter()).unwrap());
        assert_eq!((none.value, none.stderr, none.stderr_kind), (f64::INFINITY, None, StderrKind::None));
    }

    #[test]
    fn ratio_over_another_count_has_no_stderr() {
        let ratio = Ratio::of([(4.0, 2), (5.0, 1)].into_iter()).unwrap();
        assert_eq!(ratio.per(18), Some(Ratio { value: 0.5, stderr: None, count: 18 }));
        assert_eq!(ratio.per(0), None);
        let metric = Metric::perplexity("word_perplexity", &ratio.per(18).unwrap());
        assert_eq!((metric.stderr, metric.stderr_kind), (None, StderrKind::None));
    }
}
