//! Hash of a model's logits; machines with equal hashes compute bit-identical results.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_weights::WeightsError;
use sha2::{Digest, Sha256};

use crate::{EngineError, Reporter};

/// Maximum number of prompt tokens, more than one attention tile; a shorter context uses fewer.
const PROMPT_TOKENS: usize = 300;
/// Number of tokens whose logits are in memory at a time.
const PIECE_TOKENS: usize = 32;

/// Computes the SHA-256 of the logits after each token of a fixed prompt, as hexadecimal digits.
///
/// The prompt has up to 300 tokens. The logits are hashed as little-endian f32, with every NaN as
/// `0x7fc00000`. The KV cache has the type [`Gpt2LMHeadModel::kv_dtype`].
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, fingerprint};
///
/// let loaded = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// assert_eq!(fingerprint(loaded.model(), &Silent)?.len(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If there is no memory for the KV cache, or `reporter` interrupts the job.
pub fn fingerprint(model: &Gpt2LMHeadModel, reporter: &dyn Reporter) -> Result<String, EngineError> {
    let prompt = fixed_prompt(model.config(), PROMPT_TOKENS);
    let mut cache = model.new_cache(1, prompt.len()).map_err(WeightsError::from)?;
    let mut digest = Sha256::new();
    for piece in prompt.chunks(PIECE_TOKENS) {
        if reporter.is_interrupted() {
            return Err(WeightsError::Interrupted.into());
        }
        let mut logits = || -> candle_core::Result<Vec<f32>> {
            let ids = Tensor::from_slice(piece, (1, piece.len()), model.device())?;
            let pass = &mut Pass::inference();
            let logits = model.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), pass)?;
            logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
        };
        for logit in logits().map_err(WeightsError::from)? {
            // NaN payloads depend on the processor.
            let logit = if logit.is_nan() { f32::NAN } else { logit };
            digest.update(logit.to_bits().to_le_bytes());
        }
    }
    Ok(format!("{:x}", digest.finalize()))
}

/// Returns token ids spread over the vocabulary, at most one context.
///
/// The ids depend only on the vocabulary size.
pub(crate) fn fixed_prompt(config: &Gpt2Config, tokens: usize) -> Vec<u32> {
    let step = |index: usize| (index * 7919 + 3) % config.vocab_size;
    (0..tokens.min(config.n_positions)).filter_map(|index| u32::try_from(step(index)).ok()).collect()
}
