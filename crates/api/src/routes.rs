//! Server routes: one list for request routing and for the OpenAPI description.

use crate::ApiError;

/// OpenAPI description of all routes.
///
/// It is generated from [`ROUTES`], the request fields and `answers.json`. Regenerate it with
/// `WRITE_OPENAPI=1 cargo test -p candle-gpt2-api description`.
///
/// ```
/// assert!(candle_gpt2_api::OPENAPI.contains(r#""/v1/completions""#));
/// ```
pub const OPENAPI: &str = include_str!("openapi.json");

/// Handler of a route.
///
/// See [`find_route`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// Web page.
    Page,
    /// Prompt completions.
    Completions,
    /// Chat completions.
    ChatCompletions,
    /// Text or token classification.
    Classify,
    /// Activations for a prompt.
    Activations,
    /// Text embeddings.
    Embeddings,
    /// Model list.
    Models,
    /// Information about one model.
    Model,
    /// Text to tokens.
    Tokenize,
    /// Tokens to text.
    Detokenize,
    /// Tokenizer information.
    TokenizerInfo,
    /// Health check.
    Health,
    /// Counters and histograms.
    Metrics,
    /// Program version.
    Version,
    /// Server settings.
    Props,
    /// OpenAPI description.
    OpenApi,
    /// Attention patterns for a text.
    LookAttention,
    /// Logit lens for a text.
    LookLens,
    /// Computation steps of one attention head.
    LookHead,
    /// Next-token candidates for a text.
    LookNext,
    /// Strongest features for each token in a text.
    LookFeatures,
    /// Activations of one feature in a text.
    LookFeature,
    /// Attribution graph for the next token of a text.
    LookGraph,
}

/// Method and path, with their handler.
///
/// [`find_route`] returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// `GET` or `POST`; a `GET` route also answers `HEAD`.
    pub method: &'static str,
    /// Path, with `{id}` for the variable part.
    pub path: &'static str,
    /// Handler of the route.
    pub endpoint: Endpoint,
    /// Whether the route requires the API key, if the server has one.
    pub needs_key: bool,
}

const fn open(method: &'static str, path: &'static str, endpoint: Endpoint) -> Route {
    Route { method, path, endpoint, needs_key: false }
}

const fn keyed(method: &'static str, path: &'static str, endpoint: Endpoint) -> Route {
    Route { method, path, endpoint, needs_key: true }
}

/// All routes.
///
/// See [`find_route`] for one of them.
pub const ROUTES: &[Route] = &[
    open("GET", "/", Endpoint::Page),
    keyed("POST", "/v1/completions", Endpoint::Completions),
    keyed("POST", "/v1/chat/completions", Endpoint::ChatCompletions),
    keyed("POST", "/v1/classify", Endpoint::Classify),
    keyed("POST", "/classify", Endpoint::Classify),
    keyed("POST", "/v1/embeddings", Endpoint::Embeddings),
    keyed("POST", "/v1/activations", Endpoint::Activations),
    keyed("GET", "/v1/models", Endpoint::Models),
    keyed("GET", "/v1/models/{id}", Endpoint::Model),
    keyed("POST", "/tokenize", Endpoint::Tokenize),
    keyed("POST", "/detokenize", Endpoint::Detokenize),
    keyed("GET", "/tokenizer_info", Endpoint::TokenizerInfo),
    open("GET", "/health", Endpoint::Health),
    open("GET", "/v1/health", Endpoint::Health),
    keyed("GET", "/metrics", Endpoint::Metrics),
    keyed("GET", "/version", Endpoint::Version),
    keyed("GET", "/props", Endpoint::Props),
    keyed("GET", "/openapi.json", Endpoint::OpenApi),
    keyed("POST", "/look/attention", Endpoint::LookAttention),
    keyed("POST", "/look/lens", Endpoint::LookLens),
    keyed("POST", "/look/head", Endpoint::LookHead),
    keyed("POST", "/look/next", Endpoint::LookNext),
    keyed("POST", "/look/features", Endpoint::LookFeatures),
    keyed("POST", "/look/feature", Endpoint::LookFeature),
    keyed("POST", "/look/graph", Endpoint::LookGraph),
];

/// Paths in llama.cpp, Ollama and TGI, each with the equivalent path on this server.
const FOREIGN_PATHS: [(&str, &str); 10] = [
    ("/completion", "/v1/completions"),
    ("/completions", "/v1/completions"),
    ("/generate", "/v1/completions"),
    ("/generate_stream", "/v1/completions"),
    ("/api/generate", "/v1/completions"),
    ("/api/chat", "/v1/chat/completions"),
    ("/chat/completions", "/v1/chat/completions"),
    ("/embedding", "/v1/embeddings"),
    ("/api/embed", "/v1/embeddings"),
    ("/api/tags", "/v1/models"),
];

/// Finds a request's route and the part of the path that matches `{id}`, still percent-encoded.
///
/// # Errors
/// 404 for an unknown path, 405 for the wrong method.
///
/// ```
/// use candle_gpt2_api::{Endpoint, ROUTES, find_route};
///
/// let (route, id) = find_route("GET", "/v1/models/gpt2")?;
/// assert_eq!((route.endpoint, id), (Endpoint::Model, Some("gpt2")));
/// assert_eq!(find_route("GET", "/v1/completions").map_err(|error| error.status()), Err(405));
/// assert!(ROUTES.iter().filter(|route| !route.needs_key).any(|route| route.endpoint == Endpoint::Health));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn find_route<'path>(
    method: &str,
    path: &'path str,
) -> Result<(&'static Route, Option<&'path str>), ApiError> {
    let mut matches = ROUTES.iter().filter_map(|route| match route.path.strip_suffix("{id}") {
        None => (route.path == path).then_some((route, None)),
        // A model's name may contain a slash.
        Some(before) => path.strip_prefix(before).filter(|id| !id.is_empty()).map(|id| (route, Some(id))),
    });
    let Some((route, id)) = matches.next() else {
        let equivalent = FOREIGN_PATHS
            .iter()
            .find(|(foreign, _)| *foreign == path)
            .map(|(_, equivalent)| format!("use {equivalent}, or "));
        let equivalent = equivalent.unwrap_or_default();
        let message = format!("not found; {equivalent}see /openapi.json for the available endpoints");
        return Err(ApiError::new(404, message));
    };
    if route.method == method || (route.method == "GET" && method == "HEAD") {
        return Ok((route, id));
    }
    let allow = if route.method == "GET" { "GET, HEAD" } else { route.method };
    let message = format!("{} accepts only {allow}", route.path);
    Err(ApiError::new(405, message).with_allow(allow))
}
