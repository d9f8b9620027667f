//! Rows of an in-memory input file, tokenized line by line on request.

use std::fmt::{self, Formatter};
use std::ops::Range;
use std::path::Path;

use candle_gpt2::{HeadKind, excerpt};
use candle_gpt2_generation::GenerationConfig;
use serde::de::{DeserializeOwned, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{EngineError, Question, Vocabulary};

/// An in-memory file with one prompt per line, or with one JSON object per line (`.jsonl`).
///
/// ```
/// use candle_gpt2_engine::RowFile;
///
/// let file = RowFile::new("prompts.jsonl".as_ref(), b"{\"ids\": [5, 6]}\n\n{\"prompt\": 5}\n".to_vec());
/// assert_eq!(file.len(), 2, "empty lines of JSONL are skipped");
/// let (line, row) = file.row(1);
/// assert_eq!((line, row.unwrap_err().to_string()), (3, "`prompt`: expected a string".into()));
/// ```
#[derive(Debug, Clone)]
pub struct RowFile {
    bytes: Vec<u8>,
    /// Line number, starting at 1, and byte range of each line.
    lines: Vec<(usize, Range<usize>)>,
    is_json: bool,
}

impl RowFile {
    /// Splits the contents of the file `path` into lines.
    pub fn new(path: &Path, bytes: Vec<u8>) -> Self {
        let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
        // Skips the byte order mark that some editors write at the start of UTF-8 files.
        let start = if bytes.starts_with("\u{FEFF}".as_bytes()) { "\u{FEFF}".len() } else { 0 };
        let content = bytes[start..].strip_suffix(b"\n").unwrap_or(&bytes[start..]);
        let is_empty = content.is_empty();
        let mut lines = Vec::new();
        let mut end = start;
        for (number, line) in (1..).zip(content.split(|byte| *byte == b'\n')) {
            // An empty line is an empty prompt, but is skipped in JSONL.
            if !(is_empty || is_json && line.trim_ascii().is_empty()) {
                lines.push((number, end..end + line.len()));
            }
            end += line.len() + 1;
        }
        Self { bytes, lines, is_json }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Contents of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Parses a row; returns its line number, counted from 1, and the row or an error.
    ///
    /// # Panics
    /// If `index` is not below [`RowFile::len`].
    pub fn row(&self, index: usize) -> (usize, Result<Row, EngineError>) {
        let (number, range) = &self.lines[index];
        let bytes = &self.bytes[range.clone()];
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let row = match std::str::from_utf8(bytes) {
            Ok(text) if self.is_json => Row::of_json(text),
            Ok(text) => Ok(Row { prompt: Some(text.to_owned()), ..Row::default() }),
            Err(error) => {
                let valid = error.valid_up_to();
                Err(wrong(format!("not valid UTF-8 at byte {valid} of the line; convert the text to UTF-8")))
            }
        };
        (*number, row)
    }

    /// Whether the line of a row contains only white space.
    ///
    /// # Panics
    /// If `index` is not below [`RowFile::len`].
    ///
    /// ```
    /// use candle_gpt2_engine::RowFile;
    ///
    /// let file = RowFile::new("rows.txt".as_ref(), b"The dog\n \n".to_vec());
    /// assert_eq!([file.is_blank(0), file.is_blank(1)], [false, true]);
    /// ```
    pub fn is_blank(&self, index: usize) -> bool {
        self.bytes[self.lines[index].1.clone()].trim_ascii().is_empty()
    }

    /// Tokenizes a row and splits it into sequences that fit the context.
    ///
    /// Each sequence begins with `bos`, if there is one.
    ///
    /// # Panics
    /// If `index` is not below [`RowFile::len`].
    ///
    /// ```
    /// use candle_gpt2_engine::{ModelOptions, RowFile, Silent};
    ///
    /// let opened = ModelOptions::default().open(&Silent)?;
    /// let file = RowFile::new("rows.jsonl".as_ref(), b"{\"ids\": [5, 6]}\n{\"ids\": [5, 4096]}".to_vec());
    /// assert_eq!(file.sequences(0, opened.vocabulary(), Some(0)).sequences?, [[0, 5, 6]]);
    /// let error = file.sequences(1, opened.vocabulary(), None).sequences.err().ok_or("expected an error")?;
    /// assert_eq!(error.to_string(), "token 4096 is outside the vocabulary of 4096 tokens");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sequences(&self, index: usize, vocabulary: &Vocabulary, bos: Option<u32>) -> RowSequences {
        let (line, row) = self.row(index);
        let config = vocabulary.config();
        let own = config.n_positions.saturating_sub(usize::from(bos.is_some())).max(1);
        let read = || {
            let ids = row?.tokens(vocabulary)?;
            match ids.iter().find(|id| !config.has_token(**id)) {
                None => Ok(ids.chunks(own).map(|piece| bos.iter().chain(piece).copied().collect()).collect()),
                Some(id) => Err(wrong(format!(
                    "token {id} is outside the vocabulary of {} tokens",
                    config.vocab_size
                ))),
            }
        };
        RowSequences { line, sequences: read() }
    }
}

/// A row as token sequences that fit the context.
///
/// Returned by [`RowFile::sequences`].
#[derive(Debug)]
pub struct RowSequences {
    /// Line number, starting at 1.
    pub line: usize,
    /// Token sequences, or the reason why the line is invalid.
    ///
    /// An empty prompt has no sequence, and a prompt longer than the context has several.
    pub sequences: Result<Vec<Vec<u32>>, EngineError>,
}

/// Rows of a file and the function that tokenizes them.
pub(super) struct Lines<'a, T> {
    file: RowFile,
    tokens: &'a dyn Fn(&Row) -> Result<T, EngineError>,
    format_error: &'a dyn Fn(EngineError) -> String,
}

