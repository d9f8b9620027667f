//! A record of a text that is computed a few tokens at a time, so that a model which is shared can do other work in between.

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, Pass, Site};

use crate::run::stopping;
use crate::{Inspection, InterpretError, Positions, Record, Run, stop_after};

/// A [`Record`] in the making.
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
    /// `None` until a part ends before the text does.
    cache: Option<Gpt2Cache>,
    seen: Inspection,
    /// The block that comes after the last place.
    stop: Option<usize>,
    /// Tokens that are computed.
    done: usize,
}

impl Recording {
    /// Of these places. Nothing after the last of them is computed, and the output head never, so that there are no logits.
    ///
    /// # Errors
    /// As [`Run::new`].
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

    /// Whether every token is computed.
    pub fn is_complete(&self) -> bool {
        self.done == self.ids.len()
    }

    /// Computes the next tokens, at most so many. All at once are what [`Run::record`] computes, bit for bit.
    ///
    /// # Errors
    /// Those of the model, and when there is no memory for keys and values.
    pub fn advance(&mut self, model: &Gpt2LMHeadModel, tokens: usize) -> Result<()> {
        let Some(ids) = self.ids[self.done..].chunks(tokens.max(1)).next() else { return Ok(()) };
        if self.cache.is_none() && ids.len() < self.ids.len() {
            // In f32 nothing is lost: the record is that of the whole text at once.
            let (config, device) = (model.config(), model.device());
            self.cache = Some(Gpt2Cache::new(config, 1, self.ids.len(), DType::F32, device)?);
        }
        let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
        // A cache counts the tokens in its first layer.
        let stop = self.stop.map(|stop| stop.max(usize::from(self.cache.is_some())));
        let mut pass = stopping(Pass::inference().observed_by(&mut self.seen), stop);
        model.transformer().forward_with(&input, self.cache.as_mut(), &mut pass)?;
        self.done += ids.len();
        Ok(())
    }

    /// The record of all tokens computed so far. Of scores and patterns, keys behind the tokens of a part are those that the mask hides.
    ///
    /// # Errors
    /// When a place was not seen, or the device has no memory left.
    pub fn into_record(self) -> Result<Record> {
        self.seen.record()
    }
}
