//! A model, the tokens that it reads, and a number that its prediction is summed up in.

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Observer, Pass, Site, SiteKind};

use crate::{InterpretError, Record};

/// A model on a text.
#[derive(Clone, Copy)]
#[doc(alias("HookedTransformer", "run_with_cache", "run_with_hooks"))]
pub struct Run<'a> {
    /// The model.
    pub model: &'a Gpt2LMHeadModel,
    /// The tokens of the text.
    pub ids: &'a [u32],
}

impl<'a> Run<'a> {
    /// A model on these tokens.
    ///
    /// # Errors
    /// When there are none, more than the context holds, or one outside the vocabulary.
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

    /// The tokens as the model takes them, `(1, T)`.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn input(&self) -> Result<Tensor> {
        Tensor::from_slice(self.ids, (1, self.ids.len()), self.model.device())
    }

    /// Logits of the wanted tokens, seen by an observer.
    ///
    /// # Errors
    /// Those of the model and of the observer.
    pub fn logits(&self, logits_for: LogitsFor, observer: &mut dyn Observer) -> Result<Tensor> {
        self.model.forward_with(
            &self.input()?,
            logits_for,
            None,
            &mut Pass::inference().observed_by(observer),
        )
    }

    /// The activations at these hook points. Nothing after the last of them is computed: neither the blocks above it nor, unless logits are
    /// wanted, the output head.
    ///
    /// # Errors
    /// Those of the model.
    pub fn record(&self, sites: impl IntoIterator<Item = Site>) -> Result<Record> {
        self.filled(Record::new(sites))
    }

    /// A record of this run.
    ///
    /// # Errors
    /// Those of the model.
    pub fn filled(&self, mut record: Record) -> Result<Record> {
        if record.wants(Site::outside(SiteKind::Logits)) {
            self.logits(LogitsFor::EveryToken, &mut record)?;
        } else {
            let stop = stop_after(record.sites());
            let mut pass = stopping(Pass::inference().observed_by(&mut record), stop);
            self.model.transformer().forward_with(&self.input()?, None, &mut pass)?;
        }
        Ok(record)
    }

    /// The input of every block and the output of the last, `n_layer + 1` tensors of `(1, T, C)`: where a run may start.
    ///
    /// # Errors
    /// Those of the model.
    pub fn residuals(&self) -> Result<Vec<Tensor>> {
        Ok(self.record(residual_sites(self.model.config().n_layer))?.values.into_values().collect())
    }
}

/// The activations at these hook points when a model reads several texts at once: one after the other on the axis of tokens, `(1, T, …)` with
/// `T` the tokens of all of them, in the numbers that each has alone. Nothing after the last of the places is computed, as in
/// [`Run::record`].
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
/// When there is no text, one cannot be [read](Run::new), or logits or scores are wanted, and those of the model.
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
            reason: "texts are recorded together at places with a value for each token",
        });
    }
    if texts.is_empty() {
        return Err(InterpretError::Mismatch("there is no text to record".into()));
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

/// The block before which a pass may [stop](Pass::stopping_at) when only these places are looked at; `None` if one of them comes
/// after the blocks.
///
/// ```
/// use candle_gpt2_interpret::{named_site, stop_after};
///
/// assert_eq!(stop_after([named_site("z3")?, named_site("embed")?]), Some(4));
/// assert_eq!(stop_after([named_site("resid_pre3")?]), Some(3), "the input of a block is there before the block");
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

/// A pass that stops there, if anywhere.
pub(crate) fn stopping(pass: Pass<'_>, stop: Option<usize>) -> Pass<'_> {
    match stop {
        Some(layer) => pass.stopping_at(layer),
        None => pass,
    }
}

/// The input of every block, and the output of the last.
///
/// ```
/// assert_eq!(candle_gpt2_interpret::residual_sites(12).count(), 13);
/// ```
pub fn residual_sites(n_layer: usize) -> impl Iterator<Item = Site> {
    let last = n_layer.checked_sub(1).map(|layer| Site::in_block(layer, SiteKind::ResidPost));
    (0..n_layer).map(|layer| Site::in_block(layer, SiteKind::ResidPre)).chain(last)
}

/// Which number of the logits at a position is looked at. Part of a [`Metric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Measure {
    /// The logit of the answer, or its difference to that of another token.
    #[default]
    Logit,
    /// The natural logarithm of its probability, or of the ratio of both.
    LogProbability,
    /// Its probability, or the difference of both.
    Probability,
}

/// One number that a prediction is summed up in: how much an answer is expected, alone or against another one.
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
    /// The answer.
    pub answer: u32,
    /// The token that it is compared with.
    pub against: Option<u32>,
    /// The token whose prediction is looked at, counted from 0.
    pub position: usize,
    /// What is compared.
    pub measure: Measure,
}

impl Metric {
    /// The difference of two logits.
    pub fn logit_difference(answer: u32, against: u32, position: usize) -> Self {
        Self { answer, against: Some(against), position, measure: Measure::Logit }
    }

    /// The logits that it is made of.
    pub fn logits_for(&self) -> LogitsFor {
        LogitsFor::Tokens { first: self.position, count: 1 }
    }

    /// The number of each row, `(B)`, of logits `(B, 1, V)`.
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
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

    /// Checks it for a run.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or the position beyond the end of the text.
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

    /// The number of a run, seen by an observer.
    ///
    /// # Errors
    /// Those of the model and of the observer.
    pub fn of_run(&self, run: &Run, observer: &mut dyn Observer) -> Result<f32> {
        self.of(&run.logits(self.logits_for(), observer)?)?.squeeze(0)?.to_scalar()
    }
}

/// Natural logarithms of the probabilities on the last axis, from operations that have gradients.
///
/// # Errors
/// When candle cannot compute them for the type.
pub(crate) fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    let last = candle_core::D::Minus1;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(last)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(last)?.log()?)
}

/// The nearest number of f32.
#[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
pub(crate) fn rounded(value: f64) -> f32 {
    value as f32
}
