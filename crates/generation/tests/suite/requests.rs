//! What a request may ask for besides its text: how probable tokens are, what others computed, what a text conforms to.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    Constraint, Event, GenerationConfig, GenerationError, LogitsProcessor, Request, Scheduler, StopReason,
    TokenLogprobs, beam_search, score,
};
use candle_gpt2_weights::{Tokenizer, WeightDType};

use super::scheduler::{options, prompt, scheduler, tiny, tiny_in};

/// All that is told of a request's texts.
#[derive(Debug, Clone, PartialEq, Default)]
struct Told {
    prompt: Vec<Option<TokenLogprobs>>,
    ids: BTreeMap<usize, Vec<u32>>,
    logprobs: BTreeMap<usize, Vec<Option<TokenLogprobs>>>,
    reasons: BTreeMap<usize, StopReason>,
}

/// What each request is told, in their order, and how many tokens of its prompt were there.
fn listen(scheduler: &mut Scheduler<&Tokenizer>, told: &mut BTreeMap<u64, (Told, usize)>) {
    for event in scheduler.step().into_result().unwrap() {
        let (told, cached) = told.entry(event.request().0).or_default();
        match event {
            Event::Begun { cached_tokens, prompt, .. } => {
                assert_eq!((*cached, told.prompt.len(), told.ids.len()), (0, 0, 0), "once, and first");
                (told.prompt, *cached) = (prompt, cached_tokens);
            }
            Event::Token { sequence, id, logprobs, stop_reason, .. } => {
                told.ids.entry(sequence).or_default().push(id);
                told.logprobs.entry(sequence).or_default().push(logprobs);
                stop_reason.map(|reason| told.reasons.insert(sequence, reason));
            }
            Event::Empty { sequence, .. } => _ = told.reasons.insert(sequence, StopReason::MaxNewTokens),
            other => panic!("{other:?}"),
        }
    }
}

fn alone(model: &Gpt2LMHeadModel, request: &Request) -> Told {
    let mut scheduler = scheduler(model, options(8, 4_000, 48));
    scheduler.submit(request.clone()).unwrap();
    let mut told = BTreeMap::new();
    while !scheduler.is_idle() {
        listen(&mut scheduler, &mut told);
    }
    told.remove(&0).unwrap_or_default().0
}

fn scored(length: u32, seed: u32, config: GenerationConfig, alternatives: usize) -> Request {
    let asked = Some(alternatives);
    Request { logprobs: asked, prompt_logprobs: asked, ..Request::new(prompt(length, seed), config) }
}

/// Scoring reads whole windows, whose attention adds in another order than that with a cache: a few roundings of f32.
const OTHER_ORDER: f64 = 1e-5;

fn assert_close(found: &[Option<f64>], expected: &[Option<f64>]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        match (found, expected) {
            (Some(found), Some(expected)) => {
                assert!((found - expected).abs() < OTHER_ORDER, "{found}, {expected}")
            }
            both => assert_eq!(both, (&None, &None)),
        }
    }
}

/// The numbers are those that scoring the whole text gives, whatever is drawn from the logits.
#[test]
fn told_log_probabilities_are_those_of_the_score() {
    let model = tiny();
    let greedy = GenerationConfig { max_new_tokens: 9, ..GenerationConfig::default() };
    let drawn = GenerationConfig {
        do_sample: true,
        temperature: 1.7,
        top_k: 40,
        repetition_penalty: 1.4,
        suppress_tokens: vec![3, 4, 5],
        seed: 3,
        ..greedy.clone()
    };
    for (config, length, alternatives) in [(greedy, 20, 3), (drawn, 31, 0)] {
        let request = scored(length, 1, config, alternatives);
        let told = alone(&model, &request);
        let ids = [&request.prompt[..], &told.ids[&0]].concat();
        let expected = score(&model, &ids, model.config().n_positions, alternatives, &|_| ()).unwrap();
        let found: Vec<_> = told.prompt.iter().chain(&told.logprobs[&0]).cloned().collect();
        let logprobs: Vec<_> = found.iter().map(|found| found.as_ref().map(|found| found.logprob)).collect();
        assert_close(&logprobs, &expected.logprobs);
        for (found, expected) in found.iter().zip(&expected.alternatives) {
            let found: Vec<_> = found.iter().flat_map(|found| &found.alternatives).collect();
            let numbers = |of: &[&(u32, f64)]| of.iter().map(|(_, p)| Some(*p)).collect::<Vec<_>>();
            assert_close(&numbers(&found), &numbers(&expected.iter().collect::<Vec<_>>()));
        }
    }
}

/// A token has the same number among its alternatives, and it is the largest where the text is greedy.
#[test]
fn a_greedy_token_is_its_own_best_alternative() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let told = alone(&model, &scored(5, 2, config, 4));
    for (id, logprobs) in told.ids[&0].iter().zip(&told.logprobs[&0]) {
        let logprobs = logprobs.as_ref().unwrap();
        assert_eq!(logprobs.alternatives[0], (*id, logprobs.logprob));
        assert!(logprobs.alternatives.is_sorted_by(|a, b| a.1 >= b.1) && logprobs.alternatives.len() == 4);
    }
}

