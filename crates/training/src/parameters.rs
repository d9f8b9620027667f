//! Trainable parameters of a model: named variables in the order of [`expected_parameters`].

use std::collections::HashMap;
use std::str::FromStr;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2::{ByOutput, Gpt2Config, Parameter, expected_parameters};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_kernels::contiguous;
use candle_gpt2_weights::{Checkpoint, ReadProgress, UnknownName, WeightsError};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use crate::streams::Stream;

/// Initialization for a model trained from scratch.
///
/// ```
/// use candle_gpt2_training::Initialization;
///
/// assert_eq!("mimetic".parse(), Ok(Initialization::Mimetic));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initialization {
    /// GPT-2's initialization, see [`Parameter::init`].
    #[default]
    Gpt2,
    /// GPT-2's initialization with these changes:
    ///
    /// - Sinusoidal position embeddings, and heads that copy the tokens they attend to. The output weights of
    ///   attention are the transposed value weights, scaled down in the first block so that the token itself
    ///   stays readable ("Mimetic Initialization of Self-Attention Layers", arXiv:2305.09828).
    /// - MLPs with zero output. The weights of narrow models are large, so the MLPs' initial noise would
    ///   drown the residual stream.
    /// - If there are two blocks, a previous-token head (0.0) and an induction head (1.0) that reads its
    ///   output. A small model may never discover this pair on its own.
    Mimetic,
}

