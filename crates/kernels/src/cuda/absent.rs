//! Stand-in for `cuda` in builds without the feature: no kernel applies.

use std::convert::Infallible;

use candle_core::{Device, Result, Tensor, Var};

use candle_gpt2_arithmetic::{AdamWStep, Dropout, Finish};

use crate::on_gpu::{Draws, LossOnGpu};

// Tests of the kernel declarations run without a GPU.
#[cfg(test)]
mod signatures;

/// Defines kernels that never apply, from their parameter and return types.
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

/// Graph of a recording, which cannot exist without CUDA.
#[derive(Debug)]
pub(crate) enum Graph {}

impl Graph {
    #[expect(unsafe_code, reason = "same signature as with CUDA")]
    pub(crate) unsafe fn of(_: &Device, _: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        candle_core::bail!("this program was built without CUDA; build it with --features cuda")
    }

    pub(crate) fn replay(&mut self) -> Result<()> {
        match *self {}
    }
}

/// Returns `None`: there is no device to keep uploads on.
pub(crate) fn kept_uploads(_: &Device) -> Option<Infallible> {
    None
}
