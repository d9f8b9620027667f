//! Tests that observers see and change only their own sequence.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor, bail};
use candle_gpt2::{Gpt2LMHeadModel, KvDType, Observer, Site, SiteKind};
use candle_gpt2_generation::{
    Event, GenerationConfig, GenerationError, Request, RequestId, Scheduler, StopReason, TextObserver,
    TokenLogprobs, WhenFull,
};
use candle_gpt2_weights::{Tokenizer, WeightDType};

use super::scheduler::{Completions, options, prompt, run, scheduler, tiny, tiny_in};

/// Adds a multiple of a direction to the input of a block and records the sum, token by token.
struct Steer {
    scale: f32,
    seen: Vec<Vec<u32>>,
}

const SITE: Site = Site::in_block(1, SiteKind::ResidPre);

impl Observer for Steer {
    fn wants(&self, site: Site) -> bool {
        site == SITE
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        let width = value.dim(2)?; // (1, T, C)
        let direction = (0..width).map(|channel| if channel % 3 == 0 { self.scale } else { 0.0 });
        let value = match self.scale {
            0.0 => value,
            _ => {
                value.broadcast_add(&Tensor::from_iter(direction, &Device::Cpu)?.to_dtype(value.dtype())?)?
            }
        };
        let tokens = value.to_dtype(DType::F32)?.squeeze(0)?.to_vec2::<f32>()?;
        self.seen.extend(tokens.into_iter().map(|token| token.into_iter().map(f32::to_bits).collect()));
        Ok(value)
    }
}

fn steer(scale: f32) -> Arc<Mutex<Steer>> {
    Arc::new(Mutex::new(Steer { scale, seen: Vec::new() }))
}

/// Returns the request with this observer added.
fn observed(request: &Request, observer: &Arc<Mutex<Steer>>) -> Request {
    Request { observers: vec![TextObserver::new(observer.clone())], ..request.clone() }
}

/// Events collected for a request, including the number of reused tokens.
#[derive(Debug, Clone, PartialEq, Default)]
struct Report {
    cached: usize,
    prompt: Vec<Option<TokenLogprobs>>,
    tokens: Vec<(usize, u32, Option<TokenLogprobs>)>,
    ends: BTreeMap<usize, StopReason>,
    error: Option<String>,
}

impl Report {
    /// Returns the report without the number of reused tokens, which depends on the batch.
    fn without_cached(self) -> Self {
        Self { cached: 0, ..self }
    }
}

fn step_and_record(scheduler: &mut Scheduler<&Tokenizer>, report: &mut BTreeMap<RequestId, Report>) {
    for event in scheduler.step().into_result().unwrap() {
        let report = report.entry(event.request()).or_default();
        match event {
            Event::Begun { cached_tokens, prompt, .. } => {
                (report.cached, report.prompt) = (cached_tokens, prompt);
            }
            Event::Token { sequence, id, logprobs, stop_reason, .. } => {
                report.tokens.push((sequence, id, logprobs));
                stop_reason.map(|reason| report.ends.insert(sequence, reason));
            }
            Event::Empty { sequence, .. } => _ = report.ends.insert(sequence, StopReason::MaxNewTokens),
            Event::Failed { error, .. } => report.error = Some(error.to_string()),
            other => panic!("{other:?}"),
        }
    }
}

fn alone(model: &Gpt2LMHeadModel, request: &Request) -> Report {
    let mut scheduler = scheduler(model, options(8, 4_000, 48));
    let id = scheduler.submit(request.clone()).unwrap();
    let mut report = BTreeMap::new();
    while !scheduler.is_idle() {
        step_and_record(&mut scheduler, &mut report);
    }
    assert_eq!(scheduler.kv_tokens_in_use(), 0);
    report.remove(&id).unwrap_or_default()
}

fn scored(prompt: Vec<u32>, config: GenerationConfig, reuse: u64) -> Request {
    let alternatives = Some(2);
    Request {
        logprobs: alternatives,
        prompt_logprobs: alternatives,
        reuse: Some(reuse),
        ..Request::new(prompt, config)
    }
}

