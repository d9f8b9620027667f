//! Putting part of one run into another: activation patching, ablation, path patching, and grids of them.
//!
//! All cells of a layer are rows of one batch, and a run starts at the first layer that is changed, from the residual stream that the
//! run without a change has there: a grid over layers and heads costs half as much arithmetic as runs of the whole model, and reads the
//! weights once for a layer and not once for a cell.

use std::cell::OnceCell;

use candle_core::{DType, Tensor};
use candle_gpt2::{LogitsFor, Observer, Pass, Site, SiteKind};

use crate::error::Result;
use crate::observers::{Edit, Place};
use crate::{Ablate, Chain, InterpretError, Metric, Record, Replace, Run};

/// Rows of a batch together have at most so many tokens.
pub(crate) const BATCH_TOKENS: usize = 512;

/// The second axis of a grid, besides the layer. [`Patching::grid`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Nothing: the whole site at every position.
    Layer,
    /// Each position.
    Position,
    /// Each head, at every position.
    Head,
    /// Each head at each position (of scores and patterns: of the query).
    HeadAndPosition,
}

impl By {
    /// Names of the axes after the layer.
    pub fn axes(self) -> &'static [&'static str] {
        match self {
            Self::Layer => &[],
            Self::Position => &["position"],
            Self::Head => &["head"],
            Self::HeadAndPosition => &["position", "head"],
        }
    }

    /// The parts of a site of so many heads and tokens, in the order of the axes.
    fn places(self, heads: usize, tokens: usize) -> Vec<Place> {
        match self {
            Self::Layer => vec![Place::default()],
            Self::Position => (0..tokens).map(Place::position).collect(),
            Self::Head => (0..heads).map(Place::head).collect(),
            Self::HeadAndPosition => (0..tokens)
                .flat_map(|token| {
                    (0..heads).map(move |head| Place { positions: Some(vec![token]), ..Place::head(head) })
                })
                .collect(),
        }
    }
}

/// A number for each layer and part. [`Patching::grid`] and [`ablation_grid`] give it.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// One list for each layer, in the order of [`By`]'s axes.
    pub values: Vec<Vec<f32>>,
    /// Layers in which nothing was changed by what was put there, which mostly means that a mistake was made.
    pub unchanged: Vec<usize>,
}

/// The metric with something else in the place of each part, one part at a time. `done` is called after each layer.
/// [`ablation_grid`] and [`Patching::grid`] are made of it.
///
/// # Errors
/// When the site has no heads and heads are asked for, `values` has not one tensor (whose shape broadcasts to the site's) for each
/// layer, and those of the model.
pub fn replaced_grid(
    run: &Run,
    metric: &Metric,
    (kind, by): (SiteKind, By),
    values: &[Tensor],
    done: &dyn Fn(),
) -> Result<Grid> {
    metric.check(run)?;
    check_kind(kind, by)?;
    let config = run.model.config();
    let residuals = run.residuals()?;
    let mut grid = Grid { values: Vec::new(), unchanged: Vec::new() };
    if values.len() != config.n_layer {
        return Err(InterpretError::Mismatch(format!(
            "{} values for {} layers",
            values.len(),
            config.n_layer
        )));
    }
    for (layer, value) in values.iter().enumerate() {
        let places = by.places(config.n_head, run.ids.len());
        let (of_layer, has_changed) = cells(run, metric, (layer, kind), &residuals[layer], value, &places)?;
        grid.values.push(of_layer);
        if !has_changed {
            grid.unchanged.push(layer);
        }
        done();
    }
    Ok(grid)
}

/// The metric with `value` in each of the places, and whether that changed anything.
fn cells(
    run: &Run,
    metric: &Metric,
    (layer, kind): (usize, SiteKind),
    residual: &Tensor,
    value: &Tensor,
    places: &[Place],
) -> Result<(Vec<f32>, bool)> {
    let (mut found, mut has_changed) = (Vec::new(), false);
    for places in places.chunks((BATCH_TOKENS / run.ids.len()).max(1)) {
        let replace = Replace::new(Site::in_block(layer, kind), value.clone());
        let rows = places.iter().cloned().enumerate();
        let mut edit = rows.fold(replace, |edit, (row, place)| edit.at(place.in_row(row)));
        let x = residual.repeat((places.len(), 1, 1))?;
        let pass = &mut Pass::inference().observed_by(&mut edit);
        let logits = run.model.forward_from(layer, x, metric.logits_for(), pass)?;
        found.extend(metric.of(&logits)?.to_vec1::<f32>()?);
        has_changed |= edit.has_changed;
    }
    Ok((found, has_changed))
}

