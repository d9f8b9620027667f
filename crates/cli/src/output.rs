//! Everything the program prints: results on standard output, the rest on standard error.

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

/// Writes a piece of generated text at once, so that it appears as it is made. A pipe gets every byte; a terminal gets no
/// control characters, which a model may well produce.
pub(crate) fn write_text(text: &str) -> Result<()> {
    if stdout().is_terminal() { write(&printable(text)) } else { write(text) }
}

/// Writes a line for a reader; names from files may hold anything, so control characters are left out.
pub(crate) fn write_line(line: &str) -> Result<()> {
    write(&format!("{}\n", printable(line).replace('\n', "\n  ")))
}

/// Writes a text with escape codes, which a terminal alone gets.
pub(crate) fn write_styled(text: &str) -> Result<()> {
    write_to(AutoStream::auto(stdout().lock()), text)
}

fn write(text: &str) -> Result<()> {
    write_to(stdout().lock(), text)
}

/// Standard output for bytes of any kind.
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

/// Writes a text file, which is there as a whole or not at all; nothing that exists is overwritten.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    Ok(create_file(path, |partial| Ok(std::fs::write(partial, text)?))?)
}

/// Writes the result as one line of JSON.
pub(crate) fn write_json(value: &impl Serialize) -> Result<()> {
    write_json_line(&serde_json::to_string(value)?)
}

/// Writes a line that is JSON already. Escapes replace characters that could change a terminal's state.
pub(crate) fn write_json_line(json: &str) -> Result<()> {
    write(&format!("{}\n", printable_json(json)))
}

/// Repeats the prompt in front of its continuation, dimmed, for a reader at a terminal; a pipe gets the
/// continuation alone.
pub(crate) fn echo_prompt(prompt: &str) -> Result<()> {
    if !stdout().is_terminal() {
        return Ok(());
    }
    let style = if colour_is_wanted() { Style::new().dimmed() } else { Style::new() };
    write(&format!("{style}{}{style:#}", printable(prompt)))
}

/// Says how a job went, dimmed, to a reader at a terminal.
pub(crate) fn print_status(status: &str) {
    if stderr().is_terminal() {
        let style = if colour_is_wanted() { Style::new().dimmed() } else { Style::new() };
        let _ = writeln!(stderr(), "{style}{}{style:#}", printable(status));
    }
}

/// Prints a note, which is not an error.
pub(crate) fn print_note(note: &str) {
    Terminal.note(&flags::in_place_of_options(note));
}

/// Prints an error that is formatted with escape codes, which a terminal alone gets.
pub(crate) fn print_styled_error(text: &str) {
    // The parser quotes arguments; its own colors begin with ESC.
    let text: String =
        text.chars().filter(|c| !is_unprintable(*c) || matches!(c, '\n' | '\t' | '\u{1b}')).collect();
    // Nothing is left to report to when standard error is closed.
    let _ = AutoStream::auto(stderr().lock()).write_all(text.as_bytes());
}

/// Prints an error.
pub(crate) fn print_error(message: &str) {
    let style = if stderr().is_terminal() && colour_is_wanted() {
        Style::new().bold().fg_color(Some(anstyle::AnsiColor::Red.into()))
    } else {
        Style::new()
    };
    // Some libraries quote values of any length.
    let lines: Vec<_> = message.split('\n').map(bounded_message).collect();
    // Nothing is left to report to when standard error is closed.
    let _ = writeln!(stderr(), "{style}error{style:#}: {}", printable(&lines.join("\n")));
}

fn colour_is_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A number of bytes in MiB: `474.7 MiB`.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables and pictures have a crate without dependencies, and so a set of their own.
    #[test]
    fn tables_and_text_hide_the_same_characters() {
        for character in
            ('\0'..=char::MAX).filter(|c| !matches!(c, '\n' | '\t' | ' ' | '\u{fffe}' | '\u{ffff}'))
        {
            let text = character.to_string();
            let is_hidden = candle_gpt2_pictures::shown(text.as_bytes()) != text;
            assert_eq!(is_hidden, is_unprintable(character), "{character:?}");
        }
    }
}
