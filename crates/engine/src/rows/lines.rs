//! The rows of a file, line by line. The file is held in memory once; tokens are made of a line when it is asked for.

use std::fmt::{self, Formatter};
use std::ops::Range;
use std::path::Path;

use candle_gpt2::{HeadKind, excerpt};
use candle_gpt2_generation::GenerationConfig;
use serde::de::{DeserializeOwned, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{EngineError, Question, Vocabulary};

/// A file of prompts in memory: a prompt a line, or a JSON object a line if its name ends in `.jsonl`.
///
/// ```
/// use candle_gpt2_engine::RowFile;
///
/// let file = RowFile::new("prompts.jsonl".as_ref(), b"{\"ids\": [5, 6]}\n\n{\"prompt\": 5}\n".to_vec());
/// assert_eq!(file.len(), 2, "an empty line of JSONL is nothing");
/// let (line, row) = file.row(1);
/// assert_eq!((line, row.unwrap_err().to_string()), (3, "`prompt`: expected a text".into()));
/// ```
#[derive(Debug, Clone)]
pub struct RowFile {
    bytes: Vec<u8>,
    /// The number of each line, from 1, and where it is.
    lines: Vec<(usize, Range<usize>)>,
    is_json: bool,
}

impl RowFile {
    /// The file `path`, which holds these bytes.
    pub fn new(path: &Path, bytes: Vec<u8>) -> Self {
        let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
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
        Self { bytes, lines, is_json }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The bytes of the file, as they were given.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of the line of this row, counted from 1, and the row, whose index is below [`RowFile::len`], or why the line is none.
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

    /// Whether the line of this row, whose index is below [`RowFile::len`], is white space alone.
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

    /// The tokens of this row, whose index is below [`RowFile::len`], cut into sequences that the model's context holds, each with the token
    /// `bos` in front if there is one.
    ///
    /// ```
    /// use candle_gpt2_engine::{ModelOptions, RowFile, Silent};
    ///
    /// let opened = ModelOptions::default().open(&Silent)?;
    /// let file = RowFile::new("rows.jsonl".as_ref(), b"{\"ids\": [5, 6]}\n{\"ids\": [5, 2048]}".to_vec());
    /// assert_eq!(file.sequences(0, opened.vocabulary(), Some(0)).sequences?, [[0, 5, 6]]);
    /// let error = file.sequences(1, opened.vocabulary(), None).sequences.err().ok_or("there is no such token")?;
    /// assert_eq!(error.to_string(), "token 2048 is outside the vocabulary of 2048");
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
                Some(id) => {
                    Err(wrong(format!("token {id} is outside the vocabulary of {}", config.vocab_size)))
                }
            }
        };
        RowSequences { line, sequences: read() }
    }
}

/// A row as a model reads it: what no context holds is cut.
///
/// Given by [`RowFile::sequences`].
#[derive(Debug)]
pub struct RowSequences {
    /// The number of its line, counted from 1.
    pub line: usize,
    /// Its tokens: one sequence, none of an empty prompt, several of one that is longer than the context; or why the line is none.
    pub sequences: Result<Vec<Vec<u32>>, EngineError>,
}

/// The rows of a file with their tokens.
pub(super) struct Lines<'a, T> {
    file: RowFile,
    tokens: &'a dyn Fn(&Row) -> Result<T, EngineError>,
    told: &'a dyn Fn(EngineError) -> String,
}

/// A line of the file.
pub(super) struct Line<T> {
    /// From 1.
    pub(super) number: usize,
    /// What it gives; nothing if it cannot be read.
    pub(super) row: Row,
    /// Its tokens, or why there are none.
    pub(super) tokens: Result<T, String>,
}

/// The row of a line: a prompt or token ids, and other keys.
///
/// Given by a [`RowFile`], and shown to the function that [`RowsJob::run`](crate::RowsJob::run) makes tokens with.
#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// A text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<String>,
    /// All other keys.
    #[serde(skip)]
    other: Map<String, Value>,
}

/// An object without duplicate keys, of which the last would win.
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
    /// The rows of a file; `tokens` makes tokens of a row, and `told` a text of what is wrong with it.
    pub(super) fn new(
        file: RowFile,
        tokens: &'a dyn Fn(&Row) -> Result<T, EngineError>,
        told: &'a dyn Fn(EngineError) -> String,
    ) -> Self {
        Self { file, tokens, told }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.file.len()
    }

    /// The line of this index, from 0.
    pub(super) fn line(&self, index: usize) -> Line<T> {
        let (number, read) = self.file.row(index);
        let (row, tokens) = match read {
            Ok(row) => {
                let tokens = (self.tokens)(&row);
                (row, tokens)
            }
            Err(error) => (Row::default(), Err(error)),
        };
        Line { number, row, tokens: tokens.map_err(self.told) }
    }
}

impl Row {
    /// Reads a line of a JSONL file.
    fn of_json(text: &str) -> Result<Self, EngineError> {
        let UniqueKeys(mut other) = serde_json::from_str(text)
            .map_err(|error| wrong(format!("not {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}")))?;
        let has_ids = other.contains_key("ids");
        let prompt = match other.remove("prompt") {
            // As rows of labelled texts have it.
            None if !has_ids => other.remove("text"),
            prompt => prompt,
        };
        match prompt {
            Some(Value::String(prompt)) if !has_ids => Ok(Self { prompt: Some(prompt), other }),
            None if has_ids => Ok(Self { prompt: None, other }),
            Some(_) if !has_ids => Err(wrong("`prompt`: expected a text".into())),
            _ => Err(wrong("expected one of the keys `prompt` and `ids`".into())),
        }
    }

    /// Its tokens.
    ///
    /// # Errors
    /// When it gives no ids and there is no tokenizer, or the tokenizer cannot encode its prompt.
    pub fn tokens(&self, vocabulary: &Vocabulary) -> Result<Vec<u32>, EngineError> {
        match self.key("ids", "a list of token ids")? {
            Some(ids) => Ok(ids),
            None if vocabulary.tokenizer().is_none() => {
                let what = "there is no tokenizer; give ids, or a tokenizer with `tokenizer`".into();
                Err(EngineError::Options { what })
            }
            None => vocabulary.encode(self.text()),
        }
    }

    /// The first characters of its text.
    pub fn beginning(&self) -> String {
        const SHOWN: usize = 40;
        self.text().chars().take(SHOWN).collect()
    }

    /// The note on the first character of its text that the tokenizer leaves out, see [`Vocabulary::lost_note`].
    pub fn lost_note(&self, vocabulary: &Vocabulary) -> Option<String> {
        vocabulary.lost_note(self.text())
    }

    /// The prompt that a model gets for it.
    ///
    /// # Errors
    /// Those of [`Row::tokens`] and of [`Vocabulary::prompt`].
    pub fn prompt(
        &self,
        vocabulary: &Vocabulary,
        config: &GenerationConfig,
    ) -> Result<Vec<u32>, EngineError> {
        vocabulary.prompt(self.tokens(vocabulary)?, config)
    }

    /// The question that it is to a classifier. A model that chooses among texts gets those of the row, or `choices` if it has none.
    ///
    /// # Errors
    /// When a key is not what is expected, and those of [`Question`].
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
        let own: Option<Vec<String>> = self.key("choices", "a list of texts")?;
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
