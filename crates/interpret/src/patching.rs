//! Activation patching, path patching, ablation, and grids over layers, heads and positions.
//!
//! All cells of a layer run as rows of one batch. A run starts at the first modified layer, from the residual
//! stream of the unmodified run. A grid over layers and heads therefore needs half the arithmetic of full
//! runs. It also reads the weights once per layer instead of once per cell.

use std::cell::OnceCell;

use candle_core::{DType, Tensor};
use candle_gpt2::{LogitsFor, Observer, Pass, Site, SiteKind};

use crate::error::Result;
use crate::observers::{Edit, Place};
use crate::widths::sum_dtype;
use crate::{Ablate, Chain, InterpretError, Metric, Record, Replace, Run};

/// Maximum number of tokens in a batch, over all rows.
pub(crate) const BATCH_TOKENS: usize = 512;

/// Second axis of a grid, besides the layer. An argument of [`Patching::grid`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GridAxis {
    /// No second axis: the whole activation at every position.
    Layer,
    /// One cell for each position.
    Position,
    /// One cell for each head, at every position.
    Head,
    /// One cell for each head at each position (the query position for scores and patterns).
    HeadAndPosition,
}

impl GridAxis {
    /// Returns the names of the axes that follow the layer axis.
    pub fn axes(self) -> &'static [&'static str] {
        match self {
            Self::Layer => &[],
            Self::Position => &["position"],
            Self::Head => &["head"],
            Self::HeadAndPosition => &["position", "head"],
        }
    }

    /// Returns the parts of an activation with these sizes, in axis order.
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

/// One value for each layer and part, from [`Patching::grid`] or [`ablation_grid`].
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// One list per layer, in the order of [`GridAxis`]'s axes.
    pub values: Vec<Vec<f32>>,
    /// Layers where the replacement changed nothing, which usually indicates a mistake.
    pub unchanged: Vec<usize>,
}

/// Computes the metric with each part replaced, one part at a time.
///
/// Calls `done` after each layer. [`ablation_grid`] and [`Patching::grid`] build on it.
///
/// # Errors
/// If the hook point is outside the blocks, or if it has no heads and `by` requires them. If `values` does
/// not contain one tensor per layer that broadcasts to the activation. If the metric does not fit the run, or
/// if the model fails.
pub fn replaced_grid(
    run: &Run,
    metric: &Metric,
    (kind, by): (SiteKind, GridAxis),
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
            "expected {} values (one per layer), found {}",
            config.n_layer,
            values.len()
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

/// Computes the metric with `value` in each place in turn, and whether any value changed.
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

pub(crate) fn check_kind(kind: SiteKind, by: GridAxis) -> Result<()> {
    let site = Site { layer: kind.is_in_blocks().then_some(0), kind };
    if !kind.is_in_blocks() {
        let reason = "expected a hook point inside the blocks, because a grid has one row per block";
        return Err(InterpretError::Site { site, reason });
    }
    if matches!(by, GridAxis::Head | GridAxis::HeadAndPosition) && kind.head_axis().is_none() {
        let reason = "expected a hook point with heads: q, k, v, z, result, attn_scores or pattern";
        return Err(InterpretError::Site { site, reason });
    }
    Ok(())
}

/// Two prompts of equal length and a metric that distinguishes them.
///
/// ```
/// use candle_gpt2::SiteKind;
/// use candle_gpt2_interpret::{GridAxis, Metric, Patching, Run};
/// # use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions};
/// # let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// # let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// # let model = checkpoint.load(&LoadOptions::default(), &|_| ())?;
///
/// let (clean, corrupted) = ([10, 20, 30, 40, 50], [10, 20, 31, 40, 50]);
/// let metric = Metric::logit_difference(60, 70, 4);
/// let patching = Patching::new(Run::new(&model, &clean)?, Run::new(&model, &corrupted)?, metric)?;
/// let shares = patching.grid(SiteKind::ResidPre, GridAxis::Position, &|| ())?.values;
/// // Before the first block, only the token that differs has an effect.
/// assert!((shares[0][2] - 1.0).abs() < 1e-3 && shares[0][1].abs() < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "get_act_patch")]
pub struct Patching<'a> {
    clean: Run<'a>,
    corrupted: Run<'a>,
    metric: Metric,
    /// Metric of the clean prompt.
    pub clean_value: f32,
    /// Metric of the corrupted prompt.
    pub corrupted_value: f32,
    /// Head outputs of both prompts, computed on first use.
    z: OnceCell<(Record, Record)>,
}

impl<'a> Patching<'a> {
    /// Runs the model on both prompts.
    ///
    /// # Errors
    /// If the prompts differ in length, if their metrics are equal, or if the model fails.
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

