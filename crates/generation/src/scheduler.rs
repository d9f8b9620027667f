//! Many texts at once that come and go: one loop for a single text, a batch and a server.
//!
//! Prompts of different lengths need no padding. A prompt is computed by itself, in chunks between the steps of the texts that
//! are running, and its keys and values stay where they are when it joins them; every step computes one token of all running
//! texts together. Room for the keys and values of a whole text is taken before its prompt is begun, so no text ever has to
//! give way to another. Texts begin in the order of their requests.

use std::collections::VecDeque;
use std::iter::once;
use std::mem;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvPool, KvSlot, LogitsFor, Pass};
use candle_gpt2_kernels::map_items;
use tokenizers::Tokenizer;

use crate::clock::Deadline;
use crate::config::slid_tokens;
use crate::draft::{
    Assistant, CACHED_TOKEN_COST, Drafted, Drafts, Success, longest_beside, look_up, token_cost_of,
};
use crate::logits::rows_of;
use crate::logprobs::{Expected, biased, for_each_row};
use crate::prefixes::{Beginning, Prefixes, PromptScores, Source, usable_tokens};
use crate::{
    Clock, GenerationConfig, GenerationError, History, LogitsProcessor, Sampler, SearchMode, TextStream,
    TokenLogprobs, WhenFull,
};

/// Why a text ended. [`Event`]s and [`TokenGenerator::stop_reason`](crate::TokenGenerator::stop_reason) tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model produced an end-of-text token, which is the last id.
    Eos,
    /// A stop string came up; the text ends in front of it, the ids with the token that completed it.
    StopString,
    /// What the text must conform to allows nothing after it; see [`Constraint`](crate::Constraint).
    Complete,
    /// As many tokens as were asked for.
    MaxNewTokens,
    /// The model's context is full.
    Context,
    /// The time is over.
    MaxTime,
    /// Whoever asked for the text ended it.
    Interrupted,
}

impl StopReason {
    /// The reason in one word, as `--json` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::StopString => "stop_string",
            Self::Complete => "complete",
            Self::MaxNewTokens => "max_new_tokens",
            Self::Context => "context",
            Self::MaxTime => "max_time",
            Self::Interrupted => "interrupted",
        }
    }
}

/// How much a [`Scheduler`] does at once. What [`Scheduler::new`] takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Most texts that run at once; at least 1.
    pub max_texts: usize,
    /// Tokens that there is memory for, rounded up to a multiple of 16: the keys and values of all prompts and texts that run at
    /// once, of which each takes a multiple of 16.
    pub kv_tokens: usize,
    /// Most tokens of prompts that are computed in a step, at least 1. A running text waits no longer for its next token.
    pub chunk_tokens: usize,
}

impl SchedulerOptions {
    /// For these requests and no others, `batch_size` texts at a time; each prompt is computed as a whole, since nobody else waits.
    ///
    /// # Errors
    /// As [`Request::kv_tokens`].
    pub fn of_requests(
        requests: &[Request],
        batch_size: usize,
        model: &Gpt2Config,
    ) -> Result<Self, GenerationError> {
        let (mut texts, mut longest) = (0_usize, 1);
        for request in requests {
            texts = texts.saturating_add(request.config.num_return_sequences);
            longest = longest.max(request.kv_tokens(model)?);
        }
        let max_texts = batch_size.clamp(1, texts.max(1));
        let kv_tokens = max_texts.saturating_mul(longest);
        Ok(Self { max_texts, kv_tokens, chunk_tokens: model.n_positions })
    }
}

/// A prompt to be continued, by as many texts as its configuration says.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, Request};
///
/// let config = GenerationConfig { max_new_tokens: 5, ..GenerationConfig::default() };
/// let request = Request { logprobs: Some(3), ..Request::new(vec![1, 2, 3], config) };
/// assert_eq!((request.prompt.len(), request.stream), (3, 0));
/// ```
#[derive(Debug, Clone)]
pub struct Request {
    /// Its tokens.
    pub prompt: Vec<u32>,
    /// How it is continued, token by token.
    pub config: Arc<GenerationConfig>,
    /// Changes of the logits besides those of the configuration; for their place see [`LogitsProcessor::add_to`].
    pub processors: Vec<LogitsProcessor>,
    /// Its first text draws from this stream of the configuration's seed, the others from those after it.
    pub stream: u64,
    /// How probable each new token is, with so many alternatives: by the model's logits and the configuration's biases, before
    /// anything else changes them.
    pub logprobs: Option<usize>,
    /// How probable each token of the prompt is, with so many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Requests of the same number may go on from what was computed for one another, where their prompts begin alike; on a CPU,
    /// where that changes no bit. `None` is for oneself.
    pub reuse: Option<u64>,
}

impl Request {
    /// A request without anything of its own.
    pub fn new(prompt: Vec<u32>, config: impl Into<Arc<GenerationConfig>>) -> Self {
        Self {
            prompt,
            config: config.into(),
            processors: Vec::new(),
            stream: 0,
            logprobs: None,
            prompt_logprobs: None,
            reuse: None,
        }
    }

    /// A request for each prompt, all with the same configuration.
    pub fn each(prompts: &[Vec<u32>], config: &GenerationConfig) -> Vec<Self> {
        let config = Arc::new(config.clone());
        prompts.iter().map(|prompt| Self::new(prompt.clone(), Arc::clone(&config))).collect()
    }

    /// Tokens that there must be memory for so that each of its texts can keep its keys and values: the least
    /// [`SchedulerOptions::kv_tokens`] that it can be made with, whole panels of 16.
    ///
    /// # Errors
    /// When the prompt is refused, see [`GenerationConfig::fit_prompt`].
    pub fn kv_tokens(&self, model: &Gpt2Config) -> Result<usize, GenerationError> {
        let prompt = self.config.fit_prompt(&self.prompt, model)?;
        let capacity = kept_tokens(&self.config, prompt.len(), model.n_positions);
        Ok(KvSlot::room_of(capacity))
    }
}

