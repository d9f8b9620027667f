//! Reader for files written by PyTorch's `torch.save`, both zip archives and the legacy format.
//!
//! PyTorch has written zip archives since version 1.6. A legacy file is a sequence of pickles, followed by
//! raw data. The state dict can be plain or wrapped: under `state_dict`, under `model_state_dict` (as in
//! rasbt/LLMs-from-scratch), or under nanoGPT's `model` with `model_args` next to it.
//!
//! Source: `_save` and `_legacy_save` in `torch/serialization.py`.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use candle_gpt2::{Activation, Gpt2Config};
use candle_gpt2_arithmetic::NumberType;

use super::limits::MAX_TENSORS;
use super::pickle::{Pickle, TensorReference, Value};
use super::reader::{Reader, TensorsAndEntries};
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::error::ShapeOf;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// Magic number in the first pickle of a legacy file: 0x1950a86a20f9469cfc6c, little-endian.
const LEGACY_MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
/// Maximum number of dictionaries nested around a state dict.
const MAX_WRAPPERS: usize = 3;
/// Maximum nesting depth of dictionaries if all tensors are read.
const MAX_NESTING: usize = 8;
/// Maximum length in bytes of a stored string, and of a name built from nested keys.
const MAX_TEXT_BYTES: usize = 1024;
/// Maximum size of a pickle; GPT-2's is tens of kilobytes.
const MAX_PICKLE_BYTES: u64 = 64 << 20;
/// Name suffixes that identify a GPT-2 state dict.
const ANCHORS: [&str; 4] = ["wte.weight", "tok_emb.weight", "wpe.weight", "pos_emb.weight"];

/// Evidence reported for a zip archive.
const ZIP_EVIDENCE: &str = "zip archive with data.pkl";
/// Evidence reported for a legacy file.
const LEGACY_EVIDENCE: &str = "pickle with PyTorch's magic number";

/// Byte range of each storage, by key.
type Storages = HashMap<String, Range<u64>>;

/// Reader for zip archives written by `torch.save`.
pub(super) const ZIP: Reader = Reader {
    rank: 2,
    matches: |_, start| Ok(start.starts_with(b"PK\x03\x04")),
    read: |_, file| read_zip(file),
    read_all: Some(read_all_zip),
};

/// Reader for legacy files written by `torch.save`, which begin with a magic number in a pickle.
pub(super) const LEGACY: Reader = Reader {
    rank: 3,
    matches: |_, start| Ok(is_legacy(start)),
    read: |_, file| read_legacy(file),
    read_all: Some(read_all_legacy),
};

/// Reads the model in a zip archive written by `torch.save`.
fn read_zip(file: CheckpointFile) -> Result<Source, WeightsError> {
    let (pickle, storages) = zip_contents(&file)?;
    source(Format::PyTorchZip, ZIP_EVIDENCE, file, &pickle, &storages)
}

/// Reads the model in a legacy `torch.save` file.
fn read_legacy(file: CheckpointFile) -> Result<Source, WeightsError> {
    let (pickle, storages) = legacy_contents(&file)?;
    source(Format::PyTorchLegacy, LEGACY_EVIDENCE, file, &pickle, &storages)
}

/// Reads all tensors and other entries in a zip archive; see [`named_entries`].
fn read_all_zip(file: CheckpointFile) -> Result<TensorsAndEntries, WeightsError> {
    let (pickle, storages) = zip_contents(&file)?;
    all(Source::new(Format::PyTorchZip, ZIP_EVIDENCE, file), &pickle, &storages)
}

/// Reads all tensors and other entries in a legacy file; see [`named_entries`].
fn read_all_legacy(file: CheckpointFile) -> Result<TensorsAndEntries, WeightsError> {
    let (pickle, storages) = legacy_contents(&file)?;
    all(Source::new(Format::PyTorchLegacy, LEGACY_EVIDENCE, file), &pickle, &storages)
}

