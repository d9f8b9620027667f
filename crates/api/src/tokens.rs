//! `/tokenize` and `/detokenize`, compatible with llama.cpp, vLLM and lm-evaluation-harness.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::answer::{List, json};
use crate::body::{Body, Fields, Text, TokenIds, fields, wrong_value};
use crate::options::MAX_NAME_BYTES;
use crate::pieces::name;
use crate::prompts::{MAX_TEXT_BYTES, encode, encode_piece, lost_note, unreadable};
use crate::{ApiError, Reply, ServedModel};

/// Maximum number of tokens in one request to `/detokenize`.
const MAX_TOKENS: usize = 1 << 20;
/// Maximum length of the decoded text in bytes; a single token may decode to 1,024 characters.
const MAX_DETOKENIZED_BYTES: usize = 8 << 20;

fields! {
    /// Fields of `/tokenize`.
    TokenizeFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// Text to tokenize. Names of special tokens in it are parsed as special tokens.
        content | prompt: Option<String>,
        /// Whether to add the tokens that the tokenizer puts around a text; GPT-2's tokenizer adds none.
        add_special | add_special_tokens: bool = true,
        /// Whether to parse special tokens; only true is supported.
        parse_special: bool = true,
        /// Whether to return each token as an object with `id` and `piece`.
        with_pieces: bool = false,
        /// Whether to return the text of each token as `token_strs`.
        return_token_strs: bool = false,
    }
    refused ["messages": "pass the text as content or prompt"]
}

fields! {
    /// Fields of `/detokenize`.
    DetokenizeFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// The token ids.
        @required tokens: Option<TokenIds<MAX_TOKENS>>,
    }
}

/// `/tokenize`: encodes a text; as in a prompt, names of special tokens become those tokens.
pub(crate) fn tokenize(body: &[u8], served: &ServedModel) -> Result<Reply, ApiError> {
    let body = Body::parse(body, TokenizeFields::fields())?;
    let mut warnings = served.checked_warnings(&body)?;
    let fields: TokenizeFields = body.read()?;
    served.check_name(fields.model.as_ref())?;
    let text =
        fields.content.ok_or_else(|| wrong_value("content", "the text, as content or prompt", "nothing"))?;
    if !fields.parse_special {
        return Err(body.wrong("parse_special", "true, because names of special tokens are always parsed"));
    }
    let path = body.name("content");
    if text.len() > MAX_TEXT_BYTES {
        let (expected, found) = (format!("a string of at most {MAX_TEXT_BYTES} bytes"), text.len());
        return Err(wrong_value(path, expected, format_args!("{found} bytes")));
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

/// Response of [`tokenize`]; the lists are serialized lazily.
#[derive(Serialize)]
struct Tokens<L: Serialize, S: Serialize> {
    count: usize,
    max_model_len: usize,
    tokens: L,
    token_strs: Option<S>,
}

/// Token id, serialized as a number or as llama.cpp's object with `id` and `piece`.
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

/// `/detokenize`: decodes tokens, including the names of special tokens.
pub(crate) fn detokenize(body: &[u8], served: &ServedModel) -> Result<Reply, ApiError> {
    let body = Body::parse(body, DetokenizeFields::fields())?;
    let warnings = served.checked_warnings(&body)?;
    let fields: DetokenizeFields = body.read()?;
    served.check_name(fields.model.as_ref())?;
    let TokenIds(ids) =
        fields.tokens.ok_or_else(|| wrong_value("tokens", "a list of token ids", "nothing"))?;
    for (index, id) in ids.iter().enumerate() {
        served.check_token(*id, || format!("tokens[{index}]"))?;
    }
    let bytes: usize = ids.iter().map(|id| served.pieces.bytes(*id).len()).sum();
    if bytes > MAX_DETOKENIZED_BYTES {
        let expected = format!("at most {MAX_DETOKENIZED_BYTES} bytes of decoded text");
        return Err(wrong_value("tokens", expected, format_args!("{bytes} bytes")));
    }
    let text = served.pieces.text(&ids).map_err(|error| unreadable(&error, "tokens"))?;
    Ok(Reply::new(json!({ "content": text, "prompt": text }).to_string(), warnings))
}

/// `/tokenizer_info`: tokenizer data that lm-evaluation-harness needs to build its own prompts.
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
