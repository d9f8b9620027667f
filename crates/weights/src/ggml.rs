//! Element types of GGUF files.

use candle_core::quantized::GgmlDType;
use candle_gpt2_arithmetic::NumberType;

/// GGUF element type that candle can convert: any except f64.
pub(crate) struct GgmlType {
    pub(crate) dtype: NumberType,
    /// Type id in `ggml.h`.
    pub(crate) id: u32,
    pub(crate) candle: GgmlDType,
    /// llama.cpp's id for files that mostly use this type; `None` if this project writes no such files.
    pub(crate) file_type: Option<u32>,
}

const fn row(dtype: NumberType, id: u32, candle: GgmlDType, file_type: Option<u32>) -> GgmlType {
    GgmlType { dtype, id, candle, file_type }
}

static TYPES: [GgmlType; 15] = [
    row(NumberType::F32, 0, GgmlDType::F32, Some(0)),
    row(NumberType::F16, 1, GgmlDType::F16, Some(1)),
    row(NumberType::Q4_0, 2, GgmlDType::Q4_0, Some(2)),
    row(NumberType::Q4_1, 3, GgmlDType::Q4_1, None),
    row(NumberType::Q5_0, 6, GgmlDType::Q5_0, Some(8)),
    row(NumberType::Q5_1, 7, GgmlDType::Q5_1, None),
    row(NumberType::Q8_0, 8, GgmlDType::Q8_0, Some(7)),
    row(NumberType::Q8_1, 9, GgmlDType::Q8_1, None),
    row(NumberType::Q2K, 10, GgmlDType::Q2K, None),
    row(NumberType::Q3K, 11, GgmlDType::Q3K, None),
    row(NumberType::Q4K, 12, GgmlDType::Q4K, Some(14)),
    row(NumberType::Q5K, 13, GgmlDType::Q5K, Some(16)),
    row(NumberType::Q6K, 14, GgmlDType::Q6K, Some(18)),
    row(NumberType::Q8K, 15, GgmlDType::Q8K, None),
    row(NumberType::BF16, 30, GgmlDType::BF16, Some(32)),
];

impl GgmlType {
    pub(crate) const F32: &'static Self = &TYPES[0];

    /// Looks up a type by its dtype.
    pub(crate) fn of(dtype: NumberType) -> Option<&'static Self> {
        TYPES.iter().find(|row| row.dtype == dtype)
    }

    /// Looks up a type by its id in `ggml.h`.
    pub(crate) fn from_id(id: u32) -> Option<&'static Self> {
        TYPES.iter().find(|row| row.id == id)
    }
}

#[cfg(test)]
mod tests {
    use candle_gpt2_arithmetic::uses;

    use super::*;

    #[test]
    fn types_agree_with_candle_and_with_their_uses() {
        for GgmlType { dtype, candle, file_type, .. } in &TYPES {
            let block = [candle.block_size() as u64, candle.type_size() as u64];
            assert_eq!(dtype.block(), block, "{dtype}");
            assert_eq!(file_type.is_some(), dtype.is_for(uses::GGUF), "{dtype}");
        }
        assert!(NumberType::all(uses::GGUF).all(|dtype| GgmlType::of(dtype).is_some()));
    }
}
