//! Supplied files, in memory or read in parts, yield the same checkpoint as files on disk.
//!
//! Files that are read in parts are read only as far as needed.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Pass, expected_parameters};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, values};
use candle_gpt2_weights::{
    Checkpoint, GivenFiles, LoadOptions, OpenOptions, ReadAt, WeightDType, WeightsError, encode,
};

use crate::damaged::{gguf, original_weights};

/// Storage of supplied files: in memory, or read in parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FileSource {
    InMemory,
    Ranged,
}

/// File that is read in parts, with a log of the ranges.
#[derive(Debug, Default)]
struct Parts {
    bytes: Vec<u8>,
    read: Mutex<Vec<(u64, usize)>>,
}

impl ReadAt for Parts {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        self.read.lock().unwrap().push((start, to.len()));
        let start = usize::try_from(start).unwrap();
        to.copy_from_slice(&self.bytes[start..start + to.len()]);
        Ok(())
    }
}

/// Supplies the files of a folder under its path, so that error messages match those on disk.
///
/// Returns `None` if the folder contains anything but regular files.
pub(crate) fn supplied(folder: &Path, source: FileSource) -> Option<GivenFiles> {
    let mut files = GivenFiles::new(folder.to_str().unwrap());
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_type().unwrap().is_file() {
            return None;
        }
        let (name, bytes) = (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
        files = with(files, &name, bytes, source);
    }
    Some(files)
}

/// Formats an error with forward slashes in file names, even on Windows.
fn portable_message(error: impl std::fmt::Display) -> String {
    error.to_string().replace('\\', "/")
}

fn with(files: GivenFiles, name: &str, bytes: Vec<u8>, source: FileSource) -> GivenFiles {
    match source {
        FileSource::InMemory => files.with_bytes(name, bytes),
        FileSource::Ranged => files.with_file(name, Arc::new(Parts { bytes, ..Parts::default() })),
    }
}

pub(crate) fn open(files: GivenFiles) -> Result<Checkpoint, WeightsError> {
    Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())
}

fn fixture_files(name: &str, files: &[&str], source: FileSource) -> GivenFiles {
    let read = |file: &str| std::fs::read(fixture_path(name).join(file)).unwrap();
    files.iter().fold(GivenFiles::new("given"), |supplied, file| with(supplied, file, read(file), source))
}