/// The number of a request, counted from 0 in the order they came. [`Scheduler::submit`] gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    /// The place of the request among all that were submitted, counted from 0.
    pub fn place(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// What a step did. [`Scheduler::step`] returns it.
#[derive(Debug)]
#[must_use = "events are told once"]
pub struct Step {
    /// What happened, in order; where the step failed, until then.
    pub events: Vec<Event>,
    /// Why the device failed. All requests have then ended.
    pub failure: Option<GenerationError>,
}

impl Step {
    /// The events, for whom they are worth nothing where the step failed.
    ///
    /// # Errors
    /// When the device failed.
    pub fn into_result(self) -> Result<Vec<Event>, GenerationError> {
        self.failure.map_or(Ok(self.events), Err)
    }
}

/// What happened in a step. A [`Step`] holds them.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The prompt is computed; comes once for each request whose prompt is needed, before anything else of it.
    Begun {
        /// The request.
        request: RequestId,
        /// Tokens of the prompt that had been computed for another request.
        cached_tokens: usize,
        /// How probable its tokens are, where that was asked for; `None` for the first one, which has nothing before it.
        prompt: Vec<Option<TokenLogprobs>>,
    },
    /// A text has one more token.
    Token {
        /// The request.
        request: RequestId,
        /// Which of the request's `num_return_sequences` texts it is.
        sequence: usize,
        /// The token.
        id: u32,
        /// The text that it completes; empty without a tokenizer.
        text: String,
        /// How probable it is, where that was asked for.
        logprobs: Option<TokenLogprobs>,
        /// Why the text ends with it; `None` while it goes on.
        stop_reason: Option<StopReason>,
        /// What was drafted for the text so far.
        drafts: Drafts,
    },
    /// A text has ended without a token, since none was asked for.
    Empty {
        /// The request.
        request: RequestId,
        /// Which of its texts it is.
        sequence: usize,
    },
    /// A request cannot go on; all its texts have ended.
    Failed {
        /// The request.
        request: RequestId,
        /// Why.
        error: GenerationError,
    },
}

/// Makes the texts of all requests, each the one that its prompt gives alone, whatever comes and goes beside it: each has its
/// own generator of random numbers under its seed.
///
/// One thread drives it. `T` is how it holds the tokenizer.
///
/// ```
/// use candle_gpt2_generation::{Event, GenerationConfig, Request, Scheduler, SchedulerOptions};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let options = SchedulerOptions { max_texts: 4, kv_tokens: 64, chunk_tokens: 5 };
/// let mut scheduler = <Scheduler>::new(&model, None, options)?;
/// let config = GenerationConfig { max_new_tokens: 3, eos_token_id: vec![], ..GenerationConfig::default() };
/// let first = scheduler.submit(Request::new(vec![1, 2], config.clone()))?;
/// let mut tokens = scheduler.step().events.len(); // the first runs already when the second comes
/// let second = scheduler.submit(Request::new(vec![3, 4, 5, 6], config))?;
/// while !scheduler.is_idle() {
///     let events = scheduler.step().into_result()?;
///     tokens += events.iter().filter(|event| matches!(event, Event::Token { .. })).count();
/// }
/// assert!(first < second && tokens >= 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Scheduler<T = Arc<Tokenizer>> {
    model: Gpt2LMHeadModel,
    tokenizer: Option<T>,
    options: SchedulerOptions,
    clock: Option<Clock>,
    assistant: Option<Assistant>,
    /// See [`Scheduler::set_token_cost`].
    token_cost: f64,
    pool: KvPool,
    /// On GPUs, whose kernels want the rows of a step side by side: the tokens of every text's room, however short it is.
    slot_tokens: Option<usize>,
    requests: u64,
    /// Texts that have not begun.
    waiting: VecDeque<Waiting>,
    /// Texts whose tokens are being computed; the first one goes on.
    prefilling: VecDeque<Prefill<T>>,
    /// Texts that gain a token in each step. Text `i` is row `i` of the cache.
    running: Vec<Text<T>>,
    cache: Gpt2Cache,
    /// The last prompt, where the next text continues it too.
    shared: Option<SharedPrompt>,
    /// What texts that have ended leave to others.
    prefixes: Prefixes,
    /// Events that wait for the next step.
    ready: Vec<Event>,
}

/// A text of a request.
struct Waiting {
    request: Arc<Accepted>,
    sequence: usize,
}

/// A request that was checked.
struct Accepted {
    id: RequestId,
    /// The prompt as the model gets it.
    prompt: Vec<u32>,
    max_new_tokens: usize,
    /// Tokens whose keys and values a text may have to keep.
    capacity: usize,
    config: Arc<GenerationConfig>,
    processors: Vec<LogitsProcessor>,
    stream: u64,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    reuse: Option<u64>,
}

/// A text in the making.
struct Text<T> {
    request: Arc<Accepted>,
    sequence: usize,
    /// Prompt and new tokens.
    ids: Vec<u32>,
    /// How probable the tokens of its prompt are, as far as that is known.
    scores: PromptScores,
    /// Counted from when its prompt is begun.
    deadline: Deadline,
    sampler: Sampler,
    stream: Option<TextStream<T>>,
    /// Whether its row of the cache no longer begins with the prompt.
    has_slid: bool,
    success: Success,
    /// Tokens of the last draft that were right, and that the text does not have yet.
    right: usize,
    /// What the assistant keeps of it.
    assisted: Option<Gpt2Cache>,
}

/// The next tokens of a text, and why there are no more.
struct Chosen {
    tokens: Vec<ChosenToken>,
    error: Option<GenerationError>,
}

struct ChosenToken {
    id: u32,
    logprobs: Option<TokenLogprobs>,
    /// Whether nothing may come after it.
    is_complete: bool,
}

