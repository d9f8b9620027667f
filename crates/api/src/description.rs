//! OpenAPI description, generated from [`ROUTES`], the body fields and `answers.json`.
//!
//! `answers.json` describes the routes and their answers. Regenerate the description with
//! `WRITE_OPENAPI=1 cargo test -p candle-gpt2-api description`.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::body::{Field, Fields, object_schema};
use crate::classify::ClassifyFields;
use crate::embeddings::EmbeddingFields;
use crate::inside::PromptActivationFields;
use crate::look::{AttentionFields, FeatureFields, FeaturesFields, GraphFields, HeadFields, LensFields};
use crate::tokens::{DetokenizeFields, TokenizeFields};
use crate::{Endpoint, OPENAPI, ROUTES, Route, chat, completion, look};

/// Description shared by all bodies.
const OF_BODIES: &str = "A null field counts as absent. `maxLength` of a string counts bytes of UTF-8. Unknown fields are ignored and \
                         listed under `warnings` in the response; a server that was started with --strict rejects them. Fields for \
                         unsupported features are rejected.";
const OF_STREAMS: &str = "Events `data: ` with objects of the same shape; the last one is `data: [DONE]`. An error during generation \
                          is an object with `error`.";
const OF_FILES: &str = "A safetensors file, if the `Accept` header asks for this type: one tensor per hook point. With several prompts, \
                        the prompt's index and a dot precede each name. The metadata has `positions`, `activations_info` and any \
                        `warnings`.";
/// Maximum width of an object or list on a single line.
const WIDTH: usize = 120;

/// Schema name and fields of a route's request body.
fn request(endpoint: Endpoint) -> Option<(&'static str, &'static [Field])> {
    Some(match endpoint {
        Endpoint::Completions => ("CompletionRequest", &completion::FIELDS),
        Endpoint::ChatCompletions => ("ChatRequest", &chat::FIELDS),
        Endpoint::Classify => ("ClassifyRequest", ClassifyFields::fields()),
        Endpoint::Embeddings => ("EmbeddingRequest", EmbeddingFields::fields()),
        Endpoint::Activations => ("ActivationsRequest", PromptActivationFields::fields()),
        Endpoint::Tokenize => ("TokenizeRequest", TokenizeFields::fields()),
        Endpoint::Detokenize => ("DetokenizeRequest", DetokenizeFields::fields()),
        Endpoint::LookAttention => ("AttentionRequest", AttentionFields::fields()),
        Endpoint::LookLens => ("LensRequest", LensFields::fields()),
        Endpoint::LookHead => ("HeadRequest", HeadFields::fields()),
        Endpoint::LookNext => ("NextRequest", &look::NEXT),
        Endpoint::LookFeatures => ("FeaturesRequest", FeaturesFields::fields()),
        Endpoint::LookFeature => ("FeatureRequest", FeatureFields::fields()),
        Endpoint::LookGraph => ("GraphRequest", GraphFields::fields()),
        _ => return None,
    })
}

/// Error responses for a route, keyed by status code.
fn errors(route: &Route) -> Vec<(&'static str, &'static str)> {
    let is_post = route.method == "POST";
    let waits_in_queue =
        is_post && route.endpoint != Endpoint::Embeddings && !route.path.starts_with("/look/");
    let errors = [
        ("400", "BadRequest", is_post),
        ("401", "Unauthorized", route.needs_key),
        ("403", "Forbidden", route.needs_key),
        ("404", "NotFound", is_post || route.endpoint == Endpoint::Model),
        ("408", "TooSlow", is_post),
        ("413", "TooLarge", is_post),
        ("415", "NotJson", is_post),
        ("429", "Overloaded", waits_in_queue),
        ("500", "Failed", is_post),
        ("503", "Unavailable", is_post || route.endpoint == Endpoint::Health),
    ];
    errors.into_iter().filter(|(.., has)| *has).map(|(code, name, _)| (code, name)).collect()
}