pub(crate) fn check_kind(kind: SiteKind, by: By) -> Result<()> {
    let site = Site { layer: kind.is_in_blocks().then_some(0), kind };
    if !kind.is_in_blocks() {
        let reason = "it is outside the blocks, and a grid has a row for each of them";
        return Err(InterpretError::Site { site, reason });
    }
    if matches!(by, By::Head | By::HeadAndPosition) && kind.head_axis().is_none() {
        let reason = "it has no heads; q, k, v, z, result, attn_scores and pattern have";
        return Err(InterpretError::Site { site, reason });
    }
    Ok(())
}

/// Two texts of as many tokens, and a metric that tells them apart.
///
/// ```
/// use candle_gpt2::SiteKind;
/// use candle_gpt2_interpret::{By, Metric, Patching, Run};
/// # use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions};
/// # let files = GivenFiles::new("stories")
/// #     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
/// #     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// # let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// # let model = checkpoint.load(&LoadOptions::default(), &|_| ())?;
///
/// let (clean, corrupted) = ([10, 20, 30, 40, 50], [10, 20, 31, 40, 50]);
/// let metric = Metric::logit_difference(60, 70, 4);
/// let patching = Patching::new(Run::new(&model, &clean)?, Run::new(&model, &corrupted)?, metric)?;
/// let shares = patching.grid(SiteKind::ResidPre, By::Position, &|| ())?.values;
/// // Before the first block the token that differs is the whole difference, and the others are none of it.
/// assert!((shares[0][2] - 1.0).abs() < 1e-3 && shares[0][1].abs() < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "get_act_patch")]
pub struct Patching<'a> {
    clean: Run<'a>,
    corrupted: Run<'a>,
    metric: Metric,
    /// The metric of the clean text.
    pub clean_value: f32,
    /// That of the corrupted one.
    pub corrupted_value: f32,
    /// The heads' outputs in both, once they are needed.
    z: OnceCell<(Record, Record)>,
}

impl<'a> Patching<'a> {
    /// Both texts, after a run over each.
    ///
    /// # Errors
    /// When they differ in length or not in the metric, and those of the model.
    pub fn new(clean: Run<'a>, corrupted: Run<'a>, metric: Metric) -> Result<Self> {
        if clean.ids.len() != corrupted.ids.len() {
            let (clean, corrupted) = (clean.ids.len(), corrupted.ids.len());
            return Err(InterpretError::Lengths { clean, corrupted });
        }
        metric.check(&clean)?;
        let of = |run: &Run| metric.of_run(run, &mut Chain(Vec::new()));
        let (clean_value, corrupted_value) = (of(&clean)?, of(&corrupted)?);
        if clean_value == corrupted_value {
            return Err(InterpretError::NoDifference { value: clean_value.to_string() });
        }
        Ok(Self { clean, corrupted, metric, clean_value, corrupted_value, z: OnceCell::new() })
    }

