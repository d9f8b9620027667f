//! Training options for all front ends: their names, defaults and constraints.

use std::fmt::Display;
use std::path::PathBuf;

use candle_gpt2::Gpt2Config;
use candle_gpt2_arithmetic::{NumberType, UnknownNumberType, uses};
use candle_gpt2_engine::DeviceChoice;
use candle_gpt2_weights::WrittenDType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    ClassWeights, ComputeDType, DictionaryKind, DictionaryNumbers, Hyperparameters, Initialization,
    LoraConfig, OptimizerKind, Ramp, Schedule, Task, TrainingError,
};

/// Limits on the default number of warm-up steps, a twentieth of all steps.
const USUAL_WARMUP_STEPS: (u64, u64) = (1, 500);

/// Initial model of a training run; part of a [`TrainJob`](crate::TrainJob).
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// Checkpoint to train further.
    ///
    /// It is a folder, a weights file in any supported format, a model on the Hub, or
    /// [`BUILT_IN`](candle_gpt2_engine::BUILT_IN).
    Checkpoint(PathBuf),
    /// Path of a `config.json` for a new model.
    ConfigFile(PathBuf),
    /// Configuration for a new model.
    Config(Box<Gpt2Config>),
}

/// Training options.
///
/// In JSON, the options form an object keyed by field name; every field is optional.
///
/// ```
/// use candle_gpt2_jobs::TrainOptions;
///
/// let options: TrainOptions = serde_json::from_str(r#"{"steps": 200, "lora_rank": 8, "dtype": "f16"}"#)?;
/// assert_eq!(options, TrainOptions { steps: 200, lora_rank: Some(8), dtype: options.dtype, ..TrainOptions::default() });
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainOptions {
    /// Training task: text (language modeling), classify (labels of texts), answer (completions of prompts)
    /// or dictionary (SAE features of a hook point)
    #[cfg_attr(feature = "clap", arg(long, value_name = "TASK", default_value = "text"))]
    pub task: Task,
    /// Resume the training in --out; the other options must be the same
    #[cfg_attr(feature = "clap", arg(long))]
    pub resume: bool,
    /// Number of optimizer steps
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = TrainOptions::default().steps, allow_negative_numbers = true))]
    pub steps: u64,
    /// Windows of text, or rows, in one batch
    #[cfg_attr(feature = "clap", arg(long, value_name = "B", default_value_t = TrainOptions::default().batch_size, allow_negative_numbers = true))]
    pub batch_size: usize,
    /// Batches whose gradients are averaged into one step
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = TrainOptions::default().accumulate, allow_negative_numbers = true))]
    pub accumulate: usize,
    /// Tokens in a window, or in the longest row [default: the model's context]
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", allow_negative_numbers = true))]
    pub context: Option<usize>,
    /// Schedule for the window length: STEP:T pairs, such as 0:64,4000:128 for 64 tokens at first and 128
    /// from step 4000 on
    #[cfg_attr(feature = "clap", arg(long, value_name = "RAMP", conflicts_with = "context"))]
    pub context_ramp: Option<Ramp>,
    /// Schedule for the batch size: STEP:B pairs, such as 0:8,4000:16
    #[cfg_attr(feature = "clap", arg(long, value_name = "RAMP", conflicts_with = "batch_size"))]
    pub batch_ramp: Option<Ramp>,
    /// Start windows shorter than the model's context at a random position, so that all positions are
    /// trained
    #[cfg_attr(feature = "clap", arg(long))]
    pub random_positions: bool,
    /// Fraction of windows to move to a document's start, among windows that contain one
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = TrainOptions::default().document_starts, allow_negative_numbers = true))]
    pub document_starts: f64,
    /// Initial weights with --config: gpt2 (random), or mimetic (sinusoidal position embeddings and copying
    /// heads)
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", default_value = "gpt2"))]
    pub initialization: Initialization,
    /// Gradient checkpointing: keep only the inputs of the blocks and recompute the rest; same result, less
    /// memory, a third more time
    #[cfg_attr(feature = "clap", arg(long))]
    pub recompute: bool,
    /// Train only the last N blocks, the final norm and the head; a head tied to the token embedding stays
    /// frozen
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true))]
    pub train_blocks: Option<usize>,
    /// Loss weight for each label with --task classify: balanced, or a list such as ham=1,spam=6.5
    /// [default: 1 for every label]
    #[cfg_attr(feature = "clap", arg(long, value_name = "WEIGHTS"))]
    pub class_weights: Option<ClassWeights>,
    /// Hook point to explain with --task dictionary, such as blocks.3.hook_resid_post; for a transcoder,
    /// its input, such as blocks.3.ln2.hook_normalized; for a cross-layer transcoder, the input in every
    /// block, such as hook_resid_mid
    #[cfg_attr(feature = "clap", arg(long, value_name = "SITE"))]
    pub site: Option<String>,
    /// Hook point that a transcoder writes [default: the output of the MLP in the block of --site]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SITE"))]
    pub output_site: Option<String>,
    /// Kind of dictionary: top-k, batch-top-k, matryoshka, standard, jump-relu, gated, transcoder,
    /// skip-transcoder or cross-layer-transcoder [default: top-k]
    #[cfg_attr(feature = "clap", arg(long, value_name = "KIND"))]
    pub kind: Option<DictionaryKind>,
    /// Number of latents (features) of a dictionary, or of each layer of a cross-layer transcoder [default:
    /// 8 times the width of its output]
    #[cfg_attr(feature = "clap", arg(long, value_name = "F", allow_negative_numbers = true))]
    pub latents: Option<usize>,
    /// Active latents per token, in all layers together: exactly K for top-k, K on average otherwise; gated
    /// dictionaries use --sparsity instead [default: 32; 16 per layer of a cross-layer transcoder]
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", allow_negative_numbers = true))]
    pub k: Option<usize>,
    /// Weight of the sparsity loss for jump-relu and gated dictionaries [default: 1 and 0.1]
    #[cfg_attr(feature = "clap", arg(long, value_name = "X", allow_negative_numbers = true))]
    pub sparsity: Option<f64>,
    /// Tokens without activity after which a latent counts as dead and gets an auxiliary loss [default: a
    /// twentieth of all, at most 10000000]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", allow_negative_numbers = true))]
    pub dead_after: Option<u64>,
    /// Train LoRA adapters of rank R and freeze the weights, except a classifier's head; the result has the
    /// adapters merged, and its subfolder `adapter` has them separately, in PEFT's format
    #[cfg_attr(feature = "clap", arg(long, value_name = "R", allow_negative_numbers = true))]
    pub lora_rank: Option<usize>,
    /// Each adapter is multiplied by ALPHA / R [default: twice the rank]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ALPHA", allow_negative_numbers = true))]
    pub lora_alpha: Option<f64>,
    /// Linear layers with adapters: some of c_attn, c_proj, c_fc [default: c_attn]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAMES", value_delimiter = ','))]
    pub lora_targets: Option<Vec<String>>,
    /// Train even if the free memory seems too small
    #[cfg_attr(feature = "clap", arg(long))]
    pub ignore_memory: bool,
    /// Optimizer: adamw, or muon for the matrices of the blocks and AdamW for the rest
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", default_value = "adamw"))]
    pub optimizer: OptimizerKind,
    /// Peak learning rate [default: 0.001 with --config, 0.00005 with --init, 0.0003 for adapters; 0.0002 /
    /// sqrt(F / 16384) for dictionaries]
    #[cfg_attr(feature = "clap", arg(long, value_name = "LR", allow_negative_numbers = true))]
    pub lr: Option<f64>,
    /// Learning rate schedule after the warm-up: cosine, linear or constant
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", default_value = "cosine"))]
    pub schedule: Schedule,
    /// Learning rate of the last step, as a fraction of the peak
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = TrainOptions::default().final_share, allow_negative_numbers = true))]
    pub final_share: f64,
    /// Steps over which the learning rate rises [default: a twentieth of --steps, at most 500]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true))]
    pub warmup_steps: Option<u64>,
    /// Weight decay of matrices; biases and norms do not decay
    #[cfg_attr(feature = "clap", arg(long, value_name = "X", default_value_t = TrainOptions::default().weight_decay, allow_negative_numbers = true))]
    pub weight_decay: f64,
    /// Half-life in tokens of AdamW's mean of squared gradients (beta 2), for small batches [default: beta
    /// 2 of 0.95 per step]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", allow_negative_numbers = true))]
    pub beta_2_half_life: Option<f64>,
    /// Maximum gradient norm; 0 disables clipping
    #[cfg_attr(feature = "clap", arg(long, value_name = "X", default_value_t = TrainOptions::default().grad_clip, allow_negative_numbers = true))]
    pub grad_clip: f64,
    /// Dropout rate that replaces the configuration's three rates
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", allow_negative_numbers = true))]
    pub dropout: Option<f64>,
    /// Fraction of the data, at the end of each file or of each label's rows, that is held out to decide
    /// when to stop; 0 for none
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = TrainOptions::default().held_out, allow_negative_numbers = true))]
    pub held_out: f64,
    /// Steps between evaluations on the held-out data
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = TrainOptions::default().eval_every, allow_negative_numbers = true))]
    pub eval_every: u64,
    /// Steps between saved states
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = TrainOptions::default().save_every, allow_negative_numbers = true))]
    pub save_every: u64,
    /// Keep a copy of the model after these steps, such as 0,1,2,4,8: each in a subfolder of --out, such as
    /// step-4
    #[cfg_attr(feature = "clap", arg(long, value_name = "STEPS", value_delimiter = ','))]
    pub keep_steps: Option<Vec<u64>>,
    /// Continue this text at every evaluation, and show it on standard error
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub sample: Option<String>,
    /// Stop after this many evaluations without a lower held-out loss [default: never]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub patience: Option<u64>,
    /// Seed for the initial weights, the order of the data, and dropout
    #[cfg_attr(feature = "clap", arg(short, long, value_name = "SEED", default_value_t = TrainOptions::default().seed, allow_negative_numbers = true))]
    pub seed: u64,
    /// Type of the written weights: f32, f16 or bf16
    #[serde(serialize_with = "name", deserialize_with = "dtype_of_name")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE", default_value = "f32", value_parser = written_dtype))]
    pub dtype: WrittenDType,
    /// Device to compute on: cpu, cuda or cuda:N (NVIDIA), metal (Apple), or auto: cuda if this program was
    /// built with it and a GPU is available, else cpu
    #[serde(serialize_with = "name", deserialize_with = "device_of_name")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value = "auto"))]
    pub device: DeviceChoice,
    /// Type to compute in: f32, or bf16, which takes less memory and is faster on GPUs; weights, gradients
    /// and the optimizer stay in f32
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE", default_value = "f32"))]
    pub compute_dtype: ComputeDType,
    /// Number of attention heads, for checkpoints that do not specify it.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub n_head: Option<usize>,
}

