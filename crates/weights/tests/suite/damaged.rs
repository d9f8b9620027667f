//! Files that are missing, truncated, lying or something else: each is refused with what was found and what to do.

use candle_gpt2_testing::{CheckpointFolder, temporary_folder};
use candle_gpt2_weights::{Checkpoint, load_tokenizer};
use serde_json::json;

use crate::given::{How, given, open};

/// Given files are refused in the words of the disk.
#[track_caller]
fn assert_refused(folder: &CheckpointFolder, expected: &[&str]) {
    let message = Checkpoint::open(folder.path()).expect_err("a refusal").to_string();
    for how in [How::Held, How::InParts] {
        let Some(files) = given(folder.path(), how) else { continue };
        let of_given = open(files).expect_err("a refusal").to_string();
        assert_eq!(of_given.replace("give one of them alone", "name the file itself"), message, "{how:?}");
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

/// A safetensors file with this header and this many zero bytes after it.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn a_path_without_anything() {
    let message = Checkpoint::open("/no/such/folder".as_ref()).unwrap_err().to_string();
    assert!(message.starts_with("/no/such/folder: no such file or folder"), "{message}");
}

#[test]
fn a_folder_without_a_configuration() {
    assert_refused(&CheckpointFolder::tiny().without("config.json"), &["there is no config.json"]);
}

#[test]
fn a_folder_without_weights_names_what_is_there() {
    let empty = CheckpointFolder::tiny().without("model.safetensors");
    assert_refused(&empty, &["there is no model.safetensors"]);
    let other = CheckpointFolder::tiny().without("model.safetensors").with("pytorch_model.bin", "");
    assert_refused(&other, &["pytorch_model.bin: the file is empty"]);
    let several = empty.with("a.safetensors", original_weights()).with("b.safetensors", original_weights());
    assert_refused(&several, &["several others (a.safetensors, b.safetensors)", "name the file itself"]);
}

#[test]
fn a_configuration_with_an_error_is_named() {
    for (changes, expected) in [
        (json!({"n_embd": null}), "the key `n_embd` is missing"),
        (json!({"n_head": 5}), "`n_head` = 5 does not divide `n_embd` = 28"),
        (json!({"n_layer": 0}), "`n_layer`: expected a whole number from 1"),
        (json!({"n_embd": 1_000_000_000_000u64}), "`n_embd`: expected a whole number from 1"),
        (json!({"activation_function": "mish"}), "`activation_function` = \"mish\" is not supported"),
        (json!({"model_type": "bert"}), "`model_type` = \"bert\" is not supported"),
    ] {
        assert_refused(&CheckpointFolder::tiny().with_config(changes), &["config.json", expected]);
    }
    assert_refused(&CheckpointFolder::tiny().with("config.json", "{"), &["config.json", "not valid JSON"]);
    let large = CheckpointFolder::tiny().with("config.json", vec![b' '; 2 << 20]);
    assert_refused(&large, &["larger than 1048576 bytes"]);
}

#[test]
fn a_configuration_of_another_size_lists_every_tensor() {
    let folder = CheckpointFolder::tiny().with_config(json!({"n_embd": 32, "n_layer": 4}));
    let message = Checkpoint::open(folder.path()).unwrap().check().unwrap_err().to_string();
    assert!(message.contains("`transformer.wte.weight`: expected (300, 32), found (300, 28)"), "{message}");
    assert!(message.contains("`transformer.h.3.ln_1.weight` is missing"), "{message}");
    // Three blocks of the wrong width, one missing block, embeddings and final norm; biases of n_inner stay right.
    let absurd = CheckpointFolder::tiny().with_config(json!({"n_layer": 1024}));
    let message = Checkpoint::open(absurd.path()).unwrap().check().unwrap_err().to_string();
    assert!(message.ends_with(&format!("and {} more", (1024 - 3) * 12 - 1000)), "the list has an end");
}

/// A repository cloned without Git LFS (NVIDIA/FasterTransformer#342), among others.
#[test]
fn files_that_are_something_else() {
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
        assert_refused(&with_weights(contents), &["model.safetensors", expected]);
    }
}

