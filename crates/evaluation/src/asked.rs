//! Resolution of protocol names: a built-in protocol, a task file, or a comparison of two models.

use std::path::Path;
use std::sync::Arc;

use candle_gpt2_confined::WorkerProgram;

use crate::protocols::harness::HarnessTask;
use crate::protocols::{KL, TASK};
use crate::{EvaluationError, ExampleSource, ItemResult, Kl, Metric, Protocol, Totals, named};

/// A protocol that was requested by name.
#[derive(Debug, Clone)]
pub(crate) struct RequestedProtocol {
    /// Description of the protocol; for a task file, the fields that all task files share.
    pub(crate) protocol: Protocol,
    /// Number at the end of the name.
    number: Option<usize>,
    pub(crate) kind: Kind,
}

/// Implementation that prepares the data and computes the metrics.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// The protocol's own functions.
    Protocol,
    /// A task from a YAML file.
    Task(Arc<HarnessTask>),
    /// A comparison of two models.
    Kl,
}

impl RequestedProtocol {
    /// Resolves a name. Child processes of `worker` render the templates of a task file.
    pub(crate) fn named(name: &str, worker: Option<&WorkerProgram>) -> Result<Self, EvaluationError> {
        if name == Kl::NAME {
            return Ok(Self { protocol: KL, number: None, kind: Kind::Kl });
        }
        if HarnessTask::is_file(name) {
            let task = HarnessTask::read(Path::new(name), worker)?;
            // A placeholder: the task file itself specifies the source of the examples.
            let few_shot = task.takes_examples().then_some(ExampleSource::Training);
            let protocol = Protocol { few_shot, ..TASK };
            return Ok(Self { protocol, number: None, kind: Kind::Task(Arc::new(task)) });
        }
        let (protocol, number) = named(name)?;
        Ok(Self { protocol: *protocol, number, kind: Kind::Protocol })
    }

    /// Whether the protocol needs a second model.
    pub(crate) fn compares(&self) -> bool {
        matches!(self.kind, Kind::Kl)
    }

    /// Whether the caller can choose the window length.
    pub(crate) fn takes_context(&self) -> bool {
        self.compares() || self.protocol.name == "wikitext:llama.cpp"
    }

    /// Returns the number of examples before each question, with a note if it differs from `wanted`.
    pub(crate) fn shots(&self, wanted: Option<usize>) -> (usize, Option<String>) {
        match &self.kind {
            Kind::Task(task) => task.shots(wanted),
            _ => (wanted.unwrap_or(0), None),
        }
    }

    /// Returns the number at the end of the name, or its default.
    pub(crate) fn parameter(&self) -> usize {
        let usual = self.protocol.parameter.and_then(|parameter| parameter.default);
        self.number.or(usual).unwrap_or(0)
    }

    /// Returns the protocol's name for reports, with its parameter; `name` is the requested name.
    pub(crate) fn name(&self, name: &str) -> String {
        match &self.kind {
            Kind::Task(task) => task.name().to_owned(),
            Kind::Protocol if self.number.is_none() => self.protocol.name.to_owned(),
            _ => name.to_owned(),
        }
    }

    /// Computes the metrics from the results.
    pub(crate) fn measure(&self, totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
        match &self.kind {
            Kind::Task(task) => task.measure(totals, results),
            _ => (self.protocol.measure)(totals, results),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_name_the_resolved_protocol() {
        for (name, expected) in [
            ("lambada", "lambada:lm-eval"),
            ("bpb", "text:bits"),
            ("wikitext:hf-512", "wikitext:hf-512"),
            ("text:bits-128", "text:bits-128"),
            ("kl", "kl"),
        ] {
            assert_eq!(RequestedProtocol::named(name, None).unwrap().name(name), expected);
        }
    }
}
