//! Test for `story-probes page`: the shipped model's history produces the page in the book.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Maximum size of a history in bytes, since the web page contains it along with the model.
const MAX_BYTES: usize = 300_000;

fn page(history: &Path) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_story-probes")).arg("page").arg(history).output().unwrap()
}

#[test]
fn book_page_matches_the_shipped_history() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../..");
    let history = root.join("models/stories/history.json");
    assert!(fs::read(&history).unwrap().len() <= MAX_BYTES);
    let output = page(&history);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown = root.join("docs/src/pictures/learned.html");
    if std::env::var_os("WRITE_PICTURES").is_some() {
        fs::write(&shown, &output.stdout).unwrap();
    }
    let command = "WRITE_PICTURES=1 cargo test --manifest-path models/stories/workshop/Cargo.toml -p story-probes --test page";
    assert!(
        fs::read(&shown).unwrap_or_default() == output.stdout,
        "docs/src/pictures/learned.html is outdated; run {command}"
    );
}

#[test]
fn file_without_a_history_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    for content in [r#"{"loss": 1}"#, "[]", "text"] {
        fs::write(&file, content).unwrap();
        let output = page(&file);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{content}");
        assert!(error.contains("other.json") && error.contains("story-probes history"), "{content}: {error}");
    }
}