/// Creates sixteen requests, greedy and sampled, whose prompts have a common prefix.
fn sixteen_requests() -> Vec<Request> {
    (0..16_u32)
        .map(|client| {
            let config = GenerationConfig {
                max_new_tokens: 9 + client as usize % 4,
                do_sample: client % 2 == 1,
                seed: client.into(),
                ..GenerationConfig::default()
            };
            let own = prompt(1 + client % 5, client);
            scored([prompt(13, 1), own].concat(), config, 7)
        })
        .collect()
}

/// One steered and one recorded sequence do not affect the other fourteen in a batch.
///
/// The fourteen get the same completions and log-probabilities as alone, and so does the steered one.
/// The test covers every weight dtype, with KV caches in f32 and q8.
#[test]
fn observers_do_not_affect_other_sequences() {
    let weights = WeightDType::all().filter(|dtype| dtype.on_cpu().is_ok());
    for (dtype, kv_dtype) in weights.flat_map(|dtype| [KvDType::F32, KvDType::Q8].map(|kv| (dtype, kv))) {
        let model = tiny_in(dtype).with_kv_dtype(kv_dtype);
        let requests = sixteen_requests();
        let plain: Vec<Report> = requests.iter().map(|request| alone(&model, request)).collect();
        let (steered_observer, recording_observer) = (steer(2.0), steer(0.0));
        let steered_alone = alone(&model, &observed(&requests[3], &steered_observer));
        assert_ne!(steered_alone.tokens, plain[3].tokens, "{dtype:?}: steering does something");
        alone(&model, &observed(&requests[8], &recording_observer));
        let seen_alone =
            [&steered_observer, &recording_observer].map(|observer| observer.lock().unwrap().seen.clone());
        for (max_texts, kv_tokens, chunk_tokens) in [(16, 2_000, 5), (5, 170, 48)] {
            let mut scheduler = scheduler(&model, options(max_texts, kv_tokens, chunk_tokens));
            let (steered_observer, recording_observer) = (steer(2.0), steer(0.0));
            let (mut ids, mut report) = (Vec::new(), BTreeMap::new());
            for (client, request) in requests.iter().enumerate() {
                let request = match client {
                    3 => observed(request, &steered_observer),
                    8 => observed(request, &recording_observer),
                    _ => request.clone(),
                };
                ids.push(scheduler.submit(request).unwrap());
                step_and_record(&mut scheduler, &mut report);
                assert!(scheduler.running() <= max_texts);
            }
            while !scheduler.is_idle() {
                step_and_record(&mut scheduler, &mut report);
            }
            assert_eq!(scheduler.kv_tokens_in_use(), 0);
            for (client, id) in ids.iter().enumerate() {
                let found = report[id].clone();
                if [3, 8].contains(&client) {
                    assert_eq!(found.cached, 0, "an observed sequence reuses no prefix");
                }
                let expected = if client == 3 { &steered_alone } else { &plain[client] };
                assert_eq!(
                    found.without_cached(),
                    expected.clone().without_cached(),
                    "{dtype:?}, {kv_dtype}: client {client}"
                );
            }
            let seen = [&steered_observer, &recording_observer]
                .map(|observer| observer.lock().unwrap().seen.clone());
            assert!(
                seen == seen_alone,
                "{dtype:?}, {kv_dtype}: the observed values equal those of a single run"
            );
        }
    }
}

/// A steered sequence's KV cache is never reused, and a steered sequence reuses no other cache.
#[test]
fn observed_prefixes_are_never_shared() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 6, ..GenerationConfig::default() };
    let request = scored(prompt(30, 1), config, 1);
    let (plain, steered) = (alone(&model, &request), alone(&model, &observed(&request, &steer(2.0))));
    let mut scheduler = scheduler(&model, options(4, 400, 48));
    let mut report = BTreeMap::new();
    let mut submit = |request: Request, steps: usize| {
        let id = scheduler.submit(request).unwrap();
        for _ in 0..steps {
            step_and_record(&mut scheduler, &mut report);
        }
        (id, scheduler.kv_tokens_kept())
    };
    let (first, _) = submit(observed(&request, &steer(2.0)), 3);
    // The steered sequence is still running here, and ends during the third request.
    let (second, _) = submit(request.clone(), 2);
    let (_, kept) = submit(observed(&request, &steer(2.0)), 8);
    assert_eq!(kept, 48, "only the second request's prefix is kept");
    let (fourth, _) = submit(request.clone(), 8);
    let (fifth, _) = submit(observed(&request, &steer(2.0)), 8);
    assert!(scheduler.is_idle());
    let cached = |id| report[&id].cached;
    assert_eq!([first, second, fourth, fifth].map(cached), [0, 0, 29, 0]);
    for (id, expected) in [(first, &steered), (second, &plain), (fourth, &plain), (fifth, &steered)] {
        assert_eq!(report[&id].clone().without_cached(), expected.clone().without_cached());
    }
}

