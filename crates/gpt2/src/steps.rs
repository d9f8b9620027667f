//! How far the recording of the steps of a cache has come. `recorder.rs` makes and replays it.

use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2_kernels::Recording;

/// Records the steps of a model and its clones.
#[derive(Debug, Clone)]
pub(crate) struct StepRecorder {
    /// Identifies these weights: a recording keeps reading those that it was made with.
    pub(crate) model: Arc<()>,
}

/// How far the recording for a cache has come.
#[derive(Debug)]
pub(crate) enum Steps {
    /// This many steps were computed like any other pass.
    Counted(usize),
    /// A step was computed as it will be recorded, and has loaded what its kernels need.
    Prepared(StepMemory),
    /// The next step is replayed.
    Recorded(Recording, StepMemory),
    /// Steps cannot be recorded, for this reason; it may pass, but the attempt is made once for each cache.
    Never(String),
}

impl Default for Steps {
    fn default() -> Self {
        Self::Counted(0)
    }
}

/// What a recording reads and writes besides weights, keys and values.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// `(B, 1)` of u32.
    pub(crate) ids: Tensor,
    /// `(B)` of u32.
    pub(crate) lengths: Tensor,
    /// `(B, 1, V)`.
    pub(crate) logits: Tensor,
    pub(crate) model: Arc<()>,
}
