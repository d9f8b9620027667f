//! Calls of the tokenizers library, which panics on some files that it should reject.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::Tokenizer;

use crate::WeightsError;

/// Runs a call of the library and turns a panic into an error.
///
/// With `panic = "abort"`, in a browser, a panic ends the page's worker instead. `tokenizer_limits` rejects every input that is
/// known to panic.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| "the file is damaged in a way its reader does not expect".to_owned())
}

/// Encodes a text in one call of the library.
pub(crate) fn encode_whole(
    tokenizer: &Tokenizer,
    text: &str,
    special_tokens: bool,
) -> Result<Vec<u32>, WeightsError> {
    let failed = |error| WeightsError::Encode { error };
    let encoding = without_panic(|| tokenizer.encode_fast(text, special_tokens)).map_err(failed)?;
    Ok(encoding.map_err(|error| failed(error.to_string()))?.get_ids().to_vec())
}
