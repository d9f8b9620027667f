//! Many texts in one go: prompts are asked for as there is room for them, and texts are handed on as they are finished.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2::{Gpt2Config, KvSlot};
use candle_gpt2_generation::{
    Clock, Drafts, Event, Events, Found, GeneratedToken, GenerationConfig, GenerationError, LogitsProcessor,
    Request, RequestId, Scheduler, SchedulerOptions, SearchMode, Step, StopReason,
};
use candle_gpt2_kernels::is_interrupted;
use serde::{Serialize, Serializer};

use crate::memory::Room;
use crate::{EngineError, LoadedModel, Reporter, Unit, system_clock};

/// A finished text.
///
/// Handed on by a [`Job`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Text {
    /// Its tokens, with the one that ended it.
    pub ids: Vec<u32>,
    /// What they say; absent without a tokenizer.
    pub text: Option<String>,
    /// Why it ended; as JSON its [name](StopReason::name).
    #[serde(serialize_with = "by_name")]
    pub stop_reason: StopReason,
    /// Of a beam: its log-probability over its length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Where tokens were drafted: how many, and how many of them the text has.
    #[serde(flatten)]
    pub drafts: Option<Drafts>,
}

fn by_name<S: Serializer>(reason: &StopReason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(reason.name())
}

/// Where prompts come from and where their texts go. Prompts are numbered from 0 in the order in which they are given.
///
/// ```
/// use candle_gpt2_engine::{EngineError, Job, ModelOptions, Silent, Text};
/// use candle_gpt2_generation::{GenerationConfig, GenerationError};
///
/// #[derive(Default)]
/// struct Lines {
///     waiting: Vec<Vec<u32>>,
///     made: Vec<String>,
/// }
///
/// impl Job for Lines {
///     type Error = EngineError;
///
///     fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
///         Ok(self.waiting.pop())
///     }
///
///     fn on_texts(&mut self, _: usize, texts: Result<Vec<Text>, GenerationError>) -> Result<(), EngineError> {
///         self.made.extend(texts?.into_iter().filter_map(|text| text.text));
///         Ok(())
///     }
/// }
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let waiting = vec![model.vocabulary().encode("ROMEO:")?, model.vocabulary().encode("JULIET:")?];
/// let mut lines = Lines { waiting, ..Lines::default() };
/// let config = GenerationConfig { max_new_tokens: 4, ..GenerationConfig::default() };
/// model.generate(&mut lines, 2, &config, &Silent)?;
/// assert_eq!(lines.made.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Job {
    /// What can go wrong with the texts once they are made, and with the machine.
    type Error: From<EngineError>;

    /// The next prompt; `None` after the last one.
    ///
    /// # Errors
    /// What ends the whole job.
    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, Self::Error>;

    /// The seed of the texts of a prompt, in place of the configuration's; asked once the prompt was given.
    fn seed(&self, prompt: usize) -> Option<u64> {
        let _ = prompt;
        None
    }

    /// A token as it comes, where texts are made token by token.
    ///
    /// # Errors
    /// What ends the whole job.
    fn on_token(&mut self, token: &GeneratedToken) -> Result<(), Self::Error> {
        let _ = token;
        Ok(())
    }

    /// All texts of a prompt, best first where they were searched for, or why there are none.
    ///
    /// # Errors
    /// What ends the whole job.
    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Text>, GenerationError>,
    ) -> Result<(), Self::Error>;

    /// Whether to end what is being made, asked after each token. What computes inside
    /// [`candle_gpt2_kernels::interruptible`] ends sooner: what is there is then handed on likewise.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// The clock by which a [`GenerationConfig::max_time`] is counted; by default the system's.
    fn clock(&self) -> Option<Clock> {
        system_clock()
    }

    /// Changes of the logits of all texts besides those of the configuration, such as a grammar; for their place see
    /// [`LogitsProcessor::add_to`].
    fn processors(&self) -> Vec<LogitsProcessor> {
        Vec::new()
    }
}

