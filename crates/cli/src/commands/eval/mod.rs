//! `gpt2 eval`: benchmarks by protocols that have names, and two models side by side.

mod list;
mod task;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use gpt2::KvDType;
use gpt2_engine::{HubOptions, ModelOptions, Opened, WeightDType, device_name};
use gpt2_evaluation::{ItemLog, Report};

use crate::exit::UsageError;
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;
use task::{Asked, Base, Run};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 eval --list
  gpt2 eval lambada:lm-eval --model gpt2 --data lambada_test.jsonl
  gpt2 eval lambada:lm-eval --model gpt2              (the published data, from the hub)
  gpt2 eval wikitext:lm-eval wikitext:hf-512 --model gpt2 --data wiki.test.raw --json
  gpt2 eval piqa:lm-eval sciq:lm-eval --data piqa.jsonl --data sciq.jsonl
  gpt2 eval blimp:lm-eval --model gpt2 --data FOLDER  (its 67 files)
  gpt2 eval hellaswag:lm-eval --data hellaswag_val.jsonl --items LOG.jsonl --resume
  gpt2 eval piqa:lm-eval --dtype q4 --data piqa.jsonl --against LOG.jsonl
  gpt2 eval kl --model gpt2 --dtype q8 --data book.txt  (q8 beside f32)
  gpt2 eval kl --model DIR --base gpt2 --data book.txt

A name fixes which text is scored, in what pieces, and what the result is divided by. A published figure stands
beside a result only where the model has its size; data that are not the published file are measured all the same,
and told. An entry of the data that is wrong ends the run with 1: at once, or with --items after those before it.")]
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
    /// Write what the model said to each item to this file, a JSON object a line, as soon as it is known: a kill loses what is being read, about a thousand tokens or one item
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
    /// Checks what can be checked before anything is opened.
    fn check(&self, asked: &[Asked]) -> Result<(), UsageError> {
        let refuse = |message: String| Err(UsageError(message));
        let names = &self.protocols;
        if let Some((_, name)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name))
        {
            return refuse(format!("`{name}`: it is asked for twice"));
        }
        if self.context.is_some() && !asked.iter().any(Asked::takes_context) {
            return refuse(
                "--context: it is for `wikitext:llama.cpp` and `kl`; other protocols have their own".into(),
            );
        }
        if self.limit == Some(0) {
            return refuse("--limit: expected at least 1, found 0".into());
        }
        let (files, protocols) = (self.data.len(), asked.len());
        if files > 1 && files != protocols {
            return refuse(format!(
                "--data: expected it once for all protocols, or once for each of the {protocols}, found it {files} times"
            ));
        }
        let has_items = |asked: &Asked| !matches!(asked, Asked::Kl);
        if self.against.is_some() && !asked.iter().all(has_items) {
            return refuse("--against: it is for items, and `kl` has two models side by side already".into());
        }
        let compares = asked.iter().any(|asked| matches!(asked, Asked::Kl));
        if !compares && (self.base.is_some() || self.base_dtype.is_some()) {
            return refuse("--base and --base-dtype are for two models side by side; ask for `kl`".into());
        }
        Ok(())
    }

    /// The model that `kl` compares with.
    fn base(&self, hub: &HubOptions) -> ModelOptions {
        let dtype = Some(self.base_dtype.unwrap_or(WeightDType::F32));
        let same = ModelOptions { dtype, kv_dtype: None, ..self.model.options(hub) };
        match &self.base {
            Some(base) => ModelOptions { model: base.clone(), n_head: None, ..same },
            None => same,
        }
    }

    /// What the numbers depend on besides protocol and data, for readers of the log: all that must be the same where a run goes on.
    fn run_name(&self, opened: &Opened) -> String {
        let model = &self.model;
        let mut parts = vec![
            model.model.display().to_string(),
            opened.weight_type().to_owned(),
            format!("keys and values {}", model.kv_dtype.map_or("as the weights", KvDType::name)),
            device_name(opened.device()),
        ];
        parts.extend(model.tf32.then(|| "tf32".to_owned()));
        parts.extend(model.tokenizer.as_ref().map(|tokenizer| format!("tokenizer {}", tokenizer.display())));
        parts.extend(model.common.n_head.map(|n_head| format!("{n_head} heads")));
        parts.extend(self.context.map(|context| format!("context {context}")));
        parts.join(", ")
    }
}

pub(crate) fn run(arguments: &EvalArguments, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.list {
        list::print(arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let asked = arguments.protocols.iter().map(|name| Asked::named(name)).collect::<Result<Vec<_>, _>>()?;
    arguments.check(&asked)?;
    let opened = arguments.model.open(hub)?;
    let compares = asked.iter().any(|asked| matches!(asked, Asked::Kl));
    let base = compares.then(|| Base::open(&arguments.base(hub))).transpose()?;

    // Everything that the data can be refused for is known before any weights are read.
    let mut tasks = task::prepare(arguments, asked, hub, &opened, base.as_ref())?;
    let mut log = arguments.items.as_ref().map(|path| ItemLog::open(path, arguments.resume)).transpose()?;
    if let Some(log) = &mut log {
        tasks.iter_mut().try_for_each(|task| task.take_done(log))?;
        log.check_all_taken()?;
    }
    let name = arguments.model.model.display().to_string();
    let model = opened.load(&Terminal)?;
    let base = base.map(Base::load).transpose()?;
    let run = Run { name: &name, model: &model, base: base.as_ref() };
    let mut damage = None;
    for (index, task) in tasks.into_iter().enumerate() {
        match task.evaluate(&run, log.as_mut())? {
            Ok(report) => print(&report, arguments.json, index == 0)?,
            Err(error) => _ = damage.get_or_insert(error),
        }
    }
    damage.map_or(Ok(ExitCode::SUCCESS), |error| Err(error.into()))
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
