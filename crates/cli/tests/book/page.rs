//! Code blocks of a page, and the commands to run from them.
//!
//! | block | |
//! |---|---|
//! | `console` | `$ ` starts a command, `> ` continues it, and other lines are its output on both streams |
//! | `sh` | commands under `set -e`, whose output is ignored |
//! | `json`, `toml` | must parse |
//! | `rust`, `python`, `js` | run by other tests: doctests of `docs/lib.rs`, `python/tests/test_book.py` |
//! | `text`, `mermaid`, … | not run |
//!
//! A block with `,no_run` after its kind is not run. The line before it gives the reason:
//! `<!-- not run: needs a GPU -->`.

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag};

use crate::Problem;

/// Kinds of blocks that other tests run.
const RUN_ELSEWHERE: [&str; 3] = ["rust", "python", "js"];
/// Kinds of blocks that no test runs.
const NOT_RUN: [&str; 6] = ["text", "mermaid", "html", "diff", "yaml", "ebnf"];

/// Commands that run as a unit.
pub(crate) struct Step {
    /// Line of the page where the commands begin, counted from 1.
    pub(crate) line: usize,
    pub(crate) commands: String,
    pub(crate) kind: StepKind,
}

pub(crate) enum StepKind {
    /// Commands under `set -e`.
    Script,
    /// Command with its expected output.
    Command(Expected),
}

/// Expected output of a command.
pub(crate) struct Expected {
    pub(crate) text: String,
    /// Lines of the page that hold the output: the first line, counted from 0, and the number of lines.
    pub(crate) lines: (usize, usize),
    /// Indentation of these lines.
    pub(crate) indent: String,
}

/// Code block of a page.
struct Block<'a> {
    info: String,
    /// Line of the opening fence, counted from 0.
    fence: usize,
    indent: &'a str,
    lines: Vec<&'a str>,
}

/// Returns the steps to run from a page, or all problems in its blocks.
pub(crate) fn steps(text: &str) -> Result<Vec<Step>, Vec<Problem>> {
    let (mut steps, mut problems) = (Vec::new(), Vec::new());
    for block in blocks(text) {
        match steps_of(&block, text) {
            Ok(found) => steps.extend(found),
            Err(message) => problems.push(Problem { line: block.fence + 1, message }),
        }
    }
    if problems.is_empty() { Ok(steps) } else { Err(problems) }
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let events = Parser::new_ext(text, pulldown_cmark::Options::empty()).into_offset_iter();
    let blocks = events.filter_map(|(event, range)| {
        let Event::Start(Tag::CodeBlock(kind)) = event else { return None };
        let start = text[..range.start].rfind('\n').map_or(0, |at| at + 1);
        let indent = &text[start..range.start];
        let mut lines: Vec<&str> = text[start..range.end].lines().collect();
        let info = match kind {
            CodeBlockKind::Fenced(info) => {
                lines.remove(0);
                lines.pop_if(|line| {
                    line.trim_start().starts_with("```") || line.trim_start().starts_with("~~~")
                });
                info.to_string()
            }
            CodeBlockKind::Indented => String::new(),
        };
        Some(Block { info, fence: text[..start].matches('\n').count(), indent, lines })
    });
    blocks.collect()
}

fn steps_of(block: &Block<'_>, text: &str) -> Result<Vec<Step>, String> {
    let (kind, is_run) = match block.info.split_once(',') {
        None => (block.info.as_str(), true),
        Some((kind, "no_run")) => (kind, false),
        Some((_, more)) => {
            return Err(format!("unknown attribute `{more}`; write `KIND` or `KIND,no_run`"));
        }
    };
    let is_known = ["console", "sh", "json", "toml"].contains(&kind)
        || RUN_ELSEWHERE.contains(&kind)
        || NOT_RUN.contains(&kind);
    if !is_known {
        let not_run = NOT_RUN.join(", ");
        return Err(format!(
            "unknown code block kind `{kind}`; expected one of console, sh, json, toml, rust, python, js, {not_run}"
        ));
    }
    if !is_run {
        let before = text.lines().take(block.fence).filter(|line| !line.trim().is_empty()).last();
        let is_reason = |line: &str| line.starts_with("<!-- not run: ") && line.ends_with(" -->");
        return match before.map(str::trim) {
            Some(line) if is_reason(line) => Ok(Vec::new()),
            _ => {
                Err("the line before a `no_run` block must give the reason: `<!-- not run: needs a GPU -->`"
                    .to_owned())
            }
        };
    }
    if !block.indent.trim().is_empty() {
        return Err("a block that is run must be at the top level or in a list".to_owned());
    }
    let lines: Vec<&str> =
        block.lines.iter().map(|line| line.strip_prefix(block.indent).unwrap_or(line.trim_start())).collect();
    let first = block.fence + 1;
    match kind {
        "console" => commands(&lines, first, block.indent),
        "sh" => Ok(vec![Step { line: first + 1, commands: lines.join("\n"), kind: StepKind::Script }]),
        "json" => serde_json::from_str::<serde_json::Value>(&lines.join("\n"))
            .map(|_| Vec::new())
            .map_err(|error| format!("invalid JSON: {error}")),
        "toml" => toml::from_str::<toml::Table>(&lines.join("\n"))
            .map(|_| Vec::new())
            .map_err(|error| format!("invalid TOML: {error}")),
        _ => Ok(Vec::new()),
    }
}

/// Parses a console session into commands; `first` is its first line, counted from 0.
fn commands(lines: &[&str], first: usize, indent: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let start = at;
        let command =
            lines[at].strip_prefix("$ ").ok_or("a `console` block begins with a command after `$ `")?;
        let mut command = command.to_owned();
        at += 1;
        while let Some(more) = lines.get(at).and_then(|line| line.strip_prefix('>')) {
            command.push('\n');
            command.push_str(more.strip_prefix(' ').unwrap_or(more));
            at += 1;
        }
        let output_start = at;
        while lines.get(at).is_some_and(|line| !line.starts_with("$ ")) {
            at += 1;
        }
        let expected = Expected {
            text: lines[output_start..at].join("\n"),
            lines: (first + output_start, at - output_start),
            indent: indent.to_owned(),
        };
        steps.push(Step { line: first + start + 1, commands: command, kind: StepKind::Command(expected) });
    }
    Ok(steps)
}
