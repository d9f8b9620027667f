//! `gpt2 eval`: runs named benchmark protocols and compares two models.

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{HubOptions, Reporter};
use candle_gpt2_evaluation::{EvaluationOptions, ModelFacts, Report, listing};
use clap::Args;

use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;
use crate::worker;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 eval --list
  gpt2 eval lambada:lm-eval --model gpt2 --data lambada_test.jsonl
  gpt2 eval lambada:lm-eval --model gpt2    # the published data, from the Hub
  gpt2 eval wikitext:lm-eval wikitext:hf-512 --model gpt2 --data wiki.test.raw --json
  gpt2 eval piqa:lm-eval sciq:lm-eval --data piqa.jsonl --data sciq.jsonl
  gpt2 eval blimp:lm-eval --model gpt2 --data FOLDER    # its 67 files
  gpt2 eval hellaswag:lm-eval --data hellaswag_val.jsonl --items LOG.jsonl --resume
  gpt2 eval piqa:lm-eval --dtype q4 --data piqa.jsonl --against LOG.jsonl
  gpt2 eval piqa:lm-eval --data piqa.jsonl --num-fewshot 5 --fewshot-data piqa_train.jsonl
  gpt2 eval my_task.yaml --model gpt2    # a task of lm-evaluation-harness
  gpt2 eval kl --model gpt2 --dtype q8 --data book.txt    # q8 against f32
  gpt2 eval kl --model MODEL --base gpt2 --data book.txt

A protocol fixes which text is scored, how it is split, and how the result is normalized. Published figures \
are shown only for a model of the same size. Data other than the published file is accepted too, and the \
report says so. An invalid entry in the data ends the run with exit code 1: at once, or with --items after \
the entries before it.")]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    pub(crate) options: EvaluationOptions,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Print one JSON object per line for each protocol: model, dtype, kv_dtype, device, protocol,
    /// protocol_source, num_fewshot, dataset, metrics, against, cut, notes, tokens_read, tokens_scored,
    /// seconds, version; numbers that are not finite are the strings Infinity, -Infinity, NaN
    #[arg(long)]
    pub(crate) json: bool,
    /// Print every protocol with its source, its data and published figures
    #[arg(long)]
    pub(crate) list: bool,
}

pub(crate) fn run(arguments: &EvalArguments, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.list {
        list(arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let options =
        EvaluationOptions { hub: hub.clone(), worker: worker::program(), ..arguments.options.clone() };
    let plan = options.check()?;
    let options = arguments.model.options(hub).with_base_model(&Terminal)?;
    let opened = arguments.model.open_as(&options)?;
    let base_options = plan.base_of(&options);
    let base = base_options.as_ref().map(|base| base.open(&Terminal)).transpose()?;
    let facts = ModelFacts::of_opened(&options, &opened);
    let base_facts = base_options.as_ref().zip(base.as_ref());
    let base_facts = base_facts.map(|(options, opened)| ModelFacts::of_opened(options, opened));
    // Validate the data completely before reading any weights.
    let evaluation = plan.prepare(&facts, base_facts.as_ref(), &Terminal)?;
    evaluation.notes().iter().for_each(|note| Terminal.note(note));
    let model = opened.load(&Terminal)?;
    let base = base.map(|base| base.load(&Terminal)).transpose()?;
    for (index, report) in evaluation.run(&model, base.as_ref(), &Terminal).enumerate() {
        print(&report?, arguments.json, index == 0)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints all protocols; as JSON, one object per line.
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
