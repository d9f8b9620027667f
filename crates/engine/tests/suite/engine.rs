//! The crate as a front end uses it, from a model name to completions, without printing.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_gpt2_engine::{
    CallEvent, Completion, CompletionDriver, DeviceChoice, EngineError, Job, LoadedModel, ModelOptions,
    Progress, Reporter, Silent, Unit, banned_tokens,
};
use candle_gpt2_generation::{Event, GenerationConfig, GenerationError, GenerationOptions, Request};
use candle_gpt2_kernels::interruptible;
use candle_gpt2_testing::{CheckpointFolder, json_fixture};
use candle_gpt2_weights::{GivenFiles, WeightsError};
use serde_json::json;

fn options(folder: &CheckpointFolder) -> ModelOptions {
    ModelOptions { model: folder.path().into(), device: DeviceChoice::Cpu, ..ModelOptions::default() }
}

fn load(folder: &CheckpointFolder) -> LoadedModel {
    options(folder).open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Greedy configuration, the same as for the fixture's expected texts.
fn greedy(model: &LoadedModel, max_new_tokens: usize) -> GenerationConfig {
    let defaults = model.defaults().unwrap();
    let config = GenerationConfig { max_new_tokens, do_sample: false, ..defaults.config().clone() };
    defaults.complete(config).unwrap()
}

/// Job that supplies prompts and records their results.
#[derive(Default)]
struct Prompts {
    waiting: Vec<Vec<u32>>,
    results: Vec<(usize, Result<Vec<Completion>, GenerationError>)>,
    /// Number of prompts requested so far; `most_open` is the peak number without a result.
    requested: usize,
    most_open: usize,
    is_interrupted: bool,
    seeds: Vec<u64>,
}

impl Job for Prompts {
    type Error = EngineError;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
        self.most_open = self.most_open.max(self.requested - self.results.len());
        self.requested += usize::from(!self.waiting.is_empty());
        Ok((!self.waiting.is_empty()).then(|| self.waiting.remove(0)))
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Completion>, GenerationError>,
    ) -> Result<(), EngineError> {
        self.results.push((prompt, texts));
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    fn seed(&self, prompt: usize) -> Option<u64> {
        self.seeds.get(prompt).copied()
    }
}

/// Reporter that records everything.
#[derive(Clone, Default)]
struct RecordingReporter(Arc<Mutex<Vec<String>>>);

impl RecordingReporter {
    fn record(&self, entry: String) {
        self.0.lock().unwrap().push(entry);
    }
}

struct Counted {
    reporter: RecordingReporter,
    done: Mutex<u64>,
}

impl Reporter for RecordingReporter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.record(format!("{what}: {total} {unit:?}"));
        Box::new(Counted { reporter: self.clone(), done: Mutex::new(0) })
    }

    fn note(&self, note: &str) {
        self.record(format!("note: {note}"));
    }
}

impl Progress for Counted {
    fn advance(&self, by: u64) {
        *self.done.lock().unwrap() += by;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.reporter.record(format!("done: {}", self.done.lock().unwrap()));
    }
}

#[test]
fn cloned_model_generates_on_another_thread() {
    let case = json_fixture("tiny_checkpoint_expected")["greedy"][0].clone();
    let model = load(&CheckpointFolder::tiny());
    let prompt = model.vocabulary().encode(case["prompt"].as_str().unwrap()).unwrap();
    assert_eq!(json!(prompt), case["prompt_ids"]);
    let clone = model.clone();
    drop(model);
    let text = std::thread::spawn(move || {
        let config = greedy(&clone, 20);
        clone.text_generator(&prompt, &config).unwrap().collect::<Result<String, _>>().unwrap()
    });
    assert_eq!(json!(text.join().unwrap()), case["text"]);
}