/// Returns an error, because reading zip archives requires the feature `pytorch`.
#[cfg(not(feature = "pytorch"))]
fn zip_contents(file: &CheckpointFile) -> Result<(Pickle, Storages), WeightsError> {
    let what = "a PyTorch zip archive, but this program was built without the feature `pytorch`; save the model as safetensors";
    Err(WeightsError::NotWeights { path: file.path().to_owned(), what: what.to_owned() })
}

/// Reads the pickled objects in a zip archive, and the byte ranges of their storages.
#[cfg(feature = "pytorch")]
fn zip_contents(file: &CheckpointFile) -> Result<(Pickle, Storages), WeightsError> {
    use zip::{CompressionMethod, ZipArchive};

    use crate::checkpoint_file::Reader;

    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let damaged = |what: &str| refuse(format!("a damaged PyTorch file: {what}; download it again"));
    let mut archive = ZipArchive::new(Reader::new(file)).map_err(|error| damaged(&error.to_string()))?;
    let mut storages = Storages::new();
    let mut pickle = None;
    let mut is_big_endian = false;
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|error| damaged(&error.to_string()))?;
        // Names such as `{archive}/data.pkl` and `{archive}/data/{key}` only select bytes of the archive.
        let name = entry.name().map_err(|error| damaged(&error.to_string()))?;
        let name = name.split_once('/').map_or(&*name, |(_, name)| name).to_owned();
        let wanted = name == "data.pkl" || name == "byteorder" || name.starts_with("data/");
        if !wanted {
            continue;
        }
        if entry.compression() != CompressionMethod::Stored {
            return Err(damaged("its entries are compressed, which PyTorch never does"));
        }
        let size = entry.size();
        let bytes = entry.data_start().and_then(|start| Some(start..start.checked_add(size)?));
        let bytes = bytes.filter(|bytes| bytes.end <= file.len());
        let bytes = bytes.ok_or_else(|| damaged("an entry lies outside the file"))?;
        match name.strip_prefix("data/") {
            Some(key) => drop(storages.insert(key.to_owned(), bytes)),
            None if name == "data.pkl" => pickle = Some(bytes),
            None => {
                let word = file.read(bytes.start..bytes.end.min(bytes.start + 3))?;
                is_big_endian = *word == *b"big";
            }
        }
    }
    if is_big_endian {
        return Err(refuse(
            "a PyTorch file from a big-endian machine; save it again on a little-endian one".into(),
        ));
    }
    let pickle = pickle.ok_or_else(|| {
        refuse(
            "a zip archive without data.pkl, not written by torch.save (TorchScript is unsupported); save the model's \
             state_dict()"
                .into(),
        )
    })?;
    if pickle.end - pickle.start > MAX_PICKLE_BYTES {
        return Err(refuse(format!(
            "data.pkl is larger than {MAX_PICKLE_BYTES} bytes; save only the state_dict()"
        )));
    }
    let pickle = Pickle::read(&file.read(pickle)?).map_err(&refuse)?;
    Ok((pickle, storages))
}

/// Whether the first bytes of a zip archive contain the name of an entry written by `torch.save`.
pub(super) fn is_torch_archive(start: &[u8]) -> bool {
    ["/data.pkl", "/.format_version", "/byteorder", "/version"]
        .iter()
        .any(|entry| memchr::memmem::find(start, entry.as_bytes()).is_some())
}

/// Whether the bytes start like a legacy `torch.save` file.
fn is_legacy(bytes: &[u8]) -> bool {
    bytes
        .get(..32.min(bytes.len()))
        .is_some_and(|start| start.windows(LEGACY_MAGIC.len()).any(|window| window == LEGACY_MAGIC))
}

