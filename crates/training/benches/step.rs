//! Benchmark of a training step: forward, backward, clipping, AdamW.
//!
//! Prints seconds per step, tokens per second and peak memory of one model.
//!
//! ```text
//! cargo bench -p candle-gpt2-training --bench step -- CASE [--dropout RATE] [--threads N] [--recompute]
//!     [--instructions SET] [--lora-rank RANK] [--device DEVICE] [--compute-dtype TYPE]
//! ```
//!
//! CASE is one of:
//!
//! - `small`: vocabulary 2,048, hidden size 256, 6 blocks, 8 heads, 8 windows of 256 tokens.
//! - `gpt2`: 124M, 4 windows of 64 tokens.
//! - `gpt2-1024`: 124M, 8 windows of 1,024 tokens, for GPUs.
//! - `dictionary`: top-k on precomputed activations, hidden size 768, 6,144 latents with 32 active, 4,096
//!   tokens.
//!
//! With `--lora-rank`, it trains adapters of all linear layers instead of the weights. The output is one JSON
//! line in the format of `python -m bench training`, which compares it with PyTorch (for `dictionary`,
//! `python -m bench circuits` compares it with SAELens). Each run has one case, because peak memory is
//! measured per process.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]

use std::time::Instant;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_engine::{DeviceChoice, Silent};
use candle_gpt2_testing::{MadeUpWeights, pattern};
use candle_gpt2_training::{
    ActivationRows, ComputeDType, Data, DictionaryKind, DictionaryNumbers, Hyperparameters, LORA_TARGETS,
    Lora, LoraConfig, Parameters, RowValues, Task, Trainer, Windows,
};

/// Number of unmeasured steps; the first one allocates the gradients.
const WARM_UP_STEPS: u64 = 2;
/// Minimum steps and minimum seconds per measurement.
const SHORTEST: (usize, f64) = (5, 5.0);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let place = arguments.iter().position(|argument| argument == name)?;
        arguments.get(place + 1)
    };
    let dropout = value("--dropout").map_or(Ok(0.0), |rate| rate.parse())?;
    if let Some(threads) = value("--threads") {
        candle_gpt2_arithmetic::set_thread_count(threads.parse()?);
    }
    if let Some(name) =
        value("--instructions").filter(|name| !candle_gpt2_arithmetic::limits::choose_instruction_set(name))
    {
        return Err(format!(
            "{name}: this processor has {}",
            candle_gpt2_arithmetic::limits::instruction_sets().join(", ")
        )
        .into());
    }
    if arguments.iter().any(|argument| argument == "dictionary") {
        let (trainer, data) = dictionary()?;
        let (seconds, tokens) = (measured(trainer, &data)?, (DICTIONARY_BATCH * DICTIONARY_CONTEXT) as f64);
        let report = serde_json::json!({
            "case": "dictionary", "threads": candle_gpt2_arithmetic::thread_count(), "seconds_per_step": seconds,
            "tokens_per_s": tokens / seconds, "peak_mib": peak_mib(),
        });
        println!("{report}");
        return Ok(());
    }
    let case = arguments.iter().find(|argument| matches!(argument.as_str(), "small" | "gpt2" | "gpt2-1024"));
    let (sizes, batch_size, context) = match case.map(String::as_str) {
        Some("small") => {
            let sizes = (2048, 256, 256, 6, 8);
            (sizes, 8, 256)
        }
        Some("gpt2") => ((50_257, 1024, 768, 12, 12), 4, 64),
        Some("gpt2-1024") => ((50_257, 1024, 768, 12, 12), 8, 1024),
        // `cargo bench` of the entire workspace passes no case, so there is nothing to measure.
        _ => {
            println!("expected a case: small, gpt2, gpt2-1024 or dictionary");
            return Ok(());
        }
    };
    let (vocab_size, n_positions, n_embd, n_layer, n_head) = sizes;
    let config = Gpt2Config {
        vocab_size,
        n_positions,
        n_embd,
        n_layer,
        n_head,
        embd_pdrop: dropout,
        attn_pdrop: dropout,
        resid_pdrop: dropout,
        ..Gpt2Config::gpt2()
    };
    let device: DeviceChoice = value("--device").map_or(Ok(DeviceChoice::Cpu), |name| name.parse())?;
    let compute_dtype: ComputeDType =
        value("--compute-dtype").map_or(Ok(ComputeDType::F32), |name| name.parse())?;
    let parameters = Parameters::initialize(&config, 1, &device.open(&Silent)?)?;
    let count = u32::try_from(vocab_size)?;
    let tokens: Vec<u32> = (0..100_000u32).map(|index| index.wrapping_mul(7919) % count).collect();
    let numbers = Hyperparameters { batch_size, context, compute_dtype, ..Hyperparameters::default() };
    let tokens_per_step = (batch_size * context) as f64;
    let windows = Windows::new(&tokens, context, 1)?;
    let recomputes = arguments.iter().any(|argument| argument == "--recompute");
    let lora_rank = value("--lora-rank").map(|rank| rank.parse()).transpose()?;
    let trainer = match lora_rank {
        Some(rank) => {
            let targets = LORA_TARGETS.map(str::to_owned).to_vec();
            let adapters = LoraConfig { rank, alpha: 16.0, targets };
            let (lora, adapters) = Lora::new(&config, adapters, &parameters, 1)?;
            drop(parameters);
            Trainer::with_adapters(&config, lora, adapters, numbers)?
        }
        None => Trainer::new(&config, parameters, numbers)?,
    };
    let median = measured(trainer.recomputing(recomputes), &windows)?;
    let report = serde_json::json!({
        "case": case, "dropout": dropout, "recompute": recomputes, "lora_rank": lora_rank,
        "device": device.to_string(), "compute_dtype": compute_dtype, "threads": candle_gpt2_arithmetic::thread_count(), "seconds_per_step": median, "tokens_per_s": tokens_per_step / median,
        "peak_mib": peak_mib(),
    });
    println!("{report}");
    Ok(())
}

