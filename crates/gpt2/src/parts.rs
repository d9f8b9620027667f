//! The parts of a model, for those who read or count them.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_attention::{FeedForward, MultiHeadAttention};
use candle_gpt2_kernels::{LayerNorm, Linear, ParameterSize};

use crate::{Block, CrossAttention, Gpt2Config, Gpt2LMHeadModel, Gpt2Model};

impl Block {
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

    fn size(&self) -> ParameterSize {
        let cross_attention = self.cross_attention.iter().map(CrossAttention::size).sum();
        self.ln_1.size() + self.attn.size() + cross_attention + self.ln_2.size() + self.mlp.size()
    }
}

impl Gpt2Model {
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
