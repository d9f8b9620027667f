//! Parses the command line into [`Arguments`], or prints a help text or a usage error.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, Error, FromArgMatches};

use crate::arguments::Arguments;
use crate::exit::{self, EXIT_FAILURE, EXIT_USAGE};
use crate::main_options::program;
use crate::{flags, other_names, output};

/// Placeholder for a space at which clap must not break a line.
///
/// It keeps example commands in one piece, so that users can copy them.
const KEPT_SPACE: char = '\u{e000}';

/// Parses the arguments of this process.
///
/// For a help request or a usage error, prints the text and returns the exit code.
pub(crate) fn arguments() -> Result<Arguments, ExitCode> {
    let given: Vec<OsString> = std::env::args_os().collect();
    parsed(&given).map_err(|error| print(&error))
}

fn parsed(given: &[OsString]) -> Result<Arguments, Error> {
    let mut program = with_whole_examples(program());
    let words: Vec<&str> = given.iter().skip(1).filter_map(|word| word.to_str()).collect();
    flags::remember(&program, called(&program, &words));
    if let Some(name) = foreign_cluster(&words) {
        let error = Error::new(ErrorKind::UnknownArgument).with_cmd(&program);
        return Err(with_advice(with_context(error, ContextKind::InvalidArg, name), given));
    }
    let matches = program.try_get_matches_from_mut(given).map_err(|error| with_advice(error, given))?;
    let mut arguments = Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut program))?;
    arguments.threads = threads(&matches).map(usize::from);
    Ok(arguments)
}

/// Returns the thread count of the selected command.
fn threads(matches: &ArgMatches) -> Option<u16> {
    match matches.subcommand() {
        Some((_, matches)) => threads(matches),
        None => matches.try_get_one("threads").ok().flatten().copied(),
    }
}

/// Prints a help text on standard output or an error on standard error, and returns the exit code.
fn print(error: &Error) -> ExitCode {
    let text = shown(&error.render());
    if error.use_stderr() {
        output::print_styled_error(&text);
        return ExitCode::from(EXIT_USAGE);
    }
    match output::write_styled(&text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if exit::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&exit::message(&error));
            ExitCode::from(EXIT_FAILURE)
        }
    }
}

/// Protects the examples of a command and its subcommands from clap's line breaks.
fn with_whole_examples(command: Command) -> Command {
    let kept = |line: &str| match line.starts_with(' ') {
        true => in_columns(line).replace(' ', &KEPT_SPACE.to_string()),
        false => line.to_owned(),
    };
    let after =
        command.get_after_help().map(|text| text.to_string().split('\n').map(kept).collect::<Vec<_>>());
    let command = match after {
        Some(lines) => with_short_help(command.after_long_help(lines.join("\n")), &lines),
        None => with_short_help(command, &[]),
    };
    command.mut_subcommands(with_whole_examples)
}

/// Adds a `-h` help text that fits a screen.
///
/// It shows the options without a heading, each in a line or two, and the first examples of `lines`. `--help`
/// shows everything.
fn with_short_help(command: Command, lines: &[String]) -> Command {
    let most = if command.has_subcommands() { 1 } else { 3 };
    let is_long = command.get_arguments().any(|argument| argument.get_help_heading().is_some());
    let command = command.mut_args(|argument| {
        let is_extra = argument.get_help_heading().is_some();
        match argument.get_help().map(ToString::to_string) {
            Some(help) if !is_extra => {
                let long = argument.get_long_help().map_or_else(|| help.clone(), ToString::to_string);
                argument.help(in_short(&help).to_owned()).long_help(long)
            }
            _ => argument.hide_short_help(is_extra),
        }
    });
    let is_example = |line: &&String| line.starts_with(KEPT_SPACE);
    let examples = lines.iter().filter(is_example).take(most).map(String::as_str);
    let heading = lines.iter().any(|line| is_example(&line)).then_some("Examples:");
    let mut after: Vec<&str> = heading.into_iter().chain(examples).collect();
    if !command.has_subcommands() && (is_long || lines.len() > after.len()) {
        after.extend(["", "--help shows all options and examples."]);
    }
    command.after_help(after.join("\n"))
}

/// Shortens a help text to the part before its first colon, semicolon or parenthesis.
fn in_short(help: &str) -> &str {
    let end = [": ", "; ", " ("].iter().filter_map(|mark| help.find(mark)).min();
    end.map_or(help, |end| &help[..end])
}

