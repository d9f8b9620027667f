//! Many texts at once, step by step, for faces that hand them on as they come.

use std::collections::{HashMap, VecDeque};

use candle_gpt2_generation::{Clock, Event, Request, RequestId, Scheduler, SchedulerOptions};

use crate::{EngineError, LoadedModel};

/// Requests whose texts are made together. What drives a [`Job`](crate::Job) itself is here the caller's: it asks for step after
/// step, and may stop where it likes.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, Step};
/// use candle_gpt2_generation::{Event, GenerationConfig, Request};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let config = GenerationConfig { max_new_tokens: 4, ..GenerationConfig::default() };
/// let request = |prompt| Ok(Request::new(model.vocabulary().encode(prompt)?, config.clone()));
/// let requests = ["ROMEO:", "JULIET:"].map(request).into_iter().collect::<Result<_, candle_gpt2_engine::EngineError>>()?;
/// let mut batch = model.batch(requests, 2, None)?;
/// let mut texts = [String::new(), String::new()];
/// loop {
///     match batch.step()? {
///         Step::Event(place, Event::Token { text, .. }) => texts[place].push_str(&text),
///         Step::End => break,
///         _ => {}
///     }
/// }
/// assert!(texts.iter().all(|text| !text.is_empty()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Batch {
    scheduler: Scheduler,
    /// The place of each request in the list.
    places: HashMap<RequestId, usize>,
    ready: VecDeque<Event>,
}

/// What a step of a [`Batch`] brought.
///
/// Given by [`Batch::step`].
#[derive(Debug)]
pub enum Step {
    /// Something happened to the request at this place of the list, counted from 0.
    Event(usize, Event),
    /// Nothing yet.
    Nothing,
    /// All texts have ended.
    End,
}

impl LoadedModel {
    /// The texts of these requests, `batch_size` at a time. `clock` is for texts with a
    /// [`max_time`](candle_gpt2_generation::GenerationConfig::max_time); without one the system's counts.
    ///
    /// # Errors
    /// When a request is refused, or the memory that is free has no room for the keys and values of the texts that are made at
    /// once.
    pub fn batch(
        &self,
        requests: Vec<Request>,
        batch_size: usize,
        clock: Option<Clock>,
    ) -> Result<Batch, EngineError> {
        let options = SchedulerOptions::of_requests(&requests, batch_size, self.config())?;
        self.check_kv_room(options.max_texts, options.kv_tokens)?;
        let mut scheduler = self.scheduler(options)?;
        clock.into_iter().for_each(|clock| scheduler.set_clock(clock));
        let mut places = HashMap::new();
        for (place, request) in requests.into_iter().enumerate() {
            places.insert(scheduler.submit(request)?, place);
        }
        Ok(Batch { scheduler, places, ready: VecDeque::new() })
    }
}

impl Batch {
    /// The next event, or one step towards it.
    ///
    /// # Errors
    /// When the device fails, or what computes is [ended](candle_gpt2_kernels::interruptible); all texts have then ended.
    pub fn step(&mut self) -> Result<Step, EngineError> {
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
