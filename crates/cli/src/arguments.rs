//! The arguments of every command, and nothing else.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use gpt2_training::Schedule;
use gpt2_weights::WrittenDType;

use crate::commands::train::{parse_dtype as parse_trained_dtype, parse_schedule};

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
    /// Train a model from scratch, or go on with a checkpoint
    Train(TrainArguments),
    /// Show a checkpoint's configuration, tensors, parameter counts and memory
    Inspect(InspectArguments),
    /// Write a checkpoint in another format: a Hugging Face folder, or a GGUF file for llama.cpp
    Convert(ConvertArguments),
    /// Check that a checkpoint holds every tensor with its shape and finite values
    Verify(VerifyArguments),
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
  gpt2 train --data book.txt --config config.json --out my-model --steps 2000 --batch-size 8
  gpt2 train --data book.txt --init gpt2 --out fine-tuned --steps 200 --batch-size 2 --context 256
  gpt2 train --data book.txt --init gpt2 --out adapted --steps 200 --lora-rank 8 --lora-targets c_attn,c_fc
  gpt2 train … --resume                                      (the same call again, after it was stopped)

--out becomes a Hugging Face folder with the weights of the best held-out loss; beside them stand log.jsonl, loss.svg
and the state that --resume goes on from. The same call gives the same weights, interrupted or not.")]
pub(crate) struct TrainArguments {
    /// Texts: plain UTF-8 files, or .jsonl files with a \"text\" in each line
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) start: TrainStart,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the checkpoint's; with --config one is trained from the data]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Folder to write; it must be new or empty, but with --resume
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Go on with the training in --out, where it was stopped; the other options must be the same
    #[arg(long)]
    pub(crate) resume: bool,
    /// Steps of the optimizer
    #[arg(long, value_name = "N", default_value_t = 1000, allow_negative_numbers = true)]
    pub(crate) steps: u64,
    /// Windows of text in one batch
    #[arg(long, value_name = "B", default_value_t = 8, allow_negative_numbers = true)]
    pub(crate) batch_size: usize,
    /// Batches whose gradients are averaged into one step
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) accumulate: usize,
    /// Tokens in a window [default: the model's context]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,
    /// Train low-rank adapters of this rank and leave the weights as they are; they are written merged, and by themselves to the folder adapter in PEFT's format
    #[arg(long, value_name = "R", requires = "init", allow_negative_numbers = true)]
    pub(crate) lora_rank: Option<usize>,
    /// An adapter counts ALPHA / R times [default: twice the rank]
    #[arg(long, value_name = "ALPHA", requires = "lora_rank", allow_negative_numbers = true)]
    pub(crate) lora_alpha: Option<f64>,
    /// Linear layers with adapters: some of c_attn, c_proj, c_fc
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "c_attn",
        requires = "lora_rank"
    )]
    pub(crate) lora_targets: Vec<String>,
    /// Highest learning rate [default: 0.001 with --config, 0.00005 with --init, 0.0003 for adapters]
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    pub(crate) lr: Option<f64>,
    /// How the learning rate falls to a tenth of its highest value: cosine or linear; or constant
    #[arg(long, value_name = "NAME", default_value = "cosine", value_parser = parse_schedule)]
    pub(crate) schedule: Schedule,
    /// Steps over which the learning rate rises [default: a twentieth of --steps, at most 500]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) warmup_steps: Option<u64>,
    /// Weight decay of matrices; biases and norms do not decay
    #[arg(long, value_name = "X", default_value_t = 0.1, allow_negative_numbers = true)]
    pub(crate) weight_decay: f64,
    /// Largest norm of the gradient; 0 does not clip
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) grad_clip: f64,
    /// Dropout rate, in place of the configuration's three
    #[arg(long, value_name = "P", value_parser = parse_rate, allow_negative_numbers = true)]
    pub(crate) dropout: Option<f64>,
    /// Share of the data, at the end of each file, that is not trained on and tells when to stop; 0 for none
    #[arg(long, value_name = "P", default_value_t = 0.1, allow_negative_numbers = true)]
    pub(crate) held_out: f64,
    /// Steps between evaluations on the held-out text
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true)]
    pub(crate) eval_every: u64,
    /// Steps between saved states
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true)]
    pub(crate) save_every: u64,
    /// End after this many evaluations without a lower held-out loss [default: never]
    #[arg(long, value_name = "N")]
    pub(crate) patience: Option<u64>,
    /// Seed of the initial weights, the order of the data, and dropout
    #[arg(long, value_name = "SEED", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Type of the written weights: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_trained_dtype)]
    pub(crate) dtype: WrittenDType,
    /// Print one JSON object at the end: out, parameters, steps, loss, held_out_loss, held_out_loss_per_character, …
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a training starts from: one of both.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TrainStart {
    /// Checkpoint to go on with: folder, weights file of any format that is read, or a model of the hub
    #[arg(long, value_name = "CHECKPOINT")]
    pub(crate) init: Option<PathBuf>,
    /// A config.json whose model is made anew
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| (0.0..1.0).contains(rate));
    rate.ok_or_else(|| "expected a rate from 0 to below 1".to_owned())
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
