//! Untrusted grammars, each read and followed in a child process whose memory and time the system bounds. Whatever a grammar does to
//! the library, the process ends, and the system frees all its memory.
//!
//! The process is a session of a [`Worker`] that has prepared the vocabulary, which takes a tenth of a second. This side asks it to
//! read the grammar, and then for each token what may follow.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_gpt2_confined::{
    Answer, Limit, Limits, Program, Service, Session, Worker, WorkerError, WorkerProgram,
};
use candle_gpt2_generation::{Constraint, GenerationError};
use serde::{Deserialize, Serialize};

use crate::constraint::GrammarConstraint;
use crate::prepared::{LONGEST, Prepared, STACK_BYTES};
use crate::tokens::Words;
use crate::{Grammar, GrammarError};

/// The stack's part of a process's memory. The library recurses, to a depth that it bounds.
const STACK: u64 = STACK_BYTES as u64;
/// Limits of preparing a vocabulary, with a slow disk and a busy machine.
const PREPARING: Limits =
    Limits { cpu: Duration::from_secs(30), memory_bytes: 1 << 30, wall: Duration::from_secs(60) };
/// Limits of reading a grammar. Schemas of tools take milliseconds.
const READING: Limits =
    Limits { cpu: Duration::from_millis(1000), memory_bytes: STACK + (32 << 20), wall: LONGEST };
/// Limits of finding what may follow a token, which takes tens of microseconds. The memory is that of all texts of a grammar.
const STEP: Limits = Limits {
    cpu: Duration::from_millis(100),
    memory_bytes: STACK + (64 << 20),
    wall: Duration::from_secs(2),
};
/// Most memory that all processes may have written together. Beyond it no other grammar is read, and processes with at least the
/// average end.
const ALL_BYTES: usize = 256 << 20;
/// Answers between two measurements of a process's memory.
const ANSWERS_PER_MEASUREMENT: usize = 16;
/// CPU time of a step that counts toward no budget. Most grammars take a tenth of it. The library is twenty times slower in debug
/// builds.
const FREE_TIME: Duration = Duration::from_micros(if cfg!(debug_assertions) { 20_000 } else { 500 });
/// CPU time beyond [`FREE_TIME`] for each step that one process may take in its life.
const MAX_SLOW: Duration = Duration::from_millis(500);
/// Fraction of the time that slow steps of all processes may take together, since the engine waits for them, and how much of it
/// they may take at once. Beyond it, a process that has taken `FAIR_SLOW` or more ends.
const SLOW_FRACTION: f64 = 0.2;
const ALL_SLOW: Duration = Duration::from_millis(200);
const FAIR_SLOW: Duration = Duration::from_millis(50);

/// The grammars that a worker reads, for [`run_worker`](candle_gpt2_confined::run_worker).
///
/// ```
/// use candle_gpt2_confined::WorkerProgram;
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::Compiler;
///
/// // In a program whose `main` calls `run_worker(&[candle_gpt2_grammar::GRAMMARS])` for this argument, before it starts a thread.
/// let program = WorkerProgram::this("confined")?;
/// let opened = ModelOptions::default().open(&Silent)?;
/// let compiler = Compiler::isolated(opened.vocabulary(), program)?; // the program starts with the first grammar
/// # let _ = compiler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const GRAMMARS: Service = Service { name: "grammars", stack_bytes: STACK_BYTES, prepare };

/// The processes of one vocabulary.
pub(crate) struct Processes {
    worker: Worker,
    usage: Arc<Mutex<Usage>>,
}

/// What a process is to read.
#[derive(Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) grammar: Grammar,
    pub(crate) end_tokens: Vec<u32>,
}

/// Kinds of questions: the first byte of each.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Question {
    /// Read the grammar, which follows as JSON.
    Read = 0,
    /// Which tokens may follow these; the answer has a bit for each.
    Allowed = 1,
    /// Whether nothing but the end may follow these tokens.
    IsComplete = 2,
}

/// The first byte of an answer.
const IS_ANSWER: u8 = 0;
const IS_ERROR: u8 = 1;

impl Processes {
    /// Processes of `program`, for a vocabulary with these words.
    pub(crate) fn new(
        program: WorkerProgram,
        words: impl Fn() -> Result<Words, GrammarError> + Send + Sync + 'static,
    ) -> Self {
        let source = move || {
            let words = words().map_err(reason)?;
            serde_json::to_vec(&words).map_err(|error| error.to_string())
        };
        Self { worker: Worker::new(program, GRAMMARS.name, PREPARING, source), usage: Arc::default() }
    }

