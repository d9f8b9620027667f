//! Storage types of KV caches, and the mapping from number types to candle's dtypes.

use candle_core::DType;
use candle_gpt2_arithmetic::{KvSizes, NumberType, number_type_for, uses};

/// Number types and the corresponding tensor dtypes.
const TENSOR_DTYPES: [(NumberType, DType); 4] = [
    (NumberType::F32, DType::F32),
    (NumberType::F16, DType::F16),
    (NumberType::BF16, DType::BF16),
    (NumberType::F64, DType::F64),
];

/// Returns candle's dtype for this number type, if there is one.
///
/// ```
/// use candle_core::DType;
/// use candle_gpt2_arithmetic::NumberType;
/// use candle_gpt2_kernels::tensor_dtype;
///
/// assert_eq!(tensor_dtype(NumberType::BF16), Some(DType::BF16));
/// assert_eq!(tensor_dtype(NumberType::Q8), None);
/// ```
pub fn tensor_dtype(dtype: NumberType) -> Option<DType> {
    TENSOR_DTYPES.iter().find(|(known, _)| *known == dtype).map(|(_, tensor)| *tensor)
}

number_type_for! {
    /// Storage type of the keys and values in a KV cache.
    ///
    /// Users choose f32, f16 or (on the CPU only) q8. Caches of tensors can also have any other
    /// floating-point dtype of candle.
    ///
    /// ```
    /// use candle_core::DType;
    /// use candle_gpt2_kernels::KvDType;
    ///
    /// assert_eq!("f16".parse(), Ok(KvDType::F16));
    /// assert_eq!(KvDType::from(DType::F32), KvDType::F32);
    /// assert_eq!(KvDType::F32.bytes_per_token(12, 64), 2 * 12 * 64 * 4);
    /// ```
    KvDType, uses::KV_CACHE, [F32, F16, Q8]
}

impl KvDType {
    /// Size in bytes of one token's keys and values in one layer, without padding heads to 16 values.
    pub fn bytes_per_token(self, num_heads: usize, head_dim: usize) -> usize {
        KvSizes { heads: num_heads, key_dim: head_dim, value_dim: head_dim }.bytes_per_token(self.0)
    }
}

/// Maps dtypes that are not floating point to f32.
impl From<DType> for KvDType {
    fn from(dtype: DType) -> Self {
        let known = TENSOR_DTYPES.iter().find(|(_, tensor)| *tensor == dtype);
        Self(known.map_or(NumberType::F32, |(known, _)| *known))
    }
}
