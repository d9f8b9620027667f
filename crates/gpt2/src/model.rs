//! GPT-2, top to bottom: embeddings, blocks of attention and MLP on a residual stream, final norm, output head.
//!
//! ```text
//! x = wte[ids] + wpe[positions]                  token and position embeddings
//! x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))   n_layer times; cross-attention between them where a model has it
//! logits = ln_f(x) · lm_headᵀ                    lm_head is wte where the head is tied
//! ```
//!
//! Source: OpenAI's `src/model.py`; the numbers are those of transformers' `modeling_gpt2.py`. The same file serves
//! training and inference on every device: what differs sits in the ops it calls and in the [`Pass`].
//!
//! Letters in shapes: `B` batch, `T` tokens, `C` width (`n_embd`), `V` vocabulary.
//!
//! What a model shows to the observer of a pass is listed in [`SiteKind`](candle_gpt2_attention::SiteKind).

use std::fmt;
use std::iter::repeat;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_attention::{
    FeedForward, KvCache, KvDType, MultiHeadAttention, Observer, Pass, QkvProjection, Site, SiteKind,
};
use candle_gpt2_kernels::{LayerNorm, Linear, ParameterSource, add, add_positions, go_on, using};
use candle_nn::Init;

use crate::cross_attention::{CrossAttention, check_encoder_states};
use crate::parameters::table;
use crate::recorder::StepRecorder;
use crate::{Gpt2Cache, Gpt2Config, ModelError};

/// Axis of the tokens in a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// A block: two parts, each added to the residual stream after its own layer norm. [`Gpt2Model::blocks`] has those of a model.
#[derive(Debug, Clone)]
pub struct Block {
    ln_1: LayerNorm,
    attn: MultiHeadAttention,
    cross_attention: Option<CrossAttention>,
    ln_2: LayerNorm,
    mlp: FeedForward,
    resid_pdrop: f64,
}

impl Block {
    /// Block `layer`, counted from 0, from its parameters below the path of `vb`, which is the one of `ln_1`, `attn` and the others.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape, or the heads do not divide the width.
    pub fn load(config: &Gpt2Config, layer: usize, vb: impl ParameterSource) -> Result<Self> {
        let (width, inner) = (config.n_embd, config.inner_width());
        let norm = |name: &str| LayerNorm::load(width, config.layer_norm_epsilon, vb.below(name));
        let linear = |input, output, name: &str| {
            Linear::load_conv1d(input, output, config.deviation(name), vb.below(name))
        };
        let c_attn = QkvProjection::Fused(linear(width, 3 * width, "attn.c_attn")?);
        Ok(Self {
            ln_1: norm("ln_1")?,
            attn: MultiHeadAttention::new(c_attn, linear(width, width, "attn.c_proj")?, config.n_head)?
                .with_scale(config.attention_scale(layer))
                .with_dropout(config.attn_pdrop),
            cross_attention: match config.add_cross_attention {
                true => Some(CrossAttention::load(config, layer, vb.clone())?),
                false => None,
            },
            ln_2: norm("ln_2")?,
            mlp: FeedForward::new(
                linear(width, inner, "mlp.c_fc")?,
                linear(inner, width, "mlp.c_proj")?,
                config.activation_function,
            )?,
            resid_pdrop: config.resid_pdrop,
        })
    }

    /// `(B, T, C)` to `(B, T, C)`.
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

    /// The norm before attention.
    pub fn ln_1(&self) -> &LayerNorm {
        &self.ln_1
    }

    /// Attention.
    pub fn attn(&self) -> &MultiHeadAttention {
        &self.attn
    }

    /// Attention to an encoder's states, where the model has it.
    pub fn cross_attention(&self) -> Option<&CrossAttention> {
        self.cross_attention.as_ref()
    }

    /// The norm before the MLP.
    pub fn ln_2(&self) -> &LayerNorm {
        &self.ln_2
    }

    /// The MLP.
    pub fn mlp(&self) -> &FeedForward {
        &self.mlp
    }

    fn parameter_count(&self) -> usize {
        self.ln_1.parameter_count()
            + self.attn.parameter_count()
            + self.cross_attention.as_ref().map_or(0, CrossAttention::parameter_count)
            + self.ln_2.parameter_count()
            + self.mlp.parameter_count()
    }

