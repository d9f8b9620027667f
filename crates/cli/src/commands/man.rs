//! `gpt2 man`: the manual pages, made from the definitions of the commands.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;

use crate::arguments::Arguments;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 man > gpt2.1 && man ./gpt2.1
  gpt2 man --out ~/.local/share/man/man1           (then: man gpt2-generate)")]
pub(crate) struct ManArguments {
    /// Write a page for each command into this folder: gpt2.1, gpt2-generate.1 and so on
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(arguments: &ManArguments) -> Result<ExitCode> {
    match &arguments.out {
        None => {
            let mut page = Vec::new();
            Man::new(definitions()).render(&mut page)?;
            output::write_text(&String::from_utf8(page)?)?;
        }
        Some(folder) => {
            let name = || folder.display().to_string();
            fs::create_dir_all(folder).with_context(name)?;
            clap_mangen::generate_to(definitions(), folder).with_context(name)?;
            output::write_line(&format!("{}: gpt2.1 and a page for each command", folder.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The commands without `help`, which has no page.
fn definitions() -> Command {
    let without_help = |command: Command| command.disable_help_subcommand(true);
    without_help(Arguments::command()).mut_subcommand("look", without_help)
}
