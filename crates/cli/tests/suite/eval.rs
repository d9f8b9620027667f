//! `gpt2 eval`: figures that can be computed in a second way, what is refused, damaged data, and runs that go on.

use std::fs;
use std::path::PathBuf;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, program, run};

/// Passages of the suite's own.
const PASSAGES: &str = r#"{"text": "First Citizen: Before we proceed any further, hear me speak.\nAll: Speak, speak"}
{"text": "My lord, the king of France is dead, and long live the king"}
{"context": "He said: “Come hither, boy, and give me thy", "continuation": "hand"}
{"text": "What is the city but the people? True, the people are the city."}
"#;
/// Questions of the suite's own; in the last one two endings are equal, and the first of them is the best one or none is.
const QUESTIONS: &str = r#"{"ind": 1, "activity_label": "Kings", "ctx_a": "The king sits upon the throne.", "ctx_b": "the queen", "endings": ["speaks to the people.", "eats a  throne [substeps] made of fish.", "sings.", "leaves the court, and all the lords follow her."], "label": 0}
{"ind": 2, "activity_label": "Letters", "ctx_a": "A messenger brings a letter to the duke.", "ctx_b": "", "endings": ["He reads it.", "He drinks the sea and all that therein is.", "He is a letter.", "He gives it to the messenger again."], "label": "3"}
{"ind": 7, "activity_label": "Swords", "ctx_a": "[header] How to draw [title] Take the sword.", "ctx_b": "then", "endings": ["draw it.", "draw it.", "throw the river away.", "xyzzy."], "label": 2}
"#;
/// Log-probabilities of the same tokens, computed with other numbers of rows at a time.
const TOLERANCE: f64 = 1e-4;

