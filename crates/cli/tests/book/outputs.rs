//! Compares the output of commands with the pages.

use snapbox::filter::NormalizeToExpected;
use snapbox::report::{Palette, write_diff};
use snapbox::{Data, Redactions};

use crate::Problem;
use crate::page::{Expected, Step, StepKind};
use crate::session::{End, Run, time_limit};

/// Compares exit codes and outputs.
pub(crate) fn check(steps: &[Step], runs: &[Run]) -> Result<(), Vec<Problem>> {
    let mut problems = check_codes(steps, runs).err().unwrap_or_default();
    for (step, run) in steps.iter().zip(runs) {
        let StepKind::Command(expected) = &step.kind else { continue };
        if !matches!(run.end, End::Code(_)) {
            continue;
        }
        if let Some(difference) = difference(expected, &run.output) {
            problems.push(Problem { line: step.line, message: format!("$ {}\n{difference}", step.commands) });
        }
    }
    problems.sort_by_key(|problem| problem.line);
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Finds commands that failed unexpectedly, that is, without an exit code on the page.
pub(crate) fn check_codes(steps: &[Step], runs: &[Run]) -> Result<(), Vec<Problem>> {
    let is_shown = |number: usize| {
        steps.get(number + 1).is_some_and(|next| next.commands.trim() == "echo $?")
            && matches!(steps[number].kind, StepKind::Command(_))
    };
    let mut problems = Vec::new();
    for (number, (step, run)) in steps.iter().zip(runs).enumerate() {
        let message = match &run.end {
            End::NotRun => continue,
            End::Code(0) => continue,
            End::Code(_) if is_shown(number) => continue,
            End::Code(code) => format!("exit code {code} without a following `$ echo $?`"),
            End::Session(Some(command)) => format!("`{command}` failed"),
            End::Session(None) => "the session ended here".to_owned(),
            End::TimeOut => time_limit(),
        };
        let message = format!("$ {}\n{message}; output:\n{}", step.commands, run.output.trim_end());
        problems.push(Problem { line: step.line, message });
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Returns the page with each outdated output replaced by its command's actual output.
///
/// If an output keeps its number of lines, a line that still matches keeps its wildcards.
pub(crate) fn rewrite(page: &str, steps: &[Step], runs: &[Run]) -> String {
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    for (step, run) in steps.iter().zip(runs).rev() {
        let StepKind::Command(expected) = &step.kind else { continue };
        if !matches!(run.end, End::Code(_)) || difference(expected, &run.output).is_none() {
            continue;
        }
        let (first, count) = expected.lines;
        let output = trimmed(&run.output);
        let has_same_length = output.lines().count() == count;
        let output: Vec<String> = output
            .lines()
            .enumerate()
            .map(|(number, line)| {
                let before = has_same_length.then(|| &lines[first + number]).filter(|before| {
                    let before = before.strip_prefix(&expected.indent).unwrap_or(before);
                    text_difference(before, line).is_none()
                });
                before.cloned().unwrap_or_else(|| format!("{}{line}", expected.indent))
            })
            .collect();
        lines.splice(first..first + count, output);
    }
    lines.join("\n") + "\n"
}

/// Describes how an output differs from the expected one.
///
/// In the expected text, `[..]` matches anything in a line and `...` matches any lines.
fn difference(expected: &Expected, output: &str) -> Option<String> {
    text_difference(&expected.text, output)
}

fn text_difference(expected: &str, output: &str) -> Option<String> {
    let expected = Data::text(trimmed(expected));
    let redactions = Redactions::new();
    let output =
        NormalizeToExpected::new().redact_with(&redactions).normalize(Data::text(trimmed(output)), &expected);
    if expected == output {
        return None;
    }
    let mut difference = String::new();
    write_diff(
        &mut difference,
        &expected,
        &output,
        Some(&"the page"),
        Some(&"the command"),
        Palette::plain(),
    )
    .expect("writing to a string succeeds");
    Some(difference)
}

/// Removes trailing spaces and trailing empty lines, because readers cannot see them.
fn trimmed(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().map(str::trim_end).collect();
    lines.join("\n")
}