    fn bytes(&self) -> usize {
        let cross_attention = self.cross_attention.as_ref().map_or(0, CrossAttention::bytes);
        self.ln_1.bytes() + self.attn.bytes() + cross_attention + self.ln_2.bytes() + self.mlp.bytes()
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
pub struct Gpt2Model {
    wte: Linear,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    config: Gpt2Config,
    watcher: Option<Watcher>,
}

impl Gpt2Model {
    /// The model from its parameters, named and laid out as in a checkpoint of transformers, with or without `transformer.` before
    /// their names. An empty `VarMap` begins them as GPT-2 does.
    ///
    /// # Errors
    /// When the configuration is no model's, or a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        config.check()?;
        let below = vb.below("transformer");
        let vb = if below.contains("wte.weight") { below } else { vb };
        let blocks = (0..config.n_layer).map(|layer| Block::load(config, layer, vb.below("h").below(layer)));
        let positions = Init::Randn { mean: 0.0, stdev: config.initializer_range };
        Ok(Self {
            wte: table(config, config.vocab_size, vb.below("wte"))?,
            wpe: vb.parameter((config.n_positions, config.n_embd), "wpe.weight", positions)?,
            blocks: blocks.collect::<Result<_>>()?,
            ln_f: LayerNorm::load(config.n_embd, config.layer_norm_epsilon, vb.below("ln_f"))?,
            config: config.clone(),
            watcher: None,
        })
    }

    /// Hidden states after the final norm, of whole texts in inference.
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
    /// tokens, and the cache grows by `T` (but see [`Pass::after`] and [`Pass::of_rows`]).
    ///
    /// # Errors
    /// When there are no tokens, an id is outside the vocabulary, or the tokens do not fit into context or cache; and when the
    /// pass is [ended](candle_gpt2_kernels::interruptible). The cache then holds what it held before.
    pub fn forward_with(
        &self,
        ids: &Tensor,
        cache: Option<&mut Gpt2Cache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        using(self.device(), || {
            or_as_before(cache, |cache| {
                self.watched(pass, |pass| {
                    let x = self.embed(ids, cache.as_deref().map_or(&[], Gpt2Cache::lengths), pass)?;
                    self.blocks_from(0, x, cache, pass)
                })
            })
        })
    }

    /// The same of rows of any lengths, which lie one after the other in one text without padding, each as if it were alone.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(1, T_1 + … + T_R, C)`.
    ///
    /// # Errors
    /// When there is no row, a row is empty or longer than the context, or an id is outside the vocabulary.
    pub fn forward_rows(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let lengths: Arc<[usize]> = rows.iter().map(|row| row.as_ref().len()).collect();
        let ids: Vec<u32> = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
        let tokens = ids.len();
        let ids = Tensor::from_vec(ids, (1, tokens), self.wpe.device())?;
        self.forward_with(&ids, None, &mut pass.reborrow().of_rows(lengths))
    }

    /// The same from the input of block `layer` on, as [`SiteKind::ResidPre`] shows it, without a cache.
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
        using(self.device(), || {
            self.watched(pass, |pass| {
                let (batch, tokens, _) = x.dims3()?;
                pass.begin(&vec![0; batch], tokens);
                self.blocks_from(layer, x, None, pass)
            })
        })
    }

    fn blocks_from(
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
        for (layer, block) in self.blocks.iter().enumerate().skip(first) {
            // On a GPU nobody else asks.
            go_on()?;
            pass.enter_layer(Some(layer));
            x = if pass.is_recomputing() && cache.is_none() {
                let block = block.clone();
                pass.recompute(&x, move |x, pass| block.forward(x, None, pass))?
            } else {
                block.forward(&x, cache.as_deref_mut().and_then(|cache| cache.layer(layer)), pass)?
            };
        }
        pass.enter_layer(None);
        let kinds = [SiteKind::LnFinalScale, SiteKind::LnFinalNormalized];
        let normed = pass.norm(&self.ln_f, &x, kinds)?;
        pass.show(SiteKind::FinalNorm, normed)
    }

