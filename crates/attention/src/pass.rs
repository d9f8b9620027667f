//! The state of a forward pass besides its input, in two parts.
//!
//! ```text
//! Call   what is computed: the positions of the tokens, what they attend to, in which type, in which block; copied freely
//! Run    what takes part meanwhile: the generator of dropout, the observer; borrowed, so there is one of each
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, RandomStream};
use candle_gpt2_kernels::{KernelError, LayerNorm, Linear, add, dropout, recomputed};

use crate::{AttentionError, AttentionMask, Site, SiteKind};

/// Sees intermediates of a forward pass, and may replace them.
///
/// What it does not want is computed as without an observer: several steps in one kernel, if there is one.
///
/// ```
/// use candle_core::{Result, Tensor};
/// use candle_gpt2_attention::{Observer, Site, SiteKind};
///
/// /// Keeps the attention weights of every block that has been run.
/// #[derive(Default)]
/// struct Patterns(Vec<Tensor>);
///
/// impl Observer for Patterns {
///     fn wants(&self, site: Site) -> bool {
///         site.kind == SiteKind::Pattern
///     }
///
///     fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
///         self.0.push(value.clone());
///         Ok(value)
///     }
/// }
/// ```
#[doc(alias("HookPoint", "register_forward_hook"))]
pub trait Observer {
    /// Whether it wants to see what is at this place.
    fn wants(&self, site: Site) -> bool;

    /// Called when a model begins a pass over `tokens` new tokens of rows that have so many tokens before them: with a cache, what is
    /// seen is of the new tokens alone.
    fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        let _ = (past_lengths, tokens);
    }

    /// Called with what it wants, in the order of computation; what it returns is used in its place.
    ///
    /// # Errors
    /// An error ends the forward pass and is returned from it.
    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor>;
}

/// Keeps the last value of one kind.
pub(crate) struct Kept {
    kind: SiteKind,
    pub(crate) value: Option<Tensor>,
}

impl Kept {
    pub(crate) fn of(kind: SiteKind) -> Self {
        Self { kind, value: None }
    }
}

impl Observer for Kept {
    fn wants(&self, site: Site) -> bool {
        site.kind == self.kind
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.value = Some(value.clone());
        Ok(value)
    }
}

/// The mode of one forward pass: inference or training, observed or not.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::Pass;
/// use candle_gpt2_arithmetic::RandomStream;
///
/// let x = Tensor::ones(100, DType::F32, &Device::Cpu)?;
/// let kept = Pass::inference().dropout(x.clone(), 0.5)?;
/// assert_eq!(kept.to_vec1::<f32>()?, x.to_vec1::<f32>()?);
/// let dropped = Pass::training(&mut RandomStream::new(7)).dropout(x, 0.5)?;
/// assert!(dropped.to_vec1::<f32>()?.contains(&0.0));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Default)]
pub struct Pass<'a> {
    call: Call,
    run: Run<'a>,
}

/// What is computed.
#[derive(Clone, Default)]
struct Call {
    placement: Placement,
    encoder_states: Option<Tensor>,
    dtype: Option<DType>,
    first_position: usize,
    layer: Option<usize>,
    stop_at_layer: Option<usize>,
}

/// Who takes part.
#[derive(Default)]
struct Run<'a> {
    generator: Option<&'a mut RandomStream>,
    observer: Option<&'a mut dyn Observer>,
    recomputes: bool,
}

/// Where the tokens of a pass are; [`Pass::placement`] has that of a pass.
#[derive(Debug, Clone, Default)]
pub enum Placement {
    /// Each row of `(B, T)` after what its row of the cache holds, or from position 0.
    #[default]
    AfterCache,
    /// Rows of these lengths one after the other in one text, see [`Pass::of_rows`].
    Rows(Arc<[usize]>),
    /// At the positions that this tensor of the device holds, see [`Pass::at`].
    OnDevice(Tensor),
}

