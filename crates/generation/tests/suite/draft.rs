//! Tests that drafts change only the number of passes, never the completion.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    Drafts, Event, GenerationConfig, GenerationError, LogitsProcessor, Request, RequestId, Scheduler,
    SchedulerOptions, StopReason, TokenGenerator,
};
use candle_gpt2_testing::CheckpointFolder;
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, WeightDType};
use candle_nn::VarBuilder;
use serde_json::json;

use super::scheduler::{
    Completion, Completions, alone, collect, options, prompt, requests, run, scheduler, tiny,
};

/// Creates a scheduler for which drafts pay off, as with a large model.
fn eager(model: &Gpt2LMHeadModel, options: SchedulerOptions) -> Scheduler<&'static Tokenizer> {
    let mut scheduler = scheduler(model, options);
    scheduler.set_token_cost(0.02);
    scheduler
}

/// Returns the request with prompt lookup enabled.
fn with_prompt_lookup(request: &Request) -> Request {
    let config =
        GenerationConfig { prompt_lookup_num_tokens: Some(5), ..GenerationConfig::clone(&request.config) };
    Request::new(request.prompt.clone(), config)
}

/// Returns requests with repetitive prompts, and the requests from the scheduler tests.
fn all_requests(ends: &[u32]) -> Vec<Request> {
    let mut requests = requests(ends);
    let repeated = |length: u32| prompt(length, 7).into_iter().cycle().take(30).collect::<Vec<_>>();
    for length in [2, 5, 11] {
        let config = GenerationConfig { max_new_tokens: 17, ..GenerationConfig::default() };
        let sampled = GenerationConfig { do_sample: true, top_k: 3, temperature: 0.5, ..config.clone() };
        requests.extend([config, sampled].map(|config| Request::new(repeated(length), config)));
    }
    requests
}

/// A completion with drafts equals the completion without, alone and in a batch, in f32 and q8.
///
/// Drafts come from prompt lookup, and from assistants that are often, seldom or never right.
#[test]
fn drafts_do_not_change_completions() {
    for dtype in [WeightDType::F32, WeightDType::Q8] {
        let model = deep(4, dtype);
        let ends = alone(&model, &requests(&[])[0]).ids[5..6].to_vec();
        let requests = all_requests(&ends);
        let expected: Vec<Completion> = requests.iter().map(|request| alone(&model, request)).collect();
        for reason in [StopReason::Eos, StopReason::MaxNewTokens, StopReason::Context] {
            assert!(expected.iter().any(|text| text.reason == Some(reason)), "{reason:?} is among them");
        }
        let assistants = [None, Some(deep(1, dtype)), Some(deep(0, WeightDType::Q4)), Some(uniform_model())];
        for (max_texts, kv_tokens) in [(1, 48), (3, 200), (20, 2_000)] {
            for (number, assistant) in assistants.iter().enumerate() {
                let mut scheduler = eager(&model, options(max_texts, kv_tokens, 11));
                if let Some(assistant) = assistant {
                    scheduler.set_assistant(assistant).unwrap();
                }
                let submitted: Vec<Request> = match assistant {
                    Some(_) => requests.clone(),
                    None => requests.iter().map(with_prompt_lookup).collect(),
                };
                let ids: Vec<_> =
                    submitted.into_iter().map(|request| scheduler.submit(request).unwrap()).collect();
                let mut texts = Completions::new();
                run(&mut scheduler, &mut texts);
                for (request, (id, expected)) in ids.iter().zip(&expected).enumerate() {
                    let found = &texts[&(*id, 0)];
                    assert_eq!(
                        found, expected,
                        "{dtype}, {max_texts} texts, assistant {number}, request {request}"
                    );
                }
                assert_eq!(scheduler.kv_tokens_in_use(), 0);
            }
        }
    }
}

/// Loads a model with `n_layer` layers, of which all but the first change little.
///
/// The same model with fewer layers is therefore a good assistant.
fn deep(n_layer: usize, dtype: WeightDType) -> Gpt2LMHeadModel {
    deep_with_context(n_layer, dtype, 48)
}

