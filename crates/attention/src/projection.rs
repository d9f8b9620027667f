//! Query, key and value projections, and the configuration of multi-head attention.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource};

use crate::AttentionError;
use crate::error::expect_sizes;

/// Width of each head; see [`MultiHeadAttentionConfig::head_width`].
///
/// The names come from "Transformers from scratch" (Bloem, 2019, "Narrow and wide self-attention"). There, a
/// narrow head gets one slice of the input vector, and a wide head gets the entire vector. Narrow heads in
/// this strict sense are [`HeadWidth::Narrow`] with block-diagonal projections. GPT-2 and PyTorch use the
/// narrow width with full projections, so that each head sees the entire input at the same cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadWidth {
    /// The heads divide the output width: `D = d_out / H`.
    #[default]
    Narrow,
    /// Each head has the full output width, `D = d_out`; the output projection maps `H · d_out` to `d_out`.
    Wide,
}

/// Names and layout of a layer's parameters; see [`MultiHeadAttentionConfig::projection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProjectionLayout {
    /// Separate projections, as in "Build a Large Language Model (From Scratch)".
    ///
    /// Their names are `W_query`, `W_key`, `W_value` and `out_proj`, with `.weight` and `.bias`.
    #[default]
    Separate,
    /// Separate projections with custom names such as `q_proj`, plus `.weight` and `.bias`.
    Named {
        /// Name of the query projection.
        query: &'static str,
        /// Name of the key projection.
        key: &'static str,
        /// Name of the value projection.
        value: &'static str,
        /// Name of the output projection.
        output: &'static str,
    },
    /// PyTorch's `nn.MultiheadAttention`: `in_proj_weight`, `in_proj_bias` and `out_proj`.
    Fused,
    /// GPT-2's `c_attn` and `c_proj`; files store them as `Conv1D`; see [`Linear::load_conv1d`].
    Gpt2,
}

impl ProjectionLayout {
    /// Names of the separate projections: queries, keys, values and output.
    fn separate(self) -> Option<[&'static str; 4]> {
        match self {
            Self::Separate => Some(["W_query", "W_key", "W_value", "out_proj"]),
            Self::Named { query, key, value, output } => Some([query, key, value, output]),
            Self::Fused | Self::Gpt2 => None,
        }
    }
}

/// Sizes and options for loading a [`MultiHeadAttention`](crate::MultiHeadAttention) by name.
#[derive(Debug, Clone)]
pub struct MultiHeadAttentionConfig {
    /// Width of the input, and of the memory in cross-attention.
    pub d_in: usize,
    /// Width of the output.
    pub d_out: usize,
    /// Number of heads, `H`.
    pub num_heads: usize,
    /// Width of each head.
    pub head_width: HeadWidth,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_proj_bias: bool,
    /// Names and layout of the parameters.
    pub projection: ProjectionLayout,
    /// Dropout rate of the attention weights in training.
    pub dropout: f64,
}

impl MultiHeadAttentionConfig {
    /// Creates a configuration with the defaults of "Build a Large Language Model (From Scratch)".
    ///
    /// These are narrow heads, separate projections to queries, keys and values without biases, an output
    /// projection with a bias, and no dropout.
    pub fn new(d_in: usize, d_out: usize, num_heads: usize) -> Self {
        Self {
            d_in,
            d_out,
            num_heads,
            head_width: HeadWidth::Narrow,
            qkv_bias: false,
            out_proj_bias: true,
            projection: ProjectionLayout::Separate,
            dropout: 0.0,
        }
    }

    /// Creates the configuration of a GPT-2 attention layer, with GPT-2's parameter names and biases.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_gpt2_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_nn::VarBuilder;
    ///
    /// // For a 124M model file, `vb` comes from `VarBuilder::from_mmaped_safetensors`.
    /// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::gpt2(768, 12), vb.pp("h.0.attn"))?;
    /// assert_eq!(layer.parameter_count(), 2_362_368);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn gpt2(n_embd: usize, n_head: usize) -> Self {
        Self { qkv_bias: true, projection: ProjectionLayout::Gpt2, ..Self::new(n_embd, n_embd, n_head) }
    }
}

/// Query, key and value projections, each with output width `H · D`.
///
/// [`MultiHeadAttention::new`](crate::MultiHeadAttention::new) builds a layer from them, and
/// [`MultiHeadAttention::load`](crate::MultiHeadAttention::load) loads them.
#[derive(Debug, Clone)]
pub enum QkvProjection {
    /// Separate layers for queries, keys and values.
    Separate {
        /// Query projection.
        query: Linear,
        /// Key projection.
        key: Linear,
        /// Value projection.
        value: Linear,
    },
    /// One layer whose output is the concatenated queries, keys and values.
    Fused(Linear),
    /// One layer for queries and one for concatenated keys and values, as in GPT-2's cross-attention.
    FusedMemory {
        /// Query projection.
        query: Linear,
        /// Combined key and value projection.
        key_value: Linear,
    },
}

/// Keys and values computed from encoder hidden states (the memory), reused across passes.
///
/// [`MultiHeadAttention::memory`](crate::MultiHeadAttention::memory) computes them once.
#[derive(Debug, Clone)]
pub struct AttentionMemory(pub(crate) Vec<Tensor>);

