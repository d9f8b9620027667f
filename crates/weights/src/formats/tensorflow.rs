//! TensorFlow checkpoints, the format in which OpenAI published GPT-2.
//!
//! `model.ckpt.index` contains the position of each tensor in `model.ckpt.data-0000i-of-0000n`. The sizes are
//! in `hparams.json`.
//!
//! The index is a table of sorted keys in LevelDB's format, which TensorFlow never compresses. The values are
//! protocol buffers.
//!
//! Sources: `tensorflow/core/util/tensor_bundle` and `tensorflow/core/lib/io/table_format.txt` for the
//! format, `src/model.py` of openai/gpt-2 for the names.

use std::path::{Path, PathBuf};

use candle_gpt2_arithmetic::NumberType;
use prost::Message;

use super::reader::Reader;
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::crc32c;
use crate::files::Files;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// Magic number in the last eight bytes of a table.
const TABLE_MAGIC: u64 = 0xdb47_7524_8b80_fb57;
/// Size of the footer: two block handles of up to 20 bytes each, and the magic number.
const FOOTER_BYTES: usize = 48;
/// Size of the trailer after each block: the compression type and a checksum.
const BLOCK_TRAILER_BYTES: usize = 5;
/// Maximum size of an index; OpenAI's are about ten kilobytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Key under which `tf.train.Checkpoint` and Keras store the names of their objects.
const OBJECT_GRAPH: &[u8] = b"_CHECKPOINTABLE_OBJECT_GRAPH";
/// Maximum number of data files in a checkpoint; OpenAI's have one.
const MAX_SHARDS: i32 = 1024;

/// Header of the checkpoint, stored under the empty key.
#[derive(Clone, PartialEq, Message)]
struct BundleHeader {
    #[prost(int32, tag = "1")]
    num_shards: i32,
    #[prost(int32, tag = "2")]
    endianness: i32,
}