/// A prompt alone can be asked for; nothing comes after it.
#[test]
fn a_prompt_is_scored_without_a_text() {
    let model = tiny();
    for count in [1, 3] {
        let config = GenerationConfig {
            max_new_tokens: 0,
            num_return_sequences: count,
            do_sample: count > 1,
            ..GenerationConfig::default()
        };
        let told = alone(&model, &scored(30, 4, config, 2));
        let expected = score(&model, &prompt(30, 4), 48, 2, &|_| ()).unwrap();
        let logprobs: Vec<_> = told.prompt.iter().map(|found| found.as_ref().map(|f| f.logprob)).collect();
        assert_close(&logprobs, &expected.logprobs);
        assert_eq!((told.ids.len(), told.reasons.len()), (0, count));
    }
}

/// A bias belongs to what the model is asked; what a sampler does afterwards is not told.
#[test]
fn biases_change_log_probabilities_and_draws_do_not() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 1, ..GenerationConfig::default() };
    let plain = alone(&model, &scored(9, 1, config.clone(), 1)).logprobs[&0][0].clone().unwrap();
    let cold = GenerationConfig { do_sample: true, temperature: 0.01, top_k: 1, ..config.clone() };
    assert_eq!(alone(&model, &scored(9, 1, cold, 1)).logprobs[&0][0], Some(plain.clone()));
    let biased = GenerationConfig { sequence_bias: vec![(vec![7], 60.0)], ..config.clone() };
    let told = alone(&model, &scored(9, 1, biased, 1));
    assert_eq!(told.ids[&0], [7]);
    let biased = told.logprobs[&0][0].clone().unwrap();
    assert!(biased.logprob > -1e-6 && biased.alternatives == [(7, biased.logprob)], "{biased:?}");
    let bad = GenerationConfig { bad_words_ids: vec![vec![plain.alternatives[0].0]], ..config };
    let told = alone(&model, &scored(9, 1, bad, 1));
    assert_ne!(told.ids[&0], [plain.alternatives[0].0]);
    assert_eq!(told.logprobs[&0][0].as_ref().unwrap().alternatives, plain.alternatives, "not a bias");
}

/// Text `i` of a request that begins at stream `s` is text `s + i` of one that begins at 0.
#[test]
fn streams_are_counted_on() {
    let model = tiny();
    let config = GenerationConfig {
        do_sample: true,
        seed: 8,
        max_new_tokens: 7,
        num_return_sequences: 4,
        ..GenerationConfig::default()
    };
    let all = alone(&model, &Request::new(prompt(6, 1), config.clone()));
    let two = GenerationConfig { num_return_sequences: 2, ..config };
    let last = alone(&model, &Request { stream: 2, ..Request::new(prompt(6, 1), two) });
    assert_eq!((&last.ids[&0], &last.ids[&1]), (&all.ids[&2], &all.ids[&3]));
}

/// Prompts with equal beginnings that arrive in any order, with much memory or little, some cancelled: each text, and every
/// number told of it and of its prompt, is the one that it has alone.
#[test]
fn what_is_reused_changes_no_bit() {
    let cases = [(WeightDType::F32, 2_000, 400), (WeightDType::Q8, 130, 100), (WeightDType::F32, 48, 1)];
    for (dtype, kv_tokens, least) in cases {
        let model = tiny_in(dtype);
        let mut random = RandomStream::new(kv_tokens as u64);
        let mut below = |end: u64| usize::try_from(random.below(end)).unwrap();
        let beginnings: Vec<Vec<u32>> = (0..3).map(|seed| prompt(34, seed)).collect();
        let prompts: Vec<Vec<u32>> = (0..18).map(|kind| prompt(kind / 3, 50 + kind % 3)).collect();
        let mut requests = Vec::new();
        for seed in 0..60 {
            let shared = &beginnings[below(3)][..1 + below(34)];
            let own = prompts[below(18)].clone();
            let config = GenerationConfig {
                do_sample: below(2) == 0,
                seed,
                max_new_tokens: 1 + below(6),
                num_return_sequences: 1,
                ..GenerationConfig::default()
            };
            let asked = [None, Some(0), Some(2)];
            requests.push(Request {
                prompt_logprobs: asked[below(3)],
                logprobs: asked[below(3)],
                reuse: [None, Some(1), Some(1), Some(1), Some(2)][below(5)],
                ..Request::new([shared, &own].concat(), config)
            });
        }
        let mut scheduler = scheduler(&model, options(4, kv_tokens, 7));
        let mut told = BTreeMap::new();
        let mut cancelled = Vec::new();
        for request in &requests {
            let id = scheduler.submit(request.clone()).unwrap();
            for _ in 0..below(5) {
                listen(&mut scheduler, &mut told);
            }
            if below(8) == 0 && scheduler.cancel(id) {
                cancelled.push(id.0);
            }
        }
        while !scheduler.is_idle() {
            listen(&mut scheduler, &mut told);
        }
        let mut reused = 0;
        for (request, number) in requests.iter().zip(0..) {
            let (told, cached) = told.get(&number).cloned().unwrap_or_default();
            assert!(request.reuse.is_some() || cached == 0);
            assert!(cached < request.prompt.len());
            reused += cached;
            if !cancelled.contains(&number) {
                assert_eq!(told, alone(&model, request), "request {number} in {kv_tokens} tokens");
            }
        }
        assert!(reused >= least, "{reused} tokens were computed for others");
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
        assert!(scheduler.kv_tokens_kept() <= kv_tokens.next_multiple_of(16));
    }
}

