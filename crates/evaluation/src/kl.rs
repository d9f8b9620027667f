//! `kl`: KL divergence between the predictions of two models, token by token.
//!
//! The models can differ, or be one model in two dtypes. Windows and statistics follow llama.cpp's
//! `llama-perplexity --kl-divergence`. Windows of `--context` tokens are adjacent, and the second half of
//! each is scored. A shorter remainder of the text is dropped. Names of special tokens are treated as
//! plain text.
//!
//! Both models read a whole window in one pass, without an intermediate file of log-probabilities.
//! Nothing is rounded to 16 bits, so a model compared with itself has a divergence of exactly 0
//! everywhere. Logarithms are natural, values are f64, and proportions are fractions, not percentages.

use std::collections::BTreeSet;

use candle_gpt2_engine::{LoadedModel, Progress, Vocabulary};
use candle_gpt2_generation::{Divergence, GenerationError, diverge};
use candle_gpt2_weights::END_OF_TEXT;
use serde::{Deserialize, Serialize};

use crate::answer::is_like;
use crate::metric::Ratio;
use crate::protocols::llama_cpp::{SHORTEST_WINDOW, encode_file, first_scored, window_length};
use crate::protocols::shared::{limit, unusable, wrong_setting};
use crate::{Data, EvaluationError, Metric, Setting};

/// A text split into windows, ready for two models.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, WeightDType};
/// use candle_gpt2_evaluation::{Data, Kl, Setting};
///
/// let load = |dtype| {
///     let options = ModelOptions { dtype: Some(dtype), ..ModelOptions::default() };
///     options.open(&Silent)?.load(&Silent)
/// };
/// let (base, rounded) = (load(WeightDType::F32)?, load(WeightDType::Q4)?);
/// let text = "What is the city but the people? True, the people are the city. ".repeat(3);
/// let data = Data::from_bytes("text.txt".as_ref(), text.into_bytes())?;
/// let setting = Setting { context: Some(32), limit: Some(1), ..Setting::new(base.vocabulary(), &Silent) };
/// let kl = Kl::prepare(&data, &setting)?;
/// let windows = kl.evaluate(&base, &rounded, Vec::new(), &Silent, &mut |_| Ok(()))?;
/// let metrics = Kl::measure(&windows);
/// let mean = metrics.iter().find(|metric| metric.name == "kl").ok_or("no such metric")?;
/// assert!(mean.value > 0.0 && mean.value < 0.2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Kl {
    windows: Vec<Vec<u32>>,
    notes: Vec<String>,
}

/// Divergences within a window; one line of the log.
///
/// All lists have one entry per scored token. [`Kl::evaluate`] returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlWindow {
    /// Index of the window in the text, from 0.
    pub index: usize,
    /// Number of tokens before the first scored token.
    pub context_tokens: usize,
    /// Scored tokens.
    pub tokens: Vec<u32>,
    /// KL divergence of the model's prediction from the base model's, in nats.
    pub kl: Vec<f64>,
    /// Natural logarithm of each token's probability under the base model.
    pub base_logprob: Vec<f64>,
    /// Natural logarithm of each token's probability under the model.
    pub logprob: Vec<f64>,
    /// Whether both models rank the same token first.
    pub same_top: Vec<bool>,
}

impl Kl {
    /// Name of the comparison.
    pub const NAME: &'static str = "kl";
    /// One-line description of the comparison.
    pub const ABOUT: &'static str =
        "divergence between the predictions of two models, or of one model in two precisions, on a text";
    /// Source of the formulas.
    pub const SOURCE: &'static str =
        "llama.cpp, tools/perplexity/perplexity.cpp, kl_divergence; sums in f64 of exact logits";

    /// Splits text into windows.
    ///
    /// The texts in JSONL data are joined by the end-of-text token. A single trailing line break is removed.
    /// [`Setting::limit`] counts windows. A text shorter than a window becomes a single shorter window.
    ///
    /// # Errors
    /// Fails if the data is not text, the text has too few tokens, or the windows exceed the model's
    /// context.
    pub fn prepare(data: &Data, setting: &Setting<'_>) -> Result<Self, EvaluationError> {
        let (length, note) = window_length(setting)?;
        let ids = encode_file(setting, &data.texts()?.join(END_OF_TEXT))?;
        if ids.len() < SHORTEST_WINDOW {
            let what = format!("expected text of at least {SHORTEST_WINDOW} tokens, found {}", ids.len());
            return Err(unusable(data, what));
        }
        let is_short = ids.len() < length;
        let short = || {
            format!("the text has {} tokens, so its only window is shorter than {length} tokens", ids.len())
        };
        let notes = note.into_iter().chain(is_short.then(short)).collect();
        let windows = ids.chunks_exact(length.min(ids.len())).take(limit(setting)?);
        Ok(Self { windows: windows.map(<[u32]>::to_vec).collect(), notes })
    }

