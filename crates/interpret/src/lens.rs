//! Logit lens: the prediction that each layer would make if it were the model's last layer.
//!
//! The final norm and the output head are applied to the input of every block and to the last block's output.
//! The norm's statistics are recomputed for each of them. Source: nostalgebraist, "interpreting GPT: the
//! logit lens" (2020). With a learned translation for each layer, it becomes the tuned lens
//! (arXiv:2303.08112).

use candle_core::{DType, Result, Tensor, bail};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_kernels::check_interrupted;

use crate::Run;
use crate::run::{log_softmax, rounded};

/// Options for [`logit_lens`].
#[derive(Debug, Clone, Default)]
pub struct LensOptions {
    /// Number of most probable tokens to return.
    pub top: usize,
    /// Tokens whose rank and probability are reported.
    pub watch: Vec<u32>,
}

/// One layer's prediction after one token. [`logit_lens`] returns one for each layer and token.
#[derive(Debug, Clone, PartialEq)]
pub struct LensCell {
    /// Most probable tokens with natural log probabilities, in descending order; ties go to the lower id.
    pub top: Vec<(u32, f32)>,
    /// Entropy of the prediction, in nats.
    pub entropy: f32,
    /// Kullback-Leibler divergence `KL(last layer ‖ this layer)`, in nats.
    pub divergence: f32,
    /// Rank (number of larger logits) and log probability of each watched token.
    pub watched: Vec<(usize, f32)>,
    /// Log probability of the next token in the input.
    pub next: Option<f32>,
}

/// Lens results at one layer. [`logit_lens`] returns one for each layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LensLayer {
    /// Label of the layer: `0_pre`, `1_pre`, …, `final_post`.
    pub label: String,
    /// One cell for each token.
    pub cells: Vec<LensCell>,
}

/// Value of a [`LensCell`] to display; [`logit_lens`] computes the cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LensValue {
    /// Probability of the most probable token.
    Probability,
    /// [`LensCell::entropy`].
    Entropy,
    /// [`LensCell::divergence`].
    Divergence,
    /// [`LensCell::next`].
    Next,
    /// Rank of the first watched token.
    Rank,
    /// Probability of the first watched token.
    WatchedProbability,
}

impl LensValue {
    /// Returns a cell's value of this kind.
    pub fn of(self, cell: &LensCell) -> Option<f32> {
        match self {
            Self::Probability => cell.top.first().map(|(_, logprob)| libm::expf(*logprob)),
            Self::Entropy => Some(cell.entropy),
            Self::Divergence => Some(cell.divergence),
            Self::Next => cell.next,
            Self::Rank => cell.watched.first().map(|(rank, _)| *rank as f32),
            Self::WatchedProbability => cell.watched.first().map(|(_, logprob)| libm::expf(*logprob)),
        }
    }

    /// Whether the value belongs to the first watched token.
    pub fn is_watched(self) -> bool {
        matches!(self, Self::Rank | Self::WatchedProbability)
    }

    /// Description of the value.
    pub fn title(self) -> &'static str {
        match self {
            Self::Probability => "probability of the most probable token",
            Self::Entropy => "entropy in nats",
            Self::Divergence => "divergence from the last layer in nats",
            Self::Next => "log probability of the token that follows",
            Self::Rank => "rank of the watched token",
            Self::WatchedProbability => "probability of the watched token",
        }
    }
}

/// Computes the lens logits `(1, T, V)` of each layer in turn and passes them to `each`.
///
/// The layers are the inputs of the blocks, then the output of the last. `translate` is the tuned lens' map
/// of a layer's residual stream; the logit lens uses the identity. [`logit_lens`] computes the same logits.
///
/// # Errors
/// If the model, `translate` or `each` fails.
pub fn lens_logits(
    run: &Run,
    translate: &dyn Fn(usize, Tensor) -> Result<Tensor>,
    mut each: impl FnMut(usize, Tensor) -> Result<()>,
) -> Result<()> {
    for (layer, residual) in run.residuals()?.into_iter().enumerate() {
        each(layer, lens_logits_at(run.model, layer, residual, translate)?)?;
    }
    Ok(())
}

