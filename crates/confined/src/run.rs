//! Entry point of a worker process.

use std::io;
use std::thread;

use crate::Service;
use crate::host::{Hello, answer_all, prepare, received};
use crate::limits;
use crate::message::send;

/// Runs the worker process that a [`WorkerProgram`](crate::WorkerProgram) starts.
///
/// Reads the requested service and the program's source from standard input. Returns once standard input is
/// closed. The calling process must have a single thread.
///
/// # Errors
/// If standard input does not come from a [`Worker`](crate::Worker) or closes in the middle of a message, or
/// if `services` lacks the requested service.
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

/// Serves a single program in this process and returns when its session ends.
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
