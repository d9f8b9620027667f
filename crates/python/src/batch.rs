//! Many texts at once, step by step, for what is handed on as it comes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use gpt2_engine::LoadedModel;
use gpt2_generation::{Event, Request, RequestId, Scheduler, SchedulerOptions};

use crate::errors::Result;

/// Tokens of prompts that are computed between two looks for Ctrl-C, about a tenth of a second of the smallest GPT-2.
const CHUNK_TOKENS: usize = 128;

/// Requests whose texts are made together.
pub(crate) struct Batch {
    scheduler: Scheduler,
    /// The place of each request in the list.
    places: HashMap<RequestId, usize>,
    ready: VecDeque<Event>,
}

/// What a step brought.
pub(crate) enum Step {
    /// Something happened to the request at this place of the list.
    Event(usize, Event),
    /// Nothing yet.
    Nothing,
    /// All texts have ended.
    End,
}

impl Batch {
    /// Texts of these requests, `batch_size` at a time.
    pub(crate) fn new(loaded: &LoadedModel, requests: Vec<Request>, batch_size: usize) -> Result<Self> {
        let texts = requests.iter().map(|request| request.config.num_return_sequences).sum::<usize>();
        let max_texts = batch_size.clamp(1, texts.max(1));
        let mut longest = 1;
        for request in &requests {
            longest = longest.max(request.kv_tokens(loaded.config())?);
        }
        let kv_tokens = max_texts.saturating_mul(longest);
        loaded.check_kv_room(max_texts, kv_tokens)?;
        let mut scheduler =
            loaded.scheduler(SchedulerOptions { max_texts, kv_tokens, chunk_tokens: CHUNK_TOKENS })?;
        let start = Instant::now();
        scheduler.set_clock(Arc::new(move || start.elapsed()));
        let mut places = HashMap::new();
        for (place, request) in requests.into_iter().enumerate() {
            places.insert(scheduler.submit(request)?, place);
        }
        Ok(Self { scheduler, places, ready: VecDeque::new() })
    }

    /// The next event, or one step towards it.
    pub(crate) fn step(&mut self) -> Result<Step> {
        if self.ready.is_empty() {
            if self.scheduler.is_idle() {
                return Ok(Step::End);
            }
            self.ready.extend(self.scheduler.step()?);
        }
        Ok(match self.ready.pop_front() {
            Some(event) => Step::Event(self.places.get(&event.request()).copied().unwrap_or_default(), event),
            None => Step::Nothing,
        })
    }
}
