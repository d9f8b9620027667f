//! What is asked for by a name: a protocol, a task of a file, or two models side by side.

use std::path::Path;
use std::sync::Arc;

use crate::protocols::harness::HarnessTask;
use crate::{EvaluationError, ExampleSource, ItemResult, Kl, Metric, Protocol, Published, Totals, named};

/// The data of `kl`.
pub(crate) const ANY_TEXT: &str = "any text in UTF-8";

/// What is asked for by a name.
#[derive(Debug, Clone)]
pub(crate) enum Asked {
    /// A protocol, with the number at the end of its name.
    Protocol(&'static Protocol, Option<usize>),
    /// A task of a YAML file.
    Task(Arc<HarnessTask>),
    /// Two models side by side.
    Kl,
}

impl Asked {
    pub(crate) fn named(name: &str) -> Result<Self, EvaluationError> {
        if name == Kl::NAME {
            return Ok(Self::Kl);
        }
        if HarnessTask::is_file(name) {
            return HarnessTask::read(Path::new(name)).map(|task| Self::Task(Arc::new(task)));
        }
        named(name).map(|(protocol, number)| Self::Protocol(protocol, number))
    }

    /// Whether it needs a second model.
    pub(crate) fn compares(&self) -> bool {
        matches!(self, Self::Kl)
    }

    /// Whether the length of its windows is the caller's to choose.
    pub(crate) fn takes_context(&self) -> bool {
        match self {
            Self::Protocol(protocol, _) => protocol.name == "wikitext:llama.cpp",
            Self::Task(_) => false,
            Self::Kl => true,
        }
    }

    /// Where examples before its questions come from; `None` where it has no questions.
    pub(crate) fn examples(&self) -> Option<ExampleSource> {
        match self {
            Self::Protocol(protocol, _) => protocol.few_shot,
            // The task's file says the rest.
            Self::Task(task) => task.takes_examples().then_some(ExampleSource::Training),
            Self::Kl => None,
        }
    }

    /// How many examples stand before each question of a run that asks for `wanted`, and a note where that is not so.
    pub(crate) fn shots(&self, wanted: Option<usize>) -> (usize, Option<String>) {
        match self {
            Self::Task(task) => task.shots(wanted),
            _ => (wanted.unwrap_or(0), None),
        }
    }

    /// The number at the end of its name, or what it is where there is none.
    pub(crate) fn parameter(&self) -> usize {
        let number = match self {
            Self::Protocol(protocol, number) => {
                number.or(protocol.parameter.and_then(|parameter| parameter.default))
            }
            Self::Task(_) | Self::Kl => None,
        };
        number.unwrap_or(0)
    }

    /// What a report calls it, if it was asked for by this name.
    pub(crate) fn name(&self, name: &str) -> String {
        match self {
            Self::Task(task) => task.name().to_owned(),
            _ => name.to_owned(),
        }
    }

    /// Where its arithmetic comes from.
    pub(crate) fn source(&self) -> &'static str {
        match self {
            Self::Protocol(protocol, _) => protocol.source,
            Self::Task(_) => "lm-evaluation-harness 0.4.13, a task of a YAML file",
            Self::Kl => Kl::SOURCE,
        }
    }

    /// What its data are called.
    pub(crate) fn data_name(&self) -> &'static str {
        match self {
            Self::Protocol(protocol, _) => protocol.dataset.name,
            Self::Task(_) => "those of the task file",
            Self::Kl => ANY_TEXT,
        }
    }

    /// Whether data are the published ones, where that can be known.
    pub(crate) fn knows(&self, hub: Option<&str>, sha256: &str) -> Option<bool> {
        match self {
            Self::Protocol(protocol, _) => protocol.dataset.knows(hub, sha256),
            Self::Task(_) | Self::Kl => None,
        }
    }

    /// What others measured by it.
    pub(crate) fn published(&self) -> &'static [Published] {
        match self {
            Self::Protocol(protocol, _) => protocol.published,
            Self::Task(_) | Self::Kl => &[],
        }
    }

    /// Makes metrics of what a model said to items.
    pub(crate) fn measure(&self, totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
        match self {
            Self::Protocol(protocol, _) => (protocol.measure)(totals, results),
            Self::Task(task) => task.measure(totals, results),
            Self::Kl => Vec::new(),
        }
    }
}
