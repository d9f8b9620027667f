//! `story-probes`: measures checkpoints trained on the stories.
//!
//! It reports figures with their targets, and a history of what the model learned during training.
#![expect(clippy::print_stdout, reason = "a program's results")]

mod circuits;
mod copying;
mod figures;
mod held_out;
mod history;
mod ngrams;
mod probes;
mod samples;
mod subject;
mod two_people;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_gpt2_pictures::learned_page;
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use story_generator::{Lesson, lexicon};

use crate::figures::Figure;
use crate::probes::Probe;
use crate::subject::Subject;

/// Evaluates checkpoints and their attention heads
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print a checkpoint's metrics and their targets
    Report(Report),
    /// Print completions of everyday openings at the model's default settings, for a blind review
    Samples {
        /// Checkpoint folder, or weights file
        model: PathBuf,
        /// Number of seeds for each opening
        #[arg(long, value_name = "N", default_value_t = 3)]
        seeds: u64,
        /// Maximum number of tokens per completion
        #[arg(long, value_name = "N", default_value_t = 120)]
        tokens: usize,
    },
    /// Print the learning history as JSON: metrics from a few prompts for each checkpoint that
    /// `gpt2 train --keep-steps` kept
    #[command(after_help = "Example:
  story-probes history rows late --corpus corpus --stories DIR > history.json")]
    History {
        /// Folders of training runs, in order
        #[arg(required = true)]
        trainings: Vec<PathBuf>,
        #[command(flatten)]
        data: Data,
        /// Number of prompts of each kind
        #[arg(long, value_name = "N", default_value_t = 40)]
        prompts: usize,
        /// Number of held-out stories to measure the loss on
        #[arg(long, value_name = "N", default_value_t = 60)]
        documents: usize,
    },
    /// Print a history as an HTML page with a slider over the checkpoints
    #[command(after_help = "Example:
  story-probes page history.json > learned.html")]
    Page {
        /// Output of `story-probes history`
        history: PathBuf,
    },
}

#[derive(Args)]
struct Data {
    /// Output folder of `story-generator corpus`
    #[arg(long, value_name = "DIR")]
    corpus: PathBuf,
    /// Folder with the stories, including core-valid.txt
    #[arg(long, value_name = "DIR")]
    stories: PathBuf,
}

impl Data {
    fn probes(&self) -> Result<Vec<Probe>> {
        let path = self.corpus.join("probes.json");
        serde_json::from_str(&read(&path)?).with_context(|| path.display().to_string())
    }

    /// Reads the held-out stories.
    fn held_out(&self) -> Result<Vec<String>> {
        stories(&self.stories.join("core-valid.txt"))
    }

    /// Reads the stories that the lessons are made from.
    fn originals(&self) -> Result<Vec<String>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.stories).with_context(|| self.stories.display().to_string())? {
            paths.push(entry?.path());
        }
        paths.sort();
        let is_core = |path: &&PathBuf| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with("core-train-"))
        };
        let texts = paths.iter().filter(is_core).map(|path| stories(path)).collect::<Result<Vec<_>>>()?;
        Ok(texts.concat())
    }

    /// Texts of the lessons that contain stories, in the form that the model was trained on.
    fn trained(&self) -> impl Iterator<Item = Result<String>> {
        let lessons = Lesson::ALL.into_iter().filter(|(_, lesson)| *lesson != Lesson::Rows);
        lessons.flat_map(|(name, _)| texts(&self.corpus.join(format!("{name}.jsonl"))))
    }
}

#[derive(Args)]
#[command(after_help = "Examples:
  story-probes report late --corpus corpus --stories DIR --save report.json
  story-probes report model.gguf --corpus corpus --stories DIR --against report.json")]
struct Report {
    /// Checkpoint folder, or weights file
    model: PathBuf,
    #[command(flatten)]
    data: Data,
    /// Number of prompts of each kind
    #[arg(long, value_name = "N", default_value_t = 300)]
    prompts: usize,
    /// Number of rows of random tokens
    #[arg(long, value_name = "N", default_value_t = 50)]
    rows: usize,
    /// Number of completions to check
    #[arg(long, value_name = "N", default_value_t = 500)]
    samples: usize,
    /// Also print the largest drop in any fraction since the report in FILE, for example a report from
    /// before the weights were rounded
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Also write the report as JSON to this file
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// Reads the stories in a file; `<|endoftext|>` separates them.
fn stories(path: &Path) -> Result<Vec<String>> {
    let text = read(path)?;
    let stories = text.split("<|endoftext|>").map(str::trim).filter(|story| !story.is_empty());
    let stories: Vec<String> = stories.map(str::to_owned).collect();
    ensure!(!stories.is_empty(), "{}: expected stories, found none", path.display());
    Ok(stories)
}

/// Texts of a lesson, without rows of random tokens.
///
/// If the file cannot be read, the iterator yields a single error.
fn texts(path: &Path) -> Box<dyn Iterator<Item = Result<String>>> {
    let name = path.display().to_string();
    let file = match fs::File::open(path).with_context(|| name.clone()) {
        Ok(file) => file,
        Err(error) => return Box::new(std::iter::once(Err(error))),
    };
    Box::new(BufReader::new(file).lines().filter_map(move |line| {
        let parsed =
            line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str::<Value>(&line)?));
        match parsed.with_context(|| name.clone()) {
            Ok(line) => line["text"].as_str().map(|text| Ok(text.to_owned())),
            Err(error) => Some(Err(error)),
        }
    }))
}

