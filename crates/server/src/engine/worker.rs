//! The work of the engine's thread: it takes commands, gives the scheduler prompts in turn, and hands on what happens in each step.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::{CallId, Happened, LoadedModel, Texts};
use candle_gpt2_generation::{Event, GenerationError, Request, Scheduler, SchedulerOptions};
use tokio::sync::mpsc::UnboundedSender;

use super::calls::{Command, Life, Place, Shared, Submitted, Update};
use crate::busy::{draining, queue_timeout};
use crate::fault::internal;
use crate::log::log_failure;
use crate::metrics::Metrics;

/// The engine has died if a step fails from within again within this time.
const TWICE_WITHIN: Duration = Duration::from_secs(60);
/// Chunks of a prompt that are computed together while no text is being written.
const IDLE_CHUNKS: usize = 4;
/// Maximum number of request ids in one line of the log.
const MAX_LISTED: usize = 64;
/// How long a thread that is about to end waits for the next question of an analysis, before it looks whether there is one left.
const NEXT_QUESTION: Duration = Duration::from_millis(20);

pub(super) struct Worker {
    model: LoadedModel,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    commands: Receiver<Command>,
    texts: Texts<Caller>,
    panicked: Option<Instant>,
    is_draining: bool,
    /// Whether nothing is finished any more.
    is_stopped: bool,
}

/// The client of a call.
struct Caller {
    id: Arc<str>,
    updates: UnboundedSender<Update>,
    at: Instant,
    prompts: Vec<Prompt>,
    /// Whether one of its prompts has begun.
    has_begun: bool,
}

struct Prompt {
    tokens: usize,
    /// Its place in the queue; `None` once there is a row for it, so that it does not wait any more.
    place: Option<Place>,
    /// When each text had its last token.
    texts: Vec<Option<Instant>>,
}

