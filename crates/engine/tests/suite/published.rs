//! Comparisons with published values, from the built-in table and from tables made for these tests.

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Config, LogitsFor, ParameterCounts, Pass};
use candle_gpt2_engine::{
    ConvertOptions, LoadedModel, ModelOptions, PublishedCheck, PublishedValues, Silent, Verification,
    VerifyOptions, WeightDType,
};
use candle_gpt2_generation::{GenerationConfig, score_continuations};
use candle_gpt2_testing::skipped;
use candle_gpt2_weights::WrittenDType;
use serde_json::{Value, json};

/// Environment variable that names the folder of the published checkpoints.
const PUBLISHED_VARIABLE: &str = "GPT2_PUBLISHED";

fn verified(options: &ModelOptions, published: PublishedValues) -> Verification {
    let options_of_verification = VerifyOptions { published: Some(published), ..VerifyOptions::default() };
    options.verify(&options_of_verification, &Silent).unwrap()
}

fn table(values: &Value) -> PublishedValues {
    let table = json!({ "models": [{ "names": ["built-in"], "values": values }] });
    PublishedValues::from_json(&table.to_string()).unwrap()
}

/// Each parameter count matches the published configuration.
#[test]
fn parameter_counts_in_the_table_match_its_configs() {
    let table: Value = serde_json::from_str(include_str!("../../src/published.json")).unwrap();
    let models = table["models"].as_array().unwrap();
    for model in models {
        let value = |check: &str| {
            let values = model["values"].as_array().unwrap();
            values.iter().find(|value| value["check"] == check).map(|found| found["value"].clone()).unwrap()
        };
        let config = Gpt2Config::from_json(&value("config").to_string()).unwrap();
        assert_eq!(json!(ParameterCounts::new(&config).unique), value("parameters"), "{}", model["names"]);
    }
    let names: Vec<&str> = models.iter().map(|model| model["names"][0].as_str().unwrap()).collect();
    let (sizes, others) =
        (["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"], ["distilgpt2", "DialoGPT-medium"]);
    assert!(sizes.iter().chain(&others).all(|name| names.contains(name)), "{names:?}");
}

/// Measures a value of every kind by generating and scoring.
fn measured(loaded: &LoadedModel) -> Vec<Value> {
    let vocabulary = loaded.vocabulary();
    let (prompt, source) = ("Once upon a time", "this test");
    let ids = vocabulary.encode(prompt).unwrap();
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let text: String = loaded.text_generator(&ids, &config).unwrap().map(Result::unwrap).collect();
    let continuation = vocabulary.encode_piece(" there was a cat").unwrap();
    let loss = -score_continuations(loaded.model(), &ids, &[continuation], &|| ()).unwrap()[0].mean();
    let row = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits =
        loaded.model().forward_with(&row, LogitsFor::LastToken, None, &mut Pass::inference()).unwrap();
    let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    let config = loaded.config();
    vec![
        json!({ "check": "parameters", "value": ParameterCounts::new(config).unique, "source": source }),
        json!({ "check": "config", "value": { "n_layer": config.n_layer, "n_embd": config.n_embd }, "source": source }),
        json!({ "check": "tokens", "text": prompt, "ids": ids, "source": source }),
        json!({ "check": "greedy", "prompt": prompt, "text": text, "source": source }),
        json!({ "check": "logit", "prompt": prompt, "token": best, "value": logits[best], "source": source }),
        json!({ "check": "loss", "prompt": prompt, "text": " there was a cat", "value": loss, "source": source }),
    ]
}

#[test]
fn measured_values_pass_and_altered_ones_fail() {
    let options = ModelOptions { dtype: Some(WeightDType::F32), ..ModelOptions::default() };
    let values = measured(&options.open(&Silent).unwrap().load(&Silent).unwrap());
    let found = verified(&options, table(&json!(values)));
    assert_eq!(found.problems, Vec::<String>::new());
    assert!(found.sound && found.published.len() == values.len());
    assert!(found.published.iter().all(|check| check.holds && check.source == "this test"), "{found:?}");

    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(&str, Change<'_>, &str); 6] = [
        ("parameters", &|value| value["value"] = json!(7), "found "),
        ("config", &|value| value["value"]["n_layer"] = json!(99), "n_layer 99; found"),
        ("tokens", &|value| value["ids"][0] = json!(3), "found ["),
        ("greedy", &|value| value["text"] = json!(" xylophones"), "; found \""),
        ("logit", &|value| value["value"] = json!(value["value"].as_f64().unwrap() + 0.01), "found "),
        ("loss", &|value| value["value"] = json!(value["value"].as_f64().unwrap() - 0.01), "found "),
    ];
    for (kind, change, expected) in changes {
        let mut values = values.clone();
        let changed = values.iter_mut().find(|value| value["check"] == kind).unwrap();
        change(changed);
        let found = verified(&options, table(&json!(values)));
        let differing: Vec<&PublishedCheck> = found.published.iter().filter(|check| !check.holds).collect();
        assert!(!found.sound && differing.len() == 1 && found.problems.is_empty(), "{kind}: {found:?}");
        assert!(differing[0].check.contains(expected), "{kind}: {:?}", differing[0]);
        assert!(differing[0].difference > differing[0].tolerance, "{kind}");
    }
}

