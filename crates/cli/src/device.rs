//! The device that a command runs on, the types of weights it has, and whether they fit into its memory.

use anyhow::{Result, bail};
use candle_core::{DType, Device, DeviceLocation};
use gpt2::{Gpt2Config, ParameterCounts};
use gpt2_kernels::{DeviceError, free_memory, open_cuda, open_metal, use_tf32};
use gpt2_weights::{UnknownWeightDType, WeightDType, WeightFormat};

use crate::arguments::ModelArguments;
use crate::{UsageError, output};

/// What `--device` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// An NVIDIA GPU where this program and this machine have one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU of this number.
    Cuda(usize),
    /// Apple's GPU.
    Metal,
}

/// The device of this name.
pub(crate) fn parse_device(name: &str) -> Result<DeviceChoice, String> {
    match (name, name.strip_prefix("cuda:").map(str::parse)) {
        ("auto", _) => Ok(DeviceChoice::Auto),
        ("cpu", _) => Ok(DeviceChoice::Cpu),
        ("cuda", _) => Ok(DeviceChoice::Cuda(0)),
        ("metal", _) => Ok(DeviceChoice::Metal),
        (_, Some(Ok(index))) => Ok(DeviceChoice::Cuda(index)),
        _ => Err("expected auto, cpu, cuda, cuda:N or metal".to_owned()),
    }
}

/// A type of weights that `--dtype` names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeightType {
    pub(crate) name: &'static str,
    dtype: WeightDType,
}

/// The type of this name.
pub(crate) fn parse_weight_type(name: &str) -> Result<WeightType, UnknownWeightDType> {
    name.parse().map(|dtype: WeightDType| WeightType { name: dtype.name(), dtype })
}

impl WeightType {
    pub(crate) fn dtype(self) -> WeightDType {
        self.dtype
    }

    fn on_cpu(self) -> Result<WeightFormat, UsageError> {
        let hint = "without --dtype it takes what is stored, bf16 as f32";
        self.dtype.on_cpu().map_err(|error| UsageError(format!("--dtype {error}; {hint}")))
    }

    fn on_gpu(self) -> Result<DType, UsageError> {
        let hint = "q8, q6 and q4 need --device cpu";
        self.dtype.on_gpu().map_err(|error| UsageError(format!("--dtype {error}; {hint}")))
    }
}

/// Opens the device that `--device` names, and refuses what it cannot do.
pub(crate) fn open(arguments: &ModelArguments) -> Result<Device> {
    if let (Some(dtype), DeviceChoice::Cuda(_) | DeviceChoice::Metal) = (arguments.dtype, arguments.device) {
        dtype.on_gpu()?;
    }
    let opened = match arguments.device {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Auto => Ok(automatic(arguments.dtype)),
        DeviceChoice::Cuda(index) => open_cuda(index),
        DeviceChoice::Metal => open_metal(0),
    };
    let device = opened.map_err(|error| match error {
        DeviceError::NotBuilt { .. } | DeviceError::NoSuchGpu { .. } => {
            UsageError(format!("--device: {error}")).into()
        }
        error => anyhow::Error::new(error),
    })?;
    if let Some(dtype) = arguments.dtype.filter(|_| device.is_cpu()) {
        dtype.on_cpu()?;
    }
    if arguments.tf32 && !device.is_cuda() {
        let message = format!("--tf32: NVIDIA GPUs have it, and this would run on {}", name(&device));
        return Err(UsageError(message).into());
    }
    use_tf32(arguments.tf32);
    Ok(device)
}

/// The first NVIDIA GPU, where there is one that works and has the type; else the CPU.
fn automatic(dtype: Option<WeightType>) -> Device {
    if dtype.is_some_and(|dtype| dtype.on_gpu().is_err()) {
        return Device::Cpu;
    }
    open_cuda(0).unwrap_or_else(|error| {
        if matches!(error, DeviceError::Unusable { .. }) {
            output::print_note(&format!("{:#}; running on the CPU", anyhow::Error::new(error)));
        }
        Device::Cpu
    })
}

/// The device's name, as `--device` takes it.
pub(crate) fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { .. } => "metal".to_owned(),
    }
}

/// Checks that the weights, and the keys and values of one full context, fit into the memory that the GPU says is free.
pub(crate) fn check_room(config: &Gpt2Config, dtype: DType, device: &Device) -> Result<()> {
    match free_memory(device) {
        Some(free) => check_room_in(free, config, dtype),
        None => Ok(()),
    }
}

fn check_room_in(free: usize, config: &Gpt2Config, dtype: DType) -> Result<()> {
    let bytes = dtype.size_in_bytes();
    let weights = ParameterCounts::new(config).unique * bytes;
    let cache = config.n_positions * config.kv_bytes_per_token(bytes);
    if weights + cache > free {
        bail!(
            "the GPU has too little memory: {} are free, and the model takes {} in {} and {} for the keys and values \
             of a full context; --dtype f16 or bf16 takes half of f32",
            output::mebibytes(free),
            output::mebibytes(weights),
            dtype.as_str(),
            output::mebibytes(cache),
        );
    }
    Ok(())
}

/// The error, with what to do where a GPU had too little memory.
pub(crate) fn explained(error: anyhow::Error) -> anyhow::Error {
    let is_out_of_memory = format!("{error:#}").contains("CUDA_ERROR_OUT_OF_MEMORY");
    if is_out_of_memory {
        let advice =
            "the GPU has too little memory; fewer texts at once, shorter ones or --dtype f16 take less";
        return error.context(advice);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named() {
        for (name, expected) in [
            ("auto", Some(DeviceChoice::Auto)),
            ("cpu", Some(DeviceChoice::Cpu)),
            ("cuda", Some(DeviceChoice::Cuda(0))),
            ("cuda:3", Some(DeviceChoice::Cuda(3))),
            ("metal", Some(DeviceChoice::Metal)),
            ("cuda:", None),
            ("cuda:-1", None),
            ("tpu", None),
        ] {
            assert_eq!(parse_device(name).ok(), expected, "{name}");
        }
    }

    /// The 124M model: 124,439,808 values, and 2 · 12 · 768 of each of 1,024 tokens.
    #[test]
    fn a_model_that_does_not_fit_is_refused_before_it_is_loaded() {
        let config = Gpt2Config::gpt2();
        let needed = 4 * (124_439_808 + 2 * 12 * 768 * 1024);
        assert!(check_room_in(needed, &config, DType::F32).is_ok());
        let refusal = check_room_in(needed - 1, &config, DType::F32).unwrap_err().to_string();
        for part in ["546.7 MiB are free", "474.7 MiB in f32", "72.0 MiB for the keys"] {
            assert!(refusal.contains(part), "`{part}` is not in: {refusal}");
        }
        assert!(check_room_in(needed / 2, &config, DType::BF16).is_ok());
        assert!(check_room_in(needed / 2 - 1, &config, DType::F16).is_err());
    }

    #[test]
    fn an_allocation_that_fails_says_what_to_do() {
        let explain = |message: &'static str| format!("{:#}", explained(anyhow::anyhow!(message)));
        assert!(
            explain("DriverError(CUDA_ERROR_OUT_OF_MEMORY)").starts_with("the GPU has too little memory")
        );
        assert_eq!(explain("DriverError(CUDA_ERROR_ASSERT)"), "DriverError(CUDA_ERROR_ASSERT)");
    }
}
