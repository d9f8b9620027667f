//! Choice of the weights file in a folder, required tensors, and errors that suggest the right fix.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_testing::{CheckpointFolder, fixture_path};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightsError, encode, is_checkpoint, load_tokenizer};
use serde_json::{Value, json};

const WTE: &str = "transformer.wte.weight";
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 548105171\n";

fn weights() -> Vec<u8> {
    std::fs::read(fixture_path("tiny-checkpoint/model.safetensors")).unwrap()
}

fn without_weights() -> CheckpointFolder {
    CheckpointFolder::tiny().without("model.safetensors")
}

#[track_caller]
fn assert_rejected(path: &Path, expected: &[&str]) {
    let checked = Checkpoint::open(path).and_then(|checkpoint| checkpoint.check());
    let message = checked.expect_err("the checkpoint should be rejected").to_string();
    for expected in expected {
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
}

#[track_caller]
fn assert_loads(folder: &CheckpointFolder) -> Checkpoint {
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.verify(&|_| ()).unwrap(), []);
    checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
    checkpoint
}

#[test]
fn ambiguous_weights_files_are_rejected_and_listed() {
    let gguf = std::fs::read(fixture_path("formats/gguf/f32.gguf")).unwrap();
    let both = without_weights().with("old.safetensors", weights()).with("new.gguf", gguf);
    assert_rejected(both.path(), &["new.gguf", "old.safetensors", "pass one of them"]);
    assert!(Checkpoint::open(both.file("old.safetensors")).is_ok());
    // Archives from other programs and optimizer states are not candidates.
    let one = without_weights()
        .with("mine.safetensors", weights())
        .with("results.npz", b"PK\x03\x04\x14\0\0\0\0\0\0\0!\0scores.npy")
        .with("optimizer.pt", b"PK\x03\x04\x14\0\0\0\0\0\0\0!\0archive/data.pkl")
        .with("adapter_model.safetensors", weights());
    assert!(Checkpoint::open(one.path()).unwrap().weights_path().ends_with("mine.safetensors"));
}

#[test]
fn indexed_shards_count_as_one_candidate() {
    let shards = CheckpointFolder::of("formats/safetensors-shards");
    let index = std::fs::read(shards.file("model.safetensors.index.json")).unwrap();
    let renamed = shards.without("model.safetensors.index.json").with("mine.json", index);
    assert!(Checkpoint::open(renamed.path()).unwrap().weights_path().ends_with("mine.json"));
    let without_index = renamed.without("mine.json");
    assert_rejected(without_index.path(), &["shards", "-of-", "add the index"]);
    let shard = std::fs::read_dir(without_index.path()).unwrap().map(|entry| entry.unwrap().path());
    let shard = shard.into_iter().find(|path| path.to_string_lossy().contains("-of-")).unwrap();
    assert_rejected(&shard, &["one of several shards: pass their index or their folder"]);
}