fn main() -> Result<()> {
    let bar = ProgressBar::new(4);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:20} {elapsed}")?);
    match Arguments::parse().command {
        Command::Report(arguments) => report(&arguments, &bar),
        Command::Samples { model, seeds, tokens } => {
            for (number, sample) in
                samples::for_readers(&Subject::open(&model)?, seeds, tokens)?.iter().enumerate()
            {
                println!("## {}\n\n{}\n", number + 1, sample.text);
            }
            Ok(())
        }
        Command::History { trainings, data, prompts, documents } => {
            let mut held_out = data.held_out()?;
            held_out.truncate(documents);
            let measured = history::history(&trainings, &held_out, &data.probes()?, prompts, &bar)?;
            bar.finish_and_clear();
            println!("{}", Value::Array(measured));
            Ok(())
        }
        Command::Page { history } => {
            let measured = serde_json::from_str::<Vec<Value>>(&read(&history)?).unwrap_or_default();
            if !measured.first().is_some_and(|first| first["training"].is_string()) {
                bail!("{}: expected the output of `story-probes history`", history.display());
            }
            print!("{}", learned_page("How the model learned", &Value::Array(measured).to_string()));
            Ok(())
        }
    }
}

fn report(arguments: &Report, bar: &ProgressBar) -> Result<()> {
    let Report { data, prompts, rows, samples, .. } = arguments;
    let subject = Subject::open(&arguments.model)?;
    let begin = |what: &'static str| {
        bar.set_message(what);
        bar.inc(1);
    };
    begin("rows of random tokens");
    let (mut figures, heads) = circuits::random_rows(&subject, *rows)?;
    begin("prompts");
    let all = data.probes()?;
    figures.extend(probes::run(&subject, &all, *prompts)?);
    figures.extend(two_people::run(&subject, &probes::of_kind(&all, "two people", *prompts)?)?);
    figures.push(Figure::new("words of world.json that are one token", one_token(&subject)?).at_least(1.0));
    begin("held-out stories");
    let held_out = data.held_out()?;
    figures.extend(held_out::run(&subject, &held_out, &data.originals()?)?);
    begin("samples");
    figures.extend(samples::run(&subject, &held_out, data.trained(), *samples)?);
    if let Some(against) = &arguments.against {
        let before = serde_json::from_str(&read(against)?).with_context(|| against.display().to_string())?;
        figures.push(Figure::new("largest loss of any fraction", most_lost(&figures, &before)).at_most(0.01));
    }
    bar.finish_and_clear();
    let checks: Vec<Value> = figures.iter().map(Figure::to_json).collect();
    if let Some(path) = &arguments.save {
        fs::write(path, json!({ "checks": checks, "heads": heads }).to_string())
            .with_context(|| path.display().to_string())?;
    }
    figures.iter().for_each(|figure| println!("{figure}"));
    println!("induction head {}, previous-token head {}", heads["induction"], heads["previous"]);
    Ok(())
}

/// Fraction of the words in `world.json` that are a single token with their leading space.
fn one_token(subject: &Subject) -> Result<f64> {
    let words = lexicon().world_words();
    let lengths = words.iter().map(|word| Ok(subject.encode(&format!(" {word}"))?.len()));
    let lengths = lengths.collect::<Result<Vec<_>>>()?;
    Ok(lengths.iter().filter(|length| **length == 1).count() as f64 / words.len() as f64)
}

/// Largest decrease since a report among the fractions with a lower bound.
fn most_lost(figures: &[Figure], before: &Value) -> f64 {
    let checks = before["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let lost = figures.iter().filter(|figure| figure.is_fraction()).filter_map(|figure| {
        let check = checks.iter().find(|check| check["name"] == figure.name)?;
        Some(check["value"].as_f64()? - figure.value)
    });
    lost.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_drop_is_measured_on_fractions_only() {
        let before = json!({"checks": [
            {"name": "one", "value": 0.98}, {"name": "two", "value": 0.5}, {"name": "nats", "value": 9.0},
            {"name": "loss", "value": 0.1},
        ]});
        let figures = [
            Figure::new("one", 0.95).at_least(0.9),
            Figure::new("two", 0.6).at_least(0.9),
            Figure::new("nats", 3.0).at_least(2.0),
            Figure::new("loss", 0.9).at_most(1.1),
        ];
        let lost = most_lost(&figures, &before);
        assert!((lost - 0.03).abs() < 1e-12, "{lost}");
    }

    #[test]
    fn lesson_texts_are_read_and_id_rows_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("early.jsonl");
        fs::write(
            &file,
            "{\"text\": \"One.\", \"labels\": []}\n{\"ids\": [1], \"labels\": []}\n{\"text\": \"Two.\"}\n",
        )
        .unwrap();
        assert_eq!(texts(&file).collect::<Result<Vec<_>>>().unwrap(), ["One.", "Two."]);
        fs::write(&file, "{\n").unwrap();
        let error = texts(&file).next().unwrap().unwrap_err();
        assert!(format!("{error:#}").contains("early.jsonl"), "{error:#}");
    }
}