/// Tokens on their way into a cache.
struct Prefill<T> {
    text: Text<T>,
    cache: Gpt2Cache,
    tokens: Vec<u32>,
    computed: usize,
    /// Tokens that had been computed for another text.
    cached: usize,
    /// Whether these are the tokens that a sliding window keeps. The text's last token is then not among them, and is read in
    /// the next step like that of any running text.
    is_window: bool,
}

/// The prompt of a request of several texts, which is computed once.
struct SharedPrompt {
    request: RequestId,
    /// The logits after it.
    logits: Vec<f32>,
    /// The row of a text that has ended, cut to the prompt: the next text takes it over.
    row: Option<Gpt2Cache>,
}

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// A scheduler without requests. Text and stop strings need a tokenizer.
    ///
    /// # Errors
    /// When an option is out of its range, or the memory for keys and values cannot be allocated.
    pub fn new(
        model: &Gpt2LMHeadModel,
        tokenizer: Option<T>,
        options: SchedulerOptions,
    ) -> Result<Self, GenerationError> {
        let SchedulerOptions { max_texts, kv_tokens, chunk_tokens } = options;
        for (option, least, found) in
            [("max_texts", 1, max_texts), ("kv_tokens", 1, kv_tokens), ("chunk_tokens", 1, chunk_tokens)]
        {
            if found < least {
                let (expected, found) = (format!("at least {least}"), found.to_string());
                return Err(GenerationError::OptionOutOfRange { option, expected, found });
            }
        }
        let pool = model.new_pool(kv_tokens)?;
        Ok(Self {
            model: model.clone(),
            tokenizer,
            options,
            clock: None,
            assistant: None,
            token_cost: token_cost_of(model),
            cache: pool.empty_cache(),
            pool,
            slot_tokens: (!model.device().is_cpu()).then_some(KvSlot::whole_panels(kv_tokens / max_texts)),
            requests: 0,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
            shared: None,
            prefixes: Prefixes::default(),
            ready: Vec::new(),
        })
    }

    /// Gives it a clock, for texts with a [`GenerationConfig::max_time`]; without one they fail.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = Some(clock);
    }

    /// Gives it an assistant: a smaller model that drafts tokens, so that one pass of the model looks at several places of a text at
    /// once. On a CPU the texts stay the same, byte for byte.
    ///
    /// # Errors
    /// When the models have vocabularies of different sizes, or there is no memory for what the assistant keeps.
    pub fn set_assistant(&mut self, assistant: &Gpt2LMHeadModel) -> Result<(), GenerationError> {
        let [vocab_size, found] = [&self.model, assistant].map(|model| model.config().vocab_size);
        if found != vocab_size {
            return Err(GenerationError::AssistantVocabulary { vocab_size, found });
        }
        self.assistant = Some(Assistant::new(assistant, &self.model, self.pool.tokens())?);
        // What is kept of texts that have begun is another's.
        self.running.iter_mut().for_each(|text| text.assisted = None);
        self.prefilling.iter_mut().for_each(|prefill| prefill.text.assisted = None);
        Ok(())
    }

    /// Says what reading one more token costs, as a share of a pass over one token of one text: how long drafts are depends on it,
    /// and no text does; from 0.4 on only a text that runs alone gets drafts. By default it is estimated from the size of the model.
    pub fn set_token_cost(&mut self, token_cost: f64) {
        self.token_cost = token_cost.max(0.0);
    }

    /// Accepts a request, whose texts begin when there is room. Everything that can be refused is refused here, before any work.
    ///
    /// # Errors
    /// When an option is out of its range or asks for a search that is not token by token, the prompt is empty or too
    /// long, an id is outside the vocabulary, stop strings have no tokenizer, or prompt and text have no room in the memory for
    /// keys and values, however long they wait.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, GenerationError> {
        let Request { prompt, config, processors: others, stream, logprobs, prompt_logprobs, reuse } =
            request;
        let model = self.model.config();
        config.check_for(SearchMode::TokenByToken, model)?;
        if !config.stop_strings.is_empty() && self.tokenizer.is_none() {
            return Err(GenerationError::StopStringsWithoutTokenizer);
        }
        let prompt = config.fit_prompt(&prompt, model)?;
        let max_new_tokens = config.new_tokens(prompt.len());
        let capacity = kept_tokens(&config, prompt.len(), model.n_positions);
        let (needed, kv_tokens) = (KvSlot::room_of(capacity), self.pool.tokens());
        if needed > kv_tokens {
            return Err(GenerationError::KvTokens { needed, kv_tokens });
        }
        let mut processors = LogitsProcessor::of_config(&config);
        others.into_iter().for_each(|other| other.add_to(&mut processors));
        let id = RequestId(self.requests);
        self.requests += 1;
        let texts = 0..config.num_return_sequences;
        if max_new_tokens == 0 && prompt_logprobs.is_none() {
            self.ready.extend(texts.map(|sequence| Event::Empty { request: id, sequence }));
        } else {
            // On a GPU the rows of a step lie side by side, and what is kept would stand between them.
            let reuse = reuse.filter(|_| self.slot_tokens.is_none());
            let request = Arc::new(Accepted {
                id,
                prompt,
                max_new_tokens,
                capacity,
                config,
                processors,
                stream,
                logprobs,
                prompt_logprobs,
                reuse,
            });
            self.waiting.extend(texts.map(|sequence| Waiting { request: Arc::clone(&request), sequence }));
        }
        Ok(id)
    }

    /// Ends a request, of which no event comes any more. Says whether there was something to end.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let before = self.texts() + self.ready.len();
        self.waiting.retain(|waiting| waiting.request.id != request);
        self.prefilling.retain(|prefill| prefill.text.request.id != request);
        let mut row = 0;
        while row < self.running.len() {
            if self.running[row].request.id == request {
                if let Ok((text, cache)) = self.take_row(row) {
                    self.leave(text, cache);
                }
            } else {
                row += 1;
            }
        }
        self.shared.take_if(|shared| shared.request == request);
        self.ready.retain(|event| event.request() != request);
        self.texts() + self.ready.len() < before
    }

    /// What happens in step after step, until there is nothing to do.
    pub fn into_events(self) -> Events<T> {
        Events { scheduler: self, ready: VecDeque::new(), failure: None }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.texts() + self.ready.len() == 0
    }

    /// Texts that have not begun.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Texts that have begun and not ended.
    pub fn running(&self) -> usize {
        self.running.len() + self.prefilling.len()
    }

    /// Texts that gain a token in each step.
    pub fn writing(&self) -> usize {
        self.running.len()
    }

    /// Changes [`SchedulerOptions::chunk_tokens`] for the steps that follow, which changes no text; 0 counts as 1.
    pub fn set_chunk_tokens(&mut self, chunk_tokens: usize) {
        self.options.chunk_tokens = chunk_tokens.max(1);
    }

    /// Tokens whose keys and values have room taken in memory, for texts that have begun.
    pub fn kv_tokens_in_use(&self) -> usize {
        self.pool.tokens_in_use() - self.prefixes.kv_tokens()
    }

    /// Tokens whose keys and values are kept of texts that have ended, until the memory is needed; see [`Request::reuse`].
    pub fn kv_tokens_kept(&self) -> usize {
        self.prefixes.kv_tokens()
    }

    /// Computes the next token of every running text, then the next chunk of the prompts, and says what happened.
    pub fn step(&mut self) -> Step {
        let failure = self.decode().and_then(|()| self.prefill()).err();
        if failure.is_some() {
            self.waiting.clear();
            self.prefilling.clear();
            self.running.clear();
            self.cache = self.pool.empty_cache();
            self.shared = None;
            self.prefixes = Prefixes::default();
        }
        Step { events: mem::take(&mut self.ready), failure }
    }

    fn texts(&self) -> usize {
        self.waiting.len() + self.running()
    }

    /// One token of all running texts, and those that were drafted rightly.
    fn decode(&mut self) -> Result<(), GenerationError> {
        self.slide_full_rows()?;
        self.close_gaps()?;
        if self.running.is_empty() {
            return Ok(());
        }
        let drafts = self.drafts()?;
        let lengths: Vec<usize> = drafts.iter().map(|draft| 1 + draft.len()).collect();
        let (rows, tokens) = (lengths.len(), lengths.iter().sum::<usize>());
        let ids = self.running.iter().zip(&drafts).flat_map(|(text, draft)| {
            once(text.ids.last().copied().unwrap_or(0)).chain(draft.iter().copied())
        });
        let is_even = lengths.iter().all(|length| *length == lengths[0]);
        let (shape, mut pass) = if is_even {
            ((rows, lengths[0]), Pass::inference())
        } else {
            ((1, tokens), Pass::inference().of_rows(lengths.as_slice().into()))
        };
        let ids = Tensor::from_vec(ids.collect(), shape, self.model.device())?;
        let wanted = if tokens == rows { LogitsFor::LastToken } else { LogitsFor::EveryToken };
        let logits = self.model.forward_with(&ids, wanted, Some(&mut self.cache), &mut pass)?;
        let mut logits = rows_of(&logits)?.into_iter();
        let of_row = |length: &usize| logits.by_ref().take(*length).collect();
        let mut logits: Vec<Vec<Vec<f32>>> = lengths.iter().map(of_row).collect();
        let chosen = sample(&mut self.running, &drafts, logits.iter_mut().map(Vec::as_mut_slice));
        for (row, (chosen, draft)) in chosen.iter().zip(&drafts).enumerate() {
            // The cache keeps what the text goes on from.
            let held = self.cache.lengths()[row] - lengths[row] + chosen.tokens.len();
            self.cache.truncate(row, held)?;
            self.running[row].count_draft(draft, &chosen.tokens)?;
        }
        self.extend(0, chosen)
    }

    /// What each running text probably goes on with.
    fn drafts(&mut self) -> Result<Vec<Vec<u32>>, GenerationError> {
        let mut drafts = vec![Vec::new(); self.running.len()];
        let texts = self.running.len();
        // An observer sees a row for each text.
        if texts > 1 && (self.token_cost >= CACHED_TOKEN_COST || self.model.is_observed()) {
            return Ok(drafts);
        }
        let n_positions = self.model.config().n_positions;
        let rooms = self.cache.rooms().into_iter().zip(self.cache.lengths());
        let rooms: Vec<usize> = rooms.map(|(room, length)| room.min(n_positions - length)).collect();
        let (mut asked, mut rows) = (Vec::new(), Vec::new());
        for (row, text) in self.running.iter_mut().enumerate() {
            let Accepted { config, prompt, max_new_tokens, .. } = &*text.request;
            let left = max_new_tokens - (text.ids.len() - prompt.len());
            let most = rooms[row].min(left).saturating_sub(1).min(longest_beside(texts));
            if let Some(longest) = config.prompt_lookup_num_tokens {
                let length = text.success.length(most.min(longest), (self.token_cost, 0.0), texts);
                drafts[row] = look_up(&text.ids, length);
            } else if let (Some(assistant), true) = (&self.assistant, text.assisted.is_some()) {
                let most = most.min(config.num_assistant_tokens).min(assistant.most_after(text.ids.len()));
                let most = text.success.length(most, (self.token_cost, assistant.cost), texts);
                if let Some(cache) = text.assisted.take_if(|_| most > 0) {
                    let (ids, prompt_len) = (text.ids.clone(), prompt.len());
                    asked.push(Drafted { ids, prompt_len, sampler: text.sampler.clone(), cache, most });
                    rows.push(row);
                }
            }
        }
        if let Some(assistant) = self.assistant.as_ref().filter(|_| !asked.is_empty()) {
            assistant.draft(&mut asked, self.options.chunk_tokens)?;
        }
        for (row, Drafted { ids, cache, .. }) in rows.into_iter().zip(asked) {
            drafts[row] = ids;
            self.running[row].assisted = Some(cache);
        }
        Ok(drafts)
    }

    /// Takes texts whose context is full out of the running ones, to compute the tokens that a sliding window keeps.
    fn slide_full_rows(&mut self) -> Result<(), GenerationError> {
        let n_positions = self.model.config().n_positions;
        let mut row = 0;
        while let Some(text) = self.running.get_mut(row) {
            let head = match text.request.config.when_full {
                WhenFull::Slide { head } if self.cache.lengths()[row] >= n_positions => head,
                _ => {
                    row += 1;
                    continue;
                }
            };
            let before = &text.ids[..text.ids.len() - 1];
            let tail = before.len() - (slid_tokens(n_positions) - 1);
            let tokens = [&before[..head], &before[tail..]].concat();
            text.has_slid = true;
            // An assistant would have to read everything anew.
            text.assisted = None;
            self.cache.truncate(row, 0)?;
            if tokens.is_empty() {
                row += 1;
                continue;
            }
            let (text, cache) = self.take_row(row)?;
            // A running text does not wait for the prompts of others.
            let window = Prefill { text, cache, tokens, computed: 0, cached: 0, is_window: true };
            self.prefilling.push_front(window);
        }
        Ok(())
    }

    /// As many tokens of prompts as a step computes; texts begin where there is room.
    fn prefill(&mut self) -> Result<(), GenerationError> {
        let mut budget = self.options.chunk_tokens;
        while budget > 0 && (!self.prefilling.is_empty() || self.admit()?) {
            let Some(mut prefill) = self.prefilling.pop_front() else {
                // A text began at once, from a prompt that it shares: that is work too.
                budget -= 1;
                continue;
            };
            let count = budget.min(prefill.tokens.len() - prefill.computed);
            budget -= count;
            let hidden = prefill.compute(&self.model, count)?; // (1, count, C)
            if let Err(error) = prefill.score(&self.model, &hidden) {
                let request = prefill.text.request.id;
                drop(prefill);
                match error {
                    GenerationError::NotFinite => self.fail(request, error),
                    error => return Err(error),
                }
                continue;
            }
            if prefill.computed < prefill.tokens.len() {
                self.prefilling.push_front(prefill);
                continue;
            }
            let Prefill { text, cache, is_window, cached, .. } = prefill;
            if is_window {
                self.run(text, cache)?;
                continue;
            }
            self.tell_begun(&text, cached);
            if text.request.max_new_tokens == 0 {
                self.end_without_tokens(text, cache);
                continue;
            }
            let logits = rows_of(&self.model.head(&hidden, LogitsFor::LastToken)?)?.swap_remove(0);
            if self.is_shared(&text) {
                let (request, logits) = (text.request.id, logits.clone());
                self.shared = Some(SharedPrompt { request, logits, row: None });
            }
            self.begin(text, cache, logits)?;
        }
        Ok(())
    }

    /// Begins the next text that waits, where there is room; says whether it did.
    fn admit(&mut self) -> Result<bool, GenerationError> {
        let Some(Waiting { request, .. }) = self.waiting.front() else { return Ok(false) };
        if self.running() >= self.options.max_texts {
            return Ok(false);
        }
        let request = Arc::clone(request);
        let capacity = request.capacity.max(self.slot_tokens.unwrap_or(0));
        let id = request.id;
        let mut shared = self.shared.take_if(|shared| shared.request == id);
        self.shared = None;
        let row = shared.as_mut().and_then(|shared| shared.row.take());
        let is_first = row.is_none() && shared.is_none();
        let mut beginning = if is_first { self.beginning_of(&request) } else { None };
        let Some(mut cache) = row.or_else(|| self.room_for(capacity, &mut beginning)) else {
            self.shared = shared;
            return Ok(false);
        };
        let Some(Waiting { request, sequence }) = self.waiting.pop_front() else { return Ok(false) };
        let deadline = match Deadline::new(&request.config, self.clock.as_ref()) {
            Ok(deadline) => deadline,
            Err(error) => {
                self.fail(id, error);
                return Ok(true);
            }
        };
        let stream = |tokenizer: &T| {
            TextStream::new(tokenizer.clone()).with_stop_strings(&request.config.stop_strings)
        };
        let mut text = Text {
            // Texts of one prompt differ by their stream; the same prompt in another request is the same text.
            sampler: Sampler::new(
                &request.config,
                request.processors.clone(),
                request.stream.wrapping_add(sequence as u64),
            ),
            stream: self.tokenizer.as_ref().map(stream),
            deadline,
            ids: request.prompt.clone(),
            // They are told once.
            scores: PromptScores::new(request.prompt_logprobs.filter(|_| sequence == 0)),
            has_slid: false,
            success: Success::new(),
            right: 0,
            assisted: self.assistant.as_ref().and_then(|assistant| assistant.cache(capacity)),
            sequence,
            request,
        };
        let prompt_len = text.ids.len();
        let sibling = |other: &Text<T>| other.request.id == id && !other.has_slid;
        if let (Some(own), Some(other)) =
            (&mut text.assisted, self.running.iter().find(|other| sibling(other)))
            && let Some(other) = &other.assisted
            && other.lengths() >= &[prompt_len][..]
        {
            own.copy_row(0, other, 0, prompt_len)?;
        }
        if shared.is_some()
            && cache.lengths() == [0]
            && let Some(row) = self.running.iter().position(sibling)
        {
            cache.copy_row(0, &self.cache, row, prompt_len)?;
        }
        match shared.filter(|_| cache.lengths() == [prompt_len]) {
            Some(shared) => {
                let logits = shared.logits.clone();
                self.shared = Some(shared).filter(|_| self.is_shared(&text));
                self.begin(text, cache, logits)?;
            }
            // The only text, or all that had the prompt are gone.
            None => {
                let cached = self.take_over(beginning, &mut text, &mut cache)?;
                let tokens = text.ids.clone();
                let prefill = Prefill { text, cache, tokens, computed: cached, cached, is_window: false };
                self.prefilling.push_back(prefill);
            }
        }
        Ok(true)
    }

    /// The longest beginning of a prompt that was computed for a text that runs, or for one that has ended.
    fn beginning_of(&self, request: &Accepted) -> Option<Beginning> {
        let (reuse, wanted) = (request.reuse?, request.prompt_logprobs);
        let rows = self.running.iter().zip(self.cache.lengths()).enumerate();
        let rows = rows.filter(|(_, (text, _))| text.request.reuse == Some(reuse) && !text.has_slid);
        let running = rows.map(|(row, (text, held))| {
            let tokens = usable_tokens(&request.prompt, &text.ids[..*held], &text.scores, wanted);
            Beginning { tokens, source: Source::Running(row) }
        });
        let kept = self.prefixes.longest(reuse, &request.prompt, wanted);
        let kept = kept.map(|(number, tokens)| Beginning { tokens, source: Source::Kept(number) });
        running.chain(kept).filter(|beginning| beginning.tokens > 0).max_by_key(|beginning| beginning.tokens)
    }

    /// Room for a text. What is kept of others gives way where that makes room, the beginning that the text goes on from last.
    fn room_for(&mut self, capacity: usize, beginning: &mut Option<Beginning>) -> Option<Gpt2Cache> {
        let used = self.kv_tokens_in_use();
        if used + KvSlot::room_of(capacity) > self.pool.tokens() {
            return None;
        }
        let needed = match beginning {
            Some(Beginning { source: Source::Kept(number), .. }) => Some(*number),
            _ => None,
        };
        loop {
            if let Some(cache) = self.pool.cache(1, capacity) {
                return Some(cache);
            }
            if !self.prefixes.forget_oldest(needed) {
                break;
            }
        }
        if let (Some(number), Some(found)) = (needed, beginning.as_mut()) {
            if let Some((cache, scores)) = self.prefixes.give(number, capacity) {
                found.source = Source::Taken(scores);
                return Some(cache);
            }
            *beginning = None;
        }
        self.pool.cache(1, capacity)
    }

    /// Gives a text the beginning of its prompt that is computed already; returns how many tokens that is.
    fn take_over(
        &mut self,
        beginning: Option<Beginning>,
        text: &mut Text<T>,
        cache: &mut Gpt2Cache,
    ) -> Result<usize, GenerationError> {
        let Some(Beginning { tokens, source }) = beginning else { return Ok(0) };
        match source {
            Source::Running(row) => {
                cache.copy_row(0, &self.cache, row, tokens)?;
                text.scores.take_over(&self.running[row].scores, tokens + 1);
            }
            Source::Kept(number) => {
                let Some((kept, scores)) = self.prefixes.touch(number) else { return Ok(0) };
                cache.copy_row(0, kept, 0, tokens)?;
                text.scores.take_over(scores, tokens + 1);
            }
            Source::Taken(scores) => {
                cache.truncate(0, tokens)?;
                text.scores.take_over(&scores, tokens + 1);
            }
        }
        Ok(tokens)
    }

    /// Leaves what was computed for a text that has ended to others.
    fn leave(&mut self, text: Text<T>, cache: Gpt2Cache) {
        let held = cache.lengths().first().copied().unwrap_or(0);
        if let (Some(reuse), false, 1..) = (text.request.reuse, text.has_slid, held) {
            let mut ids = text.ids;
            ids.truncate(held);
            self.prefixes.keep(reuse, ids, cache, text.scores);
        }
    }

    /// Says that the prompt of a request is computed, with its first text.
    fn tell_begun(&mut self, text: &Text<T>, cached_tokens: usize) {
        if text.sequence == 0 {
            let (request, prompt) = (text.request.id, text.scores.known().to_vec());
            self.ready.push(Event::Begun { request, cached_tokens, prompt });
        }
    }

    /// Ends all texts of a request of which only the prompt was asked for.
    fn end_without_tokens(&mut self, text: Text<T>, cache: Gpt2Cache) {
        let request = text.request.id;
        self.waiting.retain(|waiting| waiting.request.id != request);
        let texts = 0..text.request.config.num_return_sequences;
        self.ready.extend(texts.map(|sequence| Event::Empty { request, sequence }));
        self.leave(text, cache);
    }

    /// Whether the next text that waits continues the same prompt.
    fn is_shared(&self, text: &Text<T>) -> bool {
        self.waiting.front().is_some_and(|next| next.request.id == text.request.id)
    }

    /// Gives a text its first token, and a place among the running ones.
    fn begin(&mut self, text: Text<T>, cache: Gpt2Cache, logits: Vec<f32>) -> Result<(), GenerationError> {
        let row = self.run(text, cache)?;
        let chosen = sample(&mut self.running[row..=row], &[Vec::new()], [&mut [logits][..]]);
        self.extend(row, chosen)
    }

    /// Gives a text a place among the running ones: that of its memory.
    fn run(&mut self, text: Text<T>, cache: Gpt2Cache) -> Result<usize, GenerationError> {
        let row = self.cache.rows_before(&cache);
        self.cache.insert(row, cache)?;
        self.running.insert(row, text);
        Ok(row)
    }

    /// Gives the texts from row `first` on their next tokens, and ends those that have their last.
    fn extend(&mut self, first: usize, chosen: Vec<Chosen>) -> Result<(), GenerationError> {
        let n_positions = self.model.config().n_positions;
        let (mut ended, mut failed) = (Vec::new(), Vec::new());
        for (row, Chosen { tokens, error }) in (first..).zip(chosen) {
            let (text, held) = (&mut self.running[row], self.cache.lengths()[row]);
            let (request, sequence) = (text.request.id, text.sequence);
            let (mut left, mut error) = (tokens.len(), error);
            for ChosenToken { id, logprobs, is_complete } in tokens {
                left -= 1;
                if text.right > 0 {
                    text.right -= 1;
                    text.success.drafts.accepted += 1;
                }
                let drafts = text.success.drafts;
                match text.push(id, is_complete, held - left >= n_positions) {
                    Ok((text, stop_reason)) => {
                        self.ready.push(Event::Token {
                            request,
                            sequence,
                            id,
                            text,
                            logprobs,
                            stop_reason,
                            drafts,
                        });
                        if stop_reason.is_some() {
                            ended.push(row);
                            error = None;
                            break;
                        }
                    }
                    Err(found) => {
                        error = Some(found);
                        break;
                    }
                }
            }
            failed.extend(error.map(|error| (request, error)));
        }
        // Rows change their numbers from here on.
        ended.into_iter().rev().try_for_each(|row| self.remove(row))?;
        failed.into_iter().for_each(|(request, error)| self.fail(request, error));
        Ok(())
    }

    /// Ends a request that cannot go on; what its texts have so far was said.
    fn fail(&mut self, request: RequestId, error: GenerationError) {
        let said = mem::take(&mut self.ready);
        self.cancel(request);
        self.ready = said;
        let is_this = |event: &Event| matches!(event, Event::Failed { .. }) && event.request() == request;
        if !self.ready.iter().any(is_this) {
            self.ready.push(Event::Failed { request, error });
        }
    }

    /// Ends the text of a row, whose place in memory goes to the next text of its request or is free.
    fn remove(&mut self, row: usize) -> Result<(), GenerationError> {
        let (text, mut cache) = self.take_row(row)?;
        let shared = self.shared.as_mut().filter(|shared| shared.request == text.request.id);
        match shared.filter(|shared| shared.row.is_none() && !text.has_slid) {
            Some(shared) => {
                cache.truncate(0, text.request.prompt.len())?;
                shared.row = Some(cache);
            }
            None => self.leave(text, cache),
        }
        Ok(())
    }

    /// Takes a text out of the running ones, with its memory.
    fn take_row(&mut self, row: usize) -> Result<(Text<T>, Gpt2Cache), GenerationError> {
        let text = self.running.remove(row);
        Ok((text, self.cache.take(row)?))
    }

    /// On a GPU: brings the last texts into the gaps that others have left in memory. While there is a gap, every step would copy
    /// all keys and values.
    fn close_gaps(&mut self) -> Result<(), GenerationError> {
        let Some(slot_tokens) = self.slot_tokens else { return Ok(()) };
        while let Some(last) = self.running.len().checked_sub(1) {
            let length = self.cache.lengths()[last];
            let capacity = slot_tokens.max(self.running[last].request.capacity);
            let Some(mut free) = self.pool.cache(1, capacity) else { break };
            if self.cache.rows_before(&free) > last {
                break;
            }
            free.copy_row(0, &self.cache, last, length)?;
            let (text, _) = self.take_row(last)?;
            self.run(text, free)?;
        }
        Ok(())
    }
}