impl Initialization {
    /// All initializations with their names.
    pub const NAMES: [(&'static str, Self); 2] = [("gpt2", Self::Gpt2), ("mimetic", Self::Mimetic)];
}

impl FromStr for Initialization {
    type Err = UnknownName;

    fn from_str(name: &str) -> std::result::Result<Self, UnknownName> {
        UnknownName::find(&Self::NAMES, name)
    }
}

/// Parameters of a model in f32, by name.
#[derive(Debug)]
#[doc(alias = "VarMap")]
pub struct Parameters {
    named: Vec<(String, Var)>,
}

impl Parameters {
    /// Creates fresh parameters with GPT-2's initialization.
    ///
    /// # Errors
    /// If the configuration is invalid, see [`Gpt2Config::check`], or allocation fails on the device.
    pub fn initialize(config: &Gpt2Config, seed: u64, device: &Device) -> Result<Self> {
        config.check()?;
        let mut generator = Stream::Initialization.generator(seed);
        let named = expected_parameters(config).into_iter().map(|parameter| {
            let variable = fresh(&parameter, &mut generator, device)?;
            Ok((parameter.name, variable))
        });
        Ok(Self { named: named.collect::<Result<_>>()? })
    }

    /// Creates fresh parameters with the selected initialization.
    ///
    /// # Errors
    /// See [`Parameters::initialize`].
    pub fn initialize_as(
        initialization: Initialization,
        config: &Gpt2Config,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let parameters = Self::initialize(config, seed, device)?;
        if initialization == Initialization::Mimetic {
            parameters.begin_mimetic(config)?;
        }
        Ok(parameters)
    }

    /// Applies the changes of [`Initialization::Mimetic`].
    fn begin_mimetic(&self, config: &Gpt2Config) -> Result<()> {
        /// Scale of the first block's heads, at which their output is as long as a token embedding.
        const FIRST_BLOCK: f64 = 0.15;
        if let Some(wpe) = self.get("wpe.weight") {
            wpe.set(&sinusoids(config, wpe.device())?)?;
        }
        for block in 0..config.n_layer {
            let weight = |name| self.get(&format!("h.{block}.attn.{name}.weight"));
            let (Some(c_attn), Some(c_proj)) = (weight("c_attn"), weight("c_proj")) else { continue };
            // The rows are outputs: queries, keys, values.
            let values = c_attn.narrow(0, 2 * config.n_embd, config.n_embd)?;
            let part = if block == 0 { FIRST_BLOCK } else { 1.0 };
            c_proj.set(&(values.t()? * part)?.contiguous()?)?;
            if let Some(mlp) = self.get(&format!("h.{block}.mlp.c_proj.weight")) {
                mlp.set(&mlp.zeros_like()?)?;
            }
        }
        if config.n_layer > 1 {
            self.begin_induction(config, FIRST_BLOCK)?;
        }
        Ok(())
    }

    /// Sets up a previous-token head (0.0) and an induction head (1.0).
    ///
    /// Head 1.0 attends to the token after an earlier occurrence of the current token. `written` scales the
    /// output of head 0.0.
    fn begin_induction(&self, config: &Gpt2Config, written: f64) -> Result<()> {
        /// Weight of the sinusoids in the queries and keys of head 0.0.
        ///
        /// With this value, the score of the previous token is near 16.
        const SHARPNESS: f64 = 2.0;
        /// Factor on the value weights that serve as queries for the induction head.
        const MATCHING: f64 = 3.0;
        let weight = |name| {
            self.get(name).ok_or_else(|| candle_core::Error::Msg(format!("parameter `{name}` is missing")))
        };
        let (width, size) = (config.n_embd, config.n_embd / config.n_head);
        let (half, pairs) = (width.div_ceil(2), size / 2);
        let device = self.device();
        // Keys read the sinusoids of the highest frequencies. Queries read the same ones, rotated back by one
        // position.
        let (mut queries, mut keys) = (vec![0f32; size * width], vec![0f32; size * width]);
        for pair in 0..pairs.min(width / 2) {
            let (sine, cosine) = (pair, half + pair);
            let (sine_row, cosine_row) = (pair * width, (pairs + pair) * width);
            let angle = frequency(pair, half);
            #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
            let [one, along, across] =
                [1.0, libm::cos(angle), libm::sin(angle)].map(|part| (SHARPNESS * part) as f32);
            (keys[sine_row + sine], keys[cosine_row + cosine]) = (one, one);
            (queries[sine_row + sine], queries[sine_row + cosine]) = (along, -across);
            (queries[cosine_row + cosine], queries[cosine_row + sine]) = (along, across);
        }
        let matrix = |values| Tensor::from_vec(values, (size, width), &device);
        let [first, second] = [weight("h.0.attn.c_attn.weight")?, weight("h.1.attn.c_attn.weight")?];
        let values = first.narrow(0, 2 * width, size)?;
        for (block, row, rows) in [
            (first, 0, matrix(queries)?),
            (first, width, matrix(keys)?),
            // The induction head looks for the token whose values the previous-token head moved.
            (second, 0, (values * MATCHING)?),
        ] {
            block.set(&block.slice_assign(&[row..row + size, 0..width], &rows)?)?;
        }
        // The previous-token head writes to the subspace that the induction head's keys read.
        let read = (second.narrow(0, width, size)?.t()? * written)?;
        let c_proj = weight("h.0.attn.c_proj.weight")?;
        c_proj.set(&c_proj.slice_assign(&[0..width, 0..size], &read)?)
    }

    /// Adapts the parameters to another configuration: reuses them by name and creates the missing ones.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn with_fresh_head(self, config: &Gpt2Config, seed: u64) -> Result<Self> {
        let (mut generator, device) = (Stream::Head.generator(seed), self.device());
        let mut here: HashMap<String, Var> = self.named.into_iter().collect();
        let named = expected_parameters(config).into_iter().map(|parameter| {
            let variable = match here.remove(&parameter.name) {
                Some(variable) => variable,
                None => fresh(&parameter, &mut generator, &device)?,
            };
            Ok((parameter.name, variable))
        });
        Ok(Self { named: named.collect::<Result<_>>()? })
    }

    /// Splits the parameters into trainable and fixed ones.
    ///
    /// If `train_blocks` is set, the embeddings and all but the last `train_blocks` blocks are fixed.
    /// Cross-attention is always fixed, because training has no encoder hidden states.
    pub fn split(self, config: &Gpt2Config, train_blocks: Option<usize>) -> (Self, HashMap<String, Tensor>) {
        let first = train_blocks.map_or(0, |count| config.n_layer.saturating_sub(count));
        let is_trained = |name: &str| {
            let block =
                name.strip_prefix("h.").and_then(|rest| rest.split_once('.')?.0.parse::<usize>().ok());
            let is_below = match block {
                Some(block) => block < first,
                None => train_blocks.is_some() && (name.starts_with("wte.") || name.starts_with("wpe.")),
            };
            let is_of_encoder = name.contains("crossattention.") || name.contains("ln_cross_attn.");
            !is_below && !is_of_encoder
        };
        let (trained, fixed): (Vec<_>, Vec<_>) =
            self.named.into_iter().partition(|(name, _)| is_trained(name));
        let fixed = fixed.into_iter().map(|(name, variable)| (name, variable.as_tensor().detach()));
        (Self { named: trained }, fixed.collect())
    }

    /// Loads the parameters of a checkpoint.
    ///
    /// `progress` receives the number of bytes read since the last call, and may abort the load.
    ///
    /// # Errors
    /// If the tensors do not match the configuration or cannot be read; [`WeightsError::Interrupted`] if
    /// `progress` aborts.
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &dyn ReadProgress,
    ) -> std::result::Result<Self, WeightsError> {
        checkpoint.check()?;
        let mut named = Vec::new();
        for parameter in expected_parameters(checkpoint.config()) {
            let tensor = checkpoint.parameter(&parameter.name, device, progress)?;
            let missing =
                || candle_core::Error::Msg(format!("parameter `{}` has no weights", parameter.name));
            let tensor = contiguous(&tensor.ok_or_else(missing)?.to_dtype(DType::F32)?)?;
            named.push((parameter.name, Var::from_tensor(&tensor)?));
        }
        Ok(Self { named })
    }

