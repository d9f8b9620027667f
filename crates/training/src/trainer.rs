//! Training step: gradients of the step's batches, clipping, and an optimizer update.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{ByOutput, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, HeadKind, Pass, expected_parameters};
use candle_gpt2_arithmetic::AdamWStep;
use candle_gpt2_kernels::{InitialGradients, Interrupt, Linear, head_loss, without_gradients};
use candle_gpt2_weights::WrittenDType;
use candle_nn::VarBuilder;
use candle_nn::ops::log_softmax;

use crate::dictionary::Learner;
use crate::parameters::Tracking;
use crate::streams::Stream;
use crate::{
    Data, DictionaryMetrics, Examples, Hyperparameters, Lora, Optimizer, OptimizerKind, Parameters, Share,
    TrainingError,
};

/// Report of a step, returned by [`Trainer::step`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Mean loss over the predictions of the step, in nats.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate for the step.
    pub learning_rate: f64,
}

/// Model in training, with optimizer and schedule.
#[doc(alias("AdamW", "Muon", "train"))]
pub struct Trainer {
    config: Gpt2Config,
    numbers: Hyperparameters,
    parameters: Parameters,
    weights: Weights,
    optimizer: Optimizer,
    /// Gradients of the last step; the next step reuses their memory.
    gradients: Vec<Tensor>,
    recomputes: bool,
    interrupt: Option<Interrupt>,
    device: Device,
}

/// Weights that the model uses.
enum Weights {
    /// Trained parameters, and parameters that remain fixed.
    Trained { model: Box<Gpt2Model>, fixed: HashMap<String, Tensor> },
    /// Fixed weights and trained adapters; the model is rebuilt for every pass.
    Adapted(Lora),
    /// Fixed model, and a dictionary that is trained on its activations at a hook point.
    Explained(Box<Learner>),
}

impl Trainer {
    /// Creates a trainer for all parameters of a model.
    ///
    /// # Errors
    /// If the configuration or a hyperparameter is out of range, or allocation fails on the device.
    pub fn new(
        config: &Gpt2Config,
        parameters: Parameters,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        Self::with_fixed(config, parameters, HashMap::new(), numbers)
    }

    /// Creates a trainer for a subset of a model's parameters.
    ///
    /// The other parameters are `fixed` and need no gradients.
    ///
    /// # Errors
    /// If a parameter is in neither `parameters` nor `fixed`, and in the cases of [`Trainer::new`].
    pub fn with_fixed(
        config: &Gpt2Config,
        parameters: Parameters,
        fixed: HashMap<String, Tensor>,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        config.check()?;
        let vb = parameters.source_with_fixed(&fixed, &parameters.device(), Tracking::Tracked);
        let weights = Weights::Trained { model: Gpt2Model::load(config, vb)?.into(), fixed };
        Self::with_weights(config, parameters, weights, numbers)
    }

    /// Creates a trainer for the adapters of `lora`.
    ///
    /// # Errors
    /// See [`Trainer::new`].
    pub fn with_adapters(
        config: &Gpt2Config,
        lora: Lora,
        adapters: Parameters,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        Self::with_weights(config, adapters, Weights::Adapted(lora), numbers)
    }

    /// Creates a trainer for a dictionary of `model`'s activations.
    ///
    /// `numbers.dictionary` names the hook points, and `name` is the name of the model. `prepends_bos` is
    /// true if every sequence of the data starts with the BOS token.
    ///
    /// # Errors
    /// If a hyperparameter is out of range, or the dictionary is missing or does not fit the model.
    pub fn with_dictionary(
        (model, name): (Gpt2LMHeadModel, String),
        prepends_bos: bool,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        let Some(dictionary) = &numbers.dictionary else {
            return Err(TrainingError::Call {
                what: "`task` dictionary needs `dictionary` \
                hyperparameters"
                    .into(),
            });
        };
        let config = model.config().clone();
        numbers.check(&config)?;
        let parameters = Learner::parameters(dictionary, &config, numbers.seed)?;
        let learner = Learner::new((model, name), prepends_bos, dictionary)?;
        Self::with_weights(&config, parameters, Weights::Explained(learner.into()), numbers)
    }

