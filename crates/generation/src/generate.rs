//! The generation loop: one text or many at once, token by token, as iterators of ids or of text.
//!
//! Prompts of different lengths need no padding. Each prompt is computed alone and its keys and values are copied into
//! a row of the batch; every further step computes one token of all running rows together. A row that has finished
//! gives its place to the next prompt, or leaves the batch.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use gpt2::{Gpt2Cache, Gpt2LMHead, LogitsFor, Pass};
use tokenizers::Tokenizer;

use crate::config::slid_tokens;
use crate::{
    GenerationConfig, GenerationError, History, LogitsProcessor, Sampler, SearchMode, TextStream, WhenFull,
};

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model produced an end-of-text token, which is the last id.
    Eos,
    /// A stop string came up; the text ends in front of it, the ids with the token that completed it.
    StopString,
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
            Self::MaxNewTokens => "max_new_tokens",
            Self::Context => "context",
            Self::MaxTime => "max_time",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A token of one of the texts.
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
    /// Why the text ends with it; `None` while it goes on.
    pub stop_reason: Option<StopReason>,
}

/// Generates texts for many prompts at once; an iterator of their tokens as they come. A text of no tokens, where none
/// are asked for, has no item.
///
/// Every text is the one that its prompt gives alone, whatever else is in the batch: each has its own generator under
/// the seed.
pub struct BatchGenerator<'a> {
    model: &'a Gpt2LMHead,
    tokenizer: Option<&'a Tokenizer>,
    config: GenerationConfig,
    processors: Vec<LogitsProcessor>,
    device: Device,
    waiting: VecDeque<Request>,
    /// Row `i` of the cache belongs to `rows[i]`, and is idle where that is `None`.
    rows: Vec<Option<Row<'a>>>,
    cache: Gpt2Cache,
    /// The last prompt, where the next text continues it too.
    shared_prompt: Option<Prefilled>,
    ready: VecDeque<GeneratedToken>,
    started: Instant,
    time_to_first_token: Option<Duration>,
    has_failed: bool,
}

/// A text to be made.
struct Request {
    prompt: usize,
    sequence: usize,
    ids: Vec<u32>,
}

/// A text in the making.
struct Row<'a> {
    prompt: usize,
    sequence: usize,
    ids: Vec<u32>,
    prompt_len: usize,
    max_new_tokens: usize,
    started: Instant,
    sampler: Sampler,
    stream: Option<TextStream<'a>>,
}

/// A computed prompt.
struct Prefilled {
    ids: Vec<u32>,
    cache: Gpt2Cache,
    logits: Vec<f32>,
}

impl<'a> BatchGenerator<'a> {
    /// A generator that continues every prompt, `batch_size` rows at a time. Text and stop strings need a tokenizer.
    ///
    /// Everything that can be refused is refused here, before any work.
    ///
    /// # Errors
    /// When an option is out of its range or asks for a search that is not token by token, a prompt is empty or too
    /// long, an id is outside the vocabulary, or the cache cannot be allocated.
    pub fn new(
        model: &'a Gpt2LMHead,
        prompts: &[Vec<u32>],
        batch_size: usize,
        config: &GenerationConfig,
        tokenizer: Option<&'a Tokenizer>,
        device: &Device,
    ) -> Result<Self, GenerationError> {
        config.check_for(SearchMode::TokenByToken, model.config())?;
        if !config.stop_strings.is_empty() && tokenizer.is_none() {
            return Err(GenerationError::StopStringsWithoutTokenizer);
        }
        let n_positions = model.config().n_positions;
        let mut waiting = VecDeque::new();
        let mut capacity = 0;
        for (prompt, ids) in prompts.iter().enumerate() {
            let ids = config.fit_prompt(ids, model.config())?;
            // The last token is produced and not read again.
            let new_tokens = config.new_tokens(ids.len());
            capacity = capacity.max(ids.len().saturating_add(new_tokens.saturating_sub(1)).min(n_positions));
            let texts = if new_tokens > 0 { config.num_return_sequences } else { 0 };
            waiting.extend((0..texts).map(|sequence| Request { prompt, sequence, ids: ids.clone() }));
        }
        let rows = batch_size.clamp(1, waiting.len().max(1));
        Ok(Self {
            model,
            tokenizer,
            config: config.clone(),
            processors: LogitsProcessor::of_config(config),
            device: device.clone(),
            waiting,
            rows: (0..rows).map(|_| None).collect(),
            cache: model.new_cache(rows, capacity)?,
            shared_prompt: None,
            ready: VecDeque::new(),
            started: Instant::now(),
            time_to_first_token: None,
            has_failed: false,
        })
    }

    /// The same generator with a processor besides those of the configuration, such as
    /// [`LogitsProcessor::AllowedTokens`]; for its place see [`LogitsProcessor::add_to`].
    pub fn with_processor(mut self, processor: LogitsProcessor) -> Self {
        processor.add_to(&mut self.processors);
        self
    }

