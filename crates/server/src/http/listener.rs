//! Listener on a TCP port or a Unix socket.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
#[cfg(unix)]
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpSocket};
#[cfg(unix)]
use tokio::net::{UnixListener, UnixSocket};

use super::peer::Peer;
use crate::{ServerError, ServerOptions};

/// Maximum number of connections that the system queues for `accept`.
const BACKLOG: u32 = 1024;

#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener, SocketAddr),
    #[cfg(unix)]
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds to the address in the options; must be called inside a tokio runtime.
    pub(crate) fn bind(options: &ServerOptions) -> Result<Self, ServerError> {
        match &options.unix_socket {
            #[cfg(unix)]
            Some(path) => bind_unix(path),
            #[cfg(not(unix))]
            Some(path) => {
                Err(ServerError::Socket { path: path.clone(), source: io::ErrorKind::Unsupported.into() })
            }
            None => bind_tcp(options),
        }
    }

    /// Address in the form that clients use.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Tcp(_, address) => format!("http://{address}"),
            #[cfg(unix)]
            Self::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    /// Bound IP address if it is a loopback address.
    pub(crate) fn loopback(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(_, address) => Some(address.ip()).filter(IpAddr::is_loopback),
            #[cfg(unix)]
            Self::Unix(..) => None,
        }
    }

    pub(crate) async fn accept(&self) -> io::Result<Peer> {
        match self {
            Self::Tcp(listener, _) => {
                let (stream, _) = listener.accept().await?;
                // Disables Nagle's algorithm. A failure costs only latency.
                _ = stream.set_nodelay(true);
                Ok(Peer::Tcp(stream))
            }
            #[cfg(unix)]
            Self::Unix(listener, _) => Ok(Peer::Unix(listener.accept().await?.0)),
        }
    }
}

#[cfg(unix)]
impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // If this fails, the next server to start removes the socket.
            _ = std::fs::remove_file(path);
        }
    }
}

fn bind_tcp(options: &ServerOptions) -> Result<Listener, ServerError> {
    let (host, port) = (options.host.as_str(), options.port);
    let error = |source: io::Error| {
        let host = host.to_owned();
        match source.kind() {
            io::ErrorKind::AddrInUse => ServerError::PortInUse { host, port },
            _ => ServerError::Address { host, port, source },
        }
    };
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(error)?.collect();
    let is_reached_by_others = addresses.iter().any(|address| !address.ip().is_loopback());
    if is_reached_by_others && options.keys.is_empty() && !options.no_auth {
        return Err(ServerError::NoKey { host: host.to_owned() });
    }
    let mut last = error(io::ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        match listen(address) {
            Ok(listener) => {
                let address = listener.local_addr().map_err(error)?;
                return Ok(Listener::Tcp(listener, address));
            }
            Err(source) => last = error(source),
        }
    }
    Err(last)
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Allows a restart while old connections are in TIME_WAIT. On other systems, this option would let two
    // programs share a port.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(unix)]
fn bind_unix(path: &Path) -> Result<Listener, ServerError> {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    let error = |source| ServerError::Socket { path: path.to_owned(), source };
    remove_stale(path)?;
    let socket = UnixSocket::new_stream().map_err(error)?;
    socket.bind(path).map_err(error)?;
    // No client can connect before `listen`, so the permissions take effect in time.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    let listener = socket.listen(BACKLOG).map_err(error)?;
    Ok(Listener::Unix(listener, path.to_owned()))
}

/// Removes a stale socket that a killed server left behind.
#[cfg(unix)]
fn remove_stale(path: &Path) -> Result<(), ServerError> {
    use std::fs;
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixStream;

    let error = |source| ServerError::Socket { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(error(source)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ServerError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ServerError::SocketInUse { path: path.to_owned() }),
        Err(source) if source.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(error)
        }
        Err(source) => Err(error(source)),
    }
}
