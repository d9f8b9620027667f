//! Continuous batching: one loop for a single completion, a batch and a server.
//!
//! Requests join, finish and cancel freely. Prompts of different lengths need no padding. A prompt is
//! prefilled in chunks. On a CPU, a chunk shares a pass with the next tokens of all running sequences;
//! on a GPU, it runs between their steps. The keys and values of a prompt are not moved when its
//! sequence joins the running ones.
//!
//! Memory for the keys and values of a whole sequence is reserved before its prefill begins, so no
//! sequence is ever preempted. Sequences begin in the order of their requests.

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
use crate::prefixes::{Prefixes, ReuseGroup};
use crate::{Clock, GenerationError, LogitsProcessor, SearchMode};

pub use event::{Event, Found, Step, StopReason};
use prefill::Prefill;
pub use request::{Request, RequestId, SchedulerOptions};
use request::{Search, check_stop, kept_tokens};
use text::{Accepted, Observed, SequenceState};
pub use text_observer::TextObserver;
use text_observer::check_observers;

/// Generates the completions of all requests.
///
/// Each completion is the same as if its request ran alone. Each has its own random number generator
/// with its request's seed.
///
/// A single thread drives the scheduler. `T` is a pointer to the tokenizer.
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
/// let mut tokens = scheduler.step().events.len(); // the first is already running when the second arrives
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
    /// Relative cost of one more token in a pass; see [`Scheduler::set_token_cost`].
    token_cost: f64,
    pool: KvPool,
    /// Minimum capacity of a sequence on a GPU, in tokens.
    ///
    /// The kernels need adjacent rows in a step, so even short sequences get this capacity. `None` on a CPU.
    slot_tokens: Option<usize>,
    requests: u64,
    /// Sequences that have not begun.
    waiting: VecDeque<Waiting>,
    /// Requests for beam or contrastive search.
    searches: VecDeque<Search>,
    /// Sequences in prefill; each step continues the first one.
    prefilling: VecDeque<Prefill<T>>,
    /// Sequences that gain a token in each step; sequence `i` is row `i` of the cache.
    running: Vec<SequenceState<T>>,
    cache: Gpt2Cache,
    /// Sequences with an observer that gain a token in each step.
    observed: Observed<T>,
    /// Logits after the prompt that the next waiting sequence shares.
    ///
    /// The logits are known if another sequence of the same request has begun.
    prompt_logits: Option<PromptLogits>,
    /// Prefixes of finished sequences, for reuse.
    prefixes: Prefixes,
    /// Events that the next step returns.
    ready: Vec<Event>,
}

/// A sequence that has not begun.
struct Waiting {
    request: Arc<Accepted>,
    sequence: usize,
}

