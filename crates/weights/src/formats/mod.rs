//! Format detection by content, and choice of the weights file in a folder.
//!
//! Files with the usual names are chosen by name. Other files are candidates if they contain weights.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::WeightsError;
use crate::adapter::{self, ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use crate::checkpoint_file::CheckpointFile;
use crate::files::Files;
use crate::mistaken_file::{self, SNIFFED_BYTES};
use crate::source::Source;
use crate::stored::StoredTensor;
use limits::{MAX_ELEMENTS, MAX_RANK, MAX_TENSORS};
use reader::{Reader, TensorsAndEntries};

mod gguf;
mod limits;
mod llm_c;
mod pickle;
mod pytorch;
mod reader;
mod safetensors;
mod tensorflow;

/// Maximum size of a shard index; real ones are a few hundred kilobytes.
const MAX_INDEX_BYTES: u64 = 4 << 20;
/// Maximum number of shards in a checkpoint.
const MAX_SHARDS: usize = 1024;
/// File names that transformers uses for weights, in its lookup order.
const USUAL_NAMES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
/// Names of files in a weights format that hold training state instead of the model.
const TRAINING_STATE: [&str; 7] = [
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
    "scaler.pt",
    "training-state.safetensors",
];

/// Readers for all formats; the first one that recognizes a file reads it.
const READERS: [Reader; 7] = [
    pytorch::ZIP,
    pytorch::LEGACY,
    gguf::READER,
    llm_c::READER,
    tensorflow::READER,
    safetensors::READER,
    SHARD_INDEX,
];

/// Compile-time check that no two readers have the same rank, because ranks identify readers.
const _: () = {
    let mut seen = [false; READERS.len()];
    let mut index = 0;
    while index < READERS.len() {
        let rank = READERS[index].rank as usize;
        assert!(!seen[rank], "two readers have the same rank");
        seen[rank] = true;
        index += 1;
    }
};

/// Reader for the index of a sharded model.
const SHARD_INDEX: Reader = Reader {
    rank: 0,
    matches: |file, _| Ok(weight_map(file)?.is_some()),
    read: |files, index| open_shards(files, &index),
    read_all: None,
};

/// Opens the weights at `path`.
///
/// The path can be a folder, a file of any format, a shard index, or the common prefix of a TensorFlow
/// checkpoint's file names.
pub(crate) fn open(files: &Files, path: &Path) -> Result<Source, WeightsError> {
    let index = with_ending(path, ".index");
    let source = if let Some(only) = files.only() {
        // A single supplied file is opened directly, so that its error messages are about the file itself.
        open_file(files, &path.join(only))?
    } else if files.is_folder(path) {
        let (weights, notes) = find_weights(files, path)?;
        let mut source = open_file(files, &weights)?;
        source.notes.extend(notes);
        source
    } else if files.exists(path) {
        let mut source = open_file(files, path)?;
        let folder = files.folder_of(path);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        if files.exists(&folder.join(ADAPTER_CONFIG)) {
            source.notes.push(adapter::adjacent_note(&name, folder));
        }
        source
    } else if files.is_file(&index) {
        open_file(files, &index)?
    } else {
        return Err(WeightsError::NotFound { path: path.to_owned() });
    };
    if source.tensors.iter().any(|tensor| tensor.name.contains("lora_A.")) {
        return Err(adapter::instead_of_model(files, &source.path));
    }
    if source.tensors.is_empty() {
        let what = "the file contains no tensors; save the model's state_dict()".to_owned();
        return Err(WeightsError::NotWeights { path: source.path, what });
    }
    Ok(source)
}

/// Whether a path looks like a checkpoint, which may still be damaged.
///
/// The path can be a folder with a configuration or weights, a weights file, or the common prefix of a
/// TensorFlow checkpoint's file names. A Git LFS pointer counts as a weights file.
///
/// ```
/// use candle_gpt2_weights::is_checkpoint;
///
/// let folder = tempfile::tempdir()?;
/// assert!(!is_checkpoint(folder.path()), "the folder is empty");
/// std::fs::write(folder.path().join("model.gguf"), candle_gpt2_stories::WEIGHTS)?;
/// assert!(is_checkpoint(folder.path()));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn is_checkpoint(path: &Path) -> bool {
    let files = Files::Disk;
    let holds_weights = |path: &Path| {
        let Ok(file) = files.open(path) else { return false };
        let is_pointer =
            file.first(SNIFFED_BYTES as u64).is_ok_and(|start| mistaken_file::pointer(&start, "").is_some());
        is_pointer || detect(&file).is_ok_and(|reader| reader.is_some())
    };
    if !files.is_folder(path) {
        return (files.is_file(path) && holds_weights(path)) || files.is_file(&with_ending(path, ".index"));
    }
    let is_usual = |name: &&str| files.exists(&path.join(name));
    let usual = [ADAPTER_CONFIG, "config.json", "hparams.json"];
    USUAL_NAMES.iter().chain(&usual).any(is_usual)
        || files.names(path).is_ok_and(|names| names.iter().any(|name| holds_weights(&path.join(name))))
}

