//! The examples of a training: rows of tokens, and the targets at some of them.
//!
//! Windows of text predict at every token the one that follows; answers do so at their own tokens only; rows with labels
//! predict the label at the last token. A step learns from examples that follow each other in an endless order, so that a
//! training can be resumed anywhere, and several processes can share a step.

use candle_core::{Device, Result, Tensor};
use candle_gpt2::{Gpt2Model, Pass};

use crate::{Batch, Windows};

/// Some examples, which one pass computes. [`Trainer::evaluate`](crate::Trainer::evaluate) takes them.
pub trait Examples {
    /// What is to be predicted: ids of tokens, or numbers of labels.
    fn targets(&self) -> &[u32];

    /// What each prediction counts in the loss, greater than 0; `None` if each counts once.
    fn weights(&self) -> Option<&[f32]> {
        None
    }

    /// What all predictions count together.
    fn weight(&self) -> f64 {
        let sum = |weights: &[f32]| weights.iter().copied().map(f64::from).sum();
        self.weights().map_or(self.targets().len() as f64, sum)
    }

    /// What a model has at the hook points of a dictionary, read and written, `(N, C)` and `(N, D)`, where it is at hand and need not be
    /// computed; of a cross-layer transcoder block after block, `(L · N, C)` each.
    ///
    /// # Errors
    /// When there is no memory for them.
    fn activations(&self) -> Result<Option<[Tensor; 2]>> {
        Ok(None)
    }

    /// The hidden states that the targets are predicted from, in their order.
    ///
    /// # Shapes
    /// `(…, C)`, one for each target.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, a row is longer than the context, or the device has no room.
    fn hidden_states(&self, model: &Gpt2Model, device: &Device, pass: &mut Pass) -> Result<Tensor>;
}

/// All examples of a training, epoch after epoch. [`Trainer::step`](crate::Trainer::step) takes it; [`Windows`] are such data.
pub trait Data: Send + Sync {
    /// The examples `first..first + count` of all epochs, counted from the first of the first epoch.
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples>;

    /// The [weight](Examples::weight) of these examples.
    fn weight(&self, first: u64, count: usize) -> f64 {
        self.examples(first, count).weight()
    }

    /// How many tokens these examples have.
    fn tokens(&self, first: u64, count: usize) -> usize;
}

impl Examples for Batch {
    fn targets(&self) -> &[u32] {
        &self.targets
    }

    fn hidden_states(&self, model: &Gpt2Model, device: &Device, pass: &mut Pass) -> Result<Tensor> {
        let context = self.inputs.len() / self.rows.max(1);
        let ids = Tensor::from_slice(&self.inputs, (self.rows, context), device)?;
        let mut pass = pass.reborrow().from_position(self.first_position);
        model.forward_with(&ids, None, &mut pass) // (B, T, C)
    }
}

impl Data for Windows<'_> {
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples> {
        Box::new(self.batch(first, count))
    }

    fn weight(&self, first: u64, count: usize) -> f64 {
        self.tokens(first, count) as f64
    }

    fn tokens(&self, first: u64, count: usize) -> usize {
        count * self.context_at(first)
    }
}
