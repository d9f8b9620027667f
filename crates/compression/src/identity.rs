//! Identity of a file's model: a digest of the model and a canary computed from its logits.
//!
//! The digest is the same on every machine that holds the model in the same dtypes. The canary is a checksum
//! of logits, so it also changes with the arithmetic. Together they distinguish a wrong model from a machine
//! with different arithmetic before anything is restored.
//!
//! Neither protects against forged files; the checksums of the restored bytes decide.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, QkvProjection};
use candle_gpt2_kernels::{LayerNorm, Linear};
use crc32fast::Hasher;
use sha2::{Digest, Sha256};

use crate::CompressionError;
use crate::bytes::ByteTokens;
use crate::windows::{Windows, for_each_next};

/// Number of digest bytes stored in a file.
pub(crate) const DIGEST_BYTES: usize = 8;
/// Maximum number of tokens in the canary's prompt; shorter windows use fewer.
const CANARY_TOKENS: usize = 16;
/// Number of matrix rows to expand together.
const ROWS: usize = 1024;

/// Computes the digest of the model's sizes, tokens and weights.
pub(crate) fn digest(model: &Gpt2LMHeadModel, tokens: &ByteTokens) -> Result<[u8; DIGEST_BYTES]> {
    let config = model.config();
    let mut digest = Digester(Sha256::new());
    for size in [config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head] {
        digest.number(size as u64);
    }
    digest.number(config.inner_width() as u64);
    digest.number(config.layer_norm_epsilon.to_bits());
    // Compressed files depend on these names, so they must never change.
    digest.0.update(format!("{:?}", config.activation_function));
    for layer in 0..config.n_layer {
        digest.number(config.attention_scale(layer).to_bits());
    }
    digest.number(config.start_token().map_or(u64::MAX, u64::from));
    for bytes in tokens.all() {
        digest.number(bytes.len() as u64);
        digest.0.update(bytes);
    }
    if !config.tie_word_embeddings {
        digest.layer(model.transformer().wte())?;
    }
    digest.tensor(model.transformer().wpe())?;
    for block in model.transformer().blocks() {
        digest.norm(block.ln_1())?;
        match block.attn().projection() {
            QkvProjection::Fused(layer) => digest.layer(layer)?,
            QkvProjection::FusedMemory { .. } | QkvProjection::Separate { .. } => {}
        }
        digest.layer(block.attn().out_proj())?;
        digest.norm(block.ln_2())?;
        digest.layer(block.mlp().expand())?;
        digest.layer(block.mlp().contract())?;
    }
    digest.norm(model.transformer().ln_f())?;
    digest.layer(model.lm_head())?;
    let mut prefix = [0; DIGEST_BYTES];
    prefix.iter_mut().zip(digest.0.finalize()).for_each(|(to, byte)| *to = byte);
    Ok(prefix)
}

/// Computes a checksum over the bits of the logits after each token of a fixed prompt.
pub(crate) fn canary(
    model: &Gpt2LMHeadModel,
    windows: Windows,
) -> std::result::Result<u32, CompressionError> {
    let vocab_size = u32::try_from(model.config().vocab_size).unwrap_or(u32::MAX);
    let tokens = u32::try_from(CANARY_TOKENS.min(windows.context)).unwrap_or(u32::MAX);
    // Token ids spread evenly over the vocabulary.
    let ids: Vec<u32> = (0..tokens).map(|index| vocab_size / tokens * index).collect();
    let of_rows = for_each_next(
        model,
        windows,
        &ids,
        |_| Ok(()),
        |_, logits| {
            let mut hasher = Hasher::new();
            logits.iter().for_each(|logit| hasher.update(&logit.to_le_bytes()));
            Ok(hasher.finalize())
        },
    )?;
    let mut hasher = Hasher::new();
    of_rows.iter().for_each(|row| hasher.update(&row.to_le_bytes()));
    Ok(hasher.finalize())
}

struct Digester(Sha256);

impl Digester {
    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn norm(&mut self, norm: &LayerNorm) -> Result<()> {
        self.tensor(norm.weight())?;
        norm.bias().map_or(Ok(()), |bias| self.tensor(bias))
    }

    fn layer(&mut self, layer: &Linear) -> Result<()> {
        let mut first = 0;
        while first < layer.out_features() {
            let end = layer.out_features().min(first + ROWS);
            let rows = (first..end).map(|row| u32::try_from(row).map_err(candle_core::Error::wrap));
            let rows = Tensor::new(rows.collect::<Result<Vec<_>>>()?, &Device::Cpu)?;
            self.tensor(&layer.embedding(&rows)?)?;
            first = end;
        }
        layer.bias().map_or(Ok(()), |bias| self.tensor(bias))
    }

    /// Adds a checksum of the values to the digest; hashing all values would be ten times slower.
    fn tensor(&mut self, tensor: &Tensor) -> Result<()> {
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let mut hasher = Hasher::new();
        let mut bytes = Vec::with_capacity(4 * values.len());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        hasher.update(&bytes);
        self.number(hasher.finalize().into());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_gpt2::Activation;

    /// Files from earlier versions contain digests that depend on these names.
    #[test]
    fn activation_names_are_stable() {
        let names = Activation::NAMES.map(|(_, activation)| format!("{activation:?}"));
        let expected = ["GeluTanh", "GeluTanh", "Gelu", "Relu", "Relu2", "Silu", "Silu", "Tanh", "QuickGelu"];
        assert_eq!(names, expected);
    }
}
