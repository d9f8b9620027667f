//! The engine: one thread that owns the scheduler. Calls come over a channel, what happens to each goes back over its own, and
//! neither side blocks: neither the thread for a reader, nor a caller for the thread.

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
use calls::{BegunAnalysis, Command, Life, Shared, Submitted};
pub(crate) use calls::{EngineOptions, Update};
use worker::Worker;

/// The way to the engine's thread; a clone is the same engine. The thread ends with the last of them.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    life: watch::Receiver<Life>,
}

/// What happens to an accepted call. Dropping it cancels the call.
#[derive(Debug)]
pub(crate) struct Ticket {
    updates: mpsc::UnboundedReceiver<Update>,
    /// Texts that have not ended.
    unfinished: usize,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the memory for keys and values cannot be allocated, or the system gives no thread.
    pub(crate) fn start(
        model: LoadedModel,
        options: EngineOptions,
        metrics: Arc<Metrics>,
    ) -> Result<Self, GenerationError> {
        let (commands, received) = channel();
        let (life, seen) = watch::channel(Life::Running);
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
            let ended = catch_unwind(AssertUnwindSafe(|| worker.run()));
            let end = ended.unwrap_or_else(|panic| Life::Died(internal(panic.as_ref())));
            // The receiver may be gone.
            _ = life.send(end);
        };
        let thread = thread::Builder::new().name("engine".into()).spawn(run);
        thread.map_err(|error| GenerationError::Candle(candle_core::Error::wrap(error)))?;
        Ok(Self { commands, shared, metrics, life: seen })
    }

    /// Hands over the requests of a call with this id, which begin in turn with those of others. Never waits.
    ///
    /// # Errors
    /// When they do not all have room in the queue, or the server is about to end.
    pub(crate) fn submit(&self, id: &Arc<str>, requests: Vec<Request>) -> Result<Ticket, ApiError> {
        let refused = || {
            self.metrics.reject("draining");
            draining()
        };
        if self.is_draining() {
            return Err(refused());
        }
        let places = self.shared.places(&requests).ok_or_else(|| {
            self.metrics.reject("queue_full");
            queue_full(Some(self.shared.retry_after()))
        })?;
        let (updates, received) = mpsc::unbounded_channel();
        let unfinished = requests.iter().map(|request| request.config.num_return_sequences).sum();
        let submitted = Submitted { id: Arc::clone(id), requests, updates, at: Instant::now(), places };
        self.commands.send(Command::Submit(submitted)).map_err(|_| refused())?;
        Ok(Ticket { updates: received, unfinished })
    }

    /// Begins an analysis, which is a series of questions.
    ///
    /// # Errors
    /// When the server is about to end.
    pub(crate) fn begin_analysis(&self) -> Result<BegunAnalysis, ApiError> {
        self.shared.analyses.fetch_add(1, Ordering::AcqRel);
        let begun = BegunAnalysis(Arc::clone(&self.shared));
        if self.is_draining() { Err(draining()) } else { Ok(begun) }
    }

    /// Runs a short analysis of the model between two steps, for the request with this id. Failures are logged, even if the client has
    /// gone.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        id: &Arc<str>,
        question: impl FnOnce(&LoadedModel) -> Result<R, ApiError> + Send + 'static,
    ) -> impl Future<Output = Result<R, ApiError>> + Send {
        let (answer, received) = oneshot::channel();
        let of = Arc::clone(id);
        let question = Box::new(move |model: &LoadedModel| {
            let answered = question(model).map_err(|error| logged(&of, error));
            // The client may be gone.
            _ = answer.send(answered);
        });
        let is_sent = self.commands.send(Command::Ask { id: Arc::clone(id), question }).is_ok();
        let is_draining = self.is_draining();
        async move {
            let answered = if is_sent { received.await.ok() } else { None };
            // A question that panicked and an engine that has died are in the log.
            let none = || Err(if is_draining { draining() } else { ApiError::internal() });
            answered.unwrap_or_else(none)
        }
    }

    /// Refuses new and waiting requests; those that have begun continue.
    pub(crate) fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        // An engine that has ended has nothing to drain.
        _ = self.commands.send(Command::Drain);
    }

    /// Ends everything, telling the calls that the server is about to end.
    pub(crate) fn stop(&self) {
        self.shared.draining.store(true, Ordering::Release);
        _ = self.commands.send(Command::Stop);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Returns when nothing is left to do after [`Engine::drain`], or the engine has died.
    pub(crate) async fn drained(&self) {
        // An error says that the thread is gone.
        _ = self.life.clone().wait_for(|life| *life != Life::Running).await;
    }

    /// Returns when the engine has died, and says why.
    pub(crate) async fn died(&self) -> String {
        let mut life = self.life.clone();
        // An error says that the thread is gone.
        _ = life.wait_for(|life| matches!(life, Life::Died(_))).await;
        let last = life.borrow().clone();
        match last {
            Life::Died(why) => why,
            Life::Running => "its thread has ended".into(),
            // It ended in peace.
            Life::Drained => std::future::pending().await,
        }
    }
}

