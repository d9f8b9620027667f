//! Grammars that constrain output, and their translation to llguidance's grammars.

use llguidance::api::TopLevelGrammar;
use llguidance::{ParserFactory, TokenParser};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{SPECIAL_TOKENS, user_message};
use crate::{GrammarError, reading, schema};

/// Maximum length of a grammar in bytes.
///
/// For a JSON schema, this is the length of the compact form.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::{Compiler, Grammar, GrammarError, MAX_SOURCE_BYTES};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let long = Grammar::Regex("a".repeat(MAX_SOURCE_BYTES + 1));
/// let refused = Compiler::new(opened.vocabulary())?.compile(&long, &[]);
/// assert!(matches!(refused, Err(GrammarError::TooLong { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// Grammar that the output must match from its first byte to its last.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::{Compiler, Grammar};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let compiler = Compiler::new(opened.vocabulary())?;
/// let schema = serde_json::json!({"type": "array", "items": {"type": "integer"}, "maxItems": 3});
/// let sum = "start: number (\"+\" number)*\nnumber: /[0-9]+/";
/// for grammar in [Grammar::JsonObject, Grammar::JsonSchema(schema), Grammar::Lark(sum.into())] {
///     compiler.compile(&grammar, &[])?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that conforms to a draft 2020-12 schema.
    ///
    /// Keywords that [llguidance does not
    /// support](https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md) are errors. So are
    /// limits that llguidance would not enforce, and references to other schemas, which are never fetched.
    /// The parts of a value are separated by at most one space.
    JsonSchema(Value),
    /// A regular expression that matches the whole text.
    ///
    /// The syntax is [that of the `regex` crate](https://docs.rs/regex/latest/regex/#syntax).
    Regex(String),
    /// A grammar in llguidance's variant of Lark, with `start` as its first rule.
    ///
    /// See [llguidance's syntax](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
    Lark(String),
}

impl Grammar {
    /// Creates a choice between several texts; returns `None` if the list or any text is empty.
    ///
    /// ```
    /// use candle_gpt2_grammar::Grammar;
    ///
    /// let choice = Grammar::choice(&["yes", "no (really)"]);
    /// assert_eq!(choice, Some(Grammar::Regex(r"yes|no \(really\)".into())));
    /// assert_eq!(Grammar::choice(&[""]), None);
    /// ```
    pub fn choice(texts: &[impl AsRef<str>]) -> Option<Self> {
        let texts = texts.iter().map(AsRef::as_ref);
        let is_choice = texts.len() > 0 && texts.clone().all(|text| !text.is_empty());
        is_choice.then(|| Self::Regex(texts.map(regex_syntax::escape).collect::<Vec<_>>().join("|")))
    }

    /// Kind of grammar, for error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "grammar",
        }
    }

    pub(crate) fn check_length(&self) -> Result<(), GrammarError> {
        let length = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(source) | Self::Lark(source) => source.len(),
        };
        match length > MAX_SOURCE_BYTES {
            true => Err(GrammarError::TooLong { kind: self.kind(), max: MAX_SOURCE_BYTES, found: length }),
            false => Ok(()),
        }
    }

    /// Compiles the grammar into a parser.
    pub(crate) fn parser(&self, factory: &ParserFactory) -> Result<TokenParser, GrammarError> {
        let wrong = |what: String| GrammarError::Grammar { kind: self.kind(), what };
        let schema = match self {
            Self::JsonSchema(schema) => schema::checked(schema).map_err(wrong)?,
            _ => json!({ "type": "object" }),
        };
        let source = match self {
            Self::JsonObject | Self::JsonSchema(_) => schema::to_llguidance(schema.clone()),
            Self::Regex(source) => TopLevelGrammar::from_regex(source),
            Self::Lark(source) if is_gbnf(source) => {
                return Err(wrong(
                    "this looks like GBNF (`::=`); write it in Lark, with `:` and the first rule `start`"
                        .into(),
                ));
            }
            Self::Lark(source) => TopLevelGrammar::from_lark(source.clone()),
        };
        let parser = reading::parser(source, factory).map_err(|message| {
            let location = match self {
                Self::JsonSchema(_) => schema::location_of(&schema, &message, factory),
                _ => String::new(),
            };
            wrong(location + &user_message(&message))
        })?;
        let lexemes = parser.parser.grammar().lexer_spec();
        if lexemes.special_token_rx.is_some() {
            return Err(wrong(SPECIAL_TOKENS.into()));
        }
        if lexemes.has_stop {
            return Err(wrong(
                "`stop=` is not supported, because it removes generated text; use `suffix=`".into(),
            ));
        }
        Ok(parser)
    }
}

/// Whether the source defines a rule in GBNF, llama.cpp's grammar format.
fn is_gbnf(source: &str) -> bool {
    let is_name = |name: &str| {
        let name = name.trim();
        !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_".contains(letter))
    };
    source.lines().filter_map(|line| line.split_once("::=")).any(|(name, _)| is_name(name))
}
