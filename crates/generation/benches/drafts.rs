//! Benchmarks the speedup from drafts, on synthetic q8 models whose completions are known.
//!
//! In these models, token `t + 1` follows token `t`. Layers cost the same as in a trained model but add
//! nothing to the residual stream, so the output head sees the token's own embedding.
//!
//! - `assistant`: the 774M shape, assisted by the 82M shape, which agrees four times out of five;
//! - `lookup`: the 774M shape with prompt lookup, on a text that repeats itself every 32 tokens;
//! - `refused`: an assistant that is always wrong, and a prompt in which a different token follows each of
//!   the completion's token pairs.
//!
//! Runs with drafts alternate with runs without drafts. The figure is the median ratio of tokens per
//! second.
//!
//! Run: `cargo bench -p candle-gpt2-generation --bench drafts -- [--threads N] [--instructions SET]
//! [NAME]`.

#![expect(clippy::print_stdout, reason = "a benchmark prints its measurements")]

mod arguments;

use std::time::Instant;

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::{NumberType, RandomStream, thread_count};
use candle_gpt2_generation::{BatchGenerator, Drafts, GenerationConfig, GenerationError, Request};
use candle_gpt2_kernels::{Matrix, ParameterSource};
use candle_gpt2_testing::pattern;
use candle_gpt2_weights::Tokenizer;
use candle_nn::Init;

/// Number of pairs of runs; each reported figure is the median over these pairs.
const ROUNDS: usize = 5;
/// Number of new tokens per run.
const NEW_TOKENS: usize = 192;
/// Token ids below this limit form cycles of [`PERIOD`] tokens.
const CIRCLES: u32 = 1024;
const PERIOD: u32 = 32;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let names = arguments::names()?;
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    println!("{} threads", thread_count());
    let large = known_text("gpt2-large", |token| token + 1)?;
    if wants("assistant") {
        let differs = |token: u32| (token.wrapping_mul(2_654_435_761) >> 16).is_multiple_of(5);
        let small = known_text("distilgpt2", |token| token + 1 + u32::from(differs(token)))?;
        compare("assistant", &large, &(20_000..20_016).collect::<Vec<_>>(), None, Some(&small))?;
    }
    if wants("lookup") {
        compare(
            "lookup",
            &large,
            &(0..2 * PERIOD).map(|token| token % PERIOD).collect::<Vec<_>>(),
            Some(16),
            None,
        )?;
    }
    if wants("refused") {
        let small = known_text("distilgpt2", |token| token + 2)?;
        compare("refused assistant", &large, &(20_000..20_016).collect::<Vec<_>>(), None, Some(&small))?;
        let first = 30_000;
        let pairs = (first..).take(NEW_TOKENS).flat_map(|token| [token, token + 1, 9]);
        compare("refused lookup", &large, &pairs.chain([first]).collect::<Vec<_>>(), Some(16), None)?;
    }
    Ok(())
}

/// Alternates runs with and without drafts and checks that their completions are equal.
fn compare(
    name: &str,
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    lookup: Option<usize>,
    assistant: Option<&Gpt2LMHeadModel>,
) -> std::result::Result<(), GenerationError> {
    let (mut ratios, mut counts) = (Vec::new(), Drafts::default());
    for _ in 0..ROUNDS {
        let (plain, plain_s, _) = text(model, prompt, None, None)?;
        let (drafted, drafted_s, drafts) = text(model, prompt, lookup, assistant)?;
        assert_eq!(plain, drafted, "{name}: the text is the same with drafts");
        ratios.push(plain_s / drafted_s);
        counts = drafts;
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{name}: {:.2} times the tokens per second ({:.2} to {:.2}); {} of {} drafted tokens accepted, {NEW_TOKENS} new tokens",
        ratios[ROUNDS / 2],
        ratios[0],
        ratios[ROUNDS - 1],
        counts.accepted,
        counts.drafted
    );
    Ok(())
}

/// Returns a completion, the seconds from its first to its last token, and its draft statistics.
fn text(
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    prompt_lookup_num_tokens: Option<usize>,
    assistant: Option<&Gpt2LMHeadModel>,
) -> std::result::Result<(Vec<u32>, f64, Drafts), GenerationError> {
    let config = GenerationConfig {
        max_new_tokens: NEW_TOKENS,
        prompt_lookup_num_tokens,
        ..GenerationConfig::default()
    };
    let request = Request::new(prompt.to_vec(), config);
    let mut tokens = BatchGenerator::<&Tokenizer>::new(model, vec![request], 1, None)?;
    if let Some(assistant) = assistant {
        tokens = tokens.with_assistant(assistant)?;
    }
    let (mut ids, mut started, mut drafts) = (Vec::new(), None, Drafts::default());
    for token in tokens {
        let token = token.map_err(|failed| failed.error)?;
        started.get_or_insert_with(Instant::now);
        ids.push(token.id);
        drafts = token.drafts;
    }
    Ok((ids, started.map_or(0.0, |started| started.elapsed().as_secs_f64()), drafts))
}

/// Loads a q8 model in a published size; `next` maps tokens outside the cycles to their successors.
fn known_text(name: &str, next: impl Fn(u32) -> u32) -> Result<Gpt2LMHeadModel> {
    let config =
        Gpt2Config { tie_word_embeddings: false, ..Gpt2Config::preset(name).expect("a published model") };
    let vocab_size = u32::try_from(config.vocab_size).expect("a vocabulary");
    let before = (0..vocab_size).map(|token| match token < CIRCLES {
        true => token - token % PERIOD + (token + 1) % PERIOD,
        false => next(token) % vocab_size,
    });
    Gpt2LMHeadModel::load(&config, KnownText { name: String::new(), next: before.collect() })
}

/// Synthetic weights: the blocks add nothing, and the head maps each token to its successor.
#[derive(Clone)]
struct KnownText {
    name: String,
    /// Successor of each token.
    next: Vec<u32>,
}

impl ParameterSource for KnownText {
    fn below(&self, name: impl ToString) -> Self {
        Self { name: format!("{}{}.", self.name, name.to_string()), next: self.next.clone() }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, _: Init) -> Result<Tensor> {
        let shape = shape.into();
        match format!("{}{name}", self.name).as_str() {
            "ln_f.weight" => Tensor::ones(shape, DType::F32, &Device::Cpu),
            "ln_f.bias" | "wpe.weight" => Tensor::zeros(shape, DType::F32, &Device::Cpu),
            name if name.contains("c_proj") => Tensor::zeros(shape, DType::F32, &Device::Cpu),
            // The row for a token is the sum of the embeddings of its predecessors.
            "lm_head.weight" => {
                let embeddings = embeddings(&shape)?;
                let next = Tensor::from_slice(&self.next, self.next.len(), &Device::Cpu)?;
                embeddings.zeros_like()?.index_add(&next, &embeddings, 0)
            }
            "wte.weight" => embeddings(&shape),
            _ => Ok(pattern(shape.dims(), 1.0, 0)),
        }
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        Matrix::pack(&self.parameter((out_features, in_features), name, init)?, NumberType::Q8)
    }
}

/// Returns random vectors of ±1, which are nearly orthogonal to each other.
fn embeddings(shape: &Shape) -> Result<Tensor> {
    let mut signs = RandomStream::new(1);
    let values = (0..shape.elem_count()).map(|_| if signs.below(2) == 0 { -1f32 } else { 1.0 });
    Tensor::from_vec(values.collect(), shape, &Device::Cpu)
}
