//! Report of a measurement: JSON for programs, a table for people.
//!
//! In JSON, numbers that are not finite are the strings `Infinity`, `-Infinity` and `NaN`. An example is
//! a perplexity beyond the range of f64.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::{Comparison, Flips, Metric, PairedDifference, Published, Size, StderrKind};

/// Results of one protocol.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_evaluation::{EvaluationOptions, ModelFacts};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("text.txt");
/// # std::fs::write(&path, "What is the city but the people?")?;
/// let plan = EvaluationOptions { data: vec![path], ..EvaluationOptions::new(["text:bits"]) }.check()?;
/// let options = ModelOptions::default();
/// let model = options.open(&Silent)?.load(&Silent)?;
/// let evaluation = plan.prepare(&ModelFacts::of_loaded(&options, &model), None, &Silent)?;
/// let report = evaluation.run(&model, None, &Silent).next().ok_or("no report")??;
/// assert_eq!((report.protocol.as_str(), report.metrics[0].name), ("text:bits", "bits_per_byte"));
/// assert_eq!(report.dataset.items, 1);
/// assert!(report.to_string().contains("  model: built-in in q8"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Name of the model.
    pub model: String,
    /// Dtype of the model's weights.
    pub dtype: &'static str,
    /// Dtype of the model's KV cache.
    pub kv_dtype: &'static str,
    /// Device that the model ran on.
    pub device: String,
    /// Base model, if the protocol compares two models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseReport>,
    /// Name of the protocol, including its numeric parameter if one was set.
    pub protocol: String,
    /// Source of the protocol's formulas.
    pub protocol_source: &'static str,
    /// Number of examples before each question; omitted from JSON if 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub num_fewshot: usize,
    /// Evaluated data.
    pub dataset: DatasetReport,
    /// Metrics.
    pub metrics: Vec<MetricReport>,
    /// Comparison with the same items in another run, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<Comparison>,
    /// Number of items that were longer than the context and were truncated at the beginning.
    pub cut: usize,
    /// Further notes.
    pub notes: Vec<String>,
    /// Number of tokens that this run read.
    ///
    /// The common prefix of an item's choices counts once. Results reused from the log do not count.
    pub tokens_read: u64,
    /// Number of tokens that this run scored.
    pub tokens_scored: u64,
    /// Evaluation time in seconds.
    pub seconds: f64,
    /// Version of this crate.
    pub version: &'static str,
}

/// Base model of a comparison.
///
/// Part of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BaseReport {
    /// Name of the model.
    pub model: String,
    /// Dtype of the model's weights.
    pub dtype: &'static str,
}

/// Data used in a measurement.
///
/// Part of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DatasetReport {
    /// Name of the protocol's dataset.
    pub name: &'static str,
    /// Path of the data, as the caller supplied it.
    pub path: String,
    /// Commit of the dataset on the Hub.
    pub revision: Option<String>,
    /// SHA-256 of the data, in lowercase hexadecimal.
    pub sha256: String,
    /// Whether the data is the published file; absent if no published SHA-256 is known.
    pub known: Option<bool>,
    /// Number of evaluated items.
    pub items: usize,
    /// Requested maximum number of items.
    pub limit: Option<usize>,
}

/// A metric alongside published results for the same model size.
///
/// ```
/// use candle_gpt2_evaluation::{Metric, MetricReport, Size, StderrKind, named};
///
/// let metric = Metric {
///     name: "acc",
///     value: 0.3256,
///     stderr: Some(0.0065),
///     stderr_kind: StderrKind::Binomial,
///     count: 5153,
/// };
/// let published = named("lambada:lm-eval")?.0.published;
/// let report = MetricReport::new(&metric, "lambada:lm-eval", published, Some(Size::Small));
/// assert!(report.published.iter().all(|figure| figure.model == Size::Small && figure.metric == "acc"));
/// assert!(report.z.is_none_or(|z| z.abs() < 3.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MetricReport {
    /// Name of the metric.
    pub name: &'static str,
    /// Value of the metric.
    #[serde(with = "crate::number")]
    pub value: f64,
    /// Standard error, if the metric has one.
    #[serde(serialize_with = "crate::number::optional::serialize")]
    pub stderr: Option<f64>,
    /// Method of computing the standard error.
    pub stderr_kind: StderrKind,
    /// Number of units averaged over: items, words, bytes or tokens.
    pub count: usize,
    /// Published results for a model of this size.
    pub published: Vec<Published>,
    /// Difference from the published result for the same protocol, in standard errors.
    ///
    /// Indicates how likely a difference of this size is for another sample of items. If the items are the
    /// same, no difference is due to chance.
    pub z: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Report {
    /// Version of this crate.
    pub const VERSION: &'static str = env!("CARGO_PKG_VERSION");
}

impl MetricReport {
    /// Combines a metric with the published results for a model of this size.
    ///
    /// `protocol` is the full name. Protocols whose names end in a number list results for every number,
    /// and only those for the same number count as exact.
    pub fn new(metric: &Metric, protocol: &str, published: &[Published], size: Option<Size>) -> Self {
        let Metric { name, value, stderr, stderr_kind, count } = *metric;
        let is_of = |published: &&Published| published.metric == name && Some(published.model) == size;
        let is_exact = |published: &Published| published.exact && published.protocol == protocol;
        let published = published.iter().filter(is_of);
        let published = published.map(|published| Published { exact: is_exact(published), ..*published });
        let published: Vec<Published> = published.collect();
        let difference = same_protocol(&published).map(|published| value - published.value);
        let z =
            difference.zip(stderr).map(|(difference, stderr)| difference / stderr).filter(|z| z.is_finite());
        Self { name, value, stderr, stderr_kind, count, published, z }
    }

