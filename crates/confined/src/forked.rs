//! Workers that fork (Linux).
//!
//! One server process prepares the program and forks for each session. A session therefore takes about a
//! millisecond to start, owns only the memory that it writes, and leaves nothing behind.
//!
//! The caller creates a socket pair for each session and sends one end over the server's standard input,
//! which is itself a socket. A process exits when its socket closes.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::host::{Hello, Program, Service, answer_all, prepare};
use crate::limits;
use crate::message::{Received, receive, send};

/// Process that holds a prepared program and forks a child for each session.
///
/// Dropping a fork server kills its process, but not the sessions.
#[derive(Debug)]
pub(crate) struct ForkServer {
    process: Child,
    socket: UnixStream,
}

impl ForkServer {
    /// Starts the process and sends the first two messages to it.
    ///
    /// [`ForkServer::prepared`] receives the reply.
    pub(crate) fn start(
        mut command: Command,
        hello: &[u8],
        source: &[u8],
        wall: Duration,
    ) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let command = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Self { process: command.spawn()?, socket };
        server.socket.set_read_timeout(Some(wall))?;
        server.socket.set_write_timeout(Some(wall))?;
        send(&server.socket, &[hello])?;
        send(&server.socket, &[source])?;
        Ok(server)
    }

    /// Receives the reply that the process sends when the program is prepared.
    pub(crate) fn prepared(&self, max_bytes: u64) -> io::Result<Received> {
        receive(&self.socket, max_bytes)
    }

    /// Starts a session in its own process.
    pub(crate) fn session(&self) -> io::Result<UnixStream> {
        let (socket, theirs) = UnixStream::pair()?;
        send_socket(&self.socket, &theirs.into())?;
        Ok(socket)
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // Fails if the process has already exited.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// Runs the server process: prepares the program, then forks for each session.
pub(crate) fn serve(service: &Service, hello: &Hello, source: &[u8]) -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // A forked process that inherited this socket would keep it open and hide the server's exit from the
    // caller.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    limits::bound_process()?;
    limits::report_limits(control.as_raw_fd());
    let mut program = match prepare(service, hello, source)? {
        Ok(program) => program,
        Err(what) => return send(&control, &[&[0], what.as_bytes()]),
    };
    send(&control, &[&[1]])?;
    #[expect(unsafe_code, reason = "no caller waits for the forked processes")]
    // SAFETY: this call installs no handler; it only makes the kernel reap exited children.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
    while let Some(socket) = receive_socket(&control)? {
        #[expect(unsafe_code, reason = "each session gets its own process with the prepared program")]
        // SAFETY: this process has a single thread, so the child cannot inherit a lock that another thread
        // holds.
        let forked = unsafe { libc::fork() };
        match forked {
            0 => {
                drop(control);
                return answer(&mut *program, service.stack_bytes, &UnixStream::from(socket));
            }
            // If `fork` failed, the caller finds out when the socket closes.
            _ => drop(socket),
        }
    }
    Ok(())
}

/// Runs in the forked process and answers the questions of one session.
fn answer(program: &mut dyn Program, stack_bytes: usize, socket: &UnixStream) -> io::Result<()> {
    limits::report_limits(socket.as_raw_fd());
    thread::scope(|scope| {
        let work = || answer_all(program, stack_bytes, socket, socket);
        let thread = thread::Builder::new().stack_size(stack_bytes).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

fn send_socket(over: &UnixStream, socket: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let sockets = [socket.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
    // Without this flag, writing to a closed socket would raise SIGPIPE.
    sendmsg(over, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the next socket, or `None` once the other end is closed.
fn receive_socket(over: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(over, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    }))
}
