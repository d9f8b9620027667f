//! Request routing: access control, route lookup and dispatch.

use std::convert::Infallible;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, Endpoint, Reply, Work};
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};

use super::accept::prefers;
use super::access::{Origin, is_preflight};
use super::body::{Answer, Content};
use super::receive::{self, Received};
use super::record::{Accepted, Record};
use super::slots::State;
use super::{Caller, Connection, Phase, Shared, complete, reply};
use crate::analyses::Analyses;
use crate::busy::{connections_full, draining};
use crate::fault::{blocking, caught};
use crate::page;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum length of a request id that the client supplies.
const MAX_ID: usize = 64;
/// Metrics label for an unknown path.
const NO_ROUTE: &str = "other";

/// Returns a method's name for the log.
fn method_name(method: &Method) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("other")
}

/// Answers a request.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    connection.activity.enter(State::Answering);
    let (head, body) = request.into_parts();
    let id = request_id(&head.headers, &shared);
    let record = Record::new(
        &shared.metrics,
        shared.options.log_requests,
        id,
        method_name(&head.method),
        route_name(&head, &shared),
    );
    // If a body is not read to its end, the connection cannot receive another request.
    let mut body = Some(body).filter(|body| !body.is_end_stream());
    let origin = shared.access.check_origin(&head.headers);
    let response = match &origin {
        Ok(origin) => {
            caught(record.id(), serve(&shared, &connection, &record, &head, origin, &mut body)).await
        }
        Err(error) => Err(error.clone()),
    };
    let mut response = response.unwrap_or_else(|error| reply::refusal(&error));
    record.stats().set_code(response.status().as_u16());
    // Close after a chunked body. hyper hides a Content-Length next to Transfer-Encoding, and a proxy that
    // trusts the length would see a different end.
    let is_chunked = head.headers.contains_key(header::TRANSFER_ENCODING);
    let must_close = body.is_some() || is_chunked || connection.is_surplus || shared.is_draining();
    finish(response.headers_mut(), record.id(), &shared, origin.ok().as_ref(), must_close);
    let activity = Arc::clone(&connection.activity);
    Ok(response.map(|content| Answer::new(content, activity, record)))
}

async fn serve(
    shared: &Arc<Shared>,
    connection: &Connection,
    record: &Record,
    head: &Parts,
    origin: &Origin,
    body: &mut Option<Incoming>,
) -> Result<Response<Content>, ApiError> {
    shared.access.check_host(head)?;
    if is_preflight(head)
        && let Origin::Shared(_) = origin
    {
        return Ok(preflight(&head.headers));
    }
    let path = head.uri.path();
    if let Some(file) = page_file(shared, path) {
        return serve_file(file, head);
    }
    let found = candle_gpt2_api::find_route(head.method.as_str(), path);
    // Only clients with a key learn which paths exist.
    let needs_key = !matches!(&found, Ok((route, _)) if !route.needs_key);
    let key = if needs_key { shared.access.check_key(&head.headers)? } else { 0 };
    let (route, rest) = found?;
    if connection.is_surplus && !matches!(route.endpoint, Endpoint::Health | Endpoint::Metrics) {
        shared.metrics.reject("connections_full");
        return Err(connections_full());
    }
    let caller = Caller {
        id: Arc::clone(record.id()),
        shared: Arc::clone(shared),
        peer: Arc::clone(&connection.peer),
        stats: Arc::clone(record.stats()),
        key,
    };
    if route.method == "POST" {
        let received = match body.as_mut() {
            Some(body) => receive::read(&head.headers, body, shared, &connection.activity).await,
            None => Err(ApiError::invalid("the body is empty; send a JSON object")),
        }?;
        *body = None;
        let wants_file = prefers(&head.headers, complete::FILE, "application/json");
        return post(route.endpoint, received, wants_file, &caller).await;
    }
    get(route.endpoint, rest.unwrap_or_default(), &head.headers, &caller).await
}

async fn get(
    endpoint: Endpoint,
    rest: &str,
    headers: &HeaderMap,
    caller: &Caller,
) -> Result<Response<Content>, ApiError> {
    let shared = &caller.shared;
    let served = Arc::clone(&shared.served);
    Ok(match endpoint {
        Endpoint::Health if shared.is_draining() => return Err(draining()),
        Endpoint::Metrics => {
            // The text is valid in both formats. The older format treats the last line as a comment.
            let kind = match prefers(headers, "application/openmetrics-text", "text/plain") {
                true => "application/openmetrics-text; version=1.0.0; charset=utf-8",
                false => "text/plain; version=0.0.4; charset=utf-8",
            };
            reply::text(kind, shared.metrics.text())
        }
        Endpoint::Model => reply::json(candle_gpt2_api::model(rest, &shared.served)?),
        Endpoint::OpenApi => reply::text("application/json", candle_gpt2_api::OPENAPI),
        Endpoint::Page => return Err(ApiError::new(404, "this server has no page")),
        Endpoint::Health => reply::json(replied(served.read(endpoint, b"", None)?)?.json),
        // Describing the tokenizer may be slow, because the chat template may be long.
        _ => {
            let described = blocking(&caller.id, move || replied(served.read(endpoint, b"", None)?));
            reply::json(caller.until(Phase::Ending, described).await?.json)
        }
    })
}

