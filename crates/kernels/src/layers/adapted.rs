//! The weight of a linear layer with an adapter: `W + scale · b a`, which is never added up where it is trained.

use candle_core::{D, Result, Tensor};

use super::linear::{Linear, Matrix};
use crate::KernelError;
use crate::training::{Adapter, FixedWeight, adapted_linear, is_cpu_float, runs_as_in_training};

/// A matrix that stays as it is, with a trained product of low rank beside it.
#[derive(Debug, Clone)]
pub struct AdaptedMatrix {
    base: Matrix,
    a: Tensor,
    b: Tensor,
    scale: f64,
}

impl AdaptedMatrix {
    /// `base + scale · b a`. No gradient leads to the base.
    ///
    /// # Shapes
    /// `base` `(out, in)`, `a` `(rank, in)`, `b` `(out, rank)`.
    ///
    /// # Errors
    /// When the shapes do not fit, or the types of a dense base and the adapter differ.
    pub fn new(base: Matrix, a: Tensor, b: Tensor, scale: f64) -> Result<Self> {
        let base = match base {
            Matrix::Dense(weight) => Matrix::Dense(weight.detach()),
            other => other,
        };
        let weight = base.shape();
        let fits =
            a.rank() == 2 && b.rank() == 2 && (b.dim(0)?, a.dim(1)?) == weight && b.dim(1)? == a.dim(0)?;
        let is_one_type = a.dtype() == b.dtype()
            && match &base {
                Matrix::Dense(weight) => weight.dtype() == a.dtype(),
                Matrix::Packed(_) | Matrix::Adapted(_) => true,
            };
        if !fits || !is_one_type {
            let (a, b) = (a.dims().to_vec(), b.dims().to_vec());
            return Err(KernelError::AdapterShapes { weight, a, b }.into());
        }
        Ok(Self { base, a, b, scale })
    }

    /// The matrix without what the adapter adds.
    pub(super) fn base(&self) -> &Matrix {
        &self.base
    }

    /// The matrix with what the adapter adds, through which gradients lead to the adapter.
    pub(super) fn merged(&self) -> Result<Tensor> {
        self.base.to_tensor()? + (self.b.matmul(&self.a)? * self.scale)?
    }

    /// `x (W + scale · b a)ᵀ + bias`, where `x` is as wide as it must be.
    pub(super) fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let fixed = match &self.base {
            Matrix::Dense(weight) => Some(FixedWeight::Dense(weight.clone())),
            Matrix::Packed(weight) => Some(FixedWeight::Packed(weight.clone())),
            Matrix::Adapted(_) => None,
        };
        let is_training = runs_as_in_training(x) || runs_as_in_training(&self.a);
        let is_fixed = bias.is_none_or(|bias| !bias.track_op() && bias.dtype() == x.dtype());
        if let Some(weight) = fixed
            && is_training
            && is_fixed
            && is_cpu_float(x)
            && x.dtype() == self.a.dtype()
        {
            return adapted_linear(x, &weight, bias, &Adapter { a: &self.a, b: &self.b, scale: self.scale });
        }
        let base = Linear::from_matrix(self.base.clone(), bias.cloned())?;
        let inner = x.reshape(((), x.dim(D::Minus1)?))?.matmul(&self.a.t()?)?;
        let added = (inner.matmul(&self.b.t()?)? * self.scale)?;
        let y = base.forward(x)?;
        let added = added.reshape(y.shape())?;
        y + added
    }
}
