//! What `cuda` is in a build without the feature: nothing applies.

use std::convert::Infallible;

use candle_core::{Device, Result, Tensor, Var};

use candle_gpt2_arithmetic::{AdamWStep, Dropout, Finish};

use crate::on_gpu::{Draws, LossOnGpu};

// The tests of the declarations need no GPU.
#[cfg(test)]
mod signatures;

/// Kernels by what they take and return.
macro_rules! absent {
    ($($kernel:ident($($parameter:ty),*) $(-> $result:ty)?;)*) => {
        $(pub(crate) fn $kernel($(_: $parameter),*) -> Result<absent!(@ $($result)?)> {
            Ok(Default::default())
        })*
    };
    (@) => { Option<Tensor> };
    (@ $result:ty) => { $result };
}

absent! {
    linear(&Tensor, &Tensor, Option<&Tensor>, Finish<&Tensor>);
    layer_norm(&Tensor, &Tensor, &Tensor, f64);
    prefix_attention(&Tensor, &Tensor, &Tensor, f64, &[usize]);
    step_attention([&Tensor; 3], [&Tensor; 2], f64, &Tensor);
    write_tokens([&Tensor; 2], [&Tensor; 2], &[usize]) -> bool;
    dropout(&Tensor, Dropout, &Draws);
    gelu(&Tensor);
    gelu_backward(&Tensor, &Tensor);
    wide_norm(&Tensor, &Tensor, &Tensor, f64);
    wide_norm_backward(&Tensor, &Tensor, &Tensor, f64) -> Option<[Tensor; 2]>;
    heads_attention([&Tensor; 3], f64, &[usize], Option<Dropout>);
    heads_attention_backward([&Tensor; 3], &Tensor, [&Tensor; 3], f64, &[usize], Option<Dropout>) -> bool;
    head_loss([&Tensor; 2], &[u32], [bool; 2]) -> Option<LossOnGpu>;
    add_rows(&Tensor, &[usize], usize);
    adamw_step([&Var; 3], &Tensor, &AdamWStep) -> bool;
    sum_of_squares(&[Tensor]) -> Option<f64>;
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