/// Index entry of a tensor, stored under its name.
#[derive(Clone, PartialEq, Message)]
struct BundleEntry {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<TensorShape>,
    #[prost(int32, tag = "3")]
    shard_id: i32,
    #[prost(int64, tag = "4")]
    offset: i64,
    #[prost(int64, tag = "5")]
    size: i64,
    #[prost(fixed32, optional, tag = "6")]
    crc32c: Option<u32>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    slices: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
struct Dimension {
    #[prost(int64, tag = "1")]
    size: i64,
}

/// Key-value pair of a table.
type Entry = (Vec<u8>, Vec<u8>);

/// Reader for TensorFlow's checkpoint index, which ends with a magic number.
pub(super) const READER: Reader = Reader {
    rank: 4,
    matches: |file, _| {
        let end = file.read(file.len().saturating_sub(8)..file.len())?;
        Ok(end.first_chunk().is_some_and(|magic| u64::from_le_bytes(*magic) == TABLE_MAGIC))
    },
    read,
    read_all: None,
};

/// Reads an index file, and opens the data files next to it.
fn read(siblings: &Files, index: CheckpointFile) -> Result<Source, WeightsError> {
    let path = index.path().to_owned();
    let refuse = |what: String| WeightsError::NotWeights { path: path.clone(), what };
    let damaged = |what: &str| refuse(format!("a damaged TensorFlow index: {what}; download it again"));
    if index.len() > MAX_INDEX_BYTES {
        return Err(damaged("it is too long"));
    }
    let entries = table(&index.read(0..index.len())?).map_err(&damaged)?;
    let header = entries.iter().find(|(key, _)| key.is_empty()).ok_or_else(|| damaged("it has no header"))?;
    let header = BundleHeader::decode(header.1.as_slice()).map_err(|error| damaged(&error.to_string()))?;
    if header.endianness != 0 {
        return Err(refuse(
            "a TensorFlow checkpoint from a big-endian machine; save it again on a little-endian one".into(),
        ));
    }
    let shards = header.num_shards;
    if !(1..=MAX_SHARDS).contains(&shards) {
        return Err(damaged(&format!("it lists {shards} data files")));
    }
    let stem = path.with_extension("");
    let data_file = |shard: i32| {
        let name = stem.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let name = format!("{name}.data-{shard:05}-of-{shards:05}");
        let path = stem.with_file_name(&name);
        if !siblings.exists(&path) {
            return Err(refuse(format!("the data file {name} is missing; put it next to the index")));
        }
        siblings.open(&path)
    };
    let files = (0..shards).map(data_file).collect::<Result<Vec<_>, _>>()?;
    if entries.iter().any(|(key, _)| key == OBJECT_GRAPH) {
        return Err(refuse(format!(
            "an object-based TensorFlow checkpoint (it contains {}), which is unsupported; load it in Python \
             and save the model as safetensors or with `tf.compat.v1.train.Saver`",
            String::from_utf8_lossy(OBJECT_GRAPH)
        )));
    }
    let mut tensors = Vec::new();
    let mut state = 0;
    for (key, value) in entries.iter().filter(|(key, _)| !key.is_empty()) {
        let name = String::from_utf8_lossy(key).into_owned();
        if is_training_state(&name) {
            state += 1;
            continue;
        }
        let entry = BundleEntry::decode(value.as_slice()).map_err(|error| damaged(&error.to_string()))?;
        let tensor = stored(&name, &entry, &files).map_err(|fault| match fault {
            Fault::Index(what) => damaged(&format!("tensor `{name}`: {what}")),
            Fault::Data { file, what } => WeightsError::NotWeights {
                path: file,
                what: format!("truncated: tensor `{name}` {what}; download it again"),
            },
        })?;
        tensors.push(tensor);
    }
    let evidence = format!("a table's magic number at the end of {}", file_name(&path));
    let mut rules = Vec::new();
    if state > 0 {
        rules.push(format!(
            "{state} training variables (optimizer, steps) are not parameters and are ignored"
        ));
    }
    Ok(Source {
        files,
        tensors,
        rules,
        has_own_bytes: true,
        ..Source::new(Format::TensorFlow, evidence, index)
    })
}

/// Whether a variable is training state: optimizer slots, counters and the saver's own variables.
fn is_training_state(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    let is_slot = ["Adam", "Adam_1", "AdamW", "AdamW_1", "Momentum", "Adafactor", "ExponentialMovingAverage"]
        .contains(&last);
    is_slot
        || last.starts_with("beta1_power")
        || last.starts_with("beta2_power")
        || last == "global_step"
        || name.starts_with('_')
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Problem with a tensor, classified by the kind of file that causes it.
enum Fault {
    /// Invalid entry in the index.
    Index(String),
    /// Data file that ends before the tensor does.
    Data { file: PathBuf, what: String },
}

impl From<String> for Fault {
    fn from(what: String) -> Self {
        Self::Index(what)
    }
}

impl From<&str> for Fault {
    fn from(what: &str) -> Self {
        Self::Index(what.to_owned())
    }
}

fn stored(name: &str, entry: &BundleEntry, files: &[CheckpointFile]) -> Result<StoredTensor, Fault> {
    if !entry.slices.is_empty() {
        return Err("it is stored in slices, which is unsupported".into());
    }
    let dimensions = entry.shape.iter().flat_map(|shape| &shape.dim);
    let shape = dimensions.map(|dimension| usize::try_from(dimension.size)).collect::<Result<Vec<_>, _>>();
    let mut shape = shape.map_err(|_| "it has a negative dimension".to_owned())?;
    // Conv1D weights are stored as convolutions of width 1: (1, in, out).
    if let [1, input, output] = shape[..] {
        shape = vec![input, output];
    }
    let dtype = match entry.dtype {
        1 => StoredDType::Weights(NumberType::F32),
        2 => StoredDType::Weights(NumberType::F64),
        14 => StoredDType::Weights(NumberType::BF16),
        19 => StoredDType::Weights(NumberType::F16),
        3 => StoredDType::Other("int32"),
        9 => StoredDType::Other("int64"),
        _ => StoredDType::Other("an unsupported type"),
    };
    let file = usize::try_from(entry.shard_id).map_err(|_| "it has a negative file number".to_owned())?;
    let start = u64::try_from(entry.offset).map_err(|_| "it has a negative offset".to_owned())?;
    let size = u64::try_from(entry.size).map_err(|_| "it has a negative size".to_owned())?;
    let data = files.get(file).ok_or("it has an invalid file number")?;
    let end = start.checked_add(size).ok_or("its offset overflows")?;
    if end > data.len() {
        let what = format!("ends at byte {end}, but the file has {} bytes", data.len());
        return Err(Fault::Data { file: data.path().to_owned(), what });
    }
    let elements = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
    if dtype.holds_weights() && elements.and_then(|elements| dtype.byte_count(elements)) != Some(size) {
        return Err(format!("its {size} bytes do not match shape {shape:?} in {dtype}").into());
    }
    let checksum = entry.crc32c.map(crc32c::unmasked);
    Ok(StoredTensor { name: name.to_owned(), shape, dtype, file, bytes: start..end, strides: None, checksum })
}

/// Reads the keys and values of a table.
fn table(bytes: &[u8]) -> Result<Vec<Entry>, &'static str> {
    let footer = bytes
        .len()
        .checked_sub(FOOTER_BYTES)
        .and_then(|start| bytes.get(start..))
        .ok_or("it is too short")?;
    let mut handles = Fields(footer);
    let _meta_index = (handles.varint()?, handles.varint()?);
    let index = block(bytes, handles.varint()?, handles.varint()?)?;
    let mut entries = Vec::new();
    // Blocks do not overlap, so their total size is at most the file's.
    let mut total_block_bytes = 0;
    for (_, handle) in block_entries(index)? {
        let mut handle = Fields(&handle);
        let block = block(bytes, handle.varint()?, handle.varint()?)?;
        total_block_bytes += block.len();
        if total_block_bytes > bytes.len() {
            return Err("its blocks overlap");
        }
        entries.extend(block_entries(block)?);
    }
    Ok(entries)
}

/// Returns the contents of a block, without its trailer.
fn block(bytes: &[u8], offset: usize, size: usize) -> Result<&[u8], &'static str> {
    let end = offset.checked_add(size).ok_or("a block lies outside the file")?;
    let contents = bytes.get(offset..end).ok_or("a block lies outside the file")?;
    match bytes.get(end..).and_then(|rest| rest.get(..BLOCK_TRAILER_BYTES)) {
        Some([0, ..]) => Ok(contents),
        Some(_) => Err("a block is compressed, which TensorFlow never does"),
        None => Err("a block lies outside the file"),
    }
}