/// Returns every parameter as the bits of its values.
fn parameters(checkpoint: &Checkpoint) -> Vec<(String, Vec<u32>)> {
    let bits = |name: &str| {
        let tensor = checkpoint.parameter(name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let names = expected_parameters(checkpoint.config()).into_iter().map(|parameter| parameter.name);
    names.map(|name| (name.clone(), bits(&name))).collect()
}

fn logits(checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> Vec<f64> {
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let model: Gpt2LMHeadModel = checkpoint.load(&options, &|_| ()).unwrap();
    let ids = candle_core::Tensor::new(&[[5u32, 42, 0, 17]], &Device::Cpu).unwrap();
    values(&model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap())
}

/// Fixture folders that contain a checkpoint.
const FOLDERS: [&str; 9] = [
    "tiny-checkpoint",
    "formats/safetensors-shards",
    "formats/pytorch-zip",
    "formats/pytorch-legacy",
    "formats/pytorch-shards",
    "formats/pytorch-views",
    "formats/tensorflow",
    "formats/nanogpt",
    "formats/book",
];

#[test]
fn supplied_files_load_like_their_folder() {
    for folder in FOLDERS {
        let path = fixture_path(folder);
        let on_disk = Checkpoint::open(&path).unwrap();
        for source in [FileSource::InMemory, FileSource::Ranged] {
            let checkpoint = open(supplied(&path, source).unwrap()).unwrap();
            assert_eq!(checkpoint.config(), on_disk.config(), "{folder}, {source:?}");
            assert_eq!(checkpoint.rules(), on_disk.rules(), "{folder}, {source:?}");
            assert_eq!(checkpoint.weights_path(), on_disk.weights_path(), "{folder}, {source:?}");
            assert_eq!(parameters(&checkpoint), parameters(&on_disk), "{folder}, {source:?}");
            for dtype in [None, Some(WeightDType::F16), Some(WeightDType::Q8), Some(WeightDType::Q4)] {
                assert_eq!(
                    logits(&checkpoint, dtype),
                    logits(&on_disk, dtype),
                    "{folder}, {source:?}, {dtype:?}"
                );
            }
            let ids = |checkpoint: &Checkpoint| {
                let tokenizer = checkpoint.tokenizer(None).map_err(|error| error.to_string());
                tokenizer.map(|tokenizer| encode(&tokenizer, "The first citizen, naïve café").unwrap())
            };
            assert_eq!(ids(&checkpoint), ids(&on_disk), "{folder}, {source:?}");
            let texts = |checkpoint: &Checkpoint| {
                (checkpoint.generation_config().unwrap(), checkpoint.chat_template().unwrap())
            };
            assert_eq!(texts(&checkpoint), texts(&on_disk), "{folder}, {source:?}");
        }
    }
}

/// Checks that GGUF and llm.c files load without any files next to them.
#[test]
fn single_gguf_or_llm_c_file_is_a_checkpoint() {
    for name in ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"] {
        let file = format!("{name}.gguf");
        let on_disk = Checkpoint::open(fixture_path("formats/gguf").join(&file)).unwrap();
        for source in [FileSource::InMemory, FileSource::Ranged] {
            let checkpoint = open(fixture_files("formats/gguf", &[&file], source)).unwrap();
            assert_eq!(parameters(&checkpoint), parameters(&on_disk), "{name}, {source:?}");
            assert_eq!(logits(&checkpoint, None), logits(&on_disk, None), "{name}, {source:?}");
            let ids = encode(&checkpoint.tokenizer(None).unwrap(), "The first").unwrap();
            assert_eq!(
                ids,
                encode(&on_disk.tokenizer(None).unwrap(), "The first").unwrap(),
                "{name}, {source:?}"
            );
        }
    }
    for file in ["gpt2.bin", "gpt2_bf16.bin"] {
        let on_disk = Checkpoint::open(fixture_path("formats/llmc").join(file)).unwrap();
        let checkpoint = open(fixture_files("formats/llmc", &[file], FileSource::Ranged)).unwrap();
        assert_eq!(parameters(&checkpoint), parameters(&on_disk), "{file}");
        let none = checkpoint.tokenizer(None).unwrap_err().to_string();
        assert!(
            none.starts_with("given: no tokenizer found; copy tokenizer.json, vocab.json with merges.txt, spiece.model or vocab.txt from"),
            "{none}"
        );
    }
}

/// Checks bytes in memory at unaligned addresses, because candle reads blocks in place.
#[test]
fn in_memory_blocks_need_no_alignment() {
    let bytes = std::fs::read(fixture_path("formats/gguf/q4_k.gguf")).unwrap();
    let expected = parameters(&Checkpoint::open(fixture_path("formats/gguf/q4_k.gguf")).unwrap());
    for shift in 0..4 {
        let shifted: &'static [u8] = [&vec![0; shift], bytes.as_slice()].concat().leak();
        let files = GivenFiles::new("given").with_bytes("q4_k.gguf", &shifted[shift..]);
        assert_eq!(parameters(&open(files).unwrap()), expected, "{shift}");
    }
}

/// The header is read first, then each tensor once.
///
/// No read is larger than a tensor, and nothing unnecessary is read.
#[test]
fn ranged_files_are_read_one_tensor_at_a_time() {
    /// Read size for files that do not record their header size.
    const READ_AHEAD: usize = 64 << 10;
    let folders = FOLDERS.iter().map(|folder| ((*folder).to_owned(), None));
    let files = ["gguf/f32.gguf", "gguf/q6_k.gguf", "llmc/gpt2.bin"].map(|file| {
        let (folder, file) = file.split_once('/').unwrap();
        (format!("formats/{folder}"), Some(file))
    });
    for (folder, only) in folders.chain(files) {
        let mut parts = Vec::new();
        let mut files = GivenFiles::new("given");
        for entry in std::fs::read_dir(fixture_path(&folder)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if only.is_none_or(|only| only == name) {
                let file =
                    Arc::new(Parts { bytes: std::fs::read(entry.path()).unwrap(), ..Parts::default() });
                parts.push(Arc::clone(&file));
                files = files.with_file(&name, file);
            }
        }
        let take = || -> Vec<(u64, usize)> {
            parts.iter().flat_map(|part| std::mem::take(&mut *part.read.lock().unwrap())).collect()
        };
        let checkpoint = open(files).unwrap();
        let largest_read = take().iter().map(|(_, length)| *length).max().unwrap();
        let head = checkpoint.tied_head().map_or(0, |head| usize::try_from(head.stored_bytes()).unwrap());
        assert!(largest_read <= READ_AHEAD.max(head), "{folder}: {largest_read} bytes to open it");

        checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
        let read = take();
        let largest =
            checkpoint.tensors().iter().map(|tensor| usize::try_from(tensor.stored_bytes()).unwrap()).max();
        assert!(read.iter().all(|(_, length)| Some(*length) <= largest), "{folder}: {read:?}");
        let all: usize = read.iter().map(|(_, length)| length).sum();
        assert_eq!(all as u64, checkpoint.parameter_bytes(), "{folder}: each tensor once");
    }
}

#[test]
fn supplied_files_are_matched_by_base_name() {
    let tiny = |name: &str| std::fs::read(fixture_path("tiny-checkpoint").join(name)).unwrap();
    let expected = parameters(&Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap());
    let supply = |names: &[&str]| {
        names.iter().fold(GivenFiles::new("picked"), |files, name| {
            files.with_bytes(name, tiny(name.rsplit('/').next().unwrap()))
        })
    };
    for names in [
        ["config.json", "model.safetensors", "tokenizer.json"],
        ["gpt2/config.json", "gpt2/model.safetensors", "gpt2/tokenizer.json"],
        ["a/b/config.json", "a/c/model.safetensors", "tokenizer.json"],
    ] {
        let checkpoint = open(supply(&names)).unwrap();
        assert_eq!(checkpoint.weights_path(), Path::new("picked/model.safetensors"));
        assert_eq!(parameters(&checkpoint), expected, "{names:?}");
        checkpoint.tokenizer(None).unwrap();
    }
    // Files in deeper folders do not belong to the checkpoint, as on disk.
    let deeper = supply(&["gpt2/config.json", "gpt2/model.safetensors"])
        .with_bytes("gpt2/onnx/config.json", b"{}")
        .with_bytes("gpt2/onnx/model.safetensors", b"nothing");
    assert_eq!(parameters(&open(deeper).unwrap()), expected);
    // Two files with the same name are ambiguous.
    let two = supply(&["run/model.safetensors", "run/1/config.json", "run/2/config.json"]);
    let error = portable_message(open(two).unwrap_err());
    assert_eq!(
        error,
        "picked/config.json: two files with this name were supplied, `run/1/config.json` and `run/2/config.json`; supply \
         only the files of one checkpoint"
    );
    // An ambiguous name does no harm if the file is not needed.
    let unused =
        supply(&["a/config.json", "a/model.safetensors"]).with_bytes("a/x/y", b"").with_bytes("a/z/y", b"");
    open(unused).unwrap();
}

#[test]
fn weights_file_may_have_any_name() {
    let read = |name: &str| std::fs::read(fixture_path("tiny-checkpoint").join(name)).unwrap();
    let expected = parameters(&Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap());
    for source in [FileSource::InMemory, FileSource::Ranged] {
        let files =
            with(GivenFiles::new("mine"), "my-gpt2 (1).safetensors", read("model.safetensors"), source);
        let files = with(files, "config.json", read("config.json"), source);
        assert_eq!(parameters(&open(files.clone()).unwrap()), expected);
        // `vocab.json` and `merges.txt` replace a `tokenizer.json`.
        let files = with(files, "merges.txt", read("merges.txt"), source);
        assert!(open(files.clone()).unwrap().tokenizer(None).is_err(), "half of a pair");
        let files = with(files, "vocab.json", read("vocab.json"), source);
        let ids = encode(&open(files).unwrap().tokenizer(None).unwrap(), "The first").unwrap();
        let from_json = candle_gpt2_weights::load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
        assert_eq!(ids, encode(&from_json, "The first").unwrap());
    }
}

#[test]
fn chat_template_is_read_from_supplied_files() {
    let files = fixture_files("tiny-checkpoint", &["config.json", "model.safetensors"], FileSource::Ranged);
    let files = files.with_bytes("tokenizer_config.json", br#"{"chat_template": "from json"}"#);
    assert_eq!(open(files.clone()).unwrap().chat_template().unwrap().as_deref(), Some("from json"));
    let files = files.with_bytes("chat_template.jinja", b"alone");
    assert_eq!(open(files).unwrap().chat_template().unwrap().as_deref(), Some("alone"));
}

#[test]
fn missing_supplied_files_are_reported() {
    let rejection = |files: GivenFiles| portable_message(open(files).unwrap_err());
    assert_eq!(
        rejection(GivenFiles::new("nothing")),
        "nothing: no model.safetensors and no other weights file; add the weights, or pass the folder that contains them"
    );
    let without_weights =
        fixture_files("tiny-checkpoint", &["tokenizer.json", "config.json"], FileSource::Ranged);
    assert_eq!(
        rejection(without_weights),
        "given: no model.safetensors and no other weights file (found config.json, tokenizer.json); add the weights, or pass the folder that contains them"
    );
    let photo = GivenFiles::new("given").with_bytes("photo.jpg", b"\xff\xd8\xff\xe0 and so on".as_slice());
    assert!(rejection(photo).starts_with("given/photo.jpg: "));
    let alone = fixture_files("tiny-checkpoint", &["model.safetensors"], FileSource::Ranged);
    assert_eq!(
        rejection(alone),
        "given: config.json is missing; copy it from the checkpoint's source (it defines the model's sizes)"
    );
    let several = GivenFiles::new("given")
        .with_bytes("a.safetensors", original_weights())
        .with_bytes("b.safetensors", original_weights());
    let error = rejection(several);
    assert!(
        error.contains("several other weights files (a.safetensors, b.safetensors); supply only one of them"),
        "{error}"
    );
    let folder = "formats/safetensors-shards";
    let first = "model-00001-of-00004.safetensors";
    let shards =
        fixture_files(folder, &["config.json", "model.safetensors.index.json", first], FileSource::InMemory);
    assert_eq!(
        rejection(shards),
        "given/model.safetensors.index.json: the shard model-00002-of-00004.safetensors is missing; put it next to the others"
    );
    let index =
        fixture_files("formats/tensorflow", &["hparams.json", "model.ckpt.index"], FileSource::InMemory);
    assert_eq!(
        rejection(index),
        "given/model.ckpt.index: the data file model.ckpt.data-00000-of-00001 is missing; put it next to the index"
    );
}

/// File that is longer or shorter than it claims, or that fails in the middle.
#[derive(Debug)]
struct Failing {
    bytes: Vec<u8>,
    claimed: u64,
    /// Offset of the byte that cannot be read.
    broken: u64,
}

impl ReadAt for Failing {
    fn len(&self) -> u64 {
        self.claimed
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        let end = start + to.len() as u64;
        let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
        let bytes = self.bytes.get(range).filter(|_| !(start..end).contains(&self.broken));
        to.copy_from_slice(bytes.ok_or_else(|| io::Error::other("the file has changed"))?);
        Ok(())
    }
}

#[test]
fn read_errors_name_the_tensor() {
    let bytes = original_weights();
    let len = bytes.len() as u64;
    let open_with = |claimed: u64, broken: u64| {
        let file = Failing { bytes: bytes.clone(), claimed, broken };
        let files = fixture_files("tiny-checkpoint", &["config.json"], FileSource::InMemory);
        open(files.with_file("model.safetensors", Arc::new(file)))
    };
    let broken = open_with(len, len - 20).unwrap();
    let last = broken.tensors().last().unwrap().name.clone();
    let expected = format!("given/model.safetensors: tensor `{last}` cannot be read: the file has changed");
    for dtype in [None, Some(WeightDType::Q4)] {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let error = portable_message(broken.load(&options, &|_| ()).unwrap_err());
        assert!(error.starts_with(&expected), "{error}");
    }
    assert_eq!(portable_message(broken.verify(&|_| ()).unwrap_err()), expected);
    let parameter = last.strip_prefix("transformer.").unwrap();
    let error = portable_message(broken.parameter(parameter, &Device::Cpu, &|_| ()).unwrap_err());
    assert!(error.starts_with(&expected), "{error}");

    let header_error = portable_message(open_with(len, 4).unwrap_err());
    assert_eq!(header_error, "given/model.safetensors: cannot be read: the file has changed");
    for claimed in [0, 1, 7, 8, 9, len / 2, len - 1, len + 1, 3 << 30] {
        let error = portable_message(open_with(claimed, u64::MAX).unwrap_err());
        assert!(error.starts_with("given/model.safetensors: "), "{claimed}: {error}");
    }
}

/// GGUF file larger than 4 GiB, with a header and a single nonzero byte of data.
#[derive(Debug)]
struct Sparse {
    header: Vec<u8>,
    len: u64,
}

impl ReadAt for Sparse {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        for (offset, byte) in (start..).zip(to) {
            *byte = usize::try_from(offset)
                .ok()
                .and_then(|offset| self.header.get(offset))
                .copied()
                .unwrap_or_default();
            // Highest byte of the second value in the last tensor, which is then 2 in f32.
            if offset == self.len - 32 + 7 {
                *byte = 0x40;
            }
        }
        Ok(())
    }
}

/// Checks that offsets beyond 4 GiB also work on 32-bit systems.
#[test]
fn offsets_beyond_4_gib_are_read() {
    let size = |key: &'static str, size: u32| (key, 4, size.to_le_bytes().to_vec());
    let sizes = [
        size("gpt2.context_length", 2),
        size("gpt2.embedding_length", 2),
        size("gpt2.block_count", 1),
        size("gpt2.attention.head_count", 1),
    ];
    let far = 5u64 << 30;
    let tensors = [("token_embd.weight", [4, 2], 0), ("far", [4, 2], far)];
    let header = gguf(&sizes, &tensors, 0);
    let len = header.len() as u64 + far + 32;
    let files = GivenFiles::new("large").with_file("large.gguf", Arc::new(Sparse { header, len }));
    let checkpoint = open(files).unwrap();
    assert_eq!(checkpoint.files().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [len]);
    let index = checkpoint.tensors().iter().position(|tensor| tensor.name == "far").unwrap();
    let statistics = checkpoint.statistics(index, &|_| ()).unwrap().unwrap();
    assert_eq!((statistics.min, statistics.max, statistics.zeros), (0.0, 2.0, 7));
}

/// A file beyond the address space is rejected before its header is read.
#[cfg(target_pointer_width = "32")]
#[test]
fn safetensors_file_beyond_the_address_space_is_rejected() {
    let files = fixture_files("tiny-checkpoint", &["config.json"], FileSource::InMemory);
    // A header length, followed by `{`.
    let header = [&8u64.to_le_bytes()[..], b"{"].concat();
    let file = Sparse { header, len: 5 << 30 };
    let error = open(files.with_file("model.safetensors", Arc::new(file))).unwrap_err().to_string();
    assert_eq!(
        error,
        "given/model.safetensors: the safetensors file has 5368709120 bytes, but this 32-bit program reads at most \
         4294967295; save the model in shards, or as GGUF in q8_0"
    );
}

/// A head in a tied configuration is compared with the embedding piece by piece.
#[test]
fn contradicting_head_is_detected_in_ranged_files() {
    for (change, is_sound) in [(0.0, true), (1.0, false)] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            let head = tensors["transformer.wte.weight"].affine(1.0, change).unwrap();
            tensors.insert("lm_head.weight".into(), head.to_dtype(DType::F32).unwrap());
        });
        let checkpoint = open(supplied(folder.path(), FileSource::Ranged).unwrap()).unwrap();
        let on_disk = Checkpoint::open(folder.path()).unwrap();
        let problems = |checkpoint: &Checkpoint| checkpoint.check().map_err(|error| error.to_string());
        assert_eq!(problems(&checkpoint), problems(&on_disk));
        assert_eq!(checkpoint.check().is_ok(), is_sound);
    }
}

/// Error messages omit the folder if its only file has the same name.
#[test]
fn single_file_errors_omit_the_folder() {
    let error = open(GivenFiles::new("cut.gguf").with_bytes("cut.gguf", b"GGUF".as_slice())).unwrap_err();
    let alone = portable_message(error);
    assert!(alone.starts_with("cut.gguf: "), "{alone}");
    let named = open(GivenFiles::new("mine").with_bytes("cut.gguf", b"GGUF".as_slice())).unwrap_err();
    assert_eq!(portable_message(named), format!("mine/{alone}"));
}
