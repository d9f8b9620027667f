//! Scores of previous-token, duplicate-token and induction heads.
//!
//! They attend to the previous token, to an earlier copy of the token, or to the token after that copy.

use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{
    IgnoredEntries, PatternSimilarity, PerHead, TargetPattern, detect_heads, head_scores, random_rows,
};
use candle_gpt2_pictures::{Axis, Scale};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Result, invalid_option};
use crate::{Analysis, Look, LookSubject, Reader, Text};

/// Lowest random token id; lower ids are single bytes and the most common pieces.
const LOWEST_TOKEN: u32 = 100;
/// Exclusive upper bound on the random token ids.
const HIGHEST_TOKEN: u32 = 20_000;
/// Number of random tokens per row.
const LENGTH: usize = 100;
/// Maximum number of rows of random tokens.
const MOST_ROWS: usize = 1000;

/// Scores heads by type, on repeated rows of random tokens or on a text.
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
/// assert_eq!(found.report.axes.last().map(|axis| axis.labels.len()), Some(4), "heads per layer");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HeadKinds {
    /// Text to analyze; by default, random tokens are used.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Option<Text>,
    /// Random tokens per row; each row is repeated once [default: 100, or fewer if the context
    /// cannot hold them twice]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub length: Option<usize>,
    /// Number of rows of random tokens
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = HeadKinds::default().rows))]
    pub rows: usize,
    /// Seed for the random tokens
    #[cfg_attr(feature = "clap", arg(short, long, value_name = "N", default_value_t = HeadKinds::default().seed))]
    pub seed: u32,
    /// Lowest id of the random tokens [default: 100, or 0 if the vocabulary has no more than 100]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    pub from: Option<u32>,
    /// Exclusive upper bound on the random ids [default: 20000, or the size of the vocabulary]
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

/// Validated input of [`HeadKinds`].
///
/// Returned by [`HeadKinds`]'s `check`.
#[derive(Debug)]
pub enum CheckedHeadKinds {
    /// Tokens of the text.
    Text(Vec<u32>),
    /// Random tokens.
    Random {
        /// Number of tokens in a row before it is repeated.
        length: usize,
        /// Lowest token id.
        from: u32,
        /// Exclusive upper bound on the token ids.
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
            return Err(invalid_option("`exclude_bos` and `exclude_current` require a text"));
        }
        if !(1..=MOST_ROWS).contains(&self.rows) {
            return Err(invalid_option(format!(
                "`rows`: expected a number from 1 to {MOST_ROWS}, found {}",
                self.rows
            )));
        }
        let config = reader.config();
        let half = config.n_positions.saturating_sub(usize::from(reader.bos().is_some())) / 2;
        if half == 0 {
            return Err(invalid_option(format!(
                "the context of {} tokens is too short for repeated random rows; pass a text",
                config.n_positions
            )));
        }
        let length = self.length.unwrap_or(half.min(LENGTH));
        if length == 0 || length > half {
            return Err(invalid_option(format!(
                "`length` {length}: expected a number from 1 to {half}, since the context must hold each row twice"
            )));
        }
        let vocab_size = u32::try_from(config.vocab_size).unwrap_or(u32::MAX);
        let below = self.below.unwrap_or(vocab_size.min(HIGHEST_TOKEN));
        let from = self.from.unwrap_or(if below > LOWEST_TOKEN { LOWEST_TOKEN } else { 0 });
        if from >= below || below > vocab_size {
            return Err(invalid_option(format!(
                "`from` {from}, `below` {below}: expected a range within the vocabulary of {vocab_size} tokens"
            )));
        }
        Ok(CheckedHeadKinds::Random { length, from, below })
    }

    fn look(&self, checked: CheckedHeadKinds, subject: &LookSubject, _: &dyn Reporter) -> Result<Analysis> {
        let (scores, ids, note) = match checked {
            CheckedHeadKinds::Text(ids) => {
                let run = subject.run(&ids)?;
                let ignored = IgnoredEntries { bos: self.exclude_bos, current: self.exclude_current };
                let of = |target| detect_heads(&run, &target, PatternSimilarity::Share, ignored);
                let scores = [
                    of(TargetPattern::Previous)?,
                    of(TargetPattern::Duplicate)?,
                    of(TargetPattern::Induction)?,
                ];
                let note =
                    "fraction of each head's attention in this text that goes to these tokens".to_owned();
                (scores, ids, note)
            }
            CheckedHeadKinds::Random { length, from, below } => {
                let rows = random_rows(self.seed, self.rows, length, from, below);
                if let Some(row) = rows.first() {
                    let twice: Vec<u32> = subject.reader().bos().into_iter().chain(row.repeat(2)).collect();
                    // Rejects a model whose logits are not finite.
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
        let values = |of: &PerHead| {
            of.iter().flatten().map(|value| value.is_finite().then_some(*value)).collect::<Vec<_>>()
        };
        report.values = scores.iter().flat_map(values).collect();
        report.scale = Scale::Share;
        report.notes.push(note);
        Ok(Analysis::new(report, Value::Null))
    }
}
