//! Text generation calls.

use candle_gpt2_generation::Request;

use crate::Answer;

/// Call for the completions that one request body asks for.
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
    /// Maximum size of the activations stored for the answer, in bytes, with four bytes per value.
    pub activation_bytes: usize,
}
