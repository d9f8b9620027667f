//! Engine thread: processes commands, feeds the scheduler and forwards its events.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::{CallEvent, CallId, CompletionDriver, LoadedModel};
use candle_gpt2_generation::{Event, GenerationError, Request, Scheduler, SchedulerOptions};
use tokio::sync::mpsc::UnboundedSender;

use super::calls::{Command, EngineState, QueueSlot, Shared, Submitted, Update};
use crate::busy::{draining, queue_timeout};
use crate::fault::internal;
use crate::log::log_failure;
use crate::metrics::Metrics;

/// Period within which a second panicking step kills the engine.
const PANIC_WINDOW: Duration = Duration::from_secs(60);
/// Number of prefill chunks per step while no completion is being decoded.
const IDLE_CHUNKS: usize = 4;
/// Maximum number of request ids in one log line.
const MAX_LISTED: usize = 64;
/// Time that a draining thread waits for a question before it checks for unfinished analyses.
const NEXT_QUESTION: Duration = Duration::from_millis(20);

pub(super) struct Worker {
    model: LoadedModel,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    commands: Receiver<Command>,
    texts: CompletionDriver<Caller>,
    panicked: Option<Instant>,
    is_draining: bool,
    /// Whether unfinished work is abandoned, including analyses.
    is_stopped: bool,
}

/// Client that submitted a call.
struct Caller {
    id: Arc<str>,
    updates: UnboundedSender<Update>,
    at: Instant,
    prompts: Vec<Prompt>,
    /// Whether any prompt of the call has started.
    has_begun: bool,
}

struct Prompt {
    tokens: usize,
    /// Queue slot; `None` once the prompt is scheduled and no longer waits.
    slot: Option<QueueSlot>,
    /// Time of each completion's last token.
    texts: Vec<Option<Instant>>,
}

impl Caller {
    fn send(&self, update: Update) {
        // Fails if the caller no longer listens, which `is_gone` detects.
        _ = self.updates.send(update);
    }

    fn is_gone(&self) -> bool {
        self.updates.is_closed()
    }

    fn waits(&self) -> bool {
        !self.has_begun
    }
}

impl Worker {
    pub(super) fn new(
        model: LoadedModel,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
        commands: Receiver<Command>,
    ) -> Result<Self, GenerationError> {
        let texts = CompletionDriver::new(scheduler(&model, &shared)?);
        Ok(Self {
            model,
            shared,
            metrics,
            commands,
            texts,
            panicked: None,
            is_draining: false,
            is_stopped: false,
        })
    }

    /// Runs until the engine is drained, dies or has no handles left; returns its final state.
    pub(super) fn run(mut self) -> EngineState {
        loop {
            if !self.take_commands() {
                return EngineState::Drained;
            }
            self.drop_disconnected();
            self.end_timed_out();
            self.feed();
            if !self.texts.is_idle()
                && let Err(why) = self.step()
            {
                self.fail_all(|_| true, ApiError::internal);
                return EngineState::Died(why);
            }
            self.update_gauges();
            if self.is_draining && self.texts.is_idle() && self.analyses() == 0 {
                return EngineState::Drained;
            }
        }
    }

    /// Processes all pending commands; waits for one if the engine is idle.
    ///
    /// Returns false once no further command can arrive.
    fn take_commands(&mut self) -> bool {
        loop {
            let is_busy = !self.texts.is_idle();
            let command = match self.commands.try_recv() {
                Err(TryRecvError::Empty) if is_busy => return true,
                Err(TryRecvError::Empty) if self.is_draining => match self.analyses() {
                    0 => return true,
                    // Wait for the next question, with a timeout because an analysis sends no command when it
                    // ends.
                    _ => match self.commands.recv_timeout(NEXT_QUESTION) {
                        Ok(command) => Some(command),
                        Err(_) => return true,
                    },
                },
                Err(TryRecvError::Empty) => self.commands.recv().ok(),
                Err(TryRecvError::Disconnected) => None,
                Ok(command) => Some(command),
            };
            let Some(command) = command else { return false };
            self.handle_command(command);
            if !is_busy {
                return true;
            }
        }
    }

