//! `gpt2 look lens`.

use std::path::PathBuf;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_interpret::LensValue;
use candle_gpt2_look::Lens;
use clap::Args;

use super::view::{LookArguments, named, text};
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look lens \"The capital of France is\" --model gpt2
  gpt2 look lens \"The capital of France is\" --model gpt2 --watch \" Paris\" --show rank --html lens.html
  gpt2 look lens \"The capital of France is\" --model gpt2 --tuned params.pt --json

The residual stream before each block, and after the last, goes through the final norm and the output head. Logarithms are natural.")]
pub(crate) struct LensArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// The N most probable tokens of each cell, in the JSON
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) top: u16,
    /// A token whose rank and probability are wanted too; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) watch: Vec<String>,
    /// The value of a cell; rank and watched-probability are those of the first --watch
    #[arg(long, value_name = "VALUE", default_value = "probability", value_parser = named::<LensValue>())]
    pub(crate) show: LensValue,
    /// A tuned lens: its file (params.pt or safetensors) or folder
    #[arg(long, value_name = "PATH")]
    pub(crate) tuned: Option<PathBuf>,
}

pub(crate) fn run(arguments: &LensArguments, hub: &HubOptions) -> Result<()> {
    arguments.look.run(hub, |reader| {
        Ok(Lens {
            text: text(&arguments.input, reader)?,
            show: arguments.show,
            // A table and a picture show one of each cell.
            top: if arguments.look.view.json { arguments.top.into() } else { 1 },
            watch: arguments.watch.iter().map(|text| text.as_str().into()).collect(),
            tuned: arguments.tuned.clone(),
        })
    })
}
