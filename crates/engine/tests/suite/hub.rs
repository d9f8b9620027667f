//! Downloads from a hostile or broken Hub on this machine.
//!
//! No response may create, change or remove a file outside the repository's folder in the cache. Error
//! messages name the header or field and its value.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use candle_gpt2_engine::{
    AdapterChoice, EngineError, HubError, HubOptions, ModelOptions, Network, Opened, Silent, dataset_file,
};
use candle_gpt2_testing::fixture_path;
use serde_json::json;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";
/// Timeout for a Hub that is silent on purpose; `PATIENCE` allows for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(30);

/// Response from the Hub, which a test can change.
#[derive(Clone)]
struct Reply {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
    end: End,
}

/// Connection behavior after the response body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    NextRequest,
    Close,
    Silence,
}

impl Reply {
    fn new(body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let headers = BTreeMap::from([("content-length".to_owned(), body.len().to_string())]);
        Self { status: 200, headers, body, end: End::NextRequest }
    }

    /// Changes a header; an empty value removes it.
    fn with(mut self, name: &str, value: &str) -> Self {
        match value {
            "" => _ = self.headers.remove(name),
            value => _ = self.headers.insert(name.to_owned(), value.to_owned()),
        }
        self
    }
}

#[derive(Debug, Clone)]
struct Request {
    path: String,
    start: usize,
    has_token: bool,
}

impl Request {
    fn file(&self) -> &str {
        self.path.rsplit('/').next().unwrap()
    }

    fn is_for_weights(&self) -> bool {
        self.file() == "model.safetensors"
    }
}

/// Fake Hub with one model, and a cache next to a file that must not change.
struct Hub {
    endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
    root: tempfile::TempDir,
    timeout: Duration,
}

impl Hub {
    /// Serves the tiny checkpoint as `someone/tiny`; `change` can replace each response.
    fn new(change: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static) -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("victim")).unwrap();
        fs::write(root.path().join("victim/.bashrc"), "precious").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (change, seen) = (Arc::new(change), Arc::clone(&requests));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (change, seen) = (Arc::clone(&change), Arc::clone(&seen));
                // A client that disconnects is not an error.
                thread::spawn(move || serve(&stream.unwrap(), &*change, &seen));
            }
        });
        Self { endpoint, requests, root, timeout: PATIENCE }
    }

    fn options(&self) -> HubOptions {
        HubOptions {
            network: Network::Allowed,
            endpoint: self.endpoint.clone(),
            cache: self.cache(),
            token: Some(TOKEN.into()),
            timeout: self.timeout,
        }
    }

    fn open(&self) -> Result<Opened, EngineError> {
        let options =
            ModelOptions { model: "someone/tiny".into(), hub: self.options(), ..ModelOptions::default() };
        options.open(&Silent)
    }

    /// Opens the model; checks that it fails and changes nothing outside the cache.
    #[track_caller]
    fn error(&self) -> HubError {
        let before = self.outside();
        let error = match self.open() {
            Err(EngineError::Hub(error)) => error,
            Err(error) => panic!("an error of the Hub was expected: {error}"),
            Ok(_) => panic!("an error was expected"),
        };
        assert_eq!(self.outside(), before, "{error}");
        let text = error.to_string();
        assert!(text.len() < 500 && !text.contains(char::is_control), "{text:?}");
        error
    }

    #[track_caller]
    fn assert_rejected(&self, parts: &[&str]) {
        let error = self.error();
        assert!(matches!(error, HubError::InvalidResponse { .. }), "{error}");
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
    }

    fn cache(&self) -> PathBuf {
        self.root.path().join("cache/hub")
    }

    fn repository(&self) -> PathBuf {
        self.cache().join("models--someone--tiny")
    }

    fn victim(&self) -> PathBuf {
        self.root.path().join("victim/.bashrc")
    }

    /// Returns all files outside the repository's folder, with their contents.
    fn outside(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        list(self.root.path(), &self.repository(), &mut found);
        // Excludes the folders of the cache itself.
        found.retain(|path, _| !self.cache().starts_with(path));
        found
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn list(folder: &Path, excluded: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type().unwrap())).unwrap();
        if path == excluded {
            continue;
        }
        let contents = if kind.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
        if kind.is_dir() {
            list(&path, excluded, found);
        }
        found.insert(path, contents);
    }
}

