//! Dictionaries of features in training: what there is to learn, and how.
//!
//! A dictionary writes the values `x` of a hook point as a sum of few directions out of many, `x̂ = z W_dec + b_dec`, where few of the
//! latents `z` are not zero; a transcoder writes the output of an MLP so, from its input, and a cross-layer transcoder the outputs of
//! all MLPs, from the input of each. `objective.rs` has losses and gradients, `learner.rs` the state between steps, `metrics.rs` how good
//! a dictionary is, `save.rs` the files, `save_layers.rs` those of cross-layer transcoders.
//!
//! Sources: "Scaling and evaluating sparse autoencoders" (arXiv:2406.04093) and openai/sparse_autoencoder for top-k, dead latents and
//! the beginning; "BatchTopK Sparse Autoencoders" (arXiv:2412.06410); "Jumping Ahead" (arXiv:2407.14435) for JumpReLU; "Improving
//! Dictionary Learning with Gated Sparse Autoencoders" (arXiv:2404.16014); "Learning Multi-Level Features with Matryoshka Sparse
//! Autoencoders" (arXiv:2503.17547); "Transcoders Beat Sparse Autoencoders for Interpretability"
//! (arXiv:2501.18823) for the skip connection; "Circuit Tracing: Revealing Computational Graphs in Language Models"
//! (<https://transformer-circuits.pub/2025/attribution-graphs/methods.html>) for cross-layer transcoders.

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
pub(crate) use metrics::{MOST_TOKENS, SHORTEST};
pub use save::{CONFIG_FILE, WEIGHTS_FILE};
pub(crate) use save::{files, save};
pub use save_layers::{LAYERS_CONFIG_FILE, layer_files};

use crate::TrainingError;

/// Which latents of a dictionary are active, and what it writes.
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
    /// The `k` largest of every token.
    #[default]
    TopK,
    /// The largest of a batch, `k` for each token on average; in use those above a threshold, a running mean of the least that was kept.
    BatchTopK,
    /// Nested [`DictionaryKind::BatchTopK`]: the first F/16, F/8, F/4, F/2 and all latents each reconstruct the values.
    Matryoshka,
    /// The positive ones, with an L1 penalty.
    Standard,
    /// Those above thresholds that are learnt, `k` for each token on average.
    JumpRelu,
    /// Those that a gate opens, with a size of their own.
    Gated,
    /// As [`DictionaryKind::BatchTopK`], from the input of an MLP to its output.
    Transcoder,
    /// The same beside a linear map.
    SkipTranscoder,
    /// As [`DictionaryKind::BatchTopK`] over all blocks together, from the input of every MLP to its output and to those after it.
    CrossLayerTranscoder,
}

impl DictionaryKind {
    /// Every kind by its name.
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

    /// Whether it writes the values of another hook point than it reads.
    pub fn is_transcoder(self) -> bool {
        matches!(self, Self::Transcoder | Self::SkipTranscoder | Self::CrossLayerTranscoder)
    }

    /// Whether a running threshold decides in use.
    pub(crate) fn has_running_threshold(self) -> bool {
        matches!(self, Self::BatchTopK | Self::Matryoshka) || self.is_transcoder()
    }

    /// Whether a penalty, not `k`, decides how many latents are active.
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

/// The numbers of a dictionary in training. Part of [`Hyperparameters`](crate::Hyperparameters).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DictionaryNumbers {
    /// Which latents are active.
    pub kind: DictionaryKind,
    /// The hook point that is read, by any of its names; of a cross-layer transcoder without the block, for it reads every one.
    pub site: String,
    /// The hook point that is written; `None` for the same one, or, of a transcoder, the output of the MLP in the block of `site`.
    pub output_site: Option<String>,
    /// Number of latents; of a cross-layer transcoder, of each block.
    pub latents: usize,
    /// Active latents for each token, of all blocks together; unused by standard and gated kinds.
    pub k: usize,
    /// Weight of sparsity beside the share of variance that is not explained: of JumpReLU the square of `L0 / k − 1`, of standard and gated
    /// ones the sum of the latents or open gates, divided by the root of the width.
    pub sparsity: f64,
    /// After how many tokens without being active a latent is dead, and learns to explain what the others leave.
    pub dead_after: u64,
}