#[test]
fn failing_prompts_do_not_affect_the_others() {
    let model = load(&CheckpointFolder::tiny());
    let config = greedy(&model, 3);
    let prompts = [vec![1, 2], vec![999], vec![], vec![3]];
    for batch_size in [1, 2, 9] {
        let mut job = Prompts { waiting: prompts.to_vec(), ..Prompts::default() };
        model.generate(&mut job, batch_size, &config, &Silent).unwrap();
        job.results.sort_by_key(|(prompt, _)| *prompt);
        let results: Vec<_> = job.results.iter().map(|(_, texts)| texts).collect();
        assert_eq!(results.len(), 4);
        assert!(
            matches!(results[1], Err(GenerationError::IdBeyondVocabulary { id: 999, .. })),
            "{results:?}"
        );
        assert!(matches!(results[2], Err(GenerationError::EmptyPrompt)), "{results:?}");
        for index in [0, 3] {
            let alone = model.text_generator(&prompts[index], &config).unwrap();
            let expected: String = alone.map(Result::unwrap).collect();
            let texts = results[index].as_ref().unwrap();
            assert_eq!((texts.len(), texts[0].text.as_deref()), (1, Some(expected.as_str())));
            assert_eq!((texts[0].ids.len(), texts[0].stop_reason.name()), (3, "max_new_tokens"));
        }
    }
}

/// A prompt with its own seed yields the same completions in a batch as on its own.
#[test]
fn each_prompt_may_have_its_own_seed() {
    let model = load(&CheckpointFolder::tiny());
    let sampled = |seed| {
        let defaults = model.defaults().unwrap();
        let config =
            GenerationConfig { seed, do_sample: true, max_new_tokens: 9, ..defaults.config().clone() };
        defaults.complete(GenerationConfig { num_return_sequences: 2, ..config }).unwrap()
    };
    let prompts: Vec<Vec<u32>> = (1..6).map(|id| vec![id, 2]).collect();
    let seeds = vec![3, 1, 4, 1];
    let texts = |waiting: Vec<Vec<u32>>, seeds: &[u64], seed| {
        let mut job = Prompts { waiting, seeds: seeds.to_vec(), ..Prompts::default() };
        model.generate(&mut job, 3, &sampled(seed), &Silent).unwrap();
        job.results.sort_by_key(|(prompt, _)| *prompt);
        job.results.into_iter().map(|(_, texts)| texts.unwrap()).collect::<Vec<_>>()
    };
    let found = texts(prompts.clone(), &seeds, 7);
    assert_ne!(found, texts(prompts.clone(), &[], 7));
    // The last prompt uses the seed of the configuration.
    for ((prompt, seed), found) in prompts.into_iter().zip([3, 1, 4, 1, 7]).zip(found) {
        assert_eq!(vec![found], texts(vec![prompt], &[], seed), "seed {seed}");
    }
}

/// A checkpoint's `max_time` applies even if the caller sets no limit.
#[test]
fn max_time_of_a_checkpoint_applies() {
    for (max_time, pieces) in [(3600.0, 6), (1e-9, 1)] {
        let json = json!({"max_new_tokens": 6, "do_sample": false, "max_time": max_time});
        let model = load(&CheckpointFolder::tiny().with("generation_config.json", json.to_string()));
        let defaults = model.defaults().unwrap();
        let config = defaults.complete(defaults.config().clone()).unwrap();
        assert_eq!(config.max_time, Some(max_time));
        let mut text = model.text_generator(&[1, 2], &config).unwrap();
        text.by_ref().collect::<Result<String, _>>().unwrap();
        assert_eq!(text.ids().len(), pieces, "{max_time} seconds");
        let mut job = Prompts { waiting: vec![vec![1, 2]], ..Prompts::default() };
        model.generate(&mut job, 2, &config, &Silent).unwrap();
        let (_, texts) = &job.results[0];
        assert_eq!(texts.as_ref().unwrap()[0].ids.len(), pieces, "{max_time} seconds, in a batch");
    }
}

