//! Advice for users who bring option names from llama.cpp, transformers, vLLM and Ollama.

use candle_gpt2_kernels::KvDType;
use candle_gpt2_weights::{WeightDType, WrittenDType};
use clap::Command;

/// Names that other programs use, and the advice for users of this program.
///
/// In the advice, backquotes hold an option (`--top-k`) or another command with one (`gpt2 serve --port`). A
/// row applies to a command that has every option named without a command. If the row lists commands, it
/// applies only to those. The first matching row wins.
struct Row {
    names: &'static [&'static str],
    commands: &'static [&'static str],
    advice: &'static str,
}

const fn row(names: &'static [&'static str], advice: &'static str) -> Row {
    Row { names, commands: &[], advice }
}

const fn row_of(
    commands: &'static [&'static str],
    names: &'static [&'static str],
    advice: &'static str,
) -> Row {
    Row { names, commands, advice }
}

const NEW_TOKENS: &[&str] = &[
    "--n-predict",
    "--predict",
    "--num-predict",
    "--max-token",
    "--max-tokens",
    "--max-len",
    "--max-output-tokens",
    "--max-gen-len",
    "--tokens",
];
const CONTEXT: &[&str] = &[
    "-c",
    "--ctx-size",
    "--ctx",
    "--n-ctx",
    "--num-ctx",
    "--max-model-len",
    "--context-length",
    "--max-seq-len",
    "--max-seq-length",
    "--block-size",
    "--seq-length",
];
const MODEL: &[&str] = &[
    "--model-path",
    "--model-name",
    "--model-name-or-path",
    "--model-id",
    "--model-dir",
    "--pretrained",
    "--checkpoint",
    "--ckpt",
    "--gguf",
    "--hf-repo",
    "-hf",
    "-hfr",
    "--base-model",
];
const GPU: &[&str] = &[
    "-ngl",
    "--n-gpu-layers",
    "--gpu-layers",
    "--num-gpu",
    "--num-gpus",
    "--gpus",
    "--gpu",
    "--use-gpu",
    "--cuda",
    "--main-gpu",
    "-mg",
    "--device-map",
    "--tensor-parallel-size",
    "-tp",
    "-dev",
];
/// Options that each request sets instead of the server.
const OF_A_REQUEST: &[&str] = &[
    "-n",
    "--n-predict",
    "--predict",
    "--num-predict",
    "--max-token",
    "--max-tokens",
    "--max-length",
    "--max-new-tokens",
    "--temp",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repeat-penalty",
    "--repetition-penalty",
    "--seed",
    "-s",
    "--stop",
    "--stream",
    "--do-sample",
    "-p",
    "--prompt",
];

const TRAINED: &str = "use `--init` with a checkpoint to train further, or `--config` to train from scratch";
const CONVERTED: &str = "pass the checkpoint and the output as two arguments";

