//! Tests log-probabilities, prefix reuse and constraints.

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

/// Events collected for a request.
#[derive(Debug, Clone, PartialEq, Default)]
struct Report {
    prompt: Vec<Option<TokenLogprobs>>,
    ids: BTreeMap<usize, Vec<u32>>,
    logprobs: BTreeMap<usize, Vec<Option<TokenLogprobs>>>,
    reasons: BTreeMap<usize, StopReason>,
}

/// Runs a step; collects each request's events and its number of reused tokens.
fn step_and_record(scheduler: &mut Scheduler<&Tokenizer>, report: &mut BTreeMap<u64, (Report, usize)>) {
    for event in scheduler.step().into_result().unwrap() {
        let (report, cached) = report.entry(event.request().0).or_default();
        match event {
            Event::Begun { cached_tokens, prompt, .. } => {
                assert_eq!((*cached, report.prompt.len(), report.ids.len()), (0, 0, 0), "once, and first");
                (report.prompt, *cached) = (prompt, cached_tokens);
            }
            Event::Token { sequence, id, logprobs, stop_reason, .. } => {
                report.ids.entry(sequence).or_default().push(id);
                report.logprobs.entry(sequence).or_default().push(logprobs);
                stop_reason.map(|reason| report.reasons.insert(sequence, reason));
            }
            Event::Empty { sequence, .. } => _ = report.reasons.insert(sequence, StopReason::MaxNewTokens),
            other => panic!("{other:?}"),
        }
    }
}

fn alone(model: &Gpt2LMHeadModel, request: &Request) -> Report {
    let mut scheduler = scheduler(model, options(8, 4_000, 48));
    scheduler.submit(request.clone()).unwrap();
    let mut report = BTreeMap::new();
    while !scheduler.is_idle() {
        step_and_record(&mut scheduler, &mut report);
    }
    report.remove(&0).unwrap_or_default().0
}

fn scored(length: u32, seed: u32, config: GenerationConfig, alternatives: usize) -> Request {
    let count = Some(alternatives);
    Request { logprobs: count, prompt_logprobs: count, ..Request::new(prompt(length, seed), config) }
}

/// Tolerance between scoring and generation: a few f32 roundings.
///
/// Scoring reads whole windows. The attention over a whole window may sum in a different order than the
/// attention with a KV cache.
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

/// Reported log-probabilities equal the scores of the whole text, regardless of the sampler.
#[test]
fn reported_logprobs_equal_the_score() {
    let model = tiny();
    let greedy = GenerationConfig { max_new_tokens: 9, ..GenerationConfig::default() };
    let sampled = GenerationConfig {
        do_sample: true,
        temperature: 1.7,
        top_k: 40,
        repetition_penalty: 1.4,
        suppress_tokens: vec![3, 4, 5],
        seed: 3,
        ..greedy.clone()
    };
    for (config, length, alternatives) in [(greedy, 20, 3), (sampled, 31, 0)] {
        let request = scored(length, 1, config, alternatives);
        let report = alone(&model, &request);
        let ids = [&request.prompt[..], &report.ids[&0]].concat();
        let expected = score(&model, &ids, model.config().n_positions, alternatives, &|_| ()).unwrap();
        let found: Vec<_> = report.prompt.iter().chain(&report.logprobs[&0]).cloned().collect();
        let logprobs: Vec<_> = found.iter().map(|found| found.as_ref().map(|found| found.logprob)).collect();
        assert_close(&logprobs, &expected.logprobs);
        for (found, expected) in found.iter().zip(&expected.alternatives) {
            let found: Vec<_> = found.iter().flat_map(|found| &found.alternatives).collect();
            let logprobs_of =
                |alternatives: &[&(u32, f64)]| alternatives.iter().map(|(_, p)| Some(*p)).collect::<Vec<_>>();
            assert_close(&logprobs_of(&found), &logprobs_of(&expected.iter().collect::<Vec<_>>()));
        }
    }
}

/// A greedy token is its own most probable alternative, with the same log-probability.
#[test]
fn greedy_token_is_its_best_alternative() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let report = alone(&model, &scored(5, 2, config, 4));
    for (id, logprobs) in report.ids[&0].iter().zip(&report.logprobs[&0]) {
        let logprobs = logprobs.as_ref().unwrap();
        assert_eq!(logprobs.alternatives[0], (*id, logprobs.logprob));
        assert!(logprobs.alternatives.is_sorted_by(|a, b| a.1 >= b.1) && logprobs.alternatives.len() == 4);
    }
}