/// Logits after a prompt that several sequences share; they are computed once.
struct PromptLogits {
    request: RequestId,
    logits: Vec<f32>,
}

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// Creates a scheduler without requests; text and stop strings need a tokenizer.
    ///
    /// # Errors
    /// Returns an error if an option is out of range or the memory for keys and values cannot be allocated.
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

    /// Sets the clock for [`max_time`](crate::GenerationConfig::max_time).
    ///
    /// Without a clock, requests with a time limit fail.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = Some(clock);
    }

    /// Sets an assistant, a smaller model that drafts tokens.
    ///
    /// One pass of the model then verifies several tokens of a sequence. On a CPU, the completions stay
    /// byte-identical.
    ///
    /// # Errors
    /// Returns an error if the vocabularies have different sizes or the assistant's KV cache cannot be
    /// allocated.
    pub fn set_assistant(&mut self, assistant: &Gpt2LMHeadModel) -> Result<(), GenerationError> {
        let [vocab_size, found] = [&self.model, assistant].map(|model| model.config().vocab_size);
        if found != vocab_size {
            return Err(GenerationError::AssistantVocabulary { vocab_size, found });
        }
        self.assistant = Some(Assistant::new(assistant, &self.model, self.pool.tokens())?);
        // The caches of sequences that have begun belong to the previous assistant.
        self.running.iter_mut().for_each(|text| text.assisted = None);
        self.prefilling.iter_mut().for_each(|prefill| prefill.text.assisted = None);
        Ok(())
    }

    /// Sets the cost of an additional token in a pass, relative to a pass over a single token.
    ///
    /// The cost affects the length of drafts, but never a completion. At 0.4 or above, only a sequence that
    /// runs alone gets drafts. By default, the cost is estimated from the model's size.
    pub fn set_token_cost(&mut self, token_cost: f64) {
        self.token_cost = token_cost.max(0.0);
    }

    /// Accepts a request; its sequences begin as soon as there is capacity.
    ///
    /// Invalid requests are rejected here, before any computation. The configuration selects beam or
    /// contrastive search. Such a search allocates its own memory, uses no assistant, and reports its
    /// completions as [`Event::Found`].
    ///
    /// # Errors
    /// Returns an error if an option is out of range, the prompt is empty or too long, or an id is outside
    /// the vocabulary. Also returns an error in these cases:
    ///
    /// - Stop strings are set without a tokenizer.
    /// - Prompt and completion exceed the whole KV cache.
    /// - Log-probabilities are requested for a search.
    /// - Passes stop at a block although logits are needed.
    /// - There are observers, but not one for each sequence, or the completions are not decoded token by
    ///   token.
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
                let what = "log-probabilities are available only when decoding token by token, not with \
                    beam or contrastive search";
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
            // On a GPU, kept prefixes would lie between the rows of a step, which must be adjacent. With
            // observers, changes to the KV cache must not reach other sequences.
            let reuse = reuse.filter(|_| self.slot_tokens.is_none() && observers.is_empty());
            let reuse_group = reuse.map_or(ReuseGroup::Sequences(id.0), ReuseGroup::Reuse);
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
                reuse_group,
                observers,
                stop_at_layer,
                echoed,
            });
            self.waiting.extend(texts.map(|sequence| Waiting { request: Arc::clone(&request), sequence }));
        }
        Ok(id)
    }

    /// Cancels a request and its remaining events; returns whether there was anything to cancel.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let before = self.texts() + self.ready.len();
        self.waiting.retain(|waiting| waiting.request.id != request);
        self.searches.retain(|search| search.id != request);
        self.prefilling.retain(|prefill| prefill.text.request.id != request);
        self.observed.retain(|(text, _)| text.request.id != request);
        let mut row = 0;
        while row < self.running.len() {
            if self.running[row].request.id == request {
                // A row that cannot be kept is freed.
                let _ = self.take_row(row).and_then(|(text, cache)| self.keep_prefix(text, cache));
            } else {
                row += 1;
            }
        }
        self.forget_prompt(request);
        self.ready.retain(|event| event.request() != request);
        self.texts() + self.ready.len() < before
    }

    /// Returns whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.texts() + self.ready.len() == 0
    }

    /// Returns the number of sequences that have not begun; a search counts as one.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.searches.len()
    }

    /// Returns the number of sequences that have begun and not ended.
    pub fn running(&self) -> usize {
        self.decoding() + self.prefilling.len()
    }

    /// Returns the number of sequences that gain a token in each step.
    pub fn decoding(&self) -> usize {
        self.running.len() + self.observed.len()
    }

    /// Changes [`SchedulerOptions::chunk_tokens`] for the following steps; 0 counts as 1.
    ///
    /// No completion depends on it.
    pub fn set_chunk_tokens(&mut self, chunk_tokens: usize) {
        self.options.chunk_tokens = chunk_tokens.max(1);
    }

    /// Returns the KV cache capacity that running sequences have reserved, in tokens.
    pub fn kv_tokens_in_use(&self) -> usize {
        self.pool.tokens_in_use() - self.prefixes.kv_tokens()
    }

    /// Returns the KV cache capacity of kept prefixes, in tokens; see [`Request::reuse`].
    ///
    /// This memory is freed when sequences need it.
    pub fn kv_tokens_kept(&self) -> usize {
        self.prefixes.kv_tokens()
    }

    /// Decodes one token of every running sequence, prefills the next chunk, and returns the events.
    ///
    /// If search requests are waiting, the step also runs one of them to completion.
    pub fn step(&mut self) -> Step {
        self.step_with(&|| ControlFlow::Continue(()))
    }

    /// Runs a step like [`Scheduler::step`] and calls `progress` after each token of a search.
    ///
    /// `progress` may end the search, which then returns its best completions so far.
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

    /// Number of tokens in a slot, and context length of the model.
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

    /// Finished and canceled sequences leave no gap in a step.
    ///
    /// As on a GPU, all rows have slots of the same size.
    #[test]
    fn running_rows_stay_contiguous_after_removals() {
        let model = small(VarBuilder::zeros(DType::F32, &Device::Cpu));
        let options = SchedulerOptions { max_texts: 5, kv_tokens: 5 * SLOT, chunk_tokens: 64 };
        let mut scheduler = <Scheduler>::new(&model, None, options).unwrap();
        scheduler.slot_tokens = Some(SLOT);
        let request = |max_new_tokens| {
            let config =
                GenerationConfig { max_new_tokens, eos_token_id: vec![], ..GenerationConfig::default() };
            Request::new(vec![1, 2], config)
        };
        // The second sequence ends by itself; the first and the fourth are canceled.
        let ids = [9, 3, 9, 9, 9].map(|tokens| scheduler.submit(request(tokens)).unwrap());
        let mut generated = [0; 5];
        for step in 0..20 {
            if step == 4 {
                assert!(scheduler.cancel(ids[0]) && scheduler.cancel(ids[3]));
            }
            for event in scheduler.step().into_result().unwrap() {
                if let Event::Token { request, .. } = event {
                    generated[usize::try_from(request.0).unwrap()] += 1;
                }
            }
            // Close the gaps from sequences that left in this step, as the next step would.
            scheduler.close_gaps().unwrap();
            if let Some(free) = scheduler.pool.cache(1, SLOT) {
                assert_eq!(scheduler.cache.rows_before(&free), scheduler.running.len(), "step {step}");
            }
        }
        assert!(scheduler.is_idle());
        assert_eq!((generated[1], generated[2], generated[4]), (3, 9, 9));
        assert!(generated[0] < 9 && generated[3] < 9);
    }

    /// Observes one hook point without changing it.
    struct NoopObserver;

    impl Observer for NoopObserver {
        fn wants(&self, site: Site) -> bool {
            site == Site::in_block(1, SiteKind::ResidPre)
        }

        fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
            Ok(value)
        }
    }

    /// Observed sequences are never part of the common rows, nor located between these rows.
    ///
    /// On a GPU, the recorded step of the common rows therefore stays valid.
    #[test]
    fn observed_rows_do_not_disturb_the_common_rows() {
        let weights = VarMap::new();
        let model = small(VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu));
        let request = |first: u32, max_new_tokens: usize, is_observed: bool| {
            let config =
                GenerationConfig { max_new_tokens, eos_token_id: vec![], ..GenerationConfig::default() };
            let observers = match is_observed {
                true => vec![TextObserver::new(Arc::new(Mutex::new(NoopObserver)))],
                false => Vec::new(),
            };
            Request { observers, ..Request::new(vec![first, 2], config) }
        };
        // The first sequence ends early, so the last one moves to its row.
        let requests = [(1, 3, false), (3, 9, true), (4, 12, false), (5, 9, true), (6, 12, false)];
        let requests = requests.map(|(first, tokens, is_observed)| request(first, tokens, is_observed));
        let options = SchedulerOptions { max_texts: 5, kv_tokens: 5 * SLOT, chunk_tokens: 64 };
        let run = |requests: &[Request]| {
            let mut scheduler = <Scheduler>::new(&model, None, options).unwrap();
            scheduler.slot_tokens = Some(SLOT);
            requests.iter().for_each(|request| _ = scheduler.submit(request.clone()).unwrap());
            let mut generated = vec![Vec::new(); requests.len()];
            while !scheduler.is_idle() {
                scheduler.close_gaps().unwrap();
                scheduler.move_observed_back().unwrap();
                for (_, cache) in &scheduler.observed {
                    let before = scheduler.cache.rows_before(cache);
                    assert!(before == 0 || before == scheduler.running.len(), "{before} rows before it");
                }
                // Swap in a cache from a different pool, so that inserting or removing a common row fails.
                let others = model.new_pool(SLOT).unwrap().empty_cache();
                let common = mem::replace(&mut scheduler.cache, others);
                scheduler.observe().unwrap();
                scheduler.cache = common;
                for event in scheduler.step().into_result().unwrap() {
                    if let Event::Token { request, id, .. } = event {
                        generated[request.index()].push(id);
                    }
                }
            }
            assert_eq!(scheduler.kv_tokens_in_use(), 0);
            generated
        };
        let together = run(&requests);
        for (request, generated) in requests.iter().zip(together) {
            assert_eq!(vec![generated], run(std::slice::from_ref(request)));
        }
    }
}
