//! End-to-end tests of Hub models with the program's real client.
//!
//! A local server implements the Hub's protocol: model and dataset information, files by revision, ranges,
//! and redirects to another address.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_gpt2_testing::{fixture_path, json_fixture, pattern};
use serde_json::{Value, json};

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

const DATA_SHA: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Contents of the dataset's file at the revision `main`.
const KING: &str = "The king of France is dead, and all the people speak of the queen.\n";

/// Fault that the server simulates.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Cuts off the first weights response halfway.
    CutsOff,
    /// Announces more bytes than the file has.
    WrongSize,
}

struct Hub {
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
    cache: tempfile::TempDir,
}

impl Hub {
    /// Serves `folder` as the models `someone/tiny` and `someone/gated`, and a dataset.
    ///
    /// `someone/gated` needs a token. The dataset `someone/texts` has one file at each of two revisions.
    fn new(folder: &Path, fault: Fault) -> Self {
        Self::serving("someone/tiny", folder, fault)
    }

    /// Serves the files of `folder` as the model `name` instead.
    fn serving(name: &'static str, folder: &Path, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let files: HashMap<String, Vec<u8>> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect();
        let has_cut_off = AtomicBool::new(false);
        let server = Server {
            name,
            files,
            endpoint: endpoint.clone(),
            requests: Arc::clone(&requests),
            fault,
            has_cut_off,
        };
        let server = Arc::new(server);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let server = Arc::clone(&server);
                // A client keeps several connections open, and a closed one is not an error.
                std::thread::spawn(move || server.answer(stream.unwrap()));
            }
        });
        Self { endpoint, requests, cache: tempfile::tempdir().unwrap() }
    }

    fn tiny(fault: Fault) -> Self {
        Self::new(&fixture_path("tiny-checkpoint"), fault)
    }

    fn run(&self, arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        // Hide the user's tokens and caches, and proxies that cannot reach localhost.
        let hidden = "HF_TOKEN HF_TOKEN_PATH HF_HUB_OFFLINE HF_HUB_DOWNLOAD_TIMEOUT HF_HOME HUGGINGFACE_HUB_CACHE RUST_BACKTRACE http_proxy HTTP_PROXY \
                   https_proxy HTTPS_PROXY all_proxy ALL_PROXY";
        hidden.split(' ').for_each(|name| _ = command.env_remove(name));
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HUB_CACHE", self.cache.path());
        command.args(arguments).envs(environment.iter().copied());
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    fn generate(&self, model: &str, more: &[&str], environment: &[(&str, &str)]) -> (i32, String, String) {
        let flags = "--greedy --max-new-tokens 20 --json --model".split(' ').collect::<Vec<_>>();
        let arguments = [&["generate", "The first citizen"], &flags[..], &[model], more].concat();
        self.run(&arguments, environment)
    }

    #[track_caller]
    fn assert_generates(&self, model: &str, more: &[&str], environment: &[(&str, &str)]) -> String {
        let (code, stdout, stderr) = self.generate(model, more, environment);
        assert_eq!(code, 0, "{stderr}");
        let report: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(report["ids"], json_fixture("tiny_checkpoint_expected")["greedy"][0]["ids"]);
        stderr
    }

    #[track_caller]
    fn assert_fails(&self, model: &str, more: &[&str], environment: &[(&str, &str)], expected: &str) {
        let (code, stdout, stderr) = self.generate(model, more, environment);
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        assert!(stderr.contains(expected), "`{expected}` is not in: {stderr}");
    }

    fn request_count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }

    fn snapshot(&self) -> PathBuf {
        self.cache.path().join("models--someone--tiny/snapshots").join(SHA)
    }
}

struct Server {
    name: &'static str,
    files: HashMap<String, Vec<u8>>,
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
    fault: Fault,
    has_cut_off: AtomicBool,
}

