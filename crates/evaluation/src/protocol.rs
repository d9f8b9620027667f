//! Protocols: a name fixes which text is scored, in what pieces, and what the result is divided by.

use crate::{Data, EvaluationError, ItemResult, Metric, Prepared, Published, Setting, Totals};

/// A way to measure, as data and two functions.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// Its name, as `lambada:lm-eval`; with `N` at its end where a number stands there, as `wikitext:hf-N`.
    pub name: &'static str,
    /// What it measures, in a line.
    pub about: &'static str,
    /// Where its arithmetic comes from.
    pub source: &'static str,
    /// The published data.
    pub dataset: Dataset,
    /// What others measured by it, and what the paper says of the same data.
    pub published: &'static [Published],
    /// The number at the end of its name where none is given, and what it says.
    pub parameter: Option<Parameter>,
    /// Makes items of the data.
    pub prepare: fn(&Data, &Setting<'_>) -> Result<Prepared, EvaluationError>,
    /// Makes metrics of what the model said; the results are in the order of the items.
    pub measure: fn(&Totals, &[ItemResult]) -> Vec<Metric>,
}

/// The number at the end of a protocol's name.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// What it is where the name has none; `None` where it must be given or follows from the model.
    pub default: Option<usize>,
    /// What it says.
    pub about: &'static str,
}

/// Where the published data are.
#[derive(Debug, Clone, Copy)]
pub struct Dataset {
    /// What it is called.
    pub name: &'static str,
    /// `owner/name[@revision]/path` on the hub; `None` for any text of the caller's.
    pub hub: Option<&'static str>,
    /// SHA-256 of the files that are the published data, in lower-case hexadecimal digits.
    pub sha256: &'static [&'static str],
    /// Its licence.
    pub licence: &'static str,
}

impl Dataset {
    /// Whether data are the published ones: by their path on the hub where they come from there, or by their SHA-256 where the
    /// published one is known.
    pub fn knows(&self, hub: Option<&str>, sha256: &str) -> Option<bool> {
        let is_of_hub = hub.is_some() && self.hub == hub;
        let is_known = is_of_hub || self.sha256.contains(&sha256);
        (is_known || !self.sha256.is_empty()).then_some(is_known)
    }
}

impl Protocol {
    /// The task: what stands before the colon.
    pub fn task(&self) -> &'static str {
        self.name.split(':').next().unwrap_or(self.name)
    }

    /// Its name without the place of a number.
    fn stem(&self) -> &'static str {
        self.name.strip_suffix(PLACE_OF_NUMBER).unwrap_or(self.name)
    }
}

/// What stands in a name where a number must be given.
const PLACE_OF_NUMBER: &str = "-N";
/// Names that are told where there is no protocol of a name.
const NEAREST_NAMES: usize = 3;

/// All protocols, those of a task one after the other.
pub fn protocols() -> &'static [&'static Protocol] {
    crate::protocols::ALL
}

/// The protocol of a name, and the number that the name ends in.
///
/// # Errors
/// When there is none, with those of the task or the nearest names; when a number is missing, or none that can be used.
pub fn named(name: &str) -> Result<(&'static Protocol, Option<usize>), EvaluationError> {
    let of_name = |protocol: &&&Protocol| protocol.name == name && !name.ends_with(PLACE_OF_NUMBER);
    if let Some(protocol) = protocols().iter().find(of_name) {
        return Ok((protocol, None));
    }
    let with_number =
        protocols().iter().filter(|protocol| protocol.parameter.is_some()).find_map(|protocol| {
            let rest = name.strip_prefix(protocol.stem())?;
            (rest.is_empty() || rest.starts_with('-'))
                .then(|| (protocol, rest.strip_prefix('-').unwrap_or(rest)))
        });
    let Some((protocol, digits)) = with_number else { return Err(unknown(name)) };
    match digits.parse() {
        Ok(number) if number > 0 && digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            Ok((protocol, Some(number)))
        }
        _ => Err(EvaluationError::Setting {
            what: protocol.name.to_owned(),
            expected: format!("a number of tokens at the end of its name, as `{}-512`", protocol.stem()),
            found: format!("`{name}`"),
        }),
    }
}

/// That there is no protocol of this name, with those of the task where it is one, or the nearest names.
fn unknown(name: &str) -> EvaluationError {
    let quoted = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let task = name.split(':').next().unwrap_or(name);
    let of_task: Vec<&str> =
        protocols().iter().filter(|protocol| protocol.task() == task).map(|protocol| protocol.name).collect();
    let hint = if of_task.is_empty() {
        let mut names: Vec<&str> = protocols().iter().map(|protocol| protocol.name).collect();
        // A name alone is near a task's; a whole one is near a protocol's.
        let distance = |known: &str| {
            let task = known.split(':').next().unwrap_or(known);
            strsim::damerau_levenshtein(name, known).min(strsim::damerau_levenshtein(name, task))
        };
        names.sort_by_key(|known| distance(known));
        format!("the nearest are {}", quoted(&names[..NEAREST_NAMES.min(names.len())]))
    } else if task == name {
        format!("a number means something by its protocol only: name one of {}", quoted(&of_task))
    } else {
        format!("`{task}` has {}", quoted(&of_task))
    };
    EvaluationError::UnknownProtocol { name: name.to_owned(), hint }
}
