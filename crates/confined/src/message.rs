//! Messages between a caller and its worker: each is an eight-byte length followed by the payload.

use std::io::{self, Read, Write};
use std::time::Duration;

use crate::{Limit, Limits};

/// Maximum size of a message, large enough for a vocabulary.
pub(crate) const MAX_MESSAGE_BYTES: u64 = 1 << 30;

/// Message, or the limit that the sender exceeded.
pub(crate) type Received = Result<Vec<u8>, Limit>;

pub(crate) fn send(mut to: impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let length = parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let mut message = length.to_le_bytes().to_vec();
    parts.iter().for_each(|part| message.extend_from_slice(part));
    // Uses a single write, so that a limit marker cannot land in the middle of a message.
    to.write_all(&message)?;
    to.flush()
}

/// Receives a message of at most `max_bytes` bytes.
pub(crate) fn receive(mut from: impl Read, max_bytes: u64) -> io::Result<Received> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if let Some(limit) = Limit::of_mark(length) {
        return Ok(Err(limit));
    }
    if length > max_bytes {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // The buffer grows with the data received, regardless of the announced length.
    let mut message = Vec::new();
    from.take(length).read_to_end(&mut message)?;
    match message.len() as u64 == length {
        true => Ok(Ok(message)),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Header of a question: the limits on the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuestionHead {
    pub(crate) cpu: Duration,
    pub(crate) memory_bytes: u64,
    /// Whether the answer reports the worker's memory usage, which costs about 0.1 ms.
    pub(crate) measures: bool,
}

impl QuestionHead {
    const BYTES: usize = 17;

    pub(crate) fn new(limits: &Limits, measures: bool) -> Self {
        Self { cpu: limits.cpu, memory_bytes: limits.memory_bytes, measures }
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&micros(self.cpu).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[16] = u8::from(self.measures);
        bytes
    }

    /// Splits a message into the header and the question that follows.
    pub(crate) fn split(message: &[u8]) -> Option<(Self, &[u8])> {
        let (cpu, rest) = message.split_first_chunk()?;
        let (memory, rest) = rest.split_first_chunk()?;
        let (measures, question) = rest.split_first()?;
        let head = Self {
            cpu: Duration::from_micros(u64::from_le_bytes(*cpu)),
            memory_bytes: u64::from_le_bytes(*memory),
            measures: *measures != 0,
        };
        Some((head, question))
    }
}

/// Header of an answer: its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnswerHead {
    pub(crate) cpu: Duration,
    /// Memory that the process has written, in bytes; 0 if not measured.
    pub(crate) private_bytes: u64,
    /// Whether the program panicked.
    pub(crate) panicked: bool,
}

impl AnswerHead {
    const BYTES: usize = 17;

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let head = QuestionHead { cpu: self.cpu, memory_bytes: self.private_bytes, measures: self.panicked };
        head.to_bytes()
    }

    pub(crate) fn split(message: &[u8]) -> Option<(Self, &[u8])> {
        let (QuestionHead { cpu, memory_bytes: private_bytes, measures: panicked }, answer) =
            QuestionHead::split(message)?;
        Some((Self { cpu, private_bytes, panicked }, answer))
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_limit_marks_are_distinguished() {
        let mut bytes = Vec::new();
        send(&mut bytes, &[b"ab", b"c"]).unwrap();
        assert_eq!(receive(&bytes[..], 3).unwrap(), Ok(b"abc".to_vec()));
        assert_eq!(receive(&bytes[..], 2).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(receive(&bytes[..10], 3).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let mark = Limit::Memory.mark().to_le_bytes();
        assert_eq!(receive(&mark[..], 3).unwrap(), Err(Limit::Memory));
    }

    #[test]
    fn message_heads_round_trip() {
        let head = QuestionHead { cpu: Duration::from_millis(7), memory_bytes: 5 << 40, measures: true };
        let message = [&head.to_bytes()[..], b"question"].concat();
        assert_eq!(QuestionHead::split(&message), Some((head, &b"question"[..])));
        assert_eq!(QuestionHead::split(&message[..9]), None);
        let head = AnswerHead { cpu: Duration::from_micros(3), private_bytes: 9, panicked: false };
        assert_eq!(AnswerHead::split(&head.to_bytes()), Some((head, &b""[..])));
    }
}