/// Loads the same model as [`deep`], with a context of `n_positions`.
fn deep_with_context(n_layer: usize, dtype: WeightDType, n_positions: usize) -> Gpt2LMHeadModel {
    const C: usize = 64;
    let sizes = json!({"n_embd": C, "n_inner": 4 * C, "n_layer": n_layer.max(1), "n_positions": n_positions, "n_ctx": n_positions});
    let folder = CheckpointFolder::tiny().with_config(sizes).with_tensors(|tensors| {
        let mut shapes =
            vec![("wte.weight".to_owned(), vec![300, C]), ("wpe.weight".into(), vec![n_positions, C])];
        for layer in 0..n_layer.max(1) {
            let mut add_shape =
                |name: &str, shape: &[usize]| shapes.push((format!("h.{layer}.{name}"), shape.to_vec()));
            for (name, inputs, outputs) in [
                ("attn.c_attn", C, 3 * C),
                ("attn.c_proj", C, C),
                ("mlp.c_fc", C, 4 * C),
                ("mlp.c_proj", 4 * C, C),
            ] {
                add_shape(&format!("{name}.weight"), &[inputs, outputs]);
                add_shape(&format!("{name}.bias"), &[outputs]);
            }
            ["ln_1", "ln_2"].iter().for_each(|norm| {
                add_shape(&format!("{norm}.weight"), &[C]);
                add_shape(&format!("{norm}.bias"), &[C]);
            });
        }
        shapes.extend([("ln_f.weight".to_owned(), vec![C]), ("ln_f.bias".into(), vec![C])]);
        tensors.clear();
        for (index, (name, shape)) in shapes.into_iter().enumerate() {
            let is_norm = name.contains("ln_") && name.ends_with("weight");
            let is_first = name.starts_with("w") || name.starts_with("h.0.");
            let scale = if is_first { 0.5 } else { 0.02 };
            let mut random = RandomStream::with_stream(1, index as u64);
            let count = shape.iter().product();
            let values = (0..count).map(|_| (random.uniform() - 0.5) * 2.0 * scale).collect::<Vec<f64>>();
            let values = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
            // Without layers, load a single block of zeros, which changes nothing.
            let values =
                if n_layer == 0 && name.starts_with("h.") { (values * 0.0).unwrap() } else { values };
            let values = if is_norm { values.ones_like().unwrap() } else { values };
            tensors.insert(format!("transformer.{name}"), values);
        }
    });
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    Checkpoint::open(folder.path()).unwrap().load(&options, &|_| ()).unwrap()
}

/// An assistant drafts up to the end of its context, and nothing after a prompt that exceeds it.
///
/// The assistant reads a long prompt in pieces that do not exceed a chunk.
#[test]
fn assistant_drafts_only_within_its_context() {
    let (model, assistant) = (deep(4, WeightDType::F32), deep_with_context(1, WeightDType::F32, 20));
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let sampled = GenerationConfig { do_sample: true, seed: 2, ..config.clone() };
    let mut requests = Vec::new();
    for length in [1, 3, 15, 18, 19, 20, 21, 30, 40] {
        requests
            .extend([&config, &sampled].map(|config| Request::new(prompt(length, length), config.clone())));
    }
    let stopped = GenerationConfig { max_new_tokens: 40, ..config };
    requests.push(Request::new(prompt(2, 1), stopped));
    let expected: Vec<Completion> = requests.iter().map(|request| alone(&model, request)).collect();
    for (max_texts, chunk_tokens) in [(1, 4), (3, 4), (30, 100)] {
        let mut scheduler = eager(&model, options(max_texts, 2_000, chunk_tokens));
        scheduler.set_assistant(&assistant).unwrap();
        let ids: Vec<_> = requests.iter().map(|request| scheduler.submit(request.clone()).unwrap()).collect();
        let (mut texts, mut drafted) = (Completions::new(), HashMap::new());
        while !scheduler.is_idle() {
            let events = scheduler.step().into_result().unwrap();
            for event in &events {
                if let Event::Token { request, drafts, .. } = event {
                    assert!(drafts.accepted <= drafts.drafted);
                    drafted.insert(*request, *drafts);
                }
            }
            collect(&mut texts, events);
        }
        for (index, (id, expected)) in ids.iter().zip(&expected).enumerate() {
            assert_eq!(&texts[&(*id, 0)], expected, "{max_texts} texts, request {index}");
            let can_draft = requests[index].prompt.len() < 15;
            assert!(drafted[id].accepted > 0 || !can_draft || max_texts > 1, "request {index}");
            assert!(drafted[id].drafted == 0 || requests[index].prompt.len() < 20, "request {index}");
        }
    }
}

