//! Direct effect of a feature on the next-token logits, without the blocks in between.
//!
//! The final norm divides by one scalar per token. The scalar is the same for the whole vocabulary and
//! is therefore omitted. A feature with direction `d` has the logits `((d − mean d) ∘ w) · wte` minus their
//! mean over the vocabulary. `w` is the final norm's weight.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::{Dictionary, center};

/// Number of features per batch; their logits take 13 MB at GPT-2's vocabulary size.
const BATCH: usize = 64;
/// Vocabulary axis of logits `(N, V)`.
const VOCABULARY_DIM: usize = 1;

/// Tokens that a feature promotes and suppresses, from [`feature_logits`].
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureLogits {
    /// Tokens with the largest logits, in descending order.
    pub top: Vec<(u32, f32)>,
    /// Tokens with the smallest logits, in ascending order.
    pub bottom: Vec<(u32, f32)>,
}

/// Returns the `count` tokens that each feature promotes most and suppresses most.
///
/// Returns `None` if the dictionary's hook point does not add to the residual stream, for example a norm or
/// queries.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// use candle_gpt2_interpret::{Dictionary, DictionaryConfig, feature_logits};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let eye = Tensor::eye(6, DType::F32, &Device::Cpu)?;
/// let zeros = Tensor::zeros(6, DType::F32, &Device::Cpu)?;
/// let tensors = [("W_enc", &eye), ("b_enc", &zeros), ("W_dec", &eye), ("b_dec", &zeros)];
/// let tensors: BTreeMap<_, _> = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
/// let config = DictionaryConfig::from_json(
///     r#"{"hook_name": "blocks.1.hook_resid_pre", "architecture": "standard", "d_in": 6, "d_sae": 6, "activation_fn": "relu",
///         "apply_b_dec_to_input": true}"#,
/// )?;
/// let dictionary = Dictionary::from_tensors(&tensors, &config)?;
/// let logits = feature_logits(&model, &dictionary, &[3], 2)?.ok_or("does not write to the residual stream")?;
/// assert_eq!(logits[0].top, [(0, 0.0), (1, 0.0)], "with all weights zero, all logits are 0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a feature index is out of range, if the dictionary belongs to another model, or if the output head
/// cannot be allocated in f32.
pub fn feature_logits(
    model: &Gpt2LMHeadModel,
    dictionary: &Dictionary,
    features: &[usize],
    count: usize,
) -> Result<Option<Vec<FeatureLogits>>> {
    let Some(writer) = Writer::of(model, dictionary.explained_site())? else { return Ok(None) };
    let directions: Vec<Tensor> =
        features.iter().map(|feature| dictionary.direction(*feature)).collect::<Result<_>>()?;
    if directions.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let written = writer.written(&Tensor::stack(&directions, 0)?.to_device(model.device())?)?;
    direction_logits(model, &written, count).map(Some)
}

/// Same as [`feature_logits`], for directions `(N, C)` in the residual stream.
///
/// # Errors
/// If the output head cannot be allocated in f32.
pub fn direction_logits(
    model: &Gpt2LMHeadModel,
    directions: &Tensor,
    count: usize,
) -> Result<Vec<FeatureLogits>> {
    let head = model.lm_head().weight().to_tensor()?.to_dtype(DType::F32)?.t()?; // (C, V)
    let weight = model.transformer().ln_f().weight().to_dtype(DType::F32)?;
    let directions = directions.to_dtype(DType::F32)?;
    let mut found = Vec::with_capacity(directions.dim(0)?);
    for start in (0..directions.dim(0)?).step_by(BATCH) {
        let batch = directions.narrow(0, start, BATCH.min(directions.dim(0)? - start))?;
        let written = center(&batch)?.broadcast_mul(&weight)?; // (N, C)
        let logits = written.matmul(&head)?; // (N, V)
        let logits = logits.broadcast_sub(&logits.mean_keepdim(VOCABULARY_DIM)?)?;
        let logits = logits.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        found.extend(logits.iter().map(|logits| FeatureLogits {
            top: first(logits, count, |one, other| other.total_cmp(&one)),
            bottom: first(logits, count, |one, other| one.total_cmp(&other)),
        }));
    }
    Ok(found)
}

/// Path of an activation into the residual stream.
enum Writer {
    /// The activation is part of the residual stream.
    Direct,
    /// A weight `(width, C)` projects the activation into the residual stream.
    Projected(Tensor),
}

impl Writer {
    /// Returns a hook point's path; `None` if it does not write to the residual stream.
    fn of(model: &Gpt2LMHeadModel, site: Site) -> Result<Option<Self>> {
        let block = site.layer.and_then(|layer| model.transformer().blocks().get(layer));
        let weight = match (site.kind, block) {
            (
                SiteKind::Embed
                | SiteKind::PosEmbed
                | SiteKind::ResidPre
                | SiteKind::ResidMid
                | SiteKind::ResidPost
                | SiteKind::AttnOut
                | SiteKind::MlpOut,
                _,
            ) => return Ok(Some(Self::Direct)),
            (SiteKind::Z, Some(block)) => block.attn().out_proj().weight().to_tensor()?,
            (SiteKind::MlpPost, Some(block)) => block.mlp().contract().weight().to_tensor()?,
            _ => return Ok(None),
        };
        Ok(Some(Self::Projected(weight.to_dtype(DType::F32)?.t()?)))
    }

    /// Contribution of rows at the hook point to the residual stream, `(N, C)`.
    fn written(&self, rows: &Tensor) -> Result<Tensor> {
        match self {
            Self::Direct => Ok(rows.clone()),
            Self::Projected(weight) => rows.matmul(weight),
        }
    }
}

/// Sorts tokens by logit in this order and returns the first `count`; ties go to the lower id.
fn first(logits: &[f32], count: usize, order: impl Fn(f32, f32) -> std::cmp::Ordering) -> Vec<(u32, f32)> {
    let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let by = |one: &(u32, f32), other: &(u32, f32)| order(one.1, other.1).then(one.0.cmp(&other.0));
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, by);
        tokens.truncate(count);
    }
    tokens.sort_by(by);
    tokens
}
