//! Batch generation that requests prompts while there is capacity and delivers completions.

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

use crate::memory::KvDemand;
use crate::{CallEvent, CallId, CompletionDriver, EngineError, LoadedModel, Reporter, Unit, system_clock};

/// A finished completion.
///
/// Passed to a [`Job`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Completion {
    /// Generated token ids, including the end token.
    pub ids: Vec<u32>,
    /// Decoded text; absent without a tokenizer.
    pub text: Option<String>,
    /// Stop reason, serialized as its [name](StopReason::name).
    #[serde(serialize_with = "by_name")]
    pub stop_reason: StopReason,
    /// Length-normalized log-probability of a beam.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Number of drafted and accepted tokens, if tokens were drafted.
    #[serde(flatten)]
    pub drafts: Option<Drafts>,
}

fn by_name<S: Serializer>(reason: &StopReason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(reason.name())
}

/// Source of prompts and receiver of their completions.
///
/// Prompts are numbered from 0 in the order in which the source returns them.
///
/// ```
/// use candle_gpt2_engine::{Completion, EngineError, Job, ModelOptions, Silent};
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
///     fn on_texts(&mut self, _: usize, texts: Result<Vec<Completion>, GenerationError>) -> Result<(), EngineError> {
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
    /// Error type of the job; must be convertible from engine errors.
    type Error: From<EngineError>;

    /// Returns the next prompt, or `None` after the last one.
    ///
    /// # Errors
    /// An error that ends the whole job.
    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, Self::Error>;

    /// Returns a seed for a prompt's completions, which overrides the configuration's seed.
    ///
    /// Called after [`Job::next_prompt`] has returned the prompt.
    fn seed(&self, prompt: usize) -> Option<u64> {
        let _ = prompt;
        None
    }

    /// Receives each generated token, unless the configuration requests a search.
    ///
    /// # Errors
    /// An error that ends the whole job.
    fn on_token(&mut self, token: &GeneratedToken) -> Result<(), Self::Error> {
        let _ = token;
        Ok(())
    }

    /// Receives all completions of a prompt, or its error.
    ///
    /// A search returns the best completion first.
    ///
    /// # Errors
    /// An error that ends the whole job.
    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Completion>, GenerationError>,
    ) -> Result<(), Self::Error>;

    /// Whether to stop generating, checked after each token.
    ///
    /// An interruption through [`candle_gpt2_kernels::interruptible`] takes effect sooner. In both cases the
    /// job still receives the partial completions.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Clock that measures [`GenerationConfig::max_time`]; by default the system clock.
    fn clock(&self) -> Option<Clock> {
        system_clock()
    }

    /// Logits processors in addition to those from the configuration, such as a grammar.
    ///
    /// [`LogitsProcessor::add_to`] defines their order.
    fn processors(&self) -> Vec<LogitsProcessor> {
        Vec::new()
    }
}

