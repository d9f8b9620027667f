//! The model inside the program, `models/shakespeare`: what runs where none is named, from any folder and without a network.

use gpt2_weights::Checkpoint;

use crate::EngineError;

/// The name of the model inside the program. A folder of this name is `./built-in`.
pub const BUILT_IN: &str = "built-in";

#[cfg(feature = "built-in")]
pub(crate) fn open() -> Result<Checkpoint, EngineError> {
    use gpt2_weights::EmbeddedFiles;

    // These stand outside this crate, so it compiles inside the repository only.
    const FILES: EmbeddedFiles = EmbeddedFiles {
        config: include_str!("../../../models/shakespeare/config.json"),
        tokenizer: include_str!("../../../models/shakespeare/tokenizer.json"),
        weights: include_bytes!("../../../models/shakespeare/model.safetensors"),
    };
    Ok(Checkpoint::from_embedded(BUILT_IN, FILES)?)
}

#[cfg(not(feature = "built-in"))]
pub(crate) fn open() -> Result<Checkpoint, EngineError> {
    Err(EngineError::NoBuiltIn { name: BUILT_IN })
}
