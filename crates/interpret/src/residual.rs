//! The residual stream as the sum that it is, and what each part of the sum says for a prediction (direct logit attribution).
//!
//! The final norm divides by one number for each token, so a logit is a sum over the parts of the residual stream, once that number
//! is taken from the whole run: part `a` gives `((a - mean a) / scale) · d`, where `d` is what the output head and the norm's weight
//! make of the answer. What the norm's bias gives is no part of any of them. Source: TransformerLens 4.3.0, `ActivationCache`.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::error::Result;
use crate::processing::{Processing, centred};
use crate::run::rounded;
use crate::{InterpretError, Measure, Metric, Run};

/// Parts of a residual stream. [`decomposed_residual`] gives one.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Their names, as TransformerLens has them.
    pub labels: Vec<String>,
    /// `(N, T, C)`, of the model as it is.
    pub values: Tensor,
}

impl Stack {
    fn new(parts: Vec<(String, Tensor)>) -> Result<Self> {
        let (labels, values): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Ok(Self { labels, values: Tensor::cat(&values, 0)?.to_dtype(DType::F32)? })
    }
}

/// The residual stream on its way: `0_pre`, with `has_middle` `0_mid`, `1_pre`, …, `final_post`.
///
/// ```
/// use candle_gpt2_interpret::{Run, accumulated_residuals};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let stack = accumulated_residuals(&Run::new(&model, &[1, 2, 3, 4])?, false)?;
/// assert_eq!(stack.labels, ["0_pre", "1_pre", "final_post"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of the model.
pub fn accumulated_residuals(run: &Run, has_middle: bool) -> Result<Stack> {
    let n_layer = run.model.config().n_layer;
    let last = Site::in_block(n_layer - 1, SiteKind::ResidPost);
    let kinds: &[_] = if has_middle {
        &[(SiteKind::ResidPre, "pre"), (SiteKind::ResidMid, "mid")]
    } else {
        &[(SiteKind::ResidPre, "pre")]
    };
    let inside = (0..n_layer).flat_map(|layer| {
        kinds.iter().map(move |(kind, name)| (Site::in_block(layer, *kind), format!("{layer}_{name}")))
    });
    stack_of(run, inside.chain([(last, "final_post".to_owned())]).collect())
}

/// The residual stream as the sum of `embed`, `pos_embed`, `0_attn_out`, `0_mlp_out`, ….
///
/// ```
/// use candle_gpt2_interpret::{Run, decomposed_residual};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let stack = decomposed_residual(&Run::new(&model, &[1, 2, 3, 4])?)?;
/// assert_eq!(stack.labels, ["embed", "pos_embed", "0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of the model.
pub fn decomposed_residual(run: &Run) -> Result<Stack> {
    let mut sites = vec![
        (Site::outside(SiteKind::Embed), "embed".to_owned()),
        (Site::outside(SiteKind::PosEmbed), "pos_embed".to_owned()),
    ];
    for layer in 0..run.model.config().n_layer {
        sites.push((Site::in_block(layer, SiteKind::AttnOut), format!("{layer}_attn_out")));
        sites.push((Site::in_block(layer, SiteKind::MlpOut), format!("{layer}_mlp_out")));
    }
    stack_of(run, sites)
}

fn stack_of(run: &Run, sites: Vec<(Site, String)>) -> Result<Stack> {
    let record = run.record(sites.iter().map(|(site, _)| *site))?;
    let part = |(site, label): (Site, String)| Ok((label, record.get(site)?.clone()));
    Stack::new(sites.into_iter().map(part).collect::<Result<_>>()?)
}

/// What each head adds, `L0H0`, `L0H1`, …, and the `remainder` of the last residual stream. With `processing` what the constants of
/// the heads' values write is in the remainder, as in TransformerLens, and not with the heads.
/// As [`decomposed_residual`], head by head.
///
/// # Errors
/// Those of the model.
pub fn head_results(run: &Run, processing: Option<&Processing>) -> Result<Stack> {
    let (n_layer, n_head) = (run.model.config().n_layer, run.model.config().n_head);
    let last = Site::in_block(n_layer - 1, SiteKind::ResidPost);
    let z = (0..n_layer).map(|layer| Site::in_block(layer, SiteKind::Z));
    let record = run.record(z.chain([last]))?;
    let mut remainder = record.get(last)?.to_dtype(DType::F32)?;
    let mut parts = Vec::new();
    for (layer, block) in run.model.transformer().blocks().iter().enumerate() {
        let z = record.get(Site::in_block(layer, SiteKind::Z))?.flatten_from(2)?;
        let mut results = block.attn().results(&z)?.to_dtype(DType::F32)?; // (1, T, H, C)
        if let Some(constants) = processing.and_then(|processing| processing.result_constants(layer)) {
            results = results.broadcast_sub(&constants.to_dtype(DType::F32)?)?;
        }
        remainder = (remainder - results.sum(2)?)?;
        for head in 0..n_head {
            parts.push((format!("L{layer}H{head}"), results.narrow(2, head, 1)?.squeeze(2)?));
        }
    }
    parts.push(("remainder".to_owned(), remainder));
    Stack::new(parts)
}

/// The direction that a normalized residual stream is multiplied with for the metric. [`attribute`] multiplies with it.
#[derive(Debug, Clone)]
pub struct Direction {
    /// `(C)`, less its mean.
    pub values: Tensor,
    /// What the final norm's bias gives.
    pub bias: f32,
}

