//! Missing, truncated, inconsistent and wrong files: errors state the problem and the remedy.

use candle_gpt2_testing::{CheckpointFolder, temporary_folder};
use candle_gpt2_weights::{Checkpoint, load_tokenizer};
use serde_json::json;

use crate::supplied_files::{FileSource, open, supplied};

/// Checks that opening fails, with the same message for supplied files as for files on disk.
#[track_caller]
fn assert_rejected(folder: &CheckpointFolder, expected: &[&str]) {
    let message = Checkpoint::open(folder.path()).expect_err("the checkpoint should be rejected").to_string();
    for source in [FileSource::InMemory, FileSource::Ranged] {
        let Some(files) = supplied(folder.path(), source) else { continue };
        let supplied_error = open(files).expect_err("the checkpoint should be rejected").to_string();
        assert_eq!(
            supplied_error.replace("supply only one of them", "pass one of them"),
            message,
            "{source:?}"
        );
    }
    for part in expected {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn with_weights(contents: impl AsRef<[u8]>) -> CheckpointFolder {
    CheckpointFolder::tiny().with("model.safetensors", contents)
}

pub(crate) fn original_weights() -> Vec<u8> {
    std::fs::read(CheckpointFolder::tiny().file("model.safetensors")).unwrap()
}

/// Builds a safetensors file with this header, followed by `data` zero bytes.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn missing_path_is_reported() {
    let message = Checkpoint::open("/no/such/folder").unwrap_err().to_string();
    assert!(message.starts_with("/no/such/folder: no such file or folder"), "{message}");
}

#[test]
fn missing_configuration_is_reported() {
    assert_rejected(&CheckpointFolder::tiny().without("config.json"), &["config.json is missing"]);
}

#[test]
fn missing_weights_error_lists_other_files() {
    let empty = CheckpointFolder::tiny().without("model.safetensors");
    assert_rejected(&empty, &["no model.safetensors"]);
    let other = CheckpointFolder::tiny().without("model.safetensors").with("pytorch_model.bin", "");
    assert_rejected(&other, &["pytorch_model.bin: the file is empty"]);
    let several = empty.with("a.safetensors", original_weights()).with("b.safetensors", original_weights());
    assert_rejected(
        &several,
        &["several other weights files (a.safetensors, b.safetensors)", "pass one of them"],
    );
}

#[test]
fn invalid_configuration_is_reported() {
    for (changes, expected) in [
        (json!({"n_embd": null}), "the key `n_embd` is missing"),
        (json!({"n_head": 5}), "`n_head` = 5 does not divide `n_embd` = 28"),
        (json!({"n_layer": 0}), "`n_layer`: expected a whole number from 1"),
        (json!({"n_embd": 1_000_000_000_000u64}), "`n_embd`: expected a whole number from 1"),
        (json!({"activation_function": "mish"}), "`activation_function` = \"mish\" is not supported"),
        (json!({"model_type": "bert"}), "`model_type` = \"bert\" is not supported"),
    ] {
        assert_rejected(&CheckpointFolder::tiny().with_config(changes), &["config.json", expected]);
    }
    assert_rejected(&CheckpointFolder::tiny().with("config.json", "{"), &["config.json", "not valid JSON"]);
    let large = CheckpointFolder::tiny().with("config.json", vec![b' '; 2 << 20]);
    assert_rejected(&large, &["larger than 1048576 bytes"]);
}

#[test]
fn configuration_size_mismatch_lists_the_tensors() {
    let folder = CheckpointFolder::tiny().with_config(json!({"n_embd": 32, "n_layer": 4}));
    let message = Checkpoint::open(folder.path()).unwrap().check().unwrap_err().to_string();
    assert!(
        message.contains("`transformer.wte.weight`: expected shape (300, 32), found (300, 28)"),
        "{message}"
    );
    assert!(message.contains("`transformer.h.3.ln_1.weight` is missing"), "{message}");
    // 1021 blocks of 12 tensors are missing, and a message lists at most 1000 of them.
    let absurd = CheckpointFolder::tiny().with_config(json!({"n_layer": 1024}));
    let message = Checkpoint::open(absurd.path()).unwrap().check().unwrap_err().to_string();
    assert!(
        message.ends_with(&format!("and {} more", (1024 - 3) * 12 - 1000)),
        "the list should be truncated"
    );
}

/// Checks files that are not weights, such as Git LFS pointers (NVIDIA/FasterTransformer#342).
#[test]
fn non_weights_content_is_identified() {
    for (contents, expected) in [
        (&b""[..], "the file is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 548105171\n",
            "a Git LFS pointer in place of the weights (the file has 548105171 bytes); run `git lfs pull`",
        ),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML or XML page in place of the weights"),
        (b"\n\n <html>", "an HTML or XML page"),
        (
            b"{\"error\":\"Repository not found\"}",
            "JSON text in place of the weights: {\"error\":\"Repository not found\"}",
        ),
        (b"PK\x03\x04rest of an archive", "a damaged PyTorch file"),
        (b"\x80\x02}q\x00.", "a pickle that torch.save did not write"),
        (b"GGUF\x03\x00\x00\x00", "a damaged GGUF file"),
        (b"abc", "3 bytes are too few for a header"),
        (b"just some text that is no checkpoint at all", "not a safetensors file, or a truncated one"),
    ] {
        assert_rejected(&with_weights(contents), &["model.safetensors", expected]);
    }
}

#[test]
fn truncated_files_report_both_sizes() {
    let whole = original_weights();
    let message = format!("truncated: expected {} bytes, found {}", whole.len(), whole.len() - 1);
    assert_rejected(&with_weights(&whole[..whole.len() - 1]), &[&message]);
    assert_rejected(&with_weights(&whole[..whole.len() / 2]), &["truncated: expected", "download it again"]);
    assert_rejected(&with_weights(&whole[..100]), &["its header claims", "the file has 100"]);
    let mut longer = whole.clone();
    longer.extend([0; 5]);
    assert_rejected(&with_weights(longer), &["extra data after the last tensor"]);
}

/// False sizes in a header never cause an allocation or a read beyond the file.
#[test]
fn inconsistent_headers_are_rejected() {
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"wte.weight":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for header in [
        tensor("[2,2]", "[0,15]"),
        tensor("[2,2]", "[4,20]"),
        tensor("[2,2]", "[16,0]"),
        tensor("[4611686018427387904,4]", "[0,16]"),
        tensor("[1000000000000]", "[0,4000000000000]"),
        tensor("[-1]", "[0,4]"),
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#.into(),
        r#"{"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}"#.into(),
        "[".repeat(100_000),
        "not json".into(),
    ] {
        assert_rejected(&with_weights(safetensors(&header, 16)), &["model.safetensors"]);
    }
    let mut huge_claim = u64::MAX.to_le_bytes().to_vec();
    huge_claim.extend([b' '; 64]);
    assert_rejected(
        &with_weights(huge_claim),
        &["its header claims 18446744073709551615 bytes, but the file has 72"],
    );
}

#[test]
fn folder_in_place_of_weights_is_rejected() {
    let folder = CheckpointFolder::tiny().without("model.safetensors");
    std::fs::create_dir(folder.file("model.safetensors")).unwrap();
    assert_rejected(&folder, &["model.safetensors: not a regular file"]);
}

#[test]
fn missing_and_broken_tokenizers_are_reported() {
    let message = |folder: &CheckpointFolder| load_tokenizer(folder.path()).unwrap_err().to_string();
    let none = CheckpointFolder::tiny().without("tokenizer.json").without("merges.txt");
    assert!(message(&none).contains(
        "no tokenizer found; copy tokenizer.json, vocab.json with merges.txt, spiece.model or vocab.txt from the checkpoint's source, or use another tokenizer"
    ));
    let other = none
        .with("tokenizer_config.json", "{}")
        .with("my.tokenizer.json", "{}")
        .with("tokenizer-2.json", "{}");
    assert!(
        message(&other)
            .ends_with("no tokenizer found, but my.tokenizer.json may be one; pass it as the tokenizer"),
        "{}",
        message(&other)
    );
    for contents in ["", "{}", "<html>", "version https://git-lfs.github.com/spec/v1", "[", "{\"model\":1}"] {
        let broken = CheckpointFolder::tiny().with("tokenizer.json", contents);
        assert!(message(&broken).contains("tokenizer.json: not a usable tokenizer"), "{}", message(&broken));
    }
    let broken = CheckpointFolder::tiny().without("tokenizer.json").with("vocab.json", "[1]");
    assert!(message(&broken).contains("vocab.json and merges.txt"), "{}", message(&broken));
    assert!(load_tokenizer("/no/such/file").unwrap_err().to_string().contains("no such file"));
}

#[test]
fn both_tokenizer_formats_give_the_same_ids() {
    let json = CheckpointFolder::tiny();
    let pair = CheckpointFolder::tiny().without("tokenizer.json");
    let [json, pair] = [&json, &pair].map(|folder| load_tokenizer(folder.path()).unwrap());
    for text in ["The first citizen", "naïve café 🤗", "  two  spaces\n\n", "<|endoftext|>after", ""] {
        let ids = |tokenizer: &candle_gpt2_weights::Tokenizer| {
            tokenizer.encode(text, true).unwrap().get_ids().to_vec()
        };
        assert_eq!(ids(&json), ids(&pair), "{text:?}");
        assert_eq!(json.decode(&ids(&json), false).unwrap(), text);
    }
}

/// Checks the files that transformers' `GPT2Tokenizer` reads next to `vocab.json` and `merges.txt`.
#[test]
fn files_next_to_the_vocabulary_are_read() {
    let pair = || CheckpointFolder::tiny().without("tokenizer.json");
    let ids = |folder: &CheckpointFolder, text: &str| {
        candle_gpt2_weights::encode(&load_tokenizer(folder.path()).unwrap(), text).unwrap()
    };
    let plain = ids(&pair(), "The");
    let added = pair().with("added_tokens.json", r#"{"<|user|>": 301, "<pad>": 300}"#);
    assert_eq!(ids(&added, "<|user|>The<pad>"), [&[301], plain.as_slice(), &[300]].concat());
    let gap = pair().with("added_tokens.json", r#"{"<pad>": 305}"#);
    assert!(
        load_tokenizer(gap.path()).unwrap_err().to_string().contains("the id of `<pad>` does not follow")
    );
    let special =
        pair().with("special_tokens_map.json", r#"{"additional_special_tokens": [{"content": "<|user|>"}]}"#);
    assert_eq!(ids(&special, "<|user|>The"), [&[300], plain.as_slice()].concat());
    let bos = pair().with("tokenizer_config.json", r#"{"add_bos_token": true}"#);
    assert_eq!(ids(&bos, "The"), [&[0], plain.as_slice()].concat());
    let space = pair().with("tokenizer_config.json", r#"{"add_prefix_space": true}"#);
    assert_eq!(ids(&space, "The"), ids(&pair(), " The"));
}

/// Checks FIFOs and devices: reading a FIFO would block forever, and a device may have no end.
#[cfg(unix)]
#[test]
fn special_files_are_rejected_without_reading() {
    for name in ["config.json", "model.safetensors"] {
        let folder = CheckpointFolder::tiny().without(name);
        std::os::unix::fs::symlink("/dev/zero", folder.file(name)).unwrap();
        assert_rejected(&folder, &[name, "not a regular file"]);
        let folder = CheckpointFolder::tiny().without(name);
        std::os::unix::fs::symlink(folder.file(name), folder.file(name)).unwrap();
        assert!(Checkpoint::open(folder.path()).is_err(), "a link to itself");
    }
}

#[test]
fn shards_must_match_their_index() {
    let shards = || {
        let folder = temporary_folder();
        for entry in
            std::fs::read_dir(candle_gpt2_testing::fixture_path("formats/safetensors-shards")).unwrap()
        {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        folder
    };
    let assert_error = |folder: &tempfile::TempDir, expected: &str| {
        let message = Checkpoint::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    };
    let index = "model.safetensors.index.json";
    let with_index = |change: &dyn Fn(&str) -> String| {
        let folder = shards();
        let text = std::fs::read_to_string(folder.path().join(index)).unwrap();
        std::fs::write(folder.path().join(index), change(&text)).unwrap();
        folder
    };
    let third = "model-00003-of-00004.safetensors";
    let missing = shards();
    std::fs::remove_file(missing.path().join(third)).unwrap();
    assert_error(&missing, "the shard model-00003-of-00004.safetensors is missing");
    for outside in ["../secret", "/etc/passwd", "a/b", "..", "a\\\\b"] {
        assert_error(
            &with_index(&|text| text.replace(third, outside)),
            "is a path; shards must be next to their index",
        );
    }
    let first = "model-00001-of-00004.safetensors";
    assert_error(&with_index(&|text| text.replace(third, first)), "where the index places it");
    assert_error(&with_index(&|_| r#"{"weight_map": {}}"#.into()), "the index lists 0 shards");
    let doubled = shards();
    std::fs::copy(doubled.path().join(first), doubled.path().join(third)).unwrap();
    assert!(Checkpoint::open(doubled.path()).is_err(), "a shard stored under two names");
}

/// A pickle that would run code in Python is rejected with the function's name, and nothing runs.
#[test]
fn hostile_and_truncated_pickles_are_rejected() {
    let evil = b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touchR.";
    let mut legacy =
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.".to_vec();
    legacy.extend_from_slice(evil);
    assert_rejected(&with_weights(&legacy), &["`os.system`", "nothing was run"]);
    let whole =
        std::fs::read(candle_gpt2_testing::fixture_path("formats/pytorch-legacy/pytorch_model.bin")).unwrap();
    for length in [whole.len() - 1, whole.len() / 2, whole.len() - 100_000, 60, 20] {
        assert!(Checkpoint::open(with_weights(&whole[..length]).path()).is_err(), "cut to {length} bytes");
    }
    let zip =
        std::fs::read(candle_gpt2_testing::fixture_path("formats/pytorch-zip/pytorch_model.bin")).unwrap();
    for length in [zip.len() - 1, zip.len() / 2, 100] {
        assert!(Checkpoint::open(with_weights(&zip[..length]).path()).is_err(), "cut to {length} bytes");
    }
}

/// A flipped header byte yields an error or a checkpoint, never a panic or a hang.
#[test]
fn flipped_bytes_never_cause_a_panic() {
    for name in [
        "pytorch-legacy/pytorch_model.bin",
        "pytorch-zip/pytorch_model.bin",
        "gguf/q4_0.gguf",
        "llmc/gpt2.bin",
        "safetensors-shards/model-00001-of-00004.safetensors",
    ] {
        let whole = std::fs::read(candle_gpt2_testing::fixture_path("formats").join(name)).unwrap();
        let folder = CheckpointFolder::tiny();
        // The headers are at both ends of the file. A stride through the rest keeps the test short.
        let offsets =
            (0..400).chain((400..whole.len().min(20_000)).step_by(97)).chain(whole.len() - 300..whole.len());
        for offset in offsets {
            let mut changed = whole.clone();
            changed[offset] ^= 0xff;
            std::fs::write(folder.file("model.safetensors"), changed).unwrap();
            if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
                let _ = checkpoint.verify(&|_| ());
            }
        }
    }
    for name in ["model.ckpt.index", "model.ckpt.data-00000-of-00001"] {
        let folder = temporary_folder();
        for entry in std::fs::read_dir(candle_gpt2_testing::fixture_path("formats/tensorflow")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let whole = std::fs::read(folder.path().join(name)).unwrap();
        for offset in 0..whole.len().min(972) {
            let mut changed = whole.clone();
            changed[offset] ^= 0xff;
            std::fs::write(folder.path().join(name), changed).unwrap();
            if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
                let _ = checkpoint.verify(&|_| ());
            }
        }
    }
}

/// Builds a GGUF file with zeros for data.
///
/// Metadata entries are (key, type, bytes), and tensors are (name, shape, offset).
pub(crate) fn gguf(
    metadata: &[(&str, u32, Vec<u8>)],
    tensors: &[(&str, [u64; 2], u64)],
    data: usize,
) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64 + 1).to_le_bytes());
    bytes.extend([text("general.architecture"), 8u32.to_le_bytes().to_vec(), text("gpt2")].concat());
    for (key, kind, value) in metadata {
        bytes.extend([text(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
    }
    for (name, shape, offset) in tensors {
        bytes.extend([text(name), 2u32.to_le_bytes().to_vec()].concat());
        bytes.extend(shape.iter().rev().flat_map(|size| size.to_le_bytes()));
        bytes.extend([0u32.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
    }
    bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
    bytes
}

/// Checks valid files that users pass to `--model` but that cannot be loaded.
#[test]
fn non_gpt2_and_non_weights_files_are_rejected() {
    let bytes = gguf(&[], &[], 0);
    let name_at = bytes.windows(4).position(|letters| letters == b"gpt2").unwrap();
    let other = [&bytes[..name_at], b"lama", &bytes[name_at + 4..]].concat();
    let folder = CheckpointFolder::tiny().with("other.gguf", &other);
    let error = |name: &str| Checkpoint::open(folder.file(name)).unwrap_err().to_string();
    let message = error("other.gguf");
    assert!(
        message.ends_with("unsupported GGUF architecture \"lama\"; only gpt2 can be loaded"),
        "{message}"
    );
    let message = error("config.json");
    assert!(message.contains(": JSON text in place of the weights: {"), "{message}");
    assert!(
        message.ends_with("; pass its folder, which contains the weights") && message.lines().count() == 1,
        "{message}"
    );
    // The folder contains only minGPT's weights, in JSON.
    let alone =
        CheckpointFolder::tiny().without("model.safetensors").with("weights.json", "{\"wte\": [0.5]}");
    let message = Checkpoint::open(alone.file("weights.json")).unwrap_err().to_string();
    assert!(
        message.ends_with("JSON weights are unsupported: save them as safetensors or with torch.save"),
        "{message}"
    );
}

#[test]
fn inconsistent_gguf_files_are_rejected() {
    let tensor = |name: &'static str, offset| (name, [4, 2], offset);
    let assert_error = |bytes: Vec<u8>, expected: &str| assert_rejected(&with_weights(bytes), &[expected]);
    for zero in [
        ("general.alignment", 4, vec![0; 4]),
        ("general.alignment", 0, vec![0]),
        ("general.alignment", 3, vec![0; 2]),
    ] {
        assert_error(gguf(&[zero], &[], 0), "`general.alignment` is 0");
    }
    assert_error(gguf(&[], &[tensor("a", 0), tensor("a", 32)], 64), "duplicate tensor names");
    let size = |key: &'static str, size: u32| (key, 4, size.to_le_bytes().to_vec());
    let sizes = [
        size("gpt2.context_length", 2),
        size("gpt2.embedding_length", 2),
        size("gpt2.block_count", 1),
        size("gpt2.attention.head_count", 1),
    ];
    assert_error(gguf(&sizes, &[tensor("token_embd.weight", 0), tensor("b", 16)], 64), "overlap");
    assert_error(gguf(&[], &[tensor("a", 64)], 64), "lies outside the file");
    // Found by fuzzing: candle would read quantized blocks from unaligned addresses.
    assert_error(gguf(&[], &[tensor("a", 4)], 64), "does not start at a multiple of 8 bytes");
    assert_error(gguf(&[], &[("a", [1 << 40, 1 << 40], 0)], 64), "damaged GGUF file");
    assert_error(gguf(&[], &[("a", [u64::MAX, 2], 0)], 64), "damaged GGUF file");
    assert_error(gguf(&[], &[tensor("a", 0)], 32), "invalid header: the key `n_head` is missing");
    let claims = b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\x01\0\0\0\0\0\0\0".to_vec();
    assert_error(claims, "damaged GGUF file");
    let other = gguf(&[], &[], 0);
    let other: Vec<u8> = String::from_utf8_lossy(&other).replace("gpt2", "bert").into_bytes();
    assert_error(other, "only gpt2 can be loaded");
}

/// Checks shapes in which a zero dimension hides an overflow in the product of the others.
#[test]
fn implausible_shapes_are_rejected_even_if_empty() {
    let large = usize::MAX / 4 + 1;
    let header = format!(r#"{{"wte.weight":{{"dtype":"F32","shape":[{large},0,8],"data_offsets":[0,0]}}}}"#);
    assert_rejected(
        &with_weights(safetensors(&header, 0)),
        &["tensor `wte.weight` has the implausible shape"],
    );
    let deep = format!(r#"{{"a":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}}}"#, "1,".repeat(20));
    assert_rejected(&with_weights(safetensors(&deep, 4)), &["tensor `a` has the implausible shape"]);
}

/// A million tensors are rejected, either for the header size or for duplicate names.
// Node 20 sometimes crashes when a program under WASI grows by several hundred megabytes.
#[cfg(not(target_os = "wasi"))]
#[test]
fn excessive_tensor_counts_are_rejected() {
    let entry = |index: usize| format!(r#""t{index}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let header = (0..1_000_000).map(entry).collect::<Vec<_>>().join(",");
    assert_rejected(
        &with_weights(safetensors(&format!("{{{header}}}"), 0)),
        &["the header has", "expected at most"],
    );
    let tensors: Vec<_> = (0..150_000).map(|_| ("", [0u64, 1], 0)).collect();
    assert_rejected(&with_weights(gguf(&[], &tensors, 0)), &["duplicate tensor names"]);
}

#[test]
fn index_listed_as_a_shard_is_rejected() {
    let folder = CheckpointFolder::tiny().without("model.safetensors");
    let index = "model.safetensors.index.json";
    let folder = folder.with(index, format!(r#"{{"weight_map": {{"a": "{index}"}}}}"#));
    assert_rejected(&folder, &["the shard model.safetensors.index.json is itself an index"]);
    let other = r#"{"weight_map": {"a": "model.safetensors.index.json"}}"#;
    let folder = folder.with("other", other).with(index, r#"{"weight_map": {"a": "other"}}"#);
    assert_rejected(&folder, &["the shard other is itself an index"]);
}

/// Pickles have limits on the length of names and on the number of values.
// Excluded because of the Node crashes described above.
#[cfg(not(target_os = "wasi"))]
#[test]
fn pickle_bombs_are_rejected() {
    let legacy = |program: &[u8]| {
        let before = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.";
        with_weights([before.as_slice(), program].concat())
    };
    let long = "k".repeat(1 << 20);
    let length = |text: &str| u32::try_from(text.len()).unwrap().to_le_bytes();
    let text = |text: &str| [b"X".as_slice(), &length(text), text.as_bytes()].concat();
    // A storage with a one-megabyte name, referenced ten thousand times.
    let storage = [
        b"(".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text(&long),
        text("cpu"),
        b"K\x01tq\x00".to_vec(),
    ];
    let again = b"Qh\x00".repeat(10_000);
    assert_rejected(
        &legacy(&[storage.concat(), again, b"Q.".to_vec()].concat()),
        &["a name that is too long"],
    );
    let global = [text("torch"), text(&format!("{long}Storage")), b"\x93.".to_vec()].concat();
    assert_rejected(&legacy(&global), &["a name that is too long"]);
    assert_rejected(&legacy(&b"N".repeat(4 << 20)), &["the pickle contains more than 1048576 values"]);
}

/// Fine-tuning with TensorFlow leaves several checkpoints; the file `checkpoint` names the latest.
#[test]
fn tensorflow_checkpoint_file_selects_the_latest() {
    let folder = temporary_folder();
    let source = candle_gpt2_testing::fixture_path("formats/tensorflow");
    std::fs::copy(source.join("hparams.json"), folder.path().join("hparams.json")).unwrap();
    for step in ["model-100", "model-200"] {
        for ending in ["index", "data-00000-of-00001"] {
            let to = folder.path().join(format!("{step}.{ending}"));
            std::fs::copy(source.join(format!("model.ckpt.{ending}")), to).unwrap();
        }
    }
    let message = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("several other weights files (model-100.index, model-200.index)"), "{message}");
    std::fs::write(folder.path().join("checkpoint"), "model_checkpoint_path: \"/far/away/model-200\"\n")
        .unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.weights_path().ends_with("model-200.index"));
    checkpoint.check().unwrap();
}
