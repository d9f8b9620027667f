//! Construction of models from parts, accessors for the parts, and their sizes.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_attention::{FeedForward, KvCache, MultiHeadAttention, Pass, SiteKind};
use candle_gpt2_kernels::{KvDType, LayerNorm, Linear, ParameterSize, add};

use crate::embeddings::Embeddings;
use crate::sublayer::{OwnLayers, Sublayer};
use crate::{
    Block, CrossAttention, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvPool, LogitsFor, ModelError,
};

impl Block {
    /// Creates a block from its parts, without dropout and cross-attention.
    pub fn new(ln_1: LayerNorm, attn: MultiHeadAttention, ln_2: LayerNorm, mlp: FeedForward) -> Self {
        let own = OwnLayers::default();
        Self { ln_1, attn, cross_attention: None, ln_2, mlp, own, resid_pdrop: 0.0 }
    }

    /// Sets the dropout rate of the attention's and the MLP's output in training.
    pub fn with_dropout(mut self, rate: f64) -> Self {
        self.resid_pdrop = rate;
        self
    }

    /// Replaces the attention; [`Block::attn`] still returns the layer before.
    pub fn with_attention(mut self, attention: Arc<dyn Sublayer>) -> Self {
        self.own.attention = Some(attention);
        self
    }

    /// Replaces the MLP; [`Block::mlp`] still returns the layer before.
    pub fn with_mlp(mut self, mlp: Arc<dyn Sublayer>) -> Self {
        self.own.mlp = Some(mlp);
        self
    }

    /// Computes `x + dropout(own(normed))`.
    pub(crate) fn add_own(
        &self,
        own: &Arc<dyn Sublayer>,
        kind: SiteKind,
        x: &Tensor,
        normed: &Tensor,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let output = own.forward(normed, cache, pass)?;
        if output.dims() != x.dims() {
            return Err(
                ModelError::OwnLayer { expected: x.dims().to_vec(), found: output.dims().to_vec() }.into()
            );
        }
        let output = pass.show(kind, output)?;
        add(x, &pass.dropout(output, self.resid_pdrop)?)
    }

    /// Layer norm before attention.
    pub fn ln_1(&self) -> &LayerNorm {
        &self.ln_1
    }

    /// Self-attention.
    pub fn attn(&self) -> &MultiHeadAttention {
        &self.attn
    }

    /// Cross-attention to encoder hidden states, if the model has it.
    pub fn cross_attention(&self) -> Option<&CrossAttention> {
        self.cross_attention.as_ref()
    }

    /// Layer norm before the MLP.
    pub fn ln_2(&self) -> &LayerNorm {
        &self.ln_2
    }

    /// MLP.
    pub fn mlp(&self) -> &FeedForward {
        &self.mlp
    }

    fn size(&self) -> ParameterSize {
        let cross_attention = self.cross_attention.iter().map(CrossAttention::size).sum();
        let attention = self.own.attention.as_ref().map_or_else(|| self.attn.size(), |own| own.size());
        let mlp = self.own.mlp.as_ref().map_or_else(|| self.mlp.size(), |own| own.size());
        self.ln_1.size() + attention + cross_attention + self.ln_2.size() + mlp
    }
}

impl Gpt2Model {
    /// Creates a model from its parts. [`Sublayer`] has an example.
    ///
    /// # Shapes
    /// `wte` `(vocab_size, n_embd)`; `wpe` `(n_positions, n_embd)`; one block for each of `n_layer`.
    ///
    /// # Errors
    /// If the configuration is invalid or a part does not match it.
    pub fn new(
        config: &Gpt2Config,
        wte: Linear,
        wpe: Tensor,
        blocks: Vec<Block>,
        ln_f: LayerNorm,
    ) -> Result<Self> {
        config.check()?;
        let width = config.n_embd;
        let check = |part, expected: &[usize], found: &[usize]| match expected == found {
            true => Ok(()),
            false => Err(ModelError::Part { part, expected: expected.to_vec(), found: found.to_vec() }),
        };
        check("wte", &[config.vocab_size, width], &[wte.out_features(), wte.in_features()])?;
        check("wpe", &[config.n_positions, width], wpe.dims())?;
        check("ln_f", &[width], &[ln_f.width()])?;
        check("blocks", &[config.n_layer], &[blocks.len()])?;
        for block in &blocks {
            let has_cross_attention = block.cross_attention.is_some();
            check("a block's ln_1", &[width], &[block.ln_1.width()])?;
            check("a block's ln_2", &[width], &[block.ln_2.width()])?;
            check("a block's attention heads", &[config.n_head], &[block.attn.num_heads()])?;
            check(
                "a block's cross-attention layers",
                &[usize::from(config.add_cross_attention)],
                &[usize::from(has_cross_attention)],
            )?;
        }
        let embeddings = Embeddings { wte, wpe, embd_pdrop: config.embd_pdrop };
        Ok(Self { embeddings, blocks, ln_f, config: config.clone(), watcher: None })
    }

