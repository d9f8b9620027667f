//! Feature dictionaries in training: kinds, hyperparameters and hook points.
//!
//! A dictionary represents the values `x` at a hook point as a sum of a few directions out of many,
//! `x̂ = z W_dec + b_dec`, where few of the latents `z` are nonzero. A transcoder represents the output of an
//! MLP in this way, based on the MLP's input. A cross-layer transcoder represents the outputs of all MLPs, based
//! on their inputs.
//!
//! `objective.rs` has losses and gradients, `learner.rs` the state between steps, `metrics.rs` the
//! evaluation, `save.rs` the files, and `save_layers.rs` the files of cross-layer transcoders.
//!
//! Sources:
//!
//! - "Scaling and evaluating sparse autoencoders" (arXiv:2406.04093) and openai/sparse_autoencoder for top-k,
//!   dead latents and the initialization.
//! - "BatchTopK Sparse Autoencoders" (arXiv:2412.06410).
//! - "Jumping Ahead" (arXiv:2407.14435) for JumpReLU.
//! - "Improving Dictionary Learning with Gated Sparse Autoencoders" (arXiv:2404.16014).
//! - "Learning Multi-Level Features with Matryoshka Sparse Autoencoders" (arXiv:2503.17547).
//! - "Transcoders Beat Sparse Autoencoders for Interpretability" (arXiv:2501.18823) for the skip connection.
//! - "Circuit Tracing: Revealing Computational Graphs in Language Models"
//!   (<https://transformer-circuits.pub/2025/attribution-graphs/methods.html>) for cross-layer transcoders.

mod learner;
mod metrics;
mod objective;
mod save;
mod save_layers;

use std::fmt;
use std::str::FromStr;

use candle_gpt2::{Gpt2Config, Site, SiteKind};
use candle_gpt2_interpret::{TranscoderInput, named_site, named_sites, site_width};
use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

pub(crate) use learner::Learner;
pub use metrics::{CrossEntropies, DictionaryMetrics};
pub(crate) use metrics::{MAX_EVALUATED_TOKENS, MIN_SEQUENCE_LEN};
pub use save::{CONFIG_FILE, WEIGHTS_FILE};
pub(crate) use save::{files, save};
pub use save_layers::{LAYERS_CONFIG_FILE, layer_files};

use crate::TrainingError;

/// Kind of a dictionary; it determines the active latents and the output.
///
/// ```
/// use candle_gpt2_training::DictionaryKind;
///
/// assert_eq!("batch-top-k".parse(), Ok(DictionaryKind::BatchTopK));
/// assert!("top-5".parse::<DictionaryKind>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DictionaryKind {
    /// The `k` largest latents for every token are active.
    #[default]
    TopK,
    /// The largest latents in a batch are active, `k` per token on average.
    ///
    /// Outside training, latents above a threshold are active. The threshold is the running mean of the
    /// smallest kept value.
    BatchTopK,
    /// Nested [`DictionaryKind::BatchTopK`] with the first F/16, F/8, F/4, F/2 and all latents.
    Matryoshka,
    /// Positive latents are active, with an L1 penalty.
    Standard,
    /// Latents above learned thresholds are active, `k` per token on average.
    JumpRelu,
    /// Latents with an open gate are active; a separate path computes their magnitudes.
    Gated,
    /// Maps the input of an MLP to its output, with latents as in [`DictionaryKind::BatchTopK`].
    Transcoder,
    /// [`DictionaryKind::Transcoder`] with a parallel linear map.
    SkipTranscoder,
    /// Maps the input of every MLP to its output and the outputs of later MLPs.
    ///
    /// Latents are selected as in [`DictionaryKind::BatchTopK`], over all blocks together.
    CrossLayerTranscoder,
}

