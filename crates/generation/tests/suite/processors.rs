//! Logits processors against transformers on random logits, the sampler against exact probabilities, ranges of options.

use std::sync::Arc;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    AllowedTokens, Constraint, EarlyStopping, GenerationConfig, GenerationError, History, LogitsFunction,
    LogitsProcessor, Sampler, WhenFull,
};
use candle_gpt2_testing::json_fixture;
use serde_json::{Value, json};

/// f32 logits that went through the same operations in f32, or in f64 where ours are more exact.
const LOGIT: f32 = 1e-5;

fn config(options: &Value) -> GenerationConfig {
    GenerationConfig::default().with_json(&options.to_string()).unwrap()
}

fn process(processors: &[LogitsProcessor], history: History<'_>, logits: &[f32]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    processors.iter().for_each(|processor| processor.process(history, &mut logits).unwrap());
    logits
}

/// The processors of a case, with the function for allowed tokens where the case has one.
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

/// Every processor alone, and many together in the order of transformers. The options are read from their JSON form.
/// What is shown of a draw is what is drawn from: of the same sampler with the same settings.
#[test]
fn probabilities_are_those_of_the_draw() {
    let config = GenerationConfig {
        do_sample: true,
        top_k: 3,
        temperature: 0.8,
        seed: 5,
        ..GenerationConfig::default()
    };
    let logits = [0.5, 2.0, 1.0, -1.0, 1.5];
    let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
    let probabilities = sampler.probabilities(NOTHING, &mut logits.clone()).unwrap();
    let weights =
        [0.0, 2.0_f64, 1.0, 0.0, 1.5].map(|logit| if logit > 0.0 { (logit / 0.8).exp() } else { 0.0 });
    let sum: f64 = weights.iter().sum();
    for (found, weight) in probabilities.iter().zip(weights) {
        assert!((found - weight / sum).abs() < 1e-6, "{probabilities:?}");
    }
    // Asking draws nothing: the next token is that of a sampler that was not asked.
    let mut fresh = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
    for _ in 0..20 {
        sampler.probabilities(NOTHING, &mut logits.clone()).unwrap();
        let drawn = sampler.sample(NOTHING, &mut logits.clone()).unwrap();
        assert_eq!(drawn, fresh.sample(NOTHING, &mut logits.clone()).unwrap());
        assert!(probabilities[drawn as usize] > 0.0);
    }
    let mut greedy = Sampler::new(&GenerationConfig::default(), Vec::new(), 0);
    let of_equals = greedy.probabilities(NOTHING, &mut [0.0, 2.0, 2.0]).unwrap();
    assert_eq!(of_equals, [0.0, 1.0, 0.0], "the first, as it is taken");
    assert!(greedy.probabilities(NOTHING, &mut [0.0, f32::NAN]).is_err());
}

#[test]
fn processed_logits_equal_those_of_transformers() {
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

const NOTHING: History<'static> = History { ids: &[], prompt_len: 0 };
const GONE: f32 = f32::NEG_INFINITY;

fn processed(processor: &LogitsProcessor, logits: &[f32]) -> Vec<f32> {
    process(std::slice::from_ref(processor), NOTHING, logits)
}

#[test]
fn top_k_keeps_the_largest_and_their_equals() {
    let logits = [1.0, 3.0, 2.0, 3.0, 0.0];
    assert_eq!(processed(&LogitsProcessor::TopK(2), &logits), [GONE, 3.0, GONE, 3.0, GONE]);
    assert_eq!(processed(&LogitsProcessor::TopK(1), &logits), [GONE, 3.0, GONE, 3.0, GONE]);
    assert_eq!(processed(&LogitsProcessor::TopK(3), &logits), [GONE, 3.0, 2.0, 3.0, GONE]);
    assert_eq!(processed(&LogitsProcessor::TopK(9), &logits), logits);
}

/// The selection in one pass against a full sort, for lengths around those of its chunks.
#[test]
fn top_k_equals_a_full_sort() {
    let mut state = 7u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Few different values, so that there are equals.
        (state >> 22) as f32 / 64.0
    };
    for length in [1, 15, 16, 17, 63, 64, 65, 200, 1000] {
        let logits: Vec<f32> = (0..length).map(|_| next()).collect();
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        for top_k in [1, 2, 5, 50, 64, length.max(2) - 1, length] {
            let smallest = sorted[top_k.min(length) - 1];
            let expected: Vec<f32> =
                logits.iter().map(|logit| if *logit < smallest { GONE } else { *logit }).collect();
            assert_eq!(processed(&LogitsProcessor::TopK(top_k), &logits), expected, "{top_k} of {length}");
        }
    }
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_p() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let kept = |top_p: f64| {
        processed(&LogitsProcessor::TopP(top_p), &logits).iter().filter(|logit| logit.is_finite()).count()
    };
    assert_eq!([0.0, 0.1, 0.49, 0.6, 0.8, 0.9, 1.0].map(kept), [1, 1, 1, 2, 3, 4, 4]);
    // Of the two least probable the one with the larger id stays, as in the reference.
    let at_the_edge = processed(&LogitsProcessor::TopP(0.8), &logits);
    assert_eq!((at_the_edge[2], at_the_edge[3].is_finite()), (GONE, true));
}