/// Reads the pickled objects in a legacy file, and the byte ranges of their storages.
///
/// The file begins with five pickles: a magic number, a version, system information, the objects, and the
/// list of storage keys. Each storage follows as its number of elements in 8 bytes, then the elements.
fn legacy_contents(file: &CheckpointFile) -> Result<(Pickle, Storages), WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let truncated = || refuse("a truncated legacy PyTorch file; download it again".into());
    let mut position = 0;
    let mut pickles = Vec::new();
    for _ in 0..5 {
        let pickle = file.parse(position, MAX_PICKLE_BYTES, Pickle::read)?.map_err(&refuse)?;
        position += pickle.length as u64;
        pickles.push(pickle);
    }
    let [_, version, _, objects, keys] = pickles.as_slice() else {
        return Err(truncated());
    };
    if version.root() != &Value::Int(1001) {
        return Err(refuse(
            "unknown version of PyTorch's file format; save the model again with a newer PyTorch".into(),
        ));
    }
    let Value::List(keys_in_order) = keys.root() else {
        return Err(refuse("the legacy PyTorch file has no list of storages".into()));
    };
    // A storage has the element size of the tensors that use it.
    let sizes: HashMap<&str, u64> = objects
        .tensors()
        .filter_map(|tensor| Some((tensor.storage.key.as_str(), element_bytes(&tensor.storage.dtype)?)))
        .collect();
    let mut storages = Storages::new();
    for id in keys_in_order {
        let Value::Text(key) = keys.value(*id) else {
            return Err(refuse("the legacy PyTorch file has a storage without a key".into()));
        };
        let start = position.checked_add(8).filter(|start| *start <= file.len()).ok_or_else(truncated)?;
        let count = file.read(position..start)?;
        let count = count.first_chunk().map(|count| u64::from_le_bytes(*count)).ok_or_else(truncated)?;
        let Some(element_bytes) = sizes.get(key.as_str()) else {
            let dtype = objects.tensors().find(|tensor| tensor.storage.key == *key);
            return Err(refuse(match dtype {
                Some(tensor) => format!(
                    "the legacy PyTorch file has the unknown storage type {}Storage; \
                     save the model again with a newer PyTorch",
                    tensor.storage.dtype
                ),
                None => format!("the legacy PyTorch file has a storage `{key}` that no tensor uses"),
            }));
        };
        let end = count.checked_mul(*element_bytes).and_then(|length| length.checked_add(start));
        let end = end.filter(|end| *end <= file.len()).ok_or_else(truncated)?;
        storages.insert(key.clone(), start..end);
        position = end;
    }
    Ok((pickles.swap_remove(3), storages))
}

fn all(
    mut source: Source,
    pickle: &Pickle,
    storages: &Storages,
) -> Result<(Source, BTreeMap<String, String>), WeightsError> {
    let (tensors, entries) = named_entries(pickle, storages)
        .map_err(|what| WeightsError::NotWeights { path: source.path.clone(), what })?;
    source.tensors = tensors;
    Ok((source, entries))
}

/// Collects the tensors, texts, numbers and booleans in all dictionaries.
///
/// A name consists of the keys that lead to the value, joined by dots. Values other than tensors are returned
/// as text. Lists and texts longer than a kilobyte are skipped.
fn named_entries(
    pickle: &Pickle,
    storages: &Storages,
) -> Result<(Vec<StoredTensor>, BTreeMap<String, String>), String> {
    let (mut tensors, mut entries) = (Vec::new(), BTreeMap::new());
    let mut dictionaries = vec![(String::new(), pickle.root(), 0)];
    let mut seen = 0;
    while let Some((prefix, dictionary, depth)) = dictionaries.pop() {
        for (key, value) in pickle.entries(dictionary) {
            // A dictionary can contain itself, so the limits count paths instead of distinct values.
            seen += 1;
            if seen > MAX_TENSORS || depth > MAX_NESTING {
                return Err(format!(
                    "the file has more than {MAX_TENSORS} entries, or dictionaries nested more than \
                     {MAX_NESTING} deep"
                ));
            }
            if prefix.len() + key.len() > MAX_TEXT_BYTES {
                return Err(format!("the file has an entry with a name longer than {MAX_TEXT_BYTES} bytes"));
            }
            let name = if depth == 0 { key.to_owned() } else { format!("{prefix}.{key}") };
            let text = match value {
                Value::Tensor(reference) => {
                    let tensor = stored(&name, reference, storages);
                    tensors.push(tensor.map_err(|what| format!("tensor `{name}`: {what}"))?);
                    continue;
                }
                Value::Dict(_) => {
                    dictionaries.push((name, value, depth + 1));
                    continue;
                }
                Value::Text(text) if text.len() <= MAX_TEXT_BYTES => text.clone(),
                Value::Int(number) => number.to_string(),
                Value::Float(number) => number.to_string(),
                Value::Bool(value) => value.to_string(),
                _ => continue,
            };
            entries.insert(name, text);
        }
    }
    if tensors.is_empty() {
        return Err("a PyTorch file without a dictionary of tensors; save a state_dict()".into());
    }
    Ok((tensors, entries))
}

