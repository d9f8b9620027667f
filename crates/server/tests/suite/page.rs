//! The page at `/`: its files, and the looks inside that it draws. What it does in a browser: `web/tests`.

use candle_gpt2_pictures::Report;
use serde_json::{Value, json};

use crate::common::{built_in, start, start_model};

#[test]
fn every_file_of_the_page_is_there_and_kept_by_its_tag() {
    let server = start();
    let html = server.get("/").text();
    let mut files: Vec<String> = vec!["/".into()];
    for attribute in ["href=\"", "src=\""] {
        let names = html.split(attribute).skip(1).map(|rest| rest.split('"').next().unwrap());
        files.extend(names.filter(|name| !name.starts_with("data:")).map(|name| format!("/{name}")));
    }
    assert_eq!(files.len(), candle_gpt2_web::files().len());
    for file in &files {
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
        let tag = format!("If-None-Match: {}", reply.header("etag").unwrap());
        let kept = server.request("GET", file, &[&tag], b"");
        assert_eq!((kept.status, kept.body.len()), (304, 0), "{file}");
    }
}

/// A look through the server is that of the library on the same model.
#[test]
fn looks_are_those_of_the_library() {
    use candle_gpt2_interpret::{Head, LensOptions, LensValue, Patterns, Run, logit_lens};
    let model = built_in();
    let server = start_model(model.clone(), "shakespeare", |_| ());
    let text = "But soft, what light through yonder window breaks? ".repeat(2);
    let ids = model.vocabulary().encode(&text).unwrap();
    let run = Run::new(model.model(), &ids).unwrap();
    assert!(ids.len() > 32, "more than is computed at once");

    let reply = server.post("/look/lens", &json!({ "prompt": text, "show": "entropy" })).json();
    let report: Report = serde_json::from_value(reply).unwrap();
    let options = LensOptions { top: 1, watch: Vec::new() };
    let layers = logit_lens(&run, &options, &|_, x| Ok(x)).unwrap();
    let expected: Vec<f32> =
        layers.iter().flat_map(|layer| &layer.cells).filter_map(|cell| LensValue::Entropy.of(cell)).collect();
    assert_eq!(report.values.len(), expected.len());
    for (found, expected) in report.values.iter().zip(&expected) {
        assert!((found.unwrap() - expected).abs() < 1e-3, "{found:?} {expected}");
    }

    let reply = server.post("/look/attention", &json!({ "prompt": text, "layers": [1] })).json();
    let heads: Vec<Head> = (0..model.config().n_head).map(|head| Head { layer: 1, head }).collect();
    let patterns = Patterns::of(run.record(Patterns::sites(&heads)).unwrap(), &heads).unwrap();
    let tokens = ids
        .iter()
        .enumerate()
        .map(|(n, id)| candle_gpt2_pictures::Token::new(n, *id, &model.vocabulary().token_bytes(*id)));
    let expected =
        Report::new("attention", "attention patterns".into(), "shakespeare".into(), tokens.collect(), false)
            .with_patterns(patterns.layers, patterns.heads, patterns.values);
    let expected: Value = serde_json::from_str(&candle_gpt2_pictures::data(&expected)).unwrap();
    assert_eq!(reply["axes"], expected["axes"]);
    assert_eq!(reply["tokens"], expected["tokens"]);
    assert_eq!(reply["pattern"]["form"], "u16");
    let head = |data: &Value, head: usize| weights(data["pattern"]["heads"][head].as_str().unwrap());
    for n in 0..heads.len() {
        let (found, expected) = (head(&reply, n), head(&expected, n));
        assert_eq!(found.len(), ids.len() * (ids.len() + 1) / 2);
        // Sums in another order may be rounded to the next step.
        assert!(
            found.iter().zip(&expected).all(|(found, expected)| found.abs_diff(*expected) <= 1),
            "head {n}"
        );
    }
}

