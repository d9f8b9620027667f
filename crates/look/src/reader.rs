//! Parses and validates texts, tokens, positions and heads without the model's weights.

use std::fmt::{Display, Formatter};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_interpret::Head;
use candle_gpt2_pictures::{Report, Token, printable_token};
use serde::{Deserialize, Serialize};

use crate::LookError;
use crate::error::{Result, invalid_option};

/// A text, as a string or as token ids.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, Text};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let reader = Reader::without_bos(opened.vocabulary());
/// assert_eq!(reader.text(&Text::Ids(vec![5, 6]))?, [5, 6]);
/// assert!(reader.text(&Text::Words(String::new())).is_err(), "an empty text is an error");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "invalid type: expected a string, or token ids")]
pub enum Text {
    /// A string, which needs a tokenizer.
    Words(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// Returns the empty text.
impl Default for Text {
    fn default() -> Self {
        Self::Words(String::new())
    }
}

/// A token, by its text or its id.
///
/// ```
/// use candle_gpt2_look::TokenChoice;
///
/// assert!(matches!(TokenChoice::from("#464"), TokenChoice::Id(464)));
/// assert!(matches!(TokenChoice::from(" Paris"), TokenChoice::Text(text) if text == " Paris"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, from = "JsonToken")]
pub enum TokenChoice {
    /// Text of a single token.
    Text(String),
    /// Token id.
    Id(u32),
}

/// JSON form of a token: a value, or a one-element list as in files of prompt pairs.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected a string of one token, or a token id; a list may have only one element"
)]
enum JsonToken {
    Text(String),
    Id(u32),
    OnlyText([String; 1]),
    OnlyId([u32; 1]),
}

impl From<JsonToken> for TokenChoice {
    fn from(written: JsonToken) -> Self {
        match written {
            JsonToken::Text(text) | JsonToken::OnlyText([text]) => Self::Text(text),
            JsonToken::Id(id) | JsonToken::OnlyId([id]) => Self::Id(id),
        }
    }
}

/// Parses the text of one token, or `#ID`.
impl From<&str> for TokenChoice {
    fn from(text: &str) -> Self {
        match text.strip_prefix('#').map(str::parse) {
            Some(Ok(id)) => Self::Id(id),
            _ => Self::Text(text.to_owned()),
        }
    }
}

/// A list of heads, in the order specified by the user.
///
/// ```
/// use candle_gpt2_look::Heads;
///
/// let heads: Heads = "9.9,10.7".parse()?;
/// assert_eq!((heads.0[1].layer, heads.0[1].head), (10, 7));
/// assert_eq!(heads.to_string(), "9.9,10.7");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "JsonHeads")]
pub struct Heads(pub Vec<Head>);

/// JSON form of heads: a string, or a list of strings and pairs.
#[derive(Deserialize)]
#[serde(untagged, expecting = "invalid type: expected pairs of layer and head, or strings such as \"9.6\"")]
enum JsonHeads {
    Short(String),
    Each(Vec<JsonNumberPair>),
}

/// A pair of numbers, or a string such as `9.6`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "invalid type: expected a pair of numbers, or a string such as \"11.611\"")]
enum JsonNumberPair {
    Short(String),
    Numbers(usize, usize),
}

impl TryFrom<JsonHeads> for Heads {
    type Error = LookError;

    fn try_from(written: JsonHeads) -> Result<Self> {
        let each = match written {
            JsonHeads::Short(text) => return text.parse(),
            JsonHeads::Each(each) => each,
        };
        let heads = each.into_iter().map(|head| match head {
            JsonNumberPair::Numbers(layer, head) => Ok(vec![Head { layer, head }]),
            JsonNumberPair::Short(text) => text.parse().map(|Self(heads)| heads),
        });
        Ok(Self(heads.collect::<Result<Vec<_>>>()?.concat()))
    }
}

/// Parses heads such as `9.9,10.7`.
impl FromStr for Heads {
    type Err = LookError;

    fn from_str(text: &str) -> Result<Self> {
        let head = |part: &str| {
            let numbers = part.trim().split_once('.').map(|(layer, head)| (layer.parse(), head.parse()));
            match numbers {
                Some((Ok(layer), Ok(head))) => Ok(Head { layer, head }),
                _ => Err(invalid_option(format!("`{part}` is not a head; write LAYER.HEAD, such as 9.6"))),
            }
        };
        text.split(',').map(head).collect::<Result<_>>().map(Self)
    }
}

impl Display for Heads {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let names: Vec<String> =
            self.0.iter().map(|Head { layer, head }| format!("{layer}.{head}")).collect();
        f.write_str(&names.join(","))
    }
}

