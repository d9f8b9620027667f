//! Ablation: predictions without each head in turn, or without several heads together.

use std::path::PathBuf;
use std::str::FromStr;

use candle_core::{DType, Tensor};
use candle_gpt2::LogitsFor;
use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_interpret::{Ablation, Chain, ablated, ablation_grid};
use candle_gpt2_pictures::{Axis, Metric as ReportMetric};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Result, invalid_option};
use crate::files::TextFile;
use crate::patch::warn_of_unchanged;
use crate::{Analysis, CheckedMetric, Heads, Look, LookError, LookSubject, MetricOptions, Reader, Text};

/// Ablates heads and measures how a prediction changes.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Ablate, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let found = Ablate::new(Text::Words("One day, Mia was".into())).at(&subject, &Silent)?;
/// assert_eq!(found.report.values.len(), 7 * 4, "one value for each head of seven layers");
/// assert!(found.report.metric.is_some_and(|metric| metric.after.is_none()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Ablate {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Ablate these heads together: LAYER.HEAD, separated by commas
    #[cfg_attr(feature = "clap", arg(long, value_name = "HEADS"))]
    pub heads: Option<Heads>,
    /// Ablate the heads at this position only
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", requires = "heads", allow_negative_numbers = true)
    )]
    pub at: Option<i64>,
    /// Replacement for a head's output: raw-zero, transformer-lens-zero, mean:FILE (mean over the
    /// texts in FILE: one per line, or JSON objects with `prompt` or `ids` in a .jsonl file; texts longer
    /// than the context are split) or sample:FILE (from one text with the same number of tokens)
    #[cfg_attr(feature = "clap", arg(long, value_name = "WHAT", default_value = "raw-zero"))]
    pub with: Replacement,
}

impl Ablate {
    /// Creates options that replace each head's output with zeros in turn.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

/// Replacement for a head's output.
///
/// ```
/// use candle_gpt2_look::{Ablate, Replacement, Text};
///
/// let mut ablate = Ablate::new(Text::Ids(vec![5, 6, 7]));
/// ablate.with = Replacement::mean(vec![Text::Ids(vec![8, 9]), Text::Ids(vec![10, 11])]);
/// assert!("raw-zero".parse::<Replacement>().is_ok());
/// assert!("nothing".parse::<Replacement>().is_err());
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "JsonReplacement")]
pub struct Replacement {
    kind: ReplacementKind,
    /// Name of the replacement in reports.
    name: String,
}

#[derive(Debug, Clone)]
enum ReplacementKind {
    RawZero,
    TransformerLensZero,
    Mean(ReplacementTexts),
    Sample(ReplacementTexts),
}

/// Texts that supply a head's replacement output.
#[derive(Debug, Clone)]
enum ReplacementTexts {
    Texts(Vec<Text>),
    /// File with one text per line.
    File(PathBuf),
}

impl Replacement {
    /// Replaces the output with zeros.
    pub fn raw_zero() -> Self {
        Self { kind: ReplacementKind::RawZero, name: "raw-zero".into() }
    }

    /// Replaces the output with the constant that stands for zero in TransformerLens.
    pub fn transformer_lens_zero() -> Self {
        Self { kind: ReplacementKind::TransformerLensZero, name: "transformer-lens-zero".into() }
    }

    /// Replaces the output with its mean over other texts.
    pub fn mean(texts: Vec<Text>) -> Self {
        let name = format!("mean of {} texts", texts.len());
        Self { kind: ReplacementKind::Mean(ReplacementTexts::Texts(texts)), name }
    }

    /// Replaces the output with the head's output for another text with the same number of tokens.
    pub fn sample(text: Text) -> Self {
        let name = "output for another text".to_owned();
        Self { kind: ReplacementKind::Sample(ReplacementTexts::Texts(vec![text])), name }
    }

