//! Search for runs of words that texts share with the training text.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// Minimum length of a run, in words.
const RUN: usize = 16;

/// Texts, and the runs of at least 16 words that they share with the training text.
pub(crate) struct Copies<'a> {
    texts: Vec<Vec<&'a str>>,
    /// Positions of each sequence of 16 words: index of the text and index of the first word.
    places: HashMap<u64, Vec<(usize, usize)>>,
    /// For each text, the longest run and the end of the earliest match of 16 words.
    found: Vec<Option<(usize, usize)>>,
}

fn hash(words: &[&str]) -> u64 {
    let mut hasher = DefaultHasher::new();
    words.hash(&mut hasher);
    hasher.finish()
}

/// Returns the first `count` words of a text.
pub(crate) fn first_words(text: &str, count: usize) -> String {
    text.split_whitespace().take(count).collect::<Vec<_>>().join(" ")
}

impl<'a> Copies<'a> {
    pub(crate) fn new(texts: &[&'a str]) -> Self {
        let texts: Vec<Vec<&str>> = texts.iter().map(|text| text.split_whitespace().collect()).collect();
        let mut places: HashMap<u64, Vec<(usize, usize)>> = HashMap::new();
        for (text, words) in texts.iter().enumerate() {
            for (place, run) in words.windows(RUN).enumerate() {
                places.entry(hash(run)).or_default().push((text, place));
            }
        }
        let found = vec![None; texts.len()];
        Self { texts, places, found }
    }

    /// Searches a training text for runs.
    pub(crate) fn read(&mut self, trained: &str) {
        let trained: Vec<&str> = trained.split_whitespace().collect();
        for (start, run) in trained.windows(RUN).enumerate() {
            for (text, place) in self.places.get(&hash(run)).into_iter().flatten() {
                let same = trained[start..]
                    .iter()
                    .zip(&self.texts[*text][*place..])
                    .take_while(|(one, other)| one == other);
                let length = same.count();
                if length >= RUN {
                    let (longest, end) = self.found[*text].unwrap_or((0, usize::MAX));
                    self.found[*text] = Some((longest.max(length), end.min(place + RUN)));
                }
            }
        }
    }

    /// Fraction of the given texts that have a run in their first `words` words.
    pub(crate) fn share(&self, texts: Range<usize>, words: usize) -> f64 {
        let total = texts.len().max(1) as f64;
        let with_run = self.found[texts].iter().flatten().filter(|(_, end)| *end <= words);
        with_run.count() as f64 / total
    }

    /// Length of the longest run in the given texts, in words.
    pub(crate) fn longest(&self, texts: Range<usize>) -> usize {
        self.found[texts].iter().flatten().map(|(longest, _)| *longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(range: Range<usize>) -> String {
        range.map(|number| number.to_string()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn runs_of_more_than_15_words_are_found_with_their_length() {
        let texts = [numbers(0..30), numbers(100..115), format!("{} {}", numbers(40..60), numbers(5..25))];
        let mut copies = Copies::new(&texts.each_ref().map(String::as_str));
        copies.read(&format!("other words {} and others", numbers(3..21)));
        copies.read(&numbers(100..115));
        assert_eq!((copies.longest(0..1), copies.longest(1..2), copies.longest(2..3)), (18, 0, 16));
        // The first text has the run in words 4 to 19. In the third text, the run
        // follows the twentieth word.
        assert_eq!(
            (copies.share(0..3, 95), copies.share(0..3, 20), copies.share(0..3, 18)),
            (2.0 / 3.0, 1.0 / 3.0, 0.0)
        );
    }
}
