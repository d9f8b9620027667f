//! What the model writes: faults, quotation marks and brackets, and how much of it was in the corpus.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::Result;
use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request};
use story_generator::{Fault, Figure, faults, story};

use crate::probes::Probe;
use crate::{Line, Subject, figure};

/// Longest sample: more than any story has.
const TOKENS: usize = 400;
/// Longest end of a sentence with brackets.
const BRACKET_TOKENS: usize = 60;
/// Texts that are generated side by side.
const AT_ONCE: usize = 8;
/// Seed of the first story that the corpus does not have.
const FRESH: u64 = 0xfe5e_0000_0000;
/// Most words in a row that a sample may have from a text of the corpus.
const COPIED: usize = 15;

/// A text, and whether the model has ended it.
struct Sample {
    text: String,
    is_done: bool,
}

/// Continues texts, each up to so many tokens and with a seed of its own; `temperature` 0 takes the most probable ones.
fn written(subject: &Subject, openings: Vec<String>, tokens: usize, temperature: f64) -> Result<Vec<Sample>> {
    let prompts = openings.iter().map(|text| subject.prompt(text)).collect::<Result<Vec<_>>>()?;
    let config = GenerationConfig {
        max_new_tokens: tokens,
        do_sample: temperature > 0.0,
        temperature,
        top_k: 0,
        eos_token_id: vec![subject.end],
        ..GenerationConfig::default()
    };
    let requests = prompts
        .into_iter()
        .zip(1..)
        .map(|(prompt, seed)| Request::new(prompt, GenerationConfig { seed, ..config.clone() }))
        .collect();
    let mut samples: Vec<_> = openings.into_iter().map(|text| Sample { text, is_done: false }).collect();
    let tokenizer = subject.loaded.vocabulary().required_tokenizer()?;
    let model = subject.loaded.model();
    for token in BatchGenerator::new(model, requests, AT_ONCE, Some(&**tokenizer))? {
        let token = token.map_err(|failed| failed.error)?;
        let sample = &mut samples[token.prompt];
        sample.is_done |= token.id == subject.end;
        if token.id != subject.end {
            sample.text += &token.text;
        }
    }
    Ok(samples)
}

/// A story that the model writes by itself.
pub(crate) fn one(subject: &Subject, tokens: usize) -> Result<String> {
    let samples = written(subject, vec![String::new()], tokens, 0.8)?;
    Ok(samples.into_iter().map(|sample| sample.text).collect())
}

/// Figures of samples, and some of them. Half of them begin with a sentence of a held-out story.
pub(crate) fn run(
    subject: &Subject,
    held_out: &[Line],
    trained: &[Line],
    count: usize,
) -> Result<(Vec<Figure>, Vec<String>)> {
    let stories =
        held_out.iter().filter(|line| line.labels.len() > 1).filter_map(|line| line.text.as_deref());
    let openings = stories.take(count).enumerate().map(|(number, text)| match number % 2 {
        0 => String::new(),
        _ => text.split_inclusive(['.', '!', '?']).next().unwrap_or_default().to_owned(),
    });
    let samples = written(subject, openings.collect(), TOKENS, 0.8)?;
    let (mut sound, mut quoted) = (0, 0);
    for Sample { text, is_done } in &samples {
        let found = faults(text);
        let open = found.iter().any(|fault| matches!(fault, Fault::Unclosed(_)));
        quoted += u32::from(!open || !is_done);
        // A text that goes on and on is no story.
        sound += u32::from(*is_done && found.is_empty());
    }
    let total = samples.len().max(1) as f64;
    let mut texts: Vec<String> = samples.into_iter().map(|sample| sample.text).collect();
    let fresh: Vec<String> =
        (0..texts.len() as u64).map(|seed| Ok(story(FRESH + seed)?.text)).collect::<Result<_>>()?;
    let trained: Vec<&str> = trained.iter().filter_map(|line| line.text.as_deref()).collect();
    let novelty = |length| {
        let known = known([&texts[..], &fresh].concat(), &trained, length);
        let new = |texts: &[String]| {
            let all: Vec<u64> = texts.iter().flat_map(|text| sequences(text, length)).collect();
            all.iter().filter(|sequence| !known.contains(sequence)).count() as f64 / all.len().max(1) as f64
        };
        new(&texts) / new(&fresh)
    };
    let copied = known(texts.clone(), &trained, COPIED + 1);
    let own =
        texts.iter().filter(|text| !sequences(text, COPIED + 1).iter().any(|words| copied.contains(words)));
    let figures = vec![
        figure("samples without a fault", f64::from(sound) / total, 0.90, false),
        figure("samples whose quotation marks are closed", f64::from(quoted) / total, 0.98, false),
        figure("novelty of 4 words, over that of new stories", novelty(4), 0.7, false),
        figure("novelty of 8 words, over that of new stories", novelty(8), 0.7, false),
        figure(
            "samples with at most 15 words in a row of the corpus",
            own.count() as f64 / total,
            0.95,
            false,
        ),
    ];
    texts.truncate(10);
    Ok((figures, texts))
}

/// The share of sentences with open brackets that the model closes, quotations among them, before the paragraph ends.
pub(crate) fn brackets(subject: &Subject, probes: &[&Probe]) -> Result<f64> {
    let openings = probes.iter().map(|probe| probe.prompt.clone()).collect();
    let samples = written(subject, openings, BRACKET_TOKENS, 0.0)?;
    let closed = samples.iter().filter(|sample| {
        let paragraph = sample.text.lines().next().unwrap_or_default();
        !faults(paragraph).iter().any(|fault| matches!(fault, Fault::Unclosed(_)))
    });
    Ok(closed.count() as f64 / probes.len().max(1) as f64)
}

/// The sequences of so many words of a text, as hashes.
fn sequences(text: &str, length: usize) -> Vec<u64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let hash = |words: &[&str]| {
        let mut hasher = DefaultHasher::new();
        words.hash(&mut hasher);
        hasher.finish()
    };
    words.windows(length).map(hash).collect()
}

/// The sequences of so many words of some texts that are in the corpus, too.
fn known(texts: Vec<String>, trained: &[&str], length: usize) -> HashSet<u64> {
    let sought: HashSet<u64> = texts.iter().flat_map(|text| sequences(text, length)).collect();
    trained.iter().flat_map(|text| sequences(text, length)).filter(|words| sought.contains(words)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of samples are of as many texts as they say.
    #[test]
    fn texts_with_one_opening_are_different_ones() {
        let subject = Subject::open(std::path::Path::new("built-in")).unwrap();
        let samples = written(&subject, vec![String::new(); 3], 12, 0.8).unwrap();
        assert!(samples[0].text != samples[1].text && samples[1].text != samples[2].text);
    }

    #[test]
    fn what_is_copied_is_what_the_corpus_has_in_one_text() {
        let text = "the cat sat on the mat".to_owned();
        let known = |trained: &[&str], length| known(vec![text.clone()], trained, length).len();
        assert_eq!(
            known(&["a cat sat on the hill", "on the mat"], 3),
            3,
            "cat sat on, sat on the, on the mat"
        );
        assert_eq!(known(&["the cat sat", "on the mat"], 4), 0, "not over the end of a text");
        assert_eq!(known(&["the cat sat"], 7), 0, "longer than the text");
    }
}
