//! Recording of a sequence in chunks, so that a shared model can do other work in between.

use candle_core::{Result, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, Pass, Site};

use crate::run::stopping;
use crate::widths::sum_dtype;
use crate::{Inspection, InterpretError, Positions, Record, Run, stop_after};

/// A [`Record`] in progress.
///
/// ```
/// use candle_gpt2_interpret::{Recording, named_site};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let site = named_site("resid_post1")?;
/// let mut recording = Recording::new(&model, vec![1, 2, 3, 4, 5], vec![site])?;
/// while !recording.is_complete() {
///     recording.advance(&model, 2)?; // two tokens at a time
/// }
/// assert_eq!(recording.into_record()?.get(site)?.dims(), [1, 5, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "ActivationCache")]
pub struct Recording {
    ids: Vec<u32>,
    /// KV cache; `None` until a chunk ends before the sequence does.
    cache: Option<Gpt2Cache>,
    seen: Inspection,
    /// Index of the block after the last hook point, at which passes stop.
    stop: Option<usize>,
    /// Number of processed tokens.
    done: usize,
}

impl Recording {
    /// Starts a recording of these hook points.
    ///
    /// Nothing after the last of them is computed. The output head never runs, so logits are unavailable.
    ///
    /// # Errors
    /// See [`Run::new`].
    pub fn new(
        model: &Gpt2LMHeadModel,
        ids: Vec<u32>,
        sites: Vec<Site>,
    ) -> std::result::Result<Self, InterpretError> {
        Run::new(model, &ids)?;
        let stop = stop_after(sites.iter().copied());
        let seen = Inspection::new(Vec::new(), sites, Positions::All(0..usize::MAX));
        Ok(Self { ids, cache: None, seen, stop, done: 0 })
    }

    /// Whether all tokens have been processed.
    pub fn is_complete(&self) -> bool {
        self.done == self.ids.len()
    }

    /// Processes at most `tokens` further tokens.
    ///
    /// With a single chunk, the record is bit-identical to the result of [`Run::record`].
    ///
    /// # Errors
    /// If the model fails, or if the KV cache cannot be allocated.
    pub fn advance(&mut self, model: &Gpt2LMHeadModel, tokens: usize) -> Result<()> {
        let Some(ids) = self.ids[self.done..].chunks(tokens.max(1)).next() else { return Ok(()) };
        if self.cache.is_none() && ids.len() < self.ids.len() {
            // This dtype rounds no key or value, so the record equals the record of a single pass.
            let (config, device, dtype) = (model.config(), model.device(), sum_dtype(model.dtype()));
            self.cache = Some(Gpt2Cache::new(config, 1, self.ids.len(), dtype, device)?);
        }
        let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
        // A cache counts its tokens in the first layer, which must therefore run.
        let stop = self.stop.map(|stop| stop.max(usize::from(self.cache.is_some())));
        let mut pass = stopping(Pass::inference().observed_by(&mut self.seen), stop);
        model.transformer().forward_with(&input, self.cache.as_mut(), &mut pass)?;
        self.done += ids.len();
        Ok(())
    }

    /// Returns the record of all tokens processed so far.
    ///
    /// In scores and patterns, the keys after a chunk's last token have the values of masked keys.
    ///
    /// # Errors
    /// If a hook point was not reached, or if allocation on the device fails.
    pub fn into_record(self) -> Result<Record> {
        self.seen.record()
    }
}
