//! GGUF metadata keys for token and chat settings, with lookup functions.
//!
//! Source: `gguf-py/gguf/constants.py` of llama.cpp.

use crate::gguf_header::{Metadata, Value};

/// Type of an ordinary token.
pub(crate) const NORMAL: i32 = 1;
/// Type of a special token.
pub(crate) const CONTROL: i32 = 3;
/// Type of a user-added token, which matches literally.
pub(crate) const USER_DEFINED: i32 = 4;
/// Type of a vocabulary row that is not a token.
pub(crate) const UNUSED: i32 = 5;

/// Arrays with one entry for each token or merge.
const LISTS: [&str; 4] =
    ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores"];
/// Key for the chat template.
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// Key for the names of additional chat templates.
pub(crate) const CHAT_TEMPLATES: &str = "tokenizer.chat_templates";
/// Special tokens: GGUF key of the id, and name in `tokenizer_config.json`.
pub(crate) const SPECIAL_TOKENS: [(&str, &str); 7] = [
    ("tokenizer.ggml.bos_token_id", "bos_token"),
    ("tokenizer.ggml.eos_token_id", "eos_token"),
    ("tokenizer.ggml.unknown_token_id", "unk_token"),
    ("tokenizer.ggml.seperator_token_id", "sep_token"),
    ("tokenizer.ggml.padding_token_id", "pad_token"),
    ("tokenizer.ggml.cls_token_id", "cls_token"),
    ("tokenizer.ggml.mask_token_id", "mask_token"),
];
/// Flag to prepend the BOS token to every text: GGUF key, and name in `tokenizer_config.json`.
pub(crate) const ADD_BOS: (&str, &str) = ("tokenizer.ggml.add_bos_token", "add_bos_token");
/// Flag to append the EOS token to every text: GGUF key, and name in `tokenizer_config.json`.
pub(crate) const ADD_EOS: (&str, &str) = ("tokenizer.ggml.add_eos_token", "add_eos_token");
/// Keys determined by the model, the tokenizer and the dtype of the weights.
const MODEL_KEYS: [&str; 7] = [
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "general.name",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
];

/// Keys of `config.json` without a GGUF equivalent.
///
/// The file stores them with the prefix [`CONFIG_PREFIX`], and llama.cpp ignores them.
pub(crate) const CONFIG_KEYS: [&str; 5] =
    ["embd_pdrop", "attn_pdrop", "resid_pdrop", "initializer_range", "reorder_and_upcast_attn"];
/// Prefix of the keys in [`CONFIG_KEYS`].
pub(crate) const CONFIG_PREFIX: &str = "candle_gpt2.";

/// Removes the token and merge arrays, which are part of the tokenizer.
pub(crate) fn without_lists(mut metadata: Metadata) -> Metadata {
    metadata.retain(|(key, _)| !LISTS.contains(&key.as_str()));
    metadata
}

/// Returns the value for a key.
pub(crate) fn get<'a>(metadata: &'a [(String, Value)], key: &str) -> Option<&'a Value> {
    metadata.iter().rfind(|(known, _)| known == key).map(|(_, value)| value)
}

/// Returns the chat templates with their names, the default one first.
pub(crate) fn chat_templates(metadata: &[(String, Value)]) -> Vec<(&str, &str)> {
    let text = |key: &str| get(metadata, key).and_then(Value::as_text);
    let names = get(metadata, CHAT_TEMPLATES).and_then(Value::as_texts).unwrap_or_default();
    let named = names.iter().filter_map(|name| Some((name.as_str(), text(&chat_template_key(name))?)));
    text(CHAT_TEMPLATE).map(|template| (DEFAULT, template)).into_iter().chain(named).collect()
}

/// Name of the default chat template.
pub(crate) const DEFAULT: &str = "default";

/// Returns the metadata key of the chat template with this name.
pub(crate) fn chat_template_key(name: &str) -> String {
    if name == DEFAULT { CHAT_TEMPLATE.to_owned() } else { format!("{CHAT_TEMPLATE}.{name}") }
}

/// Returns the entries that describe neither the model nor known settings.
pub(crate) fn unknown(metadata: &[(String, Value)]) -> impl Iterator<Item = &(String, Value)> {
    metadata.iter().filter(|(key, _)| {
        let is_special = SPECIAL_TOKENS.iter().any(|(known, _)| known == key);
        let is_known = MODEL_KEYS.contains(&key.as_str())
            || is_special
            || [ADD_BOS.0, ADD_EOS.0].contains(&key.as_str())
            || key.starts_with("gpt2.")
            || key.starts_with(CONFIG_PREFIX)
            || key.starts_with(CHAT_TEMPLATE);
        !is_known
    })
}
