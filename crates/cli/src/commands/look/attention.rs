//! `gpt2 look attention`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::Attention;
use clap::Args;

use super::view::{LookArguments, heads, ranges, text};
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attention \"The dog chased the cat because it\" --html attention.html
  gpt2 look attention --ids 464,3290 --model gpt2 --layers 4-6 --json
  gpt2 look attention \"The dog\" --model gpt2 --heads 4.11,5.5 --svg heads.svg --columns 1

Values are the weights of query tokens (rows) over key tokens (columns); a query has none for the keys after it.")]
pub(crate) struct AttentionArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// Only these layers: 3, 0-5 or 0,4,8-11
    #[arg(long, value_name = "LAYERS", conflicts_with = "heads")]
    pub(crate) layers: Option<String>,
    /// Only these heads: LAYER.HEAD, separated by commas
    #[arg(long, value_name = "HEADS")]
    pub(crate) heads: Option<String>,
}

pub(crate) fn run(arguments: &AttentionArguments, hub: &HubOptions) -> Result<()> {
    arguments.look.run(hub, |reader| {
        Ok(Attention {
            text: text(&arguments.input, reader)?,
            layers: ranges("--layers", arguments.layers.as_ref())?,
            heads: heads(arguments.heads.as_ref())?,
        })
    })
}
