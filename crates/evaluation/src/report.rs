//! The report of a measurement: JSON for programs, a table for readers.
//!
//! Numbers that are not finite, such as a perplexity that f64 cannot hold, are the texts `Infinity`, `-Infinity` and `NaN` in JSON.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::{Comparison, Flips, Metric, PairedDifference, Published, Size, StderrKind};

/// A measurement by a protocol.
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
/// let report = evaluation.run(&model, None, &Silent).next().ok_or("there is none")??;
/// assert_eq!((report.protocol.as_str(), report.metrics[0].name), ("text:bits", "bits_per_byte"));
/// assert_eq!(report.dataset.items, 1);
/// assert!(report.to_string().contains("  model: built-in in f16"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The model's name.
    pub model: String,
    /// Type of its weights.
    pub dtype: &'static str,
    /// Type of its keys and values.
    pub kv_dtype: &'static str,
    /// Where it ran.
    pub device: String,
    /// The model that it was compared with, if the protocol compares two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseReport>,
    /// Name of the protocol, with its number if it has one.
    pub protocol: String,
    /// Where its arithmetic comes from.
    pub protocol_source: &'static str,
    /// Examples before each question; absent in JSON if there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub num_fewshot: usize,
    /// The data.
    pub dataset: DatasetReport,
    /// The figures.
    pub metrics: Vec<MetricReport>,
    /// The same items in another run, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<Comparison>,
    /// Items that were longer than the context and lost their beginning.
    pub cut: usize,
    /// Other notes.
    pub notes: Vec<String>,
    /// Tokens that this run read; what the choices of an item all begin with counts once, and what was in the log not at all.
    pub tokens_read: u64,
    /// Tokens that this run scored.
    pub tokens_scored: u64,
    /// Seconds that the model took for them.
    pub seconds: f64,
    /// Version of this crate.
    pub version: &'static str,
}

/// The model that another is compared with.
///
/// Part of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BaseReport {
    /// Its name.
    pub model: String,
    /// Type of its weights.
    pub dtype: &'static str,
}

/// The data of a measurement.
///
/// Part of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DatasetReport {
    /// The dataset that the protocol is for.
    pub name: &'static str,
    /// The file that was read, as the caller named it.
    pub path: String,
    /// Its commit on the Hub.
    pub revision: Option<String>,
    /// SHA-256 of its bytes, in lower-case hexadecimal digits.
    pub sha256: String,
    /// Whether that is the published file; absent if there is none, or its SHA-256 is not known.
    pub known: Option<bool>,
    /// Items that were measured.
    pub items: usize,
    /// Most items that were asked for.
    pub limit: Option<usize>,
}

/// A figure beside what others published of the same model.
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
    /// Its name.
    pub name: &'static str,
    /// Its value.
    #[serde(with = "crate::number")]
    pub value: f64,
    /// Its standard error, if it has one.
    #[serde(serialize_with = "crate::number::optional::serialize")]
    pub stderr: Option<f64>,
    /// How that was computed.
    pub stderr_kind: StderrKind,
    /// What was averaged over: items, words, bytes, tokens.
    pub count: usize,
    /// What others measured of a model of this size.
    pub published: Vec<Published>,
    /// Difference to the figure that was published for the same protocol, in standard errors: how likely other items of the same
    /// kind would show it. On the same items no difference is by chance.
    pub z: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Report {
    /// The version of this crate.
    pub const VERSION: &'static str = env!("CARGO_PKG_VERSION");
}

impl MetricReport {
    /// A figure of the protocol of this name, with what others published of a model of this size. Protocols whose names end in a
    /// number have the figures of every number, and those of another one are of another protocol.
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

/// The figure that was published for the protocol itself.
fn same_protocol(published: &[Published]) -> Option<&Published> {
    published.iter().find(|published| published.exact)
}

impl Display for Report {
    /// A table of the figures, and below it where everything comes from.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let head =
            ["protocol", "metric", "value", "± stderr", "published", "difference (in standard errors)"];
        let rows: Vec<_> = self.metrics.iter().map(|metric| metric.row(&self.protocol)).collect();
        write_table(f, &head.map(str::to_owned), &rows)?;
        for metric in &self.metrics {
            metric.published.iter().try_for_each(|published| write_published(f, metric.name, published))?;
        }
        if self.metrics.iter().any(|metric| same_protocol(&metric.published).is_some()) {
            let told = match self.dataset.is_published() {
                Some(true) => "the published figures are of the same items: a difference is none of chance",
                Some(false) => "the published figures are of other items",
                None => "whether the published figures are of the same items is not known",
            };
            writeln!(f, "  {told}")?;
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
    /// Whether these are all published items, if that is known.
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
            Some(false) => f.write_str(", another file than the published one"),
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
        let flips = format!("{n10} right here only, {n01} there only, {changed} other answers");
        writeln!(f, "    right by {measure} {}{error}: {flips}", signed(difference))?;
    }
    match logprob {
        None => Ok(()),
        Some(PairedDifference { difference, stderr: error }) => {
            writeln!(f, "    log-probability of an item {}{}", signed(*difference), stderr(*error))
        }
    }
}

/// Writes columns below their heads: names to the left, numbers to the right, the last one as it is.
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

/// A number for a reader: four places, and what is too small for them in powers of ten.
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

/// Below it four places show less than two digits.
const SMALLEST_IN_PLACES: f64 = 0.001;
