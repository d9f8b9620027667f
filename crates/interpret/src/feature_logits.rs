//! What a feature says for the next token by itself: the logits that its direction adds to, without the blocks in between.
//!
//! As in direct logit attribution, the final norm is what it is in a run: one number to divide by, which is left out here since it is
//! the same for all tokens. So a feature with direction `d` gives `((d − mean d) ∘ w) · wte` less its mean over the vocabulary, where `w` is
//! the final norm's weight.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::{Dictionary, centred};

/// Features whose logits are computed at once: at GPT-2's vocabulary 13 MB of them.
const BATCH: usize = 64;
/// The axis of the vocabulary in logits `(N, V)`.
const VOCABULARY_DIM: usize = 1;

/// The tokens that a feature makes more probable and less probable. [`feature_logits`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureLogits {
    /// Tokens with the largest logits, the largest first.
    pub top: Vec<(u32, f32)>,
    /// Tokens with the smallest logits, the smallest first.
    pub bottom: Vec<(u32, f32)>,
}

/// The `count` tokens that each of some features speaks most for and most against; `None` for a dictionary of a place that adds nothing
/// to the residual stream, such as a norm or queries.
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
/// let logits = feature_logits(&model, &dictionary, &[3], 2)?.ok_or("it adds to the residual stream")?;
/// assert_eq!(logits[0].top, [(0, 0.0), (1, 0.0)], "a model of zeros expects all alike");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the dictionary has no such feature, is of another model, or there is no memory for the output head in f32.
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

/// The `count` tokens that directions in the residual stream `(N, C)` speak most for and most against, as [`feature_logits`] of features.
///
/// # Errors
/// If there is no memory for the output head in f32.
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
        let written = centred(&batch)?.broadcast_mul(&weight)?; // (N, C)
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

/// How values at a place get into the residual stream.
enum Writer {
    /// They are part of it.
    Directly,
    /// By a weight `(width, C)`.
    By(Tensor),
}

impl Writer {
    /// `None` for a place whose values do not.
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
            ) => return Ok(Some(Self::Directly)),
            (SiteKind::Z, Some(block)) => block.attn().out_proj().weight().to_tensor()?,
            (SiteKind::MlpPost, Some(block)) => block.mlp().contract().weight().to_tensor()?,
            _ => return Ok(None),
        };
        Ok(Some(Self::By(weight.to_dtype(DType::F32)?.t()?)))
    }

    /// What rows of the place add to the residual stream, `(N, C)`.
    fn written(&self, rows: &Tensor) -> Result<Tensor> {
        match self {
            Self::Directly => Ok(rows.clone()),
            Self::By(weight) => rows.matmul(weight),
        }
    }
}

/// The first tokens in this order of their logits; of equal ones the first in the vocabulary.
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
