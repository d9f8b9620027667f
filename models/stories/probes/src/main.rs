//! `story-probes`: what a checkpoint that learned from the stories can do, as figures with their goals, and what it learned when.
#![expect(clippy::print_stdout, reason = "a program's results")]

mod circuits;
mod history;
mod ngrams;
mod probes;
mod samples;
mod two_people;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};
use candle_gpt2_pictures::learned_page;
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use serde_json::{Value, json};
use story_generator::{Figure, lexicon};

use crate::ngrams::KneserNey;
use crate::probes::Probe;

/// Prints what checkpoints can do, and which of their heads do it
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print what a checkpoint can do, as figures with their goals
    Report(Report),
    /// Print what was learned when, as JSON: the models that `gpt2 train --keep-steps` kept, with few prompts each
    #[command(after_help = "Example:
  story-probes history rows model --corpus corpus > history.json")]
    History {
        /// Folders of trainings, in order
        #[arg(required = true)]
        trainings: Vec<PathBuf>,
        /// Folder that `story-generator corpus` wrote
        #[arg(long, value_name = "DIR")]
        corpus: PathBuf,
        /// Prompts of each kind
        #[arg(long, value_name = "N", default_value_t = 40)]
        prompts: usize,
        /// Held-out documents whose loss is measured
        #[arg(long, value_name = "N", default_value_t = 60)]
        documents: usize,
    },
    /// Print a history as a page: one HTML file with a slider over the checkpoints
    #[command(after_help = "Example:
  story-probes page history.json > learned.html")]
    Page {
        /// What `story-probes history` printed
        history: PathBuf,
    },
}

#[derive(Args)]
#[command(after_help = "Examples:
  story-probes report model --corpus corpus
  story-probes report model --corpus corpus --save report.json
  story-probes report model.gguf --corpus corpus --against report.json")]
struct Report {
    /// Checkpoint folder, or weights file
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
    #[arg(long, value_name = "N", default_value_t = 500)]
    samples: usize,
    /// Held-out documents whose loss is measured
    #[arg(long, value_name = "N", default_value_t = 400)]
    documents: usize,
    /// Say, too, how much worse any share is than in this report: that of the weights before they were rounded
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Write the report as JSON to this file, too
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
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
    fn open(model: &Path) -> Result<Self> {
        let options = ModelOptions { model: model.to_owned(), ..ModelOptions::default() };
        let loaded = options.open(&Silent)?.load(&Silent)?;
        let Some(end) = loaded.config().end_tokens().first().copied() else {
            bail!("{}: the model has no token that ends a document", model.display());
        };
        Ok(Self { loaded, end })
    }

    /// The first token of a continuation.
    pub(crate) fn first_token(&self, text: &str) -> Result<u32> {
        self.encode(text)?.first().copied().with_context(|| format!("`{text}` has no token"))
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.loaded.vocabulary().encode(text)?)
    }

    /// A text as it is read: after the end of another document.
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

