//! What the engine's thread does: it takes commands, gives the scheduler prompts in turn, and hands on what happens in each step.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{Event, GenerationError, Request, RequestId, Scheduler, SchedulerOptions, Step};
use tokio::sync::mpsc::UnboundedSender;

use super::{CallFailure, Command, Life, Place, Shared, Submitted, Update};
use crate::fault::{internal, logged};
use crate::log::log_failure;
use crate::metrics::Metrics;

/// The engine has died where a step fails from within again within this time.
const TWICE_WITHIN: Duration = Duration::from_secs(60);
/// Chunks of a prompt that are computed together while no text is being written.
const IDLE_CHUNKS: usize = 4;

pub(super) struct Worker {
    model: LoadedModel,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    commands: Receiver<Command>,
    scheduler: Scheduler,
    /// Calls with prompts that the scheduler does not have yet; they take turns.
    turns: VecDeque<Call>,
    /// The prompts that it has.
    open: BTreeMap<RequestId, Open>,
    panicked: Option<Instant>,
    is_draining: bool,
}

/// A call with prompts that wait.
struct Call {
    rest: VecDeque<(usize, Request, Place)>,
    caller: Arc<Caller>,
}

/// Who hears of a call. All texts have ended when the last prompt that holds it is gone.
struct Caller {
    id: Arc<str>,
    updates: UnboundedSender<Update>,
    at: Instant,
    /// Whether one of its prompts has begun.
    has_begun: AtomicBool,
}

/// A prompt that the scheduler has.
struct Open {
    prompt: usize,
    caller: Arc<Caller>,
    prompt_tokens: usize,
    /// When each text had its last token.
    texts: Vec<Option<Instant>>,
    /// Texts that have not ended.
    unfinished: usize,
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
        !self.has_begun.load(Ordering::Relaxed)
    }
}

impl Worker {
    pub(super) fn new(
        model: LoadedModel,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
        commands: Receiver<Command>,
    ) -> Result<Self, GenerationError> {
        let scheduler = scheduler(&model, &shared)?;
        Ok(Self {
            model,
            shared,
            metrics,
            commands,
            scheduler,
            turns: VecDeque::new(),
            open: BTreeMap::new(),
            panicked: None,
            is_draining: false,
        })
    }

    /// Works until nobody can send commands any more, and says how it ended.
    pub(super) fn run(mut self) -> Life {
        loop {
            if !self.take_commands() {
                return Life::Drained;
            }
            self.drop_the_gone();
            self.end_the_late();
            self.feed();
            if !self.scheduler.is_idle()
                && let Err(why) = self.step()
            {
                self.fail_all(|| CallFailure::Engine);
                return Life::Died(why);
            }
            self.show();
            if self.is_draining && self.turns.is_empty() && self.open.is_empty() {
                return Life::Drained;
            }
        }
    }

