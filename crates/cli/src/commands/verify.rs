//! `gpt2 verify`: is the checkpoint sound? Structure and values, tokenizer, cache against no cache, another checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use clap::Args;
use gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHead, KvDType, LogitsFor, Pass};
use gpt2_engine::{Defaults, HubOptions, ModelOptions, Reporter, Unit, Vocabulary};
use gpt2_weights::{Checkpoint, WeightsError};
use serde::Serialize;

use crate::exit::{self, EXIT_FAILURE, is_closed_pipe};
use crate::model_arguments::{CommonArguments, open_other};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 verify --model DIR
  gpt2 verify --model DIR --json
  gpt2 verify --model converted.gguf --against DIR --tolerance 0.1

Checked are every tensor's presence, shape and values, a head that contradicts its tie, tokenizer and special tokens
against the vocabulary, and the logits of a fixed prompt with a cache against those without. Exit code 0 when the checkpoint is sound, 1 when it is not.")]
pub(crate) struct VerifyArguments {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Also compare the logits of a fixed prompt with those of another checkpoint
    #[arg(long, value_name = "OTHER")]
    pub(crate) against: Option<PathBuf>,
    /// Largest difference of logits that --against allows
    #[arg(long, value_name = "X", default_value_t = 1e-3, requires = "against", allow_negative_numbers = true, value_parser = parse_tolerance)]
    pub(crate) tolerance: f64,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object: sound, problems, notes, cache_difference, against_difference
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(tolerance) if tolerance >= 0.0 && tolerance.is_finite() => Ok(tolerance),
        _ => Err("expected a number of at least 0".into()),
    }
}

/// Tokens of the fixed prompt, where the context holds as many.
const PROMPT_TOKENS: usize = 16;
/// Largest difference between logits with a cache and without, relative to the largest logit: both are f32, summed in
/// another order through every block.
const CACHE_TOLERANCE: f64 = 1e-4;

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    sound: bool,
    problems: Vec<String>,
    /// What is worth knowing and not wrong.
    notes: Vec<String>,
    /// Largest difference between logits with a cache and without; absent where the model cannot be built.
    cache_difference: Option<f64>,
    /// Largest difference to the logits of `--against`.
    against_difference: Option<f64>,
}