const OPTIONS: &[Row] = &[
    // Request settings, and built-in server features.
    row_of(&["serve"], OF_A_REQUEST, "each request sets this in its body; /openapi.json lists the fields"),
    row_of(
        &["serve"],
        &["--num-beams", "--beam-width", "--use-beam-search"],
        "the server has no beam search; use `gpt2 generate --num-beams`",
    ),
    row_of(&["serve"], &["--metrics", "--props"], "leave it out: /metrics and /props are always available"),
    row_of(&["serve"], &["--slots"], "leave it out: /metrics counts running and waiting requests"),
    row_of(&["serve"], &["--embedding", "--embeddings"], "leave it out: /v1/embeddings is always available"),
    row_of(
        &["serve"],
        &["-cb", "--cont-batching"],
        "leave it out: requests are always processed together; `--parallel` limits how many",
    ),
    row_of(&["serve"], &["-v", "--verbose"], "use `--log-requests`, which logs a line for each request"),
    row(&["--no-webui", "--no-ui"], "use `--no-page`"),
    row(&["-a", "--model-alias"], "use `--alias`"),
    // Lengths.
    row(NEW_TOKENS, "use `--max-new-tokens`, which counts new tokens and not the prompt"),
    row(
        CONTEXT,
        "the model fixes the context; `--keep-last` shortens a long prompt, `--slide` continues when the context is full",
    ),
    row(CONTEXT, "the model fixes the context; `--kv-tokens` limits the KV cache"),
    row(CONTEXT, "use `--context`"),
    row(&["--max-length"], "use `--context`"),
    row(
        &["--min-length", "--min-tokens"],
        "use `--min-new-tokens`, which counts new tokens and not the prompt",
    ),
    row(&["--timeout", "-to"], "use `--queue-timeout`, `--max-time` or `--write-timeout`"),
    row(&["--timeout"], "use `--max-time`"),
    // Sampling and search.
    row(&["--temp"], "use `--temperature`"),
    row(&["--do-sample", "--sample"], "sampling is the default; `--greedy` turns it off"),
    row(&["--no-do-sample", "--no-sample"], "use `--greedy`"),
    row(&["--repeat-penalty"], "use `--repetition-penalty`"),
    row(&["--repeat-last-n"], "leave it out: `--repetition-penalty` counts all tokens"),
    row(&["--keep", "--n-keep"], "use `--keep-head`"),
    row(&["--typical"], "use `--typical-p`"),
    row(
        &["--mirostat", "--mirostat-ent", "--tfs", "--tfs-z", "--xtc-probability", "--dry-multiplier"],
        "not available; `--top-p`, `--min-p` and `--typical-p` limit sampling to probable tokens",
    ),
    row(&["--n", "--best-of", "--num-samples", "--nsamples"], "use `--num-return-sequences`"),
    row(&["--best-of"], "each request sets this in its body; `--max-n` limits it"),
    row(&["--beams", "--beam-width", "--beam-size", "--use-beam-search"], "use `--num-beams`"),
    row(&["--random-seed", "--manual-seed", "--rng-seed"], "use `--seed`"),
    row(&["-r", "--reverse-prompt", "--stop-sequence", "--stop-strings", "--stop-words"], "use `--stop`"),
    row(&["--eos-token", "--stop-token-ids"], "use `--eos-token-id`"),
    row(&["--ignore-eos"], "use `--min-new-tokens`: until then no end-of-text token is chosen"),
    row(&["--bad-words"], "use `--bad-word`"),
    row_of(
        &["generate"],
        &["--stream", "--no-stream"],
        "text is streamed already; `--json` prints it at the end",
    ),
    row(
        &["-i", "-cnv", "--conversation", "--chat"],
        "use `--interactive`; GPT-2 continues text and was not trained to chat",
    ),
    row_of(
        &["generate"],
        &["-no-cnv", "--no-conversation", "-st", "--single-turn"],
        "leave it out: a prompt is continued, not answered",
    ),
    row_of(
        &["generate"],
        &["-sys", "--system-prompt", "-sysf", "--system-prompt-file"],
        "put the instructions at the start of the prompt: GPT-2 has no system prompt",
    ),
    row(&["-md", "--model-draft", "--draft-model", "--speculative-model"], "use `--assistant-model`"),
    row(&["--draft", "--draft-max", "--num-speculative-tokens"], "use `--num-assistant-tokens`"),
    row(&["--prompt-lookup-num-tokens", "--lookup"], "use `--prompt-lookup`"),
    row(&["--steering-vector"], "use `--steer` or `--control-vector`"),
    row(&["--grammar-file"], "use `--grammar`"),
    row(&["-j", "--guided-json", "--json-schema-file"], "use `--json-schema`"),
    row(&["--guided-regex"], "use `--regex`"),
    // Input and output.
    row(&["--text", "--input", "--inputs", "--query"], "use `--prompt`, or pass the text as an argument"),
    row_of(&["tokenize"], &["-p", "--prompt", "--text", "--input"], "pass the text as an argument"),
    row_of(&["eval"], &["-f", "--file"], "use `--data`"),
    row(&["-f", "--file"], "use `--prompt-file`"),
    row_of(
        &["generate"],
        &["-e", "--escape", "--no-escape"],
        "leave it out: the prompt is used verbatim; `--prompt-file` reads one with line breaks",
    ),
    row_of(
        &["generate"],
        &["--no-display-prompt", "--color", "--simple-io", "--log-disable", "--no-perf"],
        "leave it out: piped output contains only the completion",
    ),
    row_of(&["generate"], &["--samplers", "--sampler-seq"], "leave it out: the order of samplers is fixed"),
    row(
        &["--rope-scaling", "--rope-freq-base", "--rope-freq-scale"],
        "leave it out: GPT-2 has learned positions, not rotary ones",
    ),
    row_of(&["bench"], &["--no-warmup"], "leave it out: every measurement begins with a warm-up run"),
    row(&["--no-warmup"], "leave it out: no warm-up is run"),
    row_of(
        &["bench"],
        &["-p", "--n-prompt", "-n", "--n-gen"],
        "leave it out: the lengths are fixed, so results are comparable",
    ),
    row_of(
        &["generate"],
        &["-v", "--verbose", "--verbose-prompt"],
        "use `--json`, which prints token ids, the stop reason and the speed",
    ),
    row(&["--input-file", "--prompts"], "use `--prompts-file`"),
    row(&["-o", "--output", "--output-dir", "--save-dir", "--outfile"], "use `--out`"),
    row(&["-o"], "use `--output`"),
    row(&["--output-format", "--format"], "use `--json`"),
    // The model.
    row_of(&["train"], &["-m", "--model"], TRAINED),
    row_of(&["train"], MODEL, TRAINED),
    row_of(&["convert"], &["-m", "--model"], CONVERTED),
    row_of(&["convert"], MODEL, CONVERTED),
    row_of(&["convert"], &["--outfile", "--out", "-o", "--output"], CONVERTED),
    row_of(&["convert"], &["--outtype"], "use `--dtype`"),
    row(MODEL, "use `--model` with a folder, a file or a name on the Hub"),
    row(&["--revision", "--branch"], "append the revision to the model's name: owner/name@revision"),
    row(&["--tokenizer-path", "--tokenizer-name"], "use `--tokenizer`"),
    row(&["--cache-dir", "--download-dir"], "set HF_HUB_CACHE; `gpt2 doctor` shows the folder"),
    row(&["--token", "--hf-token", "--use-auth-token"], "set HF_TOKEN"),
    row(&["--local-files-only"], "use `--offline`"),
    row(
        &["--override-kv"],
        "leave it out: the checkpoint's configuration is used, and `gpt2 inspect` shows it",
    ),
    row(&["--trust-remote-code"], "leave it out: checkpoint code never runs"),
    // Device, dtype and performance.
    row(GPU, "use `--device cuda`, which puts the whole model on one GPU"),
    row(&["--cpu", "--no-cuda", "--no-gpu"], "use `--device cpu`"),
    row(&["--device", "--cpu", "--no-cuda", "--no-gpu"], "leave it out: this command runs on the CPU"),
    row(
        &[
            "--torch-dtype",
            "--precision",
            "-q",
            "--quantize",
            "--quantization",
            "--load-in-8bit",
            "--load-in-4bit",
            "--fp16",
            "--bf16",
            "--half",
        ],
        "use `--dtype`",
    ),
    row(&["--kv-cache-dtype", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v"], "use `--kv-dtype`"),
    row(
        &["-t", "--num-threads", "--n-threads", "--num-thread", "--cpu-threads", "--threads-batch", "-tb"],
        "use `--threads`",
    ),
    row(
        &["-fa", "--flash-attn", "--attn-implementation", "--mlock", "--no-mmap", "--numa", "--low-vram"],
        "leave it out: the fastest kernels for this machine are chosen, and weights are mapped",
    ),
    row_of(
        &["generate"],
        &["-b", "-ub", "--n-batch", "--ubatch-size"],
        "leave it out: the program chooses the prefill chunks; `--batch-size` counts the prompts of `--prompts-file`",
    ),
    row(&["-b", "--batch", "--n-batch"], "use `--batch-size`"),
    // The server.
    row(
        &["-np", "--n-parallel", "--max-num-seqs", "--num-parallel", "--max-concurrent-requests"],
        "use `--parallel`",
    ),
    row(&["-np", "--n-parallel", "--parallel", "--max-num-seqs"], "use `--batch-size` with `--prompts-file`"),
    row(&["-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens"], "use `--prefill-chunk`"),
    row(&["--gpu-memory-utilization"], "use `--kv-tokens`, which limits the KV cache"),
    row(&["--listen", "--bind", "--ip", "--address"], "use `--host`"),
    row(&["--port", "--host"], "only the server listens: `gpt2 serve --port`"),
    row(
        &["--api-key", "--api-keys"],
        "use `--api-key-file` or set GPT2_API_KEY: other users can read a command line",
    ),
    row(&["--allowed-origins", "--cors"], "use `--cors-origin`"),
    row(&["--uds"], "use `--unix-socket`"),
    row(
        &["--ssl-keyfile", "--ssl-certfile", "--ssl-key-file", "--ssl-cert-file"],
        "put a proxy that speaks TLS in front of `gpt2 serve`",
    ),
    row(&["--chat-template-file", "--jinja"], "use `--chat-template`"),
    // Training.
    row(&["--learning-rate"], "use `--lr`"),
    row(&["--lr-scheduler-type"], "use `--schedule`"),
    row(
        &["--epochs", "--num-epochs", "--num-train-epochs"],
        "use `--steps`; a step reads `--batch-size` windows `--accumulate` times",
    ),
    row(&["--max-steps", "--max-iters", "--iters"], "use `--steps`"),
    row(&["--gradient-accumulation-steps"], "use `--accumulate`"),
    row(&["--gradient-checkpointing"], "use `--recompute`"),
    row(&["--per-device-train-batch-size", "--micro-batch-size"], "use `--batch-size`"),
    row(&["--train-file", "--train-data", "--dataset", "--dataset-name"], "use `--data`"),
    row(&["--warmup", "--num-warmup-steps", "--warmup-ratio"], "use `--warmup-steps`"),
    row(&["--max-grad-norm"], "use `--grad-clip`"),
    row(&["--lora-r", "--lora", "--rank"], "use `--lora-rank`"),
    row(&["--lora-scaled"], "use `--adapter DIR=WEIGHT`, with a folder in PEFT's format"),
    row(&["--lora-path", "--lora-modules", "--peft", "--peft-model", "--adapter-path"], "use `--adapter`"),
    row(&["--lora-base"], "use `--model` for the base model, and `--adapter` for the adapter"),
    row(&["--target-modules"], "use `--lora-targets`"),
    row(&["--validation-split", "--val-split"], "use `--held-out`"),
    row(&["--eval-steps", "--eval-interval"], "use `--eval-every`"),
    row(&["--save-steps", "--save-interval"], "use `--save-every`"),
    row(&["--resume-from-checkpoint"], "use `--resume`"),
    row_of(&["eval"], &["--tasks", "--task"], "pass the protocols as arguments; `--list` shows them"),
];

const OF_A_MODEL: &str = "use `gpt2 generate --model`, with the model and then the prompt in quotes";

/// Commands from other programs, with advice.
const COMMANDS: &[Row] = &[
    row(&["run"], OF_A_MODEL),
    row(&["chat"], "use `gpt2 generate --interactive`; GPT-2 continues text and was not trained to chat"),
    row(&["complete", "predict"], "use `gpt2 generate`"),
    row(&["pull", "download"], "`gpt2 generate --model` downloads a model on first use"),
    row(&["list", "ls", "env"], "`gpt2 doctor` shows the machine and the downloaded models"),
    row(&["rm", "remove", "delete"], "delete the model's folder in the cache, which `gpt2 doctor` shows"),
    row(&["ps", "stop"], "no model stays loaded: each command exits when done; Ctrl-C stops `gpt2 serve`"),
    row(&["show", "info"], "use `gpt2 inspect`"),
    row(
        &["quantize", "export", "create"],
        "use `gpt2 convert --dtype`; every command also quantizes on loading, such as `gpt2 generate --dtype`",
    ),
    row(&["perplexity", "ppl"], "use `gpt2 score` for a text, `gpt2 eval` for a benchmark"),
    row(&["start", "server", "api", "openai"], "use `gpt2 serve`"),
    row(&["finetune", "fine-tune", "sft"], "use `gpt2 train --init`"),
    row(&["embed", "embedding", "embeddings"], "`gpt2 cache` writes hidden states"),
    row(&["encode"], "use `gpt2 tokenize`"),
];

/// Returns advice for a name from another program that `command` does not know.
pub(crate) fn advice(name: &str, command: &Command) -> Option<&'static str> {
    rows_of(name).find(|row| row.fits(command)).map(|row| row.advice)
}

/// Returns advice for an unknown argument: an option from another program, or a word.
pub(crate) fn advice_on_argument(name: &str, command: &Command) -> Vec<String> {
    let of_name = advice(name, command).map(str::to_owned);
    let is_text = command.get_positionals().any(|positional| positional.get_id() == "text");
    match (name.starts_with('-'), of_name, command.find_subcommand("generate")) {
        (_, Some(advice), _) => vec![advice],
        (true, None, Some(_)) if name == "-v" => vec!["use `--version`".to_owned()],
        // Options without a command, as in llama.cpp's programs.
        (true, None, Some(generate)) if knows(generate, name) || contains(name) => {
            let advice = advice(name, generate).filter(|_| !knows(generate, name)).map(str::to_owned);
            let first = "name a command before its options: use `gpt2 generate` to continue a prompt";
            [Some(first.to_owned()), advice].into_iter().flatten().collect()
        }
        (true, None, None) if knows(command, name) => vec!["options come after the command".to_owned()],
        (false, ..) if is_text => vec!["put the text in quotes".to_owned()],
        (false, ..) if command.get_positionals().next().is_none() && has(command, "--model") => {
            vec!["use `--model` to name the model".to_owned()]
        }
        _ => Vec::new(),
    }
}

/// Returns advice for a word that is not a command: another program's command, a text or a model.
pub(crate) fn advice_on_command(name: &str, command: &Command) -> Vec<String> {
    if let Some(advice) = advice(name, command) {
        return vec![advice.to_owned()];
    }
    let is_program = command.find_subcommand("generate").is_some();
    let advice = if name.contains(char::is_whitespace) {
        "use `gpt2 generate` to continue a text"
    } else if name.contains(['.', '/', '\\']) {
        OF_A_MODEL
    } else {
        return Vec::new();
    };
    is_program.then(|| advice.to_owned()).into_iter().collect()
}

/// Returns advice for a value that an option, such as `--dtype <TYPE>`, does not accept.
pub(crate) fn advice_on_value(option: &str, value: &str, command: &Command) -> Option<String> {
    let option = option.split(' ').next().unwrap_or_default();
    if option == "--max-new-tokens" && value.starts_with('-') {
        let tip = "a number as large as the context, 1024 for GPT-2, continues until the context is full";
        return Some(tip.to_owned());
    }
    if option == "--seed" && value.starts_with('-') {
        return Some("`--seed $RANDOM` gives a different result each time".to_owned());
    }
    let names: Vec<&str> = match option {
        "--kv-dtype" => KvDType::all().map(KvDType::name).collect(),
        "--dtype" if command.get_name() == "convert" => WrittenDType::all().map(WrittenDType::name).collect(),
        "--dtype" | "--base-dtype" => WeightDType::all().map(WeightDType::name).collect(),
        _ => Vec::new(),
    };
    let letters =
        |name: &str| name.to_lowercase().replace("float", "f").replace("fp", "f").replace("int", "q");
    let value = letters(value);
    // `q8_0` matches `q8` and vice versa. `q4_k_m` is closer to `q4_k` than to `q4_0`.
    let kind = value.split('_').next().unwrap_or_default();
    let is_of_kind = |name: &&&str| kind.len() > 1 && name.starts_with(kind);
    let near = names.iter().find(|name| value.starts_with(**name)).or_else(|| names.iter().find(is_of_kind));
    near.map(|name| format!("did you mean {name}?"))
}

/// Whether another program uses the name, with or without advice for a given command.
pub(crate) fn contains(name: &str) -> bool {
    rows_of(name).next().is_some()
}

fn rows_of(name: &str) -> impl Iterator<Item = &'static Row> {
    let name = name.split('=').next().unwrap_or_default().replace('_', "-");
    let rows = if name.starts_with('-') { OPTIONS } else { COMMANDS };
    rows.iter().filter(move |row| row.names.contains(&name.as_str()))
}