/// More tokens than are sorted at first.
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
                expected[*token] = GONE;
            }
            before += exponentials[*token] / sum;
        }
        assert_eq!(processed(&LogitsProcessor::TopP(top_p), &logits), expected, "{top_p}");
    }
}

/// Against a stable sort of all tokens by their distance from the entropy: the same tokens stay, equals included.
#[test]
fn typical_p_equals_a_full_sort() {
    // Few different values, so that there are equals; and more tokens than are sorted at first.
    let logits: Vec<f32> =
        (0..3000u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 20) as f32 / 1e3).collect();
    let largest = logits.iter().copied().fold(GONE, f32::max);
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
            (0..logits.len()).map(|token| if kept(token) { logits[token] } else { GONE }).collect();
        assert_eq!(processed(&LogitsProcessor::TypicalP(mass), &logits), expected, "{mass}");
    }
}

#[test]
fn penalties_count_what_they_are_defined_on() {
    // Token 1 twice in the prompt and once after it, token 2 twice after it.
    let history = History { ids: &[1, 1, 1, 2, 2], prompt_len: 2 };
    let logits = [1.0, 1.0, -1.0, 1.0];
    let process = |processor| process(&[processor], history, &logits);
    assert_eq!(process(LogitsProcessor::PresencePenalty(0.5)), [1.0, 0.5, -1.5, 1.0]);
    assert_eq!(process(LogitsProcessor::FrequencyPenalty(0.5)), [1.0, 0.5, -2.0, 1.0]);
    assert_eq!(process(LogitsProcessor::RepetitionPenalty(2.0)), [1.0, 0.5, -2.0, 1.0]);
}

/// transformers' `EncoderNoRepeatNGramLogitsProcessor`, whose encoder input is the prompt: what is generated may repeat itself.
#[test]
fn sequences_of_the_prompt_are_not_generated() {
    let of_prompt = |size| {
        let options = json!({"encoder_no_repeat_ngram_size": size});
        LogitsProcessor::of_config(&config(&options))
    };
    let removed = |size, ids: &[u32], prompt_len| {
        let logits = process(&of_prompt(size), History { ids, prompt_len }, &[0.0; 8]);
        (0..8).filter(|id| logits[*id].is_infinite()).collect::<Vec<_>>()
    };
    assert!(of_prompt(0).is_empty());
    assert_eq!(removed(2, &[1, 2, 1, 3, 1], 5), [2, 3]);
    // 5 came after 1 too, but in what was generated.
    assert_eq!(removed(2, &[1, 2, 1, 5, 1], 3), [2]);
    assert_eq!(removed(3, &[1, 2, 4, 7, 1, 2], 4), [4]);
    assert_eq!(removed(3, &[1, 2, 4, 7, 1, 2], 2), [0; 0]);
    assert_eq!(removed(1, &[1, 2, 6], 2), [1, 2]);
    assert_eq!(removed(5, &[1, 2], 2), [0; 0]);
}

/// transformers' `EncoderRepetitionPenaltyLogitsProcessor`: the inverse of the penalty, on the tokens of the prompt.
#[test]
fn tokens_of_the_prompt_are_favoured() {
    let processors = LogitsProcessor::of_config(&config(&json!({"encoder_repetition_penalty": 2.0})));
    let logits = process(&processors, History { ids: &[0, 1, 0, 2], prompt_len: 3 }, &[3.0, -3.0, 3.0, -3.0]);
    assert_eq!(logits, [6.0, -1.5, 3.0, -3.0]);
    assert!(LogitsProcessor::of_config(&config(&json!({"encoder_repetition_penalty": 1.0}))).is_empty());
}

