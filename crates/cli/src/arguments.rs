//! The arguments of every command, and nothing else.

use std::num::NonZero;
use std::path::PathBuf;

use candle_core::DType;
use clap::{Args, Parser, Subcommand};
use gpt2_weights::{WeightFormat, WrittenDType};

/// Generate text with GPT-2, score texts, and look into checkpoints.
#[derive(Debug, Parser)]
#[command(
    name = "gpt2",
    version,
    help_expected = true,
    after_help = "\
Exit codes: 0 success, 1 the job failed (a damaged file, say), 2 the call is wrong.
Run `gpt2 COMMAND --help` for examples."
)]
pub(crate) struct Arguments {
    /// Use only local files and the cache, never the network (also HF_HUB_OFFLINE=1)
    #[arg(long, global = true)]
    pub(crate) offline: bool,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt
    Generate(GenerateArguments),
    /// Say how probable a text is: log-probability of every token, loss, perplexity
    Score(ScoreArguments),
    /// Show a checkpoint's configuration, tensors, parameter counts and memory
    Inspect(InspectArguments),
    /// Write a checkpoint in another format: a Hugging Face folder, or a GGUF file for llama.cpp
    Convert(ConvertArguments),
    /// Check that a checkpoint holds every tensor with its shape and finite values
    Verify(VerifyArguments),
    /// Measure how fast a model loads, reads prompts and generates on this machine
    Bench(BenchArguments),
}

impl Command {
    /// The number of threads that the command asks for.
    pub(crate) fn threads(&self) -> Option<usize> {
        let model = match self {
            Self::Generate(arguments) => &arguments.model,
            Self::Score(arguments) => &arguments.model,
            Self::Bench(arguments) => &arguments.model,
            Self::Inspect(_) | Self::Convert(_) | Self::Verify(_) => return None,
        };
        model.threads.map(|threads| usize::from(threads.get()))
    }
}

/// Where the model is and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// Checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), or a model of the hub: gpt2, owner/name, owner/name@revision
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Device to run on: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: String,
    /// Precision of the weights in memory: f32, f16, q8 (8-bit blocks) or q4 (4-bit blocks) [default: as stored]
    #[arg(long, value_name = "TYPE", value_parser = parse_format)]
    pub(crate) dtype: Option<WeightFormat>,
    /// Number of threads [default: as many as this process may use]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZero<u16>>,
}

/// The tokens to work on.
#[derive(Debug, Args)]
pub(crate) struct InputArguments {
    /// Read the text from this file
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Token ids in place of text, separated by commas; no tokenizer is needed then
    #[arg(long, value_name = "ID,ID,…", value_parser = parse_ids, conflicts_with_all = ["text", "prompt_file"])]
    pub(crate) ids: Option<Ids>,
    /// The text; without it, --prompt-file and --ids, standard input is read
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,
}

/// A list of token ids in one argument.
#[derive(Debug, Clone)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

fn parse_ids(text: &str) -> Result<Ids, String> {
    let id = |part: &str| {
        part.trim().parse::<u32>().map_err(|error| format!("`{}` is no token id: {error}", part.trim()))
    };
    text.split(',').map(id).collect::<Result<_, _>>().map(Ids)
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 generate \"The dog\" --model gpt2 --greedy            (downloaded once, then from the cache)
  gpt2 generate \"The dog\" --model DIR --greedy
  gpt2 generate --model DIR --temperature 0.8 --top-k 40 --seed 7 < prompt.txt
  gpt2 generate --model DIR --ids 464,3290 --max-new-tokens 20 --json

Without --greedy the next token is drawn at random: at temperature 1 from the 50 most probable tokens, as
transformers does by default. The same --seed gives the same text on every machine.
An empty prompt starts from the configuration's bos_token_id. Text goes to standard output as it is made.")]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Most tokens to generate; generation also ends at an end-of-text token, and where the context is full
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true)]
    pub(crate) max_new_tokens: usize,
    /// Always take the most probable token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub(crate) greedy: bool,
    /// Divide the logits by this: below 1 sharper, above 1 flatter, greater than 0
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Draw from the K most probable tokens only, at least 1
    #[arg(long, value_name = "K", default_value_t = 50, allow_negative_numbers = true)]
    pub(crate) top_k: usize,
    /// Draw from the smallest set of tokens whose probabilities add up to P, in (0, 1]
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f64,
    /// Seed of the random draws
    #[arg(long, value_name = "SEED", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Print one JSON object: prompt_ids, ids (the new ones), text, stop_reason, tokens_per_s
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 score \"The dog was found in a field.\" --model DIR
  gpt2 score --model DIR --prompt-file book.txt --stride 512 --json

