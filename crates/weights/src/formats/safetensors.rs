//! The safetensors format: a JSON header that places every tensor in the bytes after it.
//!
//! The `safetensors` crate checks the header (size limit, ranges without holes or overlaps, sizes that fit shapes and
//! types).

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use super::reader::Reader;
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// Bytes of the header's length, in front of the header.
const LENGTH_BYTES: u64 = 8;

/// Largest header that is read: that of GPT-2 XL has 60 kB.
const MAX_HEADER_BYTES: u64 = 4 << 20;

/// Hugging Face's format. It has no magic bytes: a header of less than 64 KiB times 4 GiB, in JSON.
pub(super) const READER: Reader = Reader {
    rank: 1,
    recognises: |_, start| Ok(start.get(8) == Some(&b'{') && start.get(6..8) == Some(&[0, 0])),
    read: |_, file| read(file),
    read_all: None,
};

/// Reads the header of a safetensors file: its tensors, in the order of their bytes.
pub(super) fn read(file: CheckpointFile) -> Result<Source, WeightsError> {
    let (start, metadata) = header(&file)?;
    let stored = |name: String| {
        let info = metadata.info(&name)?;
        let (from, to) = info.data_offsets;
        let bytes = start + from as u64..start + to as u64;
        let (shape, dtype) = (info.shape.clone(), stored_dtype(info.dtype));
        Some(StoredTensor { name, shape, dtype, file: 0, bytes, strides: None, checksum: None })
    };
    let tensors = metadata.offset_keys().into_iter().filter_map(stored).collect();
    let evidence = "a JSON header after its length in 8 bytes";
    Ok(Source { tensors, ..Source::new(Format::Safetensors, evidence, file) })
}

/// What the header says beside the tensors.
pub(super) fn entries(file: &CheckpointFile) -> Result<BTreeMap<String, String>, WeightsError> {
    let (_, metadata) = header(file)?;
    Ok(metadata.metadata().clone().into_iter().flatten().collect())
}

/// Where the data begin, and the header.
fn header(file: &CheckpointFile) -> Result<(u64, Metadata), WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let found = file.len();
    check_addressable(found, usize::MAX as u64).map_err(refuse)?;
    let Some(claimed) = file.first(LENGTH_BYTES)?.first_chunk().map(|length| u64::from_le_bytes(*length))
    else {
        return Err(refuse(format!(
            "not a safetensors file: {found} bytes are too few for a header; download it again"
        )));
    };
    let start = claimed.checked_add(LENGTH_BYTES).filter(|start| *start <= found).ok_or_else(|| {
        refuse(format!(
            "not a safetensors file, or a truncated one: its header claims {claimed} bytes, the file has {found}; download it again"
        ))
    })?;
    if claimed > MAX_HEADER_BYTES {
        let what = format!("a header of {claimed} bytes; that of a GPT-2 has less than {MAX_HEADER_BYTES}");
        return Err(refuse(what));
    }
    let json = file.read(LENGTH_BYTES..start)?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|error| {
        refuse(match other_than_text(&json) {
            Some((key, value)) => format!(
                "`__metadata__` may hold texts only, and `{key}` is {value}; the file is not damaged: save it again with `str(…)` around \
                 that value"
            ),
            None => format!("a damaged safetensors file: {error}; download it again"),
        })
    })?;
    let expected = start.saturating_add(metadata.data_len() as u64);
    if expected > found {
        return Err(refuse(format!(
            "truncated: expected {expected} bytes, found {found}; download it again"
        )));
    }
    if expected < found {
        return Err(refuse(format!(
            "expected {expected} bytes, found {found}: there is data after the last tensor; download it again"
        )));
    }
    Ok((start, metadata))
}

/// The first entry of the metadata that is not a text, with its value.
fn other_than_text(header: &[u8]) -> Option<(String, String)> {
    let header: Value = serde_json::from_slice(header).ok()?;
    let metadata = header.get("__metadata__")?;
    match metadata.as_object() {
        Some(entries) => {
            let (key, value) = entries.iter().find(|(_, value)| !value.is_string())?;
            Some((key.clone(), value.to_string()))
        }
        None => Some(("__metadata__".to_owned(), metadata.to_string())),
    }
}

/// The header's reader counts bytes in the machine's own numbers, of which `limit` is the largest: 4 GiB on 32 bits.
fn check_addressable(found: u64, limit: u64) -> Result<(), String> {
    if found > limit {
        return Err(format!(
            "{found} bytes in one safetensors file, of which this program of 32 bits reads at most {limit}; save the model in \
             shards, or as GGUF in q8_0"
        ));
    }
    Ok(())
}

fn stored_dtype(dtype: Dtype) -> StoredDType {
    match dtype {
        Dtype::F32 => StoredDType::F32,
        Dtype::F16 => StoredDType::F16,
        Dtype::BF16 => StoredDType::BF16,
        Dtype::F64 => StoredDType::F64,
        Dtype::BOOL => StoredDType::Other("BOOL"),
        Dtype::U8 => StoredDType::Other("U8"),
        Dtype::I8 => StoredDType::Other("I8"),
        Dtype::I16 => StoredDType::Other("I16"),
        Dtype::U16 => StoredDType::Other("U16"),
        Dtype::I32 => StoredDType::Other("I32"),
        Dtype::U32 => StoredDType::Other("U32"),
        Dtype::I64 => StoredDType::Other("I64"),
        Dtype::U64 => StoredDType::Other("U64"),
        Dtype::C64 => StoredDType::Other("C64"),
        _ => StoredDType::Other("an 8-bit, 6-bit or 4-bit float"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_beyond_the_numbers_of_the_machine_is_refused_with_a_way_out() {
        let limit = u64::from(u32::MAX);
        assert_eq!(check_addressable(limit, limit), Ok(()));
        assert_eq!(
            check_addressable(6_431_878_936, limit).unwrap_err(),
            "6431878936 bytes in one safetensors file, of which this program of 32 bits reads at most 4294967295; save the \
             model in shards, or as GGUF in q8_0"
        );
    }
}
