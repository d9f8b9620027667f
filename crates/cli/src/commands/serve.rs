//! `gpt2 serve`: a model over HTTP, for OpenAI's clients and for a browser.

use std::env::{self, VarError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use candle_gpt2_engine::process::allow_open_files;
use candle_gpt2_engine::{BUILT_IN, HubOptions};
use candle_gpt2_grammar::GrammarReader;
use candle_gpt2_server::{
    ChatTemplateChoice, Limits, Listening, Model, SecretString, ServerOptions, Timeouts,
};
use clap::Args;

use crate::exit::UsageError;
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

/// A key, where the command line and a file are not the place for it.
const KEY_VARIABLE: &str = "GPT2_API_KEY";

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 serve
  gpt2 serve --model DIR --port 8000 --parallel 8
  gpt2 serve --model DIR --host 0.0.0.0 --api-key-file keys.txt
  gpt2 serve --model DIR --unix-socket /run/gpt2.sock

  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
       -d '{\"prompt\": \"The dog was found in\", \"max_tokens\": 20}'

A classifier (see `gpt2 classify`) is asked at /v1/classify: -d '{\"input\": [\"What a film!\"]}'.

The first line on standard output is the address. OpenAI's clients take it, followed by /v1, as their base URL; a browser \
shows a page to write on. /health says whether the server is ready, /metrics how busy it is, /openapi.json what it accepts. \
The environment variable GPT2_API_KEY sets a key too. For TLS, put a proxy in front of the server. \
SIGTERM and Ctrl-C end it: running requests are finished first, for at most --drain-timeout; a second one ends it at once.")]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    address: AddressArguments,
    #[command(flatten)]
    capacity: CapacityArguments,
    #[command(flatten)]
    access: AccessArguments,
    #[command(flatten)]
    names: NameArguments,
    #[command(flatten)]
    times: TimeArguments,
    /// Whether requests that do not say how to sample get what the checkpoint's generation_config.json says (auto), or OpenAI's defaults (none)
    #[arg(long, value_name = "WHICH", default_value = "auto", value_parser = ["auto", "none"], hide_possible_values = true)]
    generation_config: String,
    /// Tell in each answer how many tokens of its prompt had been computed before; equal requests then no longer have equal answers
    #[arg(long)]
    enable_prompt_tokens_details: bool,
    /// Refuse requests with unknown fields; without it they are answered, and the answer names the fields under warnings
    #[arg(long)]
    strict: bool,
    /// Write a line on standard error for every request: its number, route, code, counts of tokens and time, never a text
    #[arg(long)]
    log_requests: bool,
}

/// Where the server listens.
#[derive(Debug, Args)]
struct AddressArguments {
    /// Name or address to listen on; one that other machines reach wants a key
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any that is free, which the first line on standard output names
    #[arg(long, value_name = "N", default_value_t = 8080, allow_negative_numbers = true)]
    port: u16,
    /// Unix socket to listen on instead, for this user alone
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"])]
    unix_socket: Option<PathBuf>,
}

/// How much is served at once.
#[derive(Debug, Args)]
struct CapacityArguments {
    /// Texts that are made at once
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true, value_parser = between(1, 256))]
    parallel: usize,
    /// Prompts that wait; a request that finds no room is answered with code 429
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true, value_parser = between(1, 65_536))]
    queue: usize,
    /// Tokens whose keys and values are held, of prompts and texts together [default: full contexts for --parallel texts]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = between(1, 1 << 30))]
    kv_tokens: Option<usize>,
    /// Most tokens of prompts that are computed between two tokens of the running texts: half as many while few are written, four times as many while none is
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = between(1, 65_536))]
    prefill_chunk: usize,
    /// Most texts for a prompt: n and best_of of requests
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true, value_parser = between(1, 128))]
    max_n: usize,
    /// Most new tokens of a request: of all completions of all prompts together
    #[arg(long, value_name = "N", default_value_t = 65_536, allow_negative_numbers = true, value_parser = between(1, 1 << 30))]
    max_total_tokens: usize,
    /// Most alternatives for each token: logprobs and top_logprobs of requests
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true, value_parser = between(0, 20))]
    max_logprobs: usize,
    /// Most prompts of a request
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true, value_parser = between(1, 2048))]
    max_prompts: usize,
    /// Connections at once; beyond them idle ones are closed, and if none is idle, requests are answered with code 503 [default: room for twice what runs and waits]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = between(1, 65_536))]
    max_connections: Option<usize>,
    /// Most bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, allow_negative_numbers = true, value_parser = between(64, 1 << 30))]
    max_body: usize,
}

/// Who may use the server.
#[derive(Debug, Args)]
struct AccessArguments {
    /// File with the keys that requests must show, one a line; lines that begin with # are skipped
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen without a key where other machines reach the server
    #[arg(long)]
    no_auth: bool,
    /// Another name by which a proxy or other machines call the server; may be given more than once
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
    /// Origin of another server's pages that may use this one, such as https://example.com; may be given more than once
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Serve no page at /
    #[arg(long)]
    no_page: bool,
}

/// What the model is called and how it is talked to.
#[derive(Debug, Args)]
struct NameArguments {
    /// Name of the model in requests and answers [default: that of --model, without its folders]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// A further name that requests may use; may be given more than once
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// How a conversation becomes a prompt: eos-join puts the token that ends texts after each message; else a file with a Jinja template [default: the checkpoint's own]
    #[arg(long, value_name = "FILE|eos-join")]
    chat_template: Option<PathBuf>,
}

