//! Output of the program: results on standard output, everything else on standard error.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::Path;

use anstream::AutoStream;
use anstyle::Style;
use anyhow::{Context, Result, bail};
use candle_gpt2::{bounded_message, is_unprintable, printable, printable_json};
pub(crate) use candle_gpt2_engine::grouped;
use candle_gpt2_engine::{Reporter, Terminal};
use candle_gpt2_weights::create_file;
use serde::Serialize;

use crate::{closed_output, flags};

/// Writes a piece of generated text and flushes it, so that it appears immediately.
///
/// A pipe receives every byte. A terminal receives no control characters, which a model can generate.
pub(crate) fn write_text(text: &str) -> Result<()> {
    if stdout().is_terminal() { write(&printable(text)) } else { write(text) }
}

/// Writes a line for a human reader.
///
/// Control characters are removed, because names from files may contain any characters.
pub(crate) fn write_line(line: &str) -> Result<()> {
    write(&format!("{}\n", printable(line).replace('\n', "\n  ")))
}

/// Writes styled text; only terminals receive the escape codes.
pub(crate) fn write_styled(text: &str) -> Result<()> {
    write_to(AutoStream::auto(stdout().lock()), text)
}

fn write(text: &str) -> Result<()> {
    write_to(stdout().lock(), text)
}

/// Opens standard output for binary data.
pub(crate) fn binary() -> Result<impl Write> {
    expect_open()?;
    Ok(stdout().lock())
}

fn expect_open() -> Result<()> {
    if closed_output::was_closed() {
        bail!("standard output is closed: redirect it to a file, a program or /dev/null");
    }
    Ok(())
}

fn write_to(mut out: impl Write, text: &str) -> Result<()> {
    expect_open()?;
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Writes a text file atomically, without overwriting an existing file.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    Ok(create_file(path, |partial| Ok(std::fs::write(partial, text)?))?)
}

/// Writes a value as one line of JSON.
pub(crate) fn write_json(value: &impl Serialize) -> Result<()> {
    write_json_line(&serde_json::to_string(value)?)
}

/// Writes a line that is already JSON.
///
/// Characters that could change a terminal's state are escaped.
pub(crate) fn write_json_line(json: &str) -> Result<()> {
    write(&format!("{}\n", printable_json(json)))
}

/// Prints the prompt, dimmed, before its completion if standard output is a terminal.
///
/// A pipe receives only the completion.
pub(crate) fn echo_prompt(prompt: &str) -> Result<()> {
    if !stdout().is_terminal() {
        return Ok(());
    }
    let style = if wants_color() { Style::new().dimmed() } else { Style::new() };
    write(&format!("{style}{}{style:#}", printable(prompt)))
}

/// Prints a dimmed status message if standard error is a terminal.
pub(crate) fn print_status(status: &str) {
    if stderr().is_terminal() {
        let style = if wants_color() { Style::new().dimmed() } else { Style::new() };
        let _ = writeln!(stderr(), "{style}{}{style:#}", printable(status));
    }
}

/// Prints a note.
pub(crate) fn print_note(note: &str) {
    Terminal.note(&flags::with_flags(note));
}

/// Prints a styled error message; only terminals receive the escape codes.
pub(crate) fn print_styled_error(text: &str) {
    // Drop unprintable characters in quoted arguments, but keep ESC, which begins the parser's color codes.
    let text: String =
        text.chars().filter(|c| !is_unprintable(*c) || matches!(c, '\n' | '\t' | '\u{1b}')).collect();
    // If standard error is closed, the failure cannot be reported anywhere.
    let _ = AutoStream::auto(stderr().lock()).write_all(text.as_bytes());
}

/// Prints an error message.
pub(crate) fn print_error(message: &str) {
    let style = if stderr().is_terminal() && wants_color() {
        Style::new().bold().fg_color(Some(anstyle::AnsiColor::Red.into()))
    } else {
        Style::new()
    };
    // Some libraries quote values of any length.
    let lines: Vec<_> = message.split('\n').map(bounded_message).collect();
    // If standard error is closed, the failure cannot be reported anywhere.
    let _ = writeln!(stderr(), "{style}error{style:#}: {}", printable(&lines.join("\n")));
}

fn wants_color() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Formats a number of bytes in MiB: `474.7 MiB`.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the `pictures` crate hides the same characters as this crate.
    ///
    /// It has no dependencies and therefore its own set of hidden characters.
    #[test]
    fn tables_and_text_hide_the_same_characters() {
        for character in
            ('\0'..=char::MAX).filter(|c| !matches!(c, '\n' | '\t' | ' ' | '\u{fffe}' | '\u{ffff}'))
        {
            let text = character.to_string();
            let is_hidden = candle_gpt2_pictures::printable_token(text.as_bytes()) != text;
            assert_eq!(is_hidden, is_unprintable(character), "{character:?}");
        }
    }
}