impl Server {
    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut request = String::new();
            if reader.read_line(&mut request)? == 0 {
                return Ok(());
            }
            let (mut start, mut end, mut has_token) = (0, None, false);
            loop {
                let mut header = String::new();
                reader.read_line(&mut header)?;
                let header = header.trim().to_lowercase();
                if let Some(range) = header.strip_prefix("range: bytes=") {
                    let (from, to) = range.split_once('-').unwrap();
                    (start, end) = (from.parse().unwrap(), to.parse::<usize>().ok());
                }
                has_token |= header == "authorization: bearer secret";
                if header.is_empty() {
                    break;
                }
            }
            let path = request.split(' ').nth(1).unwrap().to_owned();
            self.requests.lock().unwrap().push(path.clone());
            self.reply(&stream, &path, (start, end), has_token)?;
        }
    }

    fn reply(
        &self,
        mut stream: &TcpStream,
        path: &str,
        (start, end): (usize, Option<usize>),
        has_token: bool,
    ) -> std::io::Result<()> {
        let mut status = |line: &str| write!(stream, "HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n");
        let is_gated = path.contains("someone/gated");
        if is_gated && !has_token {
            return status("401 Unauthorized");
        }
        if let Some(answer) = dataset(path) {
            // The ETag depends on the contents.
            let sum: u64 = answer.bytes().map(u64::from).sum();
            let known = format!("X-Repo-Commit: {DATA_SHA}\r\nETag: \"etag-{sum}\"\r\n");
            let part = &answer.as_bytes()
                [start.min(answer.len())..end.map_or(answer.len(), |end| end + 1).min(answer.len())];
            let (length, whole) = (part.len(), answer.len());
            let range = format!("Content-Range: bytes {start}-{}/{whole}\r\n", start + length.max(1) - 1);
            write!(stream, "HTTP/1.1 206 Partial Content\r\n{known}{range}Content-Length: {length}\r\n\r\n")?;
            return stream.write_all(part);
        }
        let path = path.replace("someone/gated", "someone/tiny");
        let name = self.name;
        if path == format!("/api/models/{name}/revision/main") {
            let siblings: Vec<Value> = self.files.keys().map(|name| json!({ "rfilename": name })).collect();
            let body = json!({ "siblings": siblings, "sha": SHA }).to_string();
            let length = body.len();
            return write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
        }
        // Weights are stored elsewhere. The Hub redirects, and its first response carries the file's
        // metadata.
        let (name, is_elsewhere) =
            match (path.strip_prefix(&format!("/{name}/resolve/main/")), path.strip_prefix("/elsewhere/")) {
                (Some(name), _) => (name, false),
                (_, Some(name)) => (name, true),
                _ => return status("404 Not Found"),
            };
        let Some(contents) = self.files.get(name) else { return status("404 Not Found") };
        let is_large = name.ends_with(".safetensors");
        let known = format!("X-Repo-Commit: {SHA}\r\nETag: \"etag-{name}\"\r\n");
        if is_large && !is_elsewhere {
            let location = format!("{}/elsewhere/{name}", self.endpoint);
            return write!(
                stream,
                "HTTP/1.1 302 Found\r\n{known}Location: {location}\r\nContent-Length: 0\r\n\r\n"
            );
        }
        let end = end.map_or(contents.len(), |end| (end + 1).min(contents.len()));
        let part = contents.get(start..end).unwrap_or_default();
        let claimed =
            if self.fault == Fault::WrongSize && is_large { contents.len() + 7 } else { contents.len() };
        let length = part.len();
        write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\n{known}Content-Range: bytes {start}-{}/{claimed}\r\nContent-Length: {length}\r\n\r\n",
            end.max(1) - 1
        )?;
        let cuts_off = self.fault == Fault::CutsOff && is_large && length > 1;
        if cuts_off && !self.has_cut_off.swap(true, Ordering::Relaxed) {
            stream.write_all(&part[..length / 2])?;
            stream.shutdown(std::net::Shutdown::Both)?;
            return Ok(());
        }
        stream.write_all(part)
    }
}

/// Returns the Hub's response to a request for the dataset.
fn dataset(path: &str) -> Option<String> {
    let information = |file: &str| {
        let siblings = [json!({ "rfilename": "README.md" }), json!({ "rfilename": file })];
        Some(json!({ "siblings": siblings, "sha": DATA_SHA }).to_string())
    };
    match path.strip_prefix("/api/datasets/someone/texts/revision/") {
        Some("main") => return information("data/king.txt"),
        Some("refs%2Fconvert%2Fparquet") => return information("default/test/0000.txt"),
        _ => {}
    }
    match path.strip_prefix("/datasets/someone/texts/resolve/")? {
        "main/data/king.txt" => Some(KING.to_owned()),
        "refs%2Fconvert%2Fparquet/default/test/0000.txt" => Some(KING.to_uppercase()),
        _ => None,
    }
}

