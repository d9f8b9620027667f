//! Whether the keys and values of a request fit into the memory that is free.

use candle_core::{DType, Device};
use gpt2::Gpt2Config;
use gpt2_kernels::free_memory;

use crate::EngineError;

/// Checks that the keys and values of `rows` texts of up to `tokens` tokens each fit into the memory that is free, where the
/// system says how much that is.
pub(crate) fn check_room(
    (rows, tokens): (usize, usize),
    config: &Gpt2Config,
    kv_dtype: DType,
    device: &Device,
) -> Result<(), EngineError> {
    match free_memory(device) {
        Some(available) => check_room_in(available, (rows, tokens), config, kv_dtype),
        None => Ok(()),
    }
}

fn check_room_in(
    available: usize,
    (rows, tokens): (usize, usize),
    config: &Gpt2Config,
    kv_dtype: DType,
) -> Result<(), EngineError> {
    let tokens = tokens.min(config.n_positions);
    let of_token = config.kv_bytes_per_token(kv_dtype.size_in_bytes());
    let needed = rows.saturating_mul(tokens).saturating_mul(of_token);
    if needed > available {
        return Err(EngineError::NoRoom { rows, tokens, needed, available });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 · 12 · 768 values of 4 bytes for each token of the 124M model.
    #[test]
    fn texts_that_do_not_fit_are_refused_with_the_numbers() {
        let config = Gpt2Config::gpt2();
        let needed = 4096 * 1024 * 2 * 12 * 768 * 4;
        let check = |available, tokens, dtype| check_room_in(available, (4096, tokens), &config, dtype);
        assert!(check(needed, 5000, DType::F32).is_ok(), "no text is longer than the context");
        let refusal = check(needed - 1, 5000, DType::F32).unwrap_err();
        assert!(refusal.is_usage());
        let told = "4096 texts at once of up to 1024 tokens take 294912.0 MiB for their keys and values";
        assert!(refusal.to_string().starts_with(told), "{refusal}");
        assert!(check(needed / 2, 1024, DType::F16).is_ok() && check(needed / 2, 512, DType::F32).is_ok());
        assert!(check_room_in(0, (usize::MAX, usize::MAX), &config, DType::F32).is_err(), "no overflow");
    }
}
