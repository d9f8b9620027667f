//! State of a forward pass other than its input.
//!
//! A [`Pass`] has two parts:
//!
//! ```text
//! Call   settings of the computation: positions, encoder hidden states, dtype, block; cloned freely
//! Run    participants: the dropout generator and the observer; borrowed, so there is one of each
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, RandomStream};
use candle_gpt2_kernels::{KernelError, LayerNorm, Linear, add, dropout, recomputed};

use crate::{AttentionError, AttentionMask, Site, SiteKind};

/// Observer that sees a forward pass's intermediates and may replace them.
///
/// Intermediates that the observer does not want do not change the computation, so fused kernels remain in
/// use.
///
/// ```
/// use candle_core::{Result, Tensor};
/// use candle_gpt2_attention::{Observer, Site, SiteKind};
///
/// /// Keeps the attention weights of every block.
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
    /// Whether the observer wants the intermediate at this hook point.
    fn wants(&self, site: Site) -> bool;

    /// Called when a model begins a pass over `tokens` new tokens.
    ///
    /// Row `b` has `past_lengths[b]` tokens before them. With a cache, the observer only sees values of the
    /// new tokens.
    fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        let _ = (past_lengths, tokens);
    }

    /// Called with each wanted value, in the order of computation; the result replaces the value.
    ///
    /// # Errors
    /// An error aborts the forward pass, which returns it.
    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor>;
}

/// Observer that keeps the last value it sees at one kind of hook point.
pub(crate) struct LastValue {
    kind: SiteKind,
    pub(crate) value: Option<Tensor>,
}

impl LastValue {
    pub(crate) fn of(kind: SiteKind) -> Self {
        Self { kind, value: None }
    }
}

impl Observer for LastValue {
    fn wants(&self, site: Site) -> bool {
        site.kind == self.kind
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.value = Some(value.clone());
        Ok(value)
    }
}

/// Settings of one forward pass: inference or training, with or without an observer.
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

/// Settings for the computation.
#[derive(Clone, Default)]
struct Call {
    placement: Placement,
    encoder_states: Option<Tensor>,
    dtype: Option<DType>,
    first_position: usize,
    layer: Option<usize>,
    stop_at_layer: Option<usize>,
}

/// Dropout generator and observer of the pass.
#[derive(Default)]
struct Run<'a> {
    generator: Option<&'a mut RandomStream>,
    observer: Option<&'a mut dyn Observer>,
    recomputes: bool,
}

/// Positions of the tokens in a pass, returned by [`Pass::placement`].
#[derive(Debug, Clone, Default)]
pub enum Placement {
    /// Each row of `(B, T)` follows the tokens in its cache row, or starts at position 0.
    #[default]
    AfterCache,
    /// Rows of these lengths are packed into one sequence; see [`Pass::of_rows`].
    Rows(Arc<[usize]>),
    /// Positions stored in device memory; see [`Pass::at`].
    OnDevice(Tensor),
}

impl<'a> Pass<'a> {
    /// Creates a pass without dropout.
    pub fn inference() -> Self {
        Self::default()
    }

    /// Creates a pass with dropout sampled from `generator`.
    pub fn training(generator: &'a mut RandomStream) -> Self {
        Self { call: Call::default(), run: Run { generator: Some(generator), ..Run::default() } }
    }

    /// Sets the observer of the pass.
    pub fn observed_by(mut self, observer: &'a mut dyn Observer) -> Self {
        self.run.observer = Some(observer);
        self
    }

    /// Enables or disables gradient checkpointing of the blocks in training.
    ///
    /// With checkpointing, blocks save only their inputs, and the backward pass recomputes the rest.
    pub fn recomputing(mut self, recomputes: bool) -> Self {
        self.run.recomputes = recomputes;
        self
    }

