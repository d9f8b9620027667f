//! The corpus: documents of all kinds in their shares, training and held-out.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use crate::choices::mixed;
use crate::exercises::{Exercise, random_rows, short_rows};
use crate::{Impossible, lexicon, story};

/// Bytes of text that count as one token in the shares.
const TOKEN_BYTES: u64 = 4;

/// What a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Story,
    ShortRows,
    Rows,
    Of(Exercise),
    /// The same, in short documents.
    Short(Exercise),
}

/// Parts with their shares of all tokens, in hundredths.
type Shares = &'static [(Part, u64)];

/// What is learned first: that what followed a token before follows it again.
const ROWS: Shares = &[(Part::ShortRows, 100)];

/// Both: a model that all at once sees stories alone forgets how to copy.
const ROWS_AND_STORIES: Shares = &[
    (Part::Rows, 34),
    (Part::Story, 40),
    (Part::Of(Exercise::Copying), 6),
    (Part::Of(Exercise::TwoPeople), 7),
    (Part::Of(Exercise::Agreement), 4),
    (Part::Of(Exercise::Gender), 3),
    (Part::Of(Exercise::Numbers), 4),
    (Part::Of(Exercise::Nesting), 2),
];

/// What needs names of the same scene, again and again in short documents: a third is two people, of whom one does something for the other.
const PRACTICE: Shares = &[
    (Part::Story, 27),
    (Part::Rows, 12),
    (Part::Short(Exercise::Copying), 12),
    (Part::Short(Exercise::TwoPeople), 32),
    (Part::Short(Exercise::Agreement), 4),
    (Part::Short(Exercise::Gender), 5),
    (Part::Short(Exercise::Numbers), 5),
    (Part::Short(Exercise::Nesting), 3),
];

/// Everything.
const MIXTURE: Shares = &[
    (Part::Story, 57),
    (Part::Rows, 12),
    (Part::Of(Exercise::Copying), 8),
    (Part::Of(Exercise::TwoPeople), 9),
    (Part::Of(Exercise::Agreement), 4),
    (Part::Of(Exercise::Gender), 3),
    (Part::Of(Exercise::Numbers), 5),
    (Part::Of(Exercise::Nesting), 2),
];

/// What the probes still found weak after everything, beside stories: half of it exercises that no lesson before had.
const LAST: Shares = &[
    (Part::Story, 48),
    (Part::Rows, 4),
    (Part::Of(Exercise::Copying), 3),
    (Part::Of(Exercise::TwoPeople), 3),
    (Part::Of(Exercise::Agreement), 2),
    (Part::Of(Exercise::Gender), 1),
    (Part::Of(Exercise::Numbers), 2),
    (Part::Of(Exercise::Nesting), 1),
    (Part::Of(Exercise::Later), 9),
    (Part::Of(Exercise::Strangers), 9),
    (Part::Of(Exercise::Spells), 7),
    (Part::Of(Exercise::Belongings), 2),
    (Part::Of(Exercise::OneMore), 3),
    (Part::Of(Exercise::Pronouns), 2),
    (Part::Of(Exercise::Brackets), 4),
];

/// What a training learns from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lesson {
    /// Short rows of random tokens, whose pieces come again.
    Rows,
    /// A third rows of random tokens, and the rest of everything.
    RowsAndStories,
    /// A third short texts of two people, and the rest of everything.
    Practice,
    /// Stories, exercises and rows.
    Mixture,
    /// The same, and exercises of what is hardest.
    Last,
}

/// Which documents: those to train on and those that are held out have no seed in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// To train on.
    Training,
    /// To measure on.
    HeldOut,
}

/// Texts to train a tokenizer from: the beginning of the corpus, and the words of `world.json` so often that each becomes one token.
///
/// # Errors
/// When something happens in a story that cannot.
pub fn tokenizer_texts(seed: u64, bytes: usize) -> Result<Vec<String>, Impossible> {
    /// A word that is so frequent is merged before the rarest of two thousand tokens.
    const REPEATS: usize = 1000;
    let mut corpus = Corpus::new(seed, Lesson::Mixture, Split::Training, 1);
    let mut texts = Vec::new();
    let mut found = 0;
    while found < bytes {
        if let Some(text) = corpus.next_line()?.text {
            found += text.len();
            texts.push(text);
        }
    }
    let words: String = lexicon().world_words().iter().map(|word| format!(" {word}")).collect();
    texts.extend((0..REPEATS).map(|_| words.clone()));
    Ok(texts)
}

/// A line of the corpus: a text, or the ids of random tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// A text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Ids of tokens, where there is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
    /// What it contains.
    pub labels: Vec<String>,
    /// −log p of the choices that made it, in nats: an upper bound of its entropy.
    pub nats: f64,
}