/// How long is waited for what, in seconds.
#[derive(Debug, Args)]
struct TimeArguments {
    /// Longest time in the queue; a request that waits longer is answered with code 503
    #[arg(long, value_name = "SECONDS", default_value = "60", allow_negative_numbers = true, value_parser = seconds)]
    queue_timeout: Duration,
    /// Longest time to make the texts of a request; a text that takes longer ends there
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    max_time: Option<Duration>,
    /// Longest time to finish running requests, once the server is told to end
    #[arg(long, value_name = "SECONDS", default_value = "25", allow_negative_numbers = true, value_parser = seconds)]
    drain_timeout: Duration,
    /// Longest time that a client may leave unread what is sent to it
    #[arg(long, value_name = "SECONDS", default_value = "30", allow_negative_numbers = true, value_parser = seconds)]
    write_timeout: Duration,
}

/// Serves until a signal ends it.
pub(crate) fn run(arguments: &ServeArguments, hub: &HubOptions) -> Result<ExitCode> {
    let options = options(arguments)?;
    // What the system does not allow is refused with the options.
    allow_open_files(options.open_files());
    // What can be refused is refused before the model is read, which may take long.
    let listening = Listening::new(options)?;
    let opened = arguments.model.open_any(hub)?;
    let model: Model = match opened.config().head.has_language_model() {
        true => opened.load(&Terminal)?.into(),
        false => opened.load_classifier(&Terminal)?.into(),
    };
    let server = listening.start(model)?;
    // A server goes on when nobody reads where it is.
    _ = output::write_line(&server.address());
    output::print_status("Ctrl-C ends the server");
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

fn options(arguments: &ServeArguments) -> Result<ServerOptions> {
    let ServeArguments { model, address, capacity, access, names, times, .. } = arguments;
    let defaults = ServerOptions::default();
    let mut api = defaults.api;
    api.name = names.served_model_name.clone().unwrap_or_else(|| name_of(&model.options.model));
    api.aliases.clone_from(&names.alias);
    api.grammar_reader = grammar_reader();
    api.prompt_tokens_details = arguments.enable_prompt_tokens_details;
    api.strict = arguments.strict;
    api.chat_template = chat_template(names.chat_template.as_deref())?;
    api.use_generation_config = arguments.generation_config == "auto";
    let CapacityArguments { max_n, max_prompts, max_total_tokens, max_logprobs, .. } = *capacity;
    api.limits = Limits { max_n, max_prompts, max_total_tokens, max_logprobs, ..Limits::default() };
    Ok(ServerOptions {
        host: address.host.clone(),
        port: address.port,
        unix_socket: address.unix_socket.clone(),
        parallel: capacity.parallel,
        queue: capacity.queue,
        kv_tokens: capacity.kv_tokens,
        prefill_chunk: capacity.prefill_chunk,
        keys: keys(access.api_key_file.as_deref())?,
        no_auth: access.no_auth,
        allow_hosts: access.allow_host.clone(),
        cors_origins: access.cors_origin.clone(),
        page: !access.no_page,
        api,
        max_connections: capacity.max_connections,
        max_body: capacity.max_body,
        max_time: times.max_time,
        timeouts: Timeouts {
            queue: times.queue_timeout,
            drain: times.drain_timeout,
            write: times.write_timeout,
            ..defaults.timeouts
        },
        log_requests: arguments.log_requests,
        signals: true,
    })
}

/// This program reads the grammars of requests, in processes of their own.
fn grammar_reader() -> Option<GrammarReader> {
    // On Linux the file of a running program may have been replaced; this is still the one that runs.
    let running = PathBuf::from("/proc/self/exe");
    let program = if running.exists() { running } else { env::current_exe().ok()? };
    Some(GrammarReader { program, arguments: vec!["read-grammars".into()] })
}

/// The keys of the file and of the environment.
fn keys(file: Option<&Path>) -> Result<Vec<SecretString>> {
    let mut keys = Vec::new();
    if let Some(file) = file {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        keys.extend(lines.map(SecretString::from));
        if keys.is_empty() {
            let message = format!("{} holds no key: it has one a line, # begins a remark", file.display());
            return Err(UsageError(message).into());
        }
    }
    // As with other programs, an empty variable is none.
    match env::var(KEY_VARIABLE) {
        Ok(key) if !key.is_empty() => keys.push(key.into()),
        Err(VarError::NotUnicode(_)) => {
            return Err(
                UsageError(format!("{KEY_VARIABLE} holds what is no text; a key is visible ASCII")).into()
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
            let text = fs::read_to_string(file);
            let text = text.with_context(|| {
                format!("--chat-template: expected eos-join or a file, cannot read {}", file.display())
            })?;
            Ok(ChatTemplateChoice::Jinja(text))
        }
    }
}

/// What a model is called without where it lies: no path leaves this machine.
fn name_of(model: &Path) -> String {
    let found = fs::canonicalize(model).ok().filter(|_| model != Path::new(BUILT_IN));
    let name = found.as_deref().unwrap_or(model);
    let last = found.as_deref().and_then(Path::file_name).unwrap_or(name.as_os_str());
    last.to_string_lossy().into_owned()
}

/// A whole number within these bounds.
fn between(low: usize, high: usize) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (low..=high).contains(number));
        number.ok_or_else(|| format!("expected a whole number from {low} to {high}"))
    }
}

/// A time of up to a day; in a shorter one than a millisecond nothing can be done.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds from 0.001 to 86400".into())
}