    /// Reads a grammar in a process of its own.
    pub(crate) fn read(&self, order: &Order) -> Result<RemoteConstraint, GrammarError> {
        let kind = order.grammar.kind();
        let busy = || GrammarError::Busy { kind };
        if locked(&self.usage).bytes > ALL_BYTES {
            return Err(busy());
        }
        let wrong = |what: String| GrammarError::Grammar { kind, what };
        let mut question = vec![Question::Read as u8];
        serde_json::to_writer(&mut question, order).map_err(|error| wrong(error.to_string()))?;
        let read = self.worker.begin(&question, &READING, true);
        let (session, Answer { bytes, private_bytes, .. }) = read.map_err(|error| match error {
            WorkerError::Refused { what } => GrammarError::Tokenizer { what },
            // It had no second of the processor in five.
            WorkerError::Unavailable { .. } | WorkerError::Exceeded { limit: Limit::WallTime, .. } => busy(),
            _ => wrong("it takes too much time or memory to read; make it simpler".into()),
        })?;
        answer_of(&bytes).map_err(wrong)?;
        let part = Part::new(&self.usage, private_bytes);
        if locked(&self.usage).bytes > ALL_BYTES {
            return Err(busy());
        }
        let process = Process { session: Some(session), answers: 0, slow: Duration::ZERO };
        Ok(RemoteConstraint { kind, process: Mutex::new(process), part })
    }
}

/// A grammar that another process has read.
pub(crate) struct RemoteConstraint {
    kind: &'static str,
    process: Mutex<Process>,
    part: Part,
}

struct Process {
    /// `None` once it has failed.
    session: Option<Session>,
    answers: usize,
    /// CPU time of all steps beyond [`FREE_TIME`] each.
    slow: Duration,
}

impl fmt::Debug for RemoteConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteConstraint").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Constraint for RemoteConstraint {
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
        let answer = self.ask(Question::Allowed, generated)?;
        for (allowed, bit) in allowed.iter_mut().zip(bits(&answer)) {
            *allowed |= bit;
        }
        Ok(())
    }

    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
        Ok(self.ask(Question::IsComplete, generated)?.first() == Some(&1))
    }

    fn option(&self) -> &'static str {
        self.kind
    }
}

impl RemoteConstraint {
    /// Whether its process answers.
    pub(crate) fn is_alive(&self) -> bool {
        self.process().session.is_some()
    }

    fn ask(&self, question: Question, generated: &[u32]) -> Result<Vec<u8>, GenerationError> {
        let failed = |what: String| GenerationError::Constraint { what };
        let too_much = || {
            let after = generated.len();
            failed(format!(
                "{} after {after} tokens: it takes too much time or memory; make it simpler",
                self.kind
            ))
        };
        let mut process = self.process();
        // Taken: a failure ends the process, and all texts of the grammar with it.
        let mut session = process.session.take().ok_or_else(too_much)?;
        let ids = generated.iter().flat_map(|id| id.to_le_bytes());
        let message: Vec<u8> = [question as u8].into_iter().chain(ids).collect();
        let measures = process.answers.is_multiple_of(ANSWERS_PER_MEASUREMENT);
        let answer = session.ask(&message, &STEP, measures).map_err(|_| too_much())?;
        process.answers += 1;
        let slow = answer.cpu.saturating_sub(FREE_TIME);
        process.slow += slow;
        let takes_too_long =
            process.slow > MAX_SLOW || self.part.is_too_slow(slow) && process.slow > FAIR_SLOW;
        if takes_too_long || measures && self.part.is_too_much(answer.private_bytes) {
            return Err(too_much());
        }
        process.session = Some(session);
        answer_of(&answer.bytes).map(<[u8]>::to_vec).map_err(failed)
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        locked(&self.process)
    }
}

/// Costs of all processes.
#[derive(Default)]
struct Usage {
    /// Memory that they have written, as measured last.
    bytes: usize,
    processes: usize,
    /// Recent time of slow steps, less [`SLOW_FRACTION`] of the time that has passed.
    slow: Duration,
    slow_at: Option<Instant>,
}

/// The part of one process.
struct Part {
    bytes: AtomicUsize,
    of_all: Arc<Mutex<Usage>>,
}

impl Part {
    fn new(of_all: &Arc<Mutex<Usage>>, bytes: usize) -> Self {
        let mut usage = locked(of_all);
        usage.bytes += bytes;
        usage.processes += 1;
        Self { bytes: AtomicUsize::new(bytes), of_all: Arc::clone(of_all) }
    }

    /// Records that this process has `bytes`. Whether all have too much, and this one no less than the average.
    fn is_too_much(&self, bytes: usize) -> bool {
        let mut usage = locked(&self.of_all);
        usage.bytes = usage.bytes - self.bytes.swap(bytes, Ordering::Relaxed) + bytes;
        usage.bytes > ALL_BYTES && bytes.saturating_mul(usage.processes) >= usage.bytes
    }

