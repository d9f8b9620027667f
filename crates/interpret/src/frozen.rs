//! Frozen parts of the local replacement model, and the backward pass through them.
//!
//! Let `LNᵀ(g) = (w∘g − mean(w∘g)) / s` for a norm with weight `w` and scale `s`. The backward pass maps a
//! gradient `g` through attention to `g + LN1ᵀ(patternᵀ(g · W_O) · W_V)`. The contributions of the biases
//! along the way are summed.

use candle_core::{D, DType, Tensor};
use candle_gpt2::{Block, LayerNorm, QkvProjection, Site, SiteKind};

use crate::{Record, Run, TranscoderInput};

/// A layer norm with its scale frozen to its value in the run.
pub(crate) struct FrozenNorm {
    /// Weight, `(C)`; `None` if all ones.
    weight: Option<Tensor>,
    /// Bias, `(C)`.
    pub(crate) bias: Option<Tensor>,
    /// Scale of each row, `(T, 1)`.
    scale: Tensor,
}

impl FrozenNorm {
    /// Freezes `norm` with the scale recorded at the hook point `scale`.
    pub(crate) fn of(recorded: &RecordedRun, norm: &LayerNorm, scale: Site) -> candle_core::Result<Self> {
        Ok(Self {
            weight: Some(recorded.cast(norm.weight())?),
            bias: norm.bias().map(|bias| recorded.cast(bias)).transpose()?,
            scale: recorded.get(scale)?,
        })
    }

    /// Returns the norm between the residual stream and an encoder's input, if there is one.
    pub(crate) fn before_encoder(
        recorded: &RecordedRun,
        layer: usize,
        block: &Block,
        input: TranscoderInput,
    ) -> candle_core::Result<Option<Self>> {
        let scale = Site::in_block(layer, SiteKind::Ln2Scale);
        Ok(match input {
            TranscoderInput::ResidMid => None,
            TranscoderInput::Ln2Normalized => {
                Some(Self { weight: None, bias: None, scale: recorded.get(scale)? })
            }
            TranscoderInput::MlpIn => Some(Self::of(recorded, block.ln_2(), scale)?),
        })
    }

    /// Maps the gradient `(B, T, C)` at the output to the gradient at the input.
    pub(crate) fn back(&self, g: &Tensor) -> candle_core::Result<Tensor> {
        let g = match &self.weight {
            Some(weight) => g.broadcast_mul(weight)?,
            None => g.clone(),
        };
        let scale = self.scale.narrow(0, 0, g.dim(1)?)?;
        g.broadcast_sub(&g.mean_keepdim(D::Minus1)?)?.broadcast_div(&scale)
    }
}

/// Attention in a layer, with the pattern frozen to its value in the run.
pub(crate) struct FrozenAttention {
    norm: FrozenNorm,
    /// Attention pattern transposed to keys by queries, `(H, T, T)`.
    pattern: Tensor,
    /// Value weight, `(H · D, C)`.
    value: Tensor,
    value_bias: Option<Tensor>,
    /// Output weight, `(C, H · D)`.
    output: Tensor,
    output_bias: Option<Tensor>,
}

impl FrozenAttention {
    pub(crate) fn of(recorded: &RecordedRun, layer: usize, block: &Block) -> candle_core::Result<Self> {
        let attn = block.attn();
        let width = attn.num_heads() * attn.head_dim();
        let (of_values, first) = match attn.projection() {
            QkvProjection::Fused(layer) => (layer, 2 * width),
            QkvProjection::Separate { value, .. } => (value, 0),
            QkvProjection::FusedMemory { key_value, .. } => (key_value, width),
        };
        let value_bias = of_values.bias().map(|bias| recorded.cast(&bias.narrow(0, first, width)?));
        let pattern = recorded.rows(layer, SiteKind::Pattern)?;
        Ok(Self {
            norm: FrozenNorm::of(recorded, block.ln_1(), Site::in_block(layer, SiteKind::Ln1Scale))?,
            pattern: pattern.transpose(1, 2)?.contiguous()?,
            value: recorded.cast(&of_values.weight().to_tensor()?.narrow(0, first, width)?)?.contiguous()?,
            value_bias: value_bias.transpose()?,
            output: recorded.cast(&attn.out_proj().weight().to_tensor()?)?.contiguous()?,
            output_bias: attn.out_proj().bias().map(|bias| recorded.cast(bias)).transpose()?,
        })
    }

