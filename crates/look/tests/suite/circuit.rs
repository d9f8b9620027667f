//! Circuits of tasks, and the pairs of prompts that they are found on.

use std::path::{Path, PathBuf};

use candle_gpt2_engine::LoadedModel;
use candle_gpt2_look::{
    CircuitMethod, CircuitSearch, DataTask, EdgeAmount, Found, Look, LookError, LookSubject, Reader,
    TaskData, Text, TokenChoice, WrittenPair,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Case, Told, built_in, look, reader};

const TASKS: [DataTask; 3] = [DataTask::Ioi, DataTask::GreaterThan, DataTask::Gender];

fn pairs_of(reader: &Reader, task: DataTask, count: usize, seed: u64) -> Vec<WrittenPair> {
    TaskData { task, count, seed }.pairs(reader).unwrap()
}

fn written(folder: &TempDir, lines: &[String]) -> PathBuf {
    let path = folder.path().join("pairs.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// A file of pairs of a task in the words of the built-in model.
fn task_file(folder: &TempDir, loaded: &LoadedModel, task: DataTask, count: usize) -> PathBuf {
    let pairs = pairs_of(&reader(loaded), task, count, 1);
    let lines: Vec<String> = pairs.iter().map(|pair| serde_json::to_string(pair).unwrap()).collect();
    written(folder, &lines)
}

#[test]
fn pairs_differ_in_one_token_and_have_answers_of_one() {
    let loaded = built_in();
    for bos in [false, true] {
        let reader = Reader::new(loaded.vocabulary(), bos).unwrap();
        for task in TASKS {
            let pairs = pairs_of(&reader, task, 60, 3);
            assert_eq!(pairs.len(), 60);
            assert_eq!(pairs, pairs_of(&reader, task, 60, 3), "the same under the same seed");
            assert_ne!(pairs, pairs_of(&reader, task, 60, 4));
            assert_eq!(pairs[..10], pairs_of(&reader, task, 10, 3), "more pairs begin with the same");
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
fn spans_name_the_places_of_words() {
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

/// A bound far below what the guide on looking inside shows, so that another training does not fail it.
#[test]
fn a_twentieth_of_the_edges_does_most_of_indirect_objects() {
    let loaded = built_in();
    let folder = tempfile::tempdir().unwrap();
    let search = CircuitSearch::new(task_file(&folder, &loaded, DataTask::Ioi, 12));
    let found = look(&loaded, &search).unwrap();
    let details = found.details.to_json();
    let (clean, corrupted) = (details["clean"].as_f64().unwrap(), details["corrupted"].as_f64().unwrap());
    assert!(clean > 2.0 && clean - corrupted > 2.0, "the model knows who gets it: {clean}, {corrupted}");
    let metric = found.report.metric.as_ref().unwrap();
    let share = (metric.after.unwrap() - corrupted) / (clean - corrupted);
    assert!(share > 0.6, "{share} of the logit difference: {:?}", found.report.notes);
    let edges = details["edges"].as_object().unwrap();
    let kept = edges.values().filter(|edge| edge["in_graph"] == true).count();
    assert_eq!(edges.len(), 703);
    assert!(kept > 3 && kept <= 35, "{kept} edges");
    let reader = reader(&loaded);
    for task in [DataTask::GreaterThan, DataTask::Gender] {
        let file = task_file(&folder, &loaded, task, 8);
        let few = CircuitSearch { method: CircuitMethod::Eap, pairs: Some(6), ..CircuitSearch::new(file) };
        let told = Told::default();
        let subject = LookSubject::new(&loaded, "a model".into(), &reader);
        let found = few.at(&subject, &told).unwrap().details.to_json();
        let (clean, corrupted) = (found["clean"].as_f64().unwrap(), found["corrupted"].as_f64().unwrap());
        assert!(clean > corrupted + 0.1, "{task:?}: {clean}, {corrupted}");
        let jobs = told.jobs.into_inner().unwrap();
        assert_eq!(jobs, [("scoring edges".to_owned(), 6), ("running circuits".to_owned(), 6)]);
    }
}

/// A line for a checkpoint without a tokenizer.
fn line_of(case: &Case) -> Value {
    let ids = |name: &str| case.recorded[name].clone();
    json!({ "clean": ids("clean_ids"), "corrupt": ids("corrupted_ids"), "answer": ids("answer"), "against": [ids("wrong")] })
}

fn search(case: &Case, folder: &TempDir, line: &Value, options: CircuitSearch) -> Result<Found, LookError> {
    let data = written(folder, &[line.to_string(), String::new()]);
    look(&case.loaded, &CircuitSearch { data, ..options })
}

/// A span that no token is in, by itself or because another line has it, has no scores.
#[test]
fn spans_without_a_token_are_left_out() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let mut line = line_of(&case);
    line["spans"] = json!({ "a": [0, 1], "none": [] });
    let mut other = line.clone();
    other["spans"] = json!({ "z": [50] }); // no such token: not read
    let data = written(&folder, &[line.to_string(), other.to_string()]);
    let options = CircuitSearch {
        data,
        method: CircuitMethod::PositionAware,
        pairs: Some(1),
        ..CircuitSearch::default()
    };
    let details = look(&case.loaded, &options).unwrap().details.to_json();
    for edge in details["edges"].as_object().unwrap().values() {
        assert_eq!(edge["spans"].as_object().unwrap().keys().collect::<Vec<_>>(), ["a", "other"]);
    }
}

#[test]
fn every_method_gives_a_circuit_in_the_form_of_the_benchmark() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let differing: Vec<usize> = {
        let ids = |name: &str| -> Vec<u32> { serde_json::from_value(case.recorded[name].clone()).unwrap() };
        let (clean, corrupted) = (ids("clean_ids"), ids("corrupted_ids"));
        (0..clean.len()).filter(|place| clean[*place] != corrupted[*place]).collect()
    };
    let mut line = line_of(&case);
    line["spans"] = json!({ "changed": differing, "end": [6] });
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
            assert_eq!(edge["spans"].is_object(), method == CircuitMethod::PositionAware);
            if let Some(spans) = edge["spans"].as_object() {
                assert_eq!(spans.keys().collect::<Vec<_>>(), ["changed", "end", "other"]);
                assert!(spans["other"]["score"] == 0.0 || !name.starts_with("input"), "{name}: {edge}");
                count += spans.values().filter(|span| span["in_graph"] == true).count();
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
fn files_that_are_no_pairs_are_refused_by_line() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let refused = |lines: &[String], options: CircuitSearch, told: &[&str]| {
        let data = written(&folder, lines);
        let error = CircuitSearch { data, ..options }.check(&reader(&case.loaded)).unwrap_err();
        assert!(error.is_usage(), "{error}");
        let mut said = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            said += &format!(": {error}");
            source = error.source();
        }
        for told in told {
            assert!(said.contains(told), "`{told}` is not in: {said}");
        }
    };
    let with = |name: &str, value: Value| {
        let mut line = line_of(&case);
        line[name] = value;
        line.to_string()
    };
    let usual = CircuitSearch::default;
    let line = line_of(&case).to_string();
    refused(&[String::new()], usual(), &["pairs.jsonl", "no pairs"]);
    refused(&[line.clone(), "[1]".into()], usual(), &["pairs.jsonl, line 2", "expected {\"clean\""]);
    refused(&[with("corrupt", json!([1, 2]))], usual(), &["line 1", "`clean` has 7 tokens and `corrupt` 2"]);
    refused(&[with("colour", json!("red"))], usual(), &["unknown field `colour`"]);
    refused(&[with("answer", json!([]))], usual(), &["`answer`: expected at least one token"]);
    refused(&[with("answer", json!(73))], usual(), &["`answer`: token 73 is outside the vocabulary of 73"]);
    refused(
        &[with("answer", json!(true))],
        usual(),
        &["expected a text of one token, a token id, or a list of them"],
    );
    let by_position = || CircuitSearch { method: CircuitMethod::PositionAware, ..usual() };
    refused(
        &[with("spans", json!({ "end": [7] }))],
        by_position(),
        &["`spans` end 7: the prompts have 7 tokens"],
    );
    let shorter = json!({ "clean": [1, 2], "corrupt": [1, 3], "answer": 4, "against": 5 }).to_string();
    refused(
        &[line.clone(), String::new(), shorter],
        by_position(),
        &["line 3", "2 tokens and those of the first line 7"],
    );
    let lines = [line];
    refused(&lines, CircuitSearch { steps: 0, ..usual() }, &["`steps`: expected from 1 to 1000"]);
    refused(&lines, CircuitSearch { pairs: Some(0), ..usual() }, &["`pairs`: expected at least 1"]);
    let metric = serde_json::from_value(json!({ "metric": "kl", "method": "eap" })).unwrap();
    refused(&lines, metric, &["`metric` kl: its gradient at the clean prompt is zero"]);
    let acdc = || CircuitSearch { method: CircuitMethod::Acdc, ..usual() };
    refused(
        &lines,
        CircuitSearch { edges: Some(EdgeAmount::Count(3)), ..acdc() },
        &["`edges`", "`threshold`"],
    );
    refused(&lines, CircuitSearch { threshold: f64::NAN, ..acdc() }, &["`threshold`: expected at least 0"]);
    let nowhere = CircuitSearch::new(Path::new("/nowhere/pairs.jsonl").into())
        .check(&reader(&case.loaded))
        .unwrap_err();
    assert!(matches!(nowhere, LookError::Read { .. }) && !nowhere.is_usage(), "{nowhere}");
    // A model without a tokenizer has no words to make prompts of.
    let data = TaskData { task: DataTask::Ioi, count: 1, seed: 0 };
    assert!(data.pairs(&reader(&case.loaded)).is_err());
    assert!(TaskData { count: 1_000_001, ..data }.pairs(&reader(&built_in())).unwrap_err().is_usage());
    // And prompts that do not differ explain nothing.
    let mut same = line_of(&case);
    same["corrupt"] = same["clean"].clone();
    let error = search(&case, &folder, &same, usual()).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("no difference to explain"), "{error}");
}

#[test]
fn amounts_of_edges_are_numbers_or_shares() {
    let read = |text: &str| text.parse::<EdgeAmount>();
    for (text, of_1000) in [("0", 0), ("7", 7), ("5000", 1000), ("0.25%", 2), ("100%", 1000)] {
        let amount = read(text).unwrap();
        assert_eq!((amount.of(1000), amount.to_string().as_str()), (of_1000, text));
    }
    for text in ["", "-1", "101%", "-1%", "nan%", "%", "0.5"] {
        assert!(read(text).unwrap_err().contains("neither a number of edges nor a share"), "{text}");
    }
    let read: CircuitSearch = serde_json::from_value(json!({ "data": "a", "edges": "2%" })).unwrap();
    assert_eq!(read.edges, Some(EdgeAmount::Share(0.02)));
    let read: CircuitSearch = serde_json::from_value(json!({ "data": "a", "edges": 12 })).unwrap();
    assert_eq!(read.edges, Some(EdgeAmount::Count(12)));
}
