//! LoRA adapters saved by PEFT: the adapted models must match PEFT's.
//!
//! `scripts/reference/adapters.py` writes the fixtures.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{HeadKind, LogitsFor, Pass};
use candle_gpt2_testing::{Fixture, assert_close_absolute, fixture_path, temporary_folder};
use candle_gpt2_weights::{Adapter, Checkpoint, LoadOptions, WeightDType};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tolerance between two implementations with the same f32 weights.
const EXACT: f64 = 1e-4;
/// Layer that the adapter `plain` changes in the tiny checkpoint.
const C_ATTN: &str = "base_model.model.transformer.h.1.attn.c_attn";

fn expected() -> Fixture {
    Fixture::open("adapters/expected")
}

fn base() -> Checkpoint {
    Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap()
}

fn adapter(name: &str) -> Adapter {
    Adapter::open(fixture_path("adapters").join(name)).unwrap()
}

fn adapted(adapters: &[(&str, f64)]) -> Checkpoint {
    let adapters: Vec<_> = adapters.iter().map(|(name, weight)| (adapter(name), *weight)).collect();
    base().with_adapters(&adapters).unwrap()
}

fn logits(checkpoint: &Checkpoint) -> Tensor {
    let options = LoadOptions { dtype: Some(WeightDType::F32), ..LoadOptions::default() };
    let model = checkpoint.load(&options, &|_| ()).unwrap();
    let ids = expected().tensor("ids").to_dtype(DType::U32).unwrap().unsqueeze(0).unwrap();
    model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap().squeeze(0).unwrap()
}

/// Copy of the adapter `plain` that a test modifies.
struct ModifiedAdapter {
    folder: TempDir,
}

