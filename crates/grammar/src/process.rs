//! Grammars of strangers, each read and followed in a process of its own, whose memory and time the system bounds: whatever a
//! grammar does to the library, it ends, and all its memory is given back.
//!
//! One process waits with the vocabulary (`read_grammars`), which takes a tenth of a second to prepare. For each grammar it forks,
//! so that a grammar costs a millisecond, and only the memory that is its own. This side sends it one end of a pair of sockets,
//! and asks over the other: for the reading, and then for each token what may follow.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use candle_gpt2_generation::{Constraint, GenerationError};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::constraint::GrammarConstraint;
use crate::prepared::{LONGEST, Prepared, STACK_BYTES};
use crate::tokens::Words;
use crate::{Grammar, GrammarError};

/// What a process may add to its memory while it reads a grammar, and while it follows texts.
const READING_BYTES: u64 = 32 << 20;
const FOLLOWING_BYTES: u64 = 64 << 20;
/// What all that wait for texts or follow them may have together. Beyond it, no other grammar is read, and those that have as much
/// as the average or more end.
const ALL_BYTES: usize = 128 << 20;
/// Longest time of the processor to read a grammar, and to find what may follow a token, which takes tens of microseconds. On a
/// machine with much else to do that takes longer; `LONGEST` is waited for the one, and `LONGEST_STEP` for the other: all texts wait
/// for it.
const READING_TIME: Duration = Duration::from_millis(1000);
const STEP_TIME: Duration = Duration::from_millis(100);
const LONGEST_STEP: Duration = Duration::from_secs(2);
/// Longest time for the vocabulary, with a slow disk and much else to do.
const PREPARING_TIME: Duration = Duration::from_secs(60);
/// Longest message: a vocabulary.
const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// The program that reads grammars, which calls [`read_grammars`], and does little else before: it is forked.
///
/// `gpt2 serve` names itself, with a hidden command.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::{Compiler, GrammarReader};
///
/// // In a program whose `main` calls `read_grammars` for this argument, before it starts a thread.
/// let reader = GrammarReader { program: std::env::current_exe()?, arguments: vec!["read-grammars".into()] };
/// let opened = ModelOptions::default().open(&Silent)?;
/// let compiler = Compiler::isolated(opened.vocabulary(), reader)?; // the program runs when a grammar comes
/// # let _ = compiler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct GrammarReader {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// The processes of one vocabulary.
pub(crate) struct Processes {
    reader: GrammarReader,
    /// The process that forks, once the first grammar has come.
    waiting: Mutex<Option<Waiting>>,
    /// What all that have read a grammar use.
    usage: Arc<Mutex<Usage>>,
}

/// The process that waits for grammars. It ends when its socket is closed.
struct Waiting {
    process: Child,
    socket: UnixStream,
}

/// What a process is to read.
#[derive(Serialize, Deserialize)]
struct Order {
    grammar: Grammar,
    end_tokens: Vec<u32>,
}

/// What becomes of it.
#[derive(Serialize, Deserialize)]
enum Outcome {
    /// It was read, in a process that has so many bytes for itself.
    Read { bytes: usize },
    /// It is wrong.
    Refused { what: String },
    /// There is no process for it.
    Busy,
}

/// What is asked about the tokens of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Question {
    Allowed = 0,
    IsComplete = 1,
}

impl Processes {
    #[expect(clippy::unnecessary_wraps, reason = "elsewhere there are none")]
    pub(crate) fn new(reader: GrammarReader) -> Option<Self> {
        Some(Self { reader, waiting: Mutex::default(), usage: Arc::default() })
    }

