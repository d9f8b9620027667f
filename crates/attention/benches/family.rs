//! Benchmarks attention layers: forward passes, and forward plus backward passes, in milliseconds.
//!
//! Run it with `cargo bench -p candle-gpt2-attention --bench family -- [--threads N] [--instructions SET]
//! [--only TEXT]`. The benchmark prints one JSON line, with the same case names and sizes as
//! `python -m bench attention`, which compares the times with PyTorch's.
//!
//! The weights are tensors in `plain` cases and variables in `trained` cases. `backward` is a forward pass
//! followed by `gradients` for the input and weights. `candle_backward` is the same with candle's own backward
//! pass.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::{limits, set_thread_count};
use candle_gpt2_attention::transformer::{BlockConfig, DecoderLayer, EncoderLayer};
use candle_gpt2_attention::{
    AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, Pass, ProjectionLayout,
};
use candle_gpt2_kernels::{Activation, InitialGradients, gradients};
use candle_nn::{VarBuilder, VarMap};

/// Minimum number of passes and minimum duration in seconds of each measurement.
///
/// The median is reported.
const SHORTEST: (usize, f64) = (5, 0.4);
/// Input sizes to measure: batch size and number of tokens.
const SIZES: [(usize, usize); 3] = [(1, 1024), (8, 128), (1, 1)];
const WINDOW: usize = 128;
/// Size just below 32 MiB, the largest freed block that makes glibc adapt its thresholds.
const LARGE_BLOCK: usize = 31 << 20;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let place = arguments.iter().position(|argument| argument == name)?;
        arguments.get(place + 1)
    };
    if let Some(threads) = value("--threads") {
        set_thread_count(threads.parse()?);
    }
    if let Some(name) = value("--instructions").filter(|name| !limits::choose_instruction_set(name)) {
        return Err(format!("{name}: this processor has {}", limits::instruction_sets().join(", ")).into());
    }
    // Frees a large block, as any program that loads a model does. Before that, glibc would return the memory
    // of each pass to the system, and the next pass would wait for new pages.
    drop(black_box(vec![0_u8; LARGE_BLOCK]));
    let mut bench = Bench { only: value("--only").cloned().unwrap_or_default(), found: BTreeMap::new() };
    for (batch, tokens) in SIZES {
        bench.attention(batch, tokens)?;
        bench.transformer(batch, tokens)?;
    }
    println!("{}", serde_json::to_string(&bench.found)?);
    Ok(())
}

struct Bench {
    only: String,
    found: BTreeMap<String, f64>,
}

impl Bench {
    /// Measures `MultiHeadAttention` with width 768 and 12 heads, under every mask.
    fn attention(&mut self, batch: usize, tokens: usize) -> Result<()> {
        let window = AttentionMask::Window { before: WINDOW, after: 0 };
        let all = AttentionMask::Bidirectional;
        let additive = AttentionMask::Additive(random(&[1, 12, tokens, tokens])?);
        let masks = [
            ("causal", AttentionMask::Causal),
            ("bidirectional", all.clone()),
            ("window", window),
            ("cross", all),
            ("additive", additive),
        ];
        for (layout, projection) in
            [("fused", ProjectionLayout::Fused), ("separate", ProjectionLayout::Separate)]
        {
            let config = MultiHeadAttentionConfig {
                projection,
                qkv_bias: true,
                ..MultiHeadAttentionConfig::new(768, 768, 12)
            };
            for (name, mask) in &masks {
                let forward = |layer: &MultiHeadAttention, x: &Tensor, memory: &Tensor| {
                    let memory = (*name == "cross").then_some(memory);
                    layer.forward_with(x, memory, mask, None, &mut Pass::inference())
                };
                let load = |vb: &VarBuilder<'_>| MultiHeadAttention::load(&config, vb.clone());
                self.layer(
                    &format!("{layout} {name} {batch}x{tokens}"),
                    &[batch, tokens, 768],
                    load,
                    forward,
                )?;
            }
        }
        Ok(())
    }

    /// Measures encoder and decoder layers with width 512 and 8 heads.
    fn transformer(&mut self, batch: usize, tokens: usize) -> Result<()> {
        let config = BlockConfig {
            d_model: 512,
            num_heads: 8,
            d_feed_forward: 2048,
            activation: Activation::Relu,
            dropout: 0.0,
        };
        let shape = [batch, tokens, 512];
        self.layer(
            &format!("encoder {batch}x{tokens}"),
            &shape,
            |vb| EncoderLayer::load(&config, vb.clone()),
            |layer, x, _| layer.forward(x, &AttentionMask::Bidirectional, &mut Pass::inference()),
        )?;
        self.layer(
            &format!("decoder {batch}x{tokens}"),
            &shape,
            |vb| DecoderLayer::load(&config, vb.clone()),
            |layer, x, memory| layer.forward(x, memory, &mut Pass::inference()),
        )
    }

    /// Measures all cases of one layer. `forward` receives an input and a memory of the same shape.
    fn layer<L>(
        &mut self,
        name: &str,
        shape: &[usize],
        load: impl Fn(&VarBuilder<'_>) -> Result<L>,
        forward: impl Fn(&L, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let (x, memory) = (random(shape)?, random(shape)?);
        let variables = VarMap::new();
        let layer = load(&VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let plain = variables
            .data()
            .lock()
            .expect("a lock")
            .iter()
            .map(|(name, var)| Ok((name.clone(), var.as_detached_tensor().copy()?)))
            .collect::<Result<_>>()?;
        let plain = load(&VarBuilder::from_tensors(plain, DType::F32, &Device::Cpu))?;
        self.measure(format!("{name} plain forward"), || forward(&plain, &x, &memory))?;
        self.measure(format!("{name} trained forward"), || forward(&layer, &x, &memory))?;
        let inputs = [Var::from_tensor(&x)?, Var::from_tensor(&memory)?];
        let mut all: Vec<Var> = variables.all_vars();
        all.extend(inputs.iter().cloned());
        let all: Vec<&Tensor> = all.iter().map(|variable| variable.as_tensor()).collect();
        let loss = || forward(&layer, &inputs[0], &inputs[1])?.sum_all();
        self.measure(format!("{name} backward"), || gradients(&all, InitialGradients::Nothing, 1.0, loss))?;
        self.measure(format!("{name} candle_backward"), || loss()?.backward())
    }

    fn measure<R>(&mut self, name: String, run: impl Fn() -> Result<R>) -> Result<()> {
        if !name.contains(&self.only) {
            return Ok(());
        }
        run()?;
        let mut seconds = Vec::new();
        while seconds.len() < SHORTEST.0 || seconds.iter().sum::<f64>() < SHORTEST.1 {
            let start = Instant::now();
            let result = run()?;
            seconds.push(start.elapsed().as_secs_f64());
            drop(result);
        }
        seconds.sort_by(f64::total_cmp);
        self.found.insert(name, seconds[seconds.len() / 2] * 1e3);
        Ok(())
    }
}

fn random(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1f32, shape, &Device::Cpu)
}
