//! Calls that generate text.

use candle_gpt2_generation::Request;

use crate::Answer;

/// Completions requested by a single body.
///
/// [`ServedModel::read`](crate::ServedModel::read) returns it inside [`Work::Texts`](crate::Work).
#[derive(Debug)]
pub struct Call {
    /// One request for each prompt.
    pub requests: Vec<Request>,
    /// Builds the response from the scheduler's events.
    pub answer: Answer,
    /// Whether the response is streamed.
    pub stream: bool,
    /// Maximum size in bytes of the activations kept for the answer, four bytes per value.
    pub activation_bytes: usize,
}
