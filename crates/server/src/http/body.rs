//! Response bodies: complete bytes, or a stream that is generated while it is being sent.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::sync::mpsc;

use super::record::Record;
use super::slots::{Activity, State};

/// Maximum number of pieces waiting to be sent.
const PIECES: usize = 16;

pub(crate) enum Content {
    Whole(Bytes),
    Stream(Stream),
}

/// Pieces of a response and the future that produces them.
///
/// The future runs while the pieces are polled and is dropped with the stream.
pub(crate) struct Stream {
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    pieces: mpsc::Receiver<Bytes>,
}

impl Stream {
    /// Creates a stream of the pieces that `work` sends.
    pub(crate) fn new<F: Future<Output = ()> + Send + 'static>(
        work: impl FnOnce(mpsc::Sender<Bytes>) -> F,
    ) -> Self {
        let (sender, pieces) = mpsc::channel(PIECES);
        Self { work: Some(Box::pin(work(sender))), pieces }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.work.as_mut().is_some_and(|work| work.as_mut().poll(cx).is_ready()) {
            self.work = None;
        }
        self.pieces.poll_recv(cx)
    }
}

/// Response body; when it has been sent or is dropped, the request's record is complete.
pub(crate) struct Answer {
    content: Content,
    activity: Arc<Activity>,
    _record: Record,
}

impl Answer {
    pub(crate) fn new(content: Content, activity: Arc<Activity>, record: Record) -> Self {
        Self { content, activity, _record: record }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.activity.enter(State::Answered);
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = match &mut self.content {
            Content::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Content::Whole(bytes) => Poll::Ready(Some(std::mem::take(bytes))),
            Content::Stream(stream) => stream.poll_piece(cx),
        };
        piece.map(|piece| piece.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream(_) => SizeHint::default(),
        }
    }
}