#[test]
fn dataset_file_is_downloaded_once_and_then_cached() {
    let hub = Hub::tiny(Fault::None);
    let eval = |data: &str, more: &[&str]| {
        hub.run(&[&["eval", "text:bits", "--json", "--data", data][..], more].concat(), &[])
    };
    let measured = |data: &str, more: &[&str]| -> Value {
        let (code, stdout, stderr) = eval(data, more);
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str(&stdout).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let local = folder.path().join("king.txt");
    std::fs::write(&local, KING).unwrap();
    let expected = measured(local.to_str().unwrap(), &["--offline"]);
    assert_eq!(expected["dataset"]["revision"], Value::Null);

    let name = "someone/texts/data/king.txt";
    let report = measured(name, &[]);
    assert_eq!(report["metrics"], expected["metrics"]);
    let dataset = &report["dataset"];
    assert_eq!([&dataset["path"], &dataset["revision"]], [name, DATA_SHA]);
    assert_eq!(dataset["sha256"], expected["dataset"]["sha256"]);
    // The cache has the layout of Python's library.
    let repository = hub.cache.path().join("datasets--someone--texts");
    let link = repository.join("snapshots").join(DATA_SHA).join("data/king.txt");
    assert_eq!(std::fs::read_to_string(link).unwrap(), KING);

    let after_download = hub.request_count();
    measured(name, &[]);
    assert_eq!(
        hub.request_count(),
        after_download + 1,
        "the only request checks whether the dataset has changed"
    );
    for name in [name, "someone/texts@main/data/king.txt", &format!("someone/texts@{DATA_SHA}/data/king.txt")]
    {
        assert_eq!(measured(name, &["--offline"])["metrics"], expected["metrics"], "{name}");
    }
    assert_eq!(hub.request_count(), after_download + 1, "offline mode sends no request");
    // A revision may contain slashes and is still separated from the path.
    let converted = measured("someone/texts@refs/convert/parquet/default/test/0000.txt", &[]);
    assert_ne!(converted["metrics"], expected["metrics"]);
    assert!(repository.join("refs/refs/convert/parquet").is_file());
    measured("someone/texts@refs/convert/parquet/default/test/0000.txt", &["--offline"]);

    let fails = |data: &str, more: &[&str], expected: &str| {
        let (code, stdout, stderr) = eval(data, more);
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        assert!(stderr.contains(expected), "`{expected}` is not in: {stderr}");
    };
    fails(
        "someone/texts/data/queen.txt",
        &[],
        "someone/texts does not contain data/queen.txt; available files: README.md, data/king.txt",
    );
    fails("someone/other/data.txt", &["--offline"], "contains someone/texts");
    fails(
        "someone/other/data.txt",
        &[],
        "someone/other: the dataset or the revision does not exist on the Hub",
    );
    fails("data.txt", &[], "data.txt: ");
}

#[test]
fn model_is_downloaded_once_and_then_cached() {
    let hub = Hub::tiny(Fault::None);
    hub.assert_generates("someone/tiny", &[], &[]);
    let after_download = hub.request_count();
    // The cache has the layout of Python's library: blobs, references, and links in snapshots.
    let repository = hub.cache.path().join("models--someone--tiny");
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), SHA);
    assert!(std::fs::symlink_metadata(hub.snapshot().join("model.safetensors")).unwrap().is_symlink());
    assert!(repository.join("blobs/etag-model.safetensors").is_file());

    hub.assert_generates("someone/tiny", &[], &[]);
    assert_eq!(
        hub.request_count(),
        after_download + 1,
        "the only request checks whether the model has changed"
    );
    hub.assert_generates("someone/tiny@main", &["--offline"], &[]);
    hub.assert_generates("someone/tiny", &[], &[("HF_HUB_OFFLINE", "1")]);
    hub.assert_generates(&format!("someone/tiny@{SHA}"), &["--offline"], &[]);
    assert_eq!(hub.request_count(), after_download + 1, "offline mode sends no request");
    let (code, stdout, _) = hub.run(&["inspect", "--model", "someone/tiny", "--offline", "--json"], &[]);
    assert_eq!(
        (code, serde_json::from_str::<Value>(&stdout).unwrap()["parameters"]["per_block"].as_u64()),
        (0, Some(6238))
    );
}

#[test]
fn unreachable_hub_is_reported_and_the_cache_is_used() {
    let hub = Hub::tiny(Fault::None);
    hub.assert_generates("someone/tiny", &[], &[]);
    // A port without a listener.
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{closed_port}");
    let environment = [("HF_ENDPOINT", endpoint.as_str())];
    let stderr = hub.assert_generates("someone/tiny", &[], &environment);
    assert!(stderr.contains("cannot be reached; using the cached copy of someone/tiny"), "{stderr}");
    hub.assert_fails("someone/other", &[], &environment, "cannot be reached");
    hub.assert_fails("someone/other", &[], &environment, "contains someone/tiny");
    hub.assert_fails("someone/other", &["--offline"], &[], "network access is disabled; the cache");
}