impl LoadedModel {
    /// Generates completions for every prompt of a job.
    ///
    /// Token-by-token generation processes `batch_size` sequences at a time. `config` must be
    /// [complete](crate::Defaults::complete).
    ///
    /// # Errors
    /// If the job returns an error, the KV cache of a batch does not fit in the free memory, or the device
    /// fails. The error of a single prompt goes to the job.
    pub fn generate<J: Job>(
        &self,
        job: &mut J,
        batch_size: usize,
        config: &GenerationConfig,
        reporter: &dyn Reporter,
    ) -> Result<(), J::Error> {
        let is_search = config.search_mode() != SearchMode::TokenByToken;
        if is_search && self.assistant().is_some() {
            let what = "an assistant cannot be combined with beam or contrastive search";
            return Err(EngineError::from(GenerationError::Conflict { what: what.into() }).into());
        }
        /// Maximum number of unfinished prompts for each sequence in a batch.
        ///
        /// Without this limit, a job whose completions have no tokens would read all prompts at once.
        const OPEN_PROMPTS: usize = 2;
        // Searches run one after the other, each with its own memory.
        let batch_size = if is_search { 1 } else { batch_size.max(1) };
        let config = Arc::new(config.clone());
        // Reads up to one prompt more than the batch size, to detect jobs that fit into one batch.
        let mut ahead = VecDeque::new();
        while !is_search && ahead.len() <= batch_size {
            let Some(prompt) = job.next_prompt()? else { break };
            ahead.push_back(Request::new(prompt, Arc::clone(&config)));
        }
        // An invalid prompt counts as 0 tokens; its error is reported when the prompt is submitted.
        let kv_tokens = |request: &Request| request.kv_tokens(self.config()).unwrap_or(0);
        let tokens: Vec<usize> = ahead.iter().map(kv_tokens).collect();
        let options = options_for(&tokens, batch_size, config.num_return_sequences, self.config());
        let is_cpu = self.device().is_cpu();
        KvDemand::of_texts(&tokens, config.num_return_sequences, options, is_cpu)
            .check(self.model(), self.assistant())?;
        let mut scheduler = self.scheduler(options).map_err(EngineError::from)?;
        job.clock().into_iter().for_each(|clock| scheduler.set_clock(clock));
        let mut texts = CompletionDriver::new(scheduler);
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
                    KvDemand::of_search(&request.prompt, &config, self.config()).check(self.model(), None)?;
                }
                if let Some(seed) = job.seed(prompt) {
                    request.config = Arc::new(GenerationConfig { seed, ..(*config).clone() });
                }
                request.processors = job.processors();
                texts.begin(vec![request], Unfinished { prompt, texts: self.empty_texts(&config) });
                if let Some((call, _, Err(error))) = texts.feed(usize::MAX) {
                    _ = texts.end(call);
                    deliver(job, prompt, Err(error))?;
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

    /// Creates a scheduler for this model, with its tokenizer.
    ///
    /// # Errors
    /// If an option is out of range, or the KV cache cannot be allocated.
    pub fn scheduler(&self, options: SchedulerOptions) -> Result<Scheduler, GenerationError> {
        let mut scheduler = Scheduler::new(self.model(), self.vocabulary().tokenizer().cloned(), options)?;
        self.assistant().map_or(Ok(()), |assistant| scheduler.set_assistant(assistant))?;
        system_clock().into_iter().for_each(|clock| scheduler.set_clock(clock));
        Ok(scheduler)
    }

    /// Creates an empty scheduler with just enough capacity for these requests.
    ///
    /// It generates `batch_size` sequences at a time. `clock` measures
    /// [`max_time`](GenerationConfig::max_time); by default the system clock does.
    ///
    /// # Errors
    /// If a request does not fit the model, or the KV cache of a batch does not fit in the free memory.
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
            KvDemand::of_search(&request.prompt, &request.config, self.config()).check(self.model(), None)?;
        }
        let mut scheduler = self.scheduler(options)?;
        clock.into_iter().for_each(|clock| scheduler.set_clock(clock));
        Ok(scheduler)
    }

    /// Creates a prompt's completions as they are before their first token.
    fn empty_texts(&self, config: &GenerationConfig) -> Vec<Completion> {
        let text = self.vocabulary().tokenizer().map(|_| String::new());
        // Completions keep this stop reason until they end.
        let stop_reason = StopReason::Interrupted;
        let is_drafted = self.assistant().is_some() || config.prompt_lookup_num_tokens.is_some();
        let drafts = (is_drafted && config.search_mode() == SearchMode::TokenByToken).then(Drafts::default);
        vec![
            Completion { ids: Vec::new(), text, stop_reason, score: None, drafts };
            config.num_return_sequences
        ]
    }
}

/// Delivers a prompt's result to the job.
///
/// A device failure ends the job instead, because it would affect every other prompt too.
fn deliver<J: Job>(
    job: &mut J,
    prompt: usize,
    texts: Result<Vec<Completion>, GenerationError>,
) -> Result<(), J::Error> {
    match texts {
        Err(error @ GenerationError::Candle(_)) => Err(EngineError::from(error).into()),
        texts => job.on_texts(prompt, texts),
    }
}

/// Chooses a scheduler capacity: `batch_size` sequences of any length, or fewer for a small job.
///
/// A small job has at most `batch_size` prompts. Each prompt has `copies` sequences. `tokens` holds, for each
/// prompt, the number of cached tokens of one sequence.
fn options_for(tokens: &[usize], batch_size: usize, copies: usize, model: &Gpt2Config) -> SchedulerOptions {
    let (texts, each) = if tokens.len() <= batch_size {
        (tokens.len().saturating_mul(copies), tokens.iter().copied().fold(1, usize::max))
    } else {
        (batch_size, KvSlot::room_of(model.n_positions))
    };
    let max_texts = texts.clamp(1, batch_size);
    // No caller is waiting for individual tokens, so each prompt can be prefilled in one chunk.
    let chunk_tokens = model.n_positions;
    SchedulerOptions { max_texts, kv_tokens: max_texts.saturating_mul(each), chunk_tokens }
}

/// A prompt with unfinished completions.
struct Unfinished {
    prompt: usize,
    texts: Vec<Completion>,
}

/// Delivers the partial completions of all prompts.
fn interrupt<J: Job>(job: &mut J, mut all: CompletionDriver<Unfinished>) -> Result<(), J::Error> {
    let calls: Vec<CallId> = all.owners().map(|(call, _)| call).collect();
    let mut open = calls.into_iter().filter_map(|call| all.end(call));
    open.try_for_each(|Unfinished { prompt, texts }| job.on_texts(prompt, Ok(texts)))
}

fn take_event<J: Job>(
    job: &mut J,
    all: &mut CompletionDriver<Unfinished>,
    CallEvent { call, event, is_last, .. }: CallEvent,
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
            let text = |Found { ids, text, stop_reason, score }| Completion {
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
            return deliver(job, prompt, Err(error));
        }
        Event::Empty { sequence, .. } => texts[sequence].stop_reason = StopReason::MaxNewTokens,
        _ => {}
    }
    let ended = if is_last { all.end(call) } else { None };
    ended.map_or(Ok(()), |Unfinished { prompt, texts }| job.on_texts(prompt, Ok(texts)))
}
