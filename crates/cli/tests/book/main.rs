//! The book and the README are run: each chapter's blocks of code one after the other, their outputs beside what the page says.
//!
//! `cargo test -p candle-gpt2-cli --test book -- guides/serve` runs one chapter. `BOOK=overwrite` in the environment writes what
//! the commands say into the page, where it differs. `GPT2_PROGRAM` names another program to run than the one just built.
//! [`page`] says which kinds of blocks there are. A picture that commands make is the one in `docs/src/pictures` of the same name. Further
//! tests follow the links between all Markdown files, and draw the terminal that the README shows.

#![cfg_attr(not(unix), expect(dead_code, reason = "the blocks are read there, and not run"))]

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
    trials.push({
        let root = root.clone();
        Trial::test("mistakes_are_found", move || self_test::check(&root).map_err(Into::into))
    });
    #[cfg(target_os = "linux")]
    trials.push({
        let root = root.clone();
        Trial::test("terminal", move || pictures::check_terminal(&root).map_err(Into::into))
    });
    for (name, path) in pages(&root) {
        let root = root.clone();
        trials.push(Trial::test(name, move || run(&root, &path).map_err(Into::into)));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The folder of the repository: the nearest above the current one that has a book.
fn repository() -> PathBuf {
    let current = env::current_dir().expect("a current folder");
    let has_book = |folder: &&Path| folder.join("docs/src").is_dir() && folder.join("Cargo.lock").is_file();
    current.ancestors().find(has_book).expect("a folder with docs/src above the current one").to_owned()
}

/// The README and every chapter, named as one asks for them.
fn pages(root: &Path) -> Vec<(String, PathBuf)> {
    let book = root.join("docs/src");
    let mut pages = vec![("README".to_owned(), root.join("README.md"))];
    for path in markdown_files(&book) {
        let name = path.strip_prefix(&book).expect("a path in the book").with_extension("");
        let name = name.to_string_lossy().replace('\\', "/");
        if name != "SUMMARY" {
            pages.push((name, path));
        }
    }
    pages
}

/// All Markdown files in a folder and below it, without what tools write and fetch.
fn markdown_files(folder: &Path) -> Vec<PathBuf> {
    const NOT_OURS: [&str; 4] = ["target", "node_modules", "dist", "book"];
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && !name.starts_with('.') && !NOT_OURS.contains(&name.as_str()) {
            files.extend(markdown_files(&path));
        } else if name.ends_with(".md") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Runs the blocks of one page.
fn run(root: &Path, path: &Path) -> Result<(), String> {
    let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
    let text = fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    let steps = page::steps(&text).map_err(|errors| in_page(&name, &errors))?;
    if steps.is_empty() {
        return Ok(());
    }
    #[cfg(unix)]
    {
        let (runs, made) = session::run(root, &program(), &steps)?;
        for picture in made {
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
        eprintln!("{name}: its commands are not run, since they are bash's");
        Ok(())
    }
}

/// Whether what pages show is replaced by what commands do.
fn overwrites() -> bool {
    env::var("BOOK").as_deref() == Ok("overwrite")
}

/// The program that pages run.
fn program() -> PathBuf {
    env::var_os("GPT2_PROGRAM").map_or_else(|| env!("CARGO_BIN_EXE_gpt2").into(), PathBuf::from)
}

/// What is wrong at some place of a page.
struct Problem {
    line: usize,
    what: String,
}

fn in_page(name: &str, problems: &[Problem]) -> String {
    let lines = problems.iter().map(|Problem { line, what }| format!("{name}:{line}: {what}"));
    lines.collect::<Vec<_>>().join("\n\n")
}
