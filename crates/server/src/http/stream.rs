//! A connection's two halves: of TCP, or of a Unix socket.

use std::io::{self, IoSlice};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, tcp};
#[cfg(unix)]
use tokio::net::{UnixStream, unix};
use tokio::time::sleep;

/// How often it is looked for a client's end behind what it has sent and nobody reads yet.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What comes.
#[derive(Debug)]
pub(crate) enum ReadHalf {
    Tcp(tcp::OwnedReadHalf),
    #[cfg(unix)]
    Unix(unix::OwnedReadHalf),
}

/// What goes. Dropping it tells the client that nothing more comes.
#[derive(Debug)]
pub(crate) enum WriteHalf {
    Tcp(tcp::OwnedWriteHalf),
    #[cfg(unix)]
    Unix(unix::OwnedWriteHalf),
}

/// The halves of a TCP connection that sends at once what is written.
pub(crate) fn of_tcp(stream: TcpStream) -> (ReadHalf, WriteHalf) {
    // Without it everything works, only slower.
    _ = stream.set_nodelay(true);
    let (read, write) = stream.into_split();
    (ReadHalf::Tcp(read), WriteHalf::Tcp(write))
}

/// The halves of a connection over a Unix socket.
#[cfg(unix)]
pub(crate) fn of_unix(stream: UnixStream) -> (ReadHalf, WriteHalf) {
    let (read, write) = stream.into_split();
    (ReadHalf::Unix(read), WriteHalf::Unix(write))
}

impl ReadHalf {
    /// Reads what is there; 0 bytes are the end.
    pub(crate) fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let read = match self {
                Self::Tcp(half) => {
                    ready!(half.as_ref().poll_read_ready(cx))?;
                    half.try_read(buffer)
                }
                #[cfg(unix)]
                Self::Unix(half) => {
                    ready!(half.as_ref().poll_read_ready(cx))?;
                    half.try_read(buffer)
                }
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }

    async fn ready(&self) -> io::Result<Ready> {
        match self {
            Self::Tcp(half) => half.ready(Interest::READABLE).await,
            #[cfg(unix)]
            Self::Unix(half) => half.ready(Interest::READABLE).await,
        }
    }

    /// Returns when the client has closed its side, though there may be bytes of it that nobody has read.
    pub(crate) async fn closed(&self) {
        loop {
            match self.ready().await {
                Ok(ready) if !ready.is_read_closed() && !ready.is_error() => sleep(LOOK_AGAIN).await,
                _ => return,
            }
        }
    }
}

impl WriteHalf {
    /// Writes as many of the bytes as there is room for.
    pub(crate) fn poll_write(&self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            let written = match self {
                Self::Tcp(half) => {
                    ready!(half.as_ref().poll_write_ready(cx))?;
                    half.try_write_vectored(slices)
                }
                #[cfg(unix)]
                Self::Unix(half) => {
                    ready!(half.as_ref().poll_write_ready(cx))?;
                    half.try_write_vectored(slices)
                }
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}
