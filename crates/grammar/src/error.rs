//! Why a grammar cannot be used.

use thiserror::Error;

/// A grammar that cannot be used, or a vocabulary that grammars cannot be used with.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Without a tokenizer nothing is known of what tokens write.
    #[error("the model has no tokenizer, and a text that must conform to something needs one")]
    NoTokenizer,
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
    /// The grammar is wrong, asks for what is not there, or allows no text that the vocabulary can write.
    #[error("{kind}: {what}")]
    Grammar {
        /// What the grammar is, as above.
        kind: &'static str,
        /// What is wrong, and where.
        what: String,
    },
}

/// The library's message without what helps its authors only.
pub(crate) fn told(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default();
    message.trim().to_owned()
}
