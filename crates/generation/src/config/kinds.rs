//! Enumerations and limits that the options use.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Smallest temperature for sampling.
///
/// Dividing logits by a smaller number could leave the range of f32. Sampling is effectively greedy
/// long before that. [`GenerationConfig::check`](crate::GenerationConfig::check) rejects smaller
/// values.
pub const MIN_TEMPERATURE: f64 = 1e-6;

/// Maximum number of beams, and maximum number of completions for one prompt.
///
/// This is far more than anyone reads. The memory for their keys and values depends on the model and is
/// checked separately. [`GenerationConfig::check`](crate::GenerationConfig::check) rejects larger
/// values.
pub const MAX_TEXTS: usize = 4096;

/// Condition that ends a beam search.
///
/// It applies once there is a finished completion for every beam.
/// [`GenerationConfig::early_stopping`](crate::GenerationConfig::early_stopping) selects the condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum EarlyStopping {
    /// Ends once there is a completion for every beam: `true`.
    #[cfg_attr(feature = "clap", value(name = "true", help = "When every beam has a completion"))]
    Full,
    /// Ends when no running beam, at its current length, beats the worst finished completion: `false`.
    #[default]
    #[cfg_attr(
        feature = "clap",
        value(
            name = "false",
            help = "When no running beam, at its current length, beats the worst completion"
        )
    )]
    Heuristic,
    /// Ends when no running beam can ever beat the worst finished completion: `"never"`.
    #[cfg_attr(
        feature = "clap",
        value(name = "never", help = "When no running beam can ever beat the worst completion")
    )]
    Never,
}

/// Policy for prompts that are longer than the context.
///
/// [`GenerationConfig::long_prompt`](crate::GenerationConfig::long_prompt) selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LongPrompt {
    /// Rejects the prompt; the error message gives both lengths.
    #[default]
    Refuse,
    /// Keeps the first `head` and the last `last` tokens.
    Keep {
        /// Number of tokens to keep at the beginning.
        head: usize,
        /// Number of tokens to keep at the end; at least 1.
        last: usize,
    },
}

/// Behavior when prompt and completion fill the context.
///
/// [`GenerationConfig::when_full`](crate::GenerationConfig::when_full) selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// Ends generation.
    #[default]
    Stop,
    /// Slides the window and continues.
    ///
    /// The first `head` tokens and the last half of the context are recomputed at new positions. The KV
    /// cache cannot be shifted because GPT-2's positions are absolute.
    Slide {
        /// Number of tokens to keep at the beginning.
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
