//! Requests with observers: what they see and change is their own text's, and nobody else's.

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

use super::scheduler::{Texts, options, prompt, run, scheduler, tiny, tiny_in};

/// Adds a multiple of one direction to the input of a block, and keeps what is there then, token by token.
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

/// The same request with this observer.
fn observed(request: &Request, observer: &Arc<Mutex<Steer>>) -> Request {
    Request { observers: vec![TextObserver::new(observer.clone())], ..request.clone() }
}

/// All that is told of a request, and how many of its tokens were there.
#[derive(Debug, Clone, PartialEq, Default)]
struct Told {
    cached: usize,
    prompt: Vec<Option<TokenLogprobs>>,
    tokens: Vec<(usize, u32, Option<TokenLogprobs>)>,
    ends: BTreeMap<usize, StopReason>,
    error: Option<String>,
}

impl Told {
    /// What does not depend on the company.
    fn text(self) -> Self {
        Self { cached: 0, ..self }
    }
}

fn listen(scheduler: &mut Scheduler<&Tokenizer>, told: &mut BTreeMap<RequestId, Told>) {
    for event in scheduler.step().into_result().unwrap() {
        let told = told.entry(event.request()).or_default();
        match event {
            Event::Begun { cached_tokens, prompt, .. } => {
                (told.cached, told.prompt) = (cached_tokens, prompt);
            }
            Event::Token { sequence, id, logprobs, stop_reason, .. } => {
                told.tokens.push((sequence, id, logprobs));
                stop_reason.map(|reason| told.ends.insert(sequence, reason));
            }
            Event::Empty { sequence, .. } => _ = told.ends.insert(sequence, StopReason::MaxNewTokens),
            Event::Failed { error, .. } => told.error = Some(error.to_string()),
            other => panic!("{other:?}"),
        }
    }
}

fn alone(model: &Gpt2LMHeadModel, request: &Request) -> Told {
    let mut scheduler = scheduler(model, options(8, 4_000, 48));
    let id = scheduler.submit(request.clone()).unwrap();
    let mut told = BTreeMap::new();
    while !scheduler.is_idle() {
        listen(&mut scheduler, &mut told);
    }
    assert_eq!(scheduler.kv_tokens_in_use(), 0);
    told.remove(&id).unwrap_or_default()
}

fn scored(prompt: Vec<u32>, config: GenerationConfig, reuse: u64) -> Request {
    let asked = Some(2);
    Request { logprobs: asked, prompt_logprobs: asked, reuse: Some(reuse), ..Request::new(prompt, config) }
}

