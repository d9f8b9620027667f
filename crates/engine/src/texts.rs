//! Completion driver, which lets calls with one or more prompts share a scheduler.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;

use candle_gpt2_generation::{Event, GenerationError, Request, RequestId, Scheduler, Step};

/// Calls whose completions are being generated.
///
/// `O` is the type of a call's owner, data that the caller attaches to the call.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_gpt2_engine::{CompletionDriver, ModelOptions, Silent};
/// use candle_gpt2_generation::{Event, GenerationConfig, Request, SchedulerOptions};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let mut texts = CompletionDriver::new(model.scheduler(SchedulerOptions { max_texts: 2, kv_tokens: 512, chunk_tokens: 64 })?);
/// let config = GenerationConfig { max_new_tokens: 4, ..GenerationConfig::default() };
/// let prompts = ["One day", "Once there was"].map(|prompt| model.vocabulary().encode(prompt).unwrap_or_default());
/// texts.begin(Request::each(&prompts, &config), "one caller");
/// let mut tokens = 0;
/// while !texts.is_idle() {
///     while let Some((_, _, taken)) = texts.feed(2) {
///         taken?;
///     }
///     let (happened, failure) = texts.step(&|| ControlFlow::Continue(()));
///     tokens += happened.iter().filter(|happened| matches!(happened.event, Event::Token { .. })).count();
///     failure.map_or(Ok(()), Err)?;
/// }
/// assert_eq!(tokens, 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CompletionDriver<O> {
    /// Scheduler; `None` once [`CompletionDriver::rebuild`] has failed.
    scheduler: Option<Scheduler>,
    calls: BTreeMap<CallId, Call<O>>,
    /// Queue of calls with prompts not yet submitted to the scheduler.
    turns: VecDeque<CallId>,
    /// Prompts submitted to the scheduler.
    prompts: BTreeMap<RequestId, Submitted>,
    /// Number of calls begun so far.
    count: u64,
}

/// Identifier of a call, numbered in the order of [`CompletionDriver::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(u64);

struct Call<O> {
    owner: O,
    rest: VecDeque<(usize, Request)>,
    /// Number of completions that have not ended.
    unfinished: usize,
}

/// A prompt submitted to the scheduler.
#[derive(Clone, Copy)]
struct Submitted {
    call: CallId,
    /// Index of the prompt in the call.
    prompt: usize,
    /// Number of completions of the prompt.
    sequences: usize,
}

/// Event in a call, returned by [`CompletionDriver::step`].
#[derive(Debug)]
pub struct CallEvent {
    /// Call that the event belongs to.
    pub call: CallId,
    /// Index of the prompt in the call.
    pub prompt: usize,
    /// Event from the scheduler.
    pub event: Event,
    /// Whether the call has ended, because all completions ended or one failed.
    ///
    /// The call remains until [`CompletionDriver::end`].
    pub is_last: bool,
}

impl<O> CompletionDriver<O> {
    /// Creates a driver without calls; `scheduler` must not have any requests.
    pub fn new(scheduler: Scheduler) -> Self {
        let (calls, turns, prompts) = (BTreeMap::new(), VecDeque::new(), BTreeMap::new());
        Self { scheduler: Some(scheduler), calls, turns, prompts, count: 0 }
    }

    /// Adds a call and queues its prompts.
    pub fn begin(&mut self, requests: Vec<Request>, owner: O) -> CallId {
        let id = CallId(self.count);
        self.count += 1;
        let unfinished = requests.iter().map(|request| request.config.num_return_sequences).sum();
        let rest = requests.into_iter().enumerate().collect();
        self.calls.insert(id, Call { owner, rest, unfinished });
        self.turns.push_back(id);
        id
    }

    /// Submits the next prompt, taking calls in turn, unless the scheduler has reached `limit`.
    ///
    /// The limit applies to the sum of running and waiting sequences. Returns the call, the index of the
    /// prompt, and an error if the scheduler rejects the prompt. In that case the caller must end the call.
    pub fn feed(&mut self, limit: usize) -> Option<(CallId, usize, Result<(), GenerationError>)> {
        let scheduler = self.scheduler.as_mut()?;
        while scheduler.running() + scheduler.waiting() < limit {
            let id = self.turns.pop_front()?;
            let Some(call) = self.calls.get_mut(&id) else { continue };
            let Some((prompt, request)) = call.rest.pop_front() else { continue };
            self.turns.push_back(id);
            let submitted = Submitted { call: id, prompt, sequences: request.config.num_return_sequences };
            let taken = scheduler.submit(request);
            return Some((id, prompt, taken.map(|request| _ = self.prompts.insert(request, submitted))));
        }
        None
    }

