//! `gpt2 look attention`.

use anyhow::Result;
use clap::Args;
use gpt2_engine::HubOptions;
use gpt2_interpret::{Head, Patterns};
use serde_json::Value;

use super::view::{LookArguments, Reader};
use crate::exit::UsageError;
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attention \"The dog chased the cat because it\" --html attention.html
  gpt2 look attention --ids 464,3290 --model gpt2 --layers 4-6 --json
  gpt2 look attention \"The dog\" --model gpt2 --heads 4.11,5.5 --svg heads.svg --columns 1
Values are the weights of query tokens (rows) over key tokens (columns); after its query a key has none.")]
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

/// Most attention weights that are shown at once: those of 144 heads over 1,024 tokens, and a few more.
const MOST_VALUES: usize = 160_000_000;

pub(crate) fn run(arguments: &AttentionArguments, hub: &HubOptions) -> Result<()> {
    let (looked, (ids, heads)) = arguments.look.open(hub, |reader: &Reader| {
        let all = |layers: Vec<usize>| {
            layers
                .into_iter()
                .flat_map(|layer| (0..reader.n_head).map(move |head| Head { layer, head }))
                .collect()
        };
        let heads: Vec<Head> = match (&arguments.layers, &arguments.heads) {
            (Some(layers), _) => all(reader.layers(layers)?),
            (None, Some(heads)) => reader.heads(heads)?,
            (None, None) => all((0..reader.n_layer).collect()),
        };
        Ok((reader.input(&arguments.input)?, heads))
    })?;
    let count = heads.len() * ids.len() * ids.len();
    if count > MOST_VALUES {
        return Err(UsageError(format!(
            "{} heads of {} tokens have {count} values, more than {MOST_VALUES}; choose --layers or --heads, or a shorter text",
            heads.len(),
            ids.len()
        ))
        .into());
    }
    let record = looked.run(&ids)?.record(Patterns::sites(&heads))?;
    let Patterns { layers, heads, values } = Patterns::of(record, &heads)?;
    let report = looked.report("attention", "attention patterns".into(), &ids);
    arguments.look.view.show(&report.with_patterns(layers, heads, values), Value::Null)
}
