//! `gpt2 serve` and grammars of strangers: each is read in a process of its own.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{program, run};
use crate::serve::{JSON, Served, ask};

/// Longer than anything here takes on a busy machine; what is tested would take for ever.
const PATIENCE: Duration = Duration::from_secs(30);

/// A product of eight regular expressions of a hundred alternatives each, all of which begin alike: 100^8 pairs for the first
/// byte alone. The library sets out to write them down.
fn product() -> String {
    let alternatives = |letter: char| {
        let each =
            (0..100).map(|index| format!("[a{}]{letter}{index}", char::from(b'b' + (index % 25) as u8)));
        format!("/({})z*/", each.collect::<Vec<_>>().join("|"))
    };
    let operands: Vec<_> = "pqrstuvw".chars().map(alternatives).collect();
    format!("start: A\nA: {}\n", operands.join(" & "))
}

/// Sends a completion and gives its status line and its body.
fn complete(served: &Served, body: &serde_json::Value) -> (String, String) {
    let answer = ask(served.connect(), "POST", "/v1/completions", JSON, &body.to_string());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().expect("a status").to_owned(), body.to_owned())
}

/// The processes that a process has started, and those that these have.
fn descendants(of: u32) -> Vec<u32> {
    let pairs: Vec<(u32, u32)> = fs::read_dir("/proc")
        .expect("Linux")
        .filter_map(|entry| {
            let process = entry.ok()?.file_name().to_str()?.parse().ok()?;
            // It may have ended.
            let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
            Some((process, parent.trim().parse().ok()?))
        })
        .collect();
    let mut found = vec![of];
    for index in 0.. {
        let Some(parent) = found.get(index).copied() else { break };
        found.extend(pairs.iter().filter(|(_, of)| *of == parent).map(|(child, _)| *child));
    }
    found.split_off(1)
}

