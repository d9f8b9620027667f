//! Server options.

use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::time::Duration;

use candle_gpt2::Gpt2Config;
use candle_gpt2_api::ApiOptions;
use candle_gpt2_engine::process::open_files;
use secrecy::{ExposeSecret, SecretString};

use crate::ServerError;

/// Maximum key length in bytes; keys are padded to this length for comparison.
pub(crate) const MAX_KEY: usize = 256;
/// Bounds of numeric options.
///
/// The minimum for `max_body` is still enough for a request with a short prompt.
const BOUNDS: [(&str, usize, usize); 6] = [
    ("parallel", 1, 256),
    ("queue", 1, 65_536),
    ("kv_tokens", 1, 1 << 30),
    ("prefill_chunk", 1, 65_536),
    ("max_connections", 1, 65_536),
    ("max_body", 64, 1 << 30),
];
/// Number of connections accepted beyond the limit, mainly for health checks and metrics.
pub(crate) const RESERVE: usize = 16;
/// Number of open files in addition to the connections: for the reserve, the model and the runtime.
const OTHER_FILES: usize = RESERVE + 48;

/// Server options.
///
/// ```
/// use std::time::Duration;
/// use candle_gpt2_server::{Limits, ServerOptions, Timeouts};
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
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ServerOptions {
    /// Host name or address to listen on; an address that other machines can reach requires a key
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOST", default_value_t = ServerOptions::default().host))]
    pub host: String,
    /// Port to listen on; 0 picks a free one, which is shown in the first line of standard output
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = ServerOptions::default().port, allow_negative_numbers = true))]
    pub port: u16,
    /// Unix socket to listen on instead of a port; accessible only to this user
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"]))]
    pub unix_socket: Option<PathBuf>,
    /// Maximum number of completions to generate at once
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = ServerOptions::default().parallel, allow_negative_numbers = true, value_parser = between("parallel")))]
    pub parallel: usize,
    /// Maximum number of waiting prompts; when the queue is full, requests get status 429
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = ServerOptions::default().queue, allow_negative_numbers = true, value_parser = between("queue")))]
    pub queue: usize,
    /// KV cache size in tokens, for prompts and completions together [default: a full context for each
    /// of --parallel]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true, value_parser = between("kv_tokens")))]
    pub kv_tokens: Option<usize>,
    /// Maximum number of prompt tokens to prefill between two decode steps; half as many while few
    /// completions are running, four times as many while none is running
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = ServerOptions::default().prefill_chunk, allow_negative_numbers = true, value_parser = between("prefill_chunk")))]
    pub prefill_chunk: usize,
    /// Maximum number of connections; above it, idle connections are closed, and if none is idle,
    /// requests get status 503 [default: enough for twice --parallel and --queue together]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true, value_parser = between("max_connections")))]
    pub max_connections: Option<usize>,
    /// Maximum size of a request body, in bytes
    #[cfg_attr(feature = "clap", arg(long, value_name = "BYTES", default_value_t = ServerOptions::default().max_body, allow_negative_numbers = true, value_parser = between("max_body")))]
    pub max_body: usize,
    /// Accepted API keys; if empty, requests need no key. `{:?}` hides the keys.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub keys: Vec<SecretString>,
    /// Require no key even if other machines can reach the server
    #[cfg_attr(feature = "clap", arg(long))]
    pub no_auth: bool,
    /// Additional host name under which a proxy or other machines reach the server; may be given more than
    /// once
    #[cfg_attr(feature = "clap", arg(long = "allow-host", value_name = "HOST"))]
    pub allow_hosts: Vec<String>,
    /// Origins of other servers' pages that may use this server, such as `https://example.com`.
    #[cfg_attr(
        feature = "clap",
        arg(
            long = "cors-origin",
            value_name = "ORIGIN",
            help = "Origin whose pages may use this server, such as https://example.com; may be given more than once"
        )
    )]
    pub cors_origins: Vec<String>,
    /// Whether to serve the web page at `/`.
    #[cfg_attr(feature = "clap", arg(long = "no-page", help = "Do not serve the web page at /", action = clap::ArgAction::SetFalse))]
    pub page: bool,
    /// Names, chat template and request limits for the model.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub api: ApiOptions,
    /// Maximum time to generate a request's completions; longer completions are cut off
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds))]
    pub max_time: Option<Duration>,
    /// Timeouts.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub timeouts: Timeouts,
    /// Log a line for every request: its id, route, status, token counts and time, but never its text
    #[cfg_attr(feature = "clap", arg(long))]
    pub log_requests: bool,
    /// Whether SIGTERM, SIGINT and SIGHUP end the server.
    ///
    /// If a signal arrives before the server is ready, the process exits with code 0.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub signals: bool,
}

