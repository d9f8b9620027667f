//! `gpt2 look ablate`, `patch`, `path` and `estimate`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_interpret::By;
use candle_gpt2_look::{
    Ablate, ComparedTexts, Estimate, Instead, Patch, Patched, PathPatching, Reader, Text,
};
use clap::Args;

use super::view::{AskedArguments, LookArguments, MetricArguments, heads, named, text};
use crate::exit::UsageError;
use crate::input::Ids;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look ablate \"When Mary and John went to the store, John gave a drink to\" --model gpt2 --answer \" Mary\" --against \" John\"
  gpt2 look ablate \"The capital of France is\" --model gpt2 --heads 9.9,9.6 --with mean:prompts.txt
  gpt2 look ablate \"The dog\" --svg ablation.svg

Without --heads each head is left out in turn, and the table has the metric without it. raw-zero sets its output (z) to zero; \
transformer-lens-zero to what is zero in TransformerLens, which moves the values' biases elsewhere.")]
pub(crate) struct AblateArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// Leave out these heads together: LAYER.HEAD, separated by commas
    #[arg(long, value_name = "HEADS")]
    pub(crate) heads: Option<String>,
    /// Leave the heads out after this token alone
    #[arg(long, value_name = "N", requires = "heads", allow_negative_numbers = true)]
    pub(crate) at: Option<i64>,
    /// What takes the place of a head's output: raw-zero, transformer-lens-zero, mean:FILE (of the texts in its lines) or sample:FILE (of one text of as many tokens)
    #[arg(long, value_name = "WHAT", default_value = "raw-zero")]
    pub(crate) with: String,
}

pub(crate) fn ablate(arguments: &AblateArguments, hub: &HubOptions) -> Result<()> {
    let asked = &arguments.asked;
    asked.look.run(hub, |reader| {
        Ok(Ablate {
            text: text(&asked.input, reader)?,
            metric: asked.metric.options(),
            heads: heads(arguments.heads.as_ref())?,
            at: arguments.at,
            with: Instead::read(&arguments.with)?,
        })
    })
}

/// Two texts of as many tokens, and what tells them apart.
#[derive(Debug, Args)]
pub(crate) struct TextsArguments {
    /// The text that the answer is right for
    #[arg(long, value_name = "TEXT", conflicts_with = "clean_ids")]
    pub(crate) clean: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    pub(crate) clean_ids: Option<Ids>,
    /// A text of as many tokens that it is wrong for
    #[arg(long, value_name = "TEXT", conflicts_with = "corrupt_ids")]
    pub(crate) corrupt: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    pub(crate) corrupt_ids: Option<Ids>,
    #[command(flatten)]
    pub(crate) metric: MetricArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
}

impl TextsArguments {
    fn run<L: candle_gpt2_look::Look>(
        &self,
        hub: &HubOptions,
        look: impl FnOnce(ComparedTexts) -> Result<L>,
    ) -> Result<()> {
        self.look.run(hub, |_: &Reader| {
            let clean = text_or_ids("clean", self.clean.as_ref(), self.clean_ids.as_ref())?;
            let corrupt = text_or_ids("corrupt", self.corrupt.as_ref(), self.corrupt_ids.as_ref())?;
            look(ComparedTexts { clean, corrupt, metric: self.metric.options() })
        })
    }
}

/// A text, or tokens.
fn text_or_ids(name: &str, text: Option<&String>, ids: Option<&Ids>) -> Result<Text> {
    match (text, ids) {
        (Some(text), _) => Ok(Text::Words(text.clone())),
        (None, Some(Ids(ids))) => Ok(Text::Ids(ids.clone())),
        (None, None) => Err(UsageError(format!("--{name} TEXT or --{name}-ids ID,ID,… is missing")).into()),
    }
}

/// What of a run is put into another.
#[derive(Debug, Args)]
pub(crate) struct SiteArguments {
    /// What is put from the clean run into the corrupted one: resid_pre, resid_mid, attn_out, mlp_out, z, q, k, v, pattern, … or TransformerLens' name of one
    #[arg(long, value_name = "SITE", default_value = "resid_pre")]
    pub(crate) site: String,
    /// The parts, besides the layer [default: position, and head where the site has heads]
    #[arg(long, value_name = "PARTS", value_parser = named::<By>())]
    pub(crate) by: Option<By>,
}

impl SiteArguments {
    /// The same for the library.
    fn options(&self) -> Patched {
        Patched { site: self.site.clone(), by: self.by }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look patch --model gpt2 --clean \"After John and Mary went to the store, Mary gave a bottle of milk to\" \\
    --corrupt \"After John and Mary went to the store, John gave a bottle of milk to\" --answer \" John\" --against \" Mary\"
  gpt2 look patch --model gpt2 --clean … --corrupt … --answer \" John\" --site z --by head --svg heads.svg

Values are shares of the way from the corrupted text's metric (0) to the clean one's (1).")]
pub(crate) struct PatchArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    #[command(flatten)]
    pub(crate) site: SiteArguments,
}

pub(crate) fn patch(arguments: &PatchArguments, hub: &HubOptions) -> Result<()> {
    arguments.texts.run(hub, |texts| Ok(Patch { texts, patched: arguments.site.options() }))
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look estimate --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --site z

One gradient at the corrupted text, times the difference of both runs: an estimate of what `gpt2 look patch` finds by a run for \
each part. It is known to be wrong where the model is far from linear: at the early residual stream and at the first MLP.")]
pub(crate) struct EstimateArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    #[command(flatten)]
    pub(crate) site: SiteArguments,
}

pub(crate) fn estimate(arguments: &EstimateArguments, hub: &HubOptions) -> Result<()> {
    arguments.texts.run(hub, |texts| Ok(Estimate { texts, patched: arguments.site.options() }))
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --to final
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --from 8.6 --to 9.9.q

The run is that of the clean text, but what a head sends to the receiver is what it sends in the corrupted text. Other heads on the \
way stay as they are in the clean text; norms and MLPs are computed again. Without --from every head before the receiver is tried.")]
pub(crate) struct PathArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    /// The heads whose output is taken from the corrupted text, together: LAYER.HEAD, separated by commas
    #[arg(long, value_name = "HEADS")]
    pub(crate) from: Option<String>,
    /// Where the path ends: `final` (the last residual stream), or queries, keys or values of a head, such as 9.9.q
    #[arg(long, value_name = "RECEIVER", default_value = "final")]
    pub(crate) to: String,
}

pub(crate) fn path(arguments: &PathArguments, hub: &HubOptions) -> Result<()> {
    let PathArguments { texts, from, to } = arguments;
    texts.run(hub, |texts| Ok(PathPatching { texts, from: heads(from.as_ref())?, to: to.clone() }))
}
