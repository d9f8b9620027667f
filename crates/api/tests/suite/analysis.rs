//! An analysis in pieces is the analysis at once, whatever the size of a piece.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{Endpoint, ServedModel, Session, Work};
use candle_gpt2_generation::SchedulerOptions;
use serde_json::{Value, json};

use crate::common::{options, tiny};

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
        (Endpoint::Completions, json!({ "prompt": [5, 6, 7], "max_tokens": 5 })),
    ] {
        let work = session.served().read(endpoint, body.to_string().as_bytes(), None).unwrap();
        assert_eq!(session.answer(work, || false).unwrap(), None, "{endpoint:?}");
    }
}