fn open_file(files: &Files, path: &Path) -> Result<Source, WeightsError> {
    let file = files.open(path)?;
    let reader = detect(&file)?;
    read(files, file, reader)
}

/// Opens a file with arbitrary tensors, and returns them with the file's metadata.
pub(crate) fn open_tensors(files: &Files, path: &Path) -> Result<TensorsAndEntries, WeightsError> {
    let file = files.open(path)?;
    let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
    let (source, entries) = match detect(&file)? {
        Some(Reader { read_all: Some(read_all), .. }) => read_all(file)?,
        Some(reader) if reader.rank != safetensors::READER.rank => {
            return Err(refuse("expected safetensors, GGUF or a file written by torch.save".into()));
        }
        reader => {
            let source = read(files, file, reader)?;
            let entries = source.files.first().map(safetensors::entries).transpose()?;
            (source, entries.unwrap_or_default())
        }
    };
    check(&source).map_err(refuse)?;
    Ok((source, entries))
}

fn read(files: &Files, file: CheckpointFile, reader: Option<&Reader>) -> Result<Source, WeightsError> {
    let path = file.path().to_owned();
    let refuse = |what: String| WeightsError::NotWeights { path: path.clone(), what };
    let start = file.first(SNIFFED_BYTES as u64)?;
    if let Some(what) = mistaken_file::misidentified(&start, "weights") {
        return Err(refuse(what));
    }
    if reader.is_none() && is_json(&start) {
        let text = String::from_utf8_lossy(&start);
        let quoted: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(80).collect();
        let is_named_json = path.extension().is_some_and(|end| end == "json");
        let what_to_do = match is_named_json {
            true if find_weights(files, files.folder_of(&path)).is_ok() => {
                "pass its folder, which contains the weights"
            }
            true => "JSON weights are unsupported: save them as safetensors or with torch.save",
            false => "download the file again",
        };
        return Err(refuse(format!("JSON text in place of the weights: {quoted}; {what_to_do}")));
    }
    if let Some(what) = mistaken_file::other_format(&start).filter(|_| reader.is_none()) {
        return Err(refuse(what));
    }
    drop(start);
    let source = match reader {
        Some(reader) => (reader.read)(files, file)?,
        // For an unknown format, the safetensors reader gives the best error message.
        None => safetensors::read(file)?,
    };
    check(&source).map_err(refuse)?;
    Ok(source)
}

