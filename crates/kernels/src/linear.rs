//! The linear layer: `y = x Wᵀ + b`, with the weight in PyTorch's `nn.Linear` orientation `(out, in)`.
//!
//! A GPT-2 checkpoint stores its matrices as `(in, out)` (`Conv1D`). The loader hands those in as a transposed
//! view, which costs nothing and which the product below turns back into the stored layout.

use candle_core::{D, Result, Tensor};
use candle_nn::VarBuilder;

use crate::KernelError;
use crate::training::{add_bias, is_trained_on_cpu};

/// A linear layer, `(…, in)` to `(…, out)`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer from its tensors.
    ///
    /// # Shapes
    /// `weight` `(out, in)`, contiguous or the transposed view of an `(in, out)` tensor; `bias` `(out)`.
    ///
    /// # Errors
    /// When the shapes are not these.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (out_features, _) = weight.dims2()?;
        if let Some(bias) = &bias
            && bias.dims() != [out_features]
        {
            return Err(KernelError::BiasShape { expected: out_features, found: bias.dims().to_vec() }.into());
        }
        Ok(Self { weight, bias })
    }

    /// A layer from the parameters `weight` and, where `has_bias`, `bias` below the path of `vb`.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(in_features: usize, out_features: usize, has_bias: bool, vb: &VarBuilder) -> Result<Self> {
        let weight = vb.get((out_features, in_features), "weight")?;
        let bias = has_bias.then(|| vb.get(out_features, "bias")).transpose()?;
        Self::new(weight, bias)
    }

    /// `x Wᵀ + b`.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, out)`.
    ///
    /// # Errors
    /// When the last axis of `x` is not `in` wide.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        let Some(width) = shape.last_mut().filter(|width| **width == self.in_features()) else {
            return Err(
                KernelError::InputWidth { expected: self.in_features(), found: x.dims().to_vec() }.into()
            );
        };
        *width = self.out_features();
        // One two-axis product: candle would otherwise run one product for each row of the batch.
        let rows = x.reshape(((), self.in_features()))?.matmul(&self.weight.t()?)?;
        let y = rows.reshape(shape)?;
        match &self.bias {
            Some(bias) if is_trained_on_cpu(&y) => add_bias(&y, bias),
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Width of the input.
    pub fn in_features(&self) -> usize {
        self.weight.dim(D::Minus1).unwrap_or_default()
    }

    /// Width of the output.
    pub fn out_features(&self) -> usize {
        self.weight.dim(0).unwrap_or_default()
    }

    /// The weight, `(out, in)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(out)`, where the layer has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Number of trainable values: weight and bias.
    pub fn parameter_count(&self) -> usize {
        self.weight.elem_count() + self.bias.as_ref().map_or(0, Tensor::elem_count)
    }
}
