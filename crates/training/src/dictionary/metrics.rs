//! Evaluation of a dictionary on held-out sequences; each metric includes its definition.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2::{LogitsFor, Observer, Pass, Site};
use candle_gpt2_arithmetic::SparseRows;
use candle_nn::ops::log_softmax;
use serde::{Deserialize, Serialize};

use super::learner::{rows_after_first, rows_of, slices};
use super::objective::{Objective, Selection, Weights, squares};
use super::{DictionaryKind, Learner};
use crate::Parameters;

/// Maximum number of held-out tokens in an evaluation, because the model reads them four times.
pub(crate) const MAX_EVALUATED_TOKENS: usize = 1 << 15;
/// Minimum length of a sequence; the first token is left out, and the last has no next token.
pub(crate) const MIN_SEQUENCE_LEN: usize = 3;

/// Quality of a dictionary, part of the result of [`HeldOut::evaluate`](crate::HeldOut::evaluate).
///
/// ```
/// use candle_gpt2_training::DictionaryMetrics;
///
/// let written = r#"{"tokens": 9, "l0": 4.0, "explained_variance": 0.9, "dead_latents": 1, "cross_entropy": {"model": 2.0,
///     "reconstructed": 2.1, "zero": 4.0, "mean": 3.0}, "delta_cross_entropy": 0.1, "recovered_from_zero": 0.95,
///     "recovered_from_mean": 0.9, "definitions": {"l0": "mean number of latents that are not 0"}}"#;
/// let metrics: DictionaryMetrics = serde_json::from_str(written)?;
/// assert!(metrics.cross_entropy.zero > metrics.cross_entropy.mean);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DictionaryMetrics {
    /// Number of evaluated tokens.
    pub tokens: usize,
    /// Mean number of active latents; for a cross-layer transcoder, over all layers.
    pub l0: f64,
    /// Explained fraction of variance, `1 − Σ‖x − x̂‖² / Σ‖x − mean x‖²`.
    ///
    /// For a cross-layer transcoder, both sums include all layers, each divided by its standard deviation.
    pub explained_variance: f64,
    /// Explained fraction of variance for each output layer of a cross-layer transcoder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub explained_variance_per_layer: Vec<f64>,
    /// Number of latents that were never active.
    pub dead_latents: usize,
    /// Losses of the model for different replacements at the output hook points.
    pub cross_entropy: CrossEntropies,
    /// Increase in the loss when the dictionary replaces the activations, in nats per token.
    pub delta_cross_entropy: f64,
    /// Recovered fraction of the loss increase under zero ablation; `None` without an increase.
    pub recovered_from_zero: Option<f64>,
    /// Recovered fraction of the loss increase under mean ablation; `None` without an increase.
    pub recovered_from_mean: Option<f64>,
    /// Definitions of the metrics.
    pub definitions: BTreeMap<String, String>,
}

/// Mean losses of a model's predictions, in nats per token. Part of [`DictionaryMetrics`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropies {
    /// Loss of the original model.
    pub model: f64,
    /// Loss with the dictionary's reconstruction of the activations.
    pub reconstructed: f64,
    /// Loss with zeros instead of the activations.
    pub zero: f64,
    /// Loss with the mean activation over all tokens.
    pub mean: f64,
}

/// Definitions of the metrics in words.
const DEFINITIONS: [(&str, &str); 7] = [
    ("tokens", "held-out tokens; the first token of each text is left out everywhere"),
    ("l0", "mean number of latents that are not 0"),
    (
        "explained_variance",
        "1 - sum |x - y|^2 / sum |x - mean x|^2, with one mean over all tokens; y is the output of the dictionary for x",
    ),
    ("dead_latents", "latents that are 0 for all of these tokens"),
    (
        "cross_entropy",
        "mean loss of the next token in nats: of the model, and with the hook point replaced by the reconstruction, by zeros, or by its mean over these tokens",
    ),
    (
        "recovered_from_zero",
        "(zero - reconstructed) / (zero - model) of the cross-entropies, as SAELens and SAEBench define it",
    ),
    ("recovered_from_mean", "(mean - reconstructed) / (mean - model) of the cross-entropies"),
];

/// Definitions that differ for a cross-layer transcoder, or exist only for it.
const DEFINITIONS_OF_LAYERS: [(&str, &str); 4] = [
    ("l0", "mean number of latents that are not 0, in all layers together"),
    (
        "explained_variance",
        "1 - sum |y' - y|^2 / sum |y - mean y|^2, summed over the outputs y of all MLPs, those of each layer divided by their deviation in the first batch, with one mean over all tokens; y' is the output of the transcoder for the model's own inputs",
    ),
    ("explained_variance_per_layer", "explained_variance of the output of each MLP separately"),
    (
        "cross_entropy",
        "mean loss of the next token in nats: of the model, and with the outputs of all MLPs replaced by the outputs of the transcoder for its inputs in that run, by zeros, or by their means over these tokens",
    ),
];

