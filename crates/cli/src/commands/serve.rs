//! `gpt2 serve`: serves a model over HTTP to OpenAI clients and browsers.

use std::collections::BTreeMap;
use std::env::{self, VarError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::process::{allow_open_files, use_one_heap};
use candle_gpt2_engine::{BUILT_IN, HubOptions, ModelOptions};
use candle_gpt2_interpret::Dictionary;
use candle_gpt2_look::{built_in_dictionaries, read_dictionary};
use candle_gpt2_server::{
    ApiOptions, ChatTemplateChoice, Limits, Listening, LogFormat, Model, SecretString, ServerOptions,
    check_health,
};
use candle_gpt2_weights::read_bounded_text;
use clap::Args;

use crate::exit::{EXIT_FAILURE, UsageError};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;
use crate::worker;

/// Environment variable for an API key, as an alternative to a key file.
const KEY_VARIABLE: &str = "GPT2_API_KEY";
/// Maximum size of a chat template, far more than any context holds.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Maximum time for writing the last log lines at shutdown.
const LAST_LINES: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 serve
  gpt2 serve --model MODEL --port 8000 --parallel 8
  gpt2 serve --model MODEL --host 0.0.0.0 --api-key-file keys.txt
  gpt2 serve --model MODEL --unix-socket /run/gpt2.sock
  gpt2 serve --check --port 8000

  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
       -d '{\"prompt\": \"The dog was found in\", \"max_tokens\": 20}'

A classifier (see `gpt2 classify`) takes requests at /v1/classify: -d '{\"input\": [\"What a film!\"]}'.

The first line on standard output is the address: append /v1 to use it as the base URL of an OpenAI client, \
or open it in a browser. /health reports whether the server is ready, /metrics its load, /openapi.json the \
requests it accepts. The environment variable GPT2_API_KEY also sets a key. For TLS, put a proxy in front \
of the server. SIGTERM, SIGHUP and Ctrl-C shut the server down once running requests have finished, or after \
--drain-timeout; a second SIGTERM or Ctrl-C stops it at once.")]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    options: ServerOptions,
    #[command(flatten)]
    limits: LimitArguments,
    #[command(flatten)]
    names: NameArguments,
    /// File with the API keys that requests may use, one per line; lines that begin with # are skipped
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Defaults for options that a request does not set: the checkpoint's generation_config.json (auto), or
    /// no file (none)
    #[arg(long, value_name = "WHICH", default_value = "auto", value_parser = ["auto", "none"], hide_possible_values = true)]
    generation_config: String,
    /// Report the number of cached prompt tokens in each response; identical requests then no longer get
    /// identical responses
    #[arg(long)]
    enable_prompt_tokens_details: bool,
    /// Allow requests to read and steer activations: the fields activations and steering, and
    /// /v1/activations
    #[arg(long)]
    activations: bool,
    /// SAE whose features requests may steer with, under this name: a SAELens folder; may be given more
    /// than once
    #[arg(long = "dictionary", value_name = "NAME=FOLDER", requires = "activations")]
    dictionaries: Vec<String>,
    /// Refuse requests with unknown fields; by default they are answered, and the response lists the fields
    /// under warnings
    #[arg(long)]
    strict: bool,
    /// Format of the log: text, or json, one object per line
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, hide_possible_values = true)]
    log_format: LogFormat,
    /// Do not start a server; check whether the one with these options is ready: exit code 0 if it is, 1 if
    /// not
    #[arg(long)]
    check: bool,
}

/// Limits on a request.
#[derive(Debug, Args)]
struct LimitArguments {
    /// Maximum completions per prompt: n and best_of in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_n, allow_negative_numbers = true, value_parser = between(1, 128))]
    max_n: usize,
    /// Maximum new tokens per request, over all completions of all prompts
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_total_tokens, allow_negative_numbers = true, value_parser = between(1, 1 << 30))]
    max_total_tokens: usize,
    /// Maximum alternatives per token: logprobs and top_logprobs in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_logprobs, allow_negative_numbers = true, value_parser = between(0, 20))]
    max_logprobs: usize,
    /// Maximum prompts per request
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_prompts, allow_negative_numbers = true, value_parser = between(1, 2048))]
    max_prompts: usize,
    /// Maximum bytes of activations per request, at 4 bytes per number; all requests together may hold four
    /// times as many, and requests beyond that limit get status 503
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_activation_bytes, allow_negative_numbers = true, value_parser = between(4, 1 << 30))]
    max_activation_bytes: usize,
}

/// Model names and chat template.
#[derive(Debug, Args)]
struct NameArguments {
    /// Name of the model in requests and responses [default: that of --model, without its folders]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Additional model name that requests may use; may be given more than once
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// Chat template: a file with a Jinja template, or eos-join, which puts the end-of-text token after
    /// each message [default: the checkpoint's own]
    #[arg(long, value_name = "FILE|eos-join")]
    chat_template: Option<PathBuf>,
}

