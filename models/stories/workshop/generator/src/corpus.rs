//! The corpus: stories, exercises and rows of random tokens in their shares, training and held-out.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use crate::choices::mixed;
use crate::exercises::{Exercise, random_rows, short_rows};
use crate::lexicon;
use crate::stories::{Shelf, Split, Stories};

/// Tokens of 41 bytes of text, of a vocabulary of 4,096.
const TOKENS_OF_41_BYTES: u64 = 10;

/// Kind of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Story(Shelf),
    ShortRows,
    Rows,
    Of(Exercise),
}

/// Parts with their shares, in hundredths.
type Shares = &'static [(Part, u64)];

const STORIES: Shares =
    &[(Part::Story(Shelf::Core), 78), (Part::Story(Shelf::Books), 20), (Part::Story(Shelf::Plain), 2)];

const EXERCISES: Shares = &[
    (Part::Rows, 20),
    (Part::Of(Exercise::TwoPeople), 13),
    (Part::Of(Exercise::Later), 13),
    (Part::Of(Exercise::Copying), 8),
    (Part::Of(Exercise::Strangers), 8),
    (Part::Of(Exercise::Spells), 5),
    (Part::Of(Exercise::Agreement), 9),
    (Part::Of(Exercise::Gender), 7),
    (Part::Of(Exercise::Pronouns), 6),
    (Part::Of(Exercise::Belongings), 3),
    (Part::Of(Exercise::Numbers), 3),
    (Part::Of(Exercise::OneMore), 1),
    (Part::Of(Exercise::Nesting), 2),
    (Part::Of(Exercise::Brackets), 2),
];

/// Training data of one step of the curriculum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lesson {
    /// Short rows of random tokens, whose pieces repeat.
    Rows,
    /// A third rows of random tokens, the rest stories and exercises: a model that suddenly sees only stories forgets how to copy.
    RowsAndStories,
    /// Stories, and 20% exercises.
    Early,
    /// Stories, and 10% exercises.
    Middle,
    /// Stories, and 5% exercises.
    Late,
}

impl Lesson {
    /// Every lesson with its name, in the order of training.
    pub const ALL: [(&'static str, Self); 5] = [
        ("rows", Self::Rows),
        ("rows-and-stories", Self::RowsAndStories),
        ("early", Self::Early),
        ("middle", Self::Middle),
        ("late", Self::Late),
    ];

    /// Parts with their shares, in ten-thousandths of all tokens.
    fn shares(self, stories: &Stories) -> Vec<(Part, u64)> {
        let (rows, exercises) = match self {
            Self::Rows => return vec![(Part::ShortRows, 10_000)],
            Self::RowsAndStories => (34, 20),
            Self::Early => (0, 20),
            Self::Middle => (0, 10),
            Self::Late => (0, 5),
        };
        let mut shares = vec![(Part::Rows, 100 * rows)];
        let scaled = |shares: Shares, all: u64| shares.iter().map(move |(part, share)| (*part, share * all));
        shares.extend(scaled(EXERCISES, exercises));
        let mut all = 10_000 - 100 * (rows + exercises);
        for (part, share) in scaled(STORIES, 100 - rows - exercises).rev() {
            let is_missing = matches!(part, Part::Story(shelf) if stories.is_empty(shelf));
            match part {
                // The core has the rest.
                Part::Story(Shelf::Core) => shares.push((part, all)),
                _ if is_missing => {}
                _ => {
                    all -= share;
                    shares.push((part, share));
                }
            }
        }
        shares
    }
}

/// Texts to train a tokenizer from: the beginning of the corpus, and the words of `world.json` so often that each becomes one token.
pub fn tokenizer_texts(seed: u64, bytes: usize, stories: &mut Stories) -> Vec<String> {
    /// A word that is so frequent is merged before the rarest of the tokens.
    const REPEATS: usize = 1000;
    let mut corpus = Corpus::new(seed, Lesson::Late, Split::Training, 1, stories);
    let mut texts = Vec::new();
    let mut found = 0;
    while found < bytes {
        if let Some(text) = corpus.next_line().text {
            found += text.len();
            texts.push(text);
        }
    }
    let words: String = lexicon().world_words().iter().map(|word| format!(" {word}")).collect();
    texts.extend((0..REPEATS).map(|_| words.clone()));
    texts
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
    /// Kind of its content.
    pub labels: Vec<&'static str>,
}

/// Documents of a lesson in their shares, endlessly.
pub struct Corpus<'a> {
    seed: u64,
    shares: Vec<(Part, u64)>,
    split: Split,
    vocab_size: u32,
    stories: &'a mut Stories,
    index: u64,
    /// Tokens of each part so far.
    tokens: Vec<u64>,
}

