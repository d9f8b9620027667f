//! Written checkpoints can be read again and contain the same model.
//!
//! `scripts/checks/test_conversions.py` shows that transformers and llama.cpp can read them too.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_testing::{CheckpointFolder, assert_close_absolute, fixture_path, temporary_folder, worst};
use candle_gpt2_weights::{
    Checkpoint, Companions, DifferenceKind, LoadOptions, Orientation, WeightsError, WrittenDType,
    differences, encode, load_tokenizer, write_gguf, write_hugging_face,
};
use serde_json::json;

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap()
}

fn format(name: &str) -> PathBuf {
    fixture_path("formats").join(name)
}

fn written(checkpoint: &Checkpoint, target: &Path, dtype: WrittenDType) -> Result<Checkpoint, WeightsError> {
    let companions = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap().into();
    if target.extension().is_some() {
        write_gguf(checkpoint, &companions, target, dtype, &|_| ())?;
    } else {
        write_hugging_face(checkpoint, &companions, target, dtype, &|_| ())?;
    }
    Ok(open(target))
}

fn largest_difference(first: &Checkpoint, second: &Checkpoint) -> f64 {
    let values = differences(first, second, &|_| ()).unwrap();
    let largest = values.iter().map(|difference| match difference.kind {
        DifferenceKind::Values(largest) => largest,
        ref other => panic!("{}: {other:?}", difference.name),
    });
    worst(largest)
}

/// Checks conversions to a Hugging Face folder, for example from nanoGPT (karpathy/nanoGPT#241).
#[test]
fn every_format_converts_to_a_hugging_face_folder() {
    for name in [
        "pytorch-legacy",
        "pytorch-shards",
        "tensorflow",
        "nanogpt",
        "llmc/gpt2.bin",
        "book",
        "gguf/q4_0.gguf",
    ] {
        let (folder, original) = (temporary_folder(), open(&format(name)));
        let copy = written(&original, &folder.path().join("copy"), WrittenDType::F32).unwrap();
        assert_eq!(largest_difference(&original, &copy), 0.0, "{name}");
        assert_eq!(copy.config(), original.config(), "{name}");
        assert_eq!((copy.prefix(), copy.orientation()), ("transformer.", Orientation::Conv1D), "{name}");
        let text = "The first citizen 🤗";
        let reference = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
        let tokenizer = copy.tokenizer(None).unwrap();
        assert_eq!(encode(&tokenizer, text).unwrap(), encode(&reference, text).unwrap());
    }
}

/// Half precision rounds to 11 significant bits (f16) or 8 (bf16).
///
/// The relative errors are at most 2^-11 and 2^-8, on values below 4.
#[test]
fn half_precision_rounds_once() {
    let original = open(&format("tensorflow"));
    for (dtype, largest) in [(WrittenDType::F16, 4.0 / 2048.0), (WrittenDType::BF16, 4.0 / 256.0)] {
        let folder = temporary_folder();
        let copy = written(&original, &folder.path().join("copy"), dtype).unwrap();
        let difference = largest_difference(&original, &copy);
        assert!(difference > 0.0 && difference <= largest, "{dtype:?}: {difference}");
        let again = written(&copy, &folder.path().join("again"), dtype).unwrap();
        assert_eq!(largest_difference(&copy, &again), 0.0, "{dtype:?}, a second time");
    }
}

#[test]
fn gguf_files_match_the_reference_model_and_tokenizer() {
    let original = open(&format("tensorflow"));
    for (dtype, reference, tolerance) in [
        (WrittenDType::F32, "f32", 1e-4),
        (WrittenDType::F16, "f16", 1e-4),
        (WrittenDType::BF16, "bf16", 1e-4),
        // llama.cpp rounds scales differently. The logits differ by less than the format's error.
        (WrittenDType::Q8_0, "q8_0", 0.05),
        (WrittenDType::Q5_0, "q5_0", 0.3),
        (WrittenDType::Q4_0, "q4_0", 0.5),
    ] {
        let folder = temporary_folder();
        let copy = written(&original, &folder.path().join("copy.gguf"), dtype).unwrap();
        let logits = |checkpoint: &Checkpoint| {
            let model = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
            let ids = Tensor::new(&[[5u32, 299, 0, 17]], &Device::Cpu).unwrap();
            model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap()
        };
        let reference_file = open(&format(&format!("gguf/{reference}.gguf")));
        assert_close_absolute(&logits(&copy), &logits(&reference_file), tolerance, reference);
        let text = "The first citizen 🤗";
        let tokens = encode(&copy.tokenizer(None).unwrap(), text).unwrap();
        assert_eq!(tokens, encode(&reference_file.tokenizer(None).unwrap(), text).unwrap(), "{reference}");
    }
}

#[test]
fn k_quants_are_written_where_rows_fit() {
    let (original, folder) = (open(&format("gguf/q6_k.gguf")), temporary_folder());
    let mut previous = f64::INFINITY;
    for (dtype, stored) in
        [(WrittenDType::Q4K, "Q4_K"), (WrittenDType::Q5K, "Q5_K"), (WrittenDType::Q6K, "Q6_K")]
    {
        let copy = written(&original, &folder.path().join(format!("{stored}.gguf")), dtype).unwrap();
        let blocks = copy.tensors().iter().filter(|tensor| tensor.dtype.to_string() == stored).count();
        assert_eq!(blocks, 5, "four linear layers and the embedding");
        let difference = largest_difference(&original, &copy);
        assert!(difference < 0.75 * previous, "{stored}: {difference}, with one bit less {previous}");
        previous = difference;
    }
    assert!(previous < 0.05, "{previous}");
}

