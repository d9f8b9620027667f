//! `gpt2 look heads`.

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::HeadKinds;
use clap::Args;

use super::view::{LookArguments, text};
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look heads --model gpt2 --length 100 --rows 2 --seed 0 --from 100 --below 20000
  gpt2 look heads \"the cat sat, and the cat sat\" --model gpt2
  gpt2 look heads --svg heads.svg

Without a text (standard input is not read), rows of random tokens are each read twice, and a head's score is the mean attention from each token of the second \
half to the one before (previous), to the same token in the first half (duplicate) and to the one after that (induction); for the \
previous token the mean is over all tokens. The random tokens are those of torch.manual_seed. With a text, the score is the share \
of a head's attention that goes to such places.")]
pub(crate) struct HeadsArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// Random tokens of a row, read twice [default: 100, or as many as the context holds twice]
    #[arg(long, value_name = "N")]
    pub(crate) length: Option<usize>,
    /// Rows of random tokens
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rows: u16,
    /// Seed of the random tokens
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u32,
    /// The lowest random token [default: 100, or 0 in a vocabulary of no more]
    #[arg(long, value_name = "ID")]
    pub(crate) from: Option<u32>,
    /// Random tokens are below this one [default: 20000, or the size of the vocabulary]
    #[arg(long, value_name = "ID")]
    pub(crate) below: Option<u32>,
    /// With a text: leave out attention to the first token
    #[arg(long)]
    pub(crate) exclude_bos: bool,
    /// With a text: leave out attention of tokens to themselves
    #[arg(long)]
    pub(crate) exclude_current: bool,
}

pub(crate) fn run(arguments: &HeadsArguments, hub: &HubOptions) -> Result<()> {
    let input = &arguments.input;
    let has_text = input.is_given();
    arguments.look.run(hub, |reader| {
        Ok(HeadKinds {
            text: if has_text { Some(text(input, reader)?) } else { None },
            length: arguments.length,
            rows: arguments.rows.into(),
            seed: arguments.seed,
            from: arguments.from,
            below: arguments.below,
            exclude_bos: arguments.exclude_bos,
            exclude_current: arguments.exclude_current,
        })
    })
}
