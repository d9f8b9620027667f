//! Cross-attention of a block to encoder hidden states, in models with `add_cross_attention`.
//!
//! It runs between self-attention and MLP: `x = x + crossattention(ln_cross_attn(x), states)`.
//!
//! Source: `GPT2Block` of transformers. Every token attends to all states without a mask. The scale equals
//! the scale of the block's self-attention. A pass without states skips the layer.

use candle_core::Tensor;
use candle_gpt2_attention::{AttentionMemory, MultiHeadAttention, Pass, QkvProjection};
use candle_gpt2_kernels::{LayerNorm, ParameterSize, ParameterSource};

use crate::parameters::Layers;
use crate::{Gpt2Config, ModelError};

/// Attention to encoder hidden states, with its layer norm.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let config = Gpt2Config { add_cross_attention: true, ..sizes };
/// let model = Gpt2LMHeadModel::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// assert!(model.transformer().blocks()[0].cross_attention().is_some());
///
/// let states = Tensor::ones((1, 5, 6), DType::F32, &Device::Cpu)?; // encoder output for five tokens
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// let mut pass = Pass::inference().attending_to(states);
/// assert_eq!(model.forward_with(&ids, LogitsFor::EveryToken, None, &mut pass)?.dims(), [1, 3, 11]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CrossAttention {
    ln_cross_attn: LayerNorm,
    crossattention: MultiHeadAttention,
    resid_pdrop: f64,
    /// Keys and values of the default states, for passes without their own states.
    memory: Option<AttentionMemory>,
}

impl CrossAttention {
    /// Loads the cross-attention of block `layer`.
    pub(crate) fn load(
        config: &Gpt2Config,
        layer: usize,
        layers: &Layers<impl ParameterSource>,
    ) -> candle_core::Result<Self> {
        let linear = |name: &str| layers.linear(&format!("crossattention.{name}"));
        let projection =
            QkvProjection::FusedMemory { query: linear("q_attn")?, key_value: linear("c_attn")? };
        Ok(Self {
            ln_cross_attn: layers.norm("ln_cross_attn")?,
            crossattention: MultiHeadAttention::new(projection, linear("c_proj")?, config.n_head)?
                .with_scale(config.attention_scale(layer))
                .with_dropout(config.attn_pdrop),
            resid_pdrop: config.resid_pdrop,
            memory: None,
        })
    }

    /// Adds cross-attention to the residual stream, `(B, T, C)` to `(B, T, C)`.
    pub(crate) fn forward(&self, x: Tensor, pass: &mut Pass) -> candle_core::Result<Tensor> {
        let of_pass = match pass.encoder_states() {
            Some(states) => Some(self.crossattention.memory(&states.to_dtype(x.dtype())?)?),
            None => None,
        };
        let Some(memory) = of_pass.as_ref().or(self.memory.as_ref()) else {
            return Ok(x);
        };
        let normed = self.ln_cross_attn.forward(&x)?;
        self.crossattention.add_over_memory(&x, &normed, memory, self.resid_pdrop, pass)
    }

    /// Stores the keys and values of `states` for every pass without its own states.
    pub(crate) fn attend_to(&mut self, states: &Tensor) -> candle_core::Result<()> {
        self.memory = Some(self.crossattention.memory(states)?);
        Ok(())
    }

    pub(crate) fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Layer norm before cross-attention.
    pub fn ln_cross_attn(&self) -> &LayerNorm {
        &self.ln_cross_attn
    }

    /// Attention from the tokens to the encoder hidden states.
    pub fn crossattention(&self) -> &MultiHeadAttention {
        &self.crossattention
    }

    pub(crate) fn size(&self) -> ParameterSize {
        self.ln_cross_attn.size() + self.crossattention.size()
    }
}

/// Checks that a model with this configuration can attend to `states` in a pass of `rows` rows.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::{Gpt2Config, ModelError, check_encoder_states};
///
/// let states = Tensor::ones((1, 5, 768), DType::F32, &Device::Cpu)?;
/// assert!(matches!(check_encoder_states(&Gpt2Config::gpt2(), &states, 1), Err(ModelError::NoCrossAttention)));
/// let config = Gpt2Config { add_cross_attention: true, ..Gpt2Config::gpt2() };
/// assert!(check_encoder_states(&config, &states, 3).is_ok());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the model has no cross-attention, or the states are not floating-point `(1, S, C)` or `(rows, S, C)`.
pub fn check_encoder_states(config: &Gpt2Config, states: &Tensor, rows: usize) -> Result<(), ModelError> {
    if !config.add_cross_attention {
        return Err(ModelError::NoCrossAttention);
    }
    let has_valid_shape = matches!(*states.dims(), [batch, count, width]
        if (batch == 1 || batch == rows) && count > 0 && width == config.n_embd);
    if has_valid_shape && states.dtype().is_float() {
        return Ok(());
    }
    let found = (states.dims().to_vec(), states.dtype());
    Err(ModelError::EncoderStates { rows, width: config.n_embd, found })
}