/// Sixteen clients, greedy and drawn, whose prompts begin alike.
fn sixteen() -> Vec<Request> {
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

/// Sixteen clients, one steered and one recorded, in every type of weights and of the cache: the other fourteen get the texts and
/// the numbers that they get alone, and the steered one what the same request gets alone.
#[test]
fn who_is_not_observed_notices_nothing() {
    let weights = WeightDType::ALL.into_iter().filter(|dtype| dtype.on_cpu().is_ok());
    for (dtype, kv_dtype) in weights.flat_map(|dtype| [KvDType::F32, KvDType::Q8].map(|kv| (dtype, kv))) {
        let model = tiny_in(dtype).with_kv_dtype(kv_dtype);
        let requests = sixteen();
        let plain: Vec<Told> = requests.iter().map(|request| alone(&model, request)).collect();
        let (of_steered, of_recorded) = (steer(2.0), steer(0.0));
        let steered_alone = alone(&model, &observed(&requests[3], &of_steered));
        assert_ne!(steered_alone.tokens, plain[3].tokens, "{dtype:?}: steering does something");
        alone(&model, &observed(&requests[8], &of_recorded));
        let seen_alone = [&of_steered, &of_recorded].map(|of| of.lock().unwrap().seen.clone());
        for (max_texts, kv_tokens, chunk_tokens) in [(16, 2_000, 5), (5, 170, 48)] {
            let mut scheduler = scheduler(&model, options(max_texts, kv_tokens, chunk_tokens));
            let (of_steered, of_recorded) = (steer(2.0), steer(0.0));
            let (mut ids, mut told) = (Vec::new(), BTreeMap::new());
            for (client, request) in requests.iter().enumerate() {
                let request = match client {
                    3 => observed(request, &of_steered),
                    8 => observed(request, &of_recorded),
                    _ => request.clone(),
                };
                ids.push(scheduler.submit(request).unwrap());
                listen(&mut scheduler, &mut told);
                assert!(scheduler.running() <= max_texts);
            }
            while !scheduler.is_idle() {
                listen(&mut scheduler, &mut told);
            }
            assert_eq!(scheduler.kv_tokens_in_use(), 0);
            for (client, id) in ids.iter().enumerate() {
                let found = told[id].clone();
                if [3, 8].contains(&client) {
                    assert_eq!(found.cached, 0, "an observed text goes on from nothing");
                }
                let expected = if client == 3 { &steered_alone } else { &plain[client] };
                assert_eq!(found.text(), expected.clone().text(), "{dtype:?}, {kv_dtype}: client {client}");
            }
            let seen = [&of_steered, &of_recorded].map(|of| of.lock().unwrap().seen.clone());
            assert!(seen == seen_alone, "{dtype:?}, {kv_dtype}: what is seen is what is seen alone");
        }
    }
}

/// What a steered text leaves in the cache is given to nobody, neither while it runs nor later, nor does it go on from others.
#[test]
fn beginnings_of_observed_texts_are_shared_with_nobody() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 6, ..GenerationConfig::default() };
    let request = scored(prompt(30, 1), config, 1);
    let (plain, steered) = (alone(&model, &request), alone(&model, &observed(&request, &steer(2.0))));
    let mut scheduler = scheduler(&model, options(4, 400, 48));
    let mut told = BTreeMap::new();
    let mut ask = |request: Request, steps: usize| {
        let id = scheduler.submit(request).unwrap();
        for _ in 0..steps {
            listen(&mut scheduler, &mut told);
        }
        (id, scheduler.kv_tokens_kept())
    };
    let (first, _) = ask(observed(&request, &steer(2.0)), 3);
    // The steered one still runs, and has ended with the next.
    let (second, _) = ask(request.clone(), 2);
    let (_, kept) = ask(observed(&request, &steer(2.0)), 8);
    assert_eq!(kept, 48, "what the second one left, and that alone");
    let (fourth, _) = ask(request.clone(), 8);
    let (fifth, _) = ask(observed(&request, &steer(2.0)), 8);
    assert!(scheduler.is_idle());
    let cached = |id| told[&id].cached;
    assert_eq!([first, second, fourth, fifth].map(cached), [0, 0, 29, 0]);
    for (id, expected) in [(first, &steered), (second, &plain), (fourth, &plain), (fifth, &steered)] {
        assert_eq!(told[&id].clone().text(), expected.clone().text());
    }
}

/// Each text of a request has its own observer, also where nothing is generated; an observer sees each token that is read once.
#[test]
fn each_text_of_a_request_has_its_observer() {
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
            observers: observers.iter().map(|of| TextObserver::new(of.clone())).collect(),
            ..Request::new(prompt(20, 2), config.clone())
        };
        let told = alone(&model, &request);
        assert_eq!(told.ends.len(), 3);
        let plain = alone(&model, &Request::new(prompt(20, 2), config));
        for (sequence, observer) in observers.iter().enumerate() {
            let of = |told: &Told| -> Vec<u32> {
                told.tokens.iter().filter(|token| token.0 == sequence).map(|token| token.1).collect()
            };
            let is_same = of(&told) == of(&plain);
            assert!(is_same || sequence == 2, "{sequence}: looking on changes nothing");
            let seen = observer.lock().unwrap().seen.len();
            assert_eq!(seen, 20 + max_new_tokens.saturating_sub(1), "the last token is not read");
        }
    }
}

/// Fails at the third pass.
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

