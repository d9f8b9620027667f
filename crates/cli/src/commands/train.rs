//! `gpt2 train`: train a model from scratch or from a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use candle_gpt2_engine::terminal::printable;
use candle_gpt2_engine::{DeviceChoice, HubOptions, Progress, Reporter, Unit};
use candle_gpt2_jobs::{Start, TrainEvent, TrainJob, TrainOptions, TrainReport, written_dtype};
use candle_gpt2_training::{ClassWeights, ClassificationReport, ComputeDType, LabelReport, Schedule, Task};
use candle_gpt2_weights::WrittenDType;
use clap::Args;

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
  gpt2 train --task classify --data reviews.tsv --init gpt2 --out critic --train-blocks 1 --class-weights balanced
  gpt2 train --task answer --data questions.jsonl --init gpt2 --out clerk --lora-rank 8
  gpt2 train … --resume    # the same call again, after it was stopped

--out becomes a Hugging Face folder with the weights of the best held-out loss; beside them stand log.jsonl, loss.svg \
and the state that --resume goes on from. The same call gives the same weights, interrupted or not; Ctrl-C saves the state \
of the last step.

The optimizer is AdamW with the betas 0.9 and 0.95.

--task classify learns the label of each text: a .tsv file with `label`, a tab and `text` in each line (or a first line \
that names the columns `text` and `label`), or a .jsonl file of objects with both. A language model gets a head for the \
labels of the data, a classifier keeps its own. The last rows of each label are held out, and tell accuracy, F1 of each \
label and which was taken for which (--json, confusion.svg). --task answer learns the `completion` after the `prompt` \
(.jsonl, or .tsv), the end of the text after it, and nothing else. Rows are computed without padding, and none \
sees another; a row that is longer than the context loses its first tokens.")]
pub(crate) struct TrainArguments {
    /// What is taught: text, to go on with texts; classify, the labels of texts; answer, completions of prompts
    #[arg(long, value_name = "TASK", default_value = "text")]
    pub(crate) task: Task,
    /// Texts: plain UTF-8 files, or .jsonl files with a `text` in each line; or one folder of token files, as gpt2 tokenize, nanoGPT and llm.c make them. Rows for the other tasks: .jsonl or .tsv, see below
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) start: TrainStart,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the checkpoint's; with --config one is trained from the data]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Folder to write; it must be new or empty, except with --resume
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Go on with the training in --out, where it was stopped; the other options must be the same
    #[arg(long)]
    pub(crate) resume: bool,
    /// Steps of the optimizer
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().steps, allow_negative_numbers = true)]
    pub(crate) steps: u64,
    /// Windows of text, or rows, in one batch
    #[arg(long, value_name = "B", default_value_t = TrainOptions::default().batch_size, allow_negative_numbers = true)]
    pub(crate) batch_size: usize,
    /// Batches whose gradients are averaged into one step
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().accumulate, allow_negative_numbers = true)]
    pub(crate) accumulate: usize,
    /// Tokens in a window, or of the longest row [default: the model's context]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,
    /// Keep only the inputs of the blocks, and compute the blocks again for their gradients: the same result with less memory, in a third more time
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Train the last N blocks alone, with the final norm and the head; a head that is the token embedding stays as it is
    #[arg(
        long,
        value_name = "N",
        requires = "init",
        conflicts_with = "lora_rank",
        allow_negative_numbers = true
    )]
    pub(crate) train_blocks: Option<usize>,
    /// What the rows of each label count in the loss, for --task classify: balanced, or as ham=1,spam=6.5 [default: each row once]
    #[arg(long, value_name = "WEIGHTS")]
    pub(crate) class_weights: Option<ClassWeights>,
    /// Train low-rank adapters of this rank and leave the weights as they are, except a classifier's head; the result has them merged into its weights, and its folder adapter holds them alone in PEFT's format
    #[arg(long, value_name = "R", requires = "init", allow_negative_numbers = true)]
    pub(crate) lora_rank: Option<usize>,
    /// Each adapter is multiplied by ALPHA / R [default: twice the rank]
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
    /// Share of the data, at the end of each file or of each label's rows, that is not trained on and tells when to stop; 0 for none
    #[arg(long, value_name = "P", default_value_t = TrainOptions::default().held_out, allow_negative_numbers = true)]
    pub(crate) held_out: f64,
    /// Steps between evaluations on the held-out data
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
    #[arg(short, long, value_name = "SEED", default_value_t = TrainOptions::default().seed, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Type of the written weights: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = written_dtype)]
    pub(crate) dtype: WrittenDType,
    /// Device to compute on: cpu, cuda or cuda:N (NVIDIA), metal (Apple), or auto: cuda where this program was built with it and a GPU answers, else cpu
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Type to compute in: f32, or bf16, which takes less memory and is faster on GPUs; weights, gradients and the optimizer stay in f32
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub(crate) compute_dtype: ComputeDType,
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
    /// Checkpoint to train further: a folder, a weights file in any format that the program reads, or a model of the hub
    #[arg(long, value_name = "CHECKPOINT")]
    pub(crate) init: Option<PathBuf>,
    /// A config.json that says which model to make from scratch
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
            task: self.task,
            resume: self.resume,
            steps: self.steps,
            batch_size: self.batch_size,
            accumulate: self.accumulate,
            context: self.context,
            recompute: self.recompute,
            train_blocks: self.train_blocks,
            class_weights: self.class_weights.clone(),
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
            device: self.device,
            compute_dtype: self.compute_dtype,
            n_head: self.common.n_head,
        };
        Ok(TrainJob {
            data: self.data.clone(),
            start,
            tokenizer: self.tokenizer.clone(),
            out: self.out.clone(),
            options,
            hub: hub.clone(),
        })
    }
}

