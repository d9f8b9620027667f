//! llm.c's `.bin` format: a header of 256 integers, then all parameters.
//!
//! The parameters are grouped by kind, and all layers of one kind are contiguous. Version 3 holds f32,
//! version 5 bf16. Weights of linear layers are `(out, in)`. The head is tied, and the embedding's rows are
//! padded to a multiple of 128.
//!
//! Source: `dev/eval/export_hf.py` of llm.c.

use candle_gpt2::{Gpt2Config, Parameter, expected_parameters};
use candle_gpt2_arithmetic::NumberType;

use super::reader::Reader;
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};

/// First integer of the header.
const MAGIC: u32 = 20_240_326;
const HEADER_BYTES: u64 = 256 * 4;

/// Reader for llm.c's format.
pub(super) const READER: Reader = Reader {
    rank: 6,
    matches: |_, start| Ok(start.first_chunk::<4>().is_some_and(|magic| u32::from_le_bytes(*magic) == MAGIC)),
    read: |_, file| read(file),
    read_all: None,
};

/// Reads the header and computes the byte range of every parameter.
fn read(file: CheckpointFile) -> Result<Source, WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let header = file.first(HEADER_BYTES)?;
    if header.len() as u64 != HEADER_BYTES {
        return Err(refuse("a truncated llm.c file; copy it again".into()));
    }
    let (integers, _) = header.as_chunks::<4>();
    let integers: Vec<u32> = integers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    drop(header);
    let [_, version, n_positions, vocab_size, n_layer, n_head, n_embd, padded_vocab, ..] = integers[..]
    else {
        return Err(refuse("a truncated llm.c file; copy it again".into()));
    };
    let dtype = match version {
        3 => StoredDType::Weights(NumberType::F32),
        5 => StoredDType::Weights(NumberType::BF16),
        other => {
            return Err(refuse(format!("unsupported llm.c version {other}; expected 3 (f32) or 5 (bf16)")));
        }
    };
    let config = serde_json::json!({
        "vocab_size": vocab_size, "n_positions": n_positions, "n_embd": n_embd, "n_layer": n_layer, "n_head": n_head,
        "bos_token_id": vocab_size.saturating_sub(1), "eos_token_id": vocab_size.saturating_sub(1),
    });
    let config = Gpt2Config::from_json(&config.to_string())
        .map_err(|error| refuse(format!("invalid header: {error}")))?;
    let rows = usize::try_from(padded_vocab).unwrap_or(0);
    if rows < config.vocab_size {
        return Err(refuse(format!(
            "invalid header: {rows} embedding rows for a vocabulary of {vocab_size} tokens"
        )));
    }

    let width = config.n_embd;
    let mut tensors = Vec::new();
    let mut position = HEADER_BYTES;
    let mut add = |name: String, shape: &[usize]| -> Option<()> {
        let elements = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size))?;
        let end = position.checked_add(dtype.byte_count(elements)?)?;
        let (shape, bytes) = (shape.to_vec(), position..end);
        // The embedding's padding rows, which follow the vocabulary, are never read.
        tensors.push(StoredTensor { name, shape, dtype, file: 0, bytes, strides: None, checksum: None });
        position = end;
        (end <= file.len()).then_some(())
    };
    let mut add_all = || -> Option<()> {
        add("wte.weight".into(), &[rows, width])?;
        add("wpe.weight".into(), &[config.n_positions, width])?;
        // All layers of one kind of parameter are contiguous; the kinds follow the model's order.
        for Parameter { name, shape, .. } in expected_parameters(&config) {
            let Some(kind) = name.strip_prefix("h.0.") else { continue };
            for layer in 0..config.n_layer {
                add(format!("h.{layer}.{kind}"), &shape)?;
            }
        }
        add("ln_f.weight".into(), &[width])?;
        add("ln_f.bias".into(), &[width])
    };
    let fits = add_all().is_some();
    if !fits || position != file.len() {
        let found = file.len();
        let what = if fits { format!("expected {position} bytes") } else { "expected more bytes".to_owned() };
        return Err(refuse(format!(
            "a truncated or damaged llm.c file: {what}, found {found}; copy it again"
        )));
    }
    let evidence = format!("llm.c's magic number, version {version}");
    Ok(Source {
        tensors,
        config: Some(config),
        may_be_padded: true,
        ..Source::new(Format::LlmC, evidence, file)
    })
}