    /// Runs a step of the scheduler; `progress` is passed to [`Scheduler::step_with`].
    ///
    /// Returns the events, plus an error if the device failed after them. In that case, the scheduler has
    /// ended all its requests.
    pub fn step(
        &mut self,
        progress: &dyn Fn() -> ControlFlow<()>,
    ) -> (Vec<CallEvent>, Option<GenerationError>) {
        let Some(scheduler) = &mut self.scheduler else { return (Vec::new(), None) };
        let Step { events, failure } = scheduler.step_with(progress);
        let happened = events.into_iter().filter_map(|event| {
            let Submitted { call, prompt, sequences } = *self.prompts.get(&event.request())?;
            let unfinished = &mut self.calls.get_mut(&call)?.unfinished;
            match &event {
                Event::Failed { .. } => *unfinished = 0,
                Event::Found { .. } => *unfinished = unfinished.saturating_sub(sequences),
                event => *unfinished = unfinished.saturating_sub(usize::from(event.ends_text())),
            }
            Some(CallEvent { call, prompt, event, is_last: *unfinished == 0 })
        });
        (happened.collect(), failure)
    }

    /// Ends a call, cancels its requests and returns its owner.
    pub fn end(&mut self, id: CallId) -> Option<O> {
        let call = self.calls.remove(&id)?;
        self.turns.retain(|turn| *turn != id);
        let mut scheduler = self.scheduler.as_mut();
        self.prompts.retain(|request, submitted| {
            let is_kept = submitted.call != id;
            if !is_kept && let Some(scheduler) = &mut scheduler {
                scheduler.cancel(*request);
            }
            is_kept
        });
        Some(call.owner)
    }

    /// Returns the owner of an open call.
    pub fn owner(&mut self, id: CallId) -> Option<&mut O> {
        self.calls.get_mut(&id).map(|call| &mut call.owner)
    }

    /// Returns the open calls and their owners.
    pub fn owners(&self) -> impl Iterator<Item = (CallId, &O)> {
        self.calls.iter().map(|(id, call)| (*id, &call.owner))
    }

    /// Whether no call has anything left to generate.
    pub fn is_idle(&self) -> bool {
        self.scheduler.as_ref().is_none_or(Scheduler::is_idle)
            && self.calls.values().all(|call| call.rest.is_empty())
    }

    /// Scheduler, for access to its settings and statistics; `None` if it could not be rebuilt.
    pub fn scheduler(&mut self) -> Option<&mut Scheduler> {
        self.scheduler.as_mut()
    }

    /// Replaces the scheduler after a panic in a step.
    ///
    /// The old scheduler and its KV cache are freed before `make` allocates the new one. The caller must end
    /// all calls that had begun. If `make` fails, nothing more can be computed.
    ///
    /// # Errors
    /// If `make` fails.
    pub fn rebuild<E>(&mut self, make: impl FnOnce() -> Result<Scheduler, E>) -> Result<(), E> {
        self.prompts.clear();
        self.scheduler = None;
        self.scheduler = Some(make()?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_gpt2_generation::{Clock, GenerationConfig, SchedulerOptions};

    use super::*;
    use crate::{ModelOptions, Silent};

    #[test]
    fn rebuild_frees_the_old_scheduler_first() {
        let model = ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap();
        let options = SchedulerOptions { max_texts: 1, kv_tokens: 512, chunk_tokens: 64 };
        let mut scheduler = model.scheduler(options).unwrap();
        // The scheduler holds the only other reference to the clock.
        let clock: Clock = Arc::new(std::time::Duration::default);
        scheduler.set_clock(Arc::clone(&clock));
        let mut texts = CompletionDriver::new(scheduler);
        let config = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
        let begin = |texts: &mut CompletionDriver<&str>, owner| {
            texts.begin(vec![Request::new(vec![5], config.clone())], owner)
        };
        let first = begin(&mut texts, "first");
        assert!(texts.feed(1).is_some() && Arc::strong_count(&clock) == 2);
        let rebuilt = texts.rebuild(|| {
            assert_eq!(Arc::strong_count(&clock), 1, "the old scheduler still exists");
            model.scheduler(options)
        });
        rebuilt.unwrap();
        assert_eq!(texts.end(first), Some("first"));
        begin(&mut texts, "second");
        assert!(texts.feed(1).is_some_and(|(_, _, taken)| taken.is_ok()));
        assert!(!texts.step(&|| ControlFlow::Continue(())).0.is_empty());
        // Without a scheduler there are no further events.
        assert_eq!(texts.rebuild(|| Err("out of memory")), Err("out of memory"));
        let third = begin(&mut texts, "third");
        assert!(texts.feed(1).is_none() && texts.step(&|| ControlFlow::Continue(())).0.is_empty());
        assert_eq!(texts.end(third), Some("third"));
    }
}
