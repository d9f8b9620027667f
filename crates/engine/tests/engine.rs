//! From a name to texts, as a face of the project does it: owned, told of progress, with nothing printed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_gpt2_engine::{
    DeviceChoice, EngineError, Happened, Job, LoadedModel, ModelOptions, Progress, Reporter, Silent, Text,
    Texts, Unit, banned_tokens,
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

/// Greedy, as the fixture's texts are.
fn greedy(model: &LoadedModel, max_new_tokens: usize) -> GenerationConfig {
    let defaults = model.defaults().unwrap();
    let config = GenerationConfig { max_new_tokens, do_sample: false, ..defaults.config().clone() };
    defaults.complete(config).unwrap()
}

/// The prompts of a test, and what becomes of each.
#[derive(Default)]
struct Prompts {
    waiting: Vec<Vec<u32>>,
    made: Vec<(usize, Result<Vec<Text>, GenerationError>)>,
    /// Prompts that were given, and the most of them at a time that had no texts yet.
    given: usize,
    most_open: usize,
    is_interrupted: bool,
    seeds: Vec<u64>,
}

impl Job for Prompts {
    type Error = EngineError;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
        self.most_open = self.most_open.max(self.given - self.made.len());
        self.given += usize::from(!self.waiting.is_empty());
        Ok((!self.waiting.is_empty()).then(|| self.waiting.remove(0)))
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Text>, GenerationError>,
    ) -> Result<(), EngineError> {
        self.made.push((prompt, texts));
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    fn seed(&self, prompt: usize) -> Option<u64> {
        self.seeds.get(prompt).copied()
    }
}

/// Keeps what it is told.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<String>>>);

impl Kept {
    fn keep(&self, told: String) {
        self.0.lock().unwrap().push(told);
    }
}

struct Counted {
    kept: Kept,
    done: Mutex<u64>,
}

impl Reporter for Kept {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.keep(format!("{what}: {total} {unit:?}"));
        Box::new(Counted { kept: self.clone(), done: Mutex::new(0) })
    }

    fn note(&self, note: &str) {
        self.keep(format!("note: {note}"));
    }
}

impl Progress for Counted {
    fn advance(&self, by: u64) {
        *self.done.lock().unwrap() += by;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.kept.keep(format!("done: {}", self.done.lock().unwrap()));
    }
}

#[test]
fn a_model_is_owned_and_serves_any_thread() {
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
fn a_prompt_that_fails_is_told_and_the_others_are_made() {
    let model = load(&CheckpointFolder::tiny());
    let config = greedy(&model, 3);
    let prompts = [vec![1, 2], vec![999], vec![], vec![3]];
    for batch_size in [1, 2, 9] {
        let mut job = Prompts { waiting: prompts.to_vec(), ..Prompts::default() };
        model.generate(&mut job, batch_size, &config, &Silent).unwrap();
        job.made.sort_by_key(|(prompt, _)| *prompt);
        let made: Vec<_> = job.made.iter().map(|(_, texts)| texts).collect();
        assert_eq!(made.len(), 4);
        assert!(matches!(made[1], Err(GenerationError::IdBeyondVocabulary { id: 999, .. })), "{made:?}");
        assert!(matches!(made[2], Err(GenerationError::EmptyPrompt)), "{made:?}");
        for index in [0, 3] {
            let alone = model.text_generator(&prompts[index], &config).unwrap();
            let expected: String = alone.map(Result::unwrap).collect();
            let texts = made[index].as_ref().unwrap();
            assert_eq!((texts.len(), texts[0].text.as_deref()), (1, Some(expected.as_str())));
            assert_eq!((texts[0].ids.len(), texts[0].stop_reason.name()), (3, "max_new_tokens"));
        }
    }
}

/// The texts of each prompt with its own seed are those that it gives alone.
#[test]
fn prompts_may_have_seeds_of_their_own() {
    let model = load(&CheckpointFolder::tiny());
    let drawn = |seed| {
        let defaults = model.defaults().unwrap();
        let config =
            GenerationConfig { seed, do_sample: true, max_new_tokens: 9, ..defaults.config().clone() };
        defaults.complete(GenerationConfig { num_return_sequences: 2, ..config }).unwrap()
    };
    let prompts: Vec<Vec<u32>> = (1..6).map(|id| vec![id, 2]).collect();
    let seeds = vec![3, 1, 4, 1];
    let texts = |waiting: Vec<Vec<u32>>, seeds: &[u64], seed| {
        let mut job = Prompts { waiting, seeds: seeds.to_vec(), ..Prompts::default() };
        model.generate(&mut job, 3, &drawn(seed), &Silent).unwrap();
        job.made.sort_by_key(|(prompt, _)| *prompt);
        job.made.into_iter().map(|(_, texts)| texts.unwrap()).collect::<Vec<_>>()
    };
    let found = texts(prompts.clone(), &seeds, 7);
    assert_ne!(found, texts(prompts.clone(), &[], 7));
    // The last one has the seed of all.
    for ((prompt, seed), found) in prompts.into_iter().zip([3, 1, 4, 1, 7]).zip(found) {
        assert_eq!(vec![found], texts(vec![prompt], &[], seed), "seed {seed}");
    }
}

/// A time that the checkpoint itself sets is counted, with nothing said by the caller.
#[test]
fn the_max_time_of_a_checkpoint_works() {
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
        let (_, texts) = &job.made[0];
        assert_eq!(texts.as_ref().unwrap()[0].ids.len(), pieces, "{max_time} seconds, in a batch");
    }
}