/// A folder with data, in which a log may be written.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("passages.jsonl", PASSAGES);
        folder.write("questions.jsonl", QUESTIONS);
        folder
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.file(name), contents).unwrap();
    }

    /// `gpt2 eval` in the folder, offline, with the model in the program.
    fn eval(&self, arguments: &[&str]) -> Run {
        let mut command = program(&[&["eval", "--offline"][..], arguments].concat());
        // What the surroundings cache must not be found.
        let command = command.current_dir(self.0.path()).env("HF_HUB_CACHE", self.file("no-cache"));
        Run::of(&command.output().unwrap())
    }

    fn reports(&self, arguments: &[&str]) -> Vec<Value> {
        let run = self.eval(&[arguments, &["--json"]].concat());
        assert_eq!(run.code, SUCCESS, "{}", run.stderr);
        run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn report(&self, arguments: &[&str]) -> Value {
        let mut reports = self.reports(arguments);
        assert_eq!(reports.len(), 1);
        reports.remove(0)
    }

    fn log(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.file(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn figure(report: &Value, name: &str) -> f64 {
    let metrics = report["metrics"].as_array().unwrap();
    metrics.iter().find(|metric| metric["name"] == name).unwrap()["value"].as_f64().unwrap()
}

#[track_caller]
fn assert_near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "expected {expected}, found {found}");
}

/// What took another time or is of this run alone.
fn without_speed(mut report: Value) -> Value {
    let fields = ["seconds", "tokens_read", "tokens_scored"];
    report.as_object_mut().unwrap().retain(|key, _| !fields.contains(&key.as_str()));
    report
}

/// What `gpt2 score` says to choices after a prompt: sum, tokens, and whether greedy search writes it.
fn scored(prompt: &str, choices: &[&str]) -> Vec<(f64, usize, bool)> {
    let flags: Vec<&str> = choices.iter().flat_map(|choice| ["--choice", *choice]).collect();
    let report = run(&[&["score", prompt, "--json"], &flags[..]].concat()).json();
    let choice = |choice: &Value| {
        let tokens = choice["ids"].as_array().unwrap().len();
        (choice["sum"].as_f64().unwrap(), tokens, choice["is_greedy"].as_bool().unwrap())
    };
    report["choices"].as_array().unwrap().iter().map(choice).collect()
}

#[test]
fn last_words_have_the_log_probabilities_of_scored_choices() {
    let folder = Folder::new();
    let report = folder.report(&["lambada:lm-eval", "--data", "passages.jsonl", "--items", "log.jsonl"]);
    let passages = [
        ("First Citizen: Before we proceed any further, hear me speak.\nAll: Speak,", " speak"),
        ("My lord, the king of France is dead, and long live the", " king"),
        ("He said: “Come hither, boy, and give me thy", " hand"),
        ("What is the city but the people? True, the people are the", " city."),
    ];
    let expected: Vec<_> = passages.iter().map(|(prompt, word)| scored(prompt, &[word])[0]).collect();
    for ((line, (sum, tokens, is_greedy)), (_, word)) in
        folder.log("log.jsonl").iter().zip(&expected).zip(passages)
    {
        let choice = &line["choices"][0];
        assert_near(choice["logprob"].as_f64().unwrap(), *sum, TOLERANCE);
        assert_eq!((&choice["tokens"], &choice["is_greedy"]), (&json!(tokens), &json!(is_greedy)), "{word}");
        assert_eq!(
            (&choice["characters"], &line["correct"]),
            (&json!(word.trim().len()), &json!(is_greedy)),
            "{word}"
        );
        assert!(line.get("predicted").is_none());
    }
    let share = expected.iter().filter(|(_, _, is_greedy)| *is_greedy).count() as f64 / 4.0;
    assert_eq!(figure(&report, "acc"), share);
    let mean = expected.iter().map(|(sum, ..)| sum).sum::<f64>() / 4.0;
    let perplexity = (-mean).exp();
    assert_near(figure(&report, "perplexity"), perplexity, TOLERANCE * perplexity);
}

#[test]
fn questions_are_answered_as_scored_choices_are() {
    let folder = Folder::new();
    let report = folder.report(&["hellaswag:lm-eval", "--data", "questions.jsonl", "--items", "log.jsonl"]);
    let questions: [(&str, [&str; 4]); 3] = [
        (
            "Kings: The king sits upon the throne. The queen",
            [
                " speaks to the people.",
                " eats a throne made of fish.",
                " sings.",
                " leaves the court, and all the lords follow her.",
            ],
        ),
        (
            "Letters: A messenger brings a letter to the duke. ",
            [
                "He reads it.",
                "He drinks the sea and all that therein is.",
                "He is a letter.",
                "He gives it to the messenger again.",
            ],
        ),
        (
            "Swords: How to draw. Take the sword. Then",
            [" draw it.", " draw it.", " throw the river away.", " xyzzy."],
        ),
    ];
    let best = |scores: &[f64]| {
        let better = |best: usize, next: usize| if scores[next] > scores[best] { next } else { best };
        (1..scores.len()).fold(0, better)
    };
    let mut right = [0, 0];
    for ((line, (context, endings)), label) in folder.log("log.jsonl").iter().zip(&questions).zip([0, 3, 2]) {
        // A space at the end of the context begins the ending.
        let moved = context.strip_suffix(' ');
        let endings =
            endings.map(|ending| if moved.is_some() { format!(" {ending}") } else { ending.to_owned() });
        let texts: Vec<&str> = endings.iter().map(String::as_str).collect();
        let sums: Vec<f64> =
            scored(moved.unwrap_or(context), &texts).into_iter().map(|(sum, ..)| sum).collect();
        let characters = |text: &str| text.trim_start().chars().count() as f64;
        let norms: Vec<f64> = sums.iter().zip(&texts).map(|(sum, text)| sum / characters(text)).collect();
        for (choice, sum) in line["choices"].as_array().unwrap().iter().zip(&sums) {
            assert_near(choice["logprob"].as_f64().unwrap(), *sum, TOLERANCE);
        }
        assert_eq!(line["gold"], label);
        assert_eq!(line["predicted"]["sum"], best(&sums), "{context}");
        assert_eq!(line["predicted"]["per_character"], best(&norms), "{context}");
        assert_eq!(line["correct"], best(&sums) == label);
        right = [right[0] + usize::from(best(&sums) == label), right[1] + usize::from(best(&norms) == label)];
    }
    assert_eq!(figure(&report, "acc"), right[0] as f64 / 3.0);
    assert_eq!(figure(&report, "acc_norm"), right[1] as f64 / 3.0);
    let log = folder.log("log.jsonl");
    assert_eq!(log.iter().map(|line| line["id"].clone()).collect::<Vec<_>>(), ["1", "2", "7"]);
    assert_eq!(log[2]["choices"][0], log[2]["choices"][1], "equal endings");
}

#[test]
fn a_text_in_windows_has_the_perplexity_of_its_score() {
    let folder = Folder::new();
    let text = "The king of France is dead, and all the people of the city speak of the queen. ".repeat(12);
    folder.write("text.txt", text.trim_end());
    let report = folder.report(&["wikitext:hf-100", "--data", "text.txt"]);
    let file = folder.file("text.txt");
    let score = run(&["score", "--prompt-file", path(&file), "--stride", "100", "--json"]).json();
    let expected = score["perplexity"].as_f64().unwrap();
    assert_near(figure(&report, "token_perplexity"), expected, TOLERANCE * expected);
    let tokens = score["ids"].as_array().unwrap().len();
    assert!(tokens > 256, "several windows, found {tokens} tokens");
    assert_eq!(report["tokens_scored"], tokens - 1);
    assert_eq!(report["protocol"], "wikitext:hf-100");
}

#[test]
fn a_report_says_what_was_measured() {
    let folder = Folder::new();
    let report =
        folder.report(&["lambada:lm-eval", "--data", "passages.jsonl", "--limit", "2", "--dtype", "q8"]);
    let keys: Vec<&str> = report.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "model",
        "dtype",
        "kv_dtype",
        "device",
        "protocol",
        "protocol_source",
        "dataset",
        "metrics",
        "cut",
        "notes",
        "tokens_read",
        "tokens_scored",
        "seconds",
        "version",
    ];
    assert_eq!(keys, expected);
    assert_eq!(
        [&report["model"], &report["dtype"], &report["kv_dtype"], &report["protocol"]],
        ["built-in", "q8", "f16", "lambada:lm-eval"]
    );
    let hash = "f6882359662ca0656bc32c49998828bc9980d589180745fd909bd93b32937765";
    assert_eq!(
        report["dataset"],
        json!({
            "name": "LAMBADA, test, OpenAI's variant", "path": "passages.jsonl", "revision": null, "sha256": hash,
            "known": false, "items": 2, "limit": 2,
        })
    );
    assert_eq!(report["metrics"][1]["stderr_kind"], "binomial");
    assert_eq!((&report["metrics"][1]["published"], &report["metrics"][1]["z"]), (&json!([]), &Value::Null));
    assert_eq!(report["cut"], 0);

    let table = folder.eval(&["lambada:lm-eval", "--data", "passages.jsonl", "--limit", "2"]);
    assert_eq!(table.code, SUCCESS, "{}", table.stderr);
    for part in [
        "protocol ",
        "± stderr",
        "published",
        "the first 2 items",
        hash,
        "another file than the published one",
    ] {
        assert!(table.stdout.contains(part), "`{part}` is not in: {}", table.stdout);
    }
}

