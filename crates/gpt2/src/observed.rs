//! Calls into the model: device, observer, hidden states, and passes that start at a later block.

use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::rounded_to_nearest;
use candle_gpt2_attention::{Observer, Pass, Site, SiteKind};
use candle_gpt2_kernels::{using, without_gradients};

use crate::watcher::Watcher;
use crate::{Gpt2Cache, Gpt2LMHeadModel, Gpt2Model, LogitsFor, ModelError};

impl Gpt2Model {
    /// Returns the hidden states of every layer, like `output_hidden_states` of transformers.
    ///
    /// These are `n_layer + 1` tensors of `(B, T, C)`: the embeddings, the output of every block but the
    /// last, and the last block's output after the final norm.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// use candle_gpt2::{Gpt2Config, Gpt2Model};
    ///
    /// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
    /// let model = Gpt2Model::load(&sizes, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let ids = Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu)?;
    /// assert_eq!(model.forward(&ids)?.dims(), [1, 4, 6]);
    /// assert_eq!(model.blocks()[0].attn().num_heads(), 3);
    /// assert_eq!(model.hidden_states(&ids)?.len(), 3, "the embeddings and the output of each block");
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Gpt2Model::forward`].
    pub fn hidden_states(&self, ids: &Tensor) -> Result<Vec<Tensor>> {
        let mut observer = HiddenStatesObserver(Vec::new());
        self.forward_with(ids, None, &mut Pass::inference().observed_by(&mut observer))?;
        Ok(observer.0)
    }

    /// Computes hidden states after the final norm from the input of block `layer`, without a cache.
    ///
    /// The input is the value at [`SiteKind::ResidPre`].
    ///
    /// # Shapes
    /// `x` `(B, T, C)`; returns `(B, T, C)`. With `layer` = `n_layer`, only the final norm is computed.
    ///
    /// # Errors
    /// If the block does not exist, or the hidden size is wrong.
    pub fn forward_from(&self, layer: usize, x: Tensor, pass: &mut Pass) -> Result<Tensor> {
        if layer > self.blocks.len() {
            return Err(ModelError::NoSuchBlock { layer, n_layer: self.blocks.len() }.into());
        }
        self.run(None, pass, |_, pass| {
            let (batch, tokens, _) = x.dims3()?;
            pass.begin(&vec![0; batch], tokens);
            self.blocks_from(layer, x, None, pass)
        })
    }

    /// Runs `compute` on the model's device, with the model's observer if the pass has none.
    ///
    /// After an error, the cache has the same content as before. With a cache, the result is a constant.
    /// Calls may be nested; the inner call has no further effect.
    pub(crate) fn run(
        &self,
        cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
        compute: impl FnOnce(Option<&mut Gpt2Cache>, &mut Pass) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let has_cache = cache.is_some();
        let is_tracked = |states: &Tensor| states.track_op();
        let has_gradients =
            has_cache && (self.size().trainable > 0 || pass.encoder_states().is_some_and(is_tracked));
        let compute = || Gpt2Cache::restoring(cache, |cache| self.watched(pass, |pass| compute(cache, pass)));
        // Cached keys and values are constants, so gradients would be incomplete.
        let compute = || if has_gradients { without_gradients(compute) } else { compute() };
        let compute = || compute().map(|result| if has_cache { result.detach() } else { result });
        using(self.device(), || rounded_to_nearest(compute))
    }

    /// Runs `compute` with the model's observer if the pass has none.
    pub(crate) fn watched<T>(
        &self,
        pass: &mut Pass,
        compute: impl FnOnce(&mut Pass) -> Result<T>,
    ) -> Result<T> {
        match &self.watcher {
            Some(watcher) if !pass.is_observed() => watcher.with(|observer| match observer {
                Some(observer) => compute(&mut pass.watched(observer)),
                None => compute(pass),
            }),
            _ => compute(pass),
        }
    }
}

impl Gpt2LMHeadModel {
    /// Computes logits from the input of block `layer`; see [`Gpt2Model::forward_from`].
    ///
    /// # Shapes
    /// `x` `(B, T, C)`; returns the shape of [`Gpt2LMHeadModel::forward_with`].
    ///
    /// # Errors
    /// See [`Gpt2Model::forward_from`].
    pub fn forward_from(
        &self,
        layer: usize,
        x: Tensor,
        logits_for: LogitsFor,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        self.transformer.run(None, pass, |_, pass| {
            let hidden_states = self.transformer.forward_from(layer, x, pass)?;
            self.shown_logits(&hidden_states, logits_for, pass)
        })
    }

    /// Attaches an observer for every pass without its own observer.
    ///
    /// This covers generation, scoring and everything else that runs the model. The mutex is locked during a
    /// pass, so observed passes of several threads run one after another. A pass that the observer runs
    /// itself, on the same model and thread, is not observed.
    pub fn observed_by(mut self, observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        self.transformer.watcher = Some(Watcher::new(observer));
        self
    }

    /// Whether [`Gpt2LMHeadModel::observed_by`] attached an observer.
    pub fn is_observed(&self) -> bool {
        self.transformer.watcher.is_some()
    }
}

/// Observer that collects hidden states in transformers' order.
struct HiddenStatesObserver(Vec<Tensor>);

impl Observer for HiddenStatesObserver {
    fn wants(&self, site: Site) -> bool {
        matches!(site.kind, SiteKind::ResidPre | SiteKind::FinalNorm)
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.0.push(value.clone());
        Ok(value)
    }
}
