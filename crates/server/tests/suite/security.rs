//! Known vulnerabilities in other servers, with one test for each.

use std::io::ErrorKind;
use std::net::TcpListener;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
#[cfg(unix)]
use std::os::unix::net::{UnixListener, UnixStream};

use candle_gpt2_api::ROUTES;
use candle_gpt2_server::{Server, ServerError, ServerOptions};
use serde_json::json;

#[cfg(unix)]
use super::common::{Client, json_request, request, run};
use super::common::{Reply, Running, start, start_model, start_with, tiny};

const KEY: &str = "Authorization: Bearer first-key";
const JSON: &str = "Content-Type: application/json";

fn start_with_keys() -> Running {
    start_with(|options| options.keys = vec!["first-key".into(), "second-key".into()])
}

/// Sends a request to a route with additional header lines.
fn ask(server: &Running, method: &str, path: &str, lines: &[&str]) -> Reply {
    let body: &[u8] = if method == "POST" { br#"{"prompt":"a","tokens":[1],"max_tokens":1}"# } else { b"" };
    server.request(method, path, &[lines, &[JSON]].concat(), body)
}

/// vLLM CVE-2025-59425 (API key check), and vLLM's routes that require no key.
///
/// All routes require a key, except those that reveal nothing.
#[test]
fn all_routes_except_health_and_the_page_require_a_key() {
    let server = start_with_keys();
    let mut public = Vec::new();
    for route in ROUTES {
        let path = route.path.replace("{id}", "tiny");
        for lines in [
            &[][..],
            &["Authorization: Bearer wrong"],
            &["Authorization: Bearer "],
            &["Authorization: first-key"],
            &[KEY, KEY],
        ] {
            let reply = ask(&server, route.method, &path, lines);
            if route.needs_key {
                reply.refusal(401);
                assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
                assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
            } else {
                assert_eq!(reply.status, 200, "{path}");
            }
        }
        for line in [KEY, "authorization: bearer second-key"] {
            let status = ask(&server, route.method, &path, &[line]).status;
            assert!(status == 200 || status == 400, "{path} with a key: {status}");
        }
        public.extend((!route.needs_key).then_some(route.path));
    }
    assert_eq!(public, ["/", "/health", "/v1/health"]);
    for file in ["/page.css", "/page.js"] {
        assert_eq!(server.get(file).status, 200, "{file}");
    }
}

/// vLLM CVE-2026-48746: a header changes the path that the key check sees.
#[test]
fn path_spellings_do_not_bypass_the_key_check() {
    let server = start_with_keys();
    let spellings = [
        "//v1/models",
        "/v1/models/",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/v1/%6dodels",
        "/V1/MODELS",
        "/v1/models?x=/health",
        "/v1/models;/health",
        "http://localhost/v1/models",
        "http://localhost/health/../v1/models",
        "/page.js/../v1/models",
        "/nothing",
    ];
    for path in spellings {
        ask(&server, "GET", path, &[]).refusal(401);
    }
    for line in [
        "Host: localhost/health?",
        "X-Forwarded-Prefix: /health",
        "X-Original-URL: /health",
        "X-Rewrite-URL: /health",
    ] {
        let status = ask(&server, "GET", "/v1/models", &[line]).status;
        assert!(status == 401 || status == 400, "{line}: {status}");
    }
    for method in ["HEAD", "OPTIONS", "TRACE", "get"] {
        assert_eq!(server.request(method, "/v1/models", &[], b"").status, 401, "{method}");
    }
}

#[test]
fn server_without_keys_accepts_any_authorization() {
    let server = start();
    for line in ["Authorization: Bearer ", "Authorization: Bearer", "Authorization: Bearer anything"] {
        assert_eq!(ask(&server, "GET", "/v1/models", &[line]).status, 200);
    }
}

/// Keys do not share cached prefixes; otherwise, response times would reveal others' prompts.
#[test]
fn keys_do_not_share_cached_prefixes() {
    let server = start_with(|options| {
        options.keys = vec!["first-key".into(), "second-key".into()];
        options.prefill_chunk = 16;
        options.api.prompt_tokens_details = true;
    });
    let prompt: Vec<u32> = (1..40).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
    let cached = |key: &str| {
        let reply = server.request("POST", "/v1/completions", &[JSON, key], body.as_bytes());
        reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(KEY), 0);
    assert_eq!(cached("Authorization: Bearer second-key"), 0);
    assert!(cached(KEY) >= 16, "a key reuses its own prefixes");
}

/// CVE-2026-34756, CVE-2024-8939: no limit on the number of completions.
#[test]
fn excessive_requests_are_rejected() {
    let server = start_with(|options| (options.api.limits.max_n, options.api.limits.max_prompts) = (4, 2));
    for body in [
        json!({"n": 5}),
        json!({"best_of": 5}),
        json!({"n": 1_000_000_000}),
        json!({"prompt": ["a", "b", "c"]}),
        json!({"logprobs": 1_000_000}),
        json!({"stop": vec!["a"; 1000]}),
        json!({"max_tokens": 1_000_000_000}),
    ] {
        server.post("/v1/completions", &body).refusal(400);
    }
    assert_eq!(
        server.post("/v1/completions", &json!({"prompt": ["a", "b"], "n": 4, "max_tokens": 2})).status,
        200
    );
}

/// CVE-2024-8768, CVE-2026-44223, CVE-2026-21869: engine crashes.
///
/// Empty prompts, penalties and negative numbers caused the crashes.
#[test]
fn unusual_requests_do_not_crash_the_engine() {
    let server = start();
    for body in [
        json!({"prompt": ""}),
        json!({"prompt": null}),
        json!({"prompt": [""]}),
        json!({"prompt": ["", ""]}),
        json!({"max_tokens": 0}),
        json!({"prompt": "", "echo": true, "max_tokens": 0, "logprobs": 0}),
        json!({"frequency_penalty": 2, "presence_penalty": -2}),
        json!({"repetition_penalty": 1000}),
        json!({"repetition_penalty": 1e-300}),
        json!({"logit_bias": {"0": 100, "1": -100}}),
        json!({"temperature": 1e-300}),
        json!({"top_p": 0}),
        json!({"top_p": 5e-324}),
        json!({"top_k": 1}),
        json!({"min_p": 1}),
        json!({"typical_p": 1e-300}),
        json!({"seed": i64::MIN}),
        json!({"stop": "<|endoftext|>"}),
        json!({"min_tokens": 16}),
        json!({"no_repeat_ngram_size": 1}),
    ] {
        let reply = server.post("/v1/completions", &body);
        assert!(matches!(reply.status, 200 | 400), "{body}: {}", reply.text());
    }
    assert_eq!(server.metric("gpt2_engine_panics_total"), 0.0);
    assert_eq!(server.get("/health").status, 200);
}

/// ollama CVE-2024-28224: DNS rebinding. llama.cpp: requests from any web page.
#[test]
fn foreign_pages_cannot_use_a_local_server() {
    let server = start();
    let refused = [
        &["Host: evil.example"][..],
        &["Host: evil.example:80", "Origin: http://evil.example:80"],
        &["Origin: http://evil.example"],
        &["Origin: null"],
        &["Origin: http://localhost:1"],
        &["Origin: http://127.0.0.1.evil.example"],
    ];
    for lines in refused {
        for (method, path) in [
            ("GET", "/"),
            ("GET", "/health"),
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("OPTIONS", "/v1/completions"),
        ] {
            let reply = ask(&server, method, path, lines);
            reply.refusal(403);
            assert_eq!(reply.header("access-control-allow-origin"), None);
        }
    }
    // An HTML form on another page can send this content type without a preflight.
    server
        .request("POST", "/v1/completions", &["Content-Type: text/plain"], br#"{"prompt":"a"}"#)
        .refusal(415);
    let own = format!("Origin: {}", server.url());
    let host = format!("Host: {}", server.address);
    assert_eq!(ask(&server, "POST", "/v1/completions", &[&own, &host]).status, 200);
}

#[test]
fn only_allowed_origins_get_cors_headers() {
    let server = start_with(|options| {
        options.cors_origins = vec!["https://app.example".into()];
        options.keys = vec!["first-key".into()];
    });
    let origin = "Origin: https://app.example";
    let preflight = [
        origin,
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization, content-type",
    ];
    let reply = server.request("OPTIONS", "/v1/completions", &preflight, b"");
    assert_eq!(
        (reply.status, reply.header("access-control-allow-origin")),
        (204, Some("https://app.example"))
    );
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization, content-type"));
    assert_eq!(reply.header("access-control-allow-methods"), Some("GET, POST"));
    assert_eq!(reply.header("access-control-allow-credentials"), None);
    let reply = ask(&server, "POST", "/v1/completions", &[origin, KEY]);
    assert_eq!(
        (reply.status, reply.header("access-control-allow-origin")),
        (200, Some("https://app.example"))
    );
    assert_eq!(reply.header("vary"), Some("Origin"));
    // Errors have the CORS header too, so that the page can read them.
    let reply = ask(&server, "POST", "/v1/completions", &[origin]);
    assert_eq!(
        (reply.status, reply.header("access-control-allow-origin")),
        (401, Some("https://app.example"))
    );
    let other = ["Origin: https://other.example", preflight[1]];
    server.request("OPTIONS", "/v1/completions", &other, b"").refusal(403);
}

/// ollama CVE-2024-37032, CVE-2026-7020 and CVE-2026-7482, TGI CVE-2026-0599: files and addresses.
#[test]
fn files_and_urls_in_requests_are_never_opened() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("http://{}/x", listener.local_addr().unwrap());
    let server = start();
    for name in [url.as_str(), "file:///etc/passwd", "../../etc/passwd", "/etc/passwd"] {
        server.post("/v1/completions", &json!({"model": name})).refusal(404);
        let schema = json!({"guided_json": {"$ref": name}});
        server.post("/v1/completions", &schema).refusal(400);
    }
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        ErrorKind::WouldBlock,
        "the server opened a connection"
    );
    for path in
        ["/api/pull", "/api/create", "/api/push", "/models/load", "/v1/load_lora_adapter", "/lora-adapters"]
    {
        server.post(path, &json!({"model": "x"})).refusal(404);
    }
}