    /// Reads a grammar in a process of its own, for a vocabulary with these words.
    pub(crate) fn read(
        &self,
        words: impl Fn() -> Result<Words, GrammarError>,
        grammar: &Grammar,
        end_tokens: &[u32],
    ) -> Result<RemoteConstraint, GrammarError> {
        let kind = grammar.kind();
        let busy = || GrammarError::Busy { kind };
        if locked(&self.usage).bytes > ALL_BYTES {
            return Err(busy());
        }
        let wrong = |what: String| GrammarError::Grammar { kind, what };
        let (socket, theirs) = UnixStream::pair().map_err(|_| busy())?;
        let handed_over = self.hand_over(theirs.into(), words)?;
        handed_over.map_err(|error| wrong(format!("no process to read it: {error}")))?;
        let order = Order { grammar: grammar.clone(), end_tokens: end_tokens.to_vec() };
        let read = || -> io::Result<Outcome> {
            socket.set_read_timeout(Some(LONGEST))?;
            socket.set_write_timeout(Some(LONGEST))?;
            send_json(&socket, &order)?;
            let outcome = receive_json(&socket)?;
            socket.set_read_timeout(Some(LONGEST_STEP))?;
            Ok(outcome)
        };
        match read() {
            Ok(Outcome::Read { bytes }) => {
                let part = Part::new(&self.usage, bytes);
                let is_too_much = locked(&self.usage).bytes > ALL_BYTES;
                let constraint = RemoteConstraint { kind, socket: Mutex::new(Some(socket)), part };
                if is_too_much { Err(busy()) } else { Ok(constraint) }
            }
            Ok(Outcome::Refused { what }) => Err(wrong(what)),
            // It had no second of the processor in five.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Err(busy())
            }
            Ok(Outcome::Busy) => Err(busy()),
            // The system has ended the process.
            Err(_) => Err(wrong("it takes too much time or memory to read; make it simpler".into())),
        }
    }

    /// Gives a socket to the process that waits, which is started if there is none any more.
    fn hand_over(
        &self,
        socket: OwnedFd,
        words: impl Fn() -> Result<Words, GrammarError>,
    ) -> Result<io::Result<()>, GrammarError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*waiting
            && send_socket(&known.socket, &socket).is_ok()
        {
            return Ok(Ok(()));
        }
        let started = match Waiting::start(&self.reader, &words()?) {
            Ok(started) => waiting.insert(started?),
            Err(error) => return Ok(Err(error)),
        };
        Ok(send_socket(&started.socket, &socket))
    }
}

impl Waiting {
    fn start(reader: &GrammarReader, words: &Words) -> io::Result<Result<Self, GrammarError>> {
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&reader.program);
        // What the system prints when it ends a process is of no use here.
        let command = command.args(&reader.arguments).stdout(Stdio::null()).stderr(Stdio::null());
        let waiting = Self { process: command.stdin(OwnedFd::from(theirs)).spawn()?, socket };
        waiting.socket.set_read_timeout(Some(PREPARING_TIME))?;
        waiting.socket.set_write_timeout(Some(PREPARING_TIME))?;
        send_json(&waiting.socket, words)?;
        let prepared: Result<(), String> = receive_json(&waiting.socket)?;
        Ok(prepared.map(|()| waiting).map_err(|what| GrammarError::Tokenizer { what }))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // It may have ended.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// A grammar that another process has read.
pub(crate) struct RemoteConstraint {
    kind: &'static str,
    /// `None` once the process has ended, or has not answered in time.
    socket: Mutex<Option<UnixStream>>,
    part: Part,
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
}

impl RemoteConstraint {
    fn ask(&self, question: Question, generated: &[u32]) -> Result<Vec<u8>, GenerationError> {
        let mut socket = self.socket();
        let failed = |what: String| GenerationError::Constraint { what };
        let too_much = || {
            let after = generated.len();
            failed(format!(
                "{} after {after} tokens: it takes too much time or memory; make it simpler",
                self.kind
            ))
        };
        let stream = socket.as_ref().ok_or_else(too_much)?;
        let asked = || -> io::Result<(usize, Result<Vec<u8>, String>)> {
            let ids = generated.iter().flat_map(|id| id.to_le_bytes());
            send(stream, &[question as u8].into_iter().chain(ids).collect::<Vec<_>>())?;
            let answer = receive(stream)?;
            let (bytes, answer) = answer.split_first_chunk().ok_or(io::ErrorKind::InvalidData)?;
            let (is_error, answer) = answer.split_first().ok_or(io::ErrorKind::InvalidData)?;
            let bytes = usize::try_from(u64::from_le_bytes(*bytes)).unwrap_or(usize::MAX);
            Ok((
                bytes,
                match is_error {
                    0 => Ok(answer.to_vec()),
                    _ => Err(String::from_utf8_lossy(answer).into_owned()),
                },
            ))
        };
        let Ok((bytes, answer)) = asked() else {
            *socket = None;
            return Err(too_much());
        };
        if self.part.is_too_much(bytes) {
            *socket = None;
            return Err(too_much());
        }
        answer.map_err(failed)
    }

