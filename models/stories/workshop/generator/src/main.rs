//! `story-generator`: generates the corpus for the built-in model.
#![expect(clippy::print_stdout, reason = "a program's results")]

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use story_generator::{Corpus, Lesson, Shelf, Split, Stories, lexicon, probes, tokenizer_texts};

/// Generates the lessons for the built-in model from published stories and exercises
#[derive(Parser)]
#[command(after_help = "Examples:
  story-generator corpus --stories DIR --seed 1 --out corpus
  story-generator world > world.json")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write the lessons, held-out texts, texts for training a tokenizer, and prompts to a folder
    Corpus {
        /// Folder of stories: core-train-*.txt, core-books-train-*.txt, plain-train-*.txt and the held-out
        /// files
        #[arg(long, value_name = "DIR")]
        stories: PathBuf,
        /// Seed for all random choices
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Number of tokens in each lesson after the second, estimated at 4.1 bytes per token
        #[arg(long, value_name = "N", default_value_t = 9_000_000)]
        tokens: u64,
        /// Folder to write to; it must be new or empty
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Vocabulary size for rows of random tokens
        #[arg(long, value_name = "V", default_value_t = 4096)]
        vocab_size: u32,
    },
    /// Print the words of the stories in the format of world.json
    World,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Corpus { stories, seed, tokens, out, vocab_size } => {
            corpus(&stories, seed, tokens, &out, vocab_size)
        }
        Command::World => {
            println!("{}", serde_json::to_string_pretty(&lexicon().world())?);
            Ok(())
        }
    }
}

/// Number of prompts of each kind.
const PROBES: usize = 1000;
/// Number of bytes of text that the tokenizer is trained on.
const TOKENIZER_BYTES: usize = 5_000_000;

fn corpus(folder: &Path, seed: u64, tokens: u64, out: &Path, vocab_size: u32) -> Result<()> {
    let is_taken = out.exists() && (!out.is_dir() || fs::read_dir(out)?.next().is_some());
    if is_taken {
        bail!("`--out` {}: not an empty folder; choose another folder", out.display());
    }
    let mut stories = Stories::read(folder, Split::Training, seed)?;
    let mut held_out = Stories::read(folder, Split::HeldOut, seed)?;
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let lines: String =
        tokenizer_texts(seed, TOKENIZER_BYTES, &mut Stories::read(folder, Split::Training, seed)?)
            .iter()
            .map(|text| json!({ "text": text }).to_string() + "\n")
            .collect();
    fs::write(out.join("tokenizer.jsonl"), lines)?;
    let bar = ProgressBar::no_length();
    bar.set_style(ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} tokens, {eta} left")?);
    let write = |name: &str, lesson, split, stories: &mut Stories, tokens| -> Result<u64> {
        bar.set_length(tokens);
        let path = out.join(format!("{name}.jsonl"));
        let partial = out.join(format!("{name}.jsonl.part"));
        let count =
            Corpus::new(seed, lesson, split, vocab_size, stories)
                .write(&partial, tokens, |done| bar.set_position(done))?;
        fs::rename(&partial, &path)?;
        Ok(count)
    };
    let mut documents = serde_json::Map::new();
    for (name, lesson) in Lesson::ALL {
        let tokens = match lesson {
            Lesson::Rows => tokens / 9,
            Lesson::RowsAndStories => tokens / 9 * 4,
            _ => tokens,
        };
        documents.insert(name.into(), write(name, lesson, Split::Training, &mut stories, tokens)?.into());
    }
    write("valid", Lesson::Late, Split::HeldOut, &mut held_out, tokens / 100)?;
    bar.finish_and_clear();
    fs::write(out.join("probes.json"), serde_json::to_string(&probes(seed, PROBES))?)?;
    let report = json!({
        "seed": seed,
        "tokens": tokens,
        "documents": documents,
        "rounds": { "core": stories.rounds(Shelf::Core), "books": stories.rounds(Shelf::Books), "plain": stories.rounds(Shelf::Plain) },
    });
    println!("{report}");
    Ok(())
}