#[test]
fn notes_list_ignored_files() {
    let notes = |folder: &CheckpointFolder| Checkpoint::open(folder.path()).unwrap().notes().join("\n");
    assert_eq!(notes(&CheckpointFolder::tiny()), "");
    let index =
        CheckpointFolder::tiny().with("model.safetensors.index.json", r#"{"weight_map": {"a": "b"}}"#);
    assert!(
        notes(&index)
            .contains("model.safetensors is used; model.safetensors.index.json and its shards are ignored")
    );
    let adapter = CheckpointFolder::tiny().with("adapter_config.json", "{}");
    assert!(
        notes(&adapter)
            .contains("the adapter next to model.safetensors (adapter_config.json) is not applied")
    );
}

#[test]
fn files_without_weights_are_identified() {
    for (name, contents, expected) in [
        ("tf_model.h5", &b"\x89HDF\r\n\x1a\n\0\0\0\0"[..], "tf_model.h5 is an HDF5 file"),
        (
            "flax_model.msgpack",
            b"\x81\xabtransformer\x84\xa4ln_f",
            "flax_model.msgpack is a MessagePack file",
        ),
        ("model.onnx", b"\x08\x07\x12\x07pytorch\x1a\x051.9.0", "model.onnx is an ONNX model"),
        (
            "weights.pkl",
            b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.",
            "weights.pkl is a pickle that torch.save did not write",
        ),
        (
            "model.bin.gz",
            b"\x1f\x8b\x08\0\0\0\0\0",
            "model.bin.gz is a gzip archive, which is not a supported weights format; unpack it",
        ),
        ("gpt2.Q4_K_M.gguf", POINTER.as_bytes(), "gpt2.Q4_K_M.gguf is a Git LFS pointer"),
        ("model.ckpt.index", POINTER.as_bytes(), "model.ckpt.index is a Git LFS pointer"),
    ] {
        let folder = without_weights().with(name, contents);
        assert_rejected(folder.path(), &[expected]);
        assert_rejected(&folder.file(name), &[name]);
        let message = Checkpoint::open(folder.file(name)).unwrap_err().to_string();
        assert!(!message.contains("safetensors file"), "{message}");
        let renamed = without_weights().with("pytorch_model.bin", contents);
        let message = Checkpoint::open(renamed.path()).unwrap_err().to_string();
        assert!(!message.contains("header claims"), "{message}");
    }
    let program = without_weights().with("gpt2", b"\x7fELF\x02\x01\x01\0\0\0\0\0");
    assert_rejected(&program.file("gpt2"), &["an executable program", "pass a checkpoint folder"]);
    for (name, kind) in [("config.json", "configuration"), ("generation_config.json", "configuration")] {
        let folder = CheckpointFolder::tiny().with(name, POINTER);
        let error = Checkpoint::open(folder.path()).and_then(|checkpoint| checkpoint.generation_config());
        let message = error.unwrap_err().to_string();
        assert!(
            message.contains(name) && message.contains(&format!("pointer in place of the {kind}")),
            "{message}"
        );
    }
}

#[test]
fn checkpoint_folders_and_files_are_recognized() {
    let tiny = CheckpointFolder::tiny();
    assert!(is_checkpoint(tiny.path()) && is_checkpoint(&tiny.file("model.safetensors")));
    assert!(is_checkpoint(CheckpointFolder::of("formats/tensorflow").path()));
    assert!(is_checkpoint(without_weights().with("x.gguf", POINTER).path()));
    let other = without_weights()
        .without("config.json")
        .with("gpt2", b"\x7fELF\x02\x01\x01")
        .with("notes.txt", "words");
    assert!(!is_checkpoint(other.path()) && !is_checkpoint(&other.file("gpt2")));
    assert!(!is_checkpoint(&other.file("notes.txt")) && !is_checkpoint(&other.file("nothing")));
}

/// Checks files written by safetensors' `save_model`, which stores a tied pair only under the head.
#[test]
fn either_tied_tensor_name_is_sufficient() {
    let expected = CheckpointFolder::tiny();
    let logits = |folder: &CheckpointFolder| {
        let model = assert_loads(folder);
        model.parameter("wte.weight", &Device::Cpu, &|_| ()).unwrap().unwrap().to_vec2::<f32>().unwrap()
    };
    let head_alone = CheckpointFolder::tiny().with_tensors(|tensors| {
        let table = tensors.remove(WTE).unwrap();
        tensors.insert("lm_head.weight".into(), table);
    });
    assert_eq!(logits(&head_alone), logits(&expected));
    let checkpoint = Checkpoint::open(head_alone.path()).unwrap();
    assert!(checkpoint.rules().iter().any(|rule| rule.contains("lm_head.weight serves as both")));
    // An untied model needs both tensors.
    let untied = CheckpointFolder::tiny().with_config(json!({"tie_word_embeddings": false}));
    assert_rejected(untied.path(), &["`lm_head.weight` is missing"]);
}

#[test]
fn differing_head_is_not_reported_as_a_copy() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let head = (&tensors[WTE] + 1.0).unwrap();
        tensors.insert("lm_head.weight".into(), head);
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let rules = checkpoint.rules().join("\n");
    assert!(
        rules.contains("`lm_head.weight` differs from the embedding") && !rules.contains("repeats"),
        "{rules}"
    );
}

#[test]
fn unneeded_non_float_tensors_are_skipped() {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            tensors.insert("position_ids".into(), Tensor::zeros((1, 512), dtype, &Device::Cpu).unwrap());
            tensors
                .insert("transformer.h.0.attn.mask".into(), Tensor::zeros(3, dtype, &Device::Cpu).unwrap());
        });
        let checkpoint = assert_loads(&folder);
        assert_eq!(checkpoint.skipped().count(), 2);
        assert!(checkpoint.rules().iter().any(|rule| rule.contains("position_ids")));
    }
    // Dtypes that candle does not support.
    for dtype in ["BOOL", "U16", "I8", "F8_E4M3", "C64"] {
        let size = match dtype {
            "U16" => 2,
            "C64" => 8,
            _ => 1,
        };
        let whole = weights();
        let length = usize::try_from(u64::from_le_bytes(*whole.first_chunk().unwrap())).unwrap();
        let mut header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
        let data = &whole[8 + length..];
        header["mask"] =
            json!({"dtype": dtype, "shape": [4], "data_offsets": [data.len(), data.len() + 4 * size]});
        let header = header.to_string().into_bytes();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, data, &vec![1; 4 * size]].concat();
        assert_loads(&CheckpointFolder::tiny().with("model.safetensors", bytes));
    }
    let floating = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.insert("more.weight".into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
    });
    assert_rejected(floating.path(), &["`more.weight` of shape"]);
    // A required tensor with an integer dtype is still rejected.
    let needed = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.insert(WTE.into(), Tensor::zeros((300, 28), DType::I64, &Device::Cpu).unwrap());
    });
    assert_rejected(
        needed.path(),
        &["`transformer.wte.weight`: expected dtype F32, F16, BF16 or F64, found I64"],
    );
}

