//! Tests of attribution graphs: transcoder files, circuit-tracer's JSON and interventions.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use candle_gpt2_look::{Analysis, FeatureSetting, Graph, Look, LookSubject, Reader, read_transcoders};
use candle_gpt2_pictures::{PointKind, Width};
use candle_gpt2_testing::{Fixture, fixture_path, json_fixture, pattern, values};
use serde_json::{Value, json};

use crate::common::{Case, RecordingReporter, built_in, look, reader, words};

fn folder(name: &str) -> PathBuf {
    let config = fixture_path(&format!("graphs/{name}/expected.json"));
    config.parent().unwrap().join("transcoders")
}

/// Opens a fixture: its model, the options of its graph, and its recorded results.
fn graph_of(name: &str) -> (Case, Graph, Value) {
    let recorded = json_fixture(&format!("graphs/{name}/expected"));
    let case = Case::open(recorded["checkpoint"].as_str().unwrap());
    let graph = Graph { transcoders: Some(folder(name)), ..Graph::new(case.text("clean_ids")) };
    (case, graph, recorded)
}

/// Fixtures whose first token has features, because it is not a BOS token.
const GRAPHS: [&str; 4] = ["set-relu", "cross-layer-skip", "set-skip", "set-topk"];

#[test]
fn every_transcoder_format_reproduces_its_fixture() {
    for name in GRAPHS {
        let (case, graph, recorded) = graph_of(name);
        let found = look(&case.loaded, &graph).unwrap();
        let json = serde_json::to_value(&found).unwrap();
        let expected = Fixture::open(&format!("graphs/{name}/expected"));
        let kept: f64 = values(&expected.tensor("nodes")).iter().sum();
        assert_eq!(json["nodes"].as_array().unwrap().len() as f64, kept, "{name}");
        let links = expected.tensor("kept").dim(0).unwrap();
        assert_eq!(json["links"].as_array().unwrap().len(), links, "{name}");
        for (key, score) in [("replacement", "replacement_score"), ("completeness", "completeness_score")] {
            let [expected, found] = [&recorded[key], &json[score]].map(|value| value.as_f64().unwrap());
            assert!((expected - found).abs() < 1e-4, "{name}: {score} {found} for {expected}");
        }
    }
    let config = Case::open("untied").loaded.config().clone();
    let read = read_transcoders(&folder("saelens-skip"), &config).unwrap();
    assert_eq!((read.layers().len(), read.is_cross_layer()), (3, false));
    let config = Case::open("inverse_layer").loaded.config().clone();
    assert!(read_transcoders(&folder("cross-layer"), &config).unwrap().is_cross_layer());
}

/// Checks that the built-in transcoders fit only the built-in model.
#[test]
fn built_in_model_has_transcoders() {
    let loaded = built_in();
    let read = read_transcoders("built-in".as_ref(), loaded.config()).unwrap();
    assert_eq!((read.layers().len(), read.width(), read.is_cross_layer()), (7, 256, false));
    let other = Case::open("untied").loaded.config().clone();
    let error = read_transcoders("built-in".as_ref(), &other).unwrap_err();
    assert!(error.is_usage(), "{error}");
    for name in ["builtin", "built_in"] {
        let error = read_transcoders(name.as_ref(), loaded.config()).unwrap_err();
        assert_eq!(error.to_string(), format!("{name}: folder not found; did you mean built-in?"));
    }
    let graph = Graph { transcoders: Some("built-in".into()), ..Graph::new(words("One day, Mia was")) };
    let found = look(&loaded, &graph).unwrap();
    // The table states each node's token. The identifier next to the token contains the layer and feature.
    let [axis] = &found.report.axes[..] else { panic!("one axis") };
    let drawn = &found.graph.as_ref().unwrap().points;
    for (id, text) in axis.labels.iter().zip(&found.report.texts) {
        let name = &drawn.iter().find(|point| &point.id == id).unwrap().name;
        let shown = match name
            .split_once(" of layer ")
            .map(|(what, rest)| (what, rest.split_once(" at ").unwrap().1))
        {
            Some(("error", token)) => format!("error at {token}"),
            Some((_, token)) => format!("feature at {}", token.split_once(", says").unwrap().0),
            None => name.clone(),
        };
        assert!(text.starts_with(&shown), "{id}: {text}");
    }
    let table = candle_gpt2_pictures::table(&found.report);
    assert!(table.lines().any(|line| line.contains("feature at ·was ")), "{table}");
    assert!(!found.report.notes.iter().any(|note| note.contains("neurons")), "{:?}", found.report.notes);
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} of {value} is not a string"))
}

