//! GPT-2, top to bottom: embeddings, blocks of attention and MLP on a residual stream, final norm, output head.
//!
//! ```text
//! x = wte[ids] + wpe[positions]                  token and position embeddings
//! x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))   n_layer times; cross-attention between them if the model has it
//! logits = ln_f(x) · lm_headᵀ                    lm_head is wte if the head is tied
//! ```
//!
//! Source: OpenAI's `src/model.py`; results equal those of transformers' `modeling_gpt2.py`. The same file serves training and
//! inference on every device: what differs is in the ops it calls and in the [`Pass`], the settings and state of one call: training or
//! inference, positions, encoder states, observer. `pass.show` hands a value to the observer and continues with what that returns.
//!
//! Letters in shapes: `B` batch, `T` tokens, `C` width (`n_embd`), `V` vocabulary.
//!
//! Attention itself is a crate below: `multi_head.rs` there, and `steps.rs`, which has its formula. `examples/plain.rs` says all of it in
//! 150 lines on candle's own operations.
//!
//! Beside it: `embeddings.rs` (positions), `cross_attention.rs` (encoder states), `cache.rs` (keys and values), `observed.rs`
//! (observers of a model), `parts.rs` (the parts and their sizes). [`SiteKind`] lists what the observer of a pass is shown.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::rounded_to_nearest;
use candle_gpt2_attention::{FeedForward, KvCache, MultiHeadAttention, Pass, QkvProjection, SiteKind};
use candle_gpt2_kernels::{KvDType, LayerNorm, Linear, ParameterSource, check_interrupted, using};

use crate::cross_attention::{CrossAttention, check_encoder_states};
use crate::embeddings::Embeddings;
use crate::parameters::Layers;
use crate::steps::StepRecorder;
use crate::watcher::Watcher;
use crate::{Gpt2Cache, Gpt2Config, HeadKind, ModelError};

/// Axis of the tokens in a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// A pre-norm block: attention and MLP, each of which reads a normalized copy of the residual stream and adds to it, see [`Gpt2Model`].
#[derive(Debug, Clone)]
#[doc(alias("GPT2Block", "GPT2MLP"))]
pub struct Block {
    pub(crate) ln_1: LayerNorm,
    pub(crate) attn: MultiHeadAttention,
    pub(crate) cross_attention: Option<CrossAttention>,
    pub(crate) ln_2: LayerNorm,
    pub(crate) mlp: FeedForward,
    resid_pdrop: f64,
}

impl Block {
    /// Block `layer`, counted from 0, from its parameters; `vb` is at `h.{layer}`, with `ln_1`, `attn` and the others below it.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape, or the heads do not divide the width.
    pub fn load(config: &Gpt2Config, layer: usize, vb: impl ParameterSource) -> Result<Self> {
        let layers = Layers::of_block(config, vb);
        let c_attn = QkvProjection::Fused(layers.linear("attn.c_attn")?);
        Ok(Self {
            ln_1: layers.norm("ln_1")?,
            attn: MultiHeadAttention::new(c_attn, layers.linear("attn.c_proj")?, config.n_head)?
                .with_scale(config.attention_scale(layer))
                .with_dropout(config.attn_pdrop),
            cross_attention: match config.add_cross_attention {
                true => Some(CrossAttention::load(config, layer, &layers)?),
                false => None,
            },
            ln_2: layers.norm("ln_2")?,
            mlp: FeedForward::new(
                layers.linear("mlp.c_fc")?,
                layers.linear("mlp.c_proj")?,
                config.activation_function,
            )?,
            resid_pdrop: config.resid_pdrop,
        })
    }

    /// `(B, T, C)` to `(B, T, C)`; `add_to` is `x + dropout(part(normed))`.
    pub(crate) fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>, pass: &mut Pass) -> Result<Tensor> {
        let x = pass.show(SiteKind::ResidPre, x.clone())?;
        let normed = pass.norm(&self.ln_1, &x, [SiteKind::Ln1Scale, SiteKind::Ln1Normalized])?;
        let x = self.attn.add_to(&x, &normed, &pass.causal_mask(), cache, self.resid_pdrop, pass)?;
        let x = match &self.cross_attention {
            Some(cross_attention) => cross_attention.forward(x, pass)?,
            None => x,
        };
        let x = pass.show(SiteKind::ResidMid, x)?;
        let normed = pass.norm(&self.ln_2, &x, [SiteKind::Ln2Scale, SiteKind::Ln2Normalized])?;
        let x = self.mlp.add_to(&x, &normed, self.resid_pdrop, pass)?;
        pass.show(SiteKind::ResidPost, x)
    }
}