    fn with_weights(
        config: &Gpt2Config,
        parameters: Parameters,
        weights: Weights,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        config.check()?;
        numbers.check(config)?;
        if numbers.optimizer == OptimizerKind::Muon && !matches!(weights, Weights::Trained { .. }) {
            let what =
                "`optimizer` muon trains the matrices of the model; adapters and dictionaries need adamw";
            return Err(TrainingError::Call { what: what.into() });
        }
        let (optimizer, device) = (Optimizer::new(numbers.optimizer, &parameters)?, parameters.device());
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

    /// Sets whether blocks store only their inputs and are recomputed for the backward pass.
    ///
    /// The gradients are identical. Recomputing saves memory and takes a third more time.
    pub fn recomputing(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// Aborts computations with [`TrainingError::Interrupted`] once `interrupt` returns true.
    ///
    /// Every operation calls `interrupt` on the computing thread. Once it returns true, it should keep
    /// returning true.
    pub fn interrupted_by(self, interrupt: Interrupt) -> Self {
        Self { interrupt: Some(interrupt), ..self }
    }

    /// Whether computations should stop.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|is_raised| is_raised())
    }

    /// Runs an interruptible computation.
    fn interruptible<T>(&self, compute: impl FnOnce() -> candle_core::Result<T>) -> Result<T, TrainingError> {
        interruptible(self.interrupt.as_ref(), compute)
    }

    /// Restores parameters and running means from `(parameter, mean, square)`, in parameter order.
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

    /// Performs the next step on the next examples of `data`.
    ///
    /// # Errors
    /// If the loss or gradient is not finite, or the step is interrupted; the parameters are then unchanged.
    /// If allocation fails on the device.
    pub fn step(&mut self, data: &dyn Data) -> Result<StepReport, TrainingError> {
        let (loss, gradients) = self.share_of_step(data, Share::WHOLE)?;
        let report = self.apply(&gradients, loss);
        self.gradients = gradients;
        report
    }

    /// Computes a share's contribution to the loss and gradients of the next step.
    ///
    /// The gradients are in the order of the parameters. Summing over all shares gives the loss and gradients
    /// of the step. The step's loss is the mean over all its predictions.
    ///
    /// # Errors
    /// See [`Trainer::gradients`].
    pub fn share_of_step(
        &mut self,
        data: &dyn Data,
        share: Share,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        if let Weights::Explained(_) = self.weights {
            return self.dictionary_gradients(data, share);
        }
        let Hyperparameters { accumulate, seed, .. } = self.numbers;
        let batch_size = self.numbers.batch_size_at(self.steps_done());
        let passes = self.steps_done() * accumulate as u64;
        let (first, count) = self.examples_of_step();
        let whole = data.weight(first, count);
        let mut before = match std::mem::take(&mut self.gradients) {
            none if none.is_empty() => InitialGradients::Nothing,
            gradients => InitialGradients::Memory(gradients),
        };
        let mut loss = 0.0;
        for index in passes..passes + accumulate as u64 {
            let rows = share.of(batch_size);
            if rows.is_empty() {
                continue;
            }
            let batch = first + (index - passes) * batch_size as u64;
            let examples = data.examples(batch + rows.start as u64, rows.len());
            let mut generator =
                Stream::Dropout(index * share.count as u64 + share.index as u64).generator(seed);
            let mut pass = Pass::training(&mut generator).recomputing(self.recomputes);
            let divisor = whole / examples.weight();
            let (batch_loss, gradients) = self.add_gradients(&*examples, &mut pass, divisor, before)?;
            loss += batch_loss / divisor;
            before = InitialGradients::Gradients(gradients);
        }
        match before {
            InitialGradients::Gradients(gradients) => Ok((loss, gradients)),
            InitialGradients::Nothing | InitialGradients::Memory(_) => {
                let zeros = self.parameters.iter().map(|(_, variable)| variable.zeros_like());
                Ok((loss, zeros.collect::<candle_core::Result<_>>()?))
            }
        }
    }

    /// Computes a dictionary's loss for the next step, as the mean over batches, and its gradients.
    fn dictionary_gradients(
        &mut self,
        data: &dyn Data,
        share: Share,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        if share != Share::WHOLE {
            let what = "a dictionary must be trained by one process, because latents are selected over the whole \
                 batch";
            return Err(TrainingError::Call { what: what.into() });
        }
        let (first, count) = self.examples_of_step();
        let batch_size = self.numbers.batch_size_at(self.steps_done());
        let Self { weights, parameters, interrupt, .. } = self;
        let Weights::Explained(learner) = weights else {
            return Err(TrainingError::Call { what: "this trainer does not train a dictionary".into() });
        };
        interruptible(interrupt.as_ref(), || {
            learner.forget();
            let batches = (first..first + count as u64).step_by(batch_size);
            let share = 1.0 / batches.clone().count() as f64;
            let (mut loss, mut sums) = (0.0, Vec::new());
            for batch in batches {
                let examples = data.examples(batch, batch_size);
                let (batch_loss, gradients) = learner.gradients(&*examples, parameters)?;
                loss += share * batch_loss;
                sums = match sums.is_empty() && share == 1.0 {
                    true => gradients,
                    false => {
                        let scaled = gradients.into_iter().map(|gradient| gradient * share);
                        let scaled = scaled.collect::<candle_core::Result<Vec<Tensor>>>()?;
                        match sums.is_empty() {
                            true => scaled,
                            false => sums
                                .iter()
                                .zip(&scaled)
                                .map(|(sum, more)| sum + more)
                                .collect::<Result<_, _>>()?,
                        }
                    }
                };
            }
            Ok((loss, sums))
        })
    }

    /// Returns the number of tokens in the next step.
    pub fn tokens_of_step(&self, data: &dyn Data) -> usize {
        let (first, count) = self.examples_of_step();
        data.tokens(first, count)
    }

    /// Returns the index of the next step's first example, and its number of examples.
    fn examples_of_step(&self) -> (u64, usize) {
        let steps_done = self.steps_done();
        let count = self.numbers.batch_size_at(steps_done) * self.numbers.accumulate;
        (self.numbers.examples_before(steps_done), count)
    }

    /// Lets the next step reuse the memory of these gradients, if they have no other owners.
    pub fn use_memory_of(&mut self, gradients: Vec<Tensor>) {
        self.gradients = gradients;
    }

    /// Computes the loss of the examples and the gradients of `loss / divisor`, in parameter order.
    ///
    /// # Errors
    /// If a parameter receives no gradient, allocation fails on the device, or the computation is
    /// interrupted.
    pub fn gradients(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        divisor: usize,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        self.add_gradients(examples, pass, divisor as f64, InitialGradients::Nothing)
    }

    fn add_gradients(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        divisor: f64,
        before: InitialGradients,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        let variables: Vec<&Tensor> =
            self.parameters.iter().map(|(_, variable)| variable.as_tensor()).collect();
        let loss = || self.loss(examples, pass, Tracking::Tracked);
        let factor = 1.0 / divisor;
        let (loss, gradients) =
            self.interruptible(|| candle_gpt2_kernels::gradients(&variables, before, factor, loss))?;
        let named = self.parameters.iter().zip(gradients).map(|((name, _), gradient)| {
            gradient.ok_or_else(|| TrainingError::NoGradient { name: name.to_owned() })
        });
        Ok((loss, named.collect::<Result<_, _>>()?))
    }

    /// Performs an optimizer step with these gradients.
    ///
    /// # Errors
    /// If the loss or the norm of the gradients is not finite.
    pub fn apply(&mut self, gradients: &[Tensor], loss: f64) -> Result<StepReport, TrainingError> {
        let numbers = &self.numbers;
        let step = self.optimizer.steps_done() + 1;
        if !loss.is_finite() {
            return Err(TrainingError::NotFinite { step, what: "loss", last_checkpoint: None });
        }
        let share = numbers.schedule.share(step, numbers.warmup_steps, numbers.steps, numbers.final_share);
        let learning_rate = numbers.learning_rate * share;
        let adamw = AdamWStep {
            learning_rate,
            beta_1: numbers.beta_1,
            beta_2: numbers.beta_2_at(step - 1),
            epsilon: numbers.epsilon,
            weight_decay: numbers.weight_decay,
            step,
            gradient_factor: 1.0,
        };
        let gradient_norm = self.optimizer.step(&self.parameters, gradients, numbers.grad_clip, adamw)?;
        if let Weights::Explained(learner) = &mut self.weights {
            learner.after_step(&self.parameters, step)?;
        }
        Ok(StepReport { step, loss, gradient_norm, learning_rate })
    }

    /// Computes the mean loss of the examples, without dropout or gradients.
    ///
    /// # Errors
    /// If allocation fails on the device, or the computation is interrupted.
    pub fn evaluate(&self, examples: &dyn Examples) -> Result<f64, TrainingError> {
        let mut pass = Pass::inference();
        let loss =
            self.interruptible(|| without_gradients(|| self.loss(examples, &mut pass, Tracking::Detached)))?;
        Ok(loss.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
    }

    /// Computes the logits of the examples' predictions, without dropout or gradients.
    ///
    /// # Shapes
    /// One row per target: `(N, V)`, or `(N, num_labels)` for a classifier.
    ///
    /// # Errors
    /// See [`Trainer::evaluate`].
    pub fn logits(&self, examples: &dyn Examples) -> Result<Tensor, TrainingError> {
        self.interruptible(|| {
            without_gradients(|| {
                let mut pass = Pass::inference();
                let (hidden, head) = self.hidden_states(examples, &mut pass, Tracking::Detached)?;
                Linear::new(head, None)?.forward(&hidden.flatten_to(D::Minus2)?)?.to_dtype(DType::F32)
            })
        })
    }

    /// Computes the mean loss of the examples, a scalar.
    fn loss(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        tracking: Tracking,
    ) -> candle_core::Result<Tensor> {
        let (hidden, head) = self.hidden_states(examples, pass, tracking)?;
        let targets = examples.targets();
        let Some(weights) = examples.weights() else { return head_loss(&hidden, &head, targets) };
        let logits = Linear::new(head, None)?.forward(&hidden)?.to_dtype(DType::F32)?;
        let column = (targets.len(), 1);
        let targets = Tensor::from_slice(targets, column, &self.device)?;
        let weights = Tensor::from_slice(weights, column, &self.device)?;
        let losses = log_softmax(&logits, D::Minus1)?.gather(&targets, D::Minus1)?.neg()?;
        (losses * weights)?.sum_all()? / examples.weight()
    }

    /// Returns the hidden states that predict the targets, `(…, C)`, and the head's weight.
    fn hidden_states(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        tracking: Tracking,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let pass = &mut pass.reborrow().computed_in(self.numbers.compute_dtype.dtype());
        let (config, device) = (&self.config, &self.device);
        let head = tracking.of(&self.parameter(head_parameter(config))?);
        let hidden = match (&self.weights, tracking) {
            (Weights::Trained { model, .. }, Tracking::Tracked) => {
                examples.hidden_states(model, device, pass)?
            }
            (Weights::Trained { fixed, .. }, Tracking::Detached) => {
                let model =
                    Gpt2Model::load(config, self.parameters.source_with_fixed(fixed, device, tracking))?;
                examples.hidden_states(&model, device, pass)?
            }
            (Weights::Adapted(lora), _) => {
                let model = Gpt2Model::load(config, lora.source(&self.parameters, tracking))?;
                examples.hidden_states(&model, device, pass)?
            }
            (Weights::Explained(learner), _) => {
                examples.hidden_states(learner.model().transformer(), device, pass)?
            }
        };
        Ok((hidden, head))
    }

    /// Returns the current value of a model parameter by its name, with adapters merged.
    ///
    /// # Errors
    /// If the model has no parameter with this name.
    pub fn parameter(&self, name: &str) -> candle_core::Result<Tensor> {
        let trained = || self.parameters.get(name).map(|variable| variable.as_tensor().clone());
        let found = match &self.weights {
            Weights::Trained { fixed, .. } => trained().or_else(|| fixed.get(name).cloned()),
            Weights::Adapted(lora) => match lora.merged_parameter(name, &self.parameters)? {
                None => trained(),
                merged => merged,
            },
            Weights::Explained(_) => trained(),
        };
        found.ok_or_else(|| candle_core::Error::Msg(format!("the model has no parameter `{name}`")))
    }

    /// Returns the current model for inference.
    ///
    /// It shares fully trained weights, so later steps change it.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn model(&self) -> candle_core::Result<Gpt2LMHeadModel> {
        if let Weights::Explained(learner) = &self.weights {
            return Ok(learner.model().clone());
        }
        let named = expected_parameters(&self.config).into_iter().map(|parameter| {
            let tensor = self.parameter(&parameter.name)?.detach();
            Ok((parameter.name, tensor))
        });
        let tensors = named.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &self.device);
        Gpt2LMHeadModel::load(&self.config, ByOutput(vb))
    }