pub(crate) fn run(arguments: &VerifyArguments, hub: &HubOptions) -> Result<ExitCode> {
    let report = match verify(arguments, hub) {
        Ok(report) => report,
        // A checkpoint that cannot even be opened has one problem.
        Err(error) if arguments.json => Report {
            sound: false,
            problems: vec![exit::message(&error)],
            notes: Vec::new(),
            cache_difference: None,
            against_difference: None,
        },
        Err(error) => return Err(error),
    };
    match print(arguments, &report) {
        // The verdict is the exit code, whether or not all of the list is read.
        Err(error) if !is_closed_pipe(&error) => return Err(error),
        _ => {}
    }
    Ok(if report.sound { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
}

fn print(arguments: &VerifyArguments, report: &Report) -> Result<()> {
    if arguments.json {
        return output::write_json(report);
    }
    for problem in &report.problems {
        output::write_line(problem)?;
    }
    for note in &report.notes {
        output::write_line(&format!("note: {note}"))?;
    }
    if let Some(difference) = report.cache_difference {
        output::write_line(&format!(
            "cache against no cache: largest difference of logits {difference:.1e}"
        ))?;
    }
    if let Some(difference) = report.against_difference {
        output::write_line(&format!("against the other: largest difference of logits {difference:.1e}"))?;
    }
    output::write_line(&match report.problems.len() {
        0 => "sound: every tensor is there, with its shape and finite values".to_owned(),
        1 => "not sound: 1 problem".to_owned(),
        several => format!("not sound: {several} problems"),
    })
}

fn verify(arguments: &VerifyArguments, hub: &HubOptions) -> Result<Report> {
    let checkpoint = arguments.common.open_checkpoint(&arguments.model, hub)?;
    let bar = Terminal.start("reading", checkpoint.parameter_bytes(), Unit::Bytes);
    let problems = checkpoint.verify(&|bytes| bar.advance(bytes))?;
    drop(bar);
    let mut problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let notes = check_tokens(&checkpoint, &mut problems);
    let (mut cache_difference, mut against_difference) = (None, None);
    // Numbers are compared only where there are numbers.
    if problems.is_empty() {
        let model = load(&checkpoint)?;
        let prompt = fixed_prompt(checkpoint.config());
        let logits = logits(&model, &prompt)?;
        let largest = largest_logit(&logits);
        let difference = largest_difference(&logits, &logits_with_cache(&model, &prompt)?);
        if !difference.is_finite() || difference > CACHE_TOLERANCE * largest.max(1.0) {
            problems
                .push(format!("with a cache the logits differ by {difference:e}; they reach {largest:e}"));
        }
        cache_difference = Some(difference);
        if let Some(other) = &arguments.against {
            let other = open_other(other, hub)?;
            if other.config().vocab_size != checkpoint.config().vocab_size {
                bail!(
                    "the vocabularies differ: {} tokens here, {} in {}",
                    checkpoint.config().vocab_size,
                    other.config().vocab_size,
                    other.weights_path().display()
                );
            }
            let prompt = &prompt[..prompt.len().min(other.config().n_positions)];
            let theirs = self::logits(&load(&other)?, prompt)?;
            let difference = largest_difference(&logits[..theirs.len()], &theirs);
            if !difference.is_finite() || difference > arguments.tolerance {
                problems.push(format!(
                    "the logits of the two differ by {difference:e}, allowed are {:e}",
                    arguments.tolerance
                ));
            }
            against_difference = Some(difference);
        }
    }
    Ok(Report { sound: problems.is_empty(), problems, notes, cache_difference, against_difference })
}

/// Compares the tokenizer and the special tokens with the vocabulary.
fn check_tokens(checkpoint: &Checkpoint, problems: &mut Vec<String>) -> Vec<String> {
    let config = checkpoint.config();
    let vocab_size = config.vocab_size;
    let tokenizer = checkpoint.tokenizer(None);
    let vocabulary = Arc::new(Vocabulary::new(checkpoint, tokenizer.as_ref().ok().cloned()));
    let defaults = Defaults::of(checkpoint, Arc::clone(&vocabulary)).and_then(|defaults| {
        defaults.check()?;
        Ok(defaults)
    });
    let defaults = defaults.map_err(|error| problems.push(error.to_string())).ok();
    let ends = defaults.as_ref().map_or(&[][..], Defaults::named_ends);
    let start = config.bos_token_id.iter().map(|id| ("bos_token_id", id));
    let named = start.chain(ends.iter().map(|id| ("eos_token_id", id)));
    let named = named.filter(|(_, id)| !config.has_token(**id));
    let beyond =
        named.map(|(name, id)| format!("{name} {id} is beyond the vocabulary of {vocab_size} tokens"));
    let mut beyond: Vec<String> = beyond.collect();
    match tokenizer {
        // Without a tokenizer nothing is generated from text, and transformers' defaults stand in small configurations.
        Err(WeightsError::NoTokenizer { .. }) => {
            beyond.push("there is no tokenizer".into());
            beyond
        }
        Err(error) => {
            problems.push(error.to_string());
            beyond
        }
        Ok(tokenizer) => {
            problems.append(&mut beyond);
            let largest = tokenizer.get_vocab(true).into_values().max();
            problems.extend(largest.filter(|id| !config.has_token(*id)).map(|id| {
                format!("the tokenizer has the token id {id}, the vocabulary {vocab_size} tokens: they do not belong together")
            }));
            let padding = vocab_size.saturating_sub(tokenizer.get_vocab_size(true));
            let mut notes = defaults.map_or(Vec::new(), |defaults| vocabulary.notes(defaults.config()));
            if padding > 0 {
                notes.push(format!("{padding} rows of the vocabulary have no token: padding"));
            }
            notes
        }
    }
}

/// The model of a checkpoint on the CPU, in the numbers that are stored.
fn load(checkpoint: &Checkpoint) -> Result<Gpt2LMHead> {
    Ok(ModelOptions::default().load(checkpoint, &Device::Cpu, &Terminal)?)
}

/// Token ids spread over the vocabulary, the same for every model of that size.
fn fixed_prompt(config: &Gpt2Config) -> Vec<u32> {
    let step = |index: usize| (index * 7919 + 3) % config.vocab_size;
    (0..PROMPT_TOKENS.min(config.n_positions)).filter_map(|index| u32::try_from(step(index)).ok()).collect()
}

fn logits(model: &Gpt2LMHead, prompt: &[u32]) -> Result<Vec<f32>> {
    let ids = Tensor::from_slice(prompt, (1, prompt.len()), &Device::Cpu)?;
    let logits = model.forward(&ids, LogitsFor::EveryToken, None, &mut Pass::inference())?;
    Ok(logits.flatten_all()?.to_vec1()?)
}

/// The same, one token at a time.
fn logits_with_cache(model: &Gpt2LMHead, prompt: &[u32]) -> Result<Vec<f32>> {
    let mut cache = Gpt2Cache::new(model.config(), 1, prompt.len(), KvDType::F32, &Device::Cpu)?;
    let mut logits = Vec::new();
    for id in prompt {
        let ids = Tensor::from_slice(&[*id], (1, 1), &Device::Cpu)?;
        let step = model.forward(&ids, LogitsFor::EveryToken, Some(&mut cache), &mut Pass::inference())?;
        logits.extend(step.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(logits)
}

fn largest_difference(first: &[f32], second: &[f32]) -> f64 {
    largest(first.iter().zip(second).map(|(a, b)| f64::from(*a) - f64::from(*b)))
}

fn largest_logit(logits: &[f32]) -> f64 {
    largest(logits.iter().copied().map(f64::from))
}

/// The largest value without its sign; NaN where one of them is.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    // In the total order a NaN without a sign comes after all numbers.
    values.map(f64::abs).max_by(f64::total_cmp).unwrap_or(0.0)
}
