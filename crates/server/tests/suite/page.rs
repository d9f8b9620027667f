//! Files and views of the web page at `/`. `web/tests` tests the page in a browser.

use std::sync::Arc;

use candle_gpt2_api::{ApiOptions, ServedModel, Session, find_route};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_look::built_in_dictionaries;
use serde_json::{Value, json};

use crate::common::{built_in, built_in_f32, start, start_model};

#[test]
fn every_page_file_is_served_and_cached_by_etag() {
    let server = start();
    let files = candle_gpt2_web::files();
    assert!(files.len() > 20);
    for file in files.iter().map(|file| file.path) {
        let reply = server.get(file);
        assert_eq!(reply.status, 200, "{file}");
        let kind = match file.rsplit_once('.') {
            None => "text/html; charset=utf-8",
            Some((_, "css")) => "text/css; charset=utf-8",
            Some(_) => "text/javascript; charset=utf-8",
        };
        assert_eq!(reply.header("content-type"), Some(kind), "{file}");
        let policy = reply.header("content-security-policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        );
        assert!(!policy.contains("unsafe"));
        let if_none_match = format!("If-None-Match: {}", reply.header("etag").unwrap());
        let cached = server.request("GET", file, &[&if_none_match], b"");
        assert_eq!((cached.status, cached.body.len()), (304, 0), "{file}");
    }
}

/// Analyses computed in pieces over HTTP equal those that a session computes in one step.
#[test]
fn analyses_match_a_session() {
    let model = built_in_f32();
    let transcoders = Arc::new(built_in_dictionaries().unwrap().into());
    let options =
        ApiOptions { name: "stories".into(), transcoders: Arc::clone(&transcoders), ..ApiOptions::default() };
    let served = ServedModel::new(&model, options);
    let scheduler = model.scheduler(SchedulerOptions { max_texts: 1, kv_tokens: 512, chunk_tokens: 512 });
    let mut session = Session::new(model.clone(), Arc::new(served.unwrap()), scheduler.unwrap());
    let server = start_model(model.clone(), "stories", |options| options.api.transcoders = transcoders);
    let text = "One day, Mia went to the park with her friend Tom. ".repeat(3);
    let ids = model.vocabulary().encode(&text).unwrap();
    assert!(ids.len() > 32, "longer than one chunk");
    for (path, body) in [
        ("/look/attention", json!({ "prompt": text, "layers": [1] })),
        ("/look/lens", json!({ "prompt": text, "show": "entropy" })),
        ("/look/head", json!({ "prompt": ids, "layer": 2, "head": 1, "query": -3, "key": 4 })),
        ("/look/next", json!({ "prompt": ids, "at": -3, "temperature": 0.7, "top_k": 3, "top": 5 })),
        ("/look/features", json!({ "prompt": text, "layers": [3] })),
        ("/look/feature", json!({ "prompt": ids, "layer": 3, "feature": 5 })),
        ("/v1/embeddings", json!({ "input": [ids, ids[..3]] })),
    ] {
        let endpoint = find_route("POST", path).unwrap().0.endpoint;
        let work = session.served().read(endpoint, body.to_string().as_bytes(), None);
        let expected = work.and_then(|work| session.answer(work, || true)).unwrap().unwrap();
        assert_near(&server.post(path, &body).json(), &serde_json::from_str(&expected.json).unwrap(), path);
    }
}

/// Compares numbers with a tolerance; packed weights may differ by one rounding step.
fn assert_near(found: &Value, expected: &Value, path: &str) {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) if found.len() == expected.len() => {
            found.iter().zip(expected).for_each(|(found, expected)| assert_near(found, expected, path));
        }
        (Value::Object(found), Value::Object(expected)) if found.len() == expected.len() => {
            found
                .iter()
                .for_each(|(key, found)| assert_near(found, &expected[key], &format!("{path} {key}")));
        }
        (Value::Number(found), Value::Number(expected)) => {
            let difference = found.as_f64().unwrap() - expected.as_f64().unwrap();
            assert!(difference.abs() < 1e-3, "{path}: {found} {expected}");
        }
        (Value::String(found), Value::String(expected)) if path.ends_with(" heads") => {
            let (found, expected) = (weights(found), weights(expected));
            assert_eq!(found.len(), expected.len(), "{path}");
            assert!(found.iter().zip(&expected).all(|(a, b)| a.abs_diff(*b) <= 1), "{path}");
        }
        (found, expected) => assert_eq!(found, expected, "{path}"),
    }
}

#[test]
fn invalid_analysis_requests_report_the_reason() {
    let server = start_model(built_in(), "stories", |_| ());
    let long = "word ".repeat(300);
    for (path, body, expected) in [
        ("/look/attention", json!({}), "prompt: expected the text to analyze, as a string or token ids"),
        (
            "/look/attention",
            json!({ "prompt": 3 }),
            "prompt: expected the text to analyze, as a string or token ids",
        ),
        ("/look/attention", json!({ "prompt": "" }), "prompt: the text is empty; pass at least one token"),
        (
            "/look/attention",
            json!({ "prompt": "a", "layers": [1, 1000] }),
            "layers: expected a list of layers from 0 to ",
        ),
        ("/look/attention", json!({ "prompt": "a", "layers": [] }), "layers: expected a list of layers"),
        ("/look/attention", json!({ "prompt": "a", "layers": "1" }), "layers: expected a list of layers"),
        ("/look/attention", json!({ "prompt": long }), "prompt: the text has "),
        ("/look/lens", json!({ "prompt": long }), "prompt: the text has "),
        (
            "/look/lens",
            json!({ "prompt": "a", "show": "rank" }),
            "show: expected `probability`, `entropy`, `divergence` or `next`",
        ),
        ("/look/head", json!({ "prompt": "a", "layer": 0 }), "head: expected a whole number, found nothing"),
        (
            "/look/head",
            json!({ "prompt": "a", "layer": 9999, "head": 0 }),
            "layer: expected a whole number from 0 to ",
        ),
        (
            "/look/head",
            json!({ "prompt": "ab cd", "layer": 0, "head": 0, "query": 0, "key": 1 }),
            "key: expected a whole number",
        ),
        ("/look/next", json!({ "prompt": [0, 70_000] }), "prompt[1]: expected a token id below"),
        ("/look/next", json!({ "prompt": "a", "at": 40 }), "at: expected a whole number from -1 to 0"),
        (
            "/look/next",
            json!({ "prompt": "a", "temperature": 9 }),
            "temperature: expected a number from 0 to 2",
        ),
    ] {
        let message = server.post(path, &body).refusal(400);
        assert!(message.starts_with(expected), "{message}");
    }
    let message =
        server.request("POST", "/look/lens", &["Content-Type: application/json"], b"{").refusal(400);
    assert!(message.starts_with("the body is not valid JSON"), "{message}");
}

/// Decodes a packed head's weights from base64-encoded little-endian 16-bit integers.
fn weights(packed: &str) -> Vec<u16> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits = packed.bytes().filter(|byte| *byte != b'=').map(digit);
    let bits: Vec<u8> = digits.flat_map(|digit| (0..6).rev().map(move |bit| digit >> bit & 1)).collect();
    let bytes: Vec<u8> =
        bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit)).collect();
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}