    /// Encodes the replacement's texts, and checks them against a text of `tokens` tokens.
    fn ablation(&self, reader: &Reader, tokens: usize) -> Result<Ablation> {
        match &self.kind {
            ReplacementKind::RawZero => Ok(Ablation::RawZero),
            ReplacementKind::TransformerLensZero => Ok(Ablation::TransformerLensZero),
            ReplacementKind::Mean(others) => Ok(Ablation::Mean(others.tokens(reader)?)),
            ReplacementKind::Sample(others) => {
                let mut texts = others.tokens(reader)?;
                let (count, found) = (texts.len(), texts.first().map_or(0, Vec::len));
                match texts.pop() {
                    Some(ids) if count == 1 && found == tokens => Ok(Ablation::Sample(ids)),
                    _ => Err(invalid_option(format!(
                        "{}: expected one text of {tokens} tokens, found {count} text(s), the first with {found} tokens",
                        others.origin()
                    ))),
                }
            }
        }
    }
}

impl Default for Replacement {
    fn default() -> Self {
        Self::raw_zero()
    }
}

/// Parses `raw-zero`, `transformer-lens-zero`, `mean:FILE` or `sample:FILE`.
///
/// `mean` uses all lines of the file, and `sample` its only line. The file is read later; a `.jsonl` file has
/// objects with `prompt` or `ids`.
impl FromStr for Replacement {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let kind = match (text, text.split_once(':')) {
            ("raw-zero", _) => ReplacementKind::RawZero,
            ("transformer-lens-zero" | "tl-zero", _) => ReplacementKind::TransformerLensZero,
            (_, Some(("mean", path))) => ReplacementKind::Mean(ReplacementTexts::File(path.into())),
            (_, Some(("sample", path))) => ReplacementKind::Sample(ReplacementTexts::File(path.into())),
            _ => {
                return Err(format!(
                    "expected raw-zero, transformer-lens-zero, mean:FILE or sample:FILE, found {text:?}"
                ));
            }
        };
        Ok(Self { kind, name: text.to_owned() })
    }
}

