//! From the numbers of a checkpoint to those that TransformerLens shows of it.
//!
//! TransformerLens (compatibility mode) folds weights and biases of layer norms into what follows, centres what is written to the
//! residual stream, centres the output head, and moves the biases of values behind the attention pattern. None of it changes what a
//! model predicts, and all of it follows from a run of the model as it is. With `c_h` for the constant that the norm's bias and the
//! values' bias add to the values of head `h`:
//!
//! - `v` and `z` are less `c_h`, `result` less what `c_h` writes;
//! - embeddings, residual streams and what is added to them are less their mean over the width, logits less theirs over the vocabulary;
//! - the output of the final norm is the normalized one; everything else is the same.

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2::QkvProjection;
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

/// What leads from a model's values to TransformerLens' of the same model.
///
/// ```
/// use candle_gpt2_interpret::{Processing, Run, named_site};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let random = |one: candle_gpt2::Parameter| Ok((one.name, candle_core::Tensor::randn(0f32, 1., one.shape, &Device::Cpu)?));
/// # let tensors = candle_gpt2::expected_parameters(&sizes).into_iter().map(random).collect::<candle_core::Result<_>>()?;
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_gpt2::ByOutput(candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))?;
///
/// let site = named_site("resid_pre1")?;
/// let record = Run::new(&model, &[1, 2, 3, 4])?.record([site])?;
/// let value = Processing::new(&model)?.apply(site, record.get(site)?)?; // as TransformerLens shows it
/// assert!(value.mean(2)?.flatten_all()?.to_vec1::<f32>()?.iter().all(|mean| mean.abs() < 1e-4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias("fold_ln", "center_writing_weights", "fold_value_biases"))]
pub struct Processing {
    /// `c_h` of each block, `(H, D)`.
    values: Vec<Tensor>,
    /// What it writes to the residual stream, `(H, C)`.
    results: Vec<Tensor>,
}

impl Processing {
    /// That of this model.
    ///
    /// # Errors
    /// When there is no memory for a block's weights in f32.
    pub fn new(model: &Gpt2LMHeadModel) -> Result<Self> {
        let (mut values, mut results) = (Vec::new(), Vec::new());
        for block in model.transformer().blocks() {
            let attn = block.attn();
            let zeros = || block.ln_1().weight().zeros_like();
            let shift = block.ln_1().bias().map_or_else(zeros, |bias| Ok(bias.clone()))?.unsqueeze(0)?;
            let width = attn.num_heads() * attn.head_dim();
            let constant = match attn.projection() {
                QkvProjection::Fused(layer) => layer.forward_outputs(&shift, 2 * width..3 * width)?,
                QkvProjection::Separate { value, .. } => value.forward(&shift)?,
                QkvProjection::FusedMemory { key_value, .. } => {
                    key_value.forward_outputs(&shift, width..2 * width)?
                }
            }; // (1, H · D)
            results.push(attn.results(&constant.unsqueeze(0)?)?.squeeze(0)?.squeeze(0)?);
            values.push(constant.reshape((attn.num_heads(), attn.head_dim()))?);
        }
        Ok(Self { values, results })
    }

    /// The constant part of the values of a block's heads, `(H, D)`: what TransformerLens has set to zero if it sets `z` to zero.
    pub fn value_constants(&self, layer: usize) -> Option<&Tensor> {
        self.values.get(layer)
    }

    /// What these constants write to the residual stream, `(H, C)`.
    pub fn result_constants(&self, layer: usize) -> Option<&Tensor> {
        self.results.get(layer)
    }

    /// TransformerLens' value of what was seen at a place. That of [`SiteKind::FinalNorm`] is [`SiteKind::LnFinalNormalized`], which
    /// must be recorded for it.
    ///
    /// # Errors
    /// When the shape is not the site's.
    pub fn apply(&self, site: Site, value: &Tensor) -> Result<Tensor> {
        let value = &value.to_dtype(DType::F32)?;
        let of_layer = |of: &[Tensor]| match site.layer.and_then(|layer| of.get(layer)) {
            Some(constant) => constant.to_dtype(DType::F32),
            None => candle_core::bail!("{site} is in no block of this model"),
        };
        match site.kind {
            SiteKind::V | SiteKind::Z => value.broadcast_sub(&of_layer(&self.values)?),
            SiteKind::Result => centred(&value.broadcast_sub(&of_layer(&self.results)?)?),
            SiteKind::Logits => centred(value),
            kind if kind.is_residual() => centred(value),
            _ => Ok(value.clone()),
        }
    }
}

/// Values less their mean over the last axis.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2., 6.], [4., 4., 4.]], &Device::Cpu)?;
/// assert_eq!(candle_gpt2_interpret::centred(&x)?.to_vec2::<f32>()?, [[-2., -1., 3.], [0., 0., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When candle cannot compute it for the type.
pub fn centred(value: &Tensor) -> Result<Tensor> {
    value.broadcast_sub(&value.mean_keepdim(D::Minus1)?)
}