/// Checks the requirements common to all formats.
///
/// These are tensor count, unique names, plausible shapes and no overlapping data.
fn check(source: &Source) -> Result<(), String> {
    let tensors = &source.tensors;
    if tensors.len() > MAX_TENSORS {
        return Err(format!("the file has {} tensors; expected at most {MAX_TENSORS}", tensors.len()));
    }
    let mut names = HashSet::new();
    for tensor in tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(format!("duplicate tensor `{}`", tensor.name));
        }
        let mut nonzero = tensor.shape.iter().filter(|size| **size > 0);
        let elements = nonzero.try_fold(1usize, |count, size| count.checked_mul(*size));
        if elements.is_none_or(|elements| elements as u64 > MAX_ELEMENTS) || tensor.shape.len() > MAX_RANK {
            return Err(format!("tensor `{}` has the implausible shape {:?}", tensor.name, tensor.shape));
        }
        check_addressable(tensor, isize::MAX as u64)?;
    }
    if source.has_own_bytes {
        let mut ranges: Vec<_> =
            tensors.iter().map(|tensor| (tensor.file, tensor.bytes.clone(), &tensor.name)).collect();
        ranges.sort_by_key(|(file, bytes, _)| (*file, bytes.start, bytes.end));
        for pair in ranges.windows(2) {
            let [(file, bytes, name), (next_file, next_bytes, next_name)] = pair else { continue };
            if file == next_file && next_bytes.start < bytes.end {
                return Err(format!("tensors `{name}` and `{next_name}` overlap; download the file again"));
            }
        }
    }
    Ok(())
}

/// Rejects a weight tensor that is larger than the address space allows.
///
/// A tensor is held in one piece, in the file's dtype or in f32. `limit` is in bytes, 2 GiB on 32-bit
/// systems.
fn check_addressable(tensor: &StoredTensor, limit: u64) -> Result<(), String> {
    let in_f32 = (tensor.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
    let needed = in_f32.max(tensor.stored_bytes());
    if tensor.dtype.holds_weights() && needed > limit {
        return Err(format!(
            "tensor `{}` needs {needed} bytes, but this 32-bit program can allocate at most {limit} at a time; use the 64-bit \
             program",
            tensor.name
        ));
    }
    Ok(())
}

/// Returns the reader that recognizes the file's content, if any.
fn detect(file: &CheckpointFile) -> Result<Option<&'static Reader>, WeightsError> {
    let start = file.first(SNIFFED_BYTES as u64)?;
    for reader in &READERS {
        if (reader.matches)(file, &start)? {
            return Ok(Some(reader));
        }
    }
    Ok(None)
}

