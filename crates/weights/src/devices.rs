//! Which types of weights a CPU and a GPU hold.

use candle_core::{DType, Device};
use candle_gpt2_arithmetic::WeightFormat;

use crate::{WeightDType, WeightsError};

impl WeightDType {
    /// How the CPU holds it.
    ///
    /// # Errors
    /// [`WeightsError::NotOnCpu`] if it does not.
    pub fn on_cpu(self) -> Result<WeightFormat, WeightsError> {
        self.format().ok_or(WeightsError::NotOnCpu { dtype: self })
    }

    /// How a GPU holds it.
    ///
    /// # Errors
    /// [`WeightsError::NotOnGpu`] if it does not.
    pub fn on_gpu(self) -> Result<DType, WeightsError> {
        self.tensor_dtype().ok_or(WeightsError::NotOnGpu { dtype: self })
    }

    /// Checks that `device` holds it.
    ///
    /// # Errors
    /// As [`WeightDType::on_cpu`] and [`WeightDType::on_gpu`].
    pub fn check(self, device: &Device) -> Result<(), WeightsError> {
        if device.is_cpu() { self.on_cpu().map(drop) } else { self.on_gpu().map(drop) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