impl Ticket {
    /// What happens next; `None` when all texts have ended.
    pub(crate) async fn next(&mut self) -> Option<Update> {
        let update = self.updates.recv().await;
        match &update {
            Some(Update::Event { event, .. }) => {
                self.unfinished = self.unfinished.saturating_sub(usize::from(event.ends_text()));
            }
            Some(Update::Refused { .. } | Update::Failed(_)) => self.unfinished = 0,
            // The engine has gone in the middle of it.
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
        // An answer may come before its line.
        let started = Instant::now();
        while lines_with(id).is_empty() && started.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(5));
        }
        let lines = lines_with(id);
        assert!(lines.len() == 1 && lines[0].starts_with(beginning), "{lines:?}");
    }

    #[test]
    fn a_step_that_panics_is_one_line_of_the_log_with_its_requests() {
        let (runtime, engine, metrics) = start();
        let request = |processors: Vec<LogitsProcessor>| {
            let config = GenerationConfig { max_new_tokens: 200, ..GenerationConfig::default() };
            Request { processors, ..Request::new(vec![5], config) }
        };
        // It is being made when the other one fails.
        let mut beside = engine.submit(&"req-step-1".into(), vec![request(Vec::new())]).unwrap();
        assert!(matches!(runtime.block_on(beside.next()), Some(Update::Event { .. })));
        let breaks = LogitsProcessor::AllowedTokens(AllowedTokens::new(|_| panic!("a broken step")));
        let mut broken = engine.submit(&"req-step-2".into(), vec![request(vec![breaks])]).unwrap();
        assert!(matches!(
            runtime.block_on(broken.next()),
            Some(Update::Failed(_)) | Some(Update::Event { .. })
        ));
        while let Some(update) = runtime.block_on(beside.next()) {
            assert!(is_event_or_internal(&update), "{update:?}");
        }
        let expected = "failed: internal error, please report it: a broken step";
        let lines = lines_with("a broken step");
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].contains(expected) && lines[0].contains("req-step-1") && lines[0].contains("req-step-2")
        );
        assert_eq!(metrics.engine_panics.get(), 1);
        // It still serves.
        let mut after = engine.submit(&"req-step-3".into(), vec![request(Vec::new())]).unwrap();
        assert!(matches!(runtime.block_on(after.next()), Some(Update::Event { .. })));
    }

    #[test]
    fn a_question_that_panics_or_fails_is_one_line_of_the_log() {
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

        // This one's client is gone.
        drop(engine.ask(&"req-ask-3".into(), fails));
        assert_eq!(runtime.block_on(engine.ask(&"req-ask-4".into(), |_| Ok(5))), Ok(5));
        assert_logged("req-ask-3", "req-ask-3 failed: no such numbers");
        assert_eq!(lines_with("req-ask-4"), [""; 0]);
    }

    #[test]
    fn an_engine_whose_thread_panics_says_why_it_has_died() {
        let (runtime, engine, _) = start();
        let request =
            || Request::new(vec![5], GenerationConfig { max_new_tokens: 5, ..GenerationConfig::default() });
        let breaks = || LogitsProcessor::AllowedTokens(AllowedTokens::new(|_| panic!("broken twice")));
        for id in ["req-dead-1", "req-dead-2"] {
            let broken = Request { processors: vec![breaks()], ..request() };
            let mut ticket = engine.submit(&id.into(), vec![broken]).unwrap();
            while let Some(update) = runtime.block_on(ticket.next()) {
                assert!(is_event_or_internal(&update), "{update:?}");
            }
            assert_logged(id, &format!("{id} failed: internal error, please report it: broken twice"));
        }
        assert_eq!(runtime.block_on(engine.died()), "two steps have failed from within in a minute");
    }

    #[test]
    fn an_analysis_that_has_begun_is_finished_when_the_server_ends() {
        let (runtime, engine, _) = start();
        let begun = engine.begin_analysis().unwrap();
        engine.drain();
        for answer in [5, 6] {
            assert_eq!(runtime.block_on(engine.ask(&"req-drain-1".into(), move |_| Ok(answer))), Ok(answer));
        }
        assert_eq!(engine.begin_analysis().unwrap_err().code(), Some("server_draining"));
        drop(begun);
        runtime.block_on(engine.drained());

        // One that the second signal meets is not waited for.
        let (runtime, engine, _) = start();
        let _begun = engine.begin_analysis().unwrap();
        engine.stop();
        runtime.block_on(engine.drained());
    }
}
