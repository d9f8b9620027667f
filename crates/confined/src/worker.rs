//! Caller side: starts workers and sends them questions.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io;
#[cfg(target_os = "linux")]
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
#[cfg(target_os = "linux")]
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[cfg(target_os = "linux")]
use crate::forked::ForkServer;
use crate::host::Hello;
use crate::message::{AnswerHead, MAX_MESSAGE_BYTES, QuestionHead, Received};
#[cfg(target_os = "linux")]
use crate::message::{receive, send};
use crate::spawned::Spawned;
use crate::{Limit, Limits, WorkerError};

/// Environment variables that a program may need to start; workers receive no others.
const ENVIRONMENT: [&str; 2] = ["LD_LIBRARY_PATH", "SystemRoot"];

/// Program whose `main` calls [`run_worker`](crate::run_worker) almost first.
///
/// The `gpt2` binary uses itself, with a hidden command.
///
/// ```
/// use candle_gpt2_confined::WorkerProgram;
///
/// // In a program whose `main` calls `run_worker` for this argument before it starts a thread.
/// let program = WorkerProgram::this("confined")?;
/// assert_eq!(program.arguments, ["confined"]);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerProgram {
    /// Path of the executable.
    pub program: PathBuf,
    /// Command-line arguments.
    pub arguments: Vec<OsString>,
    /// Whether a process forks for each session (Linux only); if not, each session starts the program.
    pub forks: bool,
}

impl WorkerProgram {
    /// Uses the running executable with this argument, and forks if the system supports forking.
    ///
    /// # Errors
    /// If the system does not report the executable's path.
    pub fn this(argument: &str) -> io::Result<Self> {
        // On Linux, this link refers to the running executable even if its file has been replaced.
        let running = PathBuf::from("/proc/self/exe");
        let program = if running.exists() { running } else { env::current_exe()? };
        Ok(Self { program, arguments: vec![argument.into()], forks: cfg!(target_os = "linux") })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env_clear();
        for name in ENVIRONMENT {
            if let Some(value) = env::var_os(name) {
                command.env(name, value);
            }
        }
        command
    }
}

/// Function that returns a program's source bytes, or an error message.
type Source = Box<dyn Fn() -> Result<Vec<u8>, String> + Send + Sync>;

/// Untrusted program that runs in child processes.
///
/// ```
/// use std::time::Duration;
///
/// use candle_gpt2_confined::{Limits, Program, Service, Worker, WorkerProgram};
///
/// struct Repeated(Vec<u8>);
///
/// impl Program for Repeated {
///     fn answer(&mut self, question: &[u8]) -> Vec<u8> {
///         self.0.repeat(question.len())
///     }
/// }
///
/// // In `main`, for the argument below: `run_worker(&[SERVICE])`.
/// const SERVICE: Service =
///     Service { name: "repeated", stack_bytes: 1 << 20, prepare: |source| Ok(Box::new(Repeated(source.to_vec()))) };
///
/// let limits =
///     Limits { cpu: Duration::from_secs(2), memory_bytes: 64 << 20, wall: Duration::from_secs(10) };
/// let source = || Ok(b"ab".to_vec());
/// let worker = Worker::new(WorkerProgram::this("confined")?, SERVICE.name, limits, source);
/// // `worker.session()?.ask(b"12", &limits, false)?.bytes` is `abab`.
/// # let _ = worker;
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Worker {
    program: WorkerProgram,
    service: &'static str,
    /// Limits for preparing the program.
    limits: Limits,
    source: Source,
    /// Fork server, once started.
    #[cfg(target_os = "linux")]
    server: Mutex<Option<ForkServer>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("program", &self.program)
            .field("service", &self.service)
            .finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates a worker for the program with this source; starts no process yet.
    pub fn new(
        program: WorkerProgram,
        service: &'static str,
        limits: Limits,
        source: impl Fn() -> Result<Vec<u8>, String> + Send + Sync + 'static,
    ) -> Self {
        let source = Box::new(source);
        Self {
            program,
            service,
            limits,
            source,
            #[cfg(target_os = "linux")]
            server: Mutex::default(),
        }
    }

    /// Starts a session, which is a process with the prepared program.
    ///
    /// # Errors
    /// If the program is invalid, its preparation exceeds a limit, or the system cannot start a process.
    pub fn session(&self) -> Result<Session, WorkerError> {
        #[cfg(target_os = "linux")]
        if self.program.forks {
            return Ok(Session(Some(Channel::Socket(self.forked()?))));
        }
        Ok(Session(Some(Channel::Process(self.spawned()?))))
    }

    /// Starts a session and asks its first question; see [`Session::ask`].
    ///
    /// # Errors
    /// Same as [`Worker::session`] and [`Session::ask`].
    pub fn begin(
        &self,
        question: &[u8],
        limits: &Limits,
        measures: bool,
    ) -> Result<(Session, Answer), WorkerError> {
        let once = || {
            let mut session = self.session()?;
            let answer = session.ask(question, limits, measures)?;
            Ok((session, answer))
        };
        // The fork server may have been killed; a retry starts it again.
        once().or_else(|error| if error == WorkerError::Ended { once() } else { Err(error) })
    }

    #[cfg(target_os = "linux")]
    fn forked(&self) -> Result<UnixStream, WorkerError> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        // This fails if the server has exited in the meantime, in which case a new server is started.
        if let Some(session) = server.as_ref().and_then(|server| server.session().ok()) {
            return Ok(session);
        }
        let (hello, source) = self.first_messages()?;
        let started = ForkServer::start(self.program.command(), &hello, &source, self.limits.wall);
        let started = started.map_err(WorkerError::unavailable)?;
        self.check_prepared(started.prepared(MAX_MESSAGE_BYTES))?;
        server.insert(started).session().map_err(WorkerError::unavailable)
    }

    fn spawned(&self) -> Result<Spawned, WorkerError> {
        let (hello, source) = self.first_messages()?;
        let started = Spawned::start(self.program.command(), &hello, &source, MAX_MESSAGE_BYTES);
        let mut started = started.map_err(WorkerError::unavailable)?;
        self.check_prepared(started.receive(self.limits.wall))?;
        Ok(started)
    }

    fn first_messages(&self) -> Result<(Vec<u8>, Vec<u8>), WorkerError> {
        let source = (self.source)().map_err(|what| WorkerError::Refused { what })?;
        let hello = Hello {
            service: self.service.to_owned(),
            forks: self.program.forks && cfg!(target_os = "linux"),
            cpu_micros: u64::try_from(self.limits.cpu.as_micros()).unwrap_or(u64::MAX),
            memory_bytes: self.limits.memory_bytes,
        };
        Ok((serde_json::to_vec(&hello).map_err(WorkerError::unavailable)?, source))
    }

    fn check_prepared(&self, received: io::Result<Received>) -> Result<(), WorkerError> {
        let answer = received_within(received, &self.limits)?;
        match answer.split_first() {
            Some((1, _)) => Ok(()),
            Some((_, what)) => Err(WorkerError::Refused { what: String::from_utf8_lossy(what).into_owned() }),
            None => Err(WorkerError::Ended),
        }
    }
}

