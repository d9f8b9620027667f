//! Iterators over the tokens or the text of one or many completions, based on a [`Scheduler`].

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, KvSlot, LogitsFor, Pass};
use tokenizers::Tokenizer;

use crate::logits::rows_of;
use crate::{
    Clock, Drafts, Event, GenerationConfig, GenerationError, Request, Scheduler, SchedulerOptions,
    SearchMode, Step, StopReason,
};

/// A token of one of the completions; the item type of a [`BatchGenerator`].
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// Index of the prompt.
    pub prompt: usize,
    /// Index among the prompt's `num_return_sequences` completions.
    pub sequence: usize,
    /// Token id.
    pub id: u32,
    /// Text that the token completes; empty without a tokenizer.
    pub text: String,
    /// Stop reason; `None` while the completion continues.
    pub stop_reason: Option<StopReason>,
    /// Draft statistics of the completion so far.
    pub drafts: Drafts,
}

/// Failure of one prompt, or of all prompts; the error type of a [`BatchGenerator`].
#[derive(Debug)]
pub struct FailedPrompt {
    /// Index of the prompt that cannot continue; `None` if the device failed.
    ///
    /// The other prompts continue after an error of one prompt. A device failure ends all of them.
    pub prompt: Option<usize>,
    /// Reason for the failure.
    pub error: GenerationError,
}

/// Generates completions for many prompts together and iterates over the tokens as they arrive.
///
/// A completion yields no items if no tokens are requested. Each completion is independent of the rest of
/// the batch. `T` is a pointer to the tokenizer.
///
/// ```
/// use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let config = GenerationConfig { max_new_tokens: 4, eos_token_id: vec![], ..GenerationConfig::default() };
/// let requests = Request::each(&[vec![1], vec![2, 3], vec![4, 5, 6]], &config);
/// let mut texts = [const { Vec::new() }; 3];
/// for token in <BatchGenerator>::new(&model, requests, 2, None)? { // two completions at a time
///     let token = token.map_err(|failed| failed.error)?;
///     texts[token.prompt].push(token.id);
/// }
/// assert!(texts.iter().all(|ids| ids.len() == 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BatchGenerator<T = Arc<Tokenizer>> {
    scheduler: Scheduler<T>,
    /// Remaining events from the last step.
    ready: VecDeque<Event>,
    /// Device failure, returned after the remaining events.
    failure: Option<GenerationError>,
}

impl<T: Deref<Target = Tokenizer> + Clone> BatchGenerator<T> {
    /// Creates a generator that continues every prompt, `batch_size` completions at a time.
    ///
    /// Text and stop strings need a tokenizer.
    ///
    /// # Errors
    /// Returns the error of [`Scheduler::submit`] for the first invalid request. Also returns an error if
    /// the memory for keys and values cannot be allocated.
    pub fn new(
        model: &Gpt2LMHeadModel,
        requests: Vec<Request>,
        batch_size: usize,
        tokenizer: Option<T>,
    ) -> Result<Self, GenerationError> {
        for request in &requests {
            request.config.check_for(SearchMode::TokenByToken, model.config())?;
        }
        let options = SchedulerOptions::of_requests(&requests, batch_size, model.config())?;
        let mut scheduler = Scheduler::new(model, tokenizer, options)?;
        for request in requests {
            scheduler.submit(request)?;
        }
        Ok(Self { scheduler, ready: VecDeque::new(), failure: None })
    }

    /// Adds an assistant; see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.scheduler.set_assistant(assistant)?;
        Ok(self)
    }

    /// Adds a clock for [`GenerationConfig::max_time`]; completions with a time limit need one.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.scheduler.set_clock(clock);
        self
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> Iterator for BatchGenerator<T> {
    type Item = Result<GeneratedToken, FailedPrompt>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.ready.pop_front() {
                Some(Event::Token { request, sequence, id, text, stop_reason, drafts, .. }) => {
                    let prompt = request.index();
                    return Some(Ok(GeneratedToken { prompt, sequence, id, text, stop_reason, drafts }));
                }
                Some(Event::Failed { request, error }) => {
                    return Some(Err(FailedPrompt { prompt: Some(request.index()), error }));
                }
                Some(Event::Begun { .. } | Event::Empty { .. } | Event::Found { .. }) => {}
                None => {
                    if let Some(error) = self.failure.take() {
                        return Some(Err(FailedPrompt { prompt: None, error }));
                    }
                    if self.scheduler.is_idle() {
                        return None;
                    }
                    let Step { events, failure } = self.scheduler.step();
                    self.ready.extend(events);
                    self.failure = failure;
                }
            }
        }
    }
}

/// Generates the tokens of one completion, one at a time.
///
/// Computing the first token includes the prompt's prefill. Every further token costs one step.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, StopReason, TokenGenerator};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let config = GenerationConfig { max_new_tokens: 5, eos_token_id: vec![], ..GenerationConfig::default() };
/// let mut tokens = TokenGenerator::new(&model, &[1, 2], &config)?;
/// assert_eq!(tokens.by_ref().collect::<Result<Vec<_>, _>>()?.len(), 5);
/// assert_eq!(tokens.stop_reason(), Some(StopReason::MaxNewTokens));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TokenGenerator<T = Arc<Tokenizer>> {
    batch: BatchGenerator<T>,
    stop_reason: Option<StopReason>,
}

