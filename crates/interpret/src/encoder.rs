//! Encoder for dictionaries and transcoders, which maps activations to latents.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};

use crate::file_tensors::tensor;
use crate::{FileError, LatentActivation};

/// Encoder: `latents = act(x · weight + bias)`.
#[derive(Debug, Clone)]
pub(crate) struct Encoder {
    /// Weight, `(C, F)`.
    weight: Tensor,
    /// Bias, `(F)`.
    bias: Tensor,
    activation: LatentActivation,
    /// Threshold of [`LatentActivation::JumpRelu`] and [`LatentActivation::Gated`], `(F)`.
    threshold: Option<Tensor>,
}

impl Encoder {
    /// Creates an encoder from a weight `(C, F)` and the bias and threshold with these names.
    ///
    /// A gate that shares its weight with the magnitude reduces to a threshold. With `π = x · W + b_gate` and
    /// `m = x · W · e^r + b_mag`, `π > 0` is equivalent to `m > b_mag − b_gate · e^r`.
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
                    expected: format!("1 to {latents}, the number of latents"),
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
            // Training checkpoints store the logarithm of the threshold.
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

    /// Creates a TopK encoder: ReLU of the `k` largest pre-activations.
    ///
    /// `weight` is `(C, F)` and `bias` is `(F)`.
    pub(crate) fn top_k(weight: Tensor, bias: Tensor, k: usize) -> Self {
        Self { weight, bias, activation: LatentActivation::TopK { k }, threshold: None }
    }

    /// Width of the activations, `C`.
    pub(crate) fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Number of latents, `F`.
    pub(crate) fn latents(&self) -> usize {
        self.bias.elem_count()
    }

    /// Encoder weight, `(C, F)`.
    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Encoder bias, `(F)`.
    pub(crate) fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// Threshold, `(F)`, if the activation has one.
    pub(crate) fn threshold(&self) -> Option<&Tensor> {
        self.threshold.as_ref()
    }

    /// Applies a function to each tensor.
    pub(crate) fn mapped(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            weight: change(&self.weight)?,
            bias: change(&self.bias)?,
            activation: self.activation,
            threshold: self.threshold.as_ref().map(change).transpose()?,
        })
    }

    /// Multiplies the pre-activations by `factors`, `(F)`.
    pub(crate) fn scaled(&self, factors: &Tensor) -> Result<Self> {
        self.mapped(|tensor| tensor.broadcast_mul(factors))
    }

    /// Folds the subtraction of the mean over the width into the weight.
    pub(crate) fn of_centered(mut self) -> Result<Self> {
        self.weight = self.weight.broadcast_sub(&self.weight.mean_keepdim(0)?)?;
        Ok(self)
    }

    /// Computes the pre-activations `(N, F)` of rows `(N, C)`.
    pub(crate) fn pre_activations(&self, rows: &Tensor) -> Result<Tensor> {
        rows.matmul(&self.weight)?.broadcast_add(&self.bias)
    }

    /// Computes the latents `(N, F)` from the result of [`Self::pre_activations`].
    pub(crate) fn activate(&self, rows: &Tensor) -> Result<Tensor> {
        match (self.activation, &self.threshold) {
            (LatentActivation::TopK { k }, _) => rows.relu()? * mask_of_largest(rows, k)?,
            (_, Some(threshold)) => rows.relu()? * rows.broadcast_gt(threshold)?.to_dtype(rows.dtype())?,
            _ => rows.relu(),
        }
    }
}

/// Rejects a tensor of exponentials if any of them overflowed.
///
/// Finite tensors in the file can have infinite exponentials.
fn finite(key: &str, made: Tensor) -> std::result::Result<Tensor, FileError> {
    let largest = made.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    let refused = || FileError::Key {
        key: key.into(),
        expected: "values whose exponentials are finite".into(),
        found: "values that overflow".into(),
    };
    largest.is_finite().then_some(made).ok_or_else(refused)
}

/// Mask `(N, F)` of the `k` largest values in each row.
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