#[test]
fn hub_errors_explain_what_to_do() {
    let hub = Hub::tiny(Fault::None);
    hub.assert_fails("someone/gated", &[], &[], "set HF_TOKEN to an access token");
    hub.assert_fails("someone/gated", &[], &[("HF_TOKEN", "wrong")], "access denied");
    hub.assert_generates("someone/gated", &[], &[("HF_TOKEN", "secret")]);
    hub.assert_fails("someone/unknown", &[], &[], "found neither on the Hub nor as a local path");
    hub.assert_fails("someone/tiny@v9", &[], &[], "the model or the revision does not exist on the Hub");
    hub.assert_fails("no-such-folder", &[], &[], "no such file or folder");
}

#[test]
fn interrupted_download_is_completed() {
    let hub = Hub::tiny(Fault::CutsOff);
    hub.assert_generates("someone/tiny", &[], &[]);
    assert_eq!(
        std::fs::read(hub.snapshot().join("model.safetensors")).unwrap(),
        std::fs::read(fixture_path("tiny-checkpoint/model.safetensors")).unwrap()
    );
}

#[test]
fn download_of_the_wrong_size_is_discarded() {
    let hub = Hub::tiny(Fault::WrongSize);
    hub.assert_fails("someone/tiny", &[], &[], "run the command again");
    assert!(!hub.snapshot().join("model.safetensors").exists());
}

#[test]
fn repository_without_config_or_weights_is_rejected() {
    let without = |name: &str| {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture_path("tiny-checkpoint")).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != name {
                std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
            }
        }
        Hub::new(folder.path(), Fault::None)
    };
    without("config.json").assert_fails("someone/tiny", &[], &[], "someone/tiny has no config.json");
    without("model.safetensors").assert_fails("someone/tiny", &[], &[], "contains no supported weights");
}

#[test]
fn shards_are_downloaded_with_their_index() {
    let hub = Hub::new(&fixture_path("formats/safetensors-shards"), Fault::None);
    let (code, stdout, stderr) = hub.run(&["verify", "--model", "someone/tiny", "--json"], &[]);
    assert_eq!(code, 0, "{stdout} {stderr}");
    assert_eq!(std::fs::read_dir(hub.snapshot()).unwrap().count(), 6, "config, index and four shards");
}

/// Rehearses the first use of the real GPT-2.
///
/// The repository has the files, names and shapes of OpenAI's, with random weights and a made-up tokenizer of
/// its size.
#[test]
fn gpt2_is_verified_run_and_compared_with_published_values() {
    let folder = tempfile::tempdir().unwrap();
    write_gpt2(folder.path());
    let hub = Hub::serving("openai-community/gpt2", folder.path(), Fault::None);
    let run = |arguments: &[&str]| {
        let (code, stdout, stderr) = hub.run(arguments, &[]);
        (code, serde_json::from_str::<Value>(&stdout).unwrap_or(Value::Null), stderr)
    };
    let (code, report, stderr) = run(&["verify", "gpt2", "--json"]);
    assert_eq!((code, &report["sound"], &report["problems"]), (0, &json!(true), &json!([])), "{stderr}");
    let (code, report, stderr) = run(&["inspect", "gpt2", "--json"]);
    assert_eq!((code, &report["parameters"]["unique"]), (0, &json!(124_439_808)), "{stderr}");
    let generate = ["generate", "The dog", "--model", "gpt2", "--greedy", "--max-new-tokens", "4", "--json"];
    let (code, generated, stderr) = run(&generate);
    assert_eq!((code, generated["ids"].as_array().map(Vec::len)), (0, Some(4)), "{stderr}");

    let score = ["score", "The dog", "--choice", " ran", "--model", "gpt2", "--json"];
    let (code, scored, stderr) = run(&score);
    assert_eq!(code, 0, "{stderr}");
    let loss = -scored["choices"][0]["per_token"].as_f64().unwrap();
    let values = json!([
        { "check": "parameters", "value": 124_439_808, "source": "a made-up table" },
        { "check": "config", "value": { "n_layer": 12, "n_head": 12, "n_embd": 768 }, "source": "a made-up table" },
        { "check": "loss", "prompt": "The dog", "text": " ran", "value": loss, "source": "a made-up table" },
    ]);
    let table = folder.path().join("table.json");
    let models = json!({ "models": [{ "names": ["gpt2"], "values": values }] });
    std::fs::write(&table, models.to_string()).unwrap();
    let own = format!("--published={}", table.display());
    let (code, report, stderr) = run(&["verify", "gpt2", &own, "--dtype", "f16", "--json"]);
    assert_eq!((code, report["published"].as_array().map(Vec::len)), (0, Some(3)), "{stderr}");

    // Random weights match the published sizes and nothing else.
    let (code, lines, stderr) = hub.run(&["verify", "gpt2", "--published"], &[]);
    assert_eq!(code, 1, "{stderr}");
    let beginnings = [
        "holds   124,439,808 parameters: largest difference 0",
        "differs logit -69.4948 for token 1936",
        "differs loss ",
    ];
    for beginning in beginnings {
        assert!(lines.lines().any(|line| line.starts_with(beginning)), "`{beginning}` is not in: {lines}");
    }
    let (code, _, stderr) = hub.run(&["verify", "built-in", "--published"], &[]);
    assert_eq!(code, 1);
    assert!(stderr.contains("no published values"), "{stderr}");
}

