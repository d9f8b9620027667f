//! An analysis computed in pieces of any size equals the same analysis in one step.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Session, Work};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_interpret::{GraphOptions, Processing, ReplacementModel, Run, Transcoders, feature_logits};
use candle_gpt2_look::Graph;
use candle_gpt2_pictures::graph_data;
use serde_json::{Value, json};

use crate::common::{LATENTS, options, tiny, transcoders};

/// Tolerance for f32 sums of the same values in a different order.
const TOLERANCE: f64 = 1e-4;

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

/// Compares numbers with a tolerance; for encoded patterns, compares only the length.
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
            assert!(difference <= TOLERANCE, "{path}: {a} {b}");
        }
        (Value::String(a), Value::String(b)) if path.starts_with(".pattern") => {
            assert_eq!(a.len(), b.len(), "{path}")
        }
        (a, b) => assert_eq!(a, b, "{path}"),
    }
}

#[test]
fn analysis_does_not_depend_on_the_piece_size() {
    let served = Arc::new(ServedModel::new(&tiny().model, options()).unwrap());
    let scheduler =
        tiny().model.scheduler(SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 16 });
    let mut session = Session::new(tiny().model.clone(), served, scheduler.unwrap());
    let ids: Vec<u32> = (1..12).collect();
    // The counts include pieces of three tokens and pieces that process no tokens.
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
        // Four pieces record the text, four compute the last layer as the reference, and four compute each
        // layer, starting with the embedding.
        assert_eq!(count, 4 + 4 * (n_layer + 2), "{show}");
    }
}

#[test]
fn caller_can_cancel_an_analysis_or_a_completion() {
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

/// Each cell holds the n-th largest latent for a layer and token, as the dictionary computes it.
///
/// A card contains the activations of one feature at every token.
#[test]
fn features_match_the_transcoder_latents() {
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
    assert_eq!(report["axes"][0]["labels"].as_array().unwrap().len(), LATENTS, "no more ranks than latents");
    assert_eq!(report["axes"][0]["labels"][LATENTS - 2], "1, 2nd");
    let mut shown = 0;
    for (token, latents) in latents.iter().enumerate() {
        let mut order: Vec<usize> = (0..LATENTS).filter(|feature| latents[*feature] > 0.0).collect();
        order.sort_by(|a, b| latents[*b].total_cmp(&latents[*a]));
        for rank in 0..LATENTS {
            let cell = (LATENTS - 1 - rank) * ids.len() + token;
            let Some(feature) = order.get(rank) else {
                assert_eq!((&report["values"][cell], &report["texts"][cell]), (&Value::Null, &json!("")));
                continue;
            };
            assert_same(&report["values"][cell], &json!(latents[*feature]), "cell");
            let text = report["texts"][cell].as_str().unwrap();
            assert_eq!(text.split_once(' ').unwrap().0, feature.to_string());
            shown += 1;
        }
    }
    assert!(shown > ids.len(), "{shown} active features");

    let (card, _) = in_pieces(Endpoint::LookFeature, &json!({ "prompt": ids, "layer": 1, "feature": 4 }), 99);
    let activations: Vec<f32> = latents.iter().map(|latents| latents[4]).collect();
    let text = &card["examples_quantiles"][0]["examples"][0];
    assert_same(&text["tokens_acts_list"], &json!(activations), "activations");
    let logits = feature_logits(tiny().model.model(), dictionary, &[4], 10).unwrap().unwrap();
    let token = |id: u32| tiny().model.vocabulary().token_bytes(id);
    let tokens: Vec<_> =
        logits[0].top.iter().map(|(id, _)| String::from_utf8_lossy(&token(*id)).into_owned()).collect();
    assert_eq!(card["top_logits"], json!(tokens));
}

/// The graph equals the one that `gpt2 look graph` computes with the same options.
#[test]
fn graph_matches_gpt2_look_graph() {
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
fn invalid_feature_requests_report_the_reason() {
    let refused = |served: &ServedModel, endpoint, body: Value| {
        served.read(endpoint, body.to_string().as_bytes(), None).expect_err("a refusal").to_string()
    };
    let without_transcoders =
        ServedModel::new(&tiny().model, ApiOptions { transcoders: Arc::default(), ..options() }).unwrap();
    for (endpoint, body) in [
        (Endpoint::LookFeatures, json!({ "prompt": [5] })),
        (Endpoint::LookFeature, json!({ "prompt": [5], "layer": 0, "feature": 0 })),
        (Endpoint::LookGraph, json!({ "prompt": [5] })),
    ] {
        let message = refused(&without_transcoders, endpoint, body);
        assert!(message.starts_with("features and graphs need transcoders"), "{message}");
    }
    let long: Vec<u32> = (0..48).chain(0..48).collect();
    for (endpoint, body, expected) in [
        (
            Endpoint::LookFeatures,
            json!({ "prompt": [5], "layers": [3] }),
            "layers: expected a list of layers from 0 to 2",
        ),
        (Endpoint::LookFeatures, json!({ "prompt": [5], "top": 0 }), "top: expected "),
        (
            Endpoint::LookFeature,
            json!({ "prompt": [5], "layer": 0, "feature": 13 }),
            "feature: expected a whole number from 0 to 12",
        ),
        (
            Endpoint::LookFeature,
            json!({ "prompt": [5], "layer": 0 }),
            "feature: expected a whole number, found nothing",
        ),
        (
            Endpoint::LookGraph,
            json!({ "prompt": [5], "node_threshold": 1.5 }),
            "node_threshold: expected a fraction from 0 to 1",
        ),
        (Endpoint::LookGraph, json!({ "prompt": long }), "prompt: "),
    ] {
        let found = refused(&tiny().served, endpoint, body);
        assert!(found.starts_with(expected), "{found}");
    }
}
