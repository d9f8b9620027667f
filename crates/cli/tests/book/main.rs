//! Runs the code blocks of the book and the README and compares their output with the pages.
//!
//! `cargo test -p candle-gpt2-cli --test book -- guides/serve` runs one chapter. `BOOK=overwrite` in the
//! environment writes the actual output into the page where it differs. `GPT2_PROGRAM` names a program to run
//! in place of the one that was just built. [`page`] describes the kinds of blocks.
//!
//! A picture that commands write must match the file of the same name in `docs/src/pictures`. Further tests
//! check the links between all Markdown files.

#![cfg_attr(not(unix), expect(dead_code, reason = "doctests parse the blocks without running them"))]

mod links;
#[cfg(unix)]
mod outputs;
mod page;
#[cfg(unix)]
mod pictures;
#[cfg(unix)]
mod self_test;
#[cfg(unix)]
mod session;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let root = repository();
    let mut trials = vec![{
        let root = root.clone();
        Trial::test("links", move || links::check(&root).map_err(Into::into))
    }];
    #[cfg(unix)]
    trials.push(Trial::test("mistakes_are_found", || self_test::check().map_err(Into::into)));
    for (name, path) in pages(&root) {
        let root = root.clone();
        trials.push(Trial::test(name, move || run(&root, &path).map_err(Into::into)));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Returns the repository's folder: the nearest ancestor of the current folder that has a book.
fn repository() -> PathBuf {
    let current = env::current_dir().expect("a current folder");
    let has_book = |folder: &&Path| folder.join("docs/src").is_dir() && folder.join("Cargo.lock").is_file();
    current.ancestors().find(has_book).expect("a folder with docs/src above the current one").to_owned()
}

/// Returns the README, every chapter of the book and every page in `docs/dev`, with their names.
fn pages(root: &Path) -> Vec<(String, PathBuf)> {
    let docs = root.join("docs");
    let mut pages = vec![("README".to_owned(), root.join("README.md"))];
    for path in [docs.join("src"), docs.join("dev")].iter().flat_map(|folder| markdown_files(folder)) {
        let name = path.strip_prefix(&docs).expect("a path in docs").with_extension("");
        let name = name.to_string_lossy().replace('\\', "/");
        let name = name.strip_prefix("src/").unwrap_or(&name).to_owned();
        if name != "SUMMARY" {
            pages.push((name, path));
        }
    }
    pages
}

/// Returns all Markdown files in a folder and below, except generated and downloaded files.
fn markdown_files(folder: &Path) -> Vec<PathBuf> {
    const SKIPPED: [&str; 4] = ["target", "node_modules", "dist", "book"];
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && !name.starts_with('.') && !SKIPPED.contains(&name.as_str()) {
            files.extend(markdown_files(&path));
        } else if name.ends_with(".md") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Runs the blocks of one page.
#[cfg_attr(not(unix), expect(clippy::print_stderr, reason = "reports what is not tested"))]
fn run(root: &Path, path: &Path) -> Result<(), String> {
    let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
    let text = fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    let steps = page::steps(&text).map_err(|errors| in_page(&name, &errors))?;
    if steps.is_empty() {
        return Ok(());
    }
    #[cfg(unix)]
    {
        let (runs, written) = session::run(&program(), &steps)?;
        for picture in written {
            pictures::check(root, &picture.name, &picture.bytes)?;
        }
        if overwrites() {
            let rewritten = outputs::rewrite(&text, &steps, &runs);
            if rewritten != text {
                fs::write(path, rewritten).map_err(|error| format!("{name}: {error}"))?;
            }
            return outputs::check_codes(&steps, &runs).map_err(|errors| in_page(&name, &errors));
        }
        outputs::check(&steps, &runs).map_err(|errors| in_page(&name, &errors))
    }
    #[cfg(not(unix))]
    {
        eprintln!("{name}: skipped, because its commands need bash");
        Ok(())
    }
}

/// Whether actual output replaces what the pages show.
fn overwrites() -> bool {
    env::var("BOOK").as_deref() == Ok("overwrite")
}

/// Returns the program that pages run.
fn program() -> PathBuf {
    env::var_os("GPT2_PROGRAM").map_or_else(|| env!("CARGO_BIN_EXE_gpt2").into(), PathBuf::from)
}

/// Problem on a line of a page.
struct Problem {
    line: usize,
    message: String,
}

fn in_page(name: &str, problems: &[Problem]) -> String {
    let lines = problems.iter().map(|Problem { line, message }| format!("{name}:{line}: {message}"));
    lines.collect::<Vec<_>>().join("\n\n")
}