    /// Number of unfinished analyses, which the engine waits for.
    fn analyses(&self) -> usize {
        if self.is_stopped { 0 } else { self.shared.analyses.load(Ordering::Acquire) }
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit(submitted) => self.accept(submitted),
            Command::Ask { id, question } => {
                // A panic drops the question's answer channel, so the caller receives an error.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| question(&self.model))) {
                    self.metrics.engine_panics.inc();
                    log_failure(&id, internal(panic.as_ref()));
                }
            }
            Command::Drain => {
                self.is_draining = true;
                self.fail_all(Caller::waits, draining);
            }
            Command::Stop => {
                (self.is_draining, self.is_stopped) = (true, true);
                self.fail_all(|_| true, draining);
            }
        }
    }

    fn accept(&mut self, submitted: Submitted) {
        let Submitted { id, requests, updates, at, slots } = submitted;
        let prompt = |(request, slot): (&Request, QueueSlot)| {
            let texts = vec![None; request.config.num_return_sequences];
            Prompt { tokens: request.prompt.len(), slot: Some(slot), texts }
        };
        let prompts = requests.iter().zip(slots).map(prompt).collect();
        let caller = Caller { id, updates, at, prompts, has_begun: false };
        if self.is_draining {
            caller.send(Update::Failed(draining()));
        } else {
            self.texts.begin(requests, caller);
        }
    }

    /// Feeds the scheduler up to its maximum batch size, with one prompt from each call in turn.
    fn feed(&mut self) {
        while let Some((call, prompt, taken)) = self.texts.feed(self.shared.options.parallel) {
            if let Some(caller) = self.texts.owner(call) {
                caller.has_begun = true;
                caller.prompts[prompt].slot = None;
            }
            // Rejects the whole call, because its other prompts' results could not be used.
            taken.unwrap_or_else(|error| self.refuse(call, prompt, error));
        }
    }

    /// Ends a call after one of its prompts was rejected or failed.
    fn refuse(&mut self, call: CallId, prompt: usize, error: GenerationError) {
        if let Some(caller) = self.texts.end(call) {
            caller.send(Update::Refused { prompt, error });
        }
    }

    /// Drops calls whose clients have disconnected.
    fn drop_disconnected(&mut self) {
        let gone = self.end_all(Caller::is_gone, |_| ());
        self.metrics.cancelled.inc_by(gone as u64);
    }

    /// Ends calls that timed out in the queue before any prompt started.
    fn end_timed_out(&mut self) {
        let (max_wait, shared) = (self.shared.options.queue_timeout, Arc::clone(&self.shared));
        let is_late = |caller: &Caller| caller.waits() && caller.at.elapsed() > max_wait;
        let late = self.end_all(is_late, |caller| {
            caller.send(Update::Failed(queue_timeout(Some(shared.retry_after()))));
        });
        (0..late).for_each(|_| self.metrics.reject("queue_timeout"));
    }

    /// Ends the calls of all wanted callers, passes each caller to `on_end` and returns the count.
    fn end_all(&mut self, is_wanted: impl Fn(&Caller) -> bool, on_end: impl Fn(&Caller)) -> usize {
        let wanted = self.texts.owners().filter(|(_, caller)| is_wanted(caller)).map(|(call, _)| call);
        let wanted: Vec<CallId> = wanted.collect();
        wanted.iter().filter_map(|call| self.texts.end(*call)).for_each(|caller| on_end(&caller));
        wanted.len()
    }

    fn fail_all(&mut self, is_wanted: impl Fn(&Caller) -> bool, failure: fn() -> ApiError) {
        self.end_all(is_wanted, |caller| caller.send(Update::Failed(failure())));
    }

    /// Runs one scheduler step. An error means that the engine cannot continue.
    fn step(&mut self) -> Result<(), String> {
        let start = Instant::now();
        let chunk_tokens = self.chunk_tokens();
        if let Some(scheduler) = self.texts.scheduler() {
            scheduler.set_chunk_tokens(chunk_tokens);
        }
        let stepped = catch_unwind(AssertUnwindSafe(|| self.texts.step(&|| ControlFlow::Continue(()))));
        self.metrics.engine_steps.inc();
        match stepped {
            Ok((happened, failure)) => {
                let tokens: usize = happened.into_iter().map(|happened| self.forward(happened)).sum();
                match failure {
                    None => self.measure(tokens, start.elapsed()),
                    // The scheduler has already ended all its requests.
                    Some(error) => self.fail_started(&error.to_string()),
                }
                Ok(())
            }
            Err(panic) => {
                self.metrics.engine_panics.inc();
                let rebuilt = self.texts.rebuild(|| scheduler(&self.model, &self.shared));
                self.fail_started(&internal(panic.as_ref()));
                rebuilt.map_err(|error| error.to_string())?;
                let again = self.panicked.replace(start).is_some_and(|before| start - before < PANIC_WINDOW);
                if again { Err("the engine panicked twice within a minute".into()) } else { Ok(()) }
            }
        }
    }

    /// Maximum number of prompt tokens to prefill in the next step.
    ///
    /// Large chunks are more efficient, and delay no one while nothing is being decoded. A small batch has
    /// short decode steps, so a chunk delays it relatively more than a large batch.
    fn chunk_tokens(&mut self) -> usize {
        /// Number of prompt tokens per completion at which a chunk takes about as long as a decode step.
        const FOR_EACH_TEXT: usize = 4;
        let most = self.shared.options.prefill_chunk;
        match self.texts.scheduler().map_or(0, |scheduler| scheduler.decoding()) {
            0 => most.saturating_mul(IDLE_CHUNKS),
            decoding => decoding.saturating_mul(FOR_EACH_TEXT).clamp(most.div_ceil(2), most),
        }
    }

    /// Fails all started calls and logs a single line that lists them.
    fn fail_started(&mut self, cause: &str) {
        let begun = self.texts.owners().filter(|(_, caller)| caller.has_begun);
        let ids: Vec<&str> = begun.map(|(_, caller)| &*caller.id).collect();
        let listed = ids.iter().take(MAX_LISTED).copied().collect::<Vec<_>>().join(", ");
        let ids = match ids.len().saturating_sub(MAX_LISTED) {
            0 if ids.is_empty() => "a step".to_owned(),
            0 => listed,
            more => format!("{listed} and {more} more"),
        };
        log_failure(&ids, cause);
        self.fail_all(|caller| caller.has_begun, ApiError::internal);
    }

    /// Forwards an event to its caller and returns the number of tokens that the event represents.
    fn forward(&mut self, CallEvent { call, prompt, event, is_last }: CallEvent) -> usize {
        let Some(caller) = self.texts.owner(call) else { return 0 };
        let of_prompt = &mut caller.prompts[prompt];
        let now = Instant::now();
        let since_call = (now - caller.at).as_secs_f64();
        let mut computed = 0;
        match &event {
            Event::Begun { cached_tokens, .. } => {
                computed = of_prompt.tokens - cached_tokens;
                self.metrics.prompt_tokens.inc_by(of_prompt.tokens as u64);
                self.metrics.cached_tokens.inc_by(*cached_tokens as u64);
                self.metrics.queue.observe(since_call);
            }
            Event::Token { sequence, .. } => {
                computed = 1;
                self.metrics.generated_tokens.inc();
                match of_prompt.texts.get_mut(*sequence).and_then(|last| last.replace(now)) {
                    Some(before) => self.metrics.inter_token.observe((now - before).as_secs_f64()),
                    None => self.metrics.time_to_first_token.observe(since_call),
                }
            }
            _ => {}
        }
        if let Event::Failed { error, .. } = event {
            self.refuse(call, prompt, error);
            return computed;
        }
        caller.send(Update::Event { prompt, event });
        if is_last {
            self.texts.end(call);
        }
        computed
    }

    /// Updates the token rate, an exponential moving average.
    fn measure(&self, tokens: usize, time: Duration) {
        const NEW: f64 = 0.05;
        let seconds = time.as_secs_f64();
        if tokens == 0 || seconds <= 0.0 {
            return;
        }
        let now = tokens as f64 / seconds;
        let before = f64::from_bits(self.shared.rate.load(Ordering::Acquire));
        let rate = if before > 0.0 { before * (1.0 - NEW) + now * NEW } else { now };
        self.shared.rate.store(rate.to_bits(), Ordering::Release);
    }

    /// Updates the gauges in the metrics.
    fn update_gauges(&mut self) {
        let set = |gauge: &prometheus_client::metrics::gauge::Gauge, number: usize| {
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX))
        };
        let waiting = self.texts.owners().filter(|(_, caller)| caller.waits()).count();
        set(&self.metrics.requests_waiting, waiting);
        set(&self.metrics.requests_running, self.texts.owners().count() - waiting);
        let Some(scheduler) = self.texts.scheduler() else { return };
        set(&self.metrics.batch_rows, scheduler.running());
        set(&self.metrics.kv_tokens, scheduler.kv_tokens_in_use());
        set(&self.metrics.kv_tokens_kept, scheduler.kv_tokens_kept());
        set(&self.metrics.kv_tokens_limit, self.shared.options.kv_tokens);
    }
}

fn scheduler(model: &LoadedModel, shared: &Shared) -> Result<Scheduler, GenerationError> {
    let options = SchedulerOptions {
        max_texts: shared.options.parallel,
        kv_tokens: shared.options.kv_tokens,
        chunk_tokens: shared.options.prefill_chunk,
    };
    let mut scheduler = model.scheduler(options)?;
    let start = Instant::now();
    scheduler.set_clock(Arc::new(move || start.elapsed()));
    Ok(scheduler)
}
