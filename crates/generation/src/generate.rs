//! The generation loop, as an iterator of token ids.

use candle_core::{DType, Device, Tensor};
use gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHead, LogitsFor, Pass};

use crate::{GenerationConfig, GenerationError, Sampler};

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model produced an end-of-text token, which is the last id.
    Eos,
    /// As many tokens as were asked for.
    MaxNewTokens,
    /// The model's context is full.
    Context,
}

impl StopReason {
    /// The reason in one word, as `--json` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::MaxNewTokens => "max_new_tokens",
            Self::Context => "context",
        }
    }
}

/// Generates tokens one at a time. The prompt is computed with the first token, every further one costs one step.
#[derive(Debug)]
pub struct TokenGenerator<'model> {
    model: &'model Gpt2LMHead,
    device: Device,
    cache: Gpt2Cache,
    /// Tokens the model has not seen: the prompt at first, then the last token.
    pending: Vec<u32>,
    sampler: Sampler,
    remaining: usize,
    eos_token_id: Vec<u32>,
    stop_reason: Option<StopReason>,
    has_failed: bool,
}

impl<'model> TokenGenerator<'model> {
    /// A generator that continues `prompt`; everything that can be refused is refused here, before any work.
    ///
    /// # Errors
    /// When the prompt is empty or longer than the context, an id is outside the vocabulary, an option is out of its
    /// range, or the cache cannot be allocated.
    pub fn new(
        model: &'model Gpt2LMHead,
        prompt: &[u32],
        config: &GenerationConfig,
        device: &Device,
    ) -> Result<Self, GenerationError> {
        config.check()?;
        check_prompt(prompt, model.config())?;
        let n_positions = model.config().n_positions;
        // The last token is produced and not read again.
        let capacity = prompt.len().saturating_add(config.max_new_tokens.saturating_sub(1)).min(n_positions);
        Ok(Self {
            model,
            device: device.clone(),
            cache: Gpt2Cache::new(model.config(), 1, capacity, DType::F32, device)?,
            pending: prompt.to_vec(),
            sampler: Sampler::new(config.sampling),
            remaining: config.max_new_tokens,
            eos_token_id: config.eos_token_id.clone(),
            stop_reason: None,
            has_failed: false,
        })
    }

    /// Why generation ended; `None` while it goes on, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    fn step(&mut self) -> Result<u32, GenerationError> {
        let ids = Tensor::from_slice(&self.pending, (1, self.pending.len()), &self.device)?;
        let pass = &mut Pass::inference();
        let logits = self.model.forward(&ids, LogitsFor::LastToken, Some(&mut self.cache), pass)?;
        let mut logits = logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let token = self.sampler.sample(&mut logits)?;
        self.pending = vec![token];
        self.remaining -= 1;
        if self.eos_token_id.contains(&token) {
            self.stop_reason = Some(StopReason::Eos);
        }
        Ok(token)
    }

    fn context_is_full(&self) -> bool {
        let past = self.cache.lengths().first().copied().unwrap_or(0);
        past + self.pending.len() > self.model.config().n_positions
    }
}

impl Iterator for TokenGenerator<'_> {
    type Item = Result<u32, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stop_reason.is_none() && self.remaining == 0 {
            self.stop_reason = Some(StopReason::MaxNewTokens);
        } else if self.stop_reason.is_none() && self.context_is_full() {
            self.stop_reason = Some(StopReason::Context);
        }
        if self.has_failed || self.stop_reason.is_some() {
            return None;
        }
        let token = self.step();
        self.has_failed = token.is_err();
        Some(token)
    }
}

/// Checks what can be checked of a prompt before a model is loaded.
///
/// # Errors
/// When it is empty or longer than the context, or an id is outside the vocabulary.
pub fn check_prompt(prompt: &[u32], config: &Gpt2Config) -> Result<(), GenerationError> {
    let n_positions = config.n_positions;
    check_ids(prompt, config)?;
    match prompt.len() {
        0 => Err(GenerationError::EmptyPrompt),
        tokens if tokens > n_positions => Err(GenerationError::PromptTooLong { tokens, n_positions }),
        _ => Ok(()),
    }
}

/// Checks that every id is in the vocabulary.
pub(crate) fn check_ids(ids: &[u32], config: &Gpt2Config) -> Result<(), GenerationError> {
    match ids.iter().position(|id| !config.has_token(*id)) {
        Some(index) => Err(GenerationError::IdBeyondVocabulary {
            id: ids[index],
            position: index + 1,
            vocab_size: config.vocab_size,
        }),
        None => Ok(()),
    }
}
