//! Logits of the device as numbers of ours.

use candle_core::{DType, Tensor};

use crate::GenerationError;

/// Logits `(B, T, V)`, those of each row and token one after the other.
pub(crate) fn rows_of(logits: &Tensor) -> Result<Vec<Vec<f32>>, GenerationError> {
    Ok(logits.flatten(0, 1)?.to_dtype(DType::F32)?.to_vec2::<f32>()?)
}