    /// Computes with the observer of the model where the pass has none.
    fn watched<T>(&self, pass: &mut Pass, compute: impl FnOnce(&mut Pass) -> Result<T>) -> Result<T> {
        match &self.watcher {
            Some(Watcher(observer)) if !pass.is_observed() => {
                let mut observer = observer.lock().unwrap_or_else(PoisonError::into_inner);
                compute(&mut pass.watched(&mut *observer))
            }
            _ => compute(pass),
        }
    }

    /// The blocks, first to last.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The final norm.
    pub fn ln_f(&self) -> &LayerNorm {
        &self.ln_f
    }

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

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The type of the activations: that in which layer norms and position embeddings are held.
    pub fn dtype(&self) -> DType {
        self.wpe.dtype()
    }

    /// The device that holds the model.
    pub fn device(&self) -> &Device {
        self.wpe.device()
    }

    /// Token embeddings plus position embeddings; row `b` starts at position `past_lengths[b]`.
    fn embed(&self, ids: &Tensor, past_lengths: &[usize], pass: &mut Pass) -> Result<Tensor> {
        let (batch, tokens) = ids.dims2()?;
        let n_positions = self.config.n_positions;
        let (past, no_past) = (past_lengths.iter().copied().max().unwrap_or(0), vec![0; batch]);
        if tokens == 0 || batch == 0 {
            return Err(ModelError::NoTokens.into());
        }
        if let Some(rows) = pass.rows() {
            self.expect_rows(rows, past_lengths, (batch, tokens))?;
        } else if past + tokens > n_positions {
            return Err(ModelError::ContextExceeded { past, added: tokens, n_positions }.into());
        }
        pass.enter_layer(None);
        pass.begin(if past_lengths.is_empty() { &no_past } else { past_lengths }, tokens);
        let token_embeddings = match pass.lengths() {
            Some(_) => self.wte.embedding_on_device(ids)?,
            None => self.wte.embedding(ids)?,
        }; // (B, T, C)
        let x = if pass.wants(SiteKind::Embed) || pass.wants(SiteKind::PosEmbed) {
            // Somebody wants both apart.
            let zeros = token_embeddings.zeros_like()?;
            let positions = self.add_positions(&zeros, past_lengths, pass)?;
            (pass.show(SiteKind::Embed, token_embeddings)? + pass.show(SiteKind::PosEmbed, positions)?)?
        } else {
            self.add_positions(&token_embeddings, past_lengths, pass)?
        };
        let x = pass.cast(x)?;
        pass.dropout(x, self.config.embd_pdrop)
    }

    /// `x` `(B, T, C)` plus the embeddings of its positions.
    fn add_positions(&self, x: &Tensor, past_lengths: &[usize], pass: &Pass) -> Result<Tensor> {
        let (tokens, past) = (x.dim(TOKEN_DIM)?, past_lengths.iter().copied().max().unwrap_or(0));
        if let Some(lengths) = pass.lengths() {
            x + self.wpe.embedding(lengths)?.unsqueeze(TOKEN_DIM)?
        } else if let Some(rows) = pass.rows() {
            let mut positions = Vec::with_capacity(tokens);
            let past_lengths = past_lengths.iter().copied().chain(repeat(0));
            for (length, past) in rows.iter().zip(past_lengths) {
                let [first, end] = [past, past + length].map(u32::try_from);
                positions
                    .extend(first.map_err(candle_core::Error::wrap)?..end.map_err(candle_core::Error::wrap)?);
            }
            let positions = Tensor::from_vec(positions, (1, tokens), x.device())?;
            add(x, &Linear::new(self.wpe.clone(), None)?.embedding_on_device(&positions)?)
        } else if past_lengths.iter().all(|length| *length == past) {
            add_positions(x, &self.wpe, past)
        } else {
            let rows = past_lengths.iter().map(|length| self.wpe.narrow(0, *length, tokens));
            x + Tensor::stack(&rows.collect::<Result<Vec<_>>>()?, 0)?
        }
    }

