//! Tests the scheduler's guarantees.
//!
//! No completion depends on its batch. Memory is bounded and freed. A long prompt delays other
//! sequences by at most one chunk.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, KvDType, KvSlot, LogitsFor, Pass};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    AllowedTokens, Event, GenerationConfig, GenerationError, LogitsProcessor, Request, RequestId, Scheduler,
    SchedulerOptions, StopReason, TokenGenerator, WhenFull, beam_search, contrastive_search,
};
use candle_gpt2_testing::fixture_path;
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, WeightDType, load_tokenizer};

pub(super) fn tiny_in(dtype: WeightDType) -> Gpt2LMHeadModel {
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap().load(&options, &|_| ()).unwrap()
}

pub(super) fn tiny() -> Gpt2LMHeadModel {
    tiny_in(WeightDType::F32)
}

pub(super) fn options(max_texts: usize, kv_tokens: usize, chunk_tokens: usize) -> SchedulerOptions {
    SchedulerOptions { max_texts, kv_tokens, chunk_tokens }
}

pub(super) fn scheduler(model: &Gpt2LMHeadModel, options: SchedulerOptions) -> Scheduler<&'static Tokenizer> {
    Scheduler::new(model, None, options).unwrap()
}

pub(super) fn prompt(length: u32, seed: u32) -> Vec<u32> {
    (0..length).map(|index| (index * 37 + seed * 11) % 300).collect()
}

/// Ids of a completion so far, and how it ended.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Completion {
    pub(super) ids: Vec<u32>,
    pub(super) reason: Option<StopReason>,
    pub(super) error: Option<String>,
}

pub(super) type Completions = BTreeMap<(RequestId, usize), Completion>;