/// A request can score its prompt alone, without a completion.
#[test]
fn prompt_is_scored_without_a_completion() {
    let model = tiny();
    for count in [1, 3] {
        let config = GenerationConfig {
            max_new_tokens: 0,
            num_return_sequences: count,
            do_sample: count > 1,
            ..GenerationConfig::default()
        };
        let report = alone(&model, &scored(30, 4, config, 2));
        let expected = score(&model, &prompt(30, 4), 48, 2, &|_| ()).unwrap();
        let logprobs: Vec<_> = report.prompt.iter().map(|found| found.as_ref().map(|f| f.logprob)).collect();
        assert_close(&logprobs, &expected.logprobs);
        assert_eq!((report.ids.len(), report.reasons.len()), (0, count));
    }
}

/// Reported log-probabilities include biases, but no other change by the sampler.
#[test]
fn logprobs_include_biases_but_not_sampling() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 1, ..GenerationConfig::default() };
    let plain = alone(&model, &scored(9, 1, config.clone(), 1)).logprobs[&0][0].clone().unwrap();
    let cold = GenerationConfig { do_sample: true, temperature: 0.01, top_k: 1, ..config.clone() };
    assert_eq!(alone(&model, &scored(9, 1, cold, 1)).logprobs[&0][0], Some(plain.clone()));
    let biased = GenerationConfig { sequence_bias: vec![(vec![7], 60.0)], ..config.clone() };
    let report = alone(&model, &scored(9, 1, biased, 1));
    assert_eq!(report.ids[&0], [7]);
    let biased = report.logprobs[&0][0].clone().unwrap();
    assert!(biased.logprob > -1e-6 && biased.alternatives == [(7, biased.logprob)], "{biased:?}");
    let bad = GenerationConfig { bad_words_ids: vec![vec![plain.alternatives[0].0]], ..config };
    let report = alone(&model, &scored(9, 1, bad, 1));
    assert_ne!(report.ids[&0], [plain.alternatives[0].0]);
    assert_eq!(report.logprobs[&0][0].as_ref().unwrap().alternatives, plain.alternatives, "not a bias");
}

