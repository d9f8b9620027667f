//! Benchmarks for constrained generation with GPT-2's 50,257 tokens.
//!
//! - `prepare`: compiles the first grammar for a vocabulary, including the data that all grammars share;
//! - `tokens`: computes the allowed next tokens along randomly sampled texts, for a JSON schema, a regular
//!   expression and a Lark grammar;
//! - `step`: runs decode steps of a q8 model with the 124M shape, with and without such a grammar.
//!
//! Run `cargo bench -p candle-gpt2-grammar --bench cost`, and add `-- NAME` for a single benchmark.
//! `GPT2_TOKENIZER` names a folder with GPT-2's tokenizer. If it is not set, the benchmark generates a
//! tokenizer of the same size.

#![expect(clippy::print_stdout, reason = "a benchmark prints its measurements")]

use std::env;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::{
    Event, GenerationConfig, LogitsProcessor, Request, Scheduler, SchedulerOptions,
};
use candle_gpt2_grammar::{Compiler, Grammar};
use candle_gpt2_testing::CheckpointFolder;
use candle_gpt2_weights::{Checkpoint, Tokenizer, load_tokenizer};
use serde_json::{Map, Value, json};

#[path = "../../generation/benches/models/mod.rs"]
mod models;

const VOCABULARY: u32 = 50_257;
const END: u32 = VOCABULARY - 1;
/// Number of texts sampled for each grammar.
const TEXTS: u64 = 20;
/// Maximum number of tokens per text.
const LONGEST: usize = 200;
/// Number of interleaved runs for each grammar.
///
/// The fastest run counts, because other programs share the machine.
const ROUNDS: usize = 15;
/// Number of decode steps per run.
const STEPS: usize = 48;

fn main() -> Result<(), Box<dyn Error>> {
    let names: Vec<String> = env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let vocabulary = vocabulary()?;
    let compiler = Compiler::new(&vocabulary)?;
    let started = Instant::now();
    compiler.compile(&Grammar::JsonObject, &[END])?;
    let first = started.elapsed();
    let started = Instant::now();
    compiler.compile(&Grammar::JsonObject, &[END])?;
    if wants("prepare") {
        println!("prepare: first grammar {first:.1?}, the same again {:.1?}", started.elapsed());
    }
    if wants("tokens") {
        grammars().iter().try_for_each(|(name, grammar)| tokens(name, &compiler, grammar))?;
    }
    if wants("step") {
        step(&compiler)?;
    }
    Ok(())
}

/// Grammars whose texts can continue almost indefinitely.
fn grammars() -> [(&'static str, Grammar); 3] {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string" },
            "email": { "type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$" },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "roles": { "type": "array", "items": { "enum": ["reader", "writer", "owner"] } },
        },
        "required": ["name", "email", "age", "roles"],
        "additionalProperties": false,
    });
    let people = json!({ "type": "array", "items": person, "minItems": 1000 });
    let sums = "start: sum\nsum: product ((\"+\" | \"-\") product)*\nproduct: atom ((\"*\" | \"/\") atom)*\n\
        atom: NUMBER | NAME | \"(\" sum \")\"\nNUMBER: /[0-9]+(\\.[0-9]+)?/\nNAME: /[a-z_][a-z0-9_]*/\n%ignore / /\n";
    [
        ("JSON schema", Grammar::JsonSchema(people)),
        ("regular expression", Grammar::Regex("([A-Z][a-z]{1,9}( [a-z]{1,9}){2,8}[.!?] )*".into())),
        ("Lark grammar", Grammar::Lark(sums.into())),
    ]
}

fn tokens(name: &str, compiler: &Compiler, grammar: &Grammar) -> Result<(), Box<dyn Error>> {
    let mut times = Vec::new();
    for seed in 0..TEXTS {
        // Compile the grammar for each text, as a server does for each request, so that texts share no
        // cached states.
        let LogitsProcessor::Constraint(constraint) = compiler.compile(grammar, &[END])? else { continue };
        let mut random = RandomStream::with_stream(seed, 0);
        let mut ids = Vec::new();
        while ids.len() < LONGEST {
            let mut allowed = vec![false; usize::try_from(VOCABULARY)?];
            let started = Instant::now();
            constraint.allow(&ids, &mut allowed)?;
            let allowing = started.elapsed();
            let next: Vec<u32> =
                (0..END).zip(allowed).filter(|(_, allowed)| *allowed).map(|(id, _)| id).collect();
            let place = usize::try_from(random.below(next.len().max(1) as u64))?;
            let Some(id) = next.get(place) else { break };
            ids.push(*id);
            let started = Instant::now();
            let is_complete = constraint.is_complete(&ids)?;
            times.push(allowing + started.elapsed());
            if is_complete {
                break;
            }
        }
    }
    times.sort();
    let mean = times.iter().sum::<Duration>() / u32::try_from(times.len().max(1))?;
    let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or_default();
    let (count, worst) = (times.len(), times.last().copied().unwrap_or_default());
    println!(
        "tokens: {name}: {count} tokens, mean {mean:.1?}, median {:.1?}, 99% {:.1?}, longest {worst:.1?}",
        at(50),
        at(99)
    );
    Ok(())
}

