//! `gpt2 eval`: benchmarks by protocols that have names, and two models side by side.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{HubOptions, Reporter, Spelling, WeightDType};
use candle_gpt2_evaluation::{EvaluationOptions, ModelFacts, Report, listing};
use clap::Args;

use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 eval --list
  gpt2 eval lambada:lm-eval --model gpt2 --data lambada_test.jsonl
  gpt2 eval lambada:lm-eval --model gpt2    # the published data, from the hub
  gpt2 eval wikitext:lm-eval wikitext:hf-512 --model gpt2 --data wiki.test.raw --json
  gpt2 eval piqa:lm-eval sciq:lm-eval --data piqa.jsonl --data sciq.jsonl
  gpt2 eval blimp:lm-eval --model gpt2 --data FOLDER    # its 67 files
  gpt2 eval hellaswag:lm-eval --data hellaswag_val.jsonl --items LOG.jsonl --resume
  gpt2 eval piqa:lm-eval --dtype q4 --data piqa.jsonl --against LOG.jsonl
  gpt2 eval kl --model gpt2 --dtype q8 --data book.txt    # q8 beside f32
  gpt2 eval kl --model DIR --base gpt2 --data book.txt

A name fixes which text is scored, in what pieces, and what the result is divided by. A published figure stands \
beside a result only where the model has its size; data that are not the published file are measured all the same, \
and the report says so. A wrong entry in the data ends the run with exit code 1: at once, or with --items after those before it.")]
pub(crate) struct EvalArguments {
    /// What to measure, see --list; several share one loaded model
    #[arg(value_name = "PROTOCOL", required_unless_present = "list", conflicts_with = "list")]
    pub(crate) protocols: Vec<String>,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// The data: a file, a folder of files, or owner/name[@revision]/path of a dataset of the hub; once for all protocols, or once for each in their order [default: the published data, from the hub]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Vec<PathBuf>,
    /// Only the first N items
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// Length of the windows in tokens, for wikitext:llama.cpp and kl [default: 512, or the context where that is shorter]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,
    /// Write the model's answer to each item to this file as soon as it is known, a JSON object a line; a kill loses only what is being read, about a thousand tokens or one item
    #[arg(long, value_name = "FILE")]
    pub(crate) items: Option<PathBuf>,
    /// Go on with the --items of a run that was interrupted
    #[arg(long, requires = "items")]
    pub(crate) resume: bool,
    /// Compare item by item with the --items of another run of the same data: which answers flipped, and the paired difference
    #[arg(long, value_name = "FILE")]
    pub(crate) against: Option<PathBuf>,
    /// For kl: the model to compare with, named like --model [default: the same model]
    #[arg(long, value_name = "DIR")]
    pub(crate) base: Option<PathBuf>,
    /// For kl: precision of the base's weights, as for --dtype [default: f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) base_dtype: Option<WeightDType>,
    /// Print one JSON object a line for each protocol: model, dtype, kv_dtype, device, protocol, protocol_source, dataset, metrics, against, cut, notes, tokens_read, tokens_scored, seconds, version; numbers that are not finite are the texts Infinity, -Infinity, NaN
    #[arg(long)]
    pub(crate) json: bool,
    /// Print every protocol with its source, its data and what others measured by it
    #[arg(long)]
    pub(crate) list: bool,
}

impl EvalArguments {
    /// What the arguments say, for the library.
    fn options(&self, hub: &HubOptions) -> EvaluationOptions {
        EvaluationOptions {
            protocols: self.protocols.clone(),
            data: self.data.clone(),
            limit: self.limit,
            context: self.context,
            items: self.items.clone(),
            resume: self.resume,
            against: self.against.clone(),
            base: self.base.clone(),
            base_dtype: self.base_dtype,
            hub: hub.clone(),
            spelling: Spelling::Flags,
        }
    }
}

pub(crate) fn run(arguments: &EvalArguments, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.list {
        list(arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let plan = arguments.options(hub).check()?;
    let options = arguments.model.options(hub);
    let opened = arguments.model.open(hub)?;
    let base_options = plan.base_of(&options);
    let base = base_options.as_ref().map(|base| base.open(&Terminal)).transpose()?;
    let facts = ModelFacts::of_opened(&options, &opened);
    let base_facts = base_options.as_ref().zip(base.as_ref());
    let base_facts = base_facts.map(|(options, opened)| ModelFacts::of_opened(options, opened));
    // Everything that the data can be refused for is known before any weights are read.
    let evaluation = plan.prepare(&facts, base_facts.as_ref(), &Terminal)?;
    evaluation.notes().iter().for_each(|note| Terminal.note(note));
    let model = opened.load(&Terminal)?;
    let base = base.map(|base| base.load(&Terminal)).transpose()?;
    for (index, report) in evaluation.run(&model, base.as_ref(), &Terminal).enumerate() {
        print(&report?, arguments.json, index == 0)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints all protocols, as JSON one a line.
fn list(is_json: bool) -> Result<()> {
    listing().iter().try_for_each(|listed| match is_json {
        true => output::write_json(listed),
        false => listed.to_string().lines().try_for_each(output::write_line),
    })
}

fn print(report: &Report, is_json: bool, is_first: bool) -> Result<()> {
    if is_json {
        return output::write_json(report);
    }
    if !is_first {
        output::write_line("")?;
    }
    report.to_string().lines().try_for_each(output::write_line)
}
