//! Many texts at once that come and go: one loop for a single text, a batch and a server.
//!
//! Prompts of different lengths need no padding. A prompt is computed in chunks, on a CPU in the same pass as the next token of
//! all running texts, on a GPU between their steps; its keys and values stay where they are when it joins them. Room for the keys
//! and values of a whole text is taken before its prompt is begun, so no text ever has to give way to another. Texts begin in the
//! order of their requests.

mod admission;
mod decode;
mod event;
mod observed;
mod prefill;
mod request;
mod search;
mod text;
mod text_observer;

use std::collections::VecDeque;
use std::mem;
use std::ops::{ControlFlow, Deref};
use std::sync::Arc;

use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, KvPool, KvSlot};
use candle_gpt2_arithmetic::rounded_to_nearest;
use tokenizers::Tokenizer;

use crate::draft::{Assistant, token_cost_of};
use crate::prefixes::{Prefixes, Sharers};
use crate::{Clock, GenerationError, LogitsProcessor, SearchMode};

pub use event::{Event, Found, Step, StopReason};
use prefill::Prefill;
pub use request::{Request, RequestId, SchedulerOptions};
use request::{Search, check_stop, kept_tokens};
use text::{Accepted, Observed, Text};
pub use text_observer::TextObserver;
use text_observer::check_observers;

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
#[doc(alias("continuous batching", "LLMEngine"))]
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
    /// Requests whose texts are searched for.
    searches: VecDeque<Search>,
    /// Texts whose prompts are being computed; the first one continues.
    prefilling: VecDeque<Prefill<T>>,
    /// Texts that gain a token in each step. Text `i` is row `i` of the cache.
    running: Vec<Text<T>>,
    cache: Gpt2Cache,
    /// Those of them that have an observer.
    observed: Observed<T>,
    /// The logits after the prompt that the next waiting text continues too, if another sequence of its request has begun.
    prompt_logits: Option<PromptLogits>,
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

