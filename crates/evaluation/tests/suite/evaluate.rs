//! Evaluation: results match each item evaluated alone, keep their order and survive interruptions.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_gpt2_engine::{DeviceChoice, LoadedModel, ModelOptions, Progress, Silent};
use candle_gpt2_evaluation::{
    Choice, EvaluationError, EvaluationOptions, Item, ItemResult, ModelFacts, Predicted, Prepared, Work,
};
use candle_gpt2_generation::{GenerationConfig, Sequence, score_continuations};
use serde_json::Value;

/// Tolerance for sums of a few f32 log-probabilities computed with different batch shapes.
const TOLERANCE: f64 = 1e-4;

fn built_in() -> LoadedModel {
    let options = ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn prepared(items: Vec<Item>) -> Prepared {
    Prepared { items, ..Prepared::default() }
}

fn item(index: usize, context_tokens: usize, work: Work) -> Item {
    Item { index, id: None, group: None, context_tokens, work }
}

/// Builds a question from a context and its endings.
fn question(model: &LoadedModel, index: usize, context: &str, endings: &[&str], gold: Option<usize>) -> Item {
    let context = model.vocabulary().encode(context).unwrap();
    let choice = |ending: &&str| {
        let ids = [context.clone(), model.vocabulary().encode(ending).unwrap()].concat();
        Choice::of(Sequence { ids, first: context.len() }, ending.trim_start())
    };
    let choices = endings.iter().map(choice).collect();
    item(index, context.len(), Work::Score { choices, gold })
}

fn word(model: &LoadedModel, index: usize, prompt: &str, tokens: usize, word: &str) -> Item {
    let prompt = model.vocabulary().encode(prompt).unwrap();
    item(index, prompt.len(), Work::Write { prompt, tokens, word: word.into() })
}

/// Evaluates all items and checks that each result is kept once and in order.
fn results(prepared: &Prepared, model: &LoadedModel, done: &[ItemResult]) -> Vec<ItemResult> {
    let mut kept = Vec::new();
    let mut keep = |result: &ItemResult| {
        kept.push(result.clone());
        Ok(())
    };
    let results = prepared.evaluate(model, done.to_vec(), &Silent, &mut keep).unwrap();
    assert_eq!(kept, results[done.len()..]);
    assert!(results.iter().map(|result| result.index).eq(0..prepared.items.len()));
    results
}

#[derive(Default)]
struct Counter(AtomicU64);

impl Progress for Counter {
    fn advance(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }
}

const ENDINGS: [&str; 4] = [" lord", " king", " the people of the town", " xyz"];

#[test]
fn choices_match_score_continuations() {
    let model = built_in();
    let context = "First Citizen:\nSpeak, my";
    let prepared = prepared(vec![question(&model, 0, context, &ENDINGS, Some(3))]);
    let found = results(&prepared, &model, &[]).remove(0);
    let ids = |text: &&str| model.vocabulary().encode(text).unwrap();
    let endings: Vec<Vec<u32>> = ENDINGS.iter().map(ids).collect();
    let expected = score_continuations(model.model(), &ids(&context), &endings, &|| ()).unwrap();
    for ((found, expected), (text, ids)) in
        found.choices.iter().zip(&expected).zip(ENDINGS.iter().zip(&endings))
    {
        assert!(
            (found.logprob - expected.sum()).abs() < TOLERANCE,
            "{text}: {} {}",
            found.logprob,
            expected.sum()
        );
        let squares: f64 = expected.logprobs.iter().map(|logprob| logprob * logprob).sum();
        assert!((found.squares - squares).abs() < 10.0 * TOLERANCE, "{text}: {} {squares}", found.squares);
        let text = text.trim_start();
        assert_eq!(
            (found.tokens, found.characters, found.bytes),
            (ids.len(), text.len(), text.len()),
            "{text}"
        );
        assert_eq!(found.is_greedy, expected.is_greedy, "{text}");
    }
    assert_eq!(found.context_tokens, ids(&context).len());
    let predicted = found.predicted.unwrap();
    assert_eq!(predicted, Predicted::of(&found.choices));
    assert_ne!(predicted.sum, 3, "the model does not choose ` xyz`");
    assert_eq!((found.gold, found.correct), (Some(3), Some(false)));
}

#[test]
fn single_choice_is_correct_if_greedy_search_generates_it() {
    let model = built_in();
    let prompt = model.vocabulary().encode("One day").unwrap();
    let config = GenerationConfig { max_new_tokens: 3, ..GenerationConfig::default() };
    let written: String = model.text_generator(&prompt, &config).unwrap().map(Result::unwrap).collect();
    let items = vec![
        question(&model, 0, "One day", &[&written], Some(0)),
        question(&model, 1, "One day", &[" zebra"], Some(0)),
        question(&model, 2, "One day", &[&written], None),
    ];
    let found = results(&prepared(items), &model, &[]);
    assert_eq!(
        found.iter().map(|result| result.correct).collect::<Vec<_>>(),
        [Some(true), Some(false), None]
    );
    assert!(found.iter().all(|result| result.predicted.is_none()));
}

#[test]
fn resumed_run_equals_an_uninterrupted_run() {
    let model = built_in();
    let speech = "First Citizen:\nWe are accounted poor citizens, the patricians good. ".repeat(4);
    let kind = |index| match index % 7 {
        5 => word(&model, index, "The king of", 2, "France"),
        _ => question(&model, index, &speech[index..], &ENDINGS[..1 + index % 4], Some(0)),
    };
    // These items have more tokens than a single run scores.
    let prepared = prepared((0..90).map(kind).collect());
    assert!(prepared.tokens_to_read(0) > 4096, "{}", prepared.tokens_to_read(0));
    let whole = results(&prepared, &model, &[]);
    for done in [1, 44, 89, 90] {
        assert_eq!(results(&prepared, &model, &whole[..done]), whole, "after {done}");
    }
    // An item's result does not depend on the other items.
    let alone = Prepared { items: vec![prepared.items[8].clone()], ..self::prepared(Vec::new()) };
    let mut kept = 0;
    let mut keep = |result: &ItemResult| {
        kept += 1;
        assert_eq!(*result, whole[8]);
        Ok(())
    };
    alone.evaluate(&model, Vec::new(), &Silent, &mut keep).unwrap();
    assert_eq!(kept, 1);
}

#[test]
fn shared_prefix_of_choices_is_read_once() {
    let model = built_in();
    let sequence = |ids: &[u32]| Sequence { ids: ids.to_vec(), first: 2 };
    let choice = |ids: &[u32]| Choice::of(sequence(ids), "x");
    let choices = vec![choice(&[5, 6, 7, 8]), choice(&[5, 6, 7, 9, 10]), choice(&[5, 6, 11])];
    // The model reads [5 6] once, then [7] and [7 9]. It does not read the last token of a choice.
    let shared = item(0, 2, Work::Score { choices, gold: None });
    // The windows of a text do not share a prefix, even if they begin with the same tokens.
    let windows = vec![sequence(&[5, 6, 7, 8]), sequence(&[5, 6, 7, 8, 9])];
    let windows = Choice { sequences: windows, characters: 5, bytes: 5, words: Some(1) };
    let text = item(1, 2, Work::Score { choices: vec![windows], gold: None });
    let written = item(2, 3, Work::Write { prompt: vec![5, 6, 7], tokens: 4, word: String::new() });
    let prepared = prepared(vec![shared, text, written]);
    // The last completed item is read again.
    let expected = [5 + 7 + 6, 5 + 7 + 6, 7 + 6, 6, 0];
    assert_eq!([0, 1, 2, 3, 9].map(|done| prepared.tokens_to_read(done)), expected);
    let progress = Counter::default();
    let found = prepared.evaluate(&model, Vec::new(), &progress, &mut |_| Ok(())).unwrap();
    assert_eq!(progress.0.into_inner(), prepared.tokens_to_read(0));
    let sizes = found[1].choices.iter().map(|choice| (choice.tokens, choice.words)).collect::<Vec<_>>();
    assert_eq!(sizes, [(5, Some(1))], "the scored tokens of both windows");
}

#[test]
fn generated_words_avoid_suppressed_tokens() {
    let model = built_in();
    let prompt = "My lord, the king of";
    let ids = model.vocabulary().encode(prompt).unwrap();
    let config = GenerationConfig { max_new_tokens: 6, ..GenerationConfig::default() };
    let text: String = model.text_generator(&ids, &config).unwrap().map(Result::unwrap).collect();
    let expected = text.split_whitespace().next().unwrap().to_lowercase();
    let expected = expected.trim_end_matches(|c: char| !c.is_alphanumeric());
    let items = vec![word(&model, 0, prompt, 6, expected), word(&model, 1, "ROMEO", 6, "zebra")];
    let mut prepared = prepared(items);
    let found = results(&prepared, &model, &[]);
    assert_eq!(found[0].words, Some([expected.to_owned(), expected.to_owned()]), "{text:?}");
    assert_eq!(found.iter().map(|result| result.correct).collect::<Vec<_>>(), [Some(true), Some(false)]);
    assert!(found[0].choices.is_empty() && found[0].context_tokens == ids.len());

    let first = model.vocabulary().encode(&text).unwrap()[0];
    prepared.suppressed_tokens = vec![first];
    let without = results(&prepared, &model, &[]);
    assert_eq!(without[0].correct, Some(false));
    assert_ne!(without[0].words.as_ref().unwrap()[1], expected);
}

#[test]
fn log_write_error_ends_the_run() {
    let model = built_in();
    let items = (0..3).map(|index| question(&model, index, "The king", &ENDINGS, Some(0))).collect();
    let mut kept = 0;
    let mut keep = |_: &ItemResult| {
        kept += 1;
        let what = "the disk is full".to_owned();
        if kept < 2 { Ok(()) } else { Err(EvaluationError::Unusable { file: "log".into(), what }) }
    };
    let error = prepared(items).evaluate(&model, Vec::new(), &Silent, &mut keep).unwrap_err();
    assert_eq!((error.to_string().as_str(), kept), ("log: the disk is full", 2));
}

#[test]
fn log_of_other_weights_or_data_is_not_resumed() {
    let model = built_in();
    let choice = |ids: &[u32]| Choice::of(Sequence { ids: ids.to_vec(), first: 2 }, "x");
    let ending_in = |last: u32| {
        let choices = || vec![choice(&[5, 6, 7, last]), choice(&[5, 6, 11])];
        let score = |index| item(index, 2, Work::Score { choices: choices(), gold: None });
        prepared(vec![score(0), score(1), score(2)])
    };
    let evaluate = |done| ending_in(8).evaluate(&model, done, &Counter::default(), &mut |_| Ok(()));
    let whole = evaluate(Vec::new()).unwrap();
    assert_eq!(evaluate(whole[..2].to_vec()).unwrap(), whole);
    let mut others = whole[..2].to_vec();
    others[1].choices[0].logprob -= 0.01;
    let error = evaluate(others).unwrap_err().to_string();
    assert!(error.starts_with("item 1 of the log: the model now produces a different result"), "{error}");
    // Different tokens at the same positions have a different digest.
    assert_eq!(ending_in(8).items[0].token_digest(), ending_in(8).items[1].token_digest());
    assert_ne!(ending_in(8).items[0].token_digest(), ending_in(9).items[0].token_digest());
}

/// Compares a run with a copy in which words are two nats less probable and one answer is wrong.
#[test]
fn comparison_subtracts_the_other_run() {
    let folder = tempfile::tempdir().unwrap();
    let [data, log] = ["data.jsonl", "log.jsonl"].map(|name| folder.path().join(name));
    let model = built_in();
    let prompt = model.vocabulary().encode("One day").unwrap();
    let config = GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() };
    let written: String = model.text_generator(&prompt, &config).unwrap().map(Result::unwrap).collect();
    let row = |text: &str| format!("{}\n", serde_json::json!({"text": text}));
    let (first, _) = written.rsplit_once(' ').unwrap();
    fs::write(&data, row(&format!("One day{first}")) + &row("Speak, my good zebra")).unwrap();
    let report = |options: EvaluationOptions| {
        let plan = EvaluationOptions { data: vec![data.clone()], ..options }.check().unwrap();
        let facts = ModelFacts::of_loaded(&ModelOptions::default(), &model);
        let evaluation = plan.prepare(&facts, None, &Silent).unwrap();
        evaluation.run(&model, None, &Silent).next().unwrap().unwrap()
    };
    let options = || EvaluationOptions::new(["lambada:lm-eval"]);
    report(EvaluationOptions { items: Some(log.clone()), ..options() });
    let lines = fs::read_to_string(&log).unwrap();
    let mut others: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!([&others[0]["correct"], &others[1]["correct"]], [true, false]);
    for other in &mut others {
        other["correct"] = false.into();
        let logprob = &mut other["choices"][0]["logprob"];
        *logprob = (logprob.as_f64().unwrap() - 2.0).into();
    }
    fs::write(&log, others.iter().map(|other| format!("{other}\n")).collect::<String>()).unwrap();
    let compared = report(EvaluationOptions { against: Some(log), ..options() }).against.unwrap();
    let flips = &compared.answers[0];
    assert_eq!([flips.n11, flips.n10, flips.n01, flips.n00], [0, 1, 0, 1]);
    assert!((compared.logprob.unwrap().difference - 2.0).abs() < TOLERANCE);
}
