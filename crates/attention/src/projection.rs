//! The projections to queries, keys and values, and the sizes of the layer that has them.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource};

use crate::AttentionError;
use crate::error::expect_sizes;

/// How wide each head is.
///
/// The words are those of "Transformers from scratch" (Bloem, 2019, "Narrow and wide self-attention"): a head is narrow that
/// gets one slice of the input vector and wide that gets the whole vector. A narrow head of that strict kind is
/// [`HeadWidth::Narrow`] with block-diagonal projections; GPT-2 and PyTorch use the narrow width with full projections, so that
/// each head sees the whole input at the same cost. A choice of [`MultiHeadAttentionConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadWidth {
    /// The heads share the output width: `D = d_out / H`.
    #[default]
    Narrow,
    /// Each head has the whole output width, `D = d_out`, and the output projection brings `H · d_out` back to it.
    Wide,
}

/// Where the query, key and value projections are kept. A choice of [`MultiHeadAttentionConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProjectionLayout {
    /// Three parameters, `W_query.weight`, `W_key.weight`, `W_value.weight` (and `.bias`), as in "Build a Large
    /// Language Model (From Scratch)".
    #[default]
    Separate,
    /// One parameter for all three, `in_proj_weight` (and `in_proj_bias`), as in PyTorch's `nn.MultiheadAttention`.
    Fused,
}

/// Sizes and options of a [`MultiHeadAttention`](crate::MultiHeadAttention) that is built from named parameters.
#[derive(Debug, Clone)]
pub struct MultiHeadAttentionConfig {
    /// Width of the input (and of the memory in cross-attention).
    pub d_in: usize,
    /// Width of the output.
    pub d_out: usize,
    /// Number of heads, `H`.
    pub num_heads: usize,
    /// Width of each head.
    pub head_width: HeadWidth,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Where the query, key and value projections are kept.
    pub projection: ProjectionLayout,
    /// Dropout rate on the attention weights, in training.
    pub dropout: f64,
}

impl MultiHeadAttentionConfig {
    /// Narrow heads, separate projections without biases, no dropout: the defaults of "Build a Large Language Model
    /// (From Scratch)".
    pub fn new(d_in: usize, d_out: usize, num_heads: usize) -> Self {
        Self {
            d_in,
            d_out,
            num_heads,
            head_width: HeadWidth::Narrow,
            qkv_bias: false,
            projection: ProjectionLayout::Separate,
            dropout: 0.0,
        }
    }
}

/// The projections of the input to queries, keys and values, each `H · D` wide.
/// [`MultiHeadAttention::new`](crate::MultiHeadAttention::new) makes a layer of them,
/// [`MultiHeadAttention::load`](crate::MultiHeadAttention::load) reads them.
#[derive(Debug, Clone)]
pub enum QkvProjection {
    /// One layer each.
    Separate {
        /// To the queries.
        query: Linear,
        /// To the keys.
        key: Linear,
        /// To the values.
        value: Linear,
    },
    /// One layer whose output holds queries, keys and values side by side, each a third.
    Fused(Linear),
    /// One layer to the queries, and one whose output holds keys and values side by side, each a half: GPT-2's cross-attention.
    FusedMemory {
        /// To the queries.
        query: Linear,
        /// To keys and values.
        key_value: Linear,
    },
}

impl QkvProjection {
    /// Those of a layer from the named parameters below the path of `vb`, and their width `H · D`.
    pub(crate) fn load(
        config: &MultiHeadAttentionConfig,
        vb: &impl ParameterSource,
    ) -> Result<(Self, usize)> {
        let MultiHeadAttentionConfig { d_in, d_out, num_heads, qkv_bias, .. } = *config;
        let width = match config.head_width {
            HeadWidth::Narrow => d_out,
            HeadWidth::Wide => d_out * num_heads,
        };
        divided_width(width, num_heads)?;
        let projection = match config.projection {
            ProjectionLayout::Separate => {
                let layer = |name: &str| Linear::load(d_in, width, qkv_bias, vb.below(name));
                Self::Separate { query: layer("W_query")?, key: layer("W_key")?, value: layer("W_value")? }
            }
            ProjectionLayout::Fused => {
                let names = ["in_proj_weight", "in_proj_bias"];
                Self::Fused(Linear::load_named(d_in, 3 * width, names, qkv_bias, vb.clone())?)
            }
        };
        Ok((projection, width))
    }

    /// Queries, keys and values of `x`, as the layers give them: all three side by side in one tensor, queries and then keys and
    /// values in two, or each in its own, `(B, T, …)`.
    pub(crate) fn of_itself(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Fused(layer) => Ok(vec![layer.forward(x)?]),
            _ => self.over(x, &self.memory(x)?),
        }
    }

    /// Queries of `x`, and keys and values that [`QkvProjection::memory`] gave, in two or three tensors.
    pub(crate) fn over(&self, x: &Tensor, memory: &[Tensor]) -> Result<Vec<Tensor>> {
        let queries = match self {
            Self::Separate { query, .. } | Self::FusedMemory { query, .. } => query.forward(x)?,
            Self::Fused(layer) => layer.forward_outputs(x, 0..layer.out_features() / 3)?,
        };
        Ok([&[queries], memory].concat())
    }

    /// Keys and values of `memory`, side by side in one tensor or each in its own, `(B, S, …)`.
    pub(crate) fn memory(&self, memory: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Separate { key, value, .. } => Ok(vec![key.forward(memory)?, value.forward(memory)?]),
            Self::FusedMemory { key_value, .. } => Ok(vec![key_value.forward(memory)?]),
            Self::Fused(layer) => {
                let width = layer.out_features() / 3;
                Ok(vec![layer.forward_outputs(memory, width..3 * width)?])
            }
        }
    }

    /// Width of queries, of keys and of values, `H · D`.
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

pub(crate) fn expect_width(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found != expected {
        return Err(AttentionError::WidthMismatch { what, expected, found }.into());
    }
    Ok(())
}