/// What is known after the prompt of a request of several sequences, which is computed once.
struct PromptLogits {
    request: RequestId,
    logits: Vec<f32>,
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
            searches: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
            observed: Observed::new(),
            prompt_logits: None,
            prefixes: Prefixes::default(),
            ready: Vec::new(),
        })
    }

    /// Gives it a clock, for texts with a [`max_time`](crate::GenerationConfig::max_time); without one they fail.
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

    /// Sets the cost of reading one more token, as a share of a pass over one token of one text: how long drafts are depends on it,
    /// and no text does; from 0.4 on only a text that runs alone gets drafts. By default it is estimated from the size of the model.
    pub fn set_token_cost(&mut self, token_cost: f64) {
        self.token_cost = token_cost.max(0.0);
    }

    /// Accepts a request, whose texts begin when there is room. Everything that can be refused is refused here, before any work.
    ///
    /// Beam and contrastive search are asked for by the configuration. They take memory of their own, no assistant drafts for them,
    /// and what they find comes as [`Event::Found`].
    ///
    /// # Errors
    /// When an option is out of its range, the prompt is empty or too long, an id is outside the vocabulary, stop strings have no
    /// tokenizer, prompt and text have no room in the memory for keys and values, however long they wait, a search is to tell
    /// how probable tokens are, passes stop at a block though logits are wanted, or observers are not one for each text that is made
    /// token by token.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, GenerationError> {
        check_stop(&request, self.model.config().n_layer)?;
        let Request {
            prompt,
            config,
            processors: others,
            stream,
            logprobs,
            prompt_logprobs,
            reuse,
            observers,
            stop_at_layer,
            echoed,
        } = request;
        let model = self.model.config();
        let mode = config.search_mode();
        config.check_for(mode, model)?;
        check_observers(&observers, &config)?;
        if !config.stop_strings.is_empty() && self.tokenizer.is_none() {
            return Err(GenerationError::StopStringsWithoutTokenizer);
        }
        let mut processors = LogitsProcessor::of_config(&config);
        others.into_iter().for_each(|other| other.add_to(&mut processors));
        let id = RequestId(self.requests);
        if mode != SearchMode::TokenByToken {
            if logprobs.or(prompt_logprobs).is_some() {
                let what = "log-probabilities are available for texts that are generated token by token, not for beam and contrastive search";
                return Err(GenerationError::Conflict { what: what.into() });
            }
            config.fit_prompt(&prompt, model)?;
            let request = Request { processors, ..Request::new(prompt, config) };
            self.searches.push_back(Search { id, request });
            self.requests += 1;
            return Ok(id);
        }
        let echoed = echoed.and_then(|from| prompt.get(from..)).map(<[u32]>::to_vec);
        let prompt = config.fit_prompt(&prompt, model)?;
        let max_new_tokens = config.new_tokens(prompt.len());
        let capacity = kept_tokens(&config, prompt.len(), model.n_positions);
        let (needed, kv_tokens) = (KvSlot::room_of(capacity), self.pool.tokens());
        if needed > kv_tokens {
            return Err(GenerationError::KvTokens { needed, kv_tokens });
        }
        self.requests += 1;
        let texts = 0..config.num_return_sequences;
        if max_new_tokens == 0 && prompt_logprobs.is_none() && observers.is_empty() {
            self.ready.extend(texts.map(|sequence| Event::Empty { request: id, sequence }));
        } else {
            // On a GPU the rows of a step are adjacent, and kept prefixes would lie between them. What an observer may have
            // changed must not reach other texts.
            let reuse = reuse.filter(|_| self.slot_tokens.is_none() && observers.is_empty());
            let sharers = reuse.map_or(Sharers::Sequences(id.0), Sharers::Reuse);
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
                sharers,
                observers,
                stop_at_layer,
                echoed,
            });
            self.waiting.extend(texts.map(|sequence| Waiting { request: Arc::clone(&request), sequence }));
        }
        Ok(id)
    }

    /// Ends a request, of which no event comes any more. Says whether there was something to end.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let before = self.texts() + self.ready.len();
        self.waiting.retain(|waiting| waiting.request.id != request);
        self.searches.retain(|search| search.id != request);
        self.prefilling.retain(|prefill| prefill.text.request.id != request);
        self.observed.retain(|(text, _)| text.request.id != request);
        let mut row = 0;
        while row < self.running.len() {
            if self.running[row].request.id == request {
                // A row that cannot be kept is free.
                let _ = self.take_row(row).and_then(|(text, cache)| self.leave(text, cache));
            } else {
                row += 1;
            }
        }
        self.forget_prompt(request);
        self.ready.retain(|event| event.request() != request);
        self.texts() + self.ready.len() < before
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.texts() + self.ready.len() == 0
    }

    /// Texts that have not begun; those of a search count as one.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.searches.len()
    }

    /// Texts that have begun and not ended.
    pub fn running(&self) -> usize {
        self.writing() + self.prefilling.len()
    }

    /// Texts that gain a token in each step.
    pub fn writing(&self) -> usize {
        self.running.len() + self.observed.len()
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

    /// Computes the next token of every running text and the next chunk of the prompts, and says what happened. Of the
    /// requests for a search it computes one, to its end.
    pub fn step(&mut self) -> Step {
        self.step_with(&|| ControlFlow::Continue(()))
    }

    /// The same; `progress` is called after each token of a search, and may end it: the best so far is then returned.
    pub fn step_with(&mut self, progress: &dyn Fn() -> ControlFlow<()>) -> Step {
        let failure = rounded_to_nearest(|| {
            let mut step = || {
                let computed = self.decode()?;
                self.observe()?;
                self.prefill(computed)?;
                self.search(progress)
            };
            step().err()
        });
        if failure.is_some() {
            self.waiting.clear();
            self.searches.clear();
            self.prefilling.clear();
            self.running.clear();
            self.observed.clear();
            self.cache = self.pool.empty_cache();
            self.prompt_logits = None;
            self.prefixes = Prefixes::default();
        }
        Step { events: mem::take(&mut self.ready), failure }
    }

    fn texts(&self) -> usize {
        self.waiting() + self.running()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use candle_core::{DType, Device, Tensor};
    use candle_gpt2::{Gpt2Config, Observer, Site, SiteKind};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::GenerationConfig;

    /// Tokens of a slot, and of the model's context.
    const SLOT: usize = 16;

    fn small(weights: VarBuilder) -> Gpt2LMHeadModel {
        let sizes = Gpt2Config {
            vocab_size: 11,
            n_positions: SLOT,
            n_embd: 6,
            n_layer: 2,
            n_head: 3,
            ..Gpt2Config::gpt2()
        };
        Gpt2LMHeadModel::load(&sizes, weights).unwrap()
    }

    /// As on a GPU, whose rows have slots of one size: texts that end and texts that are cancelled leave no gap in a step.
    #[test]
    fn texts_lie_side_by_side_in_every_step_whichever_leaves() {
        let model = small(VarBuilder::zeros(DType::F32, &Device::Cpu));
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

    /// Sees one place and changes nothing.
    struct Looks;

    impl Observer for Looks {
        fn wants(&self, site: Site) -> bool {
            site == Site::in_block(1, SiteKind::ResidPre)
        }

        fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
            Ok(value)
        }
    }

    /// As on a GPU: observed texts never enter the common rows, so that their recorded step stays; nor do they lie between them.
    #[test]
    fn observed_texts_leave_the_common_rows_as_they_are() {
        let weights = VarMap::new();
        let model = small(VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu));
        let request = |first: u32, max_new_tokens: usize, is_observed: bool| {
            let config =
                GenerationConfig { max_new_tokens, eos_token_id: vec![], ..GenerationConfig::default() };
            let observers = match is_observed {
                true => vec![TextObserver::new(Arc::new(Mutex::new(Looks)))],
                false => Vec::new(),
            };
            Request { observers, ..Request::new(vec![first, 2], config) }
        };
        // The first ends early, so that the last one takes its place.
        let requests = [(1, 3, false), (3, 9, true), (4, 12, false), (5, 9, true), (6, 12, false)];
        let requests = requests.map(|(first, tokens, is_observed)| request(first, tokens, is_observed));
        let options = SchedulerOptions { max_texts: 5, kv_tokens: 5 * SLOT, chunk_tokens: 64 };
        let run = |requests: &[Request]| {
            let mut scheduler = <Scheduler>::new(&model, None, options).unwrap();
            scheduler.slot_tokens = Some(SLOT);
            requests.iter().for_each(|request| _ = scheduler.submit(request.clone()).unwrap());
            let mut made = vec![Vec::new(); requests.len()];
            while !scheduler.is_idle() {
                scheduler.close_gaps().unwrap();
                scheduler.make_way().unwrap();
                for (_, cache) in &scheduler.observed {
                    let before = scheduler.cache.rows_before(cache);
                    assert!(before == 0 || before == scheduler.running.len(), "{before} rows before it");
                }
                // Rows of another memory: what came to them or went would be refused.
                let others = model.new_pool(SLOT).unwrap().empty_cache();
                let common = mem::replace(&mut scheduler.cache, others);
                scheduler.observe().unwrap();
                scheduler.cache = common;
                for event in scheduler.step().into_result().unwrap() {
                    if let Event::Token { request, id, .. } = event {
                        made[request.place()].push(id);
                    }
                }
            }
            assert_eq!(scheduler.kv_tokens_in_use(), 0);
            made
        };
        let together = run(&requests);
        for (request, made) in requests.iter().zip(together) {
            assert_eq!(vec![made], run(std::slice::from_ref(request)));
        }
    }
}
