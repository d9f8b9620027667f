//! GPT-2, top to bottom: embeddings, blocks on a residual stream, final norm, output head.
//!
//! ```text
//! x = wte[ids] + wpe[positions]                  token and position embeddings
//! x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))   n_layer times; cross-attention between them if the model has it
//! logits = ln_f(x) · lm_headᵀ                    lm_head is wte if the head is tied
//! ```
//!
//! Source: OpenAI's `src/model.py`; results equal those of transformers' `modeling_gpt2.py`. This file serves
//! training and inference on every device. The operations it calls handle the differences. A [`Pass`] has the
//! settings and state of one call: training or inference, positions, encoder states, observer. `pass.show`
//! passes a value to the observer and continues with the value that the observer returns.
//!
//! Letters in shapes: `B` batch, `T` tokens, `C` hidden size (`n_embd`), `V` vocabulary.
//!
//! Attention is implemented in `candle-gpt2-attention`: `multi_head.rs`, and `steps.rs`, which has the
//! formula. `examples/plain.rs` is the whole model in 180 lines of candle's own operations.
//!
//! Related files: `embeddings.rs` (positions), `cross_attention.rs` (encoder states), `cache.rs` (keys and
//! values), `observed.rs` (observers of a model), `parts.rs` (parts and their sizes). [`SiteKind`] lists all
//! hook points.

use candle_core::{Result, Tensor};
use candle_gpt2_attention::{FeedForward, KvCache, MultiHeadAttention, Pass, QkvProjection, SiteKind};
use candle_gpt2_kernels::{KvDType, LayerNorm, Linear, ParameterSource, check_interrupted};

use crate::cross_attention::{CrossAttention, check_encoder_states};
use crate::embeddings::Embeddings;
use crate::parameters::{Layers, check_block_count, head_and_model};
use crate::steps::StepRecorder;
use crate::sublayer::OwnLayers;
use crate::watcher::Watcher;
use crate::{Gpt2Cache, Gpt2Config, HeadKind, LogitsFor, ModelError};

/// Pre-norm block of attention and MLP; see [`Gpt2Model`].
///
/// Each part reads a normalized copy of the residual stream and adds its output to the stream.
#[derive(Debug, Clone)]
#[doc(alias("GPT2Block", "GPT2MLP"))]
pub struct Block {
    pub(crate) ln_1: LayerNorm,
    pub(crate) attn: MultiHeadAttention,
    pub(crate) cross_attention: Option<CrossAttention>,
    pub(crate) ln_2: LayerNorm,
    pub(crate) mlp: FeedForward,
    pub(crate) own: OwnLayers,
    pub(crate) resid_pdrop: f64,
}

impl Block {
    /// Loads block `layer` from its parameters.
    ///
    /// `vb` is at `h.{layer}`, with `ln_1`, `attn` and the other parts below it.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape, or `n_head` does not divide the hidden size.
    pub fn load(config: &Gpt2Config, layer: usize, vb: impl ParameterSource) -> Result<Self> {
        let layers = Layers::of_block(config, vb);
        let c_attn = QkvProjection::Fused(layers.linear("attn.c_attn")?);
        Ok(Self {
            ln_1: layers.norm("ln_1")?,
            attn: MultiHeadAttention::new(c_attn, layers.linear("attn.c_proj")?, config.n_head)?
                .with_scale(config.attention_scale(layer))
                .with_dropout(config.attn_pdrop),
            cross_attention: (config.add_cross_attention)
                .then(|| CrossAttention::load(config, layer, &layers))
                .transpose()?,
            ln_2: layers.norm("ln_2")?,
            mlp: FeedForward::new(
                layers.linear("mlp.c_fc")?,
                layers.linear("mlp.c_proj")?,
                config.activation_function,
            )?,
            own: OwnLayers::default(),
            resid_pdrop: config.resid_pdrop,
        })
    }

    /// Computes `(B, T, C)` from `(B, T, C)`; `add_to` is `x + dropout(part(normed))`.
    ///
    /// # Errors
    /// If the width of `x` does not match, or its tokens do not fit into the cache.
    pub fn forward_with(&self, x: &Tensor, cache: Option<&mut KvCache>, pass: &mut Pass) -> Result<Tensor> {
        let x = pass.show(SiteKind::ResidPre, x.clone())?;
        let normed = pass.norm(&self.ln_1, &x, [SiteKind::Ln1Scale, SiteKind::Ln1Normalized])?;
        let x = match &self.own.attention {
            Some(own) => self.add_own(own, SiteKind::AttnOut, &x, &normed, cache, pass)?,
            None => self.attn.add_to(&x, &normed, &pass.causal_mask(), cache, self.resid_pdrop, pass)?,
        };
        let x = match &self.cross_attention {
            Some(cross_attention) => cross_attention.forward(x, pass)?,
            None => x,
        };
        let x = pass.show(SiteKind::ResidMid, x)?;
        let normed = pass.norm(&self.ln_2, &x, [SiteKind::Ln2Scale, SiteKind::Ln2Normalized])?;
        let x = match &self.own.mlp {
            Some(own) => self.add_own(own, SiteKind::MlpOut, &x, &normed, None, pass)?,
            None => self.mlp.add_to(&x, &normed, self.resid_pdrop, pass)?,
        };
        pass.show(SiteKind::ResidPost, x)
    }
}

