//! Published results for comparison.

use candle_gpt2::Gpt2Config;
use serde::Serialize;

/// Published GPT-2 model sizes.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_evaluation::Size;
///
/// assert_eq!(Size::of(&Gpt2Config::preset("gpt2-large")?), Some(Size::Large));
/// assert_eq!(Size::Large.name(), "gpt2-large");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Size {
    /// 124M: `gpt2`.
    #[serde(rename = "gpt2")]
    Small,
    /// 355M: `gpt2-medium`.
    #[serde(rename = "gpt2-medium")]
    Medium,
    /// 774M: `gpt2-large`.
    #[serde(rename = "gpt2-large")]
    Large,
    /// 1558M: `gpt2-xl`.
    #[serde(rename = "gpt2-xl")]
    Xl,
}

impl Size {
    /// Returns the size whose layers, hidden size and vocabulary match the configuration.
    pub fn of(config: &Gpt2Config) -> Option<Self> {
        let shape = (config.n_layer, config.n_embd, config.vocab_size);
        [
            (Self::Small, (12, 768)),
            (Self::Medium, (24, 1024)),
            (Self::Large, (36, 1280)),
            (Self::Xl, (48, 1600)),
        ]
        .into_iter()
        .find(|(_, (n_layer, n_embd))| shape == (*n_layer, *n_embd, 50257))
        .map(|(size, _)| size)
    }

    /// Returns the name of the published model.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "gpt2",
            Self::Medium => "gpt2-medium",
            Self::Large => "gpt2-large",
            Self::Xl => "gpt2-xl",
        }
    }
}

/// A published result.
///
/// A field of [`Protocol`](crate::Protocol).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Published {
    /// Model size.
    pub model: Size,
    /// Name of the metric.
    pub metric: &'static str,
    /// Value of the metric; accuracies are fractions between 0 and 1.
    pub value: f64,
    /// Source of the result.
    pub source: &'static str,
    /// Protocol of the measurement, or `not published`.
    pub protocol: &'static str,
    /// Whether `protocol` is the protocol that lists this result, so only rounding may differ.
    pub exact: bool,
}