/// Reads the keys and values of a block.
///
/// Each key repeats a prefix of the previous one. The block ends with a list of restart points, which only a
/// search needs.
fn block_entries(block: &[u8]) -> Result<Vec<Entry>, &'static str> {
    let count = block.last_chunk::<4>().ok_or("a block is too short")?;
    let restarts = usize::try_from(u32::from_le_bytes(*count)).map_err(|_| "a block is too short")?;
    let tail =
        restarts.checked_mul(4).and_then(|bytes| bytes.checked_add(4)).ok_or("a block is too short")?;
    let end = block.len().checked_sub(tail).ok_or("a block is too short")?;
    let mut reader = Fields(&block[..end]);
    let mut entries = Vec::new();
    let mut key: Vec<u8> = Vec::new();
    // Without this limit, shared prefixes could add up to the square of the file size.
    let mut total_key_bytes = 0usize;
    while !reader.0.is_empty() {
        let (shared, unshared, value) = (reader.varint()?, reader.varint()?, reader.varint()?);
        if shared > key.len() {
            return Err("a key shares more bytes than the previous key has");
        }
        key.truncate(shared);
        key.extend_from_slice(reader.take(unshared)?);
        total_key_bytes += key.len();
        if total_key_bytes > 64 * block.len() + 4096 {
            return Err("its keys are too long");
        }
        entries.push((key.clone(), reader.take(value)?.to_vec()));
    }
    Ok(entries)
}

/// Cursor that reads numbers and bytes from the front of a slice.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or("an entry ends early")?;
        self.0 = rest;
        Ok(taken)
    }

    /// Reads an integer that is stored in groups of seven bits, lowest group first.
    fn varint(&mut self) -> Result<usize, &'static str> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return usize::try_from(value).map_err(|_| "an integer is too large");
            }
        }
        Err("an integer is too large")
    }
}