impl ModifiedAdapter {
    fn new() -> Self {
        let folder = temporary_folder();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(fixture_path("adapters/plain").join(name), folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with_tensors(self, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> Self {
        let file = self.file("adapter_model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, &file).unwrap();
        self
    }

    fn with_settings(self, changes: &Value) -> Self {
        let file = self.file("adapter_config.json");
        let mut settings: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for (name, value) in changes.as_object().unwrap() {
            settings[name] = value.clone();
        }
        std::fs::write(file, settings.to_string()).unwrap();
        self
    }

    fn error(&self) -> String {
        let applied =
            Adapter::open(self.folder.path()).and_then(|adapter| base().with_adapters(&[(adapter, 1.0)]));
        applied.unwrap_err().to_string()
    }

    #[track_caller]
    fn assert_rejected(&self, parts: &[&str]) {
        let error = self.error();
        assert!(error.contains(self.folder.path().to_str().unwrap()), "the folder is not named: {error}");
        for part in parts {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn adapted_models_match_peft() {
    for name in ["plain", "patterns", "rslora", "saved", "bias-all", "bias-lora", "regex", "layers", "untied"]
    {
        assert_close_absolute(&logits(&adapted(&[(name, 1.0)])), &expected().tensor(name), EXACT, name);
    }
    let pickled = logits(&adapted(&[("pickled", 1.0)]));
    assert_close_absolute(&pickled, &expected().tensor("plain"), EXACT, "pickled");
}

#[test]
fn weighted_adapters_add_up() {
    let both = logits(&adapted(&[("plain", 0.5), ("rslora", 1.25)]));
    assert_close_absolute(&both, &expected().tensor("plain+rslora"), EXACT, "plain+rslora");
    let none = logits(&adapted(&[("plain", 0.0)]));
    assert_close_absolute(&none, &logits(&base()), EXACT, "a weight of 0");
}

#[cfg(not(target_os = "wasi"))]
#[test]
fn conversion_merges_adapters() {
    use candle_gpt2_weights::{Companions, WrittenDType, write_gguf, write_hugging_face};
    let folder = temporary_folder();
    for name in ["patterns", "saved", "untied"] {
        let (checkpoint, copy) = (adapted(&[(name, 1.0)]), folder.path().join(name));
        write_hugging_face(&checkpoint, &Companions::default(), &copy, WrittenDType::F32, &|_| ()).unwrap();
        let merged = Checkpoint::open(&copy).unwrap();
        assert_close_absolute(&logits(&merged), &expected().tensor(name), EXACT, name);
        let file = folder.path().join(format!("{name}.gguf"));
        let companions = base().companions(None).unwrap();
        write_gguf(&checkpoint, &companions, &file, WrittenDType::F32, &|_| ()).unwrap();
        assert_close_absolute(
            &logits(&Checkpoint::open(&file).unwrap()),
            &expected().tensor(name),
            EXACT,
            name,
        );
    }
}

/// Checks an adapter that contains a classification head, as written by `train --lora-rank`.
#[test]
fn adapter_provides_its_classification_head() {
    let changed = ModifiedAdapter::new()
        .with_settings(&json!({"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}))
        .with_tensors(|tensors| _ = tensors.insert("base_model.model.score.weight".into(), zeros(&[3, 28])));
    let adapter = Adapter::open(changed.folder.path()).unwrap();
    let checkpoint = base().with_adapters(&[(adapter, 1.0)]).unwrap();
    assert_eq!(checkpoint.config().head, HeadKind::SequenceClassification);
    assert_eq!(checkpoint.config().id2label, ["LABEL_0", "LABEL_1", "LABEL_2"]);
    let score = checkpoint.parameter("score.weight", &Device::Cpu, &|_| ()).unwrap().unwrap();
    assert_eq!(score.dims(), [3, 28]);
}

#[test]
fn mismatched_tensors_are_reported() {
    let a = format!("{C_ATTN}.lora_A.weight");
    let b = format!("{C_ATTN}.lora_B.weight");
    let other_layer = "base_model.model.transformer.h.9.attn.c_attn.lora_A.weight";
    for (name, tensor, parts) in [
        (a.as_str(), None, vec![a.as_str(), "is missing: expected shape (3, 28)"]),
        (&a, Some(zeros(&[3, 29])), vec![&a, "expected shape (3, 28), found (3, 29)"]),
        (&a, Some(zeros(&[4, 28])), vec![&a, "expected shape (3, 28), found (4, 28)"]),
        (&b, Some(zeros(&[3, 84])), vec![&b, "expected shape (84, 3), found (3, 84)"]),
        (&b, Some(zeros(&[84])), vec![&b, "expected shape (84, 3), found (84)"]),
        (
            other_layer,
            Some(zeros(&[3, 28])),
            vec![other_layer, "not a parameter of this model with 3 blocks"],
        ),
        (
            "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight",
            Some(zeros(&[3, 28])),
            vec!["h.0.mlp.c_fc.lora_A", "adapter_config.json does not select it"],
        ),
        (
            "base_model.model.transformer.wte.weight",
            Some(zeros(&[301, 28])),
            vec![
                "wte.weight",
                "expected shape (300, 28), found (301, 28)",
                "use its base model, tiny-checkpoint",
            ],
        ),
        (&b, Some(Tensor::full(f32::NAN, (84, 3), &Device::Cpu).unwrap()), vec![&b, "NaN or infinite"]),
        (
            "base_model.model.transformer.h.0.attn.c_attn.lora_magnitude_vector",
            Some(zeros(&[84])),
            vec!["DoRA", "merge_and_unload"],
        ),
    ] {
        let changed = ModifiedAdapter::new().with_tensors(|tensors| match tensor {
            Some(tensor) => _ = tensors.insert(name.to_owned(), tensor),
            None => _ = tensors.remove(name),
        });
        changed.assert_rejected(&parts);
    }
    ModifiedAdapter::new().with_tensors(HashMap::clear).assert_rejected(&["lora_A.weight` is missing"]);
}

#[test]
fn contradictory_or_unsupported_settings_are_rejected() {
    for (changes, expected) in [
        (json!({"r": 5}), "expected shape (5, 28), found (3, 28)"),
        (json!({"rank_pattern": {"c_attn": 2}}), "expected shape (2, 28), found (3, 28)"),
        (json!({"target_modules": ["c_attn", "c_fc"]}), "mlp.c_fc.lora_A.weight` is missing"),
        (json!({"layers_to_transform": [0]}), "does not select it"),
        (json!({"modules_to_save": ["ln_f"]}), "transformer.ln_f.weight` is missing: expected shape (28)"),
        (json!({"lora_alpha": 1e300}), "outside the range of f32"),
        (json!({"use_dora": true}), "DoRA"),
        (json!({"peft_type": "PROMPT_TUNING"}), "PROMPT_TUNING"),
        (json!({"ensure_weight_tying": true, "future_setting": "on"}), "`future_setting`"),
    ] {
        ModifiedAdapter::new().with_settings(&changes).assert_rejected(&[expected]);
    }
    let nan = std::fs::read_to_string(fixture_path("adapters/plain/adapter_config.json")).unwrap();
    let changed = ModifiedAdapter::new();
    std::fs::write(
        changed.file("adapter_config.json"),
        nan.replace("\"lora_alpha\": 8", "\"lora_alpha\": NaN"),
    )
    .unwrap();
    changed.assert_rejected(&["adapter_config.json", "numbers must be finite"]);
}

#[test]
fn replaced_tensors_reject_weights_and_other_adapters() {
    let apply = |adapters: &[(&str, f64)]| {
        let adapters: Vec<_> = adapters.iter().map(|(name, weight)| (adapter(name), *weight)).collect();
        base().with_adapters(&adapters).map_err(|error| error.to_string())
    };
    let weighted = apply(&[("saved", 0.5)]).unwrap_err();
    assert!(weighted.contains("cannot be scaled") && weighted.contains("omit the weight"), "{weighted}");
    let twice = apply(&[("saved", 1.0), ("saved", 1.0)]).unwrap_err();
    assert!(twice.contains("another adapter also replaces"), "{twice}");
    assert!(apply(&[("saved", 1.0), ("plain", 0.5)]).is_ok());
    let nan = apply(&[("plain", f64::NAN)]).unwrap_err();
    assert!(nan.contains("the adapter weight NaN is not a finite number"), "{nan}");
}

#[test]
fn missing_files_are_reported() {
    let changed = ModifiedAdapter::new();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        assert!(Adapter::open(changed.file(name)).is_ok(), "a file in place of its folder");
    }
    let read = |path: &Path| Adapter::open(path).unwrap_err().to_string();
    std::fs::remove_file(changed.file("adapter_model.safetensors")).unwrap();
    let weights = read(changed.folder.path());
    assert!(weights.contains("adapter_model.safetensors or adapter_model.bin is missing"), "{weights}");
    let outer = temporary_folder();
    assert!(read(outer.path()).contains("adapter_config.json is missing"));
    std::fs::create_dir(outer.path().join("adapter")).unwrap();
    std::fs::copy(changed.file("adapter_config.json"), outer.path().join("adapter/adapter_config.json"))
        .unwrap();
    assert!(read(outer.path()).contains("the adapter is in"), "as `train --lora-rank` writes");
    assert!(read(&outer.path().join("nothing")).contains("no such file or folder"));
}

/// An adapter next to weights is reported and not applied.
///
/// transformers would apply it, but it may already be merged into the weights.
#[test]
fn adapter_next_to_weights_is_noted_but_not_applied() {
    use candle_gpt2_testing::CheckpointFolder;
    let settings = std::fs::read(fixture_path("adapters/plain/adapter_config.json")).unwrap();
    let tensors = std::fs::read(fixture_path("adapters/plain/adapter_model.safetensors")).unwrap();
    let both = CheckpointFolder::tiny()
        .with("adapter_config.json", settings)
        .with("adapter_model.safetensors", tensors);
    for path in [both.path().to_owned(), both.file("model.safetensors")] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let [note] = checkpoint.notes() else { panic!("{:?}", checkpoint.notes()) };
        assert!(note.contains("is not applied") && note.contains("`--adapter "), "{note}");
        assert_close_absolute(&logits(&checkpoint), &logits(&base()), EXACT, "the weights alone");
        let adapter = Adapter::open(both.path()).unwrap();
        let applied = checkpoint.with_adapters(&[(adapter, 1.0)]).unwrap();
        assert!(applied.notes().is_empty(), "{:?}", applied.notes());
        assert_close_absolute(&logits(&applied), &expected().tensor("plain"), EXACT, "applied");
    }
}
