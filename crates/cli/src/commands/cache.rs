//! `gpt2 cache`: what a run over a text has at chosen places, in a file.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_interpret::named_sites;
use candle_gpt2_look::{Activations, CacheFormat};
use candle_gpt2_weights::expect_free;
use clap::Args;
use serde_json::json;

use super::look::view::{Input, OpeningArguments};
use crate::exit::UsageError;
use crate::input::InputArguments;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 cache \"The dog\" --model gpt2 --sites 'blocks.*.attn.hook_z,resid_post' --out cache.safetensors
  gpt2 cache \"The dog\" --model gpt2 --sites '*' --as transformer-lens --bos --out cache.npz
  gpt2 cache --ids 464,3290 --model gpt2 --sites z,pattern --layers 0-5 --positions 1 --out cache.safetensors

Tensors have TransformerLens' names and layouts, with a batch axis of 1. Hook points: embed pos_embed; for each block resid_pre \
ln1.scale ln1.normalized q k v attn_scores pattern z result attn_out resid_mid ln2.scale ln2.normalized mlp_pre mlp_post mlp_out \
resid_post; ln_final.scale ln_final.normalized final_norm logits. A safetensors file has the model, the tokens and the options \
in its metadata.")]
pub(crate) struct CacheArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: CacheLook,
    /// Hook points, separated by commas: short names, TransformerLens' names, or patterns with *; a name without a layer means every block
    #[arg(long, value_name = "SITES")]
    pub(crate) sites: String,
    /// Output file: .safetensors or .npz; an existing one is not overwritten
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) activations: Activations,
}

/// The model, the token in front, and the report of what was written.
#[derive(Debug, Args)]
pub(crate) struct CacheLook {
    #[command(flatten)]
    pub(crate) look: OpeningArguments,
    /// Print one JSON object: schema, out, bytes, bos, tokens (index, id, text), tensors (name, shape)
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(arguments: &CacheArguments, hub: &HubOptions) -> Result<ExitCode> {
    let format = CacheFormat::of(&arguments.out)?;
    expect_free(&arguments.out)?;
    let opening = &arguments.look.look;
    let (loaded, reader, (activations, checked)) = opening.open(hub, |reader| {
        let activations = Activations {
            text: arguments.input.texts(reader)?,
            sites: named_sites(&arguments.sites, reader.vocabulary().config().n_layer)
                .map_err(|error| UsageError(format!("--sites: {error}")))?,
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
