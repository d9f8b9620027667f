//! Keys of GGUF that hold settings of tokens and conversations: their names, and the settings in a file's metadata.
//!
//! Source: `gguf-py/gguf/constants.py` of llama.cpp.

use crate::gguf_header::{Metadata, Value};

/// Type of an ordinary token.
pub(crate) const NORMAL: i32 = 1;
/// Type of a special token.
pub(crate) const CONTROL: i32 = 3;
/// Type of a token that users added: literal text.
pub(crate) const USER_DEFINED: i32 = 4;
/// Type of a row of the vocabulary that is not a token.
pub(crate) const UNUSED: i32 = 5;

/// Lists with an entry for each token or merge.
const LISTS: [&str; 4] =
    ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores"];
/// The chat template.
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// Names of further chat templates.
pub(crate) const CHAT_TEMPLATES: &str = "tokenizer.chat_templates";
/// Special tokens: the key of the id, and the name in `tokenizer_config.json`.
pub(crate) const SPECIAL_TOKENS: [(&str, &str); 7] = [
    ("tokenizer.ggml.bos_token_id", "bos_token"),
    ("tokenizer.ggml.eos_token_id", "eos_token"),
    ("tokenizer.ggml.unknown_token_id", "unk_token"),
    ("tokenizer.ggml.seperator_token_id", "sep_token"),
    ("tokenizer.ggml.padding_token_id", "pad_token"),
    ("tokenizer.ggml.cls_token_id", "cls_token"),
    ("tokenizer.ggml.mask_token_id", "mask_token"),
];
/// Whether the first special token begins every text, and the name in `tokenizer_config.json`.
pub(crate) const ADD_BOS: (&str, &str) = ("tokenizer.ggml.add_bos_token", "add_bos_token");
/// Whether the end token ends every text, and the name in `tokenizer_config.json`.
pub(crate) const ADD_EOS: (&str, &str) = ("tokenizer.ggml.add_eos_token", "add_eos_token");
/// Keys that follow from the model, the tokenizer and the type of the weights.
const OF_THE_MODEL: [&str; 7] = [
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "general.name",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
];

/// Keys of `config.json` that GGUF has no key for: the file holds them with [`CONFIG_PREFIX`] in front, which llama.cpp ignores.
pub(crate) const OF_CONFIG: [&str; 5] =
    ["embd_pdrop", "attn_pdrop", "resid_pdrop", "initializer_range", "reorder_and_upcast_attn"];
/// The prefix of [`OF_CONFIG`].
pub(crate) const CONFIG_PREFIX: &str = "candle_gpt2.";

/// Metadata without the lists of tokens and merges, which the tokenizer holds.
pub(crate) fn without_lists(mut metadata: Metadata) -> Metadata {
    metadata.retain(|(key, _)| !LISTS.contains(&key.as_str()));
    metadata
}

/// The value of a key.
pub(crate) fn get<'a>(metadata: &'a [(String, Value)], key: &str) -> Option<&'a Value> {
    metadata.iter().rfind(|(known, _)| known == key).map(|(_, value)| value)
}

/// The chat templates with their names, the default one first.
pub(crate) fn chat_templates(metadata: &[(String, Value)]) -> Vec<(&str, &str)> {
    let text = |key: &str| get(metadata, key).and_then(Value::as_text);
    let names = get(metadata, CHAT_TEMPLATES).and_then(Value::as_texts).unwrap_or_default();
    let named = names.iter().filter_map(|name| Some((name.as_str(), text(&of_name(name))?)));
    text(CHAT_TEMPLATE).map(|template| (DEFAULT, template)).into_iter().chain(named).collect()
}

/// The name of the template that counts if there are several.
pub(crate) const DEFAULT: &str = "default";

/// The key of a chat template with this name.
pub(crate) fn of_name(name: &str) -> String {
    if name == DEFAULT { CHAT_TEMPLATE.to_owned() } else { format!("{CHAT_TEMPLATE}.{name}") }
}

/// Keys that hold neither the model nor settings that this program knows.
pub(crate) fn unknown(metadata: &[(String, Value)]) -> impl Iterator<Item = &(String, Value)> {
    metadata.iter().filter(|(key, _)| {
        let is_special = SPECIAL_TOKENS.iter().any(|(known, _)| known == key);
        let is_known = OF_THE_MODEL.contains(&key.as_str())
            || is_special
            || [ADD_BOS.0, ADD_EOS.0].contains(&key.as_str())
            || key.starts_with("gpt2.")
            || key.starts_with(CONFIG_PREFIX)
            || key.starts_with(CHAT_TEMPLATE);
        !is_known
    })
}
