//! The OpenAPI description, which is made of the routes and the fields, beside what is served.

use candle_gpt2_api::{CompletionRequest, Endpoint, OPENAPI, ROUTES, find_route};
use serde_json::{Value, json};

use crate::common::tiny;

fn description() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

#[test]
fn all_that_is_referred_to_is_there() {
    let description = description();
    let mut referred = 0;
    let mut open = vec![&description];
    while let Some(value) = open.pop() {
        if let Some(path) = value["$ref"].as_str() {
            let pointer = path.strip_prefix('#').unwrap();
            assert!(description.pointer(pointer).is_some(), "{path}");
            referred += 1;
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
    assert!(referred > 50, "{referred}");
}

#[test]
fn numbers_of_the_description_are_those_of_the_parser() {
    let description = description();
    let properties = &description["components"]["schemas"]["CompletionRequest"]["properties"];
    for (name, schema) in properties.as_object().unwrap() {
        // What is within its range is taken, what is outside is not.
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
            assert!(parse(number + beyond).is_err(), "{name}: {number} is no {bound}");
        }
    }
}

#[test]
fn responses_have_the_fields_that_are_described() {
    let description = description();
    let schemas = &description["components"]["schemas"];
    let response =
        tiny().complete(&json!({ "max_tokens": 2, "logprobs": 1, "echo": true, "return_token_ids": true }));
    let check = |value: &Value, schema: &Value| {
        for name in value.as_object().unwrap().keys() {
            assert!(schema["properties"].get(name).is_some(), "{name} is not described");
        }
        for name in schema["required"].as_array().unwrap() {
            assert!(value.get(name.as_str().unwrap()).is_some(), "{name} is missing");
        }
    };
    check(&response, &schemas["Completion"]);
    check(&response["choices"][0], &schemas["Completion"]["properties"]["choices"]["items"]);
    check(&response["choices"][0]["logprobs"], &schemas["Logprobs"]);
    check(&response["usage"], &schemas["Usage"]);
}

#[test]
fn requests_find_their_routes() {
    for route in ROUTES {
        let path = route.path.replace("{id}", "a%2Fb");
        let (found, id) = find_route(route.method, &path).unwrap();
        assert_eq!((found, id), (route, route.path.ends_with("{id}").then_some("a%2Fb")));
    }
    assert_eq!(find_route("HEAD", "/health").unwrap().0.endpoint, Endpoint::Health);
    let (route, id) = find_route("GET", "/v1/models/owner/name").unwrap();
    assert_eq!((route.endpoint, id), (Endpoint::Model, Some("owner/name")));
    let wrong = |method: &str, path: &str| {
        let error = find_route(method, path).unwrap_err();
        (error.status(), error.allow())
    };
    assert_eq!(wrong("GET", "/v1/completions"), (405, Some("POST")));
    assert_eq!(wrong("DELETE", "/v1/models"), (405, Some("GET, HEAD")));
    assert_eq!(wrong("HEAD", "/tokenize"), (405, Some("POST")));
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
        assert_eq!(wrong("GET", path), (404, None), "{path}");
    }
}
