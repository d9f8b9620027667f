//! Opening a checkpoint and loading its model on a device.

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use gpt2::Gpt2LMHead;
use gpt2_weights::{Checkpoint, WeightFormat};

use crate::arguments::ModelArguments;
use crate::hub::Network;
use crate::{UsageError, built_in, hub, progress};

/// The device that `--device` names.
pub(crate) fn device(arguments: &ModelArguments) -> Result<Device> {
    let name = arguments.device.as_str();
    let unknown = || UsageError(format!("--device {name}: expected cpu, cuda or cuda:N"));
    let index = match name {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => 0,
        _ => {
            let index = name.strip_prefix("cuda:").and_then(|index| index.parse::<usize>().ok());
            index.ok_or_else(unknown)?
        }
    };
    if !candle_core::utils::cuda_is_available() {
        let message =
            format!("--device {name}: this program was built without CUDA; build it with --features cuda");
        return Err(UsageError(message).into());
    }
    Ok(Device::new_cuda(index)?)
}

/// Opens the checkpoint that `--model` names: a path, a model of the hub, or the one inside the program.
pub(crate) fn open(path: &Path, network: Network) -> Result<Checkpoint> {
    if let Some(checkpoint) = built_in::open(path)? {
        return Ok(checkpoint);
    }
    Ok(Checkpoint::open(&hub::local_path(path, network)?)?)
}

/// Loads the model in the precisions that the arguments name, with a progress bar.
pub(crate) fn load_with(
    checkpoint: &Checkpoint,
    device: &Device,
    arguments: &ModelArguments,
) -> Result<Gpt2LMHead> {
    let model = load(checkpoint, device, arguments.dtype)?;
    Ok(match arguments.kv_dtype {
        Some(kv_dtype) => model.with_kv_dtype(kv_dtype),
        None => model,
    })
}

/// Loads the model in the precision that `--dtype` names, with a progress bar.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    device: &Device,
    dtype: Option<WeightFormat>,
) -> Result<Gpt2LMHead> {
    let bar = progress::bytes("loading", checkpoint.parameter_bytes());
    let progress = |bytes| bar.inc(bytes);
    let model = match dtype {
        None => checkpoint.load(device, &progress)?,
        Some(format) if device.is_cpu() => checkpoint.load_as(format, &progress)?,
        Some(WeightFormat::F32) => checkpoint.load_dense(device, &progress)?,
        Some(format) => {
            let message =
                format!("--dtype {}: other devices than the CPU hold their weights in f32", format.name());
            return Err(UsageError(message).into());
        }
    };
    bar.finish_and_clear();
    Ok(model)
}