impl Default for TrainOptions {
    fn default() -> Self {
        let hyperparameters = Hyperparameters::default();
        Self {
            task: Task::default(),
            resume: false,
            steps: hyperparameters.steps,
            batch_size: hyperparameters.batch_size,
            accumulate: hyperparameters.accumulate,
            context: None,
            context_ramp: None,
            batch_ramp: None,
            random_positions: false,
            document_starts: 0.0,
            initialization: Initialization::default(),
            recompute: false,
            train_blocks: None,
            class_weights: None,
            site: None,
            output_site: None,
            kind: None,
            latents: None,
            k: None,
            sparsity: None,
            dead_after: None,
            lora_rank: None,
            lora_alpha: None,
            lora_targets: None,
            ignore_memory: false,
            optimizer: hyperparameters.optimizer,
            lr: None,
            schedule: hyperparameters.schedule,
            final_share: hyperparameters.final_share,
            warmup_steps: None,
            weight_decay: hyperparameters.weight_decay,
            beta_2_half_life: None,
            grad_clip: 1.0,
            dropout: None,
            held_out: 0.1,
            eval_every: 100,
            save_every: 100,
            keep_steps: None,
            sample: None,
            patience: None,
            seed: hyperparameters.seed,
            dtype: WrittenDType::F32,
            device: DeviceChoice::default(),
            compute_dtype: ComputeDType::default(),
            n_head: None,
        }
    }
}