#[test]
fn truncated_files_say_by_how_much() {
    let whole = original_weights();
    let message = format!("truncated: expected {} bytes, found {}", whole.len(), whole.len() - 1);
    assert_refused(&with_weights(&whole[..whole.len() - 1]), &[&message]);
    assert_refused(&with_weights(&whole[..whole.len() / 2]), &["truncated: expected", "download it again"]);
    assert_refused(&with_weights(&whole[..100]), &["its header claims", "the file has 100"]);
    let mut longer = whole.clone();
    longer.extend([0; 5]);
    assert_refused(&with_weights(longer), &["there is data after the last tensor"]);
}

/// Whatever the header claims, nothing is allocated or read beyond the file.
#[test]
fn lying_headers_are_refused() {
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
        assert_refused(&with_weights(safetensors(&header, 16)), &["model.safetensors"]);
    }
    let mut claims_much = u64::MAX.to_le_bytes().to_vec();
    claims_much.extend([b' '; 64]);
    assert_refused(
        &with_weights(claims_much),
        &["its header claims 18446744073709551615 bytes, the file has 72"],
    );
}

#[test]
fn a_folder_in_place_of_the_weights() {
    let folder = CheckpointFolder::tiny().without("model.safetensors");
    std::fs::create_dir(folder.file("model.safetensors")).unwrap();
    assert_refused(&folder, &["model.safetensors: not a regular file"]);
}

#[test]
fn tokenizers_that_are_missing_or_broken() {
    let message = |folder: &CheckpointFolder| load_tokenizer(folder.path()).unwrap_err().to_string();
    let none = CheckpointFolder::tiny().without("tokenizer.json").without("merges.txt");
    assert!(message(&none).contains(
        "there is no tokenizer.json, no vocab.json with merges.txt, no spiece.model and no vocab.txt; copy them from the checkpoint's source, or name another tokenizer"
    ));
    let other = none
        .with("tokenizer_config.json", "{}")
        .with("my.tokenizer.json", "{}")
        .with("tokenizer-2.json", "{}");
    assert!(
        message(&other).ends_with("no vocab.txt; found my.tokenizer.json; give it as the tokenizer"),
        "{}",
        message(&other)
    );
    for contents in ["", "{}", "<html>", "version https://git-lfs.github.com/spec/v1", "[", "{\"model\":1}"] {
        let broken = CheckpointFolder::tiny().with("tokenizer.json", contents);
        assert!(message(&broken).contains("tokenizer.json: not a usable tokenizer"), "{}", message(&broken));
    }
    let broken = CheckpointFolder::tiny().without("tokenizer.json").with("vocab.json", "[1]");
    assert!(message(&broken).contains("vocab.json and merges.txt"), "{}", message(&broken));
    assert!(load_tokenizer("/no/such/file".as_ref()).unwrap_err().to_string().contains("no such file"));
}