/// A line of the file.
pub(super) struct Line<T> {
    /// Line number, starting at 1.
    pub(super) number: usize,
    /// Parsed row; empty if the line is invalid.
    pub(super) row: Row,
    /// Tokens of the row, or an error message.
    pub(super) tokens: Result<T, String>,
}

/// Row of an input file: a prompt or token ids, plus any other keys.
///
/// Returned by a [`RowFile`], and passed to the tokenizing function of [`RowsJob::run`](crate::RowsJob::run).
#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// Text of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<String>,
    /// All other keys.
    #[serde(skip)]
    other: Map<String, Value>,
}

/// JSON object that rejects duplicate keys instead of keeping only the last value.
struct UniqueKeys(Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = UniqueKeys;

            fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<UniqueKeys, A::Error> {
                let mut keys = Map::new();
                while let Some(key) = entries.next_key::<String>()? {
                    if keys.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("duplicate field `{}`", excerpt(&key))));
                    }
                    keys.insert(key, entries.next_value()?);
                }
                Ok(UniqueKeys(keys))
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

impl<'a, T> Lines<'a, T> {
    /// Creates the rows of a file; `tokens` tokenizes a row, and `format_error` formats an error.
    pub(super) fn new(
        file: RowFile,
        tokens: &'a dyn Fn(&Row) -> Result<T, EngineError>,
        format_error: &'a dyn Fn(EngineError) -> String,
    ) -> Self {
        Self { file, tokens, format_error }
    }

    /// Number of lines.
    pub(super) fn len(&self) -> usize {
        self.file.len()
    }

    /// Reads and tokenizes the line at an index, counted from 0.
    pub(super) fn line(&self, index: usize) -> Line<T> {
        let (number, read) = self.file.row(index);
        let (row, tokens) = match read {
            Ok(row) => {
                let tokens = (self.tokens)(&row);
                (row, tokens)
            }
            Err(error) => (Row::default(), Err(error)),
        };
        Line { number, row, tokens: tokens.map_err(self.format_error) }
    }
}