/// Returns the median time of a step in seconds.
fn measured(mut trainer: Trainer, data: &dyn Data) -> Result<f64, Box<dyn std::error::Error>> {
    for _ in 0..WARM_UP_STEPS {
        trainer.step(data)?;
    }
    let mut seconds = Vec::new();
    while seconds.len() < SHORTEST.0 || seconds.iter().sum::<f64>() < SHORTEST.1 {
        let start = Instant::now();
        trainer.step(data)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// Batch size of the `dictionary` case, which reads precomputed activations and runs no model.
const DICTIONARY_BATCH: usize = 32;
const DICTIONARY_CONTEXT: usize = 128;
const DICTIONARY_WIDTH: usize = 768;

/// Synthetic activations for the tokens of a few steps.
struct Values(Tensor);

impl RowValues for Values {
    fn len(&self) -> usize {
        self.0.dims()[0]
    }

    fn read(&self, rows: &[usize]) -> candle_core::Result<[Tensor; 2]> {
        let places = Tensor::from_iter(rows.iter().map(|row| *row as i64), &Device::Cpu)?;
        let x = self.0.index_select(&places, 0)?;
        Ok([x.clone(), x])
    }
}

fn dictionary() -> Result<(Trainer, ActivationRows), Box<dyn std::error::Error>> {
    let numbers = Hyperparameters {
        task: Task::Dictionary,
        batch_size: DICTIONARY_BATCH,
        context: DICTIONARY_CONTEXT,
        weight_decay: 0.0,
        dictionary: Some(DictionaryNumbers {
            kind: DictionaryKind::TopK,
            site: "blocks.0.hook_resid_post".into(),
            output_site: None,
            latents: 8 * DICTIONARY_WIDTH,
            k: 32,
            sparsity: 0.0,
            dead_after: 10_000_000,
        }),
        ..Hyperparameters::default()
    };
    let config = Gpt2Config {
        vocab_size: 64,
        n_positions: DICTIONARY_CONTEXT,
        n_embd: DICTIONARY_WIDTH,
        n_layer: 1,
        ..Gpt2Config::gpt2()
    };
    let model = Gpt2LMHeadModel::load(&config, MadeUpWeights::new(NumberType::F32))?;
    let values = pattern(&[5 * DICTIONARY_BATCH * DICTIONARY_CONTEXT, DICTIONARY_WIDTH], 2.0, 1);
    let values = Values(values.to_dtype(candle_core::DType::F32)?);
    let data = ActivationRows::new(values, DICTIONARY_CONTEXT, 1)?;
    Ok((Trainer::with_dictionary((model, "made up".into()), false, numbers)?, data))
}

/// Peak resident memory of this process, if the operating system reports it.
fn peak_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes >> 10)
}
