//! Default model `models/stories`, built into the program; needs neither files nor a network.

use std::path::Path;

use candle_gpt2_weights::{Checkpoint, OpenOptions};

use crate::EngineError;

/// Name of the built-in model.
///
/// To use a folder of this name, write `./built-in`.
///
/// ```
/// use candle_gpt2_engine::{BUILT_IN, ModelOptions};
///
/// assert_eq!(ModelOptions::default().model.to_str(), Some(BUILT_IN));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const BUILT_IN: &str = "built-in";

/// Whether a nonexistent path is a misspelling of [`BUILT_IN`], such as `builtin`.
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

    let files = GivenFiles::of_bytes(BUILT_IN, candle_gpt2_stories::FILES);
    Ok(Checkpoint::open_given(files, options, &|_| ())?)
}

#[cfg(not(feature = "built-in"))]
pub(crate) fn open(_: &OpenOptions) -> Result<Checkpoint, EngineError> {
    Err(EngineError::NoBuiltIn { name: BUILT_IN })
}

/// Transcoders of the built-in model's MLPs, with one `cfg.json` and tensor file per block.
///
/// The files are in SAELens format. The slice is empty if the program was built without the model.
///
/// ```
/// assert_eq!(candle_gpt2_engine::built_in_transcoders().len(), 7);
/// ```
pub fn built_in_transcoders() -> &'static [(&'static str, &'static [u8])] {
    #[cfg(feature = "built-in")]
    return &candle_gpt2_stories::TRANSCODERS;
    #[cfg(not(feature = "built-in"))]
    &[]
}
