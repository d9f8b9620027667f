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

/// The most new tokens of a row in a step that is recorded. Passes over longer drafts are computed like any other.
const MOST_TOKENS: usize = 8;

/// How far the recordings for a cache have come: of steps of one token for each row, of two, and so on.
#[derive(Debug, Default)]
pub(crate) struct Steps([Step; MOST_TOKENS]);

impl Steps {
    /// Of steps of so many tokens for each row; `None` if they are not recorded.
    pub(crate) fn of(&self, tokens: usize) -> Option<&Step> {
        self.0.get(tokens.checked_sub(1)?)
    }

    /// The same to change it.
    pub(crate) fn of_mut(&mut self, tokens: usize) -> Option<&mut Step> {
        self.0.get_mut(tokens.checked_sub(1)?)
    }
}

/// How far a recording for a cache has come.
#[derive(Debug)]
pub(crate) enum Step {
    /// This many steps were computed like any other pass.
    Counted(usize),
    /// A step was computed as it will be recorded, and has loaded what its kernels need.
    Prepared(StepMemory),
    /// The next step is replayed.
    Recorded(Recording, StepMemory),
    /// Steps cannot be recorded, for this reason; it may pass, but the attempt is made once for each cache.
    Never(String),
}

impl Default for Step {
    fn default() -> Self {
        Self::Counted(0)
    }
}

/// What a recording reads and writes besides weights, keys and values.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// `(B, T)` of u32.
    pub(crate) ids: Tensor,
    /// `(B, T)` of u32.
    pub(crate) positions: Tensor,
    /// `(B, T, V)`.
    pub(crate) logits: Tensor,
    pub(crate) model: Arc<()>,
}