/// Completion `i` of a request with stream `s` equals completion `s + i` with stream 0.
#[test]
fn sequences_use_consecutive_streams() {
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

/// Prefix reuse changes neither completions nor reported values.
///
/// Prompts with common prefixes arrive in any order, with much or little memory, and some of them are
/// canceled.
#[test]
fn prefix_reuse_does_not_change_completions() {
    let cases = [(WeightDType::F32, 2_000, 400), (WeightDType::Q8, 130, 100), (WeightDType::F32, 48, 1)];
    for (dtype, kv_tokens, least) in cases {
        let model = tiny_in(dtype);
        let mut random = RandomStream::new(kv_tokens as u64);
        let mut below = |end: u64| usize::try_from(random.below(end)).unwrap();
        let prefixes: Vec<Vec<u32>> = (0..3).map(|seed| prompt(34, seed)).collect();
        let prompts: Vec<Vec<u32>> = (0..18).map(|kind| prompt(kind / 3, 50 + kind % 3)).collect();
        let mut requests = Vec::new();
        for seed in 0..60 {
            let shared = &prefixes[below(3)][..1 + below(34)];
            let own = prompts[below(18)].clone();
            let config = GenerationConfig {
                do_sample: below(2) == 0,
                seed,
                max_new_tokens: 1 + below(6),
                num_return_sequences: 1,
                ..GenerationConfig::default()
            };
            let counts = [None, Some(0), Some(2)];
            requests.push(Request {
                prompt_logprobs: counts[below(3)],
                logprobs: counts[below(3)],
                reuse: [None, Some(1), Some(1), Some(1), Some(2)][below(5)],
                ..Request::new([shared, &own].concat(), config)
            });
        }
        let mut scheduler = scheduler(&model, options(4, kv_tokens, 7));
        let mut report = BTreeMap::new();
        let mut cancelled = Vec::new();
        for request in &requests {
            let id = scheduler.submit(request.clone()).unwrap();
            for _ in 0..below(5) {
                step_and_record(&mut scheduler, &mut report);
            }
            if below(8) == 0 && scheduler.cancel(id) {
                cancelled.push(id.0);
            }
        }
        while !scheduler.is_idle() {
            step_and_record(&mut scheduler, &mut report);
        }
        let mut reused = 0;
        for (request, number) in requests.iter().zip(0..) {
            let (report, cached) = report.get(&number).cloned().unwrap_or_default();
            assert!(request.reuse.is_some() || cached == 0);
            assert!(cached < request.prompt.len());
            reused += cached;
            if !cancelled.contains(&number) {
                assert_eq!(report, alone(&model, request), "request {number} in {kv_tokens} tokens");
            }
        }
        assert!(reused >= least, "only {reused} tokens were reused");
        assert_eq!(scheduler.kv_tokens_in_use(), 0);
        assert!(scheduler.kv_tokens_kept() <= kv_tokens.next_multiple_of(16));
    }
}

/// Prefixes are reused only within a reuse group; a repeated prompt computes only its last token.
#[test]
fn prefixes_are_shared_only_within_a_reuse_group() {
    let model = tiny();
    let config = GenerationConfig { max_new_tokens: 2, ..GenerationConfig::default() };
    let mut scheduler = scheduler(&model, options(2, 500, 48));
    let mut report = BTreeMap::new();
    for reuse in [Some(1), Some(2), None, Some(1)] {
        let request = Request { reuse, ..Request::new(prompt(20, 1), config.clone()) };
        scheduler.submit(request).unwrap();
        while !scheduler.is_idle() {
            step_and_record(&mut scheduler, &mut report);
        }
    }
    assert_eq!(report.values().map(|(_, cached)| *cached).collect::<Vec<_>>(), [0, 0, 0, 19]);
    let scored = Request { reuse: Some(1), prompt_logprobs: Some(0), ..Request::new(prompt(20, 1), config) };
    scheduler.submit(scored.clone()).unwrap();
    scheduler.submit(scored).unwrap();
    while !scheduler.is_idle() {
        step_and_record(&mut scheduler, &mut report);
    }
    let cached: Vec<_> = report.values().map(|(_, cached)| *cached).collect();
    assert_eq!(cached[4..], [0, 19], "prompt scores are reused only if the earlier request computed them");
}

/// A constraint that makes token ids count up by one or two, from 10 or 11 to at most 18.
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

fn counts_up(ids: &[u32]) -> bool {
    ids.windows(2).all(|pair| pair[1] == pair[0] + 1 || pair[1] == pair[0] + 2) && matches!(ids[0], 10 | 11)
}

/// Completions, beams and drafts satisfy a constraint and end where it allows no more tokens.
///
/// This includes combinations with other exclusions.
#[test]
fn completions_satisfy_their_constraint() {
    let model = tiny();
    let constraint = || LogitsProcessor::Constraint(Arc::new(Counting));
    let greedy = GenerationConfig { max_new_tokens: 30, ..GenerationConfig::default() };
    let sampled = GenerationConfig {
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
    let prompt = vec![10, 11, 12, 13, 14, 15, 16, 17, 18, 10, 11, 12];
    for config in [greedy.clone(), sampled, narrowed] {
        let request =
            Request { processors: vec![constraint()], ..Request::new(prompt.clone(), config.clone()) };
        let report = alone(&model, &request);
        assert_eq!(report.ids.len(), config.num_return_sequences);
        for (sequence, ids) in &report.ids {
            assert!(counts_up(ids) && ids.last() == Some(&18), "{ids:?}");
            assert_eq!(report.reasons[sequence], StopReason::Complete);
        }
    }
    // The constraint runs out of tokens before `min_new_tokens` permits an end-of-text token.
    let longer = GenerationConfig { min_new_tokens: 20, ..greedy };
    let mut scheduler = scheduler(&model, options(8, 4_000, 48));
    scheduler
        .submit(Request { processors: vec![constraint()], ..Request::new(prompt.clone(), longer) })
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
        beam_search(&model, &prompt, &beams, &[constraint()], None, &|| ControlFlow::Continue(())).unwrap();
    assert!(found.len() == 3 && found.iter().all(|text| counts_up(&text.ids)), "{found:?}");
}