#[test]
fn several_protocols_share_a_call() {
    let folder = Folder::new();
    let both = ["lambada:last-token", "hellaswag:llm.c"];
    folder.write("more.jsonl", QUESTIONS.replace("\"ctx_b\"", "\"ctx\": \"The king\", \"ctx_b\""));
    let data = ["--data", "passages.jsonl", "--data", "more.jsonl"];
    let reports = folder.reports(&[&both[..], &data].concat());
    let names: Vec<&Value> = reports.iter().map(|report| &report["protocol"]).collect();
    assert_eq!(names, both);
    assert_eq!(reports[1]["dataset"]["path"], "more.jsonl");
    for (report, (protocol, data)) in
        reports.into_iter().zip(both.iter().zip(["passages.jsonl", "more.jsonl"]))
    {
        assert_eq!(without_speed(report), without_speed(folder.report(&[protocol, "--data", data])));
    }
    let one = folder.reports(&["lambada:lm-eval", "lambada:stop-words", "--data", "passages.jsonl"]);
    assert_eq!(
        one.iter().map(|report| report["dataset"]["items"].as_u64()).collect::<Vec<_>>(),
        [Some(4); 2]
    );
}

#[test]
fn a_run_goes_on_where_it_was_cut_off() {
    let folder = Folder::new();
    let arguments = ["lambada:stop-words", "lambada:lm-eval", "--data", "passages.jsonl", "--items"];
    let whole = folder.reports(&[&arguments[..], &["whole.jsonl"]].concat());
    let lines = fs::read(folder.file("whole.jsonl")).unwrap();
    let log = folder.log("whole.jsonl");
    let protocols = log.iter().map(|line| line["protocol"].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(protocols, [["lambada:stop-words"; 4], ["lambada:lm-eval"; 4]].concat());
    // Within the first line, in the middle of a line of the second protocol, and behind the last line.
    let ends: Vec<usize> = (0..lines.len()).filter(|index| lines[*index] == b'\n').collect();
    for cut in [0, 7, ends[3] + 1, ends[4] + 30, ends[7], lines.len()] {
        folder.write("cut.jsonl", &lines[..cut]);
        let again = folder.reports(&[&arguments[..], &["cut.jsonl", "--resume"]].concat());
        assert_eq!(fs::read(folder.file("cut.jsonl")).unwrap(), lines, "cut at byte {cut}");
        for (again, whole) in again.iter().zip(&whole) {
            assert_eq!(without_speed(again.clone()), without_speed(whole.clone()), "cut at byte {cut}");
        }
    }
    let done = folder.eval(&[&arguments[..], &["cut.jsonl", "--resume"]].concat());
    assert!(done.stderr.contains("lambada:lm-eval: 4 of 4 items are in the log"), "{}", done.stderr);
    // More items may follow, and fewer are another run.
    let first = &arguments[1..];
    folder.reports(&[first, &["limited.jsonl", "--limit", "1"]].concat());
    folder.reports(&[first, &["limited.jsonl", "--resume"]].concat());
    assert_eq!(folder.log("limited.jsonl")[..], log[4..]);
    let fewer = folder.eval(&[first, &["limited.jsonl", "--resume", "--limit", "1"]].concat());
    assert_refused(
        &fewer,
        FAILURE,
        "limited.jsonl: line 2: the data have 1 items, and this would be one more",
    );
}

#[test]
fn a_log_of_another_run_is_refused() {
    let folder = Folder::new();
    let arguments = ["lambada:lm-eval", "--data", "passages.jsonl", "--items", "log.jsonl"];
    folder.reports(&arguments);
    let before = fs::read(folder.file("log.jsonl")).unwrap();
    let refused = |more: &[&str], expected: &str| {
        assert_refused(&folder.eval(&[&arguments[..], more].concat()), FAILURE, expected);
        assert_eq!(fs::read(folder.file("log.jsonl")).unwrap(), before, "the log is left alone");
    };
    refused(
        &[],
        "log.jsonl: it holds the items of another run; go on with it, or choose another name (--items, --resume, --against)",
    );
    refused(&["--resume", "--dtype", "q8"], "log.jsonl: line 1: it is of the run `built-in, f16");
    refused(&["--resume", "--kv-dtype", "f16"], "line 1: it is of the run");
    let other = ["lambada:last-token", "--data", "passages.jsonl", "--items", "log.jsonl", "--resume"];
    assert_refused(
        &folder.eval(&other),
        FAILURE,
        "line 1: it is of `lambada:lm-eval`, which this run does not measure",
    );
    folder.write("passages.jsonl", PASSAGES.replace("the king\"}", "the prince\"}"));
    refused(&["--resume"], "log.jsonl: line 2: its");
}

#[test]
fn damaged_data_name_file_line_and_field_and_keep_what_was_done() {
    let folder = Folder::new();
    let question: Value = serde_json::from_str(QUESTIONS.lines().next().unwrap()).unwrap();
    let changed = |field: &str, value: Value| {
        let mut question = question.clone();
        question[field] = value;
        question.to_string()
    };
    let without = |field: &str| {
        let mut question = question.clone();
        question.as_object_mut().unwrap().remove(field);
        question.to_string()
    };
    let damages = [
        ("{\"ind\": 4,".to_owned(), "no JSON"),
        ("[1, 2]".to_owned(), "expected an object of JSON"),
        (without("label"), "field `label`: missing"),
        (without("endings"), "`endings`"),
        (changed("label", json!(4)), "field `label`: expected a number from 0 to 3, found 4"),
        (changed("label", json!("x")), "field `label`: expected a number from 0 to 3"),
        (changed("ctx_a", json!(7)), "field `ctx_a`: expected a text, found 7"),
        (changed("endings", json!(["a", "", "c", "d"])), "field `endings[1]`"),
        (changed("endings", json!(["a", 2, "c", "d"])), "field `endings[1]`: expected a text, found 2"),
    ];
    let lines: Vec<&str> = QUESTIONS.lines().collect();
    for (damage, expected) in damages {
        folder.write("bad.jsonl", format!("{}\n{damage}\n{}\n", lines[0], lines[1]));
        let arguments = ["hellaswag:lm-eval", "--data", "bad.jsonl"];
        let at_once = folder.eval(&arguments);
        assert_refused(&at_once, FAILURE, "error: bad.jsonl: line 2: ");
        assert_refused(&at_once, FAILURE, expected);

        // With a log the items before it are measured.
        let with_log = [&arguments[..], &["--items", "log.jsonl"]].concat();
        let run = folder.eval(&with_log);
        assert_refused(&run, FAILURE, "the 1 items before it are measured for the log");
        assert_refused(&run, FAILURE, "error: bad.jsonl: line 2: ");
        assert_eq!(folder.log("log.jsonl").len(), 1);
        // What follows the first items is not looked at.
        assert_eq!(folder.report(&[&arguments[..], &["--limit", "1"]].concat())["dataset"]["items"], 1);
        // The repaired data are gone on with.
        folder.write("bad.jsonl", QUESTIONS);
        let again = folder.report(&[&with_log[..], &["--resume"]].concat());
        let whole = folder.report(&["hellaswag:lm-eval", "--data", "bad.jsonl"]);
        assert_eq!(without_speed(again), without_speed(whole));
        fs::remove_file(folder.file("log.jsonl")).unwrap();
    }
    folder.write("bad.jsonl", "{\n");
    let none = folder.eval(&["hellaswag:lm-eval", "--data", "bad.jsonl", "--items", "log.jsonl"]);
    assert_refused(&none, FAILURE, "error: bad.jsonl: line 1: ");
    assert!(!folder.file("log.jsonl").exists(), "nothing was measured");
    // The other protocols of the call are measured all the same.
    let both = ["lambada:lm-eval", "lambada:last-token", "--data", "bad.jsonl", "--data", "passages.jsonl"];
    folder.write("bad.jsonl", format!("{PASSAGES}{{\"text\": 7}}\n"));
    let run = folder.eval(&[&both[..], &["--items", "log.jsonl", "--json"]].concat());
    assert_eq!(run.code, FAILURE, "{}", run.stderr);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["protocol"], "lambada:last-token");
    assert!(
        run.stderr.contains("error: bad.jsonl: line 5: field `text`: expected a text, found 7"),
        "{}",
        run.stderr
    );
    assert_eq!(folder.log("log.jsonl").len(), 8);
}

