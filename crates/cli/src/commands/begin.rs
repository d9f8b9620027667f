//! `gpt2` without arguments: prints how to begin.

use std::process::ExitCode;

use anyhow::Result;

use crate::output::write_line;

/// First commands to try: generation, a view of the model, a server. None of them needs a file.
const COMMANDS: [(&str, &str, bool); 3] = [
    (
        r#"gpt2 generate "One day""#,
        "continues the prompt with the built-in model; --model gpt2 downloads GPT-2 (550 MB)",
        true,
    ),
    (
        r#"gpt2 look attention "A red ball and a blue cup, a red" --html page.html"#,
        "writes a page that shows where each head attends",
        true,
    ),
    (
        "gpt2 serve",
        "serves a web page and an OpenAI-compatible API at http://127.0.0.1:8080",
        cfg!(feature = "serve"),
    ),
];

pub(crate) fn begin() -> Result<ExitCode> {
    write_line(
        "GPT-2 in one program: it generates text, inspects and trains models, and serves them. Begin with one of these:",
    )?;
    for (command, what, _) in COMMANDS.into_iter().filter(|(.., is_built)| *is_built) {
        write_line(&format!("  {command:<52} {what}"))?;
    }
    write_line(
        "All commands: gpt2 --help. Examples for a command: gpt2 generate --help. What this machine has: gpt2 doctor.",
    )?;
    Ok(ExitCode::SUCCESS)
}