/// Breaks an example into lines of at most 80 columns.
///
/// A long command continues on the next line, at an option or at the next command after `&&` or `|`.
fn in_columns(example: &str) -> String {
    const COLUMNS: usize = 80;
    const CONTINUATION: &str = " \\";
    let (mut lines, mut rest) = (Vec::new(), example.to_owned());
    while rest.chars().count() > COLUMNS {
        let mut is_quoted = false;
        let fits =
            |(index, _): &(usize, char)| rest[..*index].chars().count() + CONTINUATION.len() <= COLUMNS;
        let breaks = rest.char_indices().take_while(fits).filter(|(index, character)| {
            is_quoted ^= matches!(character, '"' | '\'');
            let word = rest[*index..].strip_prefix(' ').unwrap_or_default();
            let is_start = ["-", "&& ", "| "].iter().any(|start| word.starts_with(start));
            !is_quoted && is_start && !rest[..*index].trim().is_empty()
        });
        let Some((index, _)) = breaks.last() else { break };
        let next = format!("     {}", &rest[index..]);
        lines.push(rest[..index].to_owned() + CONTINUATION);
        rest = next;
    }
    lines.push(rest);
    lines.join("\n")
}

/// Renders clap's text with escape codes and restores the protected spaces.
fn shown(text: &StyledStr) -> String {
    text.ansi().to_string().replace(KEPT_SPACE, " ")
}

/// Finds a word such as `-ngl` or `-hf`, which clap would read as several one-letter options.
fn foreign_cluster(words: &[&str]) -> Option<String> {
    let is_foreign = |word: &&&str| word.len() > 2 && !word.starts_with("--") && other_names::contains(word);
    let options = words.iter().take_while(|word| **word != "--");
    options.into_iter().find(|word| word.starts_with('-') && is_foreign(word)).map(|word| (*word).to_owned())
}

fn with_context(mut error: Error, kind: ContextKind, text: String) -> Error {
    error.insert(kind, ContextValue::String(text));
    error
}

/// Adds advice to a parse error: the option or value that the user probably meant.
///
/// Candidates are names from other programs, and then similar names. clap's own suggestions may be
/// arbitrarily far from the input.
fn with_advice(mut error: Error, given: &[OsString]) -> Error {
    let mut program = program();
    program.build();
    let words: Vec<&str> = given.iter().skip(1).filter_map(|word| word.to_str()).collect();
    let command = called(&program, &words);
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let (advice, similar) = match error.kind() {
        ErrorKind::UnknownArgument => {
            let Some(name) = text(ContextKind::InvalidArg) else { return error };
            error.remove(ContextKind::SuggestedArg);
            // Remove clap's tip to pass the option as a value.
            error.remove(ContextKind::Suggested);
            // clap's usage line names the option that it would suggest.
            error.insert(ContextKind::Usage, ContextValue::StyledStr(command.clone().render_usage()));
            let similar = similar_option(&name, command).map(|near| (ContextKind::SuggestedArg, near));
            (other_names::advice_on_argument(&name, command), similar)
        }
        ErrorKind::InvalidSubcommand => {
            let Some(name) = text(ContextKind::InvalidSubcommand) else { return error };
            error.remove(ContextKind::SuggestedSubcommand);
            let names = command.get_subcommands().map(|command| command.get_name().to_owned());
            let similar = nearest(&name, names).map(|near| (ContextKind::SuggestedSubcommand, near));
            (other_names::advice_on_command(&name, command), similar)
        }
        ErrorKind::ValueValidation => {
            let (option, value) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue));
            let (Some(option), Some(value)) = (option, value) else { return error };
            (other_names::advice_on_value(&option, &value, command).into_iter().collect(), None)
        }
        ErrorKind::MissingRequiredArgument if command.get_name() == "eval" => {
            (vec!["`gpt2 eval --list` shows the protocols".to_owned()], None)
        }
        _ => return error,
    };
    match (advice.is_empty(), similar) {
        (false, _) => {
            let tips = advice.into_iter().map(StyledStr::from).collect();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
        (true, Some((kind, near))) => {
            error.insert(kind, ContextValue::String(near));
        }
        (true, None) => {}
    }
    error
}

/// Returns the command that the words select.
fn called<'a>(program: &'a Command, words: &[&str]) -> &'a Command {
    let mut command = program;
    for word in words {
        command = command.find_subcommand(word).unwrap_or(command);
        if !command.has_subcommands() {
            break;
        }
    }
    command
}

