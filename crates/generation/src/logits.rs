//! Conversion of logits to f32 on the host.

use candle_core::{DType, Tensor};

use crate::GenerationError;

/// Returns the rows of logits `(B, T, V)`, one for each token of each sequence.
pub(crate) fn rows_of(logits: &Tensor) -> Result<Vec<Vec<f32>>, GenerationError> {
    Ok(logits.flatten(0, 1)?.to_dtype(DType::F32)?.to_vec2::<f32>()?)
}

#[expect(clippy::cast_possible_truncation, reason = "logits are f32, as in the reference")]
pub(crate) fn to_f32(number: f64) -> f32 {
    number as f32
}
