//! Classifiers compared with transformers.
//!
//! `scripts/reference/heads.py` created the checkpoints and the expected values.

use candle_gpt2_engine::{
    Classification, Classifier, ConvertOptions, EngineError, InspectOptions, Inspected, Label, ModelOptions,
    Question, Silent, VerifyOptions, WeightDType,
};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture, temporary_folder};
use candle_gpt2_weights::WrittenDType;
use serde_json::{Value, json};

/// Tolerance for f32 rounding over three blocks, because PyTorch sums in a different order.
///
/// This bound is a project requirement.
const TOLERANCE: f64 = 1e-4;

fn options(name: &str) -> ModelOptions {
    ModelOptions { model: fixture_path("heads").join(name), ..ModelOptions::default() }
}

fn load(options: &ModelOptions) -> Classifier {
    options.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap()
}

fn expected(name: &str) -> Value {
    json_fixture("heads/expected")[name].clone()
}

fn texts() -> Vec<String> {
    serde_json::from_value(expected("texts")).unwrap()
}

fn questions(classifier: &Classifier) -> Vec<Question> {
    let question = |text: &String| Question::of_text(classifier.vocabulary(), text, None).unwrap();
    texts().iter().map(question).collect()
}

/// Returns the logits in the order of label ids.
fn logits(labels: &[Label]) -> Vec<f64> {
    let mut labels: Vec<&Label> = labels.iter().collect();
    labels.sort_by_key(|label| label.id);
    labels.iter().map(|label| f64::from(label.logit)).collect()
}

fn labels(classification: &Classification) -> &[Label] {
    match classification {
        Classification::Labels { labels } => labels,
        other => panic!("labels are expected, found {other:?}"),
    }
}

/// Returns all logits of a classification, in the order of the labels, tokens or choices.
fn all_logits(classification: &Classification) -> Vec<f64> {
    match classification {
        Classification::Labels { labels } => logits(labels),
        Classification::Tokens { tokens } => tokens.iter().flat_map(|token| logits(&token.labels)).collect(),
        Classification::Choices { choices } => {
            let mut choices: Vec<_> = choices.iter().map(|choice| (choice.index, choice.logit)).collect();
            choices.sort_by_key(|(index, _)| *index);
            choices.into_iter().map(|(_, logit)| f64::from(logit)).collect()
        }
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        number => vec![number.as_f64().unwrap()],
    }
}

#[track_caller]
fn assert_within(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= tolerance, "{what}, {index}: expected {expected}, found {found}");
    }
}

#[test]
fn logits_equal_transformers_at_any_batch_size() {
    for name in ["sequence", "multi_label", "token"] {
        let (classifier, expected) = (load(&options(name)), expected(name));
        let questions = questions(&classifier);
        assert_eq!(json!(questions), expected["ids"], "{name}: token ids");
        for size in [1, 2, questions.len()] {
            let found = questions.chunks(size).flat_map(|batch| classifier.classify(batch).unwrap());
            let found: Vec<_> = found.collect();
            assert_eq!(found.len(), questions.len());
            for (index, found) in found.iter().enumerate() {
                let expected = numbers(&expected["logits"][index]);
                assert_within(
                    &all_logits(found),
                    &expected,
                    TOLERANCE,
                    &format!("{name}, {index} by {size}"),
                );
            }
        }
        assert!(classifier.classify(&[]).unwrap().is_empty());
    }
    let classifier = load(&options("double"));
    let expected = expected("double");
    let ids: Vec<Vec<u32>> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let question = Question::of_choice_ids(classifier.vocabulary(), ids, None).unwrap();
    let found = classifier.classify(&[question.clone(), question]).unwrap();
    for found in &found {
        assert_within(&all_logits(found), &numbers(&expected["logits"]), TOLERANCE, "choices");
    }
}

/// Tests rows that end with padding tokens and a row that is all padding.
///
/// The classifier reads the same token as transformers.
#[test]
fn trailing_padding_is_ignored() {
    let (classifier, expected) = (load(&options("sequence")), expected("sequence"));
    let rows: Vec<Vec<u32>> = serde_json::from_value(expected["padded_ids"].clone()).unwrap();
    let question = |row: &Vec<u32>| Question::of_ids(classifier.vocabulary(), row.clone(), None).unwrap();
    let found = classifier.classify(&rows.iter().map(question).collect::<Vec<_>>()).unwrap();
    for (index, found) in found.iter().enumerate() {
        let expected = numbers(&expected["padded_logits"][index]);
        assert_within(&all_logits(found), &expected, TOLERANCE, &format!("padded row {index}"));
    }
}

