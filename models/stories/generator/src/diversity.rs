//! How varied texts are: how well they compress, how often words follow each other again, how they begin.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;

use crate::check::{sentences, words};
use crate::lexicon::lexicon;

/// Bytes that are compressed.
const GZIP_BYTES: usize = 400_000;
/// Words, marks included, whose sequences are counted.
const WORDS: usize = 80_000;
/// Stories whose skeletons are compared.
const SKELETONS: usize = 10_000;

/// A figure and the goal that it should meet.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// What is measured.
    pub name: &'static str,
    /// What was found.
    pub value: f64,
    /// What is wanted.
    pub goal: f64,
    /// Whether the goal is the most it may be, or the least.
    pub is_most: bool,
}

impl Figure {
    /// Whether the goal is met.
    pub fn is_met(&self) -> bool {
        if self.is_most { self.value <= self.goal } else { self.value >= self.goal }
    }
}

/// Measures stories against the goals of the generator. References: six books of Thornton Burgess compress to 1 / 3.2, have 86% different
/// sequences of four words and repeat 0.7% of their sentences.
///
/// # Errors
/// When nothing can be compressed, which does not happen in memory.
pub fn diversity(stories: &[String]) -> std::io::Result<Vec<Figure>> {
    let mut text = stories.join("\n\n");
    text.truncate(text.floor_char_boundary(GZIP_BYTES));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text.as_bytes())?;
    let gzip = text.len() as f64 / encoder.finish()?.len() as f64;

    let mut all = stories.iter().flat_map(|story| words(story)).take(WORDS).collect::<Vec<_>>();
    all.shrink_to_fit();
    let lower: Vec<String> = all.iter().map(|word| word.to_lowercase()).collect();
    let fours: HashSet<&[String]> = lower.windows(4).collect();
    let distinct = fours.len() as f64 / lower.windows(4).count().max(1) as f64;

    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut counted = 0;
    for sentence in stories.iter().flat_map(|story| sentences(story)) {
        let length = words(sentence).len();
        if counted >= WORDS {
            break;
        }
        counted += length;
        if length > 5 {
            *counts.entry(sentence).or_default() += 1;
        }
    }
    let total: usize = counts.values().sum();
    let repeated: usize = counts.values().map(|count| count - 1).sum();

    let mut openings: HashMap<Vec<&str>, usize> = HashMap::new();
    for story in stories {
        *openings.entry(words(story).into_iter().take(4).collect()).or_default() += 1;
    }
    let opening = openings.values().max().copied().unwrap_or_default() as f64 / stories.len().max(1) as f64;

    let mut skeletons = HashSet::new();
    let compared = stories.len().min(SKELETONS);
    let twice = stories[..compared].iter().filter(|story| !skeletons.insert(skeleton(story))).count();

    let figure = |name, value, goal, is_most| Figure { name, value, goal, is_most };
    Ok(vec![
        figure("gzip ratio of 400 kB", gzip, 4.0, true),
        figure("different sequences of 4 words", distinct, 0.70, false),
        figure("repeated sentences", repeated as f64 / total.max(1) as f64, 0.03, true),
        figure("stories with the commonest 4 words at the beginning", opening, 0.01, true),
        figure("stories whose masked skeleton was there before", twice as f64, 0.0, true),
    ])
}

/// A story without its names, nouns, adjectives and numbers.
fn skeleton(story: &str) -> String {
    let lexicon = lexicon();
    let nouns = lexicon.objects.iter().chain(&lexicon.places).chain(&lexicon.animals);
    let mut masked: HashSet<&str> = nouns.flat_map(|noun| [noun.singular, noun.plural]).collect();
    masked.extend(lexicon.she.iter().chain(&lexicon.he).chain(&lexicon.adjectives).chain(&lexicon.numbers));
    words(story)
        .into_iter()
        .map(|word| if masked.contains(word.strip_suffix("'s").unwrap_or(word)) { "_" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_texts_that_can_be_counted_by_hand() {
        let one = "Tom saw a red ball on a hill.".to_owned();
        let other = "Mia saw a big kite on a farm.".to_owned();
        let figures = diversity(&[one.clone(), other, one]).unwrap();
        let value = |name: &str| figures.iter().find(|figure| figure.name.contains(name)).unwrap().value;
        // 27 words and marks have 24 sequences of four; those of the third sentence, six of them, were there before.
        assert_eq!(value("sequences"), 18.0 / 24.0);
        assert_eq!(value("repeated"), 1.0 / 3.0);
        assert_eq!(value("beginning"), 2.0 / 3.0);
        assert_eq!(value("skeleton"), 2.0, "names and nouns are all that the second story changes");
    }

    #[test]
    fn a_goal_is_a_bound_on_its_side() {
        let figure = |value, is_most| Figure { name: "", value, goal: 0.5, is_most };
        assert!(figure(0.4, true).is_met() && !figure(0.6, true).is_met());
        assert!(figure(0.6, false).is_met() && !figure(0.4, false).is_met());
    }
}
