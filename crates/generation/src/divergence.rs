//! Divergence of a model's predictions from a base model's, token by token.
//!
//! It measures the cost of a smaller weight dtype.
//!
//! The divergence is `KL = Σ p_i (ln p_i - ln q_i)` over the vocabulary, where `p` is the base model's
//! distribution and `q` the other model's. Logits are used unchanged, and sums are in f64. Nothing is
//! rounded or left out, so a model has a divergence of exactly 0 from itself.

use candle_core::Tensor;
use candle_gpt2::{Gpt2LMHeadModel, Pass};
use candle_gpt2_arithmetic::map_items;

use crate::GenerationError;
use crate::config::check_ids;
use crate::logprobs::{Expected, pieces, with_logits};
use crate::sequences::check_window;

/// Predictions of two models for a token; [`diverge`] returns one for each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// Kullback-Leibler divergence of the other model's prediction from the base model's, in nats.
    pub kl: f64,
    /// Natural logarithm of the token's probability under the base model.
    pub base_logprob: f64,
    /// Natural logarithm of the token's probability under the other model.
    pub logprob: f64,
    /// Whether both models consider the same token most probable; ties go to the first token.
    pub same_top: bool,
}

/// Compares the predictions of two models for each of the tokens `ids[first..]`.
///
/// Both models read the tokens through a KV cache, so its dtype affects the result as it affects
/// generation.
///
/// ```
/// use candle_gpt2_generation::diverge;
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let divergences = diverge(&model, &model, &[1, 2, 3, 4, 5], 2)?;
/// assert_eq!(divergences.len(), 3);
/// assert!(divergences.iter().all(|one| one.kl == 0.0 && one.same_top));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if the vocabularies have different sizes, or if there is no token to predict or
/// no token before it. Also returns an error if the tokens that are read (all but the last) exceed a
/// model's context. Finally, returns an error if an id is outside the vocabulary or a model's logits are
/// not finite.
pub fn diverge(
    base: &Gpt2LMHeadModel,
    other: &Gpt2LMHeadModel,
    ids: &[u32],
    first: usize,
) -> Result<Vec<Divergence>, GenerationError> {
    check(base, other, ids, first)?;
    let read = ids.len() - 1;
    let (base_hidden, hidden) = (hidden_states(base, &ids[..read])?, hidden_states(other, &ids[..read])?);
    let mut found = Vec::with_capacity(ids.len() - first);
    // Row r of the hidden states predicts token r + 1.
    for rows in pieces(first - 1..read) {
        let predicted = &ids[rows.start + 1..];
        let of_piece = with_logits(base, &base_hidden, rows.clone(), |base| {
            with_logits(other, &hidden, rows, |other| {
                Ok(map_items(base.zip(other).zip(predicted), |((base, other), id)| of_row(base, other, *id)))
            })
        })?;
        for divergence in of_piece {
            found.push(divergence?);
        }
    }
    Ok(found)
}

fn check(
    base: &Gpt2LMHeadModel,
    other: &Gpt2LMHeadModel,
    ids: &[u32],
    first: usize,
) -> Result<(), GenerationError> {
    let (base, other) = (base.config(), other.config());
    if base.vocab_size != other.vocab_size {
        let (vocab_size, found) = (base.vocab_size, other.vocab_size);
        return Err(GenerationError::OtherVocabulary { vocab_size, found });
    }
    check_window(ids, first, base.n_positions.min(other.n_positions))?;
    check_ids(ids, base)
}

/// Returns the hidden states after the final norm, `(1, T, C)`.
fn hidden_states(model: &Gpt2LMHeadModel, ids: &[u32]) -> Result<Tensor, GenerationError> {
    let mut cache = model.new_cache(1, ids.len())?;
    let ids = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    Ok(model.transformer().forward_with(&ids, Some(&mut cache), &mut Pass::inference())?)
}

/// Computes the divergence at one position from the logits of both models.
fn of_row(base: &[f32], other: &[f32], id: u32) -> Result<Divergence, GenerationError> {
    let (base, other) = (Expected::of(base, 0)?, Expected::of(other, 0)?);
    Ok(Divergence {
        kl: base.relative_entropy(&other),
        base_logprob: base.logprob(id),
        logprob: other.logprob(id),
        same_top: base.most_probable() == other.most_probable(),
    })
}
