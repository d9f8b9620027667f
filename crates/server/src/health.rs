//! Health check for a running server, so that a supervisor can restart a server that is not ready.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::{ServerError, ServerOptions};

/// Timeout for each step: connecting, sending the request and receiving the response.
///
/// A server that is loading its model accepts connections but does not respond.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a status line.
const MAX_LINE: u64 = 1024;
const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// Queries `/health` on a server in another process; returns the server's address if it is ready.
///
/// Uses only the options that define the address.
///
/// # Errors
/// If the server is unreachable, does not respond, or responds with a status other than 200.
///
/// ```
/// use candle_gpt2_server::{ServerError, ServerOptions, check_health};
///
/// let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port(); // free again by now
/// let down = check_health(&ServerOptions { port, ..ServerOptions::default() });
/// assert!(matches!(down, Err(ServerError::Unreachable { .. })));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn check_health(options: &ServerOptions) -> Result<String, ServerError> {
    let (address, asked) = match &options.unix_socket {
        Some(path) => (format!("unix:{}", path.display()), status_on_socket(path)),
        None => {
            let host =
                if options.host.contains(':') { format!("[{}]", options.host) } else { options.host.clone() };
            (format!("http://{host}:{}", options.port), status_on_port(&options.host, options.port))
        }
    };
    match asked {
        Err(source) => Err(ServerError::Unreachable { address, source }),
        Ok(status) if status.split(' ').nth(1) == Some("200") => Ok(address),
        Ok(status) => Err(ServerError::Unhealthy { address, status }),
    }
}

fn status_on_port(host: &str, port: u16) -> io::Result<String> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&reachable(address), TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                return status(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Replaces the unspecified address (all interfaces) with the loopback address.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    address
}

#[cfg(unix)]
fn status_on_socket(path: &std::path::Path) -> io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    status(stream)
}

#[cfg(not(unix))]
fn status_on_socket(_: &std::path::Path) -> io::Result<String> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Sends the health request and returns the status line of the response.
fn status(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(REQUEST)?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line).map_err(|error| match error.kind() {
        // The error kind of a timeout depends on the operating system.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, format!("no response within {} s", TIMEOUT.as_secs()))
        }
        _ => error,
    })?;
    Ok(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Returns the result of a health check on a server that sends only `answer`.
    fn checked(answer: &'static str) -> Result<String, ServerError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options =
            ServerOptions { port: listener.local_addr().unwrap().port(), ..ServerOptions::default() };
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; REQUEST.len()];
                stream.read_exact(&mut request).unwrap();
                assert_eq!(request, REQUEST);
                stream.write_all(answer.as_bytes()).unwrap();
            });
            check_health(&options)
        })
    }

    #[test]
    fn only_status_200_is_healthy() {
        assert!(checked("HTTP/1.1 200 OK\r\n\r\n").unwrap().starts_with("http://127.0.0.1:"));
        for answer in ["HTTP/1.1 503 Service Unavailable\r\n\r\n", "SSH-2.0-200\r\n", ""] {
            let refused = checked(answer).unwrap_err();
            assert!(
                matches!(&refused, ServerError::Unhealthy { status, .. } if answer.starts_with(status.as_str())),
                "{answer:?}: {refused}"
            );
        }
    }

    #[test]
    fn unspecified_address_is_checked_on_loopback() {
        for (bound, expected) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("192.0.2.1:80", "192.0.2.1:80")]
        {
            assert_eq!(reachable(bound.parse().unwrap()), expected.parse().unwrap());
        }
    }
}
