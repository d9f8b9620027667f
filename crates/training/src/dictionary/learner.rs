//! State of a dictionary between steps, and the computations of a step.
//!
//! These are the model's activations, their scale, loss and gradient, unit-length directions, the running
//! threshold and dead latents. Activations are divided by the standard deviation at their hook point. The first
//! batch determines it for the entire training run. `save.rs` folds it into the weights.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Pass, Site};
use candle_gpt2_arithmetic::{Float, RandomStream};
use candle_gpt2_interpret::{Record, stop_after, token_rows};

use super::objective::{Computed, Objective, Selection, Weights, names};
use super::{DictionaryKind, DictionaryNumbers};
use crate::streams::Stream;
use crate::{Examples, Parameters, TrainingError};

/// Update rate of the running threshold, which averages roughly the last ten steps.
///
/// With SAELens' 0.01, it lags behind the weights: the number of active latents was up to a third off.
const THRESHOLD_RATE: f32 = 0.1;
/// Maximum token count: the largest value up to which f32 counts in steps of one.
const MAX_COUNTED: f32 = 16_777_216.0;
/// Number of random directions for measuring the encoder's initial scale.
const PROBES: usize = 256;
/// Number of iterations of Weiszfeld's algorithm for the geometric median.
///
/// It gains a decimal digit every few iterations.
const MEDIAN_ROUNDS: usize = 20;
/// Names of the saved tensors other than the parameters.
const STATE: [&str; 3] = ["scales", "threshold", "unused_tokens"];

/// State of a dictionary in training, without its parameters.
pub(crate) struct Learner {
    pub(super) model: Gpt2LMHeadModel,
    /// Name of the model.
    pub(super) model_name: String,
    /// Sample of the model's logits, to distinguish models with the same configuration.
    pub(crate) sample_logits: Vec<f32>,
    /// Whether every sequence in the data starts with the BOS token.
    pub(super) prepends_bos: bool,
    pub(super) numbers: DictionaryNumbers,
    /// Input and output hook points for each block.
    pub(super) sites: Vec<[Site; 2]>,
    pub(super) objective: Objective,
    /// Scale factors for the input and output values of each block, set by the first batch.
    scales: Option<[Vec<f32>; 2]>,
    pub(super) threshold: f32,
    /// Number of tokens since each latent was last active.
    unused_tokens: Vec<f32>,
    /// Statistics of the current step's batches.
    step_stats: Option<StepStats>,
}

struct StepStats {
    tokens: usize,
    fired: Vec<bool>,
    /// Smallest kept value of each batch.
    min_kept: Vec<f64>,
}

impl Learner {
    /// Creates a dictionary learner for a model with this name.
    ///
    /// # Errors
    /// See [`DictionaryNumbers::check`].
    pub(crate) fn new(
        (model, model_name): (Gpt2LMHeadModel, String),
        prepends_bos: bool,
        numbers: &DictionaryNumbers,
    ) -> std::result::Result<Self, TrainingError> {
        numbers.check(model.config())?;
        let objective = Objective::new(numbers, model.config())?;
        let sites = numbers.sites(model.config())?.into_iter().map(|pair| pair.map(|(site, _)| site));
        let sample_logits = sample_logits(&model)?;
        Ok(Self {
            sites: sites.collect(),
            model,
            model_name,
            sample_logits,
            prepends_bos,
            numbers: numbers.clone(),
            objective,
            scales: None,
            threshold: 0.0,
            unused_tokens: vec![0.0; objective.blocks * objective.latents],
            step_stats: None,
        })
    }

    /// Model that the dictionary explains.
    pub(crate) fn model(&self) -> &Gpt2LMHeadModel {
        &self.model
    }