pub(super) fn collect(texts: &mut Completions, events: Vec<Event>) {
    for event in events {
        match event {
            Event::Token { request, sequence, id, stop_reason, .. } => {
                let text = texts.entry((request, sequence)).or_default();
                assert_eq!(
                    (text.reason, &text.error),
                    (None, &None),
                    "no event follows the end of a completion"
                );
                text.ids.push(id);
                text.reason = stop_reason;
            }
            Event::Empty { request, sequence } => {
                texts.entry((request, sequence)).or_default().reason = Some(StopReason::MaxNewTokens);
            }
            Event::Failed { request, error } => {
                texts.entry((request, 0)).or_default().error = Some(error.to_string());
            }
            Event::Begun { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn run(scheduler: &mut Scheduler<&Tokenizer>, texts: &mut Completions) {
    while !scheduler.is_idle() {
        collect(texts, scheduler.step().into_result().unwrap());
    }
}

/// Returns the completion of a request that runs alone.
pub(super) fn alone(model: &Gpt2LMHeadModel, request: &Request) -> Completion {
    let mut tokens = TokenGenerator::<&Tokenizer>::of_request(model, request.clone(), None).unwrap();
    let ids = tokens.by_ref().collect::<Result<_, _>>().unwrap();
    Completion { ids, reason: tokens.stop_reason(), error: None }
}

/// Creates requests of all lengths and kinds: greedy, sampled, penalized, sliding, with end tokens.
pub(super) fn requests(ends: &[u32]) -> Vec<Request> {
    let greedy = GenerationConfig { max_new_tokens: 14, ..GenerationConfig::default() };
    let configs = [
        GenerationConfig { eos_token_id: ends.to_vec(), ..greedy.clone() },
        GenerationConfig { do_sample: true, top_k: 30, seed: 5, ..greedy.clone() },
        GenerationConfig {
            do_sample: true,
            top_p: 0.9,
            repetition_penalty: 1.3,
            no_repeat_ngram_size: 2,
            seed: 6,
            ..greedy.clone()
        },
        GenerationConfig { when_full: WhenFull::Slide { head: 2 }, max_new_tokens: 70, ..greedy.clone() },
        GenerationConfig { max_new_tokens: 1, ..greedy.clone() },
        GenerationConfig { max_new_tokens: 90, ..greedy.clone() },
        GenerationConfig { max_length: Some(20), max_new_tokens: 90, ..greedy },
    ];
    let lengths = [3, 1, 30, 47, 48, 12, 2, 17, 33, 9, 5, 41];
    let each = lengths.iter().zip(1..).zip(configs.iter().cycle());
    each.map(|((length, seed), config)| Request::new(prompt(*length, seed), config.clone())).collect()
}

/// Every completion that is not canceled equals the completion of its request run alone.
///
/// Requests arrive one by one, with chunked prompts and little memory, and others are canceled at random.
#[test]
fn completions_do_not_depend_on_other_requests() {
    let model = tiny();
    let ends = alone(&model, &requests(&[])[0]).ids[5..6].to_vec();
    let requests = requests(&ends);
    let expected: Vec<Completion> = requests.iter().map(|request| alone(&model, request)).collect();
    for reason in [StopReason::Eos, StopReason::MaxNewTokens, StopReason::Context] {
        assert!(expected.iter().any(|text| text.reason == Some(reason)), "{reason:?} is among them");
    }
    let mut generator = RandomStream::new(3);
    let mut random =
        |below: u32| (0..below).find(|n| generator.uniform() < 1.0 / f64::from(below - n)).unwrap();
    for (max_texts, kv_tokens, chunk_tokens) in
        [(1, 48, 2), (2, 60, 5), (4, 130, 7), (8, 400, 16), (12, 600, 48), (3, 5_000, 1_000)]
    {
        let mut scheduler = scheduler(&model, options(max_texts, kv_tokens, chunk_tokens));
        let (mut texts, mut kept) = (Completions::new(), BTreeMap::new());
        for (index, request) in requests.iter().chain(&requests).enumerate() {
            let doomed = (random(3) == 0).then(|| scheduler.submit(request.clone()).unwrap());
            let id = scheduler.submit(request.clone()).unwrap();
            kept.insert(id, index % requests.len());
            for _ in 0..random(6) {
                collect(&mut texts, scheduler.step().into_result().unwrap());
                assert!(scheduler.running() <= max_texts);
                assert!(scheduler.kv_tokens_in_use() <= KvSlot::room_of(kv_tokens));
            }
            if let Some(doomed) = doomed {
                scheduler.cancel(doomed);
                texts.retain(|(request, _), _| *request != doomed);
            }
        }
        run(&mut scheduler, &mut texts);
        assert_eq!(scheduler.kv_tokens_in_use(), 0, "all capacity is released");
        assert_eq!(texts.len(), kept.len());
        for (id, index) in kept {
            assert_eq!(
                texts[&(id, 0)],
                expected[index],
                "{max_texts} texts, {kv_tokens} tokens, chunks of {chunk_tokens}: request {index}"
            );
        }
    }
}

/// The logits after a prompt do not depend on the chunk sizes, bit for bit.
///
/// This holds for every weight dtype with every KV cache dtype. Scoring without a cache gives the
/// same bits as an f32 cache.
#[test]
fn logits_do_not_depend_on_chunk_sizes() {
    let weights = WeightDType::all().filter(|dtype| dtype.on_cpu().is_ok());
    let cached = [KvDType::F32, KvDType::F16, KvDType::Q8];
    for (dtype, kv_dtype) in weights.flat_map(|dtype| cached.map(|cached| (dtype, cached))) {
        let model = tiny_in(dtype).with_kv_dtype(kv_dtype);
        let prompt = prompt(45, 4);
        let logits = |chunks: &[usize]| -> Vec<u32> {
            let mut cache = model.new_cache(1, 48).unwrap();
            let (mut start, mut last) = (0, Vec::new());
            for count in chunks {
                let ids =
                    Tensor::from_slice(&prompt[start..start + count], (1, *count), &Device::Cpu).unwrap();
                let pass = &mut Pass::inference();
                let logits = model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass).unwrap();
                last = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                start += count;
            }
            assert_eq!(start, prompt.len());
            last.into_iter().map(f32::to_bits).collect()
        };
        let whole = logits(&[45]);
        if kv_dtype == KvDType::F32 {
            let ids = Tensor::from_slice(&prompt, (1, 45), &Device::Cpu).unwrap();
            let scored = model.forward(&ids).unwrap().get(0).unwrap().get(44).unwrap();
            let scored: Vec<u32> = scored.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
            assert_eq!(scored, whole, "{dtype:?} without a cache");
        }
        for chunks in
            [vec![1; 45], vec![16, 16, 13], [vec![2; 21], vec![3]].concat(), vec![44, 1], vec![7, 38]]
        {
            assert_eq!(logits(&chunks), whole, "{dtype:?}, {kv_dtype} in {chunks:?}");
        }
    }
}

/// During the prefill of a long prompt, a running sequence gets a token in every step.
///
/// No step computes more than one chunk.
#[test]
fn long_prompt_delays_others_by_at_most_one_chunk() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 40, ..GenerationConfig::default() };
    let mut scheduler = scheduler(&model, options(4, 400, 6));
    let first = scheduler.submit(Request::new(prompt(4, 1), config.clone())).unwrap();
    scheduler.step().into_result().unwrap();
    let long = scheduler.submit(Request::new(prompt(44, 2), config.clone())).unwrap();
    let mut steps = 0;
    loop {
        let events = scheduler.step().into_result().unwrap();
        steps += 1;
        assert!(
            events.iter().any(|event| event.request() == first),
            "the running sequence continues in step {steps}"
        );
        if events.iter().any(|event| event.request() == long) {
            break;
        }
    }
    assert_eq!(steps, 44_usize.div_ceil(6), "a chunk of six tokens in each step");
    // Short prompts share a step if they fit into a chunk together.
    let shorts: Vec<RequestId> =
        (0..3).map(|seed| scheduler.submit(Request::new(prompt(3, seed), config.clone())).unwrap()).collect();
    let started: Vec<RequestId> =
        scheduler.step().into_result().unwrap().iter().map(Event::request).collect();
    assert!(started.contains(&shorts[0]) && started.contains(&shorts[1]) && !started.contains(&shorts[2]));
}

/// A chunk of a prompt shares a pass with the next token of the running sequence.
///
/// A pass polls for interrupts in each block and product. A step with a chunk polls about as often as a
/// single pass, not twice as often.
#[test]
fn prefill_chunk_shares_the_decode_pass() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 40, eos_token_id: vec![], ..GenerationConfig::default() };
    let mut scheduler = scheduler(&model, options(4, 400, 6));
    let first = scheduler.submit(Request::new(prompt(4, 1), config.clone())).unwrap();
    let polls = Arc::new(AtomicUsize::new(0));
    let step = |scheduler: &mut Scheduler<_>| {
        let counted = Arc::clone(&polls);
        let count = Arc::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            false
        });
        let events = candle_gpt2_kernels::interruptible(count, || scheduler.step().into_result().unwrap());
        (events, polls.swap(0, Ordering::Relaxed))
    };
    let _ = step(&mut scheduler);
    let (_, alone) = step(&mut scheduler);
    let second = scheduler.submit(Request::new(prompt(9, 2), config)).unwrap();
    let (events, with_chunk) = step(&mut scheduler);
    assert!(events.iter().all(|event| event.request() == first), "six of nine tokens are read");
    assert!(alone > 0 && 2 * with_chunk < 3 * alone, "{with_chunk} polls with a chunk, {alone} alone");
    let (events, with_chunk) = step(&mut scheduler);
    assert!(events.iter().any(|event| event.request() == second), "the prompt is read");
    assert!(2 * with_chunk < 3 * alone, "{with_chunk} polls with the end of a prompt, {alone} alone");
}