/// Generating a batch step by step returns the same completions as generating each prompt alone.
#[test]
fn stepwise_batch_equals_single_completions() {
    let model = load(&CheckpointFolder::tiny());
    let config = Arc::new(greedy(&model, 5));
    let request = |id: u32| Request::new(vec![id, 2], Arc::clone(&config));
    let started = |requests: Vec<Request>| {
        let mut texts = CompletionDriver::new(model.scheduler_for(&requests, 2, None)?);
        texts.begin(requests, ());
        while let Some((_, _, taken)) = texts.feed(usize::MAX) {
            taken?;
        }
        Ok::<_, EngineError>(texts)
    };
    let mut texts = started((1..6).map(request).collect()).unwrap();
    let mut results = vec![String::new(); 5];
    while !texts.is_idle() {
        let (events, failure) = texts.step(&|| ControlFlow::Continue(()));
        assert!(failure.is_none());
        for CallEvent { prompt, event, .. } in events {
            if let Event::Token { text, .. } = event {
                results[prompt].push_str(&text);
            }
        }
    }
    for (id, text) in (1..6).zip(&results) {
        let alone = model.text_generator(&[id, 2], &config).unwrap();
        assert_eq!(alone.map(Result::unwrap).collect::<String>(), *text);
    }
    let error = started(vec![request(1), request(999)]).err().unwrap();
    assert!(matches!(error, EngineError::Generation(GenerationError::IdBeyondVocabulary { id: 999, .. })));
    let mut texts = started(vec![request(1)]).unwrap();
    let (events, failure) = interruptible(Arc::new(|| true), || texts.step(&|| ControlFlow::Continue(())));
    assert!(events.is_empty() && failure.is_some() && texts.is_idle());
}

/// Interrupting any kind of generation during a pass returns the tokens from earlier passes.
#[test]
fn interrupted_generation_returns_the_tokens_so_far() {
    let model = load(&CheckpointFolder::tiny());
    // Counts the interruption checks of one pass.
    let checks = Arc::new(Mutex::new(0_usize));
    let count = Arc::clone(&checks);
    let never = move || {
        *count.lock().unwrap() += 1;
        false
    };
    let score = || candle_gpt2_generation::score(model.model(), &[1, 2, 3], 4, 0, &|_| {});
    interruptible(Arc::new(never), score).unwrap();
    let per_pass = *checks.lock().unwrap();
    let beams = GenerationConfig { num_beams: 2, ..greedy(&model, 12) };
    let contrastive = GenerationConfig { penalty_alpha: 0.6, top_k: 3, ..greedy(&model, 12) };
    for (config, has_all) in [(greedy(&model, 12), true), (beams, false), (contrastive, true)] {
        let texts = || {
            let mut job = Prompts { waiting: vec![vec![1, 2, 3]], ..Prompts::default() };
            model.generate(&mut job, 1, &config, &Silent).unwrap();
            let (_, texts) = job.results.pop().unwrap();
            texts.unwrap().pop().unwrap()
        };
        let whole = texts();
        assert_eq!((whole.ids.len(), whole.stop_reason.name()), (12, "max_new_tokens"));
        let interrupted_at = |checks: usize| {
            let left = Arc::new(Mutex::new(checks));
            let check = move || {
                let mut left = left.lock().unwrap();
                *left = left.saturating_sub(1);
                *left == 0
            };
            interruptible(Arc::new(check), texts)
        };
        for checks in 1..=4 * per_pass {
            assert_eq!(interrupted_at(checks).stop_reason.name(), "interrupted", "{checks}");
        }
        // Interrupts during the prefill, at the beginning of a token's pass, and in the middle of a pass.
        for (checks, passes) in [(1, 0), (per_pass, 1), (4 * per_pass + 3, 4)] {
            let found = interrupted_at(checks);
            assert_eq!(found.stop_reason.name(), "interrupted", "{checks}: {found:?}");
            let most = if config.penalty_alpha > 0.0 { passes.max(1) - 1 } else { passes };
            assert!(found.ids.len() <= most && found.ids.len() + 1 >= most, "{checks}: {found:?}");
            assert!(!has_all || whole.ids.starts_with(&found.ids), "{checks}: {found:?}");
        }
    }
    assert!(interruptible(Arc::new(|| true), score).is_err());
}

/// Completions without tokens finish immediately, but the number of open prompts is still limited.
#[test]
fn number_of_open_prompts_is_limited() {
    let model = load(&CheckpointFolder::tiny());
    for max_new_tokens in [0, 2] {
        let mut job = Prompts { waiting: vec![vec![1, 2]; 100], ..Prompts::default() };
        model.generate(&mut job, 4, &greedy(&model, max_new_tokens), &Silent).unwrap();
        assert_eq!((job.results.len(), job.requested), (100, 100));
        let ids = |text: &Completion| text.ids.len();
        assert!(job.results.iter().all(|(_, texts)| ids(&texts.as_ref().unwrap()[0]) == max_new_tokens));
        // The job requests another prompt while the number of open prompts is below twice the batch size.
        assert!(job.most_open < 2 * 4, "{} prompts were open", job.most_open);
    }
}

