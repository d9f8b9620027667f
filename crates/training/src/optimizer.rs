//! AdamW over named parameters: decay for matrices, none for biases and norms, and running means that can be saved.

use candle_core::{Result, Tensor, Var};
use candle_gpt2_kernels::{AdamWStep, adamw_step, gradient_norm};

use crate::{Parameters, TrainingError};

/// Added to the norm that the gradient is divided by when it is clipped, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// The optimizer's state: two running means for each parameter, in the parameters' order.
/// The [`Trainer`](crate::Trainer) takes its steps with it.
#[derive(Debug)]
pub struct AdamW {
    means: Vec<(Var, Var)>,
    steps_done: u64,
}

/// Whether a parameter of this shape decays: embeddings and the weights of linear layers do, biases and norms do not.
///
/// ```
/// use candle_gpt2_training::decays;
///
/// assert!(decays(&[768, 2304]));
/// assert!(!decays(&[2304]));
/// ```
pub fn decays(shape: &[usize]) -> bool {
    shape.len() >= 2
}

impl AdamW {
    /// A fresh state.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(parameters: &Parameters) -> Result<Self> {
        let zeros = |variable: &Var| Var::from_tensor(&variable.zeros_like()?);
        let means = parameters.iter().map(|(_, variable)| Ok((zeros(variable)?, zeros(variable)?)));
        Ok(Self { means: means.collect::<Result<_>>()?, steps_done: 0 })
    }

    /// Says how many steps the running means are from.
    pub(crate) fn set_steps_done(&mut self, steps_done: u64) {
        self.steps_done = steps_done;
    }

    /// Steps taken so far.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// The running means of gradient and squared gradient, in the order of the parameters.
    pub fn means(&self) -> impl Iterator<Item = (&Var, &Var)> {
        self.means.iter().map(|(mean, square)| (mean, square))
    }

    /// Clips the gradients to a norm of `clip` over all of them, and takes one step; `numbers.step` and
    /// `numbers.gradient_factor` are set here. `gradients` are in the order of the parameters. Returns the norm before
    /// clipping.
    ///
    /// # Errors
    /// When the norm is not a number: the parameters are then as they were.
    pub fn step(
        &mut self,
        parameters: &Parameters,
        gradients: &[Tensor],
        clip: Option<f64>,
        numbers: AdamWStep,
    ) -> std::result::Result<f64, TrainingError> {
        let norm = gradient_norm(gradients)?;
        let step = self.steps_done + 1;
        if !norm.is_finite() {
            return Err(TrainingError::NotFinite { step, what: "gradient", last_checkpoint: None });
        }
        let gradient_factor = clip.map_or(1.0, |clip| (clip / (norm + CLIP_EPSILON)).min(1.0));
        for (((_, parameter), gradient), (mean, square)) in parameters.iter().zip(gradients).zip(&self.means)
        {
            let weight_decay = if decays(parameter.dims()) { numbers.weight_decay } else { 0.0 };
            let numbers = AdamWStep { step, gradient_factor, weight_decay, ..numbers };
            adamw_step(parameter, gradient, mean, square, &numbers)?;
        }
        self.steps_done = step;
        Ok(norm)
    }
}
