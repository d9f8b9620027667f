//! Untrusted grammars, each compiled and evaluated in its own child process.
//!
//! The system limits the memory and time of each process. Whatever a grammar does to the library, the process
//! ends and the system frees all its memory.
//!
//! The process is a session of a [`Worker`] that has already prepared the vocabulary, which takes a tenth of
//! a second. The parent sends the grammar once, and then asks after each token which tokens may follow.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use candle_gpt2_confined::{
    Answer, Limit, Limits, Program, Service, Session, Worker, WorkerError, WorkerProgram,
};
use candle_gpt2_generation::{Constraint, GenerationError};
use serde::{Deserialize, Serialize};

use crate::constraint::GrammarConstraint;
use crate::prepared::{COMPILE_TIMEOUT, Prepared, STACK_BYTES};
use crate::tokens::TokenBytes;
use crate::{Grammar, GrammarError};

/// Part of a process's memory limit that is reserved for the stack.
///
/// The library limits its recursion depth.
const STACK: u64 = STACK_BYTES as u64;
/// Limits on preparing a vocabulary, generous enough for a slow disk and a busy machine.
const PREPARING: Limits =
    Limits { cpu: Duration::from_secs(30), memory_bytes: 1 << 30, wall: Duration::from_secs(60) };
/// Limits on compiling a grammar.
///
/// Typical tool schemas take milliseconds.
const READING: Limits =
    Limits { cpu: Duration::from_millis(1000), memory_bytes: STACK + (32 << 20), wall: COMPILE_TIMEOUT };
/// Limits on computing the allowed next tokens, which takes tens of microseconds.
///
/// The memory limit covers all sequences that use the grammar.
const STEP: Limits = Limits {
    cpu: Duration::from_millis(100),
    memory_bytes: STACK + (64 << 20),
    wall: Duration::from_secs(2),
};
/// Maximum total private memory of all processes.
///
/// If the total exceeds this limit, new grammars are rejected, and processes that use at least the
/// average are stopped.
const ALL_BYTES: usize = 256 << 20;
/// Number of answers between two measurements of a process's memory.
const ANSWERS_PER_MEASUREMENT: usize = 16;
/// CPU time per step that does not count toward any budget.
///
/// Most grammars need a tenth of this time. Debug builds of the library are 20 times slower.
const FREE_TIME: Duration = Duration::from_micros(if cfg!(debug_assertions) { 20_000 } else { 500 });
/// Maximum slow CPU time of a process: the sum of the time beyond [`FREE_TIME`] in each step.
const MAX_SLOW: Duration = Duration::from_millis(500);
/// Fraction of wall-clock time that slow steps may take up, because the engine waits for them.
const SLOW_FRACTION: f64 = 0.2;
/// Maximum slow CPU time beyond [`SLOW_FRACTION`] for all processes together.
const ALL_SLOW: Duration = Duration::from_millis(200);
/// Slow CPU time above which a process is stopped when all processes together exceed [`ALL_SLOW`].
const FAIR_SLOW: Duration = Duration::from_millis(50);

/// Worker service that compiles grammars, for [`run_worker`](candle_gpt2_confined::run_worker).
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

/// Child processes for one vocabulary.
pub(crate) struct Processes {
    worker: Worker,
    usage: Arc<Mutex<Usage>>,
}

/// Grammar and end tokens, as sent to a child process.
#[derive(Serialize, Deserialize)]
pub(crate) struct CompileRequest {
    pub(crate) grammar: Grammar,
    pub(crate) end_tokens: Vec<u32>,
}

/// Request kind, encoded as the first byte of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum RequestKind {
    /// Compile the [`CompileRequest`] that follows, encoded as JSON.
    Read = 0,
    /// Return a bit mask of the tokens that may follow the tokens in the request.
    Allowed = 1,
    /// Return whether only the end may follow the tokens in the request.
    IsComplete = 2,
}

/// First byte of a successful answer.
const IS_ANSWER: u8 = 0;
/// First byte of an error.
const IS_ERROR: u8 = 1;

impl Processes {
    /// Sets up child processes that run `program`; `words` returns the bytes of the tokens.
    pub(crate) fn new(
        program: WorkerProgram,
        words: impl Fn() -> Result<TokenBytes, GrammarError> + Send + Sync + 'static,
    ) -> Self {
        let source = move || {
            let words = words().map_err(bare_message)?;
            serde_json::to_vec(&words).map_err(|error| error.to_string())
        };
        Self { worker: Worker::new(program, GRAMMARS.name, PREPARING, source), usage: Arc::default() }
    }

