//! The model that the program carries, `models/shakespeare`: what runs where `--model` is absent, from any folder and
//! without a network.

use std::borrow::Cow;
use std::path::Path;

use anyhow::Result;
use gpt2_weights::{Checkpoint, EmbeddedFiles};

/// What `--model` calls it. A folder of this name is `./built-in`.
pub(crate) const NAME: &str = "built-in";

const FILES: EmbeddedFiles<'_> = EmbeddedFiles {
    config: include_str!("../../../models/shakespeare/config.json"),
    tokenizer: include_str!("../../../models/shakespeare/tokenizer.json"),
    weights: Cow::Borrowed(include_bytes!("../../../models/shakespeare/model.safetensors")),
};

/// Opens it, where `path` is its name.
pub(crate) fn open(path: &Path) -> Result<Option<Checkpoint>> {
    if path != Path::new(NAME) {
        return Ok(None);
    }
    Ok(Some(Checkpoint::from_embedded(NAME, FILES)?))
}
