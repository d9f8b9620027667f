//! Chat templates from a GGUF file, `chat_template.jinja` or `tokenizer_config.json`.

use serde_json::Value;

use crate::gguf_keys::{self, DEFAULT};
use crate::tokenizer::{TOKENIZER_CONFIG, strip_mark};
use crate::{Checkpoint, WeightsError, mistaken_file};

/// Separate file that contains the chat template.
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Maximum size of the file. Other models' templates are tens of kilobytes.
const MAX_BYTES: u64 = 1 << 20;

impl Checkpoint {
    /// Returns the Jinja template that turns a conversation into a prompt, if the checkpoint has one.
    ///
    /// A template in a GGUF file takes precedence. Otherwise the lookup follows transformers:
    /// `chat_template.jinja`, then `tokenizer_config.json`.
    ///
    /// # Errors
    /// If a file exists but cannot be read, or `tokenizer_config.json` is not valid JSON.
    pub fn chat_template(&self) -> Result<Option<String>, WeightsError> {
        let templates = self.chat_templates()?;
        Ok(templates.into_iter().find(|(name, _)| name == DEFAULT).map(|(_, template)| template))
    }

    /// Returns all chat templates with their names.
    pub(crate) fn chat_templates(&self) -> Result<Vec<(String, String)>, WeightsError> {
        let inside = gguf_keys::chat_templates(&self.source.metadata);
        if !inside.is_empty() {
            let owned = |(name, template): (&str, &str)| (name.to_owned(), template.to_owned());
            if let Some((name, template)) =
                inside.iter().find(|(_, template)| template.len() as u64 > MAX_BYTES)
            {
                let what = format!(
                    "the chat template `{name}` has {} bytes, more than the limit of {MAX_BYTES}; remove it from the file",
                    template.len()
                );
                return Err(WeightsError::NotWeights { path: self.source.path.clone(), what });
            }
            return Ok(inside.into_iter().map(owned).collect());
        }
        let path = self.folder().join(CHAT_TEMPLATE);
        if self.siblings.is_file(&path) {
            let bytes = self.siblings.read_small(&path, MAX_BYTES)?;
            return Ok(vec![(DEFAULT.to_owned(), String::from_utf8_lossy(&bytes).into_owned())]);
        }
        let path = self.folder().join(TOKENIZER_CONFIG);
        if !self.siblings.is_file(&path) {
            return Ok(Vec::new());
        }
        let bytes = self.siblings.read_small(&path, MAX_BYTES)?;
        let bytes = strip_mark(&bytes);
        let config: Value = serde_json::from_slice(bytes).map_err(|error| {
            let error = mistaken_file::pointer(bytes, "settings").unwrap_or_else(|| error.to_string());
            WeightsError::Tokenizer { path, error }
        })?;
        Ok(templates_in(&config["chat_template"]))
    }
}

/// Parses a `chat_template` entry: a string is the default template, a list contains named ones.
pub(crate) fn templates_in(entry: &Value) -> Vec<(String, String)> {
    let named =
        |named: &Value| Some((named["name"].as_str()?.to_owned(), named["template"].as_str()?.to_owned()));
    match entry {
        Value::String(template) => vec![(DEFAULT.to_owned(), template.clone())],
        Value::Array(list) => list.iter().filter_map(named).collect(),
        _ => Vec::new(),
    }
}