impl DictionaryNumbers {
    /// The hook points that are read and written, and their widths in a model: a pair of them, or of a cross-layer transcoder one for
    /// each block.
    ///
    /// # Errors
    /// When a name is none, a block is not there, or a hook point has no vector for each token; when a dictionary that is no transcoder
    /// is to write another one than it reads, or there is no MLP to transcode.
    pub fn sites(&self, config: &Gpt2Config) -> Result<Vec<[(Site, usize); 2]>, TrainingError> {
        let call = |what: String| TrainingError::Call { what };
        if self.kind == DictionaryKind::CrossLayerTranscoder {
            return self.sites_of_blocks(config);
        }
        let found = |option: &str, name: &str| {
            let site = named_site(name).map_err(|error| call(format!("`{option}`: {error}")))?;
            if let Some(layer) = site.layer.filter(|layer| *layer >= config.n_layer) {
                let what = format!(
                    "`{option}`: {site}: there is no block {layer}; the model's {} are counted from 0",
                    config.n_layer
                );
                return Err(call(what));
            }
            let no_vector = || {
                call(format!(
                    "`{option}`: {site} has no vector for each token; take a residual stream, a normalized input, queries, keys, values, \
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
                return Err(call("`output_site`: give the hook point that the transcoder writes".into()));
            }
            (Some(_), false, _) => {
                let what =
                    "`output_site` is for transcoders: the other kinds reconstruct their input".to_owned();
                return Err(call(what));
            }
        };
        // Sites outside blocks: the embeddings before all blocks, the final norm after them.
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

    /// The hook points of a cross-layer transcoder.
    fn sites_of_blocks(&self, config: &Gpt2Config) -> Result<Vec<[(Site, usize); 2]>, TrainingError> {
        let call = |what: String| TrainingError::Call { what };
        if self.output_site.is_some() {
            let what = "`output_site`: a cross-layer transcoder writes the outputs of all MLPs";
            return Err(call(what.into()));
        }
        let blocks = config.n_layer;
        let inputs = named_sites(&self.site, blocks).map_err(|error| call(format!("`site`: {error}")))?;
        // circuit-tracer means another value by ln2.hook_normalized, see `Transcoders`.
        if inputs.iter().any(|site| TranscoderInput::of_kind(site.kind) != Some(TranscoderInput::ResidMid)) {
            let what = format!(
                "`site`: a cross-layer transcoder reads hook_resid_mid of every block; found {}",
                self.site
            );
            return Err(call(what));
        }
        let is_whole = inputs.len() == blocks && inputs.iter().all(|site| site.kind == inputs[0].kind);
        if !is_whole {
            let what = format!(
                "`site`: a cross-layer transcoder reads all blocks; give the hook point without a block, as hook_resid_mid; found {}",
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

    /// Number of trained values, for a model of this configuration.
    ///
    /// # Errors
    /// Those of [`DictionaryNumbers::sites`].
    pub fn parameter_count(&self, config: &Gpt2Config) -> Result<usize, TrainingError> {
        let (sites, latents) = (self.sites(config)?, self.latents);
        let blocks = sites.len();
        let [(_, inputs), (_, outputs)] = sites[0]; // A dictionary has a block.
        let more = match self.kind {
            DictionaryKind::JumpRelu => latents,
            DictionaryKind::Gated => 2 * latents,
            DictionaryKind::SkipTranscoder => inputs * outputs,
            _ => 0,
        };
        // From each block to its own output and to those after it.
        let decoder = blocks * (blocks + 1) / 2 * latents * outputs;
        Ok(decoder + blocks * (latents * (inputs + 1) + outputs) + more)
    }

    /// Checks every number.
    ///
    /// # Errors
    /// When one is out of its range, and those of [`DictionaryNumbers::sites`].
    pub fn check(&self, config: &Gpt2Config) -> Result<(), TrainingError> {
        /// Far more than any dictionary of GPT-2 has.
        const MOST_LATENTS: usize = 1 << 24;
        let refuse = |option, expected: String, found: String| {
            Err(TrainingError::OptionOutOfRange { option, expected, found })
        };
        let blocks = self.sites(config)?.len();
        if !(1..=MOST_LATENTS).contains(&self.latents) {
            return refuse("latents", format!("from 1 to {MOST_LATENTS}"), self.latents.to_string());
        }
        let latents = blocks * self.latents;
        if !(1..=latents).contains(&self.k) {
            let expected = format!("from 1 to the {latents} latents");
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
