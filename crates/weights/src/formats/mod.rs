//! Which format a file has, told by its content, and the file to open in a folder, told by name if that is settled.

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

/// Largest JSON that is taken for an index of shards; real ones have some hundred kilobytes.
const MAX_INDEX_BYTES: u64 = 4 << 20;
/// Most files of one checkpoint.
const MAX_SHARDS: usize = 1024;
/// The names under which transformers saves weights, in the order in which it looks for them.
const USUAL_NAMES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
/// What training leaves beside a checkpoint in a format of weights.
const TRAINING_STATE: [&str; 7] = [
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
    "scaler.pt",
    "training-state.safetensors",
];

/// Every kind of file, a row each; the first that recognises a file reads it.
const READERS: [Reader; 7] = [
    pytorch::ZIP,
    pytorch::LEGACY,
    gguf::READER,
    llm_c::READER,
    tensorflow::READER,
    safetensors::READER,
    SHARD_INDEX,
];

/// A rank tells a reader from the others too.
const _: () = {
    let mut seen = [false; READERS.len()];
    let mut place = 0;
    while place < READERS.len() {
        let rank = READERS[place].rank as usize;
        assert!(!seen[rank], "two readers of one rank");
        seen[rank] = true;
        place += 1;
    }
};

/// The index of a model in several files.
const SHARD_INDEX: Reader = Reader {
    rank: 0,
    recognises: |file, _| Ok(weight_map(file)?.is_some()),
    read: |files, index| open_shards(files, &index),
    read_all: None,
};

/// Opens the weights at `path`: a folder, a file of any format, an index of shards, or the common beginning of the
/// names of a TensorFlow checkpoint.
pub(crate) fn open(files: &Files, path: &Path) -> Result<Source, WeightsError> {
    let index = with_ending(path, ".index");
    let source = if let Some(only) = files.only() {
        // Its errors are its own.
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
            source.notes.push(adapter::note_beside(&name, folder));
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
        let what = "no tensor is in the file; save the model's state_dict()".to_owned();
        return Err(WeightsError::NotWeights { path: source.path, what });
    }
    Ok(source)
}

/// Whether there is a checkpoint at a path: a folder with a configuration or weights, a file of weights, or the common beginning
/// of the names of a TensorFlow checkpoint. It may still be damaged.
///
/// ```
/// use candle_gpt2_weights::is_checkpoint;
///
/// let folder = tempfile::tempdir()?;
/// assert!(!is_checkpoint(folder.path()), "an empty folder");
/// std::fs::write(folder.path().join("model.safetensors"), candle_gpt2_stories::WEIGHTS)?;
/// assert!(is_checkpoint(folder.path()));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn is_checkpoint(path: &Path) -> bool {
    let files = Files::Disk;
    let holds_weights = |path: &Path| {
        let Ok(file) = files.open(path) else { return false };
        let is_pointer =
            file.first(SNIFFED_BYTES as u64).is_ok_and(|start| mistaken_file::pointer(&start, "").is_some());
        is_pointer || recognised(&file).is_ok_and(|reader| reader.is_some())
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
    let reader = recognised(&file)?;
    read(files, file, reader)
}

