//! Compares processors with transformers, compares samples with probabilities, tests option ranges.
//!
//! The logits are random.

use std::sync::Arc;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    AllowedTokens, Constraint, EarlyStopping, GenerationConfig, GenerationError, History, LogitsFunction,
    LogitsProcessor, Sampler, WhenFull,
};
use candle_gpt2_testing::json_fixture;
use serde_json::{Value, json};

/// Tolerance between logits that transformers computes in f32, and this crate partly in f64.
const LOGIT: f32 = 1e-5;

fn config(options: &Value) -> GenerationConfig {
    GenerationConfig::default().with_json(&options.to_string()).unwrap()
}

fn process(processors: &[LogitsProcessor], history: History<'_>, logits: &[f32]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    processors.iter().for_each(|processor| processor.process(history, &mut logits).unwrap());
    logits
}

/// Returns the processors for a test case, including its function for allowed tokens, if any.
fn processors_of(case: &Value, config: &GenerationConfig) -> Vec<LogitsProcessor> {
    let mut processors = LogitsProcessor::of_config(config);
    if case["has_allowed"] == true {
        let allowed = match case["options"].as_object().unwrap().is_empty() {
            true => AllowedTokens::new(|history| {
                (0..61).filter(|id| (*id as usize + history.ids.len()).is_multiple_of(3)).collect()
            }),
            false => AllowedTokens::new(|_| vec![4, 5, 6]),
        };
        LogitsProcessor::AllowedTokens(allowed).add_to(&mut processors);
    }
    processors
}

/// `probabilities` returns the distribution from which an identical sampler samples.
#[test]
fn probabilities_match_the_sampler() {
    let config = GenerationConfig {
        do_sample: true,
        top_k: 3,
        temperature: 0.8,
        seed: 5,
        ..GenerationConfig::default()
    };
    let logits = [0.5, 2.0, 1.0, -1.0, 1.5];
    let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
    let probabilities = sampler.probabilities(EMPTY_HISTORY, &mut logits.clone()).unwrap();
    let weights =
        [0.0, 2.0_f64, 1.0, 0.0, 1.5].map(|logit| if logit > 0.0 { (logit / 0.8).exp() } else { 0.0 });
    let sum: f64 = weights.iter().sum();
    for (found, weight) in probabilities.iter().zip(weights) {
        assert!((found - weight / sum).abs() < 1e-6, "{probabilities:?}");
    }
    // `probabilities` consumes no random numbers, so the sampler keeps up with a fresh sampler.
    let mut fresh = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
    for _ in 0..20 {
        sampler.probabilities(EMPTY_HISTORY, &mut logits.clone()).unwrap();
        let sampled = sampler.sample(EMPTY_HISTORY, &mut logits.clone()).unwrap();
        assert_eq!(sampled, fresh.sample(EMPTY_HISTORY, &mut logits.clone()).unwrap());
        assert!(probabilities[sampled as usize] > 0.0);
    }
    let mut greedy = Sampler::new(&GenerationConfig::default(), Vec::new(), 0);
    let tied = greedy.probabilities(EMPTY_HISTORY, &mut [0.0, 2.0, 2.0]).unwrap();
    assert_eq!(tied, [0.0, 1.0, 0.0], "the first token, as greedy decoding picks it");
    assert!(greedy.probabilities(EMPTY_HISTORY, &mut [0.0, f32::NAN]).is_err());
}

/// Compares every processor alone, and many together in the order of transformers.
///
/// The options are read from JSON.
#[test]
fn processed_logits_equal_transformers() {
    let fixture = json_fixture("generation");
    let cases = fixture["processors"].as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
        let expected: Vec<Option<f32>> = serde_json::from_value(case["processed"].clone()).unwrap();
        let processors = processors_of(case, &config(&case["options"]));
        let prompt_len = usize::try_from(case["prompt_len"].as_u64().unwrap()).unwrap();
        let found = process(&processors, History { ids: &ids, prompt_len }, &logits);
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let expected = expected.unwrap_or(f32::NEG_INFINITY);
            let agrees = *found == expected || (found - expected).abs() <= LOGIT * expected.abs().max(1.0);
            assert!(agrees, "{}, token {token}: expected {expected}, found {found}", case["options"]);
        }
    }
}

