//! What options choose among, and the largest values that they have.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Smallest temperature: below it, logits divided by it could leave the range of f32. Sampling is greedy long before.
/// [`GenerationConfig::check`](crate::GenerationConfig::check) refuses less.
pub const MIN_TEMPERATURE: f64 = 1e-6;

/// Most beams, and most texts of one prompt: far more than anyone reads. Whether memory holds their keys and values depends on
/// the model, and is another question. [`GenerationConfig::check`](crate::GenerationConfig::check) refuses more.
pub const MAX_TEXTS: usize = 4096;

/// When a beam search ends, once there are as many finished texts as beams. [`GenerationConfig::early_stopping`](crate::GenerationConfig::early_stopping) chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum EarlyStopping {
    /// At once: `true`
    #[cfg_attr(feature = "clap", value(name = "true", help = "When there are as many completions as beams"))]
    Full,
    /// When no running beam, at its present length, beats the worst finished completion: `false`
    #[default]
    #[cfg_attr(
        feature = "clap",
        value(name = "false", help = "When no running beam, at its present length, beats the worst of them")
    )]
    Heuristic,
    /// When no running beam can ever beat it: `"never"`
    #[cfg_attr(feature = "clap", value(name = "never", help = "When no running beam can ever beat it"))]
    Never,
}

/// What becomes of a prompt longer than the context. A choice of [`GenerationConfig`](crate::GenerationConfig).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LongPrompt {
    /// It is refused, with the numbers.
    #[default]
    Refuse,
    /// Its first `head` and its last `last` tokens are kept.
    Keep {
        /// Tokens kept at the beginning.
        head: usize,
        /// Tokens kept at the end; at least 1.
        last: usize,
    },
}

/// What happens when prompt and text fill the context. A choice of [`GenerationConfig`](crate::GenerationConfig).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// Generation ends.
    #[default]
    Stop,
    /// The window slides: its first `head` tokens and the last half of the context are computed again at new
    /// positions (GPT-2's positions are absolute, so the cache cannot move), and generation continues.
    Slide {
        /// Tokens kept at the beginning.
        head: usize,
    },
}

impl Serialize for EarlyStopping {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Full => serializer.serialize_bool(true),
            Self::Heuristic => serializer.serialize_bool(false),
            Self::Never => serializer.serialize_str("never"),
        }
    }
}

impl<'de> Deserialize<'de> for EarlyStopping {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Bool(true) => Ok(Self::Full),
            Value::Bool(false) => Ok(Self::Heuristic),
            Value::String(name) if name == "never" => Ok(Self::Never),
            other => {
                Err(serde::de::Error::custom(format!("expected true, false or \"never\", found {other}")))
            }
        }
    }
}
