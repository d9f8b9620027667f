//! Device selection, and a check that the weights fit in the device's memory.

use std::fmt;
use std::str::FromStr;

use crate::free_memory;
use candle_core::{DType, Device, DeviceLocation};
use candle_gpt2::{Gpt2Config, ParameterCounts};
use candle_gpt2_kernels::{DeviceError, open_cuda, open_metal};
use candle_gpt2_weights::WeightDType;

use crate::{EngineError, Reporter, UnknownName};

/// Requested device.
///
/// ```
/// use candle_gpt2_engine::{DeviceChoice, Silent, device_name};
///
/// assert_eq!("cuda:1".parse(), Ok(DeviceChoice::Cuda(1)));
/// assert_eq!(DeviceChoice::Auto.to_string(), "auto");
/// assert_eq!(device_name(&DeviceChoice::Cpu.open(&Silent)?), "cpu");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// First NVIDIA GPU if this program and this machine support one, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPU with this index.
    Cuda(usize),
    /// Apple GPU.
    Metal,
}

impl DeviceChoice {
    /// Opens the device for f32 weights.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn open(self, reporter: &dyn Reporter) -> Result<Device, EngineError> {
        open(self, None, reporter)
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(index) => write!(formatter, "cuda:{index}"),
            Self::Metal => formatter.write_str("metal"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match (name, name.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            ("metal", _) => Ok(Self::Metal),
            (_, Some(Ok(index))) => Ok(Self::Cuda(index)),
            _ => Err(UnknownName { expected: "auto, cpu, cuda, cuda:N or metal".into() }),
        }
    }
}

/// Opens a device after checking that it supports the weight type.
pub(crate) fn open(
    choice: DeviceChoice,
    dtype: Option<WeightDType>,
    reporter: &dyn Reporter,
) -> Result<Device, EngineError> {
    if let (Some(dtype), DeviceChoice::Cuda(_) | DeviceChoice::Metal) = (dtype, choice) {
        dtype.on_gpu()?;
    }
    let device = match choice {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Auto => automatic(dtype, reporter),
        DeviceChoice::Cuda(index) => open_cuda(index)?,
        DeviceChoice::Metal => open_metal(0)?,
    };
    if let Some(dtype) = dtype {
        dtype.check(&device)?;
    }
    Ok(device)
}

/// Opens the first NVIDIA GPU if it works and supports the type, otherwise the CPU.
fn automatic(dtype: Option<WeightDType>, reporter: &dyn Reporter) -> Device {
    if dtype.is_some_and(|dtype| dtype.on_gpu().is_err()) {
        return Device::Cpu;
    }
    open_cuda(0).unwrap_or_else(|error| {
        if let DeviceError::Unusable { source, .. } = &error {
            reporter.note(&format!("{error}: {source}; running on the CPU"));
        }
        Device::Cpu
    })
}

/// Name of the device, in the format that [`DeviceChoice`] parses.
pub fn device_name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { .. } => "metal".to_owned(),
    }
}

/// Checks that the weights and the KV cache of one full context fit in the free GPU memory.
pub(crate) fn check_gpu_room(config: &Gpt2Config, dtype: DType, gpu: &Device) -> Result<(), EngineError> {
    match free_memory(gpu) {
        Some(free) => check_gpu_room_in(free, config, dtype),
        None => Ok(()),
    }
}

fn check_gpu_room_in(free: usize, config: &Gpt2Config, dtype: DType) -> Result<(), EngineError> {
    let bytes = dtype.size_in_bytes();
    let weights = ParameterCounts::new(config).unique * bytes;
    let cache = config.n_positions * config.kv_bytes_per_token(dtype.into());
    if weights + cache > free {
        return Err(EngineError::GpuRoom { free, weights, dtype: dtype.as_str(), cache });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_round_trip() {
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
            assert_eq!(name.parse().ok(), expected, "{name}");
            let again = expected.map(|choice| choice.to_string().parse::<DeviceChoice>());
            assert_eq!(again.transpose().ok().flatten(), expected, "{name}");
        }
    }

    /// Uses the 124M model: 124,439,808 weights, and 2 · 12 · 768 cached values for each token.
    #[test]
    fn model_that_exceeds_gpu_memory_is_rejected() {
        let config = Gpt2Config::gpt2();
        let needed = 4 * (124_439_808 + 2 * 12 * 768 * 1024);
        assert!(check_gpu_room_in(needed, &config, DType::F32).is_ok());
        let error = check_gpu_room_in(needed - 1, &config, DType::F32).unwrap_err().to_string();
        for part in ["546.7 MiB is free", "474.7 MiB for its weights in f32", "72.0 MiB for the KV cache"] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        assert!(check_gpu_room_in(needed / 2, &config, DType::BF16).is_ok());
        assert!(check_gpu_room_in(needed / 2 - 1, &config, DType::F16).is_err());
    }
}
