//! Tests a server with unmodified Python clients; the checks are in `scripts/checks`.
//!
//! `GPT2_CLIENTS_PYTHON` names a Python interpreter with the packages from `scripts/requirements.txt`.
//! Without it, each test reports that it was skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_gpt2_testing::skipped;

use crate::common::{Running, built_in, load, start_model};

/// Environment variable that names a Python interpreter with the clients' packages.
const PYTHON_VARIABLE: &str = "GPT2_CLIENTS_PYTHON";
/// Queue capacity of the server: more requests than langchain sends at once, yet quick to fill.
const QUEUE: usize = 64;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a pytest module from this repository against a server.
///
/// If there is no Python interpreter, `start` is not called.
fn check(script: &str, start: impl FnOnce() -> Running, arguments: &[&str]) {
    let Some(python) = std::env::var_os(PYTHON_VARIABLE) else {
        skipped(&format!("{script}, because {PYTHON_VARIABLE} names no Python with its packages"));
        return;
    };
    let server = start();
    let output = Command::new(python)
        .args(["-m", "pytest", "-q"])
        .arg(repository().join("scripts/checks").join(script))
        .args(["--base-url", &server.url()])
        .args(arguments)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script} failed:\n{stdout}\n{stderr}");
}

#[test]
fn openai_and_langchain_work_unmodified() {
    let start = || start_model(built_in(), "stories", |options| options.queue = QUEUE);
    let queue = QUEUE.to_string();
    check("test_clients.py", start, &["--queue", &queue]);
}

#[test]
fn openai_and_langchain_work_with_a_key() {
    let start = || start_model(built_in(), "stories", |options| options.keys = vec!["a-key".into()]);
    check("test_clients.py", start, &["--key", "a-key"]);
}

#[test]
fn lm_eval_scores_match_its_own_model() {
    let folder = repository().join("models/stories");
    let start = || start_model(load(&folder), "stories", |_| ());
    let checkpoint = folder.to_str().unwrap();
    check("test_lm_eval.py", start, &["--model", checkpoint]);
}