    /// Returns the initial parameters, before any data.
    ///
    /// Directions are random. Except in transcoders, the encoder equals the decoder. The encoder is scaled so
    /// that random inputs are reconstructed with their own length on average.
    pub(crate) fn parameters(
        numbers: &DictionaryNumbers,
        config: &Gpt2Config,
        seed: u64,
    ) -> std::result::Result<Parameters, TrainingError> {
        let objective = Objective::new(numbers, config)?;
        let Objective { blocks, inputs, outputs, latents, .. } = objective;
        let mut generator = Stream::Initialization.generator(seed);
        let decoder = directions(&objective, &mut generator);
        let mut encoder = match numbers.kind.is_transcoder() {
            true => unit_rows(blocks * latents, inputs, &mut generator),
            false => decoder.clone(),
        };
        let probes = unit_rows(PROBES, inputs, &mut generator).repeat(blocks);
        let zeros = (vec![0f32; blocks * latents], vec![0f32; blocks * outputs]);
        // The selected latents are spread evenly over the blocks.
        let k = (objective.k / blocks).max(1);
        let top_k = Objective { kind: DictionaryKind::TopK, k, ..objective };
        if let Some(weights) = Weights::of(&[&encoder, &zeros.0, &decoder, &zeros.1]) {
            let active = top_k.encode(weights, &probes, Selection::Training).active;
            let mut probed = top_k.biases(weights, PROBES);
            for (block, active) in active.iter().enumerate() {
                top_k.write(weights, block, (top_k.of_block(&probes, block), active), &mut probed);
            }
            let lengths = probed.chunks(outputs).map(|row| super::objective::squares(row).sqrt());
            let mean = lengths.sum::<f64>() / (blocks * PROBES) as f64;
            if mean > 0.0 {
                f32::scale(&mut encoder, 1.0 / mean);
            }
        }
        let named = names(numbers.kind).iter().map(|name| {
            let (values, shape) = match *name {
                "W_enc" => (encoder.clone(), vec![blocks * latents, inputs]),
                "W_dec" => (decoder.clone(), vec![objective.matrices() * latents, outputs]),
                "b_dec" => (zeros.1.clone(), vec![blocks * outputs]),
                "W_skip" => (vec![0.0; outputs * inputs], vec![outputs, inputs]),
                _ => (zeros.0.clone(), vec![blocks * latents]),
            };
            Ok(((*name).to_owned(), Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)?))
        });
        Ok(Parameters::from_named(named.collect::<Result<_>>()?))
    }

    /// Returns the activations at the input and output hook points, block by block.
    ///
    /// There is one row per token. The first token of each sequence is left out, because its activations are many
    /// times larger than those of other tokens.
    ///
    /// # Errors
    /// See [`Gpt2LMHeadModel::forward_with`].
    fn values(&self, examples: &dyn Examples) -> Result<[Vec<f32>; 2]> {
        let of = |rows: &Tensor| rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        if let Some([x, y]) = examples.activations()? {
            return Ok([of(&x)?, of(&y)?]);
        }
        let mut record = self.record();
        let mut pass = Pass::inference().observed_by(&mut record);
        if let Some(layer) = stop_after(self.all_sites()) {
            pass = pass.stopping_at(layer);
        }
        examples.hidden_states(self.model.transformer(), self.model.device(), &mut pass)?;
        let rows = |side: usize| -> Result<Vec<f32>> {
            let of_blocks = self.sites.iter().map(|pair| of(&rows_of(&record, pair[side])?));
            Ok(of_blocks.collect::<Result<Vec<_>>>()?.concat())
        };
        Ok([rows(0)?, rows(1)?])
    }

    fn all_sites(&self) -> impl Iterator<Item = Site> + '_ {
        self.sites.iter().flatten().copied()
    }

    /// Creates a record of all input and output hook points.
    pub(super) fn record(&self) -> Record {
        Record::new(self.all_sites())
    }

    /// Scale factors for a block's input and output values.
    pub(super) fn scales(&self, block: usize) -> [f32; 2] {
        let of_side = |side: usize| self.scales.as_ref().map_or(1.0, |scales| scales[side][block]);
        [of_side(0), of_side(1)]
    }

    /// Initializes the scales, biases and thresholds from the first batch.
    fn begin(&mut self, [x, y]: &[Vec<f32>; 2], parameters: &Parameters) -> Result<()> {
        let all = self.objective;
        let Objective { blocks, inputs, outputs, .. } = all;
        let of = |values: &[f32], width: usize| -> Vec<f32> {
            (0..blocks).map(|block| inverse_deviation(all.of_block(values, block), width)).collect()
        };
        let of_input = of(x, inputs);
        let of_output = match all.kind.is_transcoder() {
            true => of(y, outputs),
            false => of_input.clone(),
        };
        self.scales = Some([of_input, of_output]);
        let [x, y] = self.scaled([x, y]);
        let set = |name: &str, values: Vec<f32>| match parameters.get(name) {
            Some(variable) => variable.set(&Tensor::from_vec(values, variable.shape(), &Device::Cpu)?),
            None => Ok(()),
        };
        if all.kind.is_transcoder() {
            let means = (0..blocks).flat_map(|block| rounded(&mean(all.of_block(&y, block), outputs)));
            set("b_dec", means.collect())?;
            // The encoder then sees a value's deviation from the mean.
            let values = slices(parameters)?;
            let encoder = values.first().map_or(&[][..], |encoder| &encoder[..]);
            let of_means = (0..blocks).flat_map(|block| {
                let mean = rounded(&mean(all.of_block(&x, block), inputs));
                all.of_block(encoder, block).chunks(inputs).map(move |row| {
                    let product: f64 =
                        row.iter().zip(&mean).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    -product
                })
            });
            set("b_enc", rounded(&of_means.collect::<Vec<_>>()))?;
        } else {
            set("b_dec", rounded(&geometric_median(&y, outputs)))?;
        }
        if self.objective.kind == DictionaryKind::JumpRelu {
            let values = slices(parameters)?;
            let values: Vec<&[f32]> = values.iter().map(|values| &values[..]).collect();
            let kept = Objective { kind: DictionaryKind::BatchTopK, ..self.objective };
            let min_kept = Weights::of(&values).and_then(|weights| kept.min_kept(weights, &x));
            let threshold = libm::log(min_kept.unwrap_or(super::objective::BANDWIDTH).max(f64::MIN_POSITIVE));
            set("log_threshold", rounded(&vec![threshold; self.objective.latents]))?;
        }
        Ok(())
    }

    fn scaled(&self, values: [&[f32]; 2]) -> [Vec<f32>; 2] {
        let of_side = |side: usize| {
            let of_block = |block: usize| {
                let scale = self.scales(block)[side];
                self.objective.of_block(values[side], block).iter().map(move |value| value * scale)
            };
            (0..self.objective.blocks).flat_map(of_block).collect()
        };
        [of_side(0), of_side(1)]
    }

    /// Computes the loss of the examples and its gradients, in parameter order.
    ///
    /// The decoder's gradient has no component along the directions, so their lengths do not change.
    ///
    /// # Errors
    /// See [`Gpt2LMHeadModel::forward_with`].
    pub(crate) fn gradients(
        &mut self,
        examples: &dyn Examples,
        parameters: &Parameters,
    ) -> Result<(f64, Vec<Tensor>)> {
        let values = self.values(examples)?;
        if self.scales.is_none() {
            self.begin(&values, parameters)?;
        }
        let [x, y] = self.scaled([&values[0], &values[1]]);
        let all = slices(parameters)?;
        let all: Vec<&[f32]> = all.iter().map(|values| &values[..]).collect();
        let Some(weights) = Weights::of(&all) else {
            candle_core::bail!("expected at least 4 dictionary parameters, found {}", all.len());
        };
        let dead: Vec<bool> =
            self.unused_tokens.iter().map(|tokens| f64::from(*tokens) >= self.dead_after()).collect();
        let Computed { loss, mut gradients, fired, min_kept } =
            self.objective.compute(weights, (&x, &y), &dead);
        if let Some(decoder) = gradients.get_mut(2) {
            for rows in self.objective.directions() {
                let along = |row: Range<usize>| -> f64 {
                    let both = decoder[row.clone()].iter().zip(&weights.decoder[row]);
                    both.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                };
                let along: f64 = rows.clone().map(along).sum();
                for row in rows {
                    let both = decoder[row.clone()].iter_mut().zip(&weights.decoder[row]);
                    both.for_each(|(gradient, direction)| {
                        *gradient = rounded_one(f64::from(*gradient) - along * f64::from(*direction));
                    });
                }
            }
        }
        let tokens = x.len() / (self.objective.blocks * self.objective.inputs);
        let none = || StepStats { tokens: 0, fired: vec![false; fired.len()], min_kept: Vec::new() };
        let stats = self.step_stats.get_or_insert_with(none);
        stats.tokens += tokens;
        stats.fired.iter_mut().zip(&fired).for_each(|(before, now)| *before |= now);
        stats.min_kept.extend(min_kept);
        let tensors = parameters
            .iter()
            .zip(gradients)
            .map(|((_, variable), gradient)| Tensor::from_vec(gradient, variable.shape(), &Device::Cpu));
        Ok((loss, tensors.collect::<Result<_>>()?))
    }

    /// Number of tokens without activity after which a latent is dead, at most `MAX_COUNTED`.
    fn dead_after(&self) -> f64 {
        (self.numbers.dead_after as f64).min(f64::from(MAX_COUNTED))
    }

    /// Discards the statistics of a step that was not completed.
    pub(crate) fn forget(&mut self) {
        self.step_stats = None;
    }

    /// Updates the state after optimizer step `step`, counted from 1.
    ///
    /// # Errors
    /// If a parameter cannot be set.
    pub(crate) fn after_step(&mut self, parameters: &Parameters, step: u64) -> Result<()> {
        if let Some(decoder) = parameters.get("W_dec") {
            let mut values = decoder.flatten_all()?.to_vec1::<f32>()?;
            for rows in self.objective.directions() {
                let square: f64 = rows.clone().map(|row| super::objective::squares(&values[row])).sum();
                let length = square.sqrt();
                if length > 0.0 {
                    for row in rows {
                        let row = values[row].iter_mut();
                        row.for_each(|value| *value = rounded_one(f64::from(*value) / length));
                    }
                }
            }
            decoder.set(&Tensor::from_vec(values, decoder.shape(), &Device::Cpu)?)?;
        }
        let Some(StepStats { tokens, fired, min_kept }) = self.step_stats.take() else { return Ok(()) };
        if !min_kept.is_empty() {
            let min_kept = rounded_one(min_kept.iter().sum::<f64>() / min_kept.len() as f64);
            self.threshold = match self.threshold {
                0.0 => min_kept,
                // At first this is the mean of all steps, so a short run does not depend on its first
                // batches.
                before => before + THRESHOLD_RATE.max(1.0 / step as f32) * (min_kept - before),
            };
        }
        for (unused, fired) in self.unused_tokens.iter_mut().zip(fired) {
            *unused = if fired { 0.0 } else { (*unused + tokens as f32).min(MAX_COUNTED) };
        }
        Ok(())
    }

    /// Returns the tensors to save in addition to the parameters.
    ///
    /// # Errors
    /// If allocation fails.
    pub(crate) fn state(&self) -> Result<Vec<(String, Tensor)>> {
        // Zero means unset, because a scale is greater than 0.
        let none = vec![0.0; 2 * self.objective.blocks];
        let scales = self.scales.as_ref().map_or(none, |scales| scales.concat());
        let values = [scales, vec![self.threshold], self.unused_tokens.clone()];
        let named = STATE.iter().zip(values).map(|(name, values)| {
            let count = values.len();
            Ok((format!("dictionary.{name}"), Tensor::from_vec(values, count, &Device::Cpu)?))
        });
        named.collect()
    }

    /// Restores a saved state; the error names the missing part.
    pub(crate) fn restore(&mut self, saved: &HashMap<String, Tensor>) -> std::result::Result<(), String> {
        let blocks = self.objective.blocks;
        let counts = [2 * blocks, 1, blocks * self.objective.latents];
        let found = STATE.iter().zip(counts).map(|(name, count)| {
            let values =
                saved.get(&format!("dictionary.{name}")).and_then(|tensor| tensor.to_vec1::<f32>().ok());
            let values = values.filter(|values| values.len() == count);
            values.ok_or_else(|| format!("tensor `dictionary.{name}` is missing or has the wrong shape"))
        });
        let found = found.collect::<std::result::Result<Vec<_>, String>>()?;
        if let [scales, threshold, unused] = &found[..] {
            let (inputs, outputs) = scales.split_at(blocks);
            let is_set = scales.iter().all(|scale| *scale > 0.0);
            self.scales = is_set.then(|| [inputs.to_vec(), outputs.to_vec()]);
            self.threshold = threshold.first().copied().unwrap_or_default();
            self.unused_tokens.clone_from(unused);
        }
        self.step_stats = None;
        Ok(())
    }
}