/// The events of a [`Scheduler`] as they come; ends when all requests have, and after an error of the device.
/// [`Scheduler::into_events`] gives them.
pub struct Events<T = Arc<Tokenizer>> {
    scheduler: Scheduler<T>,
    ready: VecDeque<Event>,
    /// Told after what is ready.
    failure: Option<GenerationError>,
}

impl<T> Events<T> {
    /// The scheduler, which takes further requests.
    pub fn scheduler(&mut self) -> &mut Scheduler<T> {
        &mut self.scheduler
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> Iterator for Events<T> {
    type Item = Result<Event, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() && self.failure.is_none() && !self.scheduler.is_idle() {
            let Step { events, failure } = self.scheduler.step();
            self.ready.extend(events);
            if failure.is_some() {
                self.failure = failure;
                break;
            }
        }
        self.ready.pop_front().map(Ok).or_else(|| self.failure.take().map(Err))
    }
}

impl Event {
    /// The request that it is about.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Begun { request, .. }
            | Self::Token { request, .. }
            | Self::Empty { request, .. }
            | Self::Failed { request, .. } => *request,
        }
    }
}

impl<T: Deref<Target = Tokenizer>> Text<T> {
    /// Counts what was drafted and, of that, what the text goes on with, before it does.
    fn count_draft(&mut self, draft: &[u32], chosen: &[ChosenToken]) -> Result<(), GenerationError> {
        let is_right = |(drafted, chosen): &(&u32, &ChosenToken)| **drafted == chosen.id;
        let accepted = draft.iter().zip(chosen).take_while(is_right).count();
        if !draft.is_empty() {
            self.success.count(draft.len(), accepted);
        }
        self.right = accepted;
        if let Some(cache) = &mut self.assisted {
            let held = cache.lengths().first().copied().unwrap_or(0);
            cache.truncate(0, held.min(self.ids.len() + accepted))?;
        }
        Ok(())
    }

