//! Weight dtypes that each device supports.

use candle_core::{DType, Device};
use candle_gpt2_arithmetic::{NumberType, uses};
use candle_gpt2_kernels::tensor_dtype;

use crate::{WeightDType, WeightsError};

impl WeightDType {
    /// Returns the CPU storage type for packed weights in this dtype.
    ///
    /// # Errors
    /// [`WeightsError::NotOnCpu`] if the CPU does not support it.
    pub fn on_cpu(self) -> Result<NumberType, WeightsError> {
        let supported = Some(self.number_type()).filter(|dtype| dtype.is_for(uses::CPU_WEIGHTS));
        supported.ok_or(WeightsError::NotOnCpu { dtype: self })
    }

    /// Returns the tensor dtype that GPUs use for this dtype.
    ///
    /// # Errors
    /// [`WeightsError::NotOnGpu`] if GPUs do not support it.
    pub fn on_gpu(self) -> Result<DType, WeightsError> {
        let supported = Some(self.number_type()).filter(|dtype| dtype.is_for(uses::GPU_WEIGHTS));
        supported.and_then(tensor_dtype).ok_or(WeightsError::NotOnGpu { dtype: self })
    }

    /// Checks that `device` supports this dtype.
    ///
    /// # Errors
    /// Fails like [`WeightDType::on_cpu`] and [`WeightDType::on_gpu`].
    pub fn check(self, device: &Device) -> Result<(), WeightsError> {
        if device.is_cpu() { self.on_cpu().map(drop) } else { self.on_gpu().map(drop) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_reject_unsupported_dtypes() {
        for (name, on_cpu, on_gpu) in [
            ("f32", Some(NumberType::F32), Some(DType::F32)),
            ("f16", Some(NumberType::F16), Some(DType::F16)),
            ("bf16", None, Some(DType::BF16)),
            ("q8", Some(NumberType::Q8), None),
            ("q6", Some(NumberType::Q6), None),
            ("q5", Some(NumberType::Q5), None),
            ("q4", Some(NumberType::Q4), None),
        ] {
            let dtype: WeightDType = name.parse().unwrap();
            assert_eq!((dtype.on_cpu().ok(), dtype.on_gpu().ok()), (on_cpu, on_gpu), "{name}");
            assert_eq!(dtype.check(&Device::Cpu).is_ok(), on_cpu.is_some(), "{name}");
        }
        let message = |result: Result<(), WeightsError>| result.unwrap_err().to_string();
        assert_eq!(
            message(WeightDType::BF16.on_cpu().map(drop)),
            "bf16 weights are not supported on the CPU; use f32, f16, q8, q6, q5 or q4"
        );
        assert_eq!(
            message(WeightDType::Q6.on_gpu().map(drop)),
            "q6 weights are not supported on a GPU; use f32, f16 or bf16"
        );
    }
}
