//! Tests that a session's answers equal the library's.

use candle_gpt2_browser::Session;
use candle_gpt2_engine::{
    BUILT_IN, DeviceChoice, LoadedModel, ModelOptions, Silent, WeightDType, built_in_transcoders,
};
use candle_gpt2_generation::{GenerationConfig, TokenGenerator};
use candle_gpt2_interpret::{GraphOptions, ReplacementModel, Run, named_site, named_sites};
use candle_gpt2_look::{
    Analysis, Attention, Graph, Lens, Look, LookSubject, OneHead, Reader, Text, read_transcoders,
};
use candle_gpt2_pictures::graph_data;
use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

/// Vocabulary size of the built-in model.
const VOCABULARY: usize = 4096;
const NOW: u64 = 1_700_000_000;
const PROMPT: &str = "One day, Mia and Tom went to the";

/// Loads the built-in model in f32, because q8 products depend on the number of rows.
fn built_in() -> LoadedModel {
    let dtype = Some(WeightDType::F32);
    let options = ModelOptions { device: DeviceChoice::Cpu, dtype, ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn session() -> Session {
    Session::new(built_in(), "stories", || NOW).unwrap()
}

fn ask(session: &Session, path: &str, body: &Value) -> Value {
    serde_json::from_str(&session.ask(path, body.to_string().as_bytes()).unwrap()).unwrap()
}

fn place(number: &Value) -> usize {
    usize::try_from(number.as_u64().unwrap()).unwrap()
}

/// Returns all chunks of a completion.
fn chunks(session: &Session, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let mut writing = session.start("v1/completions", body.to_string().as_bytes()).unwrap();
    let mut chunks = Vec::new();
    while let Some(step) = writing.step().unwrap() {
        chunks.extend(step.iter().map(|chunk| serde_json::from_str::<Value>(chunk).unwrap()));
    }
    assert_eq!(writing.step().unwrap(), None, "the end is final");
    chunks
}

fn text(chunks: &[Value]) -> String {
    chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect()
}

#[test]
fn texts_match_the_library() {
    let (model, session) = (built_in(), session());
    let ids = model.vocabulary().encode(PROMPT).unwrap();
    let start = GenerationConfig {
        max_new_tokens: 30,
        do_sample: false,
        ..model.defaults().unwrap().config().clone()
    };
    let drawn = GenerationConfig { do_sample: true, ..start.clone() };
    for (config, options) in [
        (start.clone(), json!({ "temperature": 0 })),
        (GenerationConfig { seed: 7, ..drawn.clone() }, json!({ "seed": 7 })),
        (
            GenerationConfig { seed: 9, temperature: 0.7, top_k: 40, top_p: 0.9, ..drawn.clone() },
            json!({ "seed": 9, "temperature": 0.7, "top_k": 40, "top_p": 0.9 }),
        ),
        (
            GenerationConfig { seed: u64::MAX, repetition_penalty: 1.3, min_p: Some(0.05), ..drawn },
            json!({ "seed": -1, "repetition_penalty": 1.3, "min_p": 0.05 }),
        ),
    ] {
        let config = model.defaults().unwrap().complete(config).unwrap();
        let expected: String = model.text_generator(&ids, &config).unwrap().map(Result::unwrap).collect();
        let mut body = json!({ "prompt": PROMPT, "max_tokens": 30 });
        body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        assert_eq!(text(&chunks(&session, body.clone())), expected, "{options}");
        let answer = ask(&session, "v1/completions", &body);
        assert_eq!(answer["choices"][0]["text"], expected, "{options}");
        assert_eq!((&answer["created"], &answer["model"]), (&json!(NOW), &json!("stories")));
    }
}

/// Checks that a resumed completion has the same tokens, whether or not a prefix is reused.
#[test]
fn continued_text_matches_an_uninterrupted_one() {
    let session = session();
    let ids = |chunks: &[Value]| -> Vec<u64> {
        let told =
            |chunk: &Value| serde_json::from_value::<Vec<u64>>(chunk["choices"][0]["token_ids"].clone());
        chunks.iter().flat_map(|chunk| told(chunk).unwrap()).collect()
    };
    let body = |prompt: Value, count: usize| json!({ "prompt": prompt, "max_tokens": count, "temperature": 0, "min_tokens": count, "return_token_ids": true });
    let whole = ids(&chunks(&session, body(json!(PROMPT), 40)));
    assert_eq!(whole.len(), 40);
    let prompt = serde_json::from_value::<Vec<u64>>(
        ask(&session, "tokenize", &json!({ "content": PROMPT }))["tokens"].clone(),
    );
    let begun = [prompt.unwrap(), whole[..25].to_vec()].concat();
    assert_eq!(ids(&chunks(&session, body(json!(begun), 15))), whole[25..]);
    let fresh = self::session();
    assert_eq!(ids(&chunks(&fresh, body(json!(begun), 15))), whole[25..]);
}

#[test]
fn generation_stops_at_a_new_request_or_without_a_reader() {
    let session = session();
    let body = json!({ "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": true }).to_string();
    let start = || session.start("v1/completions", body.as_bytes()).unwrap();
    let mut first = start();
    assert!(first.step().unwrap().is_some());
    let mut second = start();
    let error = first.step().unwrap_err();
    assert_eq!(
        (error.status(), error.to_string().as_str()),
        (409, "another completion was started, which canceled this one")
    );
    assert_eq!(first.step().unwrap(), None);
    drop(first);
    assert!(second.step().unwrap().is_some(), "dropping the first completion does not end the second");
    drop(second);
    let again = json!({ "prompt": PROMPT, "max_tokens": 30, "temperature": 0 });
    let alone = ask(&self::session(), "v1/completions", &again);
    assert_eq!(text(&chunks(&session, again)), alone["choices"][0]["text"].as_str().unwrap());
}

#[test]
fn several_completions_stream_on_request() {
    let session = session();
    let body = json!({ "prompt": [PROMPT, "One day"], "n": 2, "max_tokens": 16, "seed": 4, "temperature": 1, "stream_options": null });
    let whole = ask(&session, "v1/completions", &body);
    let mut texts = vec![String::new(); 4];
    for chunk in chunks(&session, body) {
        let choice = &chunk["choices"][0];
        texts[place(&choice["index"])].push_str(choice["text"].as_str().unwrap());
    }
    for (choice, text) in whole["choices"].as_array().unwrap().iter().zip(&texts) {
        assert_eq!(choice["text"], *text);
    }
    assert_ne!(texts[0], texts[1]);
    let usage = json!({ "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream_options": { "include_usage": true } });
    assert_eq!(chunks(&session, usage).last().unwrap()["usage"]["completion_tokens"], 3);
}

#[test]
fn looks_match_the_library() {
    let (model, session) = (built_in(), session());
    let ids = model.vocabulary().encode(PROMPT).unwrap();
    let reader = Reader::without_bos(model.vocabulary());
    let subject = LookSubject::new(&model, "stories".into(), &reader);
    let words = || Text::Ids(ids.clone());
    let data =
        |found: &Analysis| serde_json::from_str::<Value>(&candle_gpt2_pictures::data(&found.report)).unwrap();

    let attention = Attention { text: words(), layers: Some(vec![1, 3].into()), heads: None };
    let expected = data(&attention.at(&subject, &Silent).unwrap());
    assert_eq!(ask(&session, "look/attention", &json!({ "prompt": ids, "layers": [3, 1] })), expected);
    assert_eq!(ask(&session, "look/attention", &json!({ "prompt": PROMPT, "layers": [1, 3] })), expected);

    let lens = Lens { show: candle_gpt2_interpret::LensValue::Divergence, top: 1, ..Lens::new(words()) };
    let expected = data(&lens.at(&subject, &Silent).unwrap());
    assert_eq!(ask(&session, "look/lens", &json!({ "prompt": ids, "show": "divergence" })), expected);

    let head = candle_gpt2_interpret::Head { layer: 2, head: 1 };
    let steps =
        OneHead { text: words(), head, query: -1, key: 0 }.check(&reader).unwrap().look(&subject).unwrap();
    let body = json!({ "prompt": PROMPT, "layer": 2, "head": 1, "key": 0 });
    let answer = session.ask("look/head", body.to_string().as_bytes()).unwrap();
    assert_eq!(answer, serde_json::to_string(&steps).unwrap());
}

/// Checks that transcoders can be set later, and that transcoders for another model are rejected.
#[test]
fn features_and_graphs_use_the_given_transcoders() {
    let session = session();
    let body = json!({ "prompt": PROMPT });
    for path in ["look/features", "look/graph"] {
        let error = session.ask(path, body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.status(), 400);
        assert!(error.to_string().starts_with("features and graphs need transcoders"), "{error}");
    }
    let files: Vec<(String, Vec<u8>)> = built_in_transcoders()
        .iter()
        .map(|(config, weights)| ((*config).to_owned(), weights.to_vec()))
        .collect();
    let error = session.set_transcoders(files[..5].to_vec()).unwrap_err();
    assert!(format!("{error:?}").contains("OtherDepth"), "{error:?}");
    session.set_transcoders(files).unwrap();

    let model = built_in();
    let reader = Reader::without_bos(model.vocabulary());
    let ids = model.vocabulary().encode(PROMPT).unwrap();
    let graph = Graph { max_feature_nodes: 600, ..Graph::default() };
    let transcoders = read_transcoders(BUILT_IN.as_ref(), model.config()).unwrap();
    let run = Run::new(model.model(), &ids).unwrap();
    let options = GraphOptions { max_feature_nodes: 600, ..GraphOptions::default() };
    let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
    let (report, picture) = graph.of_replacement(&replacement, &ids, "stories", &reader).unwrap();
    let expected: Value = serde_json::from_str(&graph_data(&report, &picture)).unwrap();
    assert_eq!(ask(&session, "look/graph", &body), expected);
    let features = ask(&session, "look/features", &json!({ "prompt": PROMPT, "layers": [2], "top": 1 }));
    assert_eq!(features["values"].as_array().unwrap().len(), ids.len());
}

/// Checks names, shapes and values of activations, including masked scores.
#[test]
fn activations_match_the_library() {
    let (model, session) = (built_in(), session());
    let ids = model.vocabulary().encode(PROMPT).unwrap();
    let hooks = "hook_embed, hook_pos_embed, blocks.*.hook_resid_post, attn.hook_q, attn.hook_z, attn_scores1, \
                 pattern, blocks.0.hook_mlp_out, ln_final.hook_normalized, logits";
    let sites = named_sites(hooks, model.config().n_layer).unwrap();
    let record = Run::new(model.model(), &ids).unwrap().record(sites.clone()).unwrap();
    let found = session.activations(&ids, hooks).unwrap();
    assert_eq!(found.len(), sites.len());
    for activation in &found {
        let expected = record.get(named_site(&activation.hook).unwrap()).unwrap();
        assert_eq!(activation.shape, expected.dims()[1..], "{}", activation.hook);
        let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(activation.values, expected, "{}", activation.hook);
    }
    let scores = found.iter().find(|one| one.hook == "blocks.1.attn.hook_attn_scores").unwrap();
    assert_eq!(scores.shape, [model.config().n_head, ids.len(), ids.len()]);
    assert_eq!(scores.values[1], f32::NEG_INFINITY, "the first token does not attend to the second");

    let error = session.activations(&ids, "attn.hook_y").unwrap_err();
    assert_eq!((error.status(), error.param()), (400, Some("hooks")));
    assert_eq!(session.activations(&[], "hook_embed").unwrap_err().status(), 400);
}

/// Checks that `look/next` returns the distribution that completions are sampled from.
#[test]
fn next_token_probabilities_match_sampled_texts() {
    let session = session();
    let settings = json!({ "prompt": PROMPT, "temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0, "logit_bias": { "300": -100 } });
    let with = |more: Value| {
        let mut body = settings.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let next = ask(&session, "look/next", &with(json!({ "top": 1000 })));
    let tokens = next["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 1000);
    let kept: Vec<&Value> = tokens.iter().filter(|token| token["probability"].as_f64() > Some(0.0)).collect();
    assert_eq!(kept.len() as u64, next["kept"].as_u64().unwrap());
    assert!((2..=6).contains(&kept.len()), "{next}");
    let sum: f64 = kept.iter().filter_map(|token| token["probability"].as_f64()).sum();
    assert!((sum - 1.0).abs() < 1e-12, "{sum}");
    assert!(tokens.is_sorted_by(|a, b| a["logit"].as_f64() >= b["logit"].as_f64()));
    // Tokens look the same as in completions: their text, or escaped bytes if that is invalid UTF-8.
    let is_byte = |text: &str| text.starts_with("bytes:\\x");
    for token in tokens {
        let (id, text) = (token["id"].as_u64().unwrap(), token["token"].as_str().unwrap());
        let written = session.decode(&[u32::try_from(id).unwrap()]).unwrap();
        assert!(text == written || is_byte(text) && written.contains('\u{fffd}'), "{token}: {written:?}");
    }
    assert!(tokens.iter().any(|token| token["token"].as_str().unwrap().starts_with(' ')));

    const DRAWS: usize = 400;
    let drawn = ask(
        &session,
        "v1/completions",
        &with(json!({ "max_tokens": 1, "n": 100, "seed": 1, "return_token_ids": true })),
    );
    let mut counts = std::collections::BTreeMap::new();
    for seed in 1..=DRAWS / 100 {
        let drawn = if seed == 1 {
            drawn.clone()
        } else {
            let more = json!({ "max_tokens": 1, "n": 100, "seed": seed, "return_token_ids": true });
            ask(&session, "v1/completions", &with(more))
        };
        for choice in drawn["choices"].as_array().unwrap() {
            *counts.entry(choice["token_ids"][0].as_u64().unwrap()).or_insert(0_usize) += 1;
        }
    }
    for token in &kept {
        let (id, probability) = (token["id"].as_u64().unwrap(), token["probability"].as_f64().unwrap());
        let share = counts.remove(&id).unwrap_or(0) as f64 / DRAWS as f64;
        // Four standard deviations of the sampled fraction.
        let most = 4.0 * (probability * (1.0 - probability) / DRAWS as f64).sqrt();
        assert!((share - probability).abs() <= most, "{token}: drawn {share}");
    }
    assert!(counts.is_empty(), "only kept tokens are sampled: {counts:?}");

    let greedy = ask(&session, "look/next", &json!({ "prompt": PROMPT, "temperature": 0, "top": 2 }));
    let chosen: Vec<f64> = serde_json::from_value(json!([
        greedy["tokens"][0]["probability"],
        greedy["tokens"][1]["probability"]
    ]))
    .unwrap();
    assert_eq!((greedy["kept"].as_u64(), chosen), (Some(1), vec![1.0, 0.0]));
}

/// Checks `look/next` after earlier requests for other texts and positions.
#[test]
fn next_token_probabilities_do_not_depend_on_earlier_requests() {
    let (model, used) = (built_in(), session());
    let ids = model.vocabulary().encode(&format!("{PROMPT} park. Tom had a red ball.")).unwrap();
    let mut other = ids.clone();
    other[6] = 5;
    let bodies = [
        json!({ "prompt": ids[..8] }),
        json!({ "prompt": ids }),
        json!({ "prompt": ids, "at": 2 }),
        json!({ "prompt": other }),
        json!({ "prompt": ids, "at": -3, "min_p": 0, "presence_penalty": 1.5, "prompt_tokens": 4 }),
        json!({ "prompt": ids, "at": -3, "min_p": 0, "presence_penalty": 1.5 }),
    ];
    let found: Vec<Value> = bodies.iter().map(|body| ask(&used, "look/next", body)).collect();
    for (body, found) in bodies.iter().zip(&found) {
        let fresh = session();
        assert_eq!(ask(&fresh, "look/next", body), *found, "{body}");
        let ids: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        let at = body["at"].as_i64().unwrap_or(-1);
        let at = usize::try_from(if at < 0 { at + ids.len() as i64 } else { at }).unwrap();
        let logits = fresh.logits(&ids).unwrap();
        let row = &logits[at * VOCABULARY..][..VOCABULARY];
        for token in found["tokens"].as_array().unwrap() {
            let expected = f64::from(row[place(&token["id"])]);
            assert!((token["logit"].as_f64().unwrap() - expected).abs() < 1e-4, "{token} {expected}");
        }
    }
    assert_ne!(
        found[4]["tokens"], found[5]["tokens"],
        "generated tokens are penalized, prompt tokens are not"
    );
}

#[test]
fn tokens_and_names_are_reported() {
    let session = session();
    let tokens = ask(&session, "tokenize", &json!({ "content": PROMPT }));
    let ids: Vec<u32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
    assert_eq!(session.decode(&ids).unwrap(), PROMPT);
    assert_eq!(ask(&session, "detokenize", &json!({ "tokens": ids }))["content"], PROMPT);
    let models = ask(&session, "v1/models", &Value::Null);
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["created"]), (&json!("stories"), &json!(NOW)));
    assert_eq!(session.logits(&ids).unwrap().len(), ids.len() * VOCABULARY);
}

#[test]
fn unanswerable_requests_name_the_reason() {
    let session = session();
    let long = "ball ".repeat(600);
    for (path, body, status, expected) in [
        ("v1/chat/completions", json!({}), 404, "path not found: v1/chat/completions"),
        ("v1/completions", json!({ "prompt": "a", "stream": true }), 400, "stream: "),
        ("v1/completions", json!({ "prompt": long }), 400, "prompt: this model's context is 512 tokens"),
        ("v1/completions", json!({ "prompt": "a", "temperature": 9 }), 400, "temperature: "),
        ("v1/completions", json!({ "model": "other" }), 404, "model not found"),
        ("look/attention", json!({ "prompt": long }), 400, "prompt: "),
        ("look/lens", json!({ "prompt": "a", "show": "rank" }), 400, "show: expected `probability`"),
        (
            "look/head",
            json!({ "prompt": "a", "layer": 7, "head": 0 }),
            400,
            "layer: expected a whole number from 0 to 6",
        ),
        ("look/next", json!({ "prompt": [] }), 400, "prompt: the text is empty"),
        ("look/next", json!({ "prompt": [4, VOCABULARY] }), 400, "prompt[1]: expected a token id below"),
        ("tokenize", json!({}), 400, "content: "),
    ] {
        let error = session.ask(path, body.to_string().as_bytes()).unwrap_err();
        assert!(
            error.status() == status && error.to_string().starts_with(expected),
            "{path} {body}: {error}"
        );
    }
    let error = session.ask("v1/completions", b"{").unwrap_err();
    assert_eq!(error.status(), 400);
    for (path, body) in [("v1/completions", "{}"), ("look/next", r#"{"stream": true}"#)] {
        assert!(session.start(path, body.as_bytes()).is_err(), "{path} {body}");
    }
    for ids in [&[][..], &[0; 513], &[4096]] {
        assert_eq!(session.logits(ids).unwrap_err().status(), 400);
    }
    assert_eq!(
        session.decode(&[4096]).unwrap_err().to_string(),
        "token 4096 is outside the vocabulary of 4096 tokens"
    );
}

/// Checks that a completion ends when the context is full, as in the program.
///
/// The last sampled token does not need a position, because the model never reads it.
#[test]
fn text_ends_at_the_context_length() {
    let (model, session) = (built_in(), session());
    let context = model.config().n_positions;
    let ids: Vec<u32> = (0..).map(|n| n * 7 % 900 + 20).take(context).collect();
    let config = GenerationConfig { max_new_tokens: 50, ..GenerationConfig::default() };
    for prompt in [context - 10, context - 1, context] {
        let generated = TokenGenerator::new(model.model(), &ids[..prompt], &config).unwrap();
        let expected: Vec<u32> = generated.collect::<Result<_, _>>().unwrap();
        assert_eq!(expected.len(), context - prompt + 1);
        let body = json!({
            "prompt": ids[..prompt], "max_tokens": 50, "temperature": 0, "repetition_penalty": 1, "no_repeat_ngram_size": 0,
            "return_token_ids": true
        });
        assert_eq!(ask(&session, "v1/completions", &body)["choices"][0]["token_ids"], json!(expected));
        let streamed = chunks(&session, body);
        let streamed: Vec<&Value> =
            streamed.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap()).collect();
        assert_eq!(json!(streamed), json!(expected));
    }
    let longer: Vec<u32> = ids.iter().copied().chain([20]).collect();
    let error =
        session.ask("v1/completions", json!({ "prompt": longer }).to_string().as_bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "prompt: this model's context is 512 tokens, but the text has 513; shorten it"
    );
}

/// Checks that callers see internal errors, because they own the model.
#[test]
fn internal_errors_are_reported() {
    let folder = CheckpointFolder::tiny();
    let weights = folder.file("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    // The file ends with the four bytes of a weight.
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    let options =
        ModelOptions { model: folder.path().into(), device: DeviceChoice::Cpu, ..ModelOptions::default() };
    let session =
        Session::new(options.open(&Silent).unwrap().load(&Silent).unwrap(), "tiny", || NOW).unwrap();
    let error = session.ask("look/next", br#"{"prompt": [1, 2]}"#).unwrap_err();
    assert!(error.cause().unwrap().contains("not finite"), "{error:?}");
}

/// Checks that a model without a tokenizer accepts token ids and rejects text.
#[test]
fn model_without_a_tokenizer_takes_ids() {
    let folder = CheckpointFolder::tiny();
    for name in ["tokenizer.json", "vocab.json", "merges.txt"] {
        // Fails for the files that do not exist.
        _ = std::fs::remove_file(folder.file(name));
    }
    let model = folder.file("config.json").parent().unwrap().to_owned();
    let options = ModelOptions { model, device: DeviceChoice::Cpu, ..ModelOptions::default() };
    let session =
        Session::new(options.open(&Silent).unwrap().load(&Silent).unwrap(), "tiny", || NOW).unwrap();
    let answer =
        ask(&session, "v1/completions", &json!({ "prompt": [1, 2], "max_tokens": 3, "temperature": 0 }));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let error = session.ask("look/next", br#"{"prompt": "a"}"#).unwrap_err();
    assert_eq!(error.to_string(), "prompt: this model has no tokenizer; pass token ids");
}