impl<'a> Pass<'a> {
    /// A pass without dropout.
    pub fn inference() -> Self {
        Self::default()
    }

    /// A pass with dropout drawn from `generator`.
    pub fn training(generator: &'a mut RandomStream) -> Self {
        Self { call: Call::default(), run: Run { generator: Some(generator), ..Run::default() } }
    }

    /// The same pass, seen by `observer`.
    pub fn observed_by(mut self, observer: &'a mut dyn Observer) -> Self {
        self.run.observer = Some(observer);
        self
    }

    /// The same pass; in training, blocks then keep their inputs only, and are computed again for their gradients.
    pub fn recomputing(mut self, recomputes: bool) -> Self {
        self.run.recomputes = recomputes;
        self
    }

    /// The same pass as a step of a few new tokens of each row at `positions` `(B, T)` of u32: those of a row follow each other and
    /// what its cache holds. They are read from the device's memory wherever they count, so that a recording of the step serves all
    /// steps; each must be below the capacity of the cache and the model's number of positions, and the ids of the step, which are
    /// not read back from a GPU either, below the size of the vocabulary. The lengths of the caches themselves stay as they are:
    /// [`KvCache::advance`](crate::KvCache::advance).
    pub fn at(mut self, positions: Tensor) -> Self {
        self.call.placement = Placement::OnDevice(positions);
        self
    }

    /// The same pass, computed in `dtype` between the layers, whatever the type of the parameters: layers cast theirs.
    pub fn computed_in(mut self, dtype: DType) -> Self {
        self.call.dtype = Some(dtype);
        self
    }

    /// The type given to [`Pass::computed_in`].
    pub fn dtype(&self) -> Option<DType> {
        self.call.dtype
    }

    /// `x`, which the first layer is given, in the type that the pass is computed in.
    ///
    /// # Errors
    /// When the device does not have that type.
    pub fn cast(&self, x: Tensor) -> Result<Tensor> {
        match self.call.dtype {
            Some(dtype) => x.to_dtype(dtype),
            None => Ok(x),
        }
    }

    /// The same pass over rows of these lengths that lie one after the other in one text: a token sees those of its own row alone,
    /// and positions begin anew in each. So rows of different lengths need no padding. With a cache, each row continues its row of the
    /// cache, which grows by the row's length.
    pub fn of_rows(mut self, lengths: Arc<[usize]>) -> Self {
        self.call.placement = Placement::Rows(lengths);
        self
    }

    /// The same pass, in which position `first` follows an empty cache instead of position 0: training on windows that are shorter than
    /// the context reaches all positions so. Rows of several texts begin at 0.
    pub fn from_position(mut self, first: usize) -> Self {
        self.call.first_position = first;
        self
    }

    /// The position given to [`Pass::from_position`].
    pub fn first_position(&self) -> usize {
        self.call.first_position
    }

    /// The same pass, which ends before block `layer` and returns the residual stream that enters it (TransformerLens'
    /// `stop_at_layer`): the blocks from there on, the final norm and the output head are not computed.
    pub fn stopping_at(mut self, layer: usize) -> Self {
        self.call.stop_at_layer = Some(layer);
        self
    }

    /// The layer given to [`Pass::stopping_at`].
    pub fn stop_at_layer(&self) -> Option<usize> {
        self.call.stop_at_layer
    }

    /// Where the tokens are.
    pub fn placement(&self) -> &Placement {
        &self.call.placement
    }

    /// Which keys a query of a decoder sees in this pass.
    pub fn causal_mask(&self) -> AttentionMask {
        match self.placement() {
            Placement::Rows(lengths) => AttentionMask::CausalRows(Arc::clone(lengths)),
            Placement::AfterCache | Placement::OnDevice(_) => AttentionMask::Causal,
        }
    }

    /// The same pass, in which a model with cross-attention attends to these encoder hidden states, `(B, S, C)`, or `(1, S, C)` for all
    /// rows alike. Gradients flow into them.
    pub fn attending_to(mut self, encoder_states: Tensor) -> Self {
        self.call.encoder_states = Some(encoder_states);
        self
    }