    /// Refuses rows that are not the one text of a pass, or that do not fit into the context after those of the cache.
    fn expect_rows(
        &self,
        rows: &[usize],
        past_lengths: &[usize],
        (batch, tokens): (usize, usize),
    ) -> Result<()> {
        let n_positions = self.config.n_positions;
        if let Some(row) = rows.iter().position(|length| !(1..=n_positions).contains(length)) {
            return Err(ModelError::RowLength { row, tokens: rows[row], n_positions }.into());
        }
        let expected = rows.iter().sum();
        if (batch, tokens) != (1, expected) {
            return Err(ModelError::NotTheRows { expected, found: (batch, tokens) }.into());
        }
        let mut rows = past_lengths.iter().copied().zip(rows.iter().copied());
        if let Some((past, added)) = rows.find(|(past, added)| past + added > n_positions) {
            return Err(ModelError::ContextExceeded { past, added, n_positions }.into());
        }
        Ok(())
    }

    pub(crate) fn parameter_count(&self) -> usize {
        self.wte.parameter_count()
            + self.wpe.elem_count()
            + self.blocks.iter().map(Block::parameter_count).sum::<usize>()
            + self.ln_f.parameter_count()
    }

    pub(crate) fn bytes(&self) -> usize {
        let positions = self.wpe.elem_count() * self.wpe.dtype().size_in_bytes();
        let blocks = self.blocks.iter().map(Block::bytes).sum::<usize>();
        self.wte.bytes() + positions + blocks + self.ln_f.bytes()
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
pub struct Gpt2LMHeadModel {
    transformer: Gpt2Model,
    lm_head: Linear,
    pub(crate) kv_dtype: KvDType,
    pub(crate) step_recorder: Option<StepRecorder>,
}

impl Gpt2LMHeadModel {
    /// The model from its parameters; the head is `lm_head.weight`, or the token embedding where it is tied.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        let transformer = Gpt2Model::load(config, vb.clone())?;
        let lm_head = match config.tie_word_embeddings {
            true => transformer.wte.clone(),
            false => table(config, config.vocab_size, vb.below("lm_head"))?,
        };
        let kv_dtype = lm_head.weight().kept_dtype().into();
        Ok(Self { transformer, lm_head, kv_dtype, step_recorder: None })
    }

    /// Logits of the next token after each token, of whole texts in inference.
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
    /// [`LogitsFor::LastToken`], `(B, count, V)` for [`LogitsFor::Tokens`].
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
        if let (Some(recorder), Some(cache)) = (&self.step_recorder, cache.as_deref_mut())
            && let Some(logits) = recorder.step(self, ids, logits_for, cache, pass)?
        {
            return Ok(logits);
        }
        using(self.device(), || {
            or_as_before(cache, |cache| {
                self.transformer.watched(pass, |pass| {
                    let hidden_states = self.transformer.forward_with(ids, cache, pass)?; // (B, T, C)
                    pass.show(SiteKind::Logits, self.apply_head(&hidden_states, logits_for)?)
                })
            })
        })
    }

