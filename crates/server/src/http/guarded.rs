//! The bytes of a connection under the clock. A head that comes too slowly, a client that waits too long between two requests,
//! and one that does not take what is sent to it end the connection. hyper's own timer for heads runs between two requests too,
//! and it has none for writing.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep, sleep_until};

use super::content_length::ContentLength;
use super::peer::Peer;
use super::seats::{Activity, State};
use crate::options::Timeouts;

/// Bytes that are read at once.
const READ: usize = 16 << 10;

/// What the clock has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimedOut {
    /// A head of which a part has come.
    Head,
    /// A connection without a request, or one that another has taken the place of.
    Idle,
    /// A client that does not read.
    Write,
}

/// A connection's bytes, under the clock.
#[derive(Debug)]
pub(crate) struct Guarded {
    peer: Arc<Peer>,
    activity: Arc<Activity>,
    timeouts: Timeouts,
    /// When the head must be whole, or begin.
    head: Pin<Box<Sleep>>,
    head_has_begun: bool,
    content_length: ContentLength,
    /// When something must have been written, while something waits to be.
    stalled: Option<Pin<Box<Sleep>>>,
    timed_out: Option<TimedOut>,
    is_at_end: bool,
}

impl Guarded {
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

    /// What the clock has ended.
    pub(crate) fn timed_out(&self) -> Option<TimedOut> {
        self.timed_out
    }

    /// Whether no answer is under way.
    pub(crate) fn is_between_requests(&self) -> bool {
        self.activity.state() == State::Waiting
    }

    /// Whether the client has closed its side.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// Whether the head announces a body of more bytes than hyper can count.
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

    /// Ready when nothing more is waited for between two requests.
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

impl Read for Guarded {
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

impl Write for Guarded {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_between_requests() {
            // hyper refuses a head that it cannot read with a bare status. The connection says more: see `refusal` in connection.rs.
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

    /// hyper flushes once all bytes are written: an answer that was handed over is sent then, and the next head may come.
    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.activity.state() == State::Answered {
            self.activity.enter(State::Waiting);
            self.head_has_begun = false;
            let idle = Instant::now() + self.timeouts.idle;
            self.head.as_mut().reset(idle);
        }
        Poll::Ready(Ok(()))
    }

    /// The connection closes itself, once the client has read why.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
