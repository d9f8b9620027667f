//! The original Transformer's encoder and decoder: post-layer-norm blocks with cross-attention.
//!
//! Source: "Attention Is All You Need" (arXiv:1706.03762, section 3). Each sublayer of a block computes
//! `LayerNorm(x + sublayer(x))`; GPT-2 instead normalizes before the sublayer. Parameter names and results
//! match PyTorch's `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` (`norm_first=False`).
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use candle_gpt2_attention::{Pass, transformer::{BlockConfig, EncoderDecoder, OutputHead}};
//! use candle_gpt2_kernels::{Activation, Linear};
//!
//! let config =
//!     BlockConfig { d_model: 6, num_heads: 3, d_feed_forward: 10, activation: Activation::Relu, dropout: 0.1 };
//! let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
//! let (model, head) = (EncoderDecoder::load(&config, 2, 1, vb.clone())?, OutputHead::new(Linear::load(6, 11, true, vb)?));
//!
//! let source = Tensor::ones((1, 5, 6), DType::F32, &Device::Cpu)?; // five tokens, embedded
//! let target = Tensor::ones((1, 4, 6), DType::F32, &Device::Cpu)?;
//! let mut pass = Pass::inference();
//! let memory = model.encode(&source, &mut pass)?;
//! let probabilities = head.forward(&model.decode(&target, &memory, &mut pass)?)?;
//! assert_eq!(probabilities.dims(), [1, 4, 11]);
//! # Ok::<(), candle_core::Error>(())
//! ```

use candle_core::{D, Result, Tensor};
use candle_gpt2_kernels::{Activation, LayerNorm, Linear, ParameterSource, add};
use candle_nn::ops::softmax;

use crate::{
    AttentionMask, FeedForward, MultiHeadAttention, MultiHeadAttentionConfig, Pass, ProjectionLayout,
};

/// PyTorch's default epsilon for layer norms.
const LAYER_NORM_EPSILON: f64 = 1e-5;

/// Sizes and options of a block.
#[derive(Debug, Clone)]
pub struct BlockConfig {
    /// Width of the token vectors.
    pub d_model: usize,
    /// Number of attention heads.
    pub num_heads: usize,
    /// Inner width of the feed-forward network.
    pub d_feed_forward: usize,
    /// Activation of the feed-forward network: ReLU in the paper, GELU in later models.
    pub activation: Activation,
    /// Dropout rate of every sublayer in training.
    pub dropout: f64,
}

impl BlockConfig {
    fn attention(&self, vb: impl ParameterSource) -> Result<MultiHeadAttention> {
        let config = MultiHeadAttentionConfig {
            qkv_bias: true,
            projection: ProjectionLayout::Fused,
            dropout: self.dropout,
            ..MultiHeadAttentionConfig::new(self.d_model, self.d_model, self.num_heads)
        };
        MultiHeadAttention::load(&config, vb)
    }

    fn feed_forward(&self, vb: impl ParameterSource) -> Result<FeedForward> {
        let expand = Linear::load(self.d_model, self.d_feed_forward, true, vb.below("linear1"))?;
        let contract = Linear::load(self.d_feed_forward, self.d_model, true, vb.below("linear2"))?;
        Ok(FeedForward::new(expand, contract, self.activation)?.with_inner_dropout(self.dropout))
    }

    fn norm(&self, vb: impl ParameterSource) -> Result<LayerNorm> {
        LayerNorm::load(self.d_model, LAYER_NORM_EPSILON, vb)
    }
}

/// Encoder block: self-attention, then feed-forward; [`EncoderDecoder`] stacks them.
#[derive(Debug, Clone)]
pub struct EncoderLayer {
    self_attn: MultiHeadAttention,
    feed_forward: FeedForward,
    norm1: LayerNorm,
    norm2: LayerNorm,
    dropout: f64,
}

impl EncoderLayer {
    /// Loads a block from `self_attn.…`, `linear1.…`, `linear2.…`, `norm1.…` and `norm2.…`.
    ///
    /// # Errors
    /// If the number of heads does not divide the width, or a parameter is missing or has the wrong shape.
    pub fn load(config: &BlockConfig, vb: impl ParameterSource) -> Result<Self> {
        Ok(Self {
            self_attn: config.attention(vb.below("self_attn"))?,
            feed_forward: config.feed_forward(vb.clone())?,
            norm1: config.norm(vb.below("norm1"))?,
            norm2: config.norm(vb.below("norm2"))?,
            dropout: config.dropout,
        })
    }

    /// Runs the block.
    ///
    /// # Shapes
    /// `x` `(B, T, d_model)`; returns the same shape.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask, pass: &mut Pass) -> Result<Tensor> {
        let x = self.norm1.forward(&self.self_attn.add_to(x, x, mask, None, self.dropout, pass)?)?;
        self.norm2.forward(&self.feed_forward.add_to(&x, &x, self.dropout, pass)?)
    }
}

