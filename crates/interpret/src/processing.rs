//! Conversion of a checkpoint's activations to the values that TransformerLens shows.
//!
//! In compatibility mode, TransformerLens folds the weights and biases of layer norms into the following
//! layers. It also centers everything that writes to the residual stream, centers the output head, and moves
//! the value biases past the attention pattern. None of this changes the model's predictions. All of it can
//! be derived from a run of the unmodified model. Let `c_h` be the constant that the norm's bias and the
//! value bias add to the values of head `h`:
//!
//! - `v` and `z` are reduced by `c_h`, and `result` by the contribution of `c_h` to the residual stream.
//! - The mean over the hidden size is subtracted from embeddings, residual streams and everything added to
//!   them.
//! - The mean over the vocabulary is subtracted from the logits.
//! - The output of the final norm is the normalized input; everything else is the same.

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2::QkvProjection;
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

/// Conversion from a model's activations to TransformerLens' values for the same model.
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
    /// Contribution of `c_h` to the residual stream for each block, `(H, C)`.
    results: Vec<Tensor>,
}

impl Processing {
    /// Computes the constants for this model.
    ///
    /// # Errors
    /// If a block's weights cannot be allocated in f32.
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

    /// Returns the constant part of a block's head values, `(H, D)`.
    ///
    /// Setting `z` to zero in TransformerLens corresponds to setting the model's own `z` to this constant.
    pub fn value_constants(&self, layer: usize) -> Option<&Tensor> {
        self.values.get(layer)
    }

    /// Returns the contribution of these constants to the residual stream, `(H, C)`.
    pub fn result_constants(&self, layer: usize) -> Option<&Tensor> {
        self.results.get(layer)
    }

    /// Converts the activation at a hook point to TransformerLens' value.
    ///
    /// For [`SiteKind::FinalNorm`], TransformerLens shows [`SiteKind::LnFinalNormalized`]. Callers must
    /// record that hook point instead.
    ///
    /// # Errors
    /// If the shape does not match the hook point.
    pub fn apply(&self, site: Site, value: &Tensor) -> Result<Tensor> {
        let value = &value.to_dtype(DType::F32)?;
        let of_layer = |of: &[Tensor]| match site.layer.and_then(|layer| of.get(layer)) {
            Some(constant) => constant.to_dtype(DType::F32),
            None => candle_core::bail!("{site} is not in a block of this model"),
        };
        match site.kind {
            SiteKind::V | SiteKind::Z => value.broadcast_sub(&of_layer(&self.values)?),
            SiteKind::Result => center(&value.broadcast_sub(&of_layer(&self.results)?)?),
            SiteKind::Logits => center(value),
            kind if kind.is_residual() => center(value),
            _ => Ok(value.clone()),
        }
    }
}

/// Subtracts the mean over the last axis.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2., 6.], [4., 4., 4.]], &Device::Cpu)?;
/// assert_eq!(candle_gpt2_interpret::center(&x)?.to_vec2::<f32>()?, [[-2., -1., 3.], [0., 0., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If candle does not support the dtype.
pub fn center(value: &Tensor) -> Result<Tensor> {
    value.broadcast_sub(&value.mean_keepdim(D::Minus1)?)
}