    /// Takes all commands that are there, and waits for one where there is nothing to do. Answers false when there can be none.
    fn take_commands(&mut self) -> bool {
        loop {
            let is_busy = !self.scheduler.is_idle() || !self.turns.is_empty();
            let command = match self.commands.try_recv() {
                Err(TryRecvError::Empty) if is_busy || self.is_draining => return true,
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

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submitted) => self.accept(submitted),
            Command::Ask { id, question } => {
                // Whoever asked is told by the answer, which never comes.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| question(&self.model))) {
                    self.metrics.engine_panics.inc();
                    log_failure(&id, internal(panic.as_ref()));
                }
            }
            Command::Drain => {
                self.is_draining = true;
                self.refuse_what_waits();
            }
            Command::Stop => {
                self.is_draining = true;
                self.fail_all(|| CallFailure::Draining);
            }
        }
    }

    fn accept(&mut self, submitted: Submitted) {
        let Submitted { id, requests, updates, at, places } = submitted;
        let caller = Arc::new(Caller { id, updates, at, has_begun: AtomicBool::new(false) });
        if self.is_draining {
            caller.tell(Update::Failed(CallFailure::Draining));
            return;
        }
        let rest = requests.into_iter().zip(places).enumerate();
        let rest = rest.map(|(prompt, (request, place))| (prompt, request, place)).collect();
        self.turns.push_back(Call { rest, caller });
    }

    /// Gives the scheduler as many prompts as it can make texts of at once, one of each call in turn.
    fn feed(&mut self) {
        while self.scheduler.running() + self.scheduler.waiting() < self.shared.options.parallel {
            let Some(mut call) = self.turns.pop_front() else { return };
            let Some((prompt, request, place)) = call.rest.pop_front() else { continue };
            let (texts, prompt_tokens) = (request.config.num_return_sequences, request.prompt.len());
            let caller = Arc::clone(&call.caller);
            // There is a row for it, so that it does not wait any more.
            drop(place);
            caller.has_begun.store(true, Ordering::Relaxed);
            match self.scheduler.submit(request) {
                Ok(id) => {
                    let open =
                        Open { prompt, caller, prompt_tokens, texts: vec![None; texts], unfinished: texts };
                    self.open.insert(id, open);
                    if !call.rest.is_empty() {
                        self.turns.push_back(call);
                    }
                }
                // The call as a whole is refused: what others of its prompts gave would not be looked at.
                Err(error) => self.fail(&caller, prompt, error),
            }
        }
    }

    /// Ends a call of which a prompt is refused or cannot be continued.
    fn fail(&mut self, caller: &Arc<Caller>, prompt: usize, error: GenerationError) {
        // What the request is at fault for is told to its client alone.
        _ = logged(&caller.id, ApiError::from(&error));
        self.forget(caller);
        caller.tell(Update::Failed(CallFailure::Request { prompt, error }));
    }

    /// Drops calls whose callers are gone.
    fn drop_the_gone(&mut self) {
        for caller in self.callers(Caller::is_gone) {
            self.forget(&caller);
            self.metrics.cancelled.inc();
        }
    }

    /// Ends the calls of which nothing has begun in time.
    fn end_the_late(&mut self) {
        let most = self.shared.options.queue_timeout;
        for caller in self.waiting().into_iter().filter(|caller| caller.at.elapsed() > most) {
            let retry_after = self.shared.retry_after();
            caller.tell(Update::Failed(CallFailure::QueueTimeout { retry_after }));
            self.metrics.reject("queue_timeout");
            self.forget(&caller);
        }
    }

    /// Refuses the calls of which nothing has begun.
    fn refuse_what_waits(&mut self) {
        for caller in self.waiting() {
            caller.tell(Update::Failed(CallFailure::Draining));
            self.forget(&caller);
        }
    }

    /// The callers of which nothing has begun.
    fn waiting(&self) -> Vec<Arc<Caller>> {
        self.callers(|caller| caller.waits())
    }

    /// The callers of which this holds, each once.
    fn callers(&self, is_wanted: impl Fn(&Caller) -> bool) -> Vec<Arc<Caller>> {
        let all = self.turns.iter().map(|call| &call.caller);
        let all = all.chain(self.open.values().map(|open| &open.caller));
        let mut wanted: Vec<_> = all.filter(|caller| is_wanted(caller)).cloned().collect();
        wanted.sort_by_key(Arc::as_ptr);
        wanted.dedup_by_key(|caller| Arc::as_ptr(caller));
        wanted
    }

    /// Ends a call and all that is made for it.
    fn forget(&mut self, caller: &Arc<Caller>) {
        self.turns.retain(|call| !Arc::ptr_eq(&call.caller, caller));
        let ended = |(id, open): (&RequestId, &Open)| Arc::ptr_eq(&open.caller, caller).then_some(*id);
        for id in self.open.iter().filter_map(ended).collect::<Vec<_>>() {
            self.scheduler.cancel(id);
            self.open.remove(&id);
        }
    }

    fn fail_all(&mut self, failure: impl Fn() -> CallFailure) {
        for caller in self.callers(|_| true) {
            self.forget(&caller);
            caller.tell(Update::Failed(failure()));
        }
    }

    /// One step of the scheduler. An error says that the engine cannot go on.
    fn step(&mut self) -> Result<(), String> {
        let start = Instant::now();
        self.scheduler.set_chunk_tokens(self.chunk_tokens());
        let stepped = catch_unwind(AssertUnwindSafe(|| self.scheduler.step()));
        self.metrics.engine_steps.inc();
        match stepped {
            Ok(Step { events, failure }) => {
                let tokens: usize = events.into_iter().map(|event| self.hand_on(event)).sum();
                match failure {
                    None => self.measure(tokens, start.elapsed()),
                    // The scheduler has ended all requests that it had.
                    Some(error) => self.fail_open(&error.to_string()),
                }
                Ok(())
            }
            Err(panic) => {
                self.metrics.engine_panics.inc();
                // Nothing is asked of the old one any more.
                let made = scheduler(&self.model, &self.shared).map(|scheduler| self.scheduler = scheduler);
                self.fail_open(&internal(panic.as_ref()));
                made.map_err(|error| error.to_string())?;
                let again = self.panicked.replace(start).is_some_and(|before| start - before < TWICE_WITHIN);
                if again { Err("two steps have failed from within in a minute".into()) } else { Ok(()) }
            }
        }
    }

    /// Tokens of prompts for the next step. Long chunks cost less where no text waits for its next token; a few texts, whose own
    /// step is short, notice a chunk more than many do.
    fn chunk_tokens(&self) -> usize {
        /// For each text, about what makes a chunk as long as the step.
        const FOR_EACH_TEXT: usize = 4;
        let most = self.shared.options.prefill_chunk;
        match self.scheduler.writing() {
            0 => most.saturating_mul(IDLE_CHUNKS),
            writing => writing.saturating_mul(FOR_EACH_TEXT).clamp(most.div_ceil(2), most),
        }
    }

    /// Fails the calls that the scheduler was working on, with one line of the log for all.
    fn fail_open(&mut self, cause: &str) {
        let callers = self.callers(|caller| !caller.waits());
        let ids: Vec<&str> = callers.iter().map(|caller| &*caller.id).collect();
        let ids = if ids.is_empty() { "a step".to_owned() } else { ids.join(", ") };
        log_failure(&ids, cause);
        for caller in callers {
            self.forget(&caller);
            caller.tell(Update::Failed(CallFailure::Engine));
        }
    }

    /// Tells a caller what happened; returns how many tokens were computed for it.
    fn hand_on(&mut self, event: Event) -> usize {
        let id = event.request();
        let Some(open) = self.open.get_mut(&id) else { return 0 };
        let now = Instant::now();
        let mut computed = 0;
        match &event {
            Event::Begun { cached_tokens, .. } => {
                computed = open.prompt_tokens - cached_tokens;
                self.metrics.prompt_tokens.inc_by(open.prompt_tokens as u64);
                self.metrics.cached_tokens.inc_by(*cached_tokens as u64);
                self.metrics.queue.observe((now - open.caller.at).as_secs_f64());
            }
            Event::Token { sequence, stop_reason, .. } => {
                computed = 1;
                self.metrics.generated_tokens.inc();
                let gap = open.texts.get_mut(*sequence).and_then(|last| last.replace(now));
                match gap {
                    Some(before) => self.metrics.inter_token.observe((now - before).as_secs_f64()),
                    None => self.metrics.time_to_first_token.observe((now - open.caller.at).as_secs_f64()),
                }
                open.unfinished -= usize::from(stop_reason.is_some());
            }
            Event::Empty { .. } => open.unfinished -= 1,
            _ => {}
        }
        let (prompt, is_over) = (open.prompt, open.unfinished == 0);
        let caller = Arc::clone(&open.caller);
        if is_over {
            self.open.remove(&id);
        }
        if let Event::Failed { error, .. } = event {
            self.fail(&caller, prompt, error);
        } else {
            caller.tell(Update::Event { prompt, event });
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
    fn show(&self) {
        let set = |gauge: &prometheus_client::metrics::gauge::Gauge, number: usize| {
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX))
        };
        set(&self.metrics.requests_waiting, self.waiting().len());
        set(&self.metrics.requests_running, self.callers(|caller| !caller.waits()).len());
        set(&self.metrics.batch_rows, self.scheduler.running());
        set(&self.metrics.kv_tokens, self.scheduler.kv_tokens_in_use());
        set(&self.metrics.kv_tokens_kept, self.scheduler.kv_tokens_kept());
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