/// Extracts the reply from an endpoint that needs no further work.
fn replied(work: Work) -> Result<Reply, ApiError> {
    match work {
        Work::Reply(reply) => Ok(reply),
        _ => Err(ApiError::failed("the endpoint returned unfinished work")),
    }
}

async fn post(
    endpoint: Endpoint,
    received: Received,
    wants_file: bool,
    caller: &Caller,
) -> Result<Response<Content>, ApiError> {
    let shared = &caller.shared;
    let id = &caller.id;
    if shared.is_draining() {
        shared.metrics.reject("draining");
        return Err(draining());
    }
    let Reply { json, warnings } = match endpoint {
        Endpoint::Completions | Endpoint::ChatCompletions | Endpoint::Activations => {
            return complete::answer(endpoint, received, wants_file, caller).await;
        }
        Endpoint::Tokenize | Endpoint::Detokenize => {
            let _accepted = Accepted::new(&shared.calls);
            let read = shared.threads.read(id, endpoint, received, None, replied);
            caller.until(Phase::Ending, read).await?
        }
        Endpoint::Classify
        | Endpoint::Embeddings
        | Endpoint::LookAttention
        | Endpoint::LookLens
        | Endpoint::LookHead
        | Endpoint::LookNext
        | Endpoint::LookFeatures
        | Endpoint::LookFeature
        | Endpoint::LookGraph => {
            let _accepted = Accepted::new(&shared.calls);
            let Shared { backend, served, looks, threads, metrics, .. } = &**shared;
            let analyses = Analyses { backend, served, limit: looks, threads, metrics };
            let count = |tokens| {
                caller.stats.add_prompt_tokens(tokens);
                shared.metrics.prompt_tokens.inc_by(tokens as u64);
            };
            caller.until(Phase::Ending, analyses.answer(endpoint, received, id, count)).await?
        }
        _ => return Err(ApiError::failed("the route has no handler")),
    };
    caller.log_warnings(&warnings);
    Ok(reply::json(json))
}

fn page_file(shared: &Shared, path: &str) -> Option<&'static page::PageFile> {
    if shared.options.page { page::file(path) } else { None }
}

fn serve_file(file: &'static page::PageFile, head: &Parts) -> Result<Response<Content>, ApiError> {
    if !matches!(head.method, Method::GET | Method::HEAD) {
        return Err(candle_gpt2_api::find_route(head.method.as_str(), "/")
            .err()
            .unwrap_or_else(|| ApiError::failed("the page route accepted another method")));
    }
    let known = head.headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let is_known = known.is_some_and(|tags| tags.split(',').any(|tag| tag.trim() == file.etag));
    let mut response = match is_known {
        true => reply::empty(StatusCode::NOT_MODIFIED),
        false => reply::text(file.content_type, file.body),
    };
    let headers = response.headers_mut();
    let constant = [
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::CACHE_CONTROL, "no-cache"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    headers.extend(constant.map(|(name, value)| (name, HeaderValue::from_static(value))));
    let etag = HeaderValue::from_str(&file.etag).map_err(ApiError::failed)?;
    headers.insert(header::ETAG, etag);
    Ok(response)
}

/// Responds to a CORS preflight from an allowed origin, allowing every requested header.
///
/// tower-http's CORS layer responds to `OPTIONS` on every path and rejects no origin.
fn preflight(asked: &HeaderMap) -> Response<Content> {
    let mut response = reply::empty(StatusCode::NO_CONTENT);
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// Sets the common response headers.
fn finish(headers: &mut HeaderMap, id: &str, shared: &Shared, origin: Option<&Origin>, must_close: bool) {
    headers.insert(header::SERVER, HeaderValue::from_static("gpt2"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
    if must_close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if shared.access.shares() {
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    }
    if let Some(Origin::Shared(origin)) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        let exposed = HeaderValue::from_static("x-request-id, retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
}

/// Request id: the visible ASCII characters of the client's own id, or a new id.
///
/// tower-http's layer accepts any id that the client sends.
fn request_id(headers: &HeaderMap, shared: &Shared) -> Arc<str> {
    let own = headers.get(REQUEST_ID).map(HeaderValue::as_bytes).unwrap_or_default();
    let visible = own.iter().copied().filter(u8::is_ascii_graphic).take(MAX_ID);
    let id: String = visible.map(char::from).collect();
    if id.is_empty() { shared.fresh_id() } else { id.into() }
}

/// Metrics label for a route; never contains the requested path.
fn route_name(head: &Parts, shared: &Shared) -> &'static str {
    let path = head.uri.path();
    if page_file(shared, path).is_some() {
        return "/";
    }
    let found = ["GET", "POST"].iter().find_map(|method| candle_gpt2_api::find_route(method, path).ok());
    found.map_or(NO_ROUTE, |(route, _)| route.path)
}