    fn socket(&self) -> MutexGuard<'_, Option<UnixStream>> {
        // A panic between question and answer would mix up the next ones.
        self.socket.lock().unwrap_or_else(|poisoned| {
            let mut socket = poisoned.into_inner();
            *socket = None;
            socket
        })
    }
}

/// What all processes use, as each said last.
#[derive(Default)]
struct Usage {
    bytes: usize,
    processes: usize,
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

    /// Whether all have too much, now that this one has so many bytes, and this one not less than the average.
    fn is_too_much(&self, bytes: usize) -> bool {
        let mut usage = locked(&self.of_all);
        usage.bytes = usage.bytes - self.bytes.swap(bytes, Ordering::Relaxed) + bytes;
        usage.bytes > ALL_BYTES && bytes.saturating_mul(usage.processes) >= usage.bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut usage = locked(&self.of_all);
        usage.bytes -= self.bytes.load(Ordering::Relaxed);
        usage.processes -= 1;
    }
}

fn locked(usage: &Mutex<Usage>) -> MutexGuard<'_, Usage> {
    // Numbers are whole at any moment.
    usage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The work of the program that a [`GrammarReader`] names: waits for grammars on standard input, a socket, until that is closed. The
/// calling process must have one thread. See [`GrammarReader`].
///
/// # Errors
/// When standard input is no such socket.
pub fn read_grammars() -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // A fork that held the socket would hide that this process has ended.
    rustix::stdio::dup2_stdin(fs::File::open("/dev/null")?)?;
    let words: Words = receive_json(&control)?;
    let prepared = match Prepared::new(words) {
        Ok(prepared) => prepared,
        Err(error) => return send_json(&control, &Err::<(), _>(error.to_string())),
    };
    send_json(&control, &Ok::<(), String>(()))?;
    #[expect(unsafe_code, reason = "the forked processes are never waited for")]
    // SAFETY: no handler is installed; the system is told to forget children that end.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
    while let Some(socket) = receive_socket(&control)? {
        #[expect(unsafe_code, reason = "a process for each grammar, which has the vocabulary")]
        // SAFETY: this process has one thread, so the child finds no lock held by another.
        let forked = unsafe { libc::fork() };
        match forked {
            0 => {
                drop(control);
                return follow(prepared, UnixStream::from(socket));
            }
            // The caller may have gone.
            -1 => _ = send_json(&UnixStream::from(socket), &Outcome::Busy),
            _ => (),
        }
    }
    Ok(())
}

