//! Which models restore a file, and which are told to be others.

use candle_gpt2_compression::{Compressed, CompressionError, Compressor};
use candle_gpt2_engine::{ModelOptions, WeightDType};
use candle_gpt2_kernels::KvDType;
use candle_gpt2_testing::CheckpointFolder;
use serde_json::json;

use crate::{BUILT_IN, TINY, compressed, decompressed, load, tiny_options};

const TEXT: &[u8] = b"the citizen and the word of the citizen";

#[test]
fn every_precision_restores_what_it_compressed() {
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
                let refusal = decompressed(&TINY, &file).unwrap_err();
                assert!(matches!(refusal, CompressionError::OtherTypes { .. }), "{refusal}");
            }
        }
    }
}

#[test]
fn another_model_is_refused_by_name() {
    let (file, _) = compressed(&Compressor::new(&TINY, "folder/tiny", None).unwrap(), TEXT);
    let told =
        "the file was compressed with another model, called `folder/tiny`; decompress it with that one";
    assert_eq!(decompressed(&BUILT_IN, &file).unwrap_err().to_string(), told);
    // The same sizes and tokens, and one tensor that is another.
    for name in ["wte.weight", "wpe.weight", "h.0.attn.c_attn.bias", "h.0.mlp.c_fc.weight", "h.1.ln_2.bias"] {
        let other = CheckpointFolder::tiny().with_tensors(|tensors| {
            let tensor = tensors.iter_mut().find(|(found, _)| found.ends_with(name)).unwrap().1;
            *tensor = tensor.affine(1.1, 0.01).unwrap();
        });
        let other = load(&ModelOptions { model: other.path().to_owned(), ..tiny_options() });
        assert_eq!(decompressed(&other, &file).unwrap_err().to_string(), told, "{name}");
    }
    // The same weights, which compute otherwise.
    let other = CheckpointFolder::tiny().with_config(json!({"activation_function": "gelu"}));
    let other = load(&ModelOptions { model: other.path().to_owned(), ..tiny_options() });
    assert_eq!(decompressed(&other, &file).unwrap_err().to_string(), told);
}

/// As a machine would write it that computes other bits.
#[test]
fn another_canary_of_the_same_model_is_noticed() {
    let (mut file, _) = compressed(&Compressor::new(&TINY, "tiny", None).unwrap(), TEXT);
    // The canary is before the name; a length of up to 126 bytes and the header's checksum are behind it.
    let name = file.windows(5).position(|bytes| bytes == b"\x04tiny").unwrap();
    assert!(TEXT.len() < 127);
    file[name - 1] ^= 1;
    let checked = name + 6;
    let checksum = crc32fast::hash(&file[..checked]).to_le_bytes();
    file[checked..checked + 4].copy_from_slice(&checksum);
    let refusal = decompressed(&TINY, &file).unwrap_err();
    assert!(matches!(refusal, CompressionError::OtherArithmetic), "{refusal}");
}

#[test]
fn a_context_that_the_model_has_not_is_refused() {
    for context in [0, 1, 49] {
        let refusal = Compressor::new(&TINY, "", Some(context)).err().unwrap();
        assert!(refusal.is_usage());
        let told = format!("`context`: expected from 2 to the model's 48 positions, found {context}");
        assert_eq!(refusal.to_string(), told);
    }
}

/// Tokens of whole words alone cannot stand for every byte.
#[test]
fn a_tokenizer_without_bytes_is_refused() {
    let words = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null, "truncation": null, "padding": null,
        "model": {"type": "WordLevel", "vocab": {"the": 0, "word": 1}, "unk_token": "the"},
    });
    let folder = CheckpointFolder::tiny().with("tokenizer.json", words.to_string());
    let model = load(&ModelOptions { model: folder.path().to_owned(), ..tiny_options() });
    let told = "the tokenizer has no token for the byte 0x00; only a model with byte-level tokens, such as GPT-2's, can compress";
    assert_eq!(Compressor::new(&model, "", None).err().unwrap().to_string(), told);
}

/// One that changes texts costs bytes of the file and none of the text.
#[test]
fn a_tokenizer_that_normalizes_restores_every_byte() {
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
