//! Checks for unsuitable models and for interruptions, shared by compression and decompression.

use candle_gpt2_engine::{EngineError, LoadedModel, Reporter, WeightDType, device_name};
use candle_gpt2_kernels::Matrix;

use crate::CompressionError;

/// Returns the dtype of the weights, or an error if results would depend on the machine.
///
/// The blocks' layers determine the dtype. Weights stored in bf16 are held in f32, and some dtypes (such
/// as q4) keep the embedding in another dtype.
pub(crate) fn weights_on_cpu(loaded: &LoadedModel) -> Result<WeightDType, CompressionError> {
    let error = || CompressionError::NotOnCpu { device: device_name(loaded.device()) };
    let block = loaded.model().transformer().blocks().first();
    match block.map(|block| block.attn().out_proj().weight()) {
        Some(Matrix::Packed(weight)) if loaded.device().is_cpu() => {
            weight.dtype().name().parse().map_err(|_| error())
        }
        _ => Err(error()),
    }
}

/// Returns an error if the job was interrupted.
pub(crate) fn check_interrupted(reporter: &dyn Reporter) -> Result<(), CompressionError> {
    if reporter.is_interrupted() { Err(EngineError::Interrupted.into()) } else { Ok(()) }
}
