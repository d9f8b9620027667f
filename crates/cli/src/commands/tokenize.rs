//! `gpt2 tokenize`: prints the tokens of a text, or writes token files for training.
//!
//! Input files may be of any size.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_jobs::{TokenizeJob, TokenizeOptions, TokenizeReport};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::commands::train::InterruptedTerminal;
use crate::model_arguments::CommonArguments;
use crate::{interrupt, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 tokenize \"Good night\" --model gpt2
  gpt2 tokenize --json < prompt.txt
  gpt2 tokenize book.txt letters.jsonl --model gpt2 --out tokens
  gpt2 tokenize *.jsonl --tokenizer tokenizer.json --out tokens --format llm.c --held-out 0.001
  gpt2 tokenize … --resume    # the same command again, after it was stopped
  gpt2 train --data tokens --init gpt2 --out fine-tuned

Without --out, the tokens of the argument, or of standard input, are printed: id, text and bytes. The \
default model is then the built-in one.

--out gets train.bin and val.bin, which nanoGPT reads, or numbered shards with --shard-tokens and for \
llm.c, along with the tokenizer and tokens.json, which makes it possible to detect damaged files and a \
wrong vocabulary. A file gets its name once it is complete. The same command writes the same files, with any \
number of threads, interrupted or not.")]
pub(crate) struct TokenizeArguments {
    /// The text to tokenize, or with --out the files to encode: plain UTF-8, or .jsonl files with a `text`
    /// in each line; each file, or line, is a document and ends with the end-of-text token
    #[arg(value_name = "TEXT|FILE", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub(crate) data: Vec<PathBuf>,
    /// Checkpoint whose tokenizer is used: a folder, a weights file in any format that the program reads,
    /// or a model on the Hub
    #[arg(short, long, value_name = "CHECKPOINT", group = "vocabulary")]
    pub(crate) model: Option<PathBuf>,
    /// Tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them or with
    /// vocab.json and merges.txt [default: the model's]
    #[arg(long, value_name = "FILE", group = "vocabulary")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Folder to write; it must be new or empty, except with --resume
    #[arg(long, value_name = "DIR", requires_all = ["data", "vocabulary"])]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: TokenizeOptions,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object: tokens (index, id, text, bytes); with --out at the end: out, training_tokens,
    /// held_out_tokens, documents, shards, …
    #[arg(long)]
    pub(crate) json: bool,
}

/// Encodes files into the folder `out`.
pub(crate) fn run(arguments: &TokenizeArguments, out: &Path, hub: &HubOptions) -> Result<ExitCode> {
    let job = TokenizeJob {
        data: arguments.data.clone(),
        model: arguments.model.clone(),
        tokenizer: arguments.tokenizer.clone(),
        out: out.to_owned(),
        options: arguments.options.clone(),
        n_head: arguments.common.n_head,
        hub: hub.clone(),
    };
    interrupt::end_job()?;
    let report = job.run(&InterruptedTerminal)?;
    match arguments.json {
        true => output::write_json(&report)?,
        false => write(&report)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the report for a human reader.
fn write(report: &TokenizeReport) -> Result<()> {
    output::write_line(&format!(
        "{} training tokens, {} held out, from {} documents ({}), in {} files",
        output::grouped(report.training_tokens),
        output::grouped(report.held_out_tokens),
        output::grouped(report.documents),
        output::mebibytes(report.bytes),
        report.shards.len(),
    ))?;
    output::write_line(&format!("written to {}", report.out.display()))
}
