//! Compares `/v1/classify` with transformers.
//!
//! `scripts/reference/heads.py` generated the checkpoints and the expected values.

use std::cell::RefCell;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, Endpoint, ServedModel, Session};
use candle_gpt2_engine::{ModelOptions, Silent, Vocabulary};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture};
use serde_json::{Value, json};

use crate::common::{options, tiny};

/// Tolerance for f32 sums over three blocks, which PyTorch adds up in a different order.
const TOLERANCE: f64 = 1e-4;

struct Served {
    session: RefCell<Session>,
    served: Arc<ServedModel>,
    vocabulary: Arc<Vocabulary>,
}

impl Served {
    fn fixture(name: &str) -> Self {
        Self::folder(&fixture_path("heads").join(name))
    }

    fn folder(folder: &std::path::Path) -> Self {
        let model = ModelOptions { model: folder.into(), ..ModelOptions::default() };
        let classifier = model.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap();
        let served = Arc::new(ServedModel::of_classifier(&classifier, options()));
        let vocabulary = Arc::clone(classifier.vocabulary());
        Self { session: Session::of_classifier(classifier, Arc::clone(&served)).into(), served, vocabulary }
    }

    fn answer(&self, body: &Value) -> Value {
        let work = self.served.read(Endpoint::Classify, body.to_string().as_bytes(), None).unwrap();
        let reply = self.session.borrow_mut().answer(work, || true).unwrap().unwrap();
        serde_json::from_str(&reply.json).unwrap()
    }

    fn error(&self, body: &Value) -> ApiError {
        self.served.read(Endpoint::Classify, body.to_string().as_bytes(), None).unwrap_err()
    }
}

fn expected(name: &str) -> Value {
    json_fixture("heads/expected")[name].clone()
}

