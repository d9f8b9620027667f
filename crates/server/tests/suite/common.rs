//! In-process server, and a client that sends and receives raw bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::OnceLock;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent, WeightDType};
use candle_gpt2_server::{Handle, Model, Server, ServerError, ServerOptions};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, pattern};
use serde_json::{Value, json};

/// Maximum time that a test waits for something it expects.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Tiny checkpoint from the fixtures.
pub(crate) fn tiny() -> LoadedModel {
    static MODEL: OnceLock<LoadedModel> = OnceLock::new();
    MODEL.get_or_init(|| load(&fixture_path("tiny-checkpoint"))).clone()
}

/// Small model built into the program.
pub(crate) fn built_in() -> LoadedModel {
    static MODEL: OnceLock<LoadedModel> = OnceLock::new();
    MODEL.get_or_init(|| ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap()).clone()
}

/// Built-in model in f32, for comparing passes with different numbers of rows.
pub(crate) fn built_in_f32() -> LoadedModel {
    let options = ModelOptions { dtype: Some(WeightDType::F32), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Tiny checkpoint with a context so long that a completion takes seconds.
pub(crate) fn long() -> LoadedModel {
    static MODEL: OnceLock<LoadedModel> = OnceLock::new();
    let make = || {
        let sizes = json!({"n_positions": LONG, "n_ctx": LONG});
        let folder = CheckpointFolder::tiny().with_config(sizes).with_tensors(|tensors| {
            tensors.insert("transformer.wpe.weight".into(), pattern(&[LONG, 28], 0.1, 5));
        });
        load(folder.path())
    };
    MODEL.get_or_init(make).clone()
}

/// Context length of [`long`].
pub(crate) const LONG: usize = 16_384;

/// Request to [`long`] that takes seconds.
pub(crate) fn long_request() -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": LONG - 3, "ignore_eos": true, "temperature": 0})
}

/// Streamed version of [`long_request`].
pub(crate) fn long_stream() -> Value {
    let mut request = long_request();
    request["stream"] = true.into();
    request
}

/// Loads the model in a folder.
pub(crate) fn load(folder: &Path) -> LoadedModel {
    let options = ModelOptions { model: folder.to_owned(), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Server that runs until it is dropped.
pub(crate) struct Running {
    /// Address of the server; unused if the server listens on a Unix socket.
    pub(crate) address: SocketAddr,
    pub(crate) handle: Handle,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
}

/// Starts a server for the tiny checkpoint, named `tiny`, with default options.
pub(crate) fn start() -> Running {
    start_with(|_| ())
}

/// Starts a server for the tiny checkpoint with changed options.
pub(crate) fn start_with(change: impl FnOnce(&mut ServerOptions)) -> Running {
    start_model(tiny(), "tiny", change)
}

/// Starts a server for a model.
pub(crate) fn start_model(
    model: impl Into<Model>,
    name: &str,
    change: impl FnOnce(&mut ServerOptions),
) -> Running {
    let mut options = ServerOptions { port: 0, ..ServerOptions::default() };
    options.api.name = name.to_owned();
    // Tests in which the server closes a connection should not wait long for a silent client.
    options.timeouts.linger = Duration::from_millis(300);
    change(&mut options);
    run(Server::bind(model, options).unwrap())
}

/// Runs a server on its own thread.
pub(crate) fn run(server: Server) -> Running {
    let address = server.address();
    let address = address.strip_prefix("http://").map(|address| address.parse().unwrap());
    let handle = server.handle();
    let thread = Some(thread::spawn(move || server.run()));
    Running { address: address.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0))), handle, thread }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The second call skips draining, because requests left over from a test need not finish.
        self.handle.stop();
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            assert!(result.is_ok() || thread::panicking(), "the server panicked");
        }
    }
}

impl Running {
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits until the server stops and returns its result.
    pub(crate) fn join(mut self) -> Result<(), ServerError> {
        self.thread.take().unwrap().join().unwrap()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    pub(crate) fn connect(&self) -> Client<TcpStream> {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client::new(stream)
    }

    /// Sends a request with extra header lines on its own connection.
    pub(crate) fn request(&self, method: &str, path: &str, lines: &[&str], body: &[u8]) -> Reply {
        let mut client = self.connect();
        client.send(&request(method, path, lines, body));
        if method == "HEAD" { client.head() } else { client.reply() }
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        let mut client = self.connect();
        client.send(&json_request(path, body));
        client.reply()
    }

    /// Sends a long request and waits until it is the only one running.
    #[track_caller]
    pub(crate) fn occupy(&self, body: &Value) -> Client<TcpStream> {
        let mut client = self.connect();
        client.send(&json_request("/v1/completions", body));
        self.wait_for_metric("gpt2_batch_rows", 1.0);
        client
    }

    /// Sends a request and returns the JSON objects of its stream, up to `[DONE]`.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        events(&reply.text())
    }