    /// Creates parameters from tensors by name.
    ///
    /// # Errors
    /// If one is missing or has the wrong shape.
    pub fn from_tensors(config: &Gpt2Config, tensors: &HashMap<String, Tensor>) -> Result<Self> {
        let mut named = Vec::new();
        for parameter in expected_parameters(config) {
            let Some(tensor) = tensors.get(&parameter.name) else {
                candle_core::bail!("parameter `{}` is missing", parameter.name);
            };
            if tensor.dims() != parameter.shape {
                let (expected, found) = (&parameter.shape, tensor.dims());
                candle_core::bail!(
                    "parameter `{}`: expected shape {expected:?}, found {found:?}",
                    parameter.name
                );
            }
            named.push((parameter.name, Var::from_tensor(&tensor.contiguous()?)?));
        }
        Ok(Self { named })
    }

    /// Creates parameters with these names, in this order.
    pub(crate) fn from_named(named: Vec<(String, Var)>) -> Self {
        Self { named }
    }

    /// Iterates over all parameters with their names, always in the same order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.named.iter().map(|(name, variable)| (name.as_str(), variable))
    }

    /// Returns the parameter `name`.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, variable)| variable)
    }

    /// Number of trainable parameters.
    pub fn count(&self) -> usize {
        self.named.iter().map(|(_, variable)| variable.elem_count()).sum()
    }

    /// Device of the parameters.
    pub(crate) fn device(&self) -> Device {
        self.named.first().map_or(Device::Cpu, |(_, variable)| variable.device().clone())
    }

    /// Returns a parameter source with these variables and the tensors in `fixed`.
    pub(crate) fn source_with_fixed(
        &self,
        fixed: &HashMap<String, Tensor>,
        device: &Device,
        tracking: Tracking,
    ) -> ByOutput<'static> {
        let variables = self.named.iter().map(|(name, variable)| (name.clone(), tracking.of(variable)));
        let fixed = fixed.iter().map(|(name, tensor)| (name.clone(), tensor.clone()));
        ByOutput(VarBuilder::from_tensors(fixed.chain(variables).collect(), DType::F32, device))
    }
}

/// Creates a parameter with its initial values.
fn fresh(parameter: &Parameter, generator: &mut RandomStream, device: &Device) -> Result<Var> {
    let count = parameter.shape.iter().product();
    #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
    let values: Vec<f32> = match parameter.init {
        Init::Const(value) => vec![value as f32; count],
        Init::Randn { mean, stdev } => {
            (0..count).map(|_| (mean + generator.normal() * stdev) as f32).collect()
        }
        other => candle_core::bail!("parameter `{}`: unsupported initialization {other:?}", parameter.name),
    };
    Var::from_tensor(&Tensor::from_vec(values, parameter.shape.as_slice(), device)?)
}

/// Returns sinusoidal position embeddings, `[n_positions, n_embd]`: sines, then cosines.
///
/// Frequencies range from 3 down to 0.003 radians per position. The highest one distinguishes neighbors, and
/// the lowest one distinguishes the ends of a thousand tokens. The root mean square equals the standard
/// deviation of the other initial weights.
fn sinusoids(config: &Gpt2Config, device: &Device) -> Result<Tensor> {
    let half = config.n_embd.div_ceil(2);
    let amplitude = config.initializer_range * std::f64::consts::SQRT_2;
    #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
    let value = |position: usize, place: usize| {
        let angle = position as f64 * frequency(place % half, half);
        (amplitude * if place < half { libm::sin(angle) } else { libm::cos(angle) }) as f32
    };
    let values = (0..config.n_positions)
        .flat_map(|position| (0..config.n_embd).map(move |place| value(position, place)))
        .collect();
    Tensor::from_vec(values, (config.n_positions, config.n_embd), device)
}

/// Frequency of sinusoid `index` of `count`, in radians per position; the first is the highest.
fn frequency(index: usize, count: usize) -> f64 {
    const FASTEST: f64 = 3.0;
    const RANGE: f64 = 1000.0;
    FASTEST * libm::pow(RANGE, -(index as f64) / count as f64)
}

/// Gradient tracking for parameters in a computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Gradients flow to the parameters.
    Tracked,
    /// Parameters are detached, so candle stores no graph.
    Detached,
}

impl Tracking {
    /// Returns the parameter as an input for the computation.
    pub(crate) fn of(self, parameter: &Tensor) -> Tensor {
        match self {
            Self::Tracked => parameter.clone(),
            Self::Detached => parameter.detach(),
        }
    }
}
