//! Checkpoints as found in practice: all names, orientations and dtypes yield the same model.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_testing::{CheckpointFolder, assert_close_absolute, checkpoints, values};
use candle_gpt2_weights::{Checkpoint, LoadOptions, Orientation, WeightsError};
use serde_json::json;

const LINEAR: [&str; 4] =
    ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"];

fn logits(path: &Path) -> Tensor {
    let model = Checkpoint::open(path)
        .and_then(|checkpoint| checkpoint.load(&LoadOptions::default(), &|_| ()))
        .unwrap();
    let ids = Tensor::new(&[[5u32, 299, 0, 17, 130]], &Device::Cpu).unwrap();
    model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap()
}

fn original_logits() -> Tensor {
    logits(CheckpointFolder::tiny().path())
}

fn rename(tensors: &mut HashMap<String, Tensor>, change: impl Fn(&str) -> String) {
    *tensors = tensors.drain().map(|(name, tensor)| (change(&name), tensor)).collect();
}

#[track_caller]
fn assert_same(folder: &CheckpointFolder) {
    assert_eq!(values(&logits(folder.path())), values(&original_logits()));
}

/// Checks the name prefixes of exports with and without a head, and of compiled and wrapped models.
///
/// Names are resolved once for all devices: huggingface/candle#3992, paiml/realizar#55.
#[test]
fn any_prefix_is_recognized() {
    for prefix in ["", "transformer.", "model.", "_orig_mod.transformer.", "module.transformer."] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            rename(tensors, |name| format!("{prefix}{}", name.strip_prefix("transformer.").unwrap()));
        });
        assert_eq!(Checkpoint::open(folder.path()).unwrap().prefix(), prefix);
        assert_same(&folder);
    }
}

/// Checks a header length whose bytes look like JSON.
#[test]
fn header_length_resembling_json_is_accepted() {
    let file = std::fs::read(CheckpointFolder::tiny().file("model.safetensors")).unwrap();
    let length = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let (header, data) = file[8..].split_at(length);
    let mut padded = b" {\0\0\0\0\0\0".to_vec();
    padded.extend_from_slice(header);
    padded.resize(8 + 0x7b20, b' ');
    padded.extend_from_slice(data);
    assert_same(&CheckpointFolder::tiny().with("model.safetensors", padded));
}

#[test]
fn weights_file_opens_like_its_folder() {
    let folder = CheckpointFolder::tiny();
    let file = folder.file("model.safetensors");
    assert_eq!(values(&logits(&file)), values(&original_logits()));
    std::fs::rename(&file, folder.file("weights.safetensors")).unwrap();
    assert_same(&folder);
}

/// The buffers `attn.bias` and `attn.masked_bias` may be present or missing.
///
/// See karpathy/minGPT#120 and huggingface/transformers#24581.
#[test]
fn causal_masks_are_buffers_not_parameters() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        for layer in 0..3 {
            let mask = Tensor::tril2(48, DType::U8, &Device::Cpu).unwrap().reshape((1, 1, 48, 48)).unwrap();
            let fill = Tensor::new(-1e4f32, &Device::Cpu).unwrap();
            tensors.insert(format!("transformer.h.{layer}.attn.bias"), mask);
            tensors.insert(format!("transformer.h.{layer}.attn.masked_bias"), fill);
        }
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.buffers().count(), 6);
    let model = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
    let tiny = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    assert_eq!(
        model.parameter_count(),
        tiny.load(&LoadOptions::default(), &|_| ()).unwrap().parameter_count()
    );
    assert_same(&folder);
}

/// A missing head falls back to the embedding, and a stored copy of the embedding is ignored.
///
/// See huggingface/candle#2516.
#[test]
fn copy_of_the_tied_head_changes_nothing() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let head = tensors["transformer.wte.weight"].clone();
        tensors.insert("lm_head.weight".into(), head);
    });
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tied_head().unwrap().name, "lm_head.weight");
    assert_same(&folder);
}

