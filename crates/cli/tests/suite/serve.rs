//! Tests of `gpt2 serve`: arguments, first line and shutdown.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use candle_core::safetensors;

use crate::common::{FAILURE, TIMEOUT, USAGE, assert_refused, program, run, wait_until};

/// Server for the built-in model; dropping it kills the process.
pub(crate) struct Served {
    pub(crate) child: Child,
    /// First line of the server's output.
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        // The process may have ended already.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Served {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(program(&[&["serve"], arguments].concat()))
    }

    /// Starts a server with this command.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .env("GPT2_API_KEY", "")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut address = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut address).expect("a line");
        Self { child, address: address.trim_end().to_owned() }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address.strip_prefix("http://").expect("an address")).expect("a connection")
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.expect("`kill` runs").success());
    }

    /// Waits for the server and returns its exit code and standard error.
    fn wait(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut stderr).expect("UTF-8");
        (self.child.wait().expect("an exit status").code(), stderr)
    }
}

/// Sends a request with `Connection: close` and reads the whole response.
pub(crate) fn send(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> String {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).expect("the request is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

pub(crate) const JSON: &str = "Content-Type: application/json\r\n";

#[test]
fn server_prints_its_address_and_stops_on_a_signal() {
    for signal in ["-TERM", "-INT", "-HUP"] {
        let served = Served::start(&["--port", "0"]);
        assert!(served.address.starts_with("http://127.0.0.1:"), "{}", served.address);
        let body = r#"{"model":"built-in","prompt":"One day","max_tokens":3,"temperature":0}"#;
        let answer = send(served.connect(), "POST", "/v1/completions", JSON, body);
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"completion_tokens\":3"),
            "{answer}"
        );
        assert!(send(served.connect(), "GET", "/", "", "").contains("<title>"));
        served.signal(signal);
        assert_eq!(served.wait(), (Some(0), String::new()));
    }
}

/// Checks that a signal at any time removes the socket.
///
/// The handler exists before the socket.
#[test]
fn signal_at_any_time_removes_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gpt2.sock");
    let arguments = ["--unix-socket", path.to_str().unwrap()];
    for signal in ["-TERM", "-HUP", "-TERM", "-INT", "-TERM"] {
        let served = Served::start(&arguments);
        served.signal(signal);
        assert_eq!(served.wait(), (Some(0), String::new()), "{signal}");
        assert!(!path.exists(), "{signal}");
    }
    // Signal the server while it loads, as soon as the socket exists.
    for _ in 0..5 {
        let server =
            program(&["serve", "--unix-socket", path.to_str().unwrap()]).stdout(Stdio::null()).spawn();
        let mut server = server.expect("the program runs");
        wait_until("no socket", || path.exists());
        let sent = Command::new("kill").args(["-TERM", &server.id().to_string()]).status();
        assert!(sent.expect("`kill` runs").success());
        assert_eq!(server.wait().expect("an exit status").code(), Some(0));
        assert!(!path.exists());
    }
}

/// Checks that a server outlives its terminal under `nohup`.
#[test]
fn ignored_hangup_stays_ignored() {
    let mut server = Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" serve --port 0";
    server.args(["-c", script, env!("CARGO_BIN_EXE_gpt2")]);
    let served = Served::spawn(server);
    served.signal("-HUP");
    assert!(send(served.connect(), "GET", "/health", "", "").starts_with("HTTP/1.1 200 OK\r\n"));
    served.signal("-TERM");
    assert_eq!(served.wait(), (Some(0), String::new()));
}

/// Fills a server's log with warnings about unknown fields until lines are dropped.
///
/// Returns the number of dropped lines.
fn fill_log(served: &Served) -> u64 {
    let dropped = || {
        let metrics = send(served.connect(), "GET", "/metrics", "", "");
        let line = metrics.lines().find_map(|line| line.strip_prefix("gpt2_log_lines_dropped_total "));
        line.expect("the counter").parse::<u64>().expect("a number")
    };
    let fields: String = (0..100).map(|index| format!(",\"{index:039}\":1")).collect();
    let body = format!("{{\"tokens\":[5]{fields}}}");
    let head = format!(
        "POST /detokenize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n",
        body.len()
    );
    let request = format!("{head}{body}");
    let start = Instant::now();
    while dropped() == 0 {
        assert!(start.elapsed() < TIMEOUT, "no line was dropped");
        let mut stream = BufReader::new(served.connect());
        for _ in 0..50 {
            stream.get_mut().write_all(request.as_bytes()).expect("the request is sent");
            let (mut line, mut length) = (String::new(), 0);
            while line != "\r\n" {
                line.clear();
                assert!(
                    stream.read_line(&mut line).expect("a response head") > 0,
                    "the connection was closed"
                );
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.trim_end().parse().expect("a length");
                }
            }
            stream.read_exact(&mut vec![0; length]).expect("a body");
        }
    }
    dropped()
}