/// Step by step there are the same texts.
#[test]
fn a_batch_is_driven_by_its_caller() {
    let model = load(&CheckpointFolder::tiny());
    let config = Arc::new(greedy(&model, 5));
    let request = |id: u32| Request::new(vec![id, 2], Arc::clone(&config));
    let begun = |requests: Vec<Request>| {
        let mut texts = Texts::new(model.scheduler_for(&requests, 2, None)?);
        texts.begin(requests, ());
        while let Some((_, _, taken)) = texts.feed(usize::MAX) {
            taken?;
        }
        Ok::<_, EngineError>(texts)
    };
    let mut texts = begun((1..6).map(request).collect()).unwrap();
    let mut made = vec![String::new(); 5];
    while !texts.is_idle() {
        let (happened, failure) = texts.step(&|| ControlFlow::Continue(()));
        assert!(failure.is_none());
        for Happened { prompt, event, .. } in happened {
            if let Event::Token { text, .. } = event {
                made[prompt].push_str(&text);
            }
        }
    }
    for (id, text) in (1..6).zip(&made) {
        let alone = model.text_generator(&[id, 2], &config).unwrap();
        assert_eq!(alone.map(Result::unwrap).collect::<String>(), *text);
    }
    let refused = begun(vec![request(1), request(999)]).err().unwrap();
    assert!(matches!(refused, EngineError::Generation(GenerationError::IdBeyondVocabulary { id: 999, .. })));
    let mut texts = begun(vec![request(1)]).unwrap();
    let (happened, failure) = interruptible(Arc::new(|| true), || texts.step(&|| ControlFlow::Continue(())));
    assert!(happened.is_empty() && failure.is_some() && texts.is_idle());
}

/// A model that is interrupted within a pass hands on what there was before it, however the texts are made.
#[test]
fn an_interrupted_model_hands_on_what_there_is() {
    let model = load(&CheckpointFolder::tiny());
    // How often a pass asks.
    let asked = Arc::new(Mutex::new(0_usize));
    let count = Arc::clone(&asked);
    let never = move || {
        *count.lock().unwrap() += 1;
        false
    };
    let score = || candle_gpt2_generation::score(model.model(), &[1, 2, 3], 4, 0, &|_| {});
    interruptible(Arc::new(never), score).unwrap();
    let per_pass = *asked.lock().unwrap();
    let beams = GenerationConfig { num_beams: 2, ..greedy(&model, 12) };
    let contrastive = GenerationConfig { penalty_alpha: 0.6, top_k: 3, ..greedy(&model, 12) };
    for (config, has_all) in [(greedy(&model, 12), true), (beams, false), (contrastive, true)] {
        let texts = || {
            let mut job = Prompts { waiting: vec![vec![1, 2, 3]], ..Prompts::default() };
            model.generate(&mut job, 1, &config, &Silent).unwrap();
            let (_, texts) = job.made.pop().unwrap();
            texts.unwrap().pop().unwrap()
        };
        let whole = texts();
        assert_eq!((whole.ids.len(), whole.stop_reason.name()), (12, "max_new_tokens"));
        let ended = |asked: usize| {
            let left = Arc::new(Mutex::new(asked));
            let check = move || {
                let mut left = left.lock().unwrap();
                *left = left.saturating_sub(1);
                *left == 0
            };
            interruptible(Arc::new(check), texts)
        };
        for asked in 1..=4 * per_pass {
            assert_eq!(ended(asked).stop_reason.name(), "interrupted", "{asked}");
        }
        // In the prompt, at the beginning of a token's pass, and in the middle of one.
        for (asked, passes) in [(1, 0), (per_pass, 1), (4 * per_pass + 3, 4)] {
            let found = ended(asked);
            assert_eq!(found.stop_reason.name(), "interrupted", "{asked}: {found:?}");
            let most = if config.penalty_alpha > 0.0 { passes.max(1) - 1 } else { passes };
            assert!(found.ids.len() <= most && found.ids.len() + 1 >= most, "{asked}: {found:?}");
            assert!(!has_all || whole.ids.starts_with(&found.ids), "{asked}: {found:?}");
        }
    }
    assert!(interruptible(Arc::new(|| true), score).is_err());
}

