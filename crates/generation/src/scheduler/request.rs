//! Requests to a scheduler, and the scheduler's options.

use std::sync::Arc;

use candle_gpt2::{Gpt2Config, KvSlot};

use super::text_observer::TextObserver;
use crate::{GenerationConfig, GenerationError, LogitsProcessor, SearchMode};

/// Limits for a [`Scheduler`](crate::Scheduler).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Maximum number of sequences that run concurrently; at least 1.
    pub max_texts: usize,
    /// Capacity of the KV cache in tokens, rounded up to a multiple of 16.
    ///
    /// All running sequences share the cache, including their prompts. Each sequence uses a multiple of 16.
    pub kv_tokens: usize,
    /// Maximum number of prompt tokens that a step computes; at least 1.
    ///
    /// This limits the time that a running sequence waits for its next token.
    pub chunk_tokens: usize,
}

impl SchedulerOptions {
    /// Returns options for exactly these requests, with `batch_size` sequences at a time.
    ///
    /// Each prompt is prefilled as a whole, since no other callers wait.
    ///
    /// # Errors
    /// Returns the same errors as [`Request::kv_tokens`].
    pub fn of_requests(
        requests: &[Request],
        batch_size: usize,
        model: &Gpt2Config,
    ) -> Result<Self, GenerationError> {
        let (mut texts, mut longest) = (0_usize, 1);
        let by_token = |request: &&Request| request.config.search_mode() == SearchMode::TokenByToken;
        // A search allocates its own memory.
        for request in requests.iter().filter(by_token) {
            texts = texts.saturating_add(request.config.num_return_sequences);
            longest = longest.max(request.kv_tokens(model)?);
        }
        let max_texts = batch_size.clamp(1, texts.max(1));
        let kv_tokens = max_texts.saturating_mul(longest);
        Ok(Self { max_texts, kv_tokens, chunk_tokens: model.n_positions })
    }
}

/// A prompt and the configuration for its completions.
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
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Generation configuration.
    pub config: Arc<GenerationConfig>,
    /// Additional logits processors; see [`LogitsProcessor::add_to`] for their order.
    pub processors: Vec<LogitsProcessor>,
    /// Random stream of the first completion; further completions use the following streams.
    ///
    /// All streams belong to the configuration's seed.
    pub stream: u64,
    /// Number of alternatives to report for each new token; `None` for no log-probabilities.
    ///
    /// Log-probabilities are computed from the model's logits and the configuration's biases, before any
    /// other change.
    pub logprobs: Option<usize>,
    /// Number of alternatives to report for each prompt token; `None` for no log-probabilities.
    pub prompt_logprobs: Option<usize>,
    /// Group of requests that may reuse each other's prefixes; `None` for no reuse.
    ///
    /// Reuse happens only on a CPU, and only if results stay bit-identical.
    pub reuse: Option<u64>,
    /// Observers that see, and may change, the passes of the sequences: none, or one for each sequence.
    ///
    /// An observed sequence runs in its own passes and does not affect the others, bit for bit. It neither
    /// reuses computed prefixes nor leaves any to others, and it gets no drafts.
    pub observers: Vec<TextObserver>,
    /// Index of the block before which prompt passes [stop](candle_gpt2::Pass::stopping_at).
    ///
    /// Use this for prompts that are only observed, without new tokens or log-probabilities. At least one
    /// block is computed.
    pub stop_at_layer: Option<usize>,
    /// Index of the first prompt token to echo before the completion.
    ///
    /// The text of the completion then includes a character that the prompt begins; see
    /// [`TextStream::follow`](crate::TextStream::follow). `None` if the output contains no part of the
    /// prompt, and for searches.
    pub echoed: Option<usize>,
}

impl Request {
    /// Creates a request with defaults for all other fields.
    pub fn new(prompt: Vec<u32>, config: impl Into<Arc<GenerationConfig>>) -> Self {
        Self {
            prompt,
            config: config.into(),
            processors: Vec::new(),
            stream: 0,
            logprobs: None,
            prompt_logprobs: None,
            reuse: None,
            observers: Vec::new(),
            stop_at_layer: None,
            echoed: None,
        }
    }

    /// Creates a request for each prompt, all with the same configuration.
    pub fn each(prompts: &[Vec<u32>], config: &GenerationConfig) -> Vec<Self> {
        let config = Arc::new(config.clone());
        prompts.iter().map(|prompt| Self::new(prompt.clone(), Arc::clone(&config))).collect()
    }

    /// Returns the KV cache capacity that one sequence of the request needs, in tokens.
    ///
    /// This is the smallest usable [`SchedulerOptions::kv_tokens`], a multiple of 16.
    ///
    /// # Errors
    /// Returns an error if the prompt is rejected; see [`GenerationConfig::fit_prompt`].
    pub fn kv_tokens(&self, model: &Gpt2Config) -> Result<usize, GenerationError> {
        let prompt = self.config.fit_prompt(&self.prompt, model)?;
        let capacity = kept_tokens(&self.config, prompt.len(), model.n_positions);
        Ok(KvSlot::room_of(capacity))
    }
}

/// Checks the block at which passes stop.
pub(super) fn check_stop(request: &Request, n_layer: usize) -> Result<(), GenerationError> {
    let Some(layer) = request.stop_at_layer else { return Ok(()) };
    if layer > n_layer {
        let (expected, found) =
            (format!("at most {n_layer}, the model's number of blocks"), layer.to_string());
        return Err(GenerationError::OptionOutOfRange { option: "stop_at_layer", expected, found });
    }
    if request.config.max_new_tokens > 0 || request.prompt_logprobs.is_some() {
        let what = "passes that stop at a block have no logits; \
            with `stop_at_layer`, set `max_new_tokens` to 0 and do not set `prompt_logprobs`";
        return Err(GenerationError::Conflict { what: what.into() });
    }
    Ok(())
}

/// Number of a request, counted from 0 in order of submission.
///
/// [`Scheduler::submit`](crate::Scheduler::submit) returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    /// Returns the index of the request in order of submission.
    pub fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// A validated search request with all of its processors.
pub(super) struct Search {
    pub(super) id: RequestId,
    pub(super) request: Request,
}

/// Returns the number of tokens that a sequence keeps in the KV cache.
///
/// The last token is generated but not read.
pub(super) fn kept_tokens(config: &GenerationConfig, prompt_len: usize, n_positions: usize) -> usize {
    let read = config.new_tokens(prompt_len).saturating_sub(1);
    prompt_len.saturating_add(read).min(n_positions)
}