/// Computes the lens logits of one layer from its residual stream `(1, T, C)`.
///
/// This is a building block of [`logit_lens`], for callers that run the model themselves.
///
/// # Errors
/// If the model or `translate` fails.
pub fn lens_logits_at(
    model: &Gpt2LMHeadModel,
    layer: usize,
    residual: Tensor,
    translate: &dyn Fn(usize, Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let is_last = layer == model.config().n_layer;
    let residual = if is_last { residual } else { translate(layer, residual)? };
    model.lm_head().forward(&model.transformer().ln_f().forward(&residual)?)
}

/// Logit lens: computes each layer's prediction after each token.
///
/// Only the logits of the current layer and of the last one are in memory.
///
/// ```
/// use candle_gpt2_interpret::{LensOptions, Run, logit_lens};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let layers = logit_lens(&run, &LensOptions { top: 5, watch: vec![7] }, &|_, residual| Ok(residual))?;
/// assert_eq!((layers.len(), layers[0].cells.len()), (3, 4), "before, between and after two blocks, for four tokens");
/// assert!((layers[0].cells[0].entropy - 11f32.ln()).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a watched token is outside the vocabulary, or if the model or `translate` fails, as in [`lens_logits`].
pub fn logit_lens(
    run: &Run,
    options: &LensOptions,
    translate: &dyn Fn(usize, Tensor) -> Result<Tensor>,
) -> Result<Vec<LensLayer>> {
    let Gpt2Config { n_layer, vocab_size, .. } = *run.model.config();
    check_tokens(&options.watch, vocab_size)?;
    let residuals = run.residuals()?;
    let last = lens_logprobs(&lens_logits_at(run.model, n_layer, residuals[n_layer].clone(), translate)?)?;
    let mut layers = Vec::new();
    for (layer, residual) in residuals.into_iter().enumerate() {
        let logits = lens_logits_at(run.model, layer, residual, translate)?;
        let predicted = lens_logprobs(&logits)?;
        let mut cells = Vec::with_capacity(predicted.len());
        for token in 0..predicted.len().min(last.len()) {
            check_interrupted()?;
            let next = run.ids.get(token + 1..).unwrap_or_default();
            cells.extend(lens_cells(&predicted[token..=token], &last[token..=token], options, next)?);
        }
        layers.push(LensLayer { label: lens_label(layer, n_layer), cells });
    }
    Ok(layers)
}

/// Computes natural log probabilities from logits `(1, T, V)`, one row per token.
///
/// This is a building block of [`logit_lens`], for callers that run the model themselves.
///
/// # Errors
/// If candle does not support the dtype.
pub fn lens_logprobs(logits: &Tensor) -> Result<Vec<Vec<f32>>> {
    log_softmax(&logits.squeeze(0)?.to_dtype(DType::F32)?)?.to_vec2()
}

/// Builds one layer's cells for the given tokens, from [`lens_logprobs`] of this and the last layer.
///
/// `next` contains the tokens that follow them in the input. This is a building block of [`logit_lens`], for
/// callers that run the model themselves.
///
/// # Errors
/// If a watched token or one of `next` is outside the vocabulary.
pub fn lens_cells(
    predicted: &[Vec<f32>],
    last: &[Vec<f32>],
    options: &LensOptions,
    next: &[u32],
) -> Result<Vec<LensCell>> {
    let tokens = predicted.iter().zip(last).enumerate();
    tokens
        .map(|(token, (predicted, last))| {
            let next = next.get(token).copied();
            check_tokens(options.watch.iter().chain(&next), predicted.len())?;
            Ok(cell(predicted, last, options, next))
        })
        .collect()
}

fn check_tokens<'a>(ids: impl IntoIterator<Item = &'a u32>, vocab_size: usize) -> Result<()> {
    match ids.into_iter().find(|id| **id as usize >= vocab_size) {
        Some(id) => bail!("token {id} is outside the vocabulary of {vocab_size} tokens"),
        None => Ok(()),
    }
}

/// Returns the label of a lens layer.
///
/// ```
/// let labels: Vec<String> = (0..=2).map(|layer| candle_gpt2_interpret::lens_label(layer, 2)).collect();
/// assert!(labels[0] != labels[1] && labels[1] != labels[2]);
/// ```
pub fn lens_label(layer: usize, n_layer: usize) -> String {
    if layer < n_layer { format!("{layer}_pre") } else { "final_post".to_owned() }
}

/// Builds a cell from log probabilities. All tokens must be in the vocabulary.
fn cell(predicted: &[f32], last: &[f32], options: &LensOptions, next: Option<u32>) -> LensCell {
    let mut order: Vec<u32> = (0..).take(predicted.len()).collect();
    let of = |id: &u32| predicted[*id as usize];
    let by_probability = |a: &u32, b: &u32| of(b).total_cmp(&of(a)).then(a.cmp(b));
    let top = options.top.min(order.len());
    if top > 0 {
        order.select_nth_unstable_by(top - 1, by_probability);
        order[..top].sort_by(by_probability);
    }
    let weighted = |of: &dyn Fn(f64, f64) -> f64| {
        predicted.iter().zip(last).map(|(p, q)| of(f64::from(*p), f64::from(*q))).sum::<f64>()
    };
    // A token with zero probability contributes nothing.
    let share = |logarithm: f64, of: f64| {
        if logarithm == f64::NEG_INFINITY { 0.0 } else { libm::exp(logarithm) * of }
    };
    LensCell {
        top: order[..top].iter().map(|id| (*id, of(id))).collect(),
        entropy: rounded(-weighted(&|p, _| share(p, p))),
        divergence: rounded(weighted(&|p, q| share(q, q - p))),
        watched: options
            .watch
            .iter()
            .map(|id| {
                let own = predicted[*id as usize];
                (predicted.iter().filter(|other| **other > own).count(), own)
            })
            .collect(),
        next: next.map(|id| predicted[id as usize]),
    }
}