/// Nobody sees what was computed for another number, and a second equal prompt computes its last token alone.
#[test]
fn beginnings_are_shared_among_those_of_one_number() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
    let mut scheduler = scheduler(&model, options(2, 500, 48));
    let mut told = BTreeMap::new();
    for reuse in [Some(1), Some(2), None, Some(1)] {
        let request = Request { reuse, ..Request::new(prompt(20, 1), config.clone()) };
        scheduler.submit(request).unwrap();
        while !scheduler.is_idle() {
            listen(&mut scheduler, &mut told);
        }
    }
    assert_eq!(told.values().map(|(_, cached)| *cached).collect::<Vec<_>>(), [0, 0, 0, 19]);
    let scored = Request { reuse: Some(1), prompt_logprobs: Some(0), ..Request::new(prompt(20, 1), config) };
    scheduler.submit(scored.clone()).unwrap();
    scheduler.submit(scored).unwrap();
    while !scheduler.is_idle() {
        listen(&mut scheduler, &mut told);
    }
    let cached: Vec<_> = told.values().map(|(_, cached)| *cached).collect();
    assert_eq!(cached[4..], [0, 19], "how probable tokens are is known of a prompt that was asked for it");
}

/// Counts up by one or two, from 10 on, to 18 at most.
#[derive(Debug)]
struct Counting;

impl Constraint for Counting {
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
        let last = generated.last().copied().unwrap_or(9);
        for next in [last + 1, last + 2] {
            if next <= 18 {
                allowed[next as usize] = true;
            }
        }
        Ok(())
    }

    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
        Ok(generated.last() == Some(&18))
    }
}

fn counts(ids: &[u32]) -> bool {
    ids.windows(2).all(|pair| pair[1] == pair[0] + 1 || pair[1] == pair[0] + 2) && matches!(ids[0], 10 | 11)
}

/// A text conforms and ends where nothing may follow, beside other exclusions too; so do beams and drafts.
#[test]
fn a_text_conforms_to_its_constraint() {
    let model = tiny();
    let constraint = || LogitsProcessor::Constraint(Arc::new(Counting));
    let greedy = GenerationConfig { max_new_tokens: 30, ..GenerationConfig::default() };
    let drawn = GenerationConfig {
        do_sample: true,
        temperature: 3.0,
        num_return_sequences: 5,
        prompt_lookup_num_tokens: Some(4),
        ..greedy.clone()
    };
    let narrowed = GenerationConfig {
        no_repeat_ngram_size: 3,
        bad_words_ids: vec![vec![17], vec![10], vec![13]],
        ..greedy.clone()
    };
    let beside = vec![10, 11, 12, 13, 14, 15, 16, 17, 18, 10, 11, 12];
    for config in [greedy.clone(), drawn, narrowed] {
        let request =
            Request { processors: vec![constraint()], ..Request::new(beside.clone(), config.clone()) };
        let told = alone(&model, &request);
        assert_eq!(told.ids.len(), config.num_return_sequences);
        for (sequence, ids) in &told.ids {
            assert!(counts(ids) && ids.last() == Some(&18), "{ids:?}");
            assert_eq!(told.reasons[sequence], StopReason::Complete);
        }
    }
    // The text is complete before the end is allowed.
    let longer = GenerationConfig { min_new_tokens: 20, ..greedy };
    let mut scheduler = scheduler(&model, options(8, 4_000, 48));
    scheduler
        .submit(Request { processors: vec![constraint()], ..Request::new(beside.clone(), longer) })
        .unwrap();
    let failed = loop {
        let events = scheduler.step().into_result().unwrap();
        let failed = events.into_iter().find_map(|event| match event {
            Event::Failed { error, .. } => Some(error.to_string()),
            _ => None,
        });
        if let Some(error) = failed {
            break error;
        }
    };
    assert!(failed.contains("excluded by `min_new_tokens` or `constraint`"), "{failed}");
    let beams =
        GenerationConfig { num_beams: 3, num_return_sequences: 3, max_new_tokens: 4, ..Default::default() };
    let found =
        beam_search(&model, &beside, &beams, &[constraint()], None, &|| ControlFlow::Continue(())).unwrap();
    assert!(found.len() == 3 && found.iter().all(|text| counts(&text.ids)), "{found:?}");
}
