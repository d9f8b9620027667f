//! `/tokenize` and `/detokenize`, as llama.cpp's and vLLM's clients and lm-evaluation-harness know them.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::answer::{List, json};
use crate::body::{Body, Fields, Text, TokenIds, fields, wrong_value};
use crate::options::MAX_NAME_BYTES;
use crate::pieces::name;
use crate::prompts::{MAX_TEXT_BYTES, encode, encode_piece, lost_note, unreadable};
use crate::{ApiError, Reply, ServedModel};

/// Most tokens that are turned into text at once.
const MAX_TOKENS: usize = 1 << 20;
/// Longest text of these tokens: one of them may have 1,024 characters.
const MAX_DETOKENIZED_BYTES: usize = 8 << 20;

fields! {
    /// The fields of `/tokenize`.
    TokenizeFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// The text. Names of special tokens in it are read as these tokens.
        content | prompt: Option<String>,
        /// Whether the tokens are added that the tokenizer puts around a text; GPT-2's puts none.
        add_special | add_special_tokens: bool = true,
        /// Only true is served.
        parse_special: bool = true,
        /// Whether each token is an object of its `id` and its `piece`.
        with_pieces: bool = false,
        /// Whether `token_strs` has the text of each token.
        return_token_strs: bool = false,
    }
    refused ["messages": "give the text as content or prompt"]
}

fields! {
    /// The fields of `/detokenize`.
    DetokenizeFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// The ids of the tokens.
        @required tokens: Option<TokenIds<MAX_TOKENS>>,
    }
}

/// `/tokenize`. Names of special tokens in the text are read as these tokens, as in a prompt.
pub(crate) fn tokenize(body: &[u8], served: &ServedModel) -> Result<Reply, ApiError> {
    let body = Body::parse(body, TokenizeFields::fields())?;
    let mut warnings = served.known(&body)?;
    let fields: TokenizeFields = body.read()?;
    served.check_name(fields.model.as_ref())?;
    let text =
        fields.content.ok_or_else(|| wrong_value("content", "the text, here or as prompt", "nothing"))?;
    if !fields.parse_special {
        return Err(body.wrong("parse_special", "true: names of special tokens are always read"));
    }
    let path = body.name("content");
    if text.len() > MAX_TEXT_BYTES {
        let (expected, found) = (format!("a string of at most {MAX_TEXT_BYTES} bytes"), text.len());
        return Err(wrong_value(path, expected, format_args!("one of {found} bytes")));
    }
    warnings.add(lost_note([&*text], path, served));
    let ids = match fields.add_special {
        true => encode(&text, path, served)?,
        false => encode_piece(&text, path, served)?,
    };
    let piece = |id: &u32| name(served.pieces.bytes(*id));
    let tokens =
        List(|| ids.iter().map(|id| Token { id: *id, piece: fields.with_pieces.then(|| piece(id)) }));
    let token_strs = fields.return_token_strs.then_some(List(|| ids.iter().map(piece)));
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
    let body = Body::parse(body, DetokenizeFields::fields())?;
    let warnings = served.known(&body)?;
    let fields: DetokenizeFields = body.read()?;
    served.check_name(fields.model.as_ref())?;
    let TokenIds(ids) =
        fields.tokens.ok_or_else(|| wrong_value("tokens", "a list of token ids", "nothing"))?;
    for (place, id) in ids.iter().enumerate() {
        served.check_token(*id, || format!("tokens[{place}]"))?;
    }
    let bytes: usize = ids.iter().map(|id| served.pieces.bytes(*id).len()).sum();
    if bytes > MAX_DETOKENIZED_BYTES {
        let expected = format!("tokens with a text of at most {MAX_DETOKENIZED_BYTES} bytes");
        return Err(wrong_value("tokens", expected, format_args!("a text of {bytes} bytes")));
    }
    let text = served.pieces.text(&ids).map_err(|error| unreadable(&error, "tokens"))?;
    Ok(Reply::new(json!({ "content": text, "prompt": text }).to_string(), warnings))
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
