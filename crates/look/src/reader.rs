//! Reads and checks options that are written as text, by what is known of a model without its weights: texts, tokens, positions, heads.

use std::fmt::{Display, Formatter};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_interpret::Head;
use candle_gpt2_pictures::{Report, Token, shown};
use serde::{Deserialize, Serialize};

use crate::LookError;
use crate::error::{Result, wrong};

/// A text, or its tokens.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, Text};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let reader = Reader::without_bos(opened.vocabulary());
/// assert_eq!(reader.text(&Text::Ids(vec![5, 6]))?, [5, 6]);
/// assert!(reader.text(&Text::Words(String::new())).is_err(), "a text has at least one token");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "invalid type: expected a text, or token ids")]
pub enum Text {
    /// Words, which need a tokenizer.
    Words(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// The empty text.
impl Default for Text {
    fn default() -> Self {
        Self::Words(String::new())
    }
}

/// A token.
///
/// ```
/// use candle_gpt2_look::TokenChoice;
///
/// assert!(matches!(TokenChoice::from("#464"), TokenChoice::Id(464)));
/// assert!(matches!(TokenChoice::from(" Paris"), TokenChoice::Text(text) if text == " Paris"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, from = "WrittenToken")]
pub enum TokenChoice {
    /// A text of one token.
    Text(String),
    /// Its id.
    Id(u32),
}

/// How JSON has it: alone, or as files of prompt pairs have it.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected a text of one token, or a token id; in a list there may be only one"
)]
enum WrittenToken {
    Text(String),
    Id(u32),
    OnlyText([String; 1]),
    OnlyId([u32; 1]),
}

impl From<WrittenToken> for TokenChoice {
    fn from(written: WrittenToken) -> Self {
        match written {
            WrittenToken::Text(text) | WrittenToken::OnlyText([text]) => Self::Text(text),
            WrittenToken::Id(id) | WrittenToken::OnlyId([id]) => Self::Id(id),
        }
    }
}

/// Reads a text of one token, or `#ID`.
impl From<&str> for TokenChoice {
    fn from(text: &str) -> Self {
        match text.strip_prefix('#').map(str::parse) {
            Some(Ok(id)) => Self::Id(id),
            _ => Self::Text(text.to_owned()),
        }
    }
}

/// Heads in the order that they were named in.
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
#[serde(try_from = "WrittenHeads")]
pub struct Heads(pub Vec<Head>);

/// How JSON has them: in one text, or as texts and pairs.
#[derive(Deserialize)]
#[serde(untagged, expecting = "invalid type: expected pairs of layer and head, or texts such as \"9.6\"")]
enum WrittenHeads {
    Short(String),
    Each(Vec<WrittenPair>),
}

/// Two numbers, or a text such as `9.6`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "invalid type: expected a pair of numbers, or a text such as \"11.611\"")]
enum WrittenPair {
    Short(String),
    Numbers(usize, usize),
}

impl TryFrom<WrittenHeads> for Heads {
    type Error = LookError;

    fn try_from(written: WrittenHeads) -> Result<Self> {
        let each = match written {
            WrittenHeads::Short(text) => return text.parse(),
            WrittenHeads::Each(each) => each,
        };
        let heads = each.into_iter().map(|head| match head {
            WrittenPair::Numbers(layer, head) => Ok(vec![Head { layer, head }]),
            WrittenPair::Short(text) => text.parse().map(|Self(heads)| heads),
        });
        Ok(Self(heads.collect::<Result<Vec<_>>>()?.concat()))
    }
}

/// Reads heads as `9.9,10.7`.
impl FromStr for Heads {
    type Err = LookError;