fn serve(
    stream: &TcpStream,
    change: &dyn Fn(&Request, Reply) -> Reply,
    seen: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next() {
        let mut request =
            Request { path: line?.split(' ').nth(1).unwrap().to_owned(), start: 0, has_token: false };
        for header in lines.by_ref() {
            match header?.to_lowercase().as_str() {
                "" => break,
                "authorization: bearer hf_secret" => request.has_token = true,
                header => {
                    if let Some(range) = header.strip_prefix("range: bytes=") {
                        request.start = range.split('-').next().unwrap().parse().unwrap();
                    }
                }
            }
        }
        seen.lock().unwrap().push(request.clone());
        let reply = change(&request, honest(&request));
        let mut writer = stream;
        write!(writer, "HTTP/1.1 {} -\r\n", reply.status)?;
        for (name, value) in &reply.headers {
            write!(writer, "{name}: ")?;
            writer.write_all(value.as_bytes())?;
            write!(writer, "\r\n")?;
        }
        write!(writer, "\r\n")?;
        writer.write_all(&reply.body)?;
        match reply.end {
            End::NextRequest => {}
            End::Close => return stream.shutdown(std::net::Shutdown::Both),
            End::Silence => thread::sleep(2 * PATIENCE),
        }
    }
    Ok(())
}

fn honest(request: &Request) -> Reply {
    if request.path == "/api/models/someone/tiny/revision/main" {
        return listing(&["config.json", "tokenizer.json", "model.safetensors"], SHA);
    }
    let Ok(contents) = fs::read(fixture_path("tiny-checkpoint").join(request.file())) else {
        return Reply { status: 404, ..Reply::new("") };
    };
    let (start, size) = (request.start, contents.len());
    let reply = Reply::new(&contents[start..]).with("etag", &format!("\"etag-{}\"", request.file()));
    let reply = reply.with("x-repo-commit", SHA);
    if start == 0 {
        return reply;
    }
    Reply { status: 206, ..reply.with("content-range", &format!("bytes {start}-{}/{size}", size - 1)) }
}

fn listing(names: &[&str], sha: &str) -> Reply {
    let siblings: Vec<_> = names.iter().map(|name| json!({ "rfilename": name })).collect();
    Reply::new(json!({ "sha": sha, "siblings": siblings }).to_string())
}

/// Hub that sends the given header with every file.
fn with_header(name: &'static str, value: impl Into<String>) -> Hub {
    let value = value.into();
    Hub::new(move |request, reply| match request.path.starts_with("/api/") {
        true => reply,
        false => reply.with(name, &value),
    })
}

/// Hub that returns the given list of files.
fn with_listing(reply: Reply) -> Hub {
    Hub::new(move |request, other| if request.path.starts_with("/api/") { reply.clone() } else { other })
}

/// Hub whose repository contains the adapter `plain` of the tiny checkpoint.
fn with_adapter() -> Hub {
    Hub::new(|request, reply| {
        if request.path.starts_with("/api/") {
            return listing(&["README.md", "adapter_config.json", "adapter_model.safetensors"], SHA);
        }
        let Ok(contents) = fs::read(fixture_path("adapters/plain").join(request.file())) else {
            return reply;
        };
        let etag = format!("\"etag-{}\"", request.file());
        Reply::new(contents).with("etag", &etag).with("x-repo-commit", SHA)
    })
}

#[test]
fn adapter_is_downloaded_but_rejected_as_a_model() {
    let hub = with_adapter();
    let open = |network| {
        let hub = HubOptions { network, ..hub.options() };
        let adapter = vec![AdapterChoice::new("someone/tiny")];
        let model = fixture_path("tiny-checkpoint");
        ModelOptions { model, adapter, hub, ..ModelOptions::default() }.open(&Silent)
    };
    assert!(open(Network::Offline).is_err(), "it is not in the cache yet");
    open(Network::Allowed).unwrap();
    open(Network::Offline).unwrap();
    let requested = hub.requests();
    assert!(requested.iter().all(|request| request.file() != "README.md"), "{requested:?}");
    let error = hub.error();
    assert!(matches!(error, HubError::IsAdapter { .. }), "{error}");
    assert!(error.to_string().contains("use `--adapter someone/tiny` in place of `--model someone/tiny`"));

    let model = Hub::new(|_, reply| reply);
    let adapter = vec![AdapterChoice::new("someone/tiny")];
    let options = ModelOptions { adapter, hub: model.options(), ..ModelOptions::default() };
    let error = options.open(&Silent).unwrap_err().to_string();
    assert!(
        error.contains("someone/tiny contains no LoRA adapter (looked for adapter_config.json"),
        "{error}"
    );
}

