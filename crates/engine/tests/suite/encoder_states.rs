//! Cross-attention to encoder hidden states from a file, compared with transformers.
//!
//! The tests cover scoring, every kind of generation and every weight type. `scripts/reference/gradients.py`
//! created the expected values.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_gpt2_engine::{
    Completion, DeviceChoice, EngineError, Job, LoadedModel, ModelOptions, Silent, WeightDType,
};
use candle_gpt2_generation::{EarlyStopping, GenerationConfig, GenerationError, score};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture, temporary_folder, worst};
use serde_json::Value;

/// Tolerance for log-probabilities, twice the required logit tolerance of 1e-4.
const LOG_PROBABILITIES: f64 = 2e-4;

fn folder() -> PathBuf {
    fixture_path("cross-attention")
}

fn options() -> ModelOptions {
    ModelOptions {
        model: folder(),
        encoder_states: Some(folder().join("states.safetensors")),
        device: DeviceChoice::Cpu,
        ..ModelOptions::default()
    }
}

fn load(options: &ModelOptions) -> LoadedModel {
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn rows() -> Vec<Value> {
    json_fixture("cross-attention/expected")["rows"].as_array().unwrap().clone()
}

fn ids(row: &Value, key: &str) -> Vec<u32> {
    serde_json::from_value(row[key].clone()).unwrap()
}

fn log_probabilities(model: &LoadedModel, row: &Value) -> Vec<f64> {
    let ids = ids(row, "ids");
    let scored = score(model.model(), &ids, 24, 0, &|_| ()).unwrap();
    scored.logprobs.into_iter().flatten().collect()
}

/// Returns the largest difference from the expected values in the fixture.
fn difference(found: &[f64], row: &Value, key: &str) -> f64 {
    let expected: Vec<f64> = serde_json::from_value(row[key].clone()).unwrap();
    assert_eq!(found.len(), expected.len());
    worst(found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs()))
}

/// Job that collects the new tokens of each prompt.
struct Prompts {
    waiting: Vec<Vec<u32>>,
    results: Vec<Vec<u32>>,
}

impl Job for Prompts {
    type Error = EngineError;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
        Ok((!self.waiting.is_empty()).then(|| self.waiting.remove(0)))
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Completion>, GenerationError>,
    ) -> Result<(), EngineError> {
        self.results[prompt] = texts?.remove(0).ids;
        Ok(())
    }
}

/// Generates new tokens for all rows' prompts, three at a time.
fn generated(
    model: &LoadedModel,
    change: impl FnOnce(GenerationConfig) -> GenerationConfig,
) -> Vec<Vec<u32>> {
    let defaults = model.defaults().unwrap();
    let config = GenerationConfig { max_new_tokens: 16, do_sample: false, ..defaults.config().clone() };
    let config = defaults.complete(change(config)).unwrap();
    let waiting: Vec<Vec<u32>> = rows().iter().map(|row| ids(row, "ids")).collect();
    let mut prompts = Prompts { results: vec![Vec::new(); waiting.len()], waiting };
    model.generate(&mut prompts, 3, &config, &Silent).unwrap();
    prompts.results
}

fn expected(key: &str) -> Vec<Vec<u32>> {
    rows().iter().map(|row| ids(row, key)).collect()
}

#[test]
fn scores_equal_transformers_with_and_without_states() {
    let (with, without) = (load(&options()), load(&ModelOptions { encoder_states: None, ..options() }));
    for row in rows() {
        let off = difference(&log_probabilities(&with, &row), &row, "log_probabilities");
        assert!(off < LOG_PROBABILITIES, "{}: {off}", row["text"]);
        let off = difference(&log_probabilities(&without, &row), &row, "log_probabilities_without");
        assert!(off < LOG_PROBABILITIES, "{}, without states: {off}", row["text"]);
    }
}

#[test]
fn completions_equal_transformers_in_every_decoding_mode() {
    let (with, without) = (load(&options()), load(&ModelOptions { encoder_states: None, ..options() }));
    assert_eq!(generated(&with, |config| config), expected("greedy"));
    assert_eq!(generated(&without, |config| config), expected("greedy_without"));
    let beams = |config| GenerationConfig { num_beams: 3, early_stopping: EarlyStopping::Full, ..config };
    assert_eq!(generated(&with, beams), expected("beams"));
    // The model that attends to the states verifies the drafts.
    let lookup = |config| GenerationConfig { prompt_lookup_num_tokens: Some(4), ..config };
    assert_eq!(generated(&with, lookup), expected("greedy"));
    let assistant_model = Some(fixture_path("tiny-checkpoint"));
    let assisted = load(&ModelOptions { assistant_model, ..options() });
    assert_eq!(generated(&assisted, |config| config), expected("greedy"));
}

