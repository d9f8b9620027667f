//! Decode steps and prompts of GPT-2 124M by each way to load it, next to candle's own models.
//!
//! usage: cargo run --release --manifest-path scripts/bench/candle/Cargo.toml [ROUNDS]
//!
//! All models have random weights of the same size and run in one process, one after the other in each round.
//! Prints the median over the rounds in milliseconds, and its ratio to that of `Checkpoint::load`.

use std::time::Instant;

use anyhow::Result;
use candle_core::{D, DType, Device, IndexOp, Module, Shape, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, NumberType, Packed, ParameterSource, Pass};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightDType};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Embedding, Init, LayerNorm, Linear, VarBuilder, VarMap, embedding, layer_norm, linear};
use candle_transformers::models::bigcode;

const PROMPT: usize = 128;
const STEPS: usize = 16;

/// Builder of random tensors, which need no gradients and no file.
struct Random;

impl SimpleBackend for Random {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.get_unchecked(name, dtype, device).and(Tensor::randn(0f32, 0.02, shape, device)?.to_dtype(dtype))
    }

    fn get_unchecked(&self, _: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::zeros((), dtype, device)
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// One model's state after some tokens.
trait Session {
    /// Computes the logits of the last token.
    fn forward(&mut self, ids: &Tensor) -> Result<Tensor>;
}

/// Measured model; each session starts with an empty cache.
type Start<'a> = Box<dyn Fn() -> Result<Box<dyn Session + 'a>> + 'a>;

struct Ours<'a>(&'a Gpt2LMHeadModel, candle_gpt2::Gpt2Cache);

impl Session for Ours<'_> {
    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        Ok(self.0.forward_with(ids, LogitsFor::LastToken, Some(&mut self.1), &mut Pass::inference())?)
    }
}

struct BigCode(bigcode::GPTBigCode, usize);

impl Session for BigCode {
    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let logits = self.0.forward(ids, self.1)?;
        self.1 += ids.dim(1)?;
        Ok(logits)
    }
}

/// GPT-2 of `candle_nn`'s layers, as one would write it.
#[derive(Clone)]
struct Plain {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<PlainBlock>,
    ln_f: LayerNorm,
}

#[derive(Clone)]
struct PlainBlock {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    mlp_proj: Linear,
    heads: usize,
}

impl Plain {
    fn new(config: &Gpt2Config, vb: VarBuilder<'_>) -> Result<Self> {
        let width = config.n_embd;
        let block = |_| -> Result<PlainBlock> {
            Ok(PlainBlock {
                ln_1: layer_norm(width, 1e-5, vb.pp("ln_1"))?,
                c_attn: linear(width, 3 * width, vb.pp("c_attn"))?,
                c_proj: linear(width, width, vb.pp("c_proj"))?,
                ln_2: layer_norm(width, 1e-5, vb.pp("ln_2"))?,
                c_fc: linear(width, 4 * width, vb.pp("c_fc"))?,
                mlp_proj: linear(4 * width, width, vb.pp("mlp_proj"))?,
                heads: config.n_head,
            })
        };
        Ok(Self {
            wte: embedding(config.vocab_size, width, vb.pp("wte"))?,
            wpe: embedding(config.n_positions, width, vb.pp("wpe"))?,
            blocks: (0..config.n_layer).map(block).collect::<Result<_>>()?,
            ln_f: layer_norm(width, 1e-5, vb.pp("ln_f"))?,
        })
    }
}

impl PlainBlock {
    fn forward(&self, x: &Tensor, cache: &mut Option<(Tensor, Tensor)>) -> candle_core::Result<Tensor> {
        let (batch, tokens, width) = x.dims3()?;
        let qkv = self.c_attn.forward(&self.ln_1.forward(x)?)?;
        let split = |index: usize| {
            let part = qkv.narrow(D::Minus1, index * width, width)?;
            part.reshape((batch, tokens, self.heads, width / self.heads))?.transpose(1, 2)?.contiguous()
        };
        let (q, mut k, mut v) = (split(0)?, split(1)?, split(2)?);
        if let Some((keys, values)) = cache {
            k = Tensor::cat(&[&*keys, &k], 2)?;
            v = Tensor::cat(&[&*values, &v], 2)?;
        }
        *cache = Some((k.clone(), v.clone()));
        let scale = 1.0 / ((width / self.heads) as f64).sqrt();
        let mut scores = (q.matmul(&k.t()?)? * scale)?;
        if tokens > 1 {
            let rows = Tensor::arange(0u32, tokens as u32, x.device())?.reshape((tokens, 1))?;
            let columns = Tensor::arange(0u32, tokens as u32, x.device())?.reshape((1, tokens))?;
            let mask = columns.broadcast_le(&rows)?.broadcast_as(scores.shape())?;
            let hidden = Tensor::new(f32::NEG_INFINITY, x.device())?.broadcast_as(scores.shape())?;
            scores = mask.where_cond(&scores, &hidden)?;
        }
        let attended = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)?;
        let attended = attended.transpose(1, 2)?.reshape((batch, tokens, width))?;
        let x = (x + self.c_proj.forward(&attended)?)?;
        let inner = self.c_fc.forward(&self.ln_2.forward(&x)?)?.gelu()?;
        &x + self.mlp_proj.forward(&inner)?
    }
}

struct PlainSession<'a>(&'a Plain, Vec<Option<(Tensor, Tensor)>>, usize);

