//! The arguments of every command, and nothing else.

use std::path::PathBuf;

use candle_core::DType;
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use gpt2_training::Schedule;
use gpt2_weights::WrittenDType;

use crate::built_in;
use crate::commands::train::{parse_dtype as parse_trained_dtype, parse_schedule};
use crate::device::{DeviceChoice, WeightType, parse_device, parse_weight_type};

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
    Generate(Box<GenerateArguments>),
    /// Say how probable a text is: log-probability of every token, loss, perplexity
    Score(ScoreArguments),
    /// Train a model from scratch, or go on with a checkpoint; on the CPU, whatever other devices there are
    Train(TrainArguments),
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
            Self::Train(_) | Self::Inspect(_) | Self::Convert(_) | Self::Verify(_) => return None,
        };
        model.threads.map(usize::from)
    }
}

/// Where the model is and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// Checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), a model of the hub (gpt2, owner/name, owner/name@revision), or the small one inside the program
    #[arg(long, value_name = "DIR", default_value = built_in::NAME)]
    pub(crate) model: PathBuf,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Device to run on: cpu, cuda or cuda:N (NVIDIA), metal (Apple), or auto: cuda where this program was built with it and a GPU answers, else cpu
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub(crate) device: DeviceChoice,
    /// Precision of the weights in memory: f32 or f16, on the CPU also q8, q6 or q4 (blocks of integers of as many bits; q4 holds embedding and head in q6), on GPUs also bf16 [default: the stored numbers, on the CPU in f16 or f32]
    #[arg(long, value_name = "TYPE", value_parser = parse_weight_type)]
    pub(crate) dtype: Option<WeightType>,
    /// Precision of cached keys and values: f32 or f16 [default: f32, with --dtype f16, q8, q6 or q4 f16; on GPUs that of the weights]
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: Option<DType>,
    /// On NVIDIA GPUs, round the inputs of f32 matrix products to TF32, which is faster and has 10 bits of fraction
    #[arg(long)]
    pub(crate) tf32: bool,
    /// Number of threads [default: as many as this process may use]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
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
  gpt2 generate --model DIR --temperature 0.8 --top-k 40 --seed 7 < prompt.txt
  gpt2 generate --model DIR --ids 464,3290 --max-new-tokens 20 --json
  gpt2 generate \"The dog\" --model DIR --num-beams 5 --num-return-sequences 3
  gpt2 generate \"Q: Why?\\nA:\" --model DIR --stop \"Q:\" --repetition-penalty 1.2
  gpt2 generate --model DIR --prompts-file prompts.txt --output texts.jsonl
  gpt2 generate --model DIR --interactive

What is not said here is taken from generation_config.json, where the checkpoint has one. Where that says nothing
either, the next token is drawn at random: at temperature 1 from the 50 most probable tokens. The same --seed gives
the same text on every machine, alone and in any batch.
An empty prompt starts from the configuration's bos_token_id. Text goes to standard output as it is made.")]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Print one JSON object: prompt_ids, ids (the new ones), text, stop_reason, tokens_per_s, time_to_first_token_s; with several texts `sequences` of ids, text, stop_reason and score
    #[arg(long)]
    pub(crate) json: bool,
    /// Read prompt after prompt from the terminal, with line editing and history; Ctrl-C stops the text, Ctrl-D ends
    #[arg(long, conflicts_with_all = ["json", "text", "ids", "prompt_file", "prompts_file"])]
    pub(crate) interactive: bool,

    /// Most tokens to generate; generation also ends at an end-of-text token, and where the context is full [default: 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) max_new_tokens: Option<usize>,
    /// No end-of-text token before N new tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) min_new_tokens: Option<usize>,
    /// Longest time of a text, looked at after each token
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) max_time: Option<f64>,
    /// Token that ends the text, in place of the checkpoint's; may be given several times
    #[arg(long, value_name = "ID", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) eos_token_id: Vec<u32>,
    /// End the text in front of TEXT, which is not printed; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "When to stop")]
    pub(crate) stop: Vec<String>,

    /// Always take the most probable token
    #[arg(long, help_heading = "Searching")]
    pub(crate) greedy: bool,
    /// Divide the logits by this: below 1 sharper, above 1 flatter, greater than 0 [default: 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) temperature: Option<f64>,
    /// Draw from the K most probable tokens only, at least 1 [default: 50]
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) top_k: Option<usize>,
    /// Draw from the smallest set of tokens whose probabilities add up to P, in (0, 1] [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) top_p: Option<f64>,
    /// Draw from tokens with at least the share P of the largest probability, from 0 to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) min_p: Option<f64>,
    /// Draw from the tokens closest to the expected information that add up to P, in (0, 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) typical_p: Option<f64>,
    /// Draw from tokens with at least probability P, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) epsilon_cutoff: Option<f64>,
    /// The same, lower where the distribution is flat, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) eta_cutoff: Option<f64>,
    /// Seed of the random draws [default: 0]
    #[arg(long, value_name = "SEED", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) seed: Option<u64>,
    /// Texts for each prompt [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) num_return_sequences: Option<usize>,

    /// Divide positive and multiply negative logits of all tokens so far by X, greater than 0
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) repetition_penalty: Option<f64>,
    /// Subtract X from the logits of tokens generated so far
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) presence_penalty: Option<f64>,
    /// Subtract X from a token's logit for each time it was generated
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) frequency_penalty: Option<f64>,
    /// No sequence of N tokens twice, the prompt included
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) no_repeat_ngram_size: Option<usize>,
    /// Never write TEXT, at the beginning of a text or behind a space; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Changing the logits")]
    pub(crate) bad_word: Vec<String>,
    /// Add X to the logit of token ID (-inf removes it); may be given several times
    #[arg(long, value_name = "ID=X", value_parser = parse_logit_bias, help_heading = "Changing the logits")]
    pub(crate) logit_bias: Vec<LogitBias>,
    /// Begin the text with token ID
    #[arg(long, value_name = "ID", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) forced_bos_token_id: Option<u32>,

    /// Search with N beams for the most probable text
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) num_beams: Option<usize>,
    /// Divide the beams into N groups that avoid each other's tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) num_beam_groups: Option<usize>,
    /// What a token of another group costs a beam
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) diversity_penalty: Option<f64>,
    /// Divide a beam's score by its length to the power X: above 0 favours long texts [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) length_penalty: Option<f64>,
    /// End with as many texts as beams (true), when no beam promises more (false), or when none ever can (never)
    #[arg(long, value_name = "WHEN", num_args = 0..=1, default_missing_value = "true", help_heading = "Searching")]
    pub(crate) early_stopping: Option<EarlyStoppingArgument>,
    /// Contrastive search among the --top-k most probable tokens, with weight X on being unlike the text so far
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) penalty_alpha: Option<f64>,

    /// Of a prompt longer than the context keep the last N tokens; without it such a prompt is refused
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts")]
    pub(crate) keep_last: Option<usize>,
    /// Also keep the first N tokens: of a long prompt, and when the window slides
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts")]
    pub(crate) keep_head: Option<usize>,
    /// Where the context is full, go on with the last half of it
    #[arg(long, help_heading = "Long texts")]
    pub(crate) slide: bool,

    /// Continue every prompt of a file: one a line, or JSONL of {"prompt": TEXT} or {"ids": [ID, …]} where it ends in .jsonl; prints a JSON object for each, in their order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "ids", "prompt_file", "json"], help_heading = "Many prompts")]
    pub(crate) prompts_file: Option<PathBuf>,
    /// Write the objects to this file, which appears when it is complete
    #[arg(long, value_name = "FILE", help_heading = "Many prompts")]
    pub(crate) output: Option<PathBuf>,
    /// Go on with the --output of a run that was interrupted
    #[arg(long, requires = "output", help_heading = "Many prompts")]
    pub(crate) resume: bool,
    /// Prompts that are continued at once [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Many prompts")]
    pub(crate) batch_size: Option<usize>,
}

