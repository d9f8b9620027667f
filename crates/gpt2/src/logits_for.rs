//! Selection of the tokens whose logits are computed.

use candle_core::{Result, Tensor};
use candle_gpt2_attention::Placement;

use crate::ModelError;

/// Token dimension of a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// Tokens for which logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsFor {
    /// All tokens, for scoring and training.
    EveryToken,
    /// Last token of each row, for generation; the head is computed at only one position per row.
    LastToken,
    /// `count` tokens of each row, for scoring in chunks that need less memory for logits.
    Tokens {
        /// Index of the first token.
        first: usize,
        /// Number of tokens.
        count: usize,
    },
}

impl LogitsFor {
    /// Selects the hidden states of these tokens: `(B, count, C)` from `(B, T, C)`.
    pub(crate) fn select(self, hidden_states: &Tensor, placement: &Placement) -> Result<Tensor> {
        let (_, tokens, _) = hidden_states.dims3()?;
        match (self, placement) {
            (Self::EveryToken, _) => Ok(hidden_states.clone()),
            (Self::LastToken, Placement::Rows(lengths)) => {
                let last = lengths.iter().map(|length| length.saturating_sub(1));
                tokens_of_rows(hidden_states, lengths.iter().copied(), last)?.unsqueeze(0)
            }
            (Self::LastToken, _) => hidden_states.narrow(TOKEN_DIM, tokens.saturating_sub(1), 1),
            (Self::Tokens { first, count }, _) if first.saturating_add(count) > tokens => {
                Err(ModelError::NoSuchLogits { first, count, tokens }.into())
            }
            (Self::Tokens { first, count }, _) => hidden_states.narrow(TOKEN_DIM, first, count),
        }
    }
}

/// Selects the token with index `tokens[r]` of each row: `(rows, C)` from `(1, T, C)`.
pub(crate) fn tokens_of_rows(
    hidden_states: &Tensor,
    lengths: impl Iterator<Item = usize>,
    tokens: impl Iterator<Item = usize>,
) -> Result<Tensor> {
    let (mut first, mut indices) = (0, Vec::new());
    for (length, token) in lengths.zip(tokens) {
        indices.push(u32::try_from(first + token).map_err(candle_core::Error::wrap)?);
        first += length;
    }
    let indices = Tensor::new(indices, hidden_states.device())?;
    hidden_states.squeeze(0)?.index_select(&indices, 0)
}
