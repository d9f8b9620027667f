//! The meaning of a name: a protocol, a task of a file, or a comparison of two models.

use std::path::Path;
use std::sync::Arc;

use candle_gpt2_confined::WorkerProgram;

use crate::protocols::harness::HarnessTask;
use crate::protocols::{KL, TASK};
use crate::{EvaluationError, ExampleSource, ItemResult, Kl, Metric, Protocol, Totals, named};

/// What is asked for by a name.
#[derive(Debug, Clone)]
pub(crate) struct AskedProtocol {
    /// What is known of it; of a task's file what all have in common.
    pub(crate) protocol: Protocol,
    /// The number at the end of its name.
    number: Option<usize>,
    pub(crate) kind: Kind,
}

/// Who prepares and measures.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// The protocol itself.
    Protocol,
    /// A task of a YAML file.
    Task(Arc<HarnessTask>),
    /// Two models side by side.
    Kl,
}

impl AskedProtocol {
    /// The meaning of a name. Child processes of `worker` run the templates of a task file.
    pub(crate) fn named(name: &str, worker: Option<&WorkerProgram>) -> Result<Self, EvaluationError> {
        if name == Kl::NAME {
            return Ok(Self { protocol: KL, number: None, kind: Kind::Kl });
        }
        if HarnessTask::is_file(name) {
            let task = HarnessTask::read(Path::new(name), worker)?;
            // The task's file says where examples come from.
            let few_shot = task.takes_examples().then_some(ExampleSource::Training);
            let protocol = Protocol { few_shot, ..TASK };
            return Ok(Self { protocol, number: None, kind: Kind::Task(Arc::new(task)) });
        }
        let (protocol, number) = named(name)?;
        Ok(Self { protocol: *protocol, number, kind: Kind::Protocol })
    }

    /// Whether it needs a second model.
    pub(crate) fn compares(&self) -> bool {
        matches!(self.kind, Kind::Kl)
    }

    /// Whether the length of its windows is the caller's to choose.
    pub(crate) fn takes_context(&self) -> bool {
        self.compares() || self.protocol.name == "wikitext:llama.cpp"
    }

    /// How many examples precede each question of a run that asks for `wanted`, and a note if it is another number.
    pub(crate) fn shots(&self, wanted: Option<usize>) -> (usize, Option<String>) {
        match &self.kind {
            Kind::Task(task) => task.shots(wanted),
            _ => (wanted.unwrap_or(0), None),
        }
    }

    /// The number at the end of its name, or what it is if there is none.
    pub(crate) fn parameter(&self) -> usize {
        let usual = self.protocol.parameter.and_then(|parameter| parameter.default);
        self.number.or(usual).unwrap_or(0)
    }

    /// Name in a report of the protocol that `name` means: the protocol's own, with its number.
    pub(crate) fn name(&self, name: &str) -> String {
        match &self.kind {
            Kind::Task(task) => task.name().to_owned(),
            Kind::Protocol if self.number.is_none() => self.protocol.name.to_owned(),
            _ => name.to_owned(),
        }
    }

    /// Makes metrics of what a model said to items.
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
    fn reports_name_the_protocol_and_not_its_task() {
        for (name, expected) in [
            ("lambada", "lambada:lm-eval"),
            ("bpb", "text:bits"),
            ("wikitext:hf-512", "wikitext:hf-512"),
            ("text:bits-128", "text:bits-128"),
            ("kl", "kl"),
        ] {
            assert_eq!(AskedProtocol::named(name, None).unwrap().name(name), expected);
        }
    }
}