    /// Turns the pass into a step over new tokens at `positions`, a u32 tensor `(B, T)`.
    ///
    /// The positions of a row must be consecutive and follow its cached tokens. Kernels read them from device
    /// memory, so one recording of the step serves all steps. Each position must be below the cache's
    /// capacity and the model's context length. Token IDs must be below the vocabulary size, because they are
    /// not read back from a GPU either.
    ///
    /// The pass does not change the length of a cache; call [`KvCache::advance`](crate::KvCache::advance)
    /// afterward.
    pub fn at(mut self, positions: Tensor) -> Self {
        self.call.placement = Placement::OnDevice(positions);
        self
    }

    /// Sets the dtype of values between layers; layers cast parameters of any other dtype to it.
    pub fn computed_in(mut self, dtype: DType) -> Self {
        self.call.dtype = Some(dtype);
        self
    }

    /// Dtype set by [`Pass::computed_in`].
    pub fn dtype(&self) -> Option<DType> {
        self.call.dtype
    }

    /// Casts `x`, the input of the first layer, to the dtype of the pass.
    ///
    /// # Errors
    /// If the device does not support the dtype.
    pub fn cast(&self, x: Tensor) -> Result<Tensor> {
        match self.call.dtype {
            Some(dtype) => x.to_dtype(dtype),
            None => Ok(x),
        }
    }

    /// Declares that the input packs rows of these lengths into one sequence, one after another.
    ///
    /// A token sees only tokens of its own row, and positions restart in each row, so rows of different
    /// lengths need no padding. With a cache, each row continues its cache row, which grows by the row's
    /// length.
    pub fn of_rows(mut self, lengths: Arc<[usize]>) -> Self {
        self.call.placement = Placement::Rows(lengths);
        self
    }

    /// Sets the position of a row's first token, which is 0 by default.
    ///
    /// With a cache, that is the first cached token, so every pass over the cache needs the same position.
    /// Training on windows that are shorter than the context uses this to reach all positions. Packed rows
    /// start at 0.
    pub fn from_position(mut self, first: usize) -> Self {
        self.call.first_position = first;
        self
    }

    /// Position set by [`Pass::from_position`].
    pub fn first_position(&self) -> usize {
        self.call.first_position
    }

    /// Stops before block `layer` and returns the residual stream that enters it.
    ///
    /// This is TransformerLens' `stop_at_layer`. The later blocks, the final norm and the output head are not
    /// computed.
    pub fn stopping_at(mut self, layer: usize) -> Self {
        self.call.stop_at_layer = Some(layer);
        self
    }

    /// Layer set by [`Pass::stopping_at`].
    pub fn stop_at_layer(&self) -> Option<usize> {
        self.call.stop_at_layer
    }

    /// Positions of the tokens.
    pub fn placement(&self) -> &Placement {
        &self.call.placement
    }

    /// Causal decoder mask for this pass.
    pub fn causal_mask(&self) -> AttentionMask {
        match self.placement() {
            Placement::Rows(lengths) => AttentionMask::CausalRows(Arc::clone(lengths)),
            Placement::AfterCache | Placement::OnDevice(_) => AttentionMask::Causal,
        }
    }

    /// Sets the encoder hidden states for cross-attention, `(B, S, C)`, or `(1, S, C)` for all rows.
    ///
    /// Gradients reach the encoder hidden states.
    pub fn attending_to(mut self, encoder_states: Tensor) -> Self {
        self.call.encoder_states = Some(encoder_states);
        self
    }

    /// Encoder hidden states set by [`Pass::attending_to`].
    pub fn encoder_states(&self) -> Option<&Tensor> {
        self.call.encoder_states.as_ref()
    }

    /// Whether the pass has neither dropout nor an observer.
    pub fn is_inference(&self) -> bool {
        !self.is_training() && !self.is_observed()
    }

    /// Whether blocks must be computed with [`Pass::recompute`].
    pub fn is_recomputing(&self) -> bool {
        self.run.recomputes && self.run.observer.is_none()
    }

    /// Computes part of the model with gradient checkpointing.
    ///
    /// Only `x` is saved. The backward pass computes the part again, with the same dropout.
    ///
    /// # Errors
    /// If the part fails.
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

