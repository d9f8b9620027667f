//! Gradients at hook points and latents, attribution patching, and token saliency.
//!
//! The gradient at a hook point is the gradient of a zero-initialized variable added there.

use std::collections::BTreeMap;

use candle_core::{D, DType, Tensor, Var};
use candle_gpt2::{InitialGradients, gradients};
use candle_gpt2::{Observer, Pass, Site, SiteKind};

use crate::error::Result;
use crate::patching::{BATCH_TOKENS, check_kind};
use crate::run::rounded;
use crate::{Chain, GridAxis, InterpretError, Metric, Patching, Record, Run, Splice};

/// Adds a zero-initialized variable to the activations at selected hook points.
pub(crate) struct Probes(pub(crate) BTreeMap<Site, Var>);

impl Observer for Probes {
    fn wants(&self, site: Site) -> bool {
        self.0.contains_key(&site)
    }

    fn observe(&mut self, site: Site, value: Tensor) -> candle_core::Result<Tensor> {
        match self.0.get(&site) {
            Some(probe) => &value + probe.as_tensor(),
            None => Ok(value),
        }
    }
}

/// An activation and the metric's gradient with respect to it, in the same shape.
///
/// [`gradients_under`] returns them.
#[derive(Debug, Clone)]
pub struct ActivationGradient {
    /// The activation.
    pub value: Tensor,
    /// The gradient.
    pub gradient: Tensor,
}

/// Gradients of a metric, from [`gradients_under`].
#[derive(Debug, Clone)]
pub struct Gradients {
    /// The metric.
    pub metric: f32,
    /// Gradients at hook points.
    pub sites: BTreeMap<Site, ActivationGradient>,
    /// Gradients at each splice's latents, and at its error if it has one.
    pub splices: Vec<(ActivationGradient, Option<ActivationGradient>)>,
}

/// Computes the gradients of a metric at the given hook points.
///
/// ```
/// use candle_gpt2_interpret::{Metric, Run, named_site, site_gradients};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let site = named_site("resid_pre1")?;
/// let gradients = site_gradients(&run, &Metric::logit_difference(5, 6, 3), &[site])?;
/// assert_eq!(gradients[&site].dims(), [1, 4, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model fails, or if the metric does not depend on a hook point.
pub fn site_gradients(run: &Run, metric: &Metric, sites: &[Site]) -> Result<BTreeMap<Site, Tensor>> {
    let found = gradients_under(run, metric, sites, &mut [], &mut Chain(Vec::new()))?;
    Ok(found.sites.into_iter().map(|(site, found)| (site, found.gradient)).collect())
}

/// Computes a metric's gradients at hook points and inside spliced dictionaries, in a run with edits.
///
/// At each hook point, edits come first: the activation and its gradient are those after all edits. Edits
/// must be differentiable, like [`Steering`](crate::Steering), [`ControlVector`](crate::ControlVector) and
/// [`Edit`](crate::Edit).
///
/// ```
/// use candle_gpt2_interpret::{Metric, Run, Steering, gradients_under, named_site};
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let mut steering = Steering::new(&model, 1, Tensor::ones((1, 6), DType::F32, &Device::Cpu)?)?;
/// let site = named_site("resid_pre1")?;
/// let found = gradients_under(&run, &Metric::logit_difference(5, 6, 3), &[site], &mut [], &mut steering)?;
/// assert_eq!(found.sites[&site].value.get(0)?.get(0)?.to_vec1::<f32>()?, [1.; 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model fails, or if the metric does not depend on a hook point.
pub fn gradients_under(
    run: &Run,
    metric: &Metric,
    sites: &[Site],
    splices: &mut [Splice],
    edits: &mut dyn Observer,
) -> Result<Gradients> {
    metric.check(run)?;
    let mut record = Record::new(sites.iter().copied());
    observed(run, metric, edits, splices, &mut record)?;
    let probe = |(site, value): (&Site, &Tensor)| Ok((*site, Var::from_tensor(&value.zeros_like()?)?));
    let mut probes = Probes(record.values.iter().map(probe).collect::<Result<_>>()?);
    let mut variables: Vec<Var> = probes.0.values().cloned().collect();
    for splice in &mut *splices {
        let unseen =
            InterpretError::Mismatch(format!("{}: the run never reaches this hook point", splice.site()));
        variables.extend(splice.probe()?.ok_or(unseen)?);
    }
    let tensors: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
    let (value, found) = gradients(&tensors, InitialGradients::Nothing, 1.0, || {
        observed(run, metric, edits, splices, &mut probes)?.sum_all()
    })?;
    let mut found = found.into_iter();
    let mut next = |site: &Site, value: Option<Tensor>| match (value, found.next().flatten()) {
        (Some(value), Some(gradient)) => Ok(ActivationGradient { value, gradient }),
        _ => Err(InterpretError::Mismatch(format!("the metric does not depend on {site}"))),
    };
    let at_sites = record.values.into_iter().map(|(site, value)| Ok((site, next(&site, Some(value))?)));
    let sites = at_sites.collect::<Result<_>>()?;
    let mut at_splices = Vec::new();
    for splice in splices {
        let (site, has_error) = (splice.site(), splice.has_error());
        let latents = next(&site, splice.latents.take())?;
        let error = next(&site, splice.error.take());
        at_splices.push((latents, if has_error { Some(error?) } else { None }));
    }
    Ok(Gradients { metric: rounded(value), sites, splices: at_splices })
}

