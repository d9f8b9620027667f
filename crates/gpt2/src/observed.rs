//! Looking into a model: an observer for all its passes, hidden states, and passes that begin at a later block.

use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor};
use candle_gpt2_attention::{Observer, Pass, Site, SiteKind};

use crate::watcher::Watcher;
use crate::{Gpt2LMHeadModel, Gpt2Model, LogitsFor, ModelError};

impl Gpt2Model {
    /// The hidden states of every layer, as `output_hidden_states` of transformers: the embeddings, the output of
    /// every block but the last, and the last one's after the final norm; `n_layer + 1` tensors of `(B, T, C)`.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward`].
    pub fn hidden_states(&self, ids: &Tensor) -> Result<Vec<Tensor>> {
        let mut kept = KeepHiddenStates(Vec::new());
        self.forward_with(ids, None, &mut Pass::inference().observed_by(&mut kept))?;
        Ok(kept.0)
    }

    /// Hidden states after the final norm, from the input of block `layer` on, as [`SiteKind::ResidPre`] shows it, without a cache.
    ///
    /// # Shapes
    /// `x` `(B, T, C)`; returns `(B, T, C)`. With `layer` = `n_layer` nothing but the final norm is left.
    ///
    /// # Errors
    /// When there is no such block, or the width is another.
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

    /// Computes with the observer of the model if the pass has none.
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
    /// Logits from the input of block `layer` on, see [`Gpt2Model::forward_from`].
    ///
    /// # Shapes
    /// `x` `(B, T, C)`; returns what [`Gpt2LMHeadModel::forward`] does.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward_from`].
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

    /// Shows `observer` every pass that has no observer of its own: in generation, scoring and everything else that runs the model.
    ///
    /// The mutex stays locked during a pass, so observed passes of several threads follow each other. A pass that the observer
    /// runs itself, on the same model and thread, is not observed.
    pub fn observed_by(mut self, observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        self.transformer.watcher = Some(Watcher::new(observer));
        self
    }

    /// Whether [`Gpt2LMHeadModel::observed_by`] gave it an observer.
    pub fn is_observed(&self) -> bool {
        self.transformer.watcher.is_some()
    }
}

/// Keeps the hidden states in the order of transformers.
struct KeepHiddenStates(Vec<Tensor>);

impl Observer for KeepHiddenStates {
    fn wants(&self, site: Site) -> bool {
        matches!(site.kind, SiteKind::ResidPre | SiteKind::FinalNorm)
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.0.push(value.clone());
        Ok(value)
    }
}