fn is_json(start: &[u8]) -> bool {
    start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

/// Returns each tensor's shard, or `None` if the file is not a shard index.
fn weight_map(file: &CheckpointFile) -> Result<Option<BTreeMap<String, String>>, WeightsError> {
    if file.len() > MAX_INDEX_BYTES || !is_json(&file.first(SNIFFED_BYTES as u64)?) {
        return Ok(None);
    }
    let index = serde_json::from_slice::<Value>(&file.read(0..file.len())?).ok();
    let shards = index.and_then(|mut index| Some(index.get_mut("weight_map")?.take()));
    Ok(shards.and_then(|shards| serde_json::from_value(shards).ok()))
}

/// Opens every shard of an index; all shards must be next to the index.
fn open_shards(files: &Files, index: &CheckpointFile) -> Result<Source, WeightsError> {
    let path = index.path();
    let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
    let shard_names = weight_map(index)?.unwrap_or_default();
    let names: HashSet<&str> = shard_names.values().map(String::as_str).collect();
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    if names.is_empty() || names.len() > MAX_SHARDS {
        return Err(refuse(format!("the index lists {} shards; expected 1 to {MAX_SHARDS}", names.len())));
    }
    let mut whole: Option<Source> = None;
    let mut seen = HashSet::new();
    for name in names {
        // A shard name that is a path could refer to any file on the system.
        if Path::new(name).file_name() != Some(name.as_ref()) || name.contains('\\') {
            return Err(refuse(format!(
                "the shard name `{name}` is a path; shards must be next to their index"
            )));
        }
        let shard_path = path.with_file_name(name);
        if !files.exists(&shard_path) {
            return Err(refuse(format!("the shard {name} is missing; put it next to the others")));
        }
        // Opening an index that lists itself as a shard would never end.
        let file = files.open(&shard_path)?;
        let reader = detect(&file)?;
        if reader.is_some_and(|reader| reader.rank == SHARD_INDEX.rank) {
            return Err(refuse(format!("the shard {name} is itself an index")));
        }
        let shard = read(files, file, reader)?;
        let own: HashSet<&str> = shard.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let misplaced =
            shard_names.iter().find(|(tensor, shard)| *shard == name && !own.contains(tensor.as_str()));
        if let Some((tensor, _)) = misplaced {
            return Err(refuse(format!("tensor `{tensor}` is not in {name}, where the index places it")));
        }
        if let Some(tensor) = shard.tensors.iter().find(|tensor| !seen.insert(tensor.name.clone())) {
            return Err(refuse(format!("tensor `{}` is in more than one shard", tensor.name)));
        }
        match &mut whole {
            None => whole = Some(shard),
            Some(whole) => {
                let first_file = whole.files.len();
                let moved = shard.tensors.into_iter().map(|mut tensor| {
                    tensor.file += first_file;
                    tensor
                });
                whole.tensors.extend(moved);
                whole.files.extend(shard.files);
            }
        }
    }
    let whole = whole.ok_or_else(|| refuse("the index lists no shards".into()))?;
    let evidence = format!("{}, in shards listed by an index", whole.evidence);
    Ok(Source { path: path.to_owned(), evidence, ..whole })
}

/// Chooses the weights file in a folder, and returns notes on the files that are not read.
///
/// A file with one of the usual names takes precedence. Otherwise, exactly one file must contain weights.
fn find_weights(files: &Files, folder: &Path) -> Result<(PathBuf, Vec<String>), WeightsError> {
    let has = |name: &str| files.exists(&folder.join(name));
    let mut notes = Vec::new();
    if let Some(usual) = USUAL_NAMES.into_iter().find(|name| has(name)) {
        let index = format!("{usual}.index.json");
        if has(&index) {
            notes.push(format!("{usual} is used; {index} and its shards are ignored"));
        }
        if has(ADAPTER_CONFIG) {
            notes.push(adapter::adjacent_note(usual, folder));
        }
        return Ok((folder.join(usual), notes));
    }
    let names = files.names(folder)?;
    let WeightsSearch { candidates, others } = candidates(files, folder, &names);
    let no_weights =
        |found: String| Err(WeightsError::NoWeights { folder: files.display_name(folder), found });
    let remedy = match files {
        Files::Disk => "pass one of them",
        Files::Given(_) => "supply only one of them",
    };
    match candidates.as_slice() {
        [only] => {
            if has(ADAPTER_CONFIG) {
                notes.push(adapter::adjacent_note(only, folder));
            }
            Ok((folder.join(only), notes))
        }
        [] if has(ADAPTER_CONFIG) => Err(adapter::instead_of_model(files, folder)),
        [] if others.is_empty() => no_weights(format!(
            " and no other weights file{}; add the weights, or pass the folder that contains them",
            list_names(names)
        )),
        [] => no_weights(format!(" and no other weights file: {}", others.join("; "))),
        shards if shards.iter().all(|name| is_shard(name)) => no_weights(format!(
            ", only the shards {} without their index; add the index (model.safetensors.index.json)",
            shards.join(", ")
        )),
        several => {
            no_weights(format!(", but several other weights files ({}); {remedy}", several.join(", ")))
        }
    }
}

/// Search result for a folder without the usual file names.
struct WeightsSearch {
    /// Files that may contain the model.
    candidates: Vec<String>,
    /// Reasons why the remaining files do not contain weights.
    others: Vec<String>,
}

fn candidates(files: &Files, folder: &Path, names: &[String]) -> WeightsSearch {
    /// Maximum number of reasons in a message.
    const MAX_REASONS: usize = 3;
    let mut found: Vec<(u8, String)> = Vec::new();
    let mut others = Vec::new();
    let mut in_shards: HashSet<String> = HashSet::new();
    for name in names {
        if TRAINING_STATE.contains(&name.as_str()) || ADAPTER_WEIGHTS.contains(&name.as_str()) {
            continue;
        }
        let Ok(file) = files.open(&folder.join(name)) else { continue };
        let Ok(start) = file.first(SNIFFED_BYTES as u64) else { continue };
        match detect(&file) {
            // Other zip archives begin with the same bytes.
            Ok(Some(reader)) if reader.rank == pytorch::ZIP.rank && !pytorch::is_torch_archive(&start) => {}
            Ok(Some(reader)) => {
                if reader.rank == SHARD_INDEX.rank {
                    let shards = weight_map(&file).ok().flatten().unwrap_or_default();
                    in_shards.extend(shards.into_values());
                }
                found.push((reader.rank, name.clone()));
            }
            _ => {
                let pointer = mistaken_file::pointer(&start, "weights");
                let other = || mistaken_file::other_format(&start).filter(|_| is_like_weights(name));
                others.extend(pointer.or_else(other).map(|what| format!("{name} is {what}")));
            }
        }
    }
    // The shards of an index are not separate candidates.
    found.retain(|(_, name)| !in_shards.contains(name));
    if let Some(named) = named_by_tensorflow(files, folder) {
        found.retain(|(rank, name)| *rank != tensorflow::READER.rank || *name == named);
    }
    found.sort();
    others.sort();
    others.truncate(MAX_REASONS);
    WeightsSearch { candidates: found.into_iter().map(|(_, name)| name).collect(), others }
}

/// Whether a file name belongs to a shard, such as `model-00001-of-00002.safetensors`.
pub(crate) fn is_shard(name: &str) -> bool {
    let Some((before, after)) = name.split_once("-of-") else { return false };
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = before.rsplit_once('-').map_or("", |(_, number)| number);
    is_number(number) && is_number(after.split('.').next().unwrap_or_default())
}

/// Whether a file name has an extension commonly used for weights.
fn is_like_weights(name: &str) -> bool {
    const ENDINGS: [&str; 17] = [
        "safetensors",
        "bin",
        "pt",
        "pth",
        "ckpt",
        "gguf",
        "ggml",
        "h5",
        "keras",
        "msgpack",
        "onnx",
        "pkl",
        "pickle",
        "npz",
        "gz",
        "pb",
        "tar",
    ];
    Path::new(name)
        .extension()
        .and_then(|ending| ending.to_str())
        .is_some_and(|ending| ENDINGS.contains(&ending))
}

/// Formats the first few names for an error message.
fn list_names(mut names: Vec<String>) -> String {
    const SHOWN: usize = 6;
    names.sort_unstable();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    match (names.is_empty(), more) {
        (true, _) => String::new(),
        (_, 0) => format!(" (found {})", names.join(", ")),
        (_, more) => format!(" (found {} and {more} more)", names.join(", ")),
    }
}

/// Returns the latest index, as recorded in TensorFlow's `checkpoint` file.
///
/// The file contains a line such as `model_checkpoint_path: "…"`.
fn named_by_tensorflow(files: &Files, folder: &Path) -> Option<String> {
    let text = files.read_small(&folder.join("checkpoint"), MAX_INDEX_BYTES).ok()?;
    let text = String::from_utf8(text).ok()?;
    let path = text.lines().find_map(|line| line.trim().strip_prefix("model_checkpoint_path:"))?;
    // The path may come from the machine that wrote the checkpoint, so only its file name counts.
    let name = Path::new(path.trim().trim_matches('"')).file_name()?;
    let index = with_ending(Path::new(name), ".index").to_str()?.to_owned();
    files.is_file(&folder.join(&index)).then_some(index)
}

/// Appends `ending` to the file name, after any extension.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}
