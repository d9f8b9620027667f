//! List of protocols, with their sources, their data and published results.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::protocols::KL;
use crate::{Dataset, Parameter, Protocol, Published, protocols};

/// An entry in the list of protocols.
///
/// ```
/// let listing = candle_gpt2_evaluation::listing();
/// let lambada = listing.iter().find(|entry| entry.protocol == "lambada:lm-eval").ok_or("not in the list")?;
/// assert!(lambada.to_string().starts_with("lambada:lm-eval: "));
/// assert!(!lambada.published.is_empty());
/// assert_eq!(listing.last().map(|entry| entry.protocol), Some("kl"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProtocolEntry {
    /// Name; see [`Protocol::name`].
    pub protocol: &'static str,
    /// One-line description.
    pub about: &'static str,
    /// Source of the protocol's formulas.
    pub source: &'static str,
    /// Number at the end of the protocol's name, if any.
    pub parameter: Option<Parameter>,
    /// Published data; `None` for `kl`, which accepts any text.
    pub dataset: Option<Dataset>,
    /// Published results.
    pub published: &'static [Published],
}

/// Returns all protocols, grouped by task, followed by `kl`.
///
/// See [`ProtocolEntry`] for an example.
pub fn listing() -> Vec<ProtocolEntry> {
    let kl = ProtocolEntry { dataset: None, ..ProtocolEntry::of(&KL) };
    protocols().iter().map(|protocol| ProtocolEntry::of(protocol)).chain([kl]).collect()
}

impl ProtocolEntry {
    fn of(protocol: &Protocol) -> Self {
        let Protocol { name, about, source, dataset, published, parameter, .. } = *protocol;
        Self { protocol: name, about, source, parameter, dataset: Some(dataset), published }
    }
}

impl Display for ProtocolEntry {
    /// Writes one line with the name and description, followed by indented details.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { protocol, about, source, parameter, dataset, published } = self;
        write!(f, "{protocol}: {about}")?;
        match parameter {
            None => Ok(()),
            Some(Parameter { default: Some(default), about }) => {
                write!(f, "\n    number: {about} [default: {default}]")
            }
            Some(Parameter { default: None, about }) => write!(f, "\n    number: {about}"),
        }?;
        write!(f, "\n    source: {source}")?;
        match dataset {
            None => f.write_str("\n    data: any text"),
            Some(Dataset { name, hub: None, .. }) => write!(f, "\n    data: {name}"),
            Some(Dataset { name, hub: Some(hub), license, .. }) => {
                write!(f, "\n    data: {name}, {hub}, {license}")
            }
        }?;
        for Published { model, metric, value, source, protocol, exact } in *published {
            let other = if *exact { String::new() } else { format!("; protocol {protocol}") };
            write!(f, "\n    published: {metric} {value} of {} ({source}{other})", model.name())?;
        }
        Ok(())
    }
}
