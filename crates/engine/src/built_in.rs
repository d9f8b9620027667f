//! The model inside the program, `models/stories`: what runs if none is named, from any folder and without a network.

use std::path::Path;

use candle_gpt2_weights::{Checkpoint, OpenOptions};

use crate::EngineError;

/// The name of the model inside the program. A folder of this name is `./built-in`.
///
/// ```
/// use candle_gpt2_engine::{BUILT_IN, ModelOptions};
///
/// assert_eq!(ModelOptions::default().model.to_str(), Some(BUILT_IN));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const BUILT_IN: &str = "built-in";

/// Whether a path is [`BUILT_IN`] in another spelling, such as `builtin`, and there is nothing of that name.
///
/// ```
/// use candle_gpt2_engine::{BUILT_IN, is_nearly_built_in};
///
/// assert!(is_nearly_built_in("Built_in".as_ref()));
/// assert!(!is_nearly_built_in(BUILT_IN.as_ref()));
/// ```
pub fn is_nearly_built_in(path: &Path) -> bool {
    let name = path.to_str().unwrap_or_default();
    let letters = name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase());
    name != BUILT_IN && !name.contains('/') && letters.eq("builtin".chars()) && !path.exists()
}

#[cfg(feature = "built-in")]
pub(crate) fn open(options: &OpenOptions) -> Result<Checkpoint, EngineError> {
    use candle_gpt2_weights::GivenFiles;

    let files = GivenFiles::new(BUILT_IN)
        .with_bytes("config.json", candle_gpt2_stories::CONFIG)
        .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
        .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
    Ok(Checkpoint::open_given(files, options, &|_| ())?)
}

#[cfg(not(feature = "built-in"))]
pub(crate) fn open(_: &OpenOptions) -> Result<Checkpoint, EngineError> {
    Err(EngineError::NoBuiltIn { name: BUILT_IN })
}

/// Transcoders of the MLPs of the model inside the program, one for each block: a `cfg.json` of SAELens and the file of its tensors.
/// None in a program without the model.
///
/// ```
/// assert_eq!(candle_gpt2_engine::built_in_transcoders().len(), 6);
/// ```
pub fn built_in_transcoders() -> &'static [(&'static str, &'static [u8])] {
    #[cfg(feature = "built-in")]
    return &candle_gpt2_stories::TRANSCODERS;
    #[cfg(not(feature = "built-in"))]
    &[]
}
