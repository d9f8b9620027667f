//! `/tokenize` and `/detokenize`, as llama.cpp's and vLLM's clients and lm-evaluation-harness know them.

use serde_json::{Map, Value, json};

use crate::body::{Field, Fields, Use, fields};
use crate::pieces::name;
use crate::prompts::{encode, encode_piece};
use crate::{ApiError, ServedModel};

/// Most tokens that are turned into text at once.
const MAX_TOKENS: usize = 1 << 20;

const TOKENIZE: [Field; 6] = fields(
    ["model", "content", "add_special", "parse_special", "with_pieces", "return_token_strs"],
    Use::Served,
);
const TOKENIZE_ALIASES: [Field; 2] = [
    Field { name: "prompt", use_: Use::Alias("content") },
    Field { name: "add_special_tokens", use_: Use::Alias("add_special") },
];
const TOKENIZE_REFUSED: [Field; 1] = fields(["messages"], Use::Refused("give the text as content or prompt"));
const DETOKENIZE: [Field; 2] = fields(["model", "tokens"], Use::Served);

/// Longest name of a model, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// `/tokenize`. Names of special tokens in the text are read as these tokens, as in a prompt.
///
/// # Errors
/// When the body is wrong, or the model has no tokenizer.
pub fn tokenize(body: &[u8], served: &ServedModel) -> Result<String, ApiError> {
    let fields = Fields::of_body(body, &[&TOKENIZE, &TOKENIZE_ALIASES, &TOKENIZE_REFUSED])?;
    check_model(&fields, served)?;
    let Some(content) = fields.get("content") else {
        let message = "content: expected the text, here or as prompt, found nothing";
        return Err(ApiError::invalid(message).with_param("content"));
    };
    if let Some(given) = fields.get("parse_special").filter(|given| given.json() == "false") {
        return Err(given.wrong("true: names of special tokens are always read"));
    }
    let (text, path) = (content.text()?, content.name());
    let ids = match fields.boolean("add_special", true)? {
        true => encode(&text, &path, served)?,
        false => encode_piece(&text, &path, served)?,
    };
    let piece = |id: &u32| name(served.pieces.bytes(*id));
    let tokens: Value = match fields.boolean("with_pieces", false)? {
        true => ids.iter().map(|id| json!({ "id": id, "piece": piece(id) })).collect(),
        false => json!(ids),
    };
    let strings = fields.boolean("return_token_strs", false)?;
    let strings = strings.then(|| ids.iter().map(piece).collect::<Vec<String>>());
    let max_model_len = served.config().n_positions;
    Ok(json!({ "count": ids.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings })
        .to_string())
}

/// `/detokenize`. Special tokens are written with their names.
///
/// # Errors
/// When the body is wrong, or an id is beyond the vocabulary.
pub fn detokenize(body: &[u8], served: &ServedModel) -> Result<String, ApiError> {
    let fields = Fields::of_body(body, &[&DETOKENIZE])?;
    check_model(&fields, served)?;
    let Some(ids) = fields.read("tokens", |given| given.token_ids(MAX_TOKENS))? else {
        let message = "tokens: expected a list of token ids, found nothing";
        return Err(ApiError::invalid(message).with_param("tokens"));
    };
    for (place, id) in ids.iter().enumerate() {
        served.check_token(*id, || format!("tokens[{place}]"))?;
    }
    let text = served.pieces.text(&ids);
    Ok(json!({ "content": text, "prompt": text }).to_string())
}

/// The names of the fields that [`tokenize`] reads.
pub fn tokenize_fields() -> impl Iterator<Item = &'static str> {
    TOKENIZE.iter().chain(&TOKENIZE_ALIASES).map(|field| field.name)
}

/// The names of the fields that [`detokenize`] reads.
pub fn detokenize_fields() -> impl Iterator<Item = &'static str> {
    DETOKENIZE.iter().map(|field| field.name)
}

fn check_model(fields: &Fields<'_, '_>, served: &ServedModel) -> Result<(), ApiError> {
    let name = fields.read("model", |given| given.short_text(MAX_NAME_BYTES))?;
    served.check_name(name.as_deref())
}

/// `/tokenizer_info`: what lm-evaluation-harness needs to make prompts of its own.
pub fn tokenizer_info(served: &ServedModel) -> String {
    let names: Map<String, Value> = [
        ("eos_token", served.eos_token()),
        ("bos_token", served.bos_token()),
        ("pad_token", None),
        (
            "chat_template",
            served.template.as_ref().ok().and_then(|template| Some(template.as_ref()?.source())),
        ),
        ("tokenizer_class", Some("GPT2Tokenizer".to_owned())),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), json!(value)))
    .collect();
    Value::Object(names).to_string()
}