    /// Adds a token; returns the text it completes and why the text ends with it, if it does.
    fn push(
        &mut self,
        id: u32,
        is_complete: bool,
        is_full: bool,
    ) -> Result<(String, Option<StopReason>), GenerationError> {
        self.ids.push(id);
        let mut text = self.stream.as_mut().map(|stream| stream.push(id)).transpose()?.unwrap_or_default();
        let Accepted { config, prompt, max_new_tokens, .. } = &*self.request;
        let reasons = [
            (config.eos_token_id.contains(&id), StopReason::Eos),
            (self.stream.as_ref().is_some_and(TextStream::is_stopped), StopReason::StopString),
            (is_complete, StopReason::Complete),
            (self.ids.len() - prompt.len() >= *max_new_tokens, StopReason::MaxNewTokens),
            (config.when_full == WhenFull::Stop && is_full, StopReason::Context),
            (self.deadline.is_over(), StopReason::MaxTime),
        ];
        let reason = reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason);
        if reason.is_some() {
            text.push_str(&self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default());
        }
        Ok((text, reason))
    }
}

impl<T> Prefill<T> {
    /// Computes the next `count` tokens; returns their hidden states, `(1, count, C)`.
    fn compute(&mut self, model: &Gpt2LMHeadModel, count: usize) -> Result<Tensor, GenerationError> {
        let next = &self.tokens[self.computed..][..count];
        let ids = Tensor::from_slice(next, (1, count), model.device())?;
        self.computed += count;
        Ok(model.transformer().forward_with(&ids, Some(&mut self.cache), &mut Pass::inference())?)
    }