/// Checks that a full pipe on standard error delays neither requests nor the shutdown.
#[test]
fn stalled_log_reader_delays_neither_requests_nor_shutdown() {
    let mut served = Served::start(&["--port", "0", "--log-requests"]);
    assert!(fill_log(&served) > 0);
    let body = r#"{"prompt":"One day","max_tokens":1}"#;
    assert!(send(served.connect(), "POST", "/v1/completions", JSON, body).starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(send(served.connect(), "GET", "/health", "", "").starts_with("HTTP/1.1 200 OK\r\n"));
    served.signal("-TERM");
    assert_eq!(served.child.wait().expect("an exit status").code(), Some(0));
}

/// Checks that log lines are bounded and that dropped lines are counted.
///
/// Once the log is read again, a line reports the number of dropped lines.
#[test]
fn dropped_log_lines_are_counted_and_reported() {
    let mut served = Served::start(&["--port", "0", "--log-requests"]);
    let dropped = fill_log(&served);
    let mut log = BufReader::new(served.child.stderr.take().expect("a pipe")).lines();
    let mut next = || log.next().expect("a line").expect("UTF-8");
    // Make room for the next line, before which the log reports the number of dropped lines.
    let read: Vec<String> = (0..200).map(|_| next()).collect();
    assert!(read.iter().all(|line| line.len() < 2 << 10));
    assert!(read.iter().any(|line| line.ends_with('…')), "{}", read[0]);
    send(served.connect(), "GET", "/health", "", "");
    let reported = loop {
        if let Some(rest) = next().strip_prefix("log: dropped ") {
            break rest.split(' ').next().expect("a number").parse::<u64>().expect("a number");
        }
    };
    // The request for the metrics is logged, too.
    assert!((dropped..dropped + 3).contains(&reported), "{reported} of {dropped}");
    let last = next();
    assert!(last.contains(" GET /health 200 "), "{last}");
    served.signal("-TERM");
    assert_eq!(served.child.wait().expect("an exit status").code(), Some(0));
}

#[test]
fn check_reports_whether_a_server_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    for (arguments, option) in [
        (["--port", "0", "--host", "127.0.0.1"], "--port"),
        (["--unix-socket", socket.to_str().unwrap(), "--parallel", "2"], "--unix-socket"),
    ] {
        let served = Served::start(&arguments);
        let address = served.address.clone();
        let value = address.rsplit_once(':').unwrap().1;
        let checked = run(&["serve", "--check", option, value]);
        assert_eq!(
            (checked.code, checked.stdout),
            (0, format!("{address} is ready\n")),
            "{}",
            checked.stderr
        );
        served.signal("-TERM");
        assert_eq!(served.wait(), (Some(0), String::new()));
        let refused = run(&["serve", "--check", option, value]);
        assert_refused(&refused, FAILURE, &format!("{address}: no server responds; start one"));
    }
}

/// Serves a classifier with the tokens from `scripts/reference/heads.py`.
#[test]
fn classifier_is_served() {
    let model = candle_gpt2_testing::fixture_path("heads/sequence");
    let served = Served::start(&["--port", "0", "--model", model.to_str().unwrap()]);
    let expected = candle_gpt2_testing::json_fixture("heads/expected")["sequence"].clone();
    let body = format!("{{\"input\":{}}}", expected["ids"][1]);
    let answer = send(served.connect(), "POST", "/v1/classify", JSON, &body);
    let label = expected["pipeline"][1][0]["label"].as_str().unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(&format!("\"label\":\"{label}\"")),
        "{answer}"
    );
    served.signal("-TERM");
    assert_eq!(served.wait(), (Some(0), String::new()));
}

