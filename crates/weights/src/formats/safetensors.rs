//! The safetensors format: a JSON header that places every tensor in the bytes after it.
//!
//! The `safetensors` crate checks the header (size limit, ranges without holes or overlaps, sizes that fit shapes and
//! types).

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, Metadata};
use safetensors::{SafeTensorError, SafeTensors};

use crate::WeightsError;
use crate::mapped_file::MappedFile;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// Bytes of the header's length, in front of the header.
const LENGTH_BYTES: usize = 8;

/// Largest header that is read: that of GPT-2 XL has 60 kB.
const MAX_HEADER_BYTES: u64 = 4 << 20;

/// Reads the header of a safetensors file: its tensors, in the order of their bytes.
pub(crate) fn read(file: MappedFile) -> Result<Source, WeightsError> {
    let claimed = file.first_chunk::<LENGTH_BYTES>().map_or(0, |length| u64::from_le_bytes(*length));
    if claimed > MAX_HEADER_BYTES && claimed <= file.len() as u64 {
        let what = format!("a header of {claimed} bytes; that of a GPT-2 has less than {MAX_HEADER_BYTES}");
        return Err(WeightsError::NotWeights { path: file.path().to_owned(), what });
    }
    let (header_bytes, metadata) = SafeTensors::read_metadata(&file).map_err(|error| {
        WeightsError::NotWeights { path: file.path().to_owned(), what: explain(&error, &file) }
    })?;
    let start = LENGTH_BYTES + header_bytes;
    let stored = |name: String| {
        let info = metadata.info(&name)?;
        let (from, to) = info.data_offsets;
        let (shape, dtype) = (info.shape.clone(), stored_dtype(info.dtype));
        Some(StoredTensor { name, shape, dtype, file: 0, bytes: start + from..start + to, strides: None })
    };
    let tensors = metadata.offset_keys().into_iter().filter_map(stored).collect();
    let evidence = "a JSON header after its length in 8 bytes";
    Ok(Source { tensors, ..Source::new(Format::Safetensors, evidence, file) })
}

/// What the header says beside the tensors; of a file that [`read`] took.
pub(crate) fn entries(file: &[u8]) -> BTreeMap<String, String> {
    let header = SafeTensors::read_metadata(file).ok();
    let entries = header.and_then(|(_, metadata)| metadata.metadata().clone());
    entries.into_iter().flatten().collect()
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

fn explain(error: &SafeTensorError, file: &[u8]) -> String {
    let length_bytes = file.get(..LENGTH_BYTES).and_then(|bytes| <[u8; LENGTH_BYTES]>::try_from(bytes).ok());
    let claimed = length_bytes.map_or(0, u64::from_le_bytes);
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!(
                "not a safetensors file: {} bytes are too few for a header; download it again",
                file.len()
            )
        }
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => format!(
            "not a safetensors file, or a truncated one: its header claims {claimed} bytes, the file has {}; download it again",
            file.len()
        ),
        SafeTensorError::MetadataIncompleteBuffer => {
            let header = usize::try_from(claimed)
                .ok()
                .and_then(|length| file.get(LENGTH_BYTES..LENGTH_BYTES + length));
            let metadata = header.and_then(|header| serde_json::from_slice::<Metadata>(header).ok());
            let data = metadata.map_or(0, |metadata| {
                metadata.tensors().values().map(|info| info.data_offsets.1).max().unwrap_or(0)
            });
            let expected = data as u64 + claimed + LENGTH_BYTES as u64;
            if expected > file.len() as u64 {
                format!("truncated: expected {expected} bytes, found {}; download it again", file.len())
            } else {
                format!(
                    "expected {expected} bytes, found {}: there is data after the last tensor; download it again",
                    file.len()
                )
            }
        }
        other => format!("a damaged safetensors file: {other}; download it again"),
    }
}
