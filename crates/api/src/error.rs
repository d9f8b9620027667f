//! Errors in OpenAI's format: `{"error":{"message","type","param","code"}}`.
//!
//! All four keys are always present.

use std::time::Duration;

use serde_json::json;
use thiserror::Error;

/// Retry delay while all grammar or template workers are busy; most jobs take milliseconds.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Reason why a request failed.
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
    /// Internal cause.
    cause: Option<String>,
}

impl ApiError {
    /// Creates an error; its kind is derived from the HTTP status.
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

    /// Creates an error for an invalid request (status 400).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    /// Creates an error for a server at capacity, with the delay after which to retry.
    ///
    /// The status is 503, or 429 if there are too many requests.
    pub fn busy(status: u16, message: impl Into<String>, code: &'static str, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(status, message).with_code(code) }
    }

    /// Creates an internal error (status 500) for a cause that has already been logged.
    ///
    /// The client receives no details.
    pub fn internal() -> Self {
        Self::new(500, "internal error; see the server's log for the cause")
    }

    /// Creates an internal error with a cause for the log; see [`ApiError::take_cause`].
    pub fn failed(cause: impl std::fmt::Display) -> Self {
        Self { cause: Some(cause.to_string()), ..Self::internal() }
    }

    /// Adds the path of the field at fault, such as `prompt[3]`.
    pub fn with_param(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// Adds a machine-readable error code.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Adds the methods that the path supports.
    pub(crate) fn with_allow(self, allow: &'static str) -> Self {
        Self { allow: Some(allow), ..self }
    }

    /// HTTP status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Error kind, derived from the status and sent as `type`.
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

    /// Path of the invalid field.
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// Machine-readable error code.
    pub fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// Internal cause, for logs and for the model's owner; never part of a response.
    pub fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    /// Removes and returns [`ApiError::cause`], so that the cause is logged only once.
    pub fn take_cause(&mut self) -> Option<String> {
        self.cause.take()
    }

    /// Value of the `Allow` header.
    pub fn allow(&self) -> Option<&'static str> {
        self.allow
    }

    /// Delay after which to retry, sent in the `Retry-After` header.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Response body, or an event in a stream.
    pub fn to_json(&self) -> String {
        let (message, kind, param, code) = (&self.message, self.kind(), &self.param, self.code);
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } }).to_string()
    }
}

/// Keeps the internal cause out of the response.
impl From<candle_core::Error> for ApiError {
    fn from(error: candle_core::Error) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_error_has_a_retry_after() {
        let error = ApiError::busy(503, "no memory", "busy", Duration::from_secs(2));
        assert_eq!((error.status(), error.kind(), error.code()), (503, "unavailable_error", Some("busy")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn cause_is_never_sent_and_can_be_taken_once() {
        let mut error = ApiError::failed("a secret");
        assert!(!error.to_json().contains("secret"));
        assert_eq!(error.take_cause().as_deref(), Some("a secret"));
        assert_eq!(error, ApiError::internal());
    }
}