/// Writes the files in the Hub's repository `gpt2`.
///
/// Names have no prefix, matrices are `(in, out)`, and masks are buffers.
fn write_gpt2(folder: &Path) {
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let offset = tensors.len() as u64;
        tensors.insert(name, pattern(shape, 0.1, offset << 32));
    };
    add("wte.weight".into(), &[50257, 768]);
    add("wpe.weight".into(), &[1024, 768]);
    for block in 0..12 {
        add(format!("h.{block}.attn.bias"), &[1, 1, 1024, 1024]);
        for (name, inputs, outputs) in [
            ("attn.c_attn", 768, 2304),
            ("attn.c_proj", 768, 768),
            ("mlp.c_fc", 768, 3072),
            ("mlp.c_proj", 3072, 768),
        ] {
            add(format!("h.{block}.{name}.weight"), &[inputs, outputs]);
            add(format!("h.{block}.{name}.bias"), &[outputs]);
        }
        for name in ["ln_1", "ln_2"] {
            add(format!("h.{block}.{name}.weight"), &[768]);
            add(format!("h.{block}.{name}.bias"), &[768]);
        }
    }
    add("ln_f.weight".into(), &[768]);
    add("ln_f.bias".into(), &[768]);
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();

    // The vocabulary contains the 256 single bytes and 50,000 byte pairs.
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = (0..256).filter(|byte| !printable(*byte)).zip(256..);
    let others: HashMap<u32, u32> = others.collect();
    let bytes = (0..256).map(|byte| char::from_u32(*others.get(&byte).unwrap_or(&byte)).unwrap());
    let bytes: Vec<char> = bytes.collect();
    let pairs = bytes.iter().flat_map(|first| bytes.iter().map(move |second| (first, second)));
    let pairs: Vec<(&char, &char)> = pairs.take(50_000).collect();
    let tokens = bytes.iter().map(char::to_string).chain(pairs.iter().map(|(a, b)| format!("{a}{b}")));
    let tokens = tokens.chain(["<|endoftext|>".to_owned()]);
    let vocab: serde_json::Map<String, Value> =
        tokens.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let merges: Vec<String> = pairs.iter().map(|(a, b)| format!("{a} {b}")).collect();
    let end = json!({
        "id": 50256, "content": "<|endoftext|>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false,
    });
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "vocab": vocab, "merges": merges },
    });
    let config = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
        "task_specific_params": { "text-generation": { "do_sample": true, "max_length": 50 } },
    });
    for (name, contents) in [
        ("config.json", config.to_string()),
        ("generation_config.json", r#"{"bos_token_id": 50256, "eos_token_id": 50256}"#.into()),
        ("tokenizer_config.json", r#"{"model_max_length": 1024}"#.into()),
        ("tokenizer.json", tokenizer.to_string()),
        ("vocab.json", json!(vocab).to_string()),
        ("merges.txt", format!("#version: 0.2\n{}\n", merges.join("\n"))),
        ("README.md", "GPT-2\n".into()),
        // Weights for other frameworks, which are never downloaded.
        ("flax_model.msgpack", "not read".into()),
        ("tf_model.h5", "not read".into()),
        ("64.tflite", "not read".into()),
    ] {
        std::fs::write(folder.join(name), contents).unwrap();
    }
}