impl DictionaryKind {
    /// All kinds with their names.
    pub const NAMES: [(&'static str, Self); 9] = [
        ("top-k", Self::TopK),
        ("batch-top-k", Self::BatchTopK),
        ("matryoshka", Self::Matryoshka),
        ("standard", Self::Standard),
        ("jump-relu", Self::JumpRelu),
        ("gated", Self::Gated),
        ("transcoder", Self::Transcoder),
        ("skip-transcoder", Self::SkipTranscoder),
        ("cross-layer-transcoder", Self::CrossLayerTranscoder),
    ];

    /// Whether the input and output hook points differ.
    pub fn is_transcoder(self) -> bool {
        matches!(self, Self::Transcoder | Self::SkipTranscoder | Self::CrossLayerTranscoder)
    }

    /// Whether a running threshold selects the latents outside training.
    pub(crate) fn has_running_threshold(self) -> bool {
        matches!(self, Self::BatchTopK | Self::Matryoshka) || self.is_transcoder()
    }

    /// Whether a penalty, not `k`, determines the number of active latents.
    pub fn is_penalized(self) -> bool {
        matches!(self, Self::Gated | Self::Standard)
    }
}

impl FromStr for DictionaryKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        UnknownName::find(&Self::NAMES, name)
    }
}

impl fmt::Display for DictionaryKind {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(_, kind)| kind == self);
        formatter.write_str(named.map_or("", |(name, _)| name))
    }
}

/// Hyperparameters of a dictionary, part of [`Hyperparameters`](crate::Hyperparameters).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DictionaryNumbers {
    /// Kind of the dictionary.
    pub kind: DictionaryKind,
    /// Input hook point, by any of its names.
    ///
    /// For a cross-layer transcoder the name has no block, because it reads every block.
    pub site: String,
    /// Output hook point; `None` means the default.
    ///
    /// The default is the input hook point. For a transcoder, it is the MLP output in the block of `site`.
    pub output_site: Option<String>,
    /// Number of latents; for a cross-layer transcoder, per block.
    pub latents: usize,
    /// Number of active latents per token, over all blocks; unused by standard and gated dictionaries.
    pub k: usize,
    /// Weight of the sparsity loss, relative to the fraction of variance unexplained.
    ///
    /// For JumpReLU, the sparsity loss is the square of `L0 / k − 1`. For standard and gated dictionaries, it
    /// is the sum of the latents or open gates, divided by the square root of the width.
    pub sparsity: f64,
    /// Number of tokens without activity after which a latent is dead.
    ///
    /// A dead latent learns from the remaining error.
    pub dead_after: u64,
}

impl DictionaryNumbers {
    /// Returns the input and output hook points with their widths in a model.
    ///
    /// There is one pair, or one per block for a cross-layer transcoder.
    ///
    /// # Errors
    /// If a name is invalid, a block does not exist, or a hook point does not have one vector per token. If a
    /// dictionary other than a transcoder has an output hook point, or the output cannot be derived or comes
    /// before the input.
    pub fn sites(&self, config: &Gpt2Config) -> Result<Vec<[(Site, usize); 2]>, TrainingError> {
        let call = |what: String| TrainingError::Call { what };
        if self.kind == DictionaryKind::CrossLayerTranscoder {
            return self.sites_of_blocks(config);
        }
        let found = |option: &str, name: &str| {
            let site = named_site(name).map_err(|error| call(format!("`{option}`: {error}")))?;
            if let Some(layer) = site.layer.filter(|layer| *layer >= config.n_layer) {
                let what = format!(
                    "`{option}`: {site}: there is no block {layer}; the model's {} blocks are counted from 0",
                    config.n_layer
                );
                return Err(call(what));
            }
            let no_vector = || {
                call(format!(
                    "`{option}`: {site} does not have one vector per token; \
                     choose a residual stream, a normalized input, queries, keys, values, \
                     z, or an MLP's neurons or output"
                ))
            };
            Ok((site, site_width(site, config).ok_or_else(no_vector)?))
        };
        let input = found("site", &self.site)?;
        let output = match (&self.output_site, self.kind.is_transcoder(), input.0.layer) {
            (None, false, _) => input,
            (Some(name), true, _) => found("output_site", name)?,
            (None, true, Some(layer)) => found("output_site", &format!("blocks.{layer}.hook_mlp_out"))?,
            (None, true, None) => {
                return Err(call("`output_site`: set the hook point that the transcoder writes to".into()));
            }
            (Some(_), false, _) => {
                let what =
                    "`output_site` is for transcoders; the other kinds reconstruct their input".to_owned();
                return Err(call(what));
            }
        };
        // The embeddings come before all blocks, and the final norm comes after them.
        let order = |site: Site| match (site.layer, site.kind) {
            (Some(layer), _) => (layer + 1, site),
            (None, SiteKind::Embed | SiteKind::PosEmbed) => (0, site),
            (None, _) => (usize::MAX, site),
        };
        if order(output.0) < order(input.0) {
            let what = format!(
                "`output_site`: {} comes before the input {}; choose a later hook point",
                output.0, input.0
            );
            return Err(call(what));
        }
        Ok(vec![[input, output]])
    }