/// Process that runs a program and answers questions.
///
/// The process ends when the session is dropped or on the first failure. [`Worker::session`] starts it.
#[derive(Debug)]
pub struct Session(Option<Channel>);

#[derive(Debug)]
enum Channel {
    #[cfg(target_os = "linux")]
    Socket(UnixStream),
    Process(Spawned),
}

/// Answer and what it cost.
///
/// Returned by [`Session::ask`]; see [`Worker`] for an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Content of the answer.
    pub bytes: Vec<u8>,
    /// CPU time spent on the answer; zero on systems that do not report it.
    pub cpu: Duration,
    /// Memory that the process has written, in bytes; 0 if not measured.
    pub private_bytes: usize,
}

impl Session {
    /// Asks the program a question; `measures` also requests the memory usage.
    ///
    /// # Errors
    /// If computing the answer exceeds a limit, or the process exits before it answers. Either ends the
    /// session.
    pub fn ask(&mut self, question: &[u8], limits: &Limits, measures: bool) -> Result<Answer, WorkerError> {
        // The channel is put back only on success. If an answer is missed, later answers would be out of sync
        // with their questions.
        let mut channel = self.0.take().ok_or(WorkerError::Ended)?;
        let head = QuestionHead::new(limits, measures).to_bytes();
        let message = received_within(channel.exchange(&[&head, question], limits.wall), limits)?;
        let (head, bytes) = AnswerHead::split(&message).ok_or(WorkerError::Ended)?;
        if head.panicked {
            return Err(WorkerError::Ended);
        }
        self.0 = Some(channel);
        let private_bytes = usize::try_from(head.private_bytes).unwrap_or(usize::MAX);
        Ok(Answer { bytes: bytes.to_vec(), cpu: head.cpu, private_bytes })
    }
}

impl Channel {
    fn exchange(&mut self, question: &[&[u8]], wall: Duration) -> io::Result<Received> {
        // Receive even if sending fails: the process may have reported a limit and exited before the question
        // arrived.
        let exchanged = match self {
            #[cfg(target_os = "linux")]
            Self::Socket(socket) => {
                socket.set_read_timeout(Some(wall))?;
                socket.set_write_timeout(Some(wall))?;
                (send(&*socket, question), receive(&*socket, MAX_MESSAGE_BYTES))
            }
            Self::Process(process) => (process.send(question), process.receive(wall)),
        };
        match exchanged {
            (Err(error), Err(_)) => Err(error),
            (_, received) => received,
        }
    }
}

fn received_within(received: io::Result<Received>, limits: &Limits) -> Result<Vec<u8>, WorkerError> {
    let exceeded = |limit| WorkerError::Exceeded { limit, limits: *limits };
    match received {
        Ok(message) => message.map_err(exceeded),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(exceeded(Limit::WallTime))
        }
        Err(_) => Err(WorkerError::Ended),
    }
}