    /// Time from the start to the first token; `None` before it.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        self.time_to_first_token
    }

    /// Gives an idle row to the next text, or computes the next token of all running rows.
    fn advance(&mut self) -> Result<(), GenerationError> {
        let idle = self.rows.iter().position(Option::is_none);
        if let Some((row, request)) = idle.and_then(|row| Some((row, self.waiting.pop_front()?))) {
            return self.admit(row, request);
        }
        self.drop_idle_rows()?;
        let pending = self.slide_full_rows()?;
        let ids = Tensor::from_vec(pending, (self.rows.len(), 1), &self.device)?;
        let pass = &mut Pass::inference();
        let logits = self.model.forward(&ids, LogitsFor::LastToken, Some(&mut self.cache), pass)?;
        for (row, mut logits) in rows_of(&logits)?.into_iter().enumerate() {
            self.choose(row, &mut logits)?;
        }
        Ok(())
    }

    fn admit(&mut self, row: usize, request: Request) -> Result<(), GenerationError> {
        let Request { prompt, sequence, ids } = request;
        let started = Instant::now();
        let is_shared = self.waiting.front().is_some_and(|next| next.ids == ids);
        let mut logits = match self.shared_prompt.take().filter(|shared| shared.ids == ids) {
            Some(shared) => {
                self.cache.copy_row(row, &shared.cache, 0)?;
                let logits = shared.logits.clone();
                self.shared_prompt = is_shared.then_some(shared);
                logits
            }
            None if is_shared => {
                let (cache, logits) = self.prefill(&ids)?;
                self.cache.copy_row(row, &cache, 0)?;
                self.shared_prompt = Some(Prefilled { ids: ids.clone(), cache, logits: logits.clone() });
                logits
            }
            None => self.prefill_row(row, &ids)?,
        };
        // Texts of one prompt differ by their stream; the same prompt elsewhere in the batch is the same text.
        let sampler = Sampler::new(&self.config, self.processors.clone(), sequence as u64);
        let stream = |tokenizer| TextStream::new(tokenizer).with_stop_strings(&self.config.stop_strings);
        self.rows[row] = Some(Row {
            prompt,
            sequence,
            prompt_len: ids.len(),
            max_new_tokens: self.config.new_tokens(ids.len()),
            ids,
            started,
            sampler,
            stream: self.tokenizer.map(stream),
        });
        self.choose(row, &mut logits)
    }

    /// The keys and values of some tokens, and the logits behind them.
    fn prefill(&self, ids: &[u32]) -> Result<(Gpt2Cache, Vec<f32>), GenerationError> {
        let mut cache = self.model.new_cache(1, ids.len())?;
        let logits = last_logits(self.model, ids, &mut cache, &self.device)?;
        Ok((cache, logits))
    }

    /// The same, in the place of what a row holds.
    fn prefill_row(&mut self, row: usize, ids: &[u32]) -> Result<Vec<f32>, GenerationError> {
        if self.rows.len() == 1 {
            self.cache.truncate(row, 0)?;
            return last_logits(self.model, ids, &mut self.cache, &self.device);
        }
        let (cache, logits) = self.prefill(ids)?;
        self.cache.copy_row(row, &cache, 0)?;
        Ok(logits)
    }

    fn drop_idle_rows(&mut self) -> Result<(), GenerationError> {
        let running: Vec<usize> = (0..self.rows.len()).filter(|row| self.rows[*row].is_some()).collect();
        if running.len() < self.rows.len() {
            self.cache = self.cache.fork(&running)?;
            self.rows.retain(Option::is_some);
        }
        Ok(())
    }

    /// Makes room in rows whose context is full, and gives the last token of every row, which the model has not seen.
    fn slide_full_rows(&mut self) -> Result<Vec<u32>, GenerationError> {
        let n_positions = self.model.config().n_positions;
        let mut pending = Vec::with_capacity(self.rows.len());
        for index in 0..self.rows.len() {
            let ids = self.rows[index].as_ref().map_or(&[][..], |row| &row.ids);
            let Some((last, before)) = ids.split_last() else { continue };
            pending.push(*last);
            if let WhenFull::Slide { head } = self.config.when_full
                && self.cache.lengths()[index] == n_positions
            {
                let tail = before.len() - (slid_tokens(n_positions) - 1);
                let window = [&before[..head], &before[tail..]].concat();
                if window.is_empty() {
                    self.cache.truncate(index, 0)?;
                } else {
                    self.prefill_row(index, &window)?;
                }
            }
        }
        Ok(pending)
    }

    /// Picks the next token of a row, and ends the row where it is the last.
    fn choose(&mut self, index: usize, logits: &mut [f32]) -> Result<(), GenerationError> {
        let Some(row) = &mut self.rows[index] else { return Ok(()) };
        let history = History { ids: &row.ids, prompt_len: row.prompt_len };
        let id = row.sampler.sample(history, logits)?;
        row.ids.push(id);
        let mut text = row.stream.as_mut().map(|stream| stream.push(id)).transpose()?.unwrap_or_default();
        self.time_to_first_token.get_or_insert(self.started.elapsed());
        let reasons = [
            (self.config.eos_token_id.contains(&id), StopReason::Eos),
            (row.stream.as_ref().is_some_and(TextStream::is_stopped), StopReason::StopString),
            (row.ids.len() - row.prompt_len >= row.max_new_tokens, StopReason::MaxNewTokens),
            (
                self.config.when_full == WhenFull::Stop
                    && self.cache.lengths()[index] >= self.model.config().n_positions,
                StopReason::Context,
            ),
            (
                self.config.max_time.is_some_and(|seconds| row.started.elapsed().as_secs_f64() >= seconds),
                StopReason::MaxTime,
            ),
        ];
        let stop_reason = reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason);
        let (prompt, sequence) = (row.prompt, row.sequence);
        if stop_reason.is_some() {
            let stream = self.rows[index].take().and_then(|row| row.stream);
            text.push_str(&stream.map(TextStream::finish).transpose()?.unwrap_or_default());
        }
        self.ready.push_back(GeneratedToken { prompt, sequence, id, text, stop_reason });
        Ok(())
    }
}

