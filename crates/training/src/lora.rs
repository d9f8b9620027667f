//! Low-rank adapters: the weight of a linear layer becomes `W + (alpha / rank) B A`.
//!
//! Only `A` and `B` are trained. Source: "LoRA: Low-Rank Adaptation of Large Language Models"
//! (arXiv:2106.09685, section 4.1), in the form of PEFT. `A` `(rank, in)` is sampled from
//! `U(-1/sqrt(in), 1/sqrt(in))`, and `B` `(out, rank)` is zero. The files are PEFT's `adapter_config.json`
//! and `adapter_model.safetensors`.
//!
//! The model code does not change. The parameter source supplies weights with separate adapters, which are
//! merged only if a complete model is requested.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{Result, Shape, Tensor, Var};
use candle_gpt2::{Gpt2Config, HeadKind};
use candle_gpt2_kernels::{AdaptedMatrix, Matrix, ParameterSource};
use candle_gpt2_weights::{replace_file, write_tensors};
use candle_nn::Init;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::parameters::Tracking;
use crate::streams::Stream;
use crate::{Parameters, TrainingError};

/// Linear layers that can have an adapter, selected in [`LoraConfig::targets`].
///
/// As in PEFT, `c_proj` means the output projections of both attention and MLP. [`Lora::new`] has an example.
pub const LORA_TARGETS: [&str; 3] = ["c_attn", "c_proj", "c_fc"];

/// Size and target layers of the adapters, passed to [`Lora::new`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[doc(alias = "peft")]
pub struct LoraConfig {
    /// Rank: number of rows of `A` and of columns of `B`.
    pub rank: usize,
    /// Numerator of the factor `alpha / rank` on the product `B A`.
    pub alpha: f64,
    /// Names of linear layers, from [`LORA_TARGETS`].
    pub targets: Vec<String>,
}

impl LoraConfig {
    /// Validates every option.
    ///
    /// # Errors
    /// If an option is out of range.
    pub fn check(&self, config: &Gpt2Config) -> std::result::Result<(), TrainingError> {
        let refuse = |option, expected: String, found: &dyn std::fmt::Display| {
            Err(TrainingError::OptionOutOfRange { option, expected, found: found.to_string() })
        };
        if self.rank == 0 || self.rank > config.n_embd {
            return refuse(
                "lora_rank",
                format!("from 1 to the model's width of {}", config.n_embd),
                &self.rank,
            );
        }
        if !(self.alpha > 0.0 && self.alpha.is_finite()) {
            return refuse("lora_alpha", "a number greater than 0".into(), &self.alpha);
        }
        let unknown = self.targets.iter().find(|target| !LORA_TARGETS.contains(&target.as_str()));
        let known = || format!("one or more of {}", LORA_TARGETS.join(", "));
        match unknown {
            Some(target) => refuse("lora_targets", known(), target),
            None if self.targets.is_empty() => refuse("lora_targets", known(), &"none"),
            None => Ok(()),
        }
    }

    /// Returns the layer's name, such as `h.0.attn.c_attn`, if the parameter is an adapted weight.
    fn adapted<'a>(&self, parameter: &'a str) -> Option<&'a str> {
        let layer = parameter.strip_suffix(".weight")?;
        let (path, name) = layer.rsplit_once('.')?;
        // Training has no encoder hidden states to attend to.
        if path.ends_with("crossattention") {
            return None;
        }
        self.targets.iter().any(|target| target == name).then_some(layer)
    }
}

/// Frozen weights of a model, some of them with adapters.
///
/// ```
/// use candle_core::Device;
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_training::{Hyperparameters, Lora, LoraConfig, Parameters, Trainer};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let base = Parameters::initialize(&sizes, 1, &Device::Cpu)?;
/// let config = LoraConfig { rank: 4, alpha: 8.0, targets: vec!["c_attn".into()] };
/// let (lora, adapters) = Lora::new(&sizes, config, &base, 1)?;
/// assert_eq!(adapters.count(), 2 * (4 * 6 + 18 * 4), "`a` (4, 6) and `b` (18, 4) in each of two blocks");
/// let numbers = Hyperparameters { context: 8, ..Hyperparameters::default() };
/// assert!(Trainer::with_adapters(&sizes, lora, adapters, numbers)?.lora().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias("PeftModel", "adapter"))]
pub struct Lora {
    config: LoraConfig,
    base: HashMap<String, Tensor>,
}

/// Returns the names of `A` and `B` among the trained parameters.
fn adapter_names(layer: &str) -> (String, String) {
    (format!("{layer}.lora_A.weight"), format!("{layer}.lora_B.weight"))
}

impl Lora {
    /// Creates fresh adapters for the weights of `base`; these weights stay frozen.
    ///
    /// A classification or choice head is trained in full, like PEFT's `modules_to_save`.
    ///
    /// # Errors
    /// If an option is out of range, or allocation fails on the device.
    pub fn new(
        model: &Gpt2Config,
        config: LoraConfig,
        base: &Parameters,
        seed: u64,
    ) -> std::result::Result<(Self, Parameters), TrainingError> {
        config.check(model)?;
        let mut generator = Stream::Initialization.generator(seed);
        let mut named = Vec::new();
        for (name, weight) in base.iter() {
            if HeadKind::of_parameter(name).is_some() {
                named.push((name.to_owned(), weight.clone()));
            }
            let Some(layer) = config.adapted(name) else { continue };
            let (output, input) = weight.dims2()?;
            let bound = 1.0 / (input as f64).sqrt();
            #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
            let draw = |_| ((2.0 * generator.uniform() - 1.0) * bound) as f32;
            let a: Vec<f32> = (0..config.rank * input).map(draw).collect();
            let a = Tensor::from_vec(a, (config.rank, input), weight.device())?;
            let b = Tensor::zeros((output, config.rank), a.dtype(), weight.device())?;
            let (name_a, name_b) = adapter_names(layer);
            named.push((name_a, Var::from_tensor(&a)?));
            named.push((name_b, Var::from_tensor(&b)?));
        }
        let fixed = base.iter().filter(|(name, _)| HeadKind::of_parameter(name).is_none());
        let base = fixed.map(|(name, weight)| (name.to_owned(), weight.as_tensor().detach())).collect();
        Ok((Self { config, base }, Parameters::from_named(named)))
    }