/// Indices of layers, positions or features, as single numbers and ranges.
///
/// ```
/// use candle_gpt2_look::Ranges;
///
/// assert!("0,4,8-11".parse::<Ranges>().is_ok());
/// assert!("first".parse::<Ranges>().is_err());
/// let _same: Ranges = vec![0, 4].into();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "JsonRanges")]
pub struct Ranges(Vec<RangeInclusive<usize>>);

/// JSON form of ranges: a string, a number or a list of numbers.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected non-negative integers, as a list or as a string such as \"0,4,8-11\""
)]
enum JsonRanges {
    Short(String),
    One(usize),
    Each(Vec<usize>),
}

impl TryFrom<JsonRanges> for Ranges {
    type Error = String;

    fn try_from(written: JsonRanges) -> std::result::Result<Self, String> {
        match written {
            JsonRanges::Short(text) => text.parse(),
            JsonRanges::One(number) => Ok(vec![number].into()),
            JsonRanges::Each(numbers) => Ok(numbers.into()),
        }
    }
}

/// Parses `3`, `0-5` or `0,4,8-11`.
impl FromStr for Ranges {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.parse(), last.parse()) {
                (Ok(first), Ok(last)) => Ok(first..=last),
                _ => Err(format!("`{part}` is neither a number nor a range such as 0-5")),
            }
        };
        text.split(',').map(str::trim).map(range).collect::<std::result::Result<_, _>>().map(Self)
    }
}

impl From<Vec<usize>> for Ranges {
    fn from(numbers: Vec<usize>) -> Self {
        Self(numbers.into_iter().map(|number| number..=number).collect())
    }
}

impl Ranges {
    /// Returns the numbers in ascending order without duplicates, if all are below `count`.
    fn below(&self, count: usize) -> std::result::Result<Vec<usize>, String> {
        let mut found = Vec::new();
        for range in &self.0 {
            let (first, last) = (*range.start(), *range.end());
            if first > last || last >= count {
                let part = if first == last { first.to_string() } else { format!("{first}-{last}") };
                return Err(format!("{part} is out of range; expected 0 to {}", count.saturating_sub(1)));
            }
            found.extend(range.clone());
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// A neuron of an MLP layer.
///
/// ```
/// use candle_gpt2_look::Neuron;
///
/// let neuron: Neuron = "11.611".parse()?;
/// assert_eq!((neuron.layer, neuron.neuron), (11, 611));
/// assert!("11".parse::<Neuron>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "JsonNumberPair")]
pub struct Neuron {
    /// Layer index.
    pub layer: usize,
    /// Index of the neuron in its layer.
    pub neuron: usize,
}

/// Parses `11.611`.
impl FromStr for Neuron {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers = text.split_once('.').map(|(layer, neuron)| (layer.parse(), neuron.parse()));
        match numbers {
            Some((Ok(layer), Ok(neuron))) => Ok(Self { layer, neuron }),
            _ => Err(format!("`{text}` is not a neuron; write LAYER.NEURON, such as 11.611")),
        }
    }
}

impl TryFrom<JsonNumberPair> for Neuron {
    type Error = String;

    fn try_from(written: JsonNumberPair) -> std::result::Result<Self, String> {
        match written {
            JsonNumberPair::Short(text) => text.parse(),
            JsonNumberPair::Numbers(layer, neuron) => Ok(Self { layer, neuron }),
        }
    }
}

/// Validates texts, tokens, positions and heads without the model's weights.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, Text};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let plain = Reader::new(opened.vocabulary(), false)?;
/// let with_bos = Reader::new(opened.vocabulary(), true)?;
/// let text = Text::Ids(vec![5, 6]);
/// assert_eq!(with_bos.text(&text)?.len(), plain.text(&text)?.len() + 1);
/// assert_eq!(with_bos.bos(), Some(with_bos.text(&text)?[0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Reader {
    vocabulary: Arc<Vocabulary>,
    bos: Option<u32>,
}

impl Reader {
    /// Creates a reader for a model's vocabulary.
    ///
    /// With `bos`, the model's start token is prepended to every text.
    ///
    /// # Errors
    /// If the model has no start token.
    pub fn new(vocabulary: &Arc<Vocabulary>, bos: bool) -> Result<Self> {
        let bos = match (bos, vocabulary.config().start_token()) {
            (true, None) => {
                return Err(invalid_option("`bos`: the model's configuration has no valid bos_token_id"));
            }
            (true, id) => id,
            (false, _) => None,
        };
        Ok(Self { vocabulary: Arc::clone(vocabulary), bos })
    }

    /// Creates a reader that adds no BOS token to texts.
    pub fn without_bos(vocabulary: &Arc<Vocabulary>) -> Self {
        Self { vocabulary: Arc::clone(vocabulary), bos: None }
    }

    /// Vocabulary of the model.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// BOS token that is prepended to every text, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub(crate) fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// Printable form of a token.
    pub(crate) fn printable(&self, id: u32) -> String {
        printable_token(&self.vocabulary.token_bytes(id))
    }

