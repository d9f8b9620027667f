//! Engine: one thread that owns the scheduler.
//!
//! Calls arrive over a shared channel, and each call has its own channel for updates. Sends never block: the
//! thread does not wait for a client to read, and callers do not wait for the thread.

mod calls;
mod worker;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Instant;

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{GenerationError, Request};
use tokio::sync::{mpsc, oneshot, watch};

use crate::busy::{draining, queue_full};
use crate::fault::{internal, logged};
use crate::metrics::Metrics;
use calls::{BegunAnalysis, Command, EngineState, Shared, Submitted};
pub(crate) use calls::{EngineOptions, Update};
use worker::Worker;

/// Handle to the engine thread. Clones share the thread, which ends with the last handle.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    state: watch::Receiver<EngineState>,
}

/// Receiver for an accepted call's updates; dropping it cancels the call.
#[derive(Debug)]
pub(crate) struct Ticket {
    updates: mpsc::UnboundedReceiver<Update>,
    /// Number of unfinished completions.
    unfinished: usize,
}

impl Engine {
    /// Starts the engine thread.
    ///
    /// # Errors
    /// If the KV cache cannot be allocated or the thread cannot be spawned.
    pub(crate) fn start(
        model: LoadedModel,
        options: EngineOptions,
        metrics: Arc<Metrics>,
    ) -> Result<Self, GenerationError> {
        let (commands, received) = channel();
        let (ended, state) = watch::channel(EngineState::Running);
        let shared = Arc::new(Shared {
            options,
            queued: AtomicUsize::new(0),
            queued_tokens: AtomicUsize::new(0),
            rate: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            analyses: AtomicUsize::new(0),
        });
        let worker = Worker::new(model, Arc::clone(&shared), Arc::clone(&metrics), received)?;
        let run = move || {
            let end = catch_unwind(AssertUnwindSafe(|| worker.run()));
            let end = end.unwrap_or_else(|panic| EngineState::Died(internal(panic.as_ref())));
            // Fails if all handles have been dropped.
            _ = ended.send(end);
        };
        let thread = thread::Builder::new().name("engine".into()).spawn(run);
        thread.map_err(|error| GenerationError::Candle(candle_core::Error::wrap(error)))?;
        Ok(Self { commands, shared, metrics, state })
    }

    /// Submits a call's requests without waiting.
    ///
    /// The engine takes one request from each call in turn.
    ///
    /// # Errors
    /// If the queue has too few free slots or the server is shutting down.
    pub(crate) fn submit(&self, id: &Arc<str>, requests: Vec<Request>) -> Result<Ticket, ApiError> {
        let refused = || {
            self.metrics.reject("draining");
            draining()
        };
        if self.is_draining() {
            return Err(refused());
        }
        let slots = self.shared.reserve_slots(&requests).ok_or_else(|| {
            self.metrics.reject("queue_full");
            queue_full(Some(self.shared.retry_after()))
        })?;
        let (updates, received) = mpsc::unbounded_channel();
        let unfinished = requests.iter().map(|request| request.config.num_return_sequences).sum();
        let submitted = Submitted { id: Arc::clone(id), requests, updates, at: Instant::now(), slots };
        self.commands.send(Command::Submit(submitted)).map_err(|_| refused())?;
        Ok(Ticket { updates: received, unfinished })
    }

    /// Registers an analysis that is about to ask the model questions.
    ///
    /// # Errors
    /// If the server is shutting down.
    pub(crate) fn begin_analysis(&self) -> Result<BegunAnalysis, ApiError> {
        self.shared.analyses.fetch_add(1, Ordering::AcqRel);
        let begun = BegunAnalysis(Arc::clone(&self.shared));
        if self.is_draining() { Err(draining()) } else { Ok(begun) }
    }