/// Values that are unsafe as a path component, with the part that the error message quotes.
fn unsafe_values(victim: &Path) -> Vec<(String, String)> {
    let long = "a".repeat(129);
    let victim = victim.display().to_string();
    let plain = [
        victim.as_str(),
        "../../../victim/.bashrc",
        "..",
        ".",
        "a/b",
        "a\\b",
        "C:a",
        "nul",
        "a b",
        "é",
        "a\u{202e}b",
    ];
    let mut values: Vec<_> =
        plain.iter().map(|value| ((*value).to_owned(), value.chars().take(80).collect())).collect();
    values.push((long, "a".repeat(80)));
    values.push(("a".repeat(20_000), "a".repeat(80)));
    for (_, shown) in &mut values {
        *shown = shown.replace('\\', "\\\\").replace('\u{202e}', "\\u{202e}").trim_end().to_owned();
    }
    values
}

#[test]
fn unsafe_etags_and_commits_are_rejected() {
    for header in ["etag", "x-linked-etag", "x-repo-commit"] {
        // The victim's path is unknown until the Hub exists.
        for index in 0..unsafe_values(Path::new("/victim")).len() {
            let victim = Arc::new(Mutex::new(PathBuf::new()));
            let known = Arc::clone(&victim);
            let hub = Hub::new(move |request, reply| {
                let (value, _) = unsafe_values(&known.lock().unwrap())[index].clone();
                let quote = if header == "x-repo-commit" { "" } else { "\"" };
                if request.path.starts_with("/api/") {
                    reply
                } else {
                    reply.with(header, &format!("{quote}{value}{quote}"))
                }
            });
            *victim.lock().unwrap() = hub.victim();
            let (_, shown) = unsafe_values(&hub.victim())[index].clone();
            let shown: String = shown.chars().take(60).collect();
            hub.assert_rejected(&[&format!("header {header} is "), &shown]);
            assert!(!hub.repository().exists(), "{header}: {shown}");
        }
    }
}

#[test]
fn unsafe_commits_and_file_names_in_listings_are_rejected() {
    let hub = with_header("x-none", "");
    for (value, shown) in unsafe_values(&hub.victim()) {
        let hub = with_listing(listing(&["config.json", "model.safetensors"], &value));
        let shown: String = shown.chars().take(60).collect();
        hub.assert_rejected(&["sha is ", &shown]);
        assert!(!hub.cache().exists());
    }
    for name in [
        "/etc/passwd",
        "../victim/.bashrc",
        "a/../../b",
        "./a",
        "a//b",
        "",
        "model-\\..\\a.safetensors",
        "model-C:a.safetensors",
        "model-\u{1b}[31m.safetensors",
        "model-a*.safetensors",
    ] {
        let hub = with_listing(listing(&["config.json", "model.safetensors.index.json", name], SHA));
        let shown = name.replace('\\', "\\\\").replace('\u{1b}', "\\u{1b}");
        hub.assert_rejected(&["siblings", &format!("\"{shown}\"")]);
        assert!(!hub.cache().exists());
    }
    // Unusual names are ignored if they are not needed.
    let names = ["config.json", "tokenizer.json", "model.safetensors", "notes: what?.txt", "a\\b", "con"];
    with_listing(listing(&names, SHA)).open().unwrap();
}

