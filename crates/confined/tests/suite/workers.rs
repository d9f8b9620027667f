//! General worker tests: limits, isolation and cleanup.

use std::hint::black_box;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_gpt2_confined::{Limit, Limits, Program, Service, Worker, WorkerError, WorkerProgram};

use crate::{Test, forking, spawning, tests};

pub(crate) const TESTS: &[Test] = tests![
    session_answers_every_question,
    exceeding_a_limit_ends_only_that_session,
    preparation_is_limited_and_reports_errors,
    panic_ends_only_its_session,
    worker_inherits_no_environment_or_files,
    no_process_is_left_behind,
    worker_exits_cleanly_only_if_its_input_closes_between_messages,
    unknown_service_or_program_is_an_error,
    reported_memory_covers_only_the_session,
];

/// Worker program that treats each question as a command and runs it.
pub(crate) const OBEDIENT: Service = Service { name: "obedient", stack_bytes: 64 << 20, prepare };

const LIMITS: Limits =
    Limits { cpu: Duration::from_millis(300), memory_bytes: 160 << 20, wall: Duration::from_secs(5) };
/// Timeout that exceeds every limit, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

struct Obedient(Vec<u8>);

fn prepare(source: &[u8]) -> Result<Box<dyn Program>, String> {
    match source {
        b"wrong" => Err("it is wrong".into()),
        source => {
            let mut program = Obedient(source.to_vec());
            _ = program.answer(source);
            Ok(Box::new(program))
        }
    }
}

impl Program for Obedient {
    fn answer(&mut self, question: &[u8]) -> Vec<u8> {
        match question {
            b"spin" => loop {
                black_box(0);
            },
            b"eat" => {
                let mut chunks = Vec::new();
                loop {
                    chunks.push(black_box(vec![1_u8; 1 << 20]));
                }
            }
            b"recurse" => vec![recursed(1)],
            b"sleep" => {
                std::thread::sleep(TIMEOUT);
                Vec::new()
            }
            b"panic" => panic!("as requested"),
            b"environment" => {
                let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
                names.collect::<Vec<_>>().join(",").into_bytes()
            }
            b"files" => std::fs::read_dir("/proc/self/fd").unwrap().count().to_string().into_bytes(),
            b"process" => std::process::id().to_string().into_bytes(),
            b"write" => {
                self.0.extend(black_box(vec![1; 8 << 20]));
                Vec::new()
            }
            _ => [&self.0, question].concat(),
        }
    }
}

#[expect(unconditional_recursion, reason = "it fills the stack")]
fn recursed(depth: u8) -> u8 {
    let local = black_box([depth; 1024]);
    recursed(local[usize::from(depth)]).wrapping_add(local[1])
}

fn worker(program: WorkerProgram, source: &'static str) -> Worker {
    Worker::new(program, OBEDIENT.name, LIMITS, move || Ok(source.into()))
}

fn programs() -> [WorkerProgram; 2] {
    [forking(), spawning()]
}

fn ask(worker: &Worker, question: &str) -> Result<String, WorkerError> {
    let answer = worker.session()?.ask(question.as_bytes(), &LIMITS, false)?;
    Ok(String::from_utf8(answer.bytes).unwrap())
}

fn session_answers_every_question() {
    for program in programs() {
        let worker = worker(program, "source ");
        let mut session = worker.session().unwrap();
        for question in ["a", "", "bc"] {
            let answer = session.ask(question.as_bytes(), &LIMITS, false).unwrap();
            assert_eq!(answer.bytes, format!("source {question}").into_bytes());
        }
        let long = "x".repeat(3 << 20);
        assert_eq!(ask(&worker, &long).unwrap(), format!("source {long}"));
    }
}

fn exceeding_a_limit_ends_only_that_session() {
    let cases = [
        ("spin", Limit::CpuTime, "exceeded the CPU time limit of 300ms"),
        ("eat", Limit::Memory, "exceeded the memory limit of 160 MB"),
        ("recurse", Limit::Stack, "nested too deeply"),
    ];
    for program in programs() {
        let worker = worker(program, "");
        for (question, expected, message) in cases {
            let (mut session, mut other) = (worker.session().unwrap(), worker.session().unwrap());
            let started = Instant::now();
            let error = session.ask(question.as_bytes(), &LIMITS, false).unwrap_err();
            assert!(
                matches!(error, WorkerError::Exceeded { limit, .. } if limit == expected),
                "{question}: {error:?}"
            );
            assert_eq!(error.to_string(), message);
            assert!(started.elapsed() < TIMEOUT);
            assert_eq!(session.ask(b"a", &LIMITS, false), Err(WorkerError::Ended));
            assert_eq!(other.ask(b"a", &LIMITS, false).unwrap().bytes, b"a");
            assert_eq!(ask(&worker, "b").unwrap(), "b");
        }
        let limits = Limits { wall: Duration::from_millis(100), ..LIMITS };
        let error = worker.session().unwrap().ask(b"sleep", &limits, false).unwrap_err();
        assert_eq!(error.to_string(), "exceeded the time limit of 100ms");
    }
}

