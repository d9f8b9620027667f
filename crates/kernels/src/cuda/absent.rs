//! What `cuda` is in a build without the feature: nothing applies.

use candle_core::{Result, Tensor};

pub(crate) fn add_bias(_: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn add_bias_gelu(_: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn add_bias_residual(_: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
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