    /// Compiles a grammar in a new process.
    pub(crate) fn read(&self, request: &CompileRequest) -> Result<RemoteConstraint, GrammarError> {
        let kind = request.grammar.kind();
        let busy = || GrammarError::Busy { kind };
        if lock(&self.usage).bytes > ALL_BYTES {
            return Err(busy());
        }
        let wrong = |what: String| GrammarError::Grammar { kind, what };
        let mut question = vec![RequestKind::Read as u8];
        serde_json::to_writer(&mut question, request).map_err(|error| wrong(error.to_string()))?;
        let read = self.worker.begin(&question, &READING, true);
        let (session, Answer { bytes, private_bytes, .. }) = read.map_err(|error| match error {
            WorkerError::Refused { what } => GrammarError::Tokenizer { what },
            // The process got less than 1 s of CPU time within 5 s, so the machine is busy.
            WorkerError::Unavailable { .. } | WorkerError::Exceeded { limit: Limit::WallTime, .. } => busy(),
            _ => wrong(format!("compilation exceeded the time or memory limit; simplify the {kind}")),
        })?;
        answer_of(&bytes).map_err(wrong)?;
        let usage_part = ProcessUsage::new(&self.usage, private_bytes);
        if lock(&self.usage).bytes > ALL_BYTES {
            return Err(busy());
        }
        let process = Process { session: Some(session), answers: 0, slow: Duration::ZERO };
        Ok(RemoteConstraint { kind, process: Mutex::new(process), usage_part })
    }
}

/// Constraint that is evaluated in a child process.
pub(crate) struct RemoteConstraint {
    kind: &'static str,
    process: Mutex<Process>,
    usage_part: ProcessUsage,
}

struct Process {
    /// `None` after a failure.
    session: Option<Session>,
    answers: usize,
    /// Slow CPU time: the sum of the time beyond [`FREE_TIME`] in each step.
    slow: Duration,
}

impl fmt::Debug for RemoteConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteConstraint").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Constraint for RemoteConstraint {
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
        let answer = self.ask(RequestKind::Allowed, generated)?;
        for (allowed, bit) in allowed.iter_mut().zip(bits(&answer)) {
            *allowed |= bit;
        }
        Ok(())
    }

    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
        Ok(self.ask(RequestKind::IsComplete, generated)?.first() == Some(&1))
    }

    fn option(&self) -> &'static str {
        self.kind
    }
}

impl RemoteConstraint {
    /// Whether the process can still answer; true while it computes an answer.
    pub(crate) fn is_alive(&self) -> bool {
        match self.process.try_lock() {
            Ok(process) => process.session.is_some(),
            Err(TryLockError::Poisoned(error)) => error.into_inner().session.is_some(),
            Err(TryLockError::WouldBlock) => true,
        }
    }

    fn ask(&self, question: RequestKind, generated: &[u32]) -> Result<Vec<u8>, GenerationError> {
        let failed = |what: String| GenerationError::Constraint { what };
        let too_much = || {
            let (kind, after) = (self.kind, generated.len());
            failed(format!(
                "{kind}: exceeded the time or memory limit after {after} tokens; simplify the {kind}"
            ))
        };
        let mut process = lock(&self.process);
        // The session is put back only on success. A failure drops it, which ends the process and all
        // sequences that use the grammar.
        let mut session = process.session.take().ok_or_else(too_much)?;
        let ids = generated.iter().flat_map(|id| id.to_le_bytes());
        let message: Vec<u8> = [question as u8].into_iter().chain(ids).collect();
        let measures = process.answers.is_multiple_of(ANSWERS_PER_MEASUREMENT);
        let answer = session.ask(&message, &STEP, measures).map_err(|_| too_much())?;
        process.answers += 1;
        let slow = answer.cpu.saturating_sub(FREE_TIME);
        process.slow += slow;
        let takes_too_long =
            process.slow > MAX_SLOW || self.usage_part.exceeds_time(slow) && process.slow > FAIR_SLOW;
        if takes_too_long || measures && self.usage_part.exceeds_memory(answer.private_bytes) {
            return Err(too_much());
        }
        process.session = Some(session);
        answer_of(&answer.bytes).map(<[u8]>::to_vec).map_err(failed)
    }
}

/// Resource usage of all processes.
#[derive(Default)]
struct Usage {
    /// Private memory of all processes, each as last measured.
    bytes: usize,
    processes: usize,
    /// Slow CPU time of all processes, minus [`SLOW_FRACTION`] of the elapsed time.
    slow: Duration,
    slow_at: Option<Instant>,
}

/// One process's share of the total [`Usage`].
struct ProcessUsage {
    bytes: AtomicUsize,
    total: Arc<Mutex<Usage>>,
}

impl ProcessUsage {
    fn new(total: &Arc<Mutex<Usage>>, bytes: usize) -> Self {
        let mut usage = lock(total);
        usage.bytes += bytes;
        usage.processes += 1;
        Self { bytes: AtomicUsize::new(bytes), total: Arc::clone(total) }
    }

