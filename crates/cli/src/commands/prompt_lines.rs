//! The prompts of a file, line by line. The file is held in memory once; tokens are made of a line when it is asked for.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use gpt2_engine::Vocabulary;
use gpt2_generation::GenerationConfig;
use serde_json::{Map, Value};

use crate::{exit, input};

/// The lines of a file that hold prompts: one a line, or a JSON object a line where its name ends in `.jsonl`.
pub(super) struct PromptLines {
    bytes: Vec<u8>,
    /// The number of each line, from 1, and where it stands.
    lines: Vec<(usize, Range<usize>)>,
    is_json: bool,
    vocabulary: Arc<Vocabulary>,
    config: GenerationConfig,
}

/// A line of the file.
pub(super) struct Line {
    /// From 1.
    pub(super) number: usize,
    /// The text to continue; absent where it is ids.
    pub(super) prompt: Option<String>,
    /// Its tokens, or why it cannot be continued.
    pub(super) ids: Result<Vec<u32>, String>,
}

impl PromptLines {
    pub(super) fn read(path: &Path, vocabulary: &Arc<Vocabulary>, config: &GenerationConfig) -> Result<Self> {
        let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
        let bytes = input::read_file(path)?;
        // The mark that some editors put in front of UTF-8.
        let start = if bytes.starts_with("\u{FEFF}".as_bytes()) { "\u{FEFF}".len() } else { 0 };
        let content = bytes[start..].strip_suffix(b"\n").unwrap_or(&bytes[start..]);
        let is_empty = content.is_empty();
        let mut lines = Vec::new();
        let mut end = start;
        for (number, line) in (1..).zip(content.split(|byte| *byte == b'\n')) {
            // An empty line is an empty prompt, and in JSONL nothing.
            if !(is_empty || is_json && line.trim_ascii().is_empty()) {
                lines.push((number, end..end + line.len()));
            }
            end += line.len() + 1;
        }
        Ok(Self { lines, is_json, vocabulary: Arc::clone(vocabulary), config: config.clone(), bytes })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    /// The line of this index, from 0.
    pub(super) fn line(&self, index: usize) -> Line {
        let (number, range) = &self.lines[index];
        let bytes = &self.bytes[range.clone()];
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let (prompt, ids) = match std::str::from_utf8(bytes) {
            Ok(text) => self.tokens(text),
            Err(error) => {
                let valid = error.valid_up_to();
                (None, Err(anyhow!("not valid UTF-8 at byte {valid} of the line; convert the text to UTF-8")))
            }
        };
        let ids = ids.and_then(|ids| Ok(self.vocabulary.prompt(ids, &self.config)?));
        Line { number: *number, prompt, ids: ids.map_err(|error| exit::message(&error)) }
    }

    /// The prompt of a line where it is a text, and its tokens.
    fn tokens(&self, text: &str) -> (Option<String>, Result<Vec<u32>>) {
        let prompt = match self.is_json.then(|| json_prompt(text)) {
            None => text.to_owned(),
            Some(Ok(JsonPrompt::Text(prompt))) => prompt,
            Some(Ok(JsonPrompt::Ids(ids))) => return (None, Ok(ids)),
            Some(Err(error)) => return (None, Err(error)),
        };
        let ids = self.ids_of(&prompt);
        (Some(prompt), ids)
    }

    fn ids_of(&self, prompt: &str) -> Result<Vec<u32>> {
        if self.vocabulary.tokenizer().is_none() {
            bail!("there is no tokenizer; give ids, or a tokenizer with --tokenizer");
        }
        Ok(self.vocabulary.encode(prompt)?)
    }
}

/// What a line of a JSONL file asks to continue.
enum JsonPrompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Reads a line of a JSONL file; other keys are not looked at.
fn json_prompt(text: &str) -> Result<JsonPrompt> {
    let mut keys: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| anyhow!("not {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}"))?;
    match (keys.remove("prompt"), keys.remove("ids")) {
        (Some(Value::String(prompt)), None) => Ok(JsonPrompt::Text(prompt)),
        (None, Some(ids)) => {
            let ids = serde_json::from_value(ids);
            Ok(JsonPrompt::Ids(ids.map_err(|error| anyhow!("`ids`: expected a list of token ids: {error}"))?))
        }
        (Some(_), None) => bail!("`prompt`: expected a text"),
        _ => bail!("expected one of the keys `prompt` and `ids`"),
    }
}
