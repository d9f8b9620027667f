//! `gpt2 man`: prints manual pages, generated from the command definitions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_gpt2_weights::replace_file;
use clap::{Args, Command};
use clap_mangen::Man;

use crate::exit::UsageError;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 man > gpt2.1 && man ./gpt2.1
  gpt2 man generate | man -l -
  gpt2 man --out ~/.local/share/man/man1    # then: man gpt2-generate")]
pub(crate) struct ManArguments {
    /// Commands whose page to print, such as `generate` or `look lens` [default: the program's]
    #[arg(value_name = "COMMAND", conflicts_with = "out")]
    commands: Vec<String>,
    /// Write a page for each command into this folder: gpt2.1, gpt2-generate.1 and so on
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints one command's page, or writes the pages of all commands of `program`.
pub(crate) fn run(arguments: &ManArguments, program: Command) -> Result<ExitCode> {
    // `help` has no page.
    let without_help = |command: Command| command.disable_help_subcommand(true);
    let mut command = without_help(program).mut_subcommand("look", without_help);
    command.build();
    match &arguments.out {
        None => {
            let mut command = &command;
            for name in &arguments.commands {
                let missing = || UsageError(format!("unknown command `{name}` in `{}`", command.get_name()));
                command = command.find_subcommand(name).ok_or_else(missing)?;
            }
            output::write_text(&page(&Man::new(command.clone()))?)?;
        }
        Some(folder) => {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
            let pages = write_pages(&command, folder)?;
            output::write_line(&format!("{}: {pages} pages, starting with gpt2.1", folder.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and its subcommands, and returns their number.
fn write_pages(command: &Command, folder: &Path) -> Result<usize> {
    let man = Man::new(command.clone());
    let path = folder.join(man.get_filename());
    let page = page(&man)?;
    // Replace pages from an older version.
    replace_file(&path, |partial| Ok(fs::write(partial, page)?))?;
    command.get_subcommands().try_fold(1, |pages, command| Ok(pages + write_pages(command, folder)?))
}

/// Renders a page; examples keep their line breaks, and the text after them is reflowed.
fn page(man: &Man) -> Result<String> {
    let mut page = Vec::new();
    man.render(&mut page)?;
    let page = String::from_utf8(page)?;
    Ok(match page.split_once(".SH EXTRA\n") {
        None => page,
        Some((before, after)) => {
            let (examples, rest) = after.split_at(after.find("\n.SH ").map_or(after.len(), |end| end + 1));
            let (mut shown, mut is_filled) = (format!("{before}.SH EXAMPLES\n"), true);
            for line in examples.lines() {
                let is_code = line.starts_with(' ') || line == "Examples:" || (line.is_empty() && !is_filled);
                if is_code == is_filled {
                    shown += if is_code { ".nf\n" } else { ".fi\n" };
                    is_filled = !is_code;
                }
                shown += &format!("{line}\n");
            }
            let end = if is_filled { "" } else { ".fi\n" };
            format!("{shown}{end}{rest}")
        }
    })
}
