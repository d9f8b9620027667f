//! Requests to a scheduler.

use std::sync::Arc;

use candle_gpt2::{Gpt2Config, KvSlot};

use super::text_observer::TextObserver;
use crate::{GenerationConfig, GenerationError, LogitsProcessor, SearchMode};

/// How much a [`Scheduler`](crate::Scheduler) does at once. What [`Scheduler::new`](crate::Scheduler::new) takes.
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
    /// For these requests and no others, `batch_size` texts at a time; each prompt is computed as a whole, since no other caller waits.
    ///
    /// # Errors
    /// As [`Request::kv_tokens`].
    pub fn of_requests(
        requests: &[Request],
        batch_size: usize,
        model: &Gpt2Config,
    ) -> Result<Self, GenerationError> {
        let (mut texts, mut longest) = (0_usize, 1);
        let by_token = |request: &&Request| request.config.search_mode() == SearchMode::TokenByToken;
        // A search takes memory of its own.
        for request in requests.iter().filter(by_token) {
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
    /// Logits processors besides those of the configuration; for their order see [`LogitsProcessor::add_to`].
    pub processors: Vec<LogitsProcessor>,
    /// Its first text is sampled from this stream of the configuration's seed, the others from those after it.
    pub stream: u64,
    /// How probable each new token is, with so many alternatives: by the model's logits and the configuration's biases, before
    /// anything else changes them.
    pub logprobs: Option<usize>,
    /// How probable each token of the prompt is, with so many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Requests of the same number may reuse what was computed for one another if their prompts begin alike; on a CPU only, if that
    /// changes no bit. `None` shares nothing.
    pub reuse: Option<u64>,
    /// What sees, and may change, the passes of each of its texts; none, or one for each. An observed text has passes of its own,
    /// without other texts: no bit of what is computed for others changes. It reuses nothing that was computed for another text and
    /// leaves nothing to others, and no drafts are made for it.
    pub observers: Vec<TextObserver>,
    /// The block before which the passes over its prompt [stop](candle_gpt2::Pass::stopping_at): for prompts that are only observed, with
    /// neither new tokens nor log-probabilities. At least one block is computed.
    pub stop_at_layer: Option<usize>,
    /// First token of the prompt that is shown in front of its texts: a character that the prompt begins is part of them, see
    /// [`TextStream::follow`](crate::TextStream::follow). `None` if no part of the prompt is shown, or the texts are searched for.
    pub echoed: Option<usize>,
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
            observers: Vec::new(),
            stop_at_layer: None,
            echoed: None,
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

/// What can be wrong with the block before which passes stop.
pub(super) fn check_stop(request: &Request, n_layer: usize) -> Result<(), GenerationError> {
    let Some(layer) = request.stop_at_layer else { return Ok(()) };
    if layer > n_layer {
        let (expected, found) = (format!("at most {n_layer}, the model's blocks"), layer.to_string());
        return Err(GenerationError::OptionOutOfRange { option: "stop_at_layer", expected, found });
    }
    if request.config.max_new_tokens > 0 || request.prompt_logprobs.is_some() {
        let what = "passes that stop at a block have no logits: `stop_at_layer` needs `max_new_tokens` 0, without `prompt_logprobs`";
        return Err(GenerationError::Conflict { what: what.into() });
    }
    Ok(())
}

/// The number of a request, counted from 0 in the order they came. [`Scheduler::submit`](crate::Scheduler::submit) gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    /// The place of the request among all that were submitted, counted from 0.
    pub fn place(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// A request for a search that was checked; its processors are all there are.
pub(super) struct Search {
    pub(super) id: RequestId,
    pub(super) request: Request,
}

/// Tokens whose keys and values a text needs room for. The last token is produced and not read again.
pub(super) fn kept_tokens(config: &GenerationConfig, prompt_len: usize, n_positions: usize) -> usize {
    let read = config.new_tokens(prompt_len).saturating_sub(1);
    prompt_len.saturating_add(read).min(n_positions)
}