impl LoadedModel {
    /// Continues every prompt of a job, `batch_size` texts at a time where they are made token by token. `config` is
    /// [complete](crate::Defaults::complete).
    ///
    /// # Errors
    /// Those of the job, when the memory that is free has no room for the keys and values of the texts that are made at once,
    /// and when the device fails. A prompt that cannot go on is the job's to hear of.
    pub fn generate<J: Job>(
        &self,
        job: &mut J,
        batch_size: usize,
        config: &GenerationConfig,
        reporter: &dyn Reporter,
    ) -> Result<(), J::Error> {
        let is_search = config.search_mode() != SearchMode::TokenByToken;
        if is_search && self.assistant().is_some() {
            let what = "an assistant drafts texts that are made token by token, and beams and contrastive search are not";
            return Err(EngineError::from(GenerationError::Conflict { what: what.into() }).into());
        }
        /// Prompts whose texts are not all there, for each text of a batch: where no tokens are asked for, none wait.
        const OPEN_PROMPTS: usize = 2;
        // Searches are made one after the other, with memory of their own.
        let batch_size = if is_search { 1 } else { batch_size.max(1) };
        let config = Arc::new(config.clone());
        let mut prompts = Prompts { number: 0, ahead: VecDeque::new() };
        let tokens = match is_search {
            true => Vec::new(),
            false => prompts.look_ahead(job, batch_size, &config, self.config())?,
        };
        let options = options_for(&tokens, batch_size, config.num_return_sequences, self.config());
        let is_cpu = self.device().is_cpu();
        Room::of_texts(&tokens, config.num_return_sequences, options, is_cpu)
            .check(self.model(), self.assistant())?;
        let mut scheduler = self.scheduler(options).map_err(EngineError::from)?;
        job.clock().into_iter().for_each(|clock| scheduler.set_clock(clock));
        let mut open = BTreeMap::new();
        loop {
            while scheduler.waiting() < batch_size
                && open.len() < batch_size.saturating_mul(OPEN_PROMPTS)
                && !job.is_interrupted()
            {
                let Some((prompt, ids)) = prompts.next(job)? else { break };
                if is_search {
                    Room::of_search(&ids, &config, self.config()).check(self.model(), None)?;
                }
                let config = match job.seed(prompt) {
                    Some(seed) => Arc::new(GenerationConfig { seed, ..(*config).clone() }),
                    None => Arc::clone(&config),
                };
                let request = Request::new(ids, Arc::clone(&config));
                let request = Request { processors: job.processors(), ..request };
                match scheduler.submit(request) {
                    Ok(id) => {
                        _ = open.insert(
                            id,
                            Unfinished { prompt, texts: self.empty_texts(&config), ended: BTreeSet::new() },
                        )
                    }
                    Err(error) => hand_on(job, prompt, Err(error))?,
                }
            }
            if scheduler.is_idle() {
                return Ok(());
            }
            let steps = config.max_new_tokens.min(self.config().n_positions);
            let bar = is_search.then(|| reporter.start("searching", steps as u64, Unit::Items("tokens")));
            let Step { events, failure } = scheduler.step_with(&|| {
                bar.iter().for_each(|bar| bar.advance(1));
                if job.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            drop(bar);
            for event in events {
                take_event(job, &mut open, event)?;
                if job.is_interrupted() {
                    return interrupt(job, open);
                }
            }
            match failure {
                Some(_) if is_interrupted() => return interrupt(job, open),
                failure => failure.map_or(Ok(()), |error| Err(EngineError::from(error)))?,
            }
        }
    }

    /// A scheduler of texts of this model, with its tokenizer.
    ///
    /// # Errors
    /// When an option is out of its range, or the memory for keys and values cannot be allocated.
    pub fn scheduler(&self, options: SchedulerOptions) -> Result<Scheduler, GenerationError> {
        let mut scheduler = Scheduler::new(self.model(), self.vocabulary().tokenizer().cloned(), options)?;
        self.assistant().map_or(Ok(()), |assistant| scheduler.set_assistant(assistant))?;
        system_clock().into_iter().for_each(|clock| scheduler.set_clock(clock));
        Ok(scheduler)
    }

    /// The texts of these requests, `batch_size` at a time, event by event: what drives a [`Job`] itself is here the caller's. The
    /// [place](candle_gpt2_generation::RequestId::place) of a request is that in the list. `clock` is for texts with a
    /// [`max_time`](GenerationConfig::max_time); without one the system's counts.
    ///
    /// # Errors
    /// When a request is refused, or the memory that is free has no room for the keys and values of the texts that are made at
    /// once.
    ///
    /// ```
    /// use candle_gpt2_engine::{ModelOptions, Silent};
    /// use candle_gpt2_generation::{Event, GenerationConfig, Request};
    ///
    /// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    /// let config = GenerationConfig { max_new_tokens: 4, ..GenerationConfig::default() };
    /// let request = |prompt| Ok(Request::new(model.vocabulary().encode(prompt)?, config.clone()));
    /// let requests = ["ROMEO:", "JULIET:"].map(request).into_iter().collect::<Result<_, candle_gpt2_engine::EngineError>>()?;
    /// let mut texts = [String::new(), String::new()];
    /// for event in model.batch(requests, 2, None)? {
    ///     if let Event::Token { request, text, .. } = event? {
    ///         texts[request.place()].push_str(&text);
    ///     }
    /// }
    /// assert!(texts.iter().all(|text| !text.is_empty()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn batch(
        &self,
        requests: Vec<Request>,
        batch_size: usize,
        clock: Option<Clock>,
    ) -> Result<Events, EngineError> {
        let options = SchedulerOptions::of_requests(&requests, batch_size, self.config())?;
        self.check_kv_room(options.max_texts, options.kv_tokens)?;
        let is_search = |request: &&Request| request.config.search_mode() != SearchMode::TokenByToken;
        for request in requests.iter().filter(is_search) {
            Room::of_search(&request.prompt, &request.config, self.config()).check(self.model(), None)?;
        }
        let mut scheduler = self.scheduler(options)?;
        clock.into_iter().for_each(|clock| scheduler.set_clock(clock));
        for request in requests {
            scheduler.submit(request)?;
        }
        Ok(scheduler.into_events())
    }

    /// What a prompt gives before its first token.
    fn empty_texts(&self, config: &GenerationConfig) -> Vec<Text> {
        let text = self.vocabulary().tokenizer().map(|_| String::new());
        let stop_reason = StopReason::MaxNewTokens;
        let is_drafted = self.assistant().is_some() || config.prompt_lookup_num_tokens.is_some();
        let drafts = (is_drafted && config.search_mode() == SearchMode::TokenByToken).then(Drafts::default);
        vec![Text { ids: Vec::new(), text, stop_reason, score: None, drafts }; config.num_return_sequences]
    }
}

/// Hands on what became of a prompt. A device that fails would fail for every other one too.
fn hand_on<J: Job>(
    job: &mut J,
    prompt: usize,
    texts: Result<Vec<Text>, GenerationError>,
) -> Result<(), J::Error> {
    match texts {
        Err(error @ GenerationError::Candle(_)) => Err(EngineError::from(error).into()),
        texts => job.on_texts(prompt, texts),
    }
}

/// The prompts of a job, some of which are looked at ahead.
struct Prompts {
    /// Number of the next one.
    number: usize,
    ahead: VecDeque<Vec<u32>>,
}

impl Prompts {
    fn next<J: Job>(&mut self, job: &mut J) -> Result<Option<(usize, Vec<u32>)>, J::Error> {
        let next = match self.ahead.pop_front() {
            Some(prompt) => Some(prompt),
            None => job.next_prompt()?,
        };
        let number = self.number;
        self.number += usize::from(next.is_some());
        Ok(next.map(|prompt| (number, prompt)))
    }