/// ollama, vLLM and TGI are open to the network by default.
#[test]
fn public_server_requires_a_key_or_no_auth() {
    for host in ["0.0.0.0", "::"] {
        let options = ServerOptions { host: host.into(), port: 0, ..ServerOptions::default() };
        let error = Server::bind(tiny(), options.clone()).err().unwrap();
        assert!(matches!(error, ServerError::NoKey { .. }) && error.is_usage(), "{error}");
        let options = ServerOptions { no_auth: true, host: "0.0.0.0".into(), ..options };
        Server::bind(tiny(), options).unwrap();
    }
    let keys = vec!["key".into()];
    let server = start_with(|options| (options.host, options.keys) = ("0.0.0.0".into(), keys));
    // Clients may use any host name for a server that other machines can reach.
    let reply = server.request("GET", "/v1/models", &["Host: model.lan", "Authorization: Bearer key"], b"");
    assert_eq!(reply.status, 200);
}

#[test]
fn keys_that_do_not_fit_a_header_are_rejected() {
    for key in ["", "a b", "ключ", "a\nb", &"k".repeat(257)] {
        let options = ServerOptions { keys: vec!["good".into(), key.into()], ..ServerOptions::default() };
        let error = Server::bind(tiny(), options).err().unwrap();
        assert!(error.is_usage() && error.to_string().contains("key 2"), "{error}");
        assert!(key.is_empty() || !error.to_string().contains(key), "{error}");
    }
}

