//! Messages and state shared between callers and the engine thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{Event, GenerationError, Request};
use tokio::sync::mpsc;

/// Engine capacity limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineOptions {
    /// Maximum number of concurrent completions.
    pub(crate) parallel: usize,
    /// Maximum number of waiting prompts.
    pub(crate) queue: usize,
    /// KV cache capacity in tokens, for prompts and completions together.
    pub(crate) kv_tokens: usize,
    /// Maximum number of prompt tokens prefilled between two decode steps.
    pub(crate) prefill_chunk: usize,
    /// Maximum time in the queue.
    pub(crate) queue_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Update {
    /// Event for a prompt, which is identified by its index in the call.
    Event { prompt: usize, event: Event },
    /// A prompt was rejected or failed, and the call ends.
    Refused { prompt: usize, error: GenerationError },
    /// The call failed; no further updates follow.
    Failed(ApiError),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EngineState {
    Running,
    /// All work has ended after [`Command::Drain`].
    Drained,
    Died(String),
}

pub(super) enum Command {
    Submit(Submitted),
    Ask {
        /// Id of the request.
        id: Arc<str>,
        question: Box<dyn FnOnce(&LoadedModel) + Send>,
    },
    Drain,
    Stop,
}

/// Call submitted to the engine thread.
pub(super) struct Submitted {
    /// Id of the request.
    pub(super) id: Arc<str>,
    pub(super) requests: Vec<Request>,
    pub(super) updates: mpsc::UnboundedSender<Update>,
    pub(super) at: Instant,
    /// Queue slots, one per prompt, each released on drop.
    pub(super) slots: Vec<QueueSlot>,
}

/// State shared by callers and the engine thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: EngineOptions,
    /// Number of waiting prompts.
    pub(super) queued: AtomicUsize,
    /// Number of waiting tokens: the prompts' own tokens and the new tokens that they request.
    pub(super) queued_tokens: AtomicUsize,
    /// Token rate, in tokens per second, as the bits of an `f64`; 0 until measured.
    pub(super) rate: AtomicU64,
    pub(super) draining: AtomicBool,
    /// Number of unfinished analyses.
    pub(super) analyses: AtomicUsize,
}

/// Queue slot for a prompt, released on drop.
#[derive(Debug)]
pub(super) struct QueueSlot {
    shared: Arc<Shared>,
    tokens: usize,
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        self.shared.queued_tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

/// RAII guard for an analysis; while it exists, a draining engine still answers questions.
#[derive(Debug)]
pub(crate) struct BegunAnalysis(pub(super) Arc<Shared>);

impl Drop for BegunAnalysis {
    fn drop(&mut self) {
        self.0.analyses.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Shared {
    /// Reserves a slot for each request, or none if too few are free.
    pub(super) fn reserve_slots(self: &Arc<Self>, requests: &[Request]) -> Option<Vec<QueueSlot>> {
        let max = self.options.queue;
        let taken = |queued: usize| queued.checked_add(requests.len()).filter(|queued| *queued <= max);
        self.queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        let slot = |request: &Request| {
            let new = request.config.max_new_tokens.saturating_mul(request.config.num_return_sequences);
            // Capped so that the sum over all prompts cannot overflow.
            let tokens = request.prompt.len().saturating_add(new).min(u32::MAX as usize);
            self.queued_tokens.fetch_add(tokens, Ordering::AcqRel);
            QueueSlot { shared: Arc::clone(self), tokens }
        };
        Some(requests.iter().map(slot).collect())
    }

    /// Estimated time until all waiting prompts are completed, at most a minute.
    pub(super) fn retry_after(&self) -> Duration {
        const MAX_SECONDS: f64 = 60.0;
        let rate = f64::from_bits(self.rate.load(Ordering::Acquire));
        let seconds = self.queued_tokens.load(Ordering::Acquire) as f64 / rate;
        Duration::from_secs_f64(if rate > 0.0 { seconds.ceil().clamp(1.0, MAX_SECONDS) } else { 1.0 })
    }
}