    /// Maps the gradient `(B, T, C)` after attention to the gradient before it.
    pub(crate) fn back(&self, g: &Tensor, biases: &mut Biases) -> candle_core::Result<Tensor> {
        let (batch, tokens, width) = g.dims3()?;
        let (heads, _, _) = self.pattern.dims3()?;
        biases.add(g, self.output_bias.as_ref())?;
        let z = rows(g)?.matmul(&self.output)?; // (B · T, H · D)
        let head_dim = z.dim(1)? / heads;
        let z = z.reshape((batch, tokens, heads, head_dim))?.permute((2, 1, 0, 3))?.contiguous()?;
        let pattern = self.pattern.narrow(1, 0, tokens)?.narrow(2, 0, tokens)?.contiguous()?;
        let v = pattern.matmul(&z.reshape((heads, tokens, batch * head_dim))?)?; // (H, T, B · D)
        let v = v.reshape((heads, tokens, batch, head_dim))?.permute((2, 1, 0, 3))?.contiguous()?;
        let v = v.reshape((batch, tokens, heads * head_dim))?;
        biases.add(&v, self.value_bias.as_ref())?;
        let x = rows(&v)?.matmul(&self.value)?.reshape((batch, tokens, width))?;
        biases.add(&x, self.norm.bias.as_ref())?;
        g + self.norm.back(&x)?
    }
}

/// Sum of the bias contributions for each batch row, `(B)`.
pub(crate) struct Biases(pub(crate) Option<Tensor>);

impl Biases {
    /// Adds the contribution of a bias `(C)` at every token, for gradients `(B, T, C)`.
    pub(crate) fn add(&mut self, g: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<()> {
        if let Some(bias) = bias {
            let rows = g.broadcast_mul(bias)?.sum(D::Minus1)?.sum(D::Minus1)?;
            self.0 = Some(match &self.0 {
                Some(sum) => (sum + rows)?,
                None => rows,
            });
        }
        Ok(())
    }

    /// Appends further rows.
    pub(crate) fn join(&mut self, others: Self) -> candle_core::Result<()> {
        self.0 = joined(self.0.take(), others.0)?;
        Ok(())
    }
}

/// Activations recorded in a run, in one dtype and without the batch axis.
pub(crate) struct RecordedRun {
    record: Record,
    dtype: DType,
}

impl RecordedRun {
    /// Records all activations that are frozen or read.
    pub(crate) fn of(run: &Run, dtype: DType) -> candle_core::Result<Self> {
        Ok(Self { record: run.record(sites(run.model.config().n_layer))?, dtype })
    }

    /// Returns an encoder's input in a layer, after its norm, `(T, C)`.
    pub(crate) fn read(&self, layer: usize, norm: Option<&FrozenNorm>) -> candle_core::Result<Tensor> {
        let x = self.rows(layer, SiteKind::ResidMid)?;
        let Some(norm) = norm else { return Ok(x) };
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?.broadcast_div(&norm.scale)?;
        let x = norm.weight.as_ref().map_or(Ok(x.clone()), |weight| x.broadcast_mul(weight))?;
        norm.bias.as_ref().map_or(Ok(x.clone()), |bias| x.broadcast_add(bias))
    }

    fn get(&self, site: Site) -> candle_core::Result<Tensor> {
        self.record.get(site)?.squeeze(0)?.to_dtype(self.dtype)
    }

    /// Returns the activation `(T, …)` at a hook point of a block.
    pub(crate) fn rows(&self, layer: usize, kind: SiteKind) -> candle_core::Result<Tensor> {
        self.get(Site::in_block(layer, kind))
    }

    pub(crate) fn outside(&self, kind: SiteKind) -> candle_core::Result<Tensor> {
        self.get(Site::outside(kind))
    }

    pub(crate) fn cast(&self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        tensor.to_dtype(self.dtype)
    }
}

/// Hook points of all activations that are frozen or read.
fn sites(n_layer: usize) -> Vec<Site> {
    const KINDS: [SiteKind; 5] =
        [SiteKind::Ln1Scale, SiteKind::Pattern, SiteKind::ResidMid, SiteKind::Ln2Scale, SiteKind::MlpOut];
    const OUTSIDE: [SiteKind; 4] =
        [SiteKind::Embed, SiteKind::PosEmbed, SiteKind::LnFinalScale, SiteKind::FinalNorm];
    let inside = (0..n_layer).flat_map(|layer| KINDS.map(|kind| Site::in_block(layer, kind)));
    inside.chain(OUTSIDE.map(Site::outside)).collect()
}

/// Concatenates two optional batches.
pub(crate) fn joined(first: Option<Tensor>, second: Option<Tensor>) -> candle_core::Result<Option<Tensor>> {
    match (first, second) {
        (Some(first), Some(second)) => Tensor::cat(&[first, second], 0).map(Some),
        (first, second) => Ok(first.or(second)),
    }
}

/// Reshapes `(B, T, C)` to `(B · T, C)`.
pub(crate) fn rows(x: &Tensor) -> candle_core::Result<Tensor> {
    x.contiguous()?.flatten(0, 1)
}
