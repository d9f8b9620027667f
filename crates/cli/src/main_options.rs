//! Options that a command's help lists first.
//!
//! These are the few that most users need. All others follow under their own headings.

use clap::{Arg, Command, CommandFactory};

use crate::arguments::Arguments;

/// Flags that come first in a command's help, in this order.
///
/// Commands without an entry have few options. The entry for `look` also applies to its subcommands.
const MAIN: [(&str, &[&str]); 12] = [
    ("generate", &["model", "max-new-tokens", "temperature", "top-p", "seed"]),
    ("score", &["model", "choice", "top", "stride", "json"]),
    ("classify", &["model", "choice", "dtype", "json"]),
    ("eval", &["model", "data", "limit", "num-fewshot", "list"]),
    ("serve", &["model", "host", "port", "parallel", "dtype"]),
    ("look", &["model", "html", "svg", "json", "top"]),
    ("cache", &["model", "sites", "out", "positions", "as"]),
    ("tokenize", &["tokenizer", "out", "format", "held-out", "json"]),
    ("train", &["data", "config", "init", "out", "steps"]),
    ("compress", &["model", "out", "keep", "estimate", "json"]),
    ("verify", &["model", "against", "fingerprint", "json"]),
    ("bench", &["model", "dtype", "threads", "json"]),
];

/// Heading for options that are not main options and have no heading of their own.
const OTHERS: &str = "More options";

/// Returns clap's definition of the whole program.
pub(crate) fn program() -> Command {
    MAIN.iter().fold(Arguments::command(), |program, (name, main)| match program.find_subcommand(name) {
        Some(_) => program.mut_subcommand(name, |command| with_first(command, main)),
        None => program, // a build can omit `serve`
    })
}

/// Puts the main options of a command and its subcommands first.
fn with_first(command: Command, main: &[&str]) -> Command {
    let placed = |option: Arg| {
        let flag = option.get_long().unwrap_or_default();
        match main.iter().position(|name| *name == flag) {
            Some(index) => option.help_heading(None::<&str>).display_order(index),
            None if option.is_positional() || option.get_help_heading().is_some() => option,
            None => option.help_heading(OTHERS),
        }
    };
    command.mut_args(placed).mut_subcommands(|command| with_first(command, main))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that every main option exists; a stale name would have no effect.
    #[test]
    fn every_main_option_exists() {
        fn flags(command: &Command) -> Vec<&str> {
            let own = command.get_arguments().filter_map(Arg::get_long);
            own.chain(command.get_subcommands().flat_map(flags)).collect()
        }
        let program = program();
        for (name, main) in MAIN {
            let command = program.find_subcommand(name).unwrap();
            for flag in main {
                assert!(flags(command).contains(flag), "{name}: --{flag}");
            }
        }
    }

    #[test]
    fn main_options_come_first() {
        let help = program().find_subcommand_mut("generate").unwrap().render_long_help().to_string();
        let positions: Vec<_> =
            ["--model", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--ids"]
                .iter()
                .map(|flag| help.find(&format!("{flag} <")).unwrap())
                .collect();
        assert!(positions.is_sorted(), "{positions:?}");
    }
}
