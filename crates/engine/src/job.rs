//! Many texts in one go: prompts are asked for as there is room for them, and texts are handed on as they are finished.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2::{Gpt2Config, KvSlot};
use candle_gpt2_generation::{
    Clock, Drafts, Event, Found, GeneratedToken, GenerationConfig, GenerationError, LogitsProcessor, Request,
    Scheduler, SchedulerOptions, SearchMode, StopReason,
};
use candle_gpt2_kernels::is_interrupted;
use serde::{Serialize, Serializer};

use crate::memory::Room;
use crate::{CallId, EngineError, Happened, LoadedModel, Reporter, Texts, Unit, system_clock};

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
/// let waiting = vec![model.vocabulary().encode("One day")?, model.vocabulary().encode("Once there was")?];
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

    /// A token as it comes, if texts are made token by token.
    ///
    /// # Errors
    /// What ends the whole job.
    fn on_token(&mut self, token: &GeneratedToken) -> Result<(), Self::Error> {
        let _ = token;
        Ok(())
    }

    /// All texts of a prompt, best first if they were searched for, or why there are none.
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

    /// Logits processors of all texts besides those of the configuration, such as a grammar; for their order see
    /// [`LogitsProcessor::add_to`].
    fn processors(&self) -> Vec<LogitsProcessor> {
        Vec::new()
    }
}