#[test]
fn request_ids_are_sanitized() {
    let server = start();
    let id = |line: &str| ask(&server, "GET", "/health", &[line]).header("x-request-id").unwrap().to_owned();
    assert_eq!(id("X-Request-Id: abc-123"), "abc-123");
    assert_eq!(id("X-Request-Id: a b\tc\u{e9}d"), "abcd");
    assert_eq!(id(&format!("X-Request-Id: {}", "x".repeat(500))), "x".repeat(64));
    assert!(id("X-Request-Id: \u{e9}").starts_with("req-"));
    assert_ne!(id("X: y"), id("X: y"));
}

#[test]
fn metric_labels_never_come_from_requests() {
    let server = start();
    for path in ["/evil-path", "/v1/models/evil-name", "/health?evil-query"] {
        server.request("EVIL", path, &["X-Request-Id: evil-id"], b"");
        server.get(path);
    }
    let reply = server.get("/metrics");
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    assert_eq!((reply.status, reply.header("content-type")), (200, Some(kind)));
    let text = reply.text();
    assert!(!text.to_lowercase().contains("evil"), "{text}");
    assert!(text.contains("gpt2_requests_total{route=\"other\",code=\"404\"}"), "{text}");
    assert!(text.contains("gpt2_requests_total{route=\"/v1/models/{id}\",code=\"404\"}"), "{text}");
}

