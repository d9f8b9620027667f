//! How good a dictionary is on texts that it was not trained on, each number with its definition.

use std::collections::BTreeMap;

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2::{LogitsFor, Observer, Pass, Site};
use candle_gpt2_interpret::Record;
use candle_nn::ops::log_softmax;
use serde::{Deserialize, Serialize};

use super::Learner;
use super::learner::{rows_after_first, slices};
use super::objective::{Selection, Weights, squares};
use crate::Parameters;

/// Tokens of held-out texts that a dictionary is measured on at most: the model reads them four times.
pub(crate) const MOST_TOKENS: usize = 1 << 15;
/// Shortest text that it is measured on: the first token is left out, and the last predicts nothing.
pub(crate) const SHORTEST: usize = 3;

/// How good a dictionary is. [`HeldOut::evaluate`](crate::HeldOut::evaluate) gives it in its result.
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
    /// Tokens that it was measured on.
    pub tokens: usize,
    /// Mean number of active latents.
    pub l0: f64,
    /// `1 − Σ‖x − x̂‖² / Σ‖x − mean x‖²`.
    pub explained_variance: f64,
    /// Latents that were never active.
    pub dead_latents: usize,
    /// Losses of the model with something else at the hook point that is written.
    pub cross_entropy: CrossEntropies,
    /// The rise of the loss when the dictionary replaces the activations, in nats per token.
    pub delta_cross_entropy: f64,
    /// Share of the loss from zeros that the dictionary takes back; `None` if zeros cost nothing.
    pub recovered_from_zero: Option<f64>,
    /// Share of the loss from the mean that the dictionary takes back; `None` if the mean costs nothing.
    pub recovered_from_mean: Option<f64>,
    /// What each number is.
    pub definitions: BTreeMap<String, String>,
}

/// Mean losses of a model's predictions, in nats for each token. Part of [`DictionaryMetrics`], whose example has them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropies {
    /// Of the model as it is.
    pub model: f64,
    /// With what the dictionary writes.
    pub reconstructed: f64,
    /// With zeros.
    pub zero: f64,
    /// With the mean over all tokens.
    pub mean: f64,
}

/// What each number is, in words.
const DEFINITIONS: [(&str, &str); 7] = [
    ("tokens", "held-out tokens; the first token of each text is left out everywhere"),
    ("l0", "mean number of latents that are not 0"),
    (
        "explained_variance",
        "1 - sum |x - y|^2 / sum |x - mean x|^2, with one mean over all tokens; y is what the dictionary writes for x",
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

/// Puts rows in the place of what is written at a hook point, for all tokens but the first.
struct Written<'a> {
    sites: [Site; 2],
    input: Option<Tensor>,
    rows: &'a dyn Fn(&Tensor) -> Result<Tensor>,
}

impl Observer for Written<'_> {
    fn wants(&self, site: Site) -> bool {
        self.sites.contains(&site)
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        const TOKEN_DIM: usize = 1;
        let [input, output] = self.sites;
        if site == input {
            self.input = Some(rows_after_first(site, &value)?);
        }
        let Some(rows) = self.input.as_ref().filter(|_| site == output) else { return Ok(value) };
        let after = value.narrow(TOKEN_DIM, 1, value.dim(TOKEN_DIM)? - 1)?;
        let rows = (self.rows)(rows)?.reshape(after.shape())?.to_dtype(value.dtype())?;
        let rows = rows.to_device(value.device())?;
        Tensor::cat(&[&value.narrow(TOKEN_DIM, 0, 1)?, &rows], TOKEN_DIM)
    }
}

