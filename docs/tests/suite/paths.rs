//! Checks that files and tests named in the book and in scripts exist.
//!
//! A file name is a word in backquotes that begins with one of the repository's folders. Another test checks
//! links.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose file names are checked.
const FOLDERS: [&str; 7] = ["crates/", "scripts/", "models/", "docs/", "python/", "examples/", "web/"];
/// Names to skip: build output and placeholders.
const NOT_FILES: [&str; 2] = ["web/dist", "NAME"];

#[test]
fn files_named_in_the_book_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut missing = Vec::new();
    let mut count = 0;
    let folders = ["docs/src", "docs/dev"].map(|folder| root.join(folder));
    for page in folders.iter().flat_map(|folder| pages(folder)).chain([root.join("README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        let mut is_block = false;
        for (number, line) in text.lines().enumerate() {
            is_block ^= line.trim_start().starts_with("```");
            // Every second piece is text inside backquotes.
            let quoted = line.split('`').skip(1).step_by(2).filter(|_| !is_block);
            for name in quoted.flat_map(str::split_whitespace) {
                let is_file = FOLDERS.iter().any(|folder| name.starts_with(folder));
                if !is_file || NOT_FILES.iter().any(|other| name.contains(other)) {
                    continue;
                }
                count += 1;
                if !exists(&root, name.trim_end_matches([',', ';', ':'])) {
                    missing.push(format!("{}:{}: {name}", page.display(), number + 1));
                }
            }
        }
    }
    assert!(missing.is_empty(), "missing files:\n{}", missing.join("\n"));
    assert!(count > 50, "found only {count} names");
}

/// Checks that code quoted in the course occurs in the linked source file.
///
/// The code belongs to the link before it, up to the next link or the end of the paragraph or item. A line of
/// code must occur verbatim. For a name, each of its parts must occur.
#[test]
fn code_quoted_in_the_course_exists() {
    let learn = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/learn");
    let mut missing = Vec::new();
    let mut count = 0;
    for page in pages(&learn) {
        let text = fs::read_to_string(&page).unwrap();
        let prose: String = text.split("```").step_by(2).collect();
        // A zero byte marks the end of a paragraph or an item.
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
                // Skip commands, and files that the source reads.
                if ["gpt2 ", "cargo "].iter().any(|command| code.starts_with(command))
                    || [".json", ".bpe"].iter().any(|ending| code.ends_with(ending))
                {
                    continue;
                }
                count += 1;
                let is_found = match code.contains(' ') {
                    true => source.contains(code),
                    false => parts(code).all(|part| parts(&source).any(|other| other == part)),
                };
                if !is_found {
                    missing.push(format!("{}: {link} has no `{code}`", page.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(count > 30, "found only {count} names");
}

/// Returns the names in a piece of code, with repetitions.
fn parts(code: &str) -> impl Iterator<Item = &str> {
    let found = code.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    found.filter(|part| part.starts_with(|letter: char| letter.is_alphabetic()))
}

/// Checks that every command that installs or adds a package does so from a clone or the repository.
///
/// The packages are not on any registry.
#[test]
fn install_commands_name_a_clone_or_the_repository() {
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
    assert!(wrong.is_empty(), "the packages are not on any registry:\n{}", wrong.join("\n"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let (clone, run) = (readme.find("git clone https://"), readme.find("cargo run --release"));
    assert!(clone.is_some() && clone < run, "a clone comes before the first run");
}

/// Checks that test filters in scripts and documents match at least one test.
///
/// Otherwise, a renamed test would silently no longer run, or no longer be skipped.
#[test]
fn test_filters_match_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tests = test_names(&root.join("crates"));
    let documents = ["docs/src", "docs/dev"].map(|folder| pages(&root.join(folder))).concat();
    let scripts = files(&root.join("scripts"), "sh");
    let (mut stale, mut count) = (Vec::new(), 0);
    for file in scripts.into_iter().chain(documents).chain([root.join("CONTRIBUTING.md")]) {
        let text = fs::read_to_string(&file).unwrap().replace("\\\n", " ");
        for filter in text.lines().flat_map(filters) {
            count += 1;
            if !tests.iter().any(|test| test.contains(filter)) {
                stale.push(format!("{}: {filter}", file.display()));
            }
        }
    }
    assert!(stale.is_empty(), "filters without a test:\n{}", stale.join("\n"));
    assert!(count > 20, "found only {count} filters");
}

/// Returns the test filters in a line: arguments of `--skip`, and of `cargo test` after `--`.
fn filters(line: &str) -> Vec<&str> {
    let words = |text| str::split(text, [' ', '(', ')']);
    let is_test = ["cargo test", "miri test", "in_wasm[@]"].iter().any(|command| line.contains(command));
    let arguments = line.split_once(" -- ").filter(|_| is_test).map_or("", |(_, arguments)| arguments);
    let arguments = words(arguments.split('`').next().unwrap_or_default());
    let skipped = words(line).zip(words(line).skip(1)).filter(|(option, _)| *option == "--skip");
    let is_name = |word: &&str| {
        word.starts_with(|letter: char| letter.is_ascii_lowercase())
            && word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_:".contains(letter))
    };
    skipped.map(|(_, name)| name).chain(arguments).filter(is_name).collect()
}

/// Returns the paths of all tests below a folder, such as `packed::tests::row_bits`.
fn test_names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for file in files(folder, "rs") {
        let path = file.with_extension("");
        let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let Some((name, folders)) = parts.split_last() else { continue };
        let start = folders.iter().rposition(|part| ["src", "tests", "suite"].contains(&part.as_str()));
        let Some(start) = start else { continue };
        let is_module = |part: &&str| !["mod", "lib", "main"].contains(part);
        let inline = (folders[start] == "src" && name != "tests").then_some("tests");
        let modules = parts[start + 1..].iter().map(String::as_str).filter(is_module);
        let modules: Vec<&str> = modules.chain(inline).collect();
        let text = fs::read_to_string(&file).unwrap();
        let tests =
            text.split("test]\n").skip(1).filter_map(|test| test.split_once("fn ")?.1.split_once('('));
        names.extend(tests.map(|(name, _)| [&modules[..], &[name]].concat().join("::")));
    }
    names
}

/// Returns all pages in a folder and its subfolders.
fn pages(folder: &Path) -> Vec<PathBuf> {
    files(folder, "md")
}

/// Returns all files with this extension in a folder and its subfolders.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = paths.flat_map(|path| if path.is_dir() { files(&path, extension) } else { vec![path] });
    found.filter(|path| path.extension().is_some_and(|ending| ending == extension)).collect()
}

/// Whether the file or folder exists; the name may contain a star or choices in braces.
fn exists(root: &Path, name: &str) -> bool {
    if let Some((before, (choices, after))) =
        name.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    {
        return choices.split(',').all(|choice| exists(root, &format!("{before}{choice}{after}")));
    }
    let Some((before, after)) = name.split_once('*') else { return root.join(name).exists() };
    let (folder, start) = before.rsplit_once('/').unwrap_or(("", before));
    let names = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| name.starts_with(start) && name.ends_with(after))
}
