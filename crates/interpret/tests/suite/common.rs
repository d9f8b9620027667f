//! Test checkpoints with reference values from TransformerLens.

use candle_core::Tensor;
use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_interpret::{Metric, Run};
use candle_gpt2_testing::{Fixture, fixture_path, json_fixture};
use candle_gpt2_weights::{Checkpoint, LoadOptions};
use serde_json::Value;

/// Seven checkpoints of different sizes; `scripts/reference/inside.py` describes each of them.
pub(crate) const CASES: [&str; 7] =
    ["plain", "inverse_layer", "untied", "gelu", "relu_inner", "unscaled", "epsilon"];

/// A checkpoint with TransformerLens' reference values.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) model: Gpt2LMHeadModel,
    pub(crate) raw: Fixture,
    pub(crate) compat: Fixture,
    pub(crate) analyses: Fixture,
    pub(crate) recorded: Value,
    pub(crate) clean: Vec<u32>,
    pub(crate) corrupted: Vec<u32>,
}

impl Case {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        CASES.into_iter().map(Self::open)
    }

    pub(crate) fn open(name: &'static str) -> Self {
        let folder = fixture_path(&format!("inside/{name}/config.json"));
        let checkpoint = Checkpoint::open(folder.parent().unwrap()).unwrap();
        let recorded = json_fixture(&format!("inside/{name}/analyses"));
        let of = |part: &str| Fixture::open(&format!("inside/{name}/{part}"));
        Self {
            name,
            model: checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap(),
            raw: of("raw"),
            compat: of("compat"),
            analyses: of("analyses"),
            clean: ids(&recorded["clean_ids"]),
            corrupted: ids(&recorded["corrupted_ids"]),
            recorded,
        }
    }

    pub(crate) fn clean(&self) -> Run<'_> {
        Run::new(&self.model, &self.clean).unwrap()
    }

    pub(crate) fn corrupted(&self) -> Run<'_> {
        Run::new(&self.model, &self.corrupted).unwrap()
    }

    pub(crate) fn id(&self, name: &str) -> u32 {
        u32::try_from(self.recorded[name].as_u64().unwrap()).unwrap()
    }

    /// Metric that compares the answer with the wrong answer, after the last token.
    pub(crate) fn metric(&self) -> Metric {
        Metric::logit_difference(self.id("answer"), self.id("wrong"), self.clean.len() - 1)
    }

    pub(crate) fn analysis(&self, name: &str) -> Tensor {
        self.analyses.tensor(name)
    }

    pub(crate) fn labels(&self, name: &str) -> Vec<String> {
        let labels = self.recorded[format!("labels.{name}")].as_array().unwrap();
        labels.iter().map(|label| label.as_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn layers(&self) -> usize {
        self.model.config().n_layer
    }

    pub(crate) fn heads(&self) -> usize {
        self.model.config().n_head
    }
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}