    /// Returns the run on the clean prompt, for which the answer is correct.
    pub fn clean(&self) -> &Run<'a> {
        &self.clean
    }

    /// Returns the run on the corrupted prompt.
    pub fn corrupted(&self) -> &Run<'a> {
        &self.corrupted
    }

    /// Returns the metric that compares the prompts.
    pub fn metric(&self) -> &Metric {
        &self.metric
    }

    /// Normalizes a metric to 0 for the corrupted prompt and 1 for the clean prompt.
    pub fn share(&self, value: f32) -> f32 {
        (value - self.corrupted_value) / (self.clean_value - self.corrupted_value)
    }

    /// Activation patching: replaces parts of the corrupted run with clean values, one at a time.
    ///
    /// The values are normalized as in [`Patching::share`].
    ///
    /// # Errors
    /// See [`replaced_grid`].
    pub fn grid(&self, kind: SiteKind, by: GridAxis, done: &dyn Fn()) -> Result<Grid> {
        check_kind(kind, by)?;
        let layers = 0..self.clean.model.config().n_layer;
        let record = self.clean.record(layers.map(|layer| Site::in_block(layer, kind)))?;
        let values: Vec<Tensor> = record.values.into_values().collect();
        let mut grid = replaced_grid(&self.corrupted, &self.metric, (kind, by), &values, done)?;
        grid.values.iter_mut().flatten().for_each(|value| *value = self.share(*value));
        Ok(grid)
    }

    /// Path patching: returns the clean metric with only the senders' paths to a receiver corrupted.
    ///
    /// The sending heads get their values from the corrupted prompt. All other heads between senders and
    /// receiver keep their clean values, while norms and MLPs are recomputed.
    ///
    /// Source: "Interpretability in the Wild" (arXiv:2211.00593, section 3 and appendix B).
    ///
    /// # Errors
    /// If a head is out of range, if the receiver is not in a later layer than every sender, or if the model
    /// fails.
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
            let reason = "the receiver must be in a later layer than every sender";
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

/// An attention head. [`ablated`] takes a list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Head {
    /// Layer of the head.
    pub layer: usize,
    /// Index of the head within its layer.
    pub head: usize,
}

impl Head {
    /// Checks that a model of this size has the head.
    ///
    /// # Errors
    /// If the layer or the head is out of range.
    pub fn check(&self, n_layer: usize, n_head: usize) -> Result<()> {
        let Self { layer, head } = *self;
        if layer >= n_layer || head >= n_head {
            return Err(InterpretError::Head { layer, head, n_layer, n_head });
        }
        Ok(())
    }
}

/// Endpoint of a path in [`Patching::path`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receiver {
    /// The final residual stream.
    Final,
    /// Queries of a head.
    Query(Head),
    /// Keys of a head.
    Key(Head),
    /// Values of a head.
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

/// Replacement for a head's output. An argument of [`ablated`].
#[derive(Debug, Clone)]
pub enum Ablation {
    /// Zeros, without TransformerLens' processing.
    RawZero,
    /// The constant that replaces zero in TransformerLens.
    ///
    /// See [`Processing::value_constants`](crate::Processing::value_constants).
    TransformerLensZero,
    /// Mean over other sequences.
    ///
    /// If all of them have the length of this prompt, the mean is taken at each position. Otherwise, each
    /// sequence is first averaged over its positions.
    Mean(Vec<Vec<u32>>),
    /// Value from another sequence of the same length.
    Sample(Vec<u32>),
}

impl Ablation {
    /// Returns the replacement for each layer's `z`, in a shape that broadcasts to it.
    ///
    /// # Errors
    /// If a sequence does not fit, or if the model fails.
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
                    let of_text = record.values.into_values().map(|z| {
                        let z = z.to_dtype(sum_dtype(z.dtype()))?;
                        match is_by_position {
                            true => z.squeeze(0),                              // (T, H, D)
                            false => z.sum(1)?.squeeze(0)? / ids.len() as f64, // (H, D)
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
                    return Err(InterpretError::Mismatch("mean ablation needs at least one text".into()));
                }
                sums.into_iter().map(|sum| Ok((sum / texts.len() as f64)?)).collect()
            }
        }
    }
}

/// Computes the metric with each head ablated at every position, one head at a time.
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
/// assert_eq!(grid.values, [[0.; 3]; 2], "one value for each layer and head");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If [`Ablation::values`] or the model fails.
pub fn ablation_grid(run: &Run, metric: &Metric, ablation: &Ablation, done: &dyn Fn()) -> Result<Grid> {
    replaced_grid(run, metric, (SiteKind::Z, GridAxis::Head), &ablation.values(run)?, done)
}

/// Runs the model with several heads ablated together, at all positions or at one.
///
/// Returns the logits, and whether the ablation changed anything.
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
/// assert!(!has_changed, "with all weights zero, head outputs are already zero");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a head is out of range, or if [`Ablation::values`] or the model fails.
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
