//! Item log: results are reused only for the same run and the same items.
//!
//! Any other log is rejected and left unchanged.

use std::fs;
use std::path::PathBuf;

use candle_gpt2_evaluation::{
    Choice, ChoiceResult, EvaluationError, Item, ItemLog, ItemResult, LogHead, Prepared, Work, logged_results,
};
use candle_gpt2_generation::Sequence;

fn prepared(items: usize) -> Prepared {
    let choice = |length: usize| Choice {
        sequences: vec![Sequence { ids: vec![1; 3 + length], first: 3 }],
        characters: 4,
        bytes: 5,
        words: None,
    };
    let item = |index| Item {
        index,
        id: Some(format!("item-{index}")),
        group: None,
        context_tokens: 3,
        work: Work::Score { choices: vec![choice(2), choice(1)], gold: Some(1) },
    };
    let items = (0..items).map(item).collect();
    Prepared { items, ..Prepared::default() }
}

fn result(index: usize, logprob: f64) -> ItemResult {
    let choice =
        |tokens| ChoiceResult { logprob, tokens, characters: 4, bytes: 5, ..ChoiceResult::default() };
    ItemResult {
        index,
        id: Some(format!("item-{index}")),
        asked: prepared(index + 1).items[index].token_digest(),
        context_tokens: 3,
        choices: vec![choice(2), choice(1)],
        gold: Some(1),
        correct: Some(true),
        ..ItemResult::default()
    }
}

fn head() -> LogHead {
    LogHead { protocol: "task:one".into(), run: "a model, f32".into() }
}

/// Writes a log whose numbers have no short decimal form, and returns its path.
fn written(results: &[ItemResult]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let mut log = ItemLog::open(&path, false).unwrap();
    results.iter().for_each(|result| log.append(&head(), result).unwrap());
    (folder, path)
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, EvaluationError>, expected: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(expected), "`{expected}` is not in: {error}");
}

