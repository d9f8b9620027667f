//! The OpenAPI description, made of [`ROUTES`], of the fields of bodies, and of `answers.json`, which has what routes do and
//! answer.
//! `WRITE_OPENAPI=1 cargo test -p candle-gpt2-api description` writes it anew.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::body::{Field, Fields, object_schema};
use crate::classify::ClassifyFields;
use crate::embeddings::EmbeddingFields;
use crate::inside::PromptActivationFields;
use crate::look::{AttentionFields, FeatureFields, FeaturesFields, GraphFields, HeadFields, LensFields};
use crate::tokens::{DetokenizeFields, TokenizeFields};
use crate::{Endpoint, OPENAPI, ROUTES, Route, chat, completion, look};

/// What a client should know of every body.
const OF_BODIES: &str = "Every field may be null, which is the same as absent. `maxLength` of a string counts its bytes in UTF-8. Unknown fields are ignored and named in `warnings` of \
                         the answer; a server that was started with --strict refuses them. Fields that ask for unsupported features \
                         are refused.";
const OF_STREAMS: &str = "Events `data: ` with objects of the same shape; the last one is `data: [DONE]`. An error on the way is an \
                          object with `error`.";
const OF_FILES: &str = "A safetensors file, if the header `Accept` asks for this type: a tensor for each site, of several prompts with the \
                        prompt's number and a dot in front of its name; the metadata has `positions`, `activations_info` and, if \
                        there are any, `warnings`.";
/// Widest line that an object or a list takes alone.
const WIDTH: usize = 120;

/// The schema of a route's body, by its name.
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

/// The errors of a route, by their codes.
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

/// A route, of whose name, purpose and answer `said` has what `answers.json` says.
fn operation(route: &Route, said: &Value) -> Value {
    let mut content = match said["answer"].as_str() {
        Some(answer) => json!({ "application/json": { "schema": schema_of(answer) } }),
        None => json!({ said["media"].as_str().unwrap(): { "schema": { "type": "string" } } }),
    };
    if matches!(route.endpoint, Endpoint::Completions | Endpoint::ChatCompletions) {
        content["text/event-stream"] = json!({ "schema": { "type": "string", "description": OF_STREAMS } });
    }
    if route.endpoint == Endpoint::Activations {
        content["application/octet-stream"] =
            json!({ "schema": { "type": "string", "description": OF_FILES } });
    }
    let mut responses = json!({ "200": { "description": "The answer.", "content": content } });
    for (code, name) in errors(route) {
        responses[code] = json!({ "$ref": format!("#/components/responses/{name}") });
    }
    let mut operation = json!({ "operationId": said["operationId"], "summary": said["summary"] });
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
            "description": "GPT-2 behind the interface of OpenAI's completions, with fields of vLLM and llama.cpp. The text and the \
                            log-probabilities of a request are the same alone and under load.",
            "license": { "name": env!("CARGO_PKG_LICENSE") },
        },
        "security": [{}, { "key": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer", "description": "If the server has keys." } },
            "responses": components["responses"],
            "schemas": schemas,
        },
    })
}

/// JSON whose objects and lists take a line if they fit.
fn written(value: &Value, indent: usize, before: usize) -> String {
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
        format!("\n{}{name}{}", " ".repeat(inner), written(value, inner, inner + name.len()))
    });
    let lines: Vec<String> = lines.collect();
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    format!("{open}{}\n{}{close}", lines.join(","), " ".repeat(indent))
}

#[test]
fn the_description_is_made_of_routes_and_fields() {
    let expected = written(&description(), 0, 0) + "\n";
    if std::env::var_os("WRITE_OPENAPI").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/openapi.json");
        std::fs::write(path, expected).unwrap();
        return;
    }
    let how = "WRITE_OPENAPI=1 cargo test -p candle-gpt2-api description";
    assert!(OPENAPI == expected, "openapi.json is stale; write it anew: {how}");
}