    /// Records a slow step. Whether all processes have had too many of them.
    fn is_too_slow(&self, slow: Duration) -> bool {
        if slow.is_zero() {
            return false;
        }
        let mut usage = locked(&self.of_all);
        let now = Instant::now();
        let passed = usage.slow_at.replace(now).map_or(Duration::ZERO, |before| now.duration_since(before));
        usage.slow = usage.slow.saturating_sub(passed.mul_f64(SLOW_FRACTION)) + slow;
        usage.slow > ALL_SLOW
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut usage = locked(&self.of_all);
        usage.bytes -= self.bytes.load(Ordering::Relaxed);
        usage.processes -= 1;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each value is whole at any moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares the program of [`GRAMMARS`]: the words of a vocabulary.
fn prepare(words: &[u8]) -> Result<Box<dyn Program>, String> {
    let words: Words = serde_json::from_slice(words).map_err(|error| error.to_string())?;
    let prepared = Prepared::new(words).map_err(reason)?;
    Ok(Box::new(Reader { prepared, constraint: None }))
}

/// The error without the kind of thing that is wrong, which the other side knows.
fn reason(error: GrammarError) -> String {
    match error {
        GrammarError::Tokenizer { what } | GrammarError::Grammar { what, .. } => what,
        error => error.to_string(),
    }
}

/// The worker's side: reads one grammar, and answers questions about it.
struct Reader {
    prepared: Prepared,
    constraint: Option<GrammarConstraint>,
}

impl Program for Reader {
    fn answer(&mut self, question: &[u8]) -> Vec<u8> {
        let answered = match (question.split_first(), &self.constraint) {
            (Some((kind, order)), None) if *kind == Question::Read as u8 => self.read(order),
            (Some((kind, ids)), Some(constraint)) => answer(constraint, *kind, ids),
            _ => Err("no grammar was read".into()),
        };
        let (kind, mut bytes) = match answered {
            Ok(bytes) => (IS_ANSWER, bytes),
            Err(what) => (IS_ERROR, what.into_bytes()),
        };
        bytes.insert(0, kind);
        bytes
    }
}

impl Reader {
    fn read(&mut self, order: &[u8]) -> Result<Vec<u8>, String> {
        let order: Order = serde_json::from_slice(order).map_err(|error| error.to_string())?;
        let read = self.prepared.read(&order.grammar, &order.end_tokens);
        self.constraint = Some(read.map_err(reason)?);
        Ok(Vec::new())
    }
}

fn answer(constraint: &GrammarConstraint, kind: u8, ids: &[u8]) -> Result<Vec<u8>, String> {
    let (ids, _) = ids.as_chunks();
    let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
    let answered = if kind == Question::IsComplete as u8 {
        constraint.is_complete(&ids).map(|is_complete| vec![u8::from(is_complete)])
    } else {
        let allowed = constraint.allowed(&ids);
        allowed.map(|allowed| allowed.iter().flat_map(|word| word.to_le_bytes()).collect())
    };
    answered.map_err(|error| match error {
        GenerationError::Constraint { what } => what,
        error => error.to_string(),
    })
}

/// The answer without its first byte, or the error that it is.
fn answer_of(bytes: &[u8]) -> Result<&[u8], String> {
    match bytes.split_first() {
        Some((&IS_ANSWER, answer)) => Ok(answer),
        Some((_, what)) => Err(String::from_utf8_lossy(what).into_owned()),
        None => Err("an empty answer".into()),
    }
}

fn bits(bytes: &[u8]) -> impl Iterator<Item = bool> {
    bytes.iter().flat_map(|byte| (0..u8::BITS).map(move |bit| byte >> bit & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_of_all_processes_share_a_fraction_of_the_time() {
        let usage = Arc::default();
        let (one, other) = (Part::new(&usage, 0), Part::new(&usage, 0));
        assert!(!one.is_too_slow(ALL_SLOW));
        assert!(other.is_too_slow(ALL_SLOW), "another process adds to the same sum");
        assert!(!other.is_too_slow(Duration::ZERO), "a usual step is free");
        locked(&usage).slow_at = Instant::now().checked_sub(Duration::from_secs(60));
        assert!(!one.is_too_slow(Duration::from_millis(1)), "the sum shrinks with time");
    }

    #[test]
    fn a_process_ends_for_memory_if_it_has_at_least_the_average() {
        let usage = Arc::default();
        let (large, small) = (Part::new(&usage, 0), Part::new(&usage, 0));
        assert!(!large.is_too_much(ALL_BYTES));
        assert!(!small.is_too_much(1), "others take the memory");
        assert!(large.is_too_much(ALL_BYTES));
        drop(large);
        assert_eq!(locked(&usage).bytes, 1);
    }
}