const EMPTY_HISTORY: History<'static> = History { ids: &[], prompt_len: 0 };
const MASKED: f32 = f32::NEG_INFINITY;

fn processed(processor: &LogitsProcessor, logits: &[f32]) -> Vec<f32> {
    process(std::slice::from_ref(processor), EMPTY_HISTORY, logits)
}

#[test]
fn top_k_keeps_the_largest_and_ties() {
    let logits = [1.0, 3.0, 2.0, 3.0, 0.0];
    assert_eq!(processed(&LogitsProcessor::TopK(2), &logits), [MASKED, 3.0, MASKED, 3.0, MASKED]);
    assert_eq!(processed(&LogitsProcessor::TopK(1), &logits), [MASKED, 3.0, MASKED, 3.0, MASKED]);
    assert_eq!(processed(&LogitsProcessor::TopK(3), &logits), [MASKED, 3.0, 2.0, 3.0, MASKED]);
    assert_eq!(processed(&LogitsProcessor::TopK(9), &logits), logits);
}

/// Compares the single-pass selection with a full sort, for lengths around the chunk size.
#[test]
fn top_k_equals_a_full_sort() {
    let mut state = 7u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Use few distinct values, so that ties occur.
        (state >> 22) as f32 / 64.0
    };
    for length in [1, 15, 16, 17, 63, 64, 65, 200, 1000] {
        let logits: Vec<f32> = (0..length).map(|_| next()).collect();
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        for top_k in [1, 2, 5, 50, 64, length.max(2) - 1, length] {
            let smallest = sorted[top_k.min(length) - 1];
            let expected: Vec<f32> =
                logits.iter().map(|logit| if *logit < smallest { MASKED } else { *logit }).collect();
            assert_eq!(processed(&LogitsProcessor::TopK(top_k), &logits), expected, "{top_k} of {length}");
        }
    }
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_p() {
    // The probabilities are 0.5, 0.25, 0.125 and 0.125.
    let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let kept = |top_p: f64| {
        processed(&LogitsProcessor::TopP(top_p), &logits).iter().filter(|logit| logit.is_finite()).count()
    };
    assert_eq!([0.0, 0.1, 0.49, 0.6, 0.8, 0.9, 1.0].map(kept), [1, 1, 1, 2, 3, 4, 4]);
    // The one with the larger id of the two least probable tokens remains, as in the reference.
    let boundary = processed(&LogitsProcessor::TopP(0.8), &logits);
    assert_eq!((boundary[2], boundary[3].is_finite()), (MASKED, true));
}

/// Uses more tokens than the first partial sort covers.
#[test]
fn top_p_equals_a_full_sort() {
    let logits: Vec<f32> =
        (0..3000u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 8) as f32 / 4e6).collect();
    let exponentials: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| exponentials[*b].total_cmp(&exponentials[*a]));
    for top_p in [0.001, 0.05, 0.3, 0.77, 0.99] {
        let mut expected = logits.clone();
        let mut before = 0.0;
        for token in &order {
            if before >= top_p {
                expected[*token] = MASKED;
            }
            before += exponentials[*token] / sum;
        }
        assert_eq!(processed(&LogitsProcessor::TopP(top_p), &logits), expected, "{top_p}");
    }
}

/// Compares with a stable sort of all tokens by their distance from the entropy, including ties.
#[test]
fn typical_p_equals_a_full_sort() {
    // Use few distinct values, so that ties occur, and more tokens than the first partial sort covers.
    let logits: Vec<f32> =
        (0..3000u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 20) as f32 / 1e3).collect();
    let largest = logits.iter().copied().fold(MASKED, f32::max);
    let exponentials: Vec<f64> = logits.iter().map(|logit| f64::from(logit - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    let probabilities: Vec<f64> = exponentials.iter().map(|exponential| exponential / sum).collect();
    let entropy = -probabilities.iter().map(|p| p * p.ln()).sum::<f64>();
    let distance = |token: usize| (-probabilities[token].ln() - entropy).abs();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| distance(*a).total_cmp(&distance(*b)));
    for mass in [0.0, 1e-9, 0.05, 0.3, 0.77, 0.99, 1.0] {
        let mut reached = 0.0;
        let last = order.iter().position(|token| {
            reached += probabilities[*token];
            reached >= mass
        });
        let farthest = last.map_or(f64::INFINITY, |last| distance(order[last]));
        let kept = |token: usize| token == order[0] || distance(token) <= farthest;
        let expected: Vec<f32> =
            (0..logits.len()).map(|token| if kept(token) { logits[token] } else { MASKED }).collect();
        assert_eq!(processed(&LogitsProcessor::TypicalP(mass), &logits), expected, "{mass}");
    }
}

