//! Products with packed weights.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Tensor};
use candle_gpt2_arithmetic::{Epilogue, Finish, PackedMatrix, PanelBias};

use crate::per_thread::{check_interrupted, is_interruptible};
use crate::training::elements;

/// Maximum number of multiply-adds between interrupt checks: a few hundredths of a second.
const UNINTERRUPTED: u64 = 1 << 33;

/// Name of the operation in error messages.
const READER: &str = "a product with packed weights";

/// Unpacks the weights into an f32 tensor `(out, in)`.
pub(crate) fn expanded(weight: &PackedMatrix) -> Result<Tensor> {
    let outputs: Vec<usize> = (0..weight.out_features()).collect();
    Tensor::from_vec(weight.rows(&outputs), (weight.out_features(), weight.in_features()), &Device::Cpu)
}

/// Product with packed weights, plus the bias, followed by tanh GELU if `gelu` is set.
///
/// A second input is added as a residual. Inputs must be contiguous.
pub(crate) struct PackedProduct {
    pub(crate) weight: Arc<PackedMatrix>,
    pub(crate) bias: Option<PanelBias>,
    pub(crate) gelu: bool,
}

impl PackedProduct {
    fn compute(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        finish: Finish<&[f32]>,
    ) -> Result<(CpuStorage, Shape)> {
        let mut shape = layout.dims().to_vec();
        let rows = shape.iter().rev().skip(1).product();
        if let Some(width) = shape.last_mut() {
            *width = self.weight.out_features();
        }
        check_interrupted()?;
        let x = elements(x, layout, READER)?;
        let (outputs, inputs) = (self.weight.out_features(), self.weight.in_features());
        let part = UNINTERRUPTED / (outputs as u64 * inputs as u64).max(1);
        let part = usize::try_from(part).unwrap_or(usize::MAX).max(1);
        let product = |first: usize, count: usize| {
            let finish = match finish {
                Finish::Add(residual) => Finish::Add(&residual[first * outputs..(first + count) * outputs]),
                finish => finish,
            };
            let epilogue = Epilogue { bias: self.bias.as_ref(), finish };
            self.weight.product(&x[first * inputs..(first + count) * inputs], count, epilogue)
        };
        if rows <= part || !is_interruptible() {
            return Ok((CpuStorage::F32(product(0, rows)), shape.into()));
        }
        let mut y = Vec::with_capacity(rows * outputs);
        for first in (0..rows).step_by(part) {
            check_interrupted()?;
            y.append(&mut product(first, part.min(rows - first)));
        }
        Ok((CpuStorage::F32(y), shape.into()))
    }
}

impl CustomOp1 for PackedProduct {
    fn name(&self) -> &'static str {
        "packed-product"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.compute(x, layout, if self.gelu { Finish::Gelu } else { Finish::Nothing })
    }

    /// Supports only products without GELU; layers with gradients apply GELU as a separate operation.
    ///
    /// The packed weights themselves are not trained.
    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        if self.gelu {
            return Err(candle_core::Error::BackwardNotSupported { op: CustomOp1::name(self) });
        }
        let weight = expanded(&self.weight)?;
        let rows = gradient.reshape(((), self.weight.out_features()))?;
        Ok(Some(rows.matmul(&weight)?.reshape(x.shape())?))
    }
}

impl CustomOp2 for PackedProduct {
    fn name(&self) -> &'static str {
        "packed-product-added"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.compute(x, x_layout, Finish::Add(elements(residual, residual_layout, READER)?))
    }
}