    /// Runs a short computation on the model between two steps, for the request `id`.
    ///
    /// Failures are logged, even if the client has disconnected.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        id: &Arc<str>,
        question: impl FnOnce(&LoadedModel) -> Result<R, ApiError> + Send + 'static,
    ) -> impl Future<Output = Result<R, ApiError>> + Send {
        let (answer, received) = oneshot::channel();
        let of = Arc::clone(id);
        let question = Box::new(move |model: &LoadedModel| {
            let answered = question(model).map_err(|error| logged(&of, error));
            // Fails if the client has disconnected.
            _ = answer.send(answered);
        });
        let is_sent = self.commands.send(Command::Ask { id: Arc::clone(id), question }).is_ok();
        let is_draining = self.is_draining();
        async move {
            let answered = if is_sent { received.await.ok() } else { None };
            // No answer means that the question panicked or the engine died, which is already logged.
            let none = || Err(if is_draining { draining() } else { ApiError::internal() });
            answered.unwrap_or_else(none)
        }
    }

    /// Rejects new and waiting requests; started ones continue.
    pub(crate) fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        // Fails if the engine has ended, in which case nothing is left to drain.
        _ = self.commands.send(Command::Drain);
    }

    /// Ends all calls with a shutdown error.
    pub(crate) fn stop(&self) {
        self.shared.draining.store(true, Ordering::Release);
        _ = self.commands.send(Command::Stop);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Returns once no work is left after [`Engine::drain`], or once the engine has died.
    pub(crate) async fn drained(&self) {
        // An error means that the thread has ended.
        _ = self.state.clone().wait_for(|state| *state != EngineState::Running).await;
    }

    /// Waits until the engine dies, and returns the reason.
    pub(crate) async fn died(&self) -> String {
        let mut state = self.state.clone();
        // An error means that the thread has ended.
        _ = state.wait_for(|state| matches!(state, EngineState::Died(_))).await;
        let last = state.borrow().clone();
        match last {
            EngineState::Died(why) => why,
            EngineState::Running => "its thread exited".into(),
            // A drained engine ended normally.
            EngineState::Drained => std::future::pending().await,
        }
    }
}

