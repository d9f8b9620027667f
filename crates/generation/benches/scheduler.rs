//! Benchmarks the scheduler, with the built-in model and with a 124M model in q8.
//!
//! - `arrivals`: 64 requests of mixed lengths that arrive one by one, compared with the same 64
//!   submitted together;
//! - `gap`: the longest wait for a running sequence's next token while 1,000 tokens are prefilled,
//!   compared with the longest prefill chunk and the longest decode step, each measured alone;
//! - `memory`: a million tokens in one process, with random lengths and cancellations; compares the
//!   resident memory after the first tenth and at the end.
//!
//! Run: `cargo bench -p candle-gpt2-generation --bench scheduler`, optionally with `-- NAME` for a
//! single benchmark.

#![expect(clippy::print_stdout, reason = "a benchmark prints its measurements")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{
    Event, GenerationConfig, GenerationError, Request, RequestId, Scheduler, SchedulerOptions,
};
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer};

mod models;

/// Number of runs of each kind, in alternation; each figure is a median over these runs.
const ROUNDS: usize = 5;
/// Number of requests in `arrivals`.
const REQUESTS: usize = 64;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let built_in = Checkpoint::open(folder)?.load(&LoadOptions::default(), &|_| ())?;
    let gpt2 = models::gpt2_124m();
    if wants("arrivals") {
        arrivals("built-in", &built_in, 48)?;
        arrivals("124M in q8", &gpt2, 12)?;
    }
    if wants("gap") {
        gap(&gpt2)?;
    }
    if wants("memory") {
        memory(&built_in)?;
    }
    Ok(())
}

type Texts = Scheduler<&'static Tokenizer>;

fn scheduler(
    model: &Gpt2LMHeadModel,
    kv_tokens: usize,
    chunk_tokens: usize,
) -> std::result::Result<Texts, GenerationError> {
    Scheduler::new(model, None, SchedulerOptions { max_texts: 8, kv_tokens, chunk_tokens })
}

fn request(model: &Gpt2LMHeadModel, prompt_tokens: usize, new_tokens: usize) -> Request {
    let vocab_size = model.config().vocab_size;
    let prompt = (0..prompt_tokens).filter_map(|index| u32::try_from((index * 7919 + 3) % vocab_size).ok());
    let config = GenerationConfig { max_new_tokens: new_tokens, ..GenerationConfig::default() };
    Request::new(prompt.collect(), config)
}

/// Measures requests with 5 to 100 prompt tokens and 0.5 to 1.5 times `new_tokens` new tokens.
fn arrivals(
    name: &str,
    model: &Gpt2LMHeadModel,
    new_tokens: usize,
) -> std::result::Result<(), GenerationError> {
    let lengths = |index: usize| (5 + index * 37 % 96, new_tokens / 2 + index * 13 % new_tokens);
    let requests: Vec<Request> =
        (0..REQUESTS).map(lengths).map(|(prompt, new)| request(model, prompt, new)).collect();
    let run = |comes_one_by_one: bool| -> std::result::Result<Duration, GenerationError> {
        let mut scheduler = scheduler(model, 8 * 256, 128)?;
        let started = Instant::now();
        for request in &requests {
            scheduler.submit(request.clone())?;
            if comes_one_by_one {
                scheduler.step().into_result()?;
            }
        }
        while !scheduler.is_idle() {
            scheduler.step().into_result()?;
        }
        Ok(started.elapsed())
    };
    let (mut together, mut one_by_one) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        together.push(run(false)?.as_secs_f64());
        one_by_one.push(run(true)?.as_secs_f64());
    }
    let (together, one_by_one) = (median(together), median(one_by_one));
    let tokens: usize = (0..REQUESTS).map(|index| lengths(index).1).sum();
    println!(
        "arrivals, {name}: {REQUESTS} requests, {tokens} new tokens; together {together:.3} s, one by one {one_by_one:.3} s, ratio {:.3}",
        one_by_one / together
    );
    Ok(())
}

