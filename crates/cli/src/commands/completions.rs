//! `gpt2 completions`: prints a script that completes commands, options and values in a shell.
//!
//! The script calls the program to list the candidates.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_gpt2_engine::{BUILT_IN, CachedModels, HubOptions, PublishedValues, WeightDType};
use candle_gpt2_kernels::KvDType;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, Command};
use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, PathCompleter, ValueCompleter, complete};
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};
use clap_complete::{CompleteEnv, CompletionCandidate};
use serde_json::json;

use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  mkdir -p ~/.local/share/bash-completion/completions && gpt2 completions bash > ~/.local/share/bash-completion/completions/gpt2
  mkdir -p ~/.config/fish/completions && gpt2 completions fish > ~/.config/fish/completions/gpt2.fish
  gpt2 completions zsh > _gpt2    # in a folder of zsh's $fpath
  gpt2 completions nushell >> $nu.config-path    # in Nushell
  gpt2 completions powershell >> $PROFILE    # in PowerShell

Once for each version: new shells then complete `gpt2 gen<Tab>`, `gpt2 generate --max<Tab>` and `--dtype <Tab>`, and after \
`--model` the models in the cache. The program `gpt2` must be on the PATH.")]
pub(crate) struct CompletionsArguments {
    /// Shell to write the completions for
    #[arg(value_name = "SHELL", value_parser = PossibleValuesParser::new(SHELLS.names()))]
    shell: String,
}

const SHELLS: Shells<'static> = Shells(&[&Bash, &Elvish, &Fish, &Nushell, &Powershell, &Zsh]);

/// Nushell; its external completer reads JSON.
struct Nushell;

impl EnvCompleter for Nushell {
    fn name(&self) -> &'static str {
        "nushell"
    }

    fn is(&self, name: &str) -> bool {
        [self.name(), "nu"].contains(&name)
    }

    fn write_registration(
        &self,
        variable: &str,
        _name: &str,
        program: &str,
        completer: &str,
        script: &mut dyn Write,
    ) -> io::Result<()> {
        let name = self.name();
        write!(
            script,
            r#"
$env.config.completions.external.enable = true
let before_{program} = $env.config.completions.external.completer?
$env.config.completions.external.completer = {{|spans|
    if $spans.0 == "{program}" {{
        with-env {{ {variable}: "{name}" }} {{ ^{completer} -- ...$spans | from json }}
    }} else if $before_{program} != null {{
        do $before_{program} $spans
    }}
}}
"#
        )
    }

    fn write_complete(
        &self,
        command: &mut Command,
        spans: Vec<OsString>,
        folder: Option<&Path>,
        answer: &mut dyn Write,
    ) -> io::Result<()> {
        let last = spans.len().saturating_sub(1);
        let candidates = complete(command, spans, last, folder)?.into_iter().map(|candidate| {
            let description = candidate.get_help().map(ToString::to_string);
            json!({ "value": candidate.get_value().to_string_lossy(), "description": description })
        });
        write!(answer, "{}", candidates.collect::<serde_json::Value>())
    }
}

/// Environment variable through which a script requests completions.
const VARIABLE: &str = "GPT2_COMPLETE";

/// Answers a shell's completion request and ends the process; returns if there is no request.
pub(crate) fn answer(program: fn() -> Command) {
    CompleteEnv::with_factory(|| with_values(program())).shells(SHELLS).var(VARIABLE).complete();
}

/// Adds value completion to the options of a command and its subcommands.
fn with_values(command: Command) -> Command {
    command.mut_args(with_candidates).mut_subcommands(with_values)
}

fn with_candidates(argument: Arg) -> Arg {
    let values = match argument.get_id().as_str() {
        "model" | "positional" | "against" | "diff" => return argument.add(ArgValueCompleter::new(models)),
        "dtype" | "compute_dtype" => WeightDType::all().map(WeightDType::name).collect(),
        "kv_dtype" => KvDType::all().map(KvDType::name).collect(),
        "device" => vec!["auto", "cpu", "cuda", "metal"],
        _ => return argument,
    };
    argument.add(ArgValueCandidates::new(move || values.iter().map(CompletionCandidate::new).collect()))
}

/// Lists built-in, cached and published models, and files, whose names begin with `typed`.
fn models(typed: &OsStr) -> Vec<CompletionCandidate> {
    let cached = CachedModels::of(&HubOptions::from_environment()).gpt2.into_iter().map(|model| model.name);
    let published = PublishedValues::built_in().ok();
    let published = published.iter().flat_map(PublishedValues::names).filter(|name| !name.contains('/'));
    let mut names: Vec<String> = cached.chain(published.map(str::to_owned)).collect();
    names.push(BUILT_IN.to_owned());
    names.sort();
    names.dedup();
    let begins = |name: &String| typed.to_str().is_some_and(|typed| name.starts_with(typed));
    let files = PathCompleter::any().complete(typed);
    names.into_iter().filter(begins).map(CompletionCandidate::new).chain(files).collect()
}

/// Prints the completion script for a shell.
pub(crate) fn run(arguments: &CompletionsArguments) -> Result<ExitCode> {
    let mut script = Vec::new();
    let name = &arguments.shell;
    let shell = SHELLS
        .completer(name)
        .with_context(|| format!("completions are unavailable for the shell `{name}`"))?;
    shell.write_registration(VARIABLE, "gpt2", "gpt2", "gpt2", &mut script)?;
    output::write_text(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
