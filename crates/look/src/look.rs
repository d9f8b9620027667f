//! Trait for all analyses: options are validated without the weights, and the result is a report.

use std::sync::Arc;

use candle_core::DType;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor};
use candle_gpt2_engine::{EngineError, LoadedModel, Reporter, Vocabulary};
use candle_gpt2_generation::GenerationError;
use candle_gpt2_interpret::{Chain, Measure, Metric, Run};
use candle_gpt2_pictures::{Axis, Report, Token};

use crate::error::Result;
use crate::{Analysis, Reader};

/// An analysis of a model, with its options as fields.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Look, Reader, Saliency, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let saliency = Saliency::new(Text::Words("One day, Mia was".into()));
/// let found = saliency.at(&subject, &Silent)?; // `check` and `look` in one
/// assert_eq!(found.report.values.len(), found.report.tokens.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Look {
    /// Validated text and options.
    type Checked;

    /// Validates the text and the options without the model's weights.
    ///
    /// # Errors
    /// If the text or an option does not fit the model, or a named file cannot be used.
    fn check(&self, reader: &Reader) -> Result<Self::Checked>;

    /// Runs the analysis.
    ///
    /// `checked` must come from the subject's reader.
    ///
    /// # Errors
    /// If the analysis is impossible for this input, or the model fails.
    fn look(
        &self,
        checked: Self::Checked,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis>;

    /// Validates the options and runs the analysis.
    ///
    /// # Errors
    /// Errors from [`Look::check`] and [`Look::look`].
    fn at(&self, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Analysis> {
        self.look(self.check(subject.reader())?, subject, reporter)
    }
}

/// A loaded model to analyze.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, LookSubject};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let reader = Reader::without_bos(model.vocabulary());
/// let subject = LookSubject::new(&model, "the built-in model".into(), &reader);
/// assert_eq!(subject.name(), "the built-in model");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LookSubject<'a> {
    loaded: &'a LoadedModel,
    name: String,
    reader: &'a Reader,
}

impl<'a> LookSubject<'a> {
    /// Creates a subject from a model, its display name and a reader for texts.
    pub fn new(loaded: &'a LoadedModel, name: String, reader: &'a Reader) -> Self {
        Self { loaded, name, reader }
    }

    /// Reader that encodes and validates texts.
    pub fn reader(&self) -> &Reader {
        self.reader
    }

    /// Display name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn loaded(&self) -> &LoadedModel {
        self.loaded
    }

    pub(crate) fn model(&self) -> &Gpt2LMHeadModel {
        self.loaded.model()
    }

    pub(crate) fn config(&self) -> &Gpt2Config {
        self.loaded.config()
    }

    pub(crate) fn vocabulary(&self) -> &Arc<Vocabulary> {
        self.loaded.vocabulary()
    }

    /// Prepares a run on tokens, and checks that the last token's logits are finite.
    ///
    /// Every view would misrepresent a model with non-finite logits.
    pub(crate) fn run<'b>(&'b self, ids: &'b [u32]) -> Result<Run<'b>> {
        let run = Run::new(self.model(), ids)?;
        let logits = run.logits(LogitsFor::LastToken, &mut Chain(Vec::new()))?;
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(run),
            false => Err(EngineError::from(GenerationError::NotFinite).into()),
        }
    }

    /// Printable form of a token.
    pub(crate) fn printable(&self, id: u32) -> String {
        self.reader.printable(id)
    }

    /// Raw text of a token, for programs.
    pub(crate) fn token_text(&self, id: u32) -> String {
        self.reader.token_text(id)
    }

    pub(crate) fn tokens(&self, ids: &[u32]) -> Vec<Token> {
        self.reader.listed(ids)
    }

    pub(crate) fn has_bos(&self) -> bool {
        self.reader.bos().is_some()
    }

    /// Creates a report without values.
    pub(crate) fn report(&self, what: &str, title: impl Into<String>, ids: &[u32]) -> Report {
        self.reader.report(what, title.into(), &self.name, ids)
    }

    /// Describes a metric in words.
    pub(crate) fn metric_name(&self, metric: &Metric) -> String {
        let measure = match metric.measure {
            Measure::Logit => "logit",
            Measure::LogProbability => "log probability",
            Measure::Probability => "probability",
        };
        let name = match metric.against {
            Some(against) => {
                let [answer, against] = [metric.answer, against].map(|id| self.printable(id));
                format!("{measure} difference ({answer:?} − {against:?})")
            }
            None => format!("{measure} of {:?}", self.printable(metric.answer)),
        };
        format!("{name} at position {}", metric.position)
    }

    /// States whether a BOS token precedes every text, for tables that do not list tokens.
    pub(crate) fn in_front(&self) -> &'static str {
        if self.has_bos() { "with a BOS token" } else { "without a BOS token" }
    }

    /// Axis of all heads in a layer.
    pub(crate) fn head_axis(&self) -> Axis {
        Axis::numbers("head", 0..self.config().n_head)
    }

    /// Axis of all layers.
    pub(crate) fn layer_axis(&self) -> Axis {
        Axis::numbers("layer", 0..self.config().n_layer)
    }
}