/// Loads a small model with the same vocabulary, in which all tokens are equally likely.
fn uniform_model() -> Gpt2LMHeadModel {
    let json = r#"{"model_type": "gpt2", "vocab_size": 300, "n_positions": 48, "n_embd": 8, "n_layer": 1, "n_head": 2}"#;
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    Gpt2LMHeadModel::load(&Gpt2Config::from_json(json).unwrap(), vb).unwrap()
}

/// Returns a completion's number of steps and tokens, and its draft statistics.
fn count_steps(
    model: &Gpt2LMHeadModel,
    assistant: Option<&Gpt2LMHeadModel>,
    request: Request,
) -> (usize, usize, Drafts) {
    let mut scheduler = eager(model, options(1, 64, 64));
    assistant.map_or(Ok(()), |assistant| scheduler.set_assistant(assistant)).unwrap();
    scheduler.submit(request).unwrap();
    let (mut steps, mut tokens, mut last) = (0, 0, Drafts::default());
    while !scheduler.is_idle() {
        steps += 1;
        for event in scheduler.step().into_result().unwrap() {
            if let Event::Token { drafts, .. } = event {
                (tokens, last) = (tokens + 1, drafts);
            }
        }
    }
    (steps, tokens, last)
}

#[test]
fn accepted_drafts_save_passes() {
    let model = deep(4, WeightDType::F32);
    let config = GenerationConfig { max_new_tokens: 33, ..GenerationConfig::default() };
    let request = || Request::new(prompt(3, 1), config.clone());
    assert_eq!(count_steps(&model, None, request()), (33, 33, Drafts::default()));
    let (passes, tokens, drafts) = count_steps(&model, Some(&deep(1, WeightDType::F32)), request());
    assert_eq!((tokens, passes), (33, 33 - drafts.accepted));
    assert!(drafts.accepted > 10 && drafts.accepted <= drafts.drafted, "{passes} passes, {drafts:?}");
    // If the completion continues the repetition in the prompt, every draft from prompt lookup is accepted.
    let repeated =
        Request::new([5, 9, 70].repeat(10), GenerationConfig { max_new_tokens: 18, ..config.clone() });
    let processors = LogitsProcessor::of_config(&GenerationConfig {
        sequence_bias: vec![(vec![5, 9], 1e4), (vec![9, 70], 1e4), (vec![70, 5], 1e4)],
        ..GenerationConfig::default()
    });
    let (passes, tokens, drafts) =
        count_steps(&model, None, Request { processors, ..with_prompt_lookup(&repeated) });
    assert_eq!(
        (tokens, passes, drafts.accepted),
        (18, 18 - drafts.accepted, drafts.drafted),
        "every draft is accepted"
    );
    assert!(drafts.drafted >= 10, "{passes} passes, {drafts:?}");
    // A useless assistant drafts less and less.
    let (passes, tokens, drafts) = count_steps(&model, Some(&uniform_model()), request());
    assert_eq!(tokens, 33);
    assert!(drafts.accepted <= 2 && drafts.drafted < 20, "{passes} passes, {drafts:?}");
}

