//! Models to look into.

use std::sync::Mutex;

use candle_core::Tensor;
use candle_gpt2_engine::{DeviceChoice, LoadedModel, ModelOptions, Progress, Reporter, Silent, Unit};
use candle_gpt2_look::{Found, Look, LookError, LookSubject, Reader, Text};
use candle_gpt2_testing::{Fixture, fixture_path, json_fixture};
use serde_json::Value;

/// Grids and stacks are sums and quotients of activations in f32, beside the f64 of the fixtures.
pub(crate) const GRIDS: f64 = 1e-4;

/// A checkpoint without a tokenizer, and what TransformerLens says of it.
pub(crate) struct Case {
    pub(crate) loaded: LoadedModel,
    pub(crate) analyses: Fixture,
    pub(crate) recorded: Value,
}

/// The model inside the program, which has a tokenizer.
pub(crate) fn built_in() -> LoadedModel {
    opened(ModelOptions::default())
}

fn opened(options: ModelOptions) -> LoadedModel {
    ModelOptions { device: DeviceChoice::Cpu, ..options }.open(&Silent).unwrap().load(&Silent).unwrap()
}

impl Case {
    pub(crate) fn open(name: &str) -> Self {
        let config = fixture_path(&format!("inside/{name}/config.json"));
        let model = config.parent().unwrap().to_owned();
        Self {
            loaded: opened(ModelOptions { model, ..ModelOptions::default() }),
            analyses: Fixture::open(&format!("inside/{name}/analyses")),
            recorded: json_fixture(&format!("inside/{name}/analyses")),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Text {
        Text::Ids(serde_json::from_value(self.recorded[name].clone()).unwrap())
    }

    pub(crate) fn token(&self, name: &str) -> candle_gpt2_look::TokenChoice {
        candle_gpt2_look::TokenChoice::Id(u32::try_from(self.recorded[name].as_u64().unwrap()).unwrap())
    }

    pub(crate) fn logit_difference(&self, name: &str) -> f64 {
        self.recorded["logit_difference"][name].as_f64().unwrap()
    }
}

pub(crate) fn words(text: &str) -> Text {
    Text::Words(text.to_owned())
}

pub(crate) fn reader(loaded: &LoadedModel) -> Reader {
    Reader::new(loaded.vocabulary(), false).unwrap()
}

pub(crate) fn look(loaded: &LoadedModel, look: &impl Look) -> Result<Found, LookError> {
    let reader = reader(loaded);
    look.at(&LookSubject::new(loaded, "a model".into(), &reader), &Silent)
}

/// The values of a report as a tensor over its axes.
pub(crate) fn grid(found: &Found) -> Tensor {
    let values: Vec<f32> = found.report.values.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
    let shape: Vec<usize> = found.report.axes.iter().map(|axis| axis.labels.len()).collect();
    Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap()
}

/// A reporter that remembers what it was told.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) jobs: Mutex<Vec<(String, u64)>>,
    pub(crate) notes: Mutex<Vec<String>>,
}

impl Reporter for Told {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.jobs.lock().unwrap().push((what.to_owned(), total));
        Silent.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.notes.lock().unwrap().push(note.to_owned());
    }
}
