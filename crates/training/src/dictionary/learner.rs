//! The state of a dictionary between steps, and what a step is made of: values of the model, their scale, loss and gradient, directions
//! of length 1, the running threshold, latents that have not been active for long.
//!
//! Values are divided by the deviation of their hook point, a number for the whole training that the first batch gives; `save.rs` folds it
//! into the weights.

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

/// Share of the least kept value of a batch in the running threshold.
const THRESHOLD_RATE: f32 = 0.01;
/// Tokens without activity are counted as far as f32 counts one by one.
const MOST_COUNTED: f32 = 16_777_216.0;
/// Random directions that the encoder's first scale is measured with.
const PROBES: usize = 256;
/// Rounds of Weiszfeld's algorithm for the geometric median: it gains a digit in a few.
const MEDIAN_ROUNDS: usize = 20;
/// Names of what is saved besides the parameters.
const STATE: [&str; 3] = ["scales", "threshold", "unused_tokens"];

/// A dictionary in training beside its parameters.
pub(crate) struct Learner {
    pub(super) model: Gpt2LMHeadModel,
    /// What the model is called.
    pub(super) model_name: String,
    /// Some of the model's logits: another model, even of the same configuration, has others.
    pub(crate) sample_logits: Vec<f32>,
    /// Whether every text of the data begins with the BOS token.
    pub(super) prepends_bos: bool,
    pub(super) numbers: DictionaryNumbers,
    /// What each block reads and writes.
    pub(super) sites: Vec<[Site; 2]>,
    pub(super) objective: Objective,
    /// What the values read and written in each block are multiplied by, once a batch has told.
    scales: Option<[Vec<f32>; 2]>,
    pub(super) threshold: f32,
    /// Tokens since each latent was active.
    unused_tokens: Vec<f32>,
    /// What the batches of the step that is being taken showed.
    seen: Option<Seen>,
}

struct Seen {
    tokens: usize,
    fired: Vec<bool>,
    least: Option<f64>,
}

impl Learner {
    /// A dictionary of a model that is called so.
    ///
    /// # Errors
    /// Those of [`DictionaryNumbers::check`].
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
            seen: None,
        })
    }

    /// The model.
    pub(crate) fn model(&self) -> &Gpt2LMHeadModel {
        &self.model
    }

    /// The parameters before any data: directions of random values, each read as it is written, so large that a random value is written
    /// with its own length.
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
        // As many latents in each block.
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

    /// What the model has at the hook points that are read and at those that are written, block after block a row for each token but the
    /// first of each text, whose values are many times longer than those of others.
    ///
    /// # Errors
    /// Those of the model.
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

    /// A record of every hook point that is read or written.
    pub(super) fn record(&self) -> Record {
        Record::new(self.all_sites())
    }

    /// What the values read and written in a block are multiplied by.
    pub(super) fn scales(&self, block: usize) -> [f32; 2] {
        let of_side = |side: usize| self.scales.as_ref().map_or(1.0, |scales| scales[side][block]);
        [of_side(0), of_side(1)]
    }

    /// Sets what the first batch decides: the scale of the values, and the biases and thresholds that suit it.
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
            // The directions see how far a value is from the mean.
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
            let least = Weights::of(&values).and_then(|weights| kept.least(weights, &x));
            let threshold = libm::log(least.unwrap_or(super::objective::BANDWIDTH).max(f64::MIN_POSITIVE));
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

    /// The loss of some examples, and the gradient of every parameter without what would make directions longer or shorter.
    ///
    /// # Errors
    /// Those of the model.
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
            candle_core::bail!("a dictionary has four parameters at least, found {}", all.len());
        };
        let dead: Vec<bool> =
            self.unused_tokens.iter().map(|tokens| f64::from(*tokens) >= self.dead_after()).collect();
        let Computed { loss, mut gradients, fired, least } = self.objective.compute(weights, (&x, &y), &dead);
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
        self.seen = Some(match self.seen.take() {
            None => Seen { tokens, fired, least },
            Some(before) => Seen {
                tokens: before.tokens + tokens,
                fired: before.fired.iter().zip(&fired).map(|(before, now)| *before || *now).collect(),
                least: before.least.zip(least).map(|(before, now)| before.min(now)),
            },
        });
        let tensors = parameters
            .iter()
            .zip(gradients)
            .map(|((_, variable), gradient)| Tensor::from_vec(gradient, variable.shape(), &Device::Cpu));
        Ok((loss, tensors.collect::<Result<_>>()?))
    }

    /// As many tokens without activity as make a latent dead, as far as they are counted.
    fn dead_after(&self) -> f64 {
        (self.numbers.dead_after as f64).min(f64::from(MOST_COUNTED))
    }

    /// Forgets the batches of a step that is not taken.
    pub(crate) fn forget(&mut self) {
        self.seen = None;
    }

    /// What follows the optimizer's step, which is counted from 1.
    ///
    /// # Errors
    /// When a parameter cannot be set.
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
        let Some(Seen { tokens, fired, least }) = self.seen.take() else { return Ok(()) };
        if let Some(least) = least.map(rounded_one) {
            self.threshold = match self.threshold {
                0.0 => least,
                // The mean of all steps at first, so that a short training does not keep what its first batches had.
                before => before + THRESHOLD_RATE.max(1.0 / step as f32) * (least - before),
            };
        }
        for (unused, fired) in self.unused_tokens.iter_mut().zip(fired) {
            *unused = if fired { 0.0 } else { (*unused + tokens as f32).min(MOST_COUNTED) };
        }
        Ok(())
    }

    /// What is to be saved besides the parameters.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn state(&self) -> Result<Vec<(String, Tensor)>> {
        // A scale is greater than 0.
        let none = vec![0.0; 2 * self.objective.blocks];
        let scales = self.scales.as_ref().map_or(none, |scales| scales.concat());
        let values = [scales, vec![self.threshold], self.unused_tokens.clone()];
        let named = STATE.iter().zip(values).map(|(name, values)| {
            let count = values.len();
            Ok((format!("dictionary.{name}"), Tensor::from_vec(values, count, &Device::Cpu)?))
        });
        named.collect()
    }

    /// Goes back to what was saved; says which of it is missing.
    pub(crate) fn restore(&mut self, saved: &HashMap<String, Tensor>) -> std::result::Result<(), String> {
        let blocks = self.objective.blocks;
        let counts = [2 * blocks, 1, blocks * self.objective.latents];
        let found = STATE.iter().zip(counts).map(|(name, count)| {
            let values =
                saved.get(&format!("dictionary.{name}")).and_then(|tensor| tensor.to_vec1::<f32>().ok());
            let values = values.filter(|values| values.len() == count);
            values.ok_or_else(|| format!("the `{name}` of the dictionary are missing"))
        });
        let found = found.collect::<std::result::Result<Vec<_>, String>>()?;
        if let [scales, threshold, unused] = &found[..] {
            let (inputs, outputs) = scales.split_at(blocks);
            let is_set = scales.iter().all(|scale| *scale > 0.0);
            self.scales = is_set.then(|| [inputs.to_vec(), outputs.to_vec()]);
            self.threshold = threshold.first().copied().unwrap_or_default();
            self.unused_tokens.clone_from(unused);
        }
        self.seen = None;
        Ok(())
    }
}

