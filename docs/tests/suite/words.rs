//! Checks that user-facing text is in plain words, without phrases that read as translated.

use std::fs;
use std::path::PathBuf;

use crate::crates::root;

/// Lowercase phrases, each with its replacement.
const PHRASES: [(&str, &str); 49] = [
    ("whoever", "users, callers, for programs that …"),
    ("nobody", "no caller, no client; or say it of the thing"),
    ("somebody", "another user, a third party"),
    ("goes on", "continues, is resumed"),
    (" go on", "continue, resume"),
    ("gone on with", "resumed"),
    ("by heart", "memorized"),
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

/// Folders to skip: build output, tests and their data, and the tools that made the built-in model.
const SKIPPED: [&str; 6] = ["target", "dist", "node_modules", "tests", "fixtures", "workshop"];
/// Kinds of files to check.
const KINDS: [&str; 8] = ["md", "rs", "cu", "py", "pyi", "js", "mjs", "ts"];

/// Returns the files that users read: the book, the READMEs, the web page and all sources.
///
/// Sources contain documentation comments, docstrings, help texts and messages. Other comments in them are
/// checked too, because separating them would take a parser.
fn pages() -> Vec<PathBuf> {
    let root = root();
    let names =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "python/README.md", "web/index.html"];
    let folders = ["docs/src", "crates", "models", "python/candle_gpt2", "examples", "web"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| root.join(name)).collect();
    let folders = folders.iter().map(|name| root.join(name)).collect();
    found.extend(files(folders, &SKIPPED, &KINDS));
    found
}

/// Returns the files of the given kinds in folders and their subfolders, except the skipped ones.
fn files(mut folders: Vec<PathBuf>, skipped: &[&str], kinds: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_wanted = || name.rsplit_once('.').is_some_and(|(_, kind)| kinds.contains(&kind));
            match path.is_dir() {
                true if !skipped.contains(&&*name) => folders.push(path),
                false if is_wanted() => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// Returns the lines in lower case, without the markers of comments, quotes and continued strings.
fn lines(text: &str) -> Vec<String> {
    let is_mark = |mark: char| mark.is_whitespace() || "/!#*>\\".contains(mark);
    text.lines().map(|line| line.trim_matches(is_mark).to_lowercase()).collect()
}

#[test]
fn user_facing_texts_avoid_translated_phrases() {
    let mut found = Vec::new();
    let pages = pages();
    assert!(pages.len() > 600, "{} files", pages.len());
    for path in pages {
        let lines = lines(&fs::read_to_string(&path).unwrap());
        // A phrase may span two lines.
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

/// Words that must not begin a comment, because they do not name the item.
const BAD_FIRST_WORDS: [&str; 7] = ["What", "How", "Who", "Where", "Those", "As", "Of"];
/// Maximum length of the first line of a doc comment in characters.
const MAX_FIRST_LINE: usize = 100;
/// Maximum length of a sentence in words.
const MAX_WORDS: usize = 35;

/// Consecutive comment lines of the same kind.
struct Comment<'a> {
    /// Number of the first line, counted from 1.
    line: usize,
    /// `///` or `//!`, or `//` for other comments.
    marker: &'a str,
    /// Lines without the marker and the space after it.
    text: Vec<&'a str>,
    /// Source lines after the comment.
    code: &'a [&'a str],
}

/// Returns the comments that are on lines of their own.
fn comments<'a>(lines: &'a [&'a str]) -> Vec<Comment<'a>> {
    let mut comments: Vec<Comment> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let line = line.trim_start();
        let Some(marker) = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker)) else {
            continue;
        };
        let text = line[marker.len()..].strip_prefix(' ').unwrap_or(&line[marker.len()..]);
        let code = &lines[index + 1..];
        match comments
            .last_mut()
            .filter(|last| last.marker == marker && last.line + last.text.len() == index + 1)
        {
            Some(last) => {
                last.text.push(text);
                last.code = code;
            }
            None => comments.push(Comment { line: index + 1, marker, text: vec![text], code }),
        }
    }
    comments
}

