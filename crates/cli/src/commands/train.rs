//! `gpt2 train`: train a model from scratch or from a checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use clap::Args;
use gpt2::{Gpt2Config, ParameterCounts};
use gpt2_engine::{HubOptions, Reporter, Unit};
use gpt2_generation::{GenerationConfig, TextGenerator};
use gpt2_kernels::free_memory;
use gpt2_training::{
    Corpus, Entry, HeldOut, Hyperparameters, Lora, LoraConfig, Outcome, Parameters, Run, RunOptions,
    Schedule, Split, TokenFile, Tokens, Trainer, Windows, estimated_bytes, has_state,
};
use gpt2_weights::{
    Checkpoint, END_OF_TEXT, Tokenizer, WrittenDType, encode, load_tokenizer, train_tokenizer,
};
use serde::Serialize;

use crate::exit::UsageError;
use crate::model_arguments::CommonArguments;
use crate::output;
use crate::progress::{self, Terminal};

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
    /// Keep the inputs of the blocks only, and compute the blocks again for their gradients: the same result with less memory, in a third more time
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
    /// Train even where the memory that is free seems too small for it
    #[arg(long)]
    pub(crate) ignore_memory: bool,
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
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: WrittenDType,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
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

/// Largest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Shortest and longest warm-up that is chosen by itself: a twentieth of the steps between them.
const USUAL_WARMUP_STEPS: (u64, u64) = (1, 500);

/// What `--json` prints at the end.
#[derive(Serialize)]
struct Report<'a> {
    out: &'a Path,
    parameters: usize,
    training_tokens: usize,
    held_out_tokens: usize,
    steps: u64,
    stopped_early: bool,
    loss: Option<f64>,
    best_step: Option<u64>,
    held_out_loss: Option<f64>,
    held_out_loss_per_character: Option<f64>,
    elapsed_s: f64,
}

/// What a training starts with.
struct Start {
    config: Gpt2Config,
    tokenizer: Tokenizer,
    checkpoint: Option<Checkpoint>,
}

pub(crate) fn run(arguments: &TrainArguments, hub: &HubOptions) -> Result<ExitCode> {
    check_folder(arguments)?;
    let corpus = Corpus::open(&arguments.data, arguments.held_out)?;
    let start = start(arguments, &corpus, hub)?;
    let numbers = hyperparameters(arguments, &start.config);
    numbers.check(&start.config)?;
    if let Some(lora) = lora(arguments) {
        lora.check(&start.config)?;
    }
    if let Some(note) = start.config.end_token_note() {
        output::print_note(&note);
    }
    if !arguments.ignore_memory {
        check_memory(&start.config, &numbers, arguments.recompute)?;
    }
    fs::create_dir_all(&arguments.out).with_context(|| arguments.out.display().to_string())?;
    let files = TokenFiles::encode(&corpus, &start, &arguments.out)?;
    let (training, held_out) = (TokenFile::open(&files.training)?, files.open_held_out()?);
    let windows = Windows::new(&training, numbers.context, numbers.seed)?;
    let characters = corpus.characters(Split::HeldOut);
    let held_out_tokens = held_out.as_ref().map(|tokens| HeldOut::new(tokens, characters)).transpose()?;

    let parameters = match &start.checkpoint {
        Some(checkpoint) => {
            let bar = Terminal.start("loading", checkpoint.parameter_bytes(), Unit::Bytes);
            Parameters::from_checkpoint(checkpoint, &Device::Cpu, &|bytes| bar.advance(bytes))?
        }
        None => Parameters::initialize(&start.config, numbers.seed, &Device::Cpu)?,
    };
    let options = RunOptions {
        folder: arguments.out.clone(),
        eval_every: arguments.eval_every,
        save_every: arguments.save_every,
        patience: arguments.patience,
        dtype: arguments.dtype,
        data_fingerprint: training.fingerprint(),
    };
    let data = (windows, held_out_tokens);
    let (steps, seed) = (numbers.steps, numbers.seed);
    let trainer = match lora(arguments) {
        Some(config) => {
            let (lora, adapters) = Lora::new(&start.config, config, &parameters, seed)?;
            Trainer::with_adapters(&start.config, lora, adapters, numbers)?
        }
        None => Trainer::new(&start.config, parameters, numbers)?,
    };
    let trainer = trainer.recomputing(arguments.recompute);
    let mut run = Run::open(trainer, data, &start.tokenizer, options)?;

    let clock = Instant::now();
    let elapsed_s = || clock.elapsed().as_secs_f64();
    let bar = progress::steps(steps, run.trainer().steps_done());
    let mut held_out_loss = None;
    let outcome = run.train(&elapsed_s, &mut |entry: &Entry, trainer: &Trainer| {
        held_out_loss = entry.held_out_loss.or(held_out_loss);
        if let (Some(loss), Some(prompt)) = (entry.held_out_loss, &arguments.sample) {
            // A sample that fails is shown as such; the training goes on.
            let text = sample(trainer, &start.tokenizer, prompt).unwrap_or_else(|error| format!("{error:#}"));
            bar.suspend(|| output::print_note(&format!("step {}, held out {loss:.4}: {text}", entry.step)));
        }
        if let (Some(loss), Some(tokens_per_s)) = (entry.loss, entry.tokens_per_s) {
            let held_out = held_out_loss.map_or(String::new(), |loss| format!(", held out {loss:.4}"));
            bar.set_message(format!("loss {loss:.4}{held_out}, {tokens_per_s:.0} tokens/s"));
            bar.set_position(entry.step);
        }
    })?;
    bar.finish_and_clear();
    let counts = (training.len(), held_out.as_ref().map_or(0, Tokens::len));
    report(arguments, &start.config, counts, &outcome, elapsed_s())?;
    Ok(ExitCode::SUCCESS)
}

