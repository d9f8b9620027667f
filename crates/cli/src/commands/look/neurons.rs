//! `gpt2 look neurons`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::{Neuron, Neurons};
use clap::Args;

use super::view::{LookArguments, text};
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look neurons --prompt-file book.txt --model gpt2 --neuron 11.611
  gpt2 look neurons \"The dog sat on the mat.\" --neuron 3.17 --top 5 --json

Values are outputs of the activation function (mlp_post). A long text is read in windows of the context.")]
pub(crate) struct NeuronsArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// The neuron: LAYER.NEURON
    #[arg(long, value_name = "NEURON")]
    pub(crate) neuron: String,
    /// How many places
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) top: usize,
}

pub(crate) fn run(arguments: &NeuronsArguments, hub: &HubOptions) -> Result<()> {
    let neuron = Neuron::read(&arguments.neuron)?;
    arguments
        .look
        .run(hub, |reader| Ok(Neurons { text: text(&arguments.input, reader)?, neuron, top: arguments.top }))
}