impl Session for PlainSession<'_> {
    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let tokens = ids.dim(1)?;
        let positions = Tensor::arange(self.2 as u32, (self.2 + tokens) as u32, ids.device())?;
        self.2 += tokens;
        let mut x = self.0.wte.forward(ids)?.broadcast_add(&self.0.wpe.forward(&positions)?)?;
        for (block, cache) in self.0.blocks.iter().zip(&mut self.1) {
            x = block.forward(&x, cache)?;
        }
        let last = self.0.ln_f.forward(&x.i((.., tokens - 1.., ..))?)?.squeeze(1)?;
        Ok(last.matmul(&self.0.wte.embeddings().t()?)?)
    }
}

/// Seconds of a prompt, and of one of the decode steps after it.
fn measure(start: &Start<'_>) -> Result<[f64; 2]> {
    let ids = |count: usize| Tensor::from_vec((0..count as u32).collect(), (1, count), &Device::Cpu);
    let mut session = start()?;
    let clock = Instant::now();
    session.forward(&ids(PROMPT)?)?.flatten_all()?.to_vec1::<f32>()?;
    let prompt = clock.elapsed().as_secs_f64();
    let clock = Instant::now();
    for _ in 0..STEPS {
        session.forward(&ids(1)?)?.flatten_all()?.to_vec1::<f32>()?;
    }
    Ok([prompt, clock.elapsed().as_secs_f64() / STEPS as f64])
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(9), |rounds| rounds.parse())?;
    let (config, folder) = (Gpt2Config::gpt2(), tempfile::tempdir()?);
    let variables = VarMap::new();
    Gpt2LMHeadModel::load(&config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let file = folder.path().join("model.safetensors");
    variables.save(&file)?;
    drop(variables);
    std::fs::write(folder.path().join("config.json"), serde_json::to_string(&config)?)?;
    // SAFETY: the file is not changed while it is mapped.
    let vb = || unsafe { VarBuilder::from_mmaped_safetensors(&[&file], DType::F32, &Device::Cpu) };
    fn load(config: &Gpt2Config, source: impl ParameterSource) -> Result<Gpt2LMHeadModel> {
        Ok(Gpt2LMHeadModel::load(config, source)?)
    }
    let checkpoint = Checkpoint::open(folder.path())?;
    let from_checkpoint = |dtype: WeightDType| -> Result<Gpt2LMHeadModel> {
        let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
        Ok(checkpoint.load(&options, &|_| {})?)
    };
    let ours = [
        ("Checkpoint::load, f32", from_checkpoint(WeightDType::F32)?),
        ("Packed(VarBuilder), f32", load(&config, Packed::new(vb()?, NumberType::F32))?),
        ("VarBuilder, f32", load(&config, vb()?)?),
        ("Checkpoint::load, q8", from_checkpoint(WeightDType::Q8)?),
        ("Packed(VarBuilder), q8", load(&config, Packed::new(vb()?, NumberType::Q8))?),
    ];
    let random = || VarBuilder::from_backend(Box::new(Random), DType::F32, Device::Cpu);
    let plain = Plain::new(&config, random())?;
    let of_bigcode = || bigcode::Config {
        vocab_size: config.vocab_size,
        max_position_embeddings: config.n_positions,
        num_hidden_layers: config.n_layer,
        hidden_size: config.n_embd,
        layer_norm_epsilon: 1e-5,
        n_inner: Some(4 * config.n_embd),
        num_attention_heads: config.n_head,
        multi_query: true,
        use_cache: true,
    };
    // bigcode keeps its cache, so each session needs a model; their weights are shared.
    let shared = VarMap::new();
    bigcode::GPTBigCode::load(VarBuilder::from_varmap(&shared, DType::F32, &Device::Cpu), of_bigcode())?;
    let tensors: std::collections::HashMap<_, _> = {
        let variables = shared.data().lock().expect("no thread has panicked");
        variables.iter().map(|(name, variable)| (name.clone(), variable.as_detached_tensor())).collect()
    };
    let mut models: Vec<(&str, Start<'_>)> = Vec::new();
    for (name, model) in &ours {
        models.push((name, Box::new(move || Ok(Box::new(Ours(model, model.new_cache(1, 256)?))))));
    }
    models.push((
        "candle_nn layers, f32",
        Box::new(|| Ok(Box::new(PlainSession(&plain, vec![None; config.n_layer], 0)))),
    ));
    models.push((
        "candle-transformers' bigcode, f32",
        Box::new(|| {
            let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
            Ok(Box::new(BigCode(bigcode::GPTBigCode::load(vb, of_bigcode())?, 0)))
        }),
    ));

    let mut times = vec![[Vec::new(), Vec::new()]; models.len()];
    for round in 0..=rounds {
        for (found, (_, start)) in times.iter_mut().zip(&models) {
            let measured = measure(start)?;
            // The first round warms up.
            if round > 0 {
                found.iter_mut().zip(measured).for_each(|(found, seconds)| found.push(seconds));
            }
        }
    }
    println!("{:<36}{:>14}{:>8}{:>14}{:>8}", "GPT-2 124M", "prompt of 128", "", "decode step", "");
    let medians: Vec<[f64; 2]> = times.into_iter().map(|found| found.map(median)).collect();
    for ((name, _), found) in models.iter().zip(&medians) {
        let base = if name.ends_with("q8") { &medians[3] } else { &medians[0] };
        let cells: Vec<String> = found
            .iter()
            .zip(base)
            .map(|(found, base)| format!("{:>11.2} ms{:>7.2}x", found * 1e3, found / base))
            .collect();
        println!("{name:<36}{}", cells.concat());
    }
    Ok(())
}
