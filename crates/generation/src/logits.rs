//! Logits of the device as numbers of ours.

use candle_core::{DType, Tensor};

use crate::GenerationError;

/// Logits `(B, T, V)`, those of each row and token one after the other.
pub(crate) fn rows_of(logits: &Tensor) -> Result<Vec<Vec<f32>>, GenerationError> {
    Ok(logits.flatten(0, 1)?.to_dtype(DType::F32)?.to_vec2::<f32>()?)
}

#[expect(clippy::cast_possible_truncation, reason = "logits are f32, as in the reference")]
pub(crate) fn to_f32(number: f64) -> f32 {
    number as f32
}
