//! Tests of `gpt2 serve` with untrusted grammars, each compiled in its own process.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::common::{program, run, wait_until};
use crate::serve::{JSON, Served, send};

/// Intersection of eight regular expressions, each with a hundred alternatives that begin alike.
///
/// The first byte alone has 100^8 combinations, and the library starts to enumerate them.
fn product() -> String {
    let alternatives = |letter: char| {
        let each =
            (0..100).map(|index| format!("[a{}]{letter}{index}", char::from(b'b' + (index % 25) as u8)));
        format!("/({})z*/", each.collect::<Vec<_>>().join("|"))
    };
    let operands: Vec<_> = "pqrstuvw".chars().map(alternatives).collect();
    format!("start: A\nA: {}\n", operands.join(" & "))
}

/// Sends a completion request and returns the status line and the body.
fn complete(served: &Served, body: &serde_json::Value) -> (String, String) {
    let answer = send(served.connect(), "POST", "/v1/completions", JSON, &body.to_string());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a response head");
    (head.lines().next().expect("a status").to_owned(), body.to_owned())
}

/// Returns the direct and indirect child processes of a process.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let pairs: Vec<(u32, u32)> = fs::read_dir("/proc")
        .expect("Linux")
        .filter_map(|entry| {
            let process = entry.ok()?.file_name().to_str()?.parse().ok()?;
            // The process may have ended.
            let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
            Some((process, parent.trim().parse().ok()?))
        })
        .collect();
    let mut found = vec![root];
    for index in 0.. {
        let Some(parent) = found.get(index).copied() else { break };
        found.extend(pairs.iter().filter(|(_, ppid)| *ppid == parent).map(|(child, _)| *child));
    }
    found.split_off(1)
}

/// Returns the memory that processes use, in bytes, with shared memory counted once.
fn memory(processes: &[u32]) -> u64 {
    let proportional_size = |process: &u32| {
        // The process may have ended.
        let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:").map(str::to_owned));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    processes.iter().map(proportional_size).sum()
}

#[test]
fn separate_process_does_not_change_completions() {
    let served = Served::start(&["--port", "0"]);
    for pattern in ["[0-3][0-9] (May|June) 1[0-9]{3}", "(yes|no)( sir)?", "[A-Z][a-z]{2,9}, .{10,20}!"] {
        let local =
            run(&["generate", "One day", "--regex", pattern, "--greedy", "--max-new-tokens", "40", "--json"])
                .json();
        let body = serde_json::json!({ "prompt": "One day", "guided_regex": pattern, "temperature": 0, "max_tokens": 40 });
        let (status, answer) = complete(&served, &body);
        assert_eq!(status, "HTTP/1.1 200 OK", "{answer}");
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        let text = answer["choices"][0]["text"].as_str().expect("a text");
        assert!(
            !text.is_empty() && local.to_string().contains(&serde_json::to_string(text).expect("JSON")),
            "{local}: {text}"
        );
    }
}

#[test]
fn expensive_grammar_is_rejected_and_its_memory_freed() {
    let served = Served::start(&["--port", "0"]);
    let simple =
        serde_json::json!({ "prompt": "x", "guided_regex": "[ab]{3}", "max_tokens": 5, "temperature": 0 });
    let idle = memory(&[served.child.id()]);
    let hostile = [
        (
            "too complex",
            "start: A\nA: /(.|\\n)*a(.|\\n){30}/ & ~/(.|\\n)*b(.|\\n){30}/ & ~/(.|\\n)*c(.|\\n){31}/"
                .to_owned(),
        ),
        ("compilation exceeded the time or memory limit", product()),
    ];
    for (expected, grammar) in hostile {
        let body = serde_json::json!({ "prompt": "x", "guided_grammar": grammar, "max_tokens": 5 });
        let peak = thread::scope(|scope| {
            let request = scope.spawn(|| complete(&served, &body));
            let mut peak = 0;
            while !request.is_finished() {
                let all = [descendants(served.child.id()), vec![served.child.id()]].concat();
                peak = peak.max(memory(&all));
                thread::sleep(Duration::from_millis(20));
            }
            let (status, answer) = request.join().expect("an answer");
            assert!(status.contains(" 400 ") && answer.contains(expected), "{status} {answer}");
            peak
        });
        assert!(peak < idle + (300 << 20), "{peak} bytes, compared with {idle} without a grammar");
        // Only the waiting process remains.
        wait_until("a grammar process remains", || descendants(served.child.id()).len() <= 1);
        let (status, answer) = complete(&served, &simple);
        assert!(
            status.contains(" 200 ") && answer.contains("\"finish_reason\":\"stop\""),
            "{status} {answer}"
        );
    }
}

/// Simulates an unprivileged user, who cannot raise hard limits again.
#[test]
fn lower_system_limits_are_kept() {
    let script = "ulimit -H -c 0; ulimit -H -d 4000000; exec \"$0\" serve --port 0";
    let mut server = Command::new("sh");
    server.args(["-c", script, env!("CARGO_BIN_EXE_gpt2")]);
    let served = Served::spawn(server);
    let body = serde_json::json!({ "prompt": "x", "guided_regex": "(yes|no)", "max_tokens": 5 });
    assert!(complete(&served, &body).0.contains(" 200 "));
    let reader = descendants(served.child.id())[0];
    let limits = fs::read_to_string(format!("/proc/{reader}/limits")).expect("limits");
    assert!(
        limits.lines().any(|line| line.starts_with("Max core file size        0                    0")),
        "{limits}"
    );
}

#[test]
fn waiting_process_is_restarted_and_ends_with_the_server() {
    let mut served = Served::start(&["--port", "0"]);
    let body = serde_json::json!({ "prompt": "x", "guided_regex": "(yes|no)", "max_tokens": 5 });
    assert!(complete(&served, &body).0.contains(" 200 "));
    wait_until("no single waiting process", || descendants(served.child.id()).len() == 1);
    let first = descendants(served.child.id());
    // Kill the waiting process while a forked process follows a grammar.
    let long = serde_json::json!({ "prompt": "x", "guided_regex": "[a-z ]{5000}", "max_tokens": 900, "stream": true });
    let mut stream = served.connect();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n",
        long.to_string().len()
    );
    std::io::Write::write_all(&mut stream, format!("{head}{long}").as_bytes()).expect("the request is sent");
    std::io::Read::read_exact(&mut stream, &mut [0; 1]).expect("an answer");
    assert!(
        Command::new("kill").args(["-KILL", &first[0].to_string()]).status().expect("`kill` runs").success()
    );
    wait_until("the killed process keeps its memory", || memory(&first) == 0);
    // Until the new process has read the vocabulary, requests get an error that asks them to retry.
    wait_until("the waiting process was not restarted", || complete(&served, &body).0.contains(" 200 "));
    let second =
        descendants(served.child.id()).into_iter().find(|process| *process != first[0]).expect("a process");
    served.child.kill().expect("the server ends");
    served.child.wait().expect("an exit status");
    wait_until("the process outlives the server", || {
        !fs::exists(format!("/proc/{second}")).expect("an answer")
    });
}

