//! Grammar compilation errors.

use thiserror::Error;

use crate::schema;

/// Unusable grammar, or vocabulary that cannot be used with grammars.
///
/// Returned by [`Compiler::compile`](crate::Compiler::compile).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The model has no tokenizer, so the bytes of its tokens are unknown.
    #[error("structured output needs a tokenizer, and this model has none")]
    NoTokenizer,
    /// The search mode needs an end token, and the configuration has none.
    #[error(
        "beam and contrastive search need an end-of-text token, and this checkpoint has none; \
         set `eos_token_id`"
    )]
    NoEnd,
    /// The tokenizer is unsupported, for example because a token's text depends on its neighbors.
    #[error("structured output does not support this tokenizer: {what}")]
    Tokenizer {
        /// Reason why the tokenizer is unsupported.
        what: String,
    },
    /// The grammar exceeds the length limit.
    #[error("{kind}: expected at most {max} bytes, found {found}")]
    TooLong {
        /// Kind of grammar: `JSON schema`, `regular expression` or `grammar`.
        kind: &'static str,
        /// Maximum length in bytes.
        max: usize,
        /// Actual length in bytes.
        found: usize,
    },
    /// Too many grammars are being compiled, or the grammars in use need too many resources.
    #[error("{kind}: too many grammars are being processed; retry")]
    Busy {
        /// Kind of grammar: `JSON schema`, `regular expression` or `grammar`.
        kind: &'static str,
    },
    /// The grammar is invalid or unsupported, or allows no text that the vocabulary can express.
    #[error("{kind}: {what}")]
    Grammar {
        /// Kind of grammar: `JSON schema`, `regular expression` or `grammar`.
        kind: &'static str,
        /// Description of the error, with its location in the grammar.
        what: String,
    },
}

/// Replacements for library messages that mention the library's own options and features.
const REWRITTEN: [(&str, &str); 6] = [
    (
        "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
        "$ref: only references within the schema, such as `#/$defs/NAME`, are supported, and no schema is fetched from elsewhere; found",
    ),
    ("Unimplemented keys:", "remove these unsupported keywords:"),
    (schema::ANY, "."),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf: two of the alternatives may match the same value; use anyOf",
    ),
    ("panic: missing special token prefix", SPECIAL_TOKENS),
    ("NoExtensionBias", "no token in the vocabulary can come next"),
];

/// Error message for a grammar that uses special tokens.
pub(crate) const SPECIAL_TOKENS: &str =
    "special tokens and token ids such as <[5]> are not supported; write the literal text instead";

/// Rewrites and shortens a library message for users.
///
/// Removes details that help only the library's authors, and the middle of a message that quotes a long
/// grammar.
pub(crate) fn user_message(message: &str) -> String {
    /// Number of characters kept at the beginning and at the end of a long message.
    const EDGE_CHARS: usize = 600;
    let message = message.split("\n<").next().unwrap_or_default();
    // The library wraps a regular expression in a one-line grammar, which the user does not know.
    let message = match message.split_once(" (in regex): ") {
        Some((place, what)) if place.starts_with("at 1(8): invalid regex ") => {
            what.split("\n   1 | start: /").next().unwrap_or_default()
        }
        _ => message,
    };
    let rewrite = |text: String, (found, instead): (&str, &str)| text.replace(found, instead);
    let text = REWRITTEN.into_iter().fold(message.trim().to_owned(), rewrite);
    let length = text.chars().count();
    if length <= 2 * EDGE_CHARS {
        return text;
    }
    let beginning = text.chars().take(EDGE_CHARS);
    beginning.chain(" … ".chars()).chain(text.chars().skip(length - EDGE_CHARS)).collect()
}
