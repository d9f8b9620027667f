//! Gradients of a prediction at hook points, and at the latents of dictionaries.

use candle_gpt2::{Observer, Site};
use candle_gpt2_interpret::{Dictionary, Gradients, Splice, gradients_under};
use serde::Deserialize;

use crate::error::Result;
use crate::{CheckedMetric, LookSubject, MetricOptions, Reader, Text};

/// Gradients of a prediction.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_interpret::{Chain, named_sites};
/// use candle_gpt2_look::{LookSubject, PredictionGradients, Reader, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let wanted = PredictionGradients { text: Text::Ids(vec![5, 6, 7]), ..PredictionGradients::default() };
/// let sites = named_sites("resid_post2", 6)?;
/// let found = wanted.found(&wanted.check(&reader)?, &subject, &sites, &[], &mut Chain(Vec::new()))?;
/// assert_eq!(found.sites[&sites[0]].gradient.dims(), [1, 3, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PredictionGradients {
    /// Text to analyze.
    pub text: Text,
    /// Prediction to measure; the default answer is the most probable token of the unedited run.
    #[serde(flatten)]
    pub metric: MetricOptions,
    /// Whether to omit the dictionaries' reconstruction errors instead of adding them back.
    #[serde(skip)]
    pub without_error: bool,
}

impl PredictionGradients {
    /// Validates the text and the options without the model's weights.
    ///
    /// # Errors
    /// If the text or an option does not fit the model.
    pub fn check(&self, reader: &Reader) -> Result<CheckedMetric> {
        CheckedMetric::read(reader, &self.text, &self.metric)
    }

    /// Runs the model with edits and spliced dictionaries, and computes the gradients.
    ///
    /// # Errors
    /// If the prediction does not depend on a hook point, or the model fails.
    pub fn found(
        &self,
        CheckedMetric { ids, prediction }: &CheckedMetric,
        subject: &LookSubject,
        sites: &[Site],
        dictionaries: &[Dictionary],
        edits: &mut dyn Observer,
    ) -> Result<Gradients> {
        let run = subject.run(ids)?;
        let metric = prediction.metric(&run)?;
        let splice = |dictionary| {
            let splice = Splice::new(subject.model(), dictionary)?;
            Ok::<_, candle_core::Error>(if self.without_error { splice } else { splice.with_error() })
        };
        let mut splices = dictionaries.iter().map(splice).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(gradients_under(&run, &metric, sites, &mut splices, edits)?)
    }
}