    /// The text that the answer is right for.
    pub fn clean(&self) -> &Run<'a> {
        &self.clean
    }

    /// The other one.
    pub fn corrupted(&self) -> &Run<'a> {
        &self.corrupted
    }

    /// What both are compared by.
    pub fn metric(&self) -> &Metric {
        &self.metric
    }

    /// A metric as a share of the way from the corrupted text to the clean one: 0 is as corrupted, 1 as clean.
    pub fn share(&self, value: f32) -> f32 {
        (value - self.corrupted_value) / (self.clean_value - self.corrupted_value)
    }

    /// Activation patching: the corrupted text, with one part at a time as in the clean one, as shares ([`Patching::share`]).
    ///
    /// # Errors
    /// As [`replaced_grid`].
    pub fn grid(&self, kind: SiteKind, by: By, done: &dyn Fn()) -> Result<Grid> {
        check_kind(kind, by)?;
        let layers = 0..self.clean.model.config().n_layer;
        let record = self.clean.record(layers.map(|layer| Site::in_block(layer, kind)))?;
        let values: Vec<Tensor> = record.values.into_values().collect();
        let mut grid = replaced_grid(&self.corrupted, &self.metric, (kind, by), &values, done)?;
        grid.values.iter_mut().flatten().for_each(|value| *value = self.share(*value));
        Ok(grid)
    }

    /// Path patching: the metric of the clean text if only the path from some heads, as they are in the corrupted text, to a
    /// receiver is another. Between both all heads are as in the clean text, while norms and MLPs are computed.
    ///
    /// Source: "Interpretability in the Wild" (arXiv:2211.00593, section 3 and appendix B).
    ///
    /// # Errors
    /// When a head is not there or a receiver comes before a sender, and those of the model.
    pub fn path(&self, senders: &[Head], receiver: Receiver) -> Result<f32> {
        let config = self.clean.model.config();
        senders
            .iter()
            .chain(receiver.head())
            .try_for_each(|head| head.check(config.n_layer, config.n_head))?;
        if let (Some(to), Some(from)) = (receiver.head(), senders.iter().map(|head| head.layer).max())
            && to.layer <= from
        {
            let site = Site::in_block(to.layer, SiteKind::Q);
            let reason = "the receiver must lie in a later layer than every sender";
            return Err(InterpretError::Site { site, reason });
        }
        let z = |layer| Site::in_block(layer, SiteKind::Z);
        let kept = |run: &Run| run.record((0..config.n_layer).map(z));
        let (clean, sent) = match self.z.get() {
            Some(both) => both,
            None => {
                let both = (kept(&self.clean)?, kept(&self.corrupted)?);
                self.z.get_or_init(|| both)
            }
        };
        let mut frozen: Vec<Edit> = (0..config.n_layer)
            .map(|layer| Ok(Replace::new(z(layer), clean.get(z(layer))?.clone())))
            .collect::<Result<_>>()?;
        for head in senders {
            let value = sent.get(z(head.layer))?.clone();
            frozen.push(Replace::new(z(head.layer), value).at(Place::head(head.head)));
        }
        let receiving = match receiver {
            Receiver::Final => None,
            Receiver::Query(head) => Some((Site::in_block(head.layer, SiteKind::Q), head)),
            Receiver::Key(head) => Some((Site::in_block(head.layer, SiteKind::K), head)),
            Receiver::Value(head) => Some((Site::in_block(head.layer, SiteKind::V), head)),
        };
        let mut record = Record::new(receiving.map(|(site, _)| site));
        let mut observers: Vec<&mut dyn Observer> =
            frozen.iter_mut().map(|edit| edit as &mut dyn Observer).collect();
        observers.push(&mut record);
        let value = self.metric.of_run(&self.clean, &mut Chain(observers))?;
        let Some((site, head)) = receiving else { return Ok(value) };
        let mut received = Replace::new(site, record.get(site)?.clone()).at(Place::head(head.head));
        Ok(self.metric.of_run(&self.clean, &mut received)?)
    }
}

/// A head. [`ablated`] takes some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Head {
    /// Its block.
    pub layer: usize,
    /// Its number there.
    pub head: usize,
}

impl Head {
    /// Checks that a model of this size has it.
    ///
    /// # Errors
    /// When it has not.
    pub fn check(&self, n_layer: usize, n_head: usize) -> Result<()> {
        let Self { layer, head } = *self;
        if layer >= n_layer || head >= n_head {
            return Err(InterpretError::Head { layer, head, n_layer, n_head });
        }
        Ok(())
    }
}

/// Where a path ends. [`Patching::path`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receiver {
    /// At the final residual stream.
    Final,
    /// At a head's queries.
    Query(Head),
    /// At a head's keys.
    Key(Head),
    /// At a head's values.
    Value(Head),
}

impl Receiver {
    fn head(&self) -> Option<&Head> {
        match self {
            Self::Final => None,
            Self::Query(head) | Self::Key(head) | Self::Value(head) => Some(head),
        }
    }
}

/// The replacement of a head's output. [`ablated`] takes it.
#[derive(Debug, Clone)]
pub enum Ablation {
    /// Zeros, in the model as it is.
    RawZero,
    /// The constant that is zero in TransformerLens, see [`Processing::value_constants`](crate::Processing::value_constants).
    TransformerLensZero,
    /// The mean of other texts: at each position if all have as many tokens as this one, else the mean over them of their means
    /// over positions.
    Mean(Vec<Vec<u32>>),
    /// What it is in another text of as many tokens.
    Sample(Vec<u32>),
}

