//! Constrained generation with whole models: every finished completion conforms.
//!
//! Completions are generated alone, in batches, with several sequences per prompt, and by beam search.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_gpt2_engine::{BUILT_IN, LoadedModel, ModelOptions, Silent};
use candle_gpt2_generation::{
    Event, GenerationConfig, LogitsProcessor, Request, SchedulerOptions, StopReason, beam_search,
};
use candle_gpt2_grammar::{Compiler, Grammar};
use candle_gpt2_testing::fixture_path;

use crate::common::{Case, cases};

fn models() -> Vec<LoadedModel> {
    let paths = [fixture_path("tiny-checkpoint"), PathBuf::from(BUILT_IN)];
    let load = |model: PathBuf| {
        let options = ModelOptions { model, ..ModelOptions::default() };
        options.open(&Silent).unwrap().load(&Silent).unwrap()
    };
    paths.into_iter().map(load).collect()
}

/// Finished completion: tokens, decoded text and stop reason.
type Completion = (Vec<u32>, String, StopReason);

/// Generation configurations to test.
fn configurations(model: &LoadedModel, eos_token_id: &[u32]) -> Vec<GenerationConfig> {
    let max_new_tokens = 40.min(model.config().n_positions - 4);
    let common = GenerationConfig {
        max_new_tokens,
        eos_token_id: eos_token_id.to_vec(),
        ..GenerationConfig::default()
    };
    let sampled = GenerationConfig { do_sample: true, temperature: 2.0, top_k: 0, ..common.clone() };
    let mut configurations = vec![GenerationConfig { do_sample: false, ..common.clone() }];
    configurations.extend((0..4).map(|seed| GenerationConfig { seed, ..sampled.clone() }));
    configurations.push(GenerationConfig { num_return_sequences: 3, ..sampled.clone() });
    configurations.push(GenerationConfig { min_new_tokens: 1, repetition_penalty: 1.5, ..sampled.clone() });
    configurations.push(GenerationConfig { prompt_lookup_num_tokens: Some(5), do_sample: false, ..common });
    configurations
}

/// Generates the completions for all requests in one batch.
fn completions(
    model: &LoadedModel,
    requests: Vec<Request>,
    max_texts: usize,
) -> BTreeMap<(u64, usize), Completion> {
    let kv_tokens = max_texts * 64;
    let mut scheduler = model.scheduler(SchedulerOptions { max_texts, kv_tokens, chunk_tokens: 16 }).unwrap();
    requests.into_iter().for_each(|request| _ = scheduler.submit(request).unwrap());
    let mut completions: BTreeMap<(u64, usize), Completion> = BTreeMap::new();
    while !scheduler.is_idle() {
        for event in scheduler.step().into_result().unwrap() {
            match event {
                Event::Token { request, sequence, id, text, stop_reason, .. } => {
                    let completion = completions.entry((request.0, sequence));
                    let completion =
                        completion.or_insert((Vec::new(), String::new(), StopReason::MaxNewTokens));
                    completion.0.push(id);
                    completion.1.push_str(&text);
                    completion.2 = stop_reason.unwrap_or(completion.2);
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    completions
}

fn check(case: &Case, text: &str, reason: StopReason) {
    match reason {
        StopReason::Eos | StopReason::Complete => assert!((case.is_whole)(text), "{}: {text:?}", case.name),
        // A truncated character decodes to U+FFFD.
        _ => {
            let text = text.strip_suffix('\u{FFFD}').unwrap_or(text);
            assert!((case.is_prefix)(text), "{}: {text:?}", case.name);
        }
    }
}

fn conforming(compiler: &Compiler, grammar: &Grammar, config: &GenerationConfig) -> LogitsProcessor {
    compiler.compile(grammar, &config.eos_token_id).unwrap()
}

#[test]
fn finished_completions_conform_alone_and_in_a_batch() {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for model in models() {
        let compiler = Compiler::new(model.vocabulary()).unwrap();
        for case in cases() {
            for ends in [&[0][..], &[]] {
                let request = |config: &GenerationConfig| {
                    let mut request = Request::new(vec![5, 9, 3], config.clone());
                    request.processors.push(conforming(&compiler, &case.grammar, config));
                    request
                };
                let requests: Vec<Request> = configurations(&model, ends).iter().map(request).collect();
                let batched = completions(&model, requests.clone(), 5);
                for (_, text, reason) in batched.values() {
                    check(&case, text, *reason);
                    *reasons.entry(reason.name()).or_default() += 1;
                }
                for (number, request) in (0..).zip(requests) {
                    for ((_, sequence), text) in completions(&model, vec![request], 1) {
                        assert_eq!(text, batched[&(number, sequence)], "{}", case.name);
                    }
                }
            }
        }
    }
    assert!(["eos", "complete", "max_new_tokens"].iter().all(|reason| reasons[reason] > 5), "{reasons:?}");
}

/// One constraint can serve many requests, such as all the prompts in a file.
#[test]
fn one_constraint_serves_many_requests() {
    let model = models().swap_remove(1);
    let compiler = Compiler::new(model.vocabulary()).unwrap();
    for case in cases() {
        let sampled = GenerationConfig {
            do_sample: true,
            temperature: 2.0,
            top_k: 0,
            max_new_tokens: 20,
            ..GenerationConfig::default()
        };
        let shared = conforming(&compiler, &case.grammar, &sampled);
        let request = |prompt: u32, processor: &LogitsProcessor| {
            let mut request = Request::new(vec![prompt, 7], sampled.clone());
            request.processors.push(processor.clone());
            request
        };
        let batched = completions(&model, (1..9).map(|prompt| request(prompt, &shared)).collect(), 8);
        for ((number, _), text) in &batched {
            let own = conforming(&compiler, &case.grammar, &sampled);
            let prompt = u32::try_from(*number).unwrap() + 1;
            assert_eq!(&completions(&model, vec![request(prompt, &own)], 1)[&(0, 0)], text, "{}", case.name);
            check(&case, &text.1, text.2);
        }
    }
}

#[test]
fn beam_search_results_conform() {
    let mut finished = 0;
    for model in models() {
        let compiler = Compiler::new(model.vocabulary()).unwrap();
        for case in cases() {
            for num_beam_groups in [1, 2] {
                let diversity_penalty = if num_beam_groups > 1 { 0.5 } else { 0.0 };
                let config = GenerationConfig {
                    num_beams: 4,
                    num_return_sequences: 4,
                    num_beam_groups,
                    diversity_penalty,
                    do_sample: false,
                    max_new_tokens: 40,
                    eos_token_id: vec![0],
                    ..GenerationConfig::default()
                };
                let mut processors = LogitsProcessor::of_config(&config);
                conforming(&compiler, &case.grammar, &config).add_to(&mut processors);
                let proceed = || ControlFlow::Continue(());
                let beams =
                    beam_search(model.model(), &[5, 9, 3], &config, &processors, None, &proceed).unwrap();
                for beam in beams {
                    let decoded = model.vocabulary().tokenizer().unwrap().decode(&beam.ids, true).unwrap();
                    check(&case, &decoded, beam.stop_reason);
                    finished += usize::from(beam.stop_reason == StopReason::Eos);
                }
            }
        }
    }
    assert!(finished > 10, "{finished}");
}
