//! `gpt2 look saliency`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::{Method, Saliency};
use clap::Args;

use super::view::{AskedArguments, named, text, token};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look saliency \"The capital of France is\" --model gpt2 --answer \" Paris\" --measure probability
  gpt2 look saliency \"The capital of France is\" --model gpt2 --method input-x-gradient --html saliency.html

Gradients are with regard to the token embeddings. Values are lengths of each token's vector as shares of all; the JSON has the signed \
sums too, which with --method integrated add up to the metric's difference from a text of baseline tokens.")]
pub(crate) struct SaliencyArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// How the weight of a token is found
    #[arg(long, value_name = "METHOD", default_value = "integrated", value_parser = named::<Method>())]
    pub(crate) method: Method,
    /// Steps of --method integrated
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) steps: u16,
    /// The token that stands for nothing in --method integrated: a text of one token, or #ID [default: the configuration's bos_token_id]
    #[arg(long, value_name = "TEXT")]
    pub(crate) baseline: Option<String>,
}

pub(crate) fn run(arguments: &SaliencyArguments, hub: &HubOptions) -> Result<()> {
    let SaliencyArguments { asked, method, steps, baseline } = arguments;
    asked.look.run(hub, |reader| {
        Ok(Saliency {
            text: text(&asked.input, reader)?,
            metric: asked.metric.options(),
            method: *method,
            steps: (*steps).into(),
            baseline: token(baseline.as_ref()),
        })
    })
}
