//! Prompt pairs that define a task.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;

use candle_gpt2_interpret::PromptPair;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::error::{Result, invalid_option};
use crate::files::read_text;
use crate::{ComparedTexts, LookError, Reader, TokenChoice};

/// A pair of prompts, with the same fields as activation patching.
///
/// If several tokens are correct or incorrect, they form a list.
///
/// ```
/// use candle_gpt2_look::{ComparedTexts, Text, TextPair};
///
/// let line = r#"{"clean":"When Mia and Tom met, Tom saw","corrupt":"When Mia and Tom met, Ben saw","answer":[" Mia"],"against":[" Tom"]}"#;
/// let pair: TextPair = serde_json::from_str(line)?;
/// assert_eq!(pair.answer, [" Mia".into()]);
/// assert_eq!(serde_json::to_string(&pair)?, line);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "JsonPair")]
pub struct TextPair {
    /// Clean and corrupted prompts (`clean`, `corrupt`), with the same number of tokens.
    #[serde(flatten)]
    pub texts: ComparedTexts,
    /// Tokens that are correct after the clean prompt (`answer`).
    pub answer: Vec<TokenChoice>,
    /// Tokens that the answers are compared with (`against`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<TokenChoice>,
    /// Named positions in both prompts (`spans`), counted from 0 without a BOS token.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub spans: BTreeMap<String, Vec<usize>>,
}

/// JSON form of a pair; rejects unknown fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonPair {
    clean: crate::Text,
    corrupt: crate::Text,
    #[serde(deserialize_with = "one_or_more")]
    answer: Vec<TokenChoice>,
    #[serde(default, deserialize_with = "one_or_more")]
    against: Vec<TokenChoice>,
    #[serde(default)]
    spans: BTreeMap<String, Vec<usize>>,
}

impl From<JsonPair> for TextPair {
    fn from(line: JsonPair) -> Self {
        let JsonPair { clean, corrupt, answer, against, spans } = line;
        Self { texts: ComparedTexts { clean, corrupt }, answer, against, spans }
    }
}

fn one_or_more<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<TokenChoice>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "invalid type: expected a string of one token, a token id, or a list of them"
    )]
    enum Tokens {
        One(TokenChoice),
        Several(Vec<TokenChoice>),
    }
    Ok(match Tokens::deserialize(deserializer)? {
        Tokens::One(token) => vec![token],
        Tokens::Several(tokens) => tokens,
    })
}

/// Pairs as token ids, and the names of their spans.
#[derive(Debug)]
pub(crate) struct ReadPairs {
    pub(crate) pairs: Vec<PromptPair>,
    /// Empty if edges are not distinguished by position.
    pub(crate) spans: Vec<String>,
}

/// Name of the span that holds all tokens outside the named spans.
const OTHER: &str = "other";

/// Expected form of a pair, for error messages.
const FORM: &str = r#"expected {"clean": "…", "corrupt": "…", "answer": " …", "against": " …"}"#;

/// Pairs of prompts: a file with one pair per line, or the pairs themselves.
///
/// In JSON, it is a path or a list of pairs.
///
/// ```
/// use candle_gpt2_look::PairData;
///
/// let file: PairData = serde_json::from_str(r#""pairs.jsonl""#)?;
/// assert_eq!(file, PairData::File("pairs.jsonl".into()));
/// let pairs: PairData = serde_json::from_str(r#"[{"clean": [1, 2], "corrupt": [1, 3], "answer": 4}]"#)?;
/// assert!(matches!(pairs, PairData::Pairs(pairs) if pairs.len() == 1));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub enum PairData {
    /// A JSON Lines file.
    File(PathBuf),
    /// Pairs in memory.
    Pairs(Vec<TextPair>),
}

impl TryFrom<Value> for PairData {
    type Error = String;

    fn try_from(value: Value) -> std::result::Result<Self, String> {
        match value {
            Value::String(path) => Ok(Self::File(path.into())),
            Value::Array(pairs) => {
                let read = |(place, pair): (usize, Value)| {
                    let refused = |error: serde_json::Error| format!("pair {}: {FORM}: {error}", place + 1);
                    serde_json::from_value(pair).map_err(refused)
                };
                pairs
                    .into_iter()
                    .enumerate()
                    .map(read)
                    .collect::<std::result::Result<_, _>>()
                    .map(Self::Pairs)
            }
            _ => Err("invalid type: expected a file of prompt pairs, or a list of them".into()),
        }
    }
}

impl From<PathBuf> for PairData {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<OsString> for PairData {
    fn from(path: OsString) -> Self {
        Self::File(path.into())
    }
}

/// A pair and its name in error messages.
type NamedPair<'a> = (String, Cow<'a, TextPair>);

