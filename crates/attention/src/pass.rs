//! What a forward pass carries besides its input: dropout in training, and a view of the intermediates.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor};
use gpt2_kernels::{AttentionDropout, KernelError, Linear, RandomStream, add, dropout, recomputed};

/// A place in a model where an intermediate can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site {
    /// Index of the block, counted from 0; `None` outside the blocks.
    pub layer: Option<usize>,
    /// Name of the intermediate; the layer that announces it documents its shape.
    pub name: &'static str,
}

/// Sees the named intermediates of a forward pass, and may replace them.
pub trait Observer {
    /// Called with every intermediate in the order of computation; what it returns is used in its place.
    ///
    /// # Errors
    /// An error ends the forward pass and is returned from it.
    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor>;
}

/// The mode of one forward pass: inference or training, observed or not.
#[derive(Default)]
pub struct Pass<'a> {
    generator: Option<&'a mut RandomStream>,
    observer: Option<&'a mut dyn Observer>,
    layer: Option<usize>,
    recomputes: bool,
    lengths: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// A pass without dropout.
    pub fn inference() -> Self {
        Self::default()
    }

    /// A pass with dropout drawn from `generator`.
    pub fn training(generator: &'a mut RandomStream) -> Self {
        Self { generator: Some(generator), ..Self::default() }
    }

    /// The same pass, seen by `observer`.
    pub fn observed_by(self, observer: &'a mut dyn Observer) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// The same pass; in training, blocks then keep their inputs only, and are computed again for their gradients.
    pub fn recomputing(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// The same pass as a step of one new token for each row, whose caches hold `lengths` `(B)` tokens of u32. Their numbers
    /// are read from the device's memory wherever they count, so that a recording of the step serves all steps; each must be
    /// below the capacity of the cache and the model's number of positions. The lengths of the caches themselves stay
    /// as they are: [`KvCache::advance`](crate::KvCache::advance).
    pub fn after(self, lengths: Tensor) -> Self {
        Self { lengths: Some(lengths), ..self }
    }

    /// The lengths given to [`Pass::after`].
    pub fn lengths(&self) -> Option<&Tensor> {
        self.lengths.as_ref()
    }

    /// Whether nothing is drawn and nobody looks.
    pub fn is_inference(&self) -> bool {
        !self.is_training() && !self.is_observed()
    }

    /// Whether blocks are to be computed by [`Pass::recompute`].
    pub fn is_recomputing(&self) -> bool {
        self.recomputes && self.observer.is_none()
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
        let start = self.generator.as_deref().cloned();
        let end = Arc::new(Mutex::new(None));
        let (layer, reached) = (self.layer, Arc::clone(&end));
        let y = recomputed(x, move |x| {
            let mut generator = start.clone();
            let mut pass = Pass { generator: generator.as_mut(), layer, ..Pass::default() };
            let y = part(x, &mut pass)?;
            *reached.lock().unwrap_or_else(PoisonError::into_inner) = generator;
            Ok(y)
        })?;
        let end = end.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(generator), Some(end)) = (&mut self.generator, end) {
            **generator = end;
        }
        Ok(y)
    }

    /// Says that what follows belongs to block `layer`, or to none.
    pub fn enter_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    /// Shows an intermediate to the observer and returns what to go on with: `value` itself where nobody looks.
    ///
    /// # Errors
    /// Those of the observer.
    pub fn show(&mut self, name: &'static str, value: Tensor) -> Result<Tensor> {
        match &mut self.observer {
            Some(observer) => observer.observe(Site { layer: self.layer, name }, value),
            None => Ok(value),
        }
    }

    /// Dropout in training, `x` itself in inference.
    ///
    /// # Errors
    /// When `rate` is outside `[0, 1]`.
    pub fn dropout(&mut self, x: Tensor, rate: f64) -> Result<Tensor> {
        match &mut self.generator {
            Some(generator) => dropout(&x, rate, generator),
            None => Ok(x),
        }
    }

    /// `residual + dropout(layer(x))`, where the layer's output is shown under `name`: the end of a part of a block, in one
    /// product where nothing is dropped and nobody looks.
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
        name: &'static str,
        rate: f64,
    ) -> Result<Tensor> {
        if self.is_inference() {
            return layer.forward_added(x, residual);
        }
        let output = self.show(name, layer.forward(x)?)?;
        add(residual, &self.dropout(output, rate)?)
    }

    /// Whether dropout is drawn.
    pub fn is_training(&self) -> bool {
        self.generator.is_some()
    }

    /// Dropout for an attention that draws its masks itself; `None` in inference and at a rate of zero.
    ///
    /// # Errors
    /// When `rate` is outside `[0, 1]`.
    pub fn attention_dropout(&mut self, rate: f64) -> Result<Option<AttentionDropout>> {
        if !(0.0..=1.0).contains(&rate) {
            return Err(KernelError::DropoutRate { found: rate }.into());
        }
        let generator = self.generator.as_deref_mut().filter(|_| rate > 0.0);
        Ok(generator.map(|generator| AttentionDropout { rate, seed: generator.seed() }))
    }

    /// Whether an observer looks: an op may then not skip an intermediate.
    pub fn is_observed(&self) -> bool {
        self.observer.is_some()
    }
}