impl QkvProjection {
    /// Loads the input and output projections under the path of `vb`.
    pub(crate) fn load(
        config: &MultiHeadAttentionConfig,
        vb: impl ParameterSource,
    ) -> Result<(Self, Linear)> {
        let MultiHeadAttentionConfig { d_in, d_out, num_heads, qkv_bias, out_proj_bias, .. } = *config;
        let width = match config.head_width {
            HeadWidth::Narrow => d_out,
            HeadWidth::Wide => d_out * num_heads,
        };
        divided_width(width, num_heads)?;
        if let Some([query, key, value, output]) = config.projection.separate() {
            let layer = |name: &str| Linear::load(d_in, width, qkv_bias, vb.below(name));
            let projection = Self::Separate { query: layer(query)?, key: layer(key)?, value: layer(value)? };
            return Ok((projection, Linear::load(width, d_out, out_proj_bias, vb.below(output))?));
        }
        if config.projection == ProjectionLayout::Gpt2 {
            let c_attn = Linear::load_conv1d(d_in, 3 * width, qkv_bias, vb.below("c_attn"))?;
            let c_proj = Linear::load_conv1d(width, d_out, out_proj_bias, vb.below("c_proj"))?;
            return Ok((Self::Fused(c_attn), c_proj));
        }
        let names = ["in_proj_weight", "in_proj_bias"];
        let in_proj = Linear::load_named(d_in, 3 * width, names, qkv_bias, vb.clone())?;
        Ok((Self::Fused(in_proj), Linear::load(width, d_out, out_proj_bias, vb.below("out_proj"))?))
    }

    /// Rejects inputs whose shape is not `(B, T, d_in)`.
    pub(crate) fn expect_input(&self, x: &Tensor) -> Result<()> {
        let (Self::Separate { query, .. } | Self::FusedMemory { query, .. } | Self::Fused(query)) = self;
        expect_shape("an input", "B, T", query.in_features(), x)
    }

    /// Projects `x` to queries, keys and values, `(B, T, …)`.
    ///
    /// The result has one tensor for a fused projection. Otherwise it has the queries, followed by
    /// concatenated keys and values or by two separate tensors.
    pub(crate) fn of_itself(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Fused(layer) => Ok(vec![layer.forward(x)?]),
            _ => self.over(x, &self.memory(x)?),
        }
    }

    /// Projects `x` to queries and combines them with keys and values from [`QkvProjection::memory`].
    pub(crate) fn over(&self, x: &Tensor, memory: &AttentionMemory) -> Result<Vec<Tensor>> {
        let queries = match self {
            Self::Separate { query, .. } | Self::FusedMemory { query, .. } => query.forward(x)?,
            Self::Fused(layer) => layer.forward_outputs(x, 0..layer.out_features() / 3)?,
        };
        Ok([&[queries], &memory.0[..]].concat())
    }

    /// Projects `memory` to keys and values, `(B, S, …)`, either concatenated in one tensor or separate.
    pub(crate) fn memory(&self, memory: &Tensor) -> Result<AttentionMemory> {
        let (Self::Separate { key, .. } | Self::FusedMemory { key_value: key, .. } | Self::Fused(key)) = self;
        expect_shape("a memory", "B, S", key.in_features(), memory)?;
        let keys_and_values = match self {
            Self::Separate { key, value, .. } => vec![key.forward(memory)?, value.forward(memory)?],
            Self::FusedMemory { key_value, .. } => vec![key_value.forward(memory)?],
            Self::Fused(layer) => {
                let width = layer.out_features() / 3;
                vec![layer.forward_outputs(memory, width..3 * width)?]
            }
        };
        Ok(AttentionMemory(keys_and_values))
    }

    /// Checks the widths of the projections and returns `H · D`.
    pub(crate) fn width(&self) -> Result<usize> {
        match self {
            Self::Separate { query, key, value } => {
                for (what, layer) in [("the key projection", key), ("the value projection", value)] {
                    expect_width(what, query.out_features(), layer.out_features())?;
                }
                Ok(query.out_features())
            }
            Self::Fused(layer) => {
                expect_width("the fused projection", layer.out_features() / 3 * 3, layer.out_features())?;
                Ok(layer.out_features() / 3)
            }
            Self::FusedMemory { query, key_value } => {
                let what = "the projection to keys and values";
                expect_width(what, 2 * query.out_features(), key_value.out_features())?;
                Ok(query.out_features())
            }
        }
    }

    fn layers(&self) -> Vec<&Linear> {
        match self {
            Self::Separate { query, key, value } => vec![query, key, value],
            Self::Fused(layer) => vec![layer],
            Self::FusedMemory { query, key_value } => vec![query, key_value],
        }
    }

    pub(crate) fn size(&self) -> ParameterSize {
        self.layers().into_iter().map(Linear::size).sum()
    }
}

pub(crate) fn divided_width(width: usize, num_heads: usize) -> Result<usize> {
    expect_sizes(&[("number of heads", num_heads), ("width", width)])?;
    if !width.is_multiple_of(num_heads) {
        return Err(AttentionError::HeadsDoNotDivideWidth { num_heads, width }.into());
    }
    Ok(width / num_heads)
}

fn expect_shape(what: &'static str, axes: &'static str, width: usize, x: &Tensor) -> Result<()> {
    match x.dims() {
        [_, _, found] if *found == width => Ok(()),
        found => Err(AttentionError::InputShape { what, axes, width, found: found.to_vec() }.into()),
    }
}

pub(crate) fn expect_width(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found != expected {
        return Err(AttentionError::WidthMismatch { what, expected, found }.into());
    }
    Ok(())
}