    fn from_str(text: &str) -> Result<Self> {
        let head = |part: &str| {
            let numbers = part.trim().split_once('.').map(|(layer, head)| (layer.parse(), head.parse()));
            match numbers {
                Some((Ok(layer), Ok(head))) => Ok(Head { layer, head }),
                _ => Err(wrong(format!("`{part}` is not a head; write LAYER.HEAD, such as 9.6"))),
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

/// Numbers of layers or positions: single ones and ranges.
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
#[serde(try_from = "WrittenRanges")]
pub struct Ranges(Vec<RangeInclusive<usize>>);

/// How JSON has them: in a text, or as numbers.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected numbers from 0 on, as a list or as a text such as \"0,4,8-11\""
)]
enum WrittenRanges {
    Short(String),
    One(usize),
    Each(Vec<usize>),
}

impl TryFrom<WrittenRanges> for Ranges {
    type Error = String;

    fn try_from(written: WrittenRanges) -> std::result::Result<Self, String> {
        match written {
            WrittenRanges::Short(text) => text.parse(),
            WrittenRanges::One(number) => Ok(vec![number].into()),
            WrittenRanges::Each(numbers) => Ok(numbers.into()),
        }
    }
}

/// Reads `3`, `0-5` or `0,4,8-11`.
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
    /// The numbers, each once and in their order, all of them below `count`.
    fn below(&self, count: usize) -> std::result::Result<Vec<usize>, String> {
        let mut found = Vec::new();
        for range in &self.0 {
            let (first, last) = (*range.start(), *range.end());
            if first > last || last >= count {
                let part = if first == last { first.to_string() } else { format!("{first}-{last}") };
                return Err(format!("{part} is not among 0 to {}", count.saturating_sub(1)));
            }
            found.extend(range.clone());
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// A neuron of an MLP.
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
#[serde(try_from = "WrittenPair")]
pub struct Neuron {
    /// Its layer.
    pub layer: usize,
    /// Its number there.
    pub neuron: usize,
}

/// Reads `11.611`.
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

impl TryFrom<WrittenPair> for Neuron {
    type Error = String;

    fn try_from(written: WrittenPair) -> std::result::Result<Self, String> {
        match written {
            WrittenPair::Short(text) => text.parse(),
            WrittenPair::Numbers(layer, neuron) => Ok(Self { layer, neuron }),
        }
    }
}

/// What texts, tokens and heads are checked against before any weight is needed.
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
    /// For a model of this vocabulary. With `bos` the token that texts begin with is put in front of them.
    ///
    /// # Errors
    /// When the model has no such token.
    pub fn new(vocabulary: &Arc<Vocabulary>, bos: bool) -> Result<Self> {
        let bos = match (bos, vocabulary.config().start_token()) {
            (true, None) => {
                return Err(wrong(
                    "`bos`: this model's configuration names no bos_token_id that its vocabulary has",
                ));
            }
            (true, id) => id,
            (false, _) => None,
        };
        Ok(Self { vocabulary: Arc::clone(vocabulary), bos })
    }

    /// For a model of this vocabulary and texts as they are.
    pub fn without_bos(vocabulary: &Arc<Vocabulary>) -> Self {
        Self { vocabulary: Arc::clone(vocabulary), bos: None }
    }

    /// The tokens of the model.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// The token in front of every text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub(crate) fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// A token as it is shown.
    pub(crate) fn shown(&self, id: u32) -> String {
        shown(&self.vocabulary.token_bytes(id))
    }

    /// A token as it is, for programs; bytes that are no UTF-8 are replaced.
    pub(crate) fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.vocabulary.token_bytes(id)).into_owned()
    }

    /// A report on these tokens without its values; `model` is what the user calls it.
    pub(crate) fn report(&self, what: &str, title: String, model: &str, ids: &[u32]) -> Report {
        Report::new(what, title, model.to_owned(), self.listed(ids), self.bos.is_some())
    }

    /// Tokens as reports have them.
    pub(crate) fn listed(&self, ids: &[u32]) -> Vec<Token> {
        let token = |(index, id): (usize, &u32)| Token::new(index, *id, &self.vocabulary.token_bytes(*id));
        ids.iter().enumerate().map(token).collect()
    }

    /// The tokens of a text, however long, and without the token in front.
    pub(crate) fn tokens(&self, text: &Text) -> Result<Vec<u32>> {
        match text {
            Text::Words(words) => Ok(self.vocabulary.encode(words)?),
            Text::Ids(ids) => Ok(ids.clone()),
        }
    }

    /// The tokens of a text, after the BOS token if there is one, within the model's context.
    ///
    /// # Errors
    /// When there are none or too many, or one is outside the vocabulary.
    pub fn text(&self, text: &Text) -> Result<Vec<u32>> {
        let ids: Vec<u32> = self.bos.into_iter().chain(self.tokens(text)?).collect();
        let Gpt2Config { n_positions, vocab_size, .. } = *self.config();
        if ids.is_empty() {
            return Err(wrong("the text is empty; give at least one token, or `bos`"));
        }
        if ids.len() > n_positions {
            let tokens = ids.len();
            return Err(wrong(format!(
                "the text has {tokens} tokens; this model takes at most {n_positions}"
            )));
        }
        if let Some(id) = ids.iter().find(|id| !self.config().has_token(**id)) {
            return Err(wrong(format!("token {id} is outside the vocabulary of {vocab_size}")));
        }
        Ok(ids)
    }

    /// The one token that an option names.
    pub(crate) fn token(&self, option: &str, token: &TokenChoice) -> Result<u32> {
        let id = match token {
            TokenChoice::Id(id) => *id,
            TokenChoice::Text(text) => match self.vocabulary.encode(text)?[..] {
                [id] => id,
                ref ids => {
                    let tokens: Vec<String> = ids.iter().map(|id| format!("{:?}", self.shown(*id))).collect();
                    return Err(wrong(format!(
                        "`{option}` {text:?} has {} tokens ({}); give one token (most words need the space before them) or its id (#ID)",
                        ids.len(),
                        tokens.join(" "),
                    )));
                }
            },
        };
        if !self.config().has_token(id) {
            let vocab_size = self.config().vocab_size;
            return Err(wrong(format!("`{option}`: token {id} is outside the vocabulary of {vocab_size}")));
        }
        Ok(id)
    }

    /// The position that an option names in a text of so many tokens; negative ones count from the end.
    pub(crate) fn position(&self, option: &str, position: i64, tokens: usize) -> Result<usize> {
        let place = if position < 0 { position + tokens as i64 } else { position };
        usize::try_from(place).ok().filter(|place| *place < tokens).ok_or_else(|| {
            wrong(format!(
                "`{option}` {position}: the text has {tokens} tokens, counted from 0, or from -1 at its end"
            ))
        })
    }

    /// Heads that the model has, each once.
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
            true => Err(wrong("`heads`: none is given")),
            false => Ok(Heads(found)),
        }
    }

    /// Layers that the model has.
    pub(crate) fn layers(&self, layers: &Ranges) -> Result<Vec<usize>> {
        self.numbers("layers", layers, self.config().n_layer)
    }

    /// Numbers below `count`.
    pub(crate) fn numbers(&self, option: &str, numbers: &Ranges, count: usize) -> Result<Vec<usize>> {
        let below = numbers.below(count);
        let below = below.map_err(|error| wrong(format!("`{option}`: {error}")))?;
        match below.is_empty() {
            true => Err(wrong(format!("`{option}`: none is given"))),
            false => Ok(below),
        }
    }
}