/// The memory check counts the tokens that the sequences can reach and runs before any work.
#[cfg(target_os = "linux")]
#[test]
fn batch_that_exceeds_memory_is_rejected_before_any_work() {
    /// Bytes per token: 2 · 3 · 28 values of 4 bytes.
    const OF_TOKEN: usize = 2 * 3 * 28 * 4;
    const COPIES: usize = 4096;
    let model = load(&CheckpointFolder::tiny());
    let available = candle_gpt2_engine::free_memory(model.device()).unwrap();
    // At 48 tokens each, a full context, the sequences need twice the free memory. At 2 tokens each, they
    // need a twelfth of it.
    let prompts = (2 * available / (48 * OF_TOKEN)).div_ceil(COPIES);
    let config = GenerationConfig {
        do_sample: true,
        num_return_sequences: COPIES,
        max_new_tokens: 100,
        ..model.defaults().unwrap().config().clone()
    };
    // The job is interrupted from the start, so it ends right after the memory check.
    let generate = |config: &GenerationConfig| {
        let waiting = vec![vec![1, 2]; prompts];
        let mut job = Prompts { waiting, is_interrupted: true, ..Prompts::default() };
        let result = model.generate(&mut job, usize::MAX, config, &Silent);
        assert!(job.results.is_empty());
        result
    };
    let error = generate(&config).unwrap_err();
    let expected = prompts * COPIES;
    let is_expected = matches!(error, EngineError::NoRoom { rows, tokens: 48, needed, .. } if rows == expected && needed == rows * 48 * OF_TOKEN);
    assert!(is_expected && error.is_usage(), "{error}");
    generate(&GenerationConfig { max_length: Some(3), ..config }).unwrap();
}

