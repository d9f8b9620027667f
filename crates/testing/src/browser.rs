//! Runs web pages in headless Chromium.

use std::process::Command;

use crate::skipped;

const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// Returns the DOM of a page after its script has run, or `None` without a browser.
///
/// `fragment` is the fragment of the page's URL, and `after` is a script that runs last. Without a browser,
/// the test is reported as skipped.
///
/// # Panics
/// If the page logs to the console or requests a resource, or its script does not end.
pub fn page_in_browser(html: &str, fragment: &str, after: &str) -> Option<String> {
    let has = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let Some(browser) = BROWSERS.into_iter().find(has) else {
        skipped("page in a browser: Chromium not found");
        return None;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("page.html");
    let count = "document.body.dataset.asked = performance.getEntriesByType('resource').length;";
    let html = html.replace("</body>", &format!("<script>{after};{count}</script></body>"));
    std::fs::write(&file, html).expect("a file");
    let flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ];
    let output = Command::new(browser)
        .args(flags)
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .args(["--dump-dom", &format!("file://{}#{fragment}", file.display())])
        .output()
        .expect("a browser");
    let log = String::from_utf8_lossy(&output.stderr);
    let console_lines: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert_eq!(console_lines, Vec::<&str>::new());
    let dom = String::from_utf8(output.stdout).expect("a page in UTF-8");
    assert!(dom.contains("data-asked=\"0\""), "the page requested a resource, or its script did not finish");
    Some(dom)
}
