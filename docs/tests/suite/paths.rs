//! Files of the repository that the book names in its sentences are there: words in backquotes that begin with the name of one
//! of its folders. Links are followed by another test.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose files are named.
const FOLDERS: [&str; 7] = ["crates/", "scripts/", "models/", "docs/", "python/", "examples/", "web/"];
/// What is made by a command, and what stands for a name.
const NOT_FILES: [&str; 2] = ["web/dist", "NAME"];

#[test]
fn files_that_the_book_names_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut missing = Vec::new();
    let mut count = 0;
    for page in pages(&root.join("docs/src")).into_iter().chain([root.join("README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        let mut is_block = false;
        for (number, line) in text.lines().enumerate() {
            is_block ^= line.trim_start().starts_with("```");
            // What stands between the first and the second backquote, between the third and the fourth, and so on.
            let quoted = line.split('`').skip(1).step_by(2).filter(|_| !is_block);
            for name in quoted.flat_map(str::split_whitespace) {
                let is_file = FOLDERS.iter().any(|folder| name.starts_with(folder));
                if !is_file || NOT_FILES.iter().any(|other| name.contains(other)) {
                    continue;
                }
                count += 1;
                if !is_there(&root, name.trim_end_matches([',', ';', ':'])) {
                    missing.push(format!("{}:{}: {name}", page.display(), number + 1));
                }
            }
        }
    }
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
    assert!(count > 50, "found {count} names alone");
}

/// What a chapter says is in a source file is there: the code after a link to it, up to the next link or the end of the paragraph or item.
/// A line of code is in the file as it is written, of a name each of its parts.
#[test]
fn code_that_the_course_names_is_in_the_file() {
    let learn = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/learn");
    let mut missing = Vec::new();
    let mut count = 0;
    for page in pages(&learn) {
        let text = fs::read_to_string(&page).unwrap();
        let prose: String = text.split("```").step_by(2).collect();
        // A zero is where a paragraph or an item ends.
        let marked = prose.replace("\n\n", "\0").replace("\n- ", "\0");
        let text = marked.split_whitespace().collect::<Vec<_>>().join(" ");
        for after in text.split("](").skip(1) {
            let Some((link, after)) = after.split_once(')') else { continue };
            let is_source = Path::new(link).extension().is_some_and(|ending| ending == "rs");
            let Some(source) = fs::read_to_string(learn.join(link)).ok().filter(|_| is_source) else {
                continue;
            };
            let after = after.split(['\0', '[']).next().unwrap_or_default();
            for code in after.split('`').skip(1).step_by(2) {
                // Commands, and files that the source reads.
                if ["gpt2 ", "cargo "].iter().any(|command| code.starts_with(command))
                    || [".json", ".bpe"].iter().any(|ending| code.ends_with(ending))
                {
                    continue;
                }
                count += 1;
                let is_there = match code.contains(' ') {
                    true => source.contains(code),
                    false => parts(code).all(|part| parts(&source).any(|other| other == part)),
                };
                if !is_there {
                    missing.push(format!("{}: {link} has no `{code}`", page.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(count > 30, "found {count} names alone");
}

/// The names in a piece of code, each as often as it occurs.
fn parts(code: &str) -> impl Iterator<Item = &str> {
    let found = code.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    found.filter(|part| part.starts_with(|letter: char| letter.is_alphabetic()))
}

/// Nothing is on a registry: what installs or adds a package names a clone or the repository.
#[test]
fn packages_are_installed_from_where_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folders = ["docs/src", "crates", "python", "models", "web"].map(|folder| root.join(folder));
    let found = folders.iter().flat_map(|folder| pages(folder)).filter(|page| {
        page.components().all(|part| part.as_os_str() != "node_modules" && part.as_os_str() != "target")
    });
    let mut wrong = Vec::new();
    for page in found.chain([root.join("README.md"), root.join("CONTRIBUTING.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        for (number, line) in text.lines().enumerate() {
            let installs = ["cargo install ", "cargo add ", "pip install ", "npm install "];
            let is_from_elsewhere = ["--path", "--git", "pip install .", "pip install '."]
                .iter()
                .any(|known| line.contains(known));
            let is_dependency = line.trim_start().starts_with("candle-gpt2") && line.contains("= \"");
            let is_wrong = (installs.iter().any(|install| line.contains(install))
                && line.contains("candle-gpt2")
                && !is_from_elsewhere)
                || (is_dependency && !line.contains("path = ") && !line.contains("git = "));
            if is_wrong {
                wrong.push(format!("{}:{}: {line}", page.display(), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "from no registry:\n{}", wrong.join("\n"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let (clone, run) = (readme.find("git clone https://"), readme.find("cargo run --release"));
    assert!(clone.is_some() && clone < run, "a clone comes before the first run");
}

/// All pages in a folder and below it.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = paths.flat_map(|path| if path.is_dir() { pages(&path) } else { vec![path] });
    found.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect()
}

/// Whether there is the file or the folder, or one that fits a name with a star or with a choice in braces.
fn is_there(root: &Path, name: &str) -> bool {
    if let Some((before, (choices, after))) =
        name.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    {
        return choices.split(',').all(|choice| is_there(root, &format!("{before}{choice}{after}")));
    }
    let Some((before, after)) = name.split_once('*') else { return root.join(name).exists() };
    let (folder, start) = before.rsplit_once('/').unwrap_or(("", before));
    let names = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| name.starts_with(start) && name.ends_with(after))
}