/// GPT-2 without its output head: token IDs to hidden states.
#[derive(Debug, Clone)]
#[doc(alias("GPT2Model", "transformer"))]
pub struct Gpt2Model {
    pub(crate) embeddings: Embeddings,
    pub(crate) blocks: Vec<Block>,
    pub(crate) ln_f: LayerNorm,
    pub(crate) config: Gpt2Config,
    pub(crate) watcher: Option<Watcher>,
}

impl Gpt2Model {
    /// Loads the model from its parameters.
    ///
    /// Names and layouts match transformers checkpoints, with or without the prefix `transformer.`. An
    /// empty `VarMap` receives GPT-2's initialization, and the names that transformers saves.
    ///
    /// # Errors
    /// If the configuration is invalid, or a parameter is missing or has the wrong shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        config.check()?;
        let [_, vb] = head_and_model(&vb);
        check_block_count(config, &vb)?;
        let blocks = (0..config.n_layer).map(|layer| Block::load(config, layer, vb.below("h").below(layer)));
        let layers = Layers::outside_blocks(config, vb.clone());
        Ok(Self {
            embeddings: Embeddings {
                wte: layers.linear("wte")?,
                wpe: layers.tensor("wpe", "weight")?,
                embd_pdrop: config.embd_pdrop,
            },
            blocks: blocks.collect::<Result<_>>()?,
            ln_f: layers.norm("ln_f")?,
            config: config.clone(),
            watcher: None,
        })
    }

    /// Computes hidden states after the final norm, without dropout and without a cache.
    ///
    /// Gradients flow.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, C)`.
    ///
    /// # Errors
    /// If there are no tokens, there are more tokens than positions, or an ID is outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_with(ids, None, &mut Pass::inference())
    }

    /// Computes hidden states with a cache, in training, or with an observer.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, C)`. With a cache, row `b` continues after its
    /// `cache.lengths()[b]` tokens, and the cache grows by `T`. With [`Pass::at`] or [`Pass::of_rows`], the
    /// pass sets the positions.
    ///
    /// # Gradients
    /// Gradients flow in a pass without a cache. With a cache, the result is a constant, as with
    /// [`without_gradients`](crate::without_gradients).
    ///
    /// # Errors
    /// The cache then has the same content as before. The pass fails if:
    ///
    /// - there are no tokens, an ID is outside the vocabulary, or the tokens do not fit into the context or
    ///   cache;
    /// - it [stops](Pass::stopping_at) at a block that does not exist;
    /// - it has a cache and stops at a different block than earlier passes, which left the later layers
    ///   empty;
    /// - it is a training pass and has a cache;
    /// - it is [interrupted](candle_gpt2_kernels::interruptible).
    pub fn forward_with(
        &self,
        ids: &Tensor,
        cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        self.run(cache, pass, |cache, pass| self.states_of(ids, cache, pass))
    }

    /// Runs the embeddings and everything after them, inside [`Gpt2Model::run`].
    fn states_of(&self, ids: &Tensor, cache: Option<&mut Gpt2Cache>, pass: &mut Pass) -> Result<Tensor> {
        let past_lengths = cache.as_deref().map_or(&[][..], Gpt2Cache::lengths);
        let x = self.embeddings.forward(ids, past_lengths, pass)?; // (B, T, C)
        self.blocks_from(0, x, cache, pass)
    }

    /// Runs everything after the embeddings, from block `first` onward.
    pub(crate) fn blocks_from(
        &self,
        first: usize,
        mut x: Tensor,
        mut cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        if let Some(states) = pass.encoder_states() {
            check_encoder_states(&self.config, states, x.dim(0)?)?;
        }
        let n_layer = self.blocks.len();
        let stop = pass.stop_at_layer();
        let end = stop.unwrap_or(n_layer);
        if end > n_layer {
            return Err(ModelError::NoSuchBlock { layer: end, n_layer }.into());
        }
        if let Some(cache) = cache.as_deref() {
            cache.expect_filled_to(end, n_layer)?;
        }
        for (layer, block) in self.blocks.iter().enumerate().take(end).skip(first) {
            // GPU kernels do not check for interruptions.
            check_interrupted()?;
            pass.enter_layer(Some(layer));
            x = if pass.is_recomputing() && cache.is_none() {
                let block = block.clone();
                pass.recompute(&x, move |x, pass| block.forward_with(x, None, pass))?
            } else {
                block.forward_with(&x, cache.as_deref_mut().and_then(|cache| cache.layer(layer)), pass)?
            };
        }
        if let Some(layer) = stop {
            pass.enter_layer(Some(layer));
            return if layer < n_layer { pass.show(SiteKind::ResidPre, x) } else { Ok(x) };
        }
        pass.enter_layer(None);
        let kinds = [SiteKind::LnFinalScale, SiteKind::LnFinalNormalized];
        let normed = pass.norm(&self.ln_f, &x, kinds)?;
        pass.show(SiteKind::FinalNorm, normed)
    }
}

