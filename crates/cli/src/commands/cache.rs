//! `gpt2 cache`: writes activations at chosen hook points to a file, or to shards for many prompts.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2::Site;
use candle_gpt2_engine::{HubOptions, RowFile};
use candle_gpt2_interpret::named_sites;
use candle_gpt2_jobs::{ActivationsJob, ActivationsOptions};
use candle_gpt2_look::{Activations, CacheFormat};
use candle_gpt2_weights::expect_free;
use clap::Args;
use serde_json::json;

use super::look::view::{Input, OpeningArguments};
use super::train::InterruptedTerminal;
use crate::exit::UsageError;
use crate::input::{InputArguments, read_file};
use crate::{interrupt, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 cache \"The dog\" --model gpt2 --sites 'blocks.*.attn.hook_z,resid_post' --out cache.safetensors
  gpt2 cache \"The dog\" --model gpt2 --sites '*' --as transformer-lens --bos --out cache.npz
  gpt2 cache --ids 464,3290 --model gpt2 --sites z,pattern --layers 0-5 --positions 1 --out cache.safetensors
  gpt2 cache --prompts-file corpus.jsonl --model gpt2 --sites blocks.8.hook_resid_pre --bos --out activations
  gpt2 cache … --resume    # the same command again, after it was stopped

Tensors have TransformerLens' names and layouts, with a batch axis of 1. Hook points: embed pos_embed; for each block resid_pre \
ln1.scale ln1.normalized q k v attn_scores pattern z result attn_out resid_mid ln2.scale ln2.normalized mlp_pre mlp_post mlp_out \
resid_post; ln_final.scale ln_final.normalized final_norm logits. A safetensors file has the model, the tokens and the options \
in its metadata.

With --prompts-file, --out is a folder of safetensors shards: a tensor (tokens, width) for each hook point, the tokens, and where each \
prompt begins. Only hook points with a vector for each token can be written, and blocks above the last of them are not computed. A \
prompt longer than the context is split into several sequences. activations.json lists the shards; each gets its name when it is \
complete.")]
pub(crate) struct CacheArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: CacheLook,
    /// Hook points, separated by commas: short names, TransformerLens' names, or patterns with *; a name
    /// without a layer means every block
    #[arg(long, value_name = "SITES")]
    pub(crate) sites: String,
    /// Output file: .safetensors or .npz; existing files are not overwritten. With --prompts-file, a folder
    /// that must be new or empty, except with --resume
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) activations: Activations,
    /// Write the activations of every prompt in a file to shards: one prompt per line, or, if its name ends
    /// in .jsonl, objects {"prompt": TEXT} or {"ids": [ID, …]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input", "positions", "numbers"], help_heading = "Many prompts")]
    pub(crate) prompts_file: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Many prompts")]
    pub(crate) shards: ActivationsOptions,
}

/// Options for the model, the BOS token and the report.
#[derive(Debug, Args)]
pub(crate) struct CacheLook {
    #[command(flatten)]
    pub(crate) look: OpeningArguments,
    /// Print one JSON object: schema, out, bytes, bos, tokens (index, id, text), tensors (name, shape);
    /// with --prompts-file schema, out, sites (name, width), bos, tokens, sequences, shards, bytes,
    /// computed_tokens, elapsed_s
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(arguments: &CacheArguments, hub: &HubOptions) -> Result<ExitCode> {
    if let Some(prompts) = &arguments.prompts_file {
        return write_shards(arguments, prompts, hub);
    }
    let format = CacheFormat::of(&arguments.out)
        .map_err(|error| UsageError(format!("{error}; a folder of shards needs --prompts-file")))?;
    expect_free(&arguments.out)?;
    let opening = &arguments.look.look;
    let (loaded, reader, (activations, checked)) = opening.open(hub, |reader| {
        let activations = Activations {
            text: arguments.input.texts(reader)?,
            sites: arguments.sites(reader.vocabulary().config().n_layer)?,
            ..arguments.activations.clone()
        };
        let checked = activations.check(reader)?;
        Ok((activations, checked))
    })?;
    let cached = activations.cached(&checked, &opening.subject(&loaded, &reader))?;
    let bytes = cached.write(&arguments.out, format)?;
    let tensors = &cached.tensors;
    if arguments.look.json {
        let shapes: Vec<_> =
            tensors.iter().map(|(name, value)| json!({ "name": name, "shape": value.dims() })).collect();
        output::write_json(&json!({
            "schema": cached.schema(), "out": arguments.out, "bytes": bytes, "bos": cached.bos, "tokens": cached.tokens,
            "tensors": shapes,
        }))?;
    } else {
        output::write_line(&format!(
            "{}: {} tensors, {bytes} bytes",
            arguments.out.display(),
            tensors.len()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl CacheArguments {
    fn sites(&self, n_layer: usize) -> Result<Vec<Site>, UsageError> {
        named_sites(&self.sites, n_layer).map_err(|error| UsageError(format!("--sites: {error}")))
    }
}

/// Writes the activations of every prompt in a file to a folder of shards.
fn write_shards(arguments: &CacheArguments, prompts: &Path, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.activations.layers.is_some() {
        let way = "write the layers in --sites, such as 3.resid_post for resid_post of layer 3";
        return Err(UsageError(format!("--layers cannot be used with --prompts-file; {way}")).into());
    }
    let opening = &arguments.look.look;
    let (loaded, reader, mut job) = opening.open(hub, |reader| {
        let config = reader.vocabulary().config();
        let job = ActivationsJob {
            prompts: prompts.to_owned(),
            rows: RowFile::new(prompts, read_file(prompts)?),
            model: String::new(),
            sites: arguments.sites(config.n_layer)?,
            bos: reader.bos(),
            out: arguments.out.clone(),
            options: arguments.shards.clone(),
        };
        job.check(config)?;
        Ok(job)
    })?;
    job.model = opening.subject(&loaded, &reader).name().to_owned();
    interrupt::end_job()?;
    let report = job.run(&loaded, &InterruptedTerminal)?;
    if arguments.look.json {
        output::write_json(&report)?;
    } else {
        let computed = match report.computed_tokens {
            0 => ", already complete".to_owned(),
            tokens => format!(", {:.0} tokens/s", tokens as f64 / report.elapsed_s.max(f64::MIN_POSITIVE)),
        };
        output::write_line(&format!(
            "{}: {} tokens from {} sequences in {} shards, {}{computed}",
            report.out.display(),
            output::grouped(report.tokens),
            output::grouped(report.sequences),
            output::grouped(report.shards.len()),
            output::mebibytes(report.bytes),
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
