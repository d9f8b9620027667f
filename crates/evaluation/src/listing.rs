//! The list of protocols: where the arithmetic of each comes from, its data, and what others measured by it.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::protocols::KL;
use crate::{Dataset, Parameter, Protocol, Published, protocols};

/// A protocol in the list.
///
/// ```
/// let listing = candle_gpt2_evaluation::listing();
/// let lambada = listing.iter().find(|listed| listed.protocol == "lambada:lm-eval").ok_or("there is none")?;
/// assert!(lambada.to_string().starts_with("lambada:lm-eval: "));
/// assert!(!lambada.published.is_empty());
/// assert_eq!(listing.last().map(|listed| listed.protocol), Some("kl"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// Its name, as of [`Protocol::name`].
    pub protocol: &'static str,
    /// What it measures, in a line.
    pub about: &'static str,
    /// Where its arithmetic comes from.
    pub source: &'static str,
    /// The number at the end of its name, if it has one.
    pub parameter: Option<Parameter>,
    /// The published data; `None` of `kl`, which takes any text.
    pub dataset: Option<Dataset>,
    /// What others measured by it.
    pub published: &'static [Published],
}

/// All protocols, those of a task one after the other, and `kl`.
///
/// See [`Listed`] for an example.
pub fn listing() -> Vec<Listed> {
    let kl = Listed { dataset: None, ..Listed::of(&KL) };
    protocols().iter().map(|protocol| Listed::of(protocol)).chain([kl]).collect()
}

impl Listed {
    fn of(protocol: &Protocol) -> Self {
        let Protocol { name, about, source, dataset, published, parameter, .. } = *protocol;
        Self { protocol: name, about, source, parameter, dataset: Some(dataset), published }
    }
}

impl Display for Listed {
    /// A line with its name and what it measures, and indented lines of the rest.
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
            Some(Dataset { name, hub: Some(hub), licence, .. }) => {
                write!(f, "\n    data: {name}, {hub}, {licence}")
            }
        }?;
        for Published { model, metric, value, source, protocol, exact } in *published {
            let other = if *exact { String::new() } else { format!("; protocol {protocol}") };
            write!(f, "\n    published: {metric} {value} of {} ({source}{other})", model.name())?;
        }
        Ok(())
    }
}
