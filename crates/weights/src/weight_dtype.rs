//! Dtypes of weights, in memory and in written checkpoints.

use candle_gpt2_arithmetic::{NumberType, number_type_for, uses};

number_type_for! {
    /// In-memory dtype of linear-layer and embedding weights.
    ///
    /// CPUs support f32, f16 and integers; GPUs support f32, f16 and bf16.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_gpt2_weights::WeightDType;
    ///
    /// assert_eq!("q8".parse(), Ok(WeightDType::Q8));
    /// assert!(WeightDType::Q4.check(&Device::Cpu).is_ok());
    /// assert!(WeightDType::BF16.check(&Device::Cpu).is_err(), "only GPUs support bf16");
    /// ```
    WeightDType, uses::WEIGHTS, [F32, F16, Q8, Q6, Q5, Q4, BF16]
}

number_type_for! {
    /// Dtype of a written checkpoint. Only GGUF supports blocks of integers.
    ///
    /// ```
    /// use candle_gpt2_weights::WrittenDType;
    ///
    /// assert_eq!("q8_0".parse(), Ok(WrittenDType::Q8_0));
    /// assert_eq!(WrittenDType::F16.name(), "f16");
    /// ```
    WrittenDType, uses::GGUF | uses::SAFETENSORS, [F32, F16, BF16, Q8_0, Q4_0, Q5_0, Q4K, Q5K, Q6K]
}

impl WeightDType {
    /// Lists the dtypes for which `holds` returns true, such as `f32, f16 or q8`.
    fn listed(holds: impl Fn(NumberType) -> bool) -> String {
        let names: Vec<_> = Self::all().filter(|dtype| holds(dtype.0)).map(Self::name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        }
    }

    /// Lists the dtypes that the CPU supports, for messages.
    pub fn names_on_cpu() -> String {
        Self::listed(|dtype| dtype.is_for(uses::CPU_WEIGHTS))
    }

    /// Lists the dtypes that GPUs support, for messages.
    pub fn names_on_gpu() -> String {
        Self::listed(|dtype| dtype.is_for(uses::GPU_WEIGHTS))
    }

    /// Lists the dtypes that only the CPU supports, for messages.
    pub fn names_on_cpu_only() -> String {
        Self::listed(|dtype| !dtype.is_for(uses::GPU_WEIGHTS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in WeightDType::all() {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let error = "F32".parse::<WeightDType>().unwrap_err();
        assert_eq!(error.to_string(), "expected one of f32, f16, q8, q6, q5, q4, bf16; found `F32`");
    }
}