/// A head that differs from the embedding is an error if the configuration ties them.
///
/// It is neither used nor dropped silently: huggingface/transformers#38870 and #41038.
#[test]
fn head_differing_from_the_tied_embedding_is_rejected() {
    for changed in [-0.5, f64::NAN] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            let head = (tensors["transformer.wte.weight"].clone() * changed).unwrap();
            tensors.insert("lm_head.weight".into(), head);
        });
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let error = checkpoint.check().unwrap_err().to_string();
        let expected = "tensor `lm_head.weight` differs from `transformer.wte.weight` in 8400 of 8400 values";
        assert!(error.contains(expected) && error.contains("set `tie_word_embeddings` to false"), "{error}");
        assert_eq!(checkpoint.verify(&|_| ()).unwrap().len(), 1);
    }
}

/// A copy may have a different dtype, because only the values are compared.
#[test]
fn copy_of_the_tied_head_may_have_another_dtype() {
    let with_head = |change: &[f32]| {
        CheckpointFolder::tiny().with_tensors(|tensors| {
            let embedding = tensors["transformer.wte.weight"].to_dtype(DType::F16).unwrap();
            let values = embedding.to_dtype(DType::F32).unwrap();
            let head = values.broadcast_add(&Tensor::new(change, &Device::Cpu).unwrap()).unwrap();
            tensors.insert("transformer.wte.weight".into(), embedding);
            tensors.insert("lm_head.weight".into(), head);
        })
    };
    let mut change = vec![0.0; 28];
    let copy = with_head(&change);
    Checkpoint::open(copy.path()).unwrap().check().unwrap();
    change[27] = 1.0;
    let error = Checkpoint::open(with_head(&change).path()).unwrap().check().unwrap_err().to_string();
    assert!(error.contains("in 300 of 8400 values"), "only the last value of each row differs: {error}");
}

#[test]
fn untied_configuration_uses_the_separate_head() {
    let halved = |tensors: &mut HashMap<String, Tensor>| {
        let head = (tensors["transformer.wte.weight"].clone() * 0.5).unwrap();
        tensors.insert("lm_head.weight".into(), head);
    };
    let folder =
        CheckpointFolder::tiny().with_tensors(halved).with_config(json!({"tie_word_embeddings": false}));
    let expected = (original_logits() * 0.5).unwrap();
    assert_close_absolute(&logits(folder.path()), &expected, 1e-5, "half of the tied logits");

    let headless = CheckpointFolder::tiny().with_config(json!({"tie_word_embeddings": false}));
    let error = Checkpoint::open(headless.path()).unwrap().check().unwrap_err().to_string();
    assert!(error.contains("tensor `lm_head.weight` is missing: expected shape (300, 28)"), "{error}");
}

/// Linear weights may have shape `(2304, 768)` or `(768, 2304)`: karpathy/nanoGPT#190.
///
/// The square `attn.c_proj` has the layout of the others and never determines it.
#[test]
fn linear_weights_may_be_stored_transposed() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        for (name, tensor) in tensors.iter_mut() {
            if LINEAR.iter().any(|suffix| name.ends_with(suffix)) {
                *tensor = tensor.t().unwrap().contiguous().unwrap();
            }
        }
    });
    assert_eq!(Checkpoint::open(folder.path()).unwrap().orientation(), Orientation::Linear);
    // A different storage order changes the order of summation.
    assert_close_absolute(&logits(folder.path()), &original_logits(), 1e-5, "logits");

    let mixed = CheckpointFolder::tiny().with_tensors(|tensors| {
        let weight = tensors.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap();
        *weight = weight.t().unwrap().contiguous().unwrap();
    });
    let checkpoint = Checkpoint::open(mixed.path()).unwrap();
    assert_eq!(checkpoint.orientation(), Orientation::Conv1D);
    let error = checkpoint.check().unwrap_err().to_string();
    assert!(
        error.contains("tensor `transformer.h.1.mlp.c_fc.weight`: expected shape (28, 50), found (50, 28)"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 2, "nothing else is wrong: {error}");

    // One damaged tensor does not change the orientation of the others.
    let damaged = folder.with_tensors(|tensors| {
        let weight = tensors.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap();
        *weight = weight.narrow(0, 0, 49).unwrap().contiguous().unwrap();
    });
    let error = Checkpoint::open(damaged.path()).unwrap().check().unwrap_err().to_string();
    assert!(
        error.contains("expected shape (50, 28), found (49, 28)") && error.lines().count() == 2,
        "{error}"
    );
}