impl Iterator for BatchGenerator<'_> {
    type Item = Result<GeneratedToken, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                return Some(Ok(token));
            }
            let is_done = self.waiting.is_empty() && self.rows.iter().all(Option::is_none);
            if self.has_failed || is_done {
                return None;
            }
            if let Err(error) = self.advance() {
                self.has_failed = true;
                return Some(Err(error));
            }
        }
    }
}

/// Generates the tokens of one text, one at a time. The prompt is computed with the first, every further one costs one
/// step.
pub struct TokenGenerator<'a> {
    batch: BatchGenerator<'a>,
    stop_reason: Option<StopReason>,
}

impl<'a> TokenGenerator<'a> {
    /// A generator that continues `prompt`.
    ///
    /// # Errors
    /// Those of [`BatchGenerator::new`], and when several texts are asked for.
    pub fn new(
        model: &'a Gpt2LMHead,
        prompt: &[u32],
        config: &GenerationConfig,
        device: &Device,
    ) -> Result<Self, GenerationError> {
        Self::with_tokenizer(model, prompt, config, None, device)
    }

    fn with_tokenizer(
        model: &'a Gpt2LMHead,
        prompt: &[u32],
        config: &GenerationConfig,
        tokenizer: Option<&'a Tokenizer>,
        device: &Device,
    ) -> Result<Self, GenerationError> {
        if config.num_return_sequences > 1 {
            let what = "several texts of one prompt come from BatchGenerator";
            return Err(GenerationError::Conflict { what: what.into() });
        }
        let batch = BatchGenerator::new(model, &[prompt.to_vec()], 1, config, tokenizer, device)?;
        let stop_reason = batch.waiting.is_empty().then_some(StopReason::MaxNewTokens);
        Ok(Self { batch, stop_reason })
    }

    /// As [`BatchGenerator::with_processor`].
    pub fn with_processor(self, processor: LogitsProcessor) -> Self {
        Self { batch: self.batch.with_processor(processor), ..self }
    }

    /// Why generation ended; `None` while it goes on, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    fn step(&mut self) -> Option<Result<GeneratedToken, GenerationError>> {
        let token = self.batch.next()?;
        self.stop_reason = token.as_ref().ok().and_then(|token| token.stop_reason);
        Some(token)
    }
}

impl Iterator for TokenGenerator<'_> {
    type Item = Result<u32, GenerationError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().map(|token| token.map(|token| token.id))
    }
}

/// Generates one text piece by piece; no piece ends within a character or holds a part of a stop string.
pub struct TextGenerator<'a> {
    tokens: TokenGenerator<'a>,
    ids: Vec<u32>,
}

impl<'a> TextGenerator<'a> {
    /// A generator that continues `prompt`, whose tokens `tokenizer` turns into text.
    ///
    /// # Errors
    /// Those of [`TokenGenerator::new`].
    pub fn new(
        model: &'a Gpt2LMHead,
        prompt: &[u32],
        config: &GenerationConfig,
        tokenizer: &'a Tokenizer,
        device: &Device,
    ) -> Result<Self, GenerationError> {
        let tokens = TokenGenerator::with_tokenizer(model, prompt, config, Some(tokenizer), device)?;
        Ok(Self { tokens, ids: Vec::new() })
    }

    /// The tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Why generation ended; `None` while it goes on, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.tokens.stop_reason
    }

    /// Time from the start to the first token; `None` before it.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        self.tokens.batch.time_to_first_token
    }
}

impl Iterator for TextGenerator<'_> {
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

/// The logits behind the last of some tokens, which the cache gains.
pub(crate) fn last_logits(
    model: &Gpt2LMHead,
    ids: &[u32],
    cache: &mut Gpt2Cache,
    device: &Device,
) -> Result<Vec<f32>, GenerationError> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), device)?;
    let logits = model.forward(&ids, LogitsFor::LastToken, Some(cache), &mut Pass::inference())?;
    Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?)
}

/// Logits of one position, `(B, 1, V)`, row by row.
pub(crate) fn rows_of(logits: &Tensor) -> Result<Vec<Vec<f32>>, GenerationError> {
    Ok(logits.squeeze(1)?.to_dtype(DType::F32)?.to_vec2::<f32>()?)
}