    /// Returns the number of windows.
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    /// Returns notes on the text.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the number of tokens left for each model to read after the first `done` windows.
    ///
    /// The last completed window is read again.
    pub fn tokens_to_read(&self, done: usize) -> u64 {
        let windows = self.windows.get(done.saturating_sub(1)..).unwrap_or_default();
        windows.iter().map(|window| window.len() as u64 - 1).sum()
    }

    /// Checks that the base model has the same tokens as the model passed to [`Kl::prepare`].
    ///
    /// The check runs before any weights are read.
    ///
    /// # Errors
    /// Fails if the vocabulary sizes differ, if a token of the text means different bytes to the base
    /// model, or if the base model's context is shorter than a window.
    pub fn check_base(&self, base: &Vocabulary, model: &Vocabulary) -> Result<(), EvaluationError> {
        let (expected, found) = (model.config().vocab_size, base.config().vocab_size);
        if expected != found {
            let expected = format!("{expected} tokens, as in the evaluated model");
            return Err(wrong_setting("vocabulary of the base model", expected, found.to_string()));
        }
        let longest = self.windows.iter().map(Vec::len).max().unwrap_or(0);
        let n_positions = base.config().n_positions;
        if longest > n_positions {
            let expected = format!("at most {n_positions} tokens (the base model's context)");
            return Err(wrong_setting("`context`", expected, longest.to_string()));
        }
        if base.tokenizer().is_none() || model.tokenizer().is_none() {
            return Ok(());
        }
        let ids: BTreeSet<u32> = self.windows.iter().flatten().copied().collect();
        let Some(id) = ids.into_iter().find(|id| base.token_bytes(*id) != model.token_bytes(*id)) else {
            return Ok(());
        };
        let token =
            |vocabulary: &Vocabulary| format!("{:?}", String::from_utf8_lossy(&vocabulary.token_bytes(id)));
        let expected = format!("{}, as in the evaluated model", token(model));
        Err(wrong_setting(&format!("token {id} of the base model"), expected, token(base)))
    }

    /// Checks that a logged result belongs to window `index`.
    ///
    /// This is the check for [`ItemLog::take`](crate::ItemLog::take).
    ///
    /// # Errors
    /// Returns a description of the first mismatch.
    pub fn check_result(&self, index: usize, result: &KlWindow) -> Result<(), String> {
        let Some(window) = self.windows.get(index) else {
            return Err(format!("the text has only {} windows", self.windows.len()));
        };
        let (context, scored) = window.split_at(first_scored(window.len()));
        let lengths =
            [result.kl.len(), result.base_logprob.len(), result.logprob.len(), result.same_top.len()];
        if result.index != index {
            return Err(format!("`index`: expected {index}, found {}", result.index));
        }
        if result.context_tokens != context.len() {
            return Err(format!(
                "`context_tokens`: expected {}, found {}",
                context.len(),
                result.context_tokens
            ));
        }
        if result.tokens != scored {
            return Err("`tokens`: expected the text's tokens, found different tokens".to_owned());
        }
        match lengths.into_iter().find(|length| *length != scored.len()) {
            None => Ok(()),
            Some(length) => Err(format!(
                "expected lists of {} numbers, one for each token, found a list of {length}",
                scored.len()
            )),
        }
    }