/// Numbers that look random, each below `limit`.
fn random_below(state: &mut u64, limit: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap() % limit
}

/// A sampler counts as a text grows; a processor counts its whole history. The same bits come out, also where a history does
/// not continue the last one: a shorter one, one with another token in it, one with another prompt.
#[test]
fn a_sampler_remembers_what_processors_count_anew() {
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
                    let place = random_below(&mut state, ids.len());
                    ids[place] = 1;
                }
                // The same history again.
                3 => {}
                // Texts that repeat themselves, so that sequences of 33 tokens do.
                _ if case % 2 == 0 => ids.push(u32::try_from(ids.len() % 7).unwrap()),
                _ => ids.push(u32::try_from(random_below(&mut state, VOCABULARY + 2)).unwrap()),
            }
            longest = longest.max(ids.len());
            let logits: Vec<f32> =
                (0..VOCABULARY).map(|_| random_below(&mut state, 2000) as f32 / 300.0 - 3.0).collect();
            let history = History { ids: &ids, prompt_len };
            let expected = process(&processors, history, &logits);
            let mut found = logits.clone();
            // With every token removed the sampler says so, and has removed them.
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
fn allowed_tokens_must_be_tokens() {
    for found in [vec![], vec![1, 4]] {
        let callback = found.clone();
        let processor = LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| callback.clone()));
        let error = processor.process(NOTHING, &mut [0.0; 4]).unwrap_err();
        assert!(matches!(error, GenerationError::AllowedTokens { vocab_size: 4, .. }), "{error}");
    }
}

#[test]
fn functions_change_logits_in_front_of_what_narrows_a_draw() {
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
    let of = |ids: &[u32]| process(&processors, History { ids, prompt_len: 0 }, &[1.0, 4.0, 3.0, 9.0]);
    assert_eq!(of(&[1]), [GONE, 12.0, GONE, GONE], "after the penalty");
    assert_eq!(of(&[3]), [GONE, 4.0, GONE, GONE], "before tokens are suppressed");
    let error = LogitsProcessor::Function(function)
        .process(History { ids: &[4], prompt_len: 0 }, &mut [0.0; 4])
        .unwrap_err();
    assert_eq!((error.to_string().as_str(), error.is_usage()), ("no token 4", false));
}

fn greedy() -> Sampler {
    Sampler::new(&GenerationConfig::default(), Vec::new(), 0)
}

