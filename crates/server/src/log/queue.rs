//! Bounded queue of log lines and the thread that writes them, so that logging never blocks.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::fmt::MakeWriter;

/// Capacity of the queue in bytes.
const CAPACITY: usize = 1 << 20;
/// Maximum length of a line in bytes; exceeds the longest line that the server itself logs.
const MAX_LINE: usize = 16 << 10;

/// Queue entry.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Line including its line feed.
    Line(Vec<u8>),
    /// Number of lines that were dropped at this point.
    Dropped(u64),
}

/// Bounded queue of log lines; clones share the queue.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    shared: Arc<Shared>,
    dropped: Counter,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    has_changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Entry>,
    /// Total length of the queued lines.
    bytes: usize,
    /// Lines dropped since the last [`Entry::Dropped`].
    dropped: u64,
    is_writing: bool,
}

impl State {
    fn report_dropped(&mut self) {
        if self.dropped > 0 {
            self.entries.push_back(Entry::Dropped(std::mem::take(&mut self.dropped)));
        }
    }
}

impl Queue {
    /// Starts the thread that calls `write` for each entry.
    ///
    /// `dropped` counts the lines that were not written.
    pub(super) fn start(
        dropped: Counter,
        write: impl FnMut(Entry) -> io::Result<()> + Send + 'static,
    ) -> Self {
        let queue = Self { shared: Arc::default(), dropped };
        let of_thread = queue.clone();
        let thread = thread::Builder::new().name("log".into()).spawn(move || of_thread.run(write));
        // If the thread cannot be spawned, the queue fills up, and further lines are dropped and counted.
        drop(thread);
        queue
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent whenever the lock is free.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self, mut write: impl FnMut(Entry) -> io::Result<()>) {
        let mut state = self.state();
        loop {
            let Some(entry) = state.entries.pop_front() else {
                state = self.shared.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.is_writing = true;
            drop(state);
            let (length, lines) = match &entry {
                Entry::Line(line) => (line.len(), 1),
                Entry::Dropped(_) => (0, 0),
            };
            if write(entry).is_err() {
                self.dropped.inc_by(lines);
            }
            state = self.state();
            state.bytes -= length;
            state.is_writing = false;
            self.shared.has_changed.notify_all();
        }
    }

    /// Appends a line, or drops and counts it if it is too long or the queue is full.
    fn push(&self, line: &[u8]) {
        let mut state = self.state();
        // After a drop, wait until a line of any length would fit. Otherwise, short lines would split one gap
        // into many.
        let needed = if state.dropped > 0 { MAX_LINE } else { line.len() };
        if line.len() > MAX_LINE || state.bytes + needed > CAPACITY {
            state.dropped += 1;
            self.dropped.inc();
            return;
        }
        state.report_dropped();
        state.bytes += line.len();
        state.entries.push_back(Entry::Line(line.to_owned()));
        self.shared.has_changed.notify_all();
    }

    /// Waits until all entries are written; returns false if `timeout` expires first.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let mut state = self.state();
        state.report_dropped();
        self.shared.has_changed.notify_all();
        let is_busy = |state: &mut State| state.is_writing || !state.entries.is_empty();
        let waited = self.shared.has_changed.wait_timeout_while(state, timeout, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// Treats each write as one line, because `tracing_subscriber` formats an event before writing it.
impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Creates a queue whose writer needs a permit for each entry, and a receiver of written entries.
    fn gated() -> (Queue, mpsc::Sender<()>, mpsc::Receiver<Entry>) {
        let (permit, permits) = mpsc::channel();
        let (sender, written) = mpsc::channel();
        let queue = Queue::start(Counter::default(), move |entry| {
            // Fails once the test has ended.
            _ = permits.recv();
            _ = sender.send(entry);
            Ok(())
        });
        (queue, permit, written)
    }

    #[test]
    fn stalled_reader_drops_lines_without_blocking_writers() {
        let (queue, permit, written) = gated();
        let line = [b'x'; MAX_LINE];
        let fitting = u64::try_from(CAPACITY / MAX_LINE).unwrap();
        // The queue stays within its capacity, no matter how long the reader stalls.
        (0..fitting - 1).for_each(|_| queue.push(&line));
        queue.push(&line[1..]);
        (0..4).for_each(|_| queue.push(&line));
        queue.push(b"\n");
        assert_eq!((queue.dropped.get(), queue.state().bytes), (5, CAPACITY - 1));
        assert!(!queue.flush(Duration::from_millis(20)));
        for _ in 0..fitting {
            permit.send(()).unwrap();
            assert!(matches!(written.recv_timeout(PATIENCE).unwrap(), Entry::Line(_)));
        }
        queue.push(b"next\n");
        drop(permit);
        assert!(queue.flush(PATIENCE));
        let rest: Vec<Entry> = written.try_iter().collect();
        assert_eq!(rest, [Entry::Dropped(5), Entry::Line(b"next\n".to_vec())]);
    }

    #[test]
    fn oversized_and_unwritable_lines_are_counted() {
        let queue = Queue::start(Counter::default(), |_| Err(io::ErrorKind::BrokenPipe.into()));
        queue.push(&[b'x'; MAX_LINE + 1]);
        assert_eq!(queue.dropped.get(), 1);
        queue.push(b"unwritable\n");
        assert!(queue.flush(PATIENCE));
        assert_eq!(queue.dropped.get(), 2);
    }
}