#[test]
fn a_precision_beside_itself_is_nowhere_apart_and_beside_another_it_is() {
    let folder = Folder::new();
    folder
        .write("text.txt", "The king of France is dead, and all the people speak of the queen. ".repeat(20));
    let arguments = ["kl", "--data", "text.txt", "--context", "64"];
    let same = folder.report(&[&arguments[..], &["--dtype", "f32"]].concat());
    for name in ["kl", "kl_max", "kl_min", "dp", "dp_max", "dp_min", "dp_rms", "ln_perplexity_ratio"] {
        assert_eq!(figure(&same, name), 0.0, "{name}");
    }
    assert_eq!((figure(&same, "same_top"), figure(&same, "perplexity_ratio")), (1.0, 1.0));
    assert_eq!(same["base"], json!({ "model": "built-in", "dtype": "f32" }));

    let rounded = [&arguments[..], &["--dtype", "q4", "--items", "log.jsonl"]].concat();
    let q4 = folder.report(&rounded);
    let q8 = folder.report(&[&arguments[..], &["--dtype", "q8"]].concat());
    let [coarse, fine] = [&q4, &q8].map(|report| figure(report, "kl"));
    assert!(coarse > fine && fine > 0.0, "q4 {coarse}, q8 {fine}");
    assert_near(figure(&q4, "base_perplexity"), figure(&same, "perplexity"), 0.0);

    let lines = fs::read(folder.file("log.jsonl")).unwrap();
    folder.write("log.jsonl", &lines[..lines.len() / 2]);
    let again = folder.report(&[&rounded[..], &["--resume"]].concat());
    assert_eq!(fs::read(folder.file("log.jsonl")).unwrap(), lines);
    assert_eq!(without_speed(again), without_speed(q4));
    let other = folder.eval(&[&rounded[..], &["--resume", "--base-dtype", "q8"]].concat());
    assert_refused(&other, FAILURE, "line 1: it is of the run");
    let tiny = CheckpointFolder::tiny();
    let other = folder.eval(&[&arguments[..], &["--base", path(tiny.path())]].concat());
    assert_refused(&other, USAGE, "vocabulary of the base model: expected 1024 tokens as the model has");
}