fn source(
    format: Format,
    evidence: &str,
    file: CheckpointFile,
    pickle: &Pickle,
    storages: &Storages,
) -> Result<Source, WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let mut rules = Vec::new();
    let (keys, state_dict) = state_dict(pickle);
    if !keys.is_empty() {
        rules
            .push(format!("the tensors are under the key `{}` of the file's dictionary", keys.join("` / `")));
    }
    let mut tensors: Vec<StoredTensor> = Vec::new();
    let mut seen = HashMap::new();
    for (name, value) in pickle.entries(state_dict) {
        let Value::Tensor(reference) = value else { continue };
        let tensor =
            stored(name, reference, storages).map_err(|what| refuse(format!("tensor `{name}`: {what}")))?;
        if seen.insert(name, ()).is_some() {
            return Err(refuse(format!("duplicate tensor `{name}`")));
        }
        tensors.push(tensor);
    }
    if tensors.is_empty() {
        return Err(refuse(
            "a PyTorch file without a dictionary of tensors; save the model's state_dict()".into(),
        ));
    }
    let (config, is_bias_free) = match pickle.entry(pickle.root(), "model_args") {
        Some(arguments) => nano_gpt(pickle, arguments, &tensors).map_err(refuse)?,
        None => (None, false),
    };
    if config.is_some() {
        rules.push("the configuration comes from nanoGPT's model_args; its GELU is exact".to_owned());
    }
    Ok(Source { tensors, config, is_bias_free, rules, ..Source::new(format, evidence, file) })
}

/// Finds the dictionary with the model's tensors, and returns it with the keys that lead to it.
///
/// This is the outermost dictionary with an embedding, or the file's own if no dictionary has one.
fn state_dict(pickle: &Pickle) -> (Vec<&str>, &Value) {
    let is_model = |dict: &Value| {
        let is_anchor = |name: &str| ANCHORS.iter().any(|anchor| name.ends_with(anchor));
        pickle.entries(dict).any(|(name, value)| is_anchor(name) && matches!(value, Value::Tensor(_)))
    };
    let mut level = vec![(Vec::new(), pickle.root())];
    for _ in 0..=MAX_WRAPPERS {
        if let Some(found) = level.iter().position(|(_, dict)| is_model(dict)) {
            return level.swap_remove(found);
        }
        let inner = level.iter().flat_map(|(keys, dict)| {
            let dicts = pickle.entries(dict).filter(|(_, value)| matches!(value, Value::Dict(_)));
            dicts.map(move |(key, value)| ([keys.as_slice(), &[key]].concat(), value))
        });
        level = inner.take(1000).collect();
    }
    (Vec::new(), pickle.root())
}