/// Each sequence of a request has its own observer, even if nothing is generated.
///
/// An observer sees each token that is read exactly once.
#[test]
fn each_sequence_has_its_own_observer() {
    let model = tiny();
    for max_new_tokens in [0, 4] {
        let config = GenerationConfig {
            num_return_sequences: 3,
            do_sample: true,
            max_new_tokens,
            ..GenerationConfig::default()
        };
        let observers = [0.0, 0.0, 3.0].map(steer);
        let request = Request {
            observers: observers.iter().map(|observer| TextObserver::new(observer.clone())).collect(),
            ..Request::new(prompt(20, 2), config.clone())
        };
        let report = alone(&model, &request);
        assert_eq!(report.ends.len(), 3);
        let plain = alone(&model, &Request::new(prompt(20, 2), config));
        for (sequence, observer) in observers.iter().enumerate() {
            let ids_of = |report: &Report| -> Vec<u32> {
                report.tokens.iter().filter(|token| token.0 == sequence).map(|token| token.1).collect()
            };
            let is_same = ids_of(&report) == ids_of(&plain);
            assert!(is_same || sequence == 2, "{sequence}: observing has no effect");
            let seen = observer.lock().unwrap().seen.len();
            assert_eq!(seen, 20 + max_new_tokens.saturating_sub(1), "the last token is not read");
        }
    }
}

/// Observer that fails in the third pass.
struct Broken(usize);

impl Observer for Broken {
    fn wants(&self, site: Site) -> bool {
        site == SITE
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        self.0 += 1;
        if self.0 == 3 {
            bail!("a broken observer");
        }
        Ok(value)
    }
}

/// An observer that fails, during the prefill or later, ends only its own request.
#[test]
fn failing_observer_ends_only_its_own_request() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let good = scored(prompt(7, 1), config.clone(), 1);
    let expected = alone(&model, &good);
    for length in [5, 40] {
        let mut scheduler = scheduler(&model, options(8, 400, 10));
        let broken = TextObserver::new(Arc::new(Mutex::new(Broken(0))));
        let bad = Request { observers: vec![broken], ..Request::new(prompt(length, 2), config.clone()) };
        let ids = [good.clone(), bad, observed(&good, &steer(0.0)), good.clone()]
            .map(|request| scheduler.submit(request).unwrap());
        let mut report = BTreeMap::new();
        while !scheduler.is_idle() {
            step_and_record(&mut scheduler, &mut report);
        }
        assert!(report[&ids[1]].error.as_deref().unwrap().starts_with("a broken observer"));
        for id in [ids[0], ids[2], ids[3]] {
            assert_eq!(report[&id].clone().without_cached(), expected.clone().without_cached());
        }
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
    }
}

/// An observed sequence can be canceled in any state, and then frees its memory.
#[test]
fn observed_sequence_can_be_canceled_at_any_time() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    for steps in 0..8 {
        let mut scheduler = scheduler(&model, options(4, 400, 10));
        let id = scheduler.submit(observed(&scored(prompt(30, 1), config.clone(), 1), &steer(1.0))).unwrap();
        let mut texts = Completions::new();
        for _ in 0..steps {
            super::scheduler::collect(&mut texts, scheduler.step().into_result().unwrap());
        }
        assert!(scheduler.cancel(id) && scheduler.is_idle(), "after {steps} steps");
        assert_eq!((scheduler.kv_tokens_in_use(), scheduler.kv_tokens_kept()), (0, 0));
        run(&mut scheduler, &mut texts);
    }
}

