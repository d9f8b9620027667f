//! Observers that record and edit activations, and a chain of observers.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_gpt2::{Observer, Site, SiteKind};

use crate::widths::sum_dtype;

/// Records activations at selected hook points. [`Run::record`](crate::Run::record) returns one.
#[derive(Debug, Default)]
pub struct Record {
    sites: BTreeSet<Site>,
    positions: Option<Vec<usize>>,
    /// Recorded activations, in the shapes of [`SiteKind`]; later passes overwrite earlier ones.
    pub values: BTreeMap<Site, Tensor>,
}

impl Record {
    /// Creates a record of these hook points.
    pub fn new(sites: impl IntoIterator<Item = Site>) -> Self {
        Self { sites: sites.into_iter().collect(), ..Self::default() }
    }

    /// Restricts the record to these tokens in the pass.
    ///
    /// For scores and patterns, the positions select query rows.
    pub fn at(self, positions: Vec<usize>) -> Self {
        Self { positions: Some(positions), ..self }
    }

    /// Returns the recorded hook points.
    pub fn sites(&self) -> impl Iterator<Item = Site> {
        self.sites.iter().copied()
    }

    /// Returns the activation recorded at this hook point.
    ///
    /// # Errors
    /// If the hook point was not recorded.
    pub fn get(&self, site: Site) -> Result<&Tensor> {
        self.values.get(&site).ok_or_else(|| candle_core::Error::Msg(format!("{site} was not recorded")))
    }
}

impl Observer for Record {
    fn wants(&self, site: Site) -> bool {
        self.sites.contains(&site)
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        let kept = match &self.positions {
            Some(positions) if site.kind != SiteKind::Logits => {
                let positions: Vec<i64> = positions.iter().map(|position| *position as i64).collect();
                let count = positions.len();
                let positions = Tensor::from_vec(positions, count, value.device())?;
                value.contiguous()?.index_select(&positions, site.kind.token_axis())?
            }
            // A view would keep its whole parent tensor alive.
            _ if value.is_contiguous() && value.layout().start_offset() == 0 => value.clone(),
            _ => value.force_contiguous()?,
        };
        self.values.insert(site, kept.detach());
        Ok(value)
    }
}

/// Part of an activation; a `None` field selects everything along its axis.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Row in the batch.
    pub row: Option<usize>,
    /// Absolute positions, including the tokens before the pass; query positions for scores and patterns.
    pub positions: Option<Vec<usize>>,
    /// Heads, if the hook point has them.
    pub heads: Option<Vec<usize>>,
    /// Indices on the last axis: neurons, channels of the residual stream, or keys of a pattern.
    pub channels: Option<Vec<usize>>,
}

impl Place {
    /// Selects one head at every position.
    pub fn head(head: usize) -> Self {
        Self { heads: Some(vec![head]), ..Self::default() }
    }

    /// Selects everything at one position.
    pub fn position(position: usize) -> Self {
        Self { positions: Some(vec![position]), ..Self::default() }
    }

    /// Restricts the place to one row of the batch.
    pub fn in_row(self, row: usize) -> Self {
        Self { row: Some(row), ..self }
    }

    fn is_everything(&self) -> bool {
        *self == Self::default()
    }
}

/// Modification of the values in a [`Place`].
#[derive(Debug, Clone)]
enum Change {
    Replace(Tensor),
    Add(Tensor),
    /// A direction of unit length, in f64.
    ProjectOut(Tensor),
}

/// Changes the activation at a hook point: replaces it, adds to it, or projects a direction out of it.
///
/// [`Ablate`], [`Replace`], [`Add`] and [`ProjectOut`] create edits.
#[derive(Debug, Clone)]
pub struct Edit {
    site: Site,
    change: Change,
    /// Strength of the change.
    scale: f64,
    places: Vec<Place>,
    past_lengths: Vec<usize>,
    /// Whether the edit has changed a value in any pass so far.
    pub has_changed: bool,
}

/// Constructor of an [`Edit`] that replaces an activation with a tensor.
///
/// ```
/// use candle_core::Tensor;
/// use candle_gpt2::LogitsFor;
/// use candle_gpt2_interpret::{Place, Replace, Run, named_site};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let ones = Tensor::ones(6, DType::F32, &Device::Cpu)?;
/// let mut edit = Replace::new(named_site("resid_post0")?, ones).at(Place::position(2));
/// run.logits(LogitsFor::LastToken, &mut edit)?;
/// assert!(edit.has_changed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Replace;

