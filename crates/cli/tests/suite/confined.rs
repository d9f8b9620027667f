//! Tests of `gpt2 serve` and `gpt2 eval` with hostile templates.
//!
//! A worker's limits stop each template, and nothing else is affected.

use std::fs;
use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

use candle_gpt2_testing::fixture_path;

use crate::common::{path, run, wait_until};
use crate::serve::{JSON, Served, send};
use crate::serve_grammars::descendants;

/// Timeout for a template that uses two seconds of CPU time on a very busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Jinja template that runs for hours but takes few interpreter steps.
const FOREVER: &str = "{% set s='é'*10000000 %}{% for i in range(99999) %}{% set x=s[-1] %}{% endfor %}";

fn serve_template(template: &str) -> (tempfile::TempDir, Served) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("chat.jinja");
    fs::write(&file, template).expect("a file");
    let served = Served::start(&["--port", "0", "--chat-template", path(&file)]);
    (folder, served)
}

/// Template that nests a list so deeply that dropping it overflows any stack.
const NESTED: &str =
    "{% set ns=namespace(s=[]) %}{% for i in range(99000) %}{% set ns.s=[ns.s] %}{% endfor %}ok";

fn chat(served: &Served) -> String {
    let body = r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}"#;
    send(served.connect(), "POST", "/v1/chat/completions", JSON, body)
}

#[test]
fn hostile_chat_template_fails_only_its_request() {
    for (template, expected) in [
        ("{% set ns=namespace() %}{% set ns.a=ns %}{{ ns }}", "nested too deeply"),
        (NESTED, "nested too deeply"),
        ("{{ [[1],[2]]|tojson(indent=10**9) }}", "exceeded the memory limit of 256 MB"),
        (FOREVER, "exceeded the CPU time limit of 2s"),
    ] {
        let (_folder, mut served) = serve_template(template);
        let answer = chat(&served);
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains(expected), "{answer}");
        let completed =
            send(served.connect(), "POST", "/v1/completions", JSON, r#"{"prompt": "x", "max_tokens": 1}"#);
        assert!(completed.starts_with("HTTP/1.1 200 "), "{completed}");
        assert_eq!(served.child.try_wait().expect("a state"), None);
    }
}

#[test]
fn slow_template_delays_neither_health_nor_shutdown() {
    let (_folder, mut served) = serve_template(FOREVER);
    let mut stream = served.connect();
    let body = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n",
        body.len()
    );
    let idle = descendants(served.child.id()).len();
    stream.write_all(format!("{head}{body}").as_bytes()).expect("the request is sent");
    wait_until("the template does not run", || descendants(served.child.id()).len() > idle);
    let health = send(served.connect(), "GET", "/health", "", "");
    assert!(health.starts_with("HTTP/1.1 200 "), "{health}");
    let process = served.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &process]).status().expect("`kill` runs").success());
    wait_until("the server does not end", || served.child.try_wait().expect("a state").is_some());
    _ = stream.read(&mut [0; 1]);
}

#[test]
fn deeply_nested_chat_template_is_rejected_at_startup() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("chat.jinja");
    for template in
        [format!("{{{{ {}1 }}}}", "- ".repeat(50_000)), format!("{{{{ {}1 }}}}", "1+".repeat(50_000))]
    {
        fs::write(&file, template).expect("a file");
        let result = run(&["serve", "--port", "0", "--chat-template", path(&file)]);
        assert_eq!((result.code, result.stdout.as_str()), (2, ""));
        assert_eq!(result.stderr, "error: the chat template: nested too deeply\n");
    }
}

#[test]
fn task_stops_at_the_first_entry_over_a_limit() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["choices.yaml", "test.jsonl", "train.jsonl"] {
        fs::copy(fixture_path(&format!("evaluation/tasks/{file}")), folder.path().join(file))
            .expect("a copy");
    }
    let task = fs::read_to_string(folder.path().join("choices.yaml")).expect("a task");
    let slow = FOREVER.replace("10000000", "100000").replace("99999", "99");
    for (template, expected) in [
        ("{% set ns=namespace() %}{% set ns.a=ns %}{{ ns }}", "nested too deeply"),
        (NESTED, "nested too deeply"),
        ("{{ '{:1000000000}'.format(1) }}", "exceeded the memory limit of 256 MB"),
        (FOREVER, "exceeded the CPU time limit of 2s"),
        (
            &format!("{{% for i in range(90) %}}{slow}{{% endfor %}}"),
            "exceeded the total CPU time limit of 3s",
        ),
    ] {
        let lines = task.lines().map(|line| match line.starts_with("doc_to_text:") {
            true => format!("doc_to_text: \"{}\"", template.replace('"', "'")),
            false => line.to_owned(),
        });
        let hostile = folder.path().join("hostile.yaml");
        fs::write(&hostile, lines.collect::<Vec<_>>().join("\n")).expect("a task");
        let started = Instant::now();
        let model = fixture_path("tiny-checkpoint");
        let result = run(&["eval", path(&hostile), "--model", path(&model)]);
        assert_eq!(result.code, 1, "{}", result.stderr);
        assert!(
            result.stderr.contains("`doc_to_text` in the task file") && result.stderr.contains(expected),
            "{}",
            result.stderr
        );
        assert!(started.elapsed() < TIME_LIMIT, "{:?}", started.elapsed());
    }
}

#[test]
fn device_file_is_rejected_as_a_chat_template() {
    let result = run(&["serve", "--port", "0", "--chat-template", "/dev/zero"]);
    assert_ne!(result.code, 0);
    assert!(result.stderr.contains("/dev/zero: not a regular file"), "{}", result.stderr);
}