/// Checks that `--activations` lets clients read and steer activations.
///
/// Clients can also steer with features of a dictionary, whose folder they never see.
#[test]
fn activations_can_be_read_and_steered() {
    let folder = tempfile::tempdir().unwrap();
    let pattern = |shape: &[usize], offset| candle_gpt2_testing::pattern(shape, 1.0, offset);
    let tensors = HashMap::from([
        ("W_enc", pattern(&[256, 3], 1)),
        ("b_enc", pattern(&[3], 2)),
        ("W_dec", pattern(&[3, 256], 3)),
        ("b_dec", pattern(&[256], 4)),
    ]);
    safetensors::save(&tensors, folder.path().join("sae_weights.safetensors")).unwrap();
    let config = r#"{"d_in": 256, "d_sae": 3, "hook_name": "blocks.2.hook_resid_pre", "architecture": "standard",
        "activation_fn": "relu", "apply_b_dec_to_input": true}"#;
    std::fs::write(folder.path().join("cfg.json"), config).unwrap();
    let dictionary = format!("res2={}", folder.path().display());
    let served = Served::start(&["--port", "0", "--activations", "--dictionary", &dictionary]);
    let complete = |steering: &str| {
        let body = format!(
            r#"{{"prompt": "One day", "max_tokens": 9, "temperature": 0, "steering": {steering},
                "activations": {{"sites": ["resid_post5"], "of": "both"}}}}"#
        );
        send(served.connect(), "POST", "/v1/completions", JSON, &body)
    };
    let shown = complete("[]");
    assert!(
        shown.contains(r#""site":"blocks.5.hook_resid_post","shape":[1,256],"positions":[9]"#),
        "{shown}"
    );
    let text = |answer: &str| {
        answer.split(r#""text":"#).nth(1).unwrap().split(r#","logprobs""#).next().unwrap().to_owned()
    };
    let steered = complete(r#"[{"dictionary": "res2", "feature": 1, "scale": 100}]"#);
    assert!(steered.starts_with("HTTP/1.1 200 OK\r\n") && text(&steered) != text(&shown), "{steered}");
    let refused = complete(r#"[{"dictionary": "res3", "feature": 1}]"#);
    let expected = "steering[0].dictionary: unknown dictionary; expected `res2`";
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.contains(expected), "{refused}");
    let twice = run(&[
        "serve",
        "--port",
        "0",
        "--activations",
        "--dictionary",
        &dictionary,
        "--dictionary",
        &dictionary,
    ]);
    assert_refused(&twice, USAGE, "duplicate name");
    let other = candle_gpt2_testing::fixture_path("dictionaries/saelens-plain/cfg.json");
    let other = format!("plain={}", other.parent().unwrap().display());
    let other = run(&["serve", "--port", "0", "--activations", "--dictionary", &other]);
    assert!(other.code != 0 && other.stderr.contains("256"), "{}", other.stderr);
}

#[test]
fn running_request_is_finished_after_a_signal() {
    let served = Served::start(&["--port", "0"]);
    let mut stream = served.connect();
    let body = r#"{"prompt":"O","max_tokens":200,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    served.signal("-TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"completion_tokens\":200") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(served.wait(), (Some(0), String::new()));
}

/// Checks that the log contains counts, codes and times, but never a text, an id or a key.
#[test]
fn log_records_requests_without_texts_or_keys() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.txt");
    std::fs::write(&keys, "# for the tests\n\n  secret-key  \n").unwrap();
    let served = Served::start(&["--port", "0", "--log-requests", "--api-key-file", keys.to_str().unwrap()]);
    let headers = format!("{JSON}Authorization: Bearer secret-key\r\nX-Request-Id: mine\r\n");
    let body = r#"{"prompt":"MYSTERY","max_tokens":4,"ignore_eos":true,"temperature":0,"user":"somebody"}"#;
    let answer = send(served.connect(), "POST", "/v1/completions", &headers, body);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("x-request-id: mine\r\n"), "{answer}");
    let refused = send(served.connect(), "POST", "/v1/completions", JSON, body);
    assert!(refused.starts_with("HTTP/1.1 401 Unauthorized\r\n"), "{refused}");
    send(served.connect(), "GET", "/secret-path?MYSTERY", &headers, "");
    served.signal("-TERM");
    let (code, log) = served.wait();
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 3, "{log}");
    assert!(lines[0].starts_with("mine POST /v1/completions 200 prompt="), "{log}");
    assert!(lines[0].contains(" new=4 seconds="), "{log}");
    assert!(lines[1].contains(" POST /v1/completions 401 prompt=0 new=0 seconds="), "{log}");
    assert!(lines[2].starts_with("mine GET other 404 "), "{log}");
    for secret in ["MYSTERY", "secret", "somebody"] {
        assert!(!log.contains(secret), "{log}");
    }
}