/// Constructor of an [`Edit`] that replaces an activation with zeros or a constant such as a mean.
pub struct Ablate;

/// Constructor of an [`Edit`] that adds a tensor.
///
/// ```
/// use candle_core::Tensor;
/// use candle_gpt2::LogitsFor;
/// use candle_gpt2_interpret::{Add, Chain, Record, Run, named_site};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let mut add = Add::new(named_site("resid_post0")?, Tensor::ones(6, DType::F32, &Device::Cpu)?);
/// let mut record = Record::new([named_site("resid_post1")?]);
/// run.logits(LogitsFor::LastToken, &mut Chain(vec![&mut add, &mut record]))?;
/// let last = record.get(named_site("resid_post1")?)?.get(0)?.get(3)?;
/// assert_eq!(last.to_vec1::<f32>()?, [1.; 6], "blocks with zero weights leave it unchanged");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Add;

/// Constructor of an [`Edit`] that removes each token's component along a direction.
///
/// The result is `x − (x · d) d` for a direction `d` of unit length.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::Observer;
/// use candle_gpt2_interpret::{ProjectOut, named_site};
///
/// let site = named_site("resid_post0")?;
/// let mut edit = ProjectOut::new(site, &Tensor::new(&[3f32, 4.], &Device::Cpu)?)?;
/// let x = Tensor::new(&[[[3f32, 4.], [4., -3.]]], &Device::Cpu)?; // (B, T, C)
/// assert_eq!(edit.observe(site, x)?.to_vec3::<f32>()?, [[[0., 0.], [4., -3.]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ProjectOut;

impl ProjectOut {
    /// Creates an edit that projects out `direction`, in the shape of one token's activation.
    ///
    /// The direction is normalized.
    ///
    /// # Errors
    /// If the direction is zero or not finite.
    #[expect(clippy::new_ret_no_self, reason = "all four constructors return the same observer type")]
    pub fn new(site: Site, direction: &Tensor) -> Result<Edit> {
        let direction = direction.to_dtype(DType::F64)?;
        let length = direction.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>()?;
        if !(length.is_finite() && length > 0.0) {
            bail!("direction to project out: expected a finite, nonzero length, found {length}");
        }
        Ok(Edit::new(site, Change::ProjectOut((direction / length)?)))
    }
}

impl Replace {
    /// Replaces the activation with `value`, whose shape must broadcast to the activation's shape.
    #[expect(clippy::new_ret_no_self, reason = "all four constructors return the same observer type")]
    pub fn new(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Replace(value))
    }
}

impl Ablate {
    /// Replaces the activation with zeros.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn zero(site: Site) -> Result<Edit> {
        Ok(Edit::new(site, Change::Replace(Tensor::zeros(1, DType::F32, &Device::Cpu)?)))
    }

    /// Replaces the activation with a constant whose shape broadcasts to it, such as a mean `(H, D)`.
    pub fn with(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Replace(value))
    }
}

impl Add {
    /// Adds `value`, whose shape must broadcast to the activation's shape.
    #[expect(clippy::new_ret_no_self, reason = "all four constructors return the same observer type")]
    pub fn new(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Add(value))
    }
}

impl Edit {
    fn new(site: Site, change: Change) -> Self {
        Self { site, change, scale: 1.0, places: Vec::new(), past_lengths: Vec::new(), has_changed: false }
    }