/// Timeouts.
///
/// A field of [`ServerOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Timeouts {
    /// Maximum time to receive the head of a request.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().header))]
    pub header: Duration,
    /// Maximum time to receive the body of a request.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().body))]
    pub body: Duration,
    /// Maximum time between two requests on a connection.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().idle))]
    pub idle: Duration,
    /// Maximum time that a client may leave a response unread
    #[cfg_attr(feature = "clap", arg(id = "write-timeout", long, value_name = "SECONDS", default_value = "30", allow_negative_numbers = true, value_parser = seconds))]
    pub write: Duration,
    /// Maximum time in the queue; a request that waits longer gets status 503
    #[cfg_attr(feature = "clap", arg(id = "queue-timeout", long, value_name = "SECONDS", default_value = "60", allow_negative_numbers = true, value_parser = seconds))]
    pub queue: Duration,
    /// Maximum time to wait for a stream's first token before the head is sent without it.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().head))]
    pub head: Duration,
    /// Interval between keep-alive comments while a stream has no output.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().ping))]
    pub ping: Duration,
    /// Maximum time to finish running requests during a shutdown
    #[cfg_attr(feature = "clap", arg(id = "drain-timeout", long, value_name = "SECONDS", default_value = "25", allow_negative_numbers = true, value_parser = seconds))]
    pub drain: Duration,
    /// Maximum time to keep reading from a client after its request was rejected.
    #[cfg_attr(feature = "clap", arg(skip = Timeouts::default().linger))]
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
    /// Maximum number of files and connections that the server opens concurrently.
    ///
    /// Pass this to [`allow_open_files`](candle_gpt2_engine::process::allow_open_files).
    pub fn open_files(&self) -> usize {
        self.wanted_connections().saturating_add(OTHER_FILES)
    }

    /// Requested number of connections; the default leaves some for clients that a full queue rejects.
    fn wanted_connections(&self) -> usize {
        let waiting = self.queue.saturating_add(self.parallel).saturating_mul(2);
        self.max_connections.unwrap_or_else(|| waiting.saturating_add(64).clamp(256, 4096))
    }

    /// Maximum number of concurrent connections.
    pub(crate) fn connections(&self) -> usize {
        self.wanted_connections().min(most_connections())
    }

    /// Validates everything that does not depend on the model.
    pub(crate) fn check(&self) -> Result<(), ServerError> {
        let found = |option: &str| match option {
            "parallel" => Some(self.parallel),
            "queue" => Some(self.queue),
            "prefill_chunk" => Some(self.prefill_chunk),
            "max_body" => Some(self.max_body),
            "max_connections" => self.max_connections,
            _ => self.kv_tokens,
        };
        for (option, least, most) in BOUNDS {
            if let Some(found) = found(option).filter(|found| !(least..=most).contains(found)) {
                return Err(wrong(option, whole_number(least, most), found));
            }
        }
        let (most, found) = (most_connections(), self.max_connections.unwrap_or(0));
        if found > most {
            let files =
                format!("at most {most}, because this process may open only {} files", most + OTHER_FILES);
            return Err(wrong("max_connections", files, found));
        }
        self.check_keys()?;
        self.check_origins()?;
        self.check_names()?;
        self.check_address()
    }

    /// Validates everything that depends on the model.
    pub(crate) fn check_for(&self, config: &Gpt2Config) -> Result<(), ServerError> {
        match self.kv_tokens.filter(|tokens| *tokens < config.n_positions) {
            Some(found) => {
                let expected = format!("at least {}, the model's context length", config.n_positions);
                Err(wrong("kv_tokens", expected, found))
            }
            None => Ok(()),
        }
    }

    /// Validates the host names, and the model's names, which appear in JSON and log lines.
    fn check_names(&self) -> Result<(), ServerError> {
        let is_name = |name: &str| !name.trim().is_empty() && !name.contains(char::is_control);
        let name = || "a non-empty name without control characters".to_owned();
        let found = |found: &String| format!("{found:?}");
        if let Some(alias) = self.api.aliases.iter().find(|alias| !is_name(alias)) {
            return Err(wrong("aliases", name(), found(alias)));
        }
        // A library user may leave the model unnamed.
        if !self.api.name.is_empty() && !is_name(&self.api.name) {
            return Err(wrong("name", name(), found(&self.api.name)));
        }
        match self.allow_hosts.iter().find(|host| !is_host(host)) {
            None => Ok(()),
            Some(host) => {
                let expected = "a host name or address without scheme, port or path, such as model.lan";
                Err(wrong("allow_hosts", expected.into(), found(host)))
            }
        }
    }

    fn check_address(&self) -> Result<(), ServerError> {
        let is_path = self.unix_socket.as_ref().is_none_or(|path| !path.as_os_str().is_empty());
        match (self.host.is_empty(), is_path) {
            (_, false) => Err(wrong("unix_socket", "the path of a socket".into(), "\"\"".to_owned())),
            (true, _) => Err(wrong("host", "a host name or address".into(), "\"\"".to_owned())),
            _ => Ok(()),
        }
    }

    fn check_keys(&self) -> Result<(), ServerError> {
        let is_key =
            |key: &str| (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
        // The error contains the key's position rather than the key, because others may read the message.
        match self.keys.iter().position(|key| !is_key(key.expose_secret())) {
            None => Ok(()),
            Some(index) => {
                let expected = format!("1 to {MAX_KEY} visible ASCII characters without a space");
                Err(wrong("keys", expected, format!("an invalid character or length in key {}", index + 1)))
            }
        }
    }

    fn check_origins(&self) -> Result<(), ServerError> {
        let is_origin = |origin: &str| {
            let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            rest.is_some_and(|authority| {
                let (host, port) = match authority.rsplit_once(':') {
                    // If the port ended with `]`, the colon would belong to an IPv6 address.
                    Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
                    _ => (authority, None),
                };
                is_host(host) && port.is_none_or(|port| port.parse::<u16>().is_ok())
            })
        };
        match self.cors_origins.iter().find(|origin| !is_origin(origin)) {
            None => Ok(()),
            Some(origin) => {
                let expected = "an origin without a path, such as https://example.com";
                Err(wrong("cors_origins", expected.into(), format!("{origin:?}")))
            }
        }
    }
}

