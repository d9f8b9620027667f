//! Why a server cannot start, or had to end.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use candle_gpt2_api::SetupError;
use candle_gpt2_engine::EngineError;
use thiserror::Error;

/// A server that cannot start, or that had to end.
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
    /// An option that cannot be.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A server that others than this machine reach, without a key.
    #[error(
        "{host} is an address that other machines reach, and no key is set: any client could use the model; set a key, \
         listen on 127.0.0.1, or say that no key is wanted"
    )]
    NoKey {
        /// The address.
        host: String,
    },
    /// Another program has the port.
    #[error(
        "port {port} of {host} is in use: stop the program that listens there, or choose another port (0 takes any that is free)"
    )]
    PortInUse {
        /// The address.
        host: String,
        /// The port.
        port: u16,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {host}, port {port}")]
    Address {
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// What the system says.
        source: io::Error,
    },
    /// Another program has the Unix socket.
    #[error("a program listens on the socket {} already: stop it, or choose another path", path.display())]
    SocketInUse {
        /// The path.
        path: PathBuf,
    },
    /// The path of the Unix socket is something else.
    #[error("{} exists and is not a socket: choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The Unix socket cannot be listened on.
    #[error("cannot listen on the socket {}", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The model cannot be served.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The keys and values of all texts do not fit into the memory.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The system gives no thread, timer or signal.
    #[error("cannot start the server")]
    System(#[source] io::Error),
    /// The engine has failed again and again.
    #[error("the engine has failed and cannot continue: {what}")]
    EngineDied {
        /// What it said last.
        what: String,
    },
    /// Texts were cut off at the end.
    #[error("{calls} calls had not ended {} s after the server was told to end, and were cut off", after.as_secs_f64())]
    CutOff {
        /// Calls.
        calls: usize,
        /// How long they had.
        after: Duration,
    },
    /// A server that runs elsewhere cannot be asked, or does not answer.
    #[error("{address}: no server is ready there; gpt2 serve starts one")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// What runs there says that it is not ready, or is another program.
    #[error("{address}/health: expected status 200, found {}", if status.is_empty() { "nothing" } else { status })]
    Unhealthy {
        /// Where it is.
        address: String,
        /// The first line of its answer.
        status: String,
    },
    /// Told to end while it was ending.
    #[error("told to end a second time: {calls} calls were cut off")]
    Interrupted {
        /// Calls.
        calls: usize,
    },
}

impl ServerError {
    /// Whether the options are at fault, and not the model or the machine.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Option { .. } | Self::NoKey { .. } => true,
            Self::Engine(error) | Self::Setup(SetupError::Engine(error)) => error.is_usage(),
            Self::Setup(SetupError::ChatTemplate { .. }) => true,
            _ => false,
        }
    }
}