/// Observer that also records the last block whose hook points were queried.
struct Reach {
    steer: Steer,
    furthest: AtomicUsize,
}

impl Observer for Reach {
    fn wants(&self, site: Site) -> bool {
        self.furthest.fetch_max(site.layer.unwrap_or(0), Ordering::Relaxed);
        self.steer.wants(site)
    }

    fn observe(&mut self, site: Site, value: Tensor) -> candle_core::Result<Tensor> {
        self.steer.observe(site, value)
    }
}

/// The prefill of an observe-only prompt stops at the requested block, in each chunk.
///
/// Up to that block, the results are bit-identical to the results of a full pass.
#[test]
fn observed_prompt_stops_at_the_requested_block() {
    let model = tiny();
    let last = model.config().n_layer - 1;
    let config = GenerationConfig { max_new_tokens: 0, ..GenerationConfig::default() };
    let seen = |stop_at_layer: Option<usize>| {
        let steer = Steer { scale: 0.0, seen: Vec::new() };
        let reach = Arc::new(Mutex::new(Reach { steer, furthest: AtomicUsize::new(0) }));
        let observers = vec![TextObserver::new(reach.clone())];
        let mut scheduler = scheduler(&model, options(4, 400, 7));
        let request = Request::new(prompt(30, 1), config.clone());
        let id = scheduler.submit(Request { observers, stop_at_layer, ..request }).unwrap();
        let mut report = BTreeMap::new();
        while !scheduler.is_idle() {
            step_and_record(&mut scheduler, &mut report);
        }
        assert_eq!(report[&id].ends, BTreeMap::from([(0, StopReason::MaxNewTokens)]));
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
        let reach = reach.lock().unwrap();
        (reach.steer.seen.clone(), reach.furthest.load(Ordering::Relaxed))
    };
    let (whole, furthest) = seen(None);
    assert_eq!((whole.len(), furthest), (30, last));
    assert!(last > 1, "at least one block can be skipped");
    for stop in 1..=last + 1 {
        assert_eq!(seen(Some(stop)), (whole.clone(), stop.min(last)), "{stop}");
    }
    assert_eq!(seen(Some(0)).1, 1, "one block is computed");
    let mut scheduler = scheduler(&model, options(4, 400, 7));
    for (max_new_tokens, stop, expected) in [
        (
            0,
            last + 2,
            format!(
                "`stop_at_layer`: expected at most {}, the model's number of blocks, found {}",
                last + 1,
                last + 2
            ),
        ),
        (1, 1, "passes that stop at a block have no logits".into()),
    ] {
        let config = GenerationConfig { max_new_tokens, ..config.clone() };
        let request = Request { stop_at_layer: Some(stop), ..Request::new(prompt(3, 1), config) };
        let error = scheduler.submit(request).unwrap_err();
        assert!(error.is_usage() && error.to_string().starts_with(&expected), "{error}");
    }
}

/// Requests that cannot have observers are rejected before any computation.
#[test]
fn unobservable_requests_are_rejected() {
    let model = tiny();
    let mut scheduler = scheduler(&model, options(4, 400, 10));
    let config = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    let rejection = |scheduler: &mut Scheduler<&Tokenizer>, config: GenerationConfig| {
        let request = observed(&Request::new(prompt(5, 1), config), &steer(1.0));
        scheduler.submit(request).unwrap_err()
    };
    let two = GenerationConfig { num_return_sequences: 2, do_sample: true, ..config.clone() };
    let error = rejection(&mut scheduler, two);
    assert!(error.is_usage());
    assert_eq!(error.to_string(), "`observers`: expected 0 or 2, one for each completion, found 1");
    for (config, expected) in [
        (
            GenerationConfig { num_beams: 3, ..config.clone() },
            "observers work only when decoding token by token",
        ),
        (
            GenerationConfig { when_full: WhenFull::Slide { head: 0 }, ..config },
            "an observed completion cannot slide",
        ),
    ] {
        let error = rejection(&mut scheduler, config);
        assert!(matches!(error, GenerationError::Conflict { .. }) && error.to_string().starts_with(expected));
    }
    assert!(scheduler.is_idle());
}
