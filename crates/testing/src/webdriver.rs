//! Pages in a browser that is driven, by the WebDriver protocol: JSON over HTTP to chromedriver or geckodriver.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::skipped;

/// Keys of the keyboard, as WebDriver names them.
pub mod keys {
    /// Alt.
    pub const ALT: char = '\u{e00a}';
    /// Ctrl.
    pub const CONTROL: char = '\u{e009}';
    /// The arrow down.
    pub const DOWN: char = '\u{e015}';
    /// Enter.
    pub const ENTER: char = '\u{e007}';
    /// Escape.
    pub const ESCAPE: char = '\u{e00c}';
    /// Home.
    pub const HOME: char = '\u{e011}';
    /// The arrow to the right.
    pub const RIGHT: char = '\u{e014}';
    /// Shift.
    pub const SHIFT: char = '\u{e008}';
    /// The space bar.
    pub const SPACE: char = '\u{e00d}';
    /// Tab.
    pub const TAB: char = '\u{e004}';
}

/// Names geckodriver where it is not on the path.
pub const GECKODRIVER_VARIABLE: &str = "GPT2_GECKODRIVER";

/// What an element is called in the protocol.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
/// How long is waited for what must come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where nobody answers.
const NOWHERE: &str = "127.0.0.1:9";

/// One browser at a time: each takes both cores and half a gigabyte.
static TURN: Mutex<()> = Mutex::new(());

/// Which browser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrowserKind {
    /// Chromium, by chromedriver.
    Chromium,
    /// Firefox, by geckodriver.
    Firefox,
}

impl BrowserKind {
    /// What is started, and what it says before its port.
    fn driver(self) -> (Command, &'static str) {
        match self {
            Self::Chromium => {
                let mut command = Command::new("chromedriver");
                command.arg("--port=0");
                (command, "successfully on port ")
            }
            Self::Firefox => {
                let program = std::env::var_os(GECKODRIVER_VARIABLE).unwrap_or_else(|| "geckodriver".into());
                let mut command = Command::new(program);
                command.args(["--port", "0", "--allow-system-access"]);
                (command, "Listening on 127.0.0.1:")
            }
        }
    }

    /// What the session asks for; with `is_offline` not even this machine answers.
    fn capabilities(self, profile: &Path, is_offline: bool) -> Value {
        match self {
            Self::Chromium => {
                let mut arguments = vec![
                    "--headless=new".to_owned(),
                    "--no-sandbox".into(),
                    "--disable-gpu".into(),
                    "--disable-dev-shm-usage".into(),
                    format!("--user-data-dir={}", profile.display()),
                ];
                if is_offline {
                    arguments.push("--host-resolver-rules=MAP * ~NOTFOUND".into());
                    arguments.push(format!("--proxy-server={NOWHERE}"));
                    arguments.push("--proxy-bypass-list=<-loopback>".into());
                } else {
                    arguments.push("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1".into());
                }
                json!({
                    "goog:chromeOptions": { "args": arguments },
                    "goog:loggingPrefs": { "browser": "ALL" },
                })
            }
            Self::Firefox => {
                let (host, port) = NOWHERE.split_once(':').expect("a host and a port");
                let port: u16 = port.parse().expect("a port");
                let mut preferences = json!({
                    "network.proxy.type": 1,
                    "network.proxy.http": host,
                    "network.proxy.http_port": port,
                    "network.proxy.ssl": host,
                    "network.proxy.ssl_port": port,
                    "network.proxy.no_proxies_on": "127.0.0.1",
                });
                if is_offline {
                    preferences["network.proxy.no_proxies_on"] = "".into();
                    preferences["network.proxy.allow_hijacking_localhost"] = true.into();
                }
                let mut options = json!({ "args": ["-headless"], "prefs": preferences });
                // Debian's name, which geckodriver does not look for.
                let esr = Path::new("/usr/bin/firefox-esr");
                if esr.exists() {
                    options["binary"] = esr.to_str().into();
                }
                json!({ "moz:firefoxOptions": options })
            }
        }
    }
}

