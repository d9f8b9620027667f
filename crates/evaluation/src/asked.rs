//! What is asked for by a name: a protocol, or two models side by side.

use crate::{EvaluationError, Kl, Protocol, named};

/// The data of `kl`.
pub(crate) const ANY_TEXT: &str = "any text in UTF-8";

/// What is asked for by a name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Asked {
    /// A protocol, with the number at the end of its name.
    Protocol(&'static Protocol, Option<usize>),
    /// Two models side by side.
    Kl,
}

impl Asked {
    pub(crate) fn named(name: &str) -> Result<Self, EvaluationError> {
        if name == Kl::NAME {
            return Ok(Self::Kl);
        }
        named(name).map(|(protocol, number)| Self::Protocol(protocol, number))
    }

    /// Whether it needs a second model.
    pub(crate) fn compares(&self) -> bool {
        matches!(self, Self::Kl)
    }

    /// Whether the length of its windows is the caller's to choose.
    pub(crate) fn takes_context(&self) -> bool {
        match self {
            Self::Protocol(protocol, _) => protocol.name == "wikitext:llama.cpp",
            Self::Kl => true,
        }
    }

    /// The number at the end of its name, or what it is where there is none.
    pub(crate) fn parameter(&self) -> usize {
        let number = match self {
            Self::Protocol(protocol, number) => {
                number.or(protocol.parameter.and_then(|parameter| parameter.default))
            }
            Self::Kl => None,
        };
        number.unwrap_or(0)
    }
}
