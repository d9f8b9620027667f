//! Workers that do not fork: each session starts a process that prepares the program again.

use std::io;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::message::{Received, receive, send};

/// Process that runs one program and communicates over its standard streams; killed on drop.
#[derive(Debug)]
pub(crate) struct Spawned {
    process: Child,
    input: ChildStdin,
    /// Messages from the process, read by a thread because pipes have no timeout.
    messages: Receiver<io::Result<Received>>,
}

impl Spawned {
    /// Starts the process and sends the first two messages to it.
    ///
    /// The next [`Spawned::receive`] returns the reply.
    pub(crate) fn start(
        mut command: Command,
        hello: &[u8],
        source: &[u8],
        max_bytes: u64,
    ) -> io::Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn()?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (input, mut output) = pipes.ok_or(io::ErrorKind::BrokenPipe)?;
        let (sender, messages) = channel();
        let mut spawned = Self { process, input, messages };
        thread::Builder::new().spawn(move || {
            loop {
                let received = receive(&mut output, max_bytes);
                let is_last = !matches!(received, Ok(Ok(_)));
                // Sending fails if the session has ended.
                if sender.send(received).is_err() || is_last {
                    return;
                }
            }
        })?;
        spawned.send(&[hello])?;
        spawned.send(&[source])?;
        Ok(spawned)
    }

    pub(crate) fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        send(&mut self.input, parts)
    }

    pub(crate) fn receive(&mut self, wall: Duration) -> io::Result<Received> {
        match self.messages.recv_timeout(wall) {
            Ok(received) => received,
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // Fails if the process has already exited.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