/// Other weight types differ from f32 only by rounding, far less than the effect of the states.
#[test]
fn every_weight_dtype_attends_to_encoder_states() {
    for (dtype, rounding) in [
        (WeightDType::F32, LOG_PROBABILITIES),
        (WeightDType::F16, 0.02),
        (WeightDType::Q8, 0.2),
        (WeightDType::Q6, 0.5),
        (WeightDType::Q5, 1.0),
        (WeightDType::Q4, 1.5),
    ] {
        let model = load(&ModelOptions { dtype: Some(dtype), ..options() });
        let mean = |key: &str| {
            let differences = rows().into_iter().flat_map(|row| {
                let expected: Vec<f64> = serde_json::from_value(row[key].clone()).unwrap();
                let found = log_probabilities(&model, &row);
                found
                    .into_iter()
                    .zip(expected)
                    .map(|(found, expected)| (found - expected).abs())
                    .collect::<Vec<_>>()
            });
            let differences: Vec<f64> = differences.collect();
            differences.iter().sum::<f64>() / differences.len() as f64
        };
        let (off, without) = (mean("log_probabilities"), mean("log_probabilities_without"));
        assert!(off < rounding && 2.0 * off < without, "{}: {off}, without states {without}", dtype.name());
    }
}

/// Writes a file with a single tensor named `name`.
fn written(folder: &Path, name: &str, tensor: &Tensor) -> PathBuf {
    let path = folder.join("states.safetensors");
    tensor.save_safetensors(name, &path).unwrap();
    path
}

#[test]
fn invalid_states_are_rejected_with_file_and_tensor() {
    let directory = temporary_folder();
    let error_message = |path: &Path| {
        let options = ModelOptions { encoder_states: Some(path.to_owned()), ..options() };
        let error = options.open(&Silent).unwrap_err();
        assert!(!error.is_usage(), "the file is at fault");
        let message = error.to_string();
        assert!(message.starts_with(&path.display().to_string()), "{message}");
        message
    };
    assert!(error_message(&directory.path().join("none.safetensors")).contains("cannot be read"));
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let message = error_message(&written(directory.path(), "states", &zeros(&[1, 3, 28])));
    assert!(message.contains("expected a tensor `encoder_hidden_states`, found [\"states\"]"), "{message}");
    for shape in [&[1, 3, 27][..], &[2, 3, 28], &[3, 28], &[1, 0, 28]] {
        let message = error_message(&written(directory.path(), "encoder_hidden_states", &zeros(shape)));
        let expected = format!(
            "tensor `encoder_hidden_states`: encoder hidden states: expected floating-point numbers of shape (1, S, 28), \
             found ({shape:?}, F32)"
        );
        assert!(message.contains(&expected), "{message}");
    }
    for number in [f32::NAN, f32::INFINITY] {
        let states = (zeros(&[1, 3, 28]) + f64::from(number)).unwrap();
        let message = error_message(&written(directory.path(), "encoder_hidden_states", &states));
        assert!(message.contains("encoder hidden states: all values must be finite"), "{message}");
    }
}

#[test]
fn model_without_cross_attention_rejects_states() {
    let options = ModelOptions { model: fixture_path("tiny-checkpoint"), ..options() };
    let error = options.open(&Silent).unwrap_err();
    assert!(error.is_usage(), "{error}");
    assert!(error.to_string().contains("the model has no cross-attention"), "{error}");
}

/// Old versions of transformers saved causal masks for both attentions; they are not parameters.
#[test]
fn stored_causal_masks_are_ignored() {
    let folder = CheckpointFolder::of("cross-attention").with_tensors(|tensors| {
        for layer in 0..3 {
            for attention in ["attn", "crossattention"] {
                let name = |buffer: &str| format!("transformer.h.{layer}.{attention}.{buffer}");
                let mask = Tensor::ones((1, 1, 48, 48), DType::U8, &Device::Cpu).unwrap();
                tensors.insert(name("bias"), mask);
                tensors.insert(name("masked_bias"), Tensor::new(-1e4f32, &Device::Cpu).unwrap());
            }
        }
    });
    let model = load(&ModelOptions { model: folder.path().into(), ..options() });
    let row = &rows()[0];
    let off = difference(&log_probabilities(&model, row), row, "log_probabilities");
    assert!(off < LOG_PROBABILITIES, "{off}");
}