#[test]
fn worker_without_work_exits_and_its_command_is_hidden() {
    let output =
        program(&["confined"]).stdin(std::process::Stdio::null()).output().expect("the program runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    for listing in [&["--help"][..], &["completions", "bash"], &["completions", "fish"], &["man"]] {
        let listed = run(listing).stdout;
        assert!(!listed.contains("confined") && !listed.contains("read-grammars"), "{listing:?}");
    }
}

#[test]
fn equal_grammars_share_a_process_and_others_queue() {
    const REQUESTS: usize = 64;
    let served = Served::start(&["--port", "0"]);
    for schemas in [1, REQUESTS] {
        let status_of = |index: usize| {
            let name = format!("field{}", index % schemas);
            let schema = serde_json::json!({
                "type": "object", "properties": { &name: { "type": "integer" }, "b": { "type": "string", "maxLength": 9 } },
                "required": [&name, "b"], "additionalProperties": false,
            });
            let body =
                serde_json::json!({ "prompt": "x", "guided_json": schema, "max_tokens": 30, "seed": index });
            complete(&served, &body).0
        };
        let (statuses, peak) = thread::scope(|scope| {
            let requests: Vec<_> = (0..REQUESTS).map(|index| scope.spawn(move || status_of(index))).collect();
            let mut peak = 0;
            while requests.iter().any(|request| !request.is_finished()) {
                peak = peak.max(descendants(served.child.id()).len());
                thread::sleep(Duration::from_millis(20));
            }
            (requests.into_iter().map(|request| request.join().expect("a status")).collect::<Vec<_>>(), peak)
        });
        assert!(statuses.iter().all(|status| status.contains(" 200 ")), "{schemas} schemas: {statuses:?}");
        // One waiting process, and one for the schema.
        assert!(schemas > 1 || peak <= 2, "{peak} processes for one schema");
    }
}
