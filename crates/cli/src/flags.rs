//! Maps the library's option names to the program's flags.
//!
//! Library messages contain `` `top_k` ``, where users expect `--top-k`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use clap::Command;

/// Flags of the running command, keyed by option name.
static FLAGS: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// Makes later messages name this command's flags.
pub(crate) fn remember(command: &Command) {
    // Only the first call has an effect, because a process runs one command.
    let _ = FLAGS.set(flags_of(command));
}

/// Replaces option names in a message with flags.
pub(crate) fn with_flags(message: &str) -> String {
    FLAGS.get().map_or_else(|| message.to_owned(), |flags| replaced(message, flags))
}

/// Whether the running command has the option.
pub(crate) fn has(option: &str) -> bool {
    FLAGS.get().is_some_and(|flags| flags.contains_key(option))
}

fn flags_of(command: &Command) -> BTreeMap<String, String> {
    // An option is keyed by its argument id, and by its flag with underscores in case they differ.
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
    fn option_names_in_messages_become_flags() {
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
