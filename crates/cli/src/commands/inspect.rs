//! `gpt2 inspect`: what a checkpoint is, and how that was found out.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_core::DType;
use clap::Args;
use gpt2::{
    Gpt2Config, KvDType, LedgerRow, ParameterCounts, expected_parameters, paper_size, parameter_ledger,
};
use gpt2_engine::{HubOptions, Reporter, Silent, Unit};
use gpt2_weights::{
    Checkpoint, DifferenceKind, Mismatch, Orientation, Statistics, WeightsError, checkpoint_shape,
    differences,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::exit::UsageError;
use crate::model_arguments::{CommonArguments, open_other};
use crate::output::{grouped, mebibytes, write_json, write_line};
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 inspect --model DIR
  gpt2 inspect --preset gpt2-xl --ledger
  gpt2 inspect --model DIR --tensors
  gpt2 inspect --model DIR --diff OTHER
  gpt2 inspect --model DIR --json | jq .parameters")]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    pub(crate) subject: InspectSubject,
    /// Also minimum, maximum, mean and deviation of every tensor, and how many values are zero or not finite
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Only the parameter counts in circulation, each with its definition
    #[arg(long, conflicts_with_all = ["tensors", "diff"])]
    pub(crate) ledger: bool,
    /// Compare with another checkpoint, parameter by parameter, whatever the formats
    #[arg(long, value_name = "OTHER", conflicts_with = "tensors")]
    pub(crate) diff: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to inspect: one of both.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct InspectSubject {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// A published model, which needs no files: distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl
    #[arg(long, value_name = "NAME")]
    pub(crate) preset: Option<String>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    format: &'static str,
    evidence: String,
    path: Option<String>,
    files: Vec<FileRow>,
    naming: &'static str,
    prefix: String,
    orientation: &'static str,
    orientation_evidence: String,
    tied_head: bool,
    vocabulary: Vocabulary,
    rules: Vec<String>,
    config: Value,
    parameters: ParameterCounts,
    ledger: Vec<LedgerRow>,
    /// Distinct parameters in the files, without biases that are not stored; absent for a preset.
    stored_parameters: Option<usize>,
    memory_bytes: PerType,
    kv_bytes_per_token: KvPerType,
    dtypes: BTreeMap<String, usize>,
    tensors: Vec<TensorRow>,
    mismatches: Vec<String>,
}

#[derive(Serialize)]
struct FileRow {
    path: String,
    bytes: usize,
}

/// The number of tokens, as each place has it.
#[derive(Serialize)]
struct Vocabulary {
    config: usize,
    embedding_rows: Option<usize>,
    tokenizer: Option<usize>,
}

#[derive(Serialize)]
struct PerType {
    f32: usize,
    f16: usize,
    bf16: usize,
}

impl PerType {
    fn new(bytes: impl Fn(usize) -> usize) -> Self {
        Self { f32: bytes(4), f16: bytes(2), bf16: bytes(2) }
    }
}

#[derive(Serialize)]
struct KvPerType {
    f32: usize,
    f16: usize,
    bf16: usize,
    q8: usize,
}

impl KvPerType {
    fn new(config: &Gpt2Config) -> Self {
        let [f32, f16, bf16, q8] = [KvDType::F32, KvDType::F16, KvDType::Other(DType::BF16), KvDType::Q8]
            .map(|dtype| config.kv_bytes_per_token(dtype));
        Self { f32, f16, bf16, q8 }
    }
}

#[derive(Serialize)]
struct TensorRow {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    /// `parameter`, `buffer` (a causal mask of an old checkpoint), `tied head`, or `surplus`.
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    statistics: Option<Statistics>,
}

pub(crate) fn run(arguments: &InspectArguments, hub: &HubOptions) -> Result<ExitCode> {
    let report = match (&arguments.subject.model, &arguments.subject.preset) {
        (Some(path), _) => {
            let checkpoint = arguments.common.open_checkpoint(path, hub)?;
            if let Some(other) = &arguments.diff {
                return compare(&checkpoint, &open_other(other, hub)?, arguments.json);
            }
            report_of_checkpoint(&checkpoint, arguments.tensors)?
        }
        (None, Some(_)) if arguments.diff.is_some() || arguments.tensors => {
            return Err(UsageError("--diff and --tensors need --model: a preset has no values".into()).into());
        }
        (None, Some(name)) => {
            arguments.common.check_without_checkpoint()?;
            report_of_preset(&Gpt2Config::preset(name).map_err(|error| UsageError(error.to_string()))?)
        }
        (None, None) => return Err(UsageError("give --model DIR or --preset NAME".into()).into()),
    };
    match (arguments.json, arguments.ledger) {
        (true, _) => write_json(&report)?,
        (false, true) => print_ledger(&report)?,
        (false, false) => print(&report)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn report_of_checkpoint(checkpoint: &Checkpoint, with_statistics: bool) -> Result<Report> {
    let mismatches = match checkpoint.check() {
        Err(WeightsError::Mismatches { mismatches, .. }) => mismatches,
        _ => Vec::new(),
    };
    let buffers: HashSet<&str> = checkpoint.buffers().map(|buffer| buffer.name.as_str()).collect();
    let surplus: HashSet<&str> = mismatches
        .iter()
        .filter(|mismatch| matches!(mismatch, Mismatch::Surplus { .. }))
        .map(Mismatch::name)
        .collect();
    let tied_head = checkpoint.tied_head().map(|head| head.name.as_str());
    let role = |name: &str| match name {
        name if buffers.contains(name) => "buffer",
        name if tied_head == Some(name) => "tied head",
        name if surplus.contains(name) => "surplus",
        _ => "parameter",
    };
    let all_bytes = checkpoint.files().map(|(_, bytes)| bytes as u64).sum();
    let reporter: &dyn Reporter = if with_statistics { &Terminal } else { &Silent };
    let bar = reporter.start("reading", all_bytes, Unit::Bytes);
    let (mut tensors, mut dtypes) = (Vec::new(), BTreeMap::new());
    for (index, tensor) in checkpoint.tensors().iter().enumerate() {
        let statistics = if with_statistics { checkpoint.statistics(index)? } else { None };
        bar.advance(tensor.stored_bytes() as u64);
        *dtypes.entry(tensor.dtype.to_string()).or_default() += 1;
        tensors.push(TensorRow {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype.to_string(),
            role: role(&tensor.name),
            statistics,
        });
    }
    drop(bar);
    let config = checkpoint.config();
    let vocabulary = Vocabulary {
        config: config.vocab_size,
        embedding_rows: checkpoint.embedding_rows(),
        tokenizer: checkpoint.tokenizer(None).ok().map(|tokenizer| tokenizer.get_vocab_size(true)),
    };
    let mut rules = checkpoint.rules().to_vec();
    rules.extend(vocabulary_rule(&vocabulary));
    Ok(Report {
        format: checkpoint.format().name(),
        evidence: checkpoint.evidence().to_owned(),
        path: Some(display(checkpoint.weights_path())),
        files: checkpoint.files().map(|(path, bytes)| FileRow { path: display(path), bytes }).collect(),
        naming: checkpoint.naming_scheme(),
        prefix: checkpoint.prefix().to_owned(),
        orientation: orientation_name(checkpoint.orientation()),
        orientation_evidence: checkpoint.orientation_evidence().to_owned(),
        vocabulary,
        rules,
        dtypes,
        tensors,
        stored_parameters: Some(checkpoint.stored_parameter_count()),
        mismatches: mismatches.iter().map(ToString::to_string).collect(),
        ..report_of_config(config)
    })
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

/// How the numbers of tokens relate, where they differ.
fn vocabulary_rule(vocabulary: &Vocabulary) -> Option<String> {
    let (rows, tokens) = (vocabulary.config, vocabulary.tokenizer?);
    match rows.checked_sub(tokens) {
        Some(0) => None,
        Some(padding) => {
            Some(format!("{padding} rows of the vocabulary have no token in the tokenizer: padding"))
        }
        None => Some(format!("the tokenizer has {} tokens that the vocabulary lacks", tokens - rows)),
    }
}

fn report_of_preset(config: &Gpt2Config) -> Report {
    let orientation = Orientation::Conv1D;
    let row = |parameter: &gpt2::Parameter| TensorRow {
        name: parameter.name.clone(),
        shape: checkpoint_shape(parameter, orientation),
        dtype: "F32".into(),
        role: "parameter",
        statistics: None,
    };
    Report {
        orientation: orientation_name(orientation),
        orientation_evidence: "as published".into(),
        tensors: expected_parameters(config).iter().map(row).collect(),
        ..report_of_config(config)
    }
}

/// What follows from the configuration alone.
fn report_of_config(config: &Gpt2Config) -> Report {
    let parameters = ParameterCounts::new(config);
    Report {
        format: "preset",
        evidence: "no file: the published configuration".into(),
        path: None,
        files: Vec::new(),
        naming: "Hugging Face",
        prefix: String::new(),
        orientation: "",
        orientation_evidence: String::new(),
        tied_head: config.tie_word_embeddings,
        vocabulary: Vocabulary { config: config.vocab_size, embedding_rows: None, tokenizer: None },
        rules: paper_size(config)
            .map(|size| format!("the paper calls the published model of this shape {size}"))
            .into_iter()
            .collect(),
        config: config.to_json(),
        parameters,
        ledger: parameter_ledger(config),
        stored_parameters: None,
        memory_bytes: PerType::new(|element_bytes| parameters.unique * element_bytes),
        kv_bytes_per_token: KvPerType::new(config),
        dtypes: BTreeMap::new(),
        tensors: Vec::new(),
        mismatches: Vec::new(),
    }
}

fn orientation_name(orientation: Orientation) -> &'static str {
    match orientation {
        Orientation::Conv1D => "Conv1D (in, out)",
        Orientation::Linear => "Linear (out, in)",
    }
}

fn print(report: &Report) -> Result<()> {
    if let Some(path) = &report.path {
        write_line(&format!("file         {path}"))?;
    }
    write_line(&format!("format       {}: {}", report.format, report.evidence))?;
    let prefix =
        if report.prefix.is_empty() { "no prefix".to_owned() } else { format!("prefix `{}`", report.prefix) };
    write_line(&format!("names        {}, {prefix}", report.naming))?;
    write_line(&format!("orientation  {}: {}", report.orientation, report.orientation_evidence))?;
    let head = if report.tied_head { "tied to the token embedding" } else { "its own (lm_head.weight)" };
    write_line(&format!("output head  {head}"))?;
    let known = |count: Option<usize>| count.map_or("none".to_owned(), grouped);
    let Vocabulary { config, embedding_rows, tokenizer } = report.vocabulary;
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
    heading("memory            weights       cache, one token   cache, whole context", 1)?;
    let positions = report.config["n_positions"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    let (weights, cache) = (&report.memory_bytes, &report.kv_bytes_per_token);
    for (name, weights, cache) in [
        ("f32", mebibytes(weights.f32), cache.f32),
        ("f16", mebibytes(weights.f16), cache.f16),
        ("bf16", mebibytes(weights.bf16), cache.bf16),
        ("q8", String::new(), cache.q8),
    ] {
        let whole = mebibytes(cache.saturating_mul(positions));
        write_line(&format!("  {name:<8}{weights:>16}{:>17} B{whole:>22}", grouped(cache)))?;
    }
    let dtypes: Vec<String> = report.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
    heading(&format!("{} tensors  {}", report.tensors.len(), dtypes.join(", ")), 1)?;
    for tensor in &report.tensors {
        let role = if tensor.role == "parameter" { String::new() } else { format!("  ({})", tensor.role) };
        write_line(&format!("  {:<40}{:<6}{:?}{role}", tensor.name, tensor.dtype, tensor.shape))?;
        if let Some(Statistics { min, max, mean, standard_deviation, zeros, nan, infinite }) =
            &tensor.statistics
        {
            write_line(&format!(
                "      min {min:.4e}  max {max:.4e}  mean {mean:.4e}  std {standard_deviation:.4e}  zeros {zeros}  NaN {nan}  inf {infinite}"
            ))?;
        }
    }
    heading("what does not fit the configuration", report.mismatches.len())?;
    for mismatch in &report.mismatches {
        write_line(&format!("  {mismatch}"))?;
    }
    Ok(())
}

/// A heading with an empty line before it, where something follows.
fn heading(text: &str, entries: usize) -> Result<()> {
    if entries == 0 {
        return Ok(());
    }
    write_line("")?;
    write_line(text)
}

fn print_ledger(report: &Report) -> Result<()> {
    for LedgerRow { name, count, definition } in &report.ledger {
        write_line(&format!("{:>16}  {name:<18}  {definition}", grouped(*count)))?;
    }
    let own = report.stored_parameters.unwrap_or(report.parameters.unique);
    let row = report.ledger.iter().find(|entry| entry.count == own);
    let which = row.map_or("none of these rows".to_owned(), |entry| format!("the row `{}`", entry.name));
    write_line(&format!("{:>16}  {:<18}  {which}", grouped(own), "this checkpoint"))?;
    for rule in report.rules.iter().filter(|rule| rule.contains("the paper")) {
        write_line(&format!("{:>16}  {:<18}  {rule}; OpenAI: \"wrong due to an error\"", "", "the paper"))?;
    }
    Ok(())
}

fn compare(first: &Checkpoint, second: &Checkpoint, as_json: bool) -> Result<ExitCode> {
    let bytes = first.parameter_bytes() + second.parameter_bytes();
    let bar = Terminal.start("comparing", bytes, Unit::Bytes);
    let found = differences(first, second, &|bytes| bar.advance(bytes))?;
    drop(bar);
    let describe = |kind: &DifferenceKind| match kind {
        DifferenceKind::OnlyInFirst => "only in the first".to_owned(),
        DifferenceKind::OnlyInSecond => "only in the second".to_owned(),
        DifferenceKind::Shape(a, b) => format!("shapes {a:?} and {b:?}, as (out, in)"),
        DifferenceKind::Values(largest) => format!("largest difference {largest:e}"),
    };
    let largest = |kind: &DifferenceKind| match kind {
        DifferenceKind::Values(largest) => Some(*largest),
        _ => None,
    };
    if as_json {
        let row = |difference: &gpt2_weights::Difference| {
            json!({
                "name": difference.name,
                "difference": describe(&difference.kind),
                "largest": largest(&difference.kind),
            })
        };
        write_json(&json!({
            "equal": found.is_empty(),
            "first_differing": found.first().map(|difference| &difference.name),
            "largest": found.iter().filter_map(|difference| largest(&difference.kind)).reduce(f64::max),
            "differences": found.iter().map(row).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    for difference in &found {
        write_line(&format!("{:<40}{}", difference.name, describe(&difference.kind)))?;
    }
    write_line(&match found.first() {
        None => "equal: every parameter has the same values".to_owned(),
        Some(first) => format!("{} parameters differ, the first of them {}", found.len(), first.name),
    })?;
    Ok(ExitCode::SUCCESS)
}