/// Decoder block: masked self-attention, cross-attention to the encoder's output, then feed-forward.
///
/// [`EncoderDecoder`] stacks them.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    self_attn: MultiHeadAttention,
    multihead_attn: MultiHeadAttention,
    feed_forward: FeedForward,
    norm1: LayerNorm,
    norm2: LayerNorm,
    norm3: LayerNorm,
    dropout: f64,
}

impl DecoderLayer {
    /// Loads a block from its parameters.
    ///
    /// Their names are `self_attn.…`, `multihead_attn.…`, `linear1.…`, `linear2.…`, and `norm1.…` to
    /// `norm3.…`.
    ///
    /// # Errors
    /// If the number of heads does not divide the width, or a parameter is missing or has the wrong shape.
    pub fn load(config: &BlockConfig, vb: impl ParameterSource) -> Result<Self> {
        Ok(Self {
            self_attn: config.attention(vb.below("self_attn"))?,
            multihead_attn: config.attention(vb.below("multihead_attn"))?,
            feed_forward: config.feed_forward(vb.clone())?,
            norm1: config.norm(vb.below("norm1"))?,
            norm2: config.norm(vb.below("norm2"))?,
            norm3: config.norm(vb.below("norm3"))?,
            dropout: config.dropout,
        })
    }

    /// Runs the block: causal attention over `x`, full attention over `memory`.
    ///
    /// # Shapes
    /// `x` `(B, T, d_model)`, `memory` `(B, S, d_model)`; returns `(B, T, d_model)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward(&self, x: &Tensor, memory: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        let attended = self.self_attn.add_to(x, x, &AttentionMask::Causal, None, self.dropout, pass)?;
        let x = self.norm1.forward(&attended)?;
        let all = &AttentionMask::Bidirectional;
        let attended = self.multihead_attn.forward_with(&x, Some(memory), all, None, pass)?;
        let x = self.norm2.forward(&add(&x, &pass.dropout(attended, self.dropout)?)?)?;
        self.norm3.forward(&self.feed_forward.add_to(&x, &x, self.dropout, pass)?)
    }
}

/// Stack of encoder blocks, plus a stack of decoder blocks that attend to the encoder's output.
///
/// The stacks may have different depths.
#[derive(Debug, Clone)]
pub struct EncoderDecoder {
    encoder: Vec<EncoderLayer>,
    decoder: Vec<DecoderLayer>,
}

impl EncoderDecoder {
    /// Loads both stacks from `encoder.layers.{i}.…` and `decoder.layers.{i}.…`.
    ///
    /// # Errors
    /// If the number of heads does not divide the width, or a parameter is missing or has the wrong shape.
    pub fn load(
        config: &BlockConfig,
        encoder_layers: usize,
        decoder_layers: usize,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let (encoder, decoder) = (vb.below("encoder.layers"), vb.below("decoder.layers"));
        Ok(Self {
            encoder: (0..encoder_layers)
                .map(|layer| EncoderLayer::load(config, encoder.below(layer)))
                .collect::<Result<_>>()?,
            decoder: (0..decoder_layers)
                .map(|layer| DecoderLayer::load(config, decoder.below(layer)))
                .collect::<Result<_>>()?,
        })
    }

    /// Runs the encoder.
    ///
    /// # Shapes
    /// `source` `(B, S, d_model)`, embedded and with positions; returns the same shape.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn encode(&self, source: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        self.encoder
            .iter()
            .try_fold(source.clone(), |x, layer| layer.forward(&x, &AttentionMask::Bidirectional, pass))
    }

    /// Runs the decoder over the encoder's output.
    ///
    /// # Shapes
    /// `target` `(B, T, d_model)`, embedded and with positions; `memory` `(B, S, d_model)`; returns
    /// `(B, T, d_model)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn decode(&self, target: &Tensor, memory: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        self.decoder.iter().try_fold(target.clone(), |x, layer| layer.forward(&x, memory, pass))
    }
}

/// Output head: a linear layer to the vocabulary, then softmax.
#[derive(Debug, Clone)]
pub struct OutputHead {
    linear: Linear,
}

impl OutputHead {
    /// Creates a head from its linear layer, `(d_model, vocabulary)`.
    pub fn new(linear: Linear) -> Self {
        Self { linear }
    }

    /// Computes next-token probabilities at every position.
    ///
    /// # Shapes
    /// `x` `(B, T, d_model)`; returns `(B, T, vocabulary)`; each row sums to 1.
    ///
    /// # Errors
    /// If the width of `x` does not match.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        softmax(&self.linear.forward(x)?, D::Minus1)
    }
}