/// Sequences of a request share its prompt and sample from separate streams.
///
/// The KV cache has capacity for a single sequence, for some sequences or for all of them.
#[test]
fn sequences_of_a_request_share_its_prompt() {
    let model = tiny();
    let single =
        GenerationConfig { do_sample: true, seed: 9, max_new_tokens: 8, ..GenerationConfig::default() };
    let config = GenerationConfig { num_return_sequences: 5, ..single.clone() };
    let mut expected = None;
    for (max_texts, kv_tokens) in [(8, 400), (8, 19), (2, 40), (1, 31), (8, 31)] {
        let mut scheduler = scheduler(&model, options(max_texts, kv_tokens, 48));
        let id = scheduler.submit(Request::new(prompt(12, 3), config.clone())).unwrap();
        let mut texts = Completions::new();
        run(&mut scheduler, &mut texts);
        assert_eq!(texts[&(id, 0)], alone(&model, &Request::new(prompt(12, 3), single.clone())));
        assert_eq!(texts.len(), 5);
        assert_eq!(*expected.get_or_insert(texts.clone()), texts, "{max_texts} texts, {kv_tokens} tokens");
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
    }
    let texts = expected.unwrap();
    assert!((1..5).all(|other| texts[&(RequestId(0), other)].ids != texts[&(RequestId(0), 0)].ids));
}