    /// Finds how probable the tokens are that come after those of `hidden`, `(1, count, C)`, which were computed last.
    fn score(&mut self, model: &Gpt2LMHeadModel, hidden: &Tensor) -> Result<(), GenerationError> {
        let scores = &mut self.text.scores;
        let (Some(wanted), false) = (scores.wanted(), self.is_window) else { return Ok(()) };
        let next = &self.tokens[scores.known().len()..self.tokens.len().min(self.computed + 1)];
        let found = for_each_row(model, hidden, 0..next.len(), |row, logits| {
            Ok(Expected::of(logits, wanted)?.of_token(next[row]))
        })?;
        scores.extend(found);
        Ok(())
    }
}

/// The next tokens of each text, of which one is chosen after its last token and after each that was drafted rightly; on all
/// threads. `logits` has a row for each of them.
fn sample<'a, T>(
    texts: &mut [Text<T>],
    drafts: &[Vec<u32>],
    logits: impl IntoIterator<Item = &'a mut [Vec<f32>]>,
) -> Vec<Chosen> {
    let rows = texts.iter_mut().zip(drafts).zip(logits).map(|((text, draft), logits)| {
        let Text { request, ids, sampler, .. } = text;
        (request, ids, sampler, draft, logits)
    });
    map_items(rows, |(request, ids, sampler, draft, logits)| {
        let (start, mut tokens, mut error) = (ids.len(), Vec::new(), None);
        for (place, logits) in logits.iter_mut().enumerate() {
            let token = match choose(request, sampler, ids, logits) {
                Ok(token) => token,
                Err(found) => {
                    error = Some(found);
                    break;
                }
            };
            ids.push(token.id);
            let is_drafted = draft.get(place) == Some(&token.id);
            let is_end = token.is_complete || request.config.eos_token_id.contains(&token.id);
            tokens.push(token);
            if is_end || !is_drafted {
                break;
            }
        }
        ids.truncate(start);
        Chosen { tokens, error }
    })
}