/// Tiny checkpoint with a modified safetensors header.
fn with_header(change: impl FnOnce(&mut Value)) -> CheckpointFolder {
    let whole = weights();
    let length = usize::try_from(u64::from_le_bytes(*whole.first_chunk().unwrap())).unwrap();
    let mut header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &whole[8 + length..]].concat();
    CheckpointFolder::tiny().with("model.safetensors", bytes)
}

#[test]
fn unsupported_headers_are_not_reported_as_damage() {
    let metadata = with_header(|header| header["__metadata__"] = json!({"format": "pt", "step": 100}));
    let dtype = with_header(|header| header[WTE]["dtype"] = "F2".into());
    for (folder, expected) in [
        (metadata, ["`__metadata__` values must be strings, but `step` is 100", "not damaged"]),
        (dtype, [WTE, "unsupported dtype `F2`; save the model in f32, f16 or bf16"]),
    ] {
        assert_rejected(folder.path(), &expected);
        let message = Checkpoint::open(folder.path()).unwrap_err().to_string();
        assert!(!message.contains("download"), "{message}");
    }
    let empty = CheckpointFolder::tiny().with_tensors(|tensors| tensors.clear());
    assert_rejected(empty.path(), &["the file contains no tensors"]);
}

#[test]
fn size_mismatches_name_the_configuration_file() {
    for (changes, expected) in [
        (
            json!({"vocab_size": 301}),
            "config.json (the configured `vocab_size` is 301, but the tensors have 300; correct it",
        ),
        (json!({"n_positions": 65, "n_ctx": 65}), "the configured `n_positions` is 65"),
        (json!({"n_layer": 4}), "the configured `n_layer` is 4, but the tensors have 3"),
        (json!({"n_layer": 2}), "the configured `n_layer` is 2, but the tensors have 3"),
        (json!({"n_inner": 100}), "the configured `n_inner` is 100"),
    ] {
        assert_rejected(CheckpointFolder::tiny().with_config(changes).path(), &[expected]);
    }
    let tensorflow = CheckpointFolder::of("formats/tensorflow");
    let hparams = std::fs::read_to_string(tensorflow.file("hparams.json")).unwrap();
    let mut changed: Value = serde_json::from_str(&hparams).unwrap();
    changed["n_vocab"] = json!(301);
    let changed = tensorflow.with("hparams.json", changed.to_string());
    assert_rejected(changed.path(), &["do not match hparams.json", "`vocab_size` is 301"]);
    let missing = changed.without("hparams.json");
    assert_rejected(missing.path(), &["hparams.json is missing"]);
    // nanoGPT stores the sizes in the weights file.
    let nanogpt = CheckpointFolder::of("formats/nanogpt");
    assert!(Checkpoint::open(nanogpt.path()).unwrap().check().is_ok());
}

#[test]
fn bit_flip_in_a_tensorflow_file_is_detected() {
    let folder = CheckpointFolder::of("formats/tensorflow");
    let data = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let data = data.into_iter().find(|path| path.to_string_lossy().contains(".data-")).unwrap();
    let name = data.file_name().unwrap().to_str().unwrap().to_owned();
    let whole = std::fs::read(&data).unwrap();
    for offset in [0, whole.len() / 2, whole.len() - 1] {
        let mut flipped = whole.clone();
        flipped[offset] ^= 1;
        let folder = CheckpointFolder::of("formats/tensorflow").with(&name, flipped);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let loaded = checkpoint.load(&LoadOptions::default(), &|_| ()).map(drop);
        let verified = checkpoint.verify(&|_| ()).map(drop);
        for error in [loaded.unwrap_err(), verified.unwrap_err()] {
            let message = error.to_string();
            assert!(message.contains("do not match the checksum") && message.contains(&name), "{message}");
        }
    }
    let truncated = folder.with(&name, &whole[..whole.len() - 5]);
    assert_rejected(truncated.path(), &[&name, "truncated: tensor `"]);
}

