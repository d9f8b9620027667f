//! Read and write timeouts for a connection.
//!
//! A connection ends if a head arrives too slowly, if the client is idle too long, or if the client does not
//! read the response. hyper's own head timer also runs between requests, and hyper has no write timeout.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep, sleep_until};

use super::content_length::ContentLength;
use super::peer::Peer;
use super::slots::{Activity, State};
use crate::options::Timeouts;

/// Maximum number of bytes per read.
const READ: usize = 16 << 10;

/// Timeout that expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimedOut {
    /// The head was not received completely.
    Head,
    /// No request was received, or the connection was evicted.
    Idle,
    /// The client does not read.
    Write,
}

/// Byte stream of a connection, with timeouts.
#[derive(Debug)]
pub(crate) struct TimedStream {
    peer: Arc<Peer>,
    activity: Arc<Activity>,
    timeouts: Timeouts,
    /// Deadline for the complete head or, while the connection is idle, for the head's first byte.
    head: Pin<Box<Sleep>>,
    head_has_begun: bool,
    content_length: ContentLength,
    /// Deadline for the next successful write; set while writes are blocked.
    stalled: Option<Pin<Box<Sleep>>>,
    timed_out: Option<TimedOut>,
    is_at_end: bool,
}

impl TimedStream {
    pub(crate) fn new(peer: Arc<Peer>, activity: Arc<Activity>, timeouts: Timeouts) -> Self {
        let head = Box::pin(sleep_until(Instant::now() + timeouts.header));
        Self {
            peer,
            activity,
            timeouts,
            head,
            head_has_begun: false,
            content_length: ContentLength::default(),
            stalled: None,
            timed_out: None,
            is_at_end: false,
        }
    }

    /// Timeout that ended the connection.
    pub(crate) fn timed_out(&self) -> Option<TimedOut> {
        self.timed_out
    }

    /// Whether no response is in progress.
    pub(crate) fn is_between_requests(&self) -> bool {
        self.activity.state() == State::Waiting
    }

    /// Whether the client has closed its side.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// Whether the head announces a body larger than hyper can represent.
    pub(crate) fn announces_too_much(&self) -> bool {
        self.content_length.is_excessive()
    }

    fn has_read(&mut self, bytes: &[u8]) {
        self.is_at_end |= bytes.is_empty();
        if bytes.is_empty() || !self.is_between_requests() {
            return;
        }
        if !self.head_has_begun {
            self.head_has_begun = true;
            self.content_length = ContentLength::default();
            let whole = Instant::now() + self.timeouts.header;
            if whole < self.head.deadline() {
                self.head.as_mut().reset(whole);
            }
        }
        self.content_length.read(bytes);
    }

    /// Returns `Ready` if the connection times out or is evicted between two requests.
    fn poll_given_up(&mut self, cx: &mut Context<'_>) -> Poll<TimedOut> {
        if !self.is_between_requests() {
            return Poll::Pending;
        }
        if self.activity.poll_evicted(cx).is_ready() {
            return Poll::Ready(TimedOut::Idle);
        }
        ready!(self.head.as_mut().poll(cx));
        Poll::Ready(if self.head_has_begun { TimedOut::Head } else { TimedOut::Idle })
    }

    fn end<T>(&mut self, timed_out: TimedOut) -> Poll<io::Result<T>> {
        self.timed_out = Some(timed_out);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Read for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ];
        let room = buffer.remaining().min(READ);
        match self.peer.poll_read(cx, &mut bytes[..room]) {
            Poll::Ready(Ok(count)) => {
                self.has_read(&bytes[..count]);
                buffer.put_slice(&bytes[..count]);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => match self.poll_given_up(cx) {
                Poll::Ready(timed_out) => self.end(timed_out),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl Write for TimedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_between_requests() {
            // Discards hyper's response to an unreadable head, which is a bare status. `refusal` in
            // connection.rs sends a better one.
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        match self.peer.poll_write(cx, slices) {
            Poll::Ready(written) => {
                self.stalled = None;
                Poll::Ready(written)
            }
            Poll::Pending => {
                let limit = self.timeouts.write;
                let stalled =
                    self.stalled.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + limit)));
                match stalled.as_mut().poll(cx) {
                    Poll::Ready(()) => self.end(TimedOut::Write),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Marks the response as sent and starts the idle timeout.
    ///
    /// hyper flushes once all bytes are written, and the next head may arrive only after that.
    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.activity.state() == State::Answered {
            self.activity.enter(State::Waiting);
            self.head_has_begun = false;
            let idle = Instant::now() + self.timeouts.idle;
            self.head.as_mut().reset(idle);
        }
        Poll::Ready(Ok(()))
    }

    /// Does nothing, because `connection::serve` shuts down the socket itself.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
