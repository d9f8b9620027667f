//! Memory checks for models: WebAssembly addresses 4 GiB, and running out aborts with no message.

use candle_gpt2_engine::{EngineError, ModelOptions, WeightDType};
use candle_gpt2_weights::Checkpoint;

/// Number of bytes that WebAssembly can address.
const ADDRESSED: u64 = 4 << 30;
/// Approximate number of bytes that the engine, the tokenizer and files in memory need.
const OWN: u64 = 64 << 20;

/// Returns the number of bytes that a [`Session`](crate::Session) with this model needs.
///
/// This covers the weights, temporary memory while loading, and the KV caches of two full contexts: one for
/// completions and one for analyses.
///
/// # Errors
/// If the tensors do not match the model, or the weight type does not support them.
pub fn memory(checkpoint: &Checkpoint, options: &ModelOptions) -> Result<u64, EngineError> {
    let needed = options.memory_of(checkpoint)?;
    Ok(needed.total().saturating_add(needed.kv))
}

/// Checks that a model fits into memory; call this before loading the weights.
///
/// # Errors
/// If the model does not fit; the message contains the memory it needs and the precisions that fit. Also
/// if [`memory`] returns an error.
pub fn check_memory(checkpoint: &Checkpoint, options: &ModelOptions) -> Result<(), EngineError> {
    let needed = memory(checkpoint, options)?;
    let fits = |needed: u64| needed <= ADDRESSED - OWN;
    if fits(needed) {
        return Ok(());
    }
    let smaller = [WeightDType::F16, WeightDType::Q8, WeightDType::Q4].into_iter().filter_map(|dtype| {
        let options = ModelOptions { dtype: Some(dtype), ..options.clone() };
        let bytes = memory(checkpoint, &options).ok().filter(|bytes| fits(*bytes))?;
        Some(format!("{} ({})", dtype.name(), gigabytes(bytes)))
    });
    let smaller: Vec<String> = smaller.collect();
    let way_out = match smaller.as_slice() {
        [] => "it does not fit in any precision; use the `gpt2` program".to_owned(),
        smaller => format!("it fits in {}", smaller.join(", ")),
    };
    let what = format!(
        "this model needs {} of memory, but a page has at most {}; {way_out}",
        gigabytes(needed),
        gigabytes(ADDRESSED)
    );
    Err(EngineError::Options { what })
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}
