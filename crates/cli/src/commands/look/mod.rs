//! `gpt2 look`: what a model does inside.

mod attention;
mod contributions;
mod features;
mod heads;
mod lens;
mod neurons;
mod patching;
mod tokens;
pub(crate) mod view;

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use clap::{Args, Subcommand};

use crate::model_arguments::CommonArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attention \"When Mary and John went to the store, John gave a drink to\" --model gpt2 --html attention.html
  gpt2 look lens \"The capital of France is\" --model gpt2 --bos
  gpt2 look heads --model gpt2
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --against \" London\" --unit head

Without --model they look into the small model inside the program. Every look prints a table, one JSON object (--json), a page that \
works offline (--html FILE) or a picture for a paper (--svg FILE).")]
pub(crate) struct LookCommandArguments {
    /// What to look at.
    #[command(subcommand)]
    pub(crate) look: Look,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Look {
    /// Where each head attends: the attention pattern of every head
    Attention(attention::AttentionArguments),
    /// What each layer would predict if it were the last (logit lens, tuned lens)
    Lens(lens::LensArguments),
    /// What each part of the model adds to a prediction (direct logit attribution)
    Attribute(contributions::AttributeArguments),
    /// Which heads attend to the previous token, to the same token before, or to what followed it (induction)
    Heads(heads::HeadsArguments),
    /// What a prediction becomes without a head: each head in turn, or chosen ones together
    Ablate(patching::AblateArguments),
    /// Which clean activations restore the prediction in another text (activation patching)
    Patch(patching::PatchArguments),
    /// Which later heads a head's output reaches, and what it changes there (path patching)
    Path(patching::PathArguments),
    /// What `patch` would say, estimated from one gradient (attribution patching)
    Estimate(patching::EstimateArguments),
    /// How much each token of the text matters for a prediction, by gradients
    Saliency(tokens::SaliencyArguments),
    /// Where in a text a neuron is most active
    Neurons(neurons::NeuronsArguments),
    /// Which features of a sparse autoencoder are active, token by token
    Features(features::FeaturesArguments),
}

impl Look {
    pub(crate) fn common(&self) -> &CommonArguments {
        &match self {
            Self::Attention(arguments) => &arguments.look,
            Self::Lens(arguments) => &arguments.look,
            Self::Attribute(arguments) => &arguments.asked.look,
            Self::Heads(arguments) => &arguments.look,
            Self::Ablate(arguments) => &arguments.asked.look,
            Self::Patch(arguments) => &arguments.texts.look,
            Self::Path(arguments) => &arguments.texts.look,
            Self::Estimate(arguments) => &arguments.texts.look,
            Self::Saliency(arguments) => &arguments.asked.look,
            Self::Neurons(arguments) => &arguments.look,
            Self::Features(arguments) => &arguments.look,
        }
        .opening
        .model
        .common
    }
}

pub(crate) fn run(arguments: &LookCommandArguments, hub: &HubOptions) -> Result<ExitCode> {
    match &arguments.look {
        Look::Attention(arguments) => attention::run(arguments, hub),
        Look::Lens(arguments) => lens::run(arguments, hub),
        Look::Attribute(arguments) => contributions::run(arguments, hub),
        Look::Heads(arguments) => heads::run(arguments, hub),
        Look::Ablate(arguments) => patching::ablate(arguments, hub),
        Look::Patch(arguments) => patching::patch(arguments, hub),
        Look::Path(arguments) => patching::path(arguments, hub),
        Look::Estimate(arguments) => patching::estimate(arguments, hub),
        Look::Saliency(arguments) => tokens::run(arguments, hub),
        Look::Neurons(arguments) => neurons::run(arguments, hub),
        Look::Features(arguments) => features::run(arguments, hub),
    }?;
    Ok(ExitCode::SUCCESS)
}
