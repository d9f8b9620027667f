//! The loss on text that is not trained on.
//!
//! The tokens are cut into windows side by side; every token but the first is predicted once, from those before it in its
//! window. The last window may be shorter.

use crate::windows::{Batch, Tokens};
use crate::{Trainer, TrainingError};

/// Text to evaluate on.
pub struct HeldOut<'a> {
    tokens: &'a dyn Tokens,
    /// Characters of the text, for losses that do not depend on the tokenizer.
    characters: usize,
}

/// A loss on held-out text, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOutLoss {
    /// For each token.
    pub per_token: f64,
    /// For each character.
    pub per_character: f64,
}

impl<'a> HeldOut<'a> {
    /// The tokens of a text of `characters` characters.
    ///
    /// # Errors
    /// When there are fewer than two tokens: nothing could be predicted.
    pub fn new(tokens: &'a dyn Tokens, characters: usize) -> Result<Self, TrainingError> {
        if tokens.len() < 2 {
            return Err(TrainingError::TooFewTokens { part: "held-out", found: tokens.len(), needed: 2 });
        }
        Ok(Self { tokens, characters })
    }

    /// The loss of the model as it is now.
    ///
    /// # Errors
    /// When the device has no room, or the training is interrupted.
    pub fn loss(&self, trainer: &Trainer) -> Result<HeldOutLoss, TrainingError> {
        let (context, batch_size) = (trainer.numbers().context, trainer.numbers().batch_size);
        let predicted = self.tokens.len() - 1;
        let whole = predicted / context;
        let mut total = 0.0;
        for first in (0..whole).step_by(batch_size) {
            let rows = batch_size.min(whole - first);
            total += self.total(trainer, first * context, rows, context)?;
        }
        let rest = predicted - whole * context;
        if rest > 0 {
            total += self.total(trainer, whole * context, 1, rest)?;
        }
        Ok(HeldOutLoss {
            per_token: total / predicted as f64,
            per_character: total / self.characters.max(1) as f64,
        })
    }

    /// The summed loss of `rows` windows side by side.
    fn total(
        &self,
        trainer: &Trainer,
        start: usize,
        rows: usize,
        context: usize,
    ) -> Result<f64, TrainingError> {
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), rows };
        self.tokens.read(start, rows * context, &mut batch.inputs);
        self.tokens.read(start + 1, rows * context, &mut batch.targets);
        Ok(trainer.evaluate(&batch)? * (rows * context) as f64)
    }
}
