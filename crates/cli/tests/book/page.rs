//! The blocks of code of a page, and what is to be run of them.
//!
//! | block | |
//! |---|---|
//! | `console` | lines after `$ ` are commands, `> ` goes on with one, and other lines are what it says on both its outputs |
//! | `sh` | commands under `set -e`, whose output does not matter |
//! | `json`, `toml` | must parse |
//! | `rust`, `python`, `js` | run elsewhere: doctests of `docs/lib.rs`, `python/tests/test_book.py` |
//! | `text`, `mermaid`, … | for the eye |
//!
//! With `,no_run` after its kind a block is not run, and the line before it says why: `<!-- not run: needs a GPU -->`.

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag};

use crate::Problem;

/// Blocks that are run by other tests.
const ELSEWHERE: [&str; 3] = ["rust", "python", "js"];
/// Blocks that nothing runs.
const FOR_THE_EYE: [&str; 6] = ["text", "mermaid", "html", "diff", "yaml", "ebnf"];

/// Commands that are run at once.
pub(crate) struct Step {
    /// The line of the page where they begin, from 1.
    pub(crate) line: usize,
    pub(crate) commands: String,
    pub(crate) kind: StepKind,
}

pub(crate) enum StepKind {
    /// Commands under `set -e`.
    Script,
    /// A command and what it says.
    Command(Expected),
}

/// What a command says.
pub(crate) struct Expected {
    pub(crate) text: String,
    /// The lines of the page that hold it: the first one, from 0, and their number.
    pub(crate) lines: (usize, usize),
    /// What these lines begin with.
    pub(crate) indent: String,
}

/// A block of code as it stands in the page.
struct Block<'a> {
    info: String,
    /// The line of its fence, from 0.
    fence: usize,
    indent: &'a str,
    lines: Vec<&'a str>,
}

/// What is to be run of a page. Everything wrong with its blocks is found at once.
pub(crate) fn steps(text: &str) -> Result<Vec<Step>, Vec<Problem>> {
    let (mut steps, mut problems) = (Vec::new(), Vec::new());
    for block in blocks(text) {
        match steps_of(&block, text) {
            Ok(found) => steps.extend(found),
            Err(what) => problems.push(Problem { line: block.fence + 1, what }),
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
            return Err(format!("a block of code is `KIND` or `KIND,no_run`, and not `{more}`"));
        }
    };
    let is_known = ["console", "sh", "json", "toml"].contains(&kind)
        || ELSEWHERE.contains(&kind)
        || FOR_THE_EYE.contains(&kind);
    if !is_known {
        let eye = FOR_THE_EYE.join(", ");
        return Err(format!(
            "a block of code of the kind `{kind}`: known are console, sh, json, toml, rust, python, js, and for the eye {eye}"
        ));
    }
    if !is_run {
        let before = text.lines().take(block.fence).filter(|line| !line.trim().is_empty()).last();
        let is_reason = |line: &str| line.starts_with("<!-- not run: ") && line.ends_with(" -->");
        return match before.map(str::trim) {
            Some(line) if is_reason(line) => Ok(Vec::new()),
            _ => Err("the line before a block that is not run says why: `<!-- not run: needs a GPU -->`"
                .to_owned()),
        };
    }
    if !block.indent.trim().is_empty() {
        return Err("a block that is run stands by itself or in a list, and nowhere else".to_owned());
    }
    let lines: Vec<&str> =
        block.lines.iter().map(|line| line.strip_prefix(block.indent).unwrap_or(line.trim_start())).collect();
    let first = block.fence + 1;
    match kind {
        "console" => commands(&lines, first, block.indent),
        "sh" => Ok(vec![Step { line: first + 1, commands: lines.join("\n"), kind: StepKind::Script }]),
        "json" => serde_json::from_str::<serde_json::Value>(&lines.join("\n"))
            .map(|_| Vec::new())
            .map_err(|error| format!("no JSON: {error}")),
        "toml" => toml::from_str::<toml::Table>(&lines.join("\n"))
            .map(|_| Vec::new())
            .map_err(|error| format!("no TOML: {error}")),
        _ => Ok(Vec::new()),
    }
}

/// The commands of a session on a console; `first` is its first line, from 0.
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
        let said = at;
        while lines.get(at).is_some_and(|line| !line.starts_with("$ ")) {
            at += 1;
        }
        let expected = Expected {
            text: lines[said..at].join("\n"),
            lines: (first + said, at - said),
            indent: indent.to_owned(),
        };
        steps.push(Step { line: first + start + 1, commands: command, kind: StepKind::Command(expected) });
    }
    Ok(steps)
}
