//! What is written from the table of options (`crates/generation/src/config/table.rs`): the types and the docstring of the Python package,
//! and a page of the book. The test fails if a file is stale; `WRITE_OPTIONS=1 cargo test -p candle-gpt2-book --test suite` writes
//! them anew.

use std::fmt::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use candle_gpt2_generation::{OPTIONS, OptionRow};

/// The lines of the stub between which the options are.
const STUB: [&str; 2] = ["    # From the table of options.\n", "\nclass _GenerationConfig("];

/// The text around the names in the docstring of the package.
const DOCSTRING: [&str; 2] = ["``GenerationConfig``:\n\n", "\n- of this package: "];

/// The type that Python takes for one of Rust.
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
        (name, kind) => panic!("{name}: how does Python write {kind}?"),
    }
}

/// The default as a reader sees it.
fn default_of(option: &OptionRow) -> String {
    match option.default {
        "MAX_NEW_TOKENS" => candle_gpt2_generation::MAX_NEW_TOKENS.to_string(),
        "None" | "Vec::new()" => String::new(),
        "EarlyStopping::Heuristic" => "false".to_owned(),
        number => number.to_owned(),
    }
}

/// Several tests have a part of the same file.
static FILES: Mutex<()> = Mutex::new(());

pub(crate) fn expect_file(path: &str, change: impl Fn(&str) -> String) {
    let _one_at_a_time = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let expected = change(&found);
    if std::env::var_os("WRITE_OPTIONS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    } else {
        let how = "WRITE_OPTIONS=1 cargo test -p candle-gpt2-book --test suite";
        assert!(found == expected, "{} is stale; write it anew: {how}", path.display());
    }
}

/// The text with something else between these two pieces of it.
pub(crate) fn with_between(text: &str, [first, last]: [&str; 2], between: &str) -> String {
    let (before, rest) = text.split_once(first).unwrap();
    let (_, after) = rest.split_once(last).unwrap();
    [before, first, between, last, after].concat()
}

#[test]
fn the_stub_has_the_options_of_the_table() {
    let lines: String = OPTIONS
        .iter()
        // The overloads of `generate` tell one completion from several.
        .filter(|option| option.name != "num_return_sequences")
        .map(|option| format!("    {}: {} | None\n", option.name, python_type(option)))
        .collect();
    expect_file("python/candle_gpt2/_native.pyi", |found| with_between(found, STUB, &lines));
}

/// The docstring of the package lists the names, group by group.
#[test]
fn the_docstring_names_the_options_of_the_table() {
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

#[test]
fn the_page_of_options_is_the_table() {
    let mut page = String::from(
        "# Options of generation\n\n\
         Every front end has these options under these names: `gpt2 generate` as flags (`--top-k`), Python as keywords, a checkpoint's\n\
         `generation_config.json` as keys. Those with a range under \"HTTP\" are fields of requests too; for others requests use OpenAI's names, which\n\
         [Serve over HTTP](../guides/serve.md#what-a-request-may-say) lists. This page is written from\n\
         [`table.rs`](../../../crates/generation/src/config/table.rs).\n\n\
         ## Defaults\n\n\
         The command line, the server, the page and Python have the same defaults: those of the checkpoint's `generation_config.json`, else the\n\
         ones in the tables, with `do_sample` on. So without that file tokens are sampled at temperature 1 from the 50 most probable ones, and\n\
         at most 100 are generated. An option for sampling turns `do_sample` on, whatever the file says, and a temperature of 0 turns it off.\n\n\
         The server takes `max_new_tokens` and the groups Sampling and Logits processors from the file, except `seed` and\n\
         `num_return_sequences`, which each request sets: without a seed it takes a new one. It has no beam or contrastive search, and a chat\n\
         completion ends at the end of the context. `gpt2 serve --generation-config none` leaves the file out. `/props` shows the defaults, and the\n\
         page takes them from there.\n",
    );
    let mut group = "";
    for option in OPTIONS {
        if option.group != group {
            group = option.group;
            write!(page, "\n## {group}\n\n| option | default | HTTP | |\n|---|---|---|---|\n").unwrap();
        }
        let doc = option.doc.trim().split(" [default: ").next().unwrap_or_default();
        let range = option.request.map(|field| field.to_string()).unwrap_or_default();
        writeln!(page, "| `{}` | {} | {range} | {doc} |", option.name, default_of(option)).unwrap();
    }
    expect_file("docs/src/reference/generation-options.md", |_| page.clone());
}
