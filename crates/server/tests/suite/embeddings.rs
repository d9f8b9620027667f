//! `/v1/embeddings`, used as OpenAI's clients do.

use base64::{Engine, engine::general_purpose::STANDARD};
use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use super::common::{Running, start, tiny};

/// Rounding tolerance: the server uses pieces and a KV cache, while the reference is a single pass.
const TOLERANCE: f64 = 1e-5;

fn embed(server: &Running, body: &Value) -> Value {
    let reply = server.post("/v1/embeddings", body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

fn vector(entry: &Value) -> Vec<f64> {
    entry["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Mean or last hidden state after the final norm, normalized to unit length.
fn reference(ids: &[u32], pooling: &str) -> Vec<f64> {
    let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let states = tiny().model().transformer().forward(&ids).unwrap().squeeze(0).unwrap();
    let rows: Vec<Vec<f32>> = states.to_vec2().unwrap();
    let used = if pooling == "mean" { &rows[..] } else { &rows[rows.len() - 1..] };
    let sum = |column: usize| used.iter().map(|row| f64::from(row[column])).sum::<f64>();
    let mean: Vec<f64> = (0..rows[0].len()).map(|column| sum(column) / used.len() as f64).collect();
    let norm = mean.iter().map(|x| x * x).sum::<f64>().sqrt();
    mean.into_iter().map(|x| x / norm).collect()
}

#[test]
fn embeddings_match_the_hidden_states() {
    let server = start();
    let rows: [Vec<u32>; 2] = [(1..45).collect(), vec![7]];
    for pooling in ["mean", "last"] {
        let answer = embed(&server, &json!({ "input": rows, "model": "tiny", "pooling": pooling }));
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tiny")));
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 45, "total_tokens": 45 }));
        for (index, row) in rows.iter().enumerate() {
            let entry = &answer["data"][index];
            assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
            let difference =
                vector(entry).into_iter().zip(reference(row, pooling)).map(|(a, b)| (a - b).abs());
            assert!(difference.fold(0.0, f64::max) <= TOLERANCE, "{pooling} {index}");
        }
    }
    let floats = embed(&server, &json!({ "input": "What a day", "encoding_format": "float" }));
    let packed = embed(&server, &json!({ "input": ["What a day"], "encoding_format": "base64" }));
    let bytes = STANDARD.decode(packed["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let unpacked: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let written: Vec<f32> = serde_json::from_value(floats["data"][0]["embedding"].clone()).unwrap();
    assert_eq!(unpacked, written);
    let raw = vector(&embed(&server, &json!({ "input": [[7]], "normalize": false }))["data"][0]);
    let norm = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((norm - 1.0).abs() > 0.1, "{norm}");
    assert!(server.metric("gpt2_prompt_tokens_total") > 90.0);
}

#[test]
fn invalid_embedding_requests_report_the_field() {
    let server = start();
    for (body, param) in [
        (json!({}), "input"),
        (json!({ "input": "" }), "input"),
        (json!({ "input": ["a", ""] }), "input[1]"),
        (json!({ "input": [[1], [300]] }), "input[1][0]"),
        (json!({ "input": vec![1; 49] }), "input"),
        (json!({ "input": "a", "encoding_format": "int8" }), "encoding_format"),
        (json!({ "input": "a", "pooling": "max" }), "pooling"),
        (json!({ "input": "a", "dimensions": 5 }), "dimensions"),
        (json!({ "input": "a", "normalize": 1 }), "normalize"),
    ] {
        let reply = server.post("/v1/embeddings", &body);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.text());
    }
    let cut = embed(&server, &json!({ "input": vec![1; 60], "truncate_prompt_tokens": -1 }));
    assert_eq!(cut["usage"]["prompt_tokens"], 48);
}