/// Texts without tokens wait for nothing; their prompts are not all held at once all the same.
#[test]
fn few_prompts_are_open_at_a_time() {
    let model = load(&CheckpointFolder::tiny());
    for max_new_tokens in [0, 2] {
        let mut job = Prompts { waiting: vec![vec![1, 2]; 100], ..Prompts::default() };
        model.generate(&mut job, 4, &greedy(&model, max_new_tokens), &Silent).unwrap();
        assert_eq!((job.made.len(), job.given), (100, 100));
        let ids = |text: &Text| text.ids.len();
        assert!(job.made.iter().all(|(_, texts)| ids(&texts.as_ref().unwrap()[0]) == max_new_tokens));
        // One more may always be asked for while there are less than twice the batch.
        assert!(job.most_open < 2 * 4, "{} prompts were open", job.most_open);
    }
}

/// What is counted are the tokens that texts can have, and the refusal comes before any work.
#[cfg(target_os = "linux")]
#[test]
fn texts_without_room_are_refused_by_their_tokens() {
    /// 2 · 3 · 28 values of 4 bytes.
    const OF_TOKEN: usize = 2 * 3 * 28 * 4;
    const COPIES: usize = 4096;
    let model = load(&CheckpointFolder::tiny());
    let available = candle_gpt2_engine::free_memory(model.device()).unwrap();
    // Of 48 tokens each, one context, they take twice what is free; of 2 tokens a twelfth.
    let prompts = (2 * available / (48 * OF_TOKEN)).div_ceil(COPIES);
    let config = GenerationConfig {
        do_sample: true,
        num_return_sequences: COPIES,
        max_new_tokens: 100,
        ..model.defaults().unwrap().config().clone()
    };
    // Interrupted from the start, it ends once the room is checked.
    let generate = |config: &GenerationConfig| {
        let waiting = vec![vec![1, 2]; prompts];
        let mut job = Prompts { waiting, is_interrupted: true, ..Prompts::default() };
        let result = model.generate(&mut job, usize::MAX, config, &Silent);
        assert!(job.made.is_empty());
        result
    };
    let error = generate(&config).unwrap_err();
    let expected = prompts * COPIES;
    let told = matches!(error, EngineError::NoRoom { rows, tokens: 48, needed, .. } if rows == expected && needed == rows * 48 * OF_TOKEN);
    assert!(told && error.is_usage(), "{error}");
    generate(&GenerationConfig { max_length: Some(3), ..config }).unwrap();
}

