//! Reader for GGUF, the format of llama.cpp, with the architecture `gpt2`.
//!
//! The header yields a configuration, a tokenizer and a list of tensors. candle dequantizes their blocks.
//! Weights of linear layers are `(out, in)`.
//!
//! Source: class `GPT2Model` in llama.cpp's `convert_hf_to_gguf.py`.

use candle_gpt2::Gpt2Config;
use serde_json::json;
use tokenizers::Tokenizer;

use super::reader::{Reader, TensorsAndEntries};
use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::gguf_header::{Header, HeaderTensor};
use crate::gguf_keys;
use crate::source::{Format, Source};
use crate::stored::StoredTensor;
use crate::tokenizer;

/// Maximum size of the header; GPT-2's is 2.5 MB, including the tokenizer.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Smallest alignment in the format; every alignment is a multiple of it.
const MIN_ALIGNMENT: u64 = 8;

/// Reader for llama.cpp's format.
pub(super) const READER: Reader = Reader {
    rank: 5,
    matches: |_, start| Ok(start.starts_with(b"GGUF")),
    read: |_, file| read(file),
    read_all: Some(read_all),
};

/// Reads the header of a GPT-2 model.
fn read(file: CheckpointFile) -> Result<Source, WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let (header, tensors) = header(&file)?;
    match header.get("general.architecture").map(|value| (value, value.as_text())) {
        Some((_, Some("gpt2"))) => {}
        found => {
            let found = match found {
                Some((_, Some(architecture))) => format!("{architecture:?}"),
                Some((value, None)) => format!("{value:?}"),
                None => "none".to_owned(),
            };
            return Err(refuse(format!("unsupported GGUF architecture {found}; only gpt2 can be loaded")));
        }
    }
    let config = config(&header, &tensors).map_err(&refuse)?;
    let tokenizer = tokenizer(&header);
    let mut rules = vec![match &tokenizer {
        Ok(_) => "the tokenizer comes from the weights file".to_owned(),
        Err(why) => format!("the tokenizer in the weights file is not used: {why}"),
    }];
    let stated = header.get("gpt2.feed_forward_length").and_then(|value| value.as_u64());
    if let Some(stated) = stated.filter(|stated| *stated != config.inner_width() as u64) {
        rules.push(format!(
            "`gpt2.feed_forward_length` is {stated} in the header, but the tensors have {}, which is used",
            config.inner_width()
        ));
    }
    let evidence = "magic bytes GGUF, architecture gpt2";
    Ok(Source {
        tensors,
        has_own_bytes: true,
        config: Some(config),
        tokenizer: tokenizer.ok(),
        rules,
        metadata: gguf_keys::without_lists(header.metadata),
        ..Source::new(Format::Gguf, evidence, file)
    })
}

/// Reads the tensors and the metadata of any GGUF file.
///
/// Metadata values that are texts, numbers or booleans are returned as text; arrays are skipped.
fn read_all(file: CheckpointFile) -> Result<TensorsAndEntries, WeightsError> {
    let (header, tensors) = header(&file)?;
    let entries = header.metadata.into_iter().filter_map(|(key, value)| {
        let text = value.as_text().map(str::to_owned);
        let text = text.or_else(|| value.as_bool().map(|flag| flag.to_string()));
        let text = text.or_else(|| value.as_f32().map(|number| number.to_string()));
        let text = text.or_else(|| value.as_f64().map(|number| number.to_string()));
        Some((key, text.or_else(|| value.as_u64().map(|number| number.to_string()))?))
    });
    let entries = entries.collect();
    let evidence = "magic bytes GGUF";
    Ok((Source { tensors, has_own_bytes: true, ..Source::new(Format::Gguf, evidence, file) }, entries))
}

/// Reads the header, and returns it with its tensors in file order.
fn header(file: &CheckpointFile) -> Result<(Header, Vec<StoredTensor>), WeightsError> {
    let refuse = |what: String| WeightsError::NotWeights { path: file.path().to_owned(), what };
    let damaged = |what: String| refuse(format!("a damaged GGUF file: {what}; download it again"));
    let header = file.parse(0, MAX_HEADER_BYTES, Header::read)?.map_err(damaged)?;
    let stored = |tensor: &HeaderTensor| stored(tensor, header.data_start, file.len());
    let tensors = header.tensors.iter().map(stored).collect::<Result<Vec<_>, _>>();
    let mut tensors = tensors.map_err(damaged)?;
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    if names.array_windows().any(|[first, second]| first == second) {
        return Err(damaged("duplicate tensor names".into()));
    }
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    Ok((header, tensors))
}

