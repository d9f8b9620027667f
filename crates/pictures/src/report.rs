//! Results of analyses: named axes, values and tokens, which all renderers take as input.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::{Graph, PictureError};

/// Result of one analysis, and the JSON that every view prints with `--json`.
///
/// # Shapes
/// `values` and `texts` are row-major over `axes`, the slowest axis first.
///
/// ```
/// use candle_gpt2_pictures::{Axis, Report};
///
/// let mut report = Report::new("example", "norm of the residual stream".into(), "gpt2".into(), Vec::new(), false);
/// report.axes = vec![Axis::numbers("layer", 0..3)];
/// report.values = vec![Some(1.5), Some(4.0), None];
/// assert!(report.check().is_ok());
/// report.values.pop();
/// assert!(report.check().unwrap_err().to_string().contains("(layer 3) cannot have 2 values"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Kind of report and its version: `gpt2.look.attention/1`.
    pub schema: String,
    /// Title of the analysis, in one line.
    pub title: String,
    /// Model name, as supplied by the caller.
    pub model: String,
    /// Tokens of the text.
    pub tokens: Vec<Token>,
    /// Whether `<|endoftext|>` was prepended to the text.
    pub bos: bool,
    /// Axes of the values, slowest first.
    pub axes: Vec<Axis>,
    /// Value for each combination of labels.
    ///
    /// `None` is a missing value: masked, minus infinity or not requested.
    pub values: Vec<Option<f32>>,
    /// Text for each value, such as the most probable token; empty if the report has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<String>,
    /// Metric of the analysis, before and after a change to the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<Metric>,
    /// Warnings and conventions, in plain English.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Color scale for the values.
    pub scale: Scale,
    /// Graph, shown instead of the values in pictures and next to them in pages.
    ///
    /// It is not serialized; the JSON has its content under other keys.
    #[serde(skip)]
    pub graph: Option<Graph>,
}

/// A token of the text.
///
/// ```
/// use candle_gpt2_pictures::Token;
///
/// let token = Token::new(10, 5335, b" Mary");
/// assert_eq!(token.text, "·Mary");
/// assert_eq!(token.label(), "·Mary 10");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// Position in the text, from 0.
    pub index: usize,
    /// Id in the vocabulary.
    pub id: u32,
    /// Printable form of the bytes, see [`printable_token`].
    pub text: String,
}

/// An axis of the values.
///
/// ```
/// use candle_gpt2_pictures::{Axis, Token};
///
/// assert_eq!(Axis::numbers("head", [3, 7]).labels, ["3", "7"]);
/// assert_eq!(Axis::new("part", ["attention", "MLP"]).labels[1], "MLP");
/// let tokens = [Token::new(0, 464, b"The"), Token::new(1, 3290, b" dog")];
/// assert_eq!(Axis::tokens("query", &tokens).labels, ["The 0", "·dog 1"]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// Name of the dimension: `layer`, `head`, `query`, `key`, `token`.
    pub name: String,
    /// Label for each index along the axis.
    pub labels: Vec<String>,
}

/// A metric before and after a change to the model.
///
/// ```
/// use candle_gpt2_pictures::{Metric, Report, table};
///
/// let mut report = Report::new("ablate", "one head left out".into(), "gpt2".into(), Vec::new(), false);
/// report.metric = Some(Metric { name: "logit of \" Paris\"".into(), before: 2.5, after: Some(0.75) });
/// assert!(table(&report).contains("logit of \" Paris\": 2.50000 → 0.75000"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// Name of the metric, such as a difference between two logits.
    pub name: String,
    /// Value before the change.
    pub before: f64,
    /// Value after the change, if there is a change.
    pub after: Option<f64>,
}

/// Color scale for values.
///
/// ```
/// use candle_gpt2_pictures::{Report, Scale};
///
/// let report = Report::new("example", "logits".into(), "gpt2".into(), Vec::new(), false);
/// assert_eq!(report.scale, Scale::Signed);
/// let patterns = report.with_patterns(Vec::new(), Vec::new(), Vec::new());
/// assert_eq!(patterns.scale, Scale::Share);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// White at 0, blue above and red below, with the same range on both sides.
    Signed,
    /// Fractions, from 0 to 1.
    Share,
    /// From 0 to the largest value: entropies, norms, divergences.
    Amount,
}

