//! What `cuda` is in a build without the feature: nothing applies.

use std::convert::Infallible;

use candle_core::{Device, Result, Tensor, Var};

use candle_gpt2_arithmetic::{AdamWStep, Dropout, Finish};

use crate::training::Draws;

// The tests of the declarations need no GPU.
#[cfg(test)]
mod signatures;

/// Kernels by what they take.
macro_rules! absent {
    ($($kernel:ident($($parameter:ty),*);)*) => {
        $(pub(crate) fn $kernel($(_: $parameter),*) -> Result<Option<Tensor>> {
            Ok(None)
        })*
    };
}

absent! {
    linear(&Tensor, &Tensor, Option<&Tensor>, Finish<&Tensor>);
    layer_norm(&Tensor, &Tensor, &Tensor, f64);
    prefix_attention(&Tensor, &Tensor, &Tensor, f64, &[usize]);
    step_attention([&Tensor; 3], [&Tensor; 2], f64, &Tensor);
    drop(&Tensor, Dropout, &Draws);
}

pub(crate) fn adamw_step(_: [&Var; 3], _: &Tensor, _: &AdamWStep) -> Result<bool> {
    Ok(false)
}

pub(crate) fn sum_of_squares(_: &[Tensor]) -> Result<Option<f64>> {
    Ok(None)
}

pub(crate) fn write_tokens(_: [&Tensor; 2], _: [&Tensor; 2], _: &[usize]) -> Result<bool> {
    Ok(false)
}

/// The work of a recording; there is none.
#[derive(Debug)]
pub(crate) enum Graph {}

impl Graph {
    #[expect(unsafe_code, reason = "as in a build with CUDA")]
    pub(crate) unsafe fn of(_: &Device, _: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        candle_core::bail!("this program was built without CUDA")
    }

    pub(crate) fn replay(&mut self) -> Result<()> {
        match *self {}
    }
}

/// There is nothing that a device could keep.
pub(crate) fn kept_uploads(_: &Device) -> Option<Infallible> {
    None
}
