//! Activations as one row per token, the form of dictionary inputs and activation files.

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2::{Gpt2Config, Site, SiteKind};

/// Returns the width of a hook point's per-token vector, with heads concatenated.
///
/// Returns `None` for hook points without one: scores, patterns, head results, norm scales, and logits.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_interpret::{named_site, site_width};
///
/// let config = Gpt2Config::gpt2();
/// assert_eq!(site_width(named_site("mlp_post3")?, &config), Some(3072));
/// assert_eq!(site_width(named_site("z3")?, &config), Some(768), "12 heads of 64");
/// assert_eq!(site_width(named_site("pattern3")?, &config), None);
/// # Ok::<(), candle_gpt2_interpret::SiteError>(())
/// ```
pub fn site_width(site: Site, config: &Gpt2Config) -> Option<usize> {
    match site.kind {
        SiteKind::AttnScores
        | SiteKind::Pattern
        | SiteKind::Result
        | SiteKind::Ln1Scale
        | SiteKind::Ln2Scale
        | SiteKind::LnFinalScale
        | SiteKind::Logits => None,
        kind => Some(token_shape(config, kind, 0).iter().product()),
    }
}

/// Returns the shape of one token's activation at a hook point, with `keys` visible keys.
///
/// Examples are `[C]` for the residual stream, `[H, D]` for queries, and `[H, S]` for scores and patterns.
///
/// ```
/// use candle_gpt2::{Gpt2Config, SiteKind};
/// use candle_gpt2_interpret::token_shape;
///
/// let gpt2 = Gpt2Config::gpt2();
/// assert_eq!(token_shape(&gpt2, SiteKind::MlpPost, 5), [3072]);
/// assert_eq!(token_shape(&gpt2, SiteKind::Pattern, 5), [12, 5]);
/// ```
pub fn token_shape(model: &Gpt2Config, kind: SiteKind, keys: usize) -> Vec<usize> {
    let (width, heads) = (model.n_embd, model.n_head);
    match kind {
        SiteKind::Ln1Scale | SiteKind::Ln2Scale | SiteKind::LnFinalScale => vec![1],
        SiteKind::Q | SiteKind::K | SiteKind::V | SiteKind::Z => vec![heads, model.head_dim()],
        SiteKind::AttnScores | SiteKind::Pattern => vec![heads, keys],
        SiteKind::Result => vec![heads, width],
        SiteKind::MlpPre | SiteKind::MlpPost => vec![model.inner_width()],
        SiteKind::Logits => vec![model.vocab_size],
        SiteKind::Embed
        | SiteKind::PosEmbed
        | SiteKind::ResidPre
        | SiteKind::Ln1Normalized
        | SiteKind::AttnOut
        | SiteKind::ResidMid
        | SiteKind::Ln2Normalized
        | SiteKind::MlpOut
        | SiteKind::ResidPost
        | SiteKind::LnFinalNormalized
        | SiteKind::FinalNorm => vec![width],
    }
}

/// Reshapes an activation to one row per token, with heads concatenated.
///
/// # Shapes
/// `value` is `(B, T, …)` of a hook point that has a [width](site_width); returns `(B · T, width)`.
///
/// # Errors
/// If `value` has the wrong number of axes.
pub fn token_rows(site: Site, value: &Tensor) -> Result<Tensor> {
    let value = match site.kind.head_axis() {
        Some(_) => value.flatten_from(D::Minus2)?,
        None => value.clone(),
    };
    let (batch, tokens, width) = value.dims3()?;
    value.reshape((batch * tokens, width))
}

/// Returns the dtype for sums over activations of `dtype`: f64 for f64, f32 for all others.
pub(crate) fn sum_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