#[test]
fn runs_are_compared_item_by_item() {
    let folder = Folder::new();
    let more = ["Kings", "Letters", "Swords", "Ships", "Crowns"].map(|label| {
        QUESTIONS.replace("\"activity_label\": \"", &format!("\"activity_label\": \"{label} and "))
    });
    folder.write("more.jsonl", more.concat());
    let arguments = ["hellaswag:lm-eval", "--data", "more.jsonl"];
    folder.reports(&[&arguments[..], &["--items", "q4.jsonl", "--dtype", "q4"]].concat());
    let report =
        folder.report(&[&arguments[..], &["--items", "f32.jsonl", "--against", "q4.jsonl"]].concat());
    let against = &report["against"];
    assert_eq!([&against["path"], &against["items"]], [&json!("q4.jsonl"), &json!(15)]);
    assert!(against["run"].as_str().unwrap().starts_with("built-in, q4, "), "{against}");
    assert_eq!(against["logprob"], Value::Null);
    for flips in against["answers"].as_array().unwrap() {
        let measure = flips["measure"].as_str().unwrap();
        let answers = |name: &str| -> Vec<(Value, bool)> {
            let answer = |line: &Value| {
                (line["predicted"][measure].clone(), line["predicted"][measure] == line["gold"])
            };
            folder.log(name).iter().map(answer).collect()
        };
        let pairs: Vec<_> = answers("f32.jsonl").into_iter().zip(answers("q4.jsonl")).collect();
        let count = |here: bool, there: bool| {
            pairs.iter().filter(|pair| (pair.0.1, pair.1.1) == (here, there)).count()
        };
        let expected = [count(true, true), count(true, false), count(false, true), count(false, false)];
        assert_eq!(json!(["n11", "n10", "n01", "n00"].map(|name| &flips[name])), json!(expected));
        let changed = pairs.iter().filter(|(here, there)| here.0 != there.0).count();
        assert_eq!(flips["changed"], changed, "{measure}");
        let difference = (expected[1] as f64 - expected[2] as f64) / 15.0;
        assert_near(flips["difference"].as_f64().unwrap(), difference, 1e-12);
    }
    assert_eq!(against["answers"].as_array().unwrap().len(), 4);

    // Beside itself a run has no flips; of single choices the log-probabilities are compared.
    let words = ["lambada:lm-eval", "--data", "passages.jsonl"];
    folder.reports(&[&words[..], &["--items", "words.jsonl"]].concat());
    let same = folder.report(&[&words[..], &["--against", "words.jsonl"]].concat());
    assert_eq!(same["against"]["logprob"], json!({ "difference": 0.0, "stderr": 0.0 }));
    let flips = &same["against"]["answers"][0];
    assert_eq!([&flips["measure"], &flips["n10"], &flips["n01"]], [&json!("correct"), &json!(0), &json!(0)]);
    let table = folder.eval(&[&words[..], &["--against", "words.jsonl"]].concat());
    assert!(table.stdout.contains("0 right here only, 0 there only, 0 other answers"), "{}", table.stdout);

    let refused = |more: &[&str], expected: &str| {
        assert_refused(&folder.eval(&[&words[..], more].concat()), FAILURE, expected);
    };
    refused(&["--against", "none.jsonl"], "none.jsonl: ");
    refused(&["--against", "q4.jsonl"], "q4.jsonl: it has 0 items of `lambada:lm-eval`, and this run 4");
    refused(&["--against", "passages.jsonl"], "passages.jsonl: line 1: none of a log of items");
    folder.write("passages.jsonl", PASSAGES.replace("the king\"}", "the prince\"}"));
    refused(&["--against", "words.jsonl"], "words.jsonl: line 2: its");
    let kl = folder.eval(&["kl", "--data", "passages.jsonl", "--against", "words.jsonl"]);
    assert_refused(&kl, USAGE, "kl has two models side by side already");
}

