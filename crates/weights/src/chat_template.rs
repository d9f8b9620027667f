//! The chat templates of a checkpoint: inside a GGUF file, in `chat_template.jinja`, or in `tokenizer_config.json`.

use serde_json::Value;

use crate::gguf_keys::{self, DEFAULT};
use crate::tokenizer::{TOKENIZER_CONFIG, strip_mark};
use crate::{Checkpoint, WeightsError, mistaken_file};

/// The chat template in a file of its own.
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Largest file that is read: templates of other models have some ten kilobytes.
const MAX_BYTES: u64 = 1 << 20;

impl Checkpoint {
    /// The Jinja template that makes a prompt of a conversation, if there is one: that inside a GGUF file, else as transformers
    /// reads it, from `chat_template.jinja` or else from `tokenizer_config.json`.
    ///
    /// # Errors
    /// When a file is there and cannot be read, or `tokenizer_config.json` is not JSON.
    pub fn chat_template(&self) -> Result<Option<String>, WeightsError> {
        let templates = self.chat_templates()?;
        Ok(templates.into_iter().find(|(name, _)| name == DEFAULT).map(|(_, template)| template))
    }

    /// All chat templates with their names.
    pub(crate) fn chat_templates(&self) -> Result<Vec<(String, String)>, WeightsError> {
        let inside = gguf_keys::chat_templates(&self.source.metadata);
        if !inside.is_empty() {
            let owned = |(name, template): (&str, &str)| (name.to_owned(), template.to_owned());
            if let Some((name, template)) =
                inside.iter().find(|(_, template)| template.len() as u64 > MAX_BYTES)
            {
                let what = format!(
                    "its chat template `{name}` has {} bytes, more than {MAX_BYTES}; remove it from the file",
                    template.len()
                );
                return Err(WeightsError::NotWeights { path: self.source.path.clone(), what });
            }
            return Ok(inside.into_iter().map(owned).collect());
        }
        let path = self.folder().join(CHAT_TEMPLATE);
        if self.beside.is_file(&path) {
            let bytes = self.beside.read_small(&path, MAX_BYTES)?;
            return Ok(vec![(DEFAULT.to_owned(), String::from_utf8_lossy(&bytes).into_owned())]);
        }
        let path = self.folder().join(TOKENIZER_CONFIG);
        if !self.beside.is_file(&path) {
            return Ok(Vec::new());
        }
        let bytes = self.beside.read_small(&path, MAX_BYTES)?;
        let bytes = strip_mark(&bytes);
        let config: Value = serde_json::from_slice(bytes).map_err(|error| {
            let error = mistaken_file::pointer(bytes, "settings").unwrap_or_else(|| error.to_string());
            WeightsError::Tokenizer { path, error }
        })?;
        Ok(templates_in(&config["chat_template"]))
    }
}

/// The templates of an entry: one alone is the default one, several have names.
pub(crate) fn templates_in(entry: &Value) -> Vec<(String, String)> {
    let named =
        |named: &Value| Some((named["name"].as_str()?.to_owned(), named["template"].as_str()?.to_owned()));
    match entry {
        Value::String(template) => vec![(DEFAULT.to_owned(), template.clone())],
        Value::Array(list) => list.iter().filter_map(named).collect(),
        _ => Vec::new(),
    }
}
