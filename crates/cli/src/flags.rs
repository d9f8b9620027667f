//! Maps the library's option names to the program's flags.
//!
//! Library messages contain `` `top_k` ``, where users expect `--top-k`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use clap::Command;

/// Flags of the running command, keyed by option name.
static FLAGS: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// Makes later messages name the flags of this command, and those of the program for all commands.
pub(crate) fn remember(program: &Command, command: &Command) {
    let mut flags = flags_of(program);
    flags.extend(flags_of(command));
    // Only the first call has an effect, because a process runs one command.
    let _ = FLAGS.set(flags);
}

/// Replaces option names in a message with flags.
pub(crate) fn with_flags(message: &str) -> String {
    FLAGS.get().map_or_else(|| message.to_owned(), |flags| replaced(message, flags))
}

/// Formats a library's hint with flags, without the alternatives that the running command lacks.
///
/// Returns `None` if none is left.
pub(crate) fn hint(alternatives: &str) -> Option<String> {
    hint_with(alternatives, FLAGS.get())
}

fn hint_with(alternatives: &str, flags: Option<&BTreeMap<String, String>>) -> Option<String> {
    let named = |alternative: &str| {
        let name = alternative.split('`').nth(1)?;
        name.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
            .then(|| name.to_owned())
    };
    let with_flag = |alternative: &str| match (named(alternative), flags) {
        (None, _) => Some(alternative.to_owned()),
        (Some(name), None) => {
            Some(alternative.replace(&format!("`{name}`"), &format!("--{}", name.replace('_', "-"))))
        }
        (Some(name), Some(flags)) => flags.contains_key(&name).then(|| replaced(alternative, flags)),
    };
    let hint = alternatives.split(", ").filter_map(with_flag).collect::<Vec<_>>().join(", ");
    (!hint.is_empty()).then_some(hint)
}

fn flags_of(command: &Command) -> BTreeMap<String, String> {
    // Key each option by its argument id, and also by its flag with underscores, because the two may differ.
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

    #[test]
    fn hints_name_only_options_of_the_command() {
        let command = Command::new("score").arg(Arg::new("tokenizer").long("tokenizer"));
        let flags = flags_of(&command);
        let hint = |alternatives| hint_with(alternatives, Some(&flags));
        assert_eq!(hint("`tokenizer` FILE, or `ids` in place of text").as_deref(), Some("--tokenizer FILE"));
        assert_eq!(hint("`keep_last`"), None);
        assert_eq!(hint("`gpt2 verify`, `kv_dtype` f32").as_deref(), Some("`gpt2 verify`"));
        assert_eq!(hint_with("`keep_last`", None).as_deref(), Some("--keep-last"));
    }
}