    /// Multiplies the strength of the edit by `scale`.
    ///
    /// The factor applies to the added tensor, to the difference between replacement and original, or to the
    /// removed component. With 1 the edit is complete; with 0 the model runs as if there were no edit.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn scaled(self, scale: f64) -> Result<Self> {
        let change = match self.change {
            Change::Add(given) => Change::Add((given * scale)?),
            other => other,
        };
        Ok(Self { change, scale: self.scale * scale, ..self })
    }

    /// Adds a place to the edit; without places, the whole activation is edited.
    pub fn at(mut self, place: Place) -> Self {
        self.places.push(place);
        self
    }

    /// Returns the edited hook point.
    pub fn site(&self) -> Site {
        self.site
    }

    /// Builds a mask of ones at the edited values, with the shape of `value`; `None` if all are edited.
    fn mask(&self, value: &Tensor) -> Result<Option<Tensor>> {
        if self.places.is_empty() || self.places.iter().any(Place::is_everything) {
            return Ok(None);
        }
        let dims = value.dims();
        let (rows, last) = (dims[0], dims.len() - 1);
        let (tokens, heads) = (self.site.kind.token_axis(), self.site.kind.head_axis());
        let mut mask = vec![0u8; value.elem_count()];
        for place in &self.places {
            for row in 0..rows {
                if place.row.is_some_and(|wanted| wanted != row) {
                    continue;
                }
                let past = self.past_lengths.get(row).copied().unwrap_or(0);
                // Selected indices along each axis.
                let mut chosen: Vec<Vec<usize>> = dims.iter().map(|size| (0..*size).collect()).collect();
                chosen[0] = vec![row];
                if let Some(positions) = &place.positions {
                    chosen[tokens].retain(|token| positions.contains(&(past + token)));
                }
                if let (Some(wanted), Some(axis)) = (&place.heads, heads) {
                    chosen[axis].retain(|head| wanted.contains(head));
                }
                if let Some(channels) = &place.channels {
                    chosen[last].retain(|channel| channels.contains(channel));
                }
                let mut offsets = vec![0];
                for (size, chosen) in dims.iter().zip(&chosen) {
                    let below =
                        |offset: &usize| chosen.iter().map(|index| offset * size + index).collect::<Vec<_>>();
                    offsets = offsets.iter().flat_map(below).collect();
                }
                offsets.into_iter().for_each(|offset| mask[offset] = 1);
            }
        }
        Tensor::from_vec(mask, dims, value.device()).map(Some)
    }
}

impl Observer for Edit {
    fn wants(&self, site: Site) -> bool {
        site == self.site && self.scale != 0.0
    }

    fn begin(&mut self, past_lengths: &[usize], _: usize) {
        self.past_lengths = past_lengths.to_vec();
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        let like = |given: &Tensor| given.to_dtype(value.dtype())?.to_device(value.device());
        let whole = |given: &Tensor| like(given)?.broadcast_as(value.shape());
        let there = match &self.change {
            Change::Replace(given) if self.scale == 1.0 => whole(given)?.contiguous()?,
            Change::Replace(given) => (&value + ((whole(given)? - &value)? * self.scale)?)?,
            Change::Add(given) => (&value + whole(given)?)?,
            Change::ProjectOut(direction) => {
                let dtype = sum_dtype(value.dtype());
                // One row per token, with all heads together.
                let tokens = value.contiguous()?.to_dtype(dtype)?.reshape(((), direction.elem_count()))?;
                let direction = direction.to_dtype(dtype)?.to_device(value.device())?.reshape((1, ()))?;
                let along = tokens.broadcast_mul(&direction)?.sum_keepdim(D::Minus1)?;
                let part = (along.broadcast_mul(&direction)? * self.scale)?;
                (tokens - part)?.reshape(value.shape())?.to_dtype(value.dtype())?
            }
        };
        let changed = match self.mask(&value)? {
            Some(mask) => mask.where_cond(&there, &value.contiguous()?)?,
            None => there,
        };
        if !self.has_changed {
            let numbers = |x: &Tensor| {
                x.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()
            };
            let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
            self.has_changed = !numbers(&changed)?.iter().zip(&numbers(&value)?).all(same);
        }
        Ok(changed)
    }
}

/// Several observers in sequence: each receives the previous one's result.
///
/// [`Add`] has an example.
pub struct Chain<'a>(pub Vec<&'a mut dyn Observer>);

impl Observer for Chain<'_> {
    fn wants(&self, site: Site) -> bool {
        self.0.iter().any(|observer| observer.wants(site))
    }

    fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        self.0.iter_mut().for_each(|observer| observer.begin(past_lengths, tokens));
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        let wanting = self.0.iter_mut().filter(|observer| observer.wants(site));
        wanting.into_iter().try_fold(value, |value, observer| observer.observe(site, value))
    }
}
