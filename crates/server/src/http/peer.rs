//! The other end of a connection, over TCP or a Unix socket. One task reads, one writes, and any may wait for the client's end.

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

/// Interval of the checks whether a client has closed its side behind bytes that are not read yet.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Who is connected.
#[derive(Debug)]
pub(crate) enum Peer {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// What both kinds have under the same name.
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
    /// Reads what is there; 0 bytes are the end.
    pub(crate) fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(of_either!(self, stream => stream.poll_read_ready(cx)))?;
            match of_either!(self, stream => stream.try_read(buffer)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }

    /// Writes as many of the bytes as there is room for.
    pub(crate) fn poll_write(&self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            ready!(of_either!(self, stream => stream.poll_write_ready(cx)))?;
            match of_either!(self, stream => stream.try_write_vectored(slices)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    /// Returns when the client has closed its side, even if some of its bytes are still unread: except on Windows, whose events stop
    /// until these are read.
    pub(crate) async fn closed(&self) {
        loop {
            match of_either!(self, stream => stream.ready(Interest::READABLE).await) {
                Ok(ready) if !ready.is_read_closed() && !ready.is_error() => sleep(LOOK_AGAIN).await,
                _ => return,
            }
        }
    }

    /// Tells the client that nothing more comes.
    pub(crate) fn end(&self) {
        // A client that has gone need not be told.
        _ = of_either!(self, stream => SockRef::from(stream).shutdown(Shutdown::Write));
    }
}
