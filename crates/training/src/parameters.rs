//! The trainable parameters of a model: named variables in the order of [`expected_parameters`].
//!
//! Initialisation is GPT-2's: normal with a deviation of `initializer_range` (0.02), divided by `sqrt(2 n_layer)` for the
//! two projections of each block that end in the residual stream ("Language Models are Unsupervised Multitask Learners",
//! section 2.3; transformers' `GPT2PreTrainedModel._init_weights`); biases 0, norms 1.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use gpt2::{Gpt2Config, expected_parameters};
use gpt2_weights::{Checkpoint, ReadProgress, WeightsError};

use crate::streams::Stream;

/// The parameters of a model, in f32, by name.
#[derive(Debug)]
pub struct Parameters {
    named: Vec<(String, Var)>,
}

impl Parameters {
    /// Fresh parameters.
    ///
    /// # Errors
    /// When the configuration is not sound, see [`Gpt2Config::check`], or the device has no room.
    pub fn initialize(config: &Gpt2Config, seed: u64, device: &Device) -> Result<Self> {
        config.check()?;
        let mut generator = Stream::Initialization.generator(seed);
        let residual = config.initializer_range / (2.0 * config.n_layer as f64).sqrt();
        let mut named = Vec::new();
        for parameter in expected_parameters(config) {
            let count = parameter.shape.iter().product();
            let is_norm = parameter.name.contains("ln_");
            let values: Vec<f32> = if parameter.name.ends_with("bias") {
                vec![0.0; count]
            } else if is_norm {
                vec![1.0; count]
            } else {
                let ends_in_residual = parameter.name.ends_with("c_proj.weight");
                let deviation = if ends_in_residual { residual } else { config.initializer_range };
                #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
                let draw = |_| (generator.normal() * deviation) as f32;
                (0..count).map(draw).collect()
            };
            let tensor = Tensor::from_vec(values, parameter.shape.as_slice(), device)?;
            named.push((parameter.name, Var::from_tensor(&tensor)?));
        }
        Ok(Self { named })
    }

    /// The parameters of a checkpoint. `progress` is told how many bytes were read since the last call, and asked
    /// whether to go on.
    ///
    /// # Errors
    /// When its tensors are not those of its configuration, or cannot be read; [`WeightsError::Interrupted`] where `progress`
    /// says so.
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &dyn ReadProgress,
    ) -> std::result::Result<Self, WeightsError> {
        checkpoint.check()?;
        let mut named = Vec::new();
        for parameter in expected_parameters(checkpoint.config()) {
            let tensor = checkpoint.parameter(&parameter.name, device, progress)?;
            let missing = || candle_core::Error::Msg(format!("`{}` holds no weights", parameter.name));
            let tensor = tensor.ok_or_else(missing)?.to_dtype(DType::F32)?.contiguous()?;
            named.push((parameter.name, Var::from_tensor(&tensor)?));
        }
        Ok(Self { named })
    }

    /// Parameters from tensors by name.
    ///
    /// # Errors
    /// When one is missing or has another shape.
    pub fn from_tensors(config: &Gpt2Config, tensors: &HashMap<String, Tensor>) -> Result<Self> {
        let mut named = Vec::new();
        for parameter in expected_parameters(config) {
            let Some(tensor) = tensors.get(&parameter.name) else {
                candle_core::bail!("the parameter `{}` is missing", parameter.name);
            };
            if tensor.dims() != parameter.shape {
                let (expected, found) = (&parameter.shape, tensor.dims());
                candle_core::bail!("`{}`: expected {expected:?}, found {found:?}", parameter.name);
            }
            named.push((parameter.name, Var::from_tensor(&tensor.contiguous()?)?));
        }
        Ok(Self { named })
    }

    /// Parameters under these names, in this order.
    pub(crate) fn from_named(named: Vec<(String, Var)>) -> Self {
        Self { named }
    }

    /// Every parameter with its name, always in the same order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.named.iter().map(|(name, variable)| (name.as_str(), variable))
    }

    /// The parameter `name`.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, variable)| variable)
    }

    /// Number of trainable values.
    pub fn count(&self) -> usize {
        self.named.iter().map(|(_, variable)| variable.elem_count()).sum()
    }

    /// The device they are on.
    pub(crate) fn device(&self) -> Device {
        self.named.first().map_or(Device::Cpu, |(_, variable)| variable.device().clone())
    }

    /// What a model loads itself from, with gradients leading to these variables.
    pub(crate) fn tracked(&self, device: &Device) -> VarBuilder<'static> {
        let tensors = self.named.iter().map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
        VarBuilder::from_tensors(tensors.collect(), DType::F32, device)
    }
}