impl Ticket {
    /// Next update; `None` when all completions have finished.
    pub(crate) async fn next(&mut self) -> Option<Update> {
        let update = self.updates.recv().await;
        match &update {
            Some(Update::Event { event, .. }) => {
                self.unfinished = self.unfinished.saturating_sub(usize::from(event.ends_text()));
            }
            Some(Update::Refused { .. } | Update::Failed(_)) => self.unfinished = 0,
            // The engine ended before the call was complete.
            None if self.unfinished > 0 => {
                self.unfinished = 0;
                return Some(Update::Failed(ApiError::internal()));
            }
            None => {}
        }
        update
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use candle_gpt2_engine::{ModelOptions, Silent};
    use candle_gpt2_generation::{AllowedTokens, GenerationConfig, LogitsProcessor};
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::log::tests::lines_with;

    fn start() -> (Runtime, Engine, Arc<Metrics>) {
        let model = ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap();
        let metrics = Arc::new(Metrics::new("f32"));
        let options = EngineOptions {
            parallel: 2,
            queue: 4,
            kv_tokens: 512,
            prefill_chunk: 32,
            queue_timeout: Duration::from_secs(60),
        };
        let engine = Engine::start(model, options, Arc::clone(&metrics)).unwrap();
        (Builder::new_current_thread().enable_time().build().unwrap(), engine, metrics)
    }

    fn is_event_or_internal(update: &Update) -> bool {
        match update {
            Update::Event { .. } => true,
            Update::Refused { .. } => false,
            Update::Failed(error) => *error == ApiError::internal(),
        }
    }

    #[track_caller]
    fn assert_logged(id: &str, beginning: &str) {
        // The answer may arrive before the log line is written.
        let started = Instant::now();
        while lines_with(id).is_empty() && started.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(5));
        }
        let lines = lines_with(id);
        assert!(lines.len() == 1 && lines[0].starts_with(beginning), "{lines:?}");
    }

    #[test]
    fn step_panic_is_logged_once_with_its_requests() {
        let (runtime, engine, metrics) = start();
        let request = |processors: Vec<LogitsProcessor>| {
            let config = GenerationConfig { max_new_tokens: 200, ..GenerationConfig::default() };
            Request { processors, ..Request::new(vec![5], config) }
        };
        // This request is still running when `broken` fails.
        let mut concurrent = engine.submit(&"req-step-1".into(), vec![request(Vec::new())]).unwrap();
        assert!(matches!(runtime.block_on(concurrent.next()), Some(Update::Event { .. })));
        let panics = LogitsProcessor::AllowedTokens(AllowedTokens::new(|_| panic!("a broken step")));
        let mut broken = engine.submit(&"req-step-2".into(), vec![request(vec![panics])]).unwrap();
        assert!(matches!(
            runtime.block_on(broken.next()),
            Some(Update::Failed(_)) | Some(Update::Event { .. })
        ));
        while let Some(update) = runtime.block_on(concurrent.next()) {
            assert!(is_event_or_internal(&update), "{update:?}");
        }
        let expected = "failed: internal error, please report it: a broken step";
        let lines = lines_with("a broken step");
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].contains(expected) && lines[0].contains("req-step-1") && lines[0].contains("req-step-2")
        );
        assert_eq!(metrics.engine_panics.get(), 1);
        // The engine still serves requests.
        let mut after = engine.submit(&"req-step-3".into(), vec![request(Vec::new())]).unwrap();
        assert!(matches!(runtime.block_on(after.next()), Some(Update::Event { .. })));
    }

    #[test]
    fn failed_or_panicked_ask_is_logged_once() {
        let (runtime, engine, metrics) = start();
        let panics = |_: &LoadedModel| -> Result<(), ApiError> { panic!("a broken question") };
        let answer = runtime.block_on(engine.ask(&"req-ask-1".into(), panics));
        assert_eq!(answer, Err(ApiError::internal()));
        assert_logged("req-ask-1", "req-ask-1 failed: internal error, please report it: a broken question");
        assert_eq!(metrics.engine_panics.get(), 1);

        let fails = |_: &LoadedModel| Err::<(), _>(ApiError::failed("no such numbers"));
        let answer = runtime.block_on(engine.ask(&"req-ask-2".into(), fails));
        assert_eq!(answer, Err(ApiError::internal()));
        assert_logged("req-ask-2", "req-ask-2 failed: no such numbers");

        // The client that sent this request has disconnected.
        drop(engine.ask(&"req-ask-3".into(), fails));
        assert_eq!(runtime.block_on(engine.ask(&"req-ask-4".into(), |_| Ok(5))), Ok(5));
        assert_logged("req-ask-3", "req-ask-3 failed: no such numbers");
        assert_eq!(lines_with("req-ask-4"), [""; 0]);
    }

    #[test]
    fn engine_reports_why_its_thread_died() {
        let (runtime, engine, _) = start();
        let request =
            || Request::new(vec![5], GenerationConfig { max_new_tokens: 5, ..GenerationConfig::default() });
        let panics = || LogitsProcessor::AllowedTokens(AllowedTokens::new(|_| panic!("broken twice")));
        for id in ["req-dead-1", "req-dead-2"] {
            let broken = Request { processors: vec![panics()], ..request() };
            let mut ticket = engine.submit(&id.into(), vec![broken]).unwrap();
            while let Some(update) = runtime.block_on(ticket.next()) {
                assert!(is_event_or_internal(&update), "{update:?}");
            }
            assert_logged(id, &format!("{id} failed: internal error, please report it: broken twice"));
        }
        assert_eq!(runtime.block_on(engine.died()), "the engine panicked twice within a minute");
    }

    #[test]
    fn drain_waits_for_running_analyses() {
        let (runtime, engine, _) = start();
        let analysis = engine.begin_analysis().unwrap();
        engine.drain();
        for answer in [5, 6] {
            assert_eq!(runtime.block_on(engine.ask(&"req-drain-1".into(), move |_| Ok(answer))), Ok(answer));
        }
        assert_eq!(engine.begin_analysis().unwrap_err().code(), Some("server_draining"));
        drop(analysis);
        runtime.block_on(engine.drained());

        // After `stop`, which a second signal triggers, the engine does not wait for analyses.
        let (runtime, engine, _) = start();
        let _analysis = engine.begin_analysis().unwrap();
        engine.stop();
        runtime.block_on(engine.drained());
    }
}
