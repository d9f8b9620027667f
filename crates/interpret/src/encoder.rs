//! The first half of every dictionary and transcoder: how many of each latent a value has.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};

use crate::file_tensors::tensor;
use crate::{FileError, LatentActivation};

/// `latents = act(x · weight + bias)`.
#[derive(Debug, Clone)]
pub(crate) struct Encoder {
    /// `(C, F)`.
    weight: Tensor,
    /// `(F)`.
    bias: Tensor,
    activation: LatentActivation,
    /// Of [`LatentActivation::JumpRelu`] and [`LatentActivation::Gated`], `(F)`.
    threshold: Option<Tensor>,
}

impl Encoder {
    /// Of a weight `(C, F)`; the other tensors have these names.
    ///
    /// A gate that shares its weight with the magnitude is a threshold: with `π = x · W + b_gate` and `m = x · W · e^r + b_mag`, `π > 0`
    /// is `m > b_mag − b_gate · e^r`.
    pub(crate) fn from_tensors(
        tensors: &BTreeMap<String, Tensor>,
        weight: Tensor,
        bias: &str,
        threshold: &str,
        activation: LatentActivation,
    ) -> std::result::Result<Self, FileError> {
        let latents = weight.dim(1)?;
        let of_latents = |name: &str| tensor(tensors, name, &[latents]);
        let (weight, bias, threshold) = match activation {
            LatentActivation::TopK { k } if k == 0 || k > latents => {
                return Err(FileError::Key {
                    key: "k".into(),
                    expected: format!("from 1 to the number of latents, {latents}"),
                    found: k.to_string(),
                });
            }
            LatentActivation::Gated => {
                let factor = of_latents("r_mag")?.exp()?;
                let magnitude = of_latents("b_mag")?;
                let threshold = (&magnitude - (of_latents("b_gate")? * &factor)?)?;
                let weight = finite("r_mag", weight.broadcast_mul(&factor)?)?;
                (weight, magnitude, Some(finite("threshold", threshold)?))
            }
            // Training keeps its logarithm in files of its own.
            LatentActivation::JumpRelu if tensors.contains_key("log_threshold") => {
                let threshold = finite("threshold", of_latents("log_threshold")?.exp()?)?;
                (weight, of_latents(bias)?, Some(threshold))
            }
            LatentActivation::JumpRelu => {
                let is_row = tensors.get(threshold).is_some_and(|found| found.dims() == [1, latents]);
                let threshold = match is_row {
                    true => tensor(tensors, threshold, &[1, latents])?.flatten_all()?,
                    false => of_latents(threshold)?,
                };
                (weight, of_latents(bias)?, Some(threshold))
            }
            _ => (weight, of_latents(bias)?, None),
        };
        Ok(Self { weight, bias, activation, threshold })
    }

    /// Of a weight `(C, F)` and a bias `(F)`, with ReLU of the `k` largest.
    pub(crate) fn top_k(weight: Tensor, bias: Tensor, k: usize) -> Self {
        Self { weight, bias, activation: LatentActivation::TopK { k }, threshold: None }
    }

    /// Width of a value, `C`.
    pub(crate) fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Number of latents, `F`.
    pub(crate) fn latents(&self) -> usize {
        self.bias.elem_count()
    }

    /// `(C, F)`.
    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `(F)`.
    pub(crate) fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// `(F)`, if the activation has one.
    pub(crate) fn threshold(&self) -> Option<&Tensor> {
        self.threshold.as_ref()
    }

    /// Each of its tensors changed.
    pub(crate) fn mapped(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            weight: change(&self.weight)?,
            bias: change(&self.bias)?,
            activation: self.activation,
            threshold: self.threshold.as_ref().map(change).transpose()?,
        })
    }

    /// The same with latents that are so many times as large before their activation, `(F)`.
    pub(crate) fn scaled(&self, factors: &Tensor) -> Result<Self> {
        self.mapped(|tensor| tensor.broadcast_mul(factors))
    }

    /// The same of values less their mean over the width: what is equal in all channels no longer counts.
    pub(crate) fn of_centred(mut self) -> Result<Self> {
        self.weight = self.weight.broadcast_sub(&self.weight.mean_keepdim(0)?)?;
        Ok(self)
    }

    /// Latents before their activation, `(N, F)` of rows `(N, C)`.
    pub(crate) fn pre_activations(&self, rows: &Tensor) -> Result<Tensor> {
        rows.matmul(&self.weight)?.broadcast_add(&self.bias)
    }

    /// The latents of what [`Self::pre_activations`] gives, `(N, F)`.
    pub(crate) fn activate(&self, rows: &Tensor) -> Result<Tensor> {
        match (self.activation, &self.threshold) {
            (LatentActivation::TopK { k }, _) => rows.relu()? * mask_of_largest(rows, k)?,
            (_, Some(threshold)) => rows.relu()? * rows.broadcast_gt(threshold)?.to_dtype(rows.dtype())?,
            _ => rows.relu(),
        }
    }
}

/// What an exponential made, which may be infinite although every stored tensor is finite.
fn finite(key: &str, made: Tensor) -> std::result::Result<Tensor, FileError> {
    let largest = made.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    let refused = || FileError::Key {
        key: key.into(),
        expected: "values whose exponentials are finite".into(),
        found: "larger ones".into(),
    };
    largest.is_finite().then_some(made).ok_or_else(refused)
}

/// One where a number is among the `k` largest of its row, zero elsewhere; `(N, F)`.
fn mask_of_largest(rows: &Tensor, k: usize) -> Result<Tensor> {
    let (count, width) = rows.dims2()?;
    let mut mask = vec![0f32; count * width];
    let values = rows.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    for (row, mask) in values.iter().zip(mask.chunks_mut(width)) {
        let mut order: Vec<usize> = (0..width).collect();
        if k < width {
            order.select_nth_unstable_by(k, |a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        }
        order.iter().take(k).for_each(|index| mask[*index] = 1.0);
    }
    Tensor::from_vec(mask, (count, width), rows.device())?.to_dtype(rows.dtype())
}