/// Measures how long a running sequence waits while a prompt of 1,000 tokens is prefilled.
fn gap(model: &Gpt2LMHeadModel) -> std::result::Result<(), GenerationError> {
    for chunk_tokens in [64, 128, 256] {
        let mut scheduler = scheduler(model, 4096, chunk_tokens)?;
        let running = scheduler.submit(request(model, 8, 400))?;
        for _ in 0..10 {
            scheduler.step().into_result()?;
        }
        let mut longest_step: f64 = 0.0;
        for _ in 0..1_000_usize.div_ceil(chunk_tokens) {
            longest_step = longest_step.max(timed(|| scheduler.step().into_result().map(drop))?);
        }
        let long = scheduler.submit(request(model, 1_000, 20))?;
        let (mut longest, mut has_begun) = (0.0_f64, false);
        while !has_begun {
            let started = Instant::now();
            let events = scheduler.step().into_result()?;
            longest = longest.max(started.elapsed().as_secs_f64());
            assert!(events.iter().any(|event| event.request() == running), "the running text continues");
            has_begun = events.iter().any(|event| event.request() == long);
        }
        let chunk_s = longest_chunk(model, 1_000, chunk_tokens)?;
        println!(
            "gap, 124M in q8, chunks of {chunk_tokens}: longest wait {:.1} ms while 1,000 tokens are prefilled; alone, the longest chunk takes {:.1} ms and the longest step {:.1} ms",
            longest * 1e3,
            chunk_s * 1e3,
            longest_step * 1e3
        );
    }
    Ok(())
}

/// Returns the longest time that a prompt chunk takes when nothing else runs.
fn longest_chunk(model: &Gpt2LMHeadModel, tokens: usize, chunk_tokens: usize) -> Result<f64> {
    let mut cache = model.new_cache(1, tokens)?;
    let mut longest: f64 = 0.0;
    for first in (0..tokens).step_by(chunk_tokens) {
        let count = chunk_tokens.min(tokens - first);
        let ids = Tensor::zeros((1, count), DType::U32, model.device())?;
        let pass = &mut Pass::inference();
        longest = longest
            .max(timed(|| model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass).map(drop))?);
    }
    Ok(longest)
}

/// Runs requests of all lengths and cancels many of them at random times.
fn memory(model: &Gpt2LMHeadModel) -> std::result::Result<(), GenerationError> {
    const TOKENS: usize = 1_000_000;
    let mut scheduler = scheduler(model, 1500, 64)?;
    let mut generator = RandomStream::new(1);
    let mut below = |bound: u64| usize::try_from(generator.below(bound)).unwrap_or_default();
    let mut open: Vec<RequestId> = Vec::new();
    let (mut made, mut cancelled, mut after_first) = (0, 0, None);
    let started = Instant::now();
    while made < TOKENS {
        while scheduler.waiting() < 4 {
            open.push(scheduler.submit(request(model, 1 + below(200), 1 + below(250)))?);
        }
        if below(20) == 0 && scheduler.cancel(open.swap_remove(below(open.len() as u64))) {
            cancelled += 1;
        }
        for event in scheduler.step().into_result()? {
            if let Event::Token { request, stop_reason, .. } = event {
                made += 1;
                if stop_reason.is_some() {
                    open.retain(|id| *id != request);
                }
            }
        }
        if made >= TOKENS / 10 && after_first.is_none() {
            after_first = resident_mib();
        }
    }
    let speed = TOKENS as f64 / started.elapsed().as_secs_f64();
    match after_first.zip(resident_mib()) {
        Some((first, last)) => println!(
            "memory, built-in: {first:.1} MiB resident after {} tokens, {last:.1} MiB after {TOKENS} \
             (ratio {:.3}), {cancelled} requests canceled, {speed:.0} tokens/s",
            TOKENS / 10,
            last / first
        ),
        None => println!(
            "memory, built-in: this system does not report resident memory; \
            {speed:.0} tokens/s"
        ),
    }
    Ok(())
}

/// Returns the resident memory of this process; `None` on systems other than Linux.
fn resident_mib() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

fn timed<E>(work: impl FnOnce() -> std::result::Result<(), E>) -> std::result::Result<f64, E> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
