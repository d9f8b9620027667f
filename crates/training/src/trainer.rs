//! One step of training: gradients of a few batches, clipping, AdamW under the schedule.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gpt2::{Gpt2Config, Gpt2LMHead, Gpt2Model, Pass, expected_parameters};
use gpt2_kernels::{AdamWStep, Before, Interrupt, head_loss, without_gradients};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::streams::Stream;
use crate::windows::Batch;
use crate::{AdamW, Lora, Parameters, Schedule, TrainingError, Windows};

/// The numbers of a training. Two trainings with the same numbers, data and start have the same result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// Steps of the optimizer.
    pub steps: u64,
    /// Windows in one batch.
    pub batch_size: usize,
    /// Batches whose gradients are averaged into one step.
    pub accumulate: usize,
    /// Tokens in a window.
    pub context: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// How it decays.
    pub schedule: Schedule,
    /// Share of the highest learning rate that the last step has.
    pub final_share: f64,
    /// Steps over which the learning rate rises.
    pub warmup_steps: u64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Largest norm of the gradient; `None` does not clip.
    pub grad_clip: Option<f64>,
    /// Decay rate of the gradient's running mean.
    pub beta_1: f64,
    /// Decay rate of the squared gradient's running mean.
    pub beta_2: f64,
    /// Added to the square root that divides a step.
    pub epsilon: f64,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 8,
            accumulate: 1,
            context: 256,
            learning_rate: 6e-4,
            schedule: Schedule::Cosine,
            final_share: 0.1,
            warmup_steps: 0,
            weight_decay: 0.1,
            grad_clip: Some(1.0),
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            seed: 0,
        }
    }
}

impl Hyperparameters {
    /// Checks every number.
    ///
    /// # Errors
    /// When one is out of its range.
    pub fn check(&self, config: &Gpt2Config) -> Result<(), TrainingError> {
        let refuse = |option, expected: &str, found: &dyn std::fmt::Display| {
            Err(TrainingError::OptionOutOfRange {
                option,
                expected: expected.into(),
                found: found.to_string(),
            })
        };
        for (option, count) in [("batch_size", self.batch_size), ("accumulate", self.accumulate)] {
            if count == 0 || count > 1 << 20 {
                return refuse(option, "a number from 1 to 1048576", &count);
            }
        }
        if self.steps == 0 {
            return refuse("steps", "at least 1", &self.steps);
        }
        if self.context == 0 || self.context > config.n_positions {
            let expected = format!("from 1 to the model's context of {}", config.n_positions);
            return refuse("context", &expected, &self.context);
        }
        if self.warmup_steps > self.steps {
            return refuse("warmup_steps", "at most the number of steps", &self.warmup_steps);
        }
        let is_positive = |number: f64| number > 0.0 && number.is_finite();
        if !is_positive(self.learning_rate) {
            return refuse("lr", "a number greater than 0", &self.learning_rate);
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return refuse("weight_decay", "a number of at least 0", &self.weight_decay);
        }
        if let Some(clip) = self.grad_clip
            && !is_positive(clip)
        {
            return refuse("grad_clip", "a number greater than 0", &clip);
        }
        let shares = [("beta_1", self.beta_1), ("beta_2", self.beta_2)];
        if let Some((option, found)) = shares.into_iter().find(|(_, beta)| !(0.0..1.0).contains(beta)) {
            return refuse(option, "a number from 0 to below 1", &found);
        }
        if !(0.0..=1.0).contains(&self.final_share) {
            return refuse("final_share", "a number from 0 to 1", &self.final_share);
        }
        Ok(())
    }

    /// The numbers that differ in another training: name, value here, value there.
    pub(crate) fn differing(&self, other: &Self) -> Vec<(String, Value, Value)> {
        // Numbers as JSON are exact, and its keys are the names of the fields.
        let keys = |numbers: &Self| match serde_json::to_value(numbers) {
            Ok(Value::Object(keys)) => keys,
            _ => serde_json::Map::new(),
        };
        let mut there = keys(other);
        let pairs = keys(self).into_iter().map(|(name, here)| {
            let there = there.remove(&name).unwrap_or_default();
            (name, here, there)
        });
        pairs.filter(|(_, here, there)| here != there).collect()
    }