#[test]
fn greedy_takes_the_smallest_id_of_the_largest() {
    assert_eq!(greedy().sample(NOTHING, &mut [0.0, 2.0, 2.0, 1.0]).unwrap(), 1);
    assert_eq!(greedy().sample(NOTHING, &mut [GONE, GONE, -5.0]).unwrap(), 2);
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    for mut logits in
        [vec![0.0, f32::NAN], vec![-f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![GONE; 2], vec![]]
    {
        let error = greedy().sample(NOTHING, &mut logits).unwrap_err();
        assert!(matches!(error, GenerationError::NotFinite), "{logits:?}");
    }
    let nothing_left = vec![LogitsProcessor::SuppressTokens(vec![0, 1])];
    let error = Sampler::new(&GenerationConfig::default(), nothing_left, 0).sample(NOTHING, &mut [0.0; 2]);
    assert!(matches!(error, Err(GenerationError::NoTokenLeft { .. })));
}

/// 100,000 draws through each processor against the probabilities that transformers' processed logits give.
#[test]
fn draws_follow_the_distribution_of_transformers() {
    const DRAWS: u32 = 100_000;
    let fixture = json_fixture("generation");
    let mut drawn_options = std::collections::BTreeSet::new();
    for case in fixture["processors"].as_array().unwrap() {
        // One case of each kind; what only changes scores or keeps all is left to the comparison above.
        let names: Vec<&String> = case["options"].as_object().unwrap().keys().collect();
        if !drawn_options
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
        for _ in 0..DRAWS {
            counts[sampler.sample(history, &mut logits.clone()).unwrap() as usize] += 1;
        }
        assert_counts_follow(
            &counts,
            &exponentials.iter().map(|e| e / sum).collect::<Vec<_>>(),
            &case["options"],
        );
    }
    assert!(drawn_options.len() > 20, "{}", drawn_options.len());
}

/// Pearson's test at a probability of 0.0001 for a wrong alarm, which a fixed seed makes impossible or permanent.
/// Tokens expected less than ten times count together.
fn assert_counts_follow(counts: &[u32], probabilities: &[f64], what: &Value) {
    const NORMAL_QUANTILE: f64 = 3.719;
    let draws = f64::from(counts.iter().sum::<u32>());
    let (mut rare_count, mut rare_expected, mut chi_square, mut cells) = (0.0, 0.0, 0.0, 0.0);
    for (count, probability) in counts.iter().zip(probabilities) {
        let (count, expected) = (f64::from(*count), probability * draws);
        if expected == 0.0 {
            assert_eq!(count, 0.0, "{what}: a removed token was drawn");
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
    // Wilson and Hilferty's quantile of the chi-square distribution.
    let freedom: f64 = cells - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + NORMAL_QUANTILE * spread.sqrt()).powi(3);
    assert!(freedom == 0.0 || chi_square < limit, "{what}: chi-square {chi_square}, limit {limit}");
}

#[test]
fn the_same_seed_draws_the_same_tokens_and_streams_differ() {
    let draws = |seed, stream| -> Vec<u32> {
        let config = GenerationConfig { do_sample: true, seed, ..GenerationConfig::default() };
        let mut sampler = Sampler::new(&config, Vec::new(), stream);
        (0..50).map(|_| sampler.sample(NOTHING, &mut [0.0; 100]).unwrap()).collect()
    };
    assert_eq!(draws(5, 0), draws(5, 0));
    assert_ne!(draws(5, 0), draws(6, 0));
    assert_ne!(draws(5, 0), draws(5, 1));
}

#[test]
fn options_out_of_their_range_are_refused_by_name() {
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
fn options_that_contradict_each_other_are_refused() {
    for (options, told) in [
        (json!({"num_beams": 2, "do_sample": true}), "does not sample"),
        (json!({"num_beams": 2, "penalty_alpha": 0.5}), "one of both"),
        (json!({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}), "does not divide"),
        (json!({"num_beams": 4, "num_beam_groups": 2}), "diversity_penalty"),
        (json!({"num_beams": 2, "num_return_sequences": 3}), "more than `num_beams`"),
        (json!({"penalty_alpha": 0.5, "top_k": 1}), "top_k"),
        (json!({"penalty_alpha": 0.5, "do_sample": true}), "does not sample"),
        (json!({"num_beam_groups": 2}), "beam search"),
        (json!({"diversity_penalty": 1.0}), "beam search"),
        (json!({"num_return_sequences": 2}), "the same"),
        (json!({"num_beams": 2, "stop_strings": "x"}), "stop_strings"),
        (json!({"min_new_tokens": 9, "max_new_tokens": 8}), "more than `max_new_tokens`"),
    ] {
        let error = config(&options).check().unwrap_err();
        assert!(matches!(error, GenerationError::Conflict { .. }) && error.is_usage(), "{options}: {error}");
        assert!(error.to_string().contains(told), "{options}: {error}");
    }
    let sliding = GenerationConfig {
        num_beams: 2,
        when_full: WhenFull::Slide { head: 0 },
        ..GenerationConfig::default()
    };
    assert!(matches!(sliding.check(), Err(GenerationError::Conflict { .. })));
}

fn start_of(max_new_tokens: usize) -> GenerationConfig {
    GenerationConfig { max_new_tokens, ..GenerationConfig::default() }
}

/// What transformers writes into `generation_config.json`, and what it may hold besides.
#[test]
fn a_generation_config_is_read_key_by_key() {
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
    // Null is not set, and what only a draw looks at may be anything without one.
    let unset =
        start_of(7).with_json(r#"{"max_new_tokens": null, "max_length": 9, "temperature": 0.0}"#).unwrap();
    assert_eq!((unset.max_length, unset.check().is_ok()), (Some(9), true));
    let biased = GenerationConfig { sequence_bias: vec![(vec![4], f64::NEG_INFINITY)], ..start_of(7) };
    assert_eq!(biased.clone().with_json(r#"{"top_k": 5}"#).unwrap().sequence_bias, biased.sequence_bias);
    assert_eq!((read.eos_token_id, read.stop_strings), (vec![5], vec!["x".to_owned()]));
    assert_eq!((read.do_sample, read.temperature, read.top_k, read.max_length), (true, 0.9, 0, Some(30)));
    assert_eq!((read.early_stopping, read.max_new_tokens, read.seed), (EarlyStopping::Never, usize::MAX, 3));
    assert_eq!(read.bad_words_ids, [vec![1], vec![2, 3]]);
    for (json, told) in [
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        (r#"{"temperature": "warm"}"#, "`temperature`"),
        (r#"{"top_k": -1}"#, "`top_k`"),
        (r#"{"early_stopping": "soon"}"#, "`early_stopping`"),
        (r#"{"min_length": 3}"#, "`min_length` is 3"),
        (r#"{"guidance_scale": 1.5}"#, "`guidance_scale` is 1.5, which is not supported"),
        (r#"{"watermarking_config": {"bias": 2}}"#, "`watermarking_config`"),
    ] {
        let error = GenerationConfig::default().with_json(json).unwrap_err().to_string();
        assert!(error.contains(told), "{json}: {error}");
    }
}

/// A constraint that allows the same tokens everywhere.
#[derive(Debug)]
struct Always(Vec<bool>);

impl Constraint for Always {
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

/// Whatever excludes tokens excludes them for good: the tokens left are those that each option leaves, with their logits.
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
                words(without(&unbiased)).into_iter().map(|ids| (ids, GONE.into())).collect(),
            ),
            LogitsProcessor::BadWords(words(without(&wanted))),
            LogitsProcessor::NoRepeatNgram(2),
            LogitsProcessor::MinNewTokens { min_new_tokens: 20, eos_token_id: vec![0, 1] },
            LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| match by_function.is_empty() {
                true => vec![3],
                false => by_function.clone(),
            })),
            LogitsProcessor::Constraint(Arc::new(Always((0..12).map(|id| accepted.contains(&id)).collect()))),
            LogitsProcessor::SuppressTokens(vec![7]),
        ];
        let processors: Vec<_> = all.into_iter().filter(|_| random.below(2) > 0).collect();
        let logits: Vec<f32> =
            (0..12).map(|_| f32::from(u16::try_from(random.below(999)).unwrap()) / 64.0).collect();
        let mut expected = logits.clone();
        for processor in &processors {
            let mut alone = logits.clone();
            processor.process(history, &mut alone).unwrap();
            let gone = expected.iter_mut().zip(&alone).filter(|(_, alone)| **alone == GONE);
            gone.for_each(|(logit, _)| *logit = GONE);
        }
        let mut found = logits.clone();
        let mut sampler = Sampler::new(&GenerationConfig::default(), processors.clone(), 0);
        let picked = sampler.sample(history, &mut found);
        assert_eq!(found, expected, "{processors:?}");
        match picked {
            Ok(id) => assert!(expected[id as usize] > GONE),
            Err(error) => {
                assert!(expected.iter().all(|logit| *logit == GONE), "{error}");
                empty += 1;
            }
        }
    }
    assert!(empty > 20, "{empty} empty intersections");
}

#[test]
fn an_empty_intersection_names_the_options() {
    let processors = vec![
        LogitsProcessor::BadWords(vec![vec![0]]),
        LogitsProcessor::MinNewTokens { min_new_tokens: 2, eos_token_id: vec![1] },
        LogitsProcessor::Constraint(Arc::new(Always(vec![true, true, false]))),
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

/// transformers' `ForcedBOSTokenLogitsProcessor` acts where the text so far has one token.
#[test]
fn a_forced_first_token_follows_a_prompt_of_one_token_only() {
    let config = GenerationConfig { forced_bos_token_id: Some(2), ..GenerationConfig::default() };
    let pick = |ids: &[u32]| {
        let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
        sampler.sample(History { ids, prompt_len: ids.len() }, &mut [0.5, 0.25, 0.0]).unwrap()
    };
    assert_eq!((pick(&[1]), pick(&[1, 1])), (2, 0));
}
