//! What the model writes: faults, quotation marks, and how much of it was in the corpus.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::Result;
use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request};
use story_generator::{Fault, Figure, faults, story};

use crate::{Line, Subject, figure};

/// Documents of the corpus that samples are compared with.
pub(crate) const TRAINING_DOCUMENTS: usize = 40_000;
/// Longest sample.
const TOKENS: usize = 300;
/// Texts that are generated side by side.
const AT_ONCE: usize = 8;
/// Seed of the first story that the corpus does not have.
const FRESH: u64 = 0xfe5e_0000_0000;

/// Figures of samples, and some of them. Half of them begin with a sentence of a held-out story.
pub(crate) fn run(
    subject: &Subject,
    held_out: &[Line],
    trained: &[Line],
    count: usize,
) -> Result<(Vec<Figure>, Vec<String>)> {
    let stories =
        held_out.iter().filter(|line| line.labels.len() > 1).filter_map(|line| line.text.as_deref());
    let openings: Vec<String> = stories
        .take(count)
        .enumerate()
        .map(|(number, text)| match number % 2 {
            0 => String::new(),
            _ => text.split_inclusive(['.', '!', '?']).next().unwrap_or_default().to_owned(),
        })
        .collect();
    let prompts = openings.iter().map(|text| subject.prompt(text)).collect::<Result<Vec<_>>>()?;
    let config = GenerationConfig {
        max_new_tokens: TOKENS,
        do_sample: true,
        temperature: 0.8,
        top_k: 0,
        eos_token_id: vec![subject.end],
        seed: 1,
        ..GenerationConfig::default()
    };
    let mut texts = openings;
    let mut is_done = vec![false; texts.len()];
    let tokenizer = subject.loaded.vocabulary().required_tokenizer()?;
    let model = subject.loaded.model();
    for token in BatchGenerator::new(model, Request::each(&prompts, &config), AT_ONCE, Some(&**tokenizer))? {
        let token = token.map_err(|failed| failed.error)?;
        is_done[token.prompt] |= token.id == subject.end;
        if token.id != subject.end {
            texts[token.prompt] += &token.text;
        }
    }
    let (mut sound, mut quoted) = (0, 0);
    for (text, is_done) in texts.iter().zip(&is_done) {
        let found = faults(text);
        let open = found.iter().any(|fault| matches!(fault, Fault::Unclosed(_)));
        quoted += u32::from(!open || !is_done);
        // A text that was cut has no end, and may be within a quotation.
        let is_cut = |fault: &Fault| !is_done && matches!(fault, Fault::NoEnd(_) | Fault::Unclosed(_));
        sound += u32::from(found.iter().all(is_cut));
    }
    let total = texts.len().max(1) as f64;
    let fresh: Vec<String> =
        (0..texts.len() as u64).map(|seed| Ok(story(FRESH + seed)?.text)).collect::<Result<_>>()?;
    let known = [4, 8].map(|length| {
        let texts = trained.iter().filter_map(|line| line.text.as_deref());
        texts.flat_map(|text| sequences(text, length)).collect::<HashSet<u64>>()
    });
    let novelty = |texts: &[String], place: usize| {
        let length = [4, 8][place];
        let all: Vec<u64> = texts.iter().flat_map(|text| sequences(text, length)).collect();
        let new = all.iter().filter(|sequence| !known[place].contains(sequence)).count();
        new as f64 / all.len().max(1) as f64
    };
    let figures = vec![
        figure("samples without a fault", f64::from(sound) / total, 0.90, false),
        figure("samples whose quotation marks are closed", f64::from(quoted) / total, 0.98, false),
        figure(
            "novelty of 4 words, over that of new stories",
            novelty(&texts, 0) / novelty(&fresh, 0),
            0.7,
            false,
        ),
        figure(
            "novelty of 8 words, over that of new stories",
            novelty(&texts, 1) / novelty(&fresh, 1),
            0.7,
            false,
        ),
    ];
    texts.truncate(10);
    Ok((figures, texts))
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