#[test]
fn presence_and_frequency_penalties_ignore_the_prompt() {
    // Token 1 occurs twice in the prompt and once after it, token 2 twice after it, token 3 in the prompt.
    let history = History { ids: &[1, 1, 3, 1, 2, 2], prompt_len: 3 };
    let logits = [1.0, 1.0, -1.0, 1.0];
    let process = |processor| process(&[processor], history, &logits);
    assert_eq!(process(LogitsProcessor::PresencePenalty(0.5)), [1.0, 0.5, -1.5, 1.0]);
    assert_eq!(process(LogitsProcessor::FrequencyPenalty(0.5)), [1.0, 0.5, -2.0, 1.0]);
    // The repetition penalty also applies to token 3, which occurs only in the prompt.
    assert_eq!(process(LogitsProcessor::RepetitionPenalty(2.0)), [1.0, 0.5, -2.0, 0.5]);
}

/// The prompt's n-grams must not be repeated, but the completion's own may be.
///
/// Corresponds to transformers' `EncoderNoRepeatNGramLogitsProcessor`, whose encoder input is the
/// prompt.
#[test]
fn prompt_ngrams_are_not_repeated() {
    let processors_for = |size| {
        let options = json!({"encoder_no_repeat_ngram_size": size});
        LogitsProcessor::of_config(&config(&options))
    };
    let removed = |size, ids: &[u32], prompt_len| {
        let logits = process(&processors_for(size), History { ids, prompt_len }, &[0.0; 8]);
        (0..8).filter(|id| logits[*id].is_infinite()).collect::<Vec<_>>()
    };
    assert!(processors_for(0).is_empty());
    assert_eq!(removed(2, &[1, 2, 1, 3, 1], 5), [2, 3]);
    // Token 5 also followed token 1, but only in the completion.
    assert_eq!(removed(2, &[1, 2, 1, 5, 1], 3), [2]);
    assert_eq!(removed(3, &[1, 2, 4, 7, 1, 2], 4), [4]);
    assert_eq!(removed(3, &[1, 2, 4, 7, 1, 2], 2), [0; 0]);
    assert_eq!(removed(1, &[1, 2, 6], 2), [1, 2]);
    assert_eq!(removed(5, &[1, 2], 2), [0; 0]);
}

/// The encoder repetition penalty makes the prompt's tokens more probable.
///
/// Corresponds to transformers' `EncoderRepetitionPenaltyLogitsProcessor`.
#[test]
fn prompt_tokens_are_favored() {
    let processors = LogitsProcessor::of_config(&config(&json!({"encoder_repetition_penalty": 2.0})));
    let logits = process(&processors, History { ids: &[0, 1, 0, 2], prompt_len: 3 }, &[3.0, -3.0, 3.0, -3.0]);
    assert_eq!(logits, [6.0, -1.5, 3.0, -3.0]);
    assert!(LogitsProcessor::of_config(&config(&json!({"encoder_repetition_penalty": 1.0}))).is_empty());
}

/// Returns a pseudorandom number below `limit`.
fn random_below(state: &mut u64, limit: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap() % limit
}

