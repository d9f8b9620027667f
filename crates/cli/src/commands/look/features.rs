//! `gpt2 look features`.

use std::path::PathBuf;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::Features;
use clap::Args;

use super::view::{LookArguments, text};
use crate::input::InputArguments;

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

pub(crate) fn run(arguments: &FeaturesArguments, hub: &HubOptions) -> Result<()> {
    arguments.look.run(hub, |reader| {
        Ok(Features {
            text: text(&arguments.input, reader)?,
            sae: arguments.sae.clone(),
            site: arguments.site.clone(),
            top: arguments.top,
        })
    })
}
