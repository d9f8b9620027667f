//! How to generate. Fields are named as in transformers' `generation_config.json`.

use crate::GenerationError;

/// Smallest temperature: below it, logits divided by it could leave the range of f32. The draw is greedy long before.
pub const MIN_TEMPERATURE: f64 = 1e-6;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The most probable token; the smallest id where several are.
    Greedy,
    /// A draw from the distribution, narrowed by the options in this order.
    Random {
        /// Divides the logits: below 1 the distribution becomes sharper, above 1 flatter. At least
        /// [`MIN_TEMPERATURE`].
        temperature: f64,
        /// Keeps the most probable tokens, this many and those equal to the last; `None` keeps all. At least 1.
        top_k: Option<usize>,
        /// Keeps the smallest set of most probable tokens whose probabilities add up to this; in (0, 1].
        top_p: f64,
        /// Seed of the generator (ChaCha8): the same seed gives the same tokens on every machine.
        seed: u64,
    },
}

/// What to generate and when to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub eos_token_id: Vec<u32>,
}

impl GenerationConfig {
    /// Checks every option.
    ///
    /// # Errors
    /// When one is out of its range.
    pub fn check(&self) -> Result<(), GenerationError> {
        let Sampling::Random { temperature, top_k, top_p, .. } = self.sampling else {
            return Ok(());
        };
        let refuse = |option, expected: &str, found: String| {
            Err(GenerationError::OptionOutOfRange { option, expected: expected.into(), found })
        };
        if !(temperature >= MIN_TEMPERATURE && temperature.is_finite()) {
            return refuse(
                "temperature",
                &format!("at least {MIN_TEMPERATURE} (0 is --greedy)"),
                temperature.to_string(),
            );
        }
        if top_k == Some(0) {
            return refuse("top_k", "at least 1 (the size of the vocabulary keeps every token)", "0".into());
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", "a number greater than 0 and at most 1", top_p.to_string());
        }
        Ok(())
    }
}
