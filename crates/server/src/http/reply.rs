//! Complete responses.

use candle_gpt2_api::ApiError;
use hyper::body::Bytes;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};

use super::body::Content;

pub(crate) fn json(body: impl Into<Bytes>) -> Response<Content> {
    text("application/json", body)
}

pub(crate) fn text(content_type: &'static str, body: impl Into<Bytes>) -> Response<Content> {
    let mut response = Response::new(Content::Whole(body.into()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(crate) fn empty(status: StatusCode) -> Response<Content> {
    let mut response = Response::new(Content::Whole(Bytes::new()));
    *response.status_mut() = status;
    response
}

pub(crate) fn refusal(error: &ApiError) -> Response<Content> {
    let mut response = json(error.to_json());
    *response.status_mut() =
        StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    if let Some(allow) = error.allow() {
        headers.insert(ALLOW, HeaderValue::from_static(allow));
    }
    if let Some(time) = error.retry_after() {
        // The header takes whole seconds; rounds up to at least 1.
        headers.insert(
            RETRY_AFTER,
            HeaderValue::from(time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0)).max(1)),
        );
    }
    if error.status() == 401 {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