/// A request that cannot continue ends with its own error and does not affect others.
#[test]
fn failing_request_does_not_affect_others() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let good = Request::new(prompt(7, 1), config.clone());
    // After three tokens, no token is allowed.
    let third = AllowedTokens::new(|history| if history.generated().len() < 3 { vec![1, 2] } else { vec![] });
    let bad = Request { processors: vec![LogitsProcessor::AllowedTokens(third)], ..good.clone() };
    let everything: Vec<u32> = (0..300).collect();
    let hopeless = GenerationConfig { suppress_tokens: everything, ..config };
    let mut scheduler = scheduler(&model, options(8, 400, 48));
    let ids: Vec<RequestId> = [good.clone(), bad, Request::new(prompt(5, 2), hopeless), good.clone()]
        .map(|request| scheduler.submit(request).unwrap())
        .to_vec();
    let mut texts = Completions::new();
    run(&mut scheduler, &mut texts);
    let expected = alone(&model, &good);
    assert_eq!((&texts[&(ids[0], 0)], &texts[&(ids[3], 0)]), (&expected, &expected));
    let failed = &texts[&(ids[1], 0)];
    assert_eq!((failed.ids.len(), failed.reason), (3, None));
    assert!(failed.error.as_ref().unwrap().starts_with("allowed_tokens"), "{failed:?}");
    assert!(texts[&(ids[2], 0)].error.as_ref().unwrap().starts_with("no token is left"));
    assert_eq!(scheduler.kv_tokens_in_use(), 0);
}

/// If a sequence of a request fails, the request fails once, and other requests keep their tokens.
///
/// The failing request has several sequences, and is submitted before and after another request.
#[test]
fn failing_sequence_fails_its_request_once() {
    let model = tiny();
    let config = GenerationConfig {
        do_sample: true,
        num_return_sequences: 3,
        max_new_tokens: 12,
        ..GenerationConfig::default()
    };
    let good = Request::new(prompt(7, 1), config.clone());
    let expected = {
        let mut scheduler = scheduler(&model, options(3, 100, 48));
        scheduler.submit(good.clone()).unwrap();
        let mut texts = Completions::new();
        run(&mut scheduler, &mut texts);
        texts.into_values().collect::<Vec<_>>()
    };
    for seed in 0..8 {
        // The sampled tokens decide whether a sequence can continue, so some of the three sequences fail, at
        // different times.
        let random_end = AllowedTokens::new(|history| match history.generated().last() {
            Some(id) if id % 3 == 0 => vec![],
            _ => (0..300).collect(),
        });
        let bad = GenerationConfig { seed, top_k: 0, ..config.clone() };
        let bad = Request {
            processors: vec![LogitsProcessor::AllowedTokens(random_end)],
            ..Request::new(prompt(5, 2), bad)
        };
        let mut scheduler = scheduler(&model, options(12, 400, 48));
        let ids =
            [bad.clone(), good.clone(), bad, good.clone()].map(|request| scheduler.submit(request).unwrap());
        let (mut texts, mut failures) = (Completions::new(), Vec::new());
        while !scheduler.is_idle() {
            let events = scheduler.step().into_result().unwrap();
            failures.extend(events.iter().filter_map(|event| match event {
                Event::Failed { request, .. } => Some(*request),
                _ => None,
            }));
            collect(
                &mut texts,
                events.into_iter().filter(|event| !matches!(event, Event::Failed { .. })).collect(),
            );
        }
        assert_eq!(failures, [ids[0], ids[2]], "seed {seed}: each once");
        for good in [ids[1], ids[3]] {
            let found: Vec<Completion> = (0..3).map(|sequence| texts[&(good, sequence)].clone()).collect();
            assert_eq!(found, expected, "seed {seed}");
        }
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
    }
}