impl PairData {
    /// Returns the source's name for error messages, and up to `most` pairs.
    fn read(&self, most: usize) -> Result<(String, Vec<NamedPair<'_>>)> {
        let path = match self {
            Self::File(path) => path,
            Self::Pairs(pairs) => {
                let named = |(place, pair): (usize, _)| (format!("pair {}", place + 1), Cow::Borrowed(pair));
                return Ok((
                    "the list of pairs".into(),
                    pairs.iter().take(most).enumerate().map(named).collect(),
                ));
            }
        };
        let (text, file) = (read_text(path)?, path.display());
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).take(most);
        let read = |(number, line): (usize, _)| {
            let origin = format!("{file}, line {}", number + 1);
            match serde_json::from_str(line) {
                Ok(pair) => Ok((origin, Cow::Owned(pair))),
                Err(error) => Err(named(origin, invalid_option(format!("{FORM}: {error}")))),
            }
        };
        Ok((file.to_string(), lines.map(read).collect::<Result<_>>()?))
    }
}

fn named(origin: impl Into<String>, error: LookError) -> LookError {
    LookError::In { origin: origin.into(), error: Box::new(error) }
}

/// Reads up to `most` pairs.
///
/// With `by_position`, every token belongs to a span. If the pairs name no spans, each position is a span of
/// its own.
pub(crate) fn read_pairs(
    data: &PairData,
    most: usize,
    reader: &Reader,
    by_position: bool,
) -> Result<ReadPairs> {
    let (origin, written) = data.read(most)?;
    if written.is_empty() {
        return Err(named(
            origin,
            invalid_option("no pairs; pass at least one, or generate some with the `data` analysis"),
        ));
    }
    let mut pairs = Vec::new();
    for (origin, pair) in &written {
        pairs.push(pair.read(reader).map_err(|error| named(origin, error))?);
    }
    let mut names: Vec<String> = written.iter().flat_map(|(_, pair)| pair.spans.keys().cloned()).collect();
    names.sort();
    names.dedup();
    if !by_position {
        return Ok(ReadPairs { pairs, spans: Vec::new() });
    }
    if names.is_empty() {
        let tokens = pairs.first().map_or(0, |pair| pair.clean.len());
        if let Some((place, pair)) = pairs.iter().enumerate().find(|(_, pair)| pair.clean.len() != tokens) {
            let error = invalid_option(format!(
                "these prompts have {} tokens, but the first pair's have {tokens}; edges by position \
                 need prompts of equal length, or `spans` such as {{\"subject\": [3], \"end\": [13]}}",
                pair.clean.len()
            ));
            return Err(named(&written[place].0, error));
        }
        pairs.iter_mut().for_each(|pair| pair.spans = (0..tokens).collect());
        return Ok(ReadPairs { pairs, spans: (0..tokens).map(|position| position.to_string()).collect() });
    }
    let other = names.len();
    let in_front = usize::from(reader.bos().is_some());
    for (pair, (origin, written)) in pairs.iter_mut().zip(&written) {
        pair.spans = vec![other; pair.clean.len()];
        for (name, positions) in &written.spans {
            for position in positions {
                let tokens = pair.clean.len() - in_front;
                let Some(span) = pair.spans.get_mut(position.saturating_add(in_front)) else {
                    let error = invalid_option(format!(
                        "`spans` {name} {position}: the prompts have {tokens} tokens, counted from 0"
                    ));
                    return Err(named(origin, error));
                };
                *span = names.binary_search(name).unwrap_or(other);
            }
        }
    }
    names.push(OTHER.to_owned());
    // Spans without tokens have no scores.
    let used: BTreeSet<usize> = pairs.iter().flat_map(|pair| pair.spans.iter().copied()).collect();
    let places: BTreeMap<usize, usize> = used.iter().copied().zip(0..).collect();
    pairs.iter_mut().flat_map(|pair| &mut pair.spans).for_each(|span| *span = places[span]);
    Ok(ReadPairs { pairs, spans: used.into_iter().map(|span| names[span].clone()).collect() })
}

impl TextPair {
    /// Encodes the pair, without spans.
    fn read(&self, reader: &Reader) -> Result<PromptPair> {
        let (clean, corrupted) = self.texts.ids(reader)?;
        let tokens = |option: &str, tokens: &[TokenChoice]| {
            tokens.iter().map(|token| reader.token(option, token)).collect::<Result<Vec<u32>>>()
        };
        let (correct, incorrect) = (tokens("answer", &self.answer)?, tokens("against", &self.against)?);
        if correct.is_empty() {
            return Err(invalid_option("`answer`: expected at least one token"));
        }
        Ok(PromptPair { clean, corrupted, correct, incorrect, spans: Vec::new() })
    }
}