fn stored(name: &str, tensor: &TensorReference, storages: &Storages) -> Result<StoredTensor, String> {
    let TensorReference { storage, offset, shape, strides, dtype } = tensor;
    let dtype = dtype.as_deref().unwrap_or(&storage.dtype);
    let range = storages.get(&storage.key);
    let Some(element_bytes) = element_bytes(dtype) else {
        // An unknown type cannot hold weights, so its name and shape are sufficient.
        let bytes = range.map_or(0..0, |range| range.start..range.start);
        let (name, shape, dtype) = (name.to_owned(), shape.clone(), StoredDType::Other("an unknown type"));
        return Ok(StoredTensor { name, shape, dtype, file: 0, bytes, strides: None, checksum: None });
    };
    let range = range.ok_or("its data is missing; the file is damaged; download it again")?;
    let outside = || {
        format!(
            "its data lies outside its storage of {} bytes; the file is damaged; download it again",
            range.end - range.start
        )
    };
    // A size of zero makes the tensor empty, but the product of the other sizes may still overflow.
    let others =
        shape.iter().filter(|size| **size > 0).try_fold(1usize, |count, size| count.checked_mul(*size));
    let others = others.ok_or_else(|| {
        format!("its shape {} overflows; the file is damaged; download it again", ShapeOf(shape))
    })?;
    let elements = if shape.contains(&0) { 0 } else { others };
    // Offset of the last element in the view.
    let reach = shape.iter().zip(strides).try_fold(0usize, |reach, (size, stride)| {
        reach.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
    });
    let length = if elements == 0 { Some(0) } else { reach.and_then(|reach| reach.checked_add(1)) };
    let bytes = |elements: usize| (elements as u64).checked_mul(element_bytes);
    let from = bytes(*offset).and_then(|offset| range.start.checked_add(offset));
    let to = length.and_then(|length| from?.checked_add(bytes(length)?));
    let (from, to) = from.zip(to).filter(|(_, to)| *to <= range.end).ok_or_else(outside)?;
    // Repeated elements (stride 0) could claim any size. Checkpoints do not contain them.
    let is_repeated = length.is_some_and(|length| elements > length);
    if is_repeated {
        return Err("its elements overlap; save a contiguous copy".into());
    }
    Ok(StoredTensor {
        name: name.to_owned(),
        shape: shape.clone(),
        dtype: stored_dtype(dtype),
        file: 0,
        bytes: from..to,
        strides: (!is_row_major(shape, strides)).then(|| strides.clone()),
        checksum: None,
    })
}

/// Whether the elements are in row-major order.
///
/// The product of the sizes does not overflow, because [`stored`] has checked it.
fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size <= 1 || *stride == expected;
        expected *= size;
        fits
    })
}

fn stored_dtype(name: &str) -> StoredDType {
    match name {
        "Float" | "float32" => StoredDType::Weights(NumberType::F32),
        "Half" | "float16" => StoredDType::Weights(NumberType::F16),
        "BFloat16" | "bfloat16" => StoredDType::Weights(NumberType::BF16),
        "Double" | "float64" => StoredDType::Weights(NumberType::F64),
        other => StoredDType::Other(other_type(other).map_or("an unknown type", |(dtype, _)| dtype)),
    }
}

/// Types that cannot hold weights: PyTorch's storage class, dtype, and bytes per element.
///
/// Types without a storage class have the dtype's name twice.
const OTHER_TYPES: [(&str, &str, u64); 22] = [
    ("Bool", "bool", 1),
    ("Byte", "uint8", 1),
    ("Char", "int8", 1),
    ("Short", "int16", 2),
    ("Int", "int32", 4),
    ("Long", "int64", 8),
    ("ComplexFloat", "complex64", 8),
    ("ComplexDouble", "complex128", 16),
    ("QInt8", "qint8", 1),
    ("QUInt8", "quint8", 1),
    ("QInt32", "qint32", 4),
    ("Untyped", "uint8", 1),
    ("complex32", "complex32", 4),
    ("uint16", "uint16", 2),
    ("uint32", "uint32", 4),
    ("uint64", "uint64", 8),
    ("float8_e4m3fn", "float8_e4m3fn", 1),
    ("float8_e4m3fnuz", "float8_e4m3fnuz", 1),
    ("float8_e5m2", "float8_e5m2", 1),
    ("float8_e5m2fnuz", "float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", "float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", "float4_e2m1fn_x2", 1),
];