/// Outputs of a dictionary on a sequence, accumulated block by block.
struct Reconstructor<'a> {
    learner: &'a Learner,
    weights: Weights<'a, f32>,
    /// Outputs in scaled units, `(L, N, D)`.
    outputs: Vec<f32>,
}

impl<'a> Reconstructor<'a> {
    /// Starts a sequence of `tokens` tokens, of which the first is skipped.
    fn new(learner: &'a Learner, weights: Weights<'a, f32>, tokens: usize) -> Self {
        Self { learner, weights, outputs: learner.objective.biases(weights, tokens - 1) }
    }

    /// Runs a block on its input rows, adds its outputs and returns its latents.
    fn read(&mut self, block: usize, rows: &Tensor) -> Result<SparseRows<f32>> {
        let Self { learner, weights, outputs } = self;
        let [scale, _] = learner.scales(block);
        let x: Vec<f32> = rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let x: Vec<f32> = x.into_iter().map(|value| value * scale).collect();
        let all = &learner.objective;
        let one = Objective { blocks: 1, ..*all };
        let selection = Selection::Use(f64::from(learner.threshold));
        let mut of_blocks = one.encode(weights.of_block(all, block), &x, selection).active;
        let active = of_blocks.pop().unwrap_or_default();
        all.write(*weights, block, (&x, &active), outputs);
        Ok(active)
    }

    /// Returns the output of a block in the model's units.
    fn written(&self, block: usize) -> Result<Tensor> {
        let [_, scale] = self.learner.scales(block);
        let Objective { outputs: width, .. } = self.learner.objective;
        let output = self.learner.objective.of_block(&self.outputs, block);
        let output: Vec<f32> = output.iter().map(|value| value / scale).collect();
        Tensor::from_vec(output, (self.outputs.len() / self.learner.sites.len() / width, width), &Device::Cpu)
    }
}

/// Replacement for the outputs of all tokens but the first.
enum Replacement<'a> {
    Reconstruction(Reconstructor<'a>),
    Zeros,
    /// One row per block.
    Means(&'a [Tensor]),
}

/// Observer that replaces the values at the output hook points of a dictionary.
struct ReplacingObserver<'a> {
    sites: &'a [[Site; 2]],
    by: Replacement<'a>,
}

impl Observer for ReplacingObserver<'_> {
    fn wants(&self, site: Site) -> bool {
        self.sites.iter().any(|pair| pair.contains(&site))
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        const TOKEN_DIM: usize = 1;
        let block_of = |side: usize| self.sites.iter().position(|pair| pair[side] == site);
        if let (Some(block), Replacement::Reconstruction(reconstructor)) = (block_of(0), &mut self.by) {
            reconstructor.read(block, &rows_after_first(site, &value)?)?;
        }
        let Some(block) = block_of(1) else { return Ok(value) };
        let after = value.narrow(TOKEN_DIM, 1, value.dim(TOKEN_DIM)? - 1)?;
        let rows = match &self.by {
            Replacement::Reconstruction(reconstructor) => {
                reconstructor.written(block)?.reshape(after.shape())?
            }
            Replacement::Zeros => after.zeros_like()?,
            Replacement::Means(means) => {
                let rows = after.elem_count() / means[block].elem_count();
                means[block].repeat((rows, 1))?.reshape(after.shape())?
            }
        };
        let rows = rows.to_dtype(value.dtype())?.to_device(value.device())?;
        Tensor::cat(&[&value.narrow(TOKEN_DIM, 0, 1)?, &rows], TOKEN_DIM)
    }
}

/// Sums over tokens from which a hook point's explained variance is computed.
struct Variance {
    /// Sum of squared errors.
    error: f64,
    square: f64,
    sums: Vec<f64>,
}

impl Variance {
    fn new(width: usize) -> Self {
        Self { error: 0.0, square: 0.0, sums: vec![0.0; width] }
    }

