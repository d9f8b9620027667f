//! `gpt2 look features`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use gpt2::{Gpt2Config, Site, SiteKind};
use gpt2_engine::HubOptions;
use gpt2_interpret::{Dictionary, DictionaryConfig, Processing};
use gpt2_pictures::{Axis, Scale};
use gpt2_weights::TensorFile;
use serde_json::json;

use super::view::{LookArguments, Reader};
use crate::exit::UsageError;
use crate::input::{InputArguments, read_file};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look features \"The capital of France is\" --model gpt2 --sae blocks.8.hook_resid_pre
  gpt2 look features \"The capital of France is\" --model gpt2 --sae resid_post_mlp_v5_32k/8.pt --site 8.resid_post
--sae takes a folder of SAELens (cfg.json and sae_weights.safetensors) or a file of OpenAI's (with --site).")]
pub(crate) struct FeaturesArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// The sparse autoencoder: a folder with cfg.json and sae_weights.safetensors, or a .pt file
    #[arg(long, value_name = "PATH")]
    pub(crate) sae: PathBuf,
    /// The place that it was trained on, where its file does not say
    #[arg(long, value_name = "SITE")]
    pub(crate) site: Option<String>,
    /// How many features, those that are most active anywhere in the text
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) top: usize,
}

/// Reads the autoencoder, and checks that it is one for such a model.
fn open(arguments: &FeaturesArguments, model: &Gpt2Config) -> Result<Dictionary> {
    let path = &arguments.sae;
    let site = match &arguments.site {
        Some(name) => {
            let sites = Site::matching(name, model.n_layer)
                .map_err(|error| UsageError(format!("--site: {error}")))?;
            if sites.len() != 1 {
                return Err(
                    UsageError(format!("--site {name}: expected one place, such as 8.resid_post")).into()
                );
            }
            Some(sites[0])
        }
        None => None,
    };
    let of_file = |error| anyhow::Error::new(error).context(path.display().to_string());
    let (file, mut config) = if path.is_dir() {
        let config = path.join("cfg.json");
        let text = String::from_utf8(read_file(&config)?)
            .with_context(|| format!("{}: expected UTF-8", config.display()))?;
        let weights = path.join("sae_weights.safetensors");
        (TensorFile::read(&weights)?, DictionaryConfig::from_json(&text).map_err(of_file)?)
    } else {
        let file = TensorFile::read(path)?;
        let Some(site) = site.or_else(|| of_folder(path)) else {
            return Err(UsageError(format!(
                "{}: the file does not say what it was trained on; --site does",
                path.display()
            ))
            .into());
        };
        let config = DictionaryConfig::openai(&file.entries, site).map_err(of_file)?;
        (file, config)
    };
    if let Some(site) = site {
        config.site = site;
    }
    let dictionary = Dictionary::from_tensors(&file.tensors, &config).map_err(of_file)?;
    dictionary.check_model(model).map_err(of_file)?;
    Ok(dictionary)
}

/// The place that OpenAI's folder and file names tell: `resid_post_mlp_v5_32k/8.pt`.
fn of_folder(path: &Path) -> Option<Site> {
    let layer = path.file_stem()?.to_str()?.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    gpt2_interpret::openai_site(path.parent()?.file_name()?.to_str()?, layer)
}

pub(crate) fn run(arguments: &FeaturesArguments, hub: &HubOptions) -> Result<()> {
    let (looked, ids) = arguments.look.open(hub, |reader: &Reader| reader.input(&arguments.input))?;
    let model = looked.loaded.model();
    let dictionary = open(arguments, model.config())?.to_device(model.device())?;
    let site = dictionary.config().site;
    let record = looked.run(&ids)?.record([site])?;
    let input = dictionary.input(record.get(site)?, &Processing::new(model)?)?;
    let latents = dictionary.encode(&input)?.flatten_to(1)?; // (T, F)
    let explained = dictionary.explained(&input)?;
    let rows = latents.to_vec2::<f32>()?;
    let largest: Vec<f32> = latents.max(0)?.to_vec1()?;
    let mut order: Vec<usize> = (0..largest.len()).filter(|feature| largest[*feature] > 0.0).collect();
    order.sort_by(|a, b| largest[*b].total_cmp(&largest[*a]).then(a.cmp(b)));
    let active = order.len();
    order.truncate(arguments.top.max(1));
    let mut report = looked.report("features", format!("features of {site}"), &ids);
    report.axes =
        vec![Axis::new("feature", order.iter().map(usize::to_string)), Axis::tokens("token", &report.tokens)];
    report.values = order.iter().flat_map(|feature| rows.iter().map(|row| Some(row[*feature]))).collect();
    report.scale = Scale::Amount;
    report.notes.push(format!(
        "{active} of {} features are active; {:.1} at a token on average",
        dictionary.latents(),
        explained.mean_l0
    ));
    if let Some(share) = explained.variance_explained {
        report.notes.push(format!("they explain {share:.3} of the variance"));
    }
    if dictionary.config().prepends_bos == Some(true) && !looked.has_bos {
        report
            .notes
            .push("warning: it was trained with a token in front of each text; --bos puts it there".into());
    }
    if site.kind != SiteKind::Z && dictionary.config().needs_centring() {
        report.notes.push("the residual stream is taken less its mean, as it was trained".into());
    }
    let values = json!({ "mean_l0": explained.mean_l0, "variance_explained": explained.variance_explained, "mse": explained.mse });
    arguments.look.view.show(&report, json!({ "site": site.to_string(), "explained": values }))
}
