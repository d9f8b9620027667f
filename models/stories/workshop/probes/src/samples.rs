//! Measures completions at default settings: closed quotation marks, copied text, unwanted words.

use anyhow::Result;
use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request};
use story_generator::is_unwanted;

use crate::copying::{Copies, first_words};
use crate::figures::Figure;
use crate::subject::Subject;

/// Maximum tokens per completion.
const TOKENS: usize = 300;
/// Batch size.
const BATCH: usize = 8;
/// Number of words from a held-out story that a completion opens with.
const OPENING_WORDS: usize = 4;
/// Number of words to search for copied text, about 120 tokens.
const COMPARED_WORDS: usize = 95;

/// Openings that users type.
const OPENINGS: [&str; 15] = [
    "Once upon a time",
    "One day",
    "The dog",
    "Yesterday, Anna",
    "There was a little girl who",
    "Tom and his sister",
    "It was raining and",
    "My grandmother",
    "The old man",
    "In the forest",
    "\"Look!\" said Ben.",
    "Mia wanted to",
    "A boy found a box.",
    "On his birthday, Max",
    "The sun was shining.",
];

/// A completion including its opening.
pub(crate) struct Sample {
    pub(crate) text: String,
    /// Whether the model ended the completion.
    is_done: bool,
}

/// Continues openings with the model's default settings, each with its own seed.
fn completed(subject: &Subject, openings: &[(String, u64)], tokens: usize) -> Result<Vec<Sample>> {
    let defaults = subject.loaded.defaults()?;
    let config = GenerationConfig {
        max_new_tokens: tokens,
        eos_token_id: vec![subject.end],
        ..defaults.config().clone()
    };
    let config = defaults.complete(config)?;
    let requests = openings
        .iter()
        .map(|(text, seed)| {
            Ok(Request::new(subject.prompt(text)?, GenerationConfig { seed: *seed, ..config.clone() }))
        })
        .collect::<Result<_>>()?;
    let mut samples: Vec<_> =
        openings.iter().map(|(text, _)| Sample { text: text.clone(), is_done: false }).collect();
    let tokenizer = subject.loaded.vocabulary().required_tokenizer()?;
    for token in BatchGenerator::new(subject.loaded.model(), requests, BATCH, Some(&**tokenizer))? {
        let token = token.map_err(|failed| failed.error)?;
        let sample = &mut samples[token.prompt];
        sample.is_done |= token.id == subject.end;
        if token.id != subject.end {
            sample.text += &token.text;
        }
    }
    Ok(samples)
}

/// Completions of openings that users type, for a blind reader.
pub(crate) fn for_readers(subject: &Subject, seeds: u64, tokens: usize) -> Result<Vec<Sample>> {
    let openings: Vec<_> =
        OPENINGS.iter().flat_map(|text| (1..=seeds).map(|seed| ((*text).to_owned(), seed))).collect();
    completed(subject, &openings, tokens)
}

/// Completion of an empty prompt.
pub(crate) fn one(subject: &Subject, tokens: usize) -> Result<String> {
    let samples = completed(subject, &[(String::new(), 1)], tokens)?;
    Ok(samples.into_iter().map(|sample| sample.text).collect())
}

/// Measures `count` completions of openings from held-out stories.
///
/// `trained` contains the texts of the lessons.
pub(crate) fn run(
    subject: &Subject,
    held_out: &[String],
    trained: impl IntoIterator<Item = Result<String>>,
    count: usize,
) -> Result<Vec<Figure>> {
    let openings: Vec<_> = (0..count)
        .map(|number| (first_words(&held_out[number % held_out.len()], OPENING_WORDS), number as u64 + 1))
        .collect();
    let samples = completed(subject, &openings, TOKENS)?;
    let closed = samples.iter().filter(|sample| are_quotes_closed(&sample.text, sample.is_done)).count();
    let unwanted = samples.iter().filter(|sample| is_unwanted(&sample.text)).count();
    let texts: Vec<&str> = samples
        .iter()
        .map(|sample| sample.text.as_str())
        .chain(held_out.iter().map(String::as_str))
        .collect();
    let mut copies = Copies::new(&texts);
    for text in trained {
        copies.read(&text?);
    }
    let [own, stories] = [0..samples.len(), samples.len()..texts.len()];
    let copied_by_stories = copies.share(stories, COMPARED_WORDS);
    Ok(vec![
        Figure::new("samples whose quotation marks are closed", closed as f64 / count.max(1) as f64)
            .at_least(0.93),
        Figure::new(
            "samples that share over 15 words with the training text",
            copies.share(own.clone(), COMPARED_WORDS),
        )
        .at_most(copied_by_stories),
        Figure::new("longest shared run, in words", copies.longest(own) as f64).at_most(40.0),
        Figure::new("samples with a slur or a period stereotype", unwanted as f64).at_most(0.0),
    ])
}

/// Whether each paragraph has paired quotation marks.
///
/// The last paragraph is ignored if the model did not end the completion.
fn are_quotes_closed(text: &str, is_done: bool) -> bool {
    let paragraphs: Vec<&str> = text.lines().collect();
    let complete = if is_done { paragraphs.len() } else { paragraphs.len().saturating_sub(1) };
    paragraphs[..complete].iter().all(|paragraph| paragraph.matches('"').count() % 2 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_of_one_opening_differ_by_seed() {
        let subject = Subject::open(std::path::Path::new("built-in")).unwrap();
        let openings = [1, 2, 1].map(|seed| ("One day".to_owned(), seed));
        let samples = completed(&subject, &openings, 12).unwrap();
        assert!(samples[0].text != samples[1].text && samples[0].text == samples[2].text);
    }

    #[test]
    fn quotation_marks_are_counted_by_paragraph() {
        assert!(are_quotes_closed("\"Hi,\" he said.\n\n\"Go", false));
        assert!(!are_quotes_closed("\"Hi,\" he said.\n\n\"Go", true));
        assert!(!are_quotes_closed("\"Hi, he said.\n\n\"Go\"", true));
    }
}
