//! The types in which weights can be held in memory, and which of them a CPU and a GPU have.

use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Device};
use candle_gpt2_kernels::WeightFormat;
use thiserror::Error;

use crate::WeightsError;

/// A type in which the weights of linear layers and embeddings can be held.
///
/// ```
/// use candle_core::Device;
/// use candle_gpt2_weights::WeightDType;
///
/// assert_eq!("q8".parse(), Ok(WeightDType::Q8));
/// assert!(WeightDType::Q4.check(&Device::Cpu).is_ok());
/// assert!(WeightDType::BF16.check(&Device::Cpu).is_err(), "that is for GPUs");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightDType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// 16-bit floating point with the exponent of F32: GPUs only.
    BF16,
    /// Blocks of 8-bit integers, see [`WeightFormat::Q8`]: the CPU only.
    Q8,
    /// Blocks of 6-bit integers, see [`WeightFormat::Q6`]: the CPU only.
    Q6,
    /// Blocks of 4-bit integers, see [`WeightFormat::Q4`], embedding and head in [`WeightFormat::Q6`]: the CPU only.
    Q4,
}

impl WeightDType {
    /// Every type.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::BF16, Self::Q8, Self::Q6, Self::Q4];

    /// Its name, which [`FromStr`] reads and [`Display`](fmt::Display) writes.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Q8 => "q8",
            Self::Q6 => "q6",
            Self::Q4 => "q4",
        }
    }

    /// How the CPU holds it.
    ///
    /// # Errors
    /// [`WeightsError::NotOnCpu`] where it does not.
    pub fn on_cpu(self) -> Result<WeightFormat, WeightsError> {
        match self {
            Self::F32 => Ok(WeightFormat::F32),
            Self::F16 => Ok(WeightFormat::F16),
            Self::Q8 => Ok(WeightFormat::Q8),
            Self::Q6 => Ok(WeightFormat::Q6),
            Self::Q4 => Ok(WeightFormat::Q4),
            Self::BF16 => Err(WeightsError::NotOnCpu { dtype: self }),
        }
    }

    /// How a GPU holds it.
    ///
    /// # Errors
    /// [`WeightsError::NotOnGpu`] where it does not.
    pub fn on_gpu(self) -> Result<DType, WeightsError> {
        match self {
            Self::F32 => Ok(DType::F32),
            Self::F16 => Ok(DType::F16),
            Self::BF16 => Ok(DType::BF16),
            Self::Q8 | Self::Q6 | Self::Q4 => Err(WeightsError::NotOnGpu { dtype: self }),
        }
    }

    /// Checks that `device` holds it.
    ///
    /// # Errors
    /// As [`WeightDType::on_cpu`] and [`WeightDType::on_gpu`].
    pub fn check(self, device: &Device) -> Result<(), WeightsError> {
        if device.is_cpu() { self.on_cpu().map(drop) } else { self.on_gpu().map(drop) }
    }
}

impl fmt::Display for WeightDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no [`WeightDType`] has. What parsing a [`WeightDType`] returns then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("expected one of {}", WeightDType::ALL.map(WeightDType::name).join(", "))]
pub struct UnknownWeightDType;

impl FromStr for WeightDType {
    type Err = UnknownWeightDType;

    fn from_str(name: &str) -> Result<Self, UnknownWeightDType> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or(UnknownWeightDType)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for dtype in WeightDType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let error = "F32".parse::<WeightDType>().unwrap_err();
        assert_eq!(error.to_string(), "expected one of f32, f16, bf16, q8, q6, q4");
    }

    #[test]
    fn a_device_refuses_what_it_cannot_hold() {
        for (name, on_cpu, on_gpu) in [
            ("f32", Some(WeightFormat::F32), Some(DType::F32)),
            ("f16", Some(WeightFormat::F16), Some(DType::F16)),
            ("bf16", None, Some(DType::BF16)),
            ("q8", Some(WeightFormat::Q8), None),
            ("q6", Some(WeightFormat::Q6), None),
            ("q4", Some(WeightFormat::Q4), None),
        ] {
            let dtype: WeightDType = name.parse().unwrap();
            assert_eq!((dtype.on_cpu().ok(), dtype.on_gpu().ok()), (on_cpu, on_gpu), "{name}");
            assert_eq!(dtype.check(&Device::Cpu).is_ok(), on_cpu.is_some(), "{name}");
        }
        let refusal = |refused: Result<(), WeightsError>| refused.unwrap_err().to_string();
        assert_eq!(
            refusal(WeightDType::BF16.on_cpu().map(drop)),
            "bf16: the CPU holds weights in f32, f16, q8, q6 or q4"
        );
        assert_eq!(
            refusal(WeightDType::Q6.on_gpu().map(drop)),
            "q6: a GPU holds weights in f32, f16 or bf16"
        );
    }
}