/// Opens one file of any tensors, with what it says beside them.
pub(crate) fn open_tensors(files: &Files, path: &Path) -> Result<TensorsAndEntries, WeightsError> {
    let file = files.open(path)?;
    let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
    let (source, entries) = match recognised(&file)? {
        Some(Reader { read_all: Some(read_all), .. }) => read_all(file)?,
        Some(reader) if reader.rank != safetensors::READER.rank => {
            return Err(refuse(
                "neither safetensors, GGUF nor a file of torch.save; give one of them".into(),
            ));
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
    if let Some(what) = mistaken_file::something_else(&start, "weights") {
        return Err(refuse(what));
    }
    if reader.is_none() && is_json(&start) {
        let text = String::from_utf8_lossy(&start);
        let quoted: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(80).collect();
        let is_named_json = path.extension().is_some_and(|end| end == "json");
        let what_to_do = match is_named_json {
            true if find_weights(files, files.folder_of(&path)).is_ok() => {
                "name its folder, which holds the weights"
            }
            true => "weights in JSON are not read: save them as safetensors or with torch.save",
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
        // It says best what is wrong with a file of no known kind.
        None => safetensors::read(file)?,
    };
    check(&source).map_err(refuse)?;
    Ok(source)
}

/// What holds in every format: a number of tensors, names and shapes that a model can have.
fn check(source: &Source) -> Result<(), String> {
    let tensors = &source.tensors;
    if tensors.len() > MAX_TENSORS {
        return Err(format!("{} tensors; no GPT-2 has more than {MAX_TENSORS}", tensors.len()));
    }
    let mut names = HashSet::new();
    for tensor in tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(format!("tensor `{}` is there twice", tensor.name));
        }
        let mut nonzero = tensor.shape.iter().filter(|size| **size > 0);
        let elements = nonzero.try_fold(1usize, |count, size| count.checked_mul(*size));
        if elements.is_none_or(|elements| elements as u64 > MAX_ELEMENTS) || tensor.shape.len() > MAX_RANK {
            return Err(format!("tensor `{}` claims the shape {:?}", tensor.name, tensor.shape));
        }
        check_addressable(tensor, isize::MAX as u64)?;
    }
    if source.has_own_bytes {
        let mut places: Vec<_> =
            tensors.iter().map(|tensor| (tensor.file, tensor.bytes.clone(), &tensor.name)).collect();
        places.sort_by_key(|(file, bytes, _)| (*file, bytes.start, bytes.end));
        for pair in places.windows(2) {
            let [(file, bytes, name), (next_file, next_bytes, next_name)] = pair else { continue };
            if file == next_file && next_bytes.start < bytes.end {
                return Err(format!("the tensors `{name}` and `{next_name}` overlap; download it again"));
            }
        }
    }
    Ok(())
}

/// A tensor of weights is held in one piece, in the file's type or in f32, of at most `limit` bytes: 2 GiB on 32 bits.
fn check_addressable(tensor: &StoredTensor, limit: u64) -> Result<(), String> {
    let in_f32 = (tensor.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
    let needed = in_f32.max(tensor.stored_bytes());
    if tensor.dtype.holds_weights() && needed > limit {
        return Err(format!(
            "tensor `{}` takes {needed} bytes, and this program of 32 bits holds at most {limit} in one piece; use the 64-bit \
             program",
            tensor.name
        ));
    }
    Ok(())
}

/// The reader that a file's content is for.
fn recognised(file: &CheckpointFile) -> Result<Option<&'static Reader>, WeightsError> {
    let start = file.first(SNIFFED_BYTES as u64)?;
    for reader in &READERS {
        if (reader.recognises)(file, &start)? {
            return Ok(Some(reader));
        }
    }
    Ok(None)
}

fn is_json(start: &[u8]) -> bool {
    start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

/// The shard of each tensor, if the file is an index of shards.
fn weight_map(file: &CheckpointFile) -> Result<Option<BTreeMap<String, String>>, WeightsError> {
    if file.len() > MAX_INDEX_BYTES || !is_json(&file.first(SNIFFED_BYTES as u64)?) {
        return Ok(None);
    }
    let index = serde_json::from_slice::<Value>(&file.read(0..file.len())?).ok();
    let places = index.and_then(|mut index| Some(index.get_mut("weight_map")?.take()));
    Ok(places.and_then(|places| serde_json::from_value(places).ok()))
}

/// Opens every shard that an index names; all of them lie beside it.
fn open_shards(files: &Files, index: &CheckpointFile) -> Result<Source, WeightsError> {
    let path = index.path();
    let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
    let places = weight_map(index)?.unwrap_or_default();
    let names: HashSet<&str> = places.values().map(String::as_str).collect();
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    if names.is_empty() || names.len() > MAX_SHARDS {
        return Err(refuse(format!("an index of {} shards; expected from 1 to {MAX_SHARDS}", names.len())));
    }
    let mut whole: Option<Source> = None;
    let mut seen = HashSet::new();
    for name in names {
        // A name that leaves the folder could reach any file of the system.
        if Path::new(name).file_name() != Some(name.as_ref()) || name.contains('\\') {
            return Err(refuse(format!("the shard name `{name}` is a path; shards are next to their index")));
        }
        let shard_path = path.with_file_name(name);
        if !files.exists(&shard_path) {
            return Err(refuse(format!("the shard {name} is missing; add it to the others")));
        }
        // An index among its own shards would be opened for ever.
        let file = files.open(&shard_path)?;
        let reader = recognised(&file)?;
        if reader.is_some_and(|reader| reader.rank == SHARD_INDEX.rank) {
            return Err(refuse(format!("the shard {name} is an index itself")));
        }
        let shard = read(files, file, reader)?;
        let own: HashSet<&str> = shard.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let misplaced =
            places.iter().find(|(tensor, place)| *place == name && !own.contains(tensor.as_str()));
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
    let whole = whole.ok_or_else(|| refuse("an index without shards".into()))?;
    let evidence = format!("{}, in the shards of an index", whole.evidence);
    Ok(Source { path: path.to_owned(), evidence, ..whole })
}

/// The file to open in a folder: one of the usual names, else the only file whose content is weights; with notes on the files that
/// are not read.
fn find_weights(files: &Files, folder: &Path) -> Result<(PathBuf, Vec<String>), WeightsError> {
    let has = |name: &str| files.exists(&folder.join(name));
    let mut notes = Vec::new();
    if let Some(usual) = USUAL_NAMES.into_iter().find(|name| has(name)) {
        let index = format!("{usual}.index.json");
        if has(&index) {
            notes.push(format!("{usual} is read; {index} and its shards beside it are not"));
        }
        if has(ADAPTER_CONFIG) {
            notes.push(adapter::note_beside(usual, folder));
        }
        return Ok((folder.join(usual), notes));
    }
    let names = files.names(folder)?;
    let Found { candidates, others } = candidates(files, folder, &names);
    let no_weights = |found: String| Err(WeightsError::NoWeights { folder: files.told(folder), found });
    let way_out = match files {
        Files::Disk => "name the file itself",
        Files::Given(_) => "give one of them alone",
    };
    match candidates.as_slice() {
        [only] => {
            if has(ADAPTER_CONFIG) {
                notes.push(adapter::note_beside(only, folder));
            }
            Ok((folder.join(only), notes))
        }
        [] if has(ADAPTER_CONFIG) => Err(adapter::instead_of_model(files, folder)),
        [] if others.is_empty() => no_weights(format!(
            ", and no other weights file{}; add the weights, or name the folder that holds them",
            among(names)
        )),
        [] => no_weights(format!(", and no other weights file: {}", others.join("; "))),
        shards if shards.iter().all(|name| is_shard(name)) => no_weights(format!(
            ", but the shards {} without their index; add the index (model.safetensors.index.json)",
            shards.join(", ")
        )),
        several => no_weights(format!(", but several others ({}); {way_out}", several.join(", "))),
    }
}

/// Files of a folder without the usual names.
struct Found {
    /// Those that may be the model.
    candidates: Vec<String>,
    /// Reasons why others are not.
    others: Vec<String>,
}

fn candidates(files: &Files, folder: &Path, names: &[String]) -> Found {
    /// Most reasons in one message.
    const MOST_REASONS: usize = 3;
    let mut found: Vec<(u8, String)> = Vec::new();
    let mut others = Vec::new();
    let mut in_shards: HashSet<String> = HashSet::new();
    for name in names {
        if TRAINING_STATE.contains(&name.as_str()) || ADAPTER_WEIGHTS.contains(&name.as_str()) {
            continue;
        }
        let Ok(file) = files.open(&folder.join(name)) else { continue };
        let Ok(start) = file.first(SNIFFED_BYTES as u64) else { continue };
        match recognised(&file) {
            // Other archives begin alike.
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
    // The pieces of a model in several files are one candidate.
    found.retain(|(_, name)| !in_shards.contains(name));
    if let Some(named) = named_by_tensorflow(files, folder) {
        found.retain(|(rank, name)| *rank != tensorflow::READER.rank || *name == named);
    }
    found.sort();
    others.sort();
    others.truncate(MOST_REASONS);
    Found { candidates: found.into_iter().map(|(_, name)| name).collect(), others }
}

/// Whether a name is that of one of several shards, such as `model-00001-of-00002.safetensors`.
pub(crate) fn is_shard(name: &str) -> bool {
    let Some((before, after)) = name.split_once("-of-") else { return false };
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = before.rsplit_once('-').map_or("", |(_, number)| number);
    is_number(number) && is_number(after.split('.').next().unwrap_or_default())
}

/// Whether a name is one that weights have.
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

/// The first of some names, in words.
fn among(mut names: Vec<String>) -> String {
    const SHOWN: usize = 6;
    names.sort_unstable();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    match (names.is_empty(), more) {
        (true, _) => String::new(),
        (_, 0) => format!(" among {}", names.join(", ")),
        (_, more) => format!(" among {} and {more} more", names.join(", ")),
    }
}

/// Name of the index that TensorFlow's file `checkpoint` calls the latest: `model_checkpoint_path: "…"`.
fn named_by_tensorflow(files: &Files, folder: &Path) -> Option<String> {
    let text = files.read_small(&folder.join("checkpoint"), MAX_INDEX_BYTES).ok()?;
    let text = String::from_utf8(text).ok()?;
    let path = text.lines().find_map(|line| line.trim().strip_prefix("model_checkpoint_path:"))?;
    // It may hold the folder of the machine that wrote it; the files lie here.
    let name = Path::new(path.trim().trim_matches('"')).file_name()?;
    let index = with_ending(Path::new(name), ".index").to_str()?.to_owned();
    files.is_file(&folder.join(&index)).then_some(index)
}

/// `path` with `ending` after its whole name.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}