/// Looks up a type in [`OTHER_TYPES`] by either name, and returns its dtype and bytes per element.
fn other_type(name: &str) -> Option<(&'static str, u64)> {
    let row = OTHER_TYPES.iter().find(|(storage, dtype, _)| [storage, dtype].contains(&&name));
    row.map(|(_, dtype, bytes)| (*dtype, *bytes))
}

/// Returns the bytes per element of a storage or element type, by its PyTorch name.
fn element_bytes(name: &str) -> Option<u64> {
    match stored_dtype(name) {
        StoredDType::Weights(dtype) => dtype.bytes(1),
        StoredDType::Other(_) => other_type(name).map(|(_, bytes)| bytes),
    }
}

/// Builds the configuration from nanoGPT's `model_args`, and reports whether biases are absent.
///
/// The keys are `n_layer`, `n_head`, `n_embd`, `block_size`, `bias` and `vocab_size`.
fn nano_gpt(
    pickle: &Pickle,
    arguments: &Value,
    tensors: &[StoredTensor],
) -> Result<(Option<Gpt2Config>, bool), String> {
    let size = |key: &str| match pickle.entry(arguments, key) {
        Some(Value::Int(size)) if *size > 0 => usize::try_from(*size).map_err(|error| error.to_string()),
        _ => Err(format!("nanoGPT's model_args lack a positive `{key}`")),
    };
    let json = serde_json::json!({
        "vocab_size": size("vocab_size")?,
        "n_positions": size("block_size")?,
        "n_embd": size("n_embd")?,
        "n_layer": size("n_layer")?,
        "n_head": size("n_head")?,
        "bos_token_id": null,
        "eos_token_id": null,
    });
    let config =
        Gpt2Config::from_json(&json.to_string()).map_err(|error| format!("nanoGPT's model_args: {error}"))?;
    let is_bias_free = match pickle.entry(arguments, "bias") {
        Some(bias) => *bias == Value::Bool(false),
        None => !tensors.iter().any(|tensor| tensor.name.ends_with(".ln_1.bias")),
    };
    // An untied head has its own data. A tied head shares the embedding's.
    let bytes = |ending: &str| {
        tensors.iter().find(|tensor| tensor.name.ends_with(ending)).map(|tensor| &tensor.bytes)
    };
    let embedding = bytes("wte.weight");
    let is_tied = embedding.is_none() || bytes("lm_head.weight").is_none_or(|head| Some(head) == embedding);
    Ok((
        Some(Gpt2Config { activation_function: Activation::Gelu, tie_word_embeddings: is_tied, ..config }),
        is_bias_free,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::pickle::{DTYPES, Storage};
    use super::*;

    fn stored_shape(shape: &[usize], strides: &[usize]) -> Result<StoredTensor, String> {
        let storage = Storage { dtype: "Float".into(), key: "0".into(), elements: 6 }.into();
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        let tensor = TensorReference { storage, offset: 0, shape, strides, dtype: None };
        stored("wte.weight", &tensor, &[("0".to_owned(), 0..24)].into())
    }

    #[test]
    fn every_pickle_dtype_is_known() {
        for name in DTYPES {
            assert!(element_bytes(name).is_some(), "{name}");
            assert_ne!(stored_dtype(name), StoredDType::Other("an unknown type"), "{name}");
        }
    }

    #[test]
    fn overflowing_shapes_are_rejected() {
        const LARGE: usize = 1 << 40;
        let expected =
            "its shape (0, 1099511627776, 1099511627776) overflows; the file is damaged; download it again";
        assert_eq!(stored_shape(&[0, LARGE, LARGE], &[1, 1, 1]).unwrap_err(), expected);
        assert!(stored_shape(&[LARGE, LARGE, 0], &[0, 0, 1]).is_err());
        assert_eq!(stored_shape(&[0, 3], &[3, 1]).unwrap().bytes, 0..0);
        let rows = stored_shape(&[2, 3], &[3, 1]).unwrap();
        assert_eq!((rows.bytes, rows.strides), (0..24, None));
        assert_eq!(stored_shape(&[3, 2], &[1, 3]).unwrap().strides, Some(vec![1, 3]));
    }
}