impl Row {
    /// Parses a line of a JSONL file.
    fn of_json(text: &str) -> Result<Self, EngineError> {
        let UniqueKeys(mut other) = serde_json::from_str(text).map_err(|error| {
            wrong(format!("expected {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}"))
        })?;
        let has_ids = other.contains_key("ids");
        let prompt = match other.remove("prompt") {
            // Labeled datasets store the prompt under `text`.
            None if !has_ids => other.remove("text"),
            prompt => prompt,
        };
        match prompt {
            Some(Value::String(prompt)) if !has_ids => Ok(Self { prompt: Some(prompt), other }),
            None if has_ids => Ok(Self { prompt: None, other }),
            Some(_) if !has_ids => Err(wrong("`prompt`: expected a string".into())),
            _ => Err(wrong("expected either `prompt` or `ids`".into())),
        }
    }

    /// Returns the token ids of the row, or tokenizes its prompt.
    ///
    /// # Errors
    /// If `ids` is invalid, there is neither `ids` nor a tokenizer, or the tokenizer cannot encode the
    /// prompt.
    pub fn tokens(&self, vocabulary: &Vocabulary) -> Result<Vec<u32>, EngineError> {
        match self.key("ids", "a list of token ids")? {
            Some(ids) => Ok(ids),
            None if vocabulary.tokenizer().is_none() => {
                let what =
                    "this model has no tokenizer; use `ids`, or specify a tokenizer with `tokenizer`".into();
                Err(EngineError::Options { what })
            }
            None => vocabulary.encode(self.text()),
        }
    }

    /// First characters of the prompt.
    pub fn beginning(&self) -> String {
        const SHOWN: usize = 40;
        self.text().chars().take(SHOWN).collect()
    }

    /// Note on the first prompt character that the tokenizer drops; see [`Vocabulary::lost_note`].
    pub fn lost_note(&self, vocabulary: &Vocabulary) -> Option<String> {
        vocabulary.lost_note(self.text())
    }

    /// Prompt passed to a model for this row.
    ///
    /// # Errors
    /// If [`Row::tokens`] or [`Vocabulary::prompt`] fails.
    pub fn prompt(
        &self,
        vocabulary: &Vocabulary,
        config: &GenerationConfig,
    ) -> Result<Vec<u32>, EngineError> {
        vocabulary.prompt(self.tokens(vocabulary)?, config)
    }

    /// Creates the classifier's question for this row.
    ///
    /// A model that ranks choices receives the row's own choices, or `choices` if the row has none.
    ///
    /// # Errors
    /// If a key has an unexpected value, or [`Question`] rejects the row.
    pub fn question(
        &self,
        vocabulary: &Vocabulary,
        choices: &[String],
        keep_last: Option<usize>,
    ) -> Result<Question, EngineError> {
        if vocabulary.config().head != HeadKind::DoubleHeads {
            return match self.key("ids", "a list of token ids")? {
                Some(ids) => Question::of_ids(vocabulary, ids, keep_last),
                None if choices.is_empty() => Question::of_text(vocabulary, self.text(), keep_last),
                None => Question::of_choices(vocabulary, self.text(), choices, keep_last),
            };
        }
        if let Some(ids) = self.key("ids", "a list of token ids for each choice")? {
            return Question::of_choice_ids(vocabulary, ids, keep_last);
        }
        let own: Option<Vec<String>> = self.key("choices", "a list of strings")?;
        Question::of_choices(vocabulary, self.text(), own.as_deref().unwrap_or(choices), keep_last)
    }

    pub(super) fn text(&self) -> &str {
        self.prompt.as_deref().unwrap_or_default()
    }

    pub(super) fn key<V: DeserializeOwned>(
        &self,
        key: &str,
        expected: &str,
    ) -> Result<Option<V>, EngineError> {
        let value = self.other.get(key).map(V::deserialize).transpose();
        value.map_err(|error| wrong(format!("`{key}`: expected {expected}: {error}")))
    }
}

fn wrong(what: String) -> EngineError {
    EngineError::Row { what }
}
