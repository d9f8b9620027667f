//! `gpt2 completions`: what a shell needs to complete commands and options, made from their definitions.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  mkdir -p ~/.local/share/bash-completion/completions && gpt2 completions bash > ~/.local/share/bash-completion/completions/gpt2
  mkdir -p ~/.config/fish/completions && gpt2 completions fish > ~/.config/fish/completions/gpt2.fish
  gpt2 completions zsh > _gpt2    # in a folder of zsh's $fpath
  gpt2 completions powershell >> $PROFILE    # in PowerShell

Once is enough: each new shell then completes `gpt2 gen<Tab>` and `gpt2 generate --max<Tab>`.")]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Prints the completions of the whole program, `program`.
pub(crate) fn run(arguments: &CompletionsArguments, mut program: Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut program, "gpt2", &mut script);
    output::write_text(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