    /// Tokens that one step sees.
    pub fn tokens_per_step(&self) -> u64 {
        (self.batch_size * self.accumulate * self.context) as u64
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean loss over its tokens, in nats.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate.
    pub learning_rate: f64,
}

/// A model in training.
pub struct Trainer {
    config: Gpt2Config,
    numbers: Hyperparameters,
    parameters: Parameters,
    weights: Weights,
    optimizer: AdamW,
    /// Those of the last step, whose memory the next one's take.
    gradients: Vec<Tensor>,
    recomputes: bool,
    interrupt: Option<Interrupt>,
    device: Device,
}

/// What the model computes with.
enum Weights {
    /// The trained parameters themselves.
    Trained(Gpt2Model),
    /// Fixed weights and the adapters that are trained; the model is made anew for every pass.
    Adapted(Lora),
}

impl Trainer {
    /// A training of `parameters`.
    ///
    /// # Errors
    /// When the configuration or a number is out of its range, or the device has no room.
    pub fn new(
        config: &Gpt2Config,
        parameters: Parameters,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        config.check()?;
        let model = Gpt2Model::load(config, &parameters.tracked(&parameters.device()))?;
        Self::with_weights(config, parameters, Weights::Trained(model), numbers)
    }

    /// A training of the adapters of `lora`.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_adapters(
        config: &Gpt2Config,
        lora: Lora,
        adapters: Parameters,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        Self::with_weights(config, adapters, Weights::Adapted(lora), numbers)
    }

    fn with_weights(
        config: &Gpt2Config,
        parameters: Parameters,
        weights: Weights,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        config.check()?;
        numbers.check(config)?;
        let (optimizer, device) = (AdamW::new(&parameters)?, parameters.device());
        Ok(Self {
            config: config.clone(),
            numbers,
            parameters,
            weights,
            optimizer,
            gradients: Vec::new(),
            recomputes: false,
            interrupt: None,
            device,
        })
    }

    /// The same training; blocks then keep their inputs only, and are computed again for their gradients, which stay the same:
    /// less memory for a third more time.
    pub fn recomputing(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// The same training; what it computes ends with [`TrainingError::Interrupted`] once `interrupt` says so, which is asked in
    /// each operation on the thread that computes, and should go on saying what it says once.
    pub fn interrupted_by(self, interrupt: Interrupt) -> Self {
        Self { interrupt: Some(interrupt), ..self }
    }

    /// Whether what it computes is to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|is_raised| is_raised())
    }

    /// Computes what may be interrupted.
    fn interruptible<T>(&self, compute: impl FnOnce() -> candle_core::Result<T>) -> Result<T, TrainingError> {
        let computed = match &self.interrupt {
            Some(interrupt) => gpt2_kernels::interruptible(Arc::clone(interrupt), compute),
            None => compute(),
        };
        computed.map_err(|error| match error {
            _ if self.is_interrupted() => TrainingError::Interrupted { state: None },
            error => error.into(),
        })
    }

    /// Sets parameters and running means to saved ones, `(parameter, mean, square)` in the order of the parameters.
    pub(crate) fn restore(
        &mut self,
        saved: &[(Tensor, Tensor, Tensor)],
        steps_done: u64,
    ) -> Result<(), TrainingError> {
        let variables = self.parameters.iter().zip(self.optimizer.means());
        for (((_, parameter), (mean, square)), saved) in variables.zip(saved) {
            parameter.set(&saved.0)?;
            mean.set(&saved.1)?;
            square.set(&saved.2)?;
        }
        self.optimizer.set_steps_done(steps_done);
        Ok(())
    }

    /// Takes the next step on the next windows.
    ///
    /// # Errors
    /// When loss or gradient is not a number, or it is interrupted (the parameters are then as they were), or the device has no
    /// room.
    pub fn step(&mut self, windows: &Windows) -> Result<StepReport, TrainingError> {
        let Hyperparameters { batch_size, accumulate, .. } = self.numbers;
        let first_batch = self.optimizer.steps_done() * accumulate as u64;
        let mut before = match std::mem::take(&mut self.gradients) {
            none if none.is_empty() => Before::Nothing,
            gradients => Before::Memory(gradients),
        };
        let mut loss = 0.0;
        for index in first_batch..first_batch + accumulate as u64 {
            let batch = windows.batch(index * batch_size as u64, batch_size);
            let mut generator = Stream::Dropout(index).generator(self.numbers.seed);
            let mut pass = Pass::training(&mut generator).recomputing(self.recomputes);
            let (batch_loss, gradients) = self.add_gradients(&batch, &mut pass, accumulate, before)?;
            loss += batch_loss / accumulate as f64;
            before = Before::Gradients(gradients);
        }
        if let Before::Gradients(gradients) = before {
            self.gradients = gradients;
        }
        let step = self.optimizer.steps_done() + 1;
        if !loss.is_finite() {
            return Err(TrainingError::NotFinite { step, what: "loss", last_checkpoint: None });
        }
        let gradients = std::mem::take(&mut self.gradients);
        let report = self.apply(&gradients, loss);
        self.gradients = gradients;
        report
    }

    /// The loss of a batch, and the gradient of every parameter of `loss / divisor`, in the parameters' order.
    ///
    /// # Errors
    /// When a parameter gets no gradient, the device has no room, or it is interrupted.
    pub fn gradients(
        &self,
        batch: &Batch,
        pass: &mut Pass,
        divisor: usize,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        self.add_gradients(batch, pass, divisor, Before::Nothing)
    }