/// Finds an option of the command with a similar name.
///
/// Names that other programs use get no suggestion, unless they differ only in underscores.
fn similar_option(name: &str, command: &Command) -> Option<String> {
    let longs = command.get_opts().filter_map(|option| option.get_long()).map(|long| format!("--{long}"));
    let near = nearest(name, longs)?;
    (near == name.replace('_', "-") || !other_names::contains(name)).then_some(near)
}

/// Returns the closest known name if it differs in at most a third of the letters.
fn nearest(name: &str, known: impl Iterator<Item = String>) -> Option<String> {
    let name = name.replace('_', "-");
    let letters = |name: &str| name.trim_start_matches('-').chars().count();
    let distances = known.map(|known| (strsim::damerau_levenshtein(&name, &known), known));
    let (distance, near) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= letters(&name) / 3).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error or help text for a command line.
    fn message_of(words: &str) -> String {
        let arguments: Vec<OsString> =
            std::iter::once("gpt2").chain(words.split_whitespace()).map(Into::into).collect();
        parsed(&arguments)
            .err()
            .map(|error| error.render().to_string().replace(KEPT_SPACE, " "))
            .unwrap_or_default()
    }

    #[test]
    fn names_from_other_programs_get_tips() {
        for (words, expected) in [
            ("generate x --n-predict 5", "use `--max-new-tokens`"),
            ("generate x --n_predict=5", "use `--max-new-tokens`"),
            ("generate x --max-token 5", "use `--max-new-tokens`"),
            ("generate x --stream", "streamed already"),
            ("generate x --temp 0.5", "use `--temperature`"),
            ("generate x --repeat-penalty 1.1", "use `--repetition-penalty`"),
            ("generate x --ctx-size 512", "`--keep-last`"),
            ("generate x -c 512", "`--keep-last`"),
            ("generate x -ngl 99", "`--device cuda`"),
            ("score x -ngl 99", "`--device cuda`"),
            ("generate x --device-map auto", "`--device cuda`"),
            ("generate x --torch-dtype float16", "use `--dtype`"),
            ("generate x --do-sample", "`--greedy`"),
            ("generate x --port 80", "`gpt2 serve --port`"),
            ("serve --n-predict 5", "request"),
            ("serve --num-beams 5", "`gpt2 generate --num-beams`"),
            ("serve --ctx-size 512", "`--kv-tokens`"),
            ("train --model gpt2", "use `--init`"),
            ("look lens x --model-path y", "use `--model`"),
            ("convert a b --model y", "two arguments"),
            ("--n-predict 5 generate x", "use `--max-new-tokens`"),
            ("generate x -hf owner/name", "use `--model`"),
            ("generate x -m y -mg 0", "`--device cuda`"),
            ("generate x --no-display-prompt", "piped output contains only the completion"),
            ("generate x -e", "`--prompt-file`"),
            ("generate x --override-kv a=b", "`gpt2 inspect`"),
            ("generate x --lora-scaled y:0.5", "use `--adapter DIR=WEIGHT`"),
            ("generate x --peft-model y", "use `--adapter`"),
            ("train --lora 8", "use `--lora-rank`"),
            ("generate x --verbose", "`--json`"),
            ("generate x -b 512", "`--batch-size` counts the prompts of `--prompts-file`"),
            ("generate x -ub 512", "`--batch-size` counts the prompts of `--prompts-file`"),
            ("train -b 512", "use `--batch-size`"),
            ("generate x -no-cnv", "is continued, not answered"),
            ("generate x -st", "is continued, not answered"),
            ("generate x -sys y", "at the start of the prompt"),
            ("generate x --keep 5", "use `--keep-head`"),
            ("generate x --repeat-last-n 64", "`--repetition-penalty` counts all tokens"),
            ("serve --metrics", "/metrics and /props are always available"),
            ("serve --slots", "/metrics counts running"),
            ("serve --embedding", "/v1/embeddings is always available"),
            ("serve -cb", "always processed together"),
            ("serve --no-webui", "use `--no-page`"),
            ("serve -b 512", "use `--prefill-chunk`"),
            ("serve --verbose", "use `--log-requests`"),
            ("generate One day", "put the text in quotes"),
            ("serve folder", "use `--model`"),
            ("-m x -p hi", "use `gpt2 generate`"),
            ("-hf owner/name -p hi", "use `gpt2 generate`"),
            ("-hf owner/name -p hi", "use `--model` with a folder, a file or a name on the Hub"),
            ("-m x generate y", "options come after the command"),
            ("generate x -n -1", "the context is full"),
            ("generate x --dtype q8_0", "did you mean q8?"),
            ("generate x --dtype float16", "did you mean f16?"),
            ("generate x --kv-dtype q8_0", "did you mean q8?"),
            ("convert a b --dtype q8", "did you mean q8_0?"),
            ("generate x --seed -1", "`--seed $RANDOM`"),
            ("generate x --no-warmup", "leave it out"),
            ("generate x --color", "piped output contains only the completion"),
            ("bench --no-warmup", "every measurement begins with a warm-up"),
            ("generate x --samplers top_k", "the order of samplers is fixed"),
            ("generate x --rope-scaling yarn", "learned positions"),
            ("eval -f x", "use `--data`"),
            ("serve -a x", "use `--alias`"),
            ("bench -p 512", "the lengths are fixed"),
            ("convert a b --dtype Q4_K_M", "did you mean q4_k?"),
            ("eval", "`gpt2 eval --list`"),
            ("-v", "use `--version`"),
            ("run x", "`gpt2 generate --model`"),
            ("chat", "`gpt2 generate --interactive`"),
            ("rm x", "`gpt2 doctor`"),
            ("ps", "no model stays loaded"),
            ("model.gguf", "`gpt2 generate --model`"),
        ] {
            let message = message_of(words);
            assert!(message.contains(expected) && message.contains("tip: "), "{words}: {message}");
            assert!(!message.contains("a similar") && !message.contains("exists"), "{words}: {message}");
        }
    }

    #[test]
    fn only_similar_names_are_suggested() {
        for (words, expected) in [
            ("generate x --temperatur 1", "a similar argument exists: '--temperature'"),
            ("generate x --max_new_tokens 1", "a similar argument exists: '--max-new-tokens'"),
            ("generate x --modle y", "a similar argument exists: '--model'"),
            ("genrate x", "a similar subcommand exists: 'generate'"),
            ("completion bash", "a similar subcommand exists: 'completions'"),
        ] {
            assert!(message_of(words).contains(expected), "{words}: {}", message_of(words));
        }
        for words in ["generate x --colour", "generate x --strum", "dance", "look dance", "--colour"] {
            let message = message_of(words);
            assert!(message.starts_with("error: un") && !message.contains("a similar"), "{words}: {message}");
        }
        assert!(!message_of("--colour").contains("tip: "), "{}", message_of("--colour"));
        for words in ["generate x --dtype q2", "generate x --kv-dtype q4_0", "generate x --seed a"] {
            let message = message_of(words);
            assert!(
                message.starts_with("error: invalid") && !message.contains("tip: "),
                "{words}: {message}"
            );
        }
    }

    /// Checks that no command mistakes a name from the table for a typo of its own options.
    #[test]
    fn names_from_other_programs_are_not_treated_as_typos() {
        let mut program = program();
        program.build();
        for path in other_names::tests::paths(&program) {
            let command = called(&program, &path.iter().map(String::as_str).collect::<Vec<_>>());
            for name in other_names::tests::options() {
                let similar = similar_option(name, command).filter(|similar| similar != name);
                assert_eq!(similar, None, "{name} of {path:?}");
            }
        }
    }

    /// Checks that lines fill the width without exceeding it, and that examples fit in 80 columns.
    #[test]
    fn help_fills_the_terminal_width() {
        for width in [60, 80] {
            let mut program = with_whole_examples(program()).term_width(width);
            program.build();
            for path in other_names::tests::paths(&program) {
                let names: Vec<&str> = path.iter().map(String::as_str).collect();
                let mut command = called(&program, &names).clone();
                for help in [command.render_help(), command.render_long_help()] {
                    let help = help.to_string();
                    let lines: Vec<&str> = help.lines().collect();
                    for (line, next) in lines.iter().zip(&lines[1..]) {
                        if let Some(word) = continued(line, next) {
                            let with_word = line.chars().count() + 1 + word.chars().count();
                            assert!(
                                with_word > width,
                                "{names:?} at {width} columns is broken early:\n{line}\n{next}"
                            );
                        }
                    }
                    for line in lines.iter().filter(|line| line.contains(KEPT_SPACE)) {
                        assert!(line.chars().count() <= 80, "{names:?}: {line}");
                    }
                    for line in lines.iter().filter(|line| !line.contains(KEPT_SPACE) && line.contains(' ')) {
                        let words = line.trim_start().split(' ').count();
                        let is_usage =
                            line.starts_with("Usage: ") || line.trim_start().starts_with(['-', '[', '<']);
                        let too_long = line.chars().count() > width && words > 1 && !is_usage;
                        assert!(!too_long, "{names:?} at {width} columns is too long:\n{line}");
                    }
                }
            }
        }
    }

    /// Returns the first word of `next` if that line continues the sentence of `line`.
    fn continued<'a>(line: &str, next: &'a str) -> Option<&'a str> {
        let indent = |line: &str| line.chars().take_while(|c| *c == ' ').count();
        let column = indent(next);
        let before: Vec<char> = line.chars().collect();
        let word = next.split_whitespace().next()?;
        let has_text = before.get(column).is_some_and(|c| *c != ' ')
            && !line.contains(KEPT_SPACE)
            && !next.contains(KEPT_SPACE);
        let is_prose = column == 0 && has_text && !line.ends_with(':');
        let is_help =
            column >= 8 && has_text && before[column - 2..column] == [' ', ' '] && !word.starts_with('-');
        let is_choice = column >= 8 && has_text && before[column - 2..column] == ['-', ' '];
        (is_prose || is_help || is_choice).then_some(word)
    }

    #[test]
    fn examples_in_help_keep_their_spacing() {
        let help = message_of("generate --help");
        let long = "\n  gpt2 generate \"The dog\" --model gpt2-large \\\n      --assistant-model distilgpt2    # the same text, sooner\n";
        assert!(help.contains(long), "{help}");
    }

    /// Checks that short options parse like the corresponding long options.
    #[test]
    fn short_and_long_options_parse_alike() {
        let read = |words: &[&str]| {
            let words: Vec<OsString> =
                std::iter::once("gpt2").chain(words.iter().copied()).map(Into::into).collect();
            parsed(&words)
                .map(|arguments| format!("{arguments:?}"))
                .map_err(|error| error.render().to_string())
        };
        let mut forms = std::collections::BTreeMap::new();
        let mut program = program();
        program.build();
        for path in other_names::tests::paths(&program) {
            let command = called(&program, &path.iter().map(String::as_str).collect::<Vec<_>>());
            for option in command.get_opts().filter(|option| option.get_long() != Some("help")) {
                if let (Some(short), Some(long)) = (option.get_short(), option.get_long()) {
                    forms.entry((short, long.to_owned())).or_insert_with(Vec::new).push(path.join(" "));
                }
            }
        }
        let known: Vec<(char, &str)> = forms.keys().map(|(short, long)| (*short, long.as_str())).collect();
        assert_eq!(
            known,
            [('m', "model"), ('n', "max-new-tokens"), ('o', "out"), ('p', "prompt"), ('s', "seed")]
        );
        let words = |command: &'static str, option: &'static str| -> Vec<&'static str> {
            let required: &[&str] = match command {
                "train" => &["--data", "d", "--init", "i", "--out", "o"],
                "cache" => &["--sites", "z", "--out", "o"],
                "look features" => &["--sae", "s"],
                "look circuit" => &["--data", "d"],
                "look data" => &["ioi"],
                "look neurons" => &["--neuron", "1.1"],
                "eval" => &["kl"],
                _ => &[],
            };
            [command.split(' ').collect(), required.to_vec(), vec![option, "7"]].concat()
        };
        for ((short, long), commands) in &forms {
            for command in commands {
                let command: &'static str = command.clone().leak();
                let (short, long) = (format!("-{short}").leak(), format!("--{long}").leak());
                let (short, long) = (read(&words(command, short)), read(&words(command, long)));
                assert_eq!(short, long);
                assert!(short.is_ok(), "{short:?}");
            }
        }
        for (command, option) in [
            ("generate", 'p'),
            ("generate", 'n'),
            ("serve", 'm'),
            ("tokenize", 'm'),
            ("verify", 'm'),
            ("inspect", 'm'),
            ("train", 's'),
            ("look heads", 's'),
        ] {
            assert!(
                forms
                    .iter()
                    .any(|((short, _), commands)| *short == option
                        && commands.iter().any(|name| name == command)),
                "{command} -{option}"
            );
        }
    }
}
