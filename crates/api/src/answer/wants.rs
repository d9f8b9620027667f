//! The contents that a response is to have.

use std::fmt::Display;

use crate::ApiError;
use crate::body::Seed;
use crate::seen::ShownSites;

/// The shape of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Shape {
    /// That of `/v1/completions`.
    #[default]
    Completion,
    /// That of `/v1/chat/completions`.
    Chat,
    /// That of `/v1/activations`.
    Activations,
}

/// What every response reports.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    /// In seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// The seed of sampling, if texts are sampled.
    pub(crate) seed: Option<Seed>,
}

/// What a response is to hold.
#[derive(Debug, Default)]
pub(crate) struct Wants {
    pub(crate) shape: Shape,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) echo: bool,
    /// Whether log-probabilities are reported.
    pub(crate) logprobs: bool,
    /// Reported texts of each prompt.
    pub(crate) n: usize,
    /// Texts of each prompt, of which the most probable are reported.
    pub(crate) best_of: usize,
    /// Whether the texts of a prompt are all the same: one is made, and told as often as was asked for.
    pub(crate) is_copied: bool,
    pub(crate) stops: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) tokens_as_ids: bool,
    pub(crate) prompt_tokens_details: bool,
    /// What is shown of the inside of the model.
    pub(crate) shown: Option<Box<ShownSites>>,
    /// Whether the model is changed inside.
    pub(crate) is_steered: bool,
}

impl Wants {
    /// The refusal of numbers that are not finite, as `what` says: steering is to blame if there is any, else the model.
    pub(crate) fn overflowed(&self, what: impl Display) -> ApiError {
        match self.is_steered {
            true => {
                let message = format!("steering: {what} with it; use a smaller scale");
                ApiError::invalid(message).with_param("steering")
            }
            false => ApiError::failed(format!("{what}; verify the model's weights")),
        }
    }
}