/// Loads a model entirely from memory, as in a web page, without opening a file.
#[test]
fn model_loads_from_bytes() {
    let folder = CheckpointFolder::tiny();
    let read = |name: &str| std::fs::read(folder.file(name)).unwrap();
    let files_with = |config: Vec<u8>, generation_config: &'static str| {
        GivenFiles::new("page")
            .with_bytes("config.json", config)
            .with_bytes("tokenizer.json", read("tokenizer.json"))
            .with_bytes("generation_config.json", generation_config.as_bytes())
            .with_bytes("model.safetensors", read("model.safetensors"))
    };
    let options = ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() };
    let files = files_with(read("config.json"), r#"{"max_new_tokens": 7, "do_sample": false}"#);
    let model = options.open_given(files, &Silent).unwrap().load(&Silent).unwrap();
    let config = model.defaults().unwrap().config().clone();
    assert_eq!((config.max_new_tokens, config.do_sample), (7, false));
    let case = json_fixture("tiny_checkpoint_expected")["greedy"][0].clone();
    let prompt = model.vocabulary().encode(case["prompt"].as_str().unwrap()).unwrap();
    let mut job = Prompts { waiting: vec![prompt], ..Prompts::default() };
    model.generate(&mut job, 1, &greedy(&model, 20), &Silent).unwrap();
    let text = job.results[0].1.as_ref().unwrap()[0].text.clone();
    assert_eq!(json!(text), case["text"]);

    let files = files_with(read("config.json"), r#"{"guidance_scale": 2}"#);
    let error = options.open_given(files, &Silent).unwrap().defaults().unwrap_err().to_string();
    let file = Path::new("page").join("generation_config.json");
    assert!(
        error.starts_with(&format!("{}: `guidance_scale` 2 is not supported", file.display())),
        "{error}"
    );
    let foreign = String::from_utf8(read("config.json")).unwrap().replace("\"n_layer\": 3", "\"n_layer\": 4");
    let error = options.open_given(files_with(foreign.into_bytes(), "{}"), &Silent).unwrap_err();
    assert!(matches!(error, EngineError::Weights(WeightsError::Mismatches { .. })), "{error}");
}

#[test]
fn reporter_receives_progress() {
    let folder = CheckpointFolder::tiny();
    let reporter = RecordingReporter::default();
    let opened = options(&folder).open(&reporter).unwrap();
    assert_eq!(*reporter.0.lock().unwrap(), Vec::<String>::new(), "no long job was started");
    let model = opened.load(&reporter).unwrap();
    // Four bytes for each parameter of the checkpoint.
    let bytes = 4 * model.model().parameter_count();
    assert_eq!(*reporter.0.lock().unwrap(), [format!("loading: {bytes} Bytes"), format!("done: {bytes}")]);
    reporter.0.lock().unwrap().clear();
    let defaults = model.defaults().unwrap();
    let config = GenerationConfig {
        num_beams: 2,
        do_sample: false,
        max_new_tokens: 4,
        eos_token_id: vec![],
        ..defaults.config().clone()
    };
    let config = defaults.complete(config).unwrap();
    let mut job = Prompts { waiting: vec![vec![1, 2]], ..Prompts::default() };
    model.generate(&mut job, 1, &config, &reporter).unwrap();
    assert_eq!(job.results[0].1.as_ref().unwrap()[0].ids.len(), 4);
    assert_eq!(*reporter.0.lock().unwrap(), ["searching: 4 Items(\"tokens\")", "done: 4"]);
}

#[test]
fn invalid_inputs_are_rejected_before_the_weights_load() {
    let folder = CheckpointFolder::tiny();
    let bf16 = ModelOptions { dtype: Some("bf16".parse().unwrap()), ..options(&folder) };
    let error = bf16.open(&Silent).unwrap_err();
    assert!(
        matches!(error, EngineError::Weights(WeightsError::NotOnCpu { .. })) && error.is_usage(),
        "{error}"
    );
    let tf32 = ModelOptions { tf32: true, ..options(&folder) };
    let error = tf32.open(&Silent).unwrap_err();
    assert!(matches!(error, EngineError::NoTf32 { .. }) && error.is_usage(), "{error}");
    let other = folder.with_config(json!({"vocab_size": 100})).with_tensors(|tensors| {
        let rows = tensors["transformer.wte.weight"].narrow(0, 0, 100).unwrap().contiguous().unwrap();
        tensors.insert("transformer.wte.weight".into(), rows);
    });
    let error = options(&other).open(&Silent).unwrap().vocabulary().encode("The dog").unwrap_err();
    assert!(matches!(error, EngineError::ForeignTokenizer { id: 289, vocab_size: 100 }), "{error}");
    assert!(!error.is_usage(), "the files are at fault");
    let bare = CheckpointFolder::tiny().without("tokenizer.json").without("vocab.json").without("merges.txt");
    let opened = options(&bare).open(&Silent).unwrap();
    let error = opened.vocabulary().encode("The dog").unwrap_err();
    let is_expected = matches!(&error, EngineError::Weights(WeightsError::NoTokenizer { folder, .. }) if folder == bare.path());
    assert!(is_expected, "{error}");
    let defaults = opened.defaults().unwrap();
    let stops = GenerationConfig { stop_strings: vec!["x".into()], ..defaults.config().clone() };
    let error = defaults.complete(stops).unwrap_err();
    assert!(matches!(error, EngineError::Generation(GenerationError::StopStringsWithoutTokenizer)));
}

/// An invalid `generation_config.json` affects only callers that generate.
#[test]
fn generation_config_is_validated_on_use() {
    let broken = CheckpointFolder::tiny().with("generation_config.json", r#"{"guidance_scale": 2}"#);
    let model = load(&broken);
    let expected = "generation_config.json: `guidance_scale` 2 is not supported; remove the key";
    for _ in 0..2 {
        let error = model.defaults().unwrap_err();
        assert!(
            matches!(error, EngineError::Defaults { .. }) && error.to_string().ends_with(expected),
            "{error}"
        );
    }
    let wrong = CheckpointFolder::tiny().with("generation_config.json", r#"{"repetition_penalty": 0}"#);
    let model = load(&wrong);
    let defaults = model.defaults().unwrap();
    let error = defaults.complete(defaults.config().clone()).unwrap_err();
    assert!(
        !error.is_usage() && error.to_string().contains("generation_config.json: `repetition_penalty`"),
        "{error}"
    );
    let mended = GenerationConfig { repetition_penalty: 1.5, ..defaults.config().clone() };
    assert_eq!(defaults.complete(mended.clone()).unwrap().repetition_penalty, 1.5);
    let own = defaults.complete(GenerationConfig { top_p: 7.0, ..mended }).unwrap_err();
    assert!(own.is_usage() && !own.to_string().contains("generation_config.json"), "{own}");
}

/// The default Hub options disable the network and the cache.
#[cfg(feature = "hub")]
#[test]
fn hub_is_not_contacted_by_default() {
    use candle_gpt2_engine::HubError;
    let options = ModelOptions { model: "someone/tiny".into(), ..ModelOptions::default() };
    let error = options.open(&Silent).unwrap_err();
    assert!(matches!(error, EngineError::Hub(HubError::NotCached { .. })), "{error}");
    let file = ModelOptions { model: "someone/tiny.gguf".into(), ..ModelOptions::default() };
    let error = file.open(&Silent).unwrap_err();
    let is_expected = matches!(&error, EngineError::Weights(WeightsError::NotFound { path }) if path.as_os_str() == "someone/tiny.gguf");
    assert!(is_expected, "{error}");
}

/// vLLM's `bad_words`: a word is banned with and without a leading space, in either spelling.
#[test]
fn word_is_banned_with_and_without_a_leading_space() {
    let opened = ModelOptions::default().open(&Silent).unwrap();
    let vocabulary = opened.vocabulary();
    let forms = [vocabulary.encode("king").unwrap(), vocabulary.encode(" king").unwrap()];
    assert_ne!(forms[0], forms[1]);
    for word in ["king", " king", "\n king"] {
        assert_eq!(banned_tokens(vocabulary, word).unwrap(), forms, "{word:?}");
        let options =
            GenerationOptions { bad_words: Some(vec![word.into()]), ..GenerationOptions::default() };
        let config = opened.defaults().unwrap().changed_by(&options).unwrap();
        assert_eq!(config.bad_words_ids, forms, "{word:?}");
    }
    for space in [" ", "\n"] {
        assert_eq!(banned_tokens(vocabulary, space).unwrap(), [vocabulary.encode(space).unwrap()]);
    }
}

/// Rows of the vocabulary without a token are never sampled (karpathy/nanoGPT#169).
#[test]
fn vocabulary_padding_is_never_sampled() {
    // The tokenizer has 300 tokens; the next 20 rows are padding with the largest logits.
    let folder = CheckpointFolder::tiny().with_config(json!({"vocab_size": 320})).with_tensors(|tensors| {
        let wte = tensors["transformer.wte.weight"].clone();
        let padding = (wte.narrow(0, 0, 20).unwrap() * 50.0).unwrap();
        let padded = candle_core::Tensor::cat(&[&wte, &padding], 0).unwrap();
        tensors.insert("transformer.wte.weight".into(), padded);
    });
    let model = load(&folder);
    let sampled = GenerationConfig { do_sample: true, temperature: 3.0, top_k: 320, ..greedy(&model, 40) };
    for config in [sampled, GenerationConfig { num_beams: 3, ..greedy(&model, 9) }] {
        let mut job = Prompts { waiting: vec![vec![1, 2], vec![3], vec![4, 5]], ..Prompts::default() };
        model.generate(&mut job, 3, &config, &Silent).unwrap();
        for (_, texts) in job.results {
            let ids = &texts.unwrap()[0].ids;
            assert!(!ids.is_empty() && ids.iter().all(|id| *id < 300), "{ids:?}");
        }
    }
}

#[test]
fn zero_temperature_generates_greedily() {
    let folder = CheckpointFolder::tiny();
    let model = load(&folder);
    let options = |temperature, do_sample| GenerationOptions {
        max_new_tokens: Some(12),
        temperature,
        do_sample,
        top_k: temperature.and(Some(3)),
        ..GenerationOptions::default()
    };
    let text = |options: GenerationOptions| {
        let config = model.defaults().unwrap().changed_by(&options).unwrap();
        model.text_generator(&[5, 6, 7], &config).unwrap().collect::<Result<String, _>>().unwrap()
    };
    assert_eq!(text(options(Some(0.0), None)), text(options(None, Some(false))));
}

#[test]
fn access_tokens_are_hidden_in_debug_output() {
    let folder = CheckpointFolder::tiny();
    let mut options = options(&folder);
    options.hub.token = Some("hf_secret".into());
    let opened = options.open(&Silent).unwrap();
    for shown in [format!("{options:?}"), format!("{opened:#?}"), format!("{:?}", options.hub)] {
        assert!(shown.contains("token: Some(") && !shown.contains("hf_secret"), "{shown}");
    }
}