/// All sequences of a request run concurrently if the limit and the memory are exactly sufficient.
///
/// No sequence waits for another to end.
#[test]
fn all_sequences_of_a_request_run_concurrently() {
    let model = tiny();
    let config = GenerationConfig {
        num_return_sequences: 4,
        max_new_tokens: 6,
        do_sample: true,
        ..GenerationConfig::default()
    };
    let request = Request::new(prompt(12, 3), config);
    let kv_tokens = 4 * request.kv_tokens(model.config()).unwrap();
    let mut scheduler = scheduler(&model, options(4, kv_tokens, 48));
    let id = scheduler.submit(request.clone()).unwrap();
    scheduler.step().into_result().unwrap();
    assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.kv_tokens_in_use()), (4, 0, kv_tokens));
    // A canceled request frees all of its memory, including its prompt.
    assert!(scheduler.cancel(id));
    assert_eq!(scheduler.kv_tokens_in_use(), 0);
    let mut one_by_one = self::scheduler(&model, options(1, kv_tokens, 48));
    let id = one_by_one.submit(request).unwrap();
    for _ in 0..9 {
        one_by_one.step().into_result().unwrap();
        assert_eq!(one_by_one.running(), 1);
    }
    assert!(one_by_one.cancel(id) && one_by_one.is_idle());
    assert_eq!(one_by_one.kv_tokens_in_use(), 0);
}

/// Sequences that start from a computed prompt count toward a step's work.
#[test]
fn chunk_size_limits_sequences_started_per_step() {
    let model = tiny();
    let config = GenerationConfig {
        num_return_sequences: 40,
        max_new_tokens: 1,
        do_sample: true,
        ..GenerationConfig::default()
    };
    let mut scheduler = scheduler(&model, options(50, 2_000, 6));
    scheduler.submit(Request::new(prompt(4, 1), config)).unwrap();
    let mut started = Vec::new();
    while !scheduler.is_idle() {
        let is_token = |event: &&Event| matches!(event, Event::Token { .. });
        started.push(scheduler.step().into_result().unwrap().iter().filter(is_token).count());
    }
    assert_eq!((started.iter().sum::<usize>(), started[0]), (40, 3), "a prompt of four and two more");
    assert!(started[1..].iter().all(|started| *started <= 6), "{started:?}");
}

/// A sliding window is computed before other prompts continue.
#[test]
fn sliding_sequence_does_not_wait_for_a_long_prompt() {
    let model = tiny();
    let slide = GenerationConfig {
        when_full: WhenFull::Slide { head: 0 },
        max_new_tokens: 40,
        ..GenerationConfig::default()
    };
    let sliding = Request::new(prompt(44, 1), slide);
    let expected = alone(&model, &sliding);
    let mut scheduler = scheduler(&model, options(4, 300, 8));
    let id = scheduler.submit(sliding).unwrap();
    let mut texts = Completions::new();
    while !texts.contains_key(&(id, 0)) {
        collect(&mut texts, scheduler.step().into_result().unwrap());
    }
    let long = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
    scheduler.submit(Request::new(prompt(47, 2), long)).unwrap();
    let (mut waited, mut longest) = (0, 0);
    while scheduler.running() > 0 {
        let events = scheduler.step().into_result().unwrap();
        waited = if events.iter().any(|event| event.request() == id) { 0 } else { waited + 1 };
        longest = longest.max(waited);
        collect(&mut texts, events);
    }
    // The window's 23 tokens are computed in chunks of eight.
    assert_eq!((longest, &texts[&(id, 0)]), (23_usize.div_ceil(8), &expected));
}