/// Reads one grammar and answers questions about it.
fn follow(prepared: Prepared, socket: UnixStream) -> io::Result<()> {
    let followed = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || -> io::Result<()> {
        let order: Order = receive_json(&socket)?;
        let before = data_bytes()?;
        bound_memory(before + READING_BYTES)?;
        bound_time(READING_TIME)?;
        let read = prepared.read(&order.grammar, &order.end_tokens);
        let constraint = match read {
            Ok(constraint) => constraint,
            Err(GrammarError::Grammar { what, .. }) => return send_json(&socket, &Outcome::Refused { what }),
            Err(error) => return send_json(&socket, &Outcome::Refused { what: error.to_string() }),
        };
        let bytes = usize::try_from(data_bytes()?.saturating_sub(before)).unwrap_or(usize::MAX);
        send_json(&socket, &Outcome::Read { bytes })?;
        bound_memory(before + FOLLOWING_BYTES)?;
        loop {
            // The other side closes its socket when all texts have ended.
            let question = receive(&socket)?;
            bound_time(STEP_TIME)?;
            let answer = answer(&constraint, &question);
            let (is_error, answer) = match answer {
                Ok(answer) => (0, answer),
                Err(GenerationError::Constraint { what }) => (1, what.into_bytes()),
                Err(error) => (1, error.to_string().into_bytes()),
            };
            let bytes = data_bytes()?.saturating_sub(before);
            send(&socket, &[&bytes.to_le_bytes()[..], &[is_error], &answer].concat())?;
        }
    })?;
    followed.join().unwrap_or(Ok(()))
}

fn answer(constraint: &GrammarConstraint, question: &[u8]) -> Result<Vec<u8>, GenerationError> {
    let (kind, ids) = question.split_first().unwrap_or((&0, &[]));
    let (ids, _) = ids.as_chunks();
    let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
    if *kind == Question::IsComplete as u8 {
        return Ok(vec![u8::from(constraint.is_complete(&ids)?)]);
    }
    Ok(constraint.allowed(&ids)?.iter().flat_map(|word| word.to_le_bytes()).collect())
}

fn bits(bytes: &[u8]) -> impl Iterator<Item = bool> {
    bytes.iter().flat_map(|byte| (0..u8::BITS).map(move |bit| byte >> bit & 1 == 1))
}

/// Memory that this process has for itself: its data and stacks, in bytes.
fn data_bytes() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kilobytes.ok_or(io::ErrorKind::Unsupported)? << 10)
}

/// Has the system refuse more memory than this; Rust ends the process then.
fn bound_memory(bytes: u64) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    // What may be raised again stays as it is: to raise that takes privileges.
    let limit = |resource, most: u64| {
        let Rlimit { current: _, maximum } = getrlimit(resource);
        let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
        setrlimit(resource, Rlimit { current, maximum })
    };
    limit(Resource::Core, 0)?;
    Ok(limit(Resource::Data, bytes)?)
}

/// Has the system end this process once it has computed for so long from now.
fn bound_time(time: Duration) -> io::Result<()> {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let value = libc::timeval {
        tv_sec: time.as_secs().try_into().unwrap_or(i32::MAX.into()),
        tv_usec: time.subsec_micros().into(),
    };
    #[expect(unsafe_code, reason = "the standard library has no timers")]
    // SAFETY: the pointer is to a value that lives through the call; the old value is not asked for.
    let set = unsafe {
        libc::setitimer(
            libc::ITIMER_PROF,
            &libc::itimerval { it_interval: zero, it_value: value },
            std::ptr::null_mut(),
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A message: its length in eight bytes, and its bytes.
fn send(mut socket: &UnixStream, message: &[u8]) -> io::Result<()> {
    socket.write_all(&[&(message.len() as u64).to_le_bytes()[..], message].concat())
}

fn receive(mut socket: &UnixStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    socket.read_exact(&mut length)?;
    let length =
        usize::try_from(u64::from_le_bytes(length)).ok().filter(|length| *length <= MAX_MESSAGE_BYTES);
    let mut message = vec![0; length.ok_or(io::ErrorKind::InvalidData)?];
    socket.read_exact(&mut message)?;
    Ok(message)
}

fn send_json(socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    send(socket, &serde_json::to_vec(message)?)
}

fn receive_json<T: DeserializeOwned>(socket: &UnixStream) -> io::Result<T> {
    Ok(serde_json::from_slice(&receive(socket)?)?)
}

fn send_socket(over: &UnixStream, socket: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let sockets = [socket.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
    // Without this flag, a reader that is gone would raise a signal.
    sendmsg(over, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next socket; `None` once there will be none.
fn receive_socket(over: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(over, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    }))
}
