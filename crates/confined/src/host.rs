//! Worker side: prepares a program and answers questions within limits.

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::message::{AnswerHead, MAX_MESSAGE_BYTES, QuestionHead, receive, send};

/// Prepared untrusted program that answers questions.
///
/// See [`Worker`](crate::Worker) for an example.
pub trait Program: Send {
    /// Answers a question. A panic ends the session.
    fn answer(&mut self, question: &[u8]) -> Vec<u8>;
}

/// Function that prepares a program from its source; the error describes why the source is invalid.
///
/// See [`Worker`](crate::Worker) for an example.
pub type Prepare = fn(&[u8]) -> Result<Box<dyn Program>, String>;

/// Kind of program that a worker runs.
///
/// See [`Worker`](crate::Worker) for an example.
#[derive(Debug, Clone, Copy)]
pub struct Service {
    /// Name that identifies the service to the caller and the worker.
    pub name: &'static str,
    /// Stack size of the answering thread; counts toward the memory limit in [`Limits`](crate::Limits).
    pub stack_bytes: usize,
    /// Prepares a program from its source.
    pub prepare: Prepare,
}

/// First message to a worker; the program's source follows.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) service: String,
    /// Whether standard input is a socket that delivers another socket for each session.
    pub(crate) forks: bool,
    pub(crate) cpu_micros: u64,
    pub(crate) memory_bytes: u64,
}

/// Prepares a program within the limits for preparation.
pub(crate) fn prepare(
    service: &Service,
    hello: &Hello,
    source: &[u8],
) -> io::Result<Result<Box<dyn Program>, String>> {
    limits::bound_memory(limits::data_bytes().saturating_add(hello.memory_bytes))?;
    limits::bound_time(Some(Duration::from_micros(hello.cpu_micros)))?;
    let prepared = catch_unwind(AssertUnwindSafe(|| (service.prepare)(source)));
    limits::bound_time(None)?;
    Ok(prepared.unwrap_or_else(|_| Err("cannot be parsed".into())))
}

/// Answers questions until the input closes.
pub(crate) fn answer_all(
    program: &mut dyn Program,
    stack_bytes: usize,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let before = limits::data_bytes().saturating_sub(stack_bytes as u64);
    while let Some(message) = next_message(&mut input)? {
        let (head, question) = QuestionHead::split(&message).ok_or(io::ErrorKind::InvalidData)?;
        limits::bound_memory(before.saturating_add(head.memory_bytes))?;
        limits::bound_time(Some(head.cpu))?;
        let start = limits::used_cpu();
        let answer = catch_unwind(AssertUnwindSafe(|| program.answer(question)));
        limits::bound_time(None)?;
        let cpu = limits::used_cpu().saturating_sub(start);
        let private_bytes = if head.measures { limits::private_bytes() } else { 0 };
        let head = AnswerHead { cpu, private_bytes, panicked: answer.is_err() };
        send(&mut output, &[&head.to_bytes(), &answer.unwrap_or_default()])?;
    }
    Ok(())
}

/// Receives the next message from the caller, or `None` if the input closes first.
fn next_message(mut input: impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut first = [0; 8];
    let count = loop {
        match input.read(&mut first) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    match count {
        0 => Ok(None),
        count => received(first[..count].chain(input)).map(Some),
    }
}

/// Receives a message from the caller.
pub(crate) fn received(input: impl Read) -> io::Result<Vec<u8>> {
    receive(input, MAX_MESSAGE_BYTES)?.map_err(|_| io::ErrorKind::InvalidData.into())
}
