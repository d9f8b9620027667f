//! The page on a static host: a visit, and one without the host.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use candle_gpt2_testing::Browser;
use serde_json::json;

use crate::common::{BROWSERS, assert_quiet, built_in, greedy, web, write_greedily, written};

/// A server of the files of a folder, which can go away.
struct Host {
    address: SocketAddr,
    is_gone: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
}

impl Host {
    fn start(folder: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (is_gone, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let host = Self { address, is_gone: Arc::clone(&is_gone), answers: Arc::clone(&answers) };
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if is_gone.load(Ordering::SeqCst) {
                    return;
                }
                answers.fetch_add(1, Ordering::SeqCst);
                let folder = folder.clone();
                thread::spawn(move || answer(&stream, &folder));
            }
        });
        host
    }

    /// No connection is taken any more.
    fn go_away(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
        _ = TcpStream::connect(self.address);
        while TcpStream::connect(self.address).is_ok() {}
    }
}

/// One request, as the plainest of hosts answers it.
fn answer(mut stream: &TcpStream, folder: &Path) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let request = lines.next()?;
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let path = request.split(' ').nth(1)?.split('?').next()?;
    let file = folder.join(if path == "/" { "index.html" } else { path.trim_start_matches('/') });
    let kind = match file.extension()?.to_str()? {
        "html" => "text/html",
        "js" => "text/javascript",
        "css" => "text/css",
        "wasm" => "application/wasm",
        "json" => "application/json",
        _ => "application/octet-stream",
    };
    let (status, body) = std::fs::read(&file).map_or(("404 Not Found", Vec::new()), |body| ("200 OK", body));
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body).ok()
}

#[test]
fn after_the_first_visit_it_needs_no_host() {
    let Some(folder) = web() else { return };
    let model = built_in(None);
    for kind in BROWSERS {
        let host = Host::start(folder.clone());
        let url = format!("http://{}/", host.address);
        let Some(browser) = Browser::open_in(kind, &url, 1200) else { continue };
        browser.wait_for_status("ready");
        assert_eq!(write_greedily(&browser, "O Romeo", 20), written(&model, "O Romeo", greedy(20)));
        browser.script("navigator.serviceWorker.ready.then(() => window.isKept = true);", json!([]));
        browser.wait_for("return window.isKept === true;");
        assert_quiet(&browser);
        host.go_away();
        let asked = host.answers.load(Ordering::SeqCst);
        browser.go("about:blank");
        browser.go(&url);
        browser.wait_for_status("ready");
        assert_eq!(write_greedily(&browser, "O Juliet", 20), written(&model, "O Juliet", greedy(20)));
        assert_eq!(host.answers.load(Ordering::SeqCst), asked);
    }
}

/// A page of the host's newer version comes with the second visit after it, all of its files at once, and the older ones go.
#[test]
fn a_newer_version_takes_the_place_of_the_older() {
    let Some(web) = web() else { return };
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(web).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let host = Host::start(folder.path().to_owned());
    let url = format!("http://{}/", host.address);
    let Some(browser) = Browser::open_in(BROWSERS[0], &url, 1200) else { return };
    let kept =
        "navigator.serviceWorker.ready.then(() => caches.keys()).then(keys => window.keptAs = keys.join());";
    let versions = |browser: &Browser| {
        browser.script(kept, json!([]));
        browser.wait_for("return window.keptAs !== undefined;");
        browser.script("return window.keptAs;", json!([])).as_str().unwrap().to_owned()
    };
    browser.wait_for_status("ready");
    let before = versions(&browser);
    assert!(before.starts_with("gpt2-") && !before.contains(','), "{before}");
    change(folder.path(), "index.html", "</title>", " (newer)</title>");
    change(folder.path(), "service-worker.js", &before, "gpt2-newer");
    // The first visit shows what is kept, and fetches what is new.
    browser.go(&url);
    browser.wait_for_status("ready");
    browser.wait_for("caches.keys().then(keys => window.hasNewer = keys.includes('gpt2-newer')); return window.hasNewer === true;");
    // It takes over once no page of the older is left, which a browser decides in its own time.
    let is_newer = |browser: &Browser| {
        browser.go("about:blank");
        thread::sleep(Duration::from_millis(500));
        browser.go(&url);
        browser.wait_for_status("ready");
        browser.script("return document.title;", json!([])).as_str().unwrap().ends_with("(newer)")
    };
    assert!((0..10).any(|_| is_newer(&browser)));
    assert_eq!(versions(&browser), "gpt2-newer");
}

fn change(folder: &Path, file: &str, from: &str, to: &str) {
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file}");
    std::fs::write(path, text.replacen(from, to, 1)).unwrap();
}