    /// Value of the `/metrics` line that begins with `name`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or("0").parse().unwrap()
    }

    /// Waits until a metric has the expected value.
    #[track_caller]
    pub(crate) fn wait_for_metric(&self, name: &str, expected: f64) {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.metric(name);
            if found == expected {
                return;
            }
            assert!(Instant::now() < until, "{name} is {found}, expected {expected}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Bytes of a request with Host and Content-Length headers.
pub(crate) fn request(method: &str, path: &str, lines: &[&str], body: &[u8]) -> Vec<u8> {
    let is_sent = |name: &str| lines.iter().any(|line| line.to_ascii_lowercase().starts_with(name));
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    if !is_sent("host:") {
        head.push_str("Host: localhost\r\n");
    }
    if !(body.is_empty() || is_sent("content-length:") || is_sent("transfer-encoding:")) {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    for line in lines {
        head.push_str(&format!("{line}\r\n"));
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// Bytes of a request with a JSON body.
pub(crate) fn json_request(path: &str, body: &Value) -> Vec<u8> {
    request("POST", path, &["Content-Type: application/json"], body.to_string().as_bytes())
}

/// Parses the JSON objects in a stream's text, which must end with `[DONE]`.
#[track_caller]
pub(crate) fn events(text: &str) -> Vec<Value> {
    let events: Vec<&str> = text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).collect();
    let (last, events) = events.split_last().expect("events");
    assert_eq!(*last, "data: [DONE]", "{text}");
    let parse = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").expect("data")).unwrap();
    events.iter().map(parse).collect()
}

/// Response from the server.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Headers as pairs of a lowercase name and a value.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Checks that this is a complete error response and returns its message.
    #[track_caller]
    pub(crate) fn refusal(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].clone();
        let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys[..4], ["message", "type", "param", "code"]);
        let kind = match status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            500 => "server_error",
            _ => "invalid_request_error",
        };
        assert_eq!(error["type"], kind);
        assert!(error["param"].is_null() || error["param"].is_string());
        assert!(error["code"].is_null() || error["code"].is_string());
        let message = error["message"].as_str().unwrap();
        assert!(!message.is_empty() && !message.contains("panicked"), "{message}");
        message.to_owned()
    }
}

/// Raw connection to the server.
pub(crate) struct Client<S> {
    pub(crate) stream: S,
    buffer: Vec<u8>,
}

impl Client<TcpStream> {
    /// Closes the sending side.
    pub(crate) fn close_sending(&self) {
        // Fails if the server has already closed the connection.
        _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// Sends bytes; ignores errors, because a server that closes the connection sends the reason first.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        _ = self.stream.write_all(bytes);
    }

    /// Reads more bytes; returns false if the connection closed.
    fn read_more(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        match self.stream.read(&mut bytes) {
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                count > 0
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) => panic!("{error}, after {:?}", String::from_utf8_lossy(&self.buffer)),
        }
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.read_more(), "the connection closed in the middle of a response");
        }
        self.buffer.drain(..count).collect()
    }

    /// Reads up to and including `end`; returns `None` if the connection ends before the first byte.
    fn take_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return Some(self.take(at + end.len()));
            }
            if !self.read_more() {
                assert!(self.buffer.is_empty(), "cut off: {:?}", String::from_utf8_lossy(&self.buffer));
                return None;
            }
        }
    }

    /// Reads the head of a response, but not the body.
    #[track_caller]
    pub(crate) fn head(&mut self) -> Reply {
        self.try_head().expect("a response before the connection closes")
    }

    fn try_head(&mut self) -> Option<Reply> {
        let head = String::from_utf8(self.take_until(b"\r\n\r\n")?).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        };
        let headers = lines.filter(|line| !line.is_empty()).map(header).collect();
        Some(Reply { status, headers, body: Vec::new() })
    }

    /// Reads the next response; returns `None` if the connection ends instead.
    pub(crate) fn try_reply(&mut self) -> Option<Reply> {
        let mut reply = self.try_head()?;
        while reply.status == 100 {
            reply = self.try_head()?;
        }
        if reply.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                reply.body.extend(chunk);
            }
        } else if let Some(length) = reply.header("content-length") {
            let length = length.parse().unwrap();
            reply.body = self.take(length);
        }
        Some(reply)
    }

    /// Reads the next response.
    #[track_caller]
    pub(crate) fn reply(&mut self) -> Reply {
        self.try_reply().expect("a response before the connection closes")
    }

    /// Reads the next chunk of a body; returns `None` after the last one.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.take_until(b"\r\n").expect("a chunk");
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
        let mut chunk = self.take(size + 2);
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Checks that the server closes the connection without sending more.
    #[track_caller]
    pub(crate) fn assert_closed(&mut self) {
        assert!(
            !self.read_more(),
            "expected the connection to close, got {:?}",
            String::from_utf8_lossy(&self.buffer)
        );
    }
}
