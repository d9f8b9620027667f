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
        SiteKind::MlpPre | SiteKind::MlpPost => Some(config.inner_width()),
        SiteKind::Q | SiteKind::K | SiteKind::V | SiteKind::Z => Some(config.n_head * config.head_dim()),
        SiteKind::AttnScores
        | SiteKind::Pattern
        | SiteKind::Result
        | SiteKind::Ln1Scale
        | SiteKind::Ln2Scale
        | SiteKind::LnFinalScale
        | SiteKind::Logits => None,
        _ => Some(config.n_embd),
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