    fn row(&self, protocol: &str) -> [String; 6] {
        let none = || "-".to_owned();
        let exact = same_protocol(&self.published);
        let difference = exact.map_or(none(), |published| {
            let z = self.z.map_or(String::new(), |z| format!(" ({z:+.2})"));
            format!("{}{z}", signed(self.value - published.value))
        });
        [
            protocol.to_owned(),
            self.name.to_owned(),
            figure(self.value),
            self.stderr.map_or(none(), |stderr| format!("± {}", figure(stderr))),
            exact.map_or(none(), |published| figure(published.value)),
            difference,
        ]
    }
}

/// Returns the published result for exactly this protocol.
fn same_protocol(published: &[Published]) -> Option<&Published> {
    published.iter().find(|published| published.exact)
}

impl Display for Report {
    /// Writes a table of the metrics, followed by the data and the model that they come from.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let head =
            ["protocol", "metric", "value", "± stderr", "published", "difference (in standard errors)"];
        let rows: Vec<_> = self.metrics.iter().map(|metric| metric.row(&self.protocol)).collect();
        write_table(f, &head.map(str::to_owned), &rows)?;
        for metric in &self.metrics {
            metric.published.iter().try_for_each(|published| write_published(f, metric.name, published))?;
        }
        if self.metrics.iter().any(|metric| same_protocol(&metric.published).is_some()) {
            let note = match self.dataset.is_published() {
                Some(true) => {
                    "the published figures are for the same items, so no difference is due to chance"
                }
                Some(false) => "the published figures are for other items",
                None => "the published figures may be for other items",
            };
            writeln!(f, "  {note}")?;
        }
        if let Some(against) = &self.against {
            write_comparison(f, against)?;
        }
        write!(f, "  data: {}", self.dataset)?;
        write!(f, "\n  model: {} in {}", self.model, self.dtype)?;
        if let Some(BaseReport { model, dtype }) = &self.base {
            write!(f, ", compared with {model} in {dtype}")?;
        }
        write!(f, ", on {}; {} tokens read in {:.1} s", self.device, self.tokens_read, self.seconds)
    }
}

impl DatasetReport {
    /// Whether the run covered exactly the published items, if known.
    fn is_published(&self) -> Option<bool> {
        let is_all = self.limit.is_none_or(|limit| self.items < limit);
        if is_all { self.known } else { Some(false) }
    }
}

impl Display for DatasetReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { path, revision, sha256, known, items, limit, .. } = self;
        write!(f, "{path}")?;
        if let Some(revision) = revision {
            write!(f, " at {revision}")?;
        }
        let first = if limit.is_some_and(|limit| *items >= limit) { "the first " } else { "" };
        write!(f, ", {first}{items} items, sha256 {sha256}")?;
        match known {
            Some(true) => f.write_str(", the published file"),
            Some(false) => f.write_str(", not the published file"),
            None => Ok(()),
        }
    }
}

fn write_published(f: &mut Formatter<'_>, metric: &str, published: &Published) -> fmt::Result {
    let Published { value, source, protocol, exact, .. } = published;
    let protocol = match (*exact, *protocol) {
        (true, _) => "this protocol".to_owned(),
        (false, "not published") => "protocol not published".to_owned(),
        (false, other) => format!("another protocol: {other}"),
    };
    writeln!(f, "  {metric} {} by {source} ({protocol})", figure(*value))
}

fn write_comparison(f: &mut Formatter<'_>, against: &Comparison) -> fmt::Result {
    let Comparison { path, run, items, answers, logprob } = against;
    writeln!(f, "  compared with {path} ({run}), {items} items, this run minus the other:")?;
    let stderr =
        |stderr: Option<f64>| stderr.map_or(String::new(), |stderr| format!(" ± {}", figure(stderr)));
    for Flips { measure, n10, n01, changed, difference, .. } in answers {
        let PairedDifference { difference, stderr: error } = *difference;
        let error = stderr(error);
        let flips =
            format!("{n10} correct only in this run, {n01} only in the other, {changed} different answers");
        writeln!(f, "    accuracy by {measure} {}{error}: {flips}", signed(difference))?;
    }
    match logprob {
        None => Ok(()),
        Some(PairedDifference { difference, stderr: error }) => {
            writeln!(f, "    log-probability per item {}{}", signed(*difference), stderr(*error))
        }
    }
}

/// Writes a table with left-aligned text, right-aligned numbers and an unaligned last column.
fn write_table(f: &mut Formatter<'_>, head: &[String; 6], rows: &[[String; 6]]) -> fmt::Result {
    let width =
        |column: usize| rows.iter().chain([head]).map(|row| row[column].chars().count()).fold(0, usize::max);
    let [protocol, metric, value, stderr, published] = [0, 1, 2, 3, 4].map(width);
    for row in [head].into_iter().chain(rows) {
        let [a, b, c, d, e, last] = row;
        writeln!(f, "{a:<protocol$}  {b:<metric$}  {c:>value$}  {d:>stderr$}  {e:>published$}  {last}")?;
    }
    Ok(())
}

/// Formats a number with four decimal places, or in scientific notation if it is too small.
fn figure(number: f64) -> String {
    if number == 0.0 || number.abs() >= SMALLEST_IN_PLACES {
        format!("{number:.4}")
    } else {
        format!("{number:.3e}")
    }
}

fn signed(number: f64) -> String {
    let sign = if number < 0.0 { "" } else { "+" };
    format!(
        "{sign}{}",
        if number.abs() < SMALLEST_IN_PLACES { format!("{number:.4}") } else { figure(number) }
    )
}

/// Smallest number that shows at least two digits in four decimal places.
const SMALLEST_IN_PLACES: f64 = 0.001;
