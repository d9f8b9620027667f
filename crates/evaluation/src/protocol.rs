//! Protocols; a protocol's name determines the scored text, the windows, and the result's divisor.

use serde::Serialize;

use crate::{Data, EvaluationError, ExampleSource, ItemResult, Metric, Prepared, Published, Setting, Totals};

/// A measurement method, defined by data and two functions.
///
/// ```
/// use candle_gpt2_evaluation::named;
///
/// let (protocol, _) = named("lambada:lm-eval")?;
/// assert_eq!(protocol.task(), "lambada");
/// assert_eq!(protocol.dataset.license, "MIT");
/// assert!(protocol.published.iter().all(|figure| figure.value > 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// Name, such as `lambada:lm-eval`; a final `N` stands for a parameter, as in `wikitext:hf-N`.
    pub name: &'static str,
    /// One-line description.
    pub about: &'static str,
    /// Source of the protocol's formulas.
    pub source: &'static str,
    /// Published data.
    pub dataset: Dataset,
    /// Results published for this protocol, and the paper's results on the same data.
    pub published: &'static [Published],
    /// Number at the end of the name: its default and its meaning.
    pub parameter: Option<Parameter>,
    /// Source of few-shot examples; `None` if the protocol does not support them.
    pub few_shot: Option<ExampleSource>,
    /// Builds items from the data.
    pub prepare: fn(&Data, &Setting<'_>) -> Result<Prepared, EvaluationError>,
    /// Computes metrics from the results, which are in item order.
    pub measure: fn(&Totals, &[ItemResult]) -> Vec<Metric>,
}

/// Number at the end of a protocol's name.
///
/// A field of [`Protocol`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Parameter {
    /// Default; `None` if the number is required or derived from the model.
    pub default: Option<usize>,
    /// Meaning of the number.
    pub about: &'static str,
}

/// Location of the published data.
///
/// ```
/// use candle_gpt2_evaluation::named;
///
/// let (protocol, _) = named("text:bits")?;
/// assert_eq!(protocol.dataset.hub, None, "the caller supplies any text");
/// assert_eq!(protocol.dataset.is_published(None, "0123"), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Dataset {
    /// Name of the dataset.
    pub name: &'static str,
    /// `owner/name[@revision]/path` on the Hub; `None` if the caller supplies any text.
    pub hub: Option<&'static str>,
    /// SHA-256 of the files that hold the published data, in lowercase hexadecimal.
    pub sha256: &'static [&'static str],
    /// License of the dataset.
    pub license: &'static str,
}

impl Dataset {
    /// Whether the data is the published data, judging by Hub path or SHA-256; `None` if unknown.
    ///
    /// Data from another source is compared by SHA-256, if the published SHA-256 is known.
    pub fn is_published(&self, hub: Option<&str>, sha256: &str) -> Option<bool> {
        let is_of_hub = hub.is_some() && self.hub == hub;
        let is_known = is_of_hub || self.sha256.contains(&sha256);
        (is_known || !self.sha256.is_empty()).then_some(is_known)
    }
}

impl Protocol {
    /// Returns the task: the part of the name before the colon.
    pub fn task(&self) -> &'static str {
        self.name.split(':').next().unwrap_or(self.name)
    }

    /// Returns the name without its placeholder for a number.
    pub(crate) fn stem(&self) -> &'static str {
        self.name.strip_suffix(PLACE_OF_NUMBER).unwrap_or(self.name)
    }
}

/// Placeholder in a name for a required number.
pub(crate) const PLACE_OF_NUMBER: &str = "-N";
