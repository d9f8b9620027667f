//! `gpt2 look attribute`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::{Attribute, Numbers, Parts};
use clap::Args;

use super::view::{AskedArguments, named, text};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --against \" London\"
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --unit head --svg heads.svg
  gpt2 look attribute \"The capital of France is\" --model gpt2 --unit neuron --top 30 --json

Each part of the residual stream is divided by the final norm's scale of the whole run. The parts and the bias add up to the \
difference of the two logits, or, without --against, to the answer's logit less the mean of all; with --unit layer they do not.")]
pub(crate) struct AttributeArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// The parts
    #[arg(long, value_name = "UNIT", default_value = "component", value_parser = named::<Parts>())]
    pub(crate) unit: Parts,
    /// With --unit head: the heads of the checkpoint as it is, or of TransformerLens' compatibility mode, which counts what constant values write with the remainder
    #[arg(long = "as", value_name = "NUMBERS", default_value = "raw", value_parser = named::<Numbers>())]
    pub(crate) numbers: Numbers,
    /// Only the N strongest parts of --unit neuron
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) top: usize,
}

pub(crate) fn run(arguments: &AttributeArguments, hub: &HubOptions) -> Result<()> {
    let AttributeArguments { asked, unit, numbers, top } = arguments;
    asked.look.run(hub, |reader| {
        Ok(Attribute {
            text: text(&asked.input, reader)?,
            metric: asked.metric.options(),
            unit: *unit,
            numbers: *numbers,
            top: *top,
        })
    })
}