/// Expected values come from the text and token classification pipelines of transformers.
///
/// They are `pipeline("text-classification")` and `pipeline("token-classification")`.
#[test]
fn scores_and_offsets_equal_transformers_pipelines() {
    for name in ["sequence", "multi_label"] {
        let (classifier, expected) = (load(&options(name)), expected(name));
        let found = classifier.classify(&questions(&classifier)).unwrap();
        for (found, expected) in found.iter().zip(expected["pipeline"].as_array().unwrap()) {
            let found = labels(found);
            // Sorted best first, as in the pipeline.
            for (label, expected) in found.iter().zip(expected.as_array().unwrap()) {
                assert_eq!(json!(label.label), expected["label"]);
                let score = expected["score"].as_f64().unwrap();
                assert_within(&[label.score], &[score], TOLERANCE, &label.label);
            }
            let sum: f64 = found.iter().map(|label| label.score).sum();
            assert_eq!((sum - 1.0).abs() < 1e-12, name == "sequence", "{name}: {sum}");
        }
    }
    let (classifier, expected) = (load(&options("token")), expected("token"));
    let found = classifier.classify(&questions(&classifier)).unwrap();
    let mut compared = 0;
    for (found, expected) in found.iter().zip(expected["pipeline"].as_array().unwrap()) {
        let Classification::Tokens { tokens } = found else { panic!("{found:?}") };
        // transformers omits tokens whose best label is `O`.
        let named = tokens.iter().enumerate().filter(|(_, token)| token.labels[0].label != "O");
        let named: Vec<_> = named.collect();
        assert_eq!(named.len(), expected.as_array().unwrap().len());
        for ((index, token), expected) in named.into_iter().zip(expected.as_array().unwrap()) {
            assert_eq!(expected["index"], json!(index));
            assert_eq!(expected["entity"], json!(token.labels[0].label));
            assert_eq!((&expected["start"], &expected["end"]), (&json!(token.start), &json!(token.end)));
            let score = expected["score"].as_f64().unwrap();
            assert_within(&[token.labels[0].score], &[score], TOLERANCE, "token");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

/// The pipeline uses `NONE` for regression and `SIGMOID` for one label without a `problem_type`.
#[test]
fn regression_uses_logits_and_a_single_label_the_sigmoid() {
    let folder = CheckpointFolder::of("heads/multi_label").with_config(json!({"problem_type": "regression"}));
    let classifier = load(&ModelOptions { model: folder.path().into(), ..ModelOptions::default() });
    let found = classifier.classify(&questions(&classifier)).unwrap();
    assert_within(
        &all_logits(&found[0]),
        &numbers(&expected("multi_label")["logits"][0]),
        TOLERANCE,
        "logits",
    );
    let json = json!(found[0]);
    let first = json["labels"][0].as_object().unwrap();
    assert_eq!(first.keys().collect::<Vec<_>>(), ["label", "score", "logit"]);
    assert_eq!(first["score"], first["logit"]);
    for (problem_type, by_sigmoid) in
        [(Value::Null, true), (json!("multi_label_classification"), true), (json!("regression"), false)]
    {
        let config =
            json!({"problem_type": problem_type, "id2label": {"0": "good"}, "label2id": {"good": 0}});
        let folder = CheckpointFolder::of("heads/sequence").with_config(config).with_tensors(|tensors| {
            let score = tensors["score.weight"].narrow(0, 0, 1).unwrap().contiguous().unwrap();
            tensors.insert("score.weight".into(), score);
        });
        let classifier = load(&ModelOptions { model: folder.path().into(), ..ModelOptions::default() });
        let found = classifier.classify(&questions(&classifier)).unwrap();
        let [Label { label, score, logit, .. }] = labels(&found[0]) else { panic!("{found:?}") };
        let logit = f64::from(*logit);
        let expected = if by_sigmoid { 1.0 / (1.0 + (-logit).exp()) } else { logit };
        assert_eq!((label.as_str(), *score), ("good", expected), "{problem_type}");
    }
}

/// Reduced precision rounds the weights of all blocks but not the head's.
///
/// An error in scale, order or packing would change the logits by their full magnitude.
#[test]
fn every_weight_dtype_classifies_within_tolerance() {
    for name in ["sequence", "token"] {
        let expected = expected(name);
        for (dtype, tolerance) in [
            (WeightDType::F32, TOLERANCE),
            (WeightDType::F16, 1e-2),
            (WeightDType::Q8, 0.1),
            (WeightDType::Q6, 0.3),
            (WeightDType::Q5, 0.6),
            (WeightDType::Q4, 1.0),
        ] {
            let classifier = load(&ModelOptions { dtype: Some(dtype), ..options(name) });
            assert_eq!(classifier.weight_type(), dtype.name());
            let found = classifier.classify(&questions(&classifier)).unwrap();
            for (index, found) in found.iter().enumerate() {
                let expected = numbers(&expected["logits"][index]);
                let what = format!("{name} in {}, {index}", dtype.name());
                assert_within(&all_logits(found), &expected, tolerance, &what);
            }
        }
    }
    // The checkpoint is stored in f16, in PyTorch shards, with the tokenizer in another folder.
    let shards =
        ModelOptions { tokenizer: Some(fixture_path("tiny-checkpoint")), ..options("pytorch-shards") };
    let classifier = load(&shards);
    let found = classifier.classify(&questions(&classifier)).unwrap();
    let expected = expected("sequence");
    for (index, found) in found.iter().enumerate() {
        assert_within(&all_logits(found), &numbers(&expected["logits"][index]), 1e-2, "f16 shards");
    }
}

#[test]
fn long_inputs_are_rejected_or_truncated_at_the_start() {
    let classifier = load(&options("token"));
    let vocabulary = classifier.vocabulary();
    let long = texts().join(" ");
    let ids = vocabulary.encode(&long).unwrap();
    assert!(ids.len() > 40);
    let error = Question::of_text(vocabulary, &long, None).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("40"), "{error}");
    let cut = Question::of_text(vocabulary, &long, Some(9)).unwrap();
    assert_eq!(json!(cut), json!(ids[ids.len() - 9..]));
    let from_ids = Question::of_ids(vocabulary, ids, Some(9)).unwrap();
    let found = classifier.classify(&[cut, from_ids]).unwrap();
    assert_eq!(all_logits(&found[0]), all_logits(&found[1]));
    let Classification::Tokens { tokens } = &found[0] else { panic!("{found:?}") };
    assert_eq!(tokens.len(), 9);
    assert_eq!(tokens[8].end, Some(long.chars().count()), "offsets refer to the whole text");
    let Classification::Tokens { tokens } = &found[1] else { panic!("{found:?}") };
    assert!(tokens[8].end.is_none() && !tokens[8].text.is_empty());
    // An empty text becomes the start token.
    let empty = Question::of_text(vocabulary, "", None).unwrap();
    assert_eq!(json!(empty), json!([0]));
    let beyond = Question::of_ids(vocabulary, vec![5, 300], None).unwrap_err();
    assert!(beyond.is_usage() && beyond.to_string().contains("300"), "{beyond}");
}

#[test]
fn only_double_heads_models_rank_choices() {
    let double = load(&options("double"));
    let choices = [" blue", " green", ""].map(str::to_owned);
    let question = Question::of_choices(double.vocabulary(), "The sky is", &choices, None).unwrap();
    let found = double.classify(&[question]).unwrap();
    let Classification::Choices { choices: ranked } = &found[0] else { panic!("{found:?}") };
    assert!(ranked.is_sorted_by(|a, b| a.logit >= b.logit));
    assert!(ranked.iter().all(|choice| choice.text.as_ref() == Some(&choices[choice.index])));
    assert!((ranked.iter().map(|choice| choice.score).sum::<f64>() - 1.0).abs() < 1e-12);
    let assert_usage_error = |error: EngineError, expected: &str| {
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    };
    assert_usage_error(Question::of_text(double.vocabulary(), "x", None).unwrap_err(), "pass choices");
    assert_usage_error(
        Question::of_choices(double.vocabulary(), "x", &[], None).unwrap_err(),
        "at least one choice",
    );
    let sequence = load(&options("sequence"));
    let error = Question::of_choices(sequence.vocabulary(), "x", &choices, None).unwrap_err();
    assert_usage_error(error, "cannot rank choices");
}

#[test]
fn wrong_kind_of_model_is_rejected_at_open() {
    let error = options("sequence").open(&Silent).unwrap_err();
    assert!(error.is_usage(), "{error}");
    assert!(error.to_string().contains("GPT2ForSequenceClassification, a classifier"), "{error}");
    let language_model = ModelOptions::default().open_classifier(&Silent).unwrap_err();
    assert!(language_model.is_usage());
    assert!(language_model.to_string().contains("GPT2LMHeadModel, a language model"), "{language_model}");
    let drafts = ModelOptions {
        model: fixture_path("tiny-checkpoint"),
        assistant_model: Some(fixture_path("heads/sequence")),
        ..ModelOptions::default()
    };
    assert!(drafts.open(&Silent).unwrap_err().to_string().contains("a classifier"));
    // A model with double heads can generate, and any model can be opened to inspect its head.
    options("double").open(&Silent).unwrap().load(&Silent).unwrap();
    let head = options("token").open_any(&Silent).unwrap().config().head;
    assert_eq!(head.class_name(), "GPT2ForTokenClassification");
}

#[test]
fn classifiers_are_inspected_verified_and_converted() {
    let folder = temporary_folder();
    for (name, parameters) in
        [("sequence", 5 * 24), ("multi_label", 3 * 24), ("token", 8 * 21 + 7), ("double", 25)]
    {
        let model = options(name);
        let found = model.verify(&VerifyOptions::default(), &Silent).unwrap();
        assert!(found.sound, "{name}: {:?}", found.problems);
        assert!(found.batch_difference.unwrap() < TOLERANCE);
        assert_eq!(found.cache_difference.is_some(), name == "double");
        let inspect_options = InspectOptions {
            model: Some(model.model.clone()),
            preset: None,
            tensors: false,
            diff: None,
            n_head: None,
            hub: model.hub.clone(),
        };
        let Inspected::One(inspection) = inspect_options.inspect(&Silent).unwrap() else { panic!("one") };
        assert_eq!(inspection.tied_head, name == "double");
        assert_eq!(inspection.class, inspection.config["architectures"][0].as_str().unwrap());
        let blocks = 3 * (24 * 72 + 72 + 24 * 24 + 24 + 2 * 24 * 44 + 44 + 24 + 4 * 24);
        let parameters = (300 + 40 + 2) * 24 + blocks + parameters;
        assert_eq!(inspection.stored_parameters, Some(parameters), "{name}");
        assert_eq!(inspection.parameters.unique, parameters, "{name}");
        assert_eq!(load(&model).parameter_count(), parameters, "{name}");
        let needed = model.open_any(&Silent).unwrap().memory_needed().unwrap();
        assert!(needed.weights >= 4 * parameters as u64);
        assert_eq!(needed.kv == 0, name != "double");

        let output = folder.path().join(name);
        let convert_options = |output, dtype| ConvertOptions { output, dtype };
        model.convert(&convert_options(output.clone(), WrittenDType::F32), &Silent).unwrap();
        let against = VerifyOptions { against: Some(output), ..VerifyOptions::default() };
        let found = model.verify(&against, &Silent).unwrap();
        assert_eq!((found.sound, found.against_difference), (true, Some(0.0)), "{name}");
        let gguf = folder.path().join(format!("{name}.gguf"));
        let refusal = model.convert(&convert_options(gguf, WrittenDType::F32), &Silent).unwrap_err();
        assert!(refusal.to_string().contains("write a folder"), "{refusal}");
    }
    let against = VerifyOptions { against: Some(fixture_path("heads/token")), ..VerifyOptions::default() };
    let refusal = options("sequence").verify(&against, &Silent).unwrap_err().to_string();
    assert!(refusal.contains("GPT2ForSequenceClassification over red, green"), "{refusal}");
    let damaged = CheckpointFolder::of("heads/token").with_tensors(|tensors| {
        let nan = tensors["classifier.bias"].affine(0.0, f64::NAN).unwrap();
        tensors.insert("classifier.bias".into(), nan);
    });
    let damaged = ModelOptions { model: damaged.path().into(), ..ModelOptions::default() };
    assert!(!damaged.verify(&VerifyOptions::default(), &Silent).unwrap().sound);
    let classifier = load(&damaged);
    let error = classifier.classify(&questions(&classifier)).unwrap_err().to_string();
    assert!(error.contains("logits are not finite"), "{error}");
}