    /// Borrows the pass.
    pub fn reborrow(&mut self) -> Pass<'_> {
        Pass { call: self.call.clone(), run: self.run.reborrow() }
    }

    /// Borrows the pass without its observer.
    pub fn unobserved(&mut self) -> Pass<'_> {
        Pass { call: self.call.clone(), run: Run { observer: None, ..self.run.reborrow() } }
    }

    /// Borrows the pass with `observer` as its observer.
    pub fn watched<'b>(&'b mut self, observer: &'b mut dyn Observer) -> Pass<'b> {
        self.reborrow().observed_by(observer)
    }

    /// Notifies the observer that the pass is starting; see [`Observer::begin`].
    pub fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        if let Some(observer) = &mut self.run.observer {
            observer.begin(past_lengths, tokens);
        }
    }

    /// Sets the block that the next operations belong to; `None` means outside the blocks.
    pub fn enter_layer(&mut self, layer: Option<usize>) {
        self.call.layer = layer;
    }

    /// Whether the observer wants this intermediate of the current block.
    ///
    /// If so, an operation must compute it.
    pub fn wants(&self, kind: SiteKind) -> bool {
        let site = Site { layer: self.call.layer, kind };
        self.run.observer.as_ref().is_some_and(|observer| observer.wants(site))
    }

    /// Passes a wanted intermediate to the observer and returns the value to continue with.
    ///
    /// # Errors
    /// If the observer fails, or returns a value of a different shape or dtype.
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

    /// Computes a layer norm; the observer sees its scale and normalized input at hook points `kinds`.
    ///
    /// # Shapes
    /// `x` `(…, C)`; returns the same shape.
    ///
    /// # Errors
    /// If the width does not match, or the observer fails.
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

    /// Applies dropout in training; returns `x` in inference.
    ///
    /// # Errors
    /// If `rate` is outside `[0, 1]`.
    pub fn dropout(&mut self, x: Tensor, rate: f64) -> Result<Tensor> {
        match &mut self.run.generator {
            Some(generator) => dropout(&x, rate, generator),
            None => Ok(x),
        }
    }

    /// Computes `residual + dropout(layer(x))`; the observer sees the layer's output at hook `kind`.
    ///
    /// This is the last operation of each part of a block. It is one fused product if there is no dropout and
    /// the observer does not want the output.
    ///
    /// # Shapes
    /// `x` `(B, T, in)`, `residual` `(B, T, out)`; returns `(B, T, out)`.
    ///
    /// # Errors
    /// If the shapes do not match, `rate` is outside `[0, 1]`, or the observer fails.
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

    /// Whether dropout is active.
    pub fn is_training(&self) -> bool {
        self.run.generator.is_some()
    }

    /// Dropout for attention kernels that sample their own masks; `None` in inference or at a rate of zero.
    ///
    /// # Errors
    /// If `rate` is outside `[0, 1]`.
    pub fn attention_dropout(&mut self, rate: f64) -> Result<Option<Dropout>> {
        if !(0.0..=1.0).contains(&rate) {
            return Err(KernelError::DropoutRate { found: rate }.into());
        }
        let generator = self.run.generator.as_deref_mut().filter(|_| rate > 0.0);
        Ok(generator.map(|generator| Dropout { rate, seed: generator.seed() }))
    }

    /// Whether the pass has an observer.
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
    fn recomputed_part_sees_the_same_call() {
        let x = Tensor::ones((1, 5, 6), DType::F32, &Device::Cpu).unwrap();
        let mut pass = Pass::inference().of_rows([2, 3].into()).attending_to(x.clone());
        pass = pass.computed_in(DType::F64).recomputing(true);
        pass.enter_layer(Some(7));
        let part = |x: &Tensor, pass: &mut Pass| {
            assert!(matches!(pass.placement(), Placement::Rows(lengths) if **lengths == [2, 3]));
            assert_eq!(pass.dtype(), Some(DType::F64));
            assert_eq!((pass.encoder_states().map(Tensor::dims), pass.call.layer), (Some(x.dims()), Some(7)));
            assert!(!pass.is_recomputing(), "a recomputed part is not recomputed again");
            Ok(x.clone())
        };
        pass.recompute(&x, part).unwrap();
    }
}