/// Logits of the first tokens of the vocabulary after a fixed text.
///
/// # Errors
/// Those of the model.
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

/// The rows of a value `(B, T, …)` but those of first tokens, `(B · (T − 1), width)`.
///
/// # Errors
/// When there is a single token.
pub(super) fn rows_after_first(site: Site, value: &Tensor) -> Result<Tensor> {
    const TOKEN_DIM: usize = 1;
    let tokens = value.dim(TOKEN_DIM)?;
    let Some(after) = tokens.checked_sub(1).filter(|after| *after > 0) else {
        candle_core::bail!(
            "a text of a single token teaches a dictionary nothing: its first token is left out"
        );
    };
    token_rows(site, &value.narrow(TOKEN_DIM, 1, after)?.contiguous()?)
}

/// What a record has of a hook point, without first tokens.
pub(super) fn rows_of(record: &Record, site: Site) -> Result<Tensor> {
    rows_after_first(site, record.get(site)?)
}

/// The values of every parameter.
pub(super) fn slices(parameters: &Parameters) -> Result<Vec<Vec<f32>>> {
    parameters.iter().map(|(_, variable)| variable.flatten_all()?.to_vec1::<f32>()).collect()
}

/// Rows of length 1 in random directions.
fn unit_rows(rows: usize, width: usize, generator: &mut RandomStream) -> Vec<f32> {
    (0..rows).flat_map(|_| unit_row(width, generator)).collect()
}

fn unit_row(width: usize, generator: &mut RandomStream) -> Vec<f32> {
    let row: Vec<f64> = (0..width).map(|_| generator.normal()).collect();
    let length = row.iter().map(|value| value * value).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    row.iter().map(|value| rounded_one(value / length)).collect()
}

/// A decoder of random directions of length 1.
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

/// What makes the mean square of the distance from the mean 1 for each number; 1 if nothing differs.
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

/// The point whose distances to the rows have the least sum, by Weiszfeld's algorithm from the mean on.
fn geometric_median(values: &[f32], width: usize) -> Vec<f64> {
    /// A row that is the point itself would have all the weight.
    const LEAST_DISTANCE: f64 = 1e-6;
    let mut point = mean(values, width);
    for _ in 0..MEDIAN_ROUNDS {
        let (mut sum, mut total) = (vec![0.0; width], 0.0);
        for row in values.chunks(width) {
            let square: f64 = row
                .iter()
                .zip(&point)
                .map(|(value, at)| (f64::from(*value) - at) * (f64::from(*value) - at))
                .sum();
            let weight = 1.0 / square.sqrt().max(LEAST_DISTANCE);
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

#[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
fn rounded_one(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_geometric_median_is_not_drawn_by_one_far_value() {
        let mut values = vec![1.0, 2.0, 1.2, 2.0, 0.8, 2.0, 1.0, 2.2, 1.0, 1.8];
        values.extend([1000.0, -1000.0]);
        let median = geometric_median(&values, 2);
        // Twenty rounds do not reach it, but come near; the mean is 167 away.
        assert!((median[0] - 1.0).abs() < 0.1 && (median[1] - 2.0).abs() < 0.1, "{median:?}");
    }

    #[test]
    fn values_of_any_scale_get_a_deviation_of_one() {
        for factor in [1e-3f32, 1.0, 1e4] {
            let values: Vec<f32> = [3.0, 5.0, 1.0, 9.0, 2.0, 7.0].map(|value: f32| factor * value).to_vec();
            let scale = f64::from(inverse_deviation(&values, 2));
            // Means 2 and 7; squares 1, 4, 1, 4, 0, 0.
            assert!((scale * f64::from(factor) - (6f64 / 10.0).sqrt()).abs() < 1e-6, "{scale}");
        }
        assert_eq!(inverse_deviation(&[2.0, 2.0], 1).to_bits(), 1f32.to_bits());
    }
}