fn preparation_is_limited_and_reports_errors() {
    for program in programs() {
        for (source, expected) in [
            ("wrong", "it is wrong"),
            ("panic", "cannot be parsed"),
            ("spin", "exceeded the CPU time limit of 300ms"),
            ("eat", "exceeded the memory limit of 160 MB"),
            ("recurse", "nested too deeply"),
        ] {
            let error = ask(&worker(program.clone(), source), "a").unwrap_err();
            assert_eq!(error.to_string(), expected, "{source}");
        }
    }
}

fn panic_ends_only_its_session() {
    for program in programs() {
        let worker = worker(program, "");
        assert_eq!(ask(&worker, "panic"), Err(WorkerError::Ended));
        assert_eq!(ask(&worker, "a").unwrap(), "a");
    }
}

fn worker_inherits_no_environment_or_files() {
    for program in programs() {
        let worker = worker(program, "");
        // `cargo test` sets `LD_LIBRARY_PATH`, which workers receive.
        let names = ask(&worker, "environment").unwrap();
        let mut others = names.split(',').filter(|name| !name.is_empty() && *name != "LD_LIBRARY_PATH");
        assert_eq!(others.next(), None, "{names}");
        if cfg!(target_os = "linux") {
            // The five are three standard streams, a socket and the folder being listed.
            let files: usize = ask(&worker, "files").unwrap().parse().unwrap();
            assert!(files <= 5, "{files}");
        }
    }
}

fn no_process_is_left_behind() {
    if !cfg!(target_os = "linux") {
        return;
    }
    for program in programs() {
        let worker = worker(program, "");
        let processes: Vec<String> = (0..3).map(|_| ask(&worker, "process").unwrap()).collect();
        let spinning = ask(&worker, "spin");
        assert!(spinning.is_err());
        let started = Instant::now();
        // A zombie process counts as left behind too.
        while processes.iter().any(|process| std::fs::exists(format!("/proc/{process}")).unwrap()) {
            assert!(started.elapsed() < TIMEOUT, "{processes:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn worker_exits_cleanly_only_if_its_input_closes_between_messages() {
    let message = |payload: &[u8]| [&(payload.len() as u64).to_le_bytes(), payload].concat();
    let hello = format!(
        r#"{{"service":"{}","forks":false,"cpu_micros":{},"memory_bytes":{}}}"#,
        OBEDIENT.name,
        LIMITS.cpu.as_micros(),
        LIMITS.memory_bytes
    );
    let begun = [message(hello.as_bytes()), message(b"source")].concat();
    for (input, is_clean) in [(begun.clone(), true), ([&begun[..], &[9; 3]].concat(), false)] {
        let WorkerProgram { program, arguments, .. } = spawning();
        let mut worker = Command::new(program);
        let worker = worker.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = worker.spawn().unwrap();
        process.stdin.take().unwrap().write_all(&input).unwrap();
        assert_eq!(process.wait().unwrap().success(), is_clean);
    }
}

fn unknown_service_or_program_is_an_error() {
    for program in programs() {
        let worker = Worker::new(program, "nothing", LIMITS, || Ok(Vec::new()));
        assert_eq!(worker.session().unwrap_err(), WorkerError::Ended);
    }
    let program = WorkerProgram { program: "/nothing/here".into(), ..forking() };
    assert!(matches!(worker(program, "").session(), Err(WorkerError::Unavailable { .. })));
}

fn reported_memory_covers_only_the_session() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let worker = worker(forking(), "");
    let mut session = worker.session().unwrap();
    let before = session.ask(b"a", &LIMITS, true).unwrap().private_bytes;
    session.ask(b"write", &LIMITS, false).unwrap();
    let after = session.ask(b"a", &LIMITS, true).unwrap().private_bytes;
    assert!(before > 0 && after > before + (8 << 20), "{before} {after}");
    assert!(before < 4 << 20, "{before} bytes in an idle process");
}
