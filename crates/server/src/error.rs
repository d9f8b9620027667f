//! Errors that keep a server from starting or make it stop.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use candle_gpt2::{Diagnose, ErrorKind};
use candle_gpt2_api::SetupError;
use candle_gpt2_engine::EngineError;
use thiserror::Error;

/// Error that keeps a server from starting or makes it stop.
///
/// ```
/// use candle_gpt2_server::{Listening, ServerError, ServerOptions};
///
/// let error = Listening::new(ServerOptions { parallel: 0, ..ServerOptions::default() }).err();
/// assert!(matches!(&error, Some(ServerError::Option { option: "parallel", .. })));
/// assert!(error.is_some_and(|error| error.is_usage()));
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// An option is invalid.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Description of valid values.
        expected: String,
        /// Invalid value.
        found: String,
    },
    /// The server is reachable from other machines but has no API key.
    #[error(
        "{host} is reachable from other machines, but no API key is set; set a key, listen on 127.0.0.1, or allow requests \
         without a key"
    )]
    NoKey {
        /// Address of the server.
        host: String,
    },
    /// The port is in use by another program.
    #[error(
        "port {port} on {host} is in use; stop the program that listens there, or choose another port (0 picks a free one)"
    )]
    PortInUse {
        /// Address of the server.
        host: String,
        /// Port of the server.
        port: u16,
    },
    /// The server cannot listen on the address.
    #[error("cannot listen on {host}, port {port}")]
    Address {
        /// Address of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The Unix socket is in use by another program.
    #[error("another program already listens on the socket {}; stop it, or choose another path", path.display())]
    SocketInUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path exists but is not a socket.
    #[error("{} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// Path of the file.
        path: PathBuf,
    },
    /// The server cannot listen on the Unix socket.
    #[error("cannot listen on the socket {}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The model cannot be served.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The KV cache for all completions does not fit into memory.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The operating system refused to create a thread, timer or signal handler.
    #[error("cannot start the server")]
    System(#[source] io::Error),
    /// The engine failed repeatedly.
    #[error("the engine has failed and cannot continue: {what}")]
    EngineDied {
        /// Last engine error.
        what: String,
    },
    /// Calls were cut off at the end of the drain timeout.
    #[error("the shutdown timed out after {} s; number of calls cut off: {calls}", after.as_secs_f64())]
    CutOff {
        /// Number of calls cut off.
        calls: usize,
        /// Time that the calls had to finish.
        after: Duration,
    },
    /// The server in another process is unreachable or does not respond.
    #[error("{address}: no server responds; start one with gpt2 serve")]
    Unreachable {
        /// Expected address.
        address: String,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The server in another process is not ready, or another program is listening at the address.
    #[error("{address}/health: expected status 200, found {}", if status.is_empty() { "nothing" } else { status })]
    Unhealthy {
        /// Address of the server.
        address: String,
        /// Status line that the server sent.
        status: String,
    },
    /// A second stop request arrived during shutdown.
    #[error("a second stop request ended the server; number of calls cut off: {calls}")]
    Interrupted {
        /// Number of calls cut off.
        calls: usize,
    },
}

impl ServerError {
    /// Whether the options are at fault rather than the model or the machine.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for ServerError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Option { .. } | Self::NoKey { .. } => ErrorKind::Usage,
            Self::Engine(error) => error.kind(),
            Self::Setup(error) => error.kind(),
            _ => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Option { option, .. } => match *option {
                "aliases" => "`alias`",
                "allow_hosts" => "`allow_host`",
                "cors_origins" => "`cors_origin`",
                "keys" => "`api_key_file`, GPT2_API_KEY",
                "name" => "`served_model_name`",
                option => return Some(format!("`{option}`").into()),
            },
            Self::Address { .. } => "`host`, `port`",
            Self::Socket { .. } | Self::SocketInUse { .. } | Self::NotASocket { .. } => "`unix_socket`",
            Self::NoKey { .. } => "`api_key_file`, `host`, `no_auth`",
            Self::PortInUse { .. } => "`port`",
            Self::Engine(EngineError::NoRoom { .. }) => "`parallel`, `kv_tokens`, `kv_dtype` f16",
            Self::CutOff { .. } => "`drain_timeout`",
            _ => return None,
        };
        Some(hint.into())
    }
}