#[test]
fn wrong_calls_are_told() {
    let folder = Folder::new();
    let refused =
        |arguments: &[&str], expected: &str| assert_refused(&folder.eval(arguments), USAGE, expected);
    refused(&[], "<PROTOCOL>");
    refused(&["lambada"], "there is no protocol `lambada`");
    refused(&["lambada:lm-evil", "--data", "passages.jsonl"], "`lambada:lm-eval`");
    refused(&["nonsense"], "(`gpt2 eval --list`)");
    refused(&["wikitext:hf-0", "--data", "passages.jsonl"], "expected a number of tokens");
    refused(&["wikitext:hf-257", "--data", "passages.jsonl"], "256");
    refused(
        &["text:bits"],
        "`text:bits` measures any text in UTF-8, which no one file of the hub is: give it with --data",
    );
    refused(&["kl"], "`kl` measures any text in UTF-8, which no one file of the hub is: give it with --data");
    refused(&["blimp:lm-eval"], "which no one file of the hub is: give it with --data");
    refused(&["--list", "lambada:lm-eval"], "cannot be used with");
    refused(&["lambada:lm-eval", "--resume"], "--items");
    refused(
        &["lambada:lm-eval", "--data", "passages.jsonl", "--limit", "0"],
        "--limit: expected at least 1, found 0",
    );
    refused(&["lambada:lm-eval", "lambada:lm-eval", "--data", "passages.jsonl"], "asked for twice");
    refused(
        &["lambada:lm-eval", "--data", "passages.jsonl", "--data", "questions.jsonl"],
        "once for each of the 1, found it 2 times",
    );
    refused(&["lambada:lm-eval", "--data", "passages.jsonl", "--base-dtype", "q8"], "ask for kl");
    refused(&["lambada:lm-eval", "--data", "passages.jsonl", "--context", "64"], "wikitext:llama.cpp");
    refused(&["kl", "--data", "passages.jsonl", "--context", "1000"], "256");

    let failed =
        |arguments: &[&str], expected: &str| assert_refused(&folder.eval(arguments), FAILURE, expected);
    failed(&["lambada:lm-eval", "--data", "no-such-file.jsonl"], "no-such-file.jsonl");
    folder.write("empty.jsonl", "\n");
    failed(&["lambada:lm-eval", "--data", "empty.jsonl"], "empty.jsonl: ");
    folder.write("latin.txt", b"caf\xe9");
    failed(&["text:bits", "--data", "latin.txt"], "latin.txt: ");
}