/// The steps of a head and what may follow are those of the library too, whether the text or its tokens are given.
#[test]
fn heads_and_next_tokens_are_those_of_the_library() {
    use candle_gpt2_generation::{GenerationConfig, History};
    use candle_gpt2_interpret::Head;
    use candle_gpt2_look::{NextTokens, OneHead, Reader, Reading, Subject, Text};
    let model = built_in();
    let server = start_model(model.clone(), "shakespeare", |_| ());
    let text = "But soft, what light through yonder window breaks? ".repeat(2);
    let ids = model.vocabulary().encode(&text).unwrap();
    let reader = Reader::without_bos(model.vocabulary());
    let subject = Subject::new(&model, "shakespeare".into(), &reader);

    let last = ids.len() - 3;
    let body = json!({ "prompt": text, "layer": 2, "head": 5, "query": -3, "key": 4 });
    let reply = server.post("/look/head", &body).json();
    let asked = OneHead { text: Text::Ids(ids.clone()), head: Head { layer: 2, head: 5 }, query: -3, key: 4 };
    let steps = asked.check(&reader).unwrap().look(&subject).unwrap();
    let expected = serde_json::to_value(&steps).unwrap();
    assert_eq!((&reply["query"], &reply["scale"]), (&json!(last), &expected["scale"]));
    assert_eq!(reply["tokens"], expected["tokens"]);
    for name in ["q", "k", "products", "scores", "weights", "v", "context"] {
        let numbers = |value: &Value| -> Vec<f64> { serde_json::from_value(value[name].clone()).unwrap() };
        let (found, expected) = (numbers(&reply), numbers(&expected));
        assert_eq!(found.len(), expected.len(), "{name}");
        assert!(
            found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-3),
            "{name}: {found:?} {expected:?}"
        );
    }

    let body = json!({ "prompt": ids, "at": last, "temperature": 0.7, "top_k": 3, "top": 5 });
    let reply = server.post("/look/next", &body).json();
    let logits = Reading::default().logits(model.model(), &ids, last).unwrap();
    let history = History { ids: &ids[..=last], prompt_len: last + 1 };
    let config =
        GenerationConfig { do_sample: true, temperature: 0.7, top_k: 3, ..GenerationConfig::default() };
    let text_of = |id| String::from_utf8(model.vocabulary().token_bytes(id)).unwrap();
    let expected = NextTokens::of(&logits, history, &config, &[], 5, text_of).unwrap();
    assert_eq!(reply["kept"], 3);
    assert_eq!(reply["tokens"].as_array().unwrap().len(), 5);
    for (found, expected) in reply["tokens"].as_array().unwrap().iter().zip(&expected.tokens) {
        assert_eq!((&found["id"], &found["token"]), (&json!(expected.id), &json!(expected.token)));
        for (name, expected) in [("logprob", expected.logprob), ("probability", expected.probability)] {
            assert!((found[name].as_f64().unwrap() - expected).abs() < 1e-3, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn a_look_that_cannot_be_taken_says_why() {
    let server = start_model(built_in(), "shakespeare", |_| ());
    let long = "word ".repeat(300);
    for (path, body, expected) in [
        ("/look/attention", json!({}), "prompt: expected the text to look at, as a string or as token ids"),
        (
            "/look/attention",
            json!({ "prompt": 3 }),
            "prompt: expected the text to look at, as a string or as token ids",
        ),
        ("/look/attention", json!({ "prompt": "" }), "prompt: the text is empty; give at least one token"),
        (
            "/look/attention",
            json!({ "prompt": "a", "layers": [1, 1000] }),
            "layers: expected a list of layers, which are counted from 0 to ",
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
        ("/look/head", json!({ "prompt": "a", "layer": 0 }), "head: expected its number, found nothing"),
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
    assert!(message.starts_with("the body is not JSON"), "{message}");
}

/// The numbers of a packed head: base64 of two bytes each, the lower one first.
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
