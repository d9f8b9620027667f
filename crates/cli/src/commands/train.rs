//! `gpt2 train`: trains a model from scratch or from a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use candle_gpt2::printable;
use candle_gpt2_engine::{HubOptions, Progress, Reporter, Unit};
use candle_gpt2_jobs::{Start, TrainEvent, TrainJob, TrainOptions, TrainReport};
use candle_gpt2_training::{ClassificationReport, DictionaryMetrics, LabelReport, Task};
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
  gpt2 train --task dictionary --data stories.txt --init built-in --site blocks.3.hook_resid_post --latents 1536 --k 16 --out features
  gpt2 train --task dictionary --data activations --init gpt2 --site blocks.8.hook_resid_pre --kind batch-top-k --out features
  gpt2 train --task dictionary --data stories.txt --init built-in --site hook_resid_mid --kind cross-layer-transcoder --out clt
  gpt2 train … --resume    # the same command again, after it was stopped

--out becomes a Hugging Face folder with the weights of the lowest held-out loss, along with log.jsonl, \
loss.svg and the state that --resume continues from. The same command gives the same weights, interrupted or \
not; Ctrl-C saves the state of the last step.

The optimizer is AdamW with the betas 0.9 and 0.95; of a dictionary 0.9 and 0.999. --optimizer muon trains the matrices of the blocks \
with Muon at the same learning rate: fewer steps to the same loss, each a little slower.

--task classify learns the label of each text: a .tsv file with `label`, a tab and `text` in each line (or a first line \
that names the columns `text` and `label`), or a .jsonl file of objects with both. A language model gets a head for the \
labels of the data; a classifier keeps its own. The last rows of each label are held out to measure the \
accuracy, the F1 of each label and the confusion matrix (--json, confusion.svg). --task answer trains on \
the `completion` after the `prompt` (.jsonl or .tsv) and on the end-of-text token, not on the prompt. Rows \
are computed without padding and do not attend to each other; a row longer than the context loses its first \
tokens.

--task dictionary trains a sparse autoencoder or a transcoder of the hook point --site of --init, on texts, whose activations are \
computed on the fly, or on a folder of gpt2 cache --prompts-file. The first token of each text is left out. --out then gets \
sae_weights.safetensors and cfg.json, as SAELens reads them; a batch has --batch-size times --context tokens. A cross-layer \
transcoder gets config.yaml and two files per layer, as circuit-tracer and gpt2 look graph --transcoders read them.")]
pub(crate) struct TrainArguments {
    /// Texts: plain UTF-8 files, or .jsonl files with a `text` in each line; or one folder of token files,
    /// as gpt2 tokenize, nanoGPT and llm.c make them. Rows for the other tasks: .jsonl or .tsv, see below
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) start: TrainStart,
    /// Tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them or with
    /// vocab.json and merges.txt [default: the checkpoint's; with --config one is trained from the data]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Folder to write; it must be new or empty, except with --resume
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) options: TrainOptions,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object at the end: out, parameters, steps, loss, held_out_loss,
    /// held_out_loss_per_character, …
    #[arg(long)]
    pub(crate) json: bool,
}

/// Starting point of a training run; exactly one is required.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TrainStart {
    /// Checkpoint to train further: a folder, a weights file in any format that the program reads, or a
    /// model on the Hub
    #[arg(long, value_name = "CHECKPOINT")]
    pub(crate) init: Option<PathBuf>,
    /// A config.json that describes the model to train from scratch
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

impl TrainArguments {
    /// Builds the library's training job.
    fn job(&self, hub: &HubOptions) -> Result<TrainJob, UsageError> {
        let start = match (&self.start.init, &self.start.config) {
            (Some(checkpoint), _) => Start::Checkpoint(checkpoint.clone()),
            (None, Some(file)) => Start::ConfigFile(file.clone()),
            (None, None) => return Err(UsageError("pass --init CHECKPOINT or --config FILE".into())),
        };
        let options = TrainOptions { n_head: self.common.n_head, ..self.options.clone() };
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

/// Terminal on which Ctrl-C ends the job.
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
        false => write(&report, arguments.options.task)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the report for a human reader.
fn write(report: &TrainReport, task: Task) -> Result<()> {
    let ending = if report.stopped_early { ", stopped early: the held-out loss no longer falls" } else { "" };
    let rows =
        report.training_rows.map_or(String::new(), |rows| format!("{} rows with ", output::grouped(rows)));
    output::write_line(&format!(
        "{} parameters, {rows}{} training tokens, {} steps{ending}",
        output::grouped(report.parameters),
        output::grouped(report.training_tokens),
        report.steps
    ))?;
    let unit = task.loss_unit();
    if let (Some(step), Some(loss)) = (report.best_step, report.held_out_loss) {
        let per_character = report.held_out_loss_per_character;
        let per_character = per_character.map_or(String::new(), |loss| format!(" {loss:.4} per character,"));
        output::write_line(&format!("held-out loss {loss:.4} {unit},{per_character} at step {step}"))?;
    } else if let Some(loss) = report.loss {
        output::write_line(&format!("training loss {loss:.4} {unit}"))?;
    }
    if let Some(dictionary) = &report.dictionary {
        write_dictionary(dictionary)?;
    }
    if let Some(classification) = &report.classification {
        write_classification(classification)?;
    }
    output::write_line(&format!("written to {}", report.out.display()))
}

/// Prints the quality of a dictionary; `--json` includes the definition of each number.
fn write_dictionary(metrics: &DictionaryMetrics) -> Result<()> {
    let percent = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1}%", 100.0 * share));
    output::write_line(&format!(
        "L0 {:.1}, explained variance {:.4}, {} dead latents, on {} held-out tokens",
        metrics.l0,
        metrics.explained_variance,
        output::grouped(metrics.dead_latents),
        output::grouped(metrics.tokens),
    ))?;
    if !metrics.explained_variance_per_layer.is_empty() {
        let layers = metrics.explained_variance_per_layer.iter().map(|explained| format!(" {explained:.4}"));
        output::write_line(&format!("explained variance by layer:{}", layers.collect::<String>()))?;
    }
    output::write_line(&format!(
        "model loss {:.4} -> {:.4} nats per token with the reconstruction; recovered from zeros {}, from the mean {}",
        metrics.cross_entropy.model,
        metrics.cross_entropy.reconstructed,
        percent(metrics.recovered_from_zero),
        percent(metrics.recovered_from_mean),
    ))
}

/// Prints the results on held-out rows: a line per label, and the confusion matrix.
///
/// The matrix is omitted if it has too many columns for a terminal.
fn write_classification(report: &ClassificationReport) -> Result<()> {
    /// Maximum number of labels in the confusion matrix.
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
    output::write_line("confusion matrix (rows: label, columns: prediction):")?;
    line("label", names.clone())?;
    names
        .iter()
        .zip(confusion.counts())
        .try_for_each(|(name, counts)| line(name, counts.iter().map(u64::to_string).collect()))
}