/// JSON form of a replacement: a string, or the kind with its texts.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected a string such as \"raw-zero\", or (\"mean\", texts) or (\"sample\", text)"
)]
enum JsonReplacement {
    Short(String),
    Sample(SampleTag, Text),
    Mean(MeanTag, Vec<Text>),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum SampleTag {
    Sample,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum MeanTag {
    Mean,
}

impl TryFrom<JsonReplacement> for Replacement {
    type Error = String;

    fn try_from(written: JsonReplacement) -> std::result::Result<Self, String> {
        match written {
            JsonReplacement::Short(text) => {
                let or = "; for your own texts, use (\"mean\", texts) or (\"sample\", text)";
                text.parse().map_err(|error| format!("{error}{or}"))
            }
            JsonReplacement::Sample(SampleTag::Sample, text) => Ok(Self::sample(text)),
            JsonReplacement::Mean(MeanTag::Mean, texts) => Ok(Self::mean(texts)),
        }
    }
}

impl ReplacementTexts {
    /// Source of the texts, for error messages.
    fn origin(&self) -> String {
        match self {
            Self::Texts(_) => "`with`".into(),
            Self::File(path) => path.display().to_string(),
        }
    }

    fn tokens(&self, reader: &Reader) -> Result<Vec<Vec<u32>>> {
        match self {
            Self::Texts(texts) => {
                let read = texts.iter().map(|text| reader.text(text)).collect::<Result<_>>();
                read.map_err(|error| LookError::In { origin: self.origin(), error: Box::new(error) })
            }
            Self::File(path) => {
                let file = TextFile::read(path)?;
                let mut all = Vec::new();
                for line in (0..file.len()).filter(|line| !file.is_blank(*line)) {
                    all.extend(file.sequences(line, reader)?);
                }
                if all.is_empty() {
                    return Err(invalid_option(format!(
                        "{}: the file contains no texts; expected one per line",
                        self.origin()
                    )));
                }
                Ok(all)
            }
        }
    }
}

/// Validated options of an ablation.
///
/// Returned by [`Ablate`]'s `check`.
#[derive(Debug)]
pub struct CheckedAblate {
    metric: CheckedMetric,
    heads: Option<Heads>,
    at: Option<usize>,
    ablation: Ablation,
}

impl Look for Ablate {
    type Checked = CheckedAblate;

    fn check(&self, reader: &Reader) -> Result<CheckedAblate> {
        if self.at.is_some() && self.heads.is_none() {
            return Err(invalid_option("`at` requires `heads`"));
        }
        let metric = CheckedMetric::read(reader, &self.text, &self.metric)?;
        let tokens = metric.ids.len();
        let heads = self.heads.as_ref().map(|heads| reader.heads(heads)).transpose()?;
        let at = self.at.map(|at| reader.position("at", at, tokens)).transpose()?;
        let ablation = self.with.ablation(reader, tokens)?;
        Ok(CheckedAblate { metric, heads, at, ablation })
    }

    fn look(
        &self,
        checked: CheckedAblate,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis> {
        let CheckedAblate { metric: CheckedMetric { ids, prediction }, heads, at, ablation } = checked;
        let run = subject.run(&ids)?;
        let metric = prediction.metric(&run)?;
        let before = metric.of_run(&run, &mut Chain(Vec::new()))?;
        let name = subject.metric_name(&metric);
        let mut report = subject.report("ablate", format!("{name} without each head"), &ids);
        report.notes.push(format!("replacement for a head's output: {}", self.with.name));
        let mut report_metric = ReportMetric { name: name.clone(), before: f64::from(before), after: None };
        if let Some(heads) = heads {
            let (logits, has_changed) = ablated(&run, &heads.0, at, &ablation)?;
            let after: f32 = metric.of(&logits.narrow(1, metric.position, 1)?)?.squeeze(0)?.to_scalar()?;
            report_metric.after = Some(f64::from(after));
            report.title = format!("{name} without {heads}");
            if !has_changed {
                report.notes.push("warning: the replacement equals the original; nothing changed".into());
            }
            // Increase in each token's loss.
            let plain = losses(&run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()))?, &ids)?;
            let changed = losses(&logits, &ids)?;
            report.axes = vec![Axis::tokens("token", &report.tokens)];
            let change = changed.iter().zip(&plain).map(|(after, before)| Some(rounded(after - before)));
            report.values = std::iter::once(None).chain(change).collect();
            report.notes.push("values: change of each token's loss, in nats".into());
        } else {
            let bar = reporter.start("ablating", subject.config().n_layer as u64, Unit::Items("layers"));
            let grid = ablation_grid(&run, &metric, &ablation, &|| bar.advance(1))?;
            drop(bar);
            report.axes = vec![subject.layer_axis(), subject.head_axis()];
            report.values = grid.values.iter().flatten().map(|value| Some(value - before)).collect();
            report.notes.push("values: the metric without the head minus the metric with it".into());
            warn_of_unchanged(&mut report, &grid);
        }
        report.metric = Some(report_metric);
        Ok(Analysis::new(report, Value::Null))
    }
}

/// Computes the loss on each token except the first, in nats, from logits `(1, T, V)`.
fn losses(logits: &Tensor, ids: &[u32]) -> Result<Vec<f64>> {
    let rows = logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let loss = |(id, row): (&u32, &Vec<f32>)| {
        // Log-sum-exp, because probabilities of very unlikely tokens are 0 in f32.
        let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = row.iter().map(|logit| libm::exp(f64::from(*logit) - largest)).sum();
        largest + libm::log(sum) - f64::from(row[*id as usize])
    };
    Ok(ids.iter().skip(1).zip(&rows).map(loss).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "report values are f32")]
fn rounded(value: f64) -> f32 {
    value as f32
}
