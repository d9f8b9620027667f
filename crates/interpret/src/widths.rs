//! Values of hook points as rows, one for each token: what dictionaries are trained on, and what files of activations hold.

use candle_core::{D, Result, Tensor};
use candle_gpt2::{Gpt2Config, Site, SiteKind};

/// Width of the vector that a place has for each token, heads side by side; `None` of places that have none: scores, patterns, results
/// of heads, scales of norms, logits.
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

/// The shape of what is at a place for one token, whose rows see so many keys: `[C]` of the residual stream, `[H, D]` of queries,
/// `[H, S]` of scores and patterns.
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

/// What a place has for each token, with heads side by side.
///
/// # Shapes
/// `value` `(B, T, …)` of a place that has a [width](site_width); returns `(B · T, width)`.
///
/// # Errors
/// When the value has another number of axes.
pub fn token_rows(site: Site, value: &Tensor) -> Result<Tensor> {
    let value = match site.kind.head_axis() {
        Some(_) => value.flatten_from(D::Minus2)?,
        None => value.clone(),
    };
    let (batch, tokens, width) = value.dims3()?;
    value.reshape((batch * tokens, width))
}