/// Returns the logits of the first few vocabulary tokens after a fixed sequence.
///
/// # Errors
/// See [`Gpt2LMHeadModel::forward`].
fn sample_logits(model: &Gpt2LMHeadModel) -> Result<Vec<f32>> {
    const TOKENS: usize = 8;
    let config = model.config();
    let ids: Vec<u32> = (0..).take(TOKENS.min(config.vocab_size).min(config.n_positions)).collect();
    let count = ids.len();
    let ids = Tensor::from_vec(ids, (1, count), model.device())?;
    let mut logits = model.forward(&ids)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    logits.truncate(TOKENS);
    Ok(logits)
}

/// Flattens a value `(B, T, …)` to rows `(B · (T − 1), width)`, without the first tokens.
///
/// # Errors
/// If there is only one token.
pub(super) fn rows_after_first(site: Site, value: &Tensor) -> Result<Tensor> {
    const TOKEN_DIM: usize = 1;
    let tokens = value.dim(TOKEN_DIM)?;
    let Some(after) = tokens.checked_sub(1).filter(|after| *after > 0) else {
        candle_core::bail!(
            "a dictionary skips the first token of each sequence; use sequences of at least 2 tokens"
        );
    };
    token_rows(site, &value.narrow(TOKEN_DIM, 1, after)?.contiguous()?)
}

