//! What users read is in plain words: phrases that read as translated do not come back.

use std::fs;
use std::path::PathBuf;

use crate::crates::root;

/// A phrase in lower case, and what to write in its place.
const PHRASES: [(&str, &str); 23] = [
    ("whoever", "users, callers, for programs that …"),
    ("nobody", "no caller, no client; or say it of the thing"),
    ("somebody", "another user, a third party"),
    ("goes on", "continues, is resumed"),
    ("go on with", "resume, continue"),
    ("by heart", "memorised"),
    ("held to", "restricted to"),
    ("held against", "checked against"),
    ("the most that can be", "the upper bound"),
    ("as many as", "up to"),
    ("who said so", "which component contributed it"),
    ("where is what", "code map"),
    ("the call is wrong", "usage error"),
    ("no model's", "not a model's, invalid"),
    ("no checkpoint of", "not a … checkpoint"),
    ("is no place in", "unknown hook point"),
    ("stands in", "is in"),
    ("stand in", "are in"),
    ("stands beside", "is next to"),
    ("it tells", "it reports, it shows"),
    ("that is told", "that is reported"),
    ("a face ", "a front end"),
    ("every face", "every front end"),
];

/// The pages of the book, the READMEs and the page in the browser. Options and their help are in the book's tables.
fn pages() -> Vec<PathBuf> {
    let root = root();
    let mut found: Vec<PathBuf> = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "python/README.md",
        "web/index.html",
        "web/package/README.md",
    ]
    .iter()
    .map(|name| root.join(name))
    .collect();
    let mut folders: Vec<PathBuf> =
        ["docs/src", "crates", "models"].iter().map(|name| root.join(name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            match path.is_dir() {
                true if !["target", "src", "tests", "fixtures"].contains(&name.as_str())
                    || path.ends_with("docs/src") =>
                {
                    folders.push(path);
                }
                false if name.ends_with(".md") => found.push(path),
                _ => {}
            }
        }
    }
    found
}

#[test]
fn what_users_read_is_in_plain_words() {
    let mut found = Vec::new();
    let pages = pages();
    assert!(pages.len() > 60, "{} pages", pages.len());
    for path in pages {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let line = line.to_lowercase();
            for (phrase, better) in PHRASES {
                if line.contains(phrase) {
                    found.push(format!("{}:{}: `{phrase}`: write {better}", path.display(), number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
