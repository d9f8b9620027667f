//! A model with its input tokens, and a metric that summarizes the prediction as one number.

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Observer, Pass, Site, SiteKind};

use crate::{InterpretError, Record};

/// A model and the tokens it runs on.
#[derive(Clone, Copy)]
#[doc(alias("HookedTransformer", "run_with_cache", "run_with_hooks"))]
pub struct Run<'a> {
    /// The model.
    pub model: &'a Gpt2LMHeadModel,
    /// The input tokens.
    pub ids: &'a [u32],
}

impl<'a> Run<'a> {
    /// Pairs a model with its input tokens.
    ///
    /// # Errors
    /// If `ids` is empty or exceeds the context, or if a token is outside the vocabulary.
    pub fn new(model: &'a Gpt2LMHeadModel, ids: &'a [u32]) -> std::result::Result<Self, InterpretError> {
        let config = model.config();
        if ids.is_empty() || ids.len() > config.n_positions {
            return Err(InterpretError::Length { tokens: ids.len(), n_positions: config.n_positions });
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= config.vocab_size) {
            return Err(InterpretError::UnknownToken { id: *id, vocab_size: config.vocab_size });
        }
        Ok(Self { model, ids })
    }

    /// Returns the input tokens as a tensor of shape `(1, T)`.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn input(&self) -> Result<Tensor> {
        Tensor::from_slice(self.ids, (1, self.ids.len()), self.model.device())
    }

    /// Runs the model with an observer and returns the logits of the requested tokens.
    ///
    /// # Errors
    /// If the model or the observer fails.
    pub fn logits(&self, logits_for: LogitsFor, observer: &mut dyn Observer) -> Result<Tensor> {
        self.model.forward_with(
            &self.input()?,
            logits_for,
            None,
            &mut Pass::inference().observed_by(observer),
        )
    }

    /// Records the activations at these hook points.
    ///
    /// Nothing after the last hook point is computed: neither the blocks above it nor the output head, unless
    /// logits are requested.
    ///
    /// # Errors
    /// If the model fails.
    pub fn record(&self, sites: impl IntoIterator<Item = Site>) -> Result<Record> {
        self.fill(Record::new(sites))
    }

    /// Runs the model and fills `record`.
    ///
    /// # Errors
    /// If the model fails.
    pub fn fill(&self, mut record: Record) -> Result<Record> {
        if record.wants(Site::outside(SiteKind::Logits)) {
            self.logits(LogitsFor::EveryToken, &mut record)?;
        } else {
            let stop = stop_after(record.sites());
            let mut pass = stopping(Pass::inference().observed_by(&mut record), stop);
            self.model.transformer().forward_with(&self.input()?, None, &mut pass)?;
        }
        Ok(record)
    }

    /// Returns every block's input and the last block's output: `n_layer + 1` tensors `(1, T, C)`.
    ///
    /// A run can start from any of them.
    ///
    /// # Errors
    /// If the model fails.
    pub fn residuals(&self) -> Result<Vec<Tensor>> {
        Ok(self.record(residual_sites(self.model.config().n_layer))?.values.into_values().collect())
    }
}

/// Records the activations at these hook points for several sequences in one pass.
///
/// The sequences are concatenated along the token axis, so shapes are `(1, T, …)` with `T` the total number
/// of tokens. The values are the same as in separate runs. As in [`Run::record`], nothing after the last hook
/// point is computed.
///
/// ```
/// use candle_gpt2_interpret::{named_site, record_rows};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let site = named_site("mlp_out1")?;
/// let record = record_rows(&model, &[&[1, 2, 3, 4], &[5]], [site])?;
/// assert_eq!(record.get(site)?.dims(), [1, 5, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If `texts` is empty, a sequence is [invalid](Run::new), the sites include logits, scores or patterns, or
/// the model fails.
pub fn record_rows(
    model: &Gpt2LMHeadModel,
    texts: &[&[u32]],
    sites: impl IntoIterator<Item = Site>,
) -> std::result::Result<Record, InterpretError> {
    let mut record = Record::new(sites);
    let of_one_text =
        |site: &Site| matches!(site.kind, SiteKind::Logits | SiteKind::AttnScores | SiteKind::Pattern);
    if let Some(site) = record.sites().find(of_one_text) {
        return Err(InterpretError::Site {
            site,
            reason: "several texts can be recorded together only at hook points with a separate value for each token",
        });
    }
    if texts.is_empty() {
        return Err(InterpretError::Mismatch("expected at least one text to record".into()));
    }
    texts.iter().try_for_each(|ids| Run::new(model, ids).map(drop))?;
    let (ids, lengths): (Vec<u32>, Vec<usize>) =
        (texts.concat(), texts.iter().map(|ids| ids.len()).collect());
    let input = Tensor::from_vec(ids, (1, lengths.iter().sum::<usize>()), model.device())?;
    let stop = stop_after(record.sites());
    let mut pass = stopping(Pass::inference().observed_by(&mut record).of_rows(lengths.into()), stop);
    model.transformer().forward_with(&input, None, &mut pass)?;
    Ok(record)
}