/// Returns a record's rows at a hook point, without the first tokens.
pub(super) fn rows_of(record: &Record, site: Site) -> Result<Tensor> {
    rows_after_first(site, record.get(site)?)
}

/// Returns the values of every parameter.
pub(super) fn slices(parameters: &Parameters) -> Result<Vec<Vec<f32>>> {
    parameters.iter().map(|(_, variable)| variable.flatten_all()?.to_vec1::<f32>()).collect()
}

/// Returns random unit vectors, one per row.
fn unit_rows(rows: usize, width: usize, generator: &mut RandomStream) -> Vec<f32> {
    (0..rows).flat_map(|_| unit_row(width, generator)).collect()
}

fn unit_row(width: usize, generator: &mut RandomStream) -> Vec<f32> {
    let row: Vec<f64> = (0..width).map(|_| generator.normal()).collect();
    let length = row.iter().map(|value| value * value).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    row.iter().map(|value| rounded_one(value / length)).collect()
}

/// Returns a decoder with random directions of unit length.
fn directions(objective: &Objective, generator: &mut RandomStream) -> Vec<f32> {
    let width = objective.outputs;
    let mut decoder = vec![0.0; objective.matrices() * objective.latents * width];
    for rows in objective.directions() {
        let direction = unit_row(rows.clone().map(|row| row.len()).sum(), generator);
        for (row, values) in rows.zip(direction.chunks(width)) {
            decoder[row].copy_from_slice(values);
        }
    }
    decoder
}

