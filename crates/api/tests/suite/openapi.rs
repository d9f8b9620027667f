//! Compares the OpenAPI description, generated from routes and fields, with actual responses.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use candle_gpt2_api::{
    ApiOptions, ChatTemplateChoice, CompletionRequest, Endpoint, OPENAPI, ROUTES, ServedModel, Session, Work,
    find_route, model,
};
use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_testing::fixture_path;
use serde_json::{Value, json};

use crate::common::{call, options as api_options, tiny};

fn description() -> &'static Value {
    static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(OPENAPI).unwrap());
    &DESCRIPTION
}

#[test]
fn every_reference_resolves() {
    let description = description();
    let mut references = 0;
    let mut open = vec![description];
    while let Some(value) = open.pop() {
        if let Some(path) = value["$ref"].as_str() {
            let pointer = path.strip_prefix('#').unwrap();
            assert!(description.pointer(pointer).is_some(), "{path}");
            references += 1;
        }
        if let Some(types) = value["type"].as_array() {
            assert!(types.iter().all(Value::is_string), "{value}");
        }
        match value {
            Value::Object(entries) => open.extend(entries.values()),
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    assert!(references > 50, "{references}");
}

#[test]
fn described_ranges_match_the_parser() {
    let description = description();
    let properties = &description["components"]["schemas"]["CompletionRequest"]["properties"];
    for (name, schema) in properties.as_object().unwrap() {
        // The bound itself is accepted, and the next value outside the range is rejected.
        for (bound, beyond) in [("minimum", -1.0), ("maximum", 1.0)] {
            let Some(number) = schema[bound].as_f64() else { continue };
            let parse = |number: f64| {
                let mut body = json!({ "n": null });
                body[name] = json!(number);
                CompletionRequest::parse(body.to_string().as_bytes())
            };
            if name != "truncate_prompt_tokens" && name != "best_of" && name != "n" {
                parse(number).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            assert!(parse(number + beyond).is_err(), "{name}: {number} is not the {bound}");
        }
    }
}

/// Returns the first violation of a schema, if any.
///
/// Undescribed keys are violations. Described keys that are present are added to `seen`.
fn violation(value: &Value, schema: &Value, at: &str, seen: &mut BTreeSet<String>) -> Option<String> {
    let found = |what: &str| Some(format!("{at}: {what}, found {value}"));
    if let Some(path) = schema["$ref"].as_str() {
        let pointer = path.strip_prefix('#').unwrap();
        return violation(value, description().pointer(pointer).unwrap(), path, seen);
    }
    if let Some(alternatives) = schema["oneOf"].as_array() {
        let matching = alternatives.iter().filter(|schema| violation(value, schema, at, seen).is_none());
        return if matching.count() == 1 { None } else { found("expected exactly one match") };
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_kind = |name: &Value| *name == kind || (*name == "number" && kind == "integer");
    let has_type = match &schema["type"] {
        Value::Null => true,
        Value::Array(kinds) => kinds.iter().any(is_kind),
        name => is_kind(name),
    };
    let is_listed = schema["enum"].as_array().is_none_or(|values| values.contains(value));
    let is_constant = schema.get("const").is_none_or(|constant| constant == value);
    let is_in_range = value.as_f64().is_none_or(|number| {
        schema["minimum"].as_f64().is_none_or(|least| number >= least)
            && schema["maximum"].as_f64().is_none_or(|most| number <= most)
    });
    if !(has_type && is_listed && is_constant && is_in_range) {
        return found(&format!("expected {schema}"));
    }
    let items = value.as_array().into_iter().flatten();
    if let Some(what) =
        items.filter_map(|item| violation(item, &schema["items"], &format!("{at}[]"), seen)).next()
    {
        return Some(what);
    }
    let entries = value.as_object()?;
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !entries.contains_key(name) {
            return found(&format!("expected {name}"));
        }
    }
    for (name, value) in entries {
        let entry_schema = match (schema["properties"].get(name), schema.get("additionalProperties")) {
            (Some(schema), _) | (None, Some(schema)) => schema,
            (None, None) if schema.get("properties").is_none() => continue,
            (None, None) => return found(&format!("{name} is not described")),
        };
        let path = format!("{at}.{name}");
        if let Some(what) = violation(value, entry_schema, &path, seen) {
            return Some(what);
        }
        seen.insert(path);
    }
    None
}

/// Collects the paths of all entries that a schema describes.
fn described_paths(schema: &Value, at: &str, paths: &mut BTreeSet<String>) {
    for alternative in schema["oneOf"].as_array().into_iter().flatten() {
        described_paths(alternative, at, paths);
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{at}.{name}");
        described_paths(schema, &path, paths);
        paths.insert(path);
    }
    if let Some(items) = schema.get("items") {
        described_paths(items, &format!("{at}[]"), paths);
    }
}

/// Responses of an endpoint to bodies that together request every optional part.
fn answers(endpoint: Endpoint) -> Vec<Value> {
    let answer = |mut session: Session, body: &Value| -> Value {
        let work = session.served().read(endpoint, body.to_string().as_bytes(), None).unwrap();
        serde_json::from_str(&session.answer(work, || true).unwrap().unwrap().json).unwrap()
    };
    let classifier_session = |name: &str| {
        let options = ModelOptions { model: fixture_path("heads").join(name), ..ModelOptions::default() };
        let classifier = options.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap();
        let served = Arc::new(ServedModel::of_classifier(&classifier, api_options()));
        Session::of_classifier(classifier, served)
    };
    let template = ChatTemplateChoice::EosJoin;
    let session = || {
        let options = ApiOptions { chat_template: template.clone(), ..api_options() };
        let served = Arc::new(ServedModel::new(&tiny().model, options).unwrap());
        let scheduler = SchedulerOptions { max_texts: 2, kv_tokens: 96, chunk_tokens: 16 };
        Session::new(tiny().model.clone(), served, tiny().model.scheduler(scheduler).unwrap())
    };
    let ask = |mut body: Value| {
        body["modle"] = json!(1);
        answer(session(), &body)
    };
    let streamed = |mut body: Value| {
        (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
        let mut session = session();
        let Work::Texts(call) = session.served().read(endpoint, body.to_string().as_bytes(), None).unwrap()
        else {
            panic!("texts")
        };
        let call = session.begin(call).unwrap();
        let chunks = std::iter::from_fn(|| session.step(call).unwrap()).flatten();
        chunks.map(|chunk| serde_json::from_str(&chunk).unwrap()).collect::<Vec<Value>>()
    };
    let texts = |body: &Value| [vec![ask(body.clone())], streamed(body.clone())].concat();
    let text = json!({
        "max_tokens": 3, "n": 2, "seed": 5, "return_token_ids": true, "ignore_eos": true,
        "logit_bias": { "0": -100 }, "activations": { "sites": ["resid_post0"], "encoding_format": "float" },
    });
    let with = |more: Value| {
        let mut body = text.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let prompt = json!([5, 6, 7]);
    match endpoint {
        Endpoint::Completions => texts(&with(json!({ "prompt": prompt, "logprobs": 2, "echo": true }))),
        Endpoint::ChatCompletions => texts(&with(json!({
            "messages": [{ "role": "user", "content": "a" }], "logprobs": true, "top_logprobs": 2
        }))),
        Endpoint::Classify => ["sequence", "token"]
            .map(|name| answer(classifier_session(name), &json!({ "input": ["a", "b"], "modle": 1 })))
            .to_vec(),
        Endpoint::Activations => ["float", "base64"]
            .map(|format| {
                ask(json!({ "prompt": prompt, "sites": ["attn_scores0"], "encoding_format": format }))
            })
            .to_vec(),
        Endpoint::Embeddings => ["float", "base64"]
            .map(|format| ask(json!({ "input": prompt, "encoding_format": format })))
            .to_vec(),
        Endpoint::Tokenize => vec![
            ask(json!({ "content": "the word", "with_pieces": true })),
            ask(json!({ "content": "the word", "return_token_strs": true })),
        ],
        Endpoint::Detokenize => vec![ask(json!({ "tokens": prompt }))],
        Endpoint::LookAttention
        | Endpoint::LookLens
        | Endpoint::LookNext
        | Endpoint::LookFeatures
        | Endpoint::LookGraph => {
            vec![ask(json!({ "prompt": prompt }))]
        }
        Endpoint::LookFeature => vec![ask(json!({ "prompt": prompt, "layer": 1, "feature": 3 }))],
        Endpoint::LookHead => vec![ask(json!({ "prompt": prompt, "layer": 1, "head": 0 }))],
        Endpoint::Model => vec![serde_json::from_str(&model("tiny", &tiny().served).unwrap()).unwrap()],
        Endpoint::OpenApi => vec![description().clone()],
        _ => vec![answer(session(), &json!({}))],
    }
}

#[test]
fn answers_match_their_schemas_and_use_every_field() {
    let description = description();
    let (mut seen, mut failures) = (BTreeSet::new(), Vec::new());
    for route in ROUTES {
        let operation = &description["paths"][route.path][route.method.to_lowercase()];
        let schema = &operation["responses"]["200"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        for answer in answers(route.endpoint) {
            failures.extend(violation(&answer, schema, route.path, &mut seen));
        }
    }
    let error = call(&json!({ "prompt": vec![5; 60] })).unwrap_err().to_json();
    let error_schema = json!({ "$ref": "#/components/schemas/Error" });
    failures.extend(violation(&serde_json::from_str(&error).unwrap(), &error_schema, "", &mut seen));
    assert_eq!(failures, [""; 0]);
    let mut all = BTreeSet::new();
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        if !name.ends_with("Request") {
            described_paths(schema, &format!("#/components/schemas/{name}"), &mut all);
        }
    }
    let unused: Vec<&String> = all.difference(&seen).collect();
    // Reported only if the operator enables it.
    let details = "#/components/schemas/Usage.prompt_tokens_details";
    assert_eq!(unused, [details, &format!("{details}.cached_tokens")]);
}

#[test]
fn requests_are_routed_by_method_and_path() {
    for route in ROUTES {
        let path = route.path.replace("{id}", "a%2Fb");
        let (found, id) = find_route(route.method, &path).unwrap();
        assert_eq!((found, id), (route, route.path.ends_with("{id}").then_some("a%2Fb")));
    }
    assert_eq!(find_route("HEAD", "/health").unwrap().0.endpoint, Endpoint::Health);
    let (route, id) = find_route("GET", "/v1/models/owner/name").unwrap();
    assert_eq!((route.endpoint, id), (Endpoint::Model, Some("owner/name")));
    let failure = |method: &str, path: &str| {
        let error = find_route(method, path).unwrap_err();
        (error.status(), error.allow())
    };
    assert_eq!(failure("GET", "/v1/completions"), (405, Some("POST")));
    assert_eq!(failure("DELETE", "/v1/models"), (405, Some("GET, HEAD")));
    assert_eq!(failure("HEAD", "/tokenize"), (405, Some("POST")));
    for path in [
        "",
        "/v1",
        "/v1/models/",
        "/V1/models",
        "//health",
        "/health/",
        "/completion",
        "/../etc/passwd",
        "/v1/completions/x",
    ] {
        assert_eq!(failure("GET", path), (404, None), "{path}");
    }
    for (path, expected) in [
        ("/completion", "not found; use /v1/completions, or see /openapi.json for the available endpoints"),
        ("/api/generate", "not found; use /v1/completions, or see /openapi.json for the available endpoints"),
        ("/v1", "not found; see /openapi.json for the available endpoints"),
    ] {
        assert_eq!(find_route("POST", path).unwrap_err().to_string(), expected, "{path}");
    }
}