#[test]
fn examples_and_task_files_are_asked_for_by_flags() {
    let folder = Folder::new();
    let questions = folder.file("questions.jsonl");
    let call = ["hellaswag:lm-eval", "--data", path(&questions), "--num-fewshot", "1"];
    let report = folder.report(&call);
    assert_eq!(report["num_fewshot"], 1);
    let by_seed = |seed: u32| {
        let seed = seed.to_string();
        folder.report(&[&call[..], &["--fewshot-seed", &seed, "--fewshot-data", path(&questions)]].concat())
    };
    let differs = (0..6).any(|seed| by_seed(seed)["tokens_read"] != report["tokens_read"]);
    assert!(differs, "other seeds draw other examples, of other lengths");
    let tasks = candle_gpt2_testing::fixture_path("evaluation/tasks");
    let report = folder.report(&[path(&tasks.join("choices.yaml")), "--num-fewshot", "3"]);
    assert_eq!((&report["protocol"], &report["num_fewshot"]), (&json!("places"), &json!(3)));
    assert_eq!(report["metrics"].as_array().unwrap().len(), 3);

    let wrong = run(&["eval", "wikitext:lm-eval", "--num-fewshot", "2"]);
    assert_refused(&wrong, USAGE, "--num-fewshot: wikitext:lm-eval has no questions");
    let wrong = run(&["eval", "piqa:lm-eval", "--fewshot-data", "a.jsonl"]);
    assert_refused(&wrong, USAGE, "say how many with --num-fewshot");
    folder.write("code.yaml", "doc_to_text: !function utils.text\n");
    let wrong = run(&["eval", path(&folder.file("code.yaml"))]);
    assert_refused(&wrong, FAILURE, "code.yaml: `!function` cannot be followed");
}