    /// Looks at one prompt more than `batch_size`, where there are as many. For each, tokens of which its texts keep keys and
    /// values.
    fn look_ahead<J: Job>(
        &mut self,
        job: &mut J,
        batch_size: usize,
        config: &Arc<GenerationConfig>,
        model: &Gpt2Config,
    ) -> Result<Vec<usize>, J::Error> {
        let mut tokens = Vec::new();
        while self.ahead.len() <= batch_size {
            let Some(prompt) = job.next_prompt()? else { break };
            let request = Request::new(prompt, Arc::clone(config));
            // A prompt that is refused is told when its turn comes.
            tokens.push(request.kv_tokens(model).unwrap_or(0));
            self.ahead.push_back(request.prompt);
        }
        Ok(tokens)
    }
}

/// Room for `batch_size` texts of any length; where fewer are to be made, for those: `copies` of each prompt that was looked
/// at, which keep keys and values of so many `tokens` each.
fn options_for(tokens: &[usize], batch_size: usize, copies: usize, model: &Gpt2Config) -> SchedulerOptions {
    let (texts, each) = if tokens.len() <= batch_size {
        (tokens.len().saturating_mul(copies), tokens.iter().copied().fold(1, usize::max))
    } else {
        (batch_size, KvSlot::room_of(model.n_positions))
    };
    let max_texts = texts.clamp(1, batch_size);
    // Nobody waits for a running text while the next prompt is computed, so it is computed as a whole.
    let chunk_tokens = model.n_positions;
    SchedulerOptions { max_texts, kv_tokens: max_texts.saturating_mul(each), chunk_tokens }
}

/// A prompt whose texts are not all there.
struct Unfinished {
    prompt: usize,
    texts: Vec<Text>,
    /// Which of them have ended.
    ended: BTreeSet<usize>,
}

/// Hands on what there is of all prompts.
fn interrupt<J: Job>(job: &mut J, open: BTreeMap<RequestId, Unfinished>) -> Result<(), J::Error> {
    for Unfinished { prompt, mut texts, ended } in open.into_values() {
        let running = texts.iter_mut().enumerate().filter(|(sequence, _)| !ended.contains(sequence));
        running.for_each(|(_, text)| text.stop_reason = StopReason::Interrupted);
        job.on_texts(prompt, Ok(texts))?;
    }
    Ok(())
}

fn take_event<J: Job>(
    job: &mut J,
    open: &mut BTreeMap<RequestId, Unfinished>,
    event: Event,
) -> Result<(), J::Error> {
    let Entry::Occupied(mut entry) = open.entry(event.request()) else { return Ok(()) };
    let unfinished = entry.get_mut();
    match event {
        Event::Token { sequence, id, text: piece, stop_reason, drafts, .. } => {
            let text = &mut unfinished.texts[sequence];
            text.ids.push(id);
            text.drafts = text.drafts.map(|_| drafts);
            if let Some(text) = &mut text.text {
                text.push_str(&piece);
            }
            if let Some(reason) = stop_reason {
                text.stop_reason = reason;
                unfinished.ended.insert(sequence);
            }
            let prompt = unfinished.prompt;
            job.on_token(&GeneratedToken { prompt, sequence, id, text: piece, stop_reason, drafts })?;
        }
        Event::Found { texts, .. } => {
            let Unfinished { prompt, texts: empty, .. } = entry.remove();
            let has_text = empty.iter().any(|text| text.text.is_some());
            let text = |Found { ids, text, stop_reason, score }| Text {
                ids,
                text: has_text.then_some(text),
                stop_reason,
                score,
                drafts: None,
            };
            return job.on_texts(prompt, Ok(texts.into_iter().map(text).collect()));
        }
        Event::Failed { error, .. } => return hand_on(job, entry.remove().prompt, Err(error)),
        // A text of no tokens is what it was from the start.
        Event::Empty { sequence, .. } => _ = unfinished.ended.insert(sequence),
        _ => {}
    }
    if entry.get().ended.len() == entry.get().texts.len() {
        let Unfinished { prompt, texts, .. } = entry.remove();
        job.on_texts(prompt, Ok(texts))?;
    }
    Ok(())
}