/// A folder that holds something is only used to resume.
fn check_folder(arguments: &TrainArguments) -> Result<()> {
    let out = &arguments.out;
    let name = out.display();
    if out.exists() && !out.is_dir() {
        return Err(UsageError(format!("--out {name}: it is no folder; choose another name")).into());
    }
    let is_empty = !out.exists() || fs::read_dir(out).with_context(|| name.to_string())?.next().is_none();
    if is_empty || arguments.resume {
        return Ok(());
    }
    let way_out = match has_state(out) {
        true => "add --resume to go on with the training in it, or choose another name",
        false => "choose another name",
    };
    Err(UsageError(format!("--out {name}: the folder is not empty; {way_out}")).into())
}

/// The configuration, the tokenizer and, with --init, the checkpoint.
fn start(arguments: &TrainArguments, corpus: &Corpus, hub: &HubOptions) -> Result<Start> {
    if let Some(path) = &arguments.start.init {
        let checkpoint = arguments.common.open_checkpoint(path, hub)?;
        checkpoint.check()?;
        let tokenizer = checkpoint.tokenizer(arguments.tokenizer.as_deref())?;
        let config = with_dropout(checkpoint.config().clone(), arguments.dropout);
        return Ok(Start { config, tokenizer, checkpoint: Some(checkpoint) });
    }
    let Some(path) = &arguments.start.config else {
        return Err(UsageError("give --init CHECKPOINT or --config FILE".into()).into());
    };
    arguments.common.check_without_checkpoint()?;
    let mut config = with_dropout(read_config(path)?, arguments.dropout);
    let tokenizer = match &arguments.tokenizer {
        Some(path) => load_tokenizer(path)?,
        None => {
            let tokenizer = train_tokenizer(corpus.documents(Split::Training), config.vocab_size)?;
            let found = tokenizer.get_vocab_size(true);
            if found < config.vocab_size {
                bail!(
                    "{}: `vocab_size` is {}, and the data gives a tokenizer of {found} tokens only; lower it to {found}, or give more text",
                    path.display(),
                    config.vocab_size
                );
            }
            tokenizer
        }
    };
    // The ids of the end of a text are the tokenizer's, whatever the file says.
    if let Some(end) = tokenizer.token_to_id(END_OF_TEXT) {
        config.bos_token_id = Some(end);
        config.eos_token_id = vec![end];
    }
    Ok(Start { config, tokenizer, checkpoint: None })
}