#[test]
fn both_kinds_of_tokenizer_give_the_same_ids() {
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

/// What transformers' GPT2Tokenizer reads beside vocab.json and merges.txt.
#[test]
fn files_beside_the_vocabulary_are_read() {
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

/// Pipes would block for ever, devices have no end.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_without_reading() {
    for name in ["config.json", "model.safetensors"] {
        let folder = CheckpointFolder::tiny().without(name);
        std::os::unix::fs::symlink("/dev/zero", folder.file(name)).unwrap();
        assert_refused(&folder, &[name, "not a regular file"]);
        let folder = CheckpointFolder::tiny().without(name);
        std::os::unix::fs::symlink(folder.file(name), folder.file(name)).unwrap();
        assert!(Checkpoint::open(folder.path()).is_err(), "a link to itself");
    }
}

#[test]
fn shards_stay_in_their_folder_and_fit_their_index() {
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
    let refuse = |folder: &tempfile::TempDir, expected: &str| {
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
    refuse(&missing, "the shard model-00003-of-00004.safetensors is missing");
    for outside in ["../secret", "/etc/passwd", "a/b", "..", "a\\\\b"] {
        refuse(
            &with_index(&|text| text.replace(third, outside)),
            "is a path; shards are next to their index",
        );
    }
    let first = "model-00001-of-00004.safetensors";
    refuse(&with_index(&|text| text.replace(third, first)), "where the index places it");
    refuse(&with_index(&|_| r#"{"weight_map": {}}"#.into()), "an index of 0 shards");
    let doubled = shards();
    std::fs::copy(doubled.path().join(first), doubled.path().join(third)).unwrap();
    assert!(Checkpoint::open(doubled.path()).is_err(), "one shard under two names");
}

/// A pickle that runs code elsewhere is refused by name here, and nothing is run.
#[test]
fn hostile_pickles_are_refused() {
    let evil = b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touchR.";
    let mut legacy =
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.".to_vec();
    legacy.extend_from_slice(evil);
    assert_refused(&with_weights(&legacy), &["`os.system`", "nothing was run"]);
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

/// Every byte of each header, changed: an error or a checkpoint, never a panic or a hang.
#[test]
fn flipped_bytes_never_panic() {
    for name in [
        "pytorch-legacy/pytorch_model.bin",
        "pytorch-zip/pytorch_model.bin",
        "gguf/q4_0.gguf",
        "llmc/gpt2.bin",
        "safetensors-shards/model-00001-of-00004.safetensors",
    ] {
        let whole = std::fs::read(candle_gpt2_testing::fixture_path("formats").join(name)).unwrap();
        let folder = CheckpointFolder::tiny();
        // The ends hold the headers; a stride through the rest keeps the test short.
        let places =
            (0..400).chain((400..whole.len().min(20_000)).step_by(97)).chain(whole.len() - 300..whole.len());
        for place in places {
            let mut changed = whole.clone();
            changed[place] ^= 0xff;
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
        for place in 0..whole.len().min(972) {
            let mut changed = whole.clone();
            changed[place] ^= 0xff;
            std::fs::write(folder.path().join(name), changed).unwrap();
            if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
                let _ = checkpoint.verify(&|_| ());
            }
        }
    }
}

/// A GGUF file: metadata as (key, type, bytes), tensors as (name, shape, offset), zeros for data.
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

/// What people give to `--model` that is sound, but not what can be loaded.
#[test]
fn files_of_other_models_and_files_beside_the_weights() {
    let bytes = gguf(&[], &[], 0);
    let at = bytes.windows(4).position(|letters| letters == b"gpt2").unwrap();
    let other = [&bytes[..at], b"lama", &bytes[at + 4..]].concat();
    let folder = CheckpointFolder::tiny().with("other.gguf", &other);
    let refused = |name: &str| Checkpoint::open(&folder.file(name)).unwrap_err().to_string();
    let told = refused("other.gguf");
    assert!(told.ends_with("a GGUF file of architecture \"lama\"; only gpt2 can be loaded"), "{told}");
    let told = refused("config.json");
    assert!(told.contains(": JSON text in place of the weights: {"), "{told}");
    assert!(
        told.ends_with("; name its folder, which holds the weights") && told.lines().count() == 1,
        "{told}"
    );
    // Weights of minGPT in JSON, in a folder without others.
    let alone =
        CheckpointFolder::tiny().without("model.safetensors").with("weights.json", "{\"wte\": [0.5]}");
    let told = Checkpoint::open(&alone.file("weights.json")).unwrap_err().to_string();
    assert!(
        told.ends_with("weights in JSON are not read: save them as safetensors or with torch.save"),
        "{told}"
    );
}

#[test]
fn lying_gguf_files_are_refused() {
    let tensor = |name: &'static str, offset| (name, [4, 2], offset);
    let refuse = |bytes: Vec<u8>, expected: &str| assert_refused(&with_weights(bytes), &[expected]);
    for zero in [
        ("general.alignment", 4, vec![0; 4]),
        ("general.alignment", 0, vec![0]),
        ("general.alignment", 3, vec![0; 2]),
    ] {
        refuse(gguf(&[zero], &[], 0), "`general.alignment` is 0");
    }
    refuse(gguf(&[], &[tensor("a", 0), tensor("a", 32)], 64), "several tensors have one name");
    let size = |key: &'static str, size: u32| (key, 4, size.to_le_bytes().to_vec());
    let sizes = [
        size("gpt2.context_length", 2),
        size("gpt2.embedding_length", 2),
        size("gpt2.block_count", 1),
        size("gpt2.attention.head_count", 1),
    ];
    refuse(gguf(&sizes, &[tensor("token_embd.weight", 0), tensor("b", 16)], 64), "overlap");
    refuse(gguf(&[], &[tensor("a", 64)], 64), "lies outside the file");
    // Found by fuzzing: candle would read quantized blocks from any address.
    refuse(gguf(&[], &[tensor("a", 4)], 64), "does not start at a multiple of 8 bytes");
    refuse(gguf(&[], &[("a", [1 << 40, 1 << 40], 0)], 64), "damaged GGUF file");
    refuse(gguf(&[], &[("a", [u64::MAX, 2], 0)], 64), "damaged GGUF file");
    refuse(gguf(&[], &[tensor("a", 0)], 32), "its header: the key `n_head` is missing");
    let claims = b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\x01\0\0\0\0\0\0\0".to_vec();
    refuse(claims, "damaged GGUF file");
    let other = gguf(&[], &[], 0);
    let other: Vec<u8> = String::from_utf8_lossy(&other).replace("gpt2", "bert").into_bytes();
    refuse(other, "only gpt2 can be loaded");
}

/// Shapes whose zeros hide that the other sizes multiply beyond every machine.
#[test]
fn enormous_shapes_are_refused_even_when_they_hold_nothing() {
    let large = usize::MAX / 4 + 1;
    let header = format!(r#"{{"wte.weight":{{"dtype":"F32","shape":[{large},0,8],"data_offsets":[0,0]}}}}"#);
    assert_refused(&with_weights(safetensors(&header, 0)), &["tensor `wte.weight` claims the shape"]);
    let deep = format!(r#"{{"a":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}}}"#, "1,".repeat(20));
    assert_refused(&with_weights(safetensors(&deep, 4)), &["tensor `a` claims the shape"]);
}

/// A million names are refused by the size of the header that would list them, or by their number.
// Node 20 crashes now and then where a program under WASI grows by some hundred megabytes.
#[cfg(not(target_os = "wasi"))]
#[test]
fn a_million_tensors_are_refused() {
    let entry = |index: usize| format!(r#""t{index}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let header = (0..1_000_000).map(entry).collect::<Vec<_>>().join(",");
    assert_refused(
        &with_weights(safetensors(&format!("{{{header}}}"), 0)),
        &["a header of", "that of a GPT-2 has less"],
    );
    let tensors: Vec<_> = (0..150_000).map(|_| ("", [0u64, 1], 0)).collect();
    assert_refused(&with_weights(gguf(&[], &tensors, 0)), &["several tensors have one name"]);
}

#[test]
fn an_index_among_its_own_shards_is_refused() {
    let folder = CheckpointFolder::tiny().without("model.safetensors");
    let index = "model.safetensors.index.json";
    let folder = folder.with(index, format!(r#"{{"weight_map": {{"a": "{index}"}}}}"#));
    assert_refused(&folder, &["the shard model.safetensors.index.json is an index itself"]);
    let other = r#"{"weight_map": {"a": "model.safetensors.index.json"}}"#;
    let folder = folder.with("other", other).with(index, r#"{"weight_map": {"a": "other"}}"#);
    assert_refused(&folder, &["the shard other is an index itself"]);
}

/// Values that a pickle repeats cost nothing, and names and shapes have limits.
// Under Node as above.
#[cfg(not(target_os = "wasi"))]
#[test]
fn pickle_bombs_stay_small() {
    let legacy = |program: &[u8]| {
        let before = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.";
        with_weights([before.as_slice(), program].concat())
    };
    let long = "k".repeat(1 << 20);
    let length = |text: &str| u32::try_from(text.len()).unwrap().to_le_bytes();
    let text = |text: &str| [b"X".as_slice(), &length(text), text.as_bytes()].concat();
    // A storage under a name of a megabyte, referred to ten thousand times.
    let storage = [
        b"(".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text(&long),
        text("cpu"),
        b"K\x01tq\x00".to_vec(),
    ];
    let again = b"Qh\x00".repeat(10_000);
    assert_refused(&legacy(&[storage.concat(), again, b"Q.".to_vec()].concat()), &["a name too long"]);
    let global = [text("torch"), text(&format!("{long}Storage")), b"\x93.".to_vec()].concat();
    assert_refused(&legacy(&global), &["a name too long"]);
    assert_refused(&legacy(&b"N".repeat(4 << 20)), &["it holds more than 1048576 values"]);
}

/// What fine-tuning with TensorFlow leaves: the latest of several checkpoints is named in the file `checkpoint`.
#[test]
fn the_file_checkpoint_names_the_latest() {
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
    assert!(message.contains("several others (model-100.index, model-200.index)"), "{message}");
    std::fs::write(folder.path().join("checkpoint"), "model_checkpoint_path: \"/far/away/model-200\"\n")
        .unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.weights_path().ends_with("model-200.index"));
    checkpoint.check().unwrap();
}
