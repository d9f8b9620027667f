//! The parts of a model, for those who read or count them, and its caches.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_attention::{FeedForward, MultiHeadAttention};
use candle_gpt2_kernels::{KvDType, LayerNorm, Linear, ParameterSize};

use crate::{Block, CrossAttention, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvPool};

impl Block {
    /// The norm before attention.
    pub fn ln_1(&self) -> &LayerNorm {
        &self.ln_1
    }

    /// Attention.
    pub fn attn(&self) -> &MultiHeadAttention {
        &self.attn
    }

    /// Attention to encoder hidden states, if the model has it.
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

    fn size(&self) -> ParameterSize {
        let cross_attention = self.cross_attention.iter().map(CrossAttention::size).sum();
        self.ln_1.size() + self.attn.size() + cross_attention + self.ln_2.size() + self.mlp.size()
    }
}

impl Gpt2Model {
    /// The token embeddings, `(V, C)`.
    pub fn wte(&self) -> &Linear {
        &self.embeddings.wte
    }

    /// The position embeddings, `(n_positions, C)`.
    pub fn wpe(&self) -> &Tensor {
        &self.embeddings.wpe
    }

    /// The blocks, first to last.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The final norm.
    pub fn ln_f(&self) -> &LayerNorm {
        &self.ln_f
    }

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The type of the activations: that in which layer norms and position embeddings are held.
    pub fn dtype(&self) -> DType {
        self.embeddings.wpe.dtype()
    }

    /// The device that holds the model.
    pub fn device(&self) -> &Device {
        self.embeddings.wpe.device()
    }

    /// The size of the parameters.
    pub fn size(&self) -> ParameterSize {
        let blocks = self.blocks.iter().map(Block::size).sum();
        self.embeddings.wte.size() + (&self.embeddings.wpe).into() + blocks + self.ln_f.size()
    }
}

impl Gpt2LMHeadModel {
    /// The embedding of a token without its position, `(C)`.
    ///
    /// # Errors
    /// When it is outside the vocabulary.
    pub fn token_embedding(&self, id: u32) -> Result<Tensor> {
        self.transformer.embeddings.wte.embedding(&Tensor::new(&[id], self.device())?)?.squeeze(0)
    }

    /// The output head: its weight is the token embedding's if the head is tied.
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

    /// The size of the parameters; a tied head's are the token embedding's, and count once.
    pub fn size(&self) -> ParameterSize {
        let size = self.transformer.size();
        if self.config().tie_word_embeddings { size } else { size + self.lm_head.size() }
    }

    /// Number of distinct parameters, counted in the tensors the model holds.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// Bytes that the parameters take in memory, each once, in the types and the layout in which the model holds them.
    pub fn weight_bytes(&self) -> usize {
        self.size().bytes
    }
}

impl Gpt2LMHeadModel {
    /// The type of the keys and values in the caches of this model. By default f32 beside weights in f32, and f16 beside all
    /// others: rounding keys and values to 11 bits loses no more than rounding weights to 11 bits or fewer, and a long
    /// context is read in half the time. f16 ends at 65,504: a model with larger keys or values needs f32.
    pub fn kv_dtype(&self) -> KvDType {
        self.kv_dtype
    }

    /// The same model with keys and values of another type.
    pub fn with_kv_dtype(mut self, kv_dtype: impl Into<KvDType>) -> Self {
        self.kv_dtype = kv_dtype.into();
        self
    }

    /// An empty cache for `batch` texts of up to `capacity` tokens each.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<Gpt2Cache> {
        Gpt2Cache::new(self.config(), batch, capacity, self.kv_dtype, self.device())
    }

    /// Memory for the keys and values of `tokens` tokens, which caches share.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new_pool(&self, tokens: usize) -> Result<KvPool> {
        KvPool::new(self.config(), tokens, self.kv_dtype, self.device())
    }
}
