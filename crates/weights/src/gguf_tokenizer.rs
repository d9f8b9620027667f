//! GGUF representation of a tokenizer: llama.cpp's `gpt2`, a byte-level BPE without options.
//!
//! llama.cpp would silently produce different tokens for any other tokenizer, so those are rejected with the
//! offending part named.

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::byte_pairs::byte_of;
use crate::gguf_keys::{CONTROL, NORMAL, UNUSED, USER_DEFINED};

/// Advice for a tokenizer that GGUF cannot represent.
const REMEDY: &str = "write a folder instead";

/// Token lists and options of a tokenizer.
#[derive(Debug)]
pub(crate) struct GgufTokenizer {
    pub(crate) tokens: Vec<String>,
    pub(crate) types: Vec<i32>,
    pub(crate) merges: Vec<String>,
    /// Token prepended to every text.
    pub(crate) before: Option<u32>,
    /// Token appended to every text.
    pub(crate) after: Option<u32>,
}

impl GgufTokenizer {
    /// Converts a byte-level BPE tokenizer and pads its vocabulary to `rows` tokens.
    ///
    /// # Errors
    /// If GGUF cannot express part of it, or a token id is `rows` or larger.
    pub(crate) fn new(tokenizer: &Tokenizer, rows: usize) -> Result<Self, String> {
        let json = tokenizer.to_string(false).map_err(|error| error.to_string())?;
        let json: Value = serde_json::from_str(&json).map_err(|error| error.to_string())?;
        let refuse = |part: String| format!("GGUF cannot express the tokenizer: {part}; {REMEDY}");
        check_model(&json["model"]).map_err(refuse)?;
        check_normalizer(&json["normalizer"]).map_err(refuse)?;
        check_pre_tokenizer(&json["pre_tokenizer"]).map_err(refuse)?;
        check_decoder(&json["decoder"]).map_err(refuse)?;
        let (before, after) = added_around(&json["post_processor"]).map_err(refuse)?;
        let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
        check_added(added).map_err(refuse)?;

        let model = &json["model"];
        let merge = |merge: &Value| match merge.as_array().map(Vec::as_slice) {
            Some([first, second]) => Some(format!("{} {}", first.as_str()?, second.as_str()?)),
            _ => merge.as_str().map(str::to_owned),
        };
        let merges = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
        let merges = merges.iter().map(merge).collect::<Option<Vec<_>>>();
        let merges = merges.ok_or("the tokenizer has an invalid merge")?;
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; rows];
        let mut put = |token: &str, id: Option<u64>, kind: i32| {
            let row = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < rows);
            let row = row.ok_or_else(|| {
                format!(
                    "the token `{token}` is outside the vocabulary of {rows} tokens; remove it from the tokenizer, or {REMEDY}"
                )
            })?;
            (tokens[row], types[row]) = (token.to_owned(), kind);
            Ok::<_, String>(())
        };
        for (token, id) in model["vocab"].as_object().into_iter().flatten() {
            put(token, id.as_u64(), NORMAL)?;
        }
        for token in added {
            let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
            put(token["content"].as_str().unwrap_or_default(), token["id"].as_u64(), kind)?;
        }
        Ok(Self { tokens, types, merges, before, after })
    }
}

/// Returns the type of a component.
fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("unknown")
}

/// Returns the components of a sequence, or a single component; empty for null.
fn parts<'a>(part: &'a Value, list: &str) -> Vec<&'a Value> {
    match part["type"].as_str() {
        _ if part.is_null() => Vec::new(),
        Some("Sequence") => {
            part[list].as_array().into_iter().flatten().flat_map(|inner| parts(inner, list)).collect()
        }
        _ => vec![part],
    }
}

fn check_model(model: &Value) -> Result<(), String> {
    if kind(model) != "BPE" {
        return Err(format!("the model is {}, not a byte-level BPE", kind(model)));
    }
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return Err(format!("the model has a `{affix}`"));
        }
    }
    if model["ignore_merges"] == true {
        return Err("the model has `ignore_merges`".into());
    }
    // If the vocabulary contains all bytes, these options have no effect.
    let vocabulary = model["vocab"].as_object();
    let is_complete = || {
        let single = vocabulary.into_iter().flatten().filter_map(|(token, _)| {
            let mut characters = token.chars();
            characters.next().filter(|_| characters.next().is_none()).and_then(byte_of)
        });
        let mut bytes: Vec<u8> = single.collect();
        bytes.sort_unstable();
        bytes.dedup();
        bytes.len() == 256
    };
    for option in ["unk_token", "byte_fallback"] {
        let is_set = !model[option].is_null() && model[option] != false;
        if is_set && !is_complete() {
            return Err(format!("the model has `{option}`, but its vocabulary lacks some of the 256 bytes"));
        }
    }
    Ok(())
}