/// A page in a browser, which ends with it.
#[derive(Debug)]
pub struct Browser {
    kind: BrowserKind,
    driver: Child,
    address: SocketAddr,
    session: String,
    _profile: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Browser {
    /// A page in Chromium, so many pixels wide; `None` where there is no driver, which is said. Whatever is not this machine is not
    /// found, and from a file nothing at all is.
    ///
    /// # Panics
    /// When the driver or the browser does not do what it must, as in every method.
    pub fn open(url: &str, width: usize) -> Option<Self> {
        Self::open_in(BrowserKind::Chromium, url, width)
    }

    /// The same in the browser of this kind. (Firefox is no narrower than 450 pixels.)
    ///
    /// # Panics
    /// See [`Browser::open`].
    pub fn open_in(kind: BrowserKind, url: &str, width: usize) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut command, before_port) = kind.driver();
        let Ok(mut driver) = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn() else {
            skipped(&format!(
                "the page in a browser, because there is no {}",
                command.get_program().to_string_lossy()
            ));
            return None;
        };
        let mut lines = BufReader::new(driver.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let port =
            lines.find_map(|line| line.split_once(before_port)?.1.trim_end_matches('.').parse::<u16>().ok());
        let address = SocketAddr::from(([127, 0, 0, 1], port.expect("the driver says its port")));
        // What it prints besides is read, so that it never waits for that.
        thread::spawn(move || lines.for_each(drop));
        let profile = tempfile::tempdir().expect("a folder");
        let session = String::new();
        let mut browser = Self { kind, driver, address, session, _profile: profile, _turn: turn };
        browser.begin(width, url.starts_with("file:"));
        browser.go(url);
        Some(browser)
    }

    fn begin(&mut self, width: usize, is_offline: bool) {
        let wanted = self.kind.capabilities(self._profile.path(), is_offline);
        let session = self.command("POST", "/session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        self.session = format!("/session/{}", session["sessionId"].as_str().expect("a session"));
        match self.kind {
            BrowserKind::Chromium => {
                let size = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
                self.devtools("Emulation.setDeviceMetricsOverride", size);
            }
            BrowserKind::Firefox => _ = self.post("/window/rect", &json!({ "width": width, "height": 900 })),
        }
    }

    /// One command, and what it gives.
    #[track_caller]
    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        let (status, reply) = self.send(method, path, body).expect("an answer of the driver");
        assert_eq!(status, 200, "{path}: {reply}");
        let mut reply: Value = serde_json::from_str(&reply).expect("JSON");
        reply["value"].take()
    }

