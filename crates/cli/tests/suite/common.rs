//! Helpers that run the program as its users do.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use candle_gpt2_testing::CheckpointFolder;
use serde_json::Value;

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const FAILURE: i32 = 1;
pub(crate) const USAGE: i32 = 2;

/// Maximum time that a test waits for an expected event.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn from_output(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("output in UTF-8");
        let code = output.status.code().expect("an exit code, not a signal");
        Self { code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.code, SUCCESS, "{}", self.stderr);
        serde_json::from_str(&self.stdout).expect("one JSON object")
    }
}

pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(arguments).env_remove("RUST_BACKTRACE");
    command
}

pub(crate) fn run(arguments: &[&str]) -> Run {
    Run::from_output(&program(arguments).stdin(Stdio::null()).output().expect("the program runs"))
}

pub(crate) fn run_with_input(arguments: &[&str], input: &[u8]) -> Run {
    let mut child = program(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    child.stdin.take().expect("a pipe").write_all(input).expect("the program reads its input");
    Run::from_output(&child.wait_with_output().expect("an exit status"))
}

#[track_caller]
pub(crate) fn assert_refused(run: &Run, code: i32, expected: &str) {
    assert_eq!(run.code, code, "stdout: {} stderr: {}", run.stdout, run.stderr);
    assert!(run.stderr.contains(expected), "`{expected}` is not in: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    assert_eq!(run.stdout, "", "standard output is empty");
}

pub(crate) fn path(folder: &Path) -> &str {
    folder.to_str().expect("a path in UTF-8")
}

/// Interrupts a run with these arguments and returns the first line of its partial output file.
///
/// Kills the run as soon as the line exists. A run that finishes too early is repeated.
pub(crate) fn settings_line(folder: &CheckpointFolder, arguments: &[&str]) -> String {
    let output = folder.file("settings");
    let partial = folder.file("settings.partial");
    let arguments = [arguments, &["--output", path(&output)]].concat();
    let mut child = program(&arguments).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    loop {
        let line = fs::read_to_string(&partial).ok().filter(|text| text.contains('\n'));
        if let Some(line) = line.and_then(|text| text.lines().next().map(|line| format!("{line}\n"))) {
            let _ = child.kill();
            child.wait().unwrap();
            let _ = fs::remove_file(&partial);
            let _ = fs::remove_file(&output);
            return line;
        }
        if child.try_wait().unwrap().is_some() {
            // The run finished before the line was seen, so try again.
            let _ = fs::remove_file(&output);
            child = program(&arguments).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        }
        assert!(start.elapsed() < TIMEOUT, "no line arrived");
    }
}

/// Waits for a condition and fails with `message` on a timeout.
#[track_caller]
pub(crate) fn wait_until(message: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "{message}");
        thread::sleep(Duration::from_millis(1));
    }
}