/// Returns the block before which a pass may [stop](Pass::stopping_at) after visiting these sites.
///
/// Returns `None` if one of the sites comes after the blocks.
///
/// ```
/// use candle_gpt2_interpret::{named_site, stop_after};
///
/// assert_eq!(stop_after([named_site("z3")?, named_site("embed")?]), Some(4));
/// assert_eq!(stop_after([named_site("resid_pre3")?]), Some(3), "the input of a block is available before the block runs");
/// assert_eq!(stop_after([named_site("ln_final.hook_scale")?]), None);
/// # Ok::<(), candle_gpt2_interpret::SiteError>(())
/// ```
pub fn stop_after(sites: impl IntoIterator<Item = Site>) -> Option<usize> {
    let stops = sites.into_iter().map(|site| match (site.layer, site.kind) {
        (Some(layer), SiteKind::ResidPre) => Some(layer),
        (Some(layer), _) => Some(layer + 1),
        (None, SiteKind::Embed | SiteKind::PosEmbed) => Some(0),
        (None, _) => None,
    });
    stops.collect::<Option<Vec<_>>>()?.into_iter().max()
}

/// Makes the pass stop before block `stop`, if there is one.
pub(crate) fn stopping(pass: Pass<'_>, stop: Option<usize>) -> Pass<'_> {
    match stop {
        Some(layer) => pass.stopping_at(layer),
        None => pass,
    }
}

/// Returns the hook points of every block's input and of the last block's output.
///
/// ```
/// assert_eq!(candle_gpt2_interpret::residual_sites(12).count(), 13);
/// ```
pub fn residual_sites(n_layer: usize) -> impl Iterator<Item = Site> {
    let last = n_layer.checked_sub(1).map(|layer| Site::in_block(layer, SiteKind::ResidPost));
    (0..n_layer).map(|layer| Site::in_block(layer, SiteKind::ResidPre)).chain(last)
}

/// Value derived from the logits at one position. Part of a [`Metric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Measure {
    /// Logit of the answer, or the difference from another token's logit.
    #[default]
    Logit,
    /// Natural logarithm of the answer's probability, or of the ratio of the two probabilities.
    LogProbability,
    /// Probability of the answer, or the difference between the two probabilities.
    Probability,
}

/// A scalar summary of a prediction: the score of an answer, alone or relative to another token.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_interpret::Metric;
///
/// let logits = Tensor::new(&[[[0f32, 3., 1., 2.]]], &Device::Cpu)?;
/// assert_eq!(Metric::logit_difference(1, 2, 0).of(&logits)?.to_vec1::<f32>()?, [2.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// The answer token.
    pub answer: u32,
    /// The token that the answer is compared with.
    pub against: Option<u32>,
    /// Index of the token whose next-token prediction is measured.
    pub position: usize,
    /// The value to compare.
    pub measure: Measure,
}

impl Metric {
    /// Creates a metric for the difference between two logits.
    pub fn logit_difference(answer: u32, against: u32, position: usize) -> Self {
        Self { answer, against: Some(against), position, measure: Measure::Logit }
    }

    /// Returns the logits that the metric needs.
    pub fn logits_for(&self) -> LogitsFor {
        LogitsFor::Tokens { first: self.position, count: 1 }
    }

    /// Computes the metric of each row, `(B)`, from logits `(B, 1, V)`.
    ///
    /// # Errors
    /// If a token is outside the vocabulary.
    pub fn of(&self, logits: &Tensor) -> Result<Tensor> {
        let logits = logits.squeeze(1)?.to_dtype(DType::F32)?; // (B, V)
        let values = match self.measure {
            Measure::Logit => logits,
            Measure::LogProbability => log_softmax(&logits)?,
            Measure::Probability => log_softmax(&logits)?.exp()?,
        };
        let of_token = |id: u32| values.narrow(1, id as usize, 1)?.squeeze(1);
        let answer = of_token(self.answer)?;
        match self.against {
            Some(against) => answer - of_token(against)?,
            None => Ok(answer),
        }
    }

    /// Checks that the metric fits a run.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or if the position is past the end of the sequence.
    pub fn check(&self, run: &Run) -> std::result::Result<(), InterpretError> {
        let vocab_size = run.model.config().vocab_size;
        let mut ids = [Some(self.answer), self.against].into_iter().flatten();
        if let Some(id) = ids.find(|id| *id as usize >= vocab_size) {
            return Err(InterpretError::UnknownToken { id, vocab_size });
        }
        if self.position >= run.ids.len() {
            return Err(InterpretError::Position { position: self.position, tokens: run.ids.len() });
        }
        Ok(())
    }

    /// Runs the model with an observer and returns the metric.
    ///
    /// # Errors
    /// If the model or the observer fails.
    pub fn of_run(&self, run: &Run, observer: &mut dyn Observer) -> Result<f32> {
        self.of(&run.logits(self.logits_for(), observer)?)?.squeeze(0)?.to_scalar()
    }
}

/// Differentiable log-softmax over the last axis.
///
/// # Errors
/// If candle does not support the dtype.
pub(crate) fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    let last = candle_core::D::Minus1;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(last)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(last)?.log()?)
}

/// Rounds to the nearest `f32`.
#[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
pub(crate) fn rounded(value: f64) -> f32 {
    value as f32
}
