//! `gpt2 inspect`: describes a checkpoint and the evidence for its format.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2::{HeadKind, LedgerRow};
use candle_gpt2_engine::{
    BUILT_IN, Comparison, HubOptions, InspectOptions, Inspected, Inspection, VocabularySizes,
};
use candle_gpt2_weights::Statistics;
use clap::Args;

use crate::model_arguments::{CommonArguments, PositionalModel};
use crate::output::{grouped, mebibytes, write_json, write_line};
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 inspect MODEL
  gpt2 inspect --preset gpt2-xl --ledger
  gpt2 inspect MODEL --tensors
  gpt2 inspect MODEL --diff OTHER
  gpt2 inspect MODEL --json | jq .parameters")]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    pub(crate) subject: InspectSubject,
    /// Also show minimum, maximum, mean and standard deviation of every tensor, and how many values are
    /// zero or not finite
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print only the parameter counts that people quote (117M, 124M, 163M …), each with its definition
    #[arg(long, conflicts_with_all = ["tensors", "diff"])]
    pub(crate) ledger: bool,
    /// Compare with another checkpoint in any format, parameter by parameter
    #[arg(long, value_name = "OTHER", conflicts_with = "tensors")]
    pub(crate) diff: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Model or preset to inspect.
#[derive(Debug, Args)]
pub(crate) struct InspectSubject {
    #[command(flatten)]
    positional: PositionalModel,
    /// Checkpoint folder, weights file in any format that the program reads, a model on the Hub (gpt2,
    /// owner/name[@revision]), or built-in
    #[arg(short, long, value_name = "MODEL", default_value = BUILT_IN)]
    model: PathBuf,
    /// A published model, which needs no files: distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl
    #[arg(long, value_name = "NAME", conflicts_with_all = ["positional", "model"])]
    pub(crate) preset: Option<String>,
}

