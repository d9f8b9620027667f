//! `gpt2 train`: train a model from scratch or from a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use gpt2_engine::{HubOptions, Progress, Reporter, Spelling, Unit};
use gpt2_training::{Schedule, Start, TrainEvent, TrainJob, TrainOptions, TrainReport, written_dtype};
use gpt2_weights::WrittenDType;

use crate::exit::UsageError;
use crate::model_arguments::CommonArguments;
use crate::progress::{self, Terminal};
use crate::{interrupt, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 train --data book.txt --config config.json --out my-model --steps 2000 --batch-size 8
  gpt2 train --data book.txt --init gpt2 --out fine-tuned --steps 200 --batch-size 2 --context 256
  gpt2 train --data book.txt --init gpt2 --out adapted --steps 200 --lora-rank 8 --lora-targets c_attn,c_fc
  gpt2 train … --resume                                      (the same call again, after it was stopped)

--out becomes a Hugging Face folder with the weights of the best held-out loss; beside them stand log.jsonl, loss.svg
and the state that --resume goes on from. The same call gives the same weights, interrupted or not; Ctrl-C saves the state
of the last step.")]
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
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().steps, allow_negative_numbers = true)]
    pub(crate) steps: u64,
    /// Windows of text in one batch
    #[arg(long, value_name = "B", default_value_t = TrainOptions::default().batch_size, allow_negative_numbers = true)]
    pub(crate) batch_size: usize,
    /// Batches whose gradients are averaged into one step
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().accumulate, allow_negative_numbers = true)]
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
    #[arg(long, value_name = "NAME", default_value = "cosine")]
    pub(crate) schedule: Schedule,
    /// Steps over which the learning rate rises [default: a twentieth of --steps, at most 500]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) warmup_steps: Option<u64>,
    /// Weight decay of matrices; biases and norms do not decay
    #[arg(long, value_name = "X", default_value_t = TrainOptions::default().weight_decay, allow_negative_numbers = true)]
    pub(crate) weight_decay: f64,
    /// Largest norm of the gradient; 0 does not clip
    #[arg(long, value_name = "X", default_value_t = TrainOptions::default().grad_clip, allow_negative_numbers = true)]
    pub(crate) grad_clip: f64,
    /// Dropout rate, in place of the configuration's three
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) dropout: Option<f64>,
    /// Share of the data, at the end of each file, that is not trained on and tells when to stop; 0 for none
    #[arg(long, value_name = "P", default_value_t = TrainOptions::default().held_out, allow_negative_numbers = true)]
    pub(crate) held_out: f64,
    /// Steps between evaluations on the held-out text
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().eval_every, allow_negative_numbers = true)]
    pub(crate) eval_every: u64,
    /// Steps between saved states
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().save_every, allow_negative_numbers = true)]
    pub(crate) save_every: u64,
    /// Continue this text at every evaluation, and show it on standard error
    #[arg(long, value_name = "TEXT")]
    pub(crate) sample: Option<String>,
    /// End after this many evaluations without a lower held-out loss [default: never]
    #[arg(long, value_name = "N")]
    pub(crate) patience: Option<u64>,
    /// Seed of the initial weights, the order of the data, and dropout
    #[arg(long, value_name = "SEED", default_value_t = TrainOptions::default().seed, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Type of the written weights: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = written_dtype)]
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

impl TrainArguments {
    /// What the arguments say, for the library.
    fn job(&self, hub: &HubOptions) -> Result<TrainJob, UsageError> {
        let start = match (&self.start.init, &self.start.config) {
            (Some(checkpoint), _) => Start::Checkpoint(checkpoint.clone()),
            (None, Some(file)) => Start::ConfigFile(file.clone()),
            (None, None) => return Err(UsageError("give --init CHECKPOINT or --config FILE".into())),
        };
        let options = TrainOptions {
            resume: self.resume,
            steps: self.steps,
            batch_size: self.batch_size,
            accumulate: self.accumulate,
            context: self.context,
            recompute: self.recompute,
            lora_rank: self.lora_rank,
            lora_alpha: self.lora_alpha,
            lora_targets: self.lora_rank.map(|_| self.lora_targets.clone()),
            ignore_memory: self.ignore_memory,
            lr: self.lr,
            schedule: self.schedule,
            warmup_steps: self.warmup_steps,
            weight_decay: self.weight_decay,
            grad_clip: self.grad_clip,
            dropout: self.dropout,
            held_out: self.held_out,
            eval_every: self.eval_every,
            save_every: self.save_every,
            sample: self.sample.clone(),
            patience: self.patience,
            seed: self.seed,
            dtype: self.dtype,
            n_head: self.common.n_head,
        };
        Ok(TrainJob {
            data: self.data.clone(),
            start,
            tokenizer: self.tokenizer.clone(),
            out: self.out.clone(),
            options,
            hub: hub.clone(),
            spelling: Spelling::Flags,
        })
    }
}

/// The terminal, at which Ctrl-C ends the training.
struct InterruptedTerminal;

impl Reporter for InterruptedTerminal {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Terminal.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        Terminal.note(note);
    }

    fn is_interrupted(&self) -> bool {
        interrupt::is_requested()
    }
}

pub(crate) fn run(arguments: &TrainArguments, hub: &HubOptions) -> Result<ExitCode> {
    let job = arguments.job(hub)?;
    let (mut bar, mut held_out_loss) = (None, None);
    let reporter: Arc<dyn Reporter> = Arc::new(InterruptedTerminal);
    interrupt::end_job()?;
    let report = job.run(&reporter, &mut |event| match event {
        TrainEvent::Start { steps, steps_done } => bar = Some(progress::steps(steps, steps_done)),
        TrainEvent::Entry(entry) => {
            held_out_loss = entry.held_out_loss.or(held_out_loss);
            if let (Some(bar), Some(loss), Some(tokens_per_s)) = (&bar, entry.loss, entry.tokens_per_s) {
                let held_out = held_out_loss.map_or(String::new(), |loss| format!(", held out {loss:.4}"));
                bar.set_message(format!("loss {loss:.4}{held_out}, {tokens_per_s:.0} tokens/s"));
                bar.set_position(entry.step);
            }
        }
        TrainEvent::Sample { step, held_out_loss, text } => {
            let print = || output::print_note(&format!("step {step}, held out {held_out_loss:.4}: {text}"));
            match &bar {
                Some(bar) => bar.suspend(print),
                None => print(),
            }
        }
        _ => {}
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let report = report?;
    match arguments.json {
        true => output::write_json(&report)?,
        false => write(&report)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the report for a reader.
fn write(report: &TrainReport) -> Result<()> {
    let ending = if report.stopped_early { ", where the held-out loss had stopped to fall" } else { "" };
    output::write_line(&format!(
        "{} parameters, {} training tokens, {} steps{ending}",
        output::grouped(report.parameters),
        output::grouped(report.training_tokens),
        report.steps
    ))?;
    if let (Some(step), Some(loss), Some(per_character)) =
        (report.best_step, report.held_out_loss, report.held_out_loss_per_character)
    {
        output::write_line(&format!(
            "held-out loss {loss:.4} nats per token, {per_character:.4} per character, at step {step}"
        ))?;
    } else if let Some(loss) = report.loss {
        output::write_line(&format!("training loss {loss:.4} nats per token"))?;
    }
    output::write_line(&format!("written to {}", report.out.display()))
}