    /// Logits from the input of block `layer` on, see [`Gpt2Model::forward_from`].
    ///
    /// # Shapes
    /// `x` `(B, T, C)`; returns what [`Gpt2LMHeadModel::forward_with`] does.
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
        using(self.device(), || {
            self.transformer.watched(pass, |pass| {
                let hidden_states = self.transformer.forward_from(layer, x, pass)?;
                pass.show(SiteKind::Logits, self.apply_head(&hidden_states, logits_for)?)
            })
        })
    }

    /// The same model, of which `observer` sees every pass that has no observer of its own: in generation, scoring and all that
    /// runs a model.
    pub fn observed_by(mut self, observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        self.transformer.watcher = Some(Watcher(observer));
        self
    }

    /// The same model, which attends to these states of an encoder in every pass that has none of its own
    /// ([`Pass::attending_to`]): in generation, scoring and all that runs a model. Each block's keys and values of them are computed
    /// here, once; gradients do not lead into them.
    ///
    /// # Shapes
    /// `states` `(1, S, C)`, for all rows alike.
    ///
    /// # Errors
    /// When the model has no cross-attention, or the shape is another.
    pub fn with_encoder_states(mut self, states: &Tensor) -> Result<Self> {
        check_encoder_states(self.config(), states, 1)?;
        let states = states.detach().to_device(self.device())?.to_dtype(self.dtype())?;
        let blocks = self.transformer.blocks.iter_mut();
        blocks.filter_map(|block| block.cross_attention.as_mut()).try_for_each(|cross_attention| {
            go_on()?;
            cross_attention.attend_to(&states)
        })?;
        Ok(self)
    }

    /// Whether [`Gpt2LMHeadModel::with_encoder_states`] gave it states to attend to.
    pub fn has_encoder_states(&self) -> bool {
        let first = self.transformer.blocks.first().and_then(Block::cross_attention);
        first.is_some_and(CrossAttention::has_memory)
    }

    /// Whether [`Gpt2LMHeadModel::observed_by`] gave it an observer.
    pub fn is_observed(&self) -> bool {
        self.transformer.watcher.is_some()
    }

    /// The output head alone, on hidden states of [`Gpt2Model::forward`].
    ///
    /// # Shapes
    /// `hidden_states` `(B, T, C)`; returns what [`Gpt2LMHeadModel::forward_with`] does.
    ///
    /// # Errors
    /// When the width is another, or tokens are wanted that are not there.
    pub fn head(&self, hidden_states: &Tensor, logits_for: LogitsFor) -> Result<Tensor> {
        using(self.device(), || {
            self.transformer.watched(&mut Pass::inference(), |pass| {
                pass.show(SiteKind::Logits, self.apply_head(hidden_states, logits_for)?)
            })
        })
    }

    fn apply_head(&self, hidden_states: &Tensor, logits_for: LogitsFor) -> Result<Tensor> {
        let (first, count) = match logits_for {
            LogitsFor::EveryToken => return self.lm_head.forward(hidden_states), // (B, T, V)
            LogitsFor::LastToken => (hidden_states.dim(D::Minus2)?.saturating_sub(1), 1),
            LogitsFor::Tokens { first, count } => (first, count),
        };
        self.lm_head.forward(&hidden_states.narrow(TOKEN_DIM, first, count)?) // (B, count, V)
    }

    /// The embedding of a token without its position, `(C)`.
    ///
    /// # Errors
    /// When it is outside the vocabulary.
    pub fn token_embedding(&self, id: u32) -> Result<Tensor> {
        self.transformer.wte.embedding(&Tensor::new(&[id], self.device())?)?.squeeze(0)
    }

    /// The output head: its weight is the token embedding's where the head is tied.
    pub fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// The model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        &self.transformer.config
    }

    /// The type of the activations, and of logits: that in which layer norms and position embeddings are held.
    pub fn dtype(&self) -> DType {
        self.transformer.dtype()
    }

    /// The device that holds the model.
    pub fn device(&self) -> &Device {
        self.transformer.device()
    }

    /// Number of distinct parameters, counted in the tensors the model holds.
    pub fn parameter_count(&self) -> usize {
        let head = if self.config().tie_word_embeddings { 0 } else { self.lm_head.parameter_count() };
        self.transformer.parameter_count() + head
    }

    /// Bytes that the parameters take in memory, each once, in the types and the layout in which the model holds them.
    pub fn weight_bytes(&self) -> usize {
        let head = if self.config().tie_word_embeddings { 0 } else { self.lm_head.bytes() };
        self.transformer.bytes() + head
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

/// Sees every pass of a model.
#[derive(Clone)]
struct Watcher(Arc<Mutex<dyn Observer + Send>>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}

/// Computes with a cache, which after an error holds what it held before.
fn or_as_before(
    mut cache: Option<&mut Gpt2Cache>,
    compute: impl FnOnce(Option<&mut Gpt2Cache>) -> Result<Tensor>,
) -> Result<Tensor> {
    cache.as_deref().map_or(Ok(()), Gpt2Cache::expect_whole)?;
    let held = cache.as_deref().map(|cache| cache.lengths().to_vec());
    let computed = compute(cache.as_deref_mut());
    if let (Err(_), Some(cache), Some(held)) = (&computed, cache, held) {
        // Some blocks may have read what others have not.
        held.into_iter().enumerate().try_for_each(|(row, kept)| cache.truncate(row, kept))?;
    }
    computed
}
