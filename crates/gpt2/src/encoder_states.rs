//! Models with cross-attention that attend to the same states in every pass.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{check_interrupted, using};

use crate::{Block, CrossAttention, Gpt2LMHeadModel, check_encoder_states};

impl Gpt2LMHeadModel {
    /// Attends to these encoder hidden states in every pass without its own states.
    ///
    /// This covers generation, scoring and everything else that runs the model.
    /// [`Pass::attending_to`](crate::Pass::attending_to) overrides the states. Each block computes their keys
    /// and values once, in this call. Gradients do not flow into them.
    ///
    /// # Shapes
    /// `states` `(1, S, C)`, shared by all rows.
    ///
    /// # Errors
    /// If the model has no cross-attention, or the shape is wrong.
    pub fn with_encoder_states(mut self, states: &Tensor) -> Result<Self> {
        check_encoder_states(self.config(), states, 1)?;
        let device = self.device().clone();
        using(&device, || {
            let states = states.detach().to_device(&device)?.to_dtype(self.dtype())?;
            let blocks = self.transformer.blocks.iter_mut();
            blocks.filter_map(|block| block.cross_attention.as_mut()).try_for_each(|cross_attention| {
                check_interrupted()?;
                cross_attention.attend_to(&states)
            })
        })?;
        Ok(self)
    }

    /// Whether [`Gpt2LMHeadModel::with_encoder_states`] set states to attend to.
    pub fn has_encoder_states(&self) -> bool {
        let first = self.transformer.blocks.first().and_then(Block::cross_attention);
        first.is_some_and(CrossAttention::has_memory)
    }
}