    fn add(&mut self, wanted: &Tensor, written: &Tensor) -> Result<()> {
        self.error += squares(&(wanted - written)?.flatten_all()?.to_vec1::<f32>()?);
        let wanted = wanted.flatten_all()?.to_vec1::<f32>()?;
        self.square += squares(&wanted);
        for row in wanted.chunks(self.sums.len()) {
            self.sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        Ok(())
    }

    fn mean(&self, tokens: f64) -> Vec<f64> {
        self.sums.iter().map(|sum| sum / tokens).collect()
    }

    /// Sum of squared distances from the mean.
    fn total(&self, tokens: f64) -> f64 {
        self.square - tokens * self.mean(tokens).iter().map(|mean| mean * mean).sum::<f64>()
    }
}

impl Learner {
    /// Evaluates the dictionary on sequences of at least three tokens.
    ///
    /// # Errors
    /// See [`Gpt2LMHeadModel::forward_with`](candle_gpt2::Gpt2LMHeadModel::forward_with).
    pub(crate) fn measure(&self, parameters: &Parameters, texts: &[Vec<u32>]) -> Result<DictionaryMetrics> {
        let values = slices(parameters)?;
        let values: Vec<&[f32]> = values.iter().map(|values| &values[..]).collect();
        let Some(weights) = Weights::of(&values) else {
            candle_core::bail!("expected at least 4 dictionary parameters, found {}", values.len());
        };
        let Objective { blocks, outputs, latents, .. } = self.objective;
        let mut fired = vec![false; blocks * latents];
        let (mut tokens, mut active) = (0usize, 0usize);
        let mut layers: Vec<Variance> = (0..blocks).map(|_| Variance::new(outputs)).collect();
        let mut losses = CrossEntropies { model: 0.0, reconstructed: 0.0, zero: 0.0, mean: 0.0 };
        let mut predicted = 0;
        for ids in texts {
            let mut record = self.record();
            losses.model += self.loss(ids, &mut record)?;
            predicted += ids.len() - 2;
            let mut reconstructor = Reconstructor::new(self, weights, ids.len());
            for (block, [input, _]) in self.sites.iter().enumerate() {
                let entries = reconstructor.read(block, &rows_of(&record, *input)?)?;
                let fired = self.objective.of_block_mut(&mut fired, block);
                for (latent, value) in entries.columns().iter().zip(entries.values()) {
                    fired[*latent] |= *value > 0.0;
                    active += usize::from(*value > 0.0);
                }
            }
            for (block, [_, output]) in self.sites.iter().enumerate() {
                let wanted = rows_of(&record, *output)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
                layers[block].add(&wanted, &reconstructor.written(block)?)?;
            }
            tokens += ids.len() - 1;
        }
        let count = tokens.max(1) as f64;
        let means = layers.iter().map(|layer| {
            Tensor::from_vec(layer.mean(count), (1, outputs), &Device::Cpu)?.to_dtype(DType::F32)
        });
        let means = means.collect::<Result<Vec<_>>>()?;
        for ids in texts {
            let reconstructor = Reconstructor::new(self, weights, ids.len());
            losses.reconstructed += self.loss_with(ids, Replacement::Reconstruction(reconstructor))?;
            losses.zero += self.loss_with(ids, Replacement::Zeros)?;
            losses.mean += self.loss_with(ids, Replacement::Means(&means))?;
        }
        let of = |sum: f64| sum / f64::from(u32::try_from(predicted.max(1)).unwrap_or(u32::MAX));
        let losses = CrossEntropies {
            model: of(losses.model),
            reconstructed: of(losses.reconstructed),
            zero: of(losses.zero),
            mean: of(losses.mean),
        };
        let recovered = |ablated: f64| {
            let cost = ablated - losses.model;
            (cost != 0.0).then(|| (ablated - losses.reconstructed) / cost)
        };
        // Use scaled units, as in the loss, which sums over the layers.
        let in_deviations = |of_layer: &dyn Fn(&Variance) -> f64| -> f64 {
            let squared = |block| f64::from(self.scales(block)[1]).powi(2);
            layers.iter().enumerate().map(|(block, layer)| squared(block) * of_layer(layer)).sum()
        };
        let (error, variance) =
            (in_deviations(&|layer| layer.error), in_deviations(&|layer| layer.total(count)));
        let has_layers = self.objective.kind == DictionaryKind::CrossLayerTranscoder;
        let of_layers = layers.iter().filter(|_| has_layers);
        let more = DEFINITIONS_OF_LAYERS.iter().filter(|_| has_layers);
        let definitions = DEFINITIONS.iter().chain(more);
        Ok(DictionaryMetrics {
            tokens,
            l0: active as f64 / count,
            explained_variance: 1.0 - error / variance,
            explained_variance_per_layer: of_layers
                .map(|layer| 1.0 - layer.error / layer.total(count))
                .collect(),
            dead_latents: fired.iter().filter(|fired| !**fired).count(),
            cross_entropy: losses,
            delta_cross_entropy: losses.reconstructed - losses.model,
            recovered_from_zero: recovered(losses.zero),
            recovered_from_mean: recovered(losses.mean),
            definitions: definitions.map(|(name, is)| ((*name).to_owned(), (*is).to_owned())).collect(),
        })
    }

    fn loss_with(&self, ids: &[u32], by: Replacement<'_>) -> Result<f64> {
        self.loss(ids, &mut ReplacingObserver { sites: &self.sites, by })
    }

    /// Returns the total loss of a sequence's predictions, except for the one at the first token.
    fn loss(&self, ids: &[u32], observer: &mut dyn Observer) -> Result<f64> {
        let predictions = ids.len() - 2;
        let input = Tensor::from_slice(ids, (1, ids.len()), self.model.device())?;
        let mut pass = Pass::inference().observed_by(observer);
        let wanted = LogitsFor::Tokens { first: 1, count: predictions };
        let logits = self.model.forward_with(&input, wanted, None, &mut pass)?.squeeze(0)?;
        let targets = Tensor::from_slice(&ids[2..], (predictions, 1), self.model.device())?;
        let logits = logits.to_dtype(DType::F32)?;
        let losses = log_softmax(&logits, D::Minus1)?.gather(&targets, D::Minus1)?.neg()?;
        losses.to_dtype(DType::F64)?.sum_all()?.to_scalar()
    }
}
