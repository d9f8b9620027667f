//! Trains a small model from scratch.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::Device;
use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{GenerationConfig, TokenGenerator};
use candle_gpt2_training::{Hyperparameters, Parameters, Trainer, Windows};

const TEXT: &str = "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day. ";
const CONTEXT: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Bytes serve as tokens, so no tokenizer is needed.
    let tokens: Vec<u32> = TEXT.repeat(20).bytes().map(u32::from).collect();
    let sizes = Gpt2Config {
        vocab_size: 128,
        n_positions: CONTEXT,
        n_embd: 48,
        n_layer: 2,
        n_head: 3,
        // No dropout, because the model should memorize the text.
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        resid_pdrop: 0.0,
        ..Gpt2Config::gpt2()
    };
    let parameters = Parameters::initialize(&sizes, 1, &Device::Cpu)?;
    println!("{} parameters", parameters.count());

    let numbers = Hyperparameters {
        steps: 120,
        batch_size: 8,
        context: CONTEXT,
        learning_rate: 5e-3,
        warmup_steps: 10,
        ..Hyperparameters::default()
    };
    let mut trainer = Trainer::new(&sizes, parameters, numbers)?;
    let windows = Windows::new(&tokens, CONTEXT, 1)?;
    for _ in 0..120 {
        let report = trainer.step(&windows)?;
        if report.step % 20 == 0 || report.step == 1 {
            println!("step {:3}: loss {:.3}", report.step, report.loss);
        }
    }

    let model = trainer.model()?; // shares the weights
    let prompt: Vec<u32> = "Tomorrow, and".bytes().map(u32::from).collect();
    let config = GenerationConfig { max_new_tokens: 48, do_sample: false, ..GenerationConfig::default() };
    let ids = TokenGenerator::new(&model, &prompt, &config)?.collect::<Result<Vec<_>, _>>()?;
    let bytes = ids.into_iter().map(u8::try_from).collect::<Result<Vec<_>, _>>()?;
    println!("Tomorrow, and{}", String::from_utf8_lossy(&bytes));
    Ok(())
}
