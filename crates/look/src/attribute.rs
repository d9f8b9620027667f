//! Direct logit attribution: what each part of the model adds to a prediction.

use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{Chain, Measure, Unit, attribute};
use candle_gpt2_pictures::{Axis, Metric as ReportMetric};
use serde::Deserialize;
use serde_json::json;

use crate::error::{Result, invalid_option};
use crate::metric::logits_and_mean;
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{Analysis, CheckedMetric, Look, LookSubject, MetricOptions, Numbers, Parts, Reader, Text};

/// Contribution of each part of the residual stream to a logit or a logit difference.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Attribute, Look, Parts, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let text = Text::Words("One day, Mia was".into());
/// let attribute = Attribute { unit: Parts::Head, ..Attribute::new(text) };
/// let found = attribute.at(&subject, &Silent)?;
/// assert!(found.report.values.len() >= 6 * 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Attribute {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Parts to attribute the prediction to
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "UNIT", default_value = "component", value_parser = choices::<Parts>()))]
    pub unit: Parts,
    /// With --unit head: contributions as in the checkpoint, or as in TransformerLens' compatibility
    /// mode, which moves the contribution of constant values into the remainder
    #[serde(rename = "as", deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long = "as", value_name = "NUMBERS", default_value = "raw", value_parser = choices::<Numbers>()))]
    pub numbers: Numbers,
    /// With --unit neuron: show only the N strongest parts
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Attribute::default().top))]
    pub top: usize,
}

impl Default for Attribute {
    fn default() -> Self {
        let (metric, unit, numbers) = (MetricOptions::default(), Parts::default(), Numbers::default());
        Self { text: Text::default(), metric, unit, numbers, top: 40 }
    }
}

impl Attribute {
    /// Creates options that attribute a text's prediction to components.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

impl Look for Attribute {
    type Checked = CheckedMetric;

    fn check(&self, reader: &Reader) -> Result<CheckedMetric> {
        if self.metric.measure != Measure::Logit {
            return Err(invalid_option(
                "`measure`: parts of the residual stream add up to logits, not to probabilities; use \
                 `measure` logit",
            ));
        }
        CheckedMetric::read(reader, &self.text, &self.metric)
    }

    fn look(&self, checked: CheckedMetric, subject: &LookSubject, _: &dyn Reporter) -> Result<Analysis> {
        let CheckedMetric { ids, prediction } = checked;
        let run = subject.run(&ids)?;
        let metric = prediction.metric(&run)?;
        let unit = match self.unit {
            Parts::Component => Unit::Component,
            Parts::Layer => Unit::Layer,
            Parts::Head if self.numbers == Numbers::TransformerLens => Unit::TransformerLensHead,
            Parts::Head => Unit::Head,
            Parts::Neuron => Unit::Neuron,
        };
        let found = attribute(&run, &metric, unit)?;
        let mut name = subject.metric_name(&metric);
        if metric.against.is_none() {
            name += ", minus the mean of all logits";
        }
        let mut report = subject.report("attribute", format!("what each part adds to the {name}"), &ids);
        report.metric = Some(ReportMetric { name, before: f64::from(found.total), after: None });
        let sum: f32 = found.values.iter().sum();
        report.notes.push(match unit {
            Unit::Layer => {
                format!("norm statistics of the whole run; the final norm's bias adds {:.4}", found.bias)
            }
            _ => format!(
                "norm statistics of the whole run; parts {sum:.4} and the final norm's bias {:.4} add up to {:.4}",
                found.bias, found.total
            ),
        });
        let mut details = json!({ "bias": found.bias, "total": found.total });
        if metric.against.is_none() {
            let (logits, mean) = logits_and_mean(&run, metric.logits_for(), Chain(Vec::new()))?;
            let logit = logits[metric.answer as usize];
            report.notes.push(format!("the logit is {logit:.4}; the mean of all logits is {mean:.4}"));
            details["logit"] = json!(logit);
            details["mean_logit"] = json!(mean);
        }
        let (heads, layers) = (subject.config().n_head, subject.config().n_layer);
        match unit {
            Unit::Head | Unit::TransformerLensHead => {
                report.axes = vec![subject.layer_axis(), subject.head_axis()];
                report.values = found.values[..layers * heads].iter().copied().map(Some).collect();
                report.notes.push(format!("everything but the heads: {:.4}", found.values[layers * heads]));
            }
            Unit::Neuron => {
                let mut order: Vec<usize> = (0..found.values.len()).collect();
                order.sort_by(|a, b| found.values[*b].abs().total_cmp(&found.values[*a].abs()));
                order.truncate(self.top.max(1));
                report.axes = vec![Axis::new("part", order.iter().map(|index| found.labels[*index].clone()))];
                report.values = order.iter().map(|index| Some(found.values[*index])).collect();
                report.notes.push(format!("the {} strongest of {} parts", order.len(), found.values.len()));
            }
            Unit::Component | Unit::Layer => {
                report.axes = vec![Axis::new("part", found.labels.clone())];
                report.values = found.values.iter().copied().map(Some).collect();
            }
        }
        Ok(Analysis::new(report, details))
    }
}