/// Creates a request whose tokens follow each other in a cycle, regardless of the model.
fn cyclic_request(max_new_tokens: usize) -> Request {
    let processors = LogitsProcessor::of_config(&GenerationConfig {
        sequence_bias: vec![(vec![5, 9], 1e4), (vec![9, 70], 1e4), (vec![70, 5], 1e4)],
        ..GenerationConfig::default()
    });
    let config =
        GenerationConfig { prompt_lookup_num_tokens: Some(5), max_new_tokens, ..GenerationConfig::default() };
    Request { processors, ..Request::new([5, 9, 70].repeat(8), config) }
}

/// Sequences without capacity for a draft do not prevent drafts for others.
///
/// They lack capacity because their next token is the last, or because the context ends. They read one
/// token in each step, as they would alone.
#[test]
fn rows_without_capacity_do_not_block_other_drafts() {
    let model = deep(4, WeightDType::F32);
    let alone_for = {
        let (passes, tokens, drafts) = count_steps(&model, None, cyclic_request(20));
        assert_eq!((tokens, passes), (20, 20 - drafts.accepted));
        assert!(drafts.accepted >= 12, "{drafts:?}");
        passes
    };
    let mut scheduler = eager(&model, options(3, 400, 64));
    let long = scheduler.submit(cyclic_request(20)).unwrap();
    // These sequences have two new tokens. After the first one, only the last is left, so they never have
    // capacity for a draft.
    let others: Vec<(RequestId, Request)> = (0..30)
        .map(|seed| {
            let config = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
            let request = Request::new(prompt(46, seed), config);
            (scheduler.submit(request.clone()).unwrap(), request)
        })
        .collect();
    let (mut texts, mut steps_of_long) = (Completions::new(), 0);
    while !scheduler.is_idle() {
        let events = scheduler.step().into_result().unwrap();
        steps_of_long += usize::from(events.iter().any(|event| event.request() == long));
        collect(&mut texts, events);
    }
    assert_eq!(texts[&(long, 0)].ids, alone(&model, &cyclic_request(20)).ids);
    assert!(steps_of_long <= alone_for, "{steps_of_long} steps in a batch, {alone_for} alone");
    for (id, request) in others {
        assert_eq!(texts[&(id, 0)], alone(&model, &request));
    }
}

/// A model that fits into the processor's caches wastes few passes on rejected drafts.
#[test]
fn small_model_stops_rejected_drafts_early() {
    let model = deep(4, WeightDType::F32);
    let config = GenerationConfig {
        prompt_lookup_num_tokens: Some(10),
        // These biases make the completion depart from the prompt's cycle again and again.
        sequence_bias: vec![(vec![5, 9], -1e4), (vec![9, 70], -1e4), (vec![70, 5], -1e4)],
        max_new_tokens: 24,
        ..GenerationConfig::default()
    };
    let mut scheduler = scheduler(&model, options(1, 64, 64));
    scheduler.submit(Request::new([5, 9, 70].repeat(8), config)).unwrap();
    let mut last = Drafts::default();
    while !scheduler.is_idle() {
        for event in scheduler.step().into_result().unwrap() {
            if let Event::Token { drafts, .. } = event {
                last = drafts;
            }
        }
    }
    assert!(last.drafted - last.accepted <= 4, "{last:?}");
}

/// In a batch, a small model gets no drafts, even if they would be accepted.
#[test]
fn small_model_gets_no_drafts_in_a_batch() {
    let model = deep(4, WeightDType::F32);
    let mut scheduler = scheduler(&model, options(2, 200, 64));
    let ids = [(); 2].map(|()| scheduler.submit(cyclic_request(20)).unwrap());
    let (mut texts, mut drafted) = (Completions::new(), 0);
    while !scheduler.is_idle() {
        let events = scheduler.step().into_result().unwrap();
        for event in &events {
            if let Event::Token { drafts, .. } = event {
                drafted += drafts.drafted;
            }
        }
        collect(&mut texts, events);
    }
    assert_eq!(drafted, 0);
    assert!(ids.iter().all(|id| texts[&(*id, 0)].ids == alone(&model, &cyclic_request(20)).ids));
}