impl TokenGenerator {
    /// Creates a generator that continues `prompt`.
    ///
    /// # Errors
    /// Returns the errors of [`Scheduler::submit`], and an error if several completions are requested.
    pub fn new(
        model: &Gpt2LMHeadModel,
        prompt: &[u32],
        config: &GenerationConfig,
    ) -> Result<Self, GenerationError> {
        Self::of_request(model, Request::new(prompt.to_vec(), config.clone()), None)
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> TokenGenerator<T> {
    /// Creates a generator for a request, possibly with additional logits processors.
    ///
    /// Stop strings need a tokenizer.
    ///
    /// # Errors
    /// Returns the same errors as [`TokenGenerator::new`].
    pub fn of_request(
        model: &Gpt2LMHeadModel,
        request: Request,
        tokenizer: Option<T>,
    ) -> Result<Self, GenerationError> {
        if request.config.num_return_sequences != 1 {
            let what =
                "`num_return_sequences` must be 1 for a single completion; use `BatchGenerator` for several";
            return Err(GenerationError::Conflict { what: what.into() });
        }
        let prompt = request.config.fit_prompt(&request.prompt, model.config())?;
        let is_over = request.config.new_tokens(prompt.len()) == 0;
        let batch = BatchGenerator::new(model, vec![request], 1, tokenizer)?;
        Ok(Self { batch, stop_reason: is_over.then_some(StopReason::MaxNewTokens) })
    }

    /// Adds an assistant; see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.batch = self.batch.with_assistant(assistant)?;
        Ok(self)
    }

    /// Adds a clock for [`GenerationConfig::max_time`]; without one, a time limit is an error.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.batch = self.batch.with_clock(clock);
        self
    }

    /// Returns the stop reason; `None` while generation continues, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    fn step(&mut self) -> Option<Result<GeneratedToken, GenerationError>> {
        let token = self.batch.next()?;
        self.stop_reason = token.as_ref().ok().and_then(|token| token.stop_reason);
        Some(token.map_err(|failed| failed.error))
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> Iterator for TokenGenerator<T> {
    type Item = Result<u32, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().map(|token| token.map(|token| token.id))
    }
}

/// Generates one completion in pieces of text.
///
/// No piece ends inside a character or contains part of a stop string.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, TextGenerator};
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let (model, tokenizer) = (checkpoint.load(&LoadOptions::default(), &|_| ())?, checkpoint.tokenizer(None)?);
///
/// let config = GenerationConfig { max_new_tokens: 12, do_sample: false, ..GenerationConfig::default() };
/// let prompt = encode(&tokenizer, "One day")?;
/// let pieces = TextGenerator::new(&model, &prompt, &config, &tokenizer)?;
/// let text: String = pieces.collect::<Result<_, _>>()?;
/// assert!(text.starts_with(", a little"), "{text}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias("TextGenerationPipeline", "TextGeneration", "pipeline"))]
pub struct TextGenerator<T = Arc<Tokenizer>> {
    tokens: TokenGenerator<T>,
    ids: Vec<u32>,
}

impl<T: Deref<Target = Tokenizer> + Clone> TextGenerator<T> {
    /// Creates a generator that continues `prompt` and decodes the tokens with `tokenizer`.
    ///
    /// # Errors
    /// Returns the same errors as [`TokenGenerator::new`].
    pub fn new(
        model: &Gpt2LMHeadModel,
        prompt: &[u32],
        config: &GenerationConfig,
        tokenizer: T,
    ) -> Result<Self, GenerationError> {
        let request = Request::new(prompt.to_vec(), config.clone());
        let tokens = TokenGenerator::of_request(model, request, Some(tokenizer))?;
        Ok(Self { tokens, ids: Vec::new() })
    }

    /// Adds an assistant; see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.tokens = self.tokens.with_assistant(assistant)?;
        Ok(self)
    }

    /// Adds a clock for [`GenerationConfig::max_time`]; without one, a time limit is an error.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.tokens = self.tokens.with_clock(clock);
        self
    }

    /// Returns the tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the stop reason; `None` while generation continues, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.tokens.stop_reason
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> Iterator for TextGenerator<T> {
    type Item = Result<String, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.tokens.step()? {
                Err(error) => return Some(Err(error)),
                Ok(token) => {
                    self.ids.push(token.id);
                    if !token.text.is_empty() {
                        return Some(Ok(token.text));
                    }
                }
            }
        }
    }
}

/// Reads tokens into the cache and returns the logits after the last one.
pub(crate) fn last_logits(
    model: &Gpt2LMHeadModel,
    ids: &[u32],
    cache: &mut Gpt2Cache,
) -> Result<Vec<f32>, GenerationError> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let logits = model.forward_with(&ids, LogitsFor::LastToken, Some(cache), &mut Pass::inference())?;
    Ok(rows_of(&logits)?.swap_remove(0))
}

/// Creates an empty one-row cache, with memory for `rows` rows of this capacity.
pub(crate) fn one_row_of(
    model: &Gpt2LMHeadModel,
    rows: usize,
    capacity: usize,
) -> Result<Gpt2Cache, GenerationError> {
    let pool = model.new_pool(rows.saturating_mul(KvSlot::room_of(capacity)))?;
    let no_room = || GenerationError::KvTokens { needed: capacity, kv_tokens: pool.tokens() };
    pool.cache(1, capacity).ok_or_else(no_room)
}