#[test]
fn log_round_trips_exactly_and_drops_a_partial_line() {
    let results = [result(0, -1.0 / 3.0), result(1, f64::NEG_INFINITY)];
    let (_folder, path) = written(&results);
    let whole = fs::read_to_string(&path).unwrap();
    assert!(
        whole.starts_with(r#"{"protocol":"task:one","run":"a model, f32","index":0,"id":"item-0","#),
        "{whole}"
    );
    assert!(whole.contains(r#""logprob":"-Infinity""#), "{whole}");

    fs::write(&path, format!("{whole}{{\"protocol\":\"task:one\",\"ru")).unwrap();
    let mut log = ItemLog::open(&path, true).unwrap();
    assert_eq!(log.results(&head(), &prepared(3)).unwrap(), results);
    log.check_all_taken().unwrap();
    log.append(&head(), &result(2, -2.0)).unwrap();
    drop(log);
    let after = fs::read_to_string(&path).unwrap();
    assert!(after.starts_with(&whole) && after.lines().count() == 3, "{after}");
    let mut log = ItemLog::open(&path, true).unwrap();
    assert_eq!(log.results(&head(), &prepared(3)).unwrap().len(), 3);
}

#[test]
fn line_that_contradicts_its_item_is_reported() {
    type Change = fn(&mut ItemResult);
    let changes: [(Change, &str); 9] = [
        (|result| result.id = None, "line 2: id is None in the log, but Some(\"item-1\") in the data"),
        (|result| result.index = 0, "line 2: index is 0 in the log, but 1 in the data"),
        (|result| result.context_tokens = 4, "line 2: context_tokens is 4 in the log, but 3 in the data"),
        (|result| result.gold = Some(0), "line 2: gold is Some(0) in the log, but Some(1) in the data"),
        (
            |result| result.choices[0].tokens = 3,
            "line 2: choice 0 has 3 tokens in the log, but 2 in the data",
        ),
        (
            |result| result.choices[1].characters = 3,
            "line 2: choice 1 has 3 characters in the log, but 4 in the data",
        ),
        (|result| result.choices[1].bytes = 4, "line 2: choice 1 has 4 bytes in the log, but 5 in the data"),
        (|result| result.asked = "other".into(), "line 2: token digest is \"other\" in the log, but \""),
        (|result| _ = result.choices.pop(), "line 2: number of choices is 1 in the log, but 2 in the data"),
    ];
    for (change, expected) in changes {
        let mut second = result(1, -1.0);
        change(&mut second);
        let (_folder, path) = written(&[result(0, -1.0), second]);
        let before = fs::read(&path).unwrap();
        assert_refused(ItemLog::open(&path, true).unwrap().results(&head(), &prepared(2)), expected);
        assert_eq!(fs::read(&path).unwrap(), before, "the file is unchanged");
    }
    let (_folder, path) = written(&[result(0, -1.0), result(1, -1.0)]);
    assert_refused(
        ItemLog::open(&path, true).unwrap().results(&head(), &prepared(1)),
        "line 2: the data has only 1 items",
    );
}

#[test]
fn log_of_another_run_is_rejected() {
    let (_folder, path) = written(&[result(0, -1.0)]);
    let other = LogHead { run: "a model, q8".into(), ..head() };
    let mut log = ItemLog::open(&path, true).unwrap();
    assert_refused(
        log.results(&other, &prepared(1)),
        "line 1: written by the run `a model, f32`, but this run is `a model, q8`",
    );
    drop(log);
    let mut log = ItemLog::open(&path, true).unwrap();
    let other = LogHead { protocol: "task:two".into(), ..head() };
    assert_eq!(log.results(&other, &prepared(1)).unwrap(), []);
    assert_refused(log.check_all_taken(), "line 1: written for `task:one`, which this run does not evaluate");
}

#[test]
fn protocols_share_a_log_in_any_order() {
    let (_folder, path) = written(&[result(0, -1.0)]);
    let other = LogHead { protocol: "task:two".into(), ..head() };
    let mut log = ItemLog::open(&path, true).unwrap();
    log.append(&other, &result(0, -2.0)).unwrap();
    log.append(&head(), &result(1, -3.0)).unwrap();
    drop(log);
    let mut log = ItemLog::open(&path, true).unwrap();
    assert_eq!(log.results(&head(), &prepared(2)).unwrap(), [result(0, -1.0), result(1, -3.0)]);
    assert_eq!(log.results(&other, &prepared(2)).unwrap(), [result(0, -2.0)]);
    log.check_all_taken().unwrap();
}

#[test]
fn rejected_files_are_left_unchanged() {
    let (_folder, path) = written(&[result(0, -1.0)]);
    let before = fs::read(&path).unwrap();
    assert_refused(ItemLog::open(&path, false), "log.jsonl: contains the items of another run");
    assert_eq!(fs::read(&path).unwrap(), before);

    for (text, expected) in [
        ("a note\n", "line 1: not an item log entry"),
        ("{\"hidden_size\": 8}\n", "line 1: not an item log entry"),
        ("{\"hidden_size\": 8}", "line 1: not an item log entry"),
        ("no line break", "line 1: not an item log entry"),
    ] {
        fs::write(&path, text).unwrap();
        assert_refused(ItemLog::open(&path, true), expected);
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "the file is unchanged");
    }
    let line = String::from_utf8(before).unwrap();
    fs::write(&path, format!("{line}\u{0}\n{line}")).unwrap();
    assert_refused(ItemLog::open(&path, true), "line 2: not an item log entry");
    fs::write(&path, line.replace("\"choices\":[", "\"choices\":[7,")).unwrap();
    assert_refused(
        ItemLog::open(&path, true).unwrap().results(&head(), &prepared(1)),
        "line 1: not an item log entry",
    );
}

/// Checks that the other run's log may be longer and is not modified.
#[test]
fn log_of_another_run_must_cover_the_same_items() {
    let results = [result(0, -1.0), result(1, -2.0)];
    let (_folder, path) = written(&results);
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{whole}{{\"protocol\":\"task:one\",\"ru")).unwrap();
    for count in [1, 2] {
        let (run, found) = logged_results(&path, "task:one", &prepared(count)).unwrap();
        assert_eq!((run.as_str(), &found[..]), ("a model, f32", &results[..count]));
    }
    let refused = |text: &str, protocol: &str, items: usize, expected: &str| {
        fs::write(&path, text).unwrap();
        assert_refused(logged_results(&path, protocol, &prepared(items)), expected);
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "the file is unchanged");
    };
    refused(
        &whole,
        "task:two",
        1,
        "log.jsonl: contains 0 items for `task:two`, but this run has 1; limit this run",
    );
    refused(&whole, "task:one", 3, "contains 2 items for `task:one`, but this run has 3");
    refused(&whole.replace("item-1", "x"), "task:one", 2, "line 2: id is Some(\"x\") in the log, but Some(");
    refused("{\"text\": \"a\"}\n", "task:one", 1, "line 1: not an item log entry");
}

#[test]
fn only_one_run_can_write_a_log() {
    let (_folder, path) = written(&[result(0, -1.0)]);
    let log = ItemLog::open(&path, true).unwrap();
    assert_refused(ItemLog::open(&path, true), "log.jsonl: another process is writing to this file");
    drop(log);
    ItemLog::open(&path, true).unwrap();
}

#[test]
fn empty_log_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    drop(ItemLog::open(&path, false).unwrap());
    assert!(!path.exists());
    fs::write(&path, "").unwrap();
    drop(ItemLog::open(&path, false).unwrap());
    assert!(path.exists(), "the file existed before");
}