/// Computes the metric of a run that applies the edits, then the splices, then the observer `last`.
fn observed(
    run: &Run,
    metric: &Metric,
    edits: &mut dyn Observer,
    splices: &mut [Splice],
    last: &mut dyn Observer,
) -> candle_core::Result<Tensor> {
    let mut chain: Vec<&mut dyn Observer> = vec![edits];
    chain.extend(splices.iter_mut().map(|splice| splice as &mut dyn Observer));
    chain.push(last);
    metric.of(&run.logits(metric.logits_for(), &mut Chain(chain))?)
}

/// Attribution patching: a linear estimate of [`Patching::grid`] from one gradient.
///
/// The gradient is taken at the corrupted prompt. The estimate is known to be wrong where the model is
/// strongly nonlinear: at the early residual stream and the first MLP. [`Patching`] has an example with two
/// prompts.
///
/// # Errors
/// If [`Patching::grid`] or [`site_gradients`] would fail.
pub fn estimated_grid(patching: &Patching, kind: SiteKind, by: GridAxis) -> Result<Vec<Vec<f32>>> {
    check_kind(kind, by)?;
    let n_layer = patching.clean().model.config().n_layer;
    let sites: Vec<Site> = (0..n_layer).map(|layer| Site::in_block(layer, kind)).collect();
    let clean = patching.clean().record(sites.iter().copied())?;
    let corrupted = patching.corrupted().record(sites.iter().copied())?;
    let gradients = site_gradients(patching.corrupted(), patching.metric(), &sites)?;
    let range = f64::from(patching.clean_value - patching.corrupted_value);
    sites
        .iter()
        .map(|site| {
            let (clean, corrupted) = (clean.get(*site)?, corrupted.get(*site)?);
            let difference = (clean - corrupted)?;
            // Scores of masked keys are minus infinity in both runs.
            let difference =
                corrupted.ge(f64::from(f32::MIN))?.where_cond(&difference, &difference.zeros_like()?)?;
            let effects = ((difference * &gradients[site])? / range)?.squeeze(0)?.to_dtype(DType::F32)?;
            // `(T, C)`, `(T, H, D)` or `(H, T, S)`.
            let effects = match kind {
                SiteKind::AttnScores | SiteKind::Pattern => effects.sum(D::Minus1)?.t()?, // (T, H)
                _ => effects.sum(D::Minus1)?,                                             // (T) or (T, H)
            };
            let effects = match (by, effects.dims().len()) {
                (GridAxis::Layer, _) => effects.sum_all()?.unsqueeze(0)?,
                (GridAxis::Position, 2) => effects.sum(1)?,
                (GridAxis::Head, _) => effects.sum(0)?,
                _ => effects,
            };
            Ok(effects.flatten_all()?.to_vec1()?)
        })
        .collect()
}

/// Method for computing token weights. An argument of [`token_weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saliency {
    /// Gradient with respect to the embedding.
    Gradient,
    /// Gradient times the embedding.
    InputTimesGradient,
    /// Integrated gradients (arXiv:1703.01365).
    ///
    /// The mean gradient along a straight path from a baseline, times the difference from the baseline.
    Integrated {
        /// Number of steps along the path.
        steps: usize,
        /// Token whose embedding is the baseline.
        baseline: u32,
    },
}

