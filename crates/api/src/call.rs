//! Texts in the making.

use candle_gpt2_generation::Request;

use crate::Answer;

/// Texts that a body asks for.
///
/// Given by [`ServedModel::read`](crate::ServedModel::read), as [`Work::Texts`](crate::Work).
#[derive(Debug)]
pub struct Call {
    /// One for each prompt.
    pub requests: Vec<Request>,
    /// Puts together what happens to them.
    pub answer: Answer,
    /// Whether it is sent piece by piece.
    pub stream: bool,
    /// Bytes of the activations that are kept for the answer, at most: four for each number.
    pub activation_bytes: usize,
}
