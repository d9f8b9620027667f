//! Opening a checkpoint and loading its model on a device.

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use gpt2::Gpt2LMHead;
use gpt2_weights::{Checkpoint, LoadOptions, WeightDType};

use crate::arguments::ModelArguments;
use crate::device::{WeightType, check_room};
use crate::hub::Network;
use crate::{built_in, hub, progress};

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

/// Loads the model with the type of weights that `--dtype` names, or that is stored, with a progress bar.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    device: &Device,
    dtype: Option<WeightType>,
) -> Result<Gpt2LMHead> {
    let bar = progress::bytes("loading", checkpoint.parameter_bytes());
    let progress = |bytes| bar.inc(bytes);
    let dtype = dtype.map(WeightType::dtype);
    let options = LoadOptions { device: device.clone(), dtype, kv_dtype: None };
    if device.is_cpu() {
        let model = checkpoint.load(&options, &progress)?;
        bar.finish_and_clear();
        return Ok(model);
    }
    let held = dtype.map_or(Ok(checkpoint.stored_dtype()), WeightDType::on_gpu)?;
    check_room(checkpoint.config(), held, device)?;
    // The program gives a device work from one thread only.
    let model = checkpoint.load(&options, &progress)?.with_recorded_steps();
    bar.finish_and_clear();
    Ok(model)
}