/// Weight of each token for a prediction, from [`token_weights`].
#[derive(Debug, Clone, PartialEq)]
pub struct TokenWeights {
    /// L2 norm of the token's weight vector over the hidden size.
    pub norms: Vec<f32>,
    /// Sum of the token's weight vector.
    pub sums: Vec<f32>,
    /// Metric of the input, and of the baseline if there is one.
    ///
    /// With a baseline, `sums` add up to the difference between the two.
    pub values: (f32, Option<f32>),
}

/// Replaces the token embeddings of a pass.
pub(crate) struct Embeddings(pub(crate) Tensor);

impl Observer for Embeddings {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Embed
    }

    fn observe(&mut self, _: Site, _: Tensor) -> candle_core::Result<Tensor> {
        Ok(self.0.clone())
    }
}

/// Computes each token's weight for a prediction from gradients with respect to the token embeddings.
///
/// ```
/// use candle_gpt2_interpret::{Metric, Run, Saliency, token_weights};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let weights = token_weights(&run, &Metric::logit_difference(5, 6, 3), Saliency::InputTimesGradient)?;
/// assert_eq!(weights.sums, [0.; 4], "with all weights zero, no token matters");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the metric or the baseline token does not fit the run, if `steps` is 0, or if the model fails.
pub fn token_weights(run: &Run, metric: &Metric, saliency: Saliency) -> Result<TokenWeights> {
    metric.check(run)?;
    let site = Site::outside(SiteKind::Embed);
    let embedded = run.record([site])?.get(site)?.clone(); // (1, T, C)
    // Returns the gradients `(R, T, C)` and the metrics of rows with these embeddings.
    let of = |rows: &Tensor| -> Result<(Tensor, Vec<f32>)> {
        let ids = run.input()?.repeat((rows.dim(0)?, 1))?;
        let variable = Var::from_tensor(rows)?;
        let mut values = Vec::new();
        let (_, found) = gradients(&[variable.as_tensor()], InitialGradients::Nothing, 1.0, || {
            let mut embeddings = Embeddings(variable.as_tensor().clone());
            let pass = &mut Pass::inference().observed_by(&mut embeddings);
            let of_rows = metric.of(&run.model.forward_with(&ids, metric.logits_for(), None, pass)?)?;
            values = of_rows.detach().to_vec1::<f32>()?;
            of_rows.sum_all()
        })?;
        match found.into_iter().next().flatten() {
            Some(gradient) => Ok((gradient, values)),
            None => Err(InterpretError::Mismatch("the metric does not depend on the text".into())),
        }
    };
    let (weights, values) = match saliency {
        Saliency::Gradient => {
            let (gradient, values) = of(&embedded)?;
            (gradient, (values[0], None))
        }
        Saliency::InputTimesGradient => {
            let (gradient, values) = of(&embedded)?;
            ((gradient * &embedded)?, (values[0], None))
        }
        Saliency::Integrated { steps, baseline } => {
            if steps == 0 {
                return Err(InterpretError::Mismatch("integrated gradients need at least 1 step".into()));
            }
            let rest = Run::new(run.model, std::slice::from_ref(&baseline))?;
            let start = rest.model.token_embedding(baseline)?.broadcast_as(embedded.shape())?.contiguous()?;
            let difference = (&embedded - &start)?;
            let at = |share: f64| &start + (&difference * share)?;
            let mut sum = embedded.zeros_like()?;
            // Midpoint rule.
            let shares: Vec<f64> = (0..steps).map(|step| (step as f64 + 0.5) / steps as f64).collect();
            for shares in shares.chunks((BATCH_TOKENS / run.ids.len()).max(1)) {
                let rows = shares.iter().map(|share| at(*share)).collect::<candle_core::Result<Vec<_>>>()?;
                sum = (sum + of(&Tensor::cat(&rows, 0)?)?.0.sum_keepdim(0)?)?;
            }
            let (_, ends) = of(&Tensor::cat(&[&embedded, &start], 0)?)?;
            ((difference * (sum / steps as f64)?)?, (ends[0], Some(ends[1])))
        }
    };
    let weights = weights.squeeze(0)?.to_dtype(DType::F32)?;
    let norms = weights.sqr()?.sum(D::Minus1)?.sqrt()?.to_vec1()?;
    Ok(TokenWeights { norms, sums: weights.sum(D::Minus1)?.to_vec1()?, values })
}
