//! Tests of circuit search and its prompt pairs.

use std::collections::BTreeSet;
use std::path::PathBuf;

use candle_gpt2_engine::LoadedModel;
use candle_gpt2_look::{
    Analysis, CircuitMethod, CircuitSearch, DataTask, EdgeAmount, Look, LookError, LookSubject, PairData,
    Reader, TaskData, Text, TextPair, TokenChoice,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Case, RecordingReporter, built_in, look, reader};

const TASKS: [DataTask; 3] = [DataTask::Ioi, DataTask::GreaterThan, DataTask::Gender];

fn pairs_of(reader: &Reader, task: DataTask, count: usize, seed: u64) -> Vec<TextPair> {
    TaskData { task, count, seed }.pairs(reader).unwrap()
}

fn written(folder: &TempDir, lines: &[String]) -> PathBuf {
    let path = folder.path().join("pairs.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// Prompt pairs for a task, built from the model's vocabulary.
fn task_data(loaded: &LoadedModel, task: DataTask, count: usize) -> PairData {
    PairData::Pairs(pairs_of(&reader(loaded), task, count, 1))
}

#[test]
fn pairs_differ_in_one_token_with_single_token_answers() {
    let loaded = built_in();
    for bos in [false, true] {
        let reader = Reader::new(loaded.vocabulary(), bos).unwrap();
        for task in TASKS {
            let pairs = pairs_of(&reader, task, 60, 3);
            assert_eq!(pairs.len(), 60);
            assert_eq!(pairs, pairs_of(&reader, task, 60, 3), "the same seed gives the same pairs");
            assert_ne!(pairs, pairs_of(&reader, task, 60, 4));
            assert_eq!(
                pairs[..10],
                pairs_of(&reader, task, 10, 3),
                "a longer list starts with the same pairs"
            );
            for pair in &pairs {
                let [clean, corrupt] =
                    [&pair.texts.clean, &pair.texts.corrupt].map(|text| reader.text(text).unwrap());
                assert_eq!(clean.len(), corrupt.len(), "{pair:?}");
                assert_eq!(clean.iter().zip(&corrupt).filter(|(a, b)| a != b).count(), 1, "{pair:?}");
                for token in pair.answer.iter().chain(&pair.against) {
                    let TokenChoice::Text(word) = token else { panic!("{token:?}") };
                    assert_eq!(loaded.vocabulary().encode(word).unwrap().len(), 1, "{word}");
                }
                assert!(pair.answer.iter().all(|answer| !pair.against.contains(answer)), "{pair:?}");
                assert_eq!(pair.spans["end"], [clean.len() - 1 - usize::from(bos)], "{pair:?}");
                let Text::Words(words) = &pair.texts.clean else { panic!("{pair:?}") };
                assert!(!words.contains('{'), "{words}");
            }
        }
    }
}

#[test]
fn spans_point_to_the_named_words() {
    let loaded = built_in();
    let vocabulary = loaded.vocabulary();
    for pair in pairs_of(&reader(&loaded), DataTask::Ioi, 30, 5) {
        let Text::Words(clean) = &pair.texts.clean else { panic!("{pair:?}") };
        let ids = vocabulary.encode(clean).unwrap();
        let ([TokenChoice::Text(answer)], [TokenChoice::Text(against)]) =
            (&pair.answer[..], &pair.against[..])
        else {
            panic!("{pair:?}")
        };
        let id = |word: &str| vocabulary.encode(word).unwrap()[0];
        let at = |name: &str| ids[pair.spans[name][0]];
        assert_eq!([at("IO"), at("S1"), at("S2")], [id(answer), id(against), id(against)], "{clean}");
        assert!(pair.spans["S1"] < pair.spans["S2"]);
        assert_eq!(pair.spans.len(), 4);
    }
}

/// Goal for built-in models: a twentieth of the edges keeps four fifths of the logit difference.
///
/// The guide on looking inside shows what the current model reaches.
#[test]
fn ioi_circuit_with_5_percent_of_edges_is_faithful() {
    let loaded = built_in();
    let folder = tempfile::tempdir().unwrap();
    let search = CircuitSearch::new(task_data(&loaded, DataTask::Ioi, 12));
    let found = look(&loaded, &search).unwrap();
    // Pairs from a file give the same result.
    let PairData::Pairs(pairs) = &search.data else { panic!("{search:?}") };
    let lines: Vec<String> = pairs.iter().map(|pair| serde_json::to_string(pair).unwrap()).collect();
    let from_file = look(&loaded, &CircuitSearch::new(written(&folder, &lines))).unwrap();
    assert_eq!(from_file.details.to_json(), found.details.to_json());
    let details = found.details.to_json();
    let (clean, corrupted) = (details["clean"].as_f64().unwrap(), details["corrupted"].as_f64().unwrap());
    assert!(
        clean > 2.0 && clean - corrupted > 2.0,
        "the model predicts the indirect object: {clean}, {corrupted}"
    );
    let metric = found.report.metric.as_ref().unwrap();
    let kept = metric.after.unwrap();
    assert!(kept >= 0.8 * clean, "{kept} of the logit difference {clean}: {:?}", found.report.notes);
    let faithfulness = (kept - corrupted) / (clean - corrupted);
    assert!(faithfulness >= 0.8, "{faithfulness}: {:?}", found.report.notes);
    let edges = details["edges"].as_object().unwrap();
    let kept = edges.values().filter(|edge| edge["in_graph"] == true).count();
    assert_eq!(edges.len(), 1520);
    assert!(kept > 3 && kept <= 76, "{kept} edges");
    let reader = reader(&loaded);
    for task in [DataTask::GreaterThan, DataTask::Gender] {
        let data = task_data(&loaded, task, 8);
        let few = CircuitSearch { method: CircuitMethod::Eap, pairs: Some(6), ..CircuitSearch::new(data) };
        let reporter = RecordingReporter::default();
        let subject = LookSubject::new(&loaded, "a model".into(), &reader);
        let found = few.at(&subject, &reporter).unwrap().details.to_json();
        let (clean, corrupted) = (found["clean"].as_f64().unwrap(), found["corrupted"].as_f64().unwrap());
        assert!(clean > corrupted + 0.1, "{task:?}: {clean}, {corrupted}");
        let jobs = reporter.jobs.into_inner().unwrap();
        assert_eq!(jobs, [("scoring edges".to_owned(), 6), ("running circuits".to_owned(), 6)]);
    }
}

/// JSON line for a pair of prompts as token ids, because the checkpoint has no tokenizer.
fn line_of(case: &Case) -> Value {
    let ids = |name: &str| case.recorded[name].clone();
    json!({ "clean": ids("clean_ids"), "corrupt": ids("corrupted_ids"), "answer": ids("answer"), "against": [ids("wrong")] })
}

fn search(
    case: &Case,
    folder: &TempDir,
    line: &Value,
    options: CircuitSearch,
) -> Result<Analysis, LookError> {
    let data = written(folder, &[line.to_string(), String::new()]).into();
    look(&case.loaded, &CircuitSearch { data, ..options })
}

/// Positions at which the prompts differ.
fn differing(case: &Case) -> Vec<usize> {
    let ids = |name: &str| -> Vec<u32> { serde_json::from_value(case.recorded[name].clone()).unwrap() };
    let (clean, corrupted) = (ids("clean_ids"), ids("corrupted_ids"));
    (0..clean.len()).filter(|position| clean[*position] != corrupted[*position]).collect()
}

/// Spans at either end of the edges.
fn named_spans(details: &Value) -> BTreeSet<String> {
    let edges = details["edges"].as_object().unwrap().values();
    let spans = edges.filter_map(|edge| edge["spans"].as_array()).flatten();
    spans
        .flat_map(|spans| ["source", "destination"].map(|end| spans[end].as_str().unwrap().to_owned()))
        .collect()
}

/// Checks that a span without tokens has no scores, even if another line names it.
#[test]
fn spans_without_tokens_have_no_scores() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let mut line = line_of(&case);
    line["spans"] = json!({ "a": differing(&case), "none": [] });
    let mut other = line.clone();
    other["spans"] = json!({ "z": [50] }); // position outside the prompt; this line is not read
    let data = written(&folder, &[line.to_string(), other.to_string()]).into();
    let options = CircuitSearch {
        data,
        method: CircuitMethod::PositionAware,
        pairs: Some(1),
        ..CircuitSearch::default()
    };
    let details = look(&case.loaded, &options).unwrap().details.to_json();
    assert_eq!(named_spans(&details), ["a", "other"].map(str::to_owned).into());
}

#[test]
fn every_method_writes_the_benchmark_format() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let mut line = line_of(&case);
    line["spans"] = json!({ "changed": differing(&case), "end": [6] });
    for method in [
        CircuitMethod::Eap,
        CircuitMethod::EapIg,
        CircuitMethod::CleanCorrupted,
        CircuitMethod::PositionAware,
        CircuitMethod::Acdc,
    ] {
        let edges = (method != CircuitMethod::Acdc).then_some(EdgeAmount::Share(0.4));
        let options = CircuitSearch { method, edges, threshold: 0.003, ..CircuitSearch::default() };
        let found = search(&case, &folder, &line, options).unwrap();
        let details = found.details.to_json();
        assert_eq!(
            details["cfg"],
            json!({ "n_layers": 3, "n_heads": 2, "d_model": 18, "parallel_attn_mlp": false })
        );
        let (nodes, edges) = (details["nodes"].as_object().unwrap(), details["edges"].as_object().unwrap());
        assert_eq!((nodes.len(), edges.len()), (11, 6 * (1 + 4 + 7) + 3 + 6 + 9 + 10), "{method:?}");
        let mut count = 0;
        for (name, edge) in edges {
            assert!(edge["score"].is_number(), "{name}");
            assert_eq!(edge["spans"].is_array(), method == CircuitMethod::PositionAware);
            if let Some(spans) = edge["spans"].as_array() {
                let mut sum = 0.0;
                for span in spans {
                    let is_crossing = span["source"] != span["destination"];
                    assert!(!is_crossing || name.ends_with("<k>") || name.ends_with("<v>"), "{name}: {span}");
                    assert!(span["source"] != "other" || !name.starts_with("input"), "{name}: {span}");
                    sum += span["score"].as_f64().unwrap();
                }
                assert!((sum - edge["score"].as_f64().unwrap()).abs() < 1e-5, "{name}: {edge}");
                count += spans.iter().filter(|span| span["in_graph"] == true).count();
            } else {
                count += usize::from(edge["in_graph"] == true);
            }
            if edge["in_graph"] == true {
                let (source, end) = name.split_once("->").unwrap();
                let end = end.split('<').next().unwrap();
                assert!(nodes[source]["in_graph"] == true && nodes[end]["in_graph"] == true, "{name}");
            }
        }
        assert!(
            found.report.title.starts_with(&format!("circuit of {count} edges")),
            "{}",
            found.report.title
        );
        if method == CircuitMethod::PositionAware {
            assert_eq!(named_spans(&details), ["changed", "end", "other"].map(str::to_owned).into());
            assert!(
                found.report.notes.iter().any(|note| note.contains(" (changed to other) ")),
                "{:?}",
                found.report.notes
            );
        } else {
            assert!(named_spans(&details).is_empty());
        }
        let curve = details["curve"].as_array().unwrap();
        assert_eq!((curve.len(), found.report.values.len()), (10, 10));
        assert_eq!(curve[9]["faithfulness"], 1.0);
        let graph = found.report.graph.as_ref().unwrap();
        let named = nodes.values().filter(|node| node["in_graph"] == true).count();
        let links = edges.values().filter(|edge| edge["in_graph"] == true).count();
        assert_eq!((graph.nodes.len(), graph.links.len()), (named, links), "{method:?}");
        for link in &graph.links {
            assert!(graph.nodes[link.from].row < graph.nodes[link.to].row, "{link:?}");
        }
        let picture =
            candle_gpt2_pictures::svg(&found.report, candle_gpt2_pictures::Width::OneColumn).unwrap();
        assert_eq!(picture.matches("<path").count(), links);
        assert!(candle_gpt2_pictures::page(&found.report).contains(">logits</text>"));
    }
}