#[test]
fn impossible_options_and_requests_are_rejected() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() };
    for (bad, option) in [((0, 10, 10), "max_texts"), ((1, 0, 10), "kv_tokens"), ((1, 10, 0), "chunk_tokens")]
    {
        let error = Scheduler::<&Tokenizer>::new(&model, None, options(bad.0, bad.1, bad.2)).err().unwrap();
        assert!(error.is_usage() && error.to_string().starts_with(&format!("`{option}`")), "{error}");
    }
    let error = Scheduler::<&Tokenizer>::new(&model, None, options(1, 1 << 60, 10)).err().unwrap();
    assert!(error.to_string().contains("not enough memory for the keys and values"), "{error}");
    let mut scheduler = scheduler(&model, options(4, 28, 8));
    let error = scheduler.submit(Request::new(prompt(14, 1), config.clone())).unwrap_err();
    assert!(matches!(error, GenerationError::KvTokens { needed: 48, kv_tokens: 32 }), "{error}");
    assert!(scheduler.submit(Request::new(prompt(13, 1), config.clone())).is_ok());
    let beams = Request::new(vec![1], GenerationConfig { num_beams: 3, ..config.clone() });
    for (request, message) in [
        (Request::new(vec![], config.clone()), "the prompt has no tokens"),
        (Request::new(vec![300], config.clone()), "token id 300"),
        (Request::new(prompt(49, 1), config.clone()), "the prompt has 49 tokens"),
        (Request { logprobs: Some(2), ..beams }, "log-probabilities are available"),
    ] {
        let error = scheduler.submit(request).unwrap_err();
        assert!(error.is_usage() && error.to_string().starts_with(message), "{error}");
    }
}

/// Requests can end without tokens, or be canceled while waiting, in prefill, running or finished.
#[test]
fn requests_can_end_in_any_state() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 9, ..GenerationConfig::default() };
    let no_tokens = GenerationConfig { max_new_tokens: 0, num_return_sequences: 1, ..config.clone() };
    let mut scheduler = scheduler(&model, options(2, 100, 10));
    let empty = scheduler.submit(Request::new(prompt(3, 1), no_tokens)).unwrap();
    let [running, computed, waiting] = [(2, 1), (30, 2), (3, 3)]
        .map(|(length, seed)| scheduler.submit(Request::new(prompt(length, seed), config.clone())).unwrap());
    let mut texts = Completions::new();
    collect(&mut texts, scheduler.step().into_result().unwrap());
    assert_eq!(texts[&(empty, 0)].reason, Some(StopReason::MaxNewTokens));
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
    for id in [waiting, computed, running] {
        assert!(scheduler.cancel(id));
        assert!(!scheduler.cancel(id), "it no longer exists");
    }
    assert!(!scheduler.cancel(empty) && scheduler.is_idle());
    assert_eq!((scheduler.step().into_result().unwrap().len(), scheduler.kv_tokens_in_use()), (0, 0));
}

/// The caller's clock measures a completion's time, from the step that begins the prefill.
#[test]
fn time_limit_uses_the_callers_clock() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 30, max_time: Some(3.5), ..GenerationConfig::default() };
    let mut scheduler = scheduler(&model, options(2, 200, 48));
    let clockless = scheduler.submit(Request::new(prompt(3, 1), config.clone())).unwrap();
    let mut texts = Completions::new();
    run(&mut scheduler, &mut texts);
    assert!(texts[&(clockless, 0)].error.as_ref().unwrap().contains("clock"));
    // The clock advances by a second at each call: once when the sequence begins, and once for each token.
    let seconds = Arc::new(std::sync::atomic::AtomicU64::new(0));
    scheduler.set_clock(Arc::new(move || Duration::from_secs(seconds.fetch_add(1, Ordering::SeqCst))));
    // The time limit of one request does not end another.
    for _ in 0..2 {
        let timed = scheduler.submit(Request::new(prompt(3, 1), config.clone())).unwrap();
        run(&mut scheduler, &mut texts);
        assert_eq!((texts[&(timed, 0)].ids.len(), texts[&(timed, 0)].reason), (4, Some(StopReason::MaxTime)));
    }
}

