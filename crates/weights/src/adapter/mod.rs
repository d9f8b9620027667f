//! PEFT's LoRA adapters: `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).
//!
//! An adapter adds `scale · B A` to some weights of its base model and replaces others.
//! [`Checkpoint::with_adapters`] checks it against the model. Each weight is merged in f32 when it is read,
//! before any packing or rounding.

mod change;
mod changes;
mod config;
mod folder;
mod names;

use crate::{Checkpoint, WeightsError};

pub(crate) use change::{Changes, changed};
pub use folder::Adapter;
pub(crate) use names::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, adjacent_note, instead_of_model};

impl Checkpoint {
    /// Applies adapters, each scaled by a weight; 1 applies the adapter as trained.
    ///
    /// Parameters are merged in f32 when they are read.
    ///
    /// # Errors
    /// If a tensor does not fit the model or is missing, or the adapters cannot be combined. The message
    /// names the file and the tensors.
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