impl TrainOptions {
    /// Validates everything that can be validated before any file is opened.
    ///
    /// # Errors
    /// Fails if a number is out of range or options conflict.
    pub(crate) fn check(&self, start: &Start) -> Result<(), TrainingError> {
        let refuse = |option, expected: &str, found: String| {
            Err(TrainingError::OptionOutOfRange { option, expected: expected.into(), found })
        };
        if !(0.0..1.0).contains(&self.held_out) {
            return refuse("held_out", "a fraction of at least 0 and below 1", self.held_out.to_string());
        }
        if let Some(rate) = self.dropout.filter(|rate| !(0.0..1.0).contains(rate)) {
            return refuse("dropout", "a rate of at least 0 and below 1", rate.to_string());
        }
        let counts = [
            ("eval_every", Some(self.eval_every)),
            ("save_every", Some(self.save_every)),
            ("patience", self.patience),
        ];
        if let Some((option, _)) = counts.into_iter().find(|(_, count)| *count == Some(0)) {
            return refuse(option, "at least 1", "0".into());
        }
        let of_adapters =
            [("lora_alpha", self.lora_alpha.is_some()), ("lora_targets", self.lora_targets.is_some())];
        if self.lora_rank.is_none()
            && let Some((option, _)) = of_adapters.into_iter().find(|(_, is_given)| *is_given)
        {
            let what = format!("`{option}` applies only to adapters; set `lora_rank`");
            return Err(TrainingError::Call { what });
        }
        let not_with = |option: &str, reason: String| {
            let what = format!("`{option}` {reason}");
            Err(TrainingError::Call { what })
        };
        if self.train_blocks.is_some() && self.lora_rank.is_some() {
            return not_with(
                "train_blocks",
                "cannot be combined with `lora_rank`: adapters are trained in all blocks".into(),
            );
        }
        let of_checkpoints = [
            ("train_blocks", self.train_blocks, "the other blocks of a new model would stay untrained"),
            ("n_head", self.n_head, "the configuration defines the number of heads"),
        ];
        if !matches!(start, Start::Checkpoint(_))
            && let Some((option, _, reason)) = of_checkpoints.iter().find(|(_, given, _)| given.is_some())
        {
            return not_with(option, format!("applies only to checkpoints: {reason}"));
        }
        if matches!(start, Start::Checkpoint(_)) && self.initialization != Initialization::default() {
            return not_with(
                "initialization",
                "applies only to models trained from scratch: a checkpoint already has weights".into(),
            );
        }
        self.check_dictionary(start)?;
        if self.class_weights.is_some() && self.task != Task::Classify {
            return not_with("class_weights", "needs `task` classify".into());
        }
        if self.sample.is_some() && matches!(self.task, Task::Classify | Task::Dictionary) {
            return not_with(
                "sample",
                "needs `task` text or answer: the other tasks generate no text".into(),
            );
        }
        Ok(())
    }