    /// The status and the body of the answer.
    fn send(&self, method: &str, path: &str, body: &Value) -> std::io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let body = body.to_string();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(invalid)?;
        let mut length = None;
        loop {
            line.clear();
            stream.read_line(&mut line)?;
            let Some((name, value)) = line.split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().ok();
            }
        }
        let mut body = vec![0; length.ok_or_else(invalid)?];
        stream.read_exact(&mut body)?;
        Ok((status, String::from_utf8(body).map_err(|_| invalid())?))
    }

    #[track_caller]
    fn post(&self, path: &str, body: &Value) -> Value {
        self.command("POST", &format!("{}{path}", self.session), body)
    }

    /// A command of Chromium's developer tools, and what it gives.
    ///
    /// # Panics
    /// In Firefox too.
    #[track_caller]
    pub fn devtools(&self, command: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// Another page, or the same one again.
    ///
    /// # Panics
    /// See [`Browser::open`].
    pub fn go(&self, url: &str) {
        self.post("/url", &json!({ "url": url }));
    }

    /// What a script returns; `arguments` are its `arguments`.
    ///
    /// # Panics
    /// See [`Browser::open`]; also when the script throws.
    #[track_caller]
    pub fn script(&self, script: &str, arguments: Value) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": arguments }))
    }

    #[track_caller]
    fn element(&self, name: &str) -> String {
        let selector = json!({ "using": "css selector", "value": format!("[data-testid={name}]") });
        self.post("/element", &selector)[ELEMENT].as_str().expect("an element").to_owned()
    }

    /// Types into the part of the page with this `data-testid`.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn type_into(&self, name: &str, text: &str) {
        if text.chars().any(|c| u32::from(c) > 0xFFFF) {
            // Some drivers have no keys for such characters: it is inserted as what is pasted is.
            let script = "const part = document.querySelector(`[data-testid=${arguments[0]}]`); \
                part.focus(); document.execCommand('insertText', false, arguments[1]);";
            self.script(script, json!([name, text]));
            return;
        }
        self.post(&format!("/element/{}/value", self.element(name)), &json!({ "text": text }));
    }

    /// Puts a number or text where another stands.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn set(&self, name: &str, text: &str) {
        self.post(&format!("/element/{}/clear", self.element(name)), &json!({}));
        self.type_into(name, text);
    }

    /// Chooses files, or a folder, where the page asks for them.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn choose_files(&self, name: &str, files: &[&Path]) {
        let files: Vec<&str> = files.iter().map(|file| file.to_str().expect("a name in UTF-8")).collect();
        self.post(&format!("/element/{}/value", self.element(name)), &json!({ "text": files.join("\n") }));
    }

    /// Presses a button.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn click(&self, name: &str) {
        self.post(&format!("/element/{}/click", self.element(name)), &json!({}));
    }

    /// Presses keys one after the other where the focus is, all down before the first goes up.
    ///
    /// # Panics
    /// See [`Browser::open`].
    pub fn press(&self, keys: &[char]) {
        let action = |kind: &str, key: &char| json!({ "type": kind, "value": key });
        let down = keys.iter().map(|key| action("keyDown", key));
        let up = keys.iter().rev().map(|key| action("keyUp", key));
        let actions: Vec<Value> = down.chain(up).collect();
        self.post(
            "/actions",
            &json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": actions }] }),
        );
    }

    /// Moves the mouse over the middle of what a script returns, and presses it there if `is_click`.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn point(&self, script: &str, is_click: bool) {
        let middle = "const box = (() => { SCRIPT })().getClientRects()[0];
            return [Math.round(box.left + box.width / 2), Math.round(box.top + box.height / 2)];";
        let at = self.script(&middle.replace("SCRIPT", script), json!([]));
        let mut actions = vec![json!({ "type": "pointerMove", "duration": 20, "x": at[0], "y": at[1] })];
        if is_click {
            actions.push(json!({ "type": "pointerDown", "button": 0 }));
            actions.push(json!({ "type": "pointerUp", "button": 0 }));
        }
        let mouse = json!({ "type": "pointer", "id": "mouse", "parameters": { "pointerType": "mouse" }, "actions": actions });
        self.post("/actions", &json!({ "actions": [mouse] }));
    }

    /// The text of a part, or what is in it to be edited.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn text(&self, name: &str) -> String {
        let script = "const part = document.querySelector(`[data-testid=${arguments[0]}]`); return part.value ?? part.textContent;";
        self.script(script, json!([name])).as_str().expect("a part with text").to_owned()
    }

    /// Waits until a script returns true.
    ///
    /// # Panics
    /// When it does not within a minute; see also [`Browser::open`].
    #[track_caller]
    pub fn wait_for(&self, script: &str) {
        let until = Instant::now() + PATIENCE;
        while self.script(script, json!([])) != Value::Bool(true) {
            assert!(Instant::now() < until, "{script}; the status is {:?}", self.text("status"));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the status begins so, and returns it.
    ///
    /// # Panics
    /// See [`Browser::wait_for`].
    #[track_caller]
    pub fn wait_for_status(&self, beginning: &str) -> String {
        let status = "document.querySelector('[data-testid=status]').textContent";
        self.wait_for(&format!("return {status}.startsWith({});", json!(beginning)));
        self.text("status")
    }

    /// Complaints of the page so far, and hosts that it asked besides its own.
    ///
    /// # Panics
    /// See [`Browser::open`].
    #[track_caller]
    pub fn complaints(&self) -> Vec<String> {
        let foreign = "return performance.getEntriesByType('resource').map(one => one.name)
            .filter(name => !name.startsWith('blob:') && !(location.protocol.startsWith('http') && name.startsWith(location.origin)));";
        let foreign = self.script(foreign, json!([]));
        let foreign = foreign.as_array().expect("an array").iter().map(Value::to_string);
        let logged: Vec<String> = match self.kind {
            BrowserKind::Chromium => {
                let log = self.post("/se/log", &json!({ "type": "browser" }));
                let is_complaint = |line: &&Value| line["level"] == "SEVERE" || line["level"] == "WARNING";
                let lines = log.as_array().expect("an array").iter().filter(is_complaint);
                lines.map(|line| line["message"].to_string()).collect()
            }
            BrowserKind::Firefox => {
                // The browser's own console, from which those of its own parts are left out.
                let of_pages = "const found = Services.console.getMessageArray()
                        .filter(one => one instanceof Ci.nsIScriptError && /^(file|http|blob|data):/.test(one.sourceName));
                    Services.console.reset();
                    return found.map(String);";
                self.post("/moz/context", &json!({ "context": "chrome" }));
                let found = self.script(of_pages, json!([]));
                self.post("/moz/context", &json!({ "context": "content" }));
                found.as_array().expect("an array").iter().map(Value::to_string).collect()
            }
        };
        logged.into_iter().chain(foreign).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // A browser ends with its session, not with its driver.
        if !self.session.is_empty() {
            _ = self.send("DELETE", &self.session, &json!({}));
        }
        _ = self.driver.kill();
        _ = self.driver.wait();
    }
}
