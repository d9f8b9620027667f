//! Workers of any program: limits, isolation, and what they leave behind.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_gpt2_confined::{Limit, Limits, Program, Service, Worker, WorkerError, WorkerProgram};

use crate::{Test, forking, spawning, tests};

pub(crate) const TESTS: &[Test] = tests![
    a_program_answers_every_question_of_a_session,
    each_limit_ends_the_session_alone_and_is_named,
    a_preparation_has_limits_and_reports_what_is_wrong,
    a_panic_ends_the_session_alone,
    no_secret_and_no_file_reaches_a_worker,
    no_process_is_left_behind,
    a_service_that_the_program_lacks_is_an_error,
    memory_is_that_of_the_session_alone,
];

/// A program that does what each question says.
pub(crate) const OBEDIENT: Service = Service { name: "obedient", stack_bytes: 64 << 20, prepare };

const LIMITS: Limits =
    Limits { cpu: Duration::from_millis(300), memory_bytes: 160 << 20, wall: Duration::from_secs(5) };
/// Longer than any limit on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

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
                let mut eaten = Vec::new();
                loop {
                    eaten.push(black_box(vec![1_u8; 1 << 20]));
                }
            }
            b"recurse" => vec![recursed(1)],
            b"sleep" => {
                std::thread::sleep(PATIENCE);
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

fn both() -> [WorkerProgram; 2] {
    [forking(), spawning()]
}

fn asked(worker: &Worker, question: &str) -> Result<String, WorkerError> {
    let answer = worker.session()?.ask(question.as_bytes(), &LIMITS, false)?;
    Ok(String::from_utf8(answer.bytes).unwrap())
}

fn a_program_answers_every_question_of_a_session() {
    for program in both() {
        let worker = worker(program, "source ");
        let mut session = worker.session().unwrap();
        for question in ["a", "", "bc"] {
            let answer = session.ask(question.as_bytes(), &LIMITS, false).unwrap();
            assert_eq!(answer.bytes, format!("source {question}").into_bytes());
        }
        let long = "x".repeat(3 << 20);
        assert_eq!(asked(&worker, &long).unwrap(), format!("source {long}"));
    }
}

fn each_limit_ends_the_session_alone_and_is_named() {
    let cases = [
        ("spin", Limit::CpuTime, "it takes more than 300ms of CPU time"),
        ("eat", Limit::Memory, "it takes more than 160 MB of memory"),
        ("recurse", Limit::Stack, "it is nested too deeply"),
    ];
    for program in both() {
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
            assert!(started.elapsed() < PATIENCE);
            assert_eq!(session.ask(b"a", &LIMITS, false), Err(WorkerError::Ended));
            assert_eq!(other.ask(b"a", &LIMITS, false).unwrap().bytes, b"a");
            assert_eq!(asked(&worker, "b").unwrap(), "b");
        }
        let limits = Limits { wall: Duration::from_millis(100), ..LIMITS };
        let error = worker.session().unwrap().ask(b"sleep", &limits, false).unwrap_err();
        assert_eq!(error.to_string(), "it takes longer than 100ms");
    }
}

fn a_preparation_has_limits_and_reports_what_is_wrong() {
    for program in both() {
        for (source, expected) in [
            ("wrong", "it is wrong"),
            ("panic", "it cannot be read"),
            ("spin", "it takes more than 300ms of CPU time"),
            ("eat", "it takes more than 160 MB of memory"),
            ("recurse", "it is nested too deeply"),
        ] {
            let error = asked(&worker(program.clone(), source), "a").unwrap_err();
            assert_eq!(error.to_string(), expected, "{source}");
        }
    }
}

fn a_panic_ends_the_session_alone() {
    for program in both() {
        let worker = worker(program, "");
        assert_eq!(asked(&worker, "panic"), Err(WorkerError::Ended));
        assert_eq!(asked(&worker, "a").unwrap(), "a");
    }
}

fn no_secret_and_no_file_reaches_a_worker() {
    for program in both() {
        let worker = worker(program, "");
        // Cargo's tests set the first.
        let names = asked(&worker, "environment").unwrap();
        let mut others = names.split(',').filter(|name| !name.is_empty() && *name != "LD_LIBRARY_PATH");
        assert_eq!(others.next(), None, "{names}");
        if cfg!(target_os = "linux") {
            // Three standard streams, a socket, the folder that is read.
            let files: usize = asked(&worker, "files").unwrap().parse().unwrap();
            assert!(files <= 5, "{files}");
        }
    }
}

fn no_process_is_left_behind() {
    if !cfg!(target_os = "linux") {
        return;
    }
    for program in both() {
        let worker = worker(program, "");
        let processes: Vec<String> = (0..3).map(|_| asked(&worker, "process").unwrap()).collect();
        let spinning = asked(&worker, "spin");
        assert!(spinning.is_err());
        let started = Instant::now();
        // Not even as a zombie.
        while processes.iter().any(|process| std::fs::exists(format!("/proc/{process}")).unwrap()) {
            assert!(started.elapsed() < PATIENCE, "{processes:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn a_service_that_the_program_lacks_is_an_error() {
    for program in both() {
        let worker = Worker::new(program, "nothing", LIMITS, || Ok(Vec::new()));
        assert_eq!(worker.session().unwrap_err(), WorkerError::Ended);
    }
    let program = WorkerProgram { program: "/nothing/here".into(), ..forking() };
    assert!(matches!(worker(program, "").session(), Err(WorkerError::Unavailable { .. })));
}

fn memory_is_that_of_the_session_alone() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let worker = worker(forking(), "");
    let mut session = worker.session().unwrap();
    let before = session.ask(b"a", &LIMITS, true).unwrap().private_bytes;
    session.ask(b"write", &LIMITS, false).unwrap();
    let after = session.ask(b"a", &LIMITS, true).unwrap().private_bytes;
    assert!(before > 0 && after > before + (8 << 20), "{before} {after}");
    assert!(before < 4 << 20, "{before} bytes of a process that has done nothing");
}
