//! Whether a model has room: WebAssembly addresses 4 GiB, and what does not fit ends the engine without a word.

use candle_gpt2_engine::{EngineError, ModelOptions, WeightDType};
use candle_gpt2_weights::Checkpoint;

/// Bytes of a WebAssembly memory.
const ADDRESSED: u64 = 4 << 30;
/// What the engine itself, a tokenizer and the files in memory take of them: about.
const OWN: u64 = 64 << 20;

/// Bytes that a [`Session`](crate::Session) with this model needs: weights, what loading takes beside them, and the keys and values of
/// two full contexts, of the text that is written and of the one that is looked at.
///
/// # Errors
/// When the tensors are not those of the model, or weights cannot be held in the type.
pub fn memory(checkpoint: &Checkpoint, options: &ModelOptions) -> Result<u64, EngineError> {
    let needed = options.memory_of(checkpoint)?;
    Ok(needed.total().saturating_add(needed.kv))
}

/// Checks that a model has room, before anything of it is read.
///
/// # Errors
/// When it has none, with the figures and the precisions that would have; as [`memory`].
pub fn check_room(checkpoint: &Checkpoint, options: &ModelOptions) -> Result<(), EngineError> {
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
        [] => "it does not fit here in any precision; use the `gpt2` program".to_owned(),
        smaller => format!("it has room in {}", smaller.join(", ")),
    };
    let what = format!(
        "this model needs {} of memory, and a page has {} at most; {way_out}",
        gigabytes(needed),
        gigabytes(ADDRESSED)
    );
    Err(EngineError::Options { what })
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}