    /// Checks that dictionary options are used only for dictionaries, and are consistent.
    fn check_dictionary(&self, start: &Start) -> Result<(), TrainingError> {
        let call = |what: String| Err(TrainingError::Call { what });
        let of_dictionaries = [
            ("site", self.site.is_some()),
            ("output_site", self.output_site.is_some()),
            ("kind", self.kind.is_some()),
            ("latents", self.latents.is_some()),
            ("k", self.k.is_some()),
            ("sparsity", self.sparsity.is_some()),
            ("dead_after", self.dead_after.is_some()),
        ];
        let given = |options: &[(&'static str, bool)]| {
            options.iter().find(|(_, is_given)| *is_given).map(|(name, _)| *name)
        };
        if self.task != Task::Dictionary {
            return match given(&of_dictionaries) {
                Some(option) => call(format!("`{option}` needs `task` dictionary")),
                None => Ok(()),
            };
        }
        if !matches!(start, Start::Checkpoint(_)) {
            return call("`task` dictionary needs a trained model: start from a checkpoint".into());
        }
        if self.site.is_none() {
            return call(
                "`task` dictionary needs `site`, the hook point to train on, such as blocks.3.hook_resid_post"
                    .into(),
            );
        }
        let defaults = Self::default();
        let of_models = [
            ("recompute", self.recompute),
            ("train_blocks", self.train_blocks.is_some()),
            ("lora_rank", self.lora_rank.is_some()),
            ("dropout", self.dropout.is_some()),
            ("weight_decay", self.weight_decay != defaults.weight_decay),
            ("compute_dtype", self.compute_dtype != defaults.compute_dtype),
        ];
        if let Some(option) = given(&of_models) {
            return call(format!("`{option}` cannot be used with `task` dictionary"));
        }
        let kind = self.kind.unwrap_or_default();
        let has_sparsity = kind == DictionaryKind::JumpRelu || kind.is_penalized();
        if self.sparsity.is_some() && !has_sparsity {
            return call(format!("`sparsity` needs `kind` jump-relu, standard or gated; for {kind} use `k`"));
        }
        if self.dead_after.is_some() && has_sparsity {
            return call(format!(
                "`dead_after` cannot be used with `kind` {kind}: its latents do not need reviving"
            ));
        }
        if self.k.is_some() && kind.is_penalized() {
            return call(format!("`k` cannot be used with `kind` {kind}; use `sparsity`"));
        }
        Ok(())
    }

    /// Rejects options that apply only to windows of text.
    pub(crate) fn check_of_activations(&self) -> Result<(), TrainingError> {
        let of_windows = [
            ("context_ramp", self.context_ramp.is_some()),
            ("random_positions", self.random_positions),
            ("document_starts", self.document_starts != 0.0),
        ];
        match of_windows.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(TrainingError::Call {
                what: format!("`{option}` applies only to texts, not to activation shards"),
            }),
            None => Ok(()),
        }
    }