#[test]
fn invalid_listings_are_rejected() {
    let json = |text: &str| with_listing(Reply::new(text));
    json("[]").assert_rejected(&["the list of files is invalid"]);
    json(r#"{"sha": 7, "siblings": []}"#).assert_rejected(&["the list of files is invalid"]);
    let nested = format!(r#"{{"a": {}"#, "[".repeat(100_000));
    json(&nested).assert_rejected(&["the list of files is invalid"]);
    let quoted = format!(r#"{{"sha": "a", "siblings": "{}"}}"#, "\\u001b".repeat(1_000_000));
    json(&quoted).assert_rejected(&["the list of files is invalid"]);
    let endless = Reply {
        end: End::Silence,
        ..Reply::new(vec![b' '; 10_100_000]).with("content-length", "99999999999")
    };
    with_listing(endless).assert_rejected(&["larger than 10000000 bytes"]);
    let many: Vec<String> = (0..10_001).map(|shard| format!("model-{shard}.safetensors")).collect();
    let names =
        ["config.json", "model.safetensors.index.json"].into_iter().chain(many.iter().map(String::as_str));
    with_listing(listing(&names.collect::<Vec<_>>(), SHA))
        .assert_rejected(&["contains 10003 files to download"]);
}

/// Compressed responses are rejected, which rules out decompression bombs.
#[test]
fn compressed_responses_are_rejected() {
    for encoding in ["gzip", "br", "zstd", "gzip, gzip", "\u{1b}[31m"] {
        let bomb = Reply::new([0x1f, 0x8b, 8, 0]).with("content-encoding", encoding);
        if encoding.starts_with('\u{1b}') {
            // This header value is not valid HTTP.
            assert!(matches!(with_listing(bomb).error(), HubError::InvalidResponse { .. }));
            continue;
        }
        let expected = format!("header content-encoding is \"{encoding}\"");
        with_listing(bomb).assert_rejected(&[&expected]);
        with_header("content-encoding", encoding).assert_rejected(&[&expected]);
    }
}

#[test]
fn wrong_sizes_are_rejected_and_leave_no_files() {
    let size = fs::metadata(fixture_path("tiny-checkpoint/config.json")).unwrap().len();
    for announced in [size + 7, size - 7] {
        let hub = with_header("x-linked-size", announced.to_string());
        let error = hub.error();
        let is_right = matches!(error, HubError::WrongSize { expected, .. } if expected == announced);
        assert!(is_right, "{error}");
        assert_eq!(fs::read_dir(hub.repository().join("blobs")).unwrap().count(), 0);
        assert!(!hub.repository().join("snapshots").exists());
    }
    with_header("x-linked-size", "-1").assert_rejected(&["header x-linked-size is \"-1\""]);
    with_header("x-linked-size", "+1").assert_rejected(&["header x-linked-size is \"+1\""]);
    with_header("x-linked-size", "99999999999999999999").assert_rejected(&["header x-linked-size is \"9999"]);
    with_header("content-range", "bytes 5").assert_rejected(&["header content-range is \"bytes 5\""]);
    // A partial response that was not requested.
    let partial = Hub::new(|request, reply| match request.path.starts_with("/api/") {
        true => reply,
        false => Reply { status: 206, ..reply.with("content-range", "bytes 5-9/10") },
    });
    partial.assert_rejected(&["header content-range is \"bytes 5-9/10\""]);
    let unknown = Hub::new(|request, reply| match request.path.starts_with("/api/") {
        true => reply,
        false => Reply { end: End::Close, ..reply.with("content-length", "") },
    });
    unknown.assert_rejected(&["header content-length is missing"]);
}

#[test]
fn missing_and_changed_commits_are_errors() {
    with_header("x-repo-commit", "").assert_rejected(&["header x-repo-commit is missing"]);
    with_header("etag", "").assert_rejected(&["header etag is missing"]);
    let hub = with_header("x-repo-commit", "1".repeat(40));
    let error = hub.error();
    assert!(matches!(error, HubError::Changed { .. }), "{error}");
    assert!(!hub.repository().exists());
}

#[test]
fn redirects_are_limited_and_do_not_leak_the_token() {
    let to = |location: &str| {
        let location = location.to_owned();
        Hub::new(move |_, reply| Reply { status: 302, ..reply.with("location", &location) })
    };
    to("/loop").assert_rejected(&["more than 10 redirects"]);
    for location in ["file:///etc/passwd", "ftp://127.0.0.1/", "other", "http://"] {
        to(location).assert_rejected(&[&format!("header location is \"{location}\"")]);
    }
    let elsewhere = Hub::new(|_, reply| reply);
    let address = elsewhere.endpoint.clone();
    // The endpoint describes the weights, but another server sends them; its own headers are ignored.
    let hub = Hub::new(move |request, reply| match request.is_for_weights() {
        true => Reply { status: 302, body: Vec::new(), ..reply }
            .with("content-length", "0")
            .with("x-linked-etag", "\"linked\"")
            .with("location", &format!("{address}/someone/tiny/resolve/main/model.safetensors")),
        false => reply,
    });
    hub.open().unwrap();
    assert!(hub.repository().join("blobs/linked").is_file());
    assert!(hub.requests().iter().all(|request| request.has_token));
    let forwarded = elsewhere.requests();
    assert!(forwarded.len() == 1 && !forwarded[0].has_token, "{forwarded:?}");
}

#[test]
fn silent_hub_times_out() {
    let began = Instant::now();
    let silent = |is_silent: fn(&Request) -> bool, cut: fn(Reply) -> Reply| {
        let change = move |request: &Request, reply| match is_silent(request) {
            true => Reply { end: End::Silence, ..cut(reply) },
            false => reply,
        };
        Hub { timeout: TIMEOUT, ..Hub::new(change) }
    };
    let half = |reply: Reply| Reply { body: reply.body[..reply.body.len() / 2].to_vec(), ..reply };
    let error = silent(|request| request.path.starts_with("/api/"), half).error();
    assert!(
        matches!(&error, HubError::Unreachable { cause, .. } if cause == "no response for 1 s"),
        "{error}"
    );
    let hub = silent(Request::is_for_weights, half);
    let error = hub.error();
    assert!(matches!(error, HubError::Silent { .. }), "{error}");
    assert!(error.to_string().contains("received no data from the Hub for 1 s"), "{error}");
    // The first half is kept for the next attempt, and nothing looks complete.
    assert!(hub.repository().join("blobs/etag-model.safetensors.part").is_file());
    assert!(!hub.repository().join("snapshots").join(SHA).join("model.safetensors").exists());

    // A server that accepts connections and sends nothing, or only the beginning of a header.
    for beginning in ["", "HTTP/1.1 200 OK\r\ncontent-le"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(beginning.as_bytes()).unwrap();
            thread::sleep(2 * PATIENCE);
        });
        let hub = HubOptions { endpoint, ..hub.options() };
        let error = dataset_file("someone/texts/a.txt".as_ref(), &hub, &Silent).unwrap_err();
        assert!(matches!(error, EngineError::Hub(HubError::Unreachable { .. })), "{error}");
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

#[test]
fn interrupted_downloads_are_resumed() {
    // The connection drops twice while the weights are downloaded.
    for has_ranges in [true, false] {
        let broken_off = AtomicUsize::new(0);
        let hub = Hub::new(move |request, reply| {
            if !request.is_for_weights() {
                return reply;
            }
            let reply = if has_ranges { reply } else { honest(&Request { start: 0, ..request.clone() }) };
            let half = reply.body[..reply.body.len() / 2].to_vec();
            match broken_off.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Reply { body: half, end: End::Close, ..reply },
                _ => reply,
            }
        });
        hub.open().unwrap_or_else(|error| panic!("{has_ranges}: {error}"));
        let starts: Vec<usize> = hub
            .requests()
            .iter()
            .filter(|request| request.is_for_weights())
            .map(|request| request.start)
            .collect();
        assert!(starts.len() > 1 && starts[1] > 0, "{starts:?}");
        assert_eq!(fs::read_dir(hub.repository().join("blobs")).unwrap().count(), 3);
    }
}

#[test]
fn concurrent_clients_share_one_cache() {
    const CLIENTS: usize = 4;
    // No client receives the weights until all clients have requested them.
    let (requested, all) = (AtomicUsize::new(0), Barrier::new(CLIENTS));
    let hub = Hub::new(move |request, reply| {
        if request.is_for_weights() && requested.fetch_add(1, Ordering::Relaxed) < CLIENTS {
            all.wait();
        }
        reply
    });
    thread::scope(|scope| {
        for client in (0..CLIENTS).map(|_| scope.spawn(|| hub.open().map(drop))).collect::<Vec<_>>() {
            client.join().unwrap().unwrap();
        }
    });
    let mut blobs: Vec<_> =
        fs::read_dir(hub.repository().join("blobs")).unwrap().map(|blob| blob.unwrap().file_name()).collect();
    blobs.sort();
    assert_eq!(blobs, ["etag-config.json", "etag-model.safetensors", "etag-tokenizer.json"]);
    // A client that waits for another's download does not request the file again.
    let requests = hub.requests();
    let count = |file: &str| requests.iter().filter(|request| request.file() == file).count();
    assert_eq!(count("model.safetensors"), CLIENTS);
    for file in ["config.json", "tokenizer.json"] {
        assert!((1..=CLIENTS).contains(&count(file)), "{file}: {requests:?}");
    }
    let weights = fs::read(hub.repository().join("blobs/etag-model.safetensors")).unwrap();
    assert_eq!(weights, fs::read(fixture_path("tiny-checkpoint/model.safetensors")).unwrap());
}

/// The cache may already contain links, for example from an earlier program.
#[cfg(unix)]
#[test]
fn writes_do_not_follow_links_in_the_cache() {
    use std::os::unix::fs::symlink;
    let planted = |at: &str, to: &str| {
        let hub = Hub::new(|_, reply| reply);
        let at = hub.cache().join(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(hub.root.path().join(to), at).unwrap();
        hub
    };
    let folders = [
        "models--someone--tiny".to_owned(),
        "models--someone--tiny/blobs".to_owned(),
        "models--someone--tiny/snapshots".to_owned(),
        format!("models--someone--tiny/snapshots/{SHA}"),
        "models--someone--tiny/blobs/etag-config.json.part".to_owned(),
    ];
    for at in folders {
        let hub = planted(&at, if at.ends_with(".part") { "victim/.bashrc" } else { "victim" });
        let error = hub.error().to_string();
        assert!(error.contains("; remove it from the cache"), "{at}: {error}");
    }
    let hub = planted("models--someone--tiny/refs", "victim");
    assert!(hub.error().to_string().contains("; remove it from the cache"));
    // A link in place of a file is replaced, or read if it points to a file.
    let hub = planted("models--someone--tiny/refs/main", "victim/.bashrc");
    hub.open().unwrap();
    assert_eq!(fs::read_to_string(hub.victim()).unwrap(), "precious");
    assert_eq!(fs::read_to_string(hub.repository().join("refs/main")).unwrap(), SHA);
    let hub = planted(&format!("models--someone--tiny/snapshots/{SHA}/model.safetensors"), "victim/new");
    hub.open().unwrap();
    assert!(!hub.root.path().join("victim/new").exists());
}

/// Simulates a cache from an earlier version whose records a hostile Hub chose.
#[test]
fn unsafe_refs_in_the_cache_are_rejected() {
    let hub = Hub::new(|_, reply| reply);
    hub.open().unwrap();
    let offline = || {
        let options = HubOptions { network: Network::Offline, ..hub.options() };
        ModelOptions { model: "someone/tiny".into(), hub: options, ..ModelOptions::default() }.open(&Silent)
    };
    offline().unwrap();
    let elsewhere = hub.root.path().join("victim");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture_path("tiny-checkpoint").join(name), elsewhere.join(name)).unwrap();
    }
    for commit in [elsewhere.to_str().unwrap(), "../../../../victim"] {
        fs::write(hub.repository().join("refs/main"), commit).unwrap();
        let error = offline().unwrap_err();
        assert!(matches!(error, EngineError::Hub(HubError::Incomplete { .. })), "{error}");
        assert!(!error.to_string().contains("victim"), "{error}");
    }
}

#[test]
fn error_names_the_missing_part_of_the_cache() {
    let hub = Hub::new(|_, reply| reply);
    hub.open().unwrap();
    let offline_error = || {
        let options = HubOptions { network: Network::Offline, ..hub.options() };
        let model = ModelOptions { model: "someone/tiny".into(), hub: options, ..ModelOptions::default() };
        model.open(&Silent).unwrap_err().to_string()
    };
    let snapshot = hub.repository().join("snapshots").join(SHA);
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    assert!(
        offline_error().contains("but revision main is incomplete (missing files); download it again"),
        "{}",
        offline_error()
    );
    fs::remove_file(hub.repository().join("refs/main")).unwrap();
    assert!(offline_error().contains(&format!(
        "refs/main is missing; append the commit of a snapshot to the name, as in @{SHA}"
    )));
    fs::write(hub.repository().join("refs/main"), "f".repeat(40)).unwrap();
    assert!(
        offline_error().contains(&format!("the snapshot {} for revision main is missing", "f".repeat(40))),
        "{}",
        offline_error()
    );
}
