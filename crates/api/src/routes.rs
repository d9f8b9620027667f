//! The paths of the server: one list, by which requests are routed, and of which the OpenAPI description is made.

use crate::ApiError;

/// The OpenAPI description of all routes, made of [`ROUTES`], of the fields of requests and of `answers.json`; `WRITE_OPENAPI=1
/// cargo test -p candle-gpt2-api description` writes it anew.
///
/// ```
/// assert!(candle_gpt2_api::OPENAPI.contains(r#""/v1/completions""#));
/// ```
pub const OPENAPI: &str = include_str!("openapi.json");

/// The handler of a route.
///
/// A field of a [`Route`], see [`find_route`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// The page.
    Page,
    /// Continues prompts.
    Completions,
    /// Answers a conversation.
    ChatCompletions,
    /// Labels texts.
    Classify,
    /// Shows the inside of the model on a prompt.
    Activations,
    /// Makes vectors of texts.
    Embeddings,
    /// Lists the models.
    Models,
    /// Describes one model.
    Model,
    /// Text to tokens.
    Tokenize,
    /// Tokens to text.
    Detokenize,
    /// Describes the tokenizer.
    TokenizerInfo,
    /// Whether requests are served.
    Health,
    /// Counters and histograms.
    Metrics,
    /// The version of the program.
    Version,
    /// What the server is set to.
    Props,
    /// The OpenAPI description.
    OpenApi,
    /// Attention of a text.
    LookAttention,
    /// The lens on a text.
    LookLens,
    /// The steps of one head.
    LookHead,
    /// What may follow a text.
    LookNext,
    /// The strongest features of each token of a text.
    LookFeatures,
    /// One feature in a text.
    LookFeature,
    /// The attribution graph of what follows a text.
    LookGraph,
}

/// A path with a method.
///
/// Given by [`find_route`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// `GET` or `POST`; a route that answers `GET` answers `HEAD` too.
    pub method: &'static str,
    /// The path, with `{id}` for the part that differs.
    pub path: &'static str,
    /// What it does.
    pub endpoint: Endpoint,
    /// Whether it asks for the key, if the server has one.
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

/// Paths of llama.cpp, Ollama and TGI, and what has their work here.
const ELSEWHERE: [(&str, &str); 10] = [
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

/// The route of a request, with the part of the path that `{id}` stands for, as it is written.
///
/// # Errors
/// 404 for a path that is none of these, 405 for another method.
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
        // A model's name may have a slash in it.
        Some(before) => path.strip_prefix(before).filter(|id| !id.is_empty()).map(|id| (route, Some(id))),
    });
    let Some((route, id)) = matches.next() else {
        let here = ELSEWHERE
            .iter()
            .find(|(elsewhere, _)| *elsewhere == path)
            .map(|(_, here)| format!("use {here}; "));
        let here = here.unwrap_or_default();
        let message =
            format!("there is nothing at this path; {here}/openapi.json describes those that there are");
        return Err(ApiError::new(404, message));
    };
    if route.method == method || (route.method == "GET" && method == "HEAD") {
        return Ok((route, id));
    }
    let allow = if route.method == "GET" { "GET, HEAD" } else { route.method };
    let message = format!("{} takes {allow}", route.path);
    Err(ApiError::new(405, message).with_allow(allow))
}