/// A scheduler that owns its tokenizer can move to another thread.
#[test]
fn owned_scheduler_moves_to_another_thread() {
    let tokenizer = Arc::new(load_tokenizer(fixture_path("tiny-checkpoint")).unwrap());
    let config = GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() };
    let mut scheduler: Scheduler =
        Scheduler::new(&tiny(), Some(Arc::clone(&tokenizer)), options(2, 100, 48)).unwrap();
    let thread = std::thread::spawn(move || {
        scheduler.submit(Request::new(prompt(4, 1), config)).unwrap();
        let (mut whole, mut ids) = (String::new(), Vec::new());
        while !scheduler.is_idle() {
            for event in scheduler.step().into_result().unwrap() {
                if let Event::Token { id, text, .. } = event {
                    whole.push_str(&text);
                    ids.push(id);
                }
            }
        }
        (whole, ids)
    });
    let (text, ids) = thread.join().unwrap();
    assert_eq!(ids.len(), 20);
    assert_eq!(text, tokenizer.decode(&ids, true).unwrap());
}

/// A failed step returns the events before the failure and leaves no events for a later step.
#[test]
fn failed_step_returns_its_earlier_events() {
    let mut scheduler = scheduler(&tiny(), options(2, 100, 48));
    let config = |max_new_tokens| GenerationConfig { max_new_tokens, ..GenerationConfig::default() };
    let without_tokens = scheduler.submit(Request::new(prompt(3, 1), config(0))).unwrap();
    scheduler.submit(Request::new(prompt(4, 2), config(5))).unwrap();
    let failed = candle_gpt2_kernels::interruptible(Arc::new(|| true), || scheduler.step());
    assert!(matches!(failed.events[..], [Event::Empty { request, .. }] if request == without_tokens));
    assert!(failed.failure.is_some() && scheduler.is_idle());
    assert!(scheduler.step().into_result().unwrap().is_empty());
}

/// Searches are submitted like other requests and return the same results as the search functions.
///
/// Searches can run together with completions that are decoded token by token.
#[test]
fn searches_run_as_requests() {
    let (model, keep_going) = (tiny(), || ControlFlow::Continue(()));
    let config = |num_beams, penalty_alpha| GenerationConfig {
        num_beams,
        num_return_sequences: num_beams,
        penalty_alpha,
        top_k: 4,
        max_new_tokens: 6,
        ..GenerationConfig::default()
    };
    let (beams, contrastive, greedy) = (config(3, 0.0), config(1, 0.6), config(1, 0.0));
    let mut scheduler = scheduler(&model, options(2, 100, 48));
    let ids: Vec<RequestId> = [&beams, &greedy, &contrastive, &beams]
        .into_iter()
        .zip(1..)
        .map(|(config, seed)| scheduler.submit(Request::new(prompt(5, seed), config.clone())).unwrap())
        .collect();
    assert!(scheduler.cancel(ids[3]) && !scheduler.is_idle());
    let (mut found, mut tokens) = (BTreeMap::new(), Vec::new());
    while !scheduler.is_idle() {
        for event in scheduler.step().into_result().unwrap() {
            match event {
                Event::Found { request, texts } => _ = found.insert(request, texts),
                Event::Token { id, .. } => tokens.push(id),
                Event::Begun { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    let expected = beam_search(&model, &prompt(5, 1), &beams, &[], None, &keep_going).unwrap();
    let results: Vec<_> = found[&ids[0]].iter().map(|text| (&text.ids, text.score)).collect();
    assert_eq!(results, expected.iter().map(|text| (&text.ids, Some(text.score))).collect::<Vec<_>>());
    let (expected, reason) =
        contrastive_search(&model, &prompt(5, 3), &contrastive, &[], None, &keep_going).unwrap();
    assert!(matches!(&found[&ids[2]][..], [text] if text.ids == expected && text.stop_reason == reason));
    let alone = TokenGenerator::new(&model, &prompt(5, 2), &greedy).unwrap();
    assert_eq!((tokens, found.len()), (alone.map(Result::unwrap).collect(), 2));
}
