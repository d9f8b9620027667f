//! Chromium, by the WebDriver protocol: JSON over HTTP to chromedriver.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Client, PATIENCE, request};

/// Keys of the keyboard, as WebDriver names them.
pub(crate) mod keys {
    pub(crate) const ALT: char = '\u{e00a}';
    pub(crate) const CONTROL: char = '\u{e009}';
    pub(crate) const DOWN: char = '\u{e015}';
    pub(crate) const ENTER: char = '\u{e007}';
    pub(crate) const ESCAPE: char = '\u{e00c}';
    pub(crate) const HOME: char = '\u{e011}';
    pub(crate) const SHIFT: char = '\u{e008}';
    pub(crate) const TAB: char = '\u{e004}';
}

/// What an element is called in the protocol.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// One browser at a time: each takes both cores and half a gigabyte.
static TURN: Mutex<()> = Mutex::new(());

/// A page in a browser, which ends with it.
pub(crate) struct Browser {
    driver: Child,
    address: SocketAddr,
    session: String,
    _profile: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Browser {
    /// A page that is ready; `None` where there is no chromedriver, which is said.
    #[expect(clippy::print_stderr, reason = "a skipped test says so")]
    pub(crate) fn open(url: &str, width: usize) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let started =
            Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let Ok(mut driver) = started else {
            eprintln!("skipped: the page in a browser, because there is no chromedriver");
            return None;
        };
        let lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines.map_while(Result::ok).find_map(|line| {
            line.split_once("successfully on port ")?.1.trim_end_matches('.').parse::<u16>().ok()
        });
        let address = SocketAddr::from(([127, 0, 0, 1], port.expect("chromedriver says its port")));
        let profile = tempfile::tempdir().unwrap();
        let mut browser = Self { driver, address, session: String::new(), _profile: profile, _turn: turn };
        browser.begin(width);
        browser.go(url);
        Some(browser)
    }

    fn begin(&mut self, width: usize) {
        let arguments = json!([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            // Whatever is not this machine is not found.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            format!("--user-data-dir={}", self._profile.path().display()),
        ]);
        let wanted =
            json!({ "goog:chromeOptions": { "args": arguments }, "goog:loggingPrefs": { "browser": "ALL" } });
        let session = self.command("POST", "/session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        self.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        let size = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.post(
            "/goog/cdp/execute",
            &json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": size }),
        );
    }

    /// One command, and what it gives.
    #[track_caller]
    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        let mut client = self.send(method, path, body.to_string().as_bytes());
        let reply = client.reply();
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        reply.json()["value"].clone()
    }

    fn send(&self, method: &str, path: &str, body: &[u8]) -> Client<TcpStream> {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client::new(stream);
        client.send(&request(method, path, &["Content-Type: application/json"], body));
        client
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.command("POST", &format!("{}{path}", self.session), body)
    }

    pub(crate) fn go(&self, url: &str) {
        self.post("/url", &json!({ "url": url }));
    }

    /// What a script returns; `arguments` are its `arguments`.
    pub(crate) fn script(&self, script: &str, arguments: Value) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": arguments }))
    }

    fn element(&self, name: &str) -> String {
        let selector = json!({ "using": "css selector", "value": format!("[data-testid={name}]") });
        self.post("/element", &selector)[ELEMENT].as_str().unwrap().to_owned()
    }

    /// Types into the part of the page with this `data-testid`.
    pub(crate) fn type_into(&self, name: &str, text: &str) {
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
    pub(crate) fn set(&self, name: &str, text: &str) {
        self.post(&format!("/element/{}/clear", self.element(name)), &json!({}));
        self.type_into(name, text);
    }

    pub(crate) fn click(&self, name: &str) {
        self.post(&format!("/element/{}/click", self.element(name)), &json!({}));
    }

    /// Presses keys one after the other where the focus is, all down before the first goes up.
    pub(crate) fn press(&self, keys: &[char]) {
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
    pub(crate) fn point(&self, script: &str, is_click: bool) {
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
    pub(crate) fn text(&self, name: &str) -> String {
        let script = "const part = document.querySelector(`[data-testid=${arguments[0]}]`); return part.value ?? part.textContent;";
        self.script(script, json!([name])).as_str().unwrap().to_owned()
    }

    /// Waits until a script returns true.
    #[track_caller]
    pub(crate) fn wait_for(&self, script: &str) {
        let until = Instant::now() + PATIENCE;
        while self.script(script, json!([])) != Value::Bool(true) {
            assert!(Instant::now() < until, "{script}; the status is {:?}", self.text("status"));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the status begins so, and returns it.
    #[track_caller]
    pub(crate) fn wait_for_status(&self, beginning: &str) -> String {
        let status = "document.querySelector('[data-testid=status]').textContent";
        self.wait_for(&format!("return {status}.startsWith({});", json!(beginning)));
        self.text("status")
    }

    /// Complaints of the page, and hosts that it asked besides this one.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.post("/se/log", &json!({ "type": "browser" }));
        let is_complaint = |line: &&Value| line["level"] == "SEVERE" || line["level"] == "WARNING";
        let logged = log.as_array().unwrap().iter().filter(is_complaint);
        let foreign = "return performance.getEntriesByType('resource').map(one => one.name).filter(name => !name.startsWith(location.origin));";
        let foreign = self.script(foreign, json!([])).as_array().unwrap().clone();
        logged.map(|line| line["message"].to_string()).chain(foreign.iter().map(Value::to_string)).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium ends with its session, not with chromedriver; and a panic here would end the test program.
        if !self.session.is_empty() {
            let ended = std::panic::AssertUnwindSafe(|| self.send("DELETE", &self.session, b"").try_reply());
            _ = std::panic::catch_unwind(ended);
        }
        _ = self.driver.kill();
        _ = self.driver.wait();
    }
}