/// Checks that each line is a JSON object with the fields of the text format.
#[test]
fn log_can_be_json() {
    let served = Served::start(&["--port", "0", "--log-requests", "--log-format", "json"]);
    let headers = format!("{JSON}X-Request-Id: mine\r\n");
    let body = r#"{"prompt":"MYSTERY","max_token":4,"max_tokens":1,"ignore_eos":true}"#;
    send(served.connect(), "POST", "/v1/completions", &headers, body);
    served.signal("-TERM");
    let (code, log) = served.wait();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((code, lines.len()), (Some(0), 2), "{log}");
    assert!(lines.iter().all(|line| line["timestamp"].is_string() && line["request_id"] == "mine"), "{log}");
    let warning = "unknown field `max_token` was ignored; did you mean `max_tokens`?";
    assert!(lines[0]["level"] == "WARN" && lines[0]["warnings"] == warning, "{log}");
    let request = &lines[1];
    assert!(request["level"] == "INFO" && request["method"] == "POST", "{log}");
    assert!(request["path"] == "/v1/completions" && request["status"] == 200, "{log}");
    assert!(request["prompt_tokens"].is_u64() && request["new_tokens"] == 1, "{log}");
    assert!(request["seconds"].is_f64() && !log.contains("MYSTERY"), "{log}");
}

/// Checks that unknown fields are logged, or rejected with `--strict`.
///
/// A log line has the request's id and the field.
#[test]
fn unknown_fields_are_logged_or_rejected() {
    let headers = format!("{JSON}X-Request-Id: mine\r\n");
    let body = r#"{"prompt":"MYSTERY","max_token":4,"max_tokens":1,"stream":true}"#;
    let look = r#"{"prompt":"MYSTERY","layer":[0]}"#;
    for (arguments, status) in
        [(&["--port", "0"][..], "200 OK"), (&["--port", "0", "--strict"], "400 Bad Request")]
    {
        let served = Served::start(arguments);
        for (path, body, hint) in [
            ("/v1/completions", body, "did you mean `max_tokens`?"),
            ("/look/attention", look, "did you mean `layers`?"),
        ] {
            let answer = send(served.connect(), "POST", path, &headers, body);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
            assert_eq!(answer.matches(hint).count(), 1, "{answer}");
            assert_eq!(answer.contains("\"warnings\":[\""), status == "200 OK", "{answer}");
        }
        served.signal("-TERM");
        let (code, log) = served.wait();
        let expected = match status {
            "200 OK" => {
                "mine unknown field `max_token` was ignored; did you mean `max_tokens`?\n\
                 mine unknown field `layer` was ignored; did you mean `layers`?\n"
            }
            _ => "",
        };
        assert_eq!((code, log.as_str()), (Some(0), expected));
    }
}

#[test]
fn killed_server_does_not_block_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gpt2.sock");
    let arguments = ["--unix-socket", path.to_str().unwrap()];
    let served = Served::start(&arguments);
    assert_eq!(served.address, format!("unix:{}", path.display()));
    served.signal("-KILL");
    assert_eq!(served.wait().0, None);
    assert!(path.exists());
    let served = Served::start(&arguments);
    let answer = send(UnixStream::connect(&path).unwrap(), "GET", "/health", "", "");
    assert!(answer.ends_with("{\"status\":\"ok\"}"), "{answer}");
    let second = run(&[&["serve"], &arguments[..]].concat());
    assert_refused(&second, FAILURE, "another program already listens on the socket");
    served.signal("-TERM");
    assert_eq!(served.wait().0, Some(0));
    assert!(!path.exists());
}

#[test]
fn port_in_use_is_reported_before_the_model_is_read() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = run(&["serve", "--port", &port, "--model", "no/such/model"]);
    let expected = format!(
        "port {port} on 127.0.0.1 is in use; stop the program that listens there, or choose another port"
    );
    assert_refused(&refused, FAILURE, &expected);
    assert!(refused.stderr.contains("(--port)"), "{}", refused.stderr);
}