fn read_probes(corpus: &Path) -> Result<Vec<Probe>> {
    let path = corpus.join("probes.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

fn main() -> Result<()> {
    let bar = ProgressBar::new(5);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:20} {elapsed}")?);
    match Arguments::parse().command {
        Command::Report(arguments) => report(&arguments, &bar),
        Command::History { trainings, corpus, prompts, documents } => {
            let held_out = lines(&corpus.join("valid.jsonl"), documents)?;
            let measured = history::history(&trainings, &held_out, &read_probes(&corpus)?, prompts, &bar)?;
            bar.finish_and_clear();
            println!("{}", Value::Array(measured));
            Ok(())
        }
        Command::Page { history } => {
            let found = || history.display().to_string();
            let text = fs::read_to_string(&history).with_context(found)?;
            let measured = serde_json::from_str::<Vec<Value>>(&text).unwrap_or_default();
            if !measured.first().is_some_and(|first| first["training"].is_string()) {
                bail!("{}: expected what `story-probes history` prints", history.display());
            }
            print!("{}", learned_page("How the model learned", &Value::Array(measured).to_string()));
            Ok(())
        }
    }
}

fn report(arguments: &Report, bar: &ProgressBar) -> Result<()> {
    let Report { corpus, prompts, rows, samples, documents, .. } = arguments;
    let subject = Subject::open(&arguments.model)?;
    let begin = |what: &'static str| {
        bar.set_message(what);
        bar.inc(1);
    };
    begin("rows of random tokens");
    let (mut figures, heads) = circuits::random_rows(&subject, *rows)?;
    begin("prompts");
    let all = read_probes(corpus)?;
    figures.extend(probes::run(&subject, &all, *prompts)?);
    figures.extend(two_people::run(&subject, &probes::of_kind(&all, "two people", *prompts)?)?);
    figures.push(figure("words of world.json that are one token", one_token(&subject)?, 1.0, false));
    let brackets = samples::brackets(&subject, &probes::of_kind(&all, "brackets", *prompts)?)?;
    figures.push(figure("brackets that are closed", brackets, 0.95, false));
    begin("held-out documents");
    let held_out = lines(&corpus.join("valid.jsonl"), *documents)?;
    let (ratio, per_byte) = loss(&subject, &held_out)?;
    figures.push(figure("loss over the bound of its entropy", ratio, 1.10, true));
    begin("sequences of the corpus");
    let trained = lines(&corpus.join("train.jsonl"), usize::MAX)?;
    figures.extend(below_counts(&subject, &held_out, &trained)?);
    begin("samples");
    let (of_samples, texts) = samples::run(&subject, &held_out, &trained, *samples)?;
    figures.extend(of_samples);
    if let Some(against) = &arguments.against {
        let text = fs::read_to_string(against).with_context(|| against.display().to_string())?;
        let before: Value = serde_json::from_str(&text).with_context(|| against.display().to_string())?;
        figures.push(figure("most that any share has lost", most_lost(&figures, &before), 0.01, true));
    }
    bar.finish_and_clear();
    let checks = figures.iter().map(|figure| {
        json!({ "name": figure.name, "value": figure.value, "goal": figure.goal, "is_most": figure.is_most,
            "is_met": figure.is_met() })
    });
    let report = json!({ "checks": checks.collect::<Vec<_>>(), "heads": heads, "loss_per_byte": per_byte, "samples": texts });
    if let Some(path) = &arguments.save {
        fs::write(path, report.to_string()).with_context(|| path.display().to_string())?;
    }
    if arguments.json {
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

/// The share of the words that prompts are written from which are one token, with the space before them.
fn one_token(subject: &Subject) -> Result<f64> {
    let words = lexicon().world_words();
    let lengths = words.iter().map(|word| Ok(subject.encode(&format!(" {word}"))?.len()));
    let lengths = lengths.collect::<Result<Vec<_>>>()?;
    Ok(lengths.iter().filter(|length| **length == 1).count() as f64 / words.len() as f64)
}

/// The most that a figure which is a share, and better the higher it is, has lost since a report.
fn most_lost(figures: &[Figure], before: &Value) -> f64 {
    let checks = before["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let lost = figures.iter().filter(|figure| !figure.is_most && figure.goal < 1.0).filter_map(|figure| {
        let check = checks.iter().find(|check| check["name"] == figure.name)?;
        Some(check["value"].as_f64()? - figure.value)
    });
    lost.fold(0.0, f64::max)
}

/// How far the loss of texts is below that of counted sequences.
fn below_counts(subject: &Subject, held_out: &[Line], trained: &[Line]) -> Result<Vec<Figure>> {
    let documents = |lines: &[Line]| -> Result<Vec<Vec<u32>>> {
        lines.iter().filter_map(|line| line.text.as_deref()).map(|text| subject.prompt(text)).collect()
    };
    let counted = KneserNey::new(&documents(trained)?, subject.loaded.config().vocab_size)?;
    let held_out = documents(held_out)?;
    let mut own = 0.0;
    for ids in &held_out {
        own += nats(subject, ids)?;
    }
    let of_counts = held_out.iter().map(|ids| counted.nats(ids));
    let [plain, mixed] =
        of_counts.fold([0.0; 2], |[one, other], [plain, mixed]| [one + plain, other + mixed]);
    Ok(vec![
        figure("loss below that of five tokens counted", 1.0 - own / plain, 0.25, false),
        figure("the same, with the document's own counts", 1.0 - own / mixed, 0.12, false),
    ])
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
        let own = nats(subject, &ids)?;
        lost += own;
        bound += document.nats;
        if let Some(text) = &document.text {
            of_text += own;
            bytes += text.len();
        }
    }
    Ok((lost / bound, of_text / bytes.max(1) as f64))
}

/// −log p of a document; what is beyond the context is predicted from the last half of it.
fn nats(subject: &Subject, ids: &[u32]) -> Result<f64> {
    let context = subject.loaded.config().n_positions;
    let (mut sum, mut start, mut predicted) = (0.0, 0, 1);
    while predicted < ids.len() {
        let end = ids.len().min(start + context);
        let losses = circuits::losses(subject, &ids[start..end], &mut [])?;
        sum += losses[predicted - 1 - start..].iter().map(|loss| f64::from(*loss)).sum::<f64>();
        predicted = end;
        start = end.saturating_sub(context / 2);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_that_of_the_share_that_lost_most() {
        let before = json!({"checks": [
            {"name": "one", "value": 0.98}, {"name": "two", "value": 0.5}, {"name": "difference", "value": 9.0},
            {"name": "loss", "value": 0.1},
        ]});
        let shares = [figure("one", 0.95, 0.9, false), figure("two", 0.6, 0.9, false)];
        // Neither a difference of logits nor what is better when it is lower is a share.
        let others = [figure("difference", 3.0, 2.0, false), figure("loss", 0.9, 1.1, true)];
        let lost = most_lost(&[&shares[..], &others].concat(), &before);
        assert!((lost - 0.03).abs() < 1e-12, "{lost}");
    }
}