/// Checks the fields that circuit-tracer's schema and frontend require.
fn assert_frontend(found: &Analysis, layers: usize, tokens: usize) {
    let json = serde_json::to_value(found).unwrap();
    for key in ["slug", "scan", "prompt"] {
        text_of(&json["metadata"], key);
    }
    assert_eq!(json["metadata"]["prompt_tokens"].as_array().unwrap().len(), tokens);
    assert_eq!(json["qParams"]["linkType"], "both");
    let nodes = json["nodes"].as_array().unwrap();
    let (mut ids, mut js_ids) = (BTreeSet::new(), BTreeSet::new());
    for node in nodes {
        assert!(ids.insert(text_of(node, "node_id")), "duplicate node_id: {node}");
        let kind = text_of(node, "feature_type");
        if kind != "cross layer transcoder" {
            assert!(js_ids.insert(text_of(node, "jsNodeId")), "duplicate jsNodeId: {node}");
        }
        assert!(node["feature"].is_i64() && node["ctx_idx"].as_u64().unwrap() < tokens as u64);
        match kind {
            "cross layer transcoder" => {
                let numbers: Vec<u64> =
                    text_of(node, "node_id").split('_').map(|part| part.parse().unwrap()).collect();
                let (layer, feature) = (numbers[0], numbers[1]);
                let sum = layer + feature;
                assert_eq!(node["feature"], sum * (sum + 1) / 2 + feature, "Cantor's number");
                assert_eq!(text_of(node, "layer"), layer.to_string());
                assert!(node["activation"].as_f64().unwrap() > 0.0);
            }
            "mlp reconstruction error" => assert_eq!(node["feature"], -1),
            "embedding" => assert_eq!(node["layer"], "E"),
            "logit" => {
                assert_eq!(text_of(node, "layer"), (layers + 1).to_string());
                assert!(
                    text_of(node, "clerp").contains("(p="),
                    "the page reads the probability from `clerp`"
                );
            }
            other => panic!("unknown feature type {other}"),
        }
        if kind != "logit" {
            assert!((0.0..=1.0).contains(&node["influence"].as_f64().unwrap()));
        }
    }
    let targets = nodes.iter().filter(|node| node["is_target_logit"] == true).count();
    assert_eq!(targets, 1, "exactly one logit is the target");
    for link in json["links"].as_array().unwrap() {
        assert!(ids.contains(text_of(link, "source")) && ids.contains(text_of(link, "target")));
        assert!(link["weight"].is_f64());
    }
    let graph = found.graph.as_ref().unwrap();
    let mut ranked: Vec<(f64, f64)> =
        graph.points.iter().map(|point| (point.influence, point.share)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
    assert!(ranked.windows(2).all(|pair| pair[0].1 <= pair[1].1), "shares increase with the rank");
}

#[test]
fn every_graph_matches_the_frontend_schema() {
    for name in GRAPHS {
        let (case, graph, recorded) = graph_of(name);
        let found = look(&case.loaded, &graph).unwrap();
        assert_frontend(&found, case.loaded.config().n_layer, recorded["ids"].as_array().unwrap().len());
    }
    // Features are neurons of a model with a tokenizer; the first token is a BOS token without features.
    let loaded = built_in();
    let with_bos = Reader::new(loaded.vocabulary(), true).unwrap();
    let subject = LookSubject::new(&loaded, "built-in".into(), &with_bos);
    let graph = Graph { max_feature_nodes: 300, ..Graph::new(words("A red ball and a blue cup, a red")) };
    let reporter = RecordingReporter::default();
    let found = graph.at(&subject, &reporter).unwrap();
    assert_frontend(&found, 7, 11);
    let jobs = reporter.jobs.lock().unwrap();
    assert!(jobs[0].0 == "tracing" && (301..=310).contains(&jobs[0].1), "{jobs:?}");
    let notes = found.report.notes.join("\n");
    assert!(notes.contains("(300 traced)") && notes.contains("features are neurons"), "{notes}");
    let drawn = found.graph.as_ref().unwrap();
    assert!(drawn.points.iter().all(|point| point.column > 0 || point.kind != PointKind::Feature));
    assert!(found.page().contains("attribution graph of the prediction"));
    let picture = found.svg(Width::TwoColumns).unwrap();
    assert_eq!(picture.matches("<circle").count(), drawn.points.len());
    assert!(picture.contains("·ball"), "tokens are labels at the bottom");
}

/// Checks that the sum in the notes equals the logit, with edges for some or all features.
#[test]
fn sum_in_the_notes_equals_the_logit() {
    for max_feature_nodes in [10, 4096] {
        let (case, graph, _) = graph_of("cross-layer-skip");
        let graph = Graph { max_feature_nodes, ..graph };
        let found = look(&case.loaded, &graph).unwrap();
        let metric = found.report.metric.as_ref().unwrap();
        let sum = found.report.notes.iter().find(|note| note.contains(" = ")).unwrap();
        let (_, parts) = sum.split_once(" = ").unwrap();
        let parts: f64 =
            parts.split(" + ").map(|part| part.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
        assert!((parts - metric.before).abs() < 1e-3, "{sum}: {} is the logit", metric.before);
        assert_eq!(sum.contains("untraced features"), max_feature_nodes == 10);
    }
}

#[test]
fn setting_a_feature_moves_predicted_and_actual_logits() {
    let (case, graph, _) = graph_of("set-skip");
    let whole = look(&case.loaded, &graph).unwrap();
    let strongest = |found: &Analysis| {
        let drawn = found.graph.as_ref().unwrap();
        let features = drawn.points.iter().filter(|point| point.kind == PointKind::Feature);
        features.max_by(|a, b| a.influence.total_cmp(&b.influence)).unwrap().clone()
    };
    let feature = strongest(&whole);
    let set = |value: f64| {
        let setting: FeatureSetting = format!("{}={value:?}", feature.id).parse().unwrap();
        let found = look(&case.loaded, &Graph { set: vec![setting], ..graph.clone() }).unwrap();
        let details = found.details.to_json()["interventions"].clone();
        let logits = details["logits"].as_array().unwrap().clone();
        assert_eq!(details["set"][0]["node_id"], feature.id.as_str());
        let of =
            |key: &str| -> Vec<f64> { logits.iter().map(|logit| logit[key].as_f64().unwrap()).collect() };
        (of("before"), of("predicted"), of("actual"), found)
    };
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
    let (before, predicted, after, _) = set(feature.activation.unwrap());
    assert!(
        near(&before, &predicted) && near(&before, &after),
        "setting a feature to its own value changes nothing"
    );
    let (before, predicted, after, found) = set(0.0);
    assert!(!near(&before, &predicted) && !near(&before, &after), "{before:?} {predicted:?} {after:?}");
    let metric = found.report.metric.unwrap();
    assert!((metric.before - before[0]).abs() < 1e-6 && (metric.after.unwrap() - after[0]).abs() < 1e-6);
    assert!(found.report.notes.iter().any(|note| note.contains("predicted") && note.contains("actual")));
}

#[test]
fn invalid_graph_options_are_rejected() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let graph = Graph::new(words("The big dog"));
    let setting = |text: &str| vec![text.parse::<FeatureSetting>().unwrap()];
    let check = |graph: Graph| {
        let error = graph.check(&reader).unwrap_err();
        (error.is_usage(), error.to_string())
    };
    for (graph, expected) in [
        (
            Graph { node_threshold: 1.5, ..graph.clone() },
            "`node_threshold` 1.5: expected a fraction from 0 to 1",
        ),
        (Graph { edge_threshold: f64::NAN, ..graph.clone() }, "`edge_threshold` NaN: expected a fraction"),
        (
            Graph { set: setting("7_0_0=1"), ..graph.clone() },
            "`set` 7_0_0: layer 7 is out of range; the model has 7 layers (all counted from 0)",
        ),
        (
            Graph { set: setting("5_1024_0=1"), ..graph.clone() },
            "feature 1024 is out of range; layer 5 has 1024 features",
        ),
        (
            Graph { set: setting("5_0_3=1"), ..graph.clone() },
            "position 3 is out of range; the text has 3 tokens",
        ),
        (
            Graph { set: [setting("5_0_1=1"), setting("5_0_1=2")].concat(), ..graph.clone() },
            "`set` 5_0_1: set more than once",
        ),
    ] {
        let (is_usage, message) = check(graph);
        assert!(is_usage && message.contains(expected), "`{expected}` is not in: {message}");
    }
    let with_bos = Reader::new(loaded.vocabulary(), true).unwrap();
    let error = Graph { set: setting("5_0_0=1"), ..graph.clone() }.check(&with_bos).unwrap_err().to_string();
    assert!(error.contains("position 0 is the BOS token"), "{error}");
    for text in ["", "1_2=3", "1_2_3", "1_2_3=x", "1_2_3=inf", "a_2_3=1", "1_2_3_4=1"] {
        let error = text.parse::<FeatureSetting>().unwrap_err();
        assert!(error.contains("write LAYER_FEATURE_POSITION=VALUE"), "{error}");
    }
    assert!(serde_json::from_value::<Graph>(json!({"text": "a", "set": ["1_2_3=0"]})).is_ok());
    assert!(serde_json::from_value::<Graph>(json!({"text": "a", "set": ["1=0"]})).is_err());

    let usage_message = |graph: Graph| {
        let error = look(&loaded, &graph).unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    };
    let message = usage_message(Graph { max_memory: 0, ..graph.clone() });
    assert!(message.contains("more than the limit of 0 MiB; lower the number of feature nodes"), "{message}");
    let error = look(&loaded, &Graph { prompts_file: Some("no/such".into()), ..graph }).unwrap_err();
    assert!(error.to_string().contains("no/such"), "{error}");
}

/// Checks features without edges: inactive features, and features with little influence.
#[test]
fn any_feature_can_be_set() {
    let loaded = built_in();
    let of = |max_feature_nodes: usize, setting: String, value: f64| {
        let set = vec![format!("{setting}={value:?}").parse().unwrap()];
        let transcoders = Some("built-in".into());
        let graph = Graph { set, max_feature_nodes, transcoders, ..Graph::new(words("One day, Mia was")) };
        let details = look(&loaded, &graph).unwrap().details.to_json()["interventions"].clone();
        let logits = details["logits"].as_array().unwrap().clone();
        let number = |value: &Value| value.as_f64().unwrap();
        // For each logit: its value, and its predicted and actual changes.
        let moves: Vec<[f64; 3]> = logits
            .iter()
            .map(|logit| {
                let before = number(&logit["before"]);
                [before, number(&logit["predicted"]) - before, number(&logit["actual"]) - before]
            })
            .collect();
        (number(&details["set"][0]["from"]), moves)
    };
    let graph = Graph { transcoders: Some("built-in".into()), ..Graph::new(words("One day, Mia was")) };
    let points = look(&loaded, &graph).unwrap().graph.unwrap().points;
    let mut features: Vec<_> = points.iter().filter(|point| point.kind == PointKind::Feature).collect();
    features.sort_by(|a, b| a.influence.total_cmp(&b.influence));
    // The effect is the same with and without edges.
    let id = &features[0].id;
    let ((from, without), (same, with)) = (of(1, id.clone(), 0.0), of(4096, id.clone(), 0.0));
    assert!((from - features[0].activation.unwrap()).abs() < 1e-6 && from == same);
    for (without, with) in without.iter().zip(&with) {
        assert!(without[1] != 0.0 && (without[2] - with[2]).abs() < 1e-6, "{without:?} {with:?}");
    }
    // For a feature of the last layer that is inactive at the last token, only the final norm is between it
    // and the logits. The prediction holds the norm's scale fixed, and the actual scale multiplies all logits
    // by one factor.
    let last = points.iter().map(|point| point.column).max().unwrap();
    let silent = (0..256).map(|feature| format!("6_{feature}_{last}"));
    let silent = silent.filter(|id| points.iter().all(|point| &point.id != id));
    let (_, moves) = silent.take(5).map(|id| of(4096, id, 0.01)).find(|(from, _)| *from == 0.0).unwrap();
    let factor = |[before, predicted, actual]: [f64; 3]| (actual - predicted) / before;
    for one in &moves {
        let [before, predicted, actual] = *one;
        let rest = actual - predicted - factor(moves[0]) * before;
        assert!(predicted != 0.0 && rest.abs() < 2e-4, "{moves:?}");
    }
}

/// Checks that a node has its feature's tokens, examples, command and effect.
#[test]
fn nodes_describe_their_features() {
    let loaded = built_in();
    let file = candle_gpt2_testing::temporary_folder();
    let path = file.path().join("stories.txt");
    std::fs::write(&path, "Mia had a red ball.\nTom had a blue cup.\n").unwrap();
    let transcoders = Some("built-in".into());
    let graph = Graph { transcoders, top: 60, ..Graph::new(words("Mia had a red ball and a red")) };
    for prompts_file in [None, Some(path)] {
        let found = look(&loaded, &Graph { prompts_file: prompts_file.clone(), ..graph.clone() }).unwrap();
        let json = serde_json::to_value(&found).unwrap();
        let nodes = json["nodes"].as_array().unwrap();
        let features: Vec<_> =
            nodes.iter().filter(|node| node["feature_type"] == "cross layer transcoder").collect();
        assert!(!features.is_empty());
        for node in &features {
            assert!(node["clerp"].as_str().unwrap().starts_with("says "), "{node}");
            assert_eq!(node["top_logits"].as_array().unwrap().len(), 10);
            let site = format!("--site blocks.{}.hook_resid_mid", node["layer"].as_str().unwrap());
            assert!(node["command"].as_str().unwrap().contains(&site), "{node}");
        }
        let examples =
            |node: &Value| node["examples_quantiles"][0]["examples"].as_array().map_or(0, Vec::len);
        let most = features.iter().map(|node| examples(node)).max().unwrap();
        assert_eq!(most, if prompts_file.is_some() { 2 } else { 1 });
        let zeroed: Vec<_> = features.iter().filter(|node| node["zeroed"].is_object()).collect();
        assert!(!zeroed.is_empty());
        let texts = found.report.texts.iter().filter(|text| text.contains(", zeroed: predicted "));
        assert_eq!(texts.count(), zeroed.len());
        // Setting the feature to 0 has the same effect.
        let id = zeroed[0]["node_id"].as_str().unwrap();
        let set = vec![format!("{id}=0").parse().unwrap()];
        let set = look(&loaded, &Graph { set, ..graph.clone() }).unwrap().details.to_json();
        let logit = &set["interventions"]["logits"][0];
        for key in ["predicted", "actual"] {
            let moved = logit[key].as_f64().unwrap() - logit["before"].as_f64().unwrap();
            assert!((moved - zeroed[0]["zeroed"][key].as_f64().unwrap()).abs() < 1e-4, "{key}: {moved}");
        }
        assert!(found.page().contains("\"top_logits\"") && found.page().contains("id=\"feature-texts\""));
    }
}

/// Checks folders without transcoders for this model: each message names the file and the problem.
#[test]
fn folders_without_matching_transcoders_are_rejected() {
    let model = Case::open("plain").loaded.config().clone(); // two layers, hidden size 21
    let directory = candle_gpt2_testing::temporary_folder();
    let path = |name: &str| directory.path().join(name);
    let error_message = || format!("{:#}", Chained(read_transcoders(directory.path(), &model).unwrap_err()));
    assert!(error_message().contains("no transcoders found; expected config.yaml"));

    let config =
        "model_kind: transcoder_set\nfeature_input_hook: hook_resid_mid\nfeature_output_hook: hook_mlp_out\n";
    std::fs::write(path("config.yaml"), "model_kind: [").unwrap();
    assert!(error_message().contains("config.yaml") && error_message().contains("expected YAML"));
    std::fs::write(path("config.yaml"), "model_kind: sae\n").unwrap();
    assert!(error_message().contains("`model_kind`: expected \"transcoder_set\""));
    std::fs::write(path("config.yaml"), config).unwrap();
    assert!(error_message().contains("layer_0.safetensors"));
    std::fs::write(path("layer_0.safetensors"), b"damaged").unwrap();
    assert!(error_message().contains("found transcoders for 1 layers, but the model has 2 layers"));
    std::fs::write(path("layer_1.safetensors"), b"damaged").unwrap();
    assert!(error_message().contains("layer_0.safetensors"), "{}", error_message());
    let write = |layer: usize, width: usize, value: f64| {
        let tensors = HashMap::from([
            ("W_enc", pattern(&[4, width], 1.0, 1)),
            ("b_enc", pattern(&[4], 1.0, 2)),
            ("W_dec", pattern(&[4, width], 1.0, 3)),
            ("b_dec", Tensor::full(value, width, &Device::Cpu).unwrap()),
        ]);
        safetensors::save(&tensors, path(&format!("layer_{layer}.safetensors"))).unwrap();
    };
    (0..2).for_each(|layer| write(layer, 20, 0.0));
    assert!(error_message().contains("width 20, but the model has width 21"), "{}", error_message());
    write(0, 21, 0.0);
    assert!(error_message().contains("layer 1: expected width 21"), "{}", error_message());
    write(1, 21, f64::NAN);
    assert!(
        error_message().contains("layer_1.safetensors: tensor `b_dec`: element 0 is NaN"),
        "{}",
        error_message()
    );
    write(1, 21, 0.0);
    assert_eq!(read_transcoders(directory.path(), &model).unwrap().layers().len(), 2);
    std::fs::remove_file(path("config.yaml")).unwrap();
    std::fs::write(path("config.json"), r#"{"model_kind": "cross_layer_transcoder"}"#).unwrap();
    assert!(error_message().contains("W_enc_0.safetensors"), "{}", error_message());
}

/// An error followed by its causes.
struct Chained(candle_gpt2_look::LookError);

impl std::fmt::Display for Chained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = std::error::Error::source(&self.0);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