/// The memory of processes, in bytes; what several share is counted once.
fn memory(processes: &[u32]) -> u64 {
    let of = |process: &u32| {
        // It may have ended.
        let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:").map(str::to_owned));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    processes.iter().map(of).sum()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_process_of_its_own_changes_no_text() {
    let served = Served::start(&["--port", "0"]);
    for pattern in ["[0-3][0-9] (May|June) 1[0-9]{3}", "(yes|no)( sir)?", "[A-Z][a-z]{2,9}, .{10,20}!"] {
        let here =
            run(&["generate", "One day", "--regex", pattern, "--greedy", "--max-new-tokens", "40", "--json"])
                .json();
        let body = serde_json::json!({ "prompt": "One day", "guided_regex": pattern, "temperature": 0, "max_tokens": 40 });
        let (status, there) = complete(&served, &body);
        assert_eq!(status, "HTTP/1.1 200 OK", "{there}");
        let there: serde_json::Value = serde_json::from_str(&there).expect("JSON");
        let text = there["choices"][0]["text"].as_str().expect("a text");
        assert!(
            !text.is_empty() && here.to_string().contains(&serde_json::to_string(text).expect("JSON")),
            "{here}: {text}"
        );
    }
}

#[test]
fn a_grammar_that_costs_too_much_ends_and_gives_its_memory_back() {
    let served = Served::start(&["--port", "0"]);
    let simple =
        serde_json::json!({ "prompt": "x", "guided_regex": "[ab]{3}", "max_tokens": 5, "temperature": 0 });
    let idle = memory(&[served.child.id()]);
    let hostile = [
        (
            "it is too complex",
            "start: A\nA: /(.|\\n)*a(.|\\n){30}/ & ~/(.|\\n)*b(.|\\n){30}/ & ~/(.|\\n)*c(.|\\n){31}/"
                .to_owned(),
        ),
        ("it takes too much time or memory to read", product()),
    ];
    for (expected, grammar) in hostile {
        let body = serde_json::json!({ "prompt": "x", "guided_grammar": grammar, "max_tokens": 5 });
        let most = thread::scope(|scope| {
            let asked = scope.spawn(|| complete(&served, &body));
            let mut most = 0;
            while !asked.is_finished() {
                let all = [descendants(served.child.id()), vec![served.child.id()]].concat();
                most = most.max(memory(&all));
                thread::sleep(Duration::from_millis(20));
            }
            let (status, answer) = asked.join().expect("an answer");
            assert!(status.contains(" 400 ") && answer.contains(expected), "{status} {answer}");
            most
        });
        assert!(most < idle + (300 << 20), "{most} bytes beside {idle} without a grammar");
        // The one that waits is left.
        until("no process for a grammar is left", || descendants(served.child.id()).len() <= 1);
        let (status, answer) = complete(&served, &simple);
        assert!(
            status.contains(" 200 ") && answer.contains("\"finish_reason\":\"stop\""),
            "{status} {answer}"
        );
    }
}

/// As an unprivileged user, whose hard limits cannot be raised again.
#[test]
fn limits_of_the_system_stay_as_they_are() {
    let script = "ulimit -H -c 0; ulimit -H -d 4000000; exec \"$0\" serve --port 0";
    let mut server = Command::new("sh");
    server.args(["-c", script, env!("CARGO_BIN_EXE_gpt2")]);
    let served = Served::of(server);
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
fn the_process_that_waits_is_started_again_and_ends_with_the_server() {
    let mut served = Served::start(&["--port", "0"]);
    let body = serde_json::json!({ "prompt": "x", "guided_regex": "(yes|no)", "max_tokens": 5 });
    assert!(complete(&served, &body).0.contains(" 200 "));
    until("one process waits", || descendants(served.child.id()).len() == 1);
    let first = descendants(served.child.id());
    // While a text follows a grammar, in a process that was forked.
    let long = serde_json::json!({ "prompt": "x", "guided_regex": "[a-z ]{5000}", "max_tokens": 900, "stream": true });
    let mut stream = served.connect();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n",
        long.to_string().len()
    );
    std::io::Write::write_all(&mut stream, format!("{head}{long}").as_bytes()).expect("a request to send");
    std::io::Read::read_exact(&mut stream, &mut [0; 1]).expect("an answer");
    assert!(
        Command::new("kill").args(["-KILL", &first[0].to_string()]).status().expect("`kill` runs").success()
    );
    until("it has another state", || memory(&first) == 0);
    // Until the new one has read the vocabulary, a request is told to come again.
    until("it is started again", || complete(&served, &body).0.contains(" 200 "));
    let second =
        descendants(served.child.id()).into_iter().find(|process| *process != first[0]).expect("a process");
    served.child.kill().expect("the server ends");
    served.child.wait().expect("an end");
    until("no process is left", || !fs::exists(format!("/proc/{second}")).expect("an answer"));
}

#[test]
fn a_worker_without_work_ends_and_nobody_sees_its_command() {
    let ended = program(&["confined"]).stdin(std::process::Stdio::null()).output().expect("the program runs");
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    for listing in [&["--help"][..], &["completions", "bash"], &["completions", "fish"], &["man"]] {
        let listed = run(listing).stdout;
        assert!(!listed.contains("confined") && !listed.contains("read-grammars"), "{listing:?}");
    }
}

#[test]
fn equal_grammars_share_a_process_and_others_wait_for_room() {
    const TEXTS: usize = 64;
    let served = Served::start(&["--port", "0"]);
    for schemas in [1, TEXTS] {
        let ask = |index: usize| {
            let name = format!("field{}", index % schemas);
            let schema = serde_json::json!({
                "type": "object", "properties": { &name: { "type": "integer" }, "b": { "type": "string", "maxLength": 9 } },
                "required": [&name, "b"], "additionalProperties": false,
            });
            let body =
                serde_json::json!({ "prompt": "x", "guided_json": schema, "max_tokens": 30, "seed": index });
            complete(&served, &body).0
        };
        let (statuses, most) = thread::scope(|scope| {
            let asked: Vec<_> = (0..TEXTS).map(|index| scope.spawn(move || ask(index))).collect();
            let mut most = 0;
            while asked.iter().any(|asked| !asked.is_finished()) {
                most = most.max(descendants(served.child.id()).len());
                thread::sleep(Duration::from_millis(20));
            }
            (asked.into_iter().map(|asked| asked.join().expect("a status")).collect::<Vec<_>>(), most)
        });
        assert!(statuses.iter().all(|status| status.contains(" 200 ")), "{schemas} schemas: {statuses:?}");
        // The one that waits, and one for the schema.
        assert!(schemas > 1 || most <= 2, "{most} processes for one schema");
    }
}
