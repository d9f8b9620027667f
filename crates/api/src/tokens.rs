//! `/tokenize` and `/detokenize`, as llama.cpp's and vLLM's clients and lm-evaluation-harness know them.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::answer::{List, json};
use crate::body::{Field, Fields, Unknown, Use, fields};
use crate::pieces::name;
use crate::prompts::{MAX_TEXT_BYTES, encode, encode_piece};
use crate::{ApiError, Reply, ServedModel};

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
pub(crate) fn tokenize(body: &[u8], served: &ServedModel) -> Result<Reply, ApiError> {
    let unknown = Unknown::default();
    let fields = Fields::of_body(body, &[&TOKENIZE, &TOKENIZE_ALIASES, &TOKENIZE_REFUSED], &unknown)?;
    let warnings = served.known(&unknown)?;
    check_model(&fields, served)?;
    let Some(content) = fields.get("content") else {
        let message = "content: expected the text, here or as prompt, found nothing";
        return Err(ApiError::invalid(message).with_param("content"));
    };
    if let Some(given) = fields.get("parse_special").filter(|given| given.json() == "false") {
        return Err(given.wrong("true: names of special tokens are always read"));
    }
    let (text, path) = (content.text()?, content.name());
    if text.len() > MAX_TEXT_BYTES {
        let length = format!("one of {} bytes", text.len());
        return Err(content.wrong_as(format!("a string of at most {MAX_TEXT_BYTES} bytes"), length));
    }
    let ids = match fields.boolean("add_special", true)? {
        true => encode(&text, &path, served)?,
        false => encode_piece(&text, &path, served)?,
    };
    let with_pieces = fields.boolean("with_pieces", false)?;
    let with_strings = fields.boolean("return_token_strs", false)?;
    let piece = |id: &u32| name(served.pieces.bytes(*id));
    let tokens = List(|| ids.iter().map(|id| Token { id: *id, piece: with_pieces.then(|| piece(id)) }));
    let token_strs = with_strings.then_some(List(|| ids.iter().map(piece)));
    let max_model_len = served.config().n_positions;
    let json = json(&Tokens { count: ids.len(), max_model_len, tokens, token_strs });
    Ok(Reply::new(json, warnings))
}

/// The answer of [`tokenize`], whose lists are written as they are made.
#[derive(Serialize)]
struct Tokens<L: Serialize, S: Serialize> {
    count: usize,
    max_model_len: usize,
    tokens: L,
    token_strs: Option<S>,
}

/// A token: its id, or with its piece as llama.cpp has it.
struct Token {
    id: u32,
    piece: Option<String>,
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.piece {
            None => self.id.serialize(serializer),
            Some(piece) => json!({ "id": self.id, "piece": piece }).serialize(serializer),
        }
    }
}

/// `/detokenize`. Special tokens are written with their names.
pub(crate) fn detokenize(body: &[u8], served: &ServedModel) -> Result<Reply, ApiError> {
    let unknown = Unknown::default();
    let fields = Fields::of_body(body, &[&DETOKENIZE], &unknown)?;
    let warnings = served.known(&unknown)?;
    check_model(&fields, served)?;
    let Some(ids) = fields.read("tokens", |given| given.token_ids(MAX_TOKENS))? else {
        let message = "tokens: expected a list of token ids, found nothing";
        return Err(ApiError::invalid(message).with_param("tokens"));
    };
    for (place, id) in ids.iter().enumerate() {
        served.check_token(*id, || format!("tokens[{place}]"))?;
    }
    let text = served.pieces.text(&ids);
    Ok(Reply::new(json!({ "content": text, "prompt": text }).to_string(), warnings))
}

/// The names of the fields that `/tokenize` reads.
///
/// ```
/// assert!(candle_gpt2_api::tokenize_fields().any(|field| field == "content"));
/// ```
pub fn tokenize_fields() -> impl Iterator<Item = &'static str> {
    TOKENIZE.iter().chain(&TOKENIZE_ALIASES).map(|field| field.name)
}

/// The names of the fields that `/detokenize` reads.
///
/// ```
/// assert!(candle_gpt2_api::detokenize_fields().any(|field| field == "tokens"));
/// ```
pub fn detokenize_fields() -> impl Iterator<Item = &'static str> {
    DETOKENIZE.iter().map(|field| field.name)
}

fn check_model(fields: &Fields<'_, '_>, served: &ServedModel) -> Result<(), ApiError> {
    let name = fields.read("model", |given| given.short_text(MAX_NAME_BYTES))?;
    served.check_name(name.as_deref())
}

/// `/tokenizer_info`: what lm-evaluation-harness needs to make prompts of its own.
pub(crate) fn tokenizer_info(served: &ServedModel) -> String {
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