    /// Returns the hook points of a cross-layer transcoder.
    fn sites_of_blocks(&self, config: &Gpt2Config) -> Result<Vec<[(Site, usize); 2]>, TrainingError> {
        let call = |what: String| TrainingError::Call { what };
        if self.output_site.is_some() {
            let what = "`output_site`: a cross-layer transcoder writes the outputs of all MLPs; \
                remove the option";
            return Err(call(what.into()));
        }
        let blocks = config.n_layer;
        let inputs = named_sites(&self.site, blocks).map_err(|error| call(format!("`site`: {error}")))?;
        // circuit-tracer uses ln2.hook_normalized for a different value, see `Transcoders`.
        if inputs.iter().any(|site| TranscoderInput::of_kind(site.kind) != Some(TranscoderInput::ResidMid)) {
            let what = format!(
                "`site`: a cross-layer transcoder reads hook_resid_mid in every block; found {}",
                self.site
            );
            return Err(call(what));
        }
        let is_whole = inputs.len() == blocks && inputs.iter().all(|site| site.kind == inputs[0].kind);
        if !is_whole {
            let what = format!(
                "`site`: a cross-layer transcoder reads all blocks; \
                 give the hook point without a block, such as hook_resid_mid; found {}",
                self.site
            );
            return Err(call(what));
        }
        let outputs = (0..blocks).map(|layer| Site::in_block(layer, SiteKind::MlpOut));
        Ok(inputs
            .into_iter()
            .zip(outputs)
            .map(|pair| [pair.0, pair.1].map(|site| (site, config.n_embd)))
            .collect())
    }

    /// Number of trainable parameters, for a model with this configuration.
    ///
    /// # Errors
    /// See [`DictionaryNumbers::sites`].
    pub fn parameter_count(&self, config: &Gpt2Config) -> Result<usize, TrainingError> {
        let (sites, latents) = (self.sites(config)?, self.latents);
        let blocks = sites.len();
        let [(_, inputs), (_, outputs)] = sites[0]; // There is at least one block.
        let more = match self.kind {
            DictionaryKind::JumpRelu => latents,
            DictionaryKind::Gated => 2 * latents,
            DictionaryKind::SkipTranscoder => inputs * outputs,
            _ => 0,
        };
        // One matrix from each block to its own output, and one to the output of each later block.
        let decoder = blocks * (blocks + 1) / 2 * latents * outputs;
        Ok(decoder + blocks * (latents * (inputs + 1) + outputs) + more)
    }

    /// Validates every hyperparameter.
    ///
    /// # Errors
    /// If one is out of range, and in the cases of [`DictionaryNumbers::sites`].
    pub fn check(&self, config: &Gpt2Config) -> Result<(), TrainingError> {
        /// Maximum number of latents, far larger than any GPT-2 dictionary.
        const MAX_LATENTS: usize = 1 << 24;
        let refuse = |option, expected: String, found: String| {
            Err(TrainingError::OptionOutOfRange { option, expected, found })
        };
        let blocks = self.sites(config)?.len();
        if !(1..=MAX_LATENTS).contains(&self.latents) {
            return refuse("latents", format!("from 1 to {MAX_LATENTS}"), self.latents.to_string());
        }
        let latents = blocks * self.latents;
        if !(1..=latents).contains(&self.k) {
            let expected = format!("from 1 to {latents}, the number of latents");
            return refuse("k", expected, self.k.to_string());
        }
        if !(self.sparsity >= 0.0 && self.sparsity.is_finite()) {
            return refuse("sparsity", "a number of at least 0".into(), self.sparsity.to_string());
        }
        if self.dead_after == 0 {
            return refuse("dead_after", "at least 1".into(), "0".into());
        }
        Ok(())
    }
}