/// Nats of millionths of a bit.
fn nats(microbits: u64) -> f64 {
    microbits as f64 * std::f64::consts::LN_2 / 1e6
}

/// The documents of a seed, in their shares, without end.
pub struct Corpus {
    seed: u64,
    shares: Shares,
    split: Split,
    vocab_size: u32,
    index: u64,
    /// Tokens of each part so far.
    tokens: Vec<u64>,
}

impl Corpus {
    /// The documents of a seed; random rows are of tokens below `vocab_size`.
    pub fn new(seed: u64, lesson: Lesson, split: Split, vocab_size: u32) -> Self {
        let shares = match lesson {
            Lesson::Rows => ROWS,
            Lesson::RowsAndStories => ROWS_AND_STORIES,
            Lesson::Practice => PRACTICE,
            Lesson::Mixture => MIXTURE,
            Lesson::Last => LAST,
        };
        Self { seed, shares, split, vocab_size, index: 0, tokens: vec![0; shares.len()] }
    }

    /// Tokens of all documents so far, estimated from their bytes.
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// The next document: one of the part that is furthest behind its share.
    ///
    /// # Errors
    /// When something happens in a story that cannot.
    pub fn next_line(&mut self) -> Result<Line, Impossible> {
        let total = self.tokens() + 1;
        let behind =
            |place: usize| i128::from(self.shares[place].1 * total) - 100 * i128::from(self.tokens[place]);
        let place = (0..self.shares.len()).max_by_key(|place| behind(*place)).unwrap_or_default();
        const HELD_OUT: u64 = 1 << 63;
        let stream = mixed(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            ^ if self.split == Split::HeldOut { HELD_OUT } else { 0 };
        let seed = mixed(stream.wrapping_add(mixed(self.index)));
        self.index += 1;
        let (line, tokens) = match self.shares[place].0 {
            part @ (Part::Rows | Part::ShortRows) => {
                let rows = if part == Part::Rows { random_rows } else { short_rows };
                let (ids, microbits) = rows(seed, self.vocab_size);
                let tokens = ids.len() as u64;
                (
                    Line {
                        text: None,
                        ids: Some(ids),
                        labels: vec!["random tokens".into()],
                        nats: nats(microbits),
                    },
                    tokens,
                )
            }
            part => {
                let document = match part {
                    Part::Of(exercise) => exercise.document(seed),
                    Part::Short(exercise) => exercise.short(seed),
                    _ => story(seed)?,
                };
                let tokens = document.text.len() as u64 / TOKEN_BYTES;
                let nats = nats(document.microbits);
                (Line { text: Some(document.text), ids: None, labels: document.labels, nats }, tokens)
            }
        };
        self.tokens[place] += tokens;
        Ok(line)
    }

    /// Writes documents of so many tokens, one a line, and returns how many documents these are.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(mut self, path: &Path, tokens: u64, mut told: impl FnMut(u64)) -> io::Result<u64> {
        let mut file = BufWriter::new(File::create(path)?);
        while self.tokens() < tokens {
            let line = self.next_line().map_err(io::Error::other)?;
            serde_json::to_writer(&mut file, &line)?;
            file.write_all(b"\n")?;
            told(self.tokens());
        }
        file.flush()?;
        Ok(self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_its_share() {
        for lesson in [Lesson::Rows, Lesson::RowsAndStories, Lesson::Practice, Lesson::Mixture, Lesson::Last]
        {
            let mut corpus = Corpus::new(3, lesson, Split::Training, 2048);
            while corpus.tokens() < 200_000 {
                corpus.next_line().unwrap();
            }
            for (place, (part, share)) in corpus.shares.iter().enumerate() {
                let found = corpus.tokens[place] as f64 / corpus.tokens() as f64;
                // A document is at most some hundred tokens, so at most half a hundredth of all.
                assert!((found - *share as f64 / 100.0).abs() < 0.005, "{part:?}: {found}");
            }
            assert_eq!(corpus.shares.iter().map(|(_, share)| share).sum::<u64>(), 100);
        }
    }

    #[test]
    fn what_is_held_out_is_not_trained_on() {
        let lines = |split| {
            let mut corpus = Corpus::new(3, Lesson::Mixture, split, 2048);
            (0..300).map(|_| corpus.next_line().unwrap()).collect::<Vec<_>>()
        };
        let (training, held_out) = (lines(Split::Training), lines(Split::HeldOut));
        let long = |line: &&Line| line.text.as_ref().is_some_and(|text| text.len() > 100);
        assert!(held_out.iter().filter(long).all(|line| !training.contains(line)));
        assert_eq!(training, lines(Split::Training));
    }
}
