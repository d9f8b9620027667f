//! What goes between callers and the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{Event, GenerationError, Request};
use tokio::sync::mpsc;

/// What an engine holds at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineOptions {
    /// Most texts that are made at once.
    pub(crate) parallel: usize,
    /// Most prompts that wait.
    pub(crate) queue: usize,
    /// Tokens that there is memory for, those of prompts and texts.
    pub(crate) kv_tokens: usize,
    /// Most tokens of prompts that are computed between two tokens of a text.
    pub(crate) prefill_chunk: usize,
    /// How long a call may wait before it begins.
    pub(crate) queue_timeout: Duration,
}

#[derive(Debug)]
pub(crate) enum Update {
    /// Of a prompt, by its place in the call.
    Event { prompt: usize, event: Event },
    /// A prompt cannot be continued, which ends the call; nothing more comes.
    Refused { prompt: usize, error: GenerationError },
    /// The call cannot continue; nothing more comes.
    Failed(ApiError),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Life {
    Running,
    /// After [`Command::Drain`]: nothing is left to do.
    Drained,
    Died(String),
}

pub(super) enum Command {
    Submit(Submitted),
    Ask {
        /// That of the request.
        id: Arc<str>,
        question: Box<dyn FnOnce(&LoadedModel) + Send>,
    },
    Drain,
    Stop,
}

/// A call on its way to the thread.
pub(super) struct Submitted {
    /// That of the request.
    pub(super) id: Arc<str>,
    pub(super) requests: Vec<Request>,
    pub(super) updates: mpsc::UnboundedSender<Update>,
    pub(super) at: Instant,
    /// Its place in the queue, which is free when the last of it is dropped.
    pub(super) places: Vec<Place>,
}

/// What callers and the thread both look at.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: EngineOptions,
    /// Prompts that wait.
    pub(super) queued: AtomicUsize,
    /// Their tokens, and those that they ask for.
    pub(super) queued_tokens: AtomicUsize,
    /// Tokens in a second, as bits of an `f64`; 0 until known.
    pub(super) rate: AtomicU64,
    pub(super) draining: AtomicBool,
    /// Analyses that have begun.
    pub(super) analyses: AtomicUsize,
}

/// A prompt's place in the queue; free when dropped.
#[derive(Debug)]
pub(super) struct Place {
    shared: Arc<Shared>,
    tokens: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        self.shared.queued_tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

/// An analysis that has begun: a server that is about to end answers its questions until this is dropped.
#[derive(Debug)]
pub(crate) struct BegunAnalysis(pub(super) Arc<Shared>);

impl Drop for BegunAnalysis {
    fn drop(&mut self) {
        self.0.analyses.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Shared {
    /// Takes a place for each of these requests, or none.
    pub(super) fn places(self: &Arc<Self>, requests: &[Request]) -> Option<Vec<Place>> {
        let most = self.options.queue;
        let taken = |queued: usize| queued.checked_add(requests.len()).filter(|queued| *queued <= most);
        self.queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        let place = |request: &Request| {
            let new = request.config.max_new_tokens.saturating_mul(request.config.num_return_sequences);
            // Far from overflow, however many there are.
            let tokens = request.prompt.len().saturating_add(new).min(u32::MAX as usize);
            self.queued_tokens.fetch_add(tokens, Ordering::AcqRel);
            Place { shared: Arc::clone(self), tokens }
        };
        Some(requests.iter().map(place).collect())
    }

    /// When what waits now is probably done.
    pub(super) fn retry_after(&self) -> Duration {
        const LONGEST: f64 = 60.0;
        let rate = f64::from_bits(self.rate.load(Ordering::Acquire));
        let seconds = self.queued_tokens.load(Ordering::Acquire) as f64 / rate;
        Duration::from_secs_f64(if rate > 0.0 { seconds.ceil().clamp(1.0, LONGEST) } else { 1.0 })
    }
}
