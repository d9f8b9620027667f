//! Which heads attend to the previous token, to the same token before, or to what followed it (induction).

use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{Excluded, Likeness, OfHeads, Sought, detect_heads, head_scores, random_rows};
use candle_gpt2_pictures::{Axis, Scale};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Result, wrong};
use crate::{Found, Look, LookSubject, Reader, Text};

/// Tokens below are single bytes and the commonest pieces.
const LOWEST_TOKEN: u32 = 100;
/// Random tokens are below this one.
const HIGHEST_TOKEN: u32 = 20_000;
/// Random tokens of a row.
const LENGTH: usize = 100;
/// Most rows of random tokens.
const MOST_ROWS: usize = 1000;

/// What heads attend to: on rows of random tokens that are read twice each, or on a text.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{HeadKinds, Look, Reader, LookSubject};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let short = HeadKinds { length: Some(10), rows: 2, ..HeadKinds::default() };
/// let found = short.at(&subject, &Silent)?;
/// assert_eq!(found.report.axes.last().map(|axis| axis.labels.len()), Some(3), "heads of a layer");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HeadKinds {
    /// The text; random tokens are read if there is none.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Option<Text>,
    /// Random tokens per row, which is read twice [default: 100, or fewer if the context cannot hold them twice]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub length: Option<usize>,
    /// Number of rows of random tokens
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = HeadKinds::default().rows))]
    pub rows: usize,
    /// Seed of the random tokens
    #[cfg_attr(feature = "clap", arg(short, long, value_name = "N", default_value_t = HeadKinds::default().seed))]
    pub seed: u32,
    /// Lowest id of the random tokens [default: 100, or 0 if the vocabulary has no more than 100]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    pub from: Option<u32>,
    /// Upper bound of the random ids, exclusive [default: 20000, or the size of the vocabulary]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    pub below: Option<u32>,
    /// With a text: leave out attention to the first token
    #[cfg_attr(feature = "clap", arg(long))]
    pub exclude_bos: bool,
    /// With a text: leave out attention of tokens to themselves
    #[cfg_attr(feature = "clap", arg(long))]
    pub exclude_current: bool,
}

impl Default for HeadKinds {
    fn default() -> Self {
        Self {
            text: None,
            length: None,
            rows: 2,
            seed: 0,
            from: None,
            below: None,
            exclude_bos: false,
            exclude_current: false,
        }
    }
}

/// The tokens that are read.
///
/// Given by [`HeadKinds`]'s `check`.
#[derive(Debug)]
pub enum CheckedHeadKinds {
    /// Of the text.
    Text(Vec<u32>),
    /// Random ones.
    Random {
        /// Tokens of a row, each of which is read twice.
        length: usize,
        /// The lowest token.
        from: u32,
        /// Tokens are below this one.
        below: u32,
    },
}

impl Look for HeadKinds {
    type Checked = CheckedHeadKinds;

    fn check(&self, reader: &Reader) -> Result<CheckedHeadKinds> {
        if let Some(text) = &self.text {
            return reader.text(text).map(CheckedHeadKinds::Text);
        }
        if self.exclude_bos || self.exclude_current {
            return Err(wrong(
                "`exclude_bos` and `exclude_current` are for a text; give one, or leave them out",
            ));
        }
        if !(1..=MOST_ROWS).contains(&self.rows) {
            return Err(wrong(format!("`rows`: expected from 1 to {MOST_ROWS}, found {}", self.rows)));
        }
        let config = reader.config();
        let half = config.n_positions.saturating_sub(usize::from(reader.bos().is_some())) / 2;
        if half == 0 {
            return Err(wrong(format!(
                "the context of {} is too short for random rows, each of which is read twice; give a text",
                config.n_positions
            )));
        }
        let length = self.length.unwrap_or(half.min(LENGTH));
        if length == 0 || length > half {
            return Err(wrong(format!(
                "`length` {length}: expected from 1 to {half}, since the context must hold each row twice"
            )));
        }
        let vocab_size = u32::try_from(config.vocab_size).unwrap_or(u32::MAX);
        let below = self.below.unwrap_or(vocab_size.min(HIGHEST_TOKEN));
        let from = self.from.unwrap_or(if below > LOWEST_TOKEN { LOWEST_TOKEN } else { 0 });
        if from >= below || below > vocab_size {
            return Err(wrong(format!(
                "`from` {from} `below` {below}: expected a range within the vocabulary of {vocab_size}"
            )));
        }
        Ok(CheckedHeadKinds::Random { length, from, below })
    }

    fn look(&self, checked: CheckedHeadKinds, subject: &LookSubject, _: &dyn Reporter) -> Result<Found> {
        let (scores, ids, note) = match checked {
            CheckedHeadKinds::Text(ids) => {
                let run = subject.run(&ids)?;
                let excluded = Excluded { bos: self.exclude_bos, current: self.exclude_current };
                let of = |sought| detect_heads(&run, &sought, Likeness::Share, excluded);
                let scores = [of(Sought::Previous)?, of(Sought::Duplicate)?, of(Sought::Induction)?];
                let note = "share of each head's attention on this text that goes to such places".to_owned();
                (scores, ids, note)
            }
            CheckedHeadKinds::Random { length, from, below } => {
                let rows = random_rows(self.seed, self.rows, length, from, below);
                if let Some(row) = rows.first() {
                    let twice: Vec<u32> = subject.reader().bos().into_iter().chain(row.repeat(2)).collect();
                    // Rejects a model without finite logits.
                    subject.run(&twice)?;
                }
                let found = head_scores(subject.model(), &rows, subject.reader().bos())?;
                let note = format!(
                    "{} rows of {length} random tokens from {from} to {}, seed {}, each read twice, {}",
                    rows.len(),
                    below - 1,
                    self.seed,
                    subject.in_front()
                );
                ([found.previous, found.duplicate, found.induction], Vec::new(), note)
            }
        };
        let mut report = subject.report("heads", "what heads attend to", &ids);
        report.axes = vec![
            Axis::new("kind", ["previous", "duplicate", "induction"]),
            subject.layer_axis(),
            subject.head_axis(),
        ];
        let values = |of: &OfHeads| {
            of.iter().flatten().map(|value| value.is_finite().then_some(*value)).collect::<Vec<_>>()
        };
        report.values = scores.iter().flat_map(values).collect();
        report.scale = Scale::Share;
        report.notes.push(note);
        Ok(Found::new(report, Value::Null))
    }
}
