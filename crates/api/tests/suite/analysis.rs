//! An analysis in pieces is the analysis at once, whatever the size of a piece.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Session, Work};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_interpret::{GraphOptions, Processing, ReplacementModel, Run, Transcoders, feature_logits};
use candle_gpt2_look::Graph;
use candle_gpt2_pictures::graph_data;
use serde_json::{Value, json};

use crate::common::{LATENTS, options, tiny, transcoders};

/// Sums of the same numbers in another order, in f32.
const SAME: f64 = 1e-4;

fn in_pieces(endpoint: Endpoint, body: &Value, tokens: usize) -> (Value, usize) {
    let served = &tiny().served;
    let work = served.read(endpoint, body.to_string().as_bytes(), None).unwrap();
    let Work::Analysis(mut analysis) = work else { panic!("{work:?}") };
    for piece in 1.. {
        match analysis.compute(&tiny().model, tokens).unwrap().conclude(served).unwrap() {
            ControlFlow::Continue(rest) => analysis = rest,
            ControlFlow::Break(reply) => return (serde_json::from_str(&reply.json).unwrap(), piece),
        }
    }
    unreachable!()
}

/// Numbers are close; packed ones have the same length.
fn assert_same(found: &Value, expected: &Value, path: &str) {
    match (found, expected) {
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{path}");
            a.iter().zip(b).for_each(|(a, b)| assert_same(a, b, path));
        }
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()), "{path}");
            a.iter().for_each(|(key, a)| assert_same(a, &b[key], &format!("{path}.{key}")));
        }
        (Value::Number(a), Value::Number(b)) => {
            let difference = (a.as_f64().unwrap() - b.as_f64().unwrap()).abs();
            assert!(difference <= SAME, "{path}: {a} {b}");
        }
        (Value::String(a), Value::String(b)) if path.starts_with(".pattern") => {
            assert_eq!(a.len(), b.len(), "{path}")
        }
        (a, b) => assert_eq!(a, b, "{path}"),
    }
}

#[test]
fn pieces_of_any_size_give_the_same_numbers() {
    let served = Arc::new(ServedModel::new(&tiny().model, options()).unwrap());
    let scheduler =
        tiny().model.scheduler(SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 16 });
    let mut session = Session::new(tiny().model.clone(), served, scheduler.unwrap());
    let ids: Vec<u32> = (1..12).collect();
    // Pieces of three tokens each, and those that are no text's.
    for (endpoint, body, pieces) in [
        (Endpoint::LookAttention, json!({ "prompt": ids, "layers": [1] }), 4),
        (Endpoint::LookHead, json!({ "prompt": ids, "layer": 1, "head": 2, "query": 7, "key": 3 }), 3),
        (Endpoint::LookNext, json!({ "prompt": ids, "at": 6, "top": 5, "temperature": 0.5 }), 3 + 1),
        (Endpoint::Embeddings, json!({ "input": [ids, ids[..4]] }), 4 + 2),
        (Endpoint::LookFeatures, json!({ "prompt": ids, "top": 2 }), 4 + 1),
        (Endpoint::LookFeature, json!({ "prompt": ids, "layer": 1, "feature": 4 }), 4 + 1),
        (Endpoint::LookGraph, json!({ "prompt": ids, "node_threshold": 0.5 }), 1),
    ] {
        let work = session.served().read(endpoint, body.to_string().as_bytes(), None).unwrap();
        let reply = session.answer(work, || true).unwrap().unwrap();
        let expected: Value = serde_json::from_str(&reply.json).unwrap();
        let (found, count) = in_pieces(endpoint, &body, 3);
        assert_same(&found, &expected, "");
        assert_eq!(count, pieces, "{endpoint:?}");
        assert_same(&in_pieces(endpoint, &body, 1).0, &expected, "");
    }
    let n_layer = tiny().model.config().n_layer;
    for show in ["probability", "entropy", "divergence", "next"] {
        let body = json!({ "prompt": ids, "show": show });
        let work = session.served().read(Endpoint::LookLens, body.to_string().as_bytes(), None).unwrap();
        let expected = session.answer(work, || true).unwrap().unwrap();
        let (found, count) = in_pieces(Endpoint::LookLens, &body, 3);
        assert_same(&found, &serde_json::from_str(&expected.json).unwrap(), "");
        // The text; then the last layer, which all are compared with, and all.
        assert_eq!(count, 4 + 4 * (n_layer + 2), "{show}");
    }
}

#[test]
fn who_waits_may_end_an_analysis_and_a_text() {
    let served = Arc::new(ServedModel::new(&tiny().model, options()).unwrap());
    let scheduler =
        tiny().model.scheduler(SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 16 });
    let mut session = Session::new(tiny().model.clone(), served, scheduler.unwrap());
    for (endpoint, body) in [
        (Endpoint::LookLens, json!({ "prompt": [5, 6, 7] })),
        (Endpoint::Completions, json!({ "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": true })),
    ] {
        let work = session.served().read(endpoint, body.to_string().as_bytes(), None).unwrap();
        assert_eq!(session.answer(work, || false).unwrap(), None, "{endpoint:?}");
    }
}