/// IQ4_NL blocks have the same size as Q4_0 blocks, so only the type id needs to change.
#[test]
fn unsupported_gguf_types_are_reported() {
    let mut bytes = std::fs::read(fixture_path("formats/gguf/q4_0.gguf")).unwrap();
    let name = b"blk.0.ffn_up.weight";
    let offset = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // The name is followed by the number of dimensions, two sizes and the type.
    let offset = offset + 4 + 2 * 8;
    for (number, expected) in [(20u32, "found IQ4_NL"), (99, "found an unknown ggml type")] {
        bytes[offset..offset + 4].copy_from_slice(&number.to_le_bytes());
        let folder = without_weights().with("model.gguf", &bytes);
        assert_rejected(
            &folder.file("model.gguf"),
            &["`blk.0.ffn_up.weight`", expected, "which is unsupported; convert"],
        );
        let message = Checkpoint::open(folder.file("model.gguf")).unwrap().check().unwrap_err().to_string();
        assert!(!message.contains("damaged") && !message.contains("download"), "{message}");
    }
}

#[test]
fn adapter_in_place_of_a_model_is_reported() {
    let adapter = without_weights()
        .without("config.json")
        .with("adapter_config.json", r#"{"base_model_name_or_path": "openai-community/gpt2"}"#)
        .with("adapter_model.safetensors", weights());
    assert_rejected(
        adapter.path(),
        &[
            "an adapter for openai-community/gpt2",
            "use `--adapter ",
            "`gpt2 convert openai-community/gpt2 OUT --adapter ",
        ],
    );
    let config = std::fs::read(fixture_path("tiny-checkpoint/config.json")).unwrap();
    assert_rejected(adapter.with("config.json", config).path(), &["an adapter for openai-community/gpt2"]);
    let by_tensors = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.clear();
        let low = Tensor::zeros((2, 28), DType::F32, &Device::Cpu).unwrap();
        tensors.insert("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight".into(), low);
    });
    assert_rejected(by_tensors.path(), &["an adapter, not a model", "--model BASE"]);
}

/// Vocabulary and merges of the tiny checkpoint's tokenizer.
fn vocabulary_and_merges() -> (Value, Vec<String>) {
    let text = std::fs::read(fixture_path("tiny-checkpoint/tokenizer.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge {
        Value::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    });
    (json["model"]["vocab"].clone(), merges.collect())
}

fn tokenizer_of(vocabulary: &Value, merges: &str) -> Result<Vec<u32>, WeightsError> {
    let folder = CheckpointFolder::tiny()
        .without("tokenizer.json")
        .with("vocab.json", vocabulary.to_string())
        .with("merges.txt", merges);
    encode(&load_tokenizer(folder.path())?, "The first citizen")
}

#[test]
fn line_endings_and_bom_do_not_affect_merges() {
    let (vocabulary, merges) = vocabulary_and_merges();
    let expected = tokenizer_of(&vocabulary, &format!("#version: 0.2\n{}\n", merges.join("\n"))).unwrap();
    for (bom, end) in [("", "\r\n"), ("", "\r"), ("\u{feff}", "\n"), ("\u{feff}", "\r\n"), ("\u{feff}", "\r")]
    {
        let text = format!("{bom}#version: 0.2{end}{}{end}", merges.join(end));
        assert_eq!(tokenizer_of(&vocabulary, &text).unwrap(), expected, "{bom:?} {end:?}");
    }
}

#[test]
fn invalid_merges_are_reported_with_their_line() {
    let (vocabulary, mut merges) = vocabulary_and_merges();
    for (broken, expected) in [
        ("onlyone", "line 4 of the merges: `onlyone` is not a merge of two tokens"),
        ("a b c", "line 4 of the merges: `a b c` is not a merge of two tokens"),
        ("q zzz", "line 4 of the merges: `q zzz` needs the token `zzz`"),
        ("", "line 4 of the merges: `` is not a merge"),
    ] {
        let original = std::mem::replace(&mut merges[2], broken.to_owned());
        let message =
            tokenizer_of(&vocabulary, &format!("#version: 0.2\n{}\n", merges.join("\n"))).unwrap_err();
        assert!(message.to_string().contains(expected), "`{expected}` is not in: {message}");
        merges[2] = original;
    }
}

#[test]
fn duplicate_token_ids_are_rejected() {
    let (mut vocabulary, merges) = vocabulary_and_merges();
    vocabulary["zq"] = vocabulary["a"].clone();
    let message = tokenizer_of(&vocabulary, &merges.join("\n")).unwrap_err().to_string();
    assert!(
        message.contains("\"a\"") && message.contains("\"zq\"") && message.contains("share the id"),
        "{message}"
    );
}

#[test]
fn missing_tokenizer_error_names_similar_files() {
    for (name, expected) in [
        ("vocab_zh.txt", "vocab_zh.txt may be one; pass it as the tokenizer"),
        ("meta.pkl", "only nanoGPT's meta.pkl"),
        ("my.tokenizer.json", "my.tokenizer.json may be one; pass it as the tokenizer"),
    ] {
        let folder = CheckpointFolder::tiny().without("tokenizer.json").without("vocab.json").with(name, "x");
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let message = checkpoint.tokenizer(None).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
}