/// The next token of a text.
fn choose(
    request: &Accepted,
    sampler: &mut Sampler,
    ids: &[u32],
    logits: &mut [f32],
) -> Result<ChosenToken, GenerationError> {
    let history = History { ids, prompt_len: request.prompt.len() };
    let before = request.logprobs.map(|_| biased(&request.config, history, logits)).transpose()?;
    let id = sampler.sample(history, logits)?;
    let expected = before.as_deref().map(|logits| Expected::of(logits, request.logprobs.unwrap_or(0)));
    let logprobs = expected.transpose()?.map(|expected| expected.of_token(id));
    let is_complete = !request.config.eos_token_id.contains(&id)
        && LogitsProcessor::is_complete(&request.processors, || [history.generated(), &[id]].concat())?;
    Ok(ChosenToken { id, logprobs, is_complete })
}

/// Tokens whose keys and values a text needs room for. The last token is produced and not read again.
fn kept_tokens(config: &GenerationConfig, prompt_len: usize, n_positions: usize) -> usize {
    let read = config.new_tokens(prompt_len).saturating_sub(1);
    prompt_len.saturating_add(read).min(n_positions)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::VarBuilder;

    use super::*;

    /// As on a GPU, whose rows have slots of one size: texts that end and texts that are cancelled leave no gap in a step.
    #[test]
    fn texts_lie_side_by_side_in_every_step_whoever_leaves() {
        const SLOT: usize = 16;
        let sizes = Gpt2Config {
            vocab_size: 11,
            n_positions: SLOT,
            n_embd: 6,
            n_layer: 2,
            n_head: 3,
            ..Gpt2Config::gpt2()
        };
        let model = Gpt2LMHeadModel::load(&sizes, VarBuilder::zeros(DType::F32, &Device::Cpu)).unwrap();
        let options = SchedulerOptions { max_texts: 5, kv_tokens: 5 * SLOT, chunk_tokens: 64 };
        let mut scheduler = <Scheduler>::new(&model, None, options).unwrap();
        scheduler.slot_tokens = Some(SLOT);
        let request = |max_new_tokens| {
            let config =
                GenerationConfig { max_new_tokens, eos_token_id: vec![], ..GenerationConfig::default() };
            Request::new(vec![1, 2], config)
        };
        // The second ends by itself, the first and the fourth are cancelled.
        let ids = [9, 3, 9, 9, 9].map(|tokens| scheduler.submit(request(tokens)).unwrap());
        let mut made = [0; 5];
        for step in 0..20 {
            if step == 4 {
                assert!(scheduler.cancel(ids[0]) && scheduler.cancel(ids[3]));
            }
            for event in scheduler.step().into_result().unwrap() {
                if let Event::Token { request, .. } = event {
                    made[usize::try_from(request.0).unwrap()] += 1;
                }
            }
            // What left after the step is closed before the next one.
            scheduler.close_gaps().unwrap();
            if let Some(free) = scheduler.pool.cache(1, SLOT) {
                assert_eq!(scheduler.cache.rows_before(&free), scheduler.running.len(), "step {step}");
            }
        }
        assert!(scheduler.is_idle());
        assert_eq!((made[1], made[2], made[4]), (3, 9, 9));
        assert!(made[0] < 9 && made[3] < 9);
    }
}
