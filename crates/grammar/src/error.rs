//! Why a grammar cannot be used.

use thiserror::Error;

use crate::schema;

/// A grammar that cannot be used, or a vocabulary that grammars cannot be used with.
///
/// Given by [`Compiler::compile`](crate::Compiler::compile).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Without a tokenizer nothing is known of what tokens write.
    #[error("the model has no tokenizer, and a text that must conform to something needs one")]
    NoTokenizer,
    /// Only a token can end a text of this search.
    #[error(
        "beams and contrastive search need a token that ends a text, and this checkpoint names none; give `eos_token_id`"
    )]
    NoEnd,
    /// The tokenizer does not write its tokens one after the other.
    #[error("this tokenizer cannot be used for texts that must conform to something: {what}")]
    Tokenizer {
        /// What is wrong with it.
        what: String,
    },
    /// The grammar is longer than what is read.
    #[error("{kind}: expected at most {most} bytes, found {found}")]
    TooLong {
        /// What the grammar is: `JSON schema`, `regular expression` or `grammar`.
        kind: &'static str,
        /// Most bytes.
        most: usize,
        /// Its bytes.
        found: usize,
    },
    /// Others are being read, or followed, that take long or are large.
    #[error("{kind}: too many grammars are being processed; retry")]
    Busy {
        /// What the grammar is, as above.
        kind: &'static str,
    },
    /// The grammar is wrong, asks for what is not there, or allows no text that the vocabulary can write.
    #[error("{kind}: {what}")]
    Grammar {
        /// What the grammar is, as above.
        kind: &'static str,
        /// What is wrong, and where.
        what: String,
    },
}

/// What the library's messages say about its own options and features, and what to say instead.
const REWRITTEN: [(&str, &str); 6] = [
    (
        "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
        "$ref: only references within the schema, such as `#/$defs/NAME`, are supported, and no schema is fetched from elsewhere; found",
    ),
    ("Unimplemented keys:", "leave out these keywords, which are unsupported:"),
    (schema::ANY, "."),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf: two of the alternatives may hold at once, which cannot be excluded; use anyOf",
    ),
    ("panic: missing special token prefix", SPECIAL_TOKENS),
    ("NoExtensionBias", "no token of the vocabulary writes what must come next"),
];

/// Why a grammar with special tokens is refused.
pub(crate) const SPECIAL_TOKENS: &str =
    "special tokens and tokens by number, such as <[5]>, cannot be used; write what the text is to be";

/// The library's message without what helps its authors only, and without most of a long grammar.
pub(crate) fn told(message: &str) -> String {
    /// Characters that are kept of the beginning and of the end of a message.
    const TOLD: usize = 600;
    let message = message.split("\n<").next().unwrap_or_default();
    // A regular expression is in a grammar of one line, which no user has written.
    let message = match message.split_once(" (in regex): ") {
        Some((place, what)) if place.starts_with("at 1(8): invalid regex ") => {
            what.split("\n   1 | start: /").next().unwrap_or_default()
        }
        _ => message,
    };
    let rewrite = |told: String, (found, instead): (&str, &str)| told.replace(found, instead);
    let told = REWRITTEN.into_iter().fold(message.trim().to_owned(), rewrite);
    let length = told.chars().count();
    if length <= 2 * TOLD {
        return told;
    }
    let beginning = told.chars().take(TOLD);
    beginning.chain(" … ".chars()).chain(told.chars().skip(length - TOLD)).collect()
}