#[test]
fn invalid_pairs_are_rejected_with_their_line() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let assert_rejected = |lines: &[String], options: CircuitSearch, expected: &[&str]| {
        let data = written(&folder, lines).into();
        let error = CircuitSearch { data, ..options }.check(&reader(&case.loaded)).unwrap_err();
        assert!(error.is_usage(), "{error}");
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            message += &format!(": {error}");
            source = error.source();
        }
        for part in expected {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    };
    let with = |name: &str, value: Value| {
        let mut line = line_of(&case);
        line[name] = value;
        line.to_string()
    };
    let defaults = CircuitSearch::default;
    let line = line_of(&case).to_string();
    assert_rejected(&[String::new()], defaults(), &["pairs.jsonl", "no pairs"]);
    assert_rejected(
        &[line.clone(), "[1]".into()],
        defaults(),
        &["pairs.jsonl, line 2", "expected {\"clean\""],
    );
    assert_rejected(
        &[with("corrupt", json!([1, 2]))],
        defaults(),
        &["line 1", "`clean` has 7 tokens and `corrupt` 2"],
    );
    assert_rejected(&[with("colour", json!("red"))], defaults(), &["unknown field `colour`"]);
    assert_rejected(&[with("answer", json!([]))], defaults(), &["`answer`: expected at least one token"]);
    assert_rejected(
        &[with("answer", json!(73))],
        defaults(),
        &["`answer`: token 73 is outside the vocabulary of 73"],
    );
    assert_rejected(
        &[with("answer", json!(true))],
        defaults(),
        &["expected a string of one token, a token id, or a list of them"],
    );
    let by_position = || CircuitSearch { method: CircuitMethod::PositionAware, ..defaults() };
    assert_rejected(
        &[with("spans", json!({ "end": [7] }))],
        by_position(),
        &["`spans` end 7: the prompts have 7 tokens"],
    );
    let shorter = json!({ "clean": [1, 2], "corrupt": [1, 3], "answer": 4, "against": 5 }).to_string();
    assert_rejected(
        &[line.clone(), String::new(), shorter],
        by_position(),
        &["line 3", "2 tokens, but the first pair's have 7"],
    );
    let lines = [line];
    assert_rejected(
        &lines,
        CircuitSearch { steps: 0, ..defaults() },
        &["`steps`: expected a number from 1 to 1000"],
    );
    assert_rejected(
        &lines,
        CircuitSearch { pairs: Some(0), ..defaults() },
        &["`pairs`: expected at least 1"],
    );
    let metric = serde_json::from_value(json!({ "metric": "kl", "method": "eap" })).unwrap();
    assert_rejected(&lines, metric, &["`metric` kl: its gradient at the clean prompt is zero"]);
    let acdc = || CircuitSearch { method: CircuitMethod::Acdc, ..defaults() };
    assert_rejected(
        &lines,
        CircuitSearch { edges: Some(EdgeAmount::Count(3)), ..acdc() },
        &["`edges`", "`threshold`"],
    );
    assert_rejected(
        &lines,
        CircuitSearch { threshold: f64::NAN, ..acdc() },
        &["`threshold`: expected at least 0"],
    );
    let nowhere =
        CircuitSearch::new(PathBuf::from("/nowhere/pairs.jsonl")).check(&reader(&case.loaded)).unwrap_err();
    assert!(matches!(nowhere, LookError::Read { .. }) && !nowhere.is_usage(), "{nowhere}");
    // Pairs in memory are named by their positions in the list.
    let mut outside: TextPair = serde_json::from_value(line_of(&case)).unwrap();
    let inside = outside.clone();
    outside.answer = vec![TokenChoice::Id(73)];
    let error =
        CircuitSearch::new(PairData::Pairs(vec![inside, outside])).check(&reader(&case.loaded)).unwrap_err();
    assert!(error.to_string().starts_with("pair 2"), "{error}");
    let message = serde_json::from_value::<CircuitSearch>(json!({ "data": [line_of(&case), {}] }))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("pair 2: expected {\"clean\"") && message.contains("missing field `clean`"),
        "{message}"
    );
    let error = CircuitSearch::default().check(&reader(&case.loaded)).unwrap_err();
    assert!(error.to_string().contains("the list of pairs"), "{error}");
    // A model without a tokenizer has no words to build prompts from.
    let data = TaskData { task: DataTask::Ioi, count: 1, seed: 0 };
    assert!(data.pairs(&reader(&case.loaded)).is_err());
    assert!(TaskData { count: 1_000_001, ..data }.pairs(&reader(&built_in())).unwrap_err().is_usage());
    // Prompts without a difference have nothing to explain.
    let mut same = line_of(&case);
    same["corrupt"] = same["clean"].clone();
    let error = search(&case, &folder, &same, defaults()).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("there is nothing to explain"), "{error}");
}

#[test]
fn edge_amounts_are_counts_or_percentages() {
    let read = |text: &str| text.parse::<EdgeAmount>();
    for (text, of_1000) in [("0", 0), ("7", 7), ("5000", 1000), ("0.25%", 2), ("100%", 1000)] {
        let amount = read(text).unwrap();
        assert_eq!((amount.of(1000), amount.to_string().as_str()), (of_1000, text));
    }
    for text in ["", "-1", "101%", "-1%", "nan%", "%", "0.5"] {
        assert!(read(text).unwrap_err().contains("neither a number of edges nor a percentage"), "{text}");
    }
    let read: CircuitSearch = serde_json::from_value(json!({ "data": "a", "edges": "2%" })).unwrap();
    assert_eq!(read.edges, Some(EdgeAmount::Share(0.02)));
    let read: CircuitSearch = serde_json::from_value(json!({ "data": "a", "edges": 12 })).unwrap();
    assert_eq!(read.edges, Some(EdgeAmount::Count(12)));
}