impl Ablation {
    /// What is put in the place of each layer's `z`, in a shape that broadcasts to it.
    ///
    /// # Errors
    /// When a text does not fit, and those of the model.
    pub fn values(&self, run: &Run) -> Result<Vec<Tensor>> {
        let n_layer = run.model.config().n_layer;
        let sites = || (0..n_layer).map(|layer| Site::in_block(layer, SiteKind::Z));
        match self {
            Self::RawZero => {
                (0..n_layer).map(|_| Ok(Tensor::zeros(1, DType::F32, run.model.device())?)).collect()
            }
            Self::TransformerLensZero => {
                let processing = crate::Processing::new(run.model)?;
                Ok((0..n_layer).filter_map(|layer| processing.value_constants(layer).cloned()).collect())
            }
            Self::Sample(ids) => {
                let sample = Run::new(run.model, ids)?;
                if ids.len() != run.ids.len() {
                    let (clean, corrupted) = (run.ids.len(), ids.len());
                    return Err(InterpretError::Lengths { clean, corrupted });
                }
                Ok(sample.record(sites())?.values.into_values().collect())
            }
            Self::Mean(texts) => {
                let is_by_position = texts.iter().all(|ids| ids.len() == run.ids.len());
                let mut sums: Vec<Tensor> = Vec::new();
                for ids in texts {
                    let record = Run::new(run.model, ids)?.record(sites())?;
                    let of_text = record.values.into_values().map(|z| z.to_dtype(DType::F32)).map(|z| {
                        match is_by_position {
                            true => z?.squeeze(0),                              // (T, H, D)
                            false => z?.sum(1)?.squeeze(0)? / ids.len() as f64, // (H, D)
                        }
                    });
                    let of_text = of_text.collect::<candle_core::Result<Vec<_>>>()?;
                    sums = if sums.is_empty() {
                        of_text
                    } else {
                        sums.iter()
                            .zip(&of_text)
                            .map(|(sum, z)| sum + z)
                            .collect::<candle_core::Result<_>>()?
                    };
                }
                if sums.is_empty() {
                    return Err(InterpretError::Mismatch("a mean needs at least one text".into()));
                }
                sums.into_iter().map(|sum| Ok((sum / texts.len() as f64)?)).collect()
            }
        }
    }
}

/// The metric with each head ablated at every position, one at a time.
///
/// ```
/// use candle_gpt2_interpret::{Ablation, Metric, Run, ablation_grid};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let grid = ablation_grid(&run, &Metric::logit_difference(5, 6, 3), &Ablation::RawZero, &|| ())?;
/// assert_eq!(grid.values, [[0.; 3]; 2], "a number for each layer and head");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`Ablation::values`] and of the model.
pub fn ablation_grid(run: &Run, metric: &Metric, ablation: &Ablation, done: &dyn Fn()) -> Result<Grid> {
    replaced_grid(run, metric, (SiteKind::Z, By::Head), &ablation.values(run)?, done)
}

/// The metric and the logits of a run with some heads ablated together, at all positions or at one.
///
/// ```
/// use candle_gpt2_interpret::{Ablation, Head, Run, ablated};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let heads = [Head { layer: 0, head: 2 }, Head { layer: 1, head: 0 }];
/// let (logits, has_changed) = ablated(&run, &heads, None, &Ablation::RawZero)?;
/// assert_eq!(logits.dims().last(), Some(&11));
/// assert!(!has_changed, "heads of a model of zeros were zero");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When a head is not there, those of [`Ablation::values`] and of the model.
pub fn ablated(
    run: &Run,
    heads: &[Head],
    position: Option<usize>,
    ablation: &Ablation,
) -> Result<(Tensor, bool)> {
    let config = run.model.config();
    heads.iter().try_for_each(|head| head.check(config.n_layer, config.n_head))?;
    let values = ablation.values(run)?;
    let edit = |head: &Head| {
        let place = Place { positions: position.map(|position| vec![position]), ..Place::head(head.head) };
        Ablate::with(Site::in_block(head.layer, SiteKind::Z), values[head.layer].clone()).at(place)
    };
    let mut edits: Vec<Edit> = heads.iter().map(edit).collect();
    let mut chain = Chain(edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect());
    let logits = run.logits(LogitsFor::EveryToken, &mut chain)?;
    Ok((logits, edits.iter().any(|edit| edit.has_changed)))
}
