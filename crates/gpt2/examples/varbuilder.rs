//! Uses the model with candle alone: loads, runs and trains a checkpoint, and composes layers.
//!
//! Usage: `varbuilder [FOLDER]`. Without a folder, it writes a tiny model to a temporary one.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{
    Activation, FeedForward, Gpt2Config, Gpt2LMHeadModel, LayerNorm, MultiHeadAttention,
    MultiHeadAttentionConfig,
};
use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};

const DEVICE: Device = Device::Cpu;

fn main() -> Result<(), Box<dyn Error>> {
    let given = std::env::args().nth(1).map(PathBuf::from);
    let folder = match given {
        Some(folder) => folder,
        None => write_tiny_model()?,
    };
    run(&folder)?;
    train(&folder)?;
    compose()?;
    Ok(())
}

fn read_config(folder: &Path) -> Result<Gpt2Config, Box<dyn Error>> {
    Ok(serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?)
}

/// Computes logits from token IDs.
fn run(folder: &Path) -> Result<(), Box<dyn Error>> {
    let file = folder.join("model.safetensors");
    #[expect(unsafe_code, reason = "nothing changes the file while it is mapped")]
    // SAFETY: Nothing changes the file while the program runs.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &DEVICE)? };
    let model = Gpt2LMHeadModel::load(&read_config(folder)?, vb)?;
    let logits = model.forward(&Tensor::new(&[[1u32, 2, 3, 4]], &DEVICE)?)?; // (B, T, V)
    let next = logits.get(0)?.get(3)?.argmax(0)?.to_scalar::<u32>()?;
    println!("{} parameters; after 1, 2, 3, 4 comes {next}", model.parameter_count());
    Ok(())
}

/// Performs one step of candle's optimizer, starting from the parameters in the folder.
fn train(folder: &Path) -> Result<(), Box<dyn Error>> {
    let config = read_config(folder)?;
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &DEVICE)?;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &DEVICE);
    // Loading the model creates the variables, with the prefix `transformer.`. The file then supplies their
    // values; it may be in f16 and omit the prefix.
    let model = Gpt2LMHeadModel::load(&config, vb)?;
    for (name, variable) in &*variables.data().lock().expect("no thread has panicked") {
        let value = tensors.get(name).or_else(|| tensors.get(name.strip_prefix("transformer.")?));
        let value = value.ok_or_else(|| format!("{name} is not in the file"))?;
        variable.set(&value.to_dtype(DType::F32)?)?;
    }

    let mut optimizer = AdamW::new_lr(variables.all_vars(), 1e-3)?;
    let ids = Tensor::new(&[[1u32, 2, 3, 4, 5]], &DEVICE)?;
    let (inputs, targets) = (ids.narrow(1, 0, 4)?, ids.narrow(1, 1, 4)?.flatten_all()?);
    let loss = || candle_nn::loss::cross_entropy(&model.forward(&inputs)?.flatten_to(1)?, &targets);
    let before = loss()?;
    optimizer.backward_step(&before)?;
    println!("loss {:.4}, after a step {:.4}", before.to_scalar::<f32>()?, loss()?.to_scalar::<f32>()?);
    Ok(())
}

/// Combines this crate's layers with candle's functions.
fn compose() -> candle_core::Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &DEVICE);
    let attention = MultiHeadAttentionConfig::new(64, 64, 4);
    let block = candle_nn::seq()
        .add(LayerNorm::load(64, 1e-5, vb.pp("norm"))?)
        .add(MultiHeadAttention::load(&attention, vb.pp("attention"))?)
        .add(FeedForward::load(64, 256, Activation::GeluTanh, vb.pp("mlp"))?)
        .add_fn(|x| candle_nn::ops::softmax(x, 2));
    let y = block.forward(&Tensor::randn(0f32, 1.0, (2, 5, 64), &DEVICE)?)?;
    println!("a sequence of layers gives {:?}", y.dims());
    Ok(())
}

/// Writes a Hugging Face folder with a freshly initialized model.
fn write_tiny_model() -> Result<PathBuf, Box<dyn Error>> {
    let config = Gpt2Config {
        vocab_size: 61,
        n_positions: 32,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        ..Gpt2Config::gpt2()
    };
    let folder = std::env::temp_dir().join(format!("candle-gpt2-example-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let variables = VarMap::new();
    Gpt2LMHeadModel::load(&config, VarBuilder::from_varmap(&variables, DType::F32, &DEVICE))?;
    variables.save(folder.join("model.safetensors"))?;
    Ok(folder)
}
