//! Response options, which determine what a response contains.

use std::fmt::Display;

use crate::ApiError;
use crate::body::Seed;
use crate::recorded::ShownSites;

/// Shape of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Shape {
    /// Shape of `/v1/completions`.
    #[default]
    Completion,
    /// Shape of `/v1/chat/completions`.
    Chat,
    /// Shape of `/v1/activations`.
    Activations,
}

/// Fields common to every response.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    /// Creation time in seconds since the Unix epoch.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// Sampling seed, if completions are sampled.
    pub(crate) seed: Option<Seed>,
}

/// Response contents that the request asked for.
#[derive(Debug, Default)]
pub(crate) struct ResponseOptions {
    pub(crate) shape: Shape,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) echo: bool,
    /// Whether log-probabilities are reported.
    pub(crate) logprobs: bool,
    /// Number of completions returned for each prompt.
    pub(crate) n: usize,
    /// Number of candidates generated for each prompt; the most probable ones are returned.
    pub(crate) best_of: usize,
    /// Whether a prompt's completions are all identical; if so, one is generated and copied `n` times.
    pub(crate) is_copied: bool,
    pub(crate) stops: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) tokens_as_ids: bool,
    pub(crate) prompt_tokens_details: bool,
    /// Hook points whose activations are returned.
    pub(crate) shown: Option<Box<ShownSites>>,
    /// Whether steering changes the model.
    pub(crate) is_steered: bool,
}

impl ResponseOptions {
    /// Error for non-finite values described by `what`; blames steering if active, otherwise the model.
    pub(crate) fn overflowed(&self, what: impl Display) -> ApiError {
        match self.is_steered {
            true => {
                let message = format!("steering: {what}; use a smaller scale");
                ApiError::invalid(message).with_param("steering")
            }
            false => ApiError::failed(format!("{what}; verify the model's weights")),
        }
    }
}
