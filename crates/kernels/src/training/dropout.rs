//! Dropout by a mask of bits, applied to the values and again to their gradient.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::arithmetic::Real;
use super::{elements, for_real, is_cpu_float};

/// `x` where `kept` says so, multiplied by `scale`, and zero elsewhere.
pub(crate) fn apply_dropout(x: &Tensor, kept: Vec<bool>, scale: f64) -> Result<Tensor> {
    if is_cpu_float(x) {
        x.contiguous()?.apply_op1(Mask { kept: kept.into(), scale })
    } else {
        let kept: Vec<u8> = kept.into_iter().map(u8::from).collect();
        (x * Tensor::from_vec(kept, x.shape(), x.device())?.to_dtype(x.dtype())?)? * scale
    }
}

struct Mask {
    kept: Arc<[bool]>,
    scale: f64,
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn forward<T: Real>(x: &CpuStorage, layout: &Layout, mask: &Mask) -> Result<CpuStorage> {
            let factors = [T::zero(), T::from_f64(mask.scale)];
            let values = elements::<T>(x, layout)?.iter().zip(mask.kept.iter());
            Ok(T::to_cpu_storage_owned(values.map(|(x, kept)| *x * factors[usize::from(*kept)]).collect()))
        }
        Ok((for_real!(x.dtype(), forward(x, layout, self))?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let again = Self { kept: Arc::clone(&self.kept), scale: self.scale };
        gradient.contiguous()?.apply_op1_no_bwd(&again).map(Some)
    }
}