    /// Token embedding, `(V, C)`.
    pub fn wte(&self) -> &Linear {
        &self.embeddings.wte
    }

    /// Position embedding, `(n_positions, C)`.
    pub fn wpe(&self) -> &Tensor {
        &self.embeddings.wpe
    }

    /// Blocks, first to last.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Final layer norm.
    pub fn ln_f(&self) -> &LayerNorm {
        &self.ln_f
    }

    /// Configuration that the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Dtype of the activations, which is also the dtype of the layer norms and position embeddings.
    pub fn dtype(&self) -> DType {
        self.embeddings.wpe.dtype()
    }

    /// Device of the model's tensors.
    pub fn device(&self) -> &Device {
        self.embeddings.wpe.device()
    }

    /// Size of all parameters.
    pub fn size(&self) -> ParameterSize {
        let blocks = self.blocks.iter().map(Block::size).sum();
        self.embeddings.wte.size() + (&self.embeddings.wpe).into() + blocks + self.ln_f.size()
    }
}

impl Gpt2LMHeadModel {
    /// Creates a model from its parts, with a head of your own, which may have a bias.
    ///
    /// For a tied head, pass a clone of the token embedding. [`Sublayer`] has an example.
    ///
    /// # Shapes
    /// `lm_head` maps `n_embd` to `vocab_size`.
    ///
    /// # Errors
    /// If the head has the wrong shape.
    pub fn new(transformer: Gpt2Model, lm_head: Linear) -> Result<Self> {
        let expected = vec![transformer.config.vocab_size, transformer.config.n_embd];
        let found = vec![lm_head.out_features(), lm_head.in_features()];
        if found != expected {
            return Err(ModelError::Part { part: "lm_head", expected, found }.into());
        }
        let kv_dtype = lm_head.weight().kept_dtype().into();
        Ok(Self { transformer, lm_head, kv_dtype, step_recorder: None })
    }

    /// Computes only the output head, on hidden states from [`Gpt2Model::forward`].
    ///
    /// # Shapes
    /// `hidden_states` `(B, T, C)`; returns the shape of [`Gpt2LMHeadModel::forward_with`] in a pass without
    /// packed rows.
    ///
    /// # Errors
    /// If the hidden size does not match, or the requested tokens are out of range.
    pub fn head(&self, hidden_states: &Tensor, logits_for: LogitsFor) -> Result<Tensor> {
        self.transformer
            .run(None, &mut Pass::inference(), |_, pass| self.shown_logits(hidden_states, logits_for, pass))
    }

    /// Returns the embedding of a token without its position, `(C)`.
    ///
    /// # Errors
    /// If the ID is outside the vocabulary.
    pub fn token_embedding(&self, id: u32) -> Result<Tensor> {
        self.transformer.embeddings.of_tokens(&Tensor::new(&[id], self.device())?)?.squeeze(0)
    }

    /// Output head; a tied head shares its weight with the token embedding.
    pub fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// Model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// Configuration that the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        &self.transformer.config
    }

    /// Dtype of the activations and logits.
    ///
    /// Layer norms and position embeddings have the same dtype.
    pub fn dtype(&self) -> DType {
        self.transformer.dtype()
    }

    /// Device of the model's tensors.
    pub fn device(&self) -> &Device {
        self.transformer.device()
    }

    /// Size of all parameters; the weight of a tied head counts once.
    pub fn size(&self) -> ParameterSize {
        let size = self.transformer.size();
        if self.config().tie_word_embeddings { size } else { size + self.lm_head.size() }
    }

    /// Number of distinct parameters, counted in the model's tensors.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// Memory of the parameters in bytes; each parameter counts once.
    ///
    /// The sizes reflect the actual dtypes and layouts of the model's tensors.
    pub fn weight_bytes(&self) -> usize {
        self.size().bytes
    }
}

impl Gpt2LMHeadModel {
    /// Storage type of keys and values in this model's caches.
    ///
    /// The default is the dtype of a dense output head, f32 for a packed f32 head, and f16 for any other
    /// packed head. Rounding keys and values to 11 bits loses no more than rounding the weights to 11 bits or
    /// fewer. Reading a long context then takes half the time. The largest f16 number is 65,504, so a model
    /// with larger keys or values needs f32.
    pub fn kv_dtype(&self) -> KvDType {
        self.kv_dtype
    }

    /// Sets the storage type of keys and values.
    pub fn with_kv_dtype(mut self, kv_dtype: impl Into<KvDType>) -> Self {
        self.kv_dtype = kv_dtype.into();
        self
    }

    /// Creates an empty cache for `batch` sequences of up to `capacity` tokens each.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<Gpt2Cache> {
        Gpt2Cache::new(self.config(), batch, capacity, self.kv_dtype, self.device())
    }

    /// Allocates a pool that caches share, with storage for the keys and values of `tokens` tokens.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn new_pool(&self, tokens: usize) -> Result<KvPool> {
        KvPool::new(self.config(), tokens, self.kv_dtype, self.device())
    }
}
