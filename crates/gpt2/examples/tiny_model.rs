//! Builds a model with custom sizes and runs it on token IDs.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{ByOutput, Gpt2Config, Gpt2LMHeadModel, LogitsFor, Parameter, Pass, expected_parameters};
use candle_nn::VarBuilder;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sizes = Gpt2Config {
        vocab_size: 61,
        n_positions: 32,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        ..Gpt2Config::gpt2()
    };
    sizes.check()?;
    // Random parameters by name; `candle-gpt2-weights` reads the parameters of a checkpoint.
    let random = |one: Parameter| Ok((one.name, Tensor::randn(0f32, 0.5, one.shape, &Device::Cpu)?));
    let tensors = expected_parameters(&sizes).into_iter().map(random).collect::<candle_core::Result<_>>()?;
    let model =
        Gpt2LMHeadModel::load(&sizes, ByOutput(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))?;
    println!("{} parameters, {} bytes", model.parameter_count(), model.weight_bytes());

    // One pass: the logits of the next token after each token of the prompt.
    let ids = [5u32, 7, 11, 13];
    let prompt = Tensor::new(&ids, &Device::Cpu)?.unsqueeze(0)?; // (B, T)
    let logits = model.forward_with(&prompt, LogitsFor::EveryToken, None, &mut Pass::inference())?;
    println!("logits {:?}", logits.dims()); // (B, T, V)

    // Greedy decoding: each step computes one token and reuses the cached keys and values.
    let mut cache = model.new_cache(1, sizes.n_positions)?;
    let mut next = prompt;
    for _ in 0..5 {
        let logits =
            model.forward_with(&next, LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())?;
        next = logits.squeeze(1)?.argmax(D::Minus1)?.unsqueeze(0)?; // (B, 1)
        println!("after {} tokens comes {}", cache.lengths()[0], next.flatten_all()?.to_vec1::<u32>()?[0]);
    }
    Ok(())
}
