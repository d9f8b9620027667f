//! The start of a worker: what its caller wants, and whether it forks.

use std::io;
use std::thread;

use crate::Service;
use crate::host::{Hello, answer_all, prepare, received};
use crate::limits;
use crate::message::send;

/// Work of the program that a [`WorkerProgram`](crate::WorkerProgram) names. Reads from standard input what to run, and returns
/// when that is closed. The calling process must have one thread.
///
/// # Errors
/// If standard input does not come from a [`Worker`](crate::Worker), or the service is not in the list.
pub fn run_worker(services: &[Service]) -> io::Result<()> {
    limits::close_other_files();
    let mut input = io::stdin().lock();
    let hello = received(&mut input)?;
    let hello: Hello = serde_json::from_slice(&hello)?;
    let service = services.iter().find(|service| service.name == hello.service);
    let service = service.ok_or(io::ErrorKind::Unsupported)?;
    let source = received(&mut input)?;
    drop(input);
    if !hello.forks {
        return serve_one(service, &hello, &source);
    }
    #[cfg(target_os = "linux")]
    return crate::forked::serve(service, &hello, &source);
    #[cfg(not(target_os = "linux"))]
    return Err(io::ErrorKind::Unsupported.into());
}

/// Runs one program in this process, which ends with it.
fn serve_one(service: &Service, hello: &Hello, source: &[u8]) -> io::Result<()> {
    limits::bound_process()?;
    limits::report_limits_to_output();
    let work = || -> io::Result<()> {
        let mut output = io::stdout().lock();
        let mut program = match prepare(service, hello, source)? {
            Ok(program) => program,
            Err(what) => return send(&mut output, &[&[0], what.as_bytes()]),
        };
        send(&mut output, &[&[1]])?;
        answer_all(&mut *program, service.stack_bytes, io::stdin().lock(), output)
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(service.stack_bytes).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}
