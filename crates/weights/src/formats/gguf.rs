//! GGUF files with architecture `gpt2`: what llama.cpp reads.
//!
//! candle reads the header and dequantizes the blocks; here the header becomes a configuration and a list of tensors.
//! Source: `convert_hf_to_gguf.py` of llama.cpp, class `GPT2Model`. Weights of linear layers are `(out, in)`.

use std::io::Cursor;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_gpt2::Gpt2Config;
use serde_json::json;
use tokenizers::Tokenizer;

use super::reader::{Reader, TensorsAndEntries};
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};
use crate::tokenizer;

/// Bytes in which the header must end: that of a GPT-2 has 2.5 MB, tokenizer included.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// The format demands an alignment that is a multiple of this.
const LEAST_ALIGNMENT: u64 = 8;
/// The key whose value candle divides by.
const ALIGNMENT_KEY: &[u8] = b"general.alignment";

/// llama.cpp's format.
pub(super) const READER: Reader = Reader {
    rank: 5,
    recognises: |_, start| Ok(start.starts_with(b"GGUF")),
    read: |_, file| read(file),
    read_all: Some(read_all),
};

/// Reads the header of a model.
fn read(file: CheckpointFile) -> Result<Source, WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let (content, tensors) = header(&file)?;
    match content.metadata.get("general.architecture") {
        Some(Value::String(architecture)) if architecture == "gpt2" => {}
        found => {
            let found = match found {
                Some(Value::String(architecture)) => format!("{architecture:?}"),
                Some(other) => format!("{other:?}"),
                None => "none".to_owned(),
            };
            return Err(refuse(format!("a GGUF file of architecture {found}; only gpt2 can be loaded")));
        }
    }
    let config = config(&content, &tensors).map_err(&refuse)?;
    let tokenizer = tokenizer(&content);
    let rules = vec![match &tokenizer {
        Ok(_) => "the tokenizer is the one inside the file".to_owned(),
        Err(why) => format!("the tokenizer inside the file is not used: {why}"),
    }];
    let evidence = "the letters GGUF at the start, architecture gpt2";
    Ok(Source {
        tensors,
        has_own_bytes: true,
        config: Some(config),
        tokenizer: tokenizer.ok(),
        rules,
        ..Source::new(Format::Gguf, evidence, file)
    })
}

/// Reads the header of any GGUF file: its tensors, and what of its metadata is a text, a number or a boolean.
fn read_all(file: CheckpointFile) -> Result<TensorsAndEntries, WeightsError> {
    let (content, tensors) = header(&file)?;
    let entry = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(value) => Some(value.to_string()),
        Value::F32(_) => value.to_f32().ok().map(|number| number.to_string()),
        Value::F64(_) => value.to_f64().ok().map(|number| number.to_string()),
        value => integer(value).map(|number| number.to_string()),
    };
    let entries = content.metadata.iter().filter_map(|(key, value)| Some((key.clone(), entry(value)?)));
    let entries = entries.collect();
    let evidence = "the letters GGUF at the start";
    Ok((Source { tensors, has_own_bytes: true, ..Source::new(Format::Gguf, evidence, file) }, entries))
}

/// A whole number of any type, none of which is negative.
fn integer(value: &Value) -> Option<u64> {
    let unsigned = value.to_u64().ok().or_else(|| value.to_u32().ok().map(u64::from));
    unsigned.or_else(|| u64::try_from(value.to_i32().ok()?).ok())
}

/// The header and the tensors that it lists, in the order of their bytes.
fn header(file: &CheckpointFile) -> Result<(Content, Vec<StoredTensor>), WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let damaged = |what: String| refuse(format!("a damaged GGUF file: {what}; download it again"));
    let content = file.parse(0, MAX_HEADER_BYTES, |header| {
        if has_no_alignment(header) {
            return Err("`general.alignment` is 0".to_owned());
        }
        Content::read(&mut Cursor::new(header)).map_err(|error| first_line(&error))
    })?;
    let content = content.map_err(damaged)?;
    // candle keeps the last of several tensors with one name.
    let start = file.first(16)?;
    let counted =
        start.get(8..).and_then(|bytes| bytes.first_chunk()).map(|count| u64::from_le_bytes(*count));
    if start.get(4) != Some(&1) && counted != Some(content.tensor_infos.len() as u64) {
        return Err(damaged("several tensors have one name".into()));
    }
    drop(start);
    let mut tensors = Vec::new();
    for (name, info) in &content.tensor_infos {
        let shape = info.shape.dims().to_vec();
        let dtype = stored_dtype(info.ggml_dtype);
        let elements = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
        let start = content.tensor_data_offset.checked_add(info.offset);
        let bytes = elements.and_then(|elements| dtype.byte_count(elements));
        let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file.len())) else {
            return Err(damaged(format!(
                "tensor `{name}` of shape {shape:?} lies outside the file of {} bytes",
                file.len()
            )));
        };
        // candle reads blocks where they lie, which is only defined where they are aligned.
        if !start.is_multiple_of(LEAST_ALIGNMENT) {
            return Err(damaged(format!(
                "tensor `{name}` does not start at a multiple of {LEAST_ALIGNMENT} bytes"
            )));
        }
        tensors.push(StoredTensor {
            name: name.clone(),
            shape,
            dtype,
            file: 0,
            bytes: start..end,
            strides: None,
        });
    }
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    Ok((content, tensors))
}