    /// Configuration and fixed weights of the adapters, if adapters are trained.
    pub fn lora(&self) -> Option<&Lora> {
        match &self.weights {
            Weights::Trained { .. } | Weights::Explained(_) => None,
            Weights::Adapted(lora) => Some(lora),
        }
    }

    /// Dictionary learner, if a dictionary is trained.
    pub(crate) fn learner(&self) -> Option<&Learner> {
        match &self.weights {
            Weights::Explained(learner) => Some(learner),
            Weights::Trained { .. } | Weights::Adapted(_) => None,
        }
    }

    /// Mutable dictionary learner, to restore a saved state.
    pub(crate) fn learner_mut(&mut self) -> Option<&mut Learner> {
        match &mut self.weights {
            Weights::Explained(learner) => Some(learner),
            Weights::Trained { .. } | Weights::Adapted(_) => None,
        }
    }

    /// Writes the dictionary if one is trained; returns whether it did.
    ///
    /// The format is SAELens's: [`WEIGHTS_FILE`](crate::WEIGHTS_FILE) and
    /// [`CONFIG_FILE`](crate::CONFIG_FILE). A cross-layer transcoder has the format of circuit-tracer:
    /// [`layer_files`](crate::layer_files) and [`LAYERS_CONFIG_FILE`](crate::LAYERS_CONFIG_FILE).
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_dictionary(&self, folder: &Path, dtype: WrittenDType) -> Result<bool, TrainingError> {
        let Some(learner) = self.learner() else { return Ok(false) };
        crate::dictionary::save(learner, &self.parameters, self.numbers.context, folder, dtype)?;
        Ok(true)
    }