impl Direction {
    /// That of the difference of two logits, or of one logit to the mean of all.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or there is no memory for the output head in f32.
    pub fn new(model: &Gpt2LMHeadModel, answer: u32, against: Option<u32>) -> Result<Self> {
        let head = model.lm_head();
        let row = |id: u32| head.embedding(&Tensor::new(&[id], model.device())?)?.squeeze(0);
        let other = match against {
            Some(against) => row(against)?,
            None => head.weight().to_tensor()?.to_dtype(DType::F32)?.mean(0)?,
        };
        let difference = (row(answer)?.to_dtype(DType::F32)? - other.to_dtype(DType::F32)?)?;
        let norm = model.transformer().ln_f();
        let values = centred(&(&difference * norm.weight().to_dtype(DType::F32)?)?)?;
        let bias = match norm.bias() {
            Some(bias) => (difference * bias.to_dtype(DType::F32)?)?.sum_all()?.to_scalar()?,
            None => 0.0,
        };
        Ok(Self { values, bias })
    }
}

/// The parts that a prediction is divided into. [`attribute`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Both embeddings, and attention and MLP of each block.
    Component,
    /// The residual stream on its way, see [`accumulated_residuals`]: what it would say at each place.
    Layer,
    /// Each head, and the remainder.
    Head,
    /// The same as TransformerLens has it, see [`head_results`].
    TransformerLensHead,
    /// Each neuron, and the remainder.
    Neuron,
}

/// What each part says for a prediction. [`attribute`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Attribution {
    /// The parts.
    pub labels: Vec<String>,
    /// What each of them gives.
    pub values: Vec<f32>,
    /// What the final norm's bias gives, which is no part.
    pub bias: f32,
    /// The metric itself: the difference of the logits, or how far the answer's lies above the mean of all. The parts and the bias
    /// add up to it, except with [`Unit::Layer`].
    pub total: f32,
}

/// Direct logit attribution.
///
/// ```
/// use candle_gpt2_interpret::{Metric, Run, Unit, attribute};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let parts = attribute(&run, &Metric::logit_difference(5, 6, 3), Unit::Component)?;
/// assert_eq!(parts.labels.len(), parts.values.len());
/// assert_eq!(parts.total, 0.0, "a model of zeros expects both alike");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the metric is none of logits, does not fit the run, and those of the model.
pub fn attribute(run: &Run, metric: &Metric, unit: Unit) -> Result<Attribution> {
    metric.check(run)?;
    if metric.measure != Measure::Logit {
        let site = Site::outside(SiteKind::Logits);
        let reason = "parts of the residual stream add up to logits, not to probabilities";
        return Err(InterpretError::Site { site, reason });
    }
    let direction = Direction::new(run.model, metric.answer, metric.against)?;
    let last = Site::in_block(run.model.config().n_layer - 1, SiteKind::ResidPost);
    let scale_site = Site::outside(SiteKind::LnFinalScale);
    let record = run.record([last, scale_site])?;
    let scale: f32 = at(record.get(scale_site)?, metric.position)?.squeeze(0)?.to_scalar()?;
    // Of parts (N, C).
    let of = |parts: &Tensor| -> Result<Vec<f32>> {
        let parts = (centred(&parts.to_dtype(DType::F32)?)? / f64::from(scale))?;
        Ok(parts.matmul(&direction.values.unsqueeze(1)?)?.squeeze(1)?.to_vec1()?)
    };
    let whole = of(&at(record.get(last)?, metric.position)?.unsqueeze(0)?)?[0];
    let of_stack = |stack: Stack| -> Result<(Vec<String>, Vec<f32>)> {
        Ok((stack.labels, of(&stack.values.narrow(1, metric.position, 1)?.squeeze(1)?)?))
    };
    let (labels, values) = match unit {
        Unit::Component => of_stack(decomposed_residual(run)?)?,
        Unit::Layer => of_stack(accumulated_residuals(run, true)?)?,
        Unit::Head => of_stack(head_results(run, None)?)?,
        Unit::TransformerLensHead => of_stack(head_results(run, Some(&Processing::new(run.model)?))?)?,
        Unit::Neuron => neurons(run, metric.position, &direction.values, scale, whole)?,
    };
    Ok(Attribution { labels, values, bias: direction.bias, total: whole + direction.bias })
}

/// What each neuron gives, and all else; vectors as wide as the model are made of none.
fn neurons(
    run: &Run,
    position: usize,
    direction: &Tensor,
    scale: f32,
    whole: f32,
) -> Result<(Vec<String>, Vec<f32>)> {
    let sites = (0..run.model.config().n_layer).map(|layer| Site::in_block(layer, SiteKind::MlpPost));
    let record = run.record(sites)?;
    let (mut labels, mut values) = (Vec::new(), Vec::new());
    for (layer, block) in run.model.transformer().blocks().iter().enumerate() {
        let weight = block.mlp().contract().weight().to_tensor()?.to_dtype(DType::F32)?; // (C, inner)
        let written = weight.t()?.matmul(&direction.unsqueeze(1)?)?.squeeze(1)?; // (inner)
        let active =
            at(record.get(Site::in_block(layer, SiteKind::MlpPost))?, position)?.to_dtype(DType::F32)?;
        let given: Vec<f32> = ((active * written)? / f64::from(scale))?.to_vec1()?;
        labels.extend((0..given.len()).map(|neuron| format!("L{layer}N{neuron}")));
        values.extend(given);
    }
    let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
    labels.push("remainder".to_owned());
    values.push(rounded(f64::from(whole) - sum));
    Ok((labels, values))
}

/// One token of `(1, T, …)`.
fn at(value: &Tensor, position: usize) -> candle_core::Result<Tensor> {
    value.squeeze(0)?.narrow(0, position, 1)?.squeeze(0)?.contiguous()
}
