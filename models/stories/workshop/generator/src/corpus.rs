//! Training and held-out corpus: stories, exercises and rows of random tokens in fixed proportions.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use crate::choices::mixed;
use crate::exercises::{Exercise, random_rows, short_rows};
use crate::lexicon;
use crate::stories::{Shelf, Split, Stories};

/// Estimated number of tokens in 41 bytes of text, with a vocabulary of 4,096.
const TOKENS_OF_41_BYTES: u64 = 10;

/// Kind of document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Story(Shelf),
    ShortRows,
    Rows,
    Of(Exercise),
    /// An exercise whose first sentence always frames it as a page of a book or a game.
    Page(Exercise),
}

/// Parts and their proportions, in percent.
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

/// Proportions that favor skills that stories do not teach: who gets what, agreement, copying rows.
const PRACTICE: Shares = &[
    (Part::Rows, 15),
    (Part::Of(Exercise::Brief), 15),
    (Part::Of(Exercise::TwoPeople), 25),
    (Part::Of(Exercise::Later), 20),
    (Part::Of(Exercise::Copying), 4),
    (Part::Of(Exercise::Strangers), 3),
    (Part::Of(Exercise::Spells), 2),
    (Part::Of(Exercise::Agreement), 7),
    (Part::Of(Exercise::Gender), 3),
    (Part::Of(Exercise::Pronouns), 3),
    (Part::Of(Exercise::Belongings), 1),
    (Part::Of(Exercise::Numbers), 1),
    (Part::Of(Exercise::Nesting), 1),
];

/// Exercises about one person doing something for another, with an answer every few words.
///
/// If these exercises are scattered among stories, a training step has too few answers for a model to learn
/// which of two names comes next.
const PEOPLE: Shares =
    &[(Part::Of(Exercise::Brief), 40), (Part::Of(Exercise::TwoPeople), 30), (Part::Of(Exercise::Later), 30)];

/// Proportions that favor short stories.
const LAST_STORIES: Shares =
    &[(Part::Story(Shelf::Core), 92), (Part::Story(Shelf::Books), 7), (Part::Story(Shelf::Plain), 1)];

/// Exercises from [`PRACTICE`], each on its own page.
///
/// Every exercise begins with a framing sentence, so an ordinary opening never leads to an exercise.
const LAST_PRACTICE: Shares = &[
    (Part::Rows, 18),
    (Part::Page(Exercise::Brief), 16),
    (Part::Page(Exercise::TwoPeople), 20),
    (Part::Page(Exercise::Later), 12),
    (Part::Page(Exercise::Copying), 3),
    (Part::Page(Exercise::Strangers), 3),
    (Part::Page(Exercise::Agreement), 20),
    (Part::Page(Exercise::Gender), 3),
    (Part::Page(Exercise::Pronouns), 3),
    (Part::Page(Exercise::Numbers), 1),
    (Part::Page(Exercise::Nesting), 1),
];

/// Training data for one step of the curriculum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lesson {
    /// Short rows of random tokens with repeated pieces.
    Rows,
    /// One third rows of random tokens, the rest stories and exercises.
    ///
    /// A model that suddenly sees only stories forgets how to copy.
    RowsAndStories,
    /// Stories with 20% exercises.
    Early,
    /// Stories with 10% exercises.
    Middle,
    /// Stories with 20% exercises, in the proportions of `PRACTICE`.
    Practice,
    /// Second copying phase: 15% rows of random tokens, 55% exercises from `PEOPLE`, the rest stories.
    People,
    /// Stories with 15% exercises, in the proportions of `PRACTICE`.
    Late,
    /// Stories, most of them short, with 3% rows and 8% exercises on their own pages.
    Last,
}