/// Everything from memory, as a page has it: no file is opened.
#[test]
fn a_model_comes_from_bytes() {
    let folder = CheckpointFolder::tiny();
    let read = |name: &str| std::fs::read(folder.file(name)).unwrap();
    let given = |config: Vec<u8>, generation_config: &'static str| {
        GivenFiles::new("page")
            .with_bytes("config.json", config)
            .with_bytes("tokenizer.json", read("tokenizer.json"))
            .with_bytes("generation_config.json", generation_config.as_bytes())
            .with_bytes("model.safetensors", read("model.safetensors"))
    };
    let options = ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() };
    let files = given(read("config.json"), r#"{"max_new_tokens": 7, "do_sample": false}"#);
    let model = options.open_given(files, &Silent).unwrap().load(&Silent).unwrap();
    let config = model.defaults().unwrap().config().clone();
    assert_eq!((config.max_new_tokens, config.do_sample), (7, false));
    let case = json_fixture("tiny_checkpoint_expected")["greedy"][0].clone();
    let prompt = model.vocabulary().encode(case["prompt"].as_str().unwrap()).unwrap();
    let mut job = Prompts { waiting: vec![prompt], ..Prompts::default() };
    model.generate(&mut job, 1, &greedy(&model, 20), &Silent).unwrap();
    let text = job.made[0].1.as_ref().unwrap()[0].text.clone();
    assert_eq!(json!(text), case["text"]);

    let files = given(read("config.json"), r#"{"guidance_scale": 2}"#);
    let error = options.open_given(files, &Silent).unwrap().defaults().unwrap_err().to_string();
    let file = Path::new("page").join("generation_config.json");
    assert!(error.starts_with(&format!("{}: `guidance_scale` is 2", file.display())), "{error}");
    let foreign = String::from_utf8(read("config.json")).unwrap().replace("\"n_layer\": 3", "\"n_layer\": 4");
    let error = options.open_given(given(foreign.into_bytes(), "{}"), &Silent).unwrap_err();
    assert!(matches!(error, EngineError::Weights(WeightsError::Mismatches { .. })), "{error}");
}

#[test]
fn progress_goes_to_the_reporter() {
    let folder = CheckpointFolder::tiny();
    let kept = Kept::default();
    let opened = options(&folder).open(&kept).unwrap();
    assert_eq!(*kept.0.lock().unwrap(), Vec::<String>::new(), "nothing long was done");
    let model = opened.load(&kept).unwrap();
    // Four bytes for each of the checkpoint's parameters.
    let bytes = 4 * model.model().parameter_count();
    assert_eq!(*kept.0.lock().unwrap(), [format!("loading: {bytes} Bytes"), format!("done: {bytes}")]);
    kept.0.lock().unwrap().clear();
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
    model.generate(&mut job, 1, &config, &kept).unwrap();
    assert_eq!(job.made[0].1.as_ref().unwrap()[0].ids.len(), 4);
    assert_eq!(*kept.0.lock().unwrap(), ["searching: 4 Items(\"tokens\")", "done: 4"]);
}

#[test]
fn what_can_be_refused_is_refused_before_the_weights_are_read() {
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
    let told = matches!(&error, EngineError::Weights(WeightsError::NoTokenizer { folder, .. }) if folder == bare.path());
    assert!(told, "{error}");
    let defaults = opened.defaults().unwrap();
    let stops = GenerationConfig { stop_strings: vec!["x".into()], ..defaults.config().clone() };
    let error = defaults.complete(stops).unwrap_err();
    assert!(matches!(error, EngineError::Generation(GenerationError::StopStringsWithoutTokenizer)));
}

/// A broken file of defaults is in the way of those who generate only.
#[test]
fn defaults_are_judged_when_they_are_asked_for() {
    let broken = CheckpointFolder::tiny().with("generation_config.json", r#"{"guidance_scale": 2}"#);
    let model = load(&broken);
    let told = "generation_config.json: `guidance_scale` is 2, which is not supported; remove the key";
    for _ in 0..2 {
        let error = model.defaults().unwrap_err();
        assert!(
            matches!(error, EngineError::Defaults { .. }) && error.to_string().ends_with(told),
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

/// Without options for the Hub there is neither network nor cache.
#[cfg(feature = "hub")]
#[test]
fn the_hub_is_asked_only_where_options_say_so() {
    use candle_gpt2_engine::HubError;
    let options = ModelOptions { model: "someone/tiny".into(), ..ModelOptions::default() };
    let error = options.open(&Silent).unwrap_err();
    assert!(matches!(error, EngineError::Hub(HubError::NotCached { .. })), "{error}");
    let file = ModelOptions { model: "someone/tiny.gguf".into(), ..ModelOptions::default() };
    let error = file.open(&Silent).unwrap_err();
    let told = matches!(&error, EngineError::Weights(WeightsError::NotFound { path }) if path.as_os_str() == "someone/tiny.gguf");
    assert!(told, "{error}");
}

/// vLLM's `bad_words`: with a space in front and without one, however the word is given.
#[test]
fn a_banned_word_is_banned_with_a_space_and_without() {
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

/// Rows of the vocabulary without a token are never drawn (karpathy/nanoGPT#169).
#[test]
fn padding_rows_are_never_drawn() {
    // The tokenizer knows 300 tokens; the next 20 rows are padding with the largest logits there are.
    let folder = CheckpointFolder::tiny().with_config(json!({"vocab_size": 320})).with_tensors(|tensors| {
        let wte = tensors["transformer.wte.weight"].clone();
        let padding = (wte.narrow(0, 0, 20).unwrap() * 50.0).unwrap();
        let padded = candle_core::Tensor::cat(&[&wte, &padding], 0).unwrap();
        tensors.insert("transformer.wte.weight".into(), padded);
    });
    let model = load(&folder);
    let drawn = GenerationConfig { do_sample: true, temperature: 3.0, top_k: 320, ..greedy(&model, 40) };
    for config in [drawn, GenerationConfig { num_beams: 3, ..greedy(&model, 9) }] {
        let mut job = Prompts { waiting: vec![vec![1, 2], vec![3], vec![4, 5]], ..Prompts::default() };
        model.generate(&mut job, 3, &config, &Silent).unwrap();
        for (_, texts) in job.made {
            let ids = &texts.unwrap()[0].ids;
            assert!(!ids.is_empty() && ids.iter().all(|id| *id < 300), "{ids:?}");
        }
    }
}

#[test]
fn a_temperature_of_0_writes_the_greedy_text() {
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
fn tokens_are_never_shown() {
    let folder = CheckpointFolder::tiny();
    let mut options = options(&folder);
    options.hub.token = Some("hf_secret".into());
    let opened = options.open(&Silent).unwrap();
    for shown in [format!("{options:?}"), format!("{opened:#?}"), format!("{:?}", options.hub)] {
        assert!(shown.contains("token: Some(") && !shown.contains("hf_secret"), "{shown}");
    }
}