impl<'a> Corpus<'a> {
    /// Documents of a seed; random rows are of tokens below `vocab_size`.
    pub fn new(seed: u64, lesson: Lesson, split: Split, vocab_size: u32, stories: &'a mut Stories) -> Self {
        let shares = lesson.shares(stories);
        // Each lesson has exercises of its own.
        let seed = mixed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ lesson as u64);
        let tokens = vec![0; shares.len()];
        Self { seed, shares, split, vocab_size, stories, index: 0, tokens }
    }

    /// Tokens of all documents so far, estimated from their bytes.
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// The next document: one of the part that is furthest behind its share.
    pub fn next_line(&mut self) -> Line {
        let total = self.tokens() + 1;
        let behind =
            |place: usize| i128::from(self.shares[place].1 * total) - 10_000 * i128::from(self.tokens[place]);
        let place = (0..self.shares.len()).max_by_key(|place| behind(*place)).unwrap_or_default();
        const HELD_OUT: u64 = 1 << 63;
        let stream = self.seed ^ if self.split == Split::HeldOut { HELD_OUT } else { 0 };
        let seed = mixed(stream.wrapping_add(mixed(self.index)));
        self.index += 1;
        let (line, tokens) = match self.shares[place].0 {
            part @ (Part::Rows | Part::ShortRows) => {
                let rows = if part == Part::Rows { random_rows } else { short_rows };
                let ids = rows(seed, self.vocab_size);
                let tokens = ids.len() as u64;
                (Line { text: None, ids: Some(ids), labels: vec!["random tokens"] }, tokens)
            }
            Part::Of(exercise) => {
                let text = exercise.document(seed);
                let tokens = text.len() as u64 * TOKENS_OF_41_BYTES / 41;
                (Line { text: Some(text), ids: None, labels: vec![exercise.name()] }, tokens)
            }
            Part::Story(shelf) => {
                let text = self.stories.next(shelf).unwrap_or_default();
                let tokens = text.len() as u64 * TOKENS_OF_41_BYTES / 41;
                (Line { text: Some(text), ids: None, labels: vec![shelf.name()] }, tokens.max(1))
            }
        };
        self.tokens[place] += tokens;
        line
    }

    /// Writes documents of at least `tokens` tokens, one per line, and returns the number of documents.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(mut self, path: &Path, tokens: u64, mut progress: impl FnMut(u64)) -> io::Result<u64> {
        let mut file = BufWriter::new(File::create(path)?);
        while self.tokens() < tokens {
            serde_json::to_writer(&mut file, &self.next_line())?;
            file.write_all(b"\n")?;
            progress(self.tokens());
        }
        file.flush()?;
        Ok(self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stories() -> Stories {
        let story = |number: usize| format!("One day, Tim had {number} balls. He gave them to Lily.");
        let chapter = |number: usize| format!("{}\n\n", story(number)).repeat(20);
        Stories::new(1, [(0..100).map(story).collect(), (0..9).map(chapter).collect(), Vec::new()])
    }

    #[test]
    fn every_part_has_its_share() {
        for (_, lesson) in Lesson::ALL {
            let mut stories = stories();
            let mut corpus = Corpus::new(3, lesson, Split::Training, 4096, &mut stories);
            while corpus.tokens() < 200_000 {
                corpus.next_line();
            }
            for (place, (part, share)) in corpus.shares.iter().enumerate() {
                let found = corpus.tokens[place] as f64 / corpus.tokens() as f64;
                // A document is at most some hundred tokens, so at most half a hundredth of all.
                assert!((found - *share as f64 / 10_000.0).abs() < 0.005, "{part:?}: {found}");
            }
            assert_eq!(corpus.shares.iter().map(|(_, share)| share).sum::<u64>(), 10_000);
        }
    }

    #[test]
    fn stories_are_four_fifths_of_the_early_lesson_and_nineteen_twentieths_of_the_late_one() {
        for (lesson, expected) in [(Lesson::Early, 8000), (Lesson::Middle, 9000), (Lesson::Late, 9500)] {
            let shares = lesson.shares(&stories());
            let of_stories =
                shares.iter().filter(|(part, _)| matches!(part, Part::Story(_))).map(|(_, share)| share);
            assert_eq!(of_stories.sum::<u64>(), expected);
        }
    }

    #[test]
    fn a_seed_gives_the_same_lines_and_what_is_held_out_is_not_trained_on() {
        let lines = |split| {
            let mut stories = stories();
            let mut corpus = Corpus::new(3, Lesson::Early, split, 4096, &mut stories);
            (0..300).map(|_| corpus.next_line()).collect::<Vec<_>>()
        };
        let (training, held_out) = (lines(Split::Training), lines(Split::HeldOut));
        let is_long_exercise = |line: &&Line| {
            line.text.as_ref().is_some_and(|text| text.len() > 100)
                && ![Shelf::Core.name(), Shelf::Books.name()].contains(&line.labels[0])
        };
        assert!(held_out.iter().filter(is_long_exercise).all(|line| !training.contains(line)));
        assert_eq!(training, lines(Split::Training));
    }
}
