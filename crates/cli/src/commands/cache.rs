//! `gpt2 cache`: what a run over a text has at chosen places, in a file.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use clap::Args;
use gpt2::{Site, SiteKind};
use gpt2_engine::HubOptions;
use gpt2_interpret::{Processing, Record};
use gpt2_weights::replace_file;
use serde_json::json;

use super::look::view::{Failed, Looked, Numbers, OpeningArguments, Reader, numbers};
use crate::exit::UsageError;
use crate::input::InputArguments;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 cache \"The dog\" --model gpt2 --sites 'blocks.*.attn.hook_z,resid_post' --out cache.safetensors
  gpt2 cache \"The dog\" --model gpt2 --sites '*' --as transformer-lens --bos --out cache.npz
  gpt2 cache --ids 464,3290 --model gpt2 --sites z,pattern --layers 0-5 --positions 1 --out cache.safetensors
Tensors have TransformerLens' names and layouts, with the batch axis of 1. The places: embed pos_embed; of each block resid_pre
ln1.scale ln1.normalized q k v attn_scores pattern z result attn_out resid_mid ln2.scale ln2.normalized mlp_pre mlp_post mlp_out
resid_post; ln_final.scale ln_final.normalized final_norm logits. A safetensors file has the model, the tokens and what was asked for
in its metadata.")]
pub(crate) struct CacheArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: CacheLook,
    /// The places: names of ours or TransformerLens' and patterns with *, separated by commas; a name without a layer is that of every block
    #[arg(long, value_name = "SITES")]
    pub(crate) sites: String,
    /// Only these layers: 3, 0-5 or 0,4,8-11
    #[arg(long, value_name = "LAYERS")]
    pub(crate) layers: Option<String>,
    /// Only these tokens (of scores and patterns: queries): 3, 0-5 or 0,4,8-11
    #[arg(long, value_name = "POSITIONS", allow_hyphen_values = true)]
    pub(crate) positions: Option<String>,
    /// The file: .safetensors or .npz
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// The numbers of the checkpoint as it is, or those that TransformerLens' compatibility mode shows of it (layer norms folded, centred, value biases moved)
    #[arg(long = "as", value_name = "NUMBERS", default_value = "raw")]
    pub(crate) numbers: Numbers,
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

/// The axis of tokens in logits, `(B, T, V)`.
const TOKEN_DIM: usize = 1;

pub(crate) fn run(arguments: &CacheArguments, hub: &HubOptions) -> Result<ExitCode> {
    let extension = arguments.out.extension().and_then(|extension| extension.to_str());
    let is_npz = match extension {
        Some("safetensors") => false,
        Some("npz") => true,
        _ => {
            let message = format!(
                "--out {}: expected a name that ends in .safetensors or .npz",
                arguments.out.display()
            );
            return Err(UsageError(message).into());
        }
    };
    let (looked, (ids, sites, positions)) = arguments.look.look.open(hub, |reader: &Reader| {
        let ids = reader.input(&arguments.input)?;
        let mut sites = Site::matching(&arguments.sites, reader.n_layer)
            .map_err(|error| UsageError(format!("--sites: {error}")))?;
        if let Some(layers) = &arguments.layers {
            let layers = reader.layers(layers)?;
            sites.retain(|site| site.layer.is_none_or(|layer| layers.contains(&layer)));
            if sites.is_empty() {
                let message =
                    format!("--sites {}: no place of these is in the layers of --layers", arguments.sites);
                return Err(UsageError(message).into());
            }
        }
        let positions =
            arguments.positions.as_ref().map(|positions| numbers(positions, ids.len())).transpose();
        let positions = positions.map_err(|error| UsageError(format!("--positions: {error}")))?;
        Ok((ids, sites, positions))
    })?;
    let model = looked.loaded.model();
    // TransformerLens has the normalized residual stream where the model has the norm's output.
    let norms = [SiteKind::FinalNorm, SiteKind::LnFinalNormalized].map(Site::outside);
    let is_processed = arguments.numbers == Numbers::TransformerLens;
    let also = (is_processed && sites.contains(&norms[0])).then_some(norms[1]);
    let mut record = Record::new(sites.iter().copied().chain(also));
    if let Some(positions) = &positions {
        record = record.at(positions.clone());
    }
    let mut record = looked.run(&ids)?.filled(record)?;
    let processing = is_processed.then(|| Processing::new(model)).transpose()?;
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    for site in &sites {
        let value = match &processing {
            Some(_) if *site == norms[0] => record.get(norms[1])?.clone(),
            Some(processing) => processing.apply(*site, record.get(*site)?)?,
            None => record.get(*site)?.clone(),
        };
        record.values.retain(|kept, _| kept != site || Some(*kept) == also);
        // A record has the logits of every token that the pass gave them of.
        let value = match &positions {
            Some(positions) if site.kind == SiteKind::Logits => {
                let positions = positions.iter().map(|position| Ok(u32::try_from(*position)?));
                let positions = positions.collect::<Result<Vec<u32>>>()?;
                value.index_select(&Tensor::new(positions, value.device())?, TOKEN_DIM)?
            }
            _ => value,
        };
        tensors.insert(site.to_string(), value.contiguous()?);
    }
    let metadata = metadata(arguments, &looked, &ids, &sites, positions.as_deref())?;
    let whole = |partial: &std::path::Path| -> Result<()> {
        if is_npz {
            let in_f32 = |(name, value): (&String, &Tensor)| Ok((name.clone(), value.to_dtype(DType::F32)?));
            let tensors = tensors.iter().map(in_f32).collect::<Result<Vec<_>>>()?;
            return Ok(Tensor::write_npz(&tensors, partial)?);
        }
        Ok(gpt2_weights::write_tensors(partial, &tensors, metadata.clone())?)
    };
    replace_file(&arguments.out, |partial| whole(partial).map_err(Failed)).map_err(|Failed(error)| error)?;
    let bytes = File::open(&arguments.out)
        .and_then(|file| file.metadata())
        .with_context(|| arguments.out.display().to_string())?
        .len();
    if arguments.look.json {
        let shapes: Vec<_> =
            tensors.iter().map(|(name, value)| json!({ "name": name, "shape": value.dims() })).collect();
        output::write_json(&json!({
            "schema": "gpt2.cache/1", "out": arguments.out, "bytes": bytes, "bos": looked.has_bos, "tokens": looked.tokens(&ids),
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

/// What the file says of itself.
fn metadata(
    arguments: &CacheArguments,
    looked: &Looked,
    ids: &[u32],
    sites: &[Site],
    positions: Option<&[usize]>,
) -> Result<HashMap<String, String>> {
    let texts: Vec<String> = ids.iter().map(|id| looked.shown(*id)).collect();
    let names: Vec<String> = sites.iter().map(Site::to_string).collect();
    let entries = [
        ("schema", "gpt2.cache/1".to_owned()),
        ("program", format!("gpt2 {}", env!("CARGO_PKG_VERSION"))),
        ("model", looked.name.clone()),
        ("tokens", serde_json::to_string(ids)?),
        ("token_strings", serde_json::to_string(&texts)?),
        ("bos", looked.has_bos.to_string()),
        ("sites", serde_json::to_string(&names)?),
        ("positions", serde_json::to_string(&positions)?),
        ("processing", if arguments.numbers == Numbers::Raw { "raw" } else { "transformer_lens" }.to_owned()),
    ];
    Ok(entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}