/// Sampled completions with drafts follow the distribution of the model.
///
/// Pearson's chi-squared test covers the 27 completions of three tokens with three choices each. An
/// assistant drafts the second and third token.
#[test]
fn sampling_with_drafts_follows_the_model_distribution() {
    const SAMPLES: usize = 100_352;
    const SEQUENCES: usize = 3_584;
    let (model, assistant) = (deep(4, WeightDType::F32), deep(1, WeightDType::F32));
    let config = |seed| GenerationConfig {
        do_sample: true,
        top_k: 3,
        temperature: 1.5,
        max_new_tokens: 3,
        num_return_sequences: SEQUENCES,
        seed,
        ..GenerationConfig::default()
    };
    let prompt = prompt(5, 2);
    // Probability of each completion of three tokens under the model.
    let mut expected: HashMap<Vec<u32>, f64> = HashMap::from([(Vec::new(), 1.0)]);
    for _ in 0..3 {
        let mut longer = HashMap::new();
        for (text, probability) in expected {
            for (id, conditional) in probabilities(&model, &[&prompt[..], &text].concat()) {
                longer.insert([&text[..], &[id]].concat(), probability * conditional);
            }
        }
        expected = longer;
    }
    assert_eq!(expected.len(), 27);
    let mut counts: HashMap<Vec<u32>, usize> = HashMap::new();
    let mut accepted = 0;
    for seed in 0..SAMPLES / SEQUENCES {
        let mut scheduler = eager(&model, options(2, 2 * 16, 64));
        scheduler.set_assistant(&assistant).unwrap();
        let id = scheduler.submit(Request::new(prompt.clone(), config(seed as u64))).unwrap();
        let mut texts = Completions::new();
        while !scheduler.is_idle() {
            let events = scheduler.step().into_result().unwrap();
            for event in &events {
                if let Event::Token { drafts, .. } = event {
                    accepted = accepted.max(drafts.accepted);
                }
            }
            collect(&mut texts, events);
        }
        for sequence in 0..SEQUENCES {
            *counts.entry(texts[&(id, sequence)].ids.clone()).or_default() += 1;
        }
    }
    assert!(accepted >= 1, "some drafted tokens were accepted");
    let term = |(text, probability): (&Vec<u32>, &f64)| {
        let expected = probability * SAMPLES as f64;
        let found = counts.get(text).copied().unwrap_or(0) as f64;
        (found - expected).powi(2) / expected
    };
    let chi_square: f64 = expected.iter().map(term).sum();
    assert_eq!(counts.values().sum::<usize>(), SAMPLES);
    assert!(counts.keys().all(|text| expected.contains_key(text)));
    // With 26 degrees of freedom, one value in ten thousand exceeds 61.
    assert!(chi_square < 61.0, "{chi_square}");
}

/// Returns the three tokens that may come next, with their probabilities.
fn probabilities(model: &Gpt2LMHeadModel, ids: &[u32]) -> Vec<(u32, f64)> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits = model.forward_with(&ids, LogitsFor::LastToken, None, &mut Pass::inference()).unwrap();
    let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let weights: Vec<f64> = order[..3].iter().map(|id| (f64::from(logits[*id]) / 1.5).exp()).collect();
    let sum: f64 = weights.iter().sum();
    order.into_iter().zip(weights).map(|(id, weight)| (u32::try_from(id).unwrap(), weight / sum)).collect()
}

#[test]
fn assistant_with_another_vocabulary_is_rejected() {
    let model = tiny();
    let json = r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#;
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let other = Gpt2LMHeadModel::load(&Gpt2Config::from_json(json).unwrap(), vb).unwrap();
    let config = GenerationConfig::default();
    let text =
        TokenGenerator::<&Tokenizer>::of_request(&model, Request::new(prompt(3, 1), config.clone()), None);
    let error = text.unwrap().with_assistant(&other).err().unwrap();
    assert!(
        matches!(error, GenerationError::AssistantVocabulary { found: 11, .. }) && error.is_usage(),
        "{error}"
    );
    let searched = GenerationConfig { num_beams: 2, prompt_lookup_num_tokens: Some(3), ..config };
    assert!(searched.check().unwrap_err().to_string().contains("prompt_lookup_num_tokens"));
}
