//! The interface of every analysis: options that are checked before the weights are needed, and a report.

use std::sync::Arc;

use candle_core::DType;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor};
use candle_gpt2_engine::{EngineError, LoadedModel, Reporter, Vocabulary};
use candle_gpt2_generation::GenerationError;
use candle_gpt2_interpret::{Chain, Measure, Metric, Run};
use candle_gpt2_pictures::{Axis, Report, Token};

use crate::error::Result;
use crate::{Found, Reader};

/// One way to look into a model: its options.
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
    /// What is known once text and options are read.
    type Checked;

    /// Reads and checks what can be without the weights of the model.
    ///
    /// # Errors
    /// When the text or an option does not fit the model, or a file that is named cannot be used.
    fn check(&self, reader: &Reader) -> Result<Self::Checked>;

    /// Looks. `checked` is of the reader of the subject.
    ///
    /// # Errors
    /// When the question cannot be answered, and those of the model.
    fn look(&self, checked: Self::Checked, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Found>;

    /// Checks and looks.
    ///
    /// # Errors
    /// Those of both.
    fn at(&self, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Found> {
        self.look(self.check(subject.reader())?, subject, reporter)
    }
}

/// A model in memory that is looked into.
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
    /// A model, what its user calls it, and what reads the texts.
    pub fn new(loaded: &'a LoadedModel, name: String, reader: &'a Reader) -> Self {
        Self { loaded, name, reader }
    }

    /// What reads the texts.
    pub fn reader(&self) -> &Reader {
        self.reader
    }

    /// What its user calls it.
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

    /// Runs the model on tokens. Rejects models without finite logits, which every view would misrepresent.
    pub(crate) fn run<'b>(&'b self, ids: &'b [u32]) -> Result<Run<'b>> {
        let run = Run::new(self.model(), ids)?;
        let logits = run.logits(LogitsFor::LastToken, &mut Chain(Vec::new()))?;
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(run),
            false => Err(EngineError::from(GenerationError::NotFinite).into()),
        }
    }

    /// A token as it is shown.
    pub(crate) fn shown(&self, id: u32) -> String {
        self.reader.shown(id)
    }

    /// A token as it is, for programs.
    pub(crate) fn token_text(&self, id: u32) -> String {
        self.reader.token_text(id)
    }

    pub(crate) fn tokens(&self, ids: &[u32]) -> Vec<Token> {
        self.reader.listed(ids)
    }

    pub(crate) fn has_bos(&self) -> bool {
        self.reader.bos().is_some()
    }

    /// A report without its values.
    pub(crate) fn report(&self, what: &str, title: impl Into<String>, ids: &[u32]) -> Report {
        self.reader.report(what, title.into(), &self.name, ids)
    }

    /// What a metric is, in words.
    pub(crate) fn metric_name(&self, metric: &Metric) -> String {
        let measure = match metric.measure {
            Measure::Logit => "logit",
            Measure::LogProbability => "log probability",
            Measure::Probability => "probability",
        };
        let name = match metric.against {
            Some(against) => {
                let [answer, against] = [metric.answer, against].map(|id| self.shown(id));
                format!("{measure} difference ({answer:?} − {against:?})")
            }
            None => format!("{measure} of {:?}", self.shown(metric.answer)),
        };
        format!("{name} at position {}", metric.position)
    }

    /// Whether a BOS token precedes every text, in words: for looks whose tables list no tokens.
    pub(crate) fn in_front(&self) -> &'static str {
        if self.has_bos() { "with a BOS token" } else { "without a BOS token" }
    }

    /// The axis of all heads of a layer.
    pub(crate) fn head_axis(&self) -> Axis {
        Axis::numbers("head", 0..self.config().n_head)
    }

    /// The axis of all layers.
    pub(crate) fn layer_axis(&self) -> Axis {
        Axis::numbers("layer", 0..self.config().n_layer)
    }
}