/// A sampler's incremental counts give the same bits as counting the whole history.
///
/// This includes histories that do not extend the previous one: shorter ones, ones with a changed token,
/// and ones with a different prompt length.
#[test]
fn incremental_counts_equal_full_recounts() {
    const VOCABULARY: usize = 12;
    let processors: Vec<LogitsProcessor> = vec![
        LogitsProcessor::RepetitionPenalty(1.3),
        LogitsProcessor::PresencePenalty(0.7),
        LogitsProcessor::FrequencyPenalty(0.11),
        LogitsProcessor::NoRepeatNgram(0),
        LogitsProcessor::NoRepeatNgram(3),
        LogitsProcessor::NoRepeatNgram(2),
        LogitsProcessor::NoRepeatNgram(33),
    ];
    let single = processors.iter().map(|processor| vec![processor.clone()]);
    let without_ngrams = processors[..3].to_vec();
    for (case, processors) in single
        .chain([vec![LogitsProcessor::NoRepeatNgram(1)], without_ngrams, processors.clone()])
        .enumerate()
    {
        let mut sampler = Sampler::new(&GenerationConfig::default(), processors.clone(), 0);
        let mut state = case as u64;
        let (mut ids, mut prompt_len) = (Vec::new(), 2);
        let (mut longest, mut with_changes) = (0, 0);
        for _ in 0..600 {
            match random_below(&mut state, 40) {
                0 => ids.truncate(random_below(&mut state, ids.len() + 1)),
                1 => prompt_len = random_below(&mut state, 9),
                2 if !ids.is_empty() => {
                    let index = random_below(&mut state, ids.len());
                    ids[index] = 1;
                }
                // Repeat the previous history.
                3 => {}
                // Extend a sequence that repeats itself, including n-grams of 33 tokens.
                _ if case % 2 == 0 => ids.push(u32::try_from(ids.len() % 7).unwrap()),
                _ => ids.push(u32::try_from(random_below(&mut state, VOCABULARY + 2)).unwrap()),
            }
            longest = longest.max(ids.len());
            let logits: Vec<f32> =
                (0..VOCABULARY).map(|_| random_below(&mut state, 2000) as f32 / 300.0 - 3.0).collect();
            let history = History { ids: &ids, prompt_len };
            let expected = process(&processors, history, &logits);
            let mut found = logits.clone();
            // If every token is removed, the sampler returns an error, but has still changed the logits.
            let _ = sampler.sample(history, &mut found);
            let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "{processors:?}, {ids:?}, {prompt_len}");
            with_changes += usize::from(found != logits);
        }
        assert!(longest > 50, "{longest}");
        assert!(with_changes > 50 || matches!(processors[..], [LogitsProcessor::NoRepeatNgram(0 | 33)]));
    }
}

#[test]
fn invalid_allowed_tokens_are_rejected() {
    for found in [vec![], vec![1, 4]] {
        let callback = found.clone();
        let processor = LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| callback.clone()));
        let error = processor.process(EMPTY_HISTORY, &mut [0.0; 4]).unwrap_err();
        assert!(matches!(error, GenerationError::AllowedTokens { vocab_size: 4, .. }), "{error}");
    }
}

#[test]
fn logits_function_runs_after_penalties_and_before_filters() {
    let function = LogitsFunction::new(|history, logits| {
        let what = || GenerationError::Function { what: format!("no token {}", history.ids[0]) };
        *logits.get_mut(history.ids[0] as usize).ok_or_else(what)? += 10.0;
        Ok(())
    });
    let options = GenerationConfig {
        repetition_penalty: 2.0,
        suppress_tokens: vec![3],
        do_sample: true,
        top_k: 1,
        ..GenerationConfig::default()
    };
    let mut processors = LogitsProcessor::of_config(&options);
    LogitsProcessor::Function(function.clone()).add_to(&mut processors);
    let processed_for =
        |ids: &[u32]| process(&processors, History { ids, prompt_len: 0 }, &[1.0, 4.0, 3.0, 9.0]);
    assert_eq!(processed_for(&[1]), [MASKED, 12.0, MASKED, MASKED], "after the penalty");
    assert_eq!(processed_for(&[3]), [MASKED, 4.0, MASKED, MASKED], "before tokens are suppressed");
    let error = LogitsProcessor::Function(function)
        .process(History { ids: &[4], prompt_len: 0 }, &mut [0.0; 4])
        .unwrap_err();
    assert_eq!((error.to_string().as_str(), error.is_usage()), ("no token 4", false));
}

fn greedy() -> Sampler {
    Sampler::new(&GenerationConfig::default(), Vec::new(), 0)
}

