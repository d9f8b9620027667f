//! What users read is in plain words: phrases that read as translated do not come back.

use std::fs;
use std::path::PathBuf;

use crate::crates::root;

/// A phrase in lower case, and what to write in its place.
const PHRASES: [(&str, &str); 49] = [
    ("whoever", "users, callers, for programs that …"),
    ("nobody", "no caller, no client; or say it of the thing"),
    ("somebody", "another user, a third party"),
    ("goes on", "continues, is resumed"),
    (" go on", "continue, resume"),
    ("gone on with", "resumed"),
    ("by heart", "memorised"),
    ("held to", "restricted to"),
    ("held against", "checked against"),
    ("the most that can be", "the upper bound"),
    ("as many as", "up to, one for each"),
    ("who said so", "which component contributed it"),
    ("where is what", "code map"),
    ("the call is wrong", "usage error"),
    ("no model's", "not a model's, invalid"),
    ("no checkpoint of", "not a … checkpoint"),
    ("are no checkpoint", "are not a checkpoint"),
    ("is no place in", "unknown hook point"),
    ("stands in", "is in"),
    ("stand in", "are in"),
    ("stands beside", "is next to"),
    ("stand beside", "are next to"),
    ("stands before", "precedes, is before"),
    ("stands behind", "follows, is after"),
    ("stands on", "is on"),
    ("stands at", "is at"),
    ("what stands", "what is, the text before"),
    ("it tells", "it reports, it shows"),
    ("that is told", "that is reported"),
    ("is told of", "receives, sees"),
    ("are told of", "receive, see"),
    ("is told how", "receives the number of"),
    ("worth knowing", "notes"),
    ("where nothing is said", "by default"),
    ("where nothing else is said", "by default"),
    (" hears", "receives, is called with"),
    ("wants no more", "interrupts, is interrupted"),
    ("for whom", "for callers that"),
    ("a face ", "a front end"),
    ("every face", "every front end"),
    (" faces", "front ends"),
    ("change of the logits of", "logits processor"),
    ("nothing in front", "no BOS token"),
    ("states of an encoder", "encoder hidden states"),
    ("an encoder's states", "encoder hidden states"),
    ("stored numbers", "the checkpoint's dtype"),
    (" texts side by side", "packed sequences, a batch"),
    ("of the hub ", "on the Hub"),
    ("memory of keys and values", "KV cache"),
];

/// Folders that are not read: results of builds, tests and their data, and what makes the built-in model.
const LEFT_OUT: [&str; 6] = ["target", "dist", "node_modules", "tests", "fixtures", "workshop"];
/// Kinds of files that are read.
const KINDS: [&str; 8] = ["md", "rs", "cu", "py", "pyi", "js", "mjs", "ts"];

/// What users read: the book, the READMEs, the page in the browser, and all sources with documentation comments, docstrings, help
/// and messages. Other comments of these files are read too, since telling them apart would take a parser.
fn pages() -> Vec<PathBuf> {
    let root = root();
    let names =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "python/README.md", "web/index.html"];
    let folders = ["docs/src", "crates", "models", "python/candle_gpt2", "examples", "web"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| root.join(name)).collect();
    let mut folders: Vec<PathBuf> = folders.iter().map(|name| root.join(name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_read = || name.rsplit_once('.').is_some_and(|(_, kind)| KINDS.contains(&kind));
            match path.is_dir() {
                true if !LEFT_OUT.contains(&&*name) => folders.push(path),
                false if is_read() => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// The lines in lower case, without the marks that comments and quotes begin with and broken strings end with.
fn lines(text: &str) -> Vec<String> {
    let is_mark = |mark: char| mark.is_whitespace() || "/!#*>\\".contains(mark);
    text.lines().map(|line| line.trim_matches(is_mark).to_lowercase()).collect()
}

#[test]
fn what_users_read_is_in_plain_words() {
    let mut found = Vec::new();
    let pages = pages();
    assert!(pages.len() > 600, "{} files", pages.len());
    for path in pages {
        let lines = lines(&fs::read_to_string(&path).unwrap());
        // A phrase may be broken between two lines.
        let text = lines.join(" ");
        for (phrase, better) in PHRASES {
            for (at, _) in text.match_indices(phrase) {
                let mut end = 0;
                let before = lines.iter().take_while(|line| {
                    end += line.len() + 1;
                    end <= at
                });
                let number = before.count() + 1;
                found.push(format!("{}:{number}: `{phrase}`: write {better}", path.display()));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