impl Report {
    /// States whether the tokens begin with a BOS token.
    pub(crate) fn bos_in_words(&self) -> &'static str {
        if self.bos { "with a BOS token" } else { "no BOS token" }
    }

    /// Creates a report of a kind, such as `attention`, without values.
    pub fn new(kind: &str, title: String, model: String, tokens: Vec<Token>, bos: bool) -> Self {
        Self {
            schema: format!("gpt2.look.{kind}/1"),
            title,
            model,
            tokens,
            bos,
            axes: Vec::new(),
            values: Vec::new(),
            texts: Vec::new(),
            metric: None,
            notes: Vec::new(),
            scale: Scale::Signed,
            graph: None,
        }
    }

    /// Creates a report with a value for each token, shown as colored text in pages and pictures.
    ///
    /// ```
    /// use candle_gpt2_pictures::{Report, Scale};
    ///
    /// let report = Report::of_tokens("surprise".into(), &["One", " day"], &[0.5, 2.0], Scale::Amount);
    /// assert!(report.check().is_ok());
    /// assert_eq!(report.axes[0].labels, ["One 0", "·day 1"]);
    /// ```
    pub fn of_tokens(title: String, tokens: &[impl AsRef<str>], values: &[f32], scale: Scale) -> Self {
        let token = |(index, text): (usize, &_)| Token::new(index, 0, AsRef::<str>::as_ref(text).as_bytes());
        let tokens: Vec<Token> = tokens.iter().enumerate().map(token).collect();
        let axes = vec![Axis::tokens("token", &tokens)];
        let values = values.iter().map(|value| value.is_finite().then_some(*value)).collect();
        Self { axes, values, scale, ..Self::new("tokens", title, String::new(), tokens, false) }
    }

    /// Sets the values to attention patterns, by layer, head, query and key.
    pub fn with_patterns(self, layers: Vec<usize>, heads: Vec<usize>, values: Vec<Option<f32>>) -> Self {
        let axes = vec![
            Axis::numbers("layer", layers),
            Axis::numbers("head", heads),
            Axis::tokens("query", &self.tokens),
            Axis::tokens("key", &self.tokens),
        ];
        Self { axes, values, scale: Scale::Share, ..self }
    }

    /// Sets a value for each combination of layer label and token of the text.
    ///
    /// `texts` are the most probable tokens, or empty.
    pub fn with_lens(
        mut self,
        layers: Vec<String>,
        values: Vec<Option<f32>>,
        texts: Vec<String>,
        scale: Scale,
    ) -> Self {
        if !texts.is_empty() {
            self.notes.push("cell text: the most probable token".into());
        }
        let axes = vec![Axis::new("layer", layers), Axis::tokens("token", &self.tokens)];
        Self { axes, values, texts, scale, ..self }
    }

    /// Checks that the numbers of values and texts match the axes.
    ///
    /// # Errors
    /// [`PictureError::Values`] or [`PictureError::Texts`] with both numbers.
    pub fn check(&self) -> Result<(), PictureError> {
        let product =
            self.axes.iter().try_fold(1_usize, |product, axis| product.checked_mul(axis.labels.len()));
        let expected = if self.axes.is_empty() { Some(0) } else { product };
        if expected != Some(self.values.len()) {
            let axes: Vec<_> =
                self.axes.iter().map(|axis| format!("{} {}", axis.name, axis.labels.len())).collect();
            return Err(PictureError::Values { axes: axes.join(", "), found: self.values.len() });
        }
        if !self.texts.is_empty() && self.texts.len() != self.values.len() {
            return Err(PictureError::Texts { expected: self.values.len(), found: self.texts.len() });
        }
        Ok(())
    }

    /// Value at an index in `values`, if it is present and finite.
    pub(crate) fn at(&self, place: usize) -> Option<f32> {
        self.values.get(place).copied().flatten().filter(|value| value.is_finite())
    }

    /// Whether the axes are layer, head, query and key, as in attention patterns.
    pub(crate) fn is_attention(&self) -> bool {
        let names: Vec<_> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
        names == ["layer", "head", "query", "key"] && self.axes[2].labels.len() == self.axes[3].labels.len()
    }

    /// Whether a heatmap has its first row at the bottom, as with layers by token.
    pub(crate) fn is_bottom_up(&self) -> bool {
        match &self.axes[..] {
            [.., rows, columns] => {
                rows.name == "layer" && (columns.name == "token" || !self.texts.is_empty())
            }
            _ => false,
        }
    }

    /// Whether an axis runs over the tokens of the report's text.
    pub(crate) fn is_text(&self, axis: &Axis) -> bool {
        let labels = self.tokens.iter().map(Token::label);
        !self.tokens.is_empty() && labels.eq(axis.labels.iter().cloned())
    }

    /// Value drawn in the strongest color: 1 for fractions, otherwise the largest magnitude.
    pub(crate) fn top(&self) -> f32 {
        if self.scale == Scale::Share {
            return 1.0;
        }
        let magnitudes = (0..self.values.len()).filter_map(|place| self.at(place)).map(f32::abs);
        let top = magnitudes.fold(0.0, f32::max);
        if top > 0.0 { top } else { 1.0 }
    }
}