impl Learner {
    /// What the dictionary writes for rows of the input, with how many latents were active, and which.
    fn written(&self, parameters: &Parameters, rows: &Tensor, fired: &mut [bool]) -> Result<(Tensor, usize)> {
        let values = slices(parameters)?;
        let values: Vec<&[f32]> = values.iter().map(|values| &values[..]).collect();
        let Some(weights) = Weights::of(&values) else {
            candle_core::bail!("a dictionary has four parameters at least, found {}", values.len());
        };
        let [of_input, of_output] = self.scales.unwrap_or([1.0; 2]);
        let x: Vec<f32> = rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let x: Vec<f32> = x.into_iter().map(|value| value * of_input).collect();
        let encoded = self.objective.encode(weights, &x, Selection::Use(f64::from(self.threshold)));
        let mut count = 0;
        for (latent, value) in encoded.active.columns().iter().zip(encoded.active.values()) {
            fired[*latent] |= *value > 0.0;
            count += usize::from(*value > 0.0);
        }
        let output: Vec<f32> = encoded.output.into_iter().map(|value| value / of_output).collect();
        let tokens = x.len() / self.objective.inputs;
        Ok((Tensor::from_vec(output, (tokens, self.objective.outputs), rows.device())?, count))
    }

    /// How good the dictionary is on texts, each of three tokens at least; `is_interrupted` is asked before each of them.
    ///
    /// # Errors
    /// Those of the model.
    pub(crate) fn measure(&self, parameters: &Parameters, texts: &[Vec<u32>]) -> Result<DictionaryMetrics> {
        let width = self.objective.outputs;
        let [input, output] = self.sites;
        let mut fired = vec![false; self.objective.latents];
        let (mut tokens, mut active) = (0usize, 0usize);
        let (mut error, mut square, mut sums) = (0.0, 0.0, vec![0.0; width]);
        let mut losses = CrossEntropies { model: 0.0, reconstructed: 0.0, zero: 0.0, mean: 0.0 };
        let mut predicted = 0;
        for ids in texts {
            let mut record = Record::new(self.sites);
            losses.model += self.loss(ids, &mut record)?;
            predicted += ids.len() - 2;
            let rows = rows_after_first(input, record.get(input)?)?;
            let (written, count) = self.written(parameters, &rows, &mut fired)?;
            let wanted = rows_after_first(output, record.get(output)?)?.to_dtype(DType::F32)?;
            let differences = (&wanted - &written)?.flatten_all()?.to_vec1::<f32>()?;
            error += squares(&differences);
            let wanted = wanted.flatten_all()?.to_vec1::<f32>()?;
            square += squares(&wanted);
            for row in wanted.chunks(width) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            active += count;
            tokens += ids.len() - 1;
        }
        let count = tokens.max(1) as f64;
        let mean: Vec<f64> = sums.into_iter().map(|sum| sum / count).collect();
        let variance = square - count * mean.iter().map(|mean| mean * mean).sum::<f64>();
        let mean = Tensor::from_vec(mean, (1, width), self.model.device())?.to_dtype(DType::F32)?;
        for ids in texts {
            let reconstruct = |rows: &Tensor| {
                // Which latents are active was counted before.
                let mut again = vec![false; self.objective.latents];
                Ok(self.written(parameters, rows, &mut again)?.0)
            };
            losses.reconstructed += self.loss_with(ids, &reconstruct)?;
            losses.zero +=
                self.loss_with(ids, &|rows| Tensor::zeros((rows.dim(0)?, width), DType::F32, rows.device()))?;
            losses.mean +=
                self.loss_with(ids, &|rows| mean.broadcast_as((rows.dim(0)?, width))?.contiguous())?;
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
        Ok(DictionaryMetrics {
            tokens,
            l0: active as f64 / count,
            explained_variance: 1.0 - error / variance,
            dead_latents: fired.iter().filter(|fired| !**fired).count(),
            cross_entropy: losses,
            delta_cross_entropy: losses.reconstructed - losses.model,
            recovered_from_zero: recovered(losses.zero),
            recovered_from_mean: recovered(losses.mean),
            definitions: DEFINITIONS.map(|(name, is)| (name.to_owned(), is.to_owned())).into(),
        })
    }

    fn loss_with(&self, ids: &[u32], rows: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<f64> {
        self.loss(ids, &mut Written { sites: self.sites, input: None, rows })
    }

    /// The summed loss of the predictions of a text but that of the first token.
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