fn read_config(path: &Path) -> Result<Gpt2Config> {
    let name = || path.display().to_string();
    let metadata = fs::metadata(path).with_context(name)?;
    if !metadata.is_file() || metadata.len() > MAX_CONFIG_BYTES {
        bail!("{}: not a config.json", name());
    }
    let text = fs::read_to_string(path).with_context(name)?;
    Gpt2Config::from_json(&text).with_context(name)
}

fn with_dropout(config: Gpt2Config, rate: Option<f64>) -> Gpt2Config {
    match rate {
        Some(rate) => Gpt2Config { embd_pdrop: rate, attn_pdrop: rate, resid_pdrop: rate, ..config },
        None => config,
    }
}

/// The adapters, where `--lora-rank` asks for them.
fn lora(arguments: &TrainArguments) -> Option<LoraConfig> {
    arguments.lora_rank.map(|rank| LoraConfig {
        rank,
        alpha: arguments.lora_alpha.unwrap_or(2.0 * rank as f64),
        targets: arguments.lora_targets.clone(),
    })
}

fn hyperparameters(arguments: &TrainArguments, config: &Gpt2Config) -> Hyperparameters {
    let usual_rate = match (&arguments.start.init, arguments.lora_rank) {
        (None, _) => 1e-3,
        (Some(_), None) => 5e-5,
        (Some(_), Some(_)) => 3e-4,
    };
    let (shortest, longest) = USUAL_WARMUP_STEPS;
    let usual_warmup = (arguments.steps / 20).clamp(shortest, longest).min(arguments.steps);
    Hyperparameters {
        steps: arguments.steps,
        batch_size: arguments.batch_size,
        accumulate: arguments.accumulate,
        context: arguments.context.unwrap_or(config.n_positions),
        learning_rate: arguments.lr.unwrap_or(usual_rate),
        schedule: arguments.schedule,
        warmup_steps: arguments.warmup_steps.unwrap_or(usual_warmup),
        weight_decay: arguments.weight_decay,
        grad_clip: Some(arguments.grad_clip).filter(|clip| *clip != 0.0),
        seed: arguments.seed,
        ..Hyperparameters::default()
    }
}

/// Refuses a training that the machine's memory cannot hold.
fn check_memory(config: &Gpt2Config, numbers: &Hyperparameters, recomputes: bool) -> Result<()> {
    let needed = estimated_bytes(config, numbers, recomputes);
    let free = free_memory(&Device::Cpu).map(|free| free as u64);
    let Some(available) = free.filter(|free| needed > *free) else { return Ok(()) };
    let mebibytes = |bytes: u64| bytes >> 20;
    let message = format!(
        "training {} parameters on {} windows of {} tokens takes about {} MiB, and {} MiB are free; lower --batch-size (and raise --accumulate) or --context{}; --ignore-memory trains all the same",
        output::grouped(ParameterCounts::new(config).unique),
        numbers.batch_size,
        numbers.context,
        mebibytes(needed),
        mebibytes(available),
        if recomputes { "" } else { ", or add --recompute" },
    );
    Err(UsageError(message).into())
}

/// The data as token files in the folder of the run, removed when the training ends.
struct TokenFiles {
    training: PathBuf,
    held_out: Option<PathBuf>,
}

