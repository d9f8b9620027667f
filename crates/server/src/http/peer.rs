//! Socket of a connected client, over TCP or a Unix socket.
//!
//! One task reads, one task writes, and any task may wait for the client to close its side.

use std::io::{self, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::time::sleep;

/// Polling interval for detecting that a client closed its side while its bytes are unread.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Socket of a connected client.
#[derive(Debug)]
pub(crate) enum Peer {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Evaluates an expression with the stream from either variant.
macro_rules! of_either {
    ($either:expr, $stream:ident => $done:expr) => {
        match $either {
            Peer::Tcp($stream) => $done,
            #[cfg(unix)]
            Peer::Unix($stream) => $done,
        }
    };
}

impl Peer {
    /// Reads available bytes; reading 0 bytes means the end of the stream.
    pub(crate) fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(of_either!(self, stream => stream.poll_read_ready(cx)))?;
            match of_either!(self, stream => stream.try_read(buffer)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }

    /// Writes as many bytes as fit into the socket's buffer.
    pub(crate) fn poll_write(&self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            ready!(of_either!(self, stream => stream.poll_write_ready(cx)))?;
            match of_either!(self, stream => stream.try_write_vectored(slices)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    /// Waits until the client closes its side, even if some of the client's bytes are unread.
    ///
    /// On Windows, socket events stop until those bytes are read, so the close goes unnoticed.
    pub(crate) async fn closed(&self) {
        loop {
            match of_either!(self, stream => stream.ready(Interest::READABLE).await) {
                Ok(ready) if !ready.is_read_closed() && !ready.is_error() => sleep(POLL_INTERVAL).await,
                _ => return,
            }
        }
    }

    /// Shuts down the sending side.
    pub(crate) fn end(&self) {
        // Fails if the client has already disconnected.
        _ = of_either!(self, stream => SockRef::from(stream).shutdown(Shutdown::Write));
    }
}
