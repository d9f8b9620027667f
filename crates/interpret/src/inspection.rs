//! Edits and records one sequence's activations during generation, a few tokens at a time.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_gpt2::{Observer, Site, SiteKind};

use crate::{Edit, Record};

/// Key axis of scores and patterns.
const KEY_DIM: usize = 3;

/// Token positions to record, counted from 0. Part of an [`Inspection`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Positions {
    /// All positions in the range.
    All(Range<usize>),
    /// The last position in the range that the model has processed so far.
    Last(Range<usize>),
    /// The listed positions, except those past the end of the sequence.
    These(BTreeSet<usize>),
}

impl Positions {
    /// Returns the maximum number of recorded positions for a sequence of `tokens` tokens.
    ///
    /// ```
    /// use candle_gpt2_interpret::Positions;
    ///
    /// assert_eq!(Positions::All(3..usize::MAX).max_count(10), 7);
    /// assert_eq!(Positions::These([2, 11].into()).max_count(10), 1);
    /// assert_eq!(Positions::Last(10..usize::MAX).max_count(10), 0);
    /// ```
    pub fn max_count(&self, tokens: usize) -> usize {
        match self {
            Self::All(range) => range.end.min(tokens).saturating_sub(range.start),
            Self::Last(range) => range.end.min(tokens).saturating_sub(range.start).min(1),
            Self::These(these) => these.range(..tokens).count(),
        }
    }

    /// Returns the selected positions among the tokens that a pass reads.
    fn among(&self, read: Range<usize>) -> Vec<usize> {
        let both = |range: &Range<usize>| range.start.max(read.start)..range.end.min(read.end);
        match self {
            Self::All(range) => both(range).collect(),
            Self::Last(range) => both(range).last().into_iter().collect(),
            Self::These(these) => these.range(read).copied().collect(),
        }
    }
}

/// An observer that follows one sequence through all its passes with a KV cache.
///
/// It applies edits in order and records the edited activations.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::{LogitsFor, Pass};
/// use candle_gpt2_interpret::{Add, Inspection, Positions, named_site};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let add = Add::new(named_site("resid_pre1")?, Tensor::ones(6, DType::F32, &Device::Cpu)?).scaled(2.0)?;
/// let site = named_site("resid_post1")?;
/// let mut inspection = Inspection::new(vec![add], vec![site], Positions::All(1..usize::MAX));
/// let mut cache = model.new_cache(1, 4)?;
/// for ids in [&[1u32, 2, 3][..], &[4]] {
///     let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
///     let pass = &mut Pass::inference().observed_by(&mut inspection);
///     model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass)?;
/// }
/// assert_eq!(inspection.positions(), [1, 2, 3]);
/// let record = inspection.record()?;
/// assert_eq!(record.get(site)?.to_vec3::<f32>()?, [[[2.; 6]; 3]], "blocks with zero weights leave it unchanged");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Inspection {
    edits: Vec<Edit>,
    sites: Vec<Site>,
    wanted: Positions,
    /// Recorded parts, a few tokens each.
    parts: Vec<Record>,
    /// Positions of the recorded tokens.
    positions: Vec<usize>,
    /// Whether the current pass records tokens into the last entry of `parts`.
    is_recording: bool,
}

impl Inspection {
    /// Creates an inspection that has not recorded anything yet.
    pub fn new(edits: Vec<Edit>, sites: Vec<Site>, wanted: Positions) -> Self {
        Self { edits, sites, wanted, parts: Vec::new(), positions: Vec::new(), is_recording: false }
    }

    /// Returns the positions of the recorded tokens.
    pub fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// Returns the recorded activations, in the shapes of [`SiteKind`](candle_gpt2::SiteKind).
    ///
    /// Scores and patterns have keys up to the last recorded token. The record is empty if no tokens were
    /// recorded.
    ///
    /// # Errors
    /// If a pass did not reach a hook point, or if allocation on the device fails.
    pub fn record(&self) -> Result<Record> {
        let keys = self.positions.last().map_or(0, |last| last + 1);
        let sites = if self.parts.is_empty() { &[] } else { &*self.sites };
        joined(&self.parts, sites, keys)
    }
}

impl Observer for Inspection {
    fn wants(&self, site: Site) -> bool {
        (self.is_recording && self.sites.contains(&site)) || self.edits.iter().any(|edit| edit.wants(site))
    }

    fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        self.edits.iter_mut().for_each(|edit| edit.begin(past_lengths, tokens));
        let past = past_lengths.first().copied().unwrap_or(0);
        let read = self.wanted.among(past..past + tokens);
        self.is_recording = !(read.is_empty() || self.sites.is_empty());
        if self.is_recording {
            if let Positions::Last(_) = self.wanted {
                self.parts.clear();
                self.positions.clear();
            }
            let part = Record::new(self.sites.iter().copied());
            // Recording all tokens of a pass needs no copy.
            let is_all = read.len() == tokens;
            let in_pass = || read.iter().map(|position| position - past).collect();
            self.parts.push(if is_all { part } else { part.at(in_pass()) });
            self.positions.extend(read);
        }
    }

    fn observe(&mut self, site: Site, mut value: Tensor) -> Result<Tensor> {
        for edit in self.edits.iter_mut().filter(|edit| edit.wants(site)) {
            value = edit.observe(site, value)?;
        }
        match self.parts.last_mut().filter(|part| self.is_recording && part.wants(site)) {
            Some(part) => part.observe(site, value),
            None => Ok(value),
        }
    }
}

/// Concatenates partial records into one, extending scores and patterns to `keys` keys.
fn joined(parts: &[Record], sites: &[Site], keys: usize) -> Result<Record> {
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

/// Crops or extends scores or weights `(B, H, T, S)` to `keys` keys.
///
/// Missing keys get the value `hidden`, as if the mask hid them.
fn with_keys(part: &Tensor, keys: usize, hidden: f64) -> Result<Tensor> {
    let (batch, heads, tokens, seen) = part.dims4()?;
    if seen >= keys {
        return part.narrow(KEY_DIM, 0, keys);
    }
    let hidden = Tensor::full(hidden, (batch, heads, tokens, keys - seen), part.device())?;
    Tensor::cat(&[part, &hidden.to_dtype(part.dtype())?], KEY_DIM)
}
