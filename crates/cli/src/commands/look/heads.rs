//! `gpt2 look heads`.

use anyhow::Result;
use clap::Args;
use gpt2_engine::HubOptions;
use gpt2_interpret::{Excluded, Likeness, OfHeads, Sought, detect_heads, head_scores, random_rows};
use gpt2_pictures::{Axis, Scale};
use serde_json::Value;

use super::view::{LookArguments, Reader};
use crate::exit::UsageError;
use crate::input::InputArguments;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look heads --model gpt2 --length 100 --rows 2 --seed 0 --from 100 --below 20000
  gpt2 look heads \"the cat sat, and the cat sat\" --model gpt2
  gpt2 look heads --svg heads.svg
Without a text (standard input is not read), rows of random tokens are each read twice, and a head's score is the mean attention from each token of the second
half to the one before (previous), to the same token in the first half (duplicate) and to the one after that (induction); of the
previous token it is the mean over all tokens. The random tokens are those of torch.manual_seed. With a text, the score is the share
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
    #[arg(long, value_name = "N", default_value_t = 0)]
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

/// Tokens below are single bytes and the commonest pieces.
const LOWEST_TOKEN: u32 = 100;

pub(crate) fn run(arguments: &HeadsArguments, hub: &HubOptions) -> Result<()> {
    let has_text = arguments.input.text.is_some()
        || arguments.input.ids.is_some()
        || arguments.input.prompt_file.is_some();
    if !has_text && (arguments.exclude_bos || arguments.exclude_current) {
        let message = "--exclude-bos and --exclude-current are for a text; give one, or leave them out";
        return Err(UsageError(message.into()).into());
    }
    let (looked, ids) = arguments.look.open(hub, |reader: &Reader| {
        if has_text { reader.input(&arguments.input).map(Some) } else { Ok(None) }
    })?;
    let (scores, ids, note) = match ids {
        Some(ids) => {
            let run = looked.run(&ids)?;
            let excluded = Excluded { bos: arguments.exclude_bos, current: arguments.exclude_current };
            let of = |sought| detect_heads(&run, &sought, Likeness::Share, excluded);
            let scores = [of(Sought::Previous)?, of(Sought::Duplicate)?, of(Sought::Induction)?];
            let note = "share of each head's attention on this text that goes to such places".to_owned();
            (scores, ids, note)
        }
        None => {
            let config = looked.loaded.config();
            let bos = looked.has_bos.then(|| config.start_token()).flatten();
            let half = (config.n_positions - usize::from(bos.is_some())) / 2;
            let length = arguments.length.unwrap_or(half.min(100));
            if length == 0 || length > half {
                return Err(UsageError(format!(
                    "--length {length}: 1 to {half} tokens can be read twice by this model"
                ))
                .into());
            }
            let vocab_size = u32::try_from(config.vocab_size).unwrap_or(u32::MAX);
            let below = arguments.below.unwrap_or(vocab_size.min(20_000));
            let from = arguments.from.unwrap_or(if below > LOWEST_TOKEN { LOWEST_TOKEN } else { 0 });
            if from >= below || below > vocab_size {
                return Err(UsageError(format!(
                    "--from {from} --below {below}: expected a range within the vocabulary of {vocab_size}"
                ))
                .into());
            }
            let rows = random_rows(arguments.seed, arguments.rows.into(), length, from, below);
            let found = head_scores(looked.loaded.model(), &rows, bos)?;
            let note = format!(
                "{} rows of {length} random tokens from {} to {}, seed {}, each read twice, with {} in front",
                rows.len(),
                from,
                below - 1,
                arguments.seed,
                looked.in_front()
            );
            ([found.previous, found.duplicate, found.induction], Vec::new(), note)
        }
    };
    let mut report = looked.report("heads", "what heads attend to".into(), &ids);
    report.axes = vec![
        Axis::new("kind", ["previous", "duplicate", "induction"]),
        looked.layer_axis(),
        looked.head_axis(),
    ];
    let values = |of: &OfHeads| {
        of.iter().flatten().map(|value| value.is_finite().then_some(*value)).collect::<Vec<_>>()
    };
    report.values = scores.iter().flat_map(values).collect();
    report.scale = Scale::Share;
    report.notes.push(note);
    arguments.look.view.show(&report, Value::Null)
}
