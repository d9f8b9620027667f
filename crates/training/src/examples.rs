//! Training examples: rows of tokens with targets.
//!
//! In windows of text, every token has a target: the next token. Answers have targets only at their own tokens.
//! Rows with labels have one target, at the last token. Steps take consecutive examples from an endless
//! sequence, so a run can be resumed anywhere, and several processes can share a step.

use candle_core::{Device, Result, Tensor};
use candle_gpt2::{Gpt2Model, Pass};

use crate::{Batch, Windows};

/// Examples that are computed in one pass, used by [`Trainer::evaluate`](crate::Trainer::evaluate).
pub trait Examples {
    /// Targets for the predictions: token IDs or label indices.
    fn targets(&self) -> &[u32];

    /// Weight of each prediction in the loss, greater than 0; `None` means equal weights.
    fn weights(&self) -> Option<&[f32]> {
        None
    }

    /// Total weight of all predictions.
    fn weight(&self) -> f64 {
        let sum = |weights: &[f32]| weights.iter().copied().map(f64::from).sum();
        self.weights().map_or(self.targets().len() as f64, sum)
    }

    /// Returns precomputed activations at the input and output hook points of a dictionary, if available.
    ///
    /// The shapes are `(N, C)` and `(N, D)`. For a cross-layer transcoder, the values of all blocks are
    /// concatenated, `(L · N, C)` each.
    ///
    /// # Errors
    /// If allocation fails.
    fn activations(&self) -> Result<Option<[Tensor; 2]>> {
        Ok(None)
    }

    /// Computes the hidden states that predict the targets, in the order of the targets.
    ///
    /// # Shapes
    /// `(…, C)`, one for each target.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a row exceeds the context length, or allocation fails on the
    /// device.
    fn hidden_states(&self, model: &Gpt2Model, device: &Device, pass: &mut Pass) -> Result<Tensor>;
}

/// All training examples, epoch after epoch.
///
/// [`Trainer::step`](crate::Trainer::step) uses it, and [`Windows`] implements it.
pub trait Data: Send + Sync {
    /// Returns the examples `first..first + count`, numbered consecutively over all epochs.
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples>;

    /// Returns the total [weight](Examples::weight) of these examples.
    fn weight(&self, first: u64, count: usize) -> f64 {
        self.examples(first, count).weight()
    }

    /// Returns the number of tokens in these examples.
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