Logarithms are natural. A text longer than the context is scored in windows that start every --stride tokens; each
token counts once, in the first window that reaches it.")]
pub(crate) struct ScoreArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Distance between windows, in tokens [default: half of the context]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) stride: Option<usize>,
    /// Print one JSON object: ids, logprobs (null for the first), loss, perplexity
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 inspect --model DIR
  gpt2 inspect --preset gpt2-xl --ledger
  gpt2 inspect --model DIR --tensors
  gpt2 inspect --model DIR --diff OTHER
  gpt2 inspect --model DIR --json | jq .parameters")]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    pub(crate) subject: InspectSubject,
    /// Also minimum, maximum, mean and deviation of every tensor, and how many values are zero or not finite
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Only the parameter counts in circulation, each with its definition
    #[arg(long, conflicts_with_all = ["tensors", "diff"])]
    pub(crate) ledger: bool,
    /// Compare with another checkpoint, parameter by parameter, whatever the formats
    #[arg(long, value_name = "OTHER", conflicts_with = "tensors")]
    pub(crate) diff: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to inspect: one of both.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct InspectSubject {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// A published model, which needs no files: distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl
    #[arg(long, value_name = "NAME")]
    pub(crate) preset: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 verify --model DIR
  gpt2 verify --model DIR --json
  gpt2 verify --model converted.gguf --against DIR --tolerance 0.1

Checked are every tensor's presence, shape and values, a head that contradicts its tie, tokenizer and special tokens
against the vocabulary, and the logits of a fixed prompt with a cache against those without. Exit code 0 when the checkpoint is sound, 1 when it is not.")]
pub(crate) struct VerifyArguments {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Also compare the logits of a fixed prompt with those of another checkpoint
    #[arg(long, value_name = "OTHER")]
    pub(crate) against: Option<PathBuf>,
    /// Largest difference of logits that --against allows
    #[arg(long, value_name = "X", default_value_t = 1e-3, requires = "against")]
    pub(crate) tolerance: f64,
    /// Print one JSON object: sound, problems, notes, cache_difference, against_difference
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 convert ckpt.pt gpt2-hf
  gpt2 convert models/124M gpt2-hf --dtype f16
  gpt2 convert gpt2-hf gpt2.gguf --dtype q8_0

The result appears whole or not at all, and nothing that exists is overwritten.")]
pub(crate) struct ConvertArguments {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// What to write: a GGUF file where the name ends in .gguf, else a Hugging Face folder
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Type of the written weights: f32, f16, bf16, and for GGUF q8_0 and q4_0
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: WrittenDType,
    /// Tokenizer to write: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the input's]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Print one JSON object: output, format, dtype, bytes
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 bench --model DIR
  gpt2 bench --model DIR --dtype q8 --threads 2 --json

Prefill reads a prompt and computes the logits of its last position; decode generates 128 tokens behind 8, and 64 behind
896, always the most probable one.")]
pub(crate) struct BenchArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Type of the cached keys and values: f32 or f16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: DType,
    /// Print one JSON object: dtype, kv_dtype, threads, load_s, peak_rss_mib, prefill, decode, decode_at_896
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_format(name: &str) -> Result<WeightFormat, String> {
    let names = WeightFormat::NAMES.map(|(name, _)| name).join(", ");
    WeightFormat::from_name(name).ok_or_else(|| format!("expected one of {names}"))
}

fn parse_kv_dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        _ => Err("expected f32 or f16".to_owned()),
    }
}

fn parse_dtype(name: &str) -> Result<WrittenDType, String> {
    let names = WrittenDType::NAMES.map(|(name, _)| name).join(", ");
    let known = WrittenDType::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, dtype)| *dtype).ok_or_else(|| format!("expected one of {names}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn every_argument_has_a_help_text_and_none_conflicts() {
        super::Arguments::command().debug_assert();
    }
}
