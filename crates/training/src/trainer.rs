//! One step of training: gradients of a few batches, clipping, and the optimizer under the schedule.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{ByOutput, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, HeadKind, Pass, expected_parameters};
use candle_gpt2_arithmetic::AdamWStep;
use candle_gpt2_kernels::{Before, Interrupt, Linear, head_loss, without_gradients};
use candle_gpt2_weights::WrittenDType;
use candle_nn::VarBuilder;
use candle_nn::ops::log_softmax;

use crate::dictionary::Learner;
use crate::parameters::Lead;
use crate::streams::Stream;
use crate::{
    Data, DictionaryMetrics, Examples, Hyperparameters, Lora, Optimizer, OptimizerKind, Parameters, Share,
    TrainingError,
};

/// The report of a step. [`Trainer::step`] returns it.
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
#[doc(alias("AdamW", "Muon", "train"))]
pub struct Trainer {
    config: Gpt2Config,
    numbers: Hyperparameters,
    parameters: Parameters,
    weights: Weights,
    optimizer: Optimizer,
    /// Those of the last step, whose memory the next one's take.
    gradients: Vec<Tensor>,
    recomputes: bool,
    interrupt: Option<Interrupt>,
    device: Device,
}

/// What the model computes with.
enum Weights {
    /// The trained parameters themselves, and those that stay as they are.
    Trained { model: Box<Gpt2Model>, fixed: HashMap<String, Tensor> },
    /// Fixed weights and the adapters that are trained; the model is made anew for every pass.
    Adapted(Lora),
    /// A model that stays as it is, and a dictionary of what it has at a hook point.
    Explained(Box<Learner>),
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
        Self::with_fixed(config, parameters, HashMap::new(), numbers)
    }

    /// A training of `parameters` of a model whose others are `fixed`, and cost no gradients.
    ///
    /// # Errors
    /// As [`Trainer::new`], and when a parameter is in neither.
    pub fn with_fixed(
        config: &Gpt2Config,
        parameters: Parameters,
        fixed: HashMap<String, Tensor>,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        config.check()?;
        let vb = parameters.beside(&fixed, &parameters.device(), Lead::ToGradients);
        let weights = Weights::Trained { model: Gpt2Model::load(config, vb)?.into(), fixed };
        Self::with_weights(config, parameters, weights, numbers)
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

    /// A training of a dictionary of what `model`, which is called so, has at the hook points of the numbers' dictionary;
    /// `prepends_bos` says whether every text of the data begins with the BOS token.
    ///
    /// # Errors
    /// When a number is out of its range, the numbers have no dictionary, or it does not fit the model.
    pub fn with_dictionary(
        (model, name): (Gpt2LMHeadModel, String),
        prepends_bos: bool,
        numbers: Hyperparameters,
    ) -> Result<Self, TrainingError> {
        let Some(dictionary) = &numbers.dictionary else {
            return Err(TrainingError::Call { what: "the task `dictionary` needs its numbers".into() });
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

    /// The same training; blocks then keep their inputs only, and are computed again for their gradients, which stay the same:
    /// less memory for a third more time.
    pub fn recomputing(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// The same training; its computations end with [`TrainingError::Interrupted`] once `interrupt` returns true. It is called in
    /// each operation, on the thread that computes, and should stay true.
    pub fn interrupted_by(self, interrupt: Interrupt) -> Self {
        Self { interrupt: Some(interrupt), ..self }
    }

    /// Whether what it computes is to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|is_raised| is_raised())
    }

    /// Computes what may be interrupted.
    fn interruptible<T>(&self, compute: impl FnOnce() -> candle_core::Result<T>) -> Result<T, TrainingError> {
        interruptible(self.interrupt.as_ref(), compute)
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

    /// Takes the next step on the examples that are due.
    ///
    /// # Errors
    /// When loss or gradient is not a number, or it is interrupted (the parameters are then as they were), or the device has no
    /// room.
    pub fn step(&mut self, data: &dyn Data) -> Result<StepReport, TrainingError> {
        let (loss, gradients) = self.share_of_step(data, Share::WHOLE)?;
        let report = self.apply(&gradients, loss);
        self.gradients = gradients;
        report
    }

    /// What a share of the next step's examples adds to the step's loss, and to the gradient of every parameter, in the
    /// parameters' order: the sums over all shares are those of the step, whose loss is the mean over all its predictions.
    ///
    /// # Errors
    /// As [`Trainer::gradients`].
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
            none if none.is_empty() => Before::Nothing,
            gradients => Before::Memory(gradients),
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
            before = Before::Gradients(gradients);
        }
        match before {
            Before::Gradients(gradients) => Ok((loss, gradients)),
            Before::Nothing | Before::Memory(_) => {
                let zeros = self.parameters.iter().map(|(_, variable)| variable.zeros_like());
                Ok((loss, zeros.collect::<candle_core::Result<_>>()?))
            }
        }
    }

    /// The loss of the next step's examples, the mean over its batches, and the gradients of a dictionary.
    fn dictionary_gradients(
        &mut self,
        data: &dyn Data,
        share: Share,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        if share != Share::WHOLE {
            let what =
                "a dictionary is trained by one process: which latents are kept depends on the whole batch";
            return Err(TrainingError::Call { what: what.into() });
        }
        let (first, count) = self.examples_of_step();
        let batch_size = self.numbers.batch_size_at(self.steps_done());
        let Self { weights, parameters, interrupt, .. } = self;
        let Weights::Explained(learner) = weights else {
            return Err(TrainingError::Call { what: "no dictionary is trained".into() });
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

    /// How many tokens the next step sees.
    pub fn tokens_of_step(&self, data: &dyn Data) -> usize {
        let (first, count) = self.examples_of_step();
        data.tokens(first, count)
    }

    /// The first example of the next step, and how many it has.
    fn examples_of_step(&self) -> (u64, usize) {
        let steps_done = self.steps_done();
        let count = self.numbers.batch_size_at(steps_done) * self.numbers.accumulate;
        (self.numbers.examples_before(steps_done), count)
    }

    /// Reuses the memory of gradients without other owners for those of the next step.
    pub fn use_memory_of(&mut self, gradients: Vec<Tensor>) {
        self.gradients = gradients;
    }

    /// The loss of some examples, and the gradient of every parameter of `loss / divisor`, in the parameters' order.
    ///
    /// # Errors
    /// When a parameter gets no gradient, the device has no room, or it is interrupted.
    pub fn gradients(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        divisor: usize,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        self.add_gradients(examples, pass, divisor as f64, Before::Nothing)
    }

    fn add_gradients(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        divisor: f64,
        before: Before,
    ) -> Result<(f64, Vec<Tensor>), TrainingError> {
        let variables: Vec<&Tensor> =
            self.parameters.iter().map(|(_, variable)| variable.as_tensor()).collect();
        let loss = || self.loss(examples, pass, Lead::ToGradients);
        let factor = 1.0 / divisor;
        let (loss, gradients) =
            self.interruptible(|| candle_gpt2_kernels::gradients(&variables, before, factor, loss))?;
        let named = self.parameters.iter().zip(gradients).map(|((name, _), gradient)| {
            gradient.ok_or_else(|| TrainingError::NoGradient { name: name.to_owned() })
        });
        Ok((loss, named.collect::<Result<_, _>>()?))
    }

    /// Takes a step with these gradients.
    ///
    /// # Errors
    /// When the loss or their norm is not a number.
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

    /// The mean loss of some examples without dropout, and without gradients.
    ///
    /// # Errors
    /// When the device has no room, or it is interrupted.
    pub fn evaluate(&self, examples: &dyn Examples) -> Result<f64, TrainingError> {
        let mut pass = Pass::inference();
        let loss =
            self.interruptible(|| without_gradients(|| self.loss(examples, &mut pass, Lead::Nowhere)))?;
        Ok(loss.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
    }

    /// The logits of what some examples predict, without dropout, and without gradients.
    ///
    /// # Shapes
    /// One row for each target: `(N, V)`, or `(N, num_labels)` of a classifier.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn logits(&self, examples: &dyn Examples) -> Result<Tensor, TrainingError> {
        self.interruptible(|| {
            without_gradients(|| {
                let mut pass = Pass::inference();
                let (hidden, head) = self.hidden_states(examples, &mut pass, Lead::Nowhere)?;
                Linear::new(head, None)?.forward(&hidden.flatten_to(D::Minus2)?)?.to_dtype(DType::F32)
            })
        })
    }

    /// The mean loss of some examples, a scalar.
    fn loss(&self, examples: &dyn Examples, pass: &mut Pass, lead: Lead) -> candle_core::Result<Tensor> {
        let (hidden, head) = self.hidden_states(examples, pass, lead)?;
        let targets = examples.targets();
        let Some(weights) = examples.weights() else { return head_loss(&hidden, &head, targets) };
        let logits = Linear::new(head, None)?.forward(&hidden)?.to_dtype(DType::F32)?;
        let column = (targets.len(), 1);
        let targets = Tensor::from_slice(targets, column, &self.device)?;
        let weights = Tensor::from_slice(weights, column, &self.device)?;
        let losses = log_softmax(&logits, D::Minus1)?.gather(&targets, D::Minus1)?.neg()?;
        (losses * weights)?.sum_all()? / examples.weight()
    }

    /// The hidden states that the targets are predicted from, `(…, C)`, and the weight of the head that predicts them.
    fn hidden_states(
        &self,
        examples: &dyn Examples,
        pass: &mut Pass,
        lead: Lead,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let pass = &mut pass.reborrow().computed_in(self.numbers.compute_dtype.dtype());
        let (config, device) = (&self.config, &self.device);
        let head = lead.of(&self.parameter(head_parameter(config))?);
        let hidden = match (&self.weights, lead) {
            (Weights::Trained { model, .. }, Lead::ToGradients) => {
                examples.hidden_states(model, device, pass)?
            }
            (Weights::Trained { fixed, .. }, Lead::Nowhere) => {
                let model = Gpt2Model::load(config, self.parameters.beside(fixed, device, lead))?;
                examples.hidden_states(&model, device, pass)?
            }
            (Weights::Adapted(lora), _) => {
                let model = Gpt2Model::load(config, lora.source(&self.parameters, lead))?;
                examples.hidden_states(&model, device, pass)?
            }
            (Weights::Explained(learner), _) => {
                examples.hidden_states(learner.model().transformer(), device, pass)?
            }
        };
        Ok((hidden, head))
    }

    /// A parameter of the model as it is now, adapters added, by its name in the model.
    ///
    /// # Errors
    /// When the model has none of this name.
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

    /// The model as it is now, for inference. It shares the weights, and changes with them if they are trained whole.
    ///
    /// # Errors
    /// When the device has no room.
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

    /// The adapters' configuration and fixed weights, if adapters are trained.
    pub fn lora(&self) -> Option<&Lora> {
        match &self.weights {
            Weights::Trained { .. } | Weights::Explained(_) => None,
            Weights::Adapted(lora) => Some(lora),
        }
    }

    /// The dictionary, if one is trained.
    pub(crate) fn learner(&self) -> Option<&Learner> {
        match &self.weights {
            Weights::Explained(learner) => Some(learner),
            Weights::Trained { .. } | Weights::Adapted(_) => None,
        }
    }

    /// The same, to be brought to a saved state.
    pub(crate) fn learner_mut(&mut self) -> Option<&mut Learner> {
        match &mut self.weights {
            Weights::Explained(learner) => Some(learner),
            Weights::Trained { .. } | Weights::Adapted(_) => None,
        }
    }

    /// Writes the dictionary, where one is trained, and says whether one is: as SAELens does, [`WEIGHTS_FILE`](crate::WEIGHTS_FILE) and
    /// [`CONFIG_FILE`](crate::CONFIG_FILE), or a cross-layer transcoder as circuit-tracer does, [`layer_files`](crate::layer_files) and
    /// [`LAYERS_CONFIG_FILE`](crate::LAYERS_CONFIG_FILE).
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn save_dictionary(&self, folder: &Path, dtype: WrittenDType) -> Result<bool, TrainingError> {
        let Some(learner) = self.learner() else { return Ok(false) };
        crate::dictionary::save(learner, &self.parameters, self.numbers.context, folder, dtype)?;
        Ok(true)
    }

    /// The files that [`Trainer::save_dictionary`] writes; none where no dictionary is trained.
    pub fn dictionary_files(&self) -> Vec<String> {
        self.learner().map_or_else(Vec::new, crate::dictionary::files)
    }

    /// How good the dictionary is on these texts, of three tokens at least each; `None` where none is trained.
    ///
    /// # Errors
    /// When the device has no room, or it is interrupted.
    pub(crate) fn measure(&self, texts: &[Vec<u32>]) -> Result<Option<DictionaryMetrics>, TrainingError> {
        let Some(learner) = self.learner() else { return Ok(None) };
        self.interruptible(|| learner.measure(&self.parameters, texts)).map(Some)
    }

    /// The configuration of the model.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Where it is computed.
    pub fn device(&self) -> &Device {
        &self.device
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
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Steps taken so far.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.steps_done()
    }
}

/// Computes what ends once `interrupt` says so.
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

/// The name of the weight that predicts from the hidden states; a classifier's has a row for each label.
fn head_parameter(config: &Gpt2Config) -> &'static str {
    match config.head {
        HeadKind::SequenceClassification => "score.weight",
        _ if config.has_untied_head() => "lm_head.weight",
        _ => "wte.weight",
    }
}
