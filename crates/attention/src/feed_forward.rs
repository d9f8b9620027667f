//! The position-wise feed-forward part of a block: `activation(x W₁ + b₁) W₂ + b₂`.

use candle_core::{Result, Tensor};
use gpt2_kernels::{Activation, Linear};

use crate::{AttentionError, Pass};

/// Two linear layers with an activation between them, applied to each token by itself.
#[derive(Debug, Clone)]
pub struct FeedForward {
    expand: Linear,
    contract: Linear,
    activation: Activation,
}

impl FeedForward {
    /// The part from its layers: `expand` `(width, inner)`, `contract` `(inner, width)`.
    ///
    /// # Errors
    /// When the layers do not fit to each other.
    pub fn new(expand: Linear, contract: Linear, activation: Activation) -> Result<Self> {
        if contract.in_features() != expand.out_features() {
            return Err(AttentionError::WidthMismatch {
                what: "the second feed-forward layer's input",
                expected: expand.out_features(),
                found: contract.in_features(),
            }
            .into());
        }
        Ok(Self { expand, contract, activation })
    }

    /// Runs both layers; `inner_dropout` is the dropout rate behind the activation, in training.
    ///
    /// Shows `mlp_activation`, `(B, T, inner)`, to the observer of the pass.
    ///
    /// # Shapes
    /// `x` `(B, T, width)`; returns the same.
    ///
    /// # Errors
    /// When the width of `x` differs.
    pub fn forward(&self, x: &Tensor, inner_dropout: f64, pass: &mut Pass) -> Result<Tensor> {
        let hidden = self.expand.forward_activated(x, self.activation)?; // (B, T, inner)
        let hidden = pass.show("mlp_activation", hidden)?;
        let hidden = pass.dropout(hidden, inner_dropout)?;
        self.contract.forward(&hidden)
    }

    /// Number of trainable values.
    pub fn parameter_count(&self) -> usize {
        self.expand.parameter_count() + self.contract.parameter_count()
    }
}