#[track_caller]
fn assert_close(found: &Value, expected: &Value) {
    let difference = (found.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
    assert!(difference <= TOLERANCE, "expected {expected}, found {found}");
}

#[test]
fn sequence_labels_match_transformers() {
    for name in ["sequence", "multi_label"] {
        let (served, expected) = (Served::fixture(name), expected(name));
        let texts = json_fixture("heads/expected")["texts"].clone();
        let answer =
            served.answer(&json!({"model": "tiny", "input": texts, "user": "someone", "priority": 3}));
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tiny")));
        assert!(answer["id"].as_str().unwrap().starts_with("classify-"));
        let tokens: usize =
            expected["ids"].as_array().unwrap().iter().map(|ids| ids.as_array().unwrap().len()).sum();
        let usage = json!({
            "prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": null
        });
        assert_eq!(answer["usage"], usage);
        let data = answer["data"].as_array().unwrap();
        assert_eq!(data.len(), texts.as_array().unwrap().len());
        for (index, entry) in data.iter().enumerate() {
            let pipeline = expected["pipeline"][index].as_array().unwrap();
            let names = &served.vocabulary.config().id2label;
            assert_eq!((&entry["index"], &entry["num_classes"]), (&json!(index), &json!(names.len())));
            assert_eq!(entry["label"], pipeline[0]["label"]);
            // `probs` is ordered by label id, `labels` by descending probability.
            for (rank, expected) in pipeline.iter().enumerate() {
                let id = names.iter().position(|name| expected["label"] == json!(name)).unwrap();
                assert_close(&entry["probs"][id], &expected["score"]);
                assert_eq!(entry["labels"][rank]["label"], expected["label"]);
                assert_close(&entry["labels"][rank]["score"], &expected["score"]);
            }
            for (id, logit) in expected["logits"][index].as_array().unwrap().iter().enumerate() {
                let label = entry["labels"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .find(|label| label["label"] == json!(names[id]));
                assert_close(&label.unwrap()["logit"], logit);
            }
        }
    }
}

#[test]
fn logits_replace_probabilities_on_request_or_for_regression() {
    let (served, expected) = (Served::fixture("multi_label"), expected("multi_label"));
    let ids = &expected["ids"][0];
    for name in ["use_activation", "activation", "softmax"] {
        let mut body = json!({"input": ids});
        body[name] = json!(false);
        let answer = served.answer(&body);
        for (found, logit) in answer["data"][0]["probs"]
            .as_array()
            .unwrap()
            .iter()
            .zip(expected["logits"][0].as_array().unwrap())
        {
            assert_close(found, logit);
        }
    }
    let folder = CheckpointFolder::of("heads/multi_label").with_config(json!({"problem_type": "regression"}));
    let answer = Served::folder(folder.path()).answer(&json!({"input": [ids, ids]}));
    assert_eq!(answer["data"].as_array().unwrap().len(), 2);
    assert_close(&answer["data"][1]["probs"][2], &expected["logits"][0][2]);
    let best = &answer["data"][0]["labels"][0];
    assert_close(&best["score"], &best["logit"]);
}

#[test]
fn token_labels_and_offsets_match_transformers() {
    let (served, expected) = (Served::fixture("token"), expected("token"));
    let texts = json_fixture("heads/expected")["texts"].clone();
    let answer = served.answer(&json!({"input": texts}));
    for (index, entry) in answer["data"].as_array().unwrap().iter().enumerate() {
        assert!(entry.get("label").is_none() && entry.get("probs").is_none());
        let tokens = entry["tokens"].as_array().unwrap();
        assert_eq!(tokens.len(), expected["ids"][index].as_array().unwrap().len());
        for found in expected["pipeline"][index].as_array().unwrap() {
            let token = &tokens[usize::try_from(found["index"].as_u64().unwrap()).unwrap()];
            assert_eq!((&token["start"], &token["end"]), (&found["start"], &found["end"]));
            assert_eq!(token["labels"][0]["label"], found["entity"]);
            assert_close(&token["labels"][0]["score"], &found["score"]);
        }
    }
}

#[test]
fn long_texts_are_rejected_or_truncated_on_request() {
    let served = Served::fixture("sequence");
    let ids: Vec<u32> = (1..=60).collect();
    let error = served.error(&json!({"input": [[1, 2], ids]}));
    assert_eq!(
        (error.status(), error.param(), error.code()),
        (400, Some("input[1]"), Some("context_length_exceeded"))
    );
    assert!(error.to_string().contains("the text has 60"), "{error}");
    let truncated = |tokens: i64| served.answer(&json!({"input": ids, "truncate_prompt_tokens": tokens}));
    let check = |found: &Value, kept: &[u32]| {
        assert_eq!(found["usage"]["prompt_tokens"], kept.len());
        assert_eq!(found["data"], served.answer(&json!({"input": kept}))["data"]);
    };
    check(&truncated(-1), &ids[20..]);
    check(&truncated(40), &ids[20..]);
    check(&truncated(7), &ids[53..]);
    check(&served.answer(&json!({"input": [3, 4, 5], "truncate_prompt_tokens": 2})), &[4, 5]);
    assert_eq!(
        served.error(&json!({"input": ids, "truncate_prompt_tokens": 41})).code(),
        Some("context_length_exceeded")
    );
    let word = "The first citizen ".repeat(40);
    let error = served.error(&json!({"input": word}));
    assert_eq!((error.param(), error.code()), (Some("input"), Some("context_length_exceeded")));
    assert_eq!(
        served.answer(&json!({"input": word, "truncate_prompt_tokens": -1}))["usage"]["prompt_tokens"],
        40
    );
}

#[test]
fn truncation_keeps_the_offsets_of_the_last_tokens() {
    let served = Served::fixture("token");
    let text = format!("{}the end", "wörd ".repeat(400_000));
    let answer = served.answer(&json!({"input": text, "truncate_prompt_tokens": 7}));
    let tokens = answer["data"][0]["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 7);
    let ids = served.vocabulary.encode(&text[text.len() - 100..]).unwrap();
    let found: Vec<u64> = tokens.iter().map(|token| token["id"].as_u64().unwrap()).collect();
    assert_eq!(found, ids[ids.len() - 7..].iter().map(|id| u64::from(*id)).collect::<Vec<_>>());
    assert_eq!(tokens[6]["end"], text.chars().count());
}

#[test]
fn invalid_bodies_report_the_field() {
    let served = Served::fixture("sequence");
    let texts = vec!["a"; 65];
    for (body, param, expected) in [
        (json!({}), "input", "found nothing"),
        (json!({"input": null}), "input", "found nothing"),
        (json!({"input": []}), "input", "at least one prompt"),
        (json!({"input": {}}), "input", "a string, strings"),
        (json!({"input": [[]]}), "input[0]", "at least one token id"),
        (json!({"input": [1, 300]}), "input[1]", "below the vocabulary size of 300"),
        (json!({"input": ["a", 1]}), "input[1]", "a string"),
        (json!({"input": texts}), "input", "at most 64 texts"),
        (json!({"input": "a", "model": "gpt2"}), "model", "model not found"),
        (json!({"input": "a", "messages": [{"role": "user"}]}), "messages", "pass the text as input"),
        (
            json!({"input": "a", "truncation_side": "right"}),
            "truncation_side",
            "only the last tokens of a long text can be kept",
        ),
        (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens", "at least 1"),
        (json!({"input": "a", "use_activation": "yes"}), "use_activation", "true or false"),
        (json!({"input": "a", "request_id": "a b"}), "request_id", "visible ASCII"),
        (json!({"input": "a", "softmax": true, "activation": false}), "softmax", "are aliases"),
    ] {
        let error = served.error(&body);
        let message = error.to_json();
        assert!(message.contains(expected), "{body}: {message}");
        let is_named =
            error.param() == Some(param) || (param == "softmax" && error.param() == Some("activation"));
        assert!(is_named, "{body}: {message}");
    }
    assert_eq!(served.answer(&json!({"input": "a", "rid": "7"}))["id"], "classify-7");
    // An empty text still contains the start token.
    assert_eq!(served.answer(&json!({"input": ""}))["usage"]["prompt_tokens"], 1);
    for body in [&b"no json"[..], b"{\"input\": \"\\ud800\"}"] {
        assert!(served.served.read(Endpoint::Classify, body, None).is_err());
    }
}

#[test]
fn routes_of_other_model_kinds_are_rejected() {
    let error = tiny().served.read(Endpoint::Classify, b"{\"input\": \"a\"}", None).unwrap_err();
    assert_eq!(error.status(), 400);
    assert!(error.to_string().contains("a language model (GPT2LMHeadModel) and has no labels"), "{error}");
    let classifier = Served::fixture("sequence").served;
    for endpoint in
        [Endpoint::Completions, Endpoint::ChatCompletions, Endpoint::Embeddings, Endpoint::LookHead]
    {
        let error = classifier.read(endpoint, b"{\"prompt\": \"a\"}", None).unwrap_err();
        assert!(error.to_string().contains("a classifier (GPT2ForSequenceClassification)"), "{error}");
    }
}