pub(crate) fn run(arguments: &InspectArguments, hub: &HubOptions) -> Result<ExitCode> {
    let InspectArguments { subject, tensors, diff, common, .. } = arguments;
    let options = InspectOptions {
        model: subject.preset.is_none().then(|| subject.positional.or(&subject.model)),
        preset: subject.preset.clone(),
        tensors: *tensors,
        diff: diff.clone(),
        n_head: common.n_head,
        hub: hub.clone(),
    };
    match (options.inspect(&Terminal)?, arguments.json, arguments.ledger) {
        (found, true, _) => write_json(&found)?,
        (Inspected::One(found), false, true) => print_ledger(&found)?,
        (Inspected::One(found), false, false) => print(&found)?,
        (Inspected::Two(found), false, _) => print_comparison(&found)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Inspection) -> Result<()> {
    if let Some(path) = &report.path {
        write_line(&format!("file         {path}"))?;
    }
    write_line(&format!("format       {}: {}", report.format, report.evidence))?;
    let prefix =
        if report.prefix.is_empty() { "no prefix".to_owned() } else { format!("prefix `{}`", report.prefix) };
    write_line(&format!("names        {}, {prefix}", report.naming))?;
    write_line(&format!("orientation  {}: {}", report.orientation, report.orientation_evidence))?;
    write_line(&format!("class        {}", report.class))?;
    let is_over_vocabulary =
        HeadKind::from_class_name(report.class).is_some_and(HeadKind::has_language_model);
    let head = match report.tied_head {
        true => "tied to the token embedding",
        false if is_over_vocabulary => "separate (lm_head.weight)",
        false => "no language model head",
    };
    write_line(&format!("output head  {head}"))?;
    let known = |count: Option<usize>| count.map_or("none".to_owned(), grouped);
    let VocabularySizes { config, embedding_rows, tokenizer } = report.vocabulary;
    write_line(&format!(
        "vocabulary   config {}, embedding rows {}, tokenizer {}",
        grouped(config),
        known(embedding_rows),
        known(tokenizer)
    ))?;
    heading("rules applied", report.rules.len())?;
    for rule in &report.rules {
        write_line(&format!("  {rule}"))?;
    }
    if report.files.len() > 1 {
        heading("files", report.files.len())?;
        for file in &report.files {
            write_line(&format!("  {:>12}  {}", mebibytes(file.bytes), file.path))?;
        }
    }
    heading("config", 1)?;
    for (key, value) in report.config.as_object().into_iter().flatten() {
        write_line(&format!("  {key:<34}{value}"))?;
    }
    let counts = &report.parameters;
    heading("parameters", 1)?;
    for (name, count) in [
        ("unique", counts.unique),
        ("with an untied head", counts.with_untied_head),
        ("embeddings", counts.embedding),
        ("blocks", counts.blocks),
        ("one block", counts.per_block),
        ("  its attention", counts.attention_per_block),
        ("  its MLP", counts.mlp_per_block),
    ] {
        write_line(&format!("  {name:<24}{:>16}", grouped(count)))?;
    }
    let rare = [("  its cross-attention", counts.cross_attention_per_block), ("the other head", counts.head)];
    for (name, count) in rare.into_iter().filter(|(_, count)| *count > 0) {
        write_line(&format!("  {name:<24}{:>16}", grouped(count)))?;
    }
    heading("memory            weights       cache, one token   cache, whole context", 1)?;
    let positions = report.config["n_positions"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    let (weights, cache) = (&report.memory_bytes, &report.kv_bytes_per_token);
    for (name, weights, cache) in [
        ("f32", mebibytes(weights.f32), cache.f32),
        ("f16", mebibytes(weights.f16), cache.f16),
        ("bf16", mebibytes(weights.bf16), cache.bf16),
        ("q8", String::new(), cache.q8),
    ] {
        let whole = mebibytes((cache as u64).saturating_mul(positions as u64));
        write_line(&format!("  {name:<8}{weights:>16}{:>17} B{whole:>22}", grouped(cache)))?;
    }
    let dtypes: Vec<String> = report.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
    heading(&format!("{} tensors  {}", report.tensors.len(), dtypes.join(", ")), 1)?;
    for tensor in &report.tensors {
        let role = if tensor.role == "parameter" { String::new() } else { format!("  ({})", tensor.role) };
        write_line(&format!("  {:<46}{:<6}{:?}{role}", tensor.name, tensor.dtype, tensor.shape))?;
        if let Some(Statistics { min, max, mean, standard_deviation, zeros, nan, infinite }) =
            &tensor.statistics
        {
            write_line(&format!(
                "      min {min:.4e}  max {max:.4e}  mean {mean:.4e}  std {standard_deviation:.4e}  zeros {zeros}  NaN {nan}  inf {infinite}"
            ))?;
        }
    }
    heading("mismatches with the configuration", report.mismatches.len())?;
    for mismatch in &report.mismatches {
        write_line(&format!("  {mismatch}"))?;
    }
    Ok(())
}

/// Prints a heading after an empty line, unless its section is empty.
fn heading(text: &str, entries: usize) -> Result<()> {
    if entries == 0 {
        return Ok(());
    }
    write_line("")?;
    write_line(text)
}

fn print_ledger(report: &Inspection) -> Result<()> {
    for LedgerRow { name, count, definition } in &report.ledger {
        write_line(&format!("{:>16}  {name:<18}  {definition}", grouped(*count)))?;
    }
    let own = report.stored_parameters.unwrap_or(report.parameters.unique);
    let row = report.ledger.iter().find(|entry| entry.count == own);
    let which = row.map_or("matches no row".to_owned(), |entry| format!("matches the row `{}`", entry.name));
    write_line(&format!("{:>16}  {:<18}  {which}", grouped(own), "this checkpoint"))?;
    for rule in report.rules.iter().filter(|rule| rule.contains("paper")) {
        write_line(&format!("{:>16}  {:<18}  {rule}; OpenAI: \"wrong due to an error\"", "", "the paper"))?;
    }
    Ok(())
}

fn print_comparison(comparison: &Comparison) -> Result<()> {
    for differing in &comparison.differences {
        write_line(&format!("{:<46}{}", differing.name, differing.difference))?;
    }
    write_line(&match &comparison.first_differing {
        None => "equal: every parameter has the same values".to_owned(),
        Some(first) => {
            format!("{} parameters differ, starting with {first}", comparison.differences.len())
        }
    })
}