#[test]
fn greedy_breaks_ties_by_smallest_id() {
    assert_eq!(greedy().sample(EMPTY_HISTORY, &mut [0.0, 2.0, 2.0, 1.0]).unwrap(), 1);
    assert_eq!(greedy().sample(EMPTY_HISTORY, &mut [MASKED, MASKED, -5.0]).unwrap(), 2);
}

#[test]
fn non_finite_logits_are_an_error() {
    for mut logits in
        [vec![0.0, f32::NAN], vec![-f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![MASKED; 2], vec![]]
    {
        let error = greedy().sample(EMPTY_HISTORY, &mut logits).unwrap_err();
        assert!(matches!(error, GenerationError::NotFinite), "{logits:?}");
    }
    let nothing_left = vec![LogitsProcessor::SuppressTokens(vec![0, 1])];
    let error =
        Sampler::new(&GenerationConfig::default(), nothing_left, 0).sample(EMPTY_HISTORY, &mut [0.0; 2]);
    assert!(matches!(error, Err(GenerationError::NoTokenLeft { .. })));
}

/// Compares 100,000 samples from each processor with transformers' probabilities.
///
/// The probabilities follow from transformers' processed logits.
#[test]
fn samples_follow_the_transformers_distribution() {
    const SAMPLES: u32 = 100_000;
    let fixture = json_fixture("generation");
    let mut tested_options = std::collections::BTreeSet::new();
    for case in fixture["processors"].as_array().unwrap() {
        // Test one case for each combination of options; `processed_logits_equal_transformers`
        // covers the others.
        let names: Vec<&String> = case["options"].as_object().unwrap().keys().collect();
        if !tested_options
            .insert((names.into_iter().cloned().collect::<Vec<_>>(), case["has_allowed"] == true))
        {
            continue;
        }
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
        let processed: Vec<Option<f64>> = serde_json::from_value(case["processed"].clone()).unwrap();
        let exponentials = processed.iter().map(|logit| logit.map_or(0.0, f64::exp));
        let exponentials: Vec<f64> = exponentials.collect();
        let sum: f64 = exponentials.iter().sum();
        let mut config = config(&case["options"]);
        let processors = processors_of(case, &config);
        config.do_sample = true;
        let prompt_len = usize::try_from(case["prompt_len"].as_u64().unwrap()).unwrap();
        let history = History { ids: &ids, prompt_len };
        let mut sampler = Sampler::new(&config, processors, 0);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..SAMPLES {
            counts[sampler.sample(history, &mut logits.clone()).unwrap() as usize] += 1;
        }
        assert_counts_follow(
            &counts,
            &exponentials.iter().map(|e| e / sum).collect::<Vec<_>>(),
            &case["options"],
        );
    }
    assert!(tested_options.len() > 20, "{}", tested_options.len());
}

/// Pearson's chi-squared test with a false positive rate of 0.0001.
///
/// With a fixed seed, a false positive occurs either never or always. Tokens with an expected count
/// below ten are pooled.
fn assert_counts_follow(counts: &[u32], probabilities: &[f64], what: &Value) {
    const NORMAL_QUANTILE: f64 = 3.719;
    let draws = f64::from(counts.iter().sum::<u32>());
    let (mut rare_count, mut rare_expected, mut chi_square, mut cells) = (0.0, 0.0, 0.0, 0.0);
    for (count, probability) in counts.iter().zip(probabilities) {
        let (count, expected) = (f64::from(*count), probability * draws);
        if expected == 0.0 {
            assert_eq!(count, 0.0, "{what}: a removed token was sampled");
        } else if expected < 10.0 {
            rare_count += count;
            rare_expected += expected;
        } else {
            chi_square += (count - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if rare_expected >= 10.0 {
        chi_square += (rare_count - rare_expected).powi(2) / rare_expected;
        cells += 1.0;
    }
    // Chi-squared quantile by the Wilson-Hilferty approximation.
    let freedom: f64 = cells - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + NORMAL_QUANTILE * spread.sqrt()).powi(3);
    assert!(freedom == 0.0 || chi_square < limit, "{what}: chi-square {chi_square}, limit {limit}");
}

#[test]
fn same_seed_repeats_and_streams_differ() {
    let samples = |seed, stream| -> Vec<u32> {
        let config = GenerationConfig { do_sample: true, seed, ..GenerationConfig::default() };
        let mut sampler = Sampler::new(&config, Vec::new(), stream);
        (0..50).map(|_| sampler.sample(EMPTY_HISTORY, &mut [0.0; 100]).unwrap()).collect()
    };
    assert_eq!(samples(5, 0), samples(5, 0));
    assert_ne!(samples(5, 0), samples(6, 0));
    assert_ne!(samples(5, 0), samples(5, 1));
}

#[test]
fn out_of_range_options_are_rejected_by_name() {
    for (option, values) in [
        ("max_time", vec![json!(0.0), json!(-1)]),
        ("temperature", vec![json!(0), json!(-1), json!(1e-9)]),
        ("top_p", vec![json!(1.1), json!(-0.5)]),
        ("min_p", vec![json!(-0.1), json!(1.5)]),
        ("typical_p", vec![json!(0), json!(2)]),
        ("epsilon_cutoff", vec![json!(-0.1), json!(1)]),
        ("eta_cutoff", vec![json!(-0.1), json!(1)]),
        ("repetition_penalty", vec![json!(0), json!(-2), json!(1e-300), json!(1e300)]),
        ("num_beams", vec![json!(0), json!(4097), json!(u64::MAX)]),
        ("num_beam_groups", vec![json!(0)]),
        ("diversity_penalty", vec![json!(-1)]),
        ("num_return_sequences", vec![json!(0), json!(4097)]),
        ("length_penalty", vec![json!(-21), json!(1e308)]),
        ("presence_penalty", vec![json!(1e39)]),
        ("frequency_penalty", vec![json!(-1e300)]),
        ("penalty_alpha", vec![json!(-0.1), json!(1.1)]),
        ("stop_strings", vec![json!([""]), json!("")]),
        ("bad_words_ids", vec![json!([[]])]),
        ("sequence_bias", vec![json!([[[], 1.0]]), json!([[[1], 1e300]])]),
    ] {
        for value in values {
            let mut options = json!({ "do_sample": !matches!(option, "num_beams" | "penalty_alpha") });
            options[option] = value.clone();
            let error = config(&options).check().unwrap_err();
            assert!(error.to_string().contains(option) && error.is_usage(), "{option} {value}: {error}");
        }
    }
    let not_numbers = [f64::NAN, f64::INFINITY].map(|number| {
        [
            GenerationConfig { temperature: number, do_sample: true, ..GenerationConfig::default() },
            GenerationConfig { top_p: number, do_sample: true, ..GenerationConfig::default() },
            GenerationConfig { presence_penalty: number, ..GenerationConfig::default() },
            GenerationConfig { frequency_penalty: number, ..GenerationConfig::default() },
            GenerationConfig { length_penalty: number, ..GenerationConfig::default() },
            GenerationConfig { repetition_penalty: number, ..GenerationConfig::default() },
        ]
    });
    for config in not_numbers.concat() {
        assert!(matches!(config.check(), Err(GenerationError::OptionOutOfRange { .. })), "{config:?}");
    }
}

#[test]
fn conflicting_options_are_rejected() {
    for (options, message) in [
        (json!({"num_beams": 2, "do_sample": true}), "does not sample"),
        (json!({"num_beams": 2, "penalty_alpha": 0.5}), "mutually exclusive"),
        (json!({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}), "does not divide"),
        (json!({"num_beams": 4, "num_beam_groups": 2}), "diversity_penalty"),
        (json!({"num_beams": 2, "num_return_sequences": 3}), "exceeds `num_beams`"),
        (json!({"penalty_alpha": 0.5, "top_k": 1}), "top_k"),
        (json!({"penalty_alpha": 0.5, "do_sample": true}), "does not sample"),
        (json!({"num_beam_groups": 2}), "beam search"),
        (json!({"diversity_penalty": 1.0}), "beam search"),
        (json!({"num_return_sequences": 2}), "the same"),
        (json!({"num_beams": 2, "stop_strings": "x"}), "stop_strings"),
        (json!({"min_new_tokens": 9, "max_new_tokens": 8}), "exceeds `max_new_tokens`"),
    ] {
        let error = config(&options).check().unwrap_err();
        assert!(matches!(error, GenerationError::Conflict { .. }) && error.is_usage(), "{options}: {error}");
        assert!(error.to_string().contains(message), "{options}: {error}");
    }
    let sliding = GenerationConfig {
        num_beams: 2,
        when_full: WhenFull::Slide { head: 0 },
        ..GenerationConfig::default()
    };
    assert!(matches!(sliding.check(), Err(GenerationError::Conflict { .. })));
}

fn with_max_new_tokens(max_new_tokens: usize) -> GenerationConfig {
    GenerationConfig { max_new_tokens, ..GenerationConfig::default() }
}

/// Covers the keys that transformers writes into `generation_config.json`, and other keys.
#[test]
fn generation_config_is_read_key_by_key() {
    let start = GenerationConfig { max_new_tokens: 7, seed: 3, ..GenerationConfig::default() };
    let same = start.clone().with_json(
        r#"{"_from_model_config": true, "transformers_version": "5.23.0", "pad_token_id": 0, "use_cache": true,
            "top_p": null, "guidance_scale": 1.0, "token_healing": false}"#,
    );
    assert_eq!(same.unwrap(), GenerationConfig { pad_token_id: Some(0), ..start.clone() });
    let read = start.with_json(
        r#"{"eos_token_id": 5, "do_sample": true, "temperature": 0.9, "top_k": 0, "max_length": 30,
            "early_stopping": "never", "stop_strings": "x", "bad_words_ids": [[1], [2, 3]], "num_beams": 1}"#,
    );
    let read = read.unwrap();
    // Null leaves an option unset. Without sampling, sampling-only options may have any value.
    let unset = with_max_new_tokens(7)
        .with_json(r#"{"max_new_tokens": null, "max_length": 9, "temperature": 0.0}"#)
        .unwrap();
    assert_eq!((unset.max_length, unset.check().is_ok()), (Some(9), true));
    let biased =
        GenerationConfig { sequence_bias: vec![(vec![4], f64::NEG_INFINITY)], ..with_max_new_tokens(7) };
    assert_eq!(biased.clone().with_json(r#"{"top_k": 5}"#).unwrap().sequence_bias, biased.sequence_bias);
    assert_eq!((read.eos_token_id, read.stop_strings), (vec![5], vec!["x".to_owned()]));
    assert_eq!((read.do_sample, read.temperature, read.top_k, read.max_length), (true, 0.9, 0, Some(30)));
    assert_eq!((read.early_stopping, read.max_new_tokens, read.seed), (EarlyStopping::Never, usize::MAX, 3));
    assert_eq!(read.bad_words_ids, [vec![1], vec![2, 3]]);
    for (json, message) in [
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        (r#"{"temperature": "warm"}"#, "`temperature`"),
        (r#"{"top_k": -1}"#, "`top_k`"),
        (r#"{"early_stopping": "soon"}"#, "`early_stopping`"),
        (r#"{"min_length": 3}"#, "`min_length` 3"),
        (r#"{"guidance_scale": 1.5}"#, "`guidance_scale` 1.5 is not supported"),
        (r#"{"watermarking_config": {"bias": 2}}"#, "`watermarking_config`"),
    ] {
        let error = GenerationConfig::default().with_json(json).unwrap_err().to_string();
        assert!(error.contains(message), "{json}: {error}");
    }
}

/// A constraint that allows the same tokens at every position.
#[derive(Debug)]
struct FixedConstraint(Vec<bool>);

impl Constraint for FixedConstraint {
    fn allow(&self, _: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
        allowed.copy_from_slice(&self.0);
        Ok(())
    }

    fn is_complete(&self, _: &[u32]) -> Result<bool, GenerationError> {
        Ok(false)
    }

    fn option(&self) -> &'static str {
        "regular expression"
    }
}

/// Only tokens that every option allows remain, and their logits are unchanged.
#[test]
fn exclusions_intersect_and_change_no_other_logit() {
    const TOKENS: u64 = 12;
    let mut random = RandomStream::with_stream(45, 0);
    let mut empty = 0;
    for _ in 0..2_000 {
        let mut subset = || -> Vec<u32> { (0..12).filter(|_| random.below(3) > 0).collect() };
        let (allowed, accepted, wanted, unbiased) = (subset(), subset(), subset(), subset());
        let without = |kept: &[u32]| (0..12).filter(|id| !kept.contains(id)).collect::<Vec<u32>>();
        let words = |ids: Vec<u32>| ids.into_iter().map(|id| vec![id]).collect::<Vec<_>>();
        let ids: Vec<u32> = (0..9).map(|_| u32::try_from(random.below(TOKENS)).unwrap()).collect();
        let history = History { ids: &ids, prompt_len: 1 };
        let by_function = allowed.clone();
        let all = [
            LogitsProcessor::SequenceBias(
                words(without(&unbiased)).into_iter().map(|ids| (ids, MASKED.into())).collect(),
            ),
            LogitsProcessor::BadWords(words(without(&wanted))),
            LogitsProcessor::NoRepeatNgram(2),
            LogitsProcessor::MinNewTokens { min_new_tokens: 20, eos_token_id: vec![0, 1] },
            LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| match by_function.is_empty() {
                true => vec![3],
                false => by_function.clone(),
            })),
            LogitsProcessor::Constraint(Arc::new(FixedConstraint(
                (0..12).map(|id| accepted.contains(&id)).collect(),
            ))),
            LogitsProcessor::SuppressTokens(vec![7]),
        ];
        let processors: Vec<_> = all.into_iter().filter(|_| random.below(2) > 0).collect();
        let logits: Vec<f32> =
            (0..12).map(|_| f32::from(u16::try_from(random.below(999)).unwrap()) / 64.0).collect();
        let mut expected = logits.clone();
        for processor in &processors {
            let mut alone = logits.clone();
            processor.process(history, &mut alone).unwrap();
            let masked = expected.iter_mut().zip(&alone).filter(|(_, alone)| **alone == MASKED);
            masked.for_each(|(logit, _)| *logit = MASKED);
        }
        let mut found = logits.clone();
        let mut sampler = Sampler::new(&GenerationConfig::default(), processors.clone(), 0);
        let picked = sampler.sample(history, &mut found);
        assert_eq!(found, expected, "{processors:?}");
        match picked {
            Ok(id) => assert!(expected[id as usize] > MASKED),
            Err(error) => {
                assert!(expected.iter().all(|logit| *logit == MASKED), "{error}");
                empty += 1;
            }
        }
    }
    assert!(empty > 20, "{empty} empty intersections");
}

#[test]
fn empty_intersection_names_the_options() {
    let processors = vec![
        LogitsProcessor::BadWords(vec![vec![0]]),
        LogitsProcessor::MinNewTokens { min_new_tokens: 2, eos_token_id: vec![1] },
        LogitsProcessor::Constraint(Arc::new(FixedConstraint(vec![true, true, false]))),
        LogitsProcessor::Temperature(0.5),
        LogitsProcessor::Renormalize,
    ];
    let sample = |ids: &[u32], processors: Vec<LogitsProcessor>| {
        let config = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
        Sampler::new(&config, processors, 0).sample(History { ids, prompt_len: 1 }, &mut [0.5, 0.25, 1.0])
    };
    assert_eq!(
        sample(&[5], processors.clone()).unwrap_err().to_string(),
        "no token is left to choose from: each is excluded by `bad_words`, `min_new_tokens` or the regular expression; relax one \
         of them"
    );
    // The end is allowed after two new tokens.
    assert_eq!(sample(&[5, 2, 2], processors).unwrap(), 1);
}

/// `forced_bos_token_id` acts only on a sequence of one token, as in transformers.
#[test]
fn forced_bos_token_applies_only_to_one_token_prompts() {
    let config = GenerationConfig { forced_bos_token_id: Some(2), ..GenerationConfig::default() };
    let pick = |ids: &[u32]| {
        let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
        sampler.sample(History { ids, prompt_len: ids.len() }, &mut [0.5, 0.25, 0.0]).unwrap()
    };
    assert_eq!((pick(&[1]), pick(&[1, 1])), (2, 0));
}
