//! State of a cache's step recordings, which `recorder.rs` creates and replays.

use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2_kernels::Recording;

/// Records the steps of a model and its clones.
#[derive(Debug, Clone)]
pub(crate) struct StepRecorder {
    /// Identity of the weights, because a recording keeps reading the weights it was made with.
    pub(crate) model: Arc<()>,
}

/// Maximum number of new tokens per row in a recorded step.
///
/// Passes over longer drafts are not recorded.
const MAX_TOKENS: usize = 8;

/// Recording states of a cache, one per number of tokens per row.
#[derive(Debug)]
pub(crate) struct Steps<R = Recording>([Step<R>; MAX_TOKENS]);

impl<R> Default for Steps<R> {
    fn default() -> Self {
        Self(Default::default())
    }
}

impl<R> Steps<R> {
    /// Returns the state for steps of `tokens` tokens per row; `None` if such steps are never recorded.
    pub(crate) fn of(&self, tokens: usize) -> Option<&Step<R>> {
        self.0.get(tokens.checked_sub(1)?)
    }

    /// Mutable version of [`Steps::of`].
    pub(crate) fn of_mut(&mut self, tokens: usize) -> Option<&mut Step<R>> {
        self.0.get_mut(tokens.checked_sub(1)?)
    }
}

/// Recording state for steps of one size.
#[derive(Debug)]
pub(crate) enum Step<R = Recording> {
    /// Number of steps computed without recording so far.
    Counted(usize),
    /// A step has run with the kernels that will be recorded, so they are loaded.
    Prepared(StepMemory),
    /// The next step is replayed.
    Recorded(R, StepMemory),
    /// Recording failed for this reason; it is attempted only once per cache.
    Never(String),
}

impl<R> Default for Step<R> {
    fn default() -> Self {
        Self::Counted(0)
    }
}

/// Memory that a recording reads and writes, besides weights, keys and values.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// Token IDs, `(B, T)` of u32.
    pub(crate) ids: Tensor,
    /// Positions, `(B, T)` of u32.
    pub(crate) positions: Tensor,
    /// Logits, `(B, T, V)`.
    pub(crate) logits: Tensor,
    pub(crate) model: Arc<()>,
}
