//! Which options a command's help lists first: the few that most people use. All others follow under headings of their own.

use clap::{Arg, Command, CommandFactory};

use crate::arguments::Arguments;

/// The flags that come first in the help of a command, in this order. A command that is not here has few, or is one of `look`'s.
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

/// The heading of options that have none of their own and are not among the main ones.
const OTHERS: &str = "More options";

/// The whole program as clap knows it.
pub(crate) fn program() -> Command {
    MAIN.iter().fold(Arguments::command(), |program, (name, main)| match program.find_subcommand(name) {
        Some(_) => program.mut_subcommand(name, |command| with_first(command, main)),
        None => program, // `serve` can be left out of a build
    })
}

/// The command with its main options first, and the commands below it.
fn with_first(command: Command, main: &[&str]) -> Command {
    let placed = |option: Arg| {
        let flag = option.get_long().unwrap_or_default();
        match main.iter().position(|name| *name == flag) {
            Some(place) => option.help_heading(None::<&str>).display_order(place),
            None if option.is_positional() || option.get_help_heading().is_some() => option,
            None => option.help_heading(OTHERS),
        }
    };
    command.mut_args(placed).mut_subcommands(|command| with_first(command, main))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flag that no longer exists would come first in no help.
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
        let places: Vec<_> = ["--model", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--ids"]
            .iter()
            .map(|flag| help.find(&format!("{flag} <")).unwrap())
            .collect();
        assert!(places.is_sorted(), "{places:?}");
    }
}