#[test]
fn stored_dtypes_load_as_their_rounded_f32_values() {
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        let convert = |tensors: &mut HashMap<String, Tensor>, dtypes: &[DType]| {
            for tensor in tensors.values_mut() {
                for dtype in dtypes {
                    *tensor = tensor.to_dtype(*dtype).unwrap();
                }
            }
        };
        let stored = CheckpointFolder::tiny().with_tensors(|tensors| convert(tensors, &[dtype]));
        let rounded = CheckpointFolder::tiny().with_tensors(|tensors| convert(tensors, &[dtype, DType::F32]));
        assert_eq!(values(&logits(stored.path())), values(&logits(rounded.path())), "{dtype:?}");
    }
}

/// The error lists all names with expected and found shapes.
///
/// See huggingface/candle#2516 and karpathy/nanoGPT#126.
#[test]
fn all_mismatches_are_reported_together() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.remove("transformer.h.1.ln_2.bias");
        tensors.remove("transformer.wte.weight");
        tensors.insert(
            "transformer.h.0.ln_1.weight".into(),
            Tensor::ones(27, DType::F32, &Device::Cpu).unwrap(),
        );
        tensors.insert("score.weight".into(), Tensor::ones((2, 28), DType::F32, &Device::Cpu).unwrap());
        tensors
            .insert("transformer.h.2.ln_1.bias".into(), Tensor::ones(28, DType::U8, &Device::Cpu).unwrap());
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap_err();
    assert!(
        matches!(&error, WeightsError::Mismatches { mismatches, .. } if mismatches.len() == 5),
        "{error}"
    );
    let message = error.to_string();
    for line in [
        "tensor `transformer.wte.weight` is missing: expected shape (300, 28)",
        "tensor `transformer.h.0.ln_1.weight`: expected shape (28), found (27)",
        "tensor `transformer.h.1.ln_2.bias` is missing: expected shape (28)",
        "tensor `transformer.h.2.ln_1.bias`: expected dtype F32, F16, BF16 or F64, found U8",
        "tensor `score.weight` of shape (2, 28) is not a parameter of the model",
    ] {
        assert!(message.contains(line), "{line} is not in: {message}");
    }
    assert!(message.contains("model.safetensors"), "{message}");
    assert_eq!(checkpoint.verify(&|_| ()).unwrap().len(), 5);
}

#[test]
fn verify_counts_non_finite_values() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let values = [f32::NAN, 1.0, f32::INFINITY, f32::NEG_INFINITY].repeat(7);
        tensors.insert("transformer.ln_f.bias".into(), Tensor::from_vec(values, 28, &Device::Cpu).unwrap());
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    checkpoint.check().expect("the structure is valid");
    let problems: Vec<String> = checkpoint.verify(&|_| ()).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(problems, ["tensor `transformer.ln_f.bias`: 7 of 28 values are NaN and 14 are infinite"]);
    let sound = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    assert_eq!(sound.verify(&|_| ()).unwrap(), []);
}

#[test]
fn progress_adds_up_to_the_parameter_bytes() {
    let folder = CheckpointFolder::tiny();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let read = std::sync::atomic::AtomicU64::new(0);
    let count = |bytes| {
        read.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    };
    let model = checkpoint.load(&LoadOptions::default(), &count).unwrap();
    assert_eq!(read.into_inner(), 4 * model.parameter_count() as u64);
    assert_eq!(checkpoint.parameter_bytes(), 4 * model.parameter_count() as u64);
}

/// Checks a GPT-2 model that a third party trained and published.
#[test]
fn published_tarotble_checkpoint_is_valid() {
    let Some(folder) = checkpoints() else { return };
    let checkpoint = Checkpoint::open(folder.join("tarotble")).unwrap();
    assert_eq!(checkpoint.verify(&|_| ()).unwrap(), []);
    assert_eq!(checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap().parameter_count(), 929_536);
}