    /// Evaluates both models on every window after the first `done.len()`, and returns all results.
    ///
    /// `done` holds the results of an interrupted run. The last of them is computed again as a check.
    /// `keep` receives each further result as soon as it is available. `progress` counts the tokens of
    /// [`Kl::tokens_to_read`].
    ///
    /// # Errors
    /// Fails if the models are not comparable (see [`Kl::check_base`]), if their logits are not finite,
    /// if the recomputed result differs, or if `keep` fails.
    pub fn evaluate(
        &self,
        base: &LoadedModel,
        model: &LoadedModel,
        done: Vec<KlWindow>,
        progress: &dyn Progress,
        keep: &mut dyn FnMut(&KlWindow) -> Result<(), EvaluationError>,
    ) -> Result<Vec<KlWindow>, EvaluationError> {
        self.check_base(base.vocabulary(), model.vocabulary())?;
        let mut results = done;
        let mut known = results.pop();
        for (index, window) in self.windows.iter().enumerate().skip(results.len()) {
            let first = first_scored(window.len());
            let places = diverge(base.model(), model.model(), window, first)?;
            let result = KlWindow::of(index, window, first, &places)?;
            progress.advance(window.len() as u64 - 1);
            match known.take() {
                Some(known) => results.push(known.if_like(&result)?),
                None => {
                    keep(&result)?;
                    results.push(result);
                }
            }
        }
        Ok(results)
    }

    /// Computes the metrics for these windows; empty if there are no windows.
    ///
    /// Standard errors treat tokens as independent, as in llama.cpp. llama.cpp reports none for ten
    /// tokens or fewer, and no percentiles for fewer than a hundred. This crate needs two tokens for a
    /// standard error and one for a percentile, and both report their `count`. Metrics that are NaN are
    /// omitted: the correlation if a model finds every token equally probable, and the difference between
    /// infinite perplexities.
    pub fn measure(windows: &[KlWindow]) -> Vec<Metric> {
        let of = |list: fn(&KlWindow) -> &[f64]| windows.iter().flat_map(list).copied().collect::<Vec<f64>>();
        let [losses, base_losses] = [of(|window| &window.logprob), of(|window| &window.base_logprob)]
            .map(|logprobs| logprobs.into_iter().map(|logprob| -logprob).collect::<Vec<f64>>());
        let changes = paired(&losses, &base_losses, |loss, base| libm::exp(-loss) - libm::exp(-base));
        let same_top = windows.iter().flat_map(|window| &window.same_top).copied();
        let figures = [
            perplexities(&losses, &base_losses),
            divergences(of(|window| &window.kl)),
            probability_changes(changes),
            Metric::share("same_top", same_top).map(|share| vec![share]),
        ];
        figures.into_iter().flatten().flatten().filter(|metric| !metric.value.is_nan()).collect()
    }
}

impl KlWindow {
    /// Returns `self` if the models still produce the same values.
    ///
    /// See [`ItemResult::if_like`](crate::ItemResult).
    fn if_like(self, now: &Self) -> Result<Self, EvaluationError> {
        let pairs = |a: &[f64], b: &[f64]| a.iter().copied().zip(b.iter().copied()).collect::<Vec<_>>();
        let both = [pairs(&self.logprob, &now.logprob), pairs(&self.base_logprob, &now.base_logprob)];
        if both.into_iter().all(|pairs| is_like(pairs.into_iter())) {
            return Ok(self);
        }
        Err(EvaluationError::OtherResult { index: self.index })
    }

    /// Collects the divergences at the window's tokens, starting at `first`.
    fn of(
        index: usize,
        window: &[u32],
        first: usize,
        places: &[Divergence],
    ) -> Result<Self, EvaluationError> {
        let column = |number: fn(&Divergence) -> f64| places.iter().map(number).collect::<Vec<f64>>();
        let [kl, base_logprob, logprob] =
            [column(|place| place.kl), column(|place| place.base_logprob), column(|place| place.logprob)];
        // JSON cannot represent an infinity, and a mean that includes one is meaningless.
        if [&kl, &base_logprob, &logprob].into_iter().flatten().any(|number| !number.is_finite()) {
            return Err(GenerationError::NotFinite.into());
        }
        let same_top = places.iter().map(|place| place.same_top).collect();
        Ok(Self {
            index,
            context_tokens: first,
            tokens: window[first..].to_vec(),
            kl,
            base_logprob,
            logprob,
            same_top,
        })
    }
}