impl Comment<'_> {
    fn is_doc(&self) -> bool {
        self.marker != "//"
    }

    /// Whether the documented item is a bool or returns one, as far as its first lines show.
    fn is_about_bool(&self) -> bool {
        let item = self.code.iter().take(12).take_while(|line| !line.trim_start().starts_with("///"));
        item.flat_map(|line| line.split(|letter: char| !letter.is_alphanumeric())).any(|word| word == "bool")
    }

    /// Returns the sentences outside code fences, tables and lists.
    fn sentences(&self) -> Vec<String> {
        let mut is_fenced = false;
        let mut paragraphs = vec![String::new()];
        for line in &self.text {
            is_fenced ^= line.trim_start().starts_with("```");
            let is_apart = line.trim().is_empty() || line.trim_start().starts_with(['|', '-', '*', '#', '`']);
            if is_apart {
                paragraphs.push(String::new());
            }
            if !is_fenced && !line.starts_with('|') {
                *paragraphs.last_mut().unwrap() += &format!("{line} ");
            }
        }
        let ends = |text: &str| -> Vec<String> {
            text.split_inclusive(['.', '!', '?', ':', ';']).fold(
                vec![String::new()],
                |mut sentences, part| {
                    // A punctuation mark ends a sentence only if a space follows.
                    if part.starts_with(' ') {
                        sentences.push(String::new());
                    }
                    *sentences.last_mut().unwrap() += part;
                    sentences
                },
            )
        };
        paragraphs.iter().flat_map(|paragraph| ends(paragraph)).collect()
    }

    /// Returns the first rule that the comment breaks.
    fn fault(&self) -> Option<String> {
        let first = self.text[0];
        let word = first.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        if BAD_FIRST_WORDS.contains(&word) {
            return Some(format!("begins with `{word}`; name the item or the action"));
        }
        if self.is_doc() && word == "Whether" && !self.is_about_bool() {
            return Some("begins with `Whether`, but the item is not a bool".into());
        }
        if self.is_doc() && first.chars().count() > MAX_FIRST_LINE {
            return Some(format!("the first line has more than {MAX_FIRST_LINE} characters"));
        }
        let long = self.sentences().into_iter().find(|text| text.split_whitespace().count() > MAX_WORDS)?;
        Some(format!("a sentence has more than {MAX_WORDS} words: {}", long.trim()))
    }
}

#[test]
fn comments_follow_the_style_rules() {
    let folders = ["crates", "docs", "models", "web/src"].map(|folder| root().join(folder)).to_vec();
    let (mut found, mut count) = (Vec::new(), 0);
    for path in files(folders, &["target"], &["rs"]) {
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        let comments = comments(&lines);
        count += comments.len();
        for (comment, fault) in comments.iter().filter_map(|comment| Some((comment, comment.fault()?))) {
            found.push(format!("{}:{}: {fault}", path.display(), comment.line));
        }
    }
    assert!(count > 10_000, "{count} comments");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn style_rules_detect_bad_comments() {
    let fault = |text: &str| {
        let lines: Vec<_> = text.lines().collect();
        let found = comments(&lines);
        assert_eq!(found.len(), 1, "{text}");
        found[0].fault()
    };
    assert_eq!(fault("/// Number of rows.\nlet rows: usize;"), None);
    assert!(fault("    // What a row is.").is_some());
    assert!(fault("/// Whether it is set.\nfn is_set() -> usize").is_some());
    assert_eq!(fault("/// Whether it is set.\nfn is_set(&self) -> bool"), None);
    assert!(fault(&format!("/// {}", "word ".repeat(21))).is_some());
    let words = "word ".repeat(18);
    assert_eq!(fault(&format!("// {words}\n// end. {words}")), None);
    assert!(fault(&format!("// {words}\n// {words}")).is_some());
    assert_eq!(fault(&format!("/// Code:\n/// ```\n/// {}\n/// ```", "x ".repeat(40))), None);
}
