//! `gpt2 inspect`: configuration, tensors, parameter counts, memory.

use std::process::ExitCode;

use anyhow::Result;
use gpt2::{Gpt2Config, ParameterCounts, expected_parameters};
use gpt2_weights::{Checkpoint, Orientation, checkpoint_shape};
use serde::Serialize;
use serde_json::Value;

use crate::UsageError;
use crate::arguments::InspectArguments;
use crate::output::{grouped, mebibytes, write_json, write_line};

/// Bytes of an element of each type that weights and caches are held in.
const ELEMENT_BYTES: [(&str, usize); 3] = [("f32", 4), ("f16", 2), ("bf16", 2)];

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    format: &'static str,
    path: Option<String>,
    prefix: String,
    orientation: &'static str,
    tied_head: bool,
    config: Value,
    parameters: Counts,
    memory_bytes: PerType,
    kv_bytes_per_token: PerType,
    tensors: Vec<TensorRow>,
    mismatches: Vec<String>,
}

#[derive(Serialize)]
struct Counts {
    unique: usize,
    with_untied_head: usize,
    embedding: usize,
    blocks: usize,
    per_block: usize,
    attention_per_block: usize,
    mlp_per_block: usize,
}

#[derive(Serialize)]
struct PerType {
    f32: usize,
    f16: usize,
    bf16: usize,
}

#[derive(Serialize)]
struct TensorRow {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    /// `parameter`, `buffer` (a causal mask of an old checkpoint), `tied head`, or `surplus`.
    role: &'static str,
}

pub(crate) fn run(arguments: &InspectArguments) -> Result<ExitCode> {
    let report = match (&arguments.subject.model, &arguments.subject.preset) {
        (Some(path), _) => report_of_checkpoint(&Checkpoint::open(path)?),
        (None, Some(name)) => {
            report_of_preset(&Gpt2Config::preset(name).map_err(|error| UsageError(error.to_string()))?)
        }
        (None, None) => return Err(UsageError("give --model DIR or --preset NAME".into()).into()),
    };
    if arguments.json {
        write_json(&report)?;
    } else {
        print(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report_of_checkpoint(checkpoint: &Checkpoint) -> Report {
    let mismatches = match checkpoint.check() {
        Err(gpt2_weights::WeightsError::Mismatches { mismatches, .. }) => mismatches,
        _ => Vec::new(),
    };
    let is_surplus = |name: &str| {
        let surplus = |mismatch: &gpt2_weights::Mismatch| {
            matches!(mismatch, gpt2_weights::Mismatch::Surplus { .. }) && mismatch.name() == name
        };
        mismatches.iter().any(surplus)
    };
    let role = |name: &str| {
        if checkpoint.buffers().any(|buffer| buffer.name == name) {
            "buffer"
        } else if checkpoint.tied_head().is_some_and(|head| head.name == name) {
            "tied head"
        } else if is_surplus(name) {
            "surplus"
        } else {
            "parameter"
        }
    };
    let tensors = checkpoint.tensors().iter().map(|tensor| TensorRow {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype.to_string(),
        role: role(&tensor.name),
    });
    Report {
        format: checkpoint.format().name(),
        path: Some(checkpoint.weights_path().display().to_string()),
        prefix: checkpoint.prefix().to_owned(),
        orientation: orientation_name(checkpoint.orientation()),
        tensors: tensors.collect(),
        mismatches: mismatches.iter().map(ToString::to_string).collect(),
        ..report_of_config(checkpoint.config())
    }
}

fn report_of_preset(config: &Gpt2Config) -> Report {
    let orientation = Orientation::Conv1D;
    let row = |parameter: &gpt2::Parameter| TensorRow {
        name: parameter.name.clone(),
        shape: checkpoint_shape(parameter, orientation),
        dtype: "F32".into(),
        role: "parameter",
    };
    Report {
        orientation: orientation_name(orientation),
        tensors: expected_parameters(config).iter().map(row).collect(),
        ..report_of_config(config)
    }
}

/// What follows from the configuration alone.
fn report_of_config(config: &Gpt2Config) -> Report {
    let ParameterCounts {
        unique,
        with_untied_head,
        embedding,
        blocks,
        per_block,
        attention_per_block,
        mlp_per_block,
    } = ParameterCounts::new(config);
    let per_type = |bytes: &dyn Fn(usize) -> usize| {
        let [f32, f16, bf16] = ELEMENT_BYTES.map(|(_, element_bytes)| bytes(element_bytes));
        PerType { f32, f16, bf16 }
    };
    Report {
        format: "preset",
        path: None,
        prefix: String::new(),
        orientation: "",
        tied_head: config.tie_word_embeddings,
        config: config.to_json(),
        parameters: Counts {
            unique,
            with_untied_head,
            embedding,
            blocks,
            per_block,
            attention_per_block,
            mlp_per_block,
        },
        memory_bytes: per_type(&|element_bytes| unique * element_bytes),
        kv_bytes_per_token: per_type(&|element_bytes| config.kv_bytes_per_token(element_bytes)),
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
    write_line(&format!("format       {}", report.format))?;
    if let Some(path) = &report.path {
        write_line(&format!("file         {path}"))?;
    }
    if !report.prefix.is_empty() {
        write_line(&format!("prefix       {}", report.prefix))?;
    }
    write_line(&format!("orientation  {}", report.orientation))?;
    let head = if report.tied_head {
        "tied to the token embedding"
    } else {
        "its own (lm_head.weight)"
    };
    write_line(&format!("output head  {head}"))?;
    write_line("\nconfig")?;
    for (key, value) in report.config.as_object().into_iter().flatten() {
        write_line(&format!("  {key:<34}{value}"))?;
    }
    let counts = &report.parameters;
    write_line("\nparameters")?;
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
    write_line("\nmemory            weights       cache, one token   cache, whole context")?;
    let positions = report.config["n_positions"]
        .as_u64()
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(0);
    let (weights, cache) = (&report.memory_bytes, &report.kv_bytes_per_token);
    for (name, weights, cache) in [
        ("f32", weights.f32, cache.f32),
        ("f16", weights.f16, cache.f16),
        ("bf16", weights.bf16, cache.bf16),
    ] {
        let whole = mebibytes(cache.saturating_mul(positions));
        write_line(&format!(
            "  {name:<8}{:>16}{:>17} B{whole:>22}",
            mebibytes(weights),
            grouped(cache)
        ))?;
    }
    write_line(&format!("\n{} tensors", report.tensors.len()))?;
    for tensor in &report.tensors {
        let role = if tensor.role == "parameter" {
            String::new()
        } else {
            format!("  ({})", tensor.role)
        };
        write_line(&format!(
            "  {:<40}{:<6}{:?}{role}",
            tensor.name, tensor.dtype, tensor.shape
        ))?;
    }
    if !report.mismatches.is_empty() {
        write_line("\nwhat does not fit the configuration")?;
        for mismatch in &report.mismatches {
            write_line(&format!("  {mismatch}"))?;
        }
    }
    Ok(())
}
