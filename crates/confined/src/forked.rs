//! Workers that fork (Linux). One process prepares the program and waits. For each session it forks, so that a session costs a
//! millisecond, holds only the memory that it writes, and leaves nothing behind.
//!
//! The caller makes a pair of sockets for each session, and sends one of them over the socket that the waiting process has as its
//! standard input. A process ends when its socket closes.

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

/// The process that waits with a prepared program. Dropping it ends the process, but not its sessions.
#[derive(Debug)]
pub(crate) struct ForkServer {
    process: Child,
    socket: UnixStream,
}

impl ForkServer {
    /// Starts the process and sends it the first two messages; [`ForkServer::prepared`] receives the answer.
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

    /// Receives the answer to the preparation.
    pub(crate) fn prepared(&self, most: u64) -> io::Result<Received> {
        receive(&self.socket, most)
    }

    /// Begins a session in a process of its own.
    pub(crate) fn session(&self) -> io::Result<UnixStream> {
        let (socket, theirs) = UnixStream::pair()?;
        send_socket(&self.socket, &theirs.into())?;
        Ok(socket)
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // It may have ended.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// The work of the process that waits.
pub(crate) fn serve(service: &Service, hello: &Hello, source: &[u8]) -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // A fork that held the socket would hide that this process has ended.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    limits::bound_process()?;
    limits::report_limits(control.as_raw_fd());
    let mut program = match prepare(service, hello, source)? {
        Ok(program) => program,
        Err(what) => return send(&control, &[&[0], what.as_bytes()]),
    };
    send(&control, &[&[1]])?;
    #[expect(unsafe_code, reason = "nothing waits for the forked processes")]
    // SAFETY: this installs no handler; the system forgets children that end.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
    while let Some(socket) = receive_socket(&control)? {
        #[expect(unsafe_code, reason = "each session has a process with the prepared program")]
        // SAFETY: this process has one thread, so the child finds no lock held by another.
        let forked = unsafe { libc::fork() };
        match forked {
            0 => {
                drop(control);
                return answer(&mut *program, service.stack_bytes, &UnixStream::from(socket));
            }
            // The caller sees that its socket closes.
            _ => drop(socket),
        }
    }
    Ok(())
}

/// The work of a session's process.
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
    // Without this flag, a closed reader would raise a signal.
    sendmsg(over, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next socket; `None` once the other side is closed.
fn receive_socket(over: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(over, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    }))
}
