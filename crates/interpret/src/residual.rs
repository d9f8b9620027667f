//! Direct logit attribution: contributions of the residual stream's parts to a logit.
//!
//! The final norm divides by one scalar per token. With this scalar fixed to its value in the run, a logit is
//! a sum over the parts of the residual stream. Part `a` contributes `((a - mean a) / scale) · d`. The
//! direction `d` combines the output head's row for the answer with the norm's weight. The contribution of
//! the norm's bias belongs to no part. Source: TransformerLens 4.3.0, `ActivationCache`.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::error::Result;
use crate::processing::{Processing, center};
use crate::run::rounded;
use crate::{InterpretError, Measure, Metric, Run};

/// Parts of a residual stream, for example from [`decomposed_residual`].
#[derive(Debug, Clone)]
pub struct Stack {
    /// Names of the parts, as in TransformerLens.
    pub labels: Vec<String>,
    /// Values `(N, T, C)` of the unmodified model.
    pub values: Tensor,
}

impl Stack {
    fn new(parts: Vec<(String, Tensor)>) -> Result<Self> {
        let (labels, values): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Ok(Self { labels, values: Tensor::cat(&values, 0)?.to_dtype(DType::F32)? })
    }
}

/// Records the residual stream at each block: `0_pre`, `1_pre`, …, `final_post`.
///
/// With `has_middle`, the points between attention and MLP are included: `0_mid`, `1_mid`, ….
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
/// If the model fails.
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

/// Decomposes the residual stream into `embed`, `pos_embed`, `0_attn_out`, `0_mlp_out`, ….
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
/// If the model fails.
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

/// Decomposes the final residual stream into head outputs (`L0H0`, `L0H1`, …) and a `remainder`.
///
/// With `processing`, the contributions of the constant parts of the head values move from the heads to the
/// remainder, as in TransformerLens. [`decomposed_residual`] is the decomposition by component.
///
/// # Errors
/// If the model fails.
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

/// Direction that [`attribute`] projects the normalized residual stream onto.
#[derive(Debug, Clone)]
pub struct Direction {
    /// Direction `(C)` with zero mean.
    pub values: Tensor,
    /// Contribution of the final norm's bias.
    pub bias: f32,
}

impl Direction {
    /// Creates the direction of a logit difference, or of one logit minus the mean logit.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or if the output head cannot be allocated in f32.
    pub fn new(model: &Gpt2LMHeadModel, answer: u32, against: Option<u32>) -> Result<Self> {
        let head = model.lm_head();
        let row = |id: u32| head.embedding(&Tensor::new(&[id], model.device())?)?.squeeze(0);
        let other = match against {
            Some(against) => row(against)?,
            None => head.weight().to_tensor()?.to_dtype(DType::F32)?.mean(0)?,
        };
        let difference = (row(answer)?.to_dtype(DType::F32)? - other.to_dtype(DType::F32)?)?;
        let norm = model.transformer().ln_f();
        let values = center(&(&difference * norm.weight().to_dtype(DType::F32)?)?)?;
        let bias = match norm.bias() {
            Some(bias) => (difference * bias.to_dtype(DType::F32)?)?.sum_all()?.to_scalar()?,
            None => 0.0,
        };
        Ok(Self { values, bias })
    }
}

/// Granularity of the decomposition in [`attribute`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Both embeddings, and the attention and MLP of each block.
    Component,
    /// The residual stream at each point, see [`accumulated_residuals`].
    ///
    /// Each value is the metric that this residual stream would produce.
    Layer,
    /// Each head, and the remainder.
    Head,
    /// Each head and the remainder as in TransformerLens, see [`head_results`].
    TransformerLensHead,
    /// Each neuron, and the remainder.
    Neuron,
}

/// Contribution of each part to a prediction, from [`attribute`].
#[derive(Debug, Clone, PartialEq)]
pub struct Attribution {
    /// Names of the parts.
    pub labels: Vec<String>,
    /// Contribution of each part.
    pub values: Vec<f32>,
    /// Contribution of the final norm's bias, which belongs to no part.
    pub bias: f32,
    /// The metric: the difference between two logits, or the answer's logit minus the mean logit.
    ///
    /// The parts and the bias add up to it, except with [`Unit::Layer`].
    pub total: f32,
}

/// Computes the direct logit attribution of a metric.
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
/// assert_eq!(parts.total, 0.0, "with all weights zero, both logits are equal");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the metric does not measure logits or does not fit the run, or if the model fails.
pub fn attribute(run: &Run, metric: &Metric, unit: Unit) -> Result<Attribution> {
    metric.check(run)?;
    if metric.measure != Measure::Logit {
        let site = Site::outside(SiteKind::Logits);
        let reason = "expected a logit metric: the parts of the stream do not add up to probabilities";
        return Err(InterpretError::Site { site, reason });
    }
    let direction = Direction::new(run.model, metric.answer, metric.against)?;
    let last = Site::in_block(run.model.config().n_layer - 1, SiteKind::ResidPost);
    let scale_site = Site::outside(SiteKind::LnFinalScale);
    let record = run.record([last, scale_site])?;
    let scale: f32 = at(record.get(scale_site)?, metric.position)?.squeeze(0)?.to_scalar()?;
    // Contributions of parts `(N, C)`.
    let of = |parts: &Tensor| -> Result<Vec<f32>> {
        let parts = (center(&parts.to_dtype(DType::F32)?)? / f64::from(scale))?;
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

/// Contribution of each neuron, and of the remainder.
///
/// The weights are projected onto the direction first, so no vector of the hidden size is allocated per
/// neuron.
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

/// Selects one token of `(1, T, …)`.
fn at(value: &Tensor, position: usize) -> candle_core::Result<Tensor> {
    value.squeeze(0)?.narrow(0, position, 1)?.squeeze(0)?.contiguous()
}
