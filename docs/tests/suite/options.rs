//! Generates files from the table of generation options (`crates/generation/src/config/table.rs`).
//!
//! The generated parts are the types and the docstring of the Python package, and tables in the book. The
//! test fails if a file is stale. `WRITE_OPTIONS=1 cargo test -p candle-gpt2-book --test suite` rewrites the
//! files.

use std::fmt::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use candle_gpt2_generation::{OPTIONS, OptionRow};

/// Lines that precede and follow the options in the stub.
const STUB: [&str; 2] = ["    # Generated from the table of options.\n", "\nclass _GenerationConfig("];

/// Text that precedes and follows the option names in the package's docstring.
const DOCSTRING: [&str; 2] = ["``GenerationConfig``:\n\n", "\n- of this package: "];

/// Returns the Python type for the Rust type of an option.
fn python_type(option: &OptionRow) -> &'static str {
    match (option.name, option.kind) {
        ("seed", _) => "int | Iterable[int]",
        (_, "usize" | "u64" | "u32") => "int",
        (_, "f64") => "float",
        (_, "bool") => "bool",
        (_, "Vec<u32>") => "int | Iterable[int]",
        (_, "Vec<String>") => "str | Sequence[str]",
        (_, "Vec<Vec<u32>>") => "Sequence[Sequence[int]]",
        (_, "Vec<(Vec<u32>, f64)>") => "_Biases",
        (_, "EarlyStopping") => "bool | Literal[\"never\"]",
        (name, kind) => panic!("{name}: no Python type for {kind}"),
    }
}

/// Returns the default value as the book's tables show it.
fn default_of(option: &OptionRow) -> String {
    match option.default {
        "MAX_NEW_TOKENS" => candle_gpt2_generation::MAX_NEW_TOKENS.to_string(),
        "None" | "Vec::new()" => String::new(),
        "EarlyStopping::Heuristic" => "false".to_owned(),
        number => number.to_owned(),
    }
}

/// Lock for the files, because several tests write parts of the same file.
static FILES: Mutex<()> = Mutex::new(());

pub(crate) fn expect_file(path: &str, change: impl Fn(&str) -> String) {
    let _one_at_a_time = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let expected = change(&found);
    if std::env::var_os("WRITE_OPTIONS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    } else {
        let command = "WRITE_OPTIONS=1 cargo test -p candle-gpt2-book --test suite";
        assert!(found == expected, "{} is stale; rewrite it with {command}", path.display());
    }
}

/// Replaces the text between two markers.
pub(crate) fn with_between(text: &str, [first, last]: [&str; 2], between: &str) -> String {
    let (before, rest) = text.split_once(first).unwrap();
    let (_, after) = rest.split_once(last).unwrap();
    [before, first, between, last, after].concat()
}

#[test]
fn stub_lists_the_generation_options() {
    let lines: String = OPTIONS
        .iter()
        // The overloads of `generate` distinguish between one completion and several.
        .filter(|option| option.name != "num_return_sequences")
        .map(|option| format!("    {}: {} | None\n", option.name, python_type(option)))
        .collect();
    expect_file("python/candle_gpt2/_native.pyi", |found| with_between(found, STUB, &lines));
}

/// Checks that the package's docstring lists the option names by group.
#[test]
fn docstring_lists_the_generation_options() {
    const WIDTH: usize = 116;
    let (mut lines, mut group): (Vec<String>, &str) = (Vec::new(), "");
    for option in OPTIONS {
        let name = format!("``{}``", option.name);
        if option.group != group {
            group = option.group;
            lines.push(format!("- {}: {name}", group.to_lowercase()));
            continue;
        }
        let line = lines.last_mut().unwrap();
        line.push(',');
        if line.len() + 1 + name.len() < WIDTH {
            *line += &format!(" {name}");
        } else {
            lines.push(format!("  {name}"));
        }
    }
    let names = lines.join("\n");
    expect_file("python/candle_gpt2/__init__.py", |found| with_between(found, DOCSTRING, &names));
}

/// Returns the page's sections on generation options, with one table for each group.
pub(crate) fn generation_sections() -> String {
    let (mut page, mut group) = (String::new(), "");
    for option in OPTIONS {
        if option.group != group {
            group = option.group;
            write!(page, "\n## {group}\n\n| option | default | HTTP | |\n|---|---|---|---|\n").unwrap();
        }
        let doc = option.doc.trim().split(" [default: ").next().unwrap_or_default();
        let range = option.request.map(|field| field.to_string()).unwrap_or_default();
        writeln!(page, "| `{}` | {} | {range} | {doc} |", option.name, default_of(option)).unwrap();
    }
    page
}
