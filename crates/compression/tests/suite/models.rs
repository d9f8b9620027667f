//! Tests that only models that can restore a file are accepted.

use candle_gpt2_compression::{Compressed, CompressionError, Compressor};
use candle_gpt2_engine::{ModelOptions, WeightDType};
use candle_gpt2_kernels::KvDType;
use candle_gpt2_testing::CheckpointFolder;
use serde_json::json;

use crate::{BUILT_IN, TINY, compressed, decompressed, load, tiny_options};

const TEXT: &[u8] = b"the citizen and the word of the citizen";

#[test]
fn each_dtype_decompresses_only_its_own_files() {
    for dtype in ["f32", "f16", "q8", "q6", "q5", "q4"] {
        for kv_dtype in ["f32", "f16", "q8"] {
            let (dtype, kv_dtype): (WeightDType, KvDType) =
                (dtype.parse().unwrap(), kv_dtype.parse().unwrap());
            let model =
                load(&ModelOptions { dtype: Some(dtype), kv_dtype: Some(kv_dtype), ..tiny_options() });
            let bytes = TEXT.repeat(20);
            let (file, _) = compressed(&Compressor::new(&model, "tiny", None).unwrap(), &bytes);
            let header = Compressed::open(&file[..]).unwrap().header().clone();
            assert_eq!((header.dtype, header.kv_dtype, header.length), (dtype, kv_dtype, None));
            assert_eq!(decompressed(&model, &file).unwrap(), bytes);
            if dtype != WeightDType::Q8 {
                let error = decompressed(&TINY, &file).unwrap_err();
                assert!(matches!(error, CompressionError::DTypeMismatch { .. }), "{error}");
            }
        }
    }
}

#[test]
fn other_models_are_rejected_with_the_expected_name() {
    let (file, _) = compressed(&Compressor::new(&TINY, "folder/tiny", None).unwrap(), TEXT);
    let expected =
        "the file was compressed with a different model, `folder/tiny`; decompress it with that model";
    assert_eq!(decompressed(&BUILT_IN, &file).unwrap_err().to_string(), expected);
    // Same sizes and tokens, but one tensor differs.
    for name in ["wte.weight", "wpe.weight", "h.0.attn.c_attn.bias", "h.0.mlp.c_fc.weight", "h.1.ln_2.bias"] {
        let other = CheckpointFolder::tiny().with_tensors(|tensors| {
            let tensor = tensors.iter_mut().find(|(found, _)| found.ends_with(name)).unwrap().1;
            *tensor = tensor.affine(1.1, 0.01).unwrap();
        });
        let other = load(&ModelOptions { model: other.path().to_owned(), ..tiny_options() });
        assert_eq!(decompressed(&other, &file).unwrap_err().to_string(), expected, "{name}");
    }
    // Same weights, but another activation function.
    let other = CheckpointFolder::tiny().with_config(json!({"activation_function": "gelu"}));
    let other = load(&ModelOptions { model: other.path().to_owned(), ..tiny_options() });
    assert_eq!(decompressed(&other, &file).unwrap_err().to_string(), expected);
}

/// Changes the canary to simulate a file from a machine with different arithmetic.
#[test]
fn arithmetic_mismatch_is_detected_by_the_canary() {
    let (mut file, _) = compressed(&Compressor::new(&TINY, "tiny", None).unwrap(), TEXT);
    // The canary precedes the name. A one-byte length and the header's checksum follow the name.
    let name = file.windows(5).position(|bytes| bytes == b"\x04tiny").unwrap();
    assert!(TEXT.len() < 127);
    file[name - 1] ^= 1;
    let checksum_start = name + 6;
    let checksum = crc32fast::hash(&file[..checksum_start]).to_le_bytes();
    file[checksum_start..checksum_start + 4].copy_from_slice(&checksum);
    let error = decompressed(&TINY, &file).unwrap_err();
    assert!(matches!(error, CompressionError::ArithmeticMismatch), "{error}");
}

#[test]
fn out_of_range_context_is_rejected() {
    for context in [0, 1, 49] {
        let error = Compressor::new(&TINY, "", Some(context)).err().unwrap();
        assert!(error.is_usage());
        let expected = format!("`context`: expected 2 to 48 tokens (the model's limit), found {context}");
        assert_eq!(error.to_string(), expected);
    }
}

/// A tokenizer with tokens only for whole words cannot represent every byte.
#[test]
fn tokenizer_without_byte_tokens_is_rejected() {
    let words = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null, "truncation": null, "padding": null,
        "model": {"type": "WordLevel", "vocab": {"the": 0, "word": 1}, "unk_token": "the"},
    });
    let folder = CheckpointFolder::tiny().with("tokenizer.json", words.to_string());
    let model = load(&ModelOptions { model: folder.path().to_owned(), ..tiny_options() });
    let expected =
        "the tokenizer has no token for byte 0x00; use a model with a byte-level tokenizer, such as GPT-2's";
    assert_eq!(Compressor::new(&model, "", None).err().unwrap().to_string(), expected);
}

/// A tokenizer that normalizes text makes files larger but loses no bytes.
#[test]
fn normalizing_tokenizer_round_trips_every_byte() {
    let tokenizer =
        std::fs::read_to_string(candle_gpt2_testing::fixture_path("tiny-checkpoint/tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    tokenizer["normalizer"] = json!({"type": "Lowercase"});
    let folder = CheckpointFolder::tiny().with("tokenizer.json", tokenizer.to_string());
    let model = load(&ModelOptions { model: folder.path().to_owned(), ..tiny_options() });
    let compressor = Compressor::new(&model, "", None).unwrap();
    for text in ["The Citizen, THE WORD", "the citizen"] {
        assert_eq!(
            decompressed(&model, &compressed(&compressor, text.as_bytes()).0).unwrap(),
            text.as_bytes()
        );
    }
}
