//! Metrics that summarize a prediction in one number.

use candle_core::{DType, Device};
use candle_gpt2::LogitsFor;
use candle_gpt2_interpret::{Chain, Measure, Metric, Run};
use serde::Deserialize;

use crate::error::{Result, invalid_option};
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{Reader, Text, TokenChoice};

/// Prediction to measure: answer, comparison token, position and measure.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Attribute, Look, MetricOptions, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let metric = MetricOptions { answer: Some(" not".into()), against: Some(" be".into()), ..MetricOptions::default() };
/// let attribute = Attribute { metric, ..Attribute::new(Text::Words("One day, Mia was".into())) };
/// let metric = attribute.at(&subject, &Silent)?.report.metric.ok_or("no metric")?;
/// assert!(metric.name.contains("not"), "{}", metric.name);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct MetricOptions {
    /// Answer: text that encodes to a single token, or #ID [default: the most probable token]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub answer: Option<TokenChoice>,
    /// Token to compare the answer with
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT", requires = "answer"))]
    pub against: Option<TokenChoice>,
    /// Position of the token that precedes the answer, counted from 0, or backward from -1
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = MetricOptions::default().position, allow_negative_numbers = true))]
    pub position: i64,
    /// Measure for the answer; with --against, the difference between the two tokens
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "MEASURE", default_value = "logit", value_parser = choices::<Measure>()))]
    pub measure: Measure,
}

impl Default for MetricOptions {
    fn default() -> Self {
        Self { answer: None, against: None, position: -1, measure: Measure::Logit }
    }
}

/// A prediction and its measure; the default answer is the most probable token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prediction {
    answer: Option<u32>,
    against: Option<u32>,
    position: usize,
    measure: Measure,
}

/// A text, and the prediction to measure.
///
/// Returned by `check` of analyses with [`MetricOptions`].
#[derive(Debug)]
pub struct CheckedMetric {
    pub(crate) ids: Vec<u32>,
    pub(crate) prediction: Prediction,
}

impl CheckedMetric {
    pub(crate) fn read(reader: &Reader, text: &Text, metric: &MetricOptions) -> Result<Self> {
        let ids = reader.text(text)?;
        let prediction = metric.read(reader, ids.len())?;
        Ok(Self { ids, prediction })
    }
}

impl MetricOptions {
    /// Validates the metric for a text of `tokens` tokens.
    pub(crate) fn read(&self, reader: &Reader, tokens: usize) -> Result<Prediction> {
        if self.against.is_some() && self.answer.is_none() {
            return Err(invalid_option("`against` requires `answer`; pass both or neither"));
        }
        let token = |option: &str, token: &Option<TokenChoice>| {
            token.as_ref().map(|token| reader.token(option, token)).transpose()
        };
        Ok(Prediction {
            answer: token("answer", &self.answer)?,
            against: token("against", &self.against)?,
            position: reader.position("position", self.position, tokens)?,
            measure: self.measure,
        })
    }
}

impl Prediction {
    /// Returns the metric; the default answer is the most probable token.
    pub(crate) fn metric(&self, run: &Run) -> Result<Metric> {
        let Self { answer, against, position, measure } = *self;
        let answer = match answer {
            Some(answer) => answer,
            None => {
                let logits_for = LogitsFor::Tokens { first: position, count: 1 };
                let logits = run.logits(logits_for, &mut Chain(Vec::new()))?;
                logits.flatten_all()?.argmax(0)?.to_scalar::<u32>()?
            }
        };
        Ok(Metric { answer, against, position, measure })
    }
}

/// Returns the logits after one token, and their mean.
pub(crate) fn logits_and_mean(
    run: &Run,
    logits_for: LogitsFor,
    mut observer: Chain,
) -> Result<(Vec<f64>, f64)> {
    let logits = run.logits(logits_for, &mut observer)?.flatten_all()?;
    // Apple GPUs do not support f64.
    let logits = logits.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    Ok((logits, mean))
}
