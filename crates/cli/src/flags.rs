//! Options of the libraries as flags of the program: their messages contain `` `top_k` ``, and users see `--top-k`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use clap::Command;

/// The flags of the command that this process runs, by the names of their options.
static FLAGS: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// From now on messages name the flags of this command.
pub(crate) fn remember(command: &Command) {
    // The first one is the command that runs.
    let _ = FLAGS.set(flags_of(command));
}

/// The message with flags in place of options.
pub(crate) fn in_place_of_options(message: &str) -> String {
    FLAGS.get().map_or_else(|| message.to_owned(), |flags| replaced(message, flags))
}

/// Whether the command has the option.
pub(crate) fn has(option: &str) -> bool {
    FLAGS.get().is_some_and(|flags| flags.contains_key(option))
}

fn flags_of(command: &Command) -> BTreeMap<String, String> {
    // An option has the name of its flag, or that of its field where the two differ.
    let flags = |option: &clap::Arg| {
        let flag = option.get_long()?.to_owned();
        Some([(option.get_id().to_string(), flag.clone()), (flag.replace('-', "_"), flag)])
    };
    command.get_arguments().filter_map(flags).flatten().collect()
}

fn replaced(message: &str, flags: &BTreeMap<String, String>) -> String {
    let (mut text, mut rest) = (String::new(), message);
    while let Some((before, quoted)) = rest.split_once('`') {
        text.push_str(before);
        match quoted.split_once('`').and_then(|(name, after)| Some((flags.get(name)?, after))) {
            Some((flag, after)) => {
                text.push_str("--");
                text.push_str(flag);
                rest = after;
            }
            None => {
                text.push('`');
                rest = quoted;
            }
        }
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    #[test]
    fn options_of_the_command_become_flags() {
        let command = Command::new("generate")
            .arg(Arg::new("top_k").long("top-k"))
            .arg(Arg::new("stop_strings").long("stop"));
        let with_flags = |message| replaced(message, &flags_of(&command));
        assert_eq!(
            with_flags("`top_k` or `stop_strings`; see `gpt2 verify`"),
            "--top-k or --stop; see `gpt2 verify`"
        );
        assert_eq!(with_flags("`n_layer`: expected 3, not `top_k`"), "`n_layer`: expected 3, not --top-k");
        assert_eq!(with_flags("one ` alone"), "one ` alone");
    }
}