/// GPT-2 with its output head: token IDs to logits over the vocabulary.
///
/// [`Gpt2Cache`] has an example.
#[derive(Debug, Clone)]
#[doc(alias("GPT2LMHeadModel", "GPT", "lm_head"))]
pub struct Gpt2LMHeadModel {
    pub(crate) transformer: Gpt2Model,
    pub(crate) lm_head: Linear,
    pub(crate) kv_dtype: KvDType,
    pub(crate) step_recorder: Option<StepRecorder>,
}

impl Gpt2LMHeadModel {
    /// Loads the model from its parameters; see [`Gpt2Model::load`].
    ///
    /// The head is `lm_head.weight`, or the token embedding if it is tied.
    ///
    /// # Errors
    /// If the configuration is invalid, or a parameter is missing or has the wrong shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        let transformer = Gpt2Model::load(config, vb.clone())?;
        let lm_head = match config.tie_word_embeddings {
            true => transformer.embeddings.wte.clone(),
            // The caller asked for this class, so the head in the configuration does not matter.
            false => {
                let with_head = Gpt2Config { head: HeadKind::LanguageModel, ..config.clone() };
                let [head, _] = head_and_model(&vb);
                Layers::outside_blocks(&with_head, head).linear("lm_head")?
            }
        };
        Self::new(transformer, lm_head)
    }

    /// Computes the next-token logits after each token, without dropout and without a cache.
    ///
    /// Gradients flow.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, V)`.
    ///
    /// # Errors
    /// See [`Gpt2Model::forward`].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_with(ids, LogitsFor::EveryToken, None, &mut Pass::inference())
    }

    /// Computes the logits of selected tokens, with a cache, in training, or with an observer.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32. Returns `(B, T, V)` for [`LogitsFor::EveryToken`], `(B, 1, V)` for
    /// [`LogitsFor::LastToken`] and `(B, count, V)` for [`LogitsFor::Tokens`]. A pass that
    /// [stops](Pass::stopping_at) before the head returns `(B, T, C)`.
    ///
    /// With [`Pass::of_rows`], `B` is 1, and [`LogitsFor::LastToken`] returns `(1, rows, V)`.
    /// [`LogitsFor::Tokens`] then counts in the packed sequence.
    ///
    /// # Gradients
    /// See [`Gpt2Model::forward_with`].
    ///
    /// # Errors
    /// See [`Gpt2Model::forward_with`].
    pub fn forward_with(
        &self,
        ids: &Tensor,
        logits_for: LogitsFor,
        mut cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        // On a GPU, the kernels of a small step are recorded once and replayed. For any other step, the
        // recorder returns `None`.
        if let (Some(recorder), Some(cache)) = (&self.step_recorder, cache.as_deref_mut())
            && let Some(logits) = recorder.step(self, ids, logits_for, cache, pass)?
        {
            return Ok(logits);
        }
        self.transformer.run(cache, pass, |cache, pass| {
            let hidden_states = self.transformer.states_of(ids, cache, pass)?; // (B, T, C)
            if pass.stop_at_layer().is_some() {
                return Ok(hidden_states);
            }
            self.shown_logits(&hidden_states, logits_for, pass)
        })
    }

    /// Computes logits and passes them to the observer.
    pub(crate) fn shown_logits(
        &self,
        hidden_states: &Tensor,
        logits_for: LogitsFor,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let wanted = logits_for.select(hidden_states, pass.placement())?; // (B, count, C)
        pass.show(SiteKind::Logits, self.lm_head.forward(&wanted)?)
    }
}