/// Serves until a signal arrives, or checks a running server.
pub(crate) fn run(arguments: &ServeArguments, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.check {
        output::write_line(&format!("{} is ready", check_health(&arguments.options)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let options = options(arguments)?;
    use_one_heap();
    arguments.log_format.write_to_stderr();
    // `Listening::new` rejects options that need more open files than the system allows.
    allow_open_files(options.open_files());
    // Reject invalid options before reading the model, which may take a while.
    let mut listening = Listening::new(options)?;
    let opened = arguments.model.open_any(hub)?;
    listening.api().dictionaries = dictionaries(&arguments.dictionaries, opened.config())?;
    let ModelOptions { model, adapter, .. } = &arguments.model.options;
    if model == Path::new(BUILT_IN) && adapter.is_empty() {
        listening.api().transcoders = Arc::new(built_in_dictionaries()?.into());
    }
    let model: Model = match opened.config().head.has_language_model() {
        true => opened.load(&Terminal)?.into(),
        false => opened.load_classifier(&Terminal)?.into(),
    };
    let server = listening.start(model)?;
    // The server runs even if its address cannot be printed.
    _ = output::write_line(&server.address());
    output::print_status("press Ctrl-C to stop the server");
    let ended = server.run();
    if !LogFormat::flush_stderr(LAST_LINES) {
        // Standard error is not being read, so printing the error would block as well.
        return Ok(if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) });
    }
    ended?;
    Ok(ExitCode::SUCCESS)
}

fn options(arguments: &ServeArguments) -> Result<ServerOptions> {
    let ServeArguments { model, options, names, .. } = arguments;
    let LimitArguments { max_n, max_total_tokens, max_logprobs, max_prompts, max_activation_bytes } =
        arguments.limits;
    let limits = Limits {
        max_n,
        max_prompts,
        max_total_tokens,
        max_logprobs,
        max_activation_bytes,
        ..Limits::default()
    };
    let api = ApiOptions {
        name: names.served_model_name.clone().unwrap_or_else(|| name_of(&model.options)),
        aliases: names.alias.clone(),
        chat_template: chat_template(names.chat_template.as_deref())?,
        worker: worker::program(),
        prompt_tokens_details: arguments.enable_prompt_tokens_details,
        strict: arguments.strict,
        use_generation_config: arguments.generation_config == "auto",
        activations: arguments.activations,
        limits,
        ..ApiOptions::default()
    };
    let keys = keys(arguments.api_key_file.as_deref())?;
    Ok(ServerOptions { api, keys, signals: true, ..options.clone() })
}

/// Reads the dictionaries, keyed by name.
fn dictionaries(named: &[String], model: &Gpt2Config) -> Result<BTreeMap<String, Arc<Dictionary>>> {
    let mut dictionaries = BTreeMap::new();
    for text in named {
        let wrong = |what: &str| UsageError(format!("--dictionary {text}: {what}"));
        let (name, folder) = text
            .split_once('=')
            .filter(|(name, folder)| !name.is_empty() && !folder.is_empty())
            .ok_or_else(|| wrong("expected a name and a folder, such as res8=blocks.8.hook_resid_pre"))?;
        let folder = Path::new(folder);
        if folder.is_file() {
            return Err(wrong("expected a SAELens folder, found a file").into());
        }
        let dictionary = Arc::new(read_dictionary(folder, None, model)?);
        if dictionaries.insert(name.to_owned(), dictionary).is_some() {
            return Err(wrong("duplicate name").into());
        }
    }
    Ok(dictionaries)
}

/// Reads the API keys from the file and the environment.
fn keys(file: Option<&Path>) -> Result<Vec<SecretString>> {
    let mut keys = Vec::new();
    if let Some(file) = file {
        let text = crate::input::read_text(file);
        let text = text.with_context(|| format!("cannot read {}", file.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        keys.extend(lines.map(SecretString::from));
        if keys.is_empty() {
            let message =
                format!("{} contains no key; write one per line (# starts a comment)", file.display());
            return Err(UsageError(message).into());
        }
    }
    // An empty variable counts as unset, as in other programs.
    match env::var(KEY_VARIABLE) {
        Ok(key) if !key.is_empty() => keys.push(key.into()),
        Err(VarError::NotUnicode(_)) => {
            return Err(
                UsageError(format!("{KEY_VARIABLE} is not valid Unicode; expected visible ASCII")).into()
            );
        }
        _ => {}
    }
    Ok(keys)
}

fn chat_template(choice: Option<&Path>) -> Result<ChatTemplateChoice> {
    match choice {
        None => Ok(ChatTemplateChoice::Checkpoint),
        Some(choice) if choice == Path::new("eos-join") => Ok(ChatTemplateChoice::EosJoin),
        Some(file) => {
            let text = read_bounded_text(file, MAX_TEMPLATE_BYTES);
            let text = text.with_context(|| {
                format!("--chat-template: expected eos-join or a file; cannot read {}", file.display())
            })?;
            Ok(ChatTemplateChoice::Jinja(text))
        }
    }
}

/// Returns the name of the model, or of its first adapter, without folders.
///
/// Clients must not see paths of this machine.
fn name_of(options: &ModelOptions) -> String {
    let model = options.adapter.first().map_or(options.model.as_path(), |adapter| &adapter.path);
    let found = fs::canonicalize(model).ok().filter(|_| model != Path::new(BUILT_IN));
    let name = found.as_deref().unwrap_or(model);
    let last = found.as_deref().and_then(Path::file_name).unwrap_or(name.as_os_str());
    last.to_string_lossy().into_owned()
}

/// Returns a parser for whole numbers from `low` to `high`.
fn between(low: usize, high: usize) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (low..=high).contains(number));
        number.ok_or_else(|| format!("expected a whole number from {low} to {high}"))
    }
}