    fn add_gradients(
        &self,
        batch: &Batch,
        pass: &mut Pass,
        divisor: usize,
        before: Before,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        let variables: Vec<&Tensor> =
            self.parameters.iter().map(|(_, variable)| variable.as_tensor()).collect();
        let loss = || {
            let (hidden, head) = self.hidden_states(batch, pass)?;
            head_loss(&hidden, &head, &batch.targets)
        };
        let factor = 1.0 / divisor as f64;
        let (loss, gradients) =
            self.interruptible(|| gpt2_kernels::gradients(&variables, before, factor, loss))?;
        let named = self.parameters.iter().zip(gradients).map(|((name, _), gradient)| {
            gradient.ok_or_else(|| TrainingError::NoGradient { name: name.to_owned() })
        });
        Ok((loss, named.collect::<Result<_, _>>()?))
    }

    /// Takes a step with these gradients.
    ///
    /// # Errors
    /// When their norm is not a number.
    pub fn apply(&mut self, gradients: &[Tensor], loss: f64) -> Result<StepReport, TrainingError> {
        let numbers = &self.numbers;
        let step = self.optimizer.steps_done() + 1;
        let share = numbers.schedule.share(step, numbers.warmup_steps, numbers.steps, numbers.final_share);
        let learning_rate = numbers.learning_rate * share;
        let adamw = AdamWStep {
            learning_rate,
            beta_1: numbers.beta_1,
            beta_2: numbers.beta_2,
            epsilon: numbers.epsilon,
            weight_decay: numbers.weight_decay,
            step,
            gradient_factor: 1.0,
        };
        let gradient_norm = self.optimizer.step(&self.parameters, gradients, numbers.grad_clip, adamw)?;
        Ok(StepReport { step, loss, gradient_norm, learning_rate })
    }

    /// The mean loss of a batch without dropout, and without gradients.
    ///
    /// # Errors
    /// When the device has no room, or it is interrupted.
    pub fn evaluate(&self, batch: &Batch) -> Result<f64, TrainingError> {
        let loss = self.interruptible(|| {
            without_gradients(|| {
                let (hidden, head) = self.hidden_states(batch, &mut Pass::inference())?;
                head_loss(&hidden, &head, &batch.targets)
            })
        })?;
        Ok(loss.to_dtype(DType::F64)?.to_scalar::<f64>()?)
    }

    /// The hidden states after the final norm, `(B, T, C)`, and the output head, `(V, C)`.
    fn hidden_states(&self, batch: &Batch, pass: &mut Pass) -> candle_core::Result<(Tensor, Tensor)> {
        let context = batch.inputs.len() / batch.rows.max(1);
        let ids = Tensor::from_slice(&batch.inputs, (batch.rows, context), &self.device)?;
        let head = self.parameter(match self.config.tie_word_embeddings {
            true => "wte.weight",
            false => "lm_head.weight",
        })?;
        let hidden = match &self.weights {
            Weights::Trained(model) => model.forward(&ids, None, pass)?,
            Weights::Adapted(lora) => {
                let model = Gpt2Model::load(&self.config, &lora.source(&self.parameters))?;
                model.forward(&ids, None, pass)?
            }
        };
        Ok((hidden, head))
    }

    /// A parameter of the model as it is now, adapters added, by its name in the model.
    ///
    /// # Errors
    /// When the model has none of this name.
    pub fn parameter(&self, name: &str) -> candle_core::Result<Tensor> {
        let found = match &self.weights {
            Weights::Trained(_) => self.parameters.get(name).map(|variable| variable.as_tensor().clone()),
            Weights::Adapted(lora) => lora.merged_parameter(name, &self.parameters)?,
        };
        found.ok_or_else(|| candle_core::Error::Msg(format!("the model has no parameter `{name}`")))
    }

    /// The model as it is now, for inference. It shares the weights, and changes with them where they are trained whole.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn model(&self) -> candle_core::Result<Gpt2LMHead> {
        let named = expected_parameters(&self.config).into_iter().map(|parameter| {
            let tensor = self.parameter(&parameter.name)?.detach();
            Ok((parameter.name, tensor))
        });
        let tensors = named.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &self.device);
        Gpt2LMHead::load(&self.config, &vb)
    }

    /// The adapters' configuration and fixed weights, where adapters are trained.
    pub fn lora(&self) -> Option<&Lora> {
        match &self.weights {
            Weights::Trained(_) => None,
            Weights::Adapted(lora) => Some(lora),
        }
    }

    /// The configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The numbers of the training.
    pub fn numbers(&self) -> &Hyperparameters {
        &self.numbers
    }

    /// What is trained, as it is now: the parameters of the model, or the adapters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimizer, as it is now.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Steps taken so far.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.steps_done()
    }
}
