//! What the operator of a server sets.

use std::path::PathBuf;
use std::time::Duration;

use gpt2_api::ApiOptions;

use crate::ServerError;

/// Longest key, in bytes: what is compared has one length.
pub(crate) const MAX_KEY: usize = 256;

/// What the operator of a server sets.
///
/// ```
/// use std::time::Duration;
/// use gpt2_server::{Limits, ServerOptions, Timeouts};
///
/// let mut options = ServerOptions {
///     port: 0,
///     parallel: 4,
///     keys: vec!["a-long-secret".into()],
///     timeouts: Timeouts { queue: Duration::from_secs(5), ..Timeouts::default() },
///     ..ServerOptions::default()
/// };
/// options.api.limits = Limits { max_prompts: 8, ..Limits::default() };
/// assert!(options.page && options.queue == 256);
/// ```
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The name or the address to listen on.
    pub host: String,
    /// The port; 0 takes any that is free.
    pub port: u16,
    /// A Unix socket to listen on instead.
    pub unix_socket: Option<PathBuf>,
    /// Texts that are made at once.
    pub parallel: usize,
    /// Prompts that wait; more are refused.
    pub queue: usize,
    /// Tokens whose keys and values are held; without, those of as many full contexts as `parallel` says.
    pub kv_tokens: Option<usize>,
    /// Tokens of a prompt that are computed between two steps of the running texts.
    pub prefill_chunk: usize,
    /// Requests show one of these keys. Without any, all are served.
    pub keys: Vec<String>,
    /// Whether a server that other machines reach may be without a key.
    pub no_auth: bool,
    /// Names that this server is reached by, beside `localhost`, `127.0.0.1` and `[::1]`.
    pub allow_hosts: Vec<String>,
    /// Origins of pages of other servers that may use this one, such as `https://example.com`.
    pub cors_origins: Vec<String>,
    /// Whether there is a page at `/`.
    pub page: bool,
    /// The model's names, its chat template and the limits of requests.
    pub api: ApiOptions,
    /// Connections at once; more wait until they are accepted. Without, room for twice what runs and waits.
    pub max_connections: Option<usize>,
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// How long the texts of a request may take to make; those that take longer end there.
    pub max_time: Option<Duration>,
    /// How long is waited for what.
    pub timeouts: Timeouts,
    /// Whether a line on standard error tells of every request: who, what, how long, never a text.
    pub log_requests: bool,
    /// Whether SIGTERM and SIGINT end the server.
    pub signals: bool,
}

/// How long is waited for what.
///
/// A field of [`ServerOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For the whole head of a request.
    pub header: Duration,
    /// For the whole body of a request.
    pub body: Duration,
    /// For the next request of a connection.
    pub idle: Duration,
    /// For a client that does not take what is sent to it.
    pub write: Duration,
    /// For a request in the queue.
    pub queue: Duration,
    /// For the first token of a stream, before its head is sent.
    pub head: Duration,
    /// Between two signs of life in a stream that has nothing to tell.
    pub ping: Duration,
    /// For running requests, once the server is told to end.
    pub drain: Duration,
    /// For what a client still sends when its request is refused.
    pub linger: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            header: seconds(10),
            body: seconds(30),
            idle: seconds(60),
            write: seconds(30),
            queue: seconds(60),
            head: seconds(10),
            ping: seconds(15),
            drain: seconds(25),
            linger: seconds(2),
        }
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8080,
            unix_socket: None,
            parallel: 16,
            queue: 256,
            kv_tokens: None,
            prefill_chunk: 32,
            keys: Vec::new(),
            no_auth: false,
            allow_hosts: Vec::new(),
            cors_origins: Vec::new(),
            page: true,
            api: ApiOptions::default(),
            max_connections: None,
            max_body: 4 << 20,
            max_time: None,
            timeouts: Timeouts::default(),
            log_requests: false,
            signals: false,
        }
    }
}

impl ServerOptions {
    /// Connections at once. Clients that are refused for want of room in the queue need a connection to be told so.
    pub(crate) fn connections(&self) -> usize {
        let waiting = self.queue.saturating_add(self.parallel).saturating_mul(2);
        self.max_connections.unwrap_or_else(|| waiting.saturating_add(64).clamp(256, 4096))
    }

    /// Checks what can be checked without a model.
    pub(crate) fn check(&self) -> Result<(), ServerError> {
        let positive = [
            ("parallel", self.parallel),
            ("queue", self.queue),
            ("prefill_chunk", self.prefill_chunk),
            ("max_body", self.max_body),
            ("max_connections", self.connections()),
            ("kv_tokens", self.kv_tokens.unwrap_or(1)),
        ];
        if let Some((option, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(ServerError::Option { option, expected: "at least 1".into(), found: "0".into() });
        }
        self.check_keys()?;
        self.check_origins()
    }

    fn check_keys(&self) -> Result<(), ServerError> {
        let is_key =
            |key: &str| (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
        // Which one it is, not what it is: this is read by others.
        match self.keys.iter().position(|key| !is_key(key)) {
            None => Ok(()),
            Some(index) => Err(ServerError::Option {
                option: "keys",
                expected: format!("1 to {MAX_KEY} visible ASCII characters without a space"),
                found: format!("something else in key {}", index + 1),
            }),
        }
    }

    fn check_origins(&self) -> Result<(), ServerError> {
        let is_origin = |origin: &str| {
            let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            rest.is_some_and(|authority| {
                !authority.is_empty() && authority.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
            })
        };
        match self.cors_origins.iter().find(|origin| !is_origin(origin)) {
            None => Ok(()),
            Some(origin) => Err(ServerError::Option {
                option: "cors_origins",
                expected: "an origin without a path, such as https://example.com".into(),
                found: format!("{origin:?}"),
            }),
        }
    }
}
