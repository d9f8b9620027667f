//! Protocols: a name fixes which text is scored, in what pieces, and what the result is divided by.

use serde::Serialize;

use crate::{Data, EvaluationError, ExampleSource, ItemResult, Metric, Prepared, Published, Setting, Totals};

/// A way to measure, as data and two functions.
///
/// ```
/// use candle_gpt2_evaluation::named;
///
/// let (protocol, _) = named("lambada:lm-eval")?;
/// assert_eq!(protocol.task(), "lambada");
/// assert_eq!(protocol.dataset.licence, "MIT");
/// assert!(protocol.published.iter().all(|figure| figure.value > 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// Its name, as `lambada:lm-eval`; with `N` at its end in place of a number, as `wikitext:hf-N`.
    pub name: &'static str,
    /// What it measures, in a line.
    pub about: &'static str,
    /// Where its arithmetic comes from.
    pub source: &'static str,
    /// The published data.
    pub dataset: Dataset,
    /// What others measured by it, and what the paper says of the same data.
    pub published: &'static [Published],
    /// The number at the end of its name if none is given, and what it says.
    pub parameter: Option<Parameter>,
    /// Where examples before a question come from; `None` if no question can have any.
    pub few_shot: Option<ExampleSource>,
    /// Makes items of the data.
    pub prepare: fn(&Data, &Setting<'_>) -> Result<Prepared, EvaluationError>,
    /// Makes metrics of what the model said; the results are in the order of the items.
    pub measure: fn(&Totals, &[ItemResult]) -> Vec<Metric>,
}

/// The number at the end of a protocol's name.
///
/// A field of a [`Protocol`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Parameter {
    /// What it is if the name has none; `None` if it must be given or follows from the model.
    pub default: Option<usize>,
    /// What it says.
    pub about: &'static str,
}

/// Where the published data are.
///
/// ```
/// use candle_gpt2_evaluation::named;
///
/// let (protocol, _) = named("text:bits")?;
/// assert_eq!(protocol.dataset.hub, None, "any text of the caller's");
/// assert_eq!(protocol.dataset.knows(None, "0123"), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Dataset {
    /// What it is called.
    pub name: &'static str,
    /// `owner/name[@revision]/path` on the Hub; `None` for any text of the caller's.
    pub hub: Option<&'static str>,
    /// SHA-256 of the files that are the published data, in lower-case hexadecimal digits.
    pub sha256: &'static [&'static str],
    /// Its licence.
    pub licence: &'static str,
}

impl Dataset {
    /// Whether data are the published ones: by their path on the Hub if they come from there, or by their SHA-256 if the
    /// published one is known.
    pub fn knows(&self, hub: Option<&str>, sha256: &str) -> Option<bool> {
        let is_of_hub = hub.is_some() && self.hub == hub;
        let is_known = is_of_hub || self.sha256.contains(&sha256);
        (is_known || !self.sha256.is_empty()).then_some(is_known)
    }
}

impl Protocol {
    /// The task: the part before the colon.
    pub fn task(&self) -> &'static str {
        self.name.split(':').next().unwrap_or(self.name)
    }

    /// Its name without the place of a number.
    pub(crate) fn stem(&self) -> &'static str {
        self.name.strip_suffix(PLACE_OF_NUMBER).unwrap_or(self.name)
    }
}

/// The part of a name in whose place a number must be given.
pub(crate) const PLACE_OF_NUMBER: &str = "-N";
