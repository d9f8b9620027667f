//! Errors as OpenAI's clients read them: `{"error":{"message","type","param","code"}}`, always with the four keys.

use std::time::Duration;

use serde_json::json;
use thiserror::Error;

/// Time after which to retry a grammar or a template: usual ones take milliseconds.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request was not served.
///
/// ```
/// use candle_gpt2_api::ApiError;
///
/// let error = ApiError::invalid("temperature: expected a number").with_param("temperature");
/// assert_eq!((error.status(), error.kind()), (400, "invalid_request_error"));
/// assert_eq!(
///     error.to_json(),
///     r#"{"error":{"message":"temperature: expected a number","type":"invalid_request_error","param":"temperature","code":null}}"#
/// );
/// ```
#[derive(Debug, Clone, Error, PartialEq)]
#[error("{message}")]
pub struct ApiError {
    status: u16,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    allow: Option<&'static str>,
    retry_after: Option<Duration>,
    /// What went wrong inside.
    cause: Option<String>,
}

impl ApiError {
    /// An error with the HTTP status that tells its kind.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            allow: None,
            retry_after: None,
            cause: None,
        }
    }

    /// A request that is wrong: status 400.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    /// A request that this server has no room for at the moment, with the time after which it is worth trying again. The status is
    /// 503, or 429 if there are too many requests.
    pub fn busy(status: u16, message: impl Into<String>, code: &'static str, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(status, message).with_code(code) }
    }

    /// An internal error whose cause is in the log already: status 500. The client learns nothing more.
    pub fn internal() -> Self {
        Self::new(500, "the server failed to serve this request; its log says why")
    }

    /// An internal error and its cause, which belongs in a log, see [`ApiError::take_cause`].
    pub fn failed(cause: impl std::fmt::Display) -> Self {
        Self { cause: Some(cause.to_string()), ..Self::internal() }
    }

    /// The same, about a field: its path, such as `prompt[3]`.
    pub fn with_param(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// The same with a code by which programs distinguish errors.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The same with the methods that the path knows.
    pub(crate) fn with_allow(self, allow: &'static str) -> Self {
        Self { allow: Some(allow), ..self }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The kind of error, by its status: the value of `type`.
    pub fn kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The path of the field that is wrong.
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The code that programs tell errors apart by.
    pub fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// The internal cause, which answers do not contain: for logs, and for the owner of the model.
    pub fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    /// Takes [`ApiError::cause`] out, so that it is logged once.
    pub fn take_cause(&mut self) -> Option<String> {
        self.cause.take()
    }

    /// What belongs into the header `Allow`.
    pub fn allow(&self) -> Option<&'static str> {
        self.allow
    }

    /// The time after which it is worth trying again: the header `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The body of the answer, or an event of a stream.
    pub fn to_json(&self) -> String {
        let (message, kind, param, code) = (&self.message, self.kind(), &self.param, self.code);
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } }).to_string()
    }
}

/// Nothing internal is reported.
impl From<candle_core::Error> for ApiError {
    fn from(error: candle_core::Error) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_says_when_to_try_again() {
        let error = ApiError::busy(503, "no room", "busy", Duration::from_secs(2));
        assert_eq!((error.status(), error.kind(), error.code()), (503, "unavailable_error", Some("busy")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn a_cause_is_taken_once_and_never_sent() {
        let mut error = ApiError::failed("a secret");
        assert!(!error.to_json().contains("secret"));
        assert_eq!(error.take_cause().as_deref(), Some("a secret"));
        assert_eq!(error, ApiError::internal());
    }
}