    /// Raw text of a token for programs, with invalid UTF-8 replaced.
    pub(crate) fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.vocabulary.token_bytes(id)).into_owned()
    }

    /// Creates a report without values on these tokens.
    ///
    /// `model` is the model's display name.
    pub(crate) fn report(&self, what: &str, title: String, model: &str, ids: &[u32]) -> Report {
        Report::new(what, title, model.to_owned(), self.listed(ids), self.bos.is_some())
    }

    /// Converts token ids to the tokens of a report.
    pub(crate) fn listed(&self, ids: &[u32]) -> Vec<Token> {
        let token = |(index, id): (usize, &u32)| Token::new(index, *id, &self.vocabulary.token_bytes(*id));
        ids.iter().enumerate().map(token).collect()
    }

    /// Encodes a text of any length, without a BOS token.
    pub(crate) fn tokens(&self, text: &Text) -> Result<Vec<u32>> {
        match text {
            Text::Words(words) => Ok(self.vocabulary.encode(words)?),
            Text::Ids(ids) => Ok(ids.clone()),
        }
    }

    /// Encodes a text, prepends the reader's BOS token if it has one, and checks the length.
    ///
    /// # Errors
    /// If the text cannot be encoded, is empty or too long, or has a token outside the vocabulary.
    pub fn text(&self, text: &Text) -> Result<Vec<u32>> {
        let ids: Vec<u32> = self.bos.into_iter().chain(self.tokens(text)?).collect();
        let Gpt2Config { n_positions, vocab_size, .. } = *self.config();
        if ids.is_empty() {
            return Err(invalid_option("the text is empty; pass at least one token, or `bos`"));
        }
        if ids.len() > n_positions {
            let tokens = ids.len();
            return Err(invalid_option(format!(
                "the text has {tokens} tokens; this model takes at most {n_positions}"
            )));
        }
        if let Some(id) = ids.iter().find(|id| !self.config().has_token(**id)) {
            return Err(invalid_option(format!(
                "token {id} is outside the vocabulary of {vocab_size} tokens"
            )));
        }
        Ok(ids)
    }

    /// Resolves an option that names a single token.
    pub(crate) fn token(&self, option: &str, token: &TokenChoice) -> Result<u32> {
        let id = match token {
            TokenChoice::Id(id) => *id,
            TokenChoice::Text(text) => match self.vocabulary.encode(text)?[..] {
                [id] => id,
                ref ids => {
                    let tokens: Vec<String> =
                        ids.iter().map(|id| format!("{:?}", self.printable(*id))).collect();
                    return Err(invalid_option(format!(
                        "`{option}` {text:?} has {} tokens ({}); pass a single token (most words need a \
                         leading space) or its id (#ID)",
                        ids.len(),
                        tokens.join(" "),
                    )));
                }
            },
        };
        if !self.config().has_token(id) {
            let vocab_size = self.config().vocab_size;
            return Err(invalid_option(format!(
                "`{option}`: token {id} is outside the vocabulary of {vocab_size} tokens"
            )));
        }
        Ok(id)
    }

    /// Resolves a position in a text of `tokens` tokens; negative ones count from the end.
    pub(crate) fn position(&self, option: &str, position: i64, tokens: usize) -> Result<usize> {
        let place = if position < 0 { position + tokens as i64 } else { position };
        usize::try_from(place).ok().filter(|place| *place < tokens).ok_or_else(|| {
            invalid_option(format!(
                "`{option}` {position}: the text has {tokens} tokens, counted from 0, or backward from -1"
            ))
        })
    }

    /// Checks that the model has these heads, and removes duplicates.
    pub(crate) fn heads(&self, heads: &Heads) -> Result<Heads> {
        let config = self.config();
        let mut found = Vec::new();
        for head in &heads.0 {
            head.check(config.n_layer, config.n_head)?;
            if !found.contains(head) {
                found.push(*head);
            }
        }
        match found.is_empty() {
            true => Err(invalid_option("`heads`: expected at least one head")),
            false => Ok(Heads(found)),
        }
    }

    /// Resolves layer indices and checks that the model has them.
    pub(crate) fn layers(&self, layers: &Ranges) -> Result<Vec<usize>> {
        self.numbers("layers", layers, self.config().n_layer)
    }

    /// Resolves numbers and checks that they are below `count`.
    pub(crate) fn numbers(&self, option: &str, numbers: &Ranges, count: usize) -> Result<Vec<usize>> {
        let below = numbers.below(count);
        let below = below.map_err(|error| invalid_option(format!("`{option}`: {error}")))?;
        match below.is_empty() {
            true => Err(invalid_option(format!("`{option}`: expected at least one index"))),
            false => Ok(below),
        }
    }
}
