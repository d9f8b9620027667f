//! Models for analysis tests.

use std::sync::Mutex;

use candle_core::Tensor;
use candle_gpt2_engine::{
    DeviceChoice, LoadedModel, ModelOptions, Progress, Reporter, Silent, Unit, WeightDType,
};
use candle_gpt2_look::{Analysis, Look, LookError, LookSubject, Reader, Text};
use candle_gpt2_testing::{Fixture, fixture_path, json_fixture};
use serde_json::Value;

/// Tolerance for sums and quotients of f32 activations, compared with the f64 fixtures.
pub(crate) const GRIDS: f64 = 1e-4;

/// A checkpoint without a tokenizer, with TransformerLens' results for it.
pub(crate) struct Case {
    pub(crate) loaded: LoadedModel,
    pub(crate) analyses: Fixture,
    pub(crate) recorded: Value,
}

/// Loads the built-in model in f32, because q8 products round their inputs.
pub(crate) fn built_in() -> LoadedModel {
    opened(ModelOptions { dtype: Some(WeightDType::F32), ..ModelOptions::default() })
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

pub(crate) fn look(loaded: &LoadedModel, look: &impl Look) -> Result<Analysis, LookError> {
    let reader = reader(loaded);
    look.at(&LookSubject::new(loaded, "a model".into(), &reader), &Silent)
}

/// Values of a report as a tensor over its axes.
pub(crate) fn grid(found: &Analysis) -> Tensor {
    let values: Vec<f32> = found.report.values.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
    let shape: Vec<usize> = found.report.axes.iter().map(|axis| axis.labels.len()).collect();
    Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap()
}

/// A reporter that records its jobs and notes.
#[derive(Default)]
pub(crate) struct RecordingReporter {
    pub(crate) jobs: Mutex<Vec<(String, u64)>>,
    pub(crate) notes: Mutex<Vec<String>>,
}

impl Reporter for RecordingReporter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.jobs.lock().unwrap().push((what.to_owned(), total));
        Silent.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.notes.lock().unwrap().push(note.to_owned());
    }
}