fn check_normalizer(normalizer: &Value) -> Result<(), String> {
    match parts(normalizer, "normalizers").first() {
        Some(part) => Err(format!("it has the normalizer {}", kind(part))),
        None => Ok(()),
    }
}

fn check_pre_tokenizer(pre_tokenizer: &Value) -> Result<(), String> {
    match parts(pre_tokenizer, "pretokenizers").as_slice() {
        [part] if kind(part) == "ByteLevel" => {
            if part["add_prefix_space"] == true {
                Err("its pre_tokenizer ByteLevel has `add_prefix_space`".into())
            } else if part["use_regex"] == false {
                Err("its pre_tokenizer ByteLevel has no `use_regex`, which splits text into words like GPT-2"
                    .into())
            } else {
                Ok(())
            }
        }
        [] => Err("it has no pre_tokenizer, so it is not byte-level".into()),
        parts => {
            let kinds: Vec<&str> = parts.iter().map(|part| kind(part)).collect();
            Err(format!("its pre_tokenizer is {}; expected only GPT-2's ByteLevel", kinds.join(" and ")))
        }
    }
}

fn check_decoder(decoder: &Value) -> Result<(), String> {
    match parts(decoder, "decoders").as_slice() {
        [part] if kind(part) == "ByteLevel" => Ok(()),
        [] => Err("it has no decoder; expected ByteLevel".into()),
        parts => {
            let kinds: Vec<&str> = parts.iter().map(|part| kind(part)).collect();
            Err(format!("its decoder is {}; expected only ByteLevel", kinds.join(" and ")))
        }
    }
}

/// Returns the tokens that the post-processor adds before and after the text.
fn added_around(post_processor: &Value) -> Result<(Option<u32>, Option<u32>), String> {
    let mut around = (None, None);
    for part in parts(post_processor, "processors") {
        match kind(part) {
            // `ByteLevel` only changes token offsets.
            "ByteLevel" => {}
            "TemplateProcessing" if around == (None, None) => around = of_template(part)?,
            kind => return Err(format!("it has the post_processor {kind}")),
        }
    }
    Ok(around)
}

fn of_template(template: &Value) -> Result<(Option<u32>, Option<u32>), String> {
    let refuse = |what: &str| Err(format!("its post_processor TemplateProcessing {what}"));
    let id = |piece: &Value| {
        let name = piece["SpecialToken"]["id"].as_str()?;
        match template["special_tokens"][name]["ids"].as_array()?.as_slice() {
            [id] => u32::try_from(id.as_u64()?).ok(),
            _ => None,
        }
    };
    let is_text = |piece: &Value| piece["Sequence"]["id"] == "A";
    let pieces = template["single"].as_array().map(Vec::as_slice).unwrap_or_default();
    let around = match pieces {
        [text] if is_text(text) => (None, None),
        [before, text] if is_text(text) => (id(before), None),
        [text, after] if is_text(text) => (None, id(after)),
        [before, text, after] if is_text(text) => (id(before), id(after)),
        _ => return refuse("adds more than one token before or after a text"),
    };
    // Rejects a template token that does not have exactly one id.
    let found = usize::from(around.0.is_some()) + usize::from(around.1.is_some());
    if found + 1 != pieces.len() {
        return refuse("adds a token that does not have exactly one id");
    }
    Ok(around)
}

/// Rejects added tokens that strip surrounding spaces or match whole words only.
fn check_added(added: &[Value]) -> Result<(), String> {
    for token in added {
        let option = ["lstrip", "rstrip", "single_word"].into_iter().find(|option| token[option] == true);
        if let Some(option) = option {
            let content = token["content"].as_str().unwrap_or_default();
            return Err(format!("the added token `{content}` has `{option}`"));
        }
    }
    Ok(())
}