/// An observer that fails, at the prompt or later, ends its own request.
#[test]
fn an_observer_that_fails_ends_its_own_request() {
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
        let mut told = BTreeMap::new();
        while !scheduler.is_idle() {
            listen(&mut scheduler, &mut told);
        }
        assert!(told[&ids[1]].error.as_deref().unwrap().starts_with("a broken observer"));
        for id in [ids[0], ids[2], ids[3]] {
            assert_eq!(told[&id].clone().text(), expected.clone().text());
        }
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
    }
}

/// A cancelled text gives its room back, whatever it was doing.
#[test]
fn an_observed_text_is_cancelled_at_any_time() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    for steps in 0..8 {
        let mut scheduler = scheduler(&model, options(4, 400, 10));
        let id = scheduler.submit(observed(&scored(prompt(30, 1), config.clone(), 1), &steer(1.0))).unwrap();
        let mut texts = Texts::new();
        for _ in 0..steps {
            super::scheduler::collect(&mut texts, scheduler.step().into_result().unwrap());
        }
        assert!(scheduler.cancel(id) && scheduler.is_idle(), "after {steps} steps");
        assert_eq!((scheduler.kv_tokens_in_use(), scheduler.kv_tokens_kept()), (0, 0));
        run(&mut scheduler, &mut texts);
    }
}

/// What a text sees, and the last block that asks for it.
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

/// A prompt that is only observed stops at a block, chunk by chunk: up to there each bit is the same.
#[test]
fn a_prompt_that_is_only_observed_stops_at_a_block() {
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
        let mut told = BTreeMap::new();
        while !scheduler.is_idle() {
            listen(&mut scheduler, &mut told);
        }
        assert_eq!(told[&id].ends, BTreeMap::from([(0, StopReason::MaxNewTokens)]));
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
        let reach = reach.lock().unwrap();
        (reach.steer.seen.clone(), reach.furthest.load(Ordering::Relaxed))
    };
    let (whole, furthest) = seen(None);
    assert_eq!((whole.len(), furthest), (30, last));
    assert!(last > 1, "there is a block to leave out");
    for stop in 1..=last + 1 {
        assert_eq!(seen(Some(stop)), (whole.clone(), stop.min(last)), "{stop}");
    }
    assert_eq!(seen(Some(0)).1, 1, "one block is computed");
    let mut scheduler = scheduler(&model, options(4, 400, 7));
    for (max_new_tokens, stop, expected) in [
        (
            0,
            last + 2,
            format!("`stop_at_layer`: expected at most {}, the model's blocks, found {}", last + 1, last + 2),
        ),
        (1, 1, "passes that stop at a block have no logits".into()),
    ] {
        let config = GenerationConfig { max_new_tokens, ..config.clone() };
        let request = Request { stop_at_layer: Some(stop), ..Request::new(prompt(3, 1), config) };
        let error = scheduler.submit(request).unwrap_err();
        assert!(error.is_usage() && error.to_string().starts_with(&expected), "{error}");
    }
}

/// What has no observers is refused before any work.
#[test]
fn requests_whose_texts_cannot_be_observed_are_refused() {
    let model = tiny();
    let mut scheduler = scheduler(&model, options(4, 400, 10));
    let config = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    let refused = |scheduler: &mut Scheduler<&Tokenizer>, config: GenerationConfig| {
        let request = observed(&Request::new(prompt(5, 1), config), &steer(1.0));
        scheduler.submit(request).unwrap_err()
    };
    let two = GenerationConfig { num_return_sequences: 2, do_sample: true, ..config.clone() };
    let told = refused(&mut scheduler, two);
    assert!(told.is_usage());
    assert_eq!(
        told.to_string(),
        "`observers`: expected one for each of the request's texts, 2, or none, found 1"
    );
    for (config, expected) in [
        (
            GenerationConfig { num_beams: 3, ..config.clone() },
            "texts are observed that are made token by token",
        ),
        (
            GenerationConfig { when_full: WhenFull::Slide { head: 0 }, ..config },
            "an observed text ends when the context is full",
        ),
    ] {
        let told = refused(&mut scheduler, config);
        assert!(matches!(told, GenerationError::Conflict { .. }) && told.to_string().starts_with(expected));
    }
    assert!(scheduler.is_idle());
}
