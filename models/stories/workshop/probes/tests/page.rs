//! `story-probes page`: what it draws of the history of the model that is shipped is the picture in the book.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Most bytes of a history: it stands in the page of the browser, beside the model.
const MOST_BYTES: usize = 300_000;

fn page(history: &Path) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_story-probes")).arg("page").arg(history).output().unwrap()
}

#[test]
fn the_book_shows_the_history_of_the_model_that_is_shipped() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../..");
    let history = root.join("models/stories/history.json");
    assert!(fs::read(&history).unwrap().len() <= MOST_BYTES);
    let made = page(&history);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let shown = root.join("docs/src/pictures/learned.html");
    if std::env::var_os("WRITE_PICTURES").is_some() {
        fs::write(&shown, &made.stdout).unwrap();
    }
    let how = "WRITE_PICTURES=1 cargo test --manifest-path models/stories/workshop/Cargo.toml -p story-probes --test page";
    assert!(
        fs::read(&shown).unwrap_or_default() == made.stdout,
        "docs/src/pictures/learned.html is older; {how}"
    );
}

#[test]
fn a_file_that_is_no_history_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    for content in [r#"{"loss": 1}"#, "[]", "text"] {
        fs::write(&file, content).unwrap();
        let refused = page(&file);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && refused.stdout.is_empty(), "{content}");
        assert!(error.contains("other.json") && error.contains("story-probes history"), "{content}: {error}");
    }
}
