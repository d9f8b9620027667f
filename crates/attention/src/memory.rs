//! Cross-attention over precomputed keys and values.

use candle_core::{D, Result, Tensor};

use crate::{AttentionMask, AttentionMemory, MultiHeadAttention, Pass, SiteKind};

impl MultiHeadAttention {
    /// Computes the keys and values of encoder hidden states.
    ///
    /// # Shapes
    /// `memory` `(B, S, d_in)`.
    ///
    /// # Errors
    /// If the width does not match.
    pub fn memory(&self, memory: &Tensor) -> Result<AttentionMemory> {
        self.projection().memory(memory)
    }

    /// Computes cross-attention from `x` to all of `memory` and returns `residual + dropout(output)`.
    ///
    /// `rate` is the dropout rate. All rows of `x` share a memory with batch size 1. The pass's observer sees
    /// nothing, because the names of hook points refer to self-attention.
    ///
    /// # Shapes
    /// `x` `(B, T, d_in)`, `residual` `(B, T, d_out)`; returns `(B, T, d_out)`.
    ///
    /// # Errors
    /// If the shapes do not match, or `rate` is outside `[0, 1]`.
    pub fn add_over_memory(
        &self,
        residual: &Tensor,
        x: &Tensor,
        memory: &AttentionMemory,
        rate: f64,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let mut pass = pass.unobserved();
        self.projection().expect_input(x)?;
        let (batch, _, d_in) = x.dims3()?;
        let is_shared = memory.0.iter().all(|tensor| tensor.dims().first() == Some(&1));
        if batch > 1 && is_shared {
            // Merges the queries of all rows, so that the memory is not repeated for each row.
            let flat = residual.reshape((1, (), residual.dim(D::Minus1)?))?;
            let y = self.add_over_memory(&flat, &x.reshape((1, (), d_in))?, memory, rate, &mut pass)?;
            return y.reshape(residual.shape());
        }
        let context = self.context(x, Some(memory), &AttentionMask::Bidirectional, None, &mut pass)?;
        pass.add_to(residual, self.out_proj(), &context, SiteKind::AttnOut, rate)
    }
}