#[test]
fn data_of_the_hub_are_asked_for_by_name() {
    let folder = Folder::new();
    let missing = folder.eval(&["lambada:lm-eval"]);
    #[cfg(feature = "hub")]
    assert_refused(
        &missing,
        FAILURE,
        "EleutherAI/lambada_openai is not in the cache, and the network may not be used; the cache",
    );
    #[cfg(not(feature = "hub"))]
    assert_refused(&missing, FAILURE, "this program was built without the feature `hub`");
    let parquet = folder.eval(&["hellaswag:lm-eval"]);
    if cfg!(feature = "parquet") {
        assert_eq!(parquet.code, FAILURE, "{}", parquet.stderr);
    } else {
        assert_refused(
            &parquet,
            USAGE,
            "are Parquet, which this program was built without (the feature `parquet`)",
        );
    }
}

#[test]
fn every_protocol_is_listed_with_its_source_and_its_figures() {
    let folder = Folder::new();
    let listed: Vec<Value> = folder.reports(&["--list"]);
    let names: Vec<&str> = listed.iter().map(|protocol| protocol["protocol"].as_str().unwrap()).collect();
    let tasks = ["piqa", "arc-easy", "arc-challenge", "openbookqa", "sciq", "winogrande", "blimp"];
    let expected = [
        "wikitext:lm-eval",
        "wikitext:hf-N",
        "wikitext:megatron",
        "wikitext:llama.cpp",
        "lambada:lm-eval",
        "lambada:last-token",
        "lambada:megatron-strict",
        "lambada:stop-words",
        "hellaswag:lm-eval",
        "hellaswag:llm.c",
        "hellaswag:llama.cpp",
        "text:bits",
        "kl",
    ];
    let expected: Vec<String> =
        expected.map(str::to_owned).into_iter().chain(tasks.map(|task| format!("{task}:lm-eval"))).collect();
    for name in &expected {
        assert!(names.contains(&name.as_str()), "{name} is not in {names:?}");
    }
    assert_eq!(names.len(), expected.len());
    for protocol in &listed {
        for field in ["about", "source"] {
            assert!(protocol[field].as_str().is_some_and(|text| !text.is_empty()), "{protocol}");
        }
    }
    let lambada = listed.iter().find(|protocol| protocol["protocol"] == "lambada:lm-eval").unwrap();
    let published = |model: &str, metric: &str, exact: bool| {
        let of = |published: &&Value| {
            published["model"] == model && published["metric"] == metric && published["exact"] == exact
        };
        lambada["published"].as_array().unwrap().iter().find(of).unwrap()["value"].clone()
    };
    assert_eq!(published("gpt2", "acc", true), 0.3256);
    assert_eq!(published("gpt2", "perplexity", false), 35.13);
    let text = folder.eval(&["--list"]).stdout;
    assert!(names.iter().all(|name| text.contains(&format!("{name}: "))), "{text}");
    assert!(text.contains("published: acc 0.3256 of gpt2 (EleutherAI/lm-evaluation-harness#2159)"), "{text}");
    assert!(text.contains("protocol not published"), "{text}");
}
