//! What compressing and decompressing ask of a model and of the caller.

use candle_gpt2_engine::{EngineError, LoadedModel, Reporter, WeightDType, device_name};
use candle_gpt2_kernels::Matrix;

use crate::CompressionError;

/// Refuses a model whose results differ from machine to machine; the type of its weights.
///
/// The layers of the blocks tell it: what was stored in bf16 is held in f32, and some types hold the embedding in another one.
pub(crate) fn weights_on_cpu(loaded: &LoadedModel) -> Result<WeightDType, CompressionError> {
    let error = || CompressionError::NotOnCpu { device: device_name(loaded.device()) };
    let block = loaded.model().transformer().blocks().first();
    match block.map(|block| block.attn().out_proj().weight()) {
        Some(Matrix::Packed(weight)) if loaded.device().is_cpu() => {
            weight.format().name().parse().map_err(|_| error())
        }
        _ => Err(error()),
    }
}

/// Ends a job that was interrupted.
pub(crate) fn check_wanted(reporter: &dyn Reporter) -> Result<(), CompressionError> {
    if reporter.is_interrupted() { Err(EngineError::Interrupted.into()) } else { Ok(()) }
}