    /// Sets the hyperparameters of a dictionary, if one is trained.
    ///
    /// The learning rate depends on the number of latents. There is no weight decay, and Adam's
    /// hyperparameters are those of openai/sparse_autoencoder.
    ///
    /// # Errors
    /// Fails if the model lacks the hook points.
    pub(crate) fn put_dictionary(
        &self,
        config: &Gpt2Config,
        hyperparameters: &mut Hyperparameters,
    ) -> Result<(), TrainingError> {
        /// Learning rate for a dictionary with [`RATE_LATENTS`] latents.
        ///
        /// It is inversely proportional to the square root of the number of latents.
        const RATE: f64 = 2e-4;
        const RATE_LATENTS: f64 = 16_384.0;
        /// Default number of latents per output dimension.
        const USUAL_EXPANSION: usize = 8;
        const USUAL_K: usize = 32;
        /// Default `k` per layer of a cross-layer transcoder; the total is close to 200 for gpt2.
        const USUAL_K_OF_LAYER: usize = 16;
        const MAX_DEAD_AFTER: u64 = 10_000_000;
        let (Task::Dictionary, Some(site)) = (self.task, &self.site) else { return Ok(()) };
        let kind = self.kind.unwrap_or_default();
        let usual_sparsity = if kind.is_penalized() { 0.1 } else { 1.0 };
        let tokens =
            hyperparameters.examples_before(self.steps).saturating_mul(hyperparameters.context as u64);
        let dictionary = DictionaryNumbers {
            kind,
            site: site.clone(),
            output_site: self.output_site.clone(),
            latents: 1,
            k: 1,
            sparsity: self.sparsity.unwrap_or(usual_sparsity),
            dead_after: self.dead_after.unwrap_or((tokens / 20).clamp(1, MAX_DEAD_AFTER)),
        };
        let sites = dictionary.sites(config)?;
        let (blocks, [_, (_, width)]) = (sites.len(), sites[0]); // Every dictionary has at least one block.
        let latents = self.latents.unwrap_or(USUAL_EXPANSION * width);
        let usual_k = match kind {
            DictionaryKind::CrossLayerTranscoder => USUAL_K_OF_LAYER * blocks,
            _ => USUAL_K,
        };
        let k = self.k.unwrap_or_else(|| usual_k.min(blocks.saturating_mul(latents)));
        hyperparameters.learning_rate =
            self.lr.unwrap_or(RATE / (latents.max(1) as f64 / RATE_LATENTS).sqrt());
        (hyperparameters.weight_decay, hyperparameters.beta_2, hyperparameters.epsilon) =
            (0.0, 0.999, 6.25e-10);
        hyperparameters.dictionary = Some(DictionaryNumbers { latents, k, ..dictionary });
        Ok(())
    }