#[test]
fn page_has_a_strict_policy_and_can_be_disabled() {
    let server = start();
    let reply = server.get("/");
    assert_eq!(reply.status, 200);
    let policy = reply.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(reply.header("referrer-policy"), Some("no-referrer"));
    let etag = format!("If-None-Match: {}", reply.header("etag").unwrap());
    assert_eq!(server.request("GET", "/", &[&etag], b"").status, 304);
    let server = start_with(|options| options.page = false);
    for path in ["/", "/page.js", "/page.css"] {
        server.get(path).refusal(404);
    }
}

#[test]
fn port_in_use_is_reported() {
    let server = start();
    let port = server.address.port();
    let options = ServerOptions { port, ..ServerOptions::default() };
    let error = Server::bind(tiny(), options).err().unwrap();
    assert!(!error.is_usage());
    let expected = format!("port {port} on 127.0.0.1 is in use; stop the program that listens there");
    assert!(error.to_string().starts_with(&expected), "{error}");
}

#[cfg(unix)]
#[test]
fn unix_socket_is_private_and_replaces_a_stale_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gpt2.sock");
    let options = |path: &std::path::Path| ServerOptions {
        unix_socket: Some(path.to_owned()),
        ..ServerOptions::default()
    };
    // Leaves a stale socket behind, as a killed server does.
    drop(UnixListener::bind(&path).unwrap());
    let server = Server::bind(tiny(), options(&path)).unwrap();
    assert_eq!(server.address(), format!("unix:{}", path.display()));
    let running = run(server);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = Client::new(UnixStream::connect(&path).unwrap());
    client.send(&json_request("/v1/completions", &json!({"prompt": "a", "max_tokens": 2})));
    assert_eq!(client.reply().status, 200);
    client.send(&request("GET", "/health", &["Host: anything"], b""));
    assert_eq!(client.reply().status, 200);
    let in_use = Server::bind(tiny(), options(&path)).err().unwrap();
    assert!(matches!(in_use, ServerError::SocketInUse { .. }), "{in_use}");
    running.handle.stop();
    running.join().unwrap();
    assert!(!path.exists(), "a stopped server removes its socket");

    let file = folder.path().join("notes.txt");
    std::fs::write(&file, "mine").unwrap();
    let error = Server::bind(tiny(), options(&file)).err().unwrap();
    assert!(matches!(error, ServerError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    let missing = Server::bind(tiny(), options(&folder.path().join("no/such/folder"))).err().unwrap();
    assert!(matches!(missing, ServerError::Socket { .. }), "{missing}");
}

/// Model names are compared only as strings.
#[test]
fn model_is_served_only_under_its_names() {
    let server = start_model(tiny(), "owner/tiny", |options| {
        options.api.aliases = vec!["gpt-3.5-turbo-instruct".into()]
    });
    for name in ["owner/tiny", "gpt-3.5-turbo-instruct"] {
        assert_eq!(
            server.post("/v1/completions", &json!({"model": name, "max_tokens": 1})).status,
            200,
            "{name}"
        );
    }
    for path in ["/v1/models/owner/tiny", "/v1/models/owner%2Ftiny"] {
        assert_eq!(server.get(path).json()["id"], "owner/tiny");
    }
    server.get("/v1/models/tiny").refusal(404);
}