fn step(compiler: &Compiler) -> Result<(), Box<dyn Error>> {
    let model = models::gpt2_124m();
    let run = |grammar: Option<&Grammar>, seed: usize| -> Result<Duration, Box<dyn Error>> {
        let config = GenerationConfig {
            do_sample: true,
            max_new_tokens: STEPS,
            seed: u64::try_from(seed)?,
            ..GenerationConfig::default()
        };
        let mut request = Request::new(vec![1, 2, 3, 4], config);
        request.processors.extend(grammar.map(|grammar| compiler.compile(grammar, &[])).transpose()?);
        let options = SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 64 };
        let mut scheduler: Scheduler<&Tokenizer> = Scheduler::new(&model, None, options)?;
        scheduler.submit(request)?;
        scheduler.step().into_result()?;
        let (started, mut steps) = (Instant::now(), 0);
        while !scheduler.is_idle() {
            steps += scheduler
                .step()
                .into_result()?
                .iter()
                .filter(|event| matches!(event, Event::Token { .. }))
                .count();
        }
        Ok(started.elapsed() / u32::try_from(steps.max(1))?)
    };
    let grammars = grammars();
    let kinds: Vec<_> = [("no grammar", None)]
        .into_iter()
        .chain(grammars.iter().map(|(name, grammar)| (*name, Some(grammar))))
        .collect();
    let mut shortest = vec![Duration::MAX; kinds.len()];
    for round in 0..ROUNDS {
        for ((_, grammar), shortest) in kinds.iter().zip(&mut shortest) {
            *shortest = run(*grammar, round)?.min(*shortest);
        }
    }
    for ((name, _), time) in kinds.iter().zip(&shortest) {
        let more = time.as_secs_f64() / shortest.first().map_or(1.0, Duration::as_secs_f64) - 1.0;
        println!("step: {name}: {:.2} ms, {:+.1}%", time.as_secs_f64() * 1e3, more * 100.0);
    }
    Ok(())
}

fn vocabulary() -> Result<Vocabulary, Box<dyn Error>> {
    let tokenizer = match env::var_os("GPT2_TOKENIZER") {
        Some(folder) => load_tokenizer(Path::new(&folder))?,
        None => made_up()?,
    };
    let folder = CheckpointFolder::tiny().with_config(json!({ "vocab_size": VOCABULARY }));
    Ok(Vocabulary::new(&Checkpoint::open(folder.path())?, Some(tokenizer)))
}

/// Generates a byte-level tokenizer with all bytes, random words and the end-of-text token.
///
/// Half of the words begin with a space. The end-of-text token has the last ID.
fn made_up() -> Result<Tokenizer, Box<dyn Error>> {
    /// Offset of the characters that represent unprintable bytes in GPT-2's byte alphabet.
    const UNSEEN: u32 = 256;
    let is_seen = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let unseen = (0..256).filter(|byte| !is_seen(byte)).count();
    let bytes = (0..256).filter(is_seen).chain((UNSEEN..).take(unseen)).filter_map(char::from_u32);
    let mut vocab: Map<String, Value> = bytes.map(String::from).zip((0..).map(Value::from)).collect();
    let mut number = 0_u64;
    while vocab.len() < usize::try_from(END)? {
        number += 1;
        let mut hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut word = String::from(if number.is_multiple_of(2) { "Ġ" } else { "" });
        for _ in 0..2 + number % 7 {
            hash = hash.rotate_left(23).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word.extend("etaoinshrdlucmfwypvbgkjqxz".chars().nth(usize::try_from((hash >> 40) % 26)?));
        }
        let id = vocab.len();
        vocab.entry(word).or_insert_with(|| id.into());
    }
    vocab.insert("<|endoftext|>".into(), END.into());
    let decoder =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let model = json!({ "type": "BPE", "vocab": vocab, "merges": [] });
    let added = json!([{ "id": END, "content": "<|endoftext|>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false }]);
    let json = json!({ "version": "1.0", "added_tokens": added, "decoder": decoder, "model": model });
    Ok(json.to_string().parse::<Tokenizer>().map_err(|error| error.to_string())?)
}
