//! The prompts of a file, line by line. The file is held in memory once; tokens are made of a line when it is asked for.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{exit, input};

/// The lines of a file that hold prompts: one a line, or a JSON object a line where its name ends in `.jsonl`.
pub(super) struct PromptLines<'a, T> {
    bytes: Vec<u8>,
    /// The number of each line, from 1, and where it stands.
    lines: Vec<(usize, Range<usize>)>,
    is_json: bool,
    /// Makes tokens of what a line gives.
    tokens_of: TokensOf<'a, T>,
}

type TokensOf<'a, T> = Box<dyn Fn(&mut Given) -> Result<T> + 'a>;

/// A line of the file.
pub(super) struct Line<T> {
    /// From 1.
    pub(super) number: usize,
    /// What it gives; nothing where it cannot be read.
    pub(super) given: Given,
    /// Its tokens, or why there are none.
    pub(super) tokens: Result<T, String>,
}

/// What a line gives.
#[derive(Debug, Default, Serialize)]
pub(super) struct Given {
    /// A text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<String>,
    /// Texts that may follow it, where they were asked for; an answer has them.
    #[serde(skip)]
    pub(super) choices: Option<Vec<String>>,
    /// All other keys.
    #[serde(skip)]
    other: Map<String, Value>,
}

impl Given {
    /// The text, where the line gives no ids.
    pub(super) fn text(&self) -> &str {
        self.prompt.as_deref().unwrap_or_default()
    }

    /// The token ids that the line gives in place of a text.
    pub(super) fn ids<I: DeserializeOwned>(&self, expected: &str) -> Result<Option<I>> {
        self.key("ids", expected)
    }

    /// The texts that may follow the prompt.
    pub(super) fn ask_for_choices(&mut self) -> Result<()> {
        self.choices = self.key("choices", "a list of texts")?;
        Ok(())
    }

    fn key<V: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<V>> {
        let value = self.other.get(key).map(V::deserialize).transpose();
        value.map_err(|error| anyhow!("`{key}`: expected {expected}: {error}"))
    }
}

impl<'a, T> PromptLines<'a, T> {
    /// Reads the file; `tokens_of` makes tokens of what a line gives.
    pub(super) fn read(path: &Path, tokens_of: impl Fn(&mut Given) -> Result<T> + 'a) -> Result<Self> {
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
        Ok(Self { lines, is_json, tokens_of: Box::new(tokens_of), bytes })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    /// The line of this index, from 0.
    pub(super) fn line(&self, index: usize) -> Line<T> {
        let (number, range) = &self.lines[index];
        let bytes = &self.bytes[range.clone()];
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let given = match std::str::from_utf8(bytes) {
            Ok(text) if self.is_json => given_by_json(text),
            Ok(text) => Ok(Given { prompt: Some(text.to_owned()), ..Given::default() }),
            Err(error) => {
                let valid = error.valid_up_to();
                Err(anyhow!("not valid UTF-8 at byte {valid} of the line; convert the text to UTF-8"))
            }
        };
        let (given, tokens) = match given {
            Ok(mut given) => {
                let tokens = (self.tokens_of)(&mut given);
                (given, tokens)
            }
            Err(error) => (Given::default(), Err(error)),
        };
        Line { number: *number, given, tokens: tokens.map_err(|error| exit::message(&error)) }
    }
}

/// Reads a line of a JSONL file.
fn given_by_json(text: &str) -> Result<Given> {
    let mut other: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| anyhow!("not {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}"))?;
    let has_ids = other.contains_key("ids");
    let prompt = match other.remove("prompt") {
        // As rows of labelled texts have it.
        None if !has_ids => other.remove("text"),
        prompt => prompt,
    };
    match prompt {
        Some(Value::String(prompt)) if !has_ids => Ok(Given { prompt: Some(prompt), choices: None, other }),
        None if has_ids => Ok(Given { prompt: None, choices: None, other }),
        Some(_) if !has_ids => bail!("`prompt`: expected a text"),
        _ => bail!("expected one of the keys `prompt` and `ids`"),
    }
}
