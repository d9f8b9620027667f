//! Texts as iterators, of ids or of pieces of text: one text or many, by a [`Scheduler`].

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

/// A token of one of the texts. The items of a [`BatchGenerator`].
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// Which prompt it continues.
    pub prompt: usize,
    /// Which of the prompt's `num_return_sequences` texts it belongs to.
    pub sequence: usize,
    /// The token.
    pub id: u32,
    /// The text it completes; empty without a tokenizer.
    pub text: String,
    /// Why the text ends with it; `None` while it continues.
    pub stop_reason: Option<StopReason>,
    /// What was drafted for the text so far.
    pub drafts: Drafts,
}

/// Why no more tokens come for a prompt, or for any. The errors of a [`BatchGenerator`].
#[derive(Debug)]
pub struct FailedPrompt {
    /// The prompt that cannot be continued, while the others are; `None` if the device failed, and all have ended.
    pub prompt: Option<usize>,
    /// Why.
    pub error: GenerationError,
}

/// Generates texts for many prompts at once; an iterator of their tokens as they come. A text of no tokens, if none
/// are asked for, has no item.
///
/// Every text is the one that its prompt gives alone, whatever else is in the batch. `T` is how it holds the tokenizer.
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
/// for token in <BatchGenerator>::new(&model, requests, 2, None)? { // two texts at a time
///     let token = token.map_err(|failed| failed.error)?;
///     texts[token.prompt].push(token.id);
/// }
/// assert!(texts.iter().all(|ids| ids.len() == 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BatchGenerator<T = Arc<Tokenizer>> {
    scheduler: Scheduler<T>,
    /// Of the last step.
    ready: VecDeque<Event>,
    /// Of the device, told after what is ready.
    failure: Option<GenerationError>,
}

impl<T: Deref<Target = Tokenizer> + Clone> BatchGenerator<T> {
    /// A generator that continues every prompt, `batch_size` texts at a time. Text and stop strings need a tokenizer.
    ///
    /// # Errors
    /// As [`Scheduler::submit`], for the first request that is refused, and when the memory for keys and values cannot be
    /// allocated.
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

    /// The same generator with an assistant, see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// As [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.scheduler.set_assistant(assistant)?;
        Ok(self)
    }

    /// The same generator with a clock, for texts with a [`GenerationConfig::max_time`]; without one they fail.
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
                    let prompt = request.place();
                    return Some(Ok(GeneratedToken { prompt, sequence, id, text, stop_reason, drafts }));
                }
                Some(Event::Failed { request, error }) => {
                    return Some(Err(FailedPrompt { prompt: Some(request.place()), error }));
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

/// Generates the tokens of one text, one at a time. The prompt is computed with the first, every further one costs one
/// step.
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
    /// A generator that continues `prompt`.
    ///
    /// # Errors
    /// Those of [`Scheduler::submit`], and when several texts are asked for.
    pub fn new(
        model: &Gpt2LMHeadModel,
        prompt: &[u32],
        config: &GenerationConfig,
    ) -> Result<Self, GenerationError> {
        Self::of_request(model, Request::new(prompt.to_vec(), config.clone()), None)
    }
}

impl<T: Deref<Target = Tokenizer> + Clone> TokenGenerator<T> {
    /// A generator for a request, which may have processors of its own; stop strings need a tokenizer.
    ///
    /// # Errors
    /// As [`TokenGenerator::new`].
    pub fn of_request(
        model: &Gpt2LMHeadModel,
        request: Request,
        tokenizer: Option<T>,
    ) -> Result<Self, GenerationError> {
        if request.config.num_return_sequences != 1 {
            let what =
                "a single text was asked for, and num_return_sequences is more; BatchGenerator makes several";
            return Err(GenerationError::Conflict { what: what.into() });
        }
        let prompt = request.config.fit_prompt(&request.prompt, model.config())?;
        let is_over = request.config.new_tokens(prompt.len()) == 0;
        let batch = BatchGenerator::new(model, vec![request], 1, tokenizer)?;
        Ok(Self { batch, stop_reason: is_over.then_some(StopReason::MaxNewTokens) })
    }

    /// The same generator with an assistant, see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// As [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.batch = self.batch.with_assistant(assistant)?;
        Ok(self)
    }

    /// The same generator with a clock, for a text with a [`GenerationConfig::max_time`]; without one it fails.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.batch = self.batch.with_clock(clock);
        self
    }

    /// Why generation ended; `None` while it continues, and after an error.
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

/// Generates one text piece by piece; no piece ends within a character or holds a part of a stop string.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, TextGenerator};
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let (model, tokenizer) = (checkpoint.load(&LoadOptions::default(), &|_| ())?, checkpoint.tokenizer(None)?);
///
/// let config = GenerationConfig { max_new_tokens: 12, do_sample: false, ..GenerationConfig::default() };
/// let prompt = encode(&tokenizer, "One day")?;
/// let pieces = TextGenerator::new(&model, &prompt, &config, &tokenizer)?;
/// let text: String = pieces.collect::<Result<_, _>>()?;
/// assert!(text.starts_with(' '), "{text}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias("TextGenerationPipeline", "TextGeneration", "pipeline"))]
pub struct TextGenerator<T = Arc<Tokenizer>> {
    tokens: TokenGenerator<T>,
    ids: Vec<u32>,
}

impl<T: Deref<Target = Tokenizer> + Clone> TextGenerator<T> {
    /// A generator that continues `prompt`, whose tokens `tokenizer` turns into text.
    ///
    /// # Errors
    /// Those of [`TokenGenerator::new`].
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

    /// The same generator with an assistant, see [`Scheduler::set_assistant`].
    ///
    /// # Errors
    /// As [`Scheduler::set_assistant`].
    pub fn with_assistant(mut self, assistant: &Gpt2LMHeadModel) -> Result<Self, GenerationError> {
        self.tokens = self.tokens.with_assistant(assistant)?;
        Ok(self)
    }

    /// The same generator with a clock, for a text with a [`GenerationConfig::max_time`]; without one it fails.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.tokens = self.tokens.with_clock(clock);
        self
    }

    /// The tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Why generation ended; `None` while it continues, and after an error.
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

/// The logits after the last of some tokens, which the cache gains.
pub(crate) fn last_logits(
    model: &Gpt2LMHeadModel,
    ids: &[u32],
    cache: &mut Gpt2Cache,
) -> Result<Vec<f32>, GenerationError> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let logits = model.forward_with(&ids, LogitsFor::LastToken, Some(cache), &mut Pass::inference())?;
    Ok(rows_of(&logits)?.swap_remove(0))
}

/// An empty cache of one row, with room for others like it beside it, `rows` in all.
pub(crate) fn one_row_of(
    model: &Gpt2LMHeadModel,
    rows: usize,
    capacity: usize,
) -> Result<Gpt2Cache, GenerationError> {
    let pool = model.new_pool(rows.saturating_mul(KvSlot::room_of(capacity)))?;
    let no_room = || GenerationError::KvTokens { needed: capacity, kv_tokens: pool.tokens() };
    pool.cache(1, capacity).ok_or_else(no_room)
}