/// Returns a value parser for an option, with its bounds from [`BOUNDS`].
#[cfg(feature = "clap")]
fn between(option: &'static str) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let of_option = BOUNDS.iter().find(|(name, ..)| *name == option);
        let (_, least, most) = *of_option.ok_or("this option has no bounds")?;
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected {}", whole_number(least, most)))
    }
}

fn whole_number(least: usize, most: usize) -> String {
    format!("a whole number from {least} to {most}")
}

/// Parses a duration from one millisecond to one day; a shorter timeout would be useless.
#[cfg(feature = "clap")]
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds from 0.001 to 86400".into())
}

/// Whether a Host header can contain this name; IPv6 addresses are in brackets.
fn is_host(name: &str) -> bool {
    match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => {
            let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            !name.is_empty() && name.bytes().all(is_of_name)
        }
    }
}

/// Maximum number of connections that this process may open.
fn most_connections() -> usize {
    open_files().map_or(usize::MAX, |files| files.saturating_sub(OTHER_FILES).max(1))
}

fn wrong(option: &'static str, expected: String, found: impl ToString) -> ServerError {
    ServerError::Option { option, expected, found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut ServerOptions)) -> String {
        let mut options = ServerOptions::default();
        change(&mut options);
        let error = options.check().unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    }

    #[cfg(feature = "clap")]
    #[test]
    fn parsed_defaults_equal_the_default_options() {
        use clap::{Args, FromArgMatches};
        let parsed = ServerOptions::augment_args(clap::Command::new("serve")).get_matches_from(["serve"]);
        let parsed = ServerOptions::from_arg_matches(&parsed).unwrap();
        assert_eq!(format!("{parsed:?}"), format!("{:?}", ServerOptions::default()));
    }

    #[test]
    fn debug_output_hides_keys() {
        let options = ServerOptions { keys: vec!["a-long-secret".into()], ..ServerOptions::default() };
        let shown = format!("{options:?} {options:#?}");
        assert!(shown.contains("keys: [") && !shown.contains("a-long-secret"), "{shown}");
    }

    #[test]
    fn invalid_values_are_rejected() {
        for host in
            ["", "a b", "model.lan:80", "http://model.lan", "model.lan/x", "*", "[::1", "[model]", "é"]
        {
            let message = refused(|options| options.allow_hosts = vec!["model.lan".into(), host.into()]);
            let expected = "allow_hosts: expected a host name or address without scheme, port or path, such as \
                            model.lan, found ";
            assert_eq!(message, format!("{expected}{host:?}"));
        }
        for name in ["", " ", "a\nb"] {
            let message = refused(|options| options.api.aliases = vec![name.into()]);
            assert!(
                message.starts_with("aliases: expected a non-empty name")
                    && message.ends_with(&format!("{name:?}")),
                "{message}"
            );
        }
        assert!(
            refused(|options| options.api.name = " ".into()).starts_with("name: expected a non-empty name")
        );
        for origin in ["https://", "https://a b", "https://me@a", "https://a:b", "https://a?b", "https://a/"]
        {
            let message = refused(|options| options.cors_origins = vec![origin.into()]);
            assert!(message.starts_with("cors_origins: expected an origin without a path"), "{message}");
        }
        assert_eq!(
            refused(|options| options.host.clear()),
            "host: expected a host name or address, found \"\""
        );
        let message = refused(|options| options.unix_socket = Some("".into()));
        assert_eq!(message, "unix_socket: expected the path of a socket, found \"\"");
        assert_eq!(
            refused(|options| options.max_body = 5),
            "max_body: expected a whole number from 64 to 1073741824, found 5"
        );
        let message = refused(|options| options.max_connections = Some(0));
        assert_eq!(message, "max_connections: expected a whole number from 1 to 65536, found 0");
        let message = refused(|options| options.parallel = 257);
        assert_eq!(message, "parallel: expected a whole number from 1 to 256, found 257");
        let valid = ServerOptions {
            allow_hosts: vec!["model.lan".into(), "10.0.0.1".into(), "[::1]".into(), "a_b-c".into()],
            cors_origins: vec!["https://app.example".into(), "http://[::1]:80".into(), "http://[::1]".into()],
            ..ServerOptions::default()
        };
        assert!(valid.check().is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn max_connections_respects_the_open_file_limit() {
        let most = open_files().unwrap() - OTHER_FILES;
        let message = refused(|options| options.max_connections = Some(most + 1));
        let files = most + OTHER_FILES;
        let expected = format!(
            "expected at most {most}, because this process may open only {files} files, found {}",
            most + 1
        );
        assert_eq!(message, format!("max_connections: {expected}"));
        let options = ServerOptions { max_connections: Some(most), ..ServerOptions::default() };
        assert!(options.check().is_ok() && options.connections() == most && options.open_files() == files);
        assert_eq!(ServerOptions::default().connections(), 608.min(most));
    }
}