    /// Size and target layers of the adapters.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Returns a parameter source with the frozen weights and the adapters.
    pub(crate) fn source<'a>(&'a self, adapters: &'a Parameters, tracking: Tracking) -> AdaptedSource<'a> {
        AdaptedSource { lora: self, adapters, tracking, path: String::new() }
    }

    /// Returns a weight with its adapter merged.
    pub(crate) fn merged_parameter(&self, name: &str, adapters: &Parameters) -> Result<Option<Tensor>> {
        let Some(weight) = self.base.get(name) else { return Ok(None) };
        match self.matrix(name, weight, adapters, Tracking::Tracked)? {
            Matrix::Dense(weight) => Ok(Some(weight)),
            adapted => Ok(Some(adapted.to_tensor()?)),
        }
    }

    /// Returns a weight together with its unmerged adapter, if it has one.
    fn matrix(
        &self,
        name: &str,
        weight: &Tensor,
        adapters: &Parameters,
        tracking: Tracking,
    ) -> Result<Matrix> {
        let base = Matrix::Dense(weight.clone());
        let Some((name_a, name_b)) = self.config.adapted(name).map(adapter_names) else {
            return Ok(base);
        };
        let (Some(a), Some(b)) = (adapters.get(&name_a), adapters.get(&name_b)) else {
            candle_core::bail!(
                "the adapter for `{name}` is incomplete: expected the tensors `{name_a}` and `{name_b}`"
            );
        };
        let scale = self.config.alpha / self.config.rank as f64;
        let adapted = AdaptedMatrix::new(base, tracking.of(a), tracking.of(b), scale)?;
        Ok(Matrix::Adapted(adapted.into()))
    }

    /// Writes the adapters to `folder` in PEFT's format, and creates the folder if it is missing.
    ///
    /// `base_model` is the path or name of the model that the adapters were trained on.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save(
        &self,
        adapters: &Parameters,
        folder: &Path,
        base_model: Option<&str>,
    ) -> std::result::Result<(), TrainingError> {
        fs::create_dir_all(folder).map_err(|error| TrainingError::File { path: folder.to_owned(), error })?;
        let head = adapters.iter().find_map(|(name, _)| Some((name, HeadKind::of_parameter(name)?)));
        let task = match head.map_or(HeadKind::LanguageModel, |(_, kind)| kind) {
            HeadKind::LanguageModel => Some("CAUSAL_LM"),
            HeadKind::SequenceClassification => Some("SEQ_CLS"),
            HeadKind::TokenClassification => Some("TOKEN_CLS"),
            // PEFT has no task for multiple choice.
            HeadKind::DoubleHeads => None,
        };
        // PEFT's `fan_in_fan_out` means that GPT-2's layers store their weights as (in, out).
        let mut config = json!({
            "peft_type": "LORA", "task_type": task, "r": self.config.rank,
            "lora_alpha": self.config.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": true,
            "target_modules": self.config.targets, "base_model_name_or_path": base_model, "inference_mode": true,
        });
        if let Some((name, _)) = head {
            config["modules_to_save"] = json!([name.split('.').next()]);
        }
        let written = format!("{config:#}\n");
        replace_file(&folder.join("adapter_config.json"), |partial| Ok(fs::write(partial, written)?))?;
        let tensors = adapters.iter().map(|(name, variable)| {
            let within = if HeadKind::of_parameter(name).is_some() { "" } else { "transformer." };
            (format!("base_model.model.{within}{name}"), variable.as_tensor().detach())
        });
        let (tensors, metadata) = (tensors.collect(), [("format".to_owned(), "pt".to_owned())].into());
        let file = folder.join("adapter_model.safetensors");
        Ok(replace_file(&file, |partial| Ok(write_tensors(partial, &tensors, metadata)?))?)
    }
}

/// Parameter source for a model with adapters.
#[derive(Clone)]
pub(crate) struct AdaptedSource<'a> {
    lora: &'a Lora,
    adapters: &'a Parameters,
    tracking: Tracking,
    path: String,
}

impl AdaptedSource<'_> {
    fn weight(&self, shape: &Shape, name: &str) -> Result<(String, &Tensor)> {
        let name = format!("{}{name}", self.path);
        match self.lora.base.get(&name) {
            Some(weight) if weight.shape() == shape => Ok((name, weight)),
            Some(weight) => {
                candle_core::bail!("parameter `{name}`: expected shape {shape:?}, found {:?}", weight.shape())
            }
            None => candle_core::bail!("parameter `{name}` is missing"),
        }
    }
}

impl ParameterSource for AdaptedSource<'_> {
    fn below(&self, name: impl ToString) -> Self {
        Self { path: format!("{}{}.", self.path, name.to_string()), ..*self }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, _: Init) -> Result<Tensor> {
        Ok(self.weight(&shape.into(), name)?.1.clone())
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str, _: Init) -> Result<Matrix> {
        let (name, weight) = self.weight(&(out_features, in_features).into(), name)?;
        self.lora.matrix(&name, weight, self.adapters, self.tracking)
    }
}
