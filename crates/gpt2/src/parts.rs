//! Accessors for the parts of a model, parameter sizes, and constructors of caches.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_attention::{FeedForward, MultiHeadAttention};
use candle_gpt2_kernels::{KvDType, LayerNorm, Linear, ParameterSize};

use crate::{Block, CrossAttention, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvPool};

impl Block {
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
        self.ln_1.size() + self.attn.size() + cross_attention + self.ln_2.size() + self.mlp.size()
    }
}

impl Gpt2Model {
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