/// GPT-2 without its output head: token ids to hidden states.
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
/// assert_eq!(model.hidden_states(&ids)?.len(), 3, "the embeddings, and what each block gives");
/// # Ok::<(), candle_core::Error>(())
/// ```
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
    /// The model from its parameters, named and laid out as in a checkpoint of transformers, with or without the prefix
    /// `transformer.`. With an empty `VarMap` they get GPT-2's initialization.
    ///
    /// # Errors
    /// If the configuration is invalid, or a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        config.check()?;
        let below = vb.below("transformer");
        let vb = if below.contains("wte.weight") { below } else { vb };
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

    /// Hidden states after the final norm, without dropout and without a cache. Gradients flow.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, C)`.
    ///
    /// # Errors
    /// When there are no tokens or more than the context has positions, or an id is outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_with(ids, None, &mut Pass::inference())
    }

    /// The same with a cache, in training, or observed.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, C)`. With a cache, row `b` continues after its `cache.lengths()[b]`
    /// tokens, and the cache grows by `T`; with [`Pass::at`] or [`Pass::of_rows`] the pass places the tokens.
    ///
    /// # Errors
    /// When there are no tokens, an id is outside the vocabulary, or the tokens do not fit into context or cache; when the pass
    /// [stops](Pass::stopping_at) at a block that is not there, or, with a cache, at another one than the passes before it, which have left
    /// the layers from there on empty; when a pass in training has a cache; and when the pass is [ended](candle_gpt2_kernels::interruptible). The cache then holds what it held before.
    pub fn forward_with(
        &self,
        ids: &Tensor,
        cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        self.run(cache, pass, |cache, pass| {
            let past_lengths = cache.as_deref().map_or(&[][..], Gpt2Cache::lengths);
            let x = self.embeddings.forward(ids, past_lengths, pass)?; // (B, T, C)
            self.blocks_from(0, x, cache, pass)
        })
    }

    /// What comes after the embeddings, from block `first` on.
    pub(crate) fn blocks_from(
        &self,
        first: usize,
        mut x: Tensor,
        mut cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        if let Some(found) =
            cache.as_deref().map(Gpt2Cache::layer_count).filter(|found| *found != self.blocks.len())
        {
            return Err(ModelError::CacheLayers { expected: self.blocks.len(), found }.into());
        }
        if let Some(states) = pass.encoder_states() {
            check_encoder_states(&self.config, states, x.dim(0)?)?;
        }
        let n_layer = self.blocks.len();
        let stop = pass.stop_at_layer();
        let end = stop.unwrap_or(n_layer);
        if end > n_layer {
            return Err(ModelError::NoSuchBlock { layer: end, n_layer }.into());
        }
        if cache.as_deref().is_some_and(|cache| end == 0 || !cache.is_filled_to(end)) {
            return Err(ModelError::StopWithCache.into());
        }
        for (layer, block) in self.blocks.iter().enumerate().take(end).skip(first) {
            // The kernels of a GPU do not check whether the pass has been ended.
            check_interrupted()?;
            pass.enter_layer(Some(layer));
            x = if pass.is_recomputing() && cache.is_none() {
                let block = block.clone();
                pass.recompute(&x, move |x, pass| block.forward(x, None, pass))?
            } else {
                block.forward(&x, cache.as_deref_mut().and_then(|cache| cache.layer(layer)), pass)?
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

    /// Runs `compute` on the device of the model; if the pass has no observer, the model's own is used. After an error the cache
    /// holds what it held before. Calls may be nested: the inner one changes nothing more.
    pub(crate) fn run(
        &self,
        cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
        compute: impl FnOnce(Option<&mut Gpt2Cache>, &mut Pass) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let compute = || Gpt2Cache::restoring(cache, |cache| self.watched(pass, |pass| compute(cache, pass)));
        using(self.device(), || rounded_to_nearest(compute))
    }
}

/// The positions whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsFor {
    /// Every token: scoring, training.
    EveryToken,
    /// The last token of each row: generation. The head is then computed for one position only.
    LastToken,
    /// The tokens from `first` on, `count` of them, of each row: scoring in pieces, whose logits take less memory.
    Tokens {
        /// The first token.
        first: usize,
        /// How many tokens.
        count: usize,
    },
}

/// GPT-2 with its output head: token ids to logits over the vocabulary.
#[derive(Debug, Clone)]
#[doc(alias("GPT2LMHeadModel", "GPT", "lm_head"))]
pub struct Gpt2LMHeadModel {
    pub(crate) transformer: Gpt2Model,
    pub(crate) lm_head: Linear,
    pub(crate) kv_dtype: KvDType,
    pub(crate) step_recorder: Option<StepRecorder>,
}

impl Gpt2LMHeadModel {
    /// The model from its parameters; the head is `lm_head.weight`, or the token embedding if it is tied.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        let transformer = Gpt2Model::load(config, vb.clone())?;
        let lm_head = match config.tie_word_embeddings {
            true => transformer.embeddings.wte.clone(),
            // Whatever head the configuration names: the class is asked for by its name.
            false => {
                let with_head = Gpt2Config { head: HeadKind::LanguageModel, ..config.clone() };
                Layers::outside_blocks(&with_head, vb).linear("lm_head")?
            }
        };
        let kv_dtype = lm_head.weight().kept_dtype().into();
        Ok(Self { transformer, lm_head, kv_dtype, step_recorder: None })
    }

    /// Logits of the next token after each token, without dropout and without a cache. Gradients flow.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, V)`.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward`].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_with(ids, LogitsFor::EveryToken, None, &mut Pass::inference())
    }

    /// The same for some of the tokens, with a cache, in training, or observed.
    ///
    /// # Shapes
    /// `ids` `(B, T)` of u32; returns `(B, T, V)` for [`LogitsFor::EveryToken`], `(B, 1, V)` for
    /// [`LogitsFor::LastToken`], `(B, count, V)` for [`LogitsFor::Tokens`]; `(B, T, C)` of a pass that [stops](Pass::stopping_at)
    /// before the head.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward_with`].
    pub fn forward_with(
        &self,
        ids: &Tensor,
        logits_for: LogitsFor,
        mut cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        // On a GPU the kernels of a step of a few tokens are recorded once and replayed; None if this is no such step.
        if let (Some(recorder), Some(cache)) = (&self.step_recorder, cache.as_deref_mut())
            && let Some(logits) = recorder.step(self, ids, logits_for, cache, pass)?
        {
            return Ok(logits);
        }
        self.transformer.run(cache, pass, |cache, pass| {
            let hidden_states = self.transformer.forward_with(ids, cache, pass)?; // (B, T, C)
            if pass.stop_at_layer().is_some() {
                return Ok(hidden_states);
            }
            self.shown_logits(&hidden_states, logits_for, pass)
        })
    }

    /// The output head alone, on hidden states of [`Gpt2Model::forward`].
    ///
    /// # Shapes
    /// `hidden_states` `(B, T, C)`; returns what [`Gpt2LMHeadModel::forward_with`] does.
    ///
    /// # Errors
    /// If the width does not match, or the requested tokens are out of range.
    pub fn head(&self, hidden_states: &Tensor, logits_for: LogitsFor) -> Result<Tensor> {
        self.transformer
            .run(None, &mut Pass::inference(), |_, pass| self.shown_logits(hidden_states, logits_for, pass))
    }

    /// Logits, shown to the observer of the pass.
    pub(crate) fn shown_logits(
        &self,
        hidden_states: &Tensor,
        logits_for: LogitsFor,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let tokens = match logits_for {
            LogitsFor::EveryToken => None,
            LogitsFor::LastToken => Some((hidden_states.dim(TOKEN_DIM)?.saturating_sub(1), 1)),
            LogitsFor::Tokens { first, count } => Some((first, count)),
        };
        let logits = match tokens {
            Some((first, count)) => self.lm_head.forward(&hidden_states.narrow(TOKEN_DIM, first, count)?)?,
            None => self.lm_head.forward(hidden_states)?,
        }; // (B, count, V)
        pass.show(SiteKind::Logits, logits)
    }
}