/// Computes a tensor's byte range, and checks it against the file's length.
fn stored(tensor: &HeaderTensor, data_start: u64, file_bytes: u64) -> Result<StoredTensor, String> {
    let HeaderTensor { name, shape, dtype, block, offset } = tensor;
    let elements = shape.iter().try_fold(1u64, |count, size| count.checked_mul(*size as u64));
    let bytes = match block {
        Some([in_block, bytes]) => elements
            .filter(|elements| elements.is_multiple_of(*in_block))
            .and_then(|elements| (elements / in_block).checked_mul(*bytes)),
        // Tensors of an unknown type are never read.
        None => elements.map(|_| 0),
    };
    let start = data_start.checked_add(*offset);
    let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
    let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file_bytes)) else {
        return Err(format!(
            "tensor `{name}` of shape {shape:?} lies outside the file of {file_bytes} bytes"
        ));
    };
    // candle reads blocks in place, and unaligned reads are undefined behavior.
    if !start.is_multiple_of(MIN_ALIGNMENT) {
        return Err(format!("tensor `{name}` does not start at a multiple of {MIN_ALIGNMENT} bytes"));
    }
    let (name, shape, dtype) = (name.clone(), shape.clone(), *dtype);
    Ok(StoredTensor { name, shape, dtype, file: 0, bytes: start..end, strides: None, checksum: None })
}

fn config(header: &Header, tensors: &[StoredTensor]) -> Result<Gpt2Config, String> {
    let integer = |key: &str| header.get(key).and_then(|value| value.as_u64());
    let epsilon = header.get("gpt2.attention.layer_norm_epsilon").and_then(|value| value.as_f32());
    let named = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    let (embedding, head) = (named("token_embd.weight"), named("output.weight"));
    let expand = named("blk.0.ffn_up.bias");
    let mut json = json!({
        "vocab_size": embedding.or(head).and_then(|tensor| tensor.shape.first()),
        "n_positions": integer("gpt2.context_length"),
        "n_embd": integer("gpt2.embedding_length"),
        "n_layer": integer("gpt2.block_count"),
        "n_head": integer("gpt2.attention.head_count"),
        // llama.cpp's converter writes 4 n_embd in the header, regardless of n_inner.
        "n_inner": expand.and_then(|tensor| tensor.shape.first()),
        // The header stores f32. The shortest decimal that rounds to that value is the original value.
        "layer_norm_epsilon": epsilon.and_then(|epsilon| epsilon.to_string().parse::<f64>().ok()),
        // A single matrix serves as both embedding and head.
        "tie_word_embeddings": head.is_none() || embedding.is_none(),
        "bos_token_id": integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": integer("tokenizer.ggml.padding_token_id"),
    });
    for key in gguf_keys::CONFIG_KEYS {
        if let Some(value) = header.get(&format!("{}{key}", gguf_keys::CONFIG_PREFIX)) {
            json[key] = value.as_f64().map_or_else(|| value.as_bool().into(), Into::into);
        }
    }
    Gpt2Config::from_json(&json.to_string()).map_err(|error| format!("invalid header: {error}"))
}

/// Builds the tokenizer from the file's metadata: GPT-2's, or one with other tokens and merges.
fn tokenizer(header: &Header) -> Result<Tokenizer, String> {
    let texts = |key: &str| -> Result<&[String], String> {
        let value = header.get(key).ok_or_else(|| format!("`{key}` is missing"))?;
        value.as_texts().ok_or_else(|| format!("`{key}` is not an array of strings"))
    };
    for (key, expected) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "gpt-2")] {
        match header.get(key).and_then(|value| value.as_text()) {
            Some(found) if found != expected => {
                return Err(format!("`{key}` is `{found}`; expected `{expected}`"));
            }
            _ => {}
        }
    }
    let tokens = texts("tokenizer.ggml.tokens")?;
    let types = header.get("tokenizer.ggml.token_type").and_then(|types| types.as_integers());
    let types = types.unwrap_or_default();
    let tokens = tokens.iter().zip(0u32..).enumerate().map(|(index, (token, id))| {
        let kind = types.get(index).and_then(|kind| i32::try_from(*kind).ok());
        (token.clone(), id, kind.unwrap_or(gguf_keys::NORMAL))
    });
    let used = tokens.filter(|(_, _, kind)| *kind != gguf_keys::UNUSED).collect();
    let flag = |key: &str| header.get(key).and_then(|value| value.as_bool()).unwrap_or(false);
    let id =
        |key: &str| header.get(key).and_then(|value| value.as_u64()).and_then(|id| u32::try_from(id).ok());
    let around = |flag_key: &str, id_key: &str| match (flag(flag_key), id(id_key)) {
        (true, None) => Err(format!("`{flag_key}` is true, but `{id_key}` is missing")),
        (is_added, id) => Ok(id.filter(|_| is_added)),
    };
    let before = around("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id")?;
    let after = around("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id")?;
    tokenizer::from_lists(used, texts("tokenizer.ggml.merges")?, (before, after))
}