    /// Returns the files that [`Trainer::save_dictionary`] writes, or none if no dictionary is trained.
    pub fn dictionary_files(&self) -> Vec<String> {
        self.learner().map_or_else(Vec::new, crate::dictionary::files)
    }

    /// Evaluates the dictionary on sequences of at least three tokens; `None` if no dictionary is trained.
    ///
    /// # Errors
    /// If allocation fails on the device, or the computation is interrupted.
    pub(crate) fn measure(&self, texts: &[Vec<u32>]) -> Result<Option<DictionaryMetrics>, TrainingError> {
        let Some(learner) = self.learner() else { return Ok(None) };
        self.interruptible(|| learner.measure(&self.parameters, texts)).map(Some)
    }

    /// Configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Device of the computation.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Training hyperparameters of this run.
    pub fn numbers(&self) -> &Hyperparameters {
        &self.numbers
    }

    /// Current values of the trained parameters: those of the model, its adapters or the dictionary.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Optimizer in its current state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Number of completed steps.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.steps_done()
    }
}

/// Runs a computation that aborts once `interrupt` returns true.
fn interruptible<T>(
    interrupt: Option<&Interrupt>,
    compute: impl FnOnce() -> candle_core::Result<T>,
) -> Result<T, TrainingError> {
    let computed = match interrupt {
        Some(interrupt) => candle_gpt2_kernels::interruptible(Arc::clone(interrupt), compute),
        None => compute(),
    };
    computed.map_err(|error| match error {
        _ if interrupt.is_some_and(|is_raised| is_raised()) => TrainingError::Interrupted { state: None },
        error => error.into(),
    })
}

/// Returns the name of the head's weight; a classifier's weight has one row per label.
fn head_parameter(config: &Gpt2Config) -> &'static str {
    match config.head {
        HeadKind::SequenceClassification => "score.weight",
        _ if config.has_untied_head() => "lm_head.weight",
        _ => "wte.weight",
    }
}
