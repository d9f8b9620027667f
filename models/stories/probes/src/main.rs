//! `story-probes`: what a checkpoint that learned from the stories can do, as figures with their goals.
#![expect(clippy::print_stdout, reason = "a program's results")]

mod circuits;
mod probes;
mod samples;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use serde_json::{Value, json};
use story_generator::Figure;

/// Prints what a checkpoint can do, and which of its heads do it, as figures with their goals
#[derive(Parser)]
#[command(after_help = "Examples:
  story-probes model --corpus corpus
  story-probes model --corpus corpus --prompts 50 --samples 20 --json    # quick, for every checkpoint")]
struct Arguments {
    /// Checkpoint folder
    model: PathBuf,
    /// Folder that `story-generator corpus` wrote
    #[arg(long, value_name = "DIR")]
    corpus: PathBuf,
    /// Prompts of each kind
    #[arg(long, value_name = "N", default_value_t = 300)]
    prompts: usize,
    /// Rows of random tokens
    #[arg(long, value_name = "N", default_value_t = 50)]
    rows: usize,
    /// Samples that are checked for faults
    #[arg(long, value_name = "N", default_value_t = 100)]
    samples: usize,
    /// Held-out documents whose loss is measured
    #[arg(long, value_name = "N", default_value_t = 400)]
    documents: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A held-out document.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Line {
    pub(crate) text: Option<String>,
    ids: Option<Vec<u32>>,
    nats: f64,
    labels: Vec<String>,
}

/// A model with what encodes its texts.
pub(crate) struct Subject {
    pub(crate) loaded: LoadedModel,
    /// The token that ends documents, which each prompt begins with.
    pub(crate) end: u32,
}

impl Subject {
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.loaded.vocabulary().encode(text)?)
    }

    /// A text as it is read: after the end of another document, cut to the context.
    pub(crate) fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![self.end];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }
}

pub(crate) fn figure(name: &'static str, value: f64, goal: f64, is_most: bool) -> Figure {
    Figure { name, value, goal, is_most }
}

fn lines(path: &Path, count: usize) -> Result<Vec<Line>> {
    let file = fs::File::open(path).with_context(|| path.display().to_string())?;
    BufReader::new(file)
        .lines()
        .take(count)
        .enumerate()
        .map(|(number, line)| {
            serde_json::from_str(&line?).with_context(|| format!("{}: line {}", path.display(), number + 1))
        })
        .collect()
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let options = ModelOptions { model: arguments.model.clone(), ..ModelOptions::default() };
    let loaded = options.open(&Silent)?.load(&Silent)?;
    let Some(end) = loaded.config().end_tokens().first().copied() else {
        bail!("{}: the model has no token that ends a document", arguments.model.display());
    };
    let subject = Subject { loaded, end };
    let bar = ProgressBar::new(4);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:20} {elapsed}")?);
    let mut figures = Vec::new();
    bar.set_message("rows of random tokens");
    let (of_rows, heads) = circuits::random_rows(&subject, arguments.rows)?;
    figures.extend(of_rows);
    bar.inc(1);
    bar.set_message("prompts");
    let path = arguments.corpus.join("probes.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let all: Vec<probes::Probe> = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    figures.extend(probes::run(&subject, &all, arguments.prompts)?);
    bar.inc(1);
    bar.set_message("held-out documents");
    let held_out = lines(&arguments.corpus.join("valid.jsonl"), arguments.documents)?;
    let (ratio, per_byte) = loss(&subject, &held_out)?;
    figures.push(figure("loss over the bound of its entropy", ratio, 1.10, true));
    bar.inc(1);
    bar.set_message("samples");
    let trained = lines(&arguments.corpus.join("train.jsonl"), samples::TRAINING_DOCUMENTS)?;
    let (of_samples, texts) = samples::run(&subject, &held_out, &trained, arguments.samples)?;
    figures.extend(of_samples);
    bar.finish_and_clear();
    if arguments.json {
        let checks: Vec<Value> = figures
            .iter()
            .map(|figure| {
                json!({ "name": figure.name, "value": figure.value, "goal": figure.goal, "is_most": figure.is_most,
                    "is_met": figure.is_met() })
            })
            .collect();
        let report = json!({ "checks": checks, "heads": heads, "loss_per_byte": per_byte, "samples": texts });
        println!("{report}");
        return Ok(());
    }
    for figure in &figures {
        let bound = if figure.is_most { "at most" } else { "at least" };
        let met = if figure.is_met() { "met" } else { "missed" };
        println!("{:52} {:8.4}  {bound} {}: {met}", figure.name, figure.value, figure.goal);
    }
    println!("loss {per_byte:.4} nats per byte; induction head {}", heads["induction"]);
    Ok(())
}

/// The loss of held-out documents as a share of −log p of the choices that made them, and in nats for each byte of text.
fn loss(subject: &Subject, documents: &[Line]) -> Result<(f64, f64)> {
    let (mut lost, mut bound, mut of_text, mut bytes) = (0.0, 0.0, 0.0, 0);
    for document in documents {
        let ids = match (&document.text, &document.ids) {
            (Some(text), _) => subject.prompt(text)?,
            (None, Some(ids)) => [&[subject.end], &ids[..]].concat(),
            (None, None) => bail!("a held-out document has neither a text nor ids"),
        };
        let context = subject.loaded.config().n_positions;
        // What is beyond the context is predicted from the last half of it.
        let mut own = 0.0;
        let mut start = 0;
        let mut predicted = 1;
        while predicted < ids.len() {
            let end = ids.len().min(start + context);
            let losses = circuits::losses(subject, &ids[start..end], &mut [])?;
            own += losses[predicted - 1 - start..].iter().map(|loss| f64::from(*loss)).sum::<f64>();
            predicted = end;
            start = end.saturating_sub(context / 2);
        }
        lost += own;
        bound += document.nats;
        if let Some(text) = &document.text {
            of_text += own;
            bytes += text.len();
        }
    }
    Ok((lost / bound, of_text / bytes.max(1) as f64))
}