/// The terminal, at which Ctrl-C ends the job.
pub(super) struct InterruptedTerminal;

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
        false => write(&report, arguments.task)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the report for a reader.
fn write(report: &TrainReport, task: Task) -> Result<()> {
    let ending = if report.stopped_early { ", where the held-out loss had stopped to fall" } else { "" };
    let rows =
        report.training_rows.map_or(String::new(), |rows| format!("{} rows of ", output::grouped(rows)));
    output::write_line(&format!(
        "{} parameters, {rows}{} training tokens, {} steps{ending}",
        output::grouped(report.parameters),
        output::grouped(report.training_tokens),
        report.steps
    ))?;
    let unit = task.predicted();
    if let (Some(step), Some(loss)) = (report.best_step, report.held_out_loss) {
        let per_character = report.held_out_loss_per_character;
        let per_character = per_character.map_or(String::new(), |loss| format!(" {loss:.4} per character,"));
        output::write_line(&format!(
            "held-out loss {loss:.4} nats per {unit},{per_character} at step {step}"
        ))?;
    } else if let Some(loss) = report.loss {
        output::write_line(&format!("training loss {loss:.4} nats per {unit}"))?;
    }
    if let Some(classification) = &report.classification {
        write_classification(classification)?;
    }
    output::write_line(&format!("written to {}", report.out.display()))
}

/// Writes what a classifier says of held-out rows: a line for each label, and the table of confusion where a terminal has room.
fn write_classification(report: &ClassificationReport) -> Result<()> {
    /// Most labels in a table.
    const COLUMNS: usize = 12;
    let ClassificationReport { accuracy, macro_f1, labels, confusion } = report;
    let names: Vec<String> = labels.iter().map(|label| printable(&label.label)).collect();
    let width = names.iter().map(|name| name.chars().count()).fold("label".len(), usize::max);
    output::write_line(&format!("accuracy {accuracy:.4}, macro F1 {macro_f1:.4}"))?;
    output::write_line(&format!("{:width$}  {:>6}  precision  recall      F1", "label", "rows"))?;
    for (name, label) in names.iter().zip(labels) {
        let LabelReport { rows, precision, recall, f1, .. } = label;
        output::write_line(&format!("{name:width$}  {rows:>6}  {precision:>9.4}  {recall:>6.4}  {f1:>6.4}"))?;
    }
    if names.len() > COLUMNS {
        return Ok(());
    }
    let column = width.max(6);
    let line = |name: &str, cells: Vec<String>| {
        let cells: String = cells.into_iter().map(|cell| format!("  {cell:>column$}")).collect();
        output::write_line(&format!("{name:width$}{cells}"))
    };
    output::write_line("rows of each label by what was said of them:")?;
    line("label", names.clone())?;
    names
        .iter()
        .zip(confusion.counts())
        .try_for_each(|(name, counts)| line(name, counts.iter().map(u64::to_string).collect()))
}
