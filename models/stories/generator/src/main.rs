//! `story-generator`: makes the corpus of the built-in model, measures it, and shows it.
#![expect(clippy::print_stdout, reason = "a program's results")]

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use story_generator::{Corpus, Lesson, Split, diversity, faults, lexicon, probes, story, tokenizer_texts};

/// Makes the stories and exercises that the built-in model learns from
#[derive(Parser)]
#[command(after_help = "Examples:
  story-generator corpus --seed 1 --tokens 20000000 --out corpus
  story-generator diversity
  story-generator show 3 --seed 7")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write the lessons rows.jsonl, rows-and-stories.jsonl, practice.jsonl, train.jsonl and last.jsonl, and valid.jsonl, tokenizer.jsonl (to train a tokenizer from) and probes.json to a folder
    Corpus {
        /// Seed of every choice
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Tokens of train.jsonl, counted as 4 bytes each; last.jsonl has half as many, and a hundredth as many are held out
        #[arg(long, value_name = "N", default_value_t = 20_000_000)]
        tokens: u64,
        /// Folder to write to; it must be new or empty
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Size of the vocabulary that rows of random tokens are drawn from
        #[arg(long, value_name = "V", default_value_t = 2048)]
        vocab_size: u32,
    },
    /// Measure how varied the stories are, and exit with 1 if a goal is missed
    Diversity {
        /// Seed of the first story
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Number of stories
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        stories: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Look for faults in stories, and exit with 1 if one has any
    Check {
        /// Seed of the first story
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Number of stories
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        stories: u64,
    },
    /// Print stories
    Show {
        /// Number of stories
        #[arg(default_value_t = 1)]
        stories: u64,
        /// Seed of the first story
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Print the words of the stories as world.json has them
    World,
}

fn texts(seed: u64, stories: u64) -> Result<Vec<String>> {
    (seed..seed + stories)
        .map(|seed| Ok(story(seed).with_context(|| format!("story {seed}"))?.text))
        .collect()
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Corpus { seed, tokens, out, vocab_size } => corpus(seed, tokens, &out, vocab_size),
        Command::Diversity { seed, stories, json } => {
            let figures = diversity(&texts(seed, stories)?)?;
            if json {
                println!("{}", serde_json::to_string_pretty(&figures)?);
            }
            for figure in figures.iter().filter(|_| !json) {
                let bound = if figure.is_most { "at most" } else { "at least" };
                let met = if figure.is_met() { "met" } else { "missed" };
                println!("{:52} {:8.4}  {bound} {}: {met}", figure.name, figure.value, figure.goal);
            }
            if figures.iter().any(|figure| !figure.is_met()) {
                bail!("a goal is missed");
            }
            Ok(())
        }
        Command::Check { seed, stories } => {
            let mut faulty = 0;
            for (number, text) in (seed..).zip(texts(seed, stories)?) {
                let found = faults(&text);
                faulty += u32::from(!found.is_empty());
                found.iter().for_each(|fault| println!("{number}: {fault:?}"));
            }
            println!("{faulty} of {stories} stories have a fault");
            if faulty > 0 {
                bail!("{faulty} stories have a fault");
            }
            Ok(())
        }
        Command::Show { stories, seed } => {
            println!("{}", texts(seed, stories)?.join("\n\n"));
            Ok(())
        }
        Command::World => {
            println!("{}", serde_json::to_string_pretty(&lexicon().world())?);
            Ok(())
        }
    }
}

/// Prompts of each kind.
const PROBES: usize = 1000;
/// Text that a tokenizer is trained from.
const TOKENIZER_BYTES: usize = 5_000_000;

/// Tokens of the first lessons: more than these are trained on.
const FIRST_TOKENS: u64 = 2_000_000;

fn corpus(seed: u64, tokens: u64, out: &Path, vocab_size: u32) -> Result<()> {
    let is_taken = out.exists() && (!out.is_dir() || fs::read_dir(out)?.next().is_some());
    if is_taken {
        bail!("`--out` {}: it is not an empty folder; choose another name", out.display());
    }
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let bar = ProgressBar::no_length();
    bar.set_style(ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} tokens, {eta} left")?);
    let mut documents = Vec::new();
    for (name, lesson, split, tokens) in [
        ("rows.jsonl", Lesson::Rows, Split::Training, FIRST_TOKENS),
        ("rows-and-stories.jsonl", Lesson::RowsAndStories, Split::Training, 2 * FIRST_TOKENS),
        ("practice.jsonl", Lesson::Practice, Split::Training, 6 * FIRST_TOKENS),
        ("train.jsonl", Lesson::Mixture, Split::Training, tokens),
        ("last.jsonl", Lesson::Last, Split::Training, tokens / 2),
        ("valid.jsonl", Lesson::Mixture, Split::HeldOut, tokens / 100),
    ] {
        bar.set_length(tokens);
        let path = out.join(name);
        let partial = out.join(format!("{name}.part"));
        let count = Corpus::new(seed, lesson, split, vocab_size)
            .write(&partial, tokens, |done| bar.set_position(done))?;
        fs::rename(&partial, &path)?;
        documents.push(count);
    }
    bar.finish_and_clear();
    let lines: String = tokenizer_texts(seed, TOKENIZER_BYTES)?
        .iter()
        .map(|text| json!({ "text": text }).to_string() + "\n")
        .collect();
    fs::write(out.join("tokenizer.jsonl"), lines)?;
    fs::write(out.join("probes.json"), serde_json::to_string(&probes(seed, PROBES))?)?;
    let report = json!({ "seed": seed, "tokens": tokens, "training_documents": documents[3], "held_out_documents": documents[5] });
    println!("{report}");
    Ok(())
}
