//! Rounding of values to file dtypes, and checks for values that a dtype cannot represent.

use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use crate::{WeightsError, WrittenDType};

/// Returns the safetensors dtype for a requested dtype; the error names `target`.
pub(crate) fn safetensors_dtype(dtype: WrittenDType, target: &Path) -> Result<Dtype, WeightsError> {
    match dtype {
        WrittenDType::F32 => Ok(Dtype::F32),
        WrittenDType::F16 => Ok(Dtype::F16),
        WrittenDType::BF16 => Ok(Dtype::BF16),
        _ => Err(WeightsError::Unwritable {
            path: target.to_owned(),
            what: format!(
                "safetensors does not support {dtype}; use f32, f16 or bf16, or write a .gguf file"
            ),
        }),
    }
}

/// Appends values in a floating-point dtype, each rounded to nearest.
pub(crate) fn append(bytes: &mut Vec<u8>, values: &[f32], dtype: Dtype) {
    match dtype {
        Dtype::F16 => bytes.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
        Dtype::BF16 => bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
        _ => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
    }
}

/// Rejects finite values that f16 would turn into infinities.
pub(crate) fn check_range(name: &str, values: &[f32]) -> Result<(), String> {
    let leaves_range = |value: &&f32| value.is_finite() && f16::from_f32(**value).is_infinite();
    match values.iter().find(leaves_range) {
        Some(value) => Err(format!("`{name}` contains {value}, outside the range of f16; use bf16 or f32")),
        None => Ok(()),
    }
}

/// Rejects NaN and infinite values, because integer blocks would silently drop them.
pub(crate) fn check_finite(name: &str, values: &[f32]) -> Result<(), String> {
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(format!(
            "`{name}` contains {value}, which integer blocks cannot represent; repair the weights, or use f32"
        )),
        None => Ok(()),
    }
}