impl Lesson {
    /// All lessons with their names, in training order.
    pub const ALL: [(&'static str, Self); 8] = [
        ("rows", Self::Rows),
        ("rows-and-stories", Self::RowsAndStories),
        ("early", Self::Early),
        ("middle", Self::Middle),
        ("practice", Self::Practice),
        ("people", Self::People),
        ("late", Self::Late),
        ("last", Self::Last),
    ];

    /// Parts and their fractions of all tokens, in ten-thousandths.
    fn shares(self, stories: &Stories) -> Vec<(Part, u64)> {
        let (rows, exercises, mix, of_stories) = match self {
            Self::Rows => return vec![(Part::ShortRows, 10_000)],
            Self::RowsAndStories => (34, 20, EXERCISES, STORIES),
            Self::Early => (0, 20, EXERCISES, STORIES),
            Self::Middle => (0, 10, EXERCISES, STORIES),
            Self::Practice => (0, 20, PRACTICE, STORIES),
            Self::People => (15, 55, PEOPLE, STORIES),
            Self::Late => (0, 15, PRACTICE, STORIES),
            Self::Last => (3, 8, LAST_PRACTICE, LAST_STORIES),
        };
        let mut shares = vec![(Part::Rows, 100 * rows)];
        let scaled = |shares: Shares, all: u64| shares.iter().map(move |(part, share)| (*part, share * all));
        shares.extend(scaled(mix, exercises));
        let mut all = 10_000 - 100 * (rows + exercises);
        for (part, share) in scaled(of_stories, 100 - rows - exercises).rev() {
            let is_missing = matches!(part, Part::Story(shelf) if stories.is_empty(shelf));
            match part {
                // The core stories fill the rest.
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

/// Texts for training a tokenizer.
///
/// They are the beginning of the corpus and the words of `world.json`. The words are repeated so often that
/// each becomes a single token.
pub fn tokenizer_texts(seed: u64, bytes: usize, stories: &mut Stories) -> Vec<String> {
    /// Number of repetitions; enough for each word to become a token before the vocabulary is full.
    const REPEATS: usize = 1000;
    let mut corpus = Corpus::new(seed, Lesson::Middle, Split::Training, 1, stories);
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

/// A line in the corpus: a text or random token IDs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Text of the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Token IDs, if there is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
    /// Labels for the kind of content.
    pub labels: Vec<&'static str>,
}

/// Endless sequence of a lesson's documents, in the lesson's proportions.
pub struct Corpus<'a> {
    seed: u64,
    shares: Vec<(Part, u64)>,
    split: Split,
    vocab_size: u32,
    stories: &'a mut Stories,
    index: u64,
    /// Number of tokens in each part so far.
    tokens: Vec<u64>,
}

impl<'a> Corpus<'a> {
    /// Creates the corpus for a lesson from a seed.
    ///
    /// Rows of random tokens use tokens below `vocab_size`.
    pub fn new(seed: u64, lesson: Lesson, split: Split, vocab_size: u32, stories: &'a mut Stories) -> Self {
        let shares = lesson.shares(stories);
        // Each lesson has its own exercises.
        let seed = mixed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ lesson as u64);
        let tokens = vec![0; shares.len()];
        Self { seed, shares, split, vocab_size, stories, index: 0, tokens }
    }

    /// Returns the number of tokens in all documents so far, estimated from their bytes.
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// Returns the next document, from the part that is furthest below its proportion.
    pub fn next_line(&mut self) -> Line {
        let total = self.tokens() + 1;
        let behind =
            |place: usize| i128::from(self.shares[place].1 * total) - 10_000 * i128::from(self.tokens[place]);
        let place = (0..self.shares.len()).max_by_key(|place| behind(*place)).unwrap_or_default();
        const HELD_OUT: u64 = 1 << 63;
        let stream = self.seed ^ if self.split == Split::HeldOut { HELD_OUT } else { 0 };
        let seed = mixed(stream.wrapping_add(mixed(self.index)));
        self.index += 1;
        let rows = |rows: fn(u64, u32) -> Vec<u32>| {
            let ids = rows(seed, self.vocab_size);
            let tokens = ids.len() as u64;
            (Line { text: None, ids: Some(ids), labels: vec!["random tokens"] }, tokens)
        };
        let text = |text: String, label| {
            let tokens = text.len() as u64 * TOKENS_OF_41_BYTES / 41;
            (Line { text: Some(text), ids: None, labels: vec![label] }, tokens.max(1))
        };
        let (line, tokens) = match self.shares[place].0 {
            Part::Rows => rows(random_rows),
            Part::ShortRows => rows(short_rows),
            Part::Of(exercise) => text(exercise.document(seed), exercise.name()),
            Part::Page(exercise) => text(exercise.page(seed), exercise.name()),
            Part::Story(shelf) => text(self.stories.next(shelf).unwrap_or_default(), shelf.name()),
        };
        self.tokens[place] += tokens;
        line
    }

    /// Writes documents with at least `tokens` tokens in total, one per line, and returns their number.
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
    fn every_part_has_its_fraction_of_tokens() {
        for (_, lesson) in Lesson::ALL {
            let mut stories = stories();
            let mut corpus = Corpus::new(3, lesson, Split::Training, 4096, &mut stories);
            while corpus.tokens() < 200_000 {
                corpus.next_line();
            }
            for (place, (part, share)) in corpus.shares.iter().enumerate() {
                let found = corpus.tokens[place] as f64 / corpus.tokens() as f64;
                // A document has at most a few hundred tokens, which is at most 0.5% of all tokens.
                assert!((found - *share as f64 / 10_000.0).abs() < 0.005, "{part:?}: {found}");
            }
            assert_eq!(corpus.shares.iter().map(|(_, share)| share).sum::<u64>(), 10_000);
        }
    }

    #[test]
    fn stories_are_80_to_90_percent_of_the_later_lessons() {
        for (lesson, expected) in [
            (Lesson::Early, 8000),
            (Lesson::Middle, 9000),
            (Lesson::Practice, 8000),
            (Lesson::Late, 8500),
            (Lesson::Last, 8900),
        ] {
            let shares = lesson.shares(&stories());
            let of_stories =
                shares.iter().filter(|(part, _)| matches!(part, Part::Story(_))).map(|(_, share)| share);
            assert_eq!(of_stories.sum::<u64>(), expected);
        }
    }

    #[test]
    fn lines_are_reproducible_and_held_out_lines_are_not_trained() {
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
