//! Which format a file has, told by its content, and the file to open in a folder, told by name if that is settled.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::WeightsError;
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
const TRAINING_STATE: [&str; 6] =
    ["training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "scaler.pt"];

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
    if let Some(only) = files.only() {
        // Its errors are its own.
        open_file(files, &path.join(only))
    } else if files.is_folder(path) {
        open_file(files, &find_weights(files, path)?)
    } else if files.exists(path) {
        open_file(files, path)
    } else if files.is_file(&index) {
        open_file(files, &index)
    } else {
        Err(WeightsError::NotFound { path: path.to_owned() })
    }
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
        let what_to_do = match path.extension().is_some_and(|end| end == "json") {
            true => "give the folder that it lies in",
            false => "download the file again",
        };
        return Err(refuse(format!("JSON text in place of the weights: {quoted}; {what_to_do}")));
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

/// The file to open in a folder: one of the usual names, else the only file whose content is weights.
fn find_weights(files: &Files, folder: &Path) -> Result<PathBuf, WeightsError> {
    let usual = USUAL_NAMES.map(|name| folder.join(name));
    if let Some(path) = usual.into_iter().find(|path| files.exists(path)) {
        return Ok(path);
    }
    if let Some(index) = named_by_tensorflow(files, folder) {
        return Ok(index);
    }
    let mut found: Vec<(u8, String)> = Vec::new();
    for name in files.names(folder)? {
        if TRAINING_STATE.contains(&name.as_str()) {
            continue;
        }
        let reader = files.open(&folder.join(&name)).and_then(|file| recognised(&file));
        found.extend(reader.ok().flatten().map(|reader| (reader.rank, name)));
    }
    found.sort();
    let best: Vec<&str> =
        found.iter().filter(|(rank, _)| *rank == found[0].0).map(|(_, name)| name.as_str()).collect();
    let none = |found: String| Err(WeightsError::NoWeights { folder: files.told(folder), found });
    let way_out = match files {
        Files::Disk => "name the file itself",
        Files::Given(_) => "give one of them alone",
    };
    match best.as_slice() {
        [only] => Ok(folder.join(only)),
        [] => none(format!(
            "{}; add the weights, or name the folder that holds them",
            among(files.names(folder)?)
        )),
        several => none(format!(", but several others ({}); {way_out}", several.join(", "))),
    }
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

/// The index of the checkpoint that TensorFlow's file `checkpoint` names as the latest: `model_checkpoint_path: "…"`.
fn named_by_tensorflow(files: &Files, folder: &Path) -> Option<PathBuf> {
    let text = files.read_small(&folder.join("checkpoint"), MAX_INDEX_BYTES).ok()?;
    let text = String::from_utf8(text).ok()?;
    let path = text.lines().find_map(|line| line.trim().strip_prefix("model_checkpoint_path:"))?;
    // It may hold the folder of the machine that wrote it; the files lie here.
    let name = Path::new(path.trim().trim_matches('"')).file_name()?;
    let index = with_ending(&folder.join(name), ".index");
    files.is_file(&index).then_some(index)
}

/// `path` with `ending` after its whole name.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}
