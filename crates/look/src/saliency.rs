//! Importance of each token in a text for a prediction, computed from gradients.

use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{Saliency as SaliencyMethod, token_weights};
use candle_gpt2_pictures::{Axis, Metric as ReportMetric, Scale};
use serde::Deserialize;
use serde_json::json;

use crate::error::{Result, invalid_option};
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{Analysis, CheckedMetric, Look, LookSubject, Method, MetricOptions, Reader, Text, TokenChoice};

/// Maximum number of steps for integrated gradients.
const MOST_STEPS: usize = 1000;

/// Saliency from gradients with respect to the token embeddings.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Look, Method, Reader, Saliency, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let text = Text::Words("One day, Mia was".into());
/// let saliency = Saliency { method: Method::InputTimesGradient, ..Saliency::new(text) };
/// let found = saliency.at(&subject, &Silent)?;
/// assert_eq!(found.report.values.len(), found.report.tokens.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Saliency {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Attribution method
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "METHOD", default_value = "integrated", value_parser = choices::<Method>()))]
    pub method: Method,
    /// Number of steps for --method integrated
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Saliency::default().steps))]
    pub steps: usize,
    /// Baseline for --method integrated: text that encodes to a single token, or #ID
    /// [default: the configuration's bos_token_id]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub baseline: Option<TokenChoice>,
}

impl Default for Saliency {
    fn default() -> Self {
        let (metric, method) = (MetricOptions::default(), Method::default());
        Self { text: Text::default(), metric, method, steps: 50, baseline: None }
    }
}

impl Saliency {
    /// Creates options for integrated gradients with 50 steps.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

impl Look for Saliency {
    /// Text with its metric, and the attribution method.
    type Checked = (CheckedMetric, SaliencyMethod);

    fn check(&self, reader: &Reader) -> Result<Self::Checked> {
        let metric = CheckedMetric::read(reader, &self.text, &self.metric)?;
        let baseline = self.baseline.as_ref().map(|token| reader.token("baseline", token)).transpose()?;
        let saliency = match self.method {
            Method::Gradient => SaliencyMethod::Gradient,
            Method::InputTimesGradient => SaliencyMethod::InputTimesGradient,
            Method::Integrated => {
                let steps = self.steps;
                if !(1..=MOST_STEPS).contains(&steps) {
                    return Err(invalid_option(format!(
                        "`steps`: expected a number from 1 to {MOST_STEPS}, found {steps}"
                    )));
                }
                let Some(baseline) = baseline.or_else(|| reader.config().start_token()) else {
                    return Err(invalid_option(
                        "the model's configuration has no valid bos_token_id; pass `baseline` TEXT",
                    ));
                };
                SaliencyMethod::Integrated { steps, baseline }
            }
        };
        Ok((metric, saliency))
    }

    fn look(
        &self,
        (CheckedMetric { ids, prediction }, saliency): Self::Checked,
        subject: &LookSubject,
        _: &dyn Reporter,
    ) -> Result<Analysis> {
        let run = subject.run(&ids)?;
        let metric = prediction.metric(&run)?;
        let found = token_weights(&run, &metric, saliency)?;
        let name = subject.metric_name(&metric);
        let mut report =
            subject.report("saliency", format!("how much each token matters for the {name}"), &ids);
        report.axes = vec![Axis::tokens("token", &report.tokens)];
        let total: f32 = found.norms.iter().sum();
        report.values =
            found.norms.iter().map(|norm| Some(if total > 0.0 { norm / total } else { 0.0 })).collect();
        report.scale = Scale::Amount;
        report.metric = Some(ReportMetric { name, before: f64::from(found.values.0), after: None });
        if let SaliencyMethod::Integrated { steps, baseline } = saliency {
            let sum: f32 = found.sums.iter().sum();
            let difference = found.values.0 - found.values.1.unwrap_or_default();
            report.notes.push(format!(
                "{steps} steps from {:?}; the signed sums add up to {sum:.4}, and the metric differs by \
                 {difference:.4}",
                subject.printable(baseline)
            ));
        }
        Ok(Analysis::new(report, json!({ "sums": found.sums, "norms": found.norms })))
    }
}
