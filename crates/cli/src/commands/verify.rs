//! `gpt2 verify`: checks that a checkpoint is sound.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_gpt2_engine::{
    BUILT_IN, HubOptions, ModelOptions, PublishedCheck, PublishedValues, Verification, VerifyOptions,
    WeightDType,
};
use candle_gpt2_kernels::KvDType;
use clap::Args;

use crate::exit::{self, EXIT_FAILURE, UsageError, is_closed_pipe};
use crate::flags;
use crate::input::read_text;
use crate::model_arguments::{CommonArguments, PositionalModel};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 verify MODEL
  gpt2 verify MODEL --json
  gpt2 verify converted.gguf --against DIR --tolerance 0.1
  gpt2 verify --fingerprint --dtype q8
  gpt2 verify gpt2 --published    # OpenAI's GPT-2 against published values
  gpt2 verify my-model --published=values.json

Checks that every tensor is present with the right shape and finite values, that a separate head does not contradict a tied one, \
that the tokenizer and the special tokens fit the vocabulary, and that a fixed prompt has the same logits with and \
without a cache. --published compares parameter counts, shapes, tokens, greedy completions, logits and losses with published \
values; each line shows the largest difference and the source. The exit code is 0 if every check passes, otherwise 1.")]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    positional: PositionalModel,
    /// Checkpoint folder, weights file in any format that the program reads, a model on the Hub (gpt2,
    /// owner/name[@revision]), or built-in
    #[arg(short, long, value_name = "MODEL", default_value = BUILT_IN)]
    pub(crate) model: PathBuf,
    /// Also compare the logits of a fixed prompt with those of another checkpoint
    #[arg(long, value_name = "OTHER")]
    pub(crate) against: Option<PathBuf>,
    /// Largest difference between logits that --against allows
    #[arg(long, value_name = "X", default_value_t = VerifyOptions::TOLERANCE, requires = "against", allow_negative_numbers = true, value_parser = parse_tolerance)]
    pub(crate) tolerance: f64,
    /// Also print the SHA-256 of the logits after each token of a fixed prompt, which is the same on every
    /// machine
    #[arg(long)]
    pub(crate) fingerprint: bool,
    /// Compare with the model's published values, or with those from a table in the program's format
    #[arg(long, value_name = "TABLE", num_args = 0..=1, require_equals = true, default_missing_value = BUILT_IN)]
    pub(crate) published: Option<PathBuf>,
    /// Precision of the weights for --fingerprint and --published: f32, f16, q8, q6, q5 or q4 [default: the
    /// checkpoint's dtype, as f16 or f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<WeightDType>,
    /// Precision of the KV cache for --fingerprint: f32, f16 or q8 [default: f32, and f16 if the weights
    /// are not f32]
    #[arg(long, value_name = "TYPE", requires = "fingerprint")]
    pub(crate) kv_dtype: Option<KvDType>,
    /// Tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them or with
    /// vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object: sound, problems, notes, cache_difference, against_difference; for a
    /// classifier also batch_difference; with --fingerprint also fingerprint, with --published also published
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(tolerance) if VerifyOptions::allows(tolerance) => Ok(tolerance),
        _ => Err("expected a number of at least 0".into()),
    }
}

pub(crate) fn run(arguments: &VerifyArguments, hub: &HubOptions) -> Result<ExitCode> {
    let VerifyArguments { against, tolerance, fingerprint, dtype, kv_dtype, tokenizer, common, json, .. } =
        arguments;
    if dtype.is_some() && !fingerprint && arguments.published.is_none() {
        return Err(UsageError("--dtype needs --fingerprint or --published".into()).into());
    }
    let published = arguments.published.as_deref().map(published_values).transpose()?;
    let options = VerifyOptions {
        against: against.clone(),
        tolerance: *tolerance,
        fingerprint: *fingerprint,
        published,
    };
    let model = common.checkpoint_options(&arguments.positional.or(&arguments.model), hub);
    let model = ModelOptions { dtype: *dtype, kv_dtype: *kv_dtype, tokenizer: tokenizer.clone(), ..model };
    let verified = model.verify(&options, &Terminal);
    let report = match verified.map_err(anyhow::Error::from) {
        Ok(report) => report,
        Err(error) if *json => Verification::unopened(exit::message(&error)),
        Err(error) => return Err(error),
    };
    match print(arguments, &report) {
        // The exit code reports the verdict even if the reader closes the pipe early.
        Err(error) if !is_closed_pipe(&error) => return Err(error),
        _ => {}
    }
    Ok(if report.sound { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
}

/// Reads the table of published values from a file, or the built-in one.
fn published_values(path: &Path) -> Result<PublishedValues> {
    if path == Path::new(BUILT_IN) {
        return Ok(PublishedValues::built_in()?);
    }
    let text = read_text(path)?;
    PublishedValues::from_json(&text).with_context(|| path.display().to_string())
}

fn print(arguments: &VerifyArguments, report: &Verification) -> Result<()> {
    if arguments.json {
        return output::write_json(report);
    }
    for problem in &report.problems {
        output::write_line(&flags::with_flags(problem))?;
    }
    for check in &report.published {
        let verdict = if check.holds { "holds  " } else { "differs" };
        let PublishedCheck { check, source, difference, tolerance, .. } = check;
        output::write_line(&format!(
            "{verdict} {check}: largest difference {difference:.1e}, {tolerance:.1e} allowed ({source})"
        ))?;
    }
    for note in &report.notes {
        output::write_line(&format!("note: {note}"))?;
    }
    if let Some(difference) = report.cache_difference {
        output::write_line(&format!("with and without cache: largest logit difference {difference:.1e}"))?;
    }
    if let Some(difference) = report.batch_difference {
        output::write_line(&format!("batched and alone: largest logit difference {difference:.1e}"))?;
    }
    if let Some(difference) = report.against_difference {
        output::write_line(&format!(
            "against the other checkpoint: largest logit difference {difference:.1e}"
        ))?;
    }
    if let Some(fingerprint) = &report.fingerprint {
        output::write_line(&format!("fingerprint: {fingerprint}"))?;
    }
    let differing = report.published.iter().filter(|check| !check.holds).count();
    output::write_line(&match report.problems.len() + differing {
        0 if !report.has_tokenizer() => {
            "sound, but without a tokenizer; text needs `--tokenizer FILE`".to_owned()
        }
        0 => "sound: every tensor is present, with the right shape and finite values".to_owned(),
        1 => "not sound: 1 problem".to_owned(),
        several => format!("not sound: {several} problems"),
    })
}