/// Quantized weights get wider tolerances, because their logits deviate more.
#[test]
fn quantized_weights_have_wider_tolerances() {
    let values = {
        let options = ModelOptions { dtype: Some(WeightDType::F32), ..ModelOptions::default() };
        json!(measured(&options.open(&Silent).unwrap().load(&Silent).unwrap()))
    };
    let mut last = 0.0;
    for dtype in [WeightDType::F32, WeightDType::F16, WeightDType::Q8, WeightDType::Q4] {
        let options = ModelOptions { dtype: Some(dtype), ..ModelOptions::default() };
        let found = verified(&options, table(&values));
        assert!(found.sound, "{dtype:?}: {found:?}");
        let logit = found.published.iter().find(|check| check.check.starts_with("logit")).unwrap();
        assert!(logit.tolerance > last, "{dtype:?}");
        last = logit.tolerance;
    }
}

/// A quantized file is computed in its own type and is compared with that type's tolerance.
#[test]
fn quantized_file_uses_the_tolerance_of_its_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stories.gguf");
    let options = ConvertOptions { output: file.clone(), dtype: WrittenDType::Q8_0 };
    ModelOptions::default().convert(&options, &Silent).unwrap();
    let values =
        json!([{ "check": "logit", "prompt": "One day", "token": 0, "value": 0, "source": "this test" }]);
    let table = json!({ "models": [{ "names": ["stories.gguf"], "values": values }] });
    let tolerance = |dtype| {
        let options = ModelOptions { model: file.clone(), dtype, ..ModelOptions::default() };
        let table = PublishedValues::from_json(&table.to_string()).unwrap();
        verified(&options, table).published[0].tolerance
    };
    assert_eq!(tolerance(None), tolerance(Some(WeightDType::Q8)));
    assert!(tolerance(Some(WeightDType::F32)) < tolerance(None));
}

#[test]
fn unlisted_models_and_invalid_tables_are_errors() {
    let published = Some(PublishedValues::built_in().unwrap());
    let options = VerifyOptions { published, ..VerifyOptions::default() };
    let error = ModelOptions::default().verify(&options, &Silent).unwrap_err().to_string();
    assert!(error.starts_with("no published values for `built-in`; available models: gpt2, "), "{error}");
    for (json, expected) in [
        ("[1", "line 1"),
        (r#"{"models": [{"names": ["a"], "values": [{"check": "mood", "source": "b"}]}]}"#, "mood"),
        (r#"{"models": [{"names": ["a"], "values": [{"check": "tokens", "text": "c"}]}]}"#, "ids"),
    ] {
        let error = PublishedValues::from_json(json).unwrap_err().to_string();
        assert!(
            error.starts_with("invalid table of published values: ") && error.contains(expected),
            "{error}"
        );
    }
}

/// A kind of value that is not published for the model produces a note.
#[test]
fn unpublished_kinds_of_value_are_noted() {
    let values = json!([{ "check": "config", "value": { "n_positions": 512 }, "source": "this test" }]);
    let notes = verified(&ModelOptions::default(), table(&values)).notes;
    for kind in ["greedy text", "logit", "loss"] {
        assert!(notes.contains(&format!("not published for this model: {kind}")), "{notes:?}");
    }
}

/// Real checkpoints match the built-in table.
#[test]
fn real_checkpoints_match_the_published_values() {
    let values = PublishedValues::built_in().unwrap();
    let names: Vec<String> = values.names().filter(|name| !name.contains('/')).map(str::to_owned).collect();
    for name in names {
        let folder = std::env::var_os(PUBLISHED_VARIABLE).map(|folder| PathBuf::from(folder).join(&name));
        let Some(model) = folder.filter(|folder| folder.is_dir()) else {
            skipped(&format!("{PUBLISHED_VARIABLE} does not name a folder with {name}"));
            continue;
        };
        let found = verified(&ModelOptions { model, ..ModelOptions::default() }, values.clone());
        assert!(found.sound, "{name}: {found:?}");
    }
}