impl Caller {
    fn tell(&self, update: Update) {
        // Who does not listen any more is found by `is_gone`.
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
        let texts = Texts::new(scheduler(&model, &shared)?);
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

    /// Works until all senders of commands are gone, and returns how it ended.
    pub(super) fn run(mut self) -> Life {
        loop {
            if !self.take_commands() {
                return Life::Drained;
            }
            self.drop_the_gone();
            self.end_the_late();
            self.feed();
            if !self.texts.is_idle()
                && let Err(why) = self.step()
            {
                self.fail_all(|_| true, ApiError::internal);
                return Life::Died(why);
            }
            self.show();
            if self.is_draining && self.texts.is_idle() && self.analyses() == 0 {
                return Life::Drained;
            }
        }
    }

    /// Takes all commands that are there, and waits for one if there is nothing to do. Answers false when there can be none.
    fn take_commands(&mut self) -> bool {
        loop {
            let is_busy = !self.texts.is_idle();
            let command = match self.commands.try_recv() {
                Err(TryRecvError::Empty) if is_busy => return true,
                Err(TryRecvError::Empty) if self.is_draining => match self.analyses() {
                    0 => return true,
                    // Their next question comes, or they end, of which the thread does not hear.
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
            self.obey(command);
            if !is_busy {
                return true;
            }
        }
    }

    /// Analyses that have begun and are waited for.
    fn analyses(&self) -> usize {
        if self.is_stopped { 0 } else { self.shared.analyses.load(Ordering::Acquire) }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submitted) => self.accept(submitted),
            Command::Ask { id, question } => {
                // The caller learns it from the answer, which never comes.
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
        let Submitted { id, requests, updates, at, places } = submitted;
        let prompt = |(request, place): (&Request, Place)| {
            let texts = vec![None; request.config.num_return_sequences];
            Prompt { tokens: request.prompt.len(), place: Some(place), texts }
        };
        let prompts = requests.iter().zip(places).map(prompt).collect();
        let caller = Caller { id, updates, at, prompts, has_begun: false };
        if self.is_draining {
            caller.tell(Update::Failed(draining()));
        } else {
            self.texts.begin(requests, caller);
        }
    }

    /// Gives the scheduler as many prompts as it can make texts of at once, one of each call in turn.
    fn feed(&mut self) {
        while let Some((call, prompt, taken)) = self.texts.feed(self.shared.options.parallel) {
            if let Some(caller) = self.texts.owner(call) {
                caller.has_begun = true;
                caller.prompts[prompt].place = None;
            }
            // The call as a whole is refused: what others of its prompts gave would not be looked at.
            taken.unwrap_or_else(|error| self.refuse(call, prompt, error));
        }
    }

    /// Ends a call of which a prompt is refused or cannot be continued.
    fn refuse(&mut self, call: CallId, prompt: usize, error: GenerationError) {
        if let Some(caller) = self.texts.end(call) {
            caller.tell(Update::Refused { prompt, error });
        }
    }

    /// Drops calls whose callers are gone.
    fn drop_the_gone(&mut self) {
        let gone = self.end_all(Caller::is_gone, |_| ());
        self.metrics.cancelled.inc_by(gone as u64);
    }

    /// Ends the calls of which nothing has begun in time.
    fn end_the_late(&mut self) {
        let (most, shared) = (self.shared.options.queue_timeout, Arc::clone(&self.shared));
        let is_late = |caller: &Caller| caller.waits() && caller.at.elapsed() > most;
        let late = self.end_all(is_late, |caller| {
            caller.tell(Update::Failed(queue_timeout(Some(shared.retry_after()))));
        });
        (0..late).for_each(|_| self.metrics.reject("queue_timeout"));
    }

    /// Ends the calls of these callers and all that is made for them; returns how many there were.
    fn end_all(&mut self, is_wanted: impl Fn(&Caller) -> bool, hear: impl Fn(&Caller)) -> usize {
        let wanted = self.texts.owners().filter(|(_, caller)| is_wanted(caller)).map(|(call, _)| call);
        let wanted: Vec<CallId> = wanted.collect();
        wanted.iter().filter_map(|call| self.texts.end(*call)).for_each(|caller| hear(&caller));
        wanted.len()
    }

    fn fail_all(&mut self, is_wanted: impl Fn(&Caller) -> bool, failure: fn() -> ApiError) {
        self.end_all(is_wanted, |caller| caller.tell(Update::Failed(failure())));
    }

    /// One step of the scheduler. An error says that the engine cannot continue.
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
                let tokens: usize = happened.into_iter().map(|happened| self.hand_on(happened)).sum();
                match failure {
                    None => self.measure(tokens, start.elapsed()),
                    // The scheduler has ended all requests that it had.
                    Some(error) => self.fail_open(&error.to_string()),
                }
                Ok(())
            }
            Err(panic) => {
                self.metrics.engine_panics.inc();
                let rebuilt = self.texts.rebuild(|| scheduler(&self.model, &self.shared));
                self.fail_open(&internal(panic.as_ref()));
                rebuilt.map_err(|error| error.to_string())?;
                let again = self.panicked.replace(start).is_some_and(|before| start - before < TWICE_WITHIN);
                if again { Err("two steps have failed from within in a minute".into()) } else { Ok(()) }
            }
        }
    }

    /// Tokens of prompts for the next step. Long chunks cost less if no text waits for its next token; a few texts, whose own
    /// step is short, notice a chunk more than many do.
    fn chunk_tokens(&mut self) -> usize {
        /// For each text, about what makes a chunk as long as the step.
        const FOR_EACH_TEXT: usize = 4;
        let most = self.shared.options.prefill_chunk;
        match self.texts.scheduler().map_or(0, |scheduler| scheduler.writing()) {
            0 => most.saturating_mul(IDLE_CHUNKS),
            writing => writing.saturating_mul(FOR_EACH_TEXT).clamp(most.div_ceil(2), most),
        }
    }

    /// Fails the calls that the scheduler was working on and logs one line for all of them.
    fn fail_open(&mut self, cause: &str) {
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

    /// Tells a caller what happened; returns how many tokens were computed for it.
    fn hand_on(&mut self, Happened { call, prompt, event, is_last }: Happened) -> usize {
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
        caller.tell(Update::Event { prompt, event });
        if is_last {
            self.texts.end(call);
        }
        computed
    }

    /// Remembers how fast tokens are computed, the last ones counting most.
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

    /// Shows what there is in the metrics.
    fn show(&mut self) {
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
