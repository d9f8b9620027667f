//! Benchmarks the scoring of many sequences, on a 124M model with made-up weights.
//!
//! The inputs are groups as large as HellaSwag's (four endings of about 24 tokens after a context of
//! about 50), single sequences as long as LAMBADA's, and windows of a text.
//!
//! Batched scoring alternates with scoring each sequence alone. The output is the speedup, tokens per
//! second and items per second. Every token that the model reads counts.
//!
//! Run: `cargo bench -p candle-gpt2-generation --bench sequences -- [--threads N] [--instructions SET]
//! [f32|f16|q8]`.

#![expect(clippy::print_stdout, reason = "a benchmark prints its measurements")]

mod arguments;

use std::time::Instant;

use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::{NumberType, RandomStream, limits, thread_count};
use candle_gpt2_generation::{GenerationError, Sequence, score_sequences};
use candle_gpt2_testing::MadeUpWeights;

/// Number of rounds; each figure is the median over the rounds.
const ROUNDS: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names = arguments::names()?;
    let formats = [("f32", NumberType::F32), ("f16", NumberType::F16), ("q8", NumberType::Q8)];
    println!("{} threads, {}", thread_count(), limits::instruction_set());
    for (name, format) in formats {
        if names.is_empty() || names.iter().any(|wanted| wanted == name) {
            let config = Gpt2Config::preset("gpt2")?;
            let model = Gpt2LMHeadModel::load(&config, MadeUpWeights::new(format))?;
            compare(name, &model)?;
        }
    }
    Ok(())
}

fn compare(format: &str, model: &Gpt2LMHeadModel) -> Result<(), GenerationError> {
    let mut lengths = RandomStream::new(3);
    let mut between = |from: u64, to: u64| from + lengths.below(to - from);
    let choices = (0..24).map(|item| group(item, 4, between(20, 80), || between(8, 40)));
    let choices: Vec<_> = choices.collect();
    let words: Vec<_> = (0..48).map(|item| group(item, 1, between(60, 110), || between(1, 3))).collect();
    let windows: Vec<_> = (0..3).map(|item| group(item, 1, 1, || 1024)).collect();
    for (name, groups) in [("choices", choices), ("last words", words), ("windows", windows)] {
        let together: Vec<Vec<&Sequence>> = groups.iter().map(|group| group.iter().collect()).collect();
        let alone: Vec<Vec<&Sequence>> = groups.iter().flatten().map(|sequence| vec![sequence]).collect();
        let (mut together_s, mut alone_s) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let started = Instant::now();
            score_sequences(model, &together)?;
            together_s.push(started.elapsed().as_secs_f64());
            let started = Instant::now();
            for sequence in &alone {
                score_sequences(model, std::slice::from_ref(sequence))?;
            }
            alone_s.push(started.elapsed().as_secs_f64());
        }
        let median = |seconds: &mut Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            seconds[ROUNDS / 2]
        };
        let (together_s, alone_s) = (median(&mut together_s), median(&mut alone_s));
        let tokens: usize = groups.iter().flatten().map(|sequence| sequence.ids.len() - 1).sum();
        let (tokens, items) = (tokens as f64, groups.len() as f64);
        println!(
            "{format}, {name}: {:.2} times as fast as one by one; {:.0} tokens/s, {:.1} items/s (one by one {:.0} tokens/s)",
            alone_s / together_s,
            tokens / together_s,
            items / together_s,
            tokens / alone_s,
        );
    }
    Ok(())
}

/// Creates sequences with `context` common tokens, followed by tokens to score.
fn group(item: u32, count: u32, context: u64, mut rest: impl FnMut() -> u64) -> Vec<Sequence> {
    let token = |seed: u32, place: u64| {
        u32::try_from((u64::from(seed) * 7_919 + place * 104_729) % 50_257).unwrap_or(0)
    };
    let context: Vec<u32> = (0..context).map(|place| token(item, place)).collect();
    let sequence = |choice: u32| {
        let rest = (0..rest()).map(|place| token(1000 + 10 * item + choice, place));
        Sequence { first: context.len(), ids: context.iter().copied().chain(rest).collect() }
    };
    (0..count).map(sequence).collect()
}