impl Token {
    /// Creates a token from its position, its id and its bytes.
    pub fn new(index: usize, id: u32, bytes: &[u8]) -> Self {
        Self { index, id, text: printable_token(bytes) }
    }

    /// Text with the index, which distinguishes equal tokens: `·Mary 10`.
    pub fn label(&self) -> String {
        format!("{} {}", self.text, self.index)
    }
}

impl Axis {
    /// Creates an axis with these labels.
    pub fn new(name: impl Into<String>, labels: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { name: name.into(), labels: labels.into_iter().map(Into::into).collect() }
    }

    /// Creates an axis over the text, with a label for each token and its index.
    pub fn tokens(name: impl Into<String>, tokens: &[Token]) -> Self {
        Self::new(name, tokens.iter().map(Token::label))
    }

    /// Creates an axis with numeric labels.
    pub fn numbers(name: impl Into<String>, numbers: impl IntoIterator<Item = usize>) -> Self {
        Self::new(name, numbers.into_iter().map(|number| number.to_string()))
    }
}

/// Returns a token's bytes in printable form.
///
/// A space becomes `·` and a newline `↵`. Other control characters, characters that change the text
/// direction, and invalid UTF-8 become `\xNN`.
///
/// ```
/// use candle_gpt2_pictures::printable_token;
///
/// assert_eq!(printable_token(b" two\nlines"), "·two↵lines");
/// assert_eq!(printable_token(b"\xe2\x82"), r"\xE2\x82");
/// ```
pub fn printable_token(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            push_printable(&mut text, if character == ' ' { '·' } else { character });
        }
        push_bytes(&mut text, chunk.invalid());
    }
    text
}

/// Escapes everything that a terminal or picture cannot show, except spaces.
pub(crate) fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    text.chars().for_each(|character| push_printable(&mut printable, character));
    printable
}

/// Escapes text for use between HTML or XML tags.
pub(crate) fn escaped(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

fn push_printable(text: &mut String, character: char) {
    match character {
        '\n' => text.push('↵'),
        // Line separators, direction marks and overrides, and characters that XML forbids.
        '\u{61c}'
        | '\u{200e}'
        | '\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}'
        | '\u{fffe}'
        | '\u{ffff}' => {
            push_bytes(text, character.encode_utf8(&mut [0; 4]).as_bytes());
        }
        _ if character.is_control() => push_bytes(text, character.encode_utf8(&mut [0; 4]).as_bytes()),
        _ => text.push(character),
    }
}

fn push_bytes(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        write!(text, "\\x{byte:02X}").expect("writing to a String never fails");
    }
}

/// Formats a value with at least three significant digits.
///
/// Integers below 100,000 are written in full, and very large or small values with an exponent.
pub(crate) fn short(value: f32) -> String {
    let magnitude = value.abs();
    if magnitude < 1e5 && value.fract() == 0.0 {
        return format!("{:.0}", value + 0.0); // Avoids -0.
    }
    let decimals = match magnitude {
        1e2..1e5 => 0,
        1e1..1e2 => 1,
        1e0..1e1 => 2,
        1e-1..1e0 => 3,
        1e-2..1e-1 => 4,
        1e-3..1e-2 => 5,
        _ => return format!("{value:.2e}"),
    };
    format!("{value:.decimals$}")
}

/// Shortens a label to `length` characters; cuts the end of its text, but never its index.
pub(crate) fn shortened(label: &str, length: usize) -> String {
    let label = printable(label);
    if label.chars().count() <= length {
        return label;
    }
    let is_index = |word: &&str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let (text, index) = match label.rsplit_once(' ').filter(|(_, last)| is_index(last)) {
        Some((text, index)) => (text, format!(" {index}")),
        None => (label.as_str(), String::new()),
    };
    let kept = length.saturating_sub(index.chars().count() + 1).max(1);
    text.chars().take(kept).chain(['…']).chain(index.chars()).collect()
}