#[test]
fn invalid_calls_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("keys.txt");
    std::fs::write(&empty, "# nothing\n").unwrap();
    let empty = empty.to_str().unwrap();
    let cases: [(&[&str], &str); 28] = [
        (&["--host", "0.0.0.0"], "0.0.0.0 is reachable from other machines, but no API key is set"),
        (&["--host", "0.0.0.0"], "(--api-key-file, --host, --no-auth)"),
        (&["--port", "70000"], "--port"),
        (&["--port", "-1"], "--port"),
        (&["--parallel", "0"], "expected a whole number from 1 to 256"),
        (&["--queue", "-5"], "expected a whole number from 1 to 65536"),
        (&["--kv-tokens", "0"], "expected a whole number from 1 to 1073741824"),
        (&["--prefill-chunk", "x"], "expected a whole number from 1 to 65536"),
        (&["--max-n", "129"], "expected a whole number from 1 to 128"),
        (&["--max-prompts", "1.5"], "expected a whole number from 1 to 2048"),
        (&["--max-body", "0"], "expected a whole number from 64 to 1073741824"),
        (&["--max-activation-bytes", "3"], "expected a whole number from 4 to 1073741824"),
        (&["--dictionary", "res2=folder"], "--activations"),
        (
            &["--port", "0", "--activations", "--dictionary", "res2"],
            "--dictionary res2: expected a name and a folder",
        ),
        (&["--drain-timeout", "0"], "expected a number of seconds from 0.001 to 86400"),
        (&["--max-time", "NaN"], "expected a number of seconds from 0.001 to 86400"),
        (&["--write-timeout", "1e9"], "expected a number of seconds from 0.001 to 86400"),
        (&["--cors-origin", "example.com"], "expected an origin without a path, such as https://example.com"),
        (&["--cors-origin", "http://a b"], "found \"http://a b\" (--cors-origin)"),
        (&["--queue-timeout", "1e-10"], "expected a number of seconds from 0.001 to 86400"),
        (&["--alias", ""], "aliases: expected a non-empty name without control characters"),
        (&["--alias", ""], "found \"\" (--alias)"),
        (&["--served-model-name", " "], "found \" \" (--served-model-name)"),
        (&["--allow-host", "a b"], "such as model.lan, found \"a b\" (--allow-host)"),
        (&["--host", ""], "host: expected a host name or address, found \"\" (--host)"),
        (&["--unix-socket", ""], "a value is required for '--unix-socket <PATH>'"),
        (&["--api-key-file", empty], "contains no key"),
        (&["--unix-socket", "x", "--port", "1"], "cannot be used with"),
    ];
    for (arguments, expected) in cases {
        assert_refused(&run(&[&["serve"], arguments].concat()), USAGE, expected);
    }
    let missing = run(&["serve", "--api-key-file", "no/such/file"]);
    assert_refused(&missing, FAILURE, "cannot read no/such/file");
    let missing = run(&["serve", "--chat-template", "no/such/file"]);
    assert_refused(&missing, FAILURE, "expected eos-join or a file; cannot read no/such/file");
    let few = run(&["serve", "--port", "0", "--kv-tokens", "1"]);
    let expected = "kv_tokens: expected at least 512, the model's context length, found 1 (--kv-tokens)";
    assert_refused(&few, USAGE, expected);
    let too_large = run(&["serve", "--port", "0", "--kv-tokens", "1073741824"]);
    assert_refused(&too_large, USAGE, "--parallel, --kv-tokens, --kv-dtype f16");
}

/// Checks that the operating system's error message appears only once.
#[test]
fn failed_listen_reports_the_system_error_once() {
    for (arguments, option) in [
        (["--host", "192.0.2.1", "--no-auth"].as_slice(), "--host"),
        (&["--unix-socket", "no/such/folder/gpt2.sock"], "--unix-socket"),
    ] {
        let refused = run(&[&["serve"], arguments].concat());
        assert_refused(&refused, FAILURE, "cannot listen on ");
        assert_eq!(refused.stderr.matches("(os error ").count(), 1, "{}", refused.stderr);
        assert!(refused.stderr.contains(option), "{}", refused.stderr);
    }
}

/// Checks that a request with non-finite logits is logged once, under its id.
///
/// The response refers the client to the log, which has the reason.
#[test]
fn internal_error_is_logged_on_one_line() {
    let folder = candle_gpt2_testing::CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.insert("transformer.ln_f.bias".into(), candle_gpt2_testing::pattern(&[28], f64::NAN, 5));
    });
    let served = Served::start(&["--port", "0", "--model", folder.path().to_str().unwrap()]);
    let headers = format!("{JSON}X-Request-Id: mine\r\n");
    let answer =
        send(served.connect(), "POST", "/v1/completions", &headers, r#"{"prompt":[5],"max_tokens":2}"#);
    assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("internal error"), "{answer}");
    served.signal("-TERM");
    let (code, log) = served.wait();
    assert_eq!((code, log.lines().count()), (Some(0), 1), "{log}");
    assert!(log.starts_with("mine failed: ") && log.contains("not finite"), "{log}");
}