/// llm.c pads the rows of the embedding. Written files contain only the vocabulary's rows.
#[test]
fn padding_rows_are_not_written() {
    let original = open(&format("llmc/gpt2.bin"));
    let folder = temporary_folder();
    for dtype in [WrittenDType::F32, WrittenDType::F16, WrittenDType::BF16, WrittenDType::Q8_0] {
        let copy = written(&original, &folder.path().join(format!("{dtype:?}.gguf")), dtype).unwrap();
        assert_eq!(copy.embedding_rows(), Some(300), "{dtype:?}");
    }
    let exact = open(&folder.path().join("F32.gguf"));
    assert_eq!(largest_difference(&original, &exact), 0.0);
}

/// Checks values above 65,504, the largest finite f16 number.
#[test]
fn values_outside_the_f16_range_are_rejected() {
    let large = CheckpointFolder::tiny().with_tensors(|tensors| {
        let values = Tensor::full(7e4f32, 28, &Device::Cpu).unwrap();
        tensors.insert("transformer.ln_f.bias".into(), values);
    });
    let folder = temporary_folder();
    let message =
        written(&open(large.path()), &folder.path().join("x"), WrittenDType::F16).unwrap_err().to_string();
    assert!(
        message.contains("`ln_f.bias` contains 70000, outside the range of f16; use bf16 or f32"),
        "{message}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(written(&open(large.path()), &folder.path().join("x"), WrittenDType::BF16).is_ok());
}

#[test]
fn failed_conversions_leave_no_files() {
    let folder = temporary_folder();
    let assert_rejected = |checkpoint: &Checkpoint, name: &str, dtype, expected: &str| {
        let message = written(checkpoint, &folder.path().join(name), dtype).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
    };
    let tiny = open(&fixture_path("tiny-checkpoint"));
    assert_rejected(
        &tiny,
        "folder",
        WrittenDType::Q8_0,
        "safetensors does not support q8_0; use f32, f16 or bf16, or write a .gguf file",
    );
    assert_rejected(
        &tiny,
        "x.gguf",
        WrittenDType::Q4_0,
        "rows of 28 values, not a multiple of the block size 32 of q4_0; use f32, f16 or bf16",
    );
    assert_rejected(
        &open(&format("tensorflow")),
        "x.gguf",
        WrittenDType::Q4K,
        "rows of 32 values, not a multiple of the block size 256 of q4_k; use q8_0, q5_0, q4_0, f32, f16 or bf16",
    );
    assert_rejected(&tiny, "no/such/x", WrittenDType::F32, "cannot be written");
    let gelu = CheckpointFolder::tiny().with_config(json!({"activation_function": "gelu"}));
    assert_rejected(
        &open(gelu.path()),
        "x.gguf",
        WrittenDType::F32,
        "llama.cpp's GPT-2 ignores `activation_function`",
    );
    let scaled = CheckpointFolder::tiny().with_config(json!({"scale_attn_by_inverse_layer_idx": true}));
    assert_rejected(
        &open(scaled.path()),
        "x.gguf",
        WrittenDType::F32,
        "llama.cpp's GPT-2 ignores `scale_attn_weights`",
    );
    let damaged = CheckpointFolder::tiny().with_config(json!({"n_layer": 4}));
    assert_rejected(
        &open(damaged.path()),
        "folder",
        WrittenDType::F32,
        "`transformer.h.3.ln_1.weight` is missing",
    );

    let target = folder.path().join("there");
    std::fs::write(&target, "precious").unwrap();
    let message = written(&tiny, &target, WrittenDType::F32).unwrap_err().to_string();
    assert!(message.contains("already exists"), "{message}");
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
}

/// Checks NaN and infinity, which blocks of integers would hide.
#[test]
fn non_finite_values_cannot_be_quantized() {
    let folder = temporary_folder();
    let copy = folder.path().join("copy");
    written(&open(&format("gguf/q4_0.gguf")), &copy, WrittenDType::F32).unwrap();
    let weights = copy.join("model.safetensors");
    for value in [f32::NAN, f32::INFINITY] {
        let mut tensors = candle_core::safetensors::load(&weights, &Device::Cpu).unwrap();
        let tensor = tensors.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap();
        let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[7] = value;
        *tensor = Tensor::from_vec(values, tensor.shape(), &Device::Cpu).unwrap();
        candle_core::safetensors::save(&tensors, &weights).unwrap();
        for dtype in [WrittenDType::Q8_0, WrittenDType::Q4_0] {
            let error = written(&open(&copy), &folder.path().join("x.gguf"), dtype).unwrap_err().to_string();
            assert!(
                error.contains("`h.1.mlp.c_fc.weight` contains") && error.contains("integer blocks"),
                "{error}"
            );
        }
        written(&open(&copy), &folder.path().join(format!("{value}.gguf")), WrittenDType::F32).unwrap();
    }
}

/// The weights have the same permissions as the configuration next to them.
#[cfg(unix)]
#[test]
fn written_files_have_default_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = temporary_folder();
    let out = folder.path().join("out");
    let tiny = open(CheckpointFolder::tiny().path());
    write_hugging_face(&tiny, &Companions::default(), &out, WrittenDType::F32, &|_| ()).unwrap();
    let mode = |name: &str| std::fs::metadata(out.join(name)).unwrap().permissions().mode();
    assert_eq!(mode("model.safetensors"), mode("config.json"));
}