impl TokenFiles {
    fn encode(corpus: &Corpus, start: &Start, folder: &Path) -> Result<Self> {
        let has_held_out = corpus.bytes(Split::HeldOut) > 0;
        let files = Self {
            training: folder.join("training.tokens"),
            held_out: has_held_out.then(|| folder.join("held-out.tokens")),
        };
        let total = corpus.bytes(Split::Training) + corpus.bytes(Split::HeldOut);
        let bar = Terminal.start("encoding", total as u64, Unit::Bytes);
        let encode = |split, path: &Path| {
            corpus.encode(split, &start.tokenizer, &start.config, path, &|bytes| bar.advance(bytes))
        };
        encode(Split::Training, &files.training)?;
        if let Some(path) = &files.held_out {
            encode(Split::HeldOut, path)?;
        }
        Ok(files)
    }

    fn open_held_out(&self) -> Result<Option<TokenFile>> {
        Ok(self.held_out.as_deref().map(TokenFile::open).transpose()?)
    }
}

impl Drop for TokenFiles {
    fn drop(&mut self) {
        // They are made again from the data by the next run; nothing depends on their removal.
        for path in std::iter::once(&self.training).chain(&self.held_out) {
            let _ = fs::remove_file(path);
        }
    }
}

/// What the model makes of a prompt.
fn sample(trainer: &Trainer, tokenizer: &Tokenizer, prompt: &str) -> Result<String> {
    /// Enough to see what it has learnt, at little cost.
    const TOKENS: usize = 60;
    let model = trainer.model()?;
    let ids = encode(tokenizer, prompt)?;
    let config = GenerationConfig {
        max_new_tokens: TOKENS,
        do_sample: true,
        top_k: 50,
        eos_token_id: trainer.config().end_tokens(),
        ..GenerationConfig::default()
    };
    let mut text = prompt.to_owned();
    for piece in TextGenerator::new(&model, &ids, &config, tokenizer)? {
        text.push_str(&piece?);
    }
    Ok(text)
}

fn report(
    arguments: &TrainArguments,
    config: &Gpt2Config,
    (training_tokens, held_out_tokens): (usize, usize),
    outcome: &Outcome,
    elapsed_s: f64,
) -> Result<()> {
    let best = outcome.best.map(|(_, loss)| loss);
    let report = Report {
        out: &arguments.out,
        parameters: ParameterCounts::new(config).unique,
        training_tokens,
        held_out_tokens,
        steps: outcome.steps,
        stopped_early: outcome.is_stopped_early,
        loss: outcome.last_loss,
        best_step: outcome.best.map(|(step, _)| step),
        held_out_loss: best.map(|loss| loss.per_token),
        held_out_loss_per_character: best.map(|loss| loss.per_character),
        elapsed_s,
    };
    if arguments.json {
        return output::write_json(&report);
    }
    let ending = if outcome.is_stopped_early { ", where the held-out loss had stopped to fall" } else { "" };
    output::write_line(&format!(
        "{} parameters, {} training tokens, {} steps{ending}",
        output::grouped(report.parameters),
        output::grouped(training_tokens),
        outcome.steps
    ))?;
    if let Some((step, loss)) = outcome.best {
        output::write_line(&format!(
            "held-out loss {:.4} nats per token, {:.4} per character, at step {step}",
            loss.per_token, loss.per_character
        ))?;
    } else if let Some(loss) = outcome.last_loss {
        output::write_line(&format!("training loss {loss:.4} nats per token"))?;
    }
    output::write_line(&format!("written to {}", arguments.out.display()))
}

/// The schedule of this name.
fn parse_schedule(name: &str) -> Result<Schedule, String> {
    let names = Schedule::NAMES.map(|(name, _)| name).join(", ");
    let known = Schedule::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, schedule)| *schedule).ok_or_else(|| format!("expected one of {names}"))
}

/// The type of this name, of those that safetensors holds.
fn parse_dtype(name: &str) -> Result<WrittenDType, String> {
    let types = [WrittenDType::F32, WrittenDType::F16, WrittenDType::BF16];
    let known = types.into_iter().find(|dtype| dtype.name() == name);
    known.ok_or_else(|| "expected one of f32, f16, bf16".to_owned())
}
