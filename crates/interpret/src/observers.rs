//! Observers that record, replace and add, and a chain of several.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_gpt2::{Observer, Site, SiteKind};

/// Keeps what is seen at some places. [`Run::record`](crate::Run::record) makes one.
#[derive(Debug, Default)]
pub struct Record {
    sites: BTreeSet<Site>,
    positions: Option<Vec<usize>>,
    /// What was seen, in the shapes of [`SiteKind`]; of several passes the last.
    pub values: BTreeMap<Site, Tensor>,
}

impl Record {
    /// A record of these places.
    pub fn new(sites: impl IntoIterator<Item = Site>) -> Self {
        Self { sites: sites.into_iter().collect(), ..Self::default() }
    }

    /// The same, of these tokens of the pass alone: rows of queries of scores and patterns, tokens of everything else.
    pub fn at(self, positions: Vec<usize>) -> Self {
        Self { positions: Some(positions), ..self }
    }

    /// The places.
    pub fn sites(&self) -> impl Iterator<Item = Site> {
        self.sites.iter().copied()
    }

    /// What was seen at this place.
    ///
    /// # Errors
    /// When nothing was.
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
            // A view would keep alive what it is a part of.
            _ if value.is_contiguous() && value.layout().start_offset() == 0 => value.clone(),
            _ => value.force_contiguous()?,
        };
        self.values.insert(site, kept.detach());
        Ok(value)
    }
}

/// Part of what is at a place; `None` stands for all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Row of the batch.
    pub row: Option<usize>,
    /// Positions of the text, those before the pass counted in; of scores and patterns those of queries.
    pub positions: Option<Vec<usize>>,
    /// Heads, if the site has them.
    pub heads: Option<Vec<usize>>,
    /// Places on the last axis: neurons, channels of the residual stream, keys of a pattern.
    pub channels: Option<Vec<usize>>,
}

impl Place {
    /// One head at every position.
    pub fn head(head: usize) -> Self {
        Self { heads: Some(vec![head]), ..Self::default() }
    }

    /// Everything at one position.
    pub fn position(position: usize) -> Self {
        Self { positions: Some(vec![position]), ..Self::default() }
    }

    /// The same in one row of the batch.
    pub fn in_row(self, row: usize) -> Self {
        Self { row: Some(row), ..self }
    }

    fn is_everything(&self) -> bool {
        *self == Self::default()
    }
}

/// What is done to the values of a [`Place`].
#[derive(Debug, Clone)]
enum Change {
    Replace(Tensor),
    Add(Tensor),
    /// Of length 1.
    ProjectOut(Tensor),
}

/// Changes what is at a place: puts something else there, adds to it, or takes a direction out of it. [`Ablate`], [`Replace`], [`Add`]
/// and [`ProjectOut`] make one.
#[derive(Debug, Clone)]
pub struct Edit {
    site: Site,
    change: Change,
    /// How much of the change is made.
    scale: f64,
    places: Vec<Place>,
    past_lengths: Vec<usize>,
    /// Whether it changed a value in any pass so far.
    pub has_changed: bool,
}

/// An [`Edit`] that puts a tensor in the place of what is there.
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

/// An [`Edit`] that puts zeros there, or a constant such as a mean.
pub struct Ablate;

/// An [`Edit`] that adds a tensor.
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
/// assert_eq!(last.to_vec1::<f32>()?, [1.; 6], "blocks of zeros add nothing to it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Add;

/// An [`Edit`] that takes out of what is at each token its part along a direction: `x − (x · d) d` of a direction `d` of length 1.
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
    /// Takes out this direction, in the shape of what is there for one token.
    ///
    /// # Errors
    /// When it is zero or not finite.
    #[expect(clippy::new_ret_no_self, reason = "all four are one observer")]
    pub fn new(site: Site, direction: &Tensor) -> Result<Edit> {
        let direction = direction.to_dtype(DType::F64)?;
        let length = direction.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>()?;
        if !(length.is_finite() && length > 0.0) {
            bail!(
                "a direction to project out: expected one that is finite and not zero, found the length {length}"
            );
        }
        Ok(Edit::new(site, Change::ProjectOut((direction / length)?.to_dtype(DType::F32)?)))
    }
}

impl Replace {
    /// Puts `value` there, whose shape broadcasts to what is there.
    #[expect(clippy::new_ret_no_self, reason = "all four are one observer")]
    pub fn new(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Replace(value))
    }
}

impl Ablate {
    /// Puts zeros there.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn zero(site: Site) -> Result<Edit> {
        Ok(Edit::new(site, Change::Replace(Tensor::zeros(1, DType::F32, &Device::Cpu)?)))
    }

    /// Puts a constant there, whose shape broadcasts to what is there: a mean `(H, D)`, say.
    pub fn with(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Replace(value))
    }
}

impl Add {
    /// Adds `value`, whose shape broadcasts to what is there.
    #[expect(clippy::new_ret_no_self, reason = "all four are one observer")]
    pub fn new(site: Site, value: Tensor) -> Edit {
        Edit::new(site, Change::Add(value))
    }
}

impl Edit {
    fn new(site: Site, change: Change) -> Self {
        Self { site, change, scale: 1.0, places: Vec::new(), past_lengths: Vec::new(), has_changed: false }
    }

    /// The same with so much of the change: of what is added, of the way to what is put there, of what is taken out. 1 is all of it; with 0
    /// the model computes as if there were no edit.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn scaled(self, scale: f64) -> Result<Self> {
        let change = match self.change {
            Change::Add(given) => Change::Add((given * scale)?),
            other => other,
        };
        Ok(Self { change, scale: self.scale * scale, ..self })
    }

    /// The same at this place too; without any, everything is changed.
    pub fn at(mut self, place: Place) -> Self {
        self.places.push(place);
        self
    }

    /// The place that it changes.
    pub fn site(&self) -> Site {
        self.site
    }

    /// Ones where values are to be changed, in the shape of `value`; `None` if all are.
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
                // For each axis which indices are meant.
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
                // Of each token, whatever heads there are.
                let tokens = value.contiguous()?.reshape(((), direction.elem_count()))?;
                let direction = like(direction)?.reshape((1, ()))?;
                let along = tokens.broadcast_mul(&direction)?.sum_keepdim(D::Minus1)?;
                let part = along.broadcast_mul(&direction)?.reshape(value.shape())?;
                (&value - (part * self.scale)?)?
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

/// Several observers, one after another: each sees what the one before it made of a value. An example is at [`Add`].
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
