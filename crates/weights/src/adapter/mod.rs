//! LoRA adapters of PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).
//!
//! An adapter adds `scale · B A` to weights of its base model and replaces others. [`Checkpoint::with_adapters`] checks it
//! against the model, and merges each weight in f32 as it is read, before any packing or rounding.

mod change;
mod changes;
mod config;
mod folder;
mod names;

use crate::{Checkpoint, WeightsError};

pub(crate) use change::{Changes, changed};
pub use folder::Adapter;
pub(crate) use names::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, instead_of_model, note_beside};

impl Checkpoint {
    /// Applies adapters, each with a weight that multiplies what it adds: 1 applies it as it was trained. Parameters are
    /// merged in f32 as they are read.
    ///
    /// # Errors
    /// If a tensor does not fit the model or one is missing, or adapters cannot be combined. The message names the file and
    /// the tensors.
    pub fn with_adapters(mut self, adapters: &[(Adapter, f64)]) -> Result<Self, WeightsError> {
        self.check()?;
        for (adapter, weight) in adapters {
            changes::apply(&mut self, adapter, *weight)?;
            if adapter.folder() == self.folder() {
                self.source.notes.retain(|note| !note.contains(ADAPTER_CONFIG));
            }
        }
        Ok(self)
    }
}
