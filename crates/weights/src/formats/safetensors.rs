//! Safetensors format: a JSON header with the position of every tensor, then the data.
//!
//! The `safetensors` crate checks the header: its size, ranges without holes or overlaps, and sizes that
//! match shapes and dtypes.

use std::collections::BTreeMap;

use candle_gpt2_arithmetic::NumberType;
use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use super::reader::Reader;
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// Size of the header-length field, which precedes the header.
const LENGTH_BYTES: u64 = 8;

/// Maximum size of the header; GPT-2 XL's is 60 kB.
const MAX_HEADER_BYTES: u64 = 4 << 20;

/// Reader for Hugging Face's format.
///
/// The format has no magic bytes. A file matches if its header length is below 2^48 bytes and the header
/// begins like a JSON object.
pub(super) const READER: Reader = Reader {
    rank: 1,
    matches: |_, start| Ok(start.get(8) == Some(&b'{') && start.get(6..8) == Some(&[0, 0])),
    read: |_, file| read(file),
    read_all: None,
};

/// Reads the header of a safetensors file, with the tensors in file order.
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
    let evidence = "an 8-byte length, then a JSON header";
    Ok(Source { tensors, ..Source::new(Format::Safetensors, evidence, file) })
}

/// Returns the text metadata in the header.
pub(super) fn entries(file: &CheckpointFile) -> Result<BTreeMap<String, String>, WeightsError> {
    let (_, metadata) = header(file)?;
    Ok(metadata.metadata().clone().into_iter().flatten().collect())
}

/// Reads the header, and returns it with the offset of the data.
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
            "not a safetensors file, or a truncated one: its header claims {claimed} bytes, \
             but the file has {found}; download it again"
        ))
    })?;
    if claimed > MAX_HEADER_BYTES {
        let what = format!("the header has {claimed} bytes; expected at most {MAX_HEADER_BYTES}");
        return Err(refuse(what));
    }
    let json = file.read(LENGTH_BYTES..start)?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|error| {
        refuse(if let Some((key, value)) = other_than_text(&json) {
            format!(
                "`__metadata__` values must be strings, but `{key}` is {value}; the file is not damaged: save it again with `str(…)` \
                 around that value"
            )
        } else if let Some((tensor, dtype)) = unknown_dtype(&json) {
            format!("tensor `{tensor}`: unsupported dtype `{dtype}`; save the model in f32, f16 or bf16")
        } else {
            format!("a damaged safetensors file: {error}; download it again")
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
            "expected {expected} bytes, found {found}: extra data after the last tensor; download it again"
        )));
    }
    Ok((start, metadata))
}

/// Returns the first metadata entry whose value is not a string.
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

/// Returns the name and dtype of a tensor whose dtype the header parser does not support.
fn unknown_dtype(header: &[u8]) -> Option<(String, String)> {
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    tensors.into_iter().find_map(|(name, tensor)| {
        let dtype = tensor.get("dtype")?;
        let text = dtype.as_str()?.to_owned();
        serde_json::from_value::<Dtype>(dtype.clone()).is_err().then_some((name, text))
    })
}

/// Rejects files that the header parser cannot address, because it counts bytes in `usize`.
///
/// `limit` is the largest `usize`, 4 GiB on 32-bit systems.
fn check_addressable(found: u64, limit: u64) -> Result<(), String> {
    if found > limit {
        return Err(format!(
            "the safetensors file has {found} bytes, but this 32-bit program reads at most {limit}; save the model in shards, or \
             as GGUF in q8_0"
        ));
    }
    Ok(())
}

fn stored_dtype(dtype: Dtype) -> StoredDType {
    match dtype {
        Dtype::F32 => StoredDType::Weights(NumberType::F32),
        Dtype::F16 => StoredDType::Weights(NumberType::F16),
        Dtype::BF16 => StoredDType::Weights(NumberType::BF16),
        Dtype::F64 => StoredDType::Weights(NumberType::F64),
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
    fn file_beyond_the_address_space_is_rejected_with_advice() {
        let limit = u64::from(u32::MAX);
        assert_eq!(check_addressable(limit, limit), Ok(()));
        assert_eq!(
            check_addressable(6_431_878_936, limit).unwrap_err(),
            "the safetensors file has 6431878936 bytes, but this 32-bit program reads at most 4294967295; save the model in \
             shards, or as GGUF in q8_0"
        );
    }
}
