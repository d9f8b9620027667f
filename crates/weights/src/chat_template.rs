//! The chat template of a checkpoint: `chat_template.jinja`, or the entry of `tokenizer_config.json`.

use serde_json::Value;

use crate::{Checkpoint, WeightsError};

/// Largest file that is read: templates of other models have some ten kilobytes.
const MAX_BYTES: u64 = 1 << 20;
/// The template that counts if there are several.
const DEFAULT: &str = "default";

impl Checkpoint {
    /// The Jinja template that makes a prompt of a conversation, if there is one beside the weights: as transformers reads it,
    /// from `chat_template.jinja` or else from `tokenizer_config.json`.
    ///
    /// # Errors
    /// When a file is there and cannot be read, or `tokenizer_config.json` is not JSON.
    pub fn chat_template(&self) -> Result<Option<String>, WeightsError> {
        let path = self.folder().join("chat_template.jinja");
        if self.beside.is_file(&path) {
            let bytes = self.beside.read_small(&path, MAX_BYTES)?;
            return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
        }
        let path = self.folder().join("tokenizer_config.json");
        if !self.beside.is_file(&path) {
            return Ok(None);
        }
        let bytes = self.beside.read_small(&path, MAX_BYTES)?;
        let config: Value = serde_json::from_slice(&bytes)
            .map_err(|error| WeightsError::Tokenizer { path, error: error.to_string() })?;
        Ok(entry(&config["chat_template"]).map(str::to_owned))
    }
}

/// A template, or of several under names the default one.
fn entry(template: &Value) -> Option<&str> {
    let named = || template.as_array()?.iter().find(|named| named["name"] == DEFAULT)?["template"].as_str();
    template.as_str().or_else(named)
}
