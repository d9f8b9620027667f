//! A record of a text that is computed a few tokens at a time, so that a model which is shared can do other work in between.

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, Pass, Site, SiteKind};

use crate::{InterpretError, Record, Run};

/// The axis of the keys in scores and patterns.
const KEY_DIM: usize = 3;

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
    sites: Vec<Site>,
    /// What was seen of the tokens so far, a few of them each.
    parts: Vec<Record>,
    /// Tokens that are computed.
    done: usize,
}

impl Recording {
    /// Of these places; the output head is not computed, so that there are no logits.
    ///
    /// # Errors
    /// As [`Run::new`].
    pub fn new(
        model: &Gpt2LMHeadModel,
        ids: Vec<u32>,
        sites: Vec<Site>,
    ) -> std::result::Result<Self, InterpretError> {
        Run::new(model, &ids)?;
        Ok(Self { ids, cache: None, sites, parts: Vec::new(), done: 0 })
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
        let mut record = Record::new(self.sites.iter().copied());
        let pass = &mut Pass::inference().observed_by(&mut record);
        model.transformer().forward_with(&input, self.cache.as_mut(), pass)?;
        self.parts.push(record);
        self.done += ids.len();
        Ok(())
    }

    /// The record of all tokens computed so far. Of scores and patterns, keys behind the tokens of a part are those that the mask hides.
    ///
    /// # Errors
    /// When a place was not seen, or the device has no memory left.
    pub fn into_record(self) -> Result<Record> {
        joined(&self.parts, &self.sites, self.done)
    }
}

/// Records of some tokens each as one; scores and patterns get so many keys.
pub(crate) fn joined(parts: &[Record], sites: &[Site], keys: usize) -> Result<Record> {
    let mut whole = Record::new(sites.iter().copied());
    for site in sites {
        let parts = parts.iter().map(|part| {
            let part = part.get(*site)?;
            match site.kind {
                SiteKind::AttnScores => with_keys(part, keys, f64::NEG_INFINITY),
                SiteKind::Pattern => with_keys(part, keys, 0.0),
                _ => Ok(part.clone()),
            }
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        whole.values.insert(*site, Tensor::cat(&parts, site.kind.token_axis())?);
    }
    Ok(whole)
}

/// Scores or weights `(B, H, T, S)` for so many keys: those that are not there are hidden by the mask.
fn with_keys(part: &Tensor, keys: usize, hidden: f64) -> Result<Tensor> {
    let (batch, heads, tokens, seen) = part.dims4()?;
    if seen >= keys {
        return part.narrow(KEY_DIM, 0, keys);
    }
    let hidden = Tensor::full(hidden, (batch, heads, tokens, keys - seen), part.device())?;
    Tensor::cat(&[part, &hidden.to_dtype(part.dtype())?], KEY_DIM)
}
