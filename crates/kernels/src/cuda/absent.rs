//! What `cuda` is in a build without the feature: nothing applies.

use std::convert::Infallible;

use candle_core::{Device, Result, Tensor};

use candle_gpt2_arithmetic::Finish;

// The tests of the declarations need no GPU.
#[cfg(test)]
mod signatures;

pub(crate) fn linear(
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
    _: Finish<&Tensor>,
) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn layer_norm(_: &Tensor, _: &Tensor, _: &Tensor, _: f64) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn prefix_attention(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: f64,
    _: &[usize],
) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn step_attention(_: [&Tensor; 3], _: [&Tensor; 2], _: f64, _: &Tensor) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn write_tokens(_: [&Tensor; 2], _: [&Tensor; 2], _: &[usize]) -> Result<bool> {
    Ok(false)
}

/// Work of a GPU that can be done again; there is none in a build without the feature `cuda`.
/// `candle_gpt2::Gpt2LMHeadModel::with_recorded_steps` uses it; [`prepared`] comes first.
#[derive(Debug)]
pub struct Recording(Infallible);

impl Recording {
    /// Records what `work` gives an NVIDIA GPU to do.
    ///
    /// # Errors
    /// Always: the feature `cuda` is off.
    ///
    /// # Safety
    /// None is asked for: there is no recording.
    #[expect(unsafe_code, reason = "as in a build with CUDA")]
    pub unsafe fn of(_: &Device, _: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        candle_core::bail!("this program was built without CUDA")
    }

    /// Does the recorded work once more.
    ///
    /// # Errors
    /// Never: there is none.
    pub fn replay(&mut self) -> Result<()> {
        match self.0 {}
    }
}

/// Does `work`, so that it can be recorded.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::prepared;
///
/// let sum = prepared(&Device::Cpu, || Tensor::new(&[1f32, 2., 4.], &Device::Cpu)?.sum_all())?;
/// assert_eq!(sum.to_scalar::<f32>()?, 7.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of `work`.
pub fn prepared<T>(_: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    work()
}
