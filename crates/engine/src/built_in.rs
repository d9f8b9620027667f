//! The model inside the program, `models/shakespeare`: what runs where none is named, from any folder and without a network.

use gpt2_weights::{Checkpoint, OpenOptions};

use crate::EngineError;

/// The name of the model inside the program. A folder of this name is `./built-in`.
pub const BUILT_IN: &str = "built-in";

#[cfg(feature = "built-in")]
pub(crate) fn open(options: &OpenOptions) -> Result<Checkpoint, EngineError> {
    use std::borrow::Cow;

    use gpt2_weights::{EmbeddedFiles, WeightsError};

    // These stand outside this crate, so it compiles inside the repository only.
    const FILES: EmbeddedFiles = EmbeddedFiles {
        config: include_str!("../../../models/shakespeare/config.json"),
        tokenizer: include_str!("../../../models/shakespeare/tokenizer.json"),
        generation_config: None,
        weights: Cow::Borrowed(include_bytes!("../../../models/shakespeare/model.safetensors")),
    };
    let checkpoint = Checkpoint::from_embedded(BUILT_IN, FILES)?;
    let told = checkpoint.config().n_head;
    match options.n_head.filter(|named| *named != told) {
        Some(named) => Err(WeightsError::OtherHeads { path: BUILT_IN.into(), told, named }.into()),
        None => Ok(checkpoint),
    }
}

#[cfg(not(feature = "built-in"))]
pub(crate) fn open(_: &OpenOptions) -> Result<Checkpoint, EngineError> {
    Err(EngineError::NoBuiltIn { name: BUILT_IN })
}
