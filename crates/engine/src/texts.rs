//! The driver of completions: calls of one prompt or more, each with its owner, that take turns at a scheduler.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;

use candle_gpt2_generation::{Event, GenerationError, Request, RequestId, Scheduler, Step};

/// Calls whose texts are made. `O` is what the owner of a call is known by.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_gpt2_engine::{ModelOptions, Silent, Texts};
/// use candle_gpt2_generation::{Event, GenerationConfig, Request, SchedulerOptions};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let mut texts = Texts::new(model.scheduler(SchedulerOptions { max_texts: 2, kv_tokens: 512, chunk_tokens: 64 })?);
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
pub struct Texts<O> {
    /// `None` once [`Texts::rebuild`] has failed.
    scheduler: Option<Scheduler>,
    calls: BTreeMap<CallId, Call<O>>,
    /// Calls with prompts that the scheduler does not have yet.
    turns: VecDeque<CallId>,
    /// The prompts that it has.
    prompts: BTreeMap<RequestId, Submitted>,
    /// Calls that were begun.
    count: u64,
}

/// A call of [`Texts`], in the order in which they were begun. [`Texts::begin`] gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(u64);

struct Call<O> {
    owner: O,
    rest: VecDeque<(usize, Request)>,
    /// Texts that have not ended.
    unfinished: usize,
}

/// A prompt that the scheduler has.
#[derive(Clone, Copy)]
struct Submitted {
    call: CallId,
    /// Which of the call's prompts.
    prompt: usize,
    /// Its texts.
    sequences: usize,
}

/// What happened to a call. [`Texts::step`] gives it.
#[derive(Debug)]
pub struct Happened {
    /// The call.
    pub call: CallId,
    /// Which of its prompts.
    pub prompt: usize,
    /// What happened.
    pub event: Event,
    /// Whether all texts of the call have ended with it, or one cannot continue; the call is there until [`Texts::end`].
    pub is_last: bool,
}

impl<O> Texts<O> {
    /// No calls, with a scheduler that has no requests.
    pub fn new(scheduler: Scheduler) -> Self {
        let (calls, turns, prompts) = (BTreeMap::new(), VecDeque::new(), BTreeMap::new());
        Self { scheduler: Some(scheduler), calls, turns, prompts, count: 0 }
    }

    /// Takes a call, whose prompts wait for their turns.
    pub fn begin(&mut self, requests: Vec<Request>, owner: O) -> CallId {
        let id = CallId(self.count);
        self.count += 1;
        let unfinished = requests.iter().map(|request| request.config.num_return_sequences).sum();
        let rest = requests.into_iter().enumerate().collect();
        self.calls.insert(id, Call { owner, rest, unfinished });
        self.turns.push_back(id);
        id
    }

    /// Gives the scheduler the next prompt, one of each call in turn, while it makes fewer texts than `limit` and fewer wait there: the
    /// call, which of its prompts, and why the scheduler does not take it if it does not. The call is then the caller's to end.
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

    /// A step of the scheduler; `progress` is that of [`Scheduler::step_with`]. Returns what happened, and the error if the device failed
    /// after it; the scheduler has then ended all its requests.
    pub fn step(
        &mut self,
        progress: &dyn Fn() -> ControlFlow<()>,
    ) -> (Vec<Happened>, Option<GenerationError>) {
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
            Some(Happened { call, prompt, event, is_last: *unfinished == 0 })
        });
        (happened.collect(), failure)
    }

    /// Ends a call and all that is made for it, and gives its owner back.
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

    /// The owner of a call that was not ended.
    pub fn owner(&mut self, id: CallId) -> Option<&mut O> {
        self.calls.get_mut(&id).map(|call| &mut call.owner)
    }

    /// The calls that were not ended, with their owners.
    pub fn owners(&self) -> impl Iterator<Item = (CallId, &O)> {
        self.calls.iter().map(|(id, call)| (*id, &call.owner))
    }

    /// Whether no call is there, ended ones aside.
    pub fn is_idle(&self) -> bool {
        self.scheduler.as_ref().is_none_or(Scheduler::is_idle)
            && self.calls.values().all(|call| call.rest.is_empty())
    }

    /// The scheduler, for its settings and numbers; `None` if it could not be rebuilt.
    pub fn scheduler(&mut self) -> Option<&mut Scheduler> {
        self.scheduler.as_mut()
    }

    /// Replaces the scheduler after a panic in a step. Frees the old one and its KV cache before `make` allocates the new one.
    ///
    /// The caller ends the calls that had begun. If `make` fails, nothing more can be computed.
    ///
    /// # Errors
    /// Those of `make`.
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
    fn a_rebuild_frees_the_old_scheduler_before_it_makes_the_new_one() {
        let model = ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap();
        let options = SchedulerOptions { max_texts: 1, kv_tokens: 512, chunk_tokens: 64 };
        let mut scheduler = model.scheduler(options).unwrap();
        // The scheduler holds the only other reference.
        let clock: Clock = Arc::new(std::time::Duration::default);
        scheduler.set_clock(Arc::clone(&clock));
        let mut texts = Texts::new(scheduler);
        let config = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
        let begin =
            |texts: &mut Texts<&str>, owner| texts.begin(vec![Request::new(vec![5], config.clone())], owner);
        let first = begin(&mut texts, "first");
        assert!(texts.feed(1).is_some() && Arc::strong_count(&clock) == 2);
        let rebuilt = texts.rebuild(|| {
            assert_eq!(Arc::strong_count(&clock), 1, "the old scheduler is still there");
            model.scheduler(options)
        });
        rebuilt.unwrap();
        assert_eq!(texts.end(first), Some("first"));
        begin(&mut texts, "second");
        assert!(texts.feed(1).is_some_and(|(_, _, taken)| taken.is_ok()));
        assert!(!texts.step(&|| ControlFlow::Continue(())).0.is_empty());
        // Without a scheduler nothing more happens.
        assert_eq!(texts.rebuild(|| Err("out of memory")), Err("out of memory"));
        let third = begin(&mut texts, "third");
        assert!(texts.feed(1).is_none() && texts.step(&|| ControlFlow::Continue(())).0.is_empty());
        assert_eq!(texts.end(third), Some("third"));
    }
}