impl LoadedModel {
    /// Continues every prompt of a job, `batch_size` sequences at a time if they are generated token by token. `config` is
    /// [complete](crate::Defaults::complete).
    ///
    /// # Errors
    /// Those of the job, when the free memory has no room for the KV cache of a batch, and when the device fails. The error of a
    /// single prompt is given to the job.
    pub fn generate<J: Job>(
        &self,
        job: &mut J,
        batch_size: usize,
        config: &GenerationConfig,
        reporter: &dyn Reporter,
    ) -> Result<(), J::Error> {
        let is_search = config.search_mode() != SearchMode::TokenByToken;
        if is_search && self.assistant().is_some() {
            let what = "an assistant works only when decoding token by token; it cannot be used with beam or contrastive search";
            return Err(EngineError::from(GenerationError::Conflict { what: what.into() }).into());
        }
        /// Prompts whose texts are not all there, for each text of a batch: if no tokens are asked for, none wait.
        const OPEN_PROMPTS: usize = 2;
        // Searches are made one after the other, with memory of their own.
        let batch_size = if is_search { 1 } else { batch_size.max(1) };
        let config = Arc::new(config.clone());
        // One prompt more than a batch tells whether there are as many.
        let mut ahead = VecDeque::new();
        while !is_search && ahead.len() <= batch_size {
            let Some(prompt) = job.next_prompt()? else { break };
            ahead.push_back(Request::new(prompt, Arc::clone(&config)));
        }
        // The error of a refused prompt is reported when its turn comes.
        let kv_tokens = |request: &Request| request.kv_tokens(self.config()).unwrap_or(0);
        let tokens: Vec<usize> = ahead.iter().map(kv_tokens).collect();
        let options = options_for(&tokens, batch_size, config.num_return_sequences, self.config());
        let is_cpu = self.device().is_cpu();
        Room::of_texts(&tokens, config.num_return_sequences, options, is_cpu)
            .check(self.model(), self.assistant())?;
        let mut scheduler = self.scheduler(options).map_err(EngineError::from)?;
        job.clock().into_iter().for_each(|clock| scheduler.set_clock(clock));
        let mut texts = Texts::new(scheduler);
        let mut prompt = 0;
        loop {
            while texts.scheduler().is_some_and(|scheduler| scheduler.waiting() < batch_size)
                && texts.owners().count() < batch_size.saturating_mul(OPEN_PROMPTS)
                && !job.is_interrupted()
            {
                let next = match ahead.pop_front() {
                    Some(request) => Some(request),
                    None => job.next_prompt()?.map(|prompt| Request::new(prompt, Arc::clone(&config))),
                };
                let Some(mut request) = next else { break };
                if is_search {
                    Room::of_search(&request.prompt, &config, self.config()).check(self.model(), None)?;
                }
                if let Some(seed) = job.seed(prompt) {
                    request.config = Arc::new(GenerationConfig { seed, ..(*config).clone() });
                }
                request.processors = job.processors();
                texts.begin(vec![request], Unfinished { prompt, texts: self.empty_texts(&config) });
                if let Some((call, _, Err(error))) = texts.feed(usize::MAX) {
                    _ = texts.end(call);
                    hand_on(job, prompt, Err(error))?;
                }
                prompt += 1;
            }
            if texts.is_idle() {
                return Ok(());
            }
            let steps = config.max_new_tokens.min(self.config().n_positions);
            let bar = is_search.then(|| reporter.start("searching", steps as u64, Unit::Items("tokens")));
            let (happened, failure) = texts.step(&|| {
                bar.iter().for_each(|bar| bar.advance(1));
                if job.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            drop(bar);
            for happened in happened {
                take_event(job, &mut texts, happened)?;
                if job.is_interrupted() {
                    return interrupt(job, texts);
                }
            }
            match failure {
                Some(_) if is_interrupted() => return interrupt(job, texts),
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

    /// A scheduler with room for these requests and no others, `batch_size` texts at a time, which it does not have yet. `clock` is for
    /// texts with a [`max_time`](GenerationConfig::max_time); without one the system's counts.
    ///
    /// # Errors
    /// When a request does not fit the model, or the memory that is free has no room for the keys and values of the texts that are made
    /// at once.
    pub fn scheduler_for(
        &self,
        requests: &[Request],
        batch_size: usize,
        clock: Option<Clock>,
    ) -> Result<Scheduler, EngineError> {
        let options = SchedulerOptions::of_requests(requests, batch_size, self.config())?;
        self.check_kv_room(options.max_texts, options.kv_tokens)?;
        let is_search = |request: &&Request| request.config.search_mode() != SearchMode::TokenByToken;
        for request in requests.iter().filter(is_search) {
            Room::of_search(&request.prompt, &request.config, self.config()).check(self.model(), None)?;
        }
        let mut scheduler = self.scheduler(options)?;
        clock.into_iter().for_each(|clock| scheduler.set_clock(clock));
        Ok(scheduler)
    }

    /// What a prompt gives before its first token.
    fn empty_texts(&self, config: &GenerationConfig) -> Vec<Text> {
        let text = self.vocabulary().tokenizer().map(|_| String::new());
        // That of a text which has not ended.
        let stop_reason = StopReason::Interrupted;
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

/// Room for `batch_size` texts of any length; if fewer are to be made, for those: `copies` of each prompt that was looked
/// at, which keep keys and values of so many `tokens` each.
fn options_for(tokens: &[usize], batch_size: usize, copies: usize, model: &Gpt2Config) -> SchedulerOptions {
    let (texts, each) = if tokens.len() <= batch_size {
        (tokens.len().saturating_mul(copies), tokens.iter().copied().fold(1, usize::max))
    } else {
        (batch_size, KvSlot::room_of(model.n_positions))
    };
    let max_texts = texts.clamp(1, batch_size);
    // No caller waits for a running text while the next prompt is computed, so prompts are computed as a whole.
    let chunk_tokens = model.n_positions;
    SchedulerOptions { max_texts, kv_tokens: max_texts.saturating_mul(each), chunk_tokens }
}

/// A prompt whose texts are not all there.
struct Unfinished {
    prompt: usize,
    texts: Vec<Text>,
}

/// Hands on what there is of all prompts.
fn interrupt<J: Job>(job: &mut J, mut all: Texts<Unfinished>) -> Result<(), J::Error> {
    let calls: Vec<CallId> = all.owners().map(|(call, _)| call).collect();
    let mut open = calls.into_iter().filter_map(|call| all.end(call));
    open.try_for_each(|Unfinished { prompt, texts }| job.on_texts(prompt, Ok(texts)))
}

fn take_event<J: Job>(
    job: &mut J,
    all: &mut Texts<Unfinished>,
    Happened { call, event, is_last, .. }: Happened,
) -> Result<(), J::Error> {
    let Some(Unfinished { prompt, texts }) = all.owner(call) else { return Ok(()) };
    match event {
        Event::Token { sequence, id, text: piece, stop_reason, drafts, .. } => {
            let text = &mut texts[sequence];
            text.ids.push(id);
            text.drafts = text.drafts.map(|_| drafts);
            if let Some(text) = &mut text.text {
                text.push_str(&piece);
            }
            text.stop_reason = stop_reason.unwrap_or(text.stop_reason);
            let prompt = *prompt;
            job.on_token(&GeneratedToken { prompt, sequence, id, text: piece, stop_reason, drafts })?;
        }
        Event::Found { texts: found, .. } => {
            let has_text = texts.iter().any(|text| text.text.is_some());
            let text = |Found { ids, text, stop_reason, score }| Text {
                ids,
                text: has_text.then_some(text),
                stop_reason,
                score,
                drafts: None,
            };
            *texts = found.into_iter().map(text).collect();
        }
        Event::Failed { error, .. } => {
            let prompt = *prompt;
            _ = all.end(call);
            return hand_on(job, prompt, Err(error));
        }
        Event::Empty { sequence, .. } => texts[sequence].stop_reason = StopReason::MaxNewTokens,
        _ => {}
    }
    let ended = if is_last { all.end(call) } else { None };
    ended.map_or(Ok(()), |Unfinished { prompt, texts }| job.on_texts(prompt, Ok(texts)))
}