    /// The states given to [`Pass::attending_to`].
    pub fn encoder_states(&self) -> Option<&Tensor> {
        self.call.encoder_states.as_ref()
    }

    /// Whether there is neither dropout nor an observer.
    pub fn is_inference(&self) -> bool {
        !self.is_training() && !self.is_observed()
    }

    /// Whether blocks are to be computed by [`Pass::recompute`].
    pub fn is_recomputing(&self) -> bool {
        self.run.recomputes && self.run.observer.is_none()
    }

    /// A part of the model that is computed again for its gradients, with the same dropout, and keeps nothing but `x` until
    /// then.
    ///
    /// # Errors
    /// Those of the part.
    pub fn recompute(
        &mut self,
        x: &Tensor,
        part: impl Fn(&Tensor, &mut Pass) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let start = self.run.generator.as_deref().cloned();
        let end = Arc::new(Mutex::new(None));
        let (call, reached) = (self.call.clone(), Arc::clone(&end));
        let y = recomputed(x, move |x| {
            let mut generator = start.clone();
            let run = Run { generator: generator.as_mut(), ..Run::default() };
            let mut pass = Pass { call: call.clone(), run };
            let y = part(x, &mut pass)?;
            *reached.lock().unwrap_or_else(PoisonError::into_inner) = generator;
            Ok(y)
        })?;
        let end = end.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(generator), Some(end)) = (&mut self.run.generator, end) {
            **generator = end;
        }
        Ok(y)
    }

    /// The same pass, for the time that it is borrowed.
    pub fn reborrow(&mut self) -> Pass<'_> {
        Pass { call: self.call.clone(), run: self.run.reborrow() }
    }

    /// The same pass without its observer, for the time that it is borrowed.
    pub fn unobserved(&mut self) -> Pass<'_> {
        Pass { call: self.call.clone(), run: Run { observer: None, ..self.run.reborrow() } }
    }

    /// The same pass, seen by `observer` for the time that it is borrowed.
    pub fn watched<'b>(&'b mut self, observer: &'b mut dyn Observer) -> Pass<'b> {
        self.reborrow().observed_by(observer)
    }

    /// Announces the pass to the observer, see [`Observer::begin`].
    pub fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        if let Some(observer) = &mut self.run.observer {
            observer.begin(past_lengths, tokens);
        }
    }

    /// Marks what follows as part of block `layer`, or of none.
    pub fn enter_layer(&mut self, layer: Option<usize>) {
        self.call.layer = layer;
    }

    /// Whether the observer wants to see this intermediate of the layer that was entered: an op may then not skip it.
    pub fn wants(&self, kind: SiteKind) -> bool {
        let site = Site { layer: self.call.layer, kind };
        self.run.observer.as_ref().is_some_and(|observer| observer.wants(site))
    }

    /// Shows an intermediate to the observer, if it wants it, and returns the value to continue with.
    ///
    /// # Errors
    /// Those of the observer, and when it returns another shape or type.
    pub fn show(&mut self, kind: SiteKind, value: Tensor) -> Result<Tensor> {
        let site = Site { layer: self.call.layer, kind };
        let Some(observer) = self.run.observer.as_mut().filter(|observer| observer.wants(site)) else {
            return Ok(value);
        };
        let (shape, dtype) = (value.shape().clone(), value.dtype());
        let seen = observer.observe(site, value)?;
        if *seen.shape() != shape || seen.dtype() != dtype {
            return Err(AttentionError::Replacement {
                site,
                expected: (shape.into_dims(), dtype),
                found: (seen.dims().to_vec(), seen.dtype()),
            }
            .into());
        }
        Ok(seen)
    }

    /// A layer norm, whose scale and normalized input are shown as these two, if they are wanted.
    ///
    /// # Shapes
    /// `x` `(…, C)`; returns the same.
    ///
    /// # Errors
    /// When the width differs, and those of the observer.
    pub fn norm(&mut self, norm: &LayerNorm, x: &Tensor, kinds: [SiteKind; 2]) -> Result<Tensor> {
        let [scale_kind, normalized_kind] = kinds;
        if !kinds.into_iter().any(|kind| self.wants(kind)) {
            return norm.forward(x);
        }
        let (centered, scale) = norm.centered(x)?;
        let scale = self.show(scale_kind, scale)?;
        let normalized = centered.broadcast_div(&scale)?.to_dtype(x.dtype())?;
        norm.scaled(&self.show(normalized_kind, normalized)?)
    }

    /// Dropout in training, `x` itself in inference.
    ///
    /// # Errors
    /// When `rate` is outside `[0, 1]`.
    pub fn dropout(&mut self, x: Tensor, rate: f64) -> Result<Tensor> {
        match &mut self.run.generator {
            Some(generator) => dropout(&x, rate, generator),
            None => Ok(x),
        }
    }

    /// `residual + dropout(layer(x))`, with the layer's output shown as `kind`: the end of a part of a block, in one
    /// product if nothing is dropped and no observer wants it.
    ///
    /// # Shapes
    /// `x` `(B, T, in)`, `residual` `(B, T, out)`; returns `(B, T, out)`.
    ///
    /// # Errors
    /// When the shapes do not fit, `rate` is outside `[0, 1]`, and those of the observer.
    pub fn add_to(
        &mut self,
        residual: &Tensor,
        layer: &Linear,
        x: &Tensor,
        kind: SiteKind,
        rate: f64,
    ) -> Result<Tensor> {
        if !self.is_training() && !self.wants(kind) {
            return layer.forward_added(x, residual);
        }
        let output = self.show(kind, layer.forward(x)?)?;
        add(residual, &self.dropout(output, rate)?)
    }

    /// Whether dropout is drawn.
    pub fn is_training(&self) -> bool {
        self.run.generator.is_some()
    }

    /// Dropout for an attention that draws its masks itself; `None` in inference and at a rate of zero.
    ///
    /// # Errors
    /// When `rate` is outside `[0, 1]`.
    pub fn attention_dropout(&mut self, rate: f64) -> Result<Option<Dropout>> {
        if !(0.0..=1.0).contains(&rate) {
            return Err(KernelError::DropoutRate { found: rate }.into());
        }
        let generator = self.run.generator.as_deref_mut().filter(|_| rate > 0.0);
        Ok(generator.map(|generator| Dropout { rate, seed: generator.seed() }))
    }

    /// Whether there is an observer.
    pub fn is_observed(&self) -> bool {
        self.run.observer.is_some()
    }
}

impl Run<'_> {
    fn reborrow(&mut self) -> Run<'_> {
        let Self { generator, observer, recomputes } = self;
        Run {
            generator: generator.as_deref_mut(),
            observer: observer.as_mut().map(|observer| &mut **observer as &mut dyn Observer),
            recomputes: *recomputes,
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_part_that_is_computed_again_is_in_the_same_call() {
        let x = Tensor::ones((1, 5, 6), DType::F32, &Device::Cpu).unwrap();
        let mut pass = Pass::inference().of_rows([2, 3].into()).attending_to(x.clone());
        pass = pass.computed_in(DType::F64).recomputing(true);
        pass.enter_layer(Some(7));
        let part = |x: &Tensor, pass: &mut Pass| {
            assert!(matches!(pass.placement(), Placement::Rows(lengths) if **lengths == [2, 3]));
            assert_eq!(pass.dtype(), Some(DType::F64));
            assert_eq!((pass.encoder_states().map(Tensor::dims), pass.call.layer), (Some(x.dims()), Some(7)));
            assert!(!pass.is_recomputing(), "a part keeps what it is made of");
            Ok(x.clone())
        };
        pass.recompute(&x, part).unwrap();
    }
}
