//! Tests low-rank adapters: affected layers, merged weights and file format.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, HeadKind};
use candle_gpt2_testing::{Fixture, assert_close_absolute, values};
use candle_gpt2_training::{Batch, Hyperparameters, Lora, LoraConfig, Parameters, Trainer, Windows};
use serde_json::{Value, json};

const TARGETS: [&str; 2] = ["c_attn", "c_proj"];

fn lora_config() -> LoraConfig {
    LoraConfig { rank: 3, alpha: 6.0, targets: TARGETS.map(str::to_owned).to_vec() }
}

/// Returns the model and the weights from a fixture.
fn base() -> (Gpt2Config, HashMap<String, Tensor>) {
    let fixture = Fixture::open("training/tied");
    let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
    (config, fixture.tensors_below("parameter."))
}

fn trainer(steps: u64) -> Trainer {
    let (config, tensors) = base();
    let parameters = Parameters::from_tensors(&config, &tensors).unwrap();
    let (lora, adapters) = Lora::new(&config, lora_config(), &parameters, 4).unwrap();
    let numbers = Hyperparameters {
        steps,
        batch_size: 2,
        context: 12,
        learning_rate: 0.02,
        ..Hyperparameters::default()
    };
    Trainer::with_adapters(&config, lora, adapters, numbers).unwrap()
}

fn tokens() -> Vec<u32> {
    (0..300).map(|index| index * index % 13).collect()
}

#[test]
fn fresh_adapters_are_neutral_and_training_changes_only_targets() {
    let (config, tensors) = base();
    let tokens = tokens();
    let windows = Windows::new(&tokens, 12, 1).unwrap();
    let batch: Batch = windows.batch(0, 2);
    let whole = Parameters::from_tensors(&config, &tensors).unwrap();
    let numbers = Hyperparameters { context: 12, ..Hyperparameters::default() };
    let whole = Trainer::new(&config, whole, numbers).unwrap();
    let mut adapted = trainer(30);
    let before = adapted.evaluate(&batch).unwrap();
    assert!((before - whole.evaluate(&batch).unwrap()).abs() < 1e-6);

    for _ in 0..30 {
        adapted.step(&windows).unwrap();
    }
    assert!(adapted.evaluate(&batch).unwrap() < before - 0.5, "training lowers the loss");
    for (name, weight) in &tensors {
        let is_adapted = TARGETS.iter().any(|target| name.ends_with(&format!("{target}.weight")));
        let is_same = values(&adapted.parameter(name).unwrap()) == values(weight);
        assert_eq!(is_same, !is_adapted, "{name}");
    }
}

#[test]
fn merged_weight_matches_the_lora_formula() {
    let mut trainer = trainer(3);
    let tokens = tokens();
    let windows = Windows::new(&tokens, 12, 1).unwrap();
    for _ in 0..3 {
        trainer.step(&windows).unwrap();
    }
    let adapter = |part: &str| {
        let name = format!("h.1.mlp.c_proj.lora_{part}.weight");
        trainer.parameters().get(&name).unwrap().as_tensor().to_dtype(DType::F64).unwrap()
    };
    let (a, b) = (adapter("A"), adapter("B"));
    assert_eq!((a.dims(), b.dims()), (&[3, 96][..], &[24, 3][..]));
    let (_, tensors) = base();
    let weight = tensors["h.1.mlp.c_proj.weight"].to_dtype(DType::F64).unwrap();
    let expected = (weight + (b.matmul(&a).unwrap() * 2.0).unwrap()).unwrap();
    let merged = trainer.parameter("h.1.mlp.c_proj.weight").unwrap();
    assert_close_absolute(&merged, &expected, 1e-6, "merged weight");
}

#[test]
fn adapters_are_saved_with_peft_names() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = trainer(1);
    trainer.lora().unwrap().save(trainer.parameters(), folder.path(), Some("gpt2")).unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    // Two blocks, each with c_attn and two c_proj, A and B.
    assert_eq!(tensors.len(), 2 * 3 * 2);
    let name = "base_model.model.transformer.h.0.attn.c_attn";
    assert_eq!(tensors[&format!("{name}.lora_A.weight")].dims(), [3, 24]);
    assert_eq!(tensors[&format!("{name}.lora_B.weight")].dims(), [72, 3]);
    let config = std::fs::read(folder.path().join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["base_model_name_or_path"], "gpt2");
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(3), Some(6.0)));
    assert_eq!(config["target_modules"], json!(TARGETS));
}

/// PEFT loads a head only if `task_type` and `modules_to_save` match the model's class.
#[test]
fn saved_task_matches_the_head() {
    let labels = ["one", "two", "three"].map(str::to_owned).to_vec();
    for (head, task, module) in [
        (HeadKind::LanguageModel, json!("CAUSAL_LM"), Value::Null),
        (HeadKind::SequenceClassification, json!("SEQ_CLS"), json!(["score"])),
        (HeadKind::TokenClassification, json!("TOKEN_CLS"), json!(["classifier"])),
        (HeadKind::DoubleHeads, Value::Null, json!(["multiple_choice_head"])),
    ] {
        let config = Gpt2Config { head, id2label: labels.clone(), ..base().0 };
        let parameters = Parameters::initialize(&config, 1, &Device::Cpu).unwrap();
        let (lora, adapters) = Lora::new(&config, lora_config(), &parameters, 1).unwrap();
        let folder = tempfile::tempdir().unwrap();
        lora.save(&adapters, folder.path(), None).unwrap();
        let config = std::fs::read(folder.path().join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!((&config["task_type"], &config["modules_to_save"]), (&task, &module), "{head:?}");
    }
}

#[test]
fn out_of_range_options_are_rejected() {
    let (config, _) = base();
    for (wrong, expected) in [
        (LoraConfig { rank: 0, ..lora_config() }, "`lora_rank`: expected from 1 to the model's width of 24"),
        (LoraConfig { rank: 25, ..lora_config() }, "found 25"),
        (LoraConfig { alpha: f64::NAN, ..lora_config() }, "lora_alpha"),
        (LoraConfig { targets: Vec::new(), ..lora_config() }, "found none"),
        (
            LoraConfig { targets: vec!["wte".into()], ..lora_config() },
            "one or more of c_attn, c_proj, c_fc, found wte",
        ),
    ] {
        let error = wrong.check(&config).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    }
}