fn mean(values: &[f32], width: usize) -> Vec<f64> {
    let mut mean = vec![0.0; width];
    for row in values.chunks(width) {
        mean.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    let rows = (values.len() / width).max(1) as f64;
    mean.iter_mut().for_each(|sum| *sum /= rows);
    mean
}

/// Returns the factor that scales components to standard deviation 1, or 1 if the values are constant.
fn inverse_deviation(values: &[f32], width: usize) -> f32 {
    let mean = mean(values, width);
    let of_row = |row: &[f32]| -> f64 {
        row.iter()
            .zip(&mean)
            .map(|(value, mean)| (f64::from(*value) - mean) * (f64::from(*value) - mean))
            .sum()
    };
    let square = values.chunks(width).map(of_row).sum::<f64>() / values.len().max(1) as f64;
    let scale = rounded_one(1.0 / square.sqrt());
    if scale.is_finite() && scale > 0.0 { scale } else { 1.0 }
}

/// Returns the geometric median: the point with the smallest sum of distances to the rows.
///
/// This is Weiszfeld's algorithm, starting at the mean.
fn geometric_median(values: &[f32], width: usize) -> Vec<f64> {
    /// Minimum distance, because a row at the point itself would have infinite weight.
    const MIN_DISTANCE: f64 = 1e-6;
    let mut point = mean(values, width);
    for _ in 0..MEDIAN_ROUNDS {
        let (mut sum, mut total) = (vec![0.0; width], 0.0);
        for row in values.chunks(width) {
            let square: f64 = row
                .iter()
                .zip(&point)
                .map(|(value, at)| (f64::from(*value) - at) * (f64::from(*value) - at))
                .sum();
            let weight = 1.0 / square.sqrt().max(MIN_DISTANCE);
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * f64::from(*value));
            total += weight;
        }
        if total > 0.0 {
            point = sum.iter().map(|sum| sum / total).collect();
        }
    }
    point
}

fn rounded(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| rounded_one(*value)).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
fn rounded_one(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_median_is_robust_to_an_outlier() {
        let mut values = vec![1.0, 2.0, 1.2, 2.0, 0.8, 2.0, 1.0, 2.2, 1.0, 1.8];
        values.extend([1000.0, -1000.0]);
        let median = geometric_median(&values, 2);
        // Twenty iterations come near the median without reaching it. The mean is 167 away.
        assert!((median[0] - 1.0).abs() < 0.1 && (median[1] - 2.0).abs() < 0.1, "{median:?}");
    }

    #[test]
    fn values_of_any_scale_are_normalized_to_unit_deviation() {
        for factor in [1e-3f32, 1.0, 1e4] {
            let values: Vec<f32> = [3.0, 5.0, 1.0, 9.0, 2.0, 7.0].map(|value: f32| factor * value).to_vec();
            let scale = f64::from(inverse_deviation(&values, 2));
            // The means are 2 and 7, and the squares are 1, 4, 1, 4, 0, 0.
            assert!((scale * f64::from(factor) - (6f64 / 10.0).sqrt()).abs() < 1e-6, "{scale}");
        }
        assert_eq!(inverse_deviation(&[2.0, 2.0], 1).to_bits(), 1f32.to_bits());
    }
}