/// Computes both models' perplexities and their ratio, difference and correlation.
fn perplexities(losses: &[f64], base_losses: &[f64]) -> Option<Vec<Metric>> {
    let [loss, base_loss] = [mean_of(losses)?, mean_of(base_losses)?];
    let [perplexity, base_perplexity] = [loss, base_loss].map(|nats| libm::exp(nats.value));
    // The variance of the paired differences accounts for the covariance of the two losses, and is exactly
    // 0 for equal models.
    let log_ratio = mean_of(&paired(losses, base_losses, |loss, base| loss - base))?;
    // To first order in both losses: d(e^q - e^b) = e^q dq - e^b db.
    let difference =
        mean_of(&paired(losses, base_losses, |loss, base| perplexity * loss - base_perplexity * base))?;
    Some(vec![
        Metric::perplexity("perplexity", &loss),
        Metric::perplexity("base_perplexity", &base_loss),
        log_ratio.metric("ln_perplexity_ratio", log_ratio.value, log_ratio.stderr),
        Metric::perplexity("perplexity_ratio", &log_ratio),
        difference.metric("perplexity_difference", perplexity - base_perplexity, difference.stderr),
        loss.metric("perplexity_correlation", correlation(losses, base_losses)?, None),
    ])
}

fn divergences(kl: Vec<f64>) -> Option<Vec<Metric>> {
    const PERCENTILES: [(&str, f64); 11] = [
        ("kl_max", 1.0),
        ("kl_99.9", 0.999),
        ("kl_99", 0.99),
        ("kl_95", 0.95),
        ("kl_90", 0.9),
        ("kl_median", 0.5),
        ("kl_10", 0.1),
        ("kl_5", 0.05),
        ("kl_1", 0.01),
        ("kl_0.1", 0.001),
        ("kl_min", 0.0),
    ];
    let mean = mean_of(&kl)?;
    let first = mean.metric("kl", mean.value, mean.stderr);
    Some([first].into_iter().chain(percentiles(&mean, &PERCENTILES, kl)).collect())
}

/// Computes metrics for the change in the probabilities of the text's tokens.
fn probability_changes(changes: Vec<f64>) -> Option<Vec<Metric>> {
    const PERCENTILES: [(&str, f64); 13] = [
        ("dp_max", 1.0),
        ("dp_99.9", 0.999),
        ("dp_99", 0.99),
        ("dp_95", 0.95),
        ("dp_90", 0.9),
        ("dp_75", 0.75),
        ("dp_median", 0.5),
        ("dp_25", 0.25),
        ("dp_10", 0.1),
        ("dp_5", 0.05),
        ("dp_1", 0.01),
        ("dp_0.1", 0.001),
        ("dp_min", 0.0),
    ];
    let mean = mean_of(&changes)?;
    let square = mean_of(&paired(&changes, &changes, |one, same| one * same))?;
    let root = square.value.sqrt();
    // d sqrt(x) = dx / (2 sqrt(x)). If nothing changes, the error is 0.
    let root_error = square.stderr.map(|error| if root > 0.0 { 0.5 / root * error } else { 0.0 });
    let first = mean.metric("dp", mean.value, mean.stderr);
    let last = square.metric("dp_rms", root, root_error);
    Some([first].into_iter().chain(percentiles(&mean, &PERCENTILES, changes)).chain([last]).collect())
}

/// Computes percentile metrics, with the same `count` as `mean`.
fn percentiles(mean: &Ratio, named: &[(&'static str, f64)], mut values: Vec<f64>) -> Vec<Metric> {
    values.sort_by(f64::total_cmp);
    named.iter().map(|(name, share)| mean.metric(name, percentile(&values, *share), None)).collect()
}

/// Computes a percentile of sorted values, with linear interpolation between neighbors.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into the list, rounded down"
    )]
    let below = place as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (place - below as f64) * (sorted[above] - sorted[below])
}

/// Pearson correlation; NaN if one of the variances is 0.
fn correlation(a: &[f64], b: &[f64]) -> Option<f64> {
    let [mean_a, mean_b] = [mean_of(a)?.value, mean_of(b)?.value];
    let products = |a, mean_a, b, mean_b| -> Option<f64> {
        Some(mean_of(&paired(a, b, |a, b| (a - mean_a) * (b - mean_b)))?.value)
    };
    let variances = products(a, mean_a, a, mean_a)? * products(b, mean_b, b, mean_b)?;
    Some(products(a, mean_a, b, mean_b)? / variances.sqrt())
}

fn paired(a: &[f64], b: &[f64], combine: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| combine(*a, *b)).collect()
}

/// Mean with its standard error; `None` if there are no values.
fn mean_of(values: &[f64]) -> Option<Ratio> {
    Ratio::of(values.iter().map(|value| (*value, 1)))
}
