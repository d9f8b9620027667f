//! Published stories, read from a folder of text files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::Choices;
use crate::choices::mixed;
use crate::names::Cast;
use crate::unwanted::is_unwanted;

/// Line that ends a story in the files.
const END: &str = "<|endoftext|>";

/// Training or held-out documents; the two share no seeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Documents to train on.
    Training,
    /// Documents to evaluate on.
    HeldOut,
}

/// Kinds of stories, each with its own files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shelf {
    /// Short stories in the simplest words.
    Core,
    /// Chapters of children's books.
    Books,
    /// Less simple stories.
    Plain,
}

impl Shelf {
    /// Returns the label of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Core => "story",
            Self::Books => "book",
            Self::Plain => "plain story",
        }
    }

    fn prefix(self, split: Split) -> String {
        let kind = match self {
            Self::Core => "core",
            Self::Books => "core-books",
            Self::Plain => "plain",
        };
        let split = match split {
            Split::Training => "train",
            Split::HeldOut => "valid",
        };
        format!("{kind}-{split}")
    }
}

/// Endless sequence of stories of each kind.
///
/// Every round contains each story once, in a new order and with new names.
#[derive(Debug)]
pub struct Stories {
    shelves: [Rounds; 3],
}

impl Stories {
    /// Reads the training files or the held-out files in a folder.
    ///
    /// # Errors
    /// If the folder or a file cannot be read, or if there are no core stories.
    pub fn read(folder: &Path, split: Split, seed: u64) -> Result<Self> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            paths.push(entry?.path());
        }
        paths.sort();
        let texts = |shelf: Shelf| -> Result<Vec<String>> {
            let mut texts = Vec::new();
            for path in &paths {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if name.starts_with(&shelf.prefix(split)) && name.ends_with(".txt") {
                    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
                    texts.extend(in_file(&text));
                }
            }
            Ok(texts)
        };
        let shelves = [texts(Shelf::Core)?, texts(Shelf::Books)?, texts(Shelf::Plain)?];
        if shelves[0].is_empty() {
            bail!(
                "{}: found no stories in files named `{}*.txt`",
                folder.display(),
                Shelf::Core.prefix(split)
            );
        }
        Ok(Self::new(seed, shelves))
    }

    /// Creates the sequence from the stories of each kind.
    pub fn new(seed: u64, shelves: [Vec<String>; 3]) -> Self {
        let mut number = 0;
        let shelves = shelves.map(|texts| {
            number += 1;
            Rounds { seed: mixed(seed ^ number), texts, order: Vec::new(), next: 0, round: 0 }
        });
        Self { shelves }
    }

    /// Whether there are no stories of a kind.
    pub fn is_empty(&self, shelf: Shelf) -> bool {
        self.shelves[shelf as usize].texts.is_empty()
    }

    /// Number of rounds that have begun.
    pub fn rounds(&self, shelf: Shelf) -> u64 {
        self.shelves[shelf as usize].round
    }

    /// Returns the next story of a kind, or `None` if there are none.
    pub fn next(&mut self, shelf: Shelf) -> Option<String> {
        self.shelves[shelf as usize].next()
    }
}

/// Returns the trimmed stories in a file, except stories with unwanted words.
fn in_file(text: &str) -> impl Iterator<Item = String> {
    let stories = text.split(END).map(str::trim);
    stories.filter(|story| !story.is_empty() && !is_unwanted(story)).map(str::to_owned)
}

#[derive(Debug)]
struct Rounds {
    seed: u64,
    texts: Vec<String>,
    order: Vec<usize>,
    next: usize,
    round: u64,
}

impl Rounds {
    fn next(&mut self) -> Option<String> {
        if self.next == self.order.len() {
            self.round += 1;
            self.order = (0..self.texts.len()).collect();
            Choices::new(mixed(self.seed ^ mixed(self.round))).shuffle(&mut self.order);
            self.next = 0;
        }
        let story = *self.order.get(self.next)?;
        self.next += 1;
        let mut choices = Choices::new(mixed(self.seed ^ mixed(self.round << 32 | story as u64)));
        Some(Cast::of(&self.texts[story]).copy(&mut choices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_contains_every_story_once_in_a_new_order() {
        let texts: Vec<String> = (0..40).map(|number| format!("The cat had {number} balls.")).collect();
        let mut stories = Stories::new(5, [texts.clone(), Vec::new(), Vec::new()]);
        let mut round = || -> Vec<String> { (0..40).filter_map(|_| stories.next(Shelf::Core)).collect() };
        let (first, second) = (round(), round());
        assert_ne!(first, second);
        for mut round in [first, second] {
            round.sort();
            let mut expected = texts.clone();
            expected.sort();
            assert_eq!(round, expected);
        }
        assert_eq!((stories.rounds(Shelf::Core), stories.next(Shelf::Books)), (2, None));
    }

    #[test]
    fn story_files_are_split_at_end_markers() {
        let folder = std::env::temp_dir().join(format!("story-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("core-train-01.txt"), "One.\n\nTwo.\n<|endoftext|>\nThree.\n<|endoftext|>\n")
            .unwrap();
        fs::write(folder.join("core-valid.txt"), "The savages came.\n<|endoftext|>\nFour.\n<|endoftext|>\n")
            .unwrap();
        let mut stories = Stories::read(&folder, Split::Training, 1).unwrap();
        let mut found: Vec<_> = (0..2).filter_map(|_| stories.next(Shelf::Core)).collect();
        found.sort();
        assert_eq!(found, ["One.\n\nTwo.", "Three."]);
        assert_eq!(Stories::read(&folder, Split::HeldOut, 1).unwrap().next(Shelf::Core).unwrap(), "Four.");
        fs::remove_file(folder.join("core-train-01.txt")).unwrap();
        assert!(Stories::read(&folder, Split::Training, 1).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