    /// Returns the hyperparameters for training this model.
    pub(crate) fn hyperparameters(&self, start: &Start, config: &Gpt2Config) -> Hyperparameters {
        let usual_rate = match (start, self.lora_rank) {
            (Start::Checkpoint(_), None) => 5e-5,
            (Start::Checkpoint(_), Some(_)) => 3e-4,
            _ => 1e-3,
        };
        let (shortest, longest) = USUAL_WARMUP_STEPS;
        let usual_warmup = (self.steps / 20).clamp(shortest, longest).min(self.steps);
        Hyperparameters {
            steps: self.steps,
            batch_size: self.batch_ramp.as_ref().map_or(self.batch_size, Ramp::largest),
            accumulate: self.accumulate,
            context: match &self.context_ramp {
                Some(ramp) => ramp.largest(),
                None => self.context.unwrap_or(config.n_positions),
            },
            context_ramp: self.context_ramp.clone(),
            batch_ramp: self.batch_ramp.clone(),
            random_positions: self.random_positions,
            document_starts: self.document_starts,
            beta_2_half_life: self.beta_2_half_life,
            final_share: self.final_share,
            optimizer: self.optimizer,
            learning_rate: self.lr.unwrap_or(usual_rate),
            schedule: self.schedule,
            warmup_steps: self.warmup_steps.unwrap_or(usual_warmup),
            weight_decay: self.weight_decay,
            grad_clip: Some(self.grad_clip).filter(|clip| *clip != 0.0),
            seed: self.seed,
            task: self.task,
            train_blocks: self.train_blocks,
            compute_dtype: self.compute_dtype,
            ..Hyperparameters::default()
        }
    }

    /// Returns the configuration of the adapters, if requested.
    pub(crate) fn lora(&self) -> Option<LoraConfig> {
        self.lora_rank.map(|rank| LoraConfig {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            targets: self.lora_targets.clone().unwrap_or_else(|| vec!["c_attn".to_owned()]),
        })
    }

    /// Applies the requested dropout rate to a configuration.
    pub(crate) fn with_dropout(&self, config: Gpt2Config) -> Gpt2Config {
        match self.dropout {
            Some(rate) => Gpt2Config { embd_pdrop: rate, attn_pdrop: rate, resid_pdrop: rate, ..config },
            None => config,
        }
    }
}

/// Parses the dtype of written weights: `f32`, `f16` or `bf16`.
///
/// ```
/// use candle_gpt2_jobs::written_dtype;
/// use candle_gpt2_weights::WrittenDType;
///
/// assert_eq!(written_dtype("bf16").ok(), Some(WrittenDType::BF16));
/// assert!(written_dtype("q8_0").is_err(), "integer weights cannot be trained further");
/// ```
///
/// # Errors
/// Fails on any other name.
pub fn written_dtype(name: &str) -> Result<WrittenDType, UnknownNumberType> {
    NumberType::parse(name, uses::SAFETENSORS).and_then(|_| name.parse())
}

fn name<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn dtype_of_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<WrittenDType, D::Error> {
    written_dtype(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

fn device_of_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DeviceChoice, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}