    /// Records the memory of this process and returns whether the process must end.
    ///
    /// A process must end if all processes together exceed [`ALL_BYTES`] and it uses at least the average.
    fn exceeds_memory(&self, bytes: usize) -> bool {
        let mut usage = lock(&self.total);
        usage.bytes = usage.bytes - self.bytes.swap(bytes, Ordering::Relaxed) + bytes;
        usage.bytes > ALL_BYTES && bytes.saturating_mul(usage.processes) >= usage.bytes
    }

    /// Records slow CPU time and returns whether all processes together exceed their budget.
    fn exceeds_time(&self, slow: Duration) -> bool {
        if slow.is_zero() {
            return false;
        }
        let mut usage = lock(&self.total);
        let now = Instant::now();
        let passed = usage.slow_at.replace(now).map_or(Duration::ZERO, |before| now.duration_since(before));
        usage.slow = usage.slow.saturating_sub(passed.mul_f64(SLOW_FRACTION)) + slow;
        usage.slow > ALL_SLOW
    }
}

impl Drop for ProcessUsage {
    fn drop(&mut self) {
        let mut usage = lock(&self.total);
        usage.bytes -= self.bytes.load(Ordering::Relaxed);
        usage.processes -= 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The value is consistent at every point, so poisoning is harmless.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates the [`GRAMMARS`] program from the serialized bytes of a vocabulary's tokens.
fn prepare(words: &[u8]) -> Result<Box<dyn Program>, String> {
    let words: TokenBytes = serde_json::from_slice(words).map_err(|error| error.to_string())?;
    let prepared = Prepared::new(words).map_err(bare_message)?;
    Ok(Box::new(GrammarWorker { prepared, constraint: None }))
}

/// Error message without the grammar's kind, which the parent adds.
fn bare_message(error: GrammarError) -> String {
    match error {
        GrammarError::Tokenizer { what } | GrammarError::Grammar { what, .. } => what,
        error => error.to_string(),
    }
}

/// Worker side: compiles one grammar and answers requests about it.
struct GrammarWorker {
    prepared: Prepared,
    constraint: Option<GrammarConstraint>,
}

impl Program for GrammarWorker {
    fn answer(&mut self, question: &[u8]) -> Vec<u8> {
        let answered = match (question.split_first(), &self.constraint) {
            (Some((kind, request)), None) if *kind == RequestKind::Read as u8 => self.read(request),
            (Some((kind, ids)), Some(constraint)) => answer(constraint, *kind, ids),
            _ => Err("no grammar has been compiled".into()),
        };
        let (kind, mut bytes) = match answered {
            Ok(bytes) => (IS_ANSWER, bytes),
            Err(what) => (IS_ERROR, what.into_bytes()),
        };
        bytes.insert(0, kind);
        bytes
    }
}

impl GrammarWorker {
    fn read(&mut self, request: &[u8]) -> Result<Vec<u8>, String> {
        let request: CompileRequest = serde_json::from_slice(request).map_err(|error| error.to_string())?;
        let read = self.prepared.read(&request.grammar, &request.end_tokens);
        self.constraint = Some(read.map_err(bare_message)?);
        Ok(Vec::new())
    }
}

fn answer(constraint: &GrammarConstraint, kind: u8, ids: &[u8]) -> Result<Vec<u8>, String> {
    let (ids, _) = ids.as_chunks();
    let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
    let answered = if kind == RequestKind::IsComplete as u8 {
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

/// Strips the first byte of an answer and converts an error answer to `Err`.
fn answer_of(bytes: &[u8]) -> Result<&[u8], String> {
    match bytes.split_first() {
        Some((&IS_ANSWER, answer)) => Ok(answer),
        Some((_, what)) => Err(String::from_utf8_lossy(what).into_owned()),
        None => Err("the worker returned an empty answer".into()),
    }
}

fn bits(bytes: &[u8]) -> impl Iterator<Item = bool> {
    bytes.iter().flat_map(|byte| (0..u8::BITS).map(move |bit| byte >> bit & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_step_time_is_limited_across_processes() {
        let usage = Arc::default();
        let (one, other) = (ProcessUsage::new(&usage, 0), ProcessUsage::new(&usage, 0));
        assert!(!one.exceeds_time(ALL_SLOW));
        assert!(other.exceeds_time(ALL_SLOW), "another process adds to the same sum");
        assert!(!other.exceeds_time(Duration::ZERO), "a usual step is free");
        lock(&usage).slow_at = Instant::now().checked_sub(Duration::from_secs(60));
        assert!(!one.exceeds_time(Duration::from_millis(1)), "the sum shrinks with time");
    }

    #[test]
    fn memory_limit_spares_below_average_processes() {
        let usage = Arc::default();
        let (large, small) = (ProcessUsage::new(&usage, 0), ProcessUsage::new(&usage, 0));
        assert!(!large.exceeds_memory(ALL_BYTES));
        assert!(!small.exceeds_memory(1), "others take the memory");
        assert!(large.exceeds_memory(ALL_BYTES));
        drop(large);
        assert_eq!(lock(&usage).bytes, 1);
    }
}
