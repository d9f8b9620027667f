//! The types in which weights can be held in memory, and which of them a CPU and a GPU have.

use candle_core::DType;
use candle_gpt2_arithmetic::WeightFormat;

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
            /// The format of the CPU's products.
            pub(crate) fn format(self) -> Option<WeightFormat> {
                match self {
                    $(Self::$format => Some(WeightFormat::$format),)+
                    Self::BF16 => None,
                }
            }
        }
    };
}

candle_gpt2_arithmetic::weight_formats!(dtypes);

impl WeightDType {
    /// The type of a GPU's tensors.
    pub(crate) fn tensor_dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            _ => None,
        }
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
        Self::listed(|dtype| dtype.format().is_some())
    }

    /// The names of those that only the CPU holds, for people.
    pub fn names_on_cpu_only() -> String {
        Self::listed(|dtype| dtype.tensor_dtype().is_none())
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
}