fn schema_of(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// OpenAPI operation for a route; `entry` is the route's entry in `answers.json`.
fn operation(route: &Route, entry: &Value) -> Value {
    let mut content = match entry["answer"].as_str() {
        Some(answer) => json!({ "application/json": { "schema": schema_of(answer) } }),
        None => json!({ entry["media"].as_str().unwrap(): { "schema": { "type": "string" } } }),
    };
    if matches!(route.endpoint, Endpoint::Completions | Endpoint::ChatCompletions) {
        content["text/event-stream"] = json!({ "schema": { "type": "string", "description": OF_STREAMS } });
    }
    if route.endpoint == Endpoint::Activations {
        content["application/octet-stream"] =
            json!({ "schema": { "type": "string", "description": OF_FILES } });
    }
    let mut responses = json!({ "200": { "description": "The response.", "content": content } });
    for (code, name) in errors(route) {
        responses[code] = json!({ "$ref": format!("#/components/responses/{name}") });
    }
    let mut operation = json!({ "operationId": entry["operationId"], "summary": entry["summary"] });
    if let Some((name, _)) = request(route.endpoint) {
        operation["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema_of(name) } } });
    }
    operation["responses"] = responses;
    if !route.needs_key {
        operation["security"] = json!([]);
    }
    operation
}

fn description() -> Value {
    let mut components: Value = serde_json::from_str(include_str!("answers.json")).unwrap();
    for response in components["responses"].as_object_mut().unwrap().values_mut() {
        response["content"] = json!({ "application/json": { "schema": schema_of("Error") } });
    }
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.to_lowercase()] = operation(route, &components["operations"][route.path]);
        if route.path.contains("{id}") {
            path["parameters"] = json!([
                { "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }
            ]);
        }
        if let Some((name, fields)) = request(route.endpoint) {
            let mut schema = json!({ "description": OF_BODIES });
            schema.as_object_mut().unwrap().extend(object_schema(fields).as_object().unwrap().clone());
            schemas.insert(name.into(), schema);
        }
    }
    schemas.extend(std::mem::take(components["schemas"].as_object_mut().unwrap()));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "gpt2 serve",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "GPT-2 behind OpenAI's completions API, with fields of vLLM and llama.cpp. The text and the \
                            log-probabilities of a response do not depend on the server's load.",
            "license": { "name": env!("CARGO_PKG_LICENSE") },
        },
        "security": [{}, { "key": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer", "description": "Required if the server has keys." } },
            "responses": components["responses"],
            "schemas": schemas,
        },
    })
}

/// Formats JSON; keeps objects and lists that fit on a single line.
fn format_json(value: &Value, indent: usize, before: usize) -> String {
    let line = value.to_string();
    let entries: Vec<(String, &Value)> = match value {
        Value::Object(entries) => {
            entries.iter().map(|(name, value)| (format!("{}: ", json!(name)), value)).collect()
        }
        Value::Array(items) => items.iter().map(|item| (String::new(), item)).collect(),
        _ => return line,
    };
    if before + line.len() <= WIDTH {
        return line;
    }
    let inner = indent + 1;
    let lines = entries.into_iter().map(|(name, value)| {
        format!("\n{}{name}{}", " ".repeat(inner), format_json(value, inner, inner + name.len()))
    });
    let lines: Vec<String> = lines.collect();
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    format!("{open}{}\n{}{close}", lines.join(","), " ".repeat(indent))
}

#[test]
fn openapi_json_is_up_to_date() {
    let expected = format_json(&description(), 0, 0) + "\n";
    if std::env::var_os("WRITE_OPENAPI").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/openapi.json");
        std::fs::write(path, expected).unwrap();
        return;
    }
    let command = "WRITE_OPENAPI=1 cargo test -p candle-gpt2-api description";
    assert!(OPENAPI == expected, "openapi.json is stale; regenerate it: {command}");
}