/// When a beam search ends.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EarlyStoppingArgument {
    /// With as many texts as beams
    True,
    /// When no running beam beats the worst of them at its present length
    False,
    /// When no running beam can ever beat it
    Never,
}

/// A token and what is added to its logit.
#[derive(Debug, Clone)]
pub(crate) struct LogitBias {
    pub(crate) token: u32,
    pub(crate) bias: f64,
}

fn parse_logit_bias(text: &str) -> Result<LogitBias, String> {
    let (token, bias) =
        text.split_once('=').ok_or("expected a token id, = and a number, such as 464=-2.5")?;
    let token = token.trim().parse().map_err(|error| format!("`{token}` is no token id: {error}"))?;
    let bias = bias.trim().parse().map_err(|error| format!("`{bias}` is no number: {error}"))?;
    Ok(LogitBias { token, bias })
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 score \"The dog was found in a field.\" --model DIR
  gpt2 score --model DIR --prompt-file book.txt --stride 512 --json
  gpt2 score \"The dog was found in a\" --model DIR --top 5
  gpt2 score \"The sky is\" --model DIR --choice \" blue\" --choice \" green\"

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
    /// Also the N most probable tokens at each place
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        conflicts_with = "choice"
    )]
    pub(crate) top: usize,
    /// Score TEXT as a continuation of the prompt instead; give it for every choice
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["stride", "ids"])]
    pub(crate) choice: Vec<String>,
    /// Print one JSON object: ids, logprobs (null for the first), loss, perplexity, with --top also alternatives; with --choice: choices and best, each by sum, mean and per_character
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
    /// Texts: plain UTF-8 files, or .jsonl files with a `text` in each line
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
    /// Keep the inputs of the blocks only, and compute the blocks again for their gradients: the same result with less memory, in a third more time; not with adapters
    #[arg(long)]
    pub(crate) recompute: bool,
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
    /// Continue this text at every evaluation, and show it on standard error
    #[arg(long, value_name = "TEXT")]
    pub(crate) sample: Option<String>,
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
    #[arg(long, value_name = "X", default_value_t = 1e-3, requires = "against", allow_negative_numbers = true, value_parser = parse_tolerance)]
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
  gpt2 bench --model DIR --device cuda --dtype f16 --json

Prefill reads a prompt and computes the logits of its last position; decode generates 128 tokens behind 8, and 64 behind
896, always the most probable one; decode_batch generates 32 behind 8 in 8 and in 32 texts at once, and counts all tokens.")]
pub(crate) struct BenchArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Print one JSON object: device, dtype, kv_dtype, threads, load_s, peak_rss_mib, prefill, decode, decode_at_896, decode_batch
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(tolerance) if tolerance >= 0.0 && tolerance.is_finite() => Ok(tolerance),
        _ => Err("expected a number of at least 0".into()),
    }
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