impl Row {
    fn fits(&self, command: &Command) -> bool {
        let is_listed = self.commands.is_empty() || self.commands.contains(&command.get_name());
        is_listed && options_of(self.advice).all(|option| has(command, option))
    }
}

/// Options in the advice that belong to the current command.
fn options_of(sentence: &str) -> impl Iterator<Item = &str> {
    quoted(sentence).filter(|quoted| quoted.starts_with("--")).filter_map(|quoted| quoted.split(' ').next())
}

/// Pieces of text inside backquotes.
fn quoted(sentence: &str) -> impl Iterator<Item = &str> {
    sentence.split('`').skip(1).step_by(2)
}

fn has(command: &Command, option: &str) -> bool {
    let long = option.trim_start_matches("--");
    command.get_arguments().any(|known| known.get_long() == Some(long))
}

/// Whether the command has a long or short option with this name.
fn knows(command: &Command, name: &str) -> bool {
    let short = name.strip_prefix('-').and_then(|name| name.parse::<char>().ok());
    has(command, name) || command.get_arguments().any(|known| short.is_some() && known.get_short() == short)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::main_options;

    fn program() -> Command {
        let mut program = main_options::program();
        program.build();
        program
    }

    /// Words that select each command except `help`, as users type them.
    pub(crate) fn paths(command: &Command) -> Vec<Vec<String>> {
        let subcommands = command.get_subcommands().filter(|command| command.get_name() != "help");
        let mut found = Vec::new();
        for command in subcommands {
            let name = command.get_name().to_owned();
            let paths = paths(command);
            found.push(vec![name.clone()]);
            found.extend(paths.into_iter().map(|path| [vec![name.clone()], path].concat()));
        }
        found
    }

    fn commands(program: &Command) -> Vec<&Command> {
        let find =
            |path: Vec<String>| path.iter().try_fold(program, |command, name| command.find_subcommand(name));
        paths(program).into_iter().filter_map(find).collect()
    }

    /// All option names in the table.
    pub(crate) fn options() -> Vec<&'static str> {
        OPTIONS.iter().flat_map(|row| row.names).copied().collect()
    }

    #[test]
    fn advice_names_existing_commands_and_options() {
        let program = program();
        // Some features add options, and the rows assume a build with all features.
        let has_all_features = cfg!(all(feature = "serve", feature = "grammar"));
        for row in OPTIONS.iter().chain(COMMANDS) {
            for call in quoted(row.advice)
                .filter_map(|quoted| quoted.strip_prefix("gpt2 "))
                .filter(|_| has_all_features)
            {
                let mut words = call.split(' ');
                let command = words.next().and_then(|name| program.find_subcommand(name));
                let command = command.unwrap_or_else(|| panic!("`{call}` does not exist: {}", row.advice));
                assert!(words.all(|option| has(command, option)), "`{call}` does not exist: {}", row.advice);
            }
            for command in row.commands.iter().filter(|_| has_all_features) {
                let command =
                    program.find_subcommand(command).unwrap_or_else(|| panic!("no command {command}"));
                assert!(
                    row.fits(command),
                    "an option is missing in `{}`: {}",
                    command.get_name(),
                    row.advice
                );
            }
            assert!(
                quoted(row.advice).all(|quoted| quoted.starts_with("--") || quoted.starts_with("gpt2 ")),
                "{}",
                row.advice
            );
        }
    }

    /// Checks that every row is the advice for each of its names in at least one command.
    #[test]
    fn no_row_is_shadowed() {
        if cfg!(not(all(feature = "serve", feature = "grammar"))) {
            return;
        }
        let program = program();
        let commands = commands(&program);
        for row in OPTIONS {
            for name in row.names {
                let is_advised =
                    |command: &&&Command| !knows(command, name) && advice(name, command) == Some(row.advice);
                assert!(
                    commands.iter().any(|command| is_advised(&command)),
                    "`{name}` never gets: {}",
                    row.advice
                );
            }
        }
        for row in COMMANDS {
            for name in row.names {
                assert_eq!(
                    (program.find_subcommand(name).is_none(), advice(name, &program)),
                    (true, Some(row.advice)),
                    "{name}"
                );
            }
        }
    }
}
