//! The types in which weights can be held in memory, and which of them a CPU and a GPU have.

use candle_core::{DType, Device};
use candle_gpt2_kernels::WeightFormat;

use crate::WeightsError;
use crate::named::named;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $format:ident $name:literal $block:ty, tables $tables:ident;)+) => {
        named! {
            /// A type in which the weights of linear layers and embeddings can be held: those of [`WeightFormat`] on a CPU, f32, f16
            /// and bf16 on a GPU.
            ///
            /// ```
            /// use candle_core::Device;
            /// use candle_gpt2_weights::WeightDType;
            ///
            /// assert_eq!("q8".parse(), Ok(WeightDType::Q8));
            /// assert!(WeightDType::Q4.check(&Device::Cpu).is_ok());
            /// assert!(WeightDType::BF16.check(&Device::Cpu).is_err(), "that is for GPUs");
            /// ```
            WeightDType, UnknownWeightDType {
                $($(#[$doc])* $format $name,)+
                /// 16-bit floating point with the exponent of F32: GPUs only.
                BF16 "bf16",
            }
        }

        impl WeightDType {
            /// How the CPU holds it.
            ///
            /// # Errors
            /// [`WeightsError::NotOnCpu`] where it does not.
            pub fn on_cpu(self) -> Result<WeightFormat, WeightsError> {
                match self {
                    $(Self::$format => Ok(WeightFormat::$format),)+
                    Self::BF16 => Err(WeightsError::NotOnCpu { dtype: self }),
                }
            }
        }
    };
}

candle_gpt2_kernels::weight_formats!(dtypes);

impl WeightDType {
    /// How a GPU holds it.
    ///
    /// # Errors
    /// [`WeightsError::NotOnGpu`] where it does not.
    pub fn on_gpu(self) -> Result<DType, WeightsError> {
        match self {
            Self::F32 => Ok(DType::F32),
            Self::F16 => Ok(DType::F16),
            Self::BF16 => Ok(DType::BF16),
            _ => Err(WeightsError::NotOnGpu { dtype: self }),
        }
    }

    /// Checks that `device` holds it.
    ///
    /// # Errors
    /// As [`WeightDType::on_cpu`] and [`WeightDType::on_gpu`].
    pub fn check(self, device: &Device) -> Result<(), WeightsError> {
        if device.is_cpu() { self.on_cpu().map(drop) } else { self.on_gpu().map(drop) }
    }

    /// The names of those that only a device of this kind holds, or of all that it does.
    fn listed(holds: impl Fn(Self) -> bool) -> String {
        let names: Vec<_> = Self::ALL.into_iter().filter(|dtype| holds(*dtype)).map(Self::name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        }
    }

    /// The names of those that the CPU holds, for people.
    pub fn names_on_cpu() -> String {
        Self::listed(|dtype| dtype.on_cpu().is_ok())
    }

    /// The names of those that only the CPU holds, for people.
    pub fn names_on_cpu_only() -> String {
        Self::listed(|dtype| dtype.on_gpu().is_err())
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
        assert_eq!(error.to_string(), "expected one of f32, f16, q8, q6, q5, q4, bf16");
    }

    #[test]
    fn a_device_refuses_what_it_cannot_hold() {
        for (name, on_cpu, on_gpu) in [
            ("f32", Some(WeightFormat::F32), Some(DType::F32)),
            ("f16", Some(WeightFormat::F16), Some(DType::F16)),
            ("bf16", None, Some(DType::BF16)),
            ("q8", Some(WeightFormat::Q8), None),
            ("q6", Some(WeightFormat::Q6), None),
            ("q5", Some(WeightFormat::Q5), None),
            ("q4", Some(WeightFormat::Q4), None),
        ] {
            let dtype: WeightDType = name.parse().unwrap();
            assert_eq!((dtype.on_cpu().ok(), dtype.on_gpu().ok()), (on_cpu, on_gpu), "{name}");
            assert_eq!(dtype.check(&Device::Cpu).is_ok(), on_cpu.is_some(), "{name}");
        }
        let refusal = |refused: Result<(), WeightsError>| refused.unwrap_err().to_string();
        assert_eq!(
            refusal(WeightDType::BF16.on_cpu().map(drop)),
            "bf16: the CPU holds weights in f32, f16, q8, q6, q5 or q4"
        );
        assert_eq!(
            refusal(WeightDType::Q6.on_gpu().map(drop)),
            "q6: a GPU holds weights in f32, f16 or bf16"
        );
    }
}