/// Each cell is the place-th largest latent of its layer and token, as the dictionary itself has it; a card has all of one feature.
#[test]
fn features_are_those_of_the_transcoders() {
    let ids: Vec<u32> = (1..12).collect();
    let dictionaries = transcoders();
    let dictionary = &dictionaries[1];
    let site = dictionary.config().site;
    let record = Run::new(tiny().model.model(), &ids).unwrap().record([site]).unwrap();
    let processing = Processing::new(tiny().model.model()).unwrap();
    let input = dictionary.input(record.get(site).unwrap(), &processing).unwrap();
    let latents = dictionary.encode(&input).unwrap();
    let latents: Vec<Vec<f32>> = latents.squeeze(0).unwrap().to_vec2().unwrap();
    let (report, _) =
        in_pieces(Endpoint::LookFeatures, &json!({ "prompt": ids, "layers": [1], "top": 20 }), 99);
    assert_eq!(report["axes"][0]["labels"].as_array().unwrap().len(), LATENTS, "no more places than latents");
    assert_eq!(report["axes"][0]["labels"][LATENTS - 2], "1, 2nd");
    let mut shown = 0;
    for (token, latents) in latents.iter().enumerate() {
        let mut order: Vec<usize> = (0..LATENTS).filter(|feature| latents[*feature] > 0.0).collect();
        order.sort_by(|a, b| latents[*b].total_cmp(&latents[*a]));
        for place in 0..LATENTS {
            let at = (LATENTS - 1 - place) * ids.len() + token;
            let Some(feature) = order.get(place) else {
                assert_eq!((&report["values"][at], &report["texts"][at]), (&Value::Null, &json!("")));
                continue;
            };
            assert_same(&report["values"][at], &json!(latents[*feature]), "cell");
            let text = report["texts"][at].as_str().unwrap();
            assert_eq!(text.split_once(' ').unwrap().0, feature.to_string());
            shown += 1;
        }
    }
    assert!(shown > ids.len(), "{shown} active features");

    let (card, _) = in_pieces(Endpoint::LookFeature, &json!({ "prompt": ids, "layer": 1, "feature": 4 }), 99);
    let of_feature: Vec<f32> = latents.iter().map(|latents| latents[4]).collect();
    let text = &card["examples_quantiles"][0]["examples"][0];
    assert_same(&text["tokens_acts_list"], &json!(of_feature), "activations");
    let logits = feature_logits(tiny().model.model(), dictionary, &[4], 10).unwrap().unwrap();
    let token = |id: u32| tiny().model.vocabulary().token_bytes(id);
    let tokens: Vec<_> =
        logits[0].top.iter().map(|(id, _)| String::from_utf8_lossy(&token(*id)).into_owned()).collect();
    assert_eq!(card["top_logits"], json!(tokens));
}

/// The graph that `gpt2 look graph` finds with the same options.
#[test]
fn a_graph_is_that_of_the_look() {
    let ids: Vec<u32> = (1..9).collect();
    let graph = Graph { max_feature_nodes: 30, node_threshold: 0.7, ..Graph::default() };
    let run = Run::new(tiny().model.model(), &ids).unwrap();
    let transcoders = Transcoders::of_dictionaries(transcoders()).unwrap();
    let options = GraphOptions { max_feature_nodes: 30, ..GraphOptions::default() };
    let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
    let reader = tiny().served.reader();
    let (report, picture) = graph.of_replacement(&replacement, &ids, "tiny", &reader).unwrap();
    let expected: Value = serde_json::from_str(&graph_data(&report, &picture)).unwrap();
    let body = json!({ "prompt": ids, "max_feature_nodes": 30, "node_threshold": 0.7 });
    let (found, _) = in_pieces(Endpoint::LookGraph, &body, 99);
    assert_same(&found, &expected, "");
    assert!(found["points"].as_array().unwrap().iter().any(|point| point["kind"] == "feature"));
}

#[test]
fn features_that_cannot_be_shown_say_why() {
    let refused = |served: &ServedModel, endpoint, body: Value| {
        served.read(endpoint, body.to_string().as_bytes(), None).expect_err("a refusal").to_string()
    };
    let without =
        ServedModel::new(&tiny().model, ApiOptions { transcoders: Arc::default(), ..options() }).unwrap();
    for (endpoint, body) in [
        (Endpoint::LookFeatures, json!({ "prompt": [5] })),
        (Endpoint::LookFeature, json!({ "prompt": [5], "layer": 0, "feature": 0 })),
        (Endpoint::LookGraph, json!({ "prompt": [5] })),
    ] {
        let told = refused(&without, endpoint, body);
        assert!(told.starts_with("features and graphs are of the built-in model"), "{told}");
    }
    let long: Vec<u32> = (0..48).chain(0..48).collect();
    for (endpoint, body, told) in [
        (
            Endpoint::LookFeatures,
            json!({ "prompt": [5], "layers": [3] }),
            "layers: expected a list of layers, which are counted from 0 to 2",
        ),
        (Endpoint::LookFeatures, json!({ "prompt": [5], "top": 0 }), "top: expected "),
        (
            Endpoint::LookFeature,
            json!({ "prompt": [5], "layer": 0, "feature": 13 }),
            "feature: expected a whole number from 0 to 12",
        ),
        (Endpoint::LookFeature, json!({ "prompt": [5], "layer": 0 }), "feature: expected its number"),
        (
            Endpoint::LookGraph,
            json!({ "prompt": [5], "node_threshold": 1.5 }),
            "node_threshold: expected a share from 0 to 1",
        ),
        (Endpoint::LookGraph, json!({ "prompt": long }), "prompt: "),
    ] {
        let found = refused(&tiny().served, endpoint, body);
        assert!(found.starts_with(told), "{found}");
    }
}