/// Whether the header sets the alignment to zero, which candle would divide by.
fn has_no_alignment(bytes: &[u8]) -> bool {
    memchr::memmem::find_iter(bytes, ALIGNMENT_KEY).any(|place| {
        let Some((value_type, value)) = bytes[place + ALIGNMENT_KEY.len()..].split_first_chunk::<4>() else {
            return false;
        };
        let size = match u32::from_le_bytes(*value_type) {
            0 | 1 => 1,
            2 | 3 => 2,
            4 | 5 => 4,
            _ => return false,
        };
        value.get(..size).is_some_and(|value| value.iter().all(|byte| *byte == 0))
    })
}

fn config(content: &Content, tensors: &[StoredTensor]) -> Result<Gpt2Config, String> {
    let integer = |key: &str| content.metadata.get(key).and_then(integer);
    let epsilon =
        content.metadata.get("gpt2.attention.layer_norm_epsilon").and_then(|value| value.to_f32().ok());
    let embedding = tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    let expand = tensors.iter().find(|tensor| tensor.name == "blk.0.ffn_up.bias");
    let json = json!({
        "vocab_size": embedding.and_then(|tensor| tensor.shape.first()),
        "n_positions": integer("gpt2.context_length"),
        "n_embd": integer("gpt2.embedding_length"),
        "n_layer": integer("gpt2.block_count"),
        "n_head": integer("gpt2.attention.head_count"),
        // llama.cpp's converter writes 4 n_embd in the header, whatever n_inner is.
        "n_inner": expand.and_then(|tensor| tensor.shape.first()),
        // Written as f32: the shortest decimal that gives it back is the one meant.
        "layer_norm_epsilon": epsilon.and_then(|epsilon| epsilon.to_string().parse::<f64>().ok()),
        "tie_word_embeddings": !tensors.iter().any(|tensor| tensor.name == "output.weight"),
        "bos_token_id": integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer("tokenizer.ggml.eos_token_id"),
    });
    Gpt2Config::from_json(&json.to_string()).map_err(|error| format!("its header: {error}"))
}

/// The tokenizer inside the file: GPT-2's, or one with other merges.
fn tokenizer(content: &Content) -> Result<Tokenizer, String> {
    /// Types of tokens that stand for themselves in a text: control, user-defined.
    const SPECIAL_TYPES: [i32; 2] = [3, 4];
    /// Type of rows of the vocabulary that are no tokens.
    const UNUSED_TYPE: i32 = 5;
    let value = |key: &str| content.metadata.get(key).ok_or_else(|| format!("`{key}` is missing"));
    let texts = |key: &str| -> Result<Vec<String>, String> {
        let values = value(key)?.to_vec().map_err(|error| first_line(&error))?;
        values.iter().map(|value| value.to_string().cloned().map_err(|error| first_line(&error))).collect()
    };
    for (key, expected) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "gpt-2")] {
        match content.metadata.get(key) {
            Some(Value::String(found)) if found != expected => {
                return Err(format!("`{key}` is `{found}`, expected `{expected}`"));
            }
            _ => {}
        }
    }
    let tokens = texts("tokenizer.ggml.tokens")?;
    let types = value("tokenizer.ggml.token_type")
        .and_then(|types| types.to_vec().map_err(|error| first_line(&error)));
    let types = types.map_or(&[][..], Vec::as_slice);
    let kind = |index: usize| types.get(index).and_then(|kind| kind.to_i32().ok());
    let with_ids = tokens.into_iter().enumerate().zip(0u32..);
    let used: Vec<(String, u32, bool)> = with_ids
        .filter(|((index, _), _)| kind(*index) != Some(UNUSED_TYPE))
        .map(|((index, token), id)| {
            (token, id, kind(index).is_some_and(|kind| SPECIAL_TYPES.contains(&kind)))
        })
        .collect();
    let special: Vec<String> = used.iter().filter(|token| token.2).map(|token| token.0.clone()).collect();
    let merges = texts("tokenizer.ggml.merges")?;
    tokenizer::from_lists(used.into_iter().map(|(token, id, _)| (token, id)), &merges, special)
}

fn stored_dtype(dtype: GgmlDType) -> StoredDType {
    match dtype {
        GgmlDType::F32 => StoredDType::F32,
        GgmlDType::F16 => StoredDType::F16,
        GgmlDType::BF16 => StoredDType::BF16,
        quantized => StoredDType::Quantized(quantized),
    }
}

/// candle appends a backtrace to its messages if one is asked for.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
