//! Places in a model where an intermediate can be seen and replaced, by the names that TransformerLens gave them.
//!
//! Shapes are TransformerLens' as well: `(B, T, …)`, heads before their width. Source of names and definitions: TransformerLens 4.3.0.
//! What else a place may be called, and lists of names, `candle-gpt2-interpret` reads.

use std::fmt::{Display, Formatter};

/// A place in a model where an intermediate can be seen.
///
/// ```
/// use candle_gpt2_attention::{Site, SiteKind};
///
/// assert_eq!(Site::in_block(3, SiteKind::Z).to_string(), "blocks.3.attn.hook_z");
/// assert_eq!(Site::all(12).len(), 6 + 12 * 18, "six of them outside the blocks");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// Index of the block, counted from 0; `None` outside the blocks.
    pub layer: Option<usize>,
    /// What is seen there.
    pub kind: SiteKind,
}

/// What can be seen, in the order of computation. `B` batch, `T` tokens of the pass, `S` keys, `H` heads, `D` width of a head, `C`
/// width of the model. A [`Site`] is one of these in a block or outside of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SiteKind {
    /// Token embeddings, `(B, T, C)`; before the blocks.
    Embed,
    /// Position embeddings, `(B, T, C)`; before the blocks.
    PosEmbed,
    /// Input of a block, `(B, T, C)`; of the first one the sum of both embeddings.
    ResidPre,
    /// `sqrt(variance + ε)` of the first layer norm, `(B, T, 1)`.
    Ln1Scale,
    /// Its input less the mean, over the scale, `(B, T, C)`; before weight and bias.
    Ln1Normalized,
    /// Queries, `(B, T, H, D)`.
    Q,
    /// Keys of the pass' own tokens, `(B, T, H, D)`.
    K,
    /// Values of the pass' own tokens, `(B, T, H, D)`.
    V,
    /// Scaled products of queries and keys, `(B, H, T, S)`; minus infinity where the mask hides a key.
    AttnScores,
    /// Attention weights, `(B, H, T, S)`: the softmax of the scores, before dropout.
    Pattern,
    /// Sums of values by attention weights, `(B, T, H, D)`.
    Z,
    /// What each head adds, `(B, T, H, C)`, without the output projection's bias. It is `H` times as large as the rest.
    Result,
    /// What attention adds, `(B, T, C)`, before dropout.
    AttnOut,
    /// Between attention and MLP, `(B, T, C)`; after cross-attention, where a pass attends to an encoder's states. Cross-attention has
    /// no places of its own.
    ResidMid,
    /// As [`SiteKind::Ln1Scale`], of the second layer norm.
    Ln2Scale,
    /// As [`SiteKind::Ln1Normalized`], of the second layer norm.
    Ln2Normalized,
    /// Input of the activation function, `(B, T, n_inner)`.
    MlpPre,
    /// Its output, `(B, T, n_inner)`.
    MlpPost,
    /// What the MLP adds, `(B, T, C)`, before dropout.
    MlpOut,
    /// Output of a block, `(B, T, C)`.
    ResidPost,
    /// As [`SiteKind::Ln1Scale`], of the final layer norm; after the blocks.
    LnFinalScale,
    /// As [`SiteKind::Ln1Normalized`], of the final layer norm; after the blocks.
    LnFinalNormalized,
    /// Output of the final layer norm, `(B, T, C)`; after the blocks.
    FinalNorm,
    /// Logits of the tokens that they are wanted of, `(B, T, V)`; after the blocks.
    Logits,
}

impl SiteKind {
    /// All kinds, in the order of computation.
    pub const ALL: [Self; 24] = [
        Self::Embed,
        Self::PosEmbed,
        Self::ResidPre,
        Self::Ln1Scale,
        Self::Ln1Normalized,
        Self::Q,
        Self::K,
        Self::V,
        Self::AttnScores,
        Self::Pattern,
        Self::Z,
        Self::Result,
        Self::AttnOut,
        Self::ResidMid,
        Self::Ln2Scale,
        Self::Ln2Normalized,
        Self::MlpPre,
        Self::MlpPost,
        Self::MlpOut,
        Self::ResidPost,
        Self::LnFinalScale,
        Self::LnFinalNormalized,
        Self::FinalNorm,
        Self::Logits,
    ];

    /// Our name, which is TransformerLens' without `hook_`.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// TransformerLens' name, below `blocks.N.` where the kind is inside the blocks.
    pub fn hook(self) -> &'static str {
        self.names().1
    }

    /// Whether every block has one.
    pub fn is_in_blocks(self) -> bool {
        !matches!(
            self,
            Self::Embed
                | Self::PosEmbed
                | Self::LnFinalScale
                | Self::LnFinalNormalized
                | Self::FinalNorm
                | Self::Logits
        )
    }

    /// Whether it is the residual stream or what is added to it.
    pub fn is_residual(self) -> bool {
        matches!(
            self,
            Self::Embed
                | Self::PosEmbed
                | Self::ResidPre
                | Self::AttnOut
                | Self::ResidMid
                | Self::MlpOut
                | Self::ResidPost
        )
    }

    /// The axis of the tokens of the pass: of queries, where there are keys too.
    pub fn token_axis(self) -> usize {
        if matches!(self, Self::AttnScores | Self::Pattern) { 2 } else { 1 }
    }

    /// The axis of the heads, where there is one.
    pub fn head_axis(self) -> Option<usize> {
        match self {
            Self::AttnScores | Self::Pattern => Some(1),
            Self::Q | Self::K | Self::V | Self::Z | Self::Result => Some(2),
            _ => None,
        }
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Embed => ("embed", "hook_embed"),
            Self::PosEmbed => ("pos_embed", "hook_pos_embed"),
            Self::ResidPre => ("resid_pre", "hook_resid_pre"),
            Self::Ln1Scale => ("ln1.scale", "ln1.hook_scale"),
            Self::Ln1Normalized => ("ln1.normalized", "ln1.hook_normalized"),
            Self::Q => ("q", "attn.hook_q"),
            Self::K => ("k", "attn.hook_k"),
            Self::V => ("v", "attn.hook_v"),
            Self::AttnScores => ("attn_scores", "attn.hook_attn_scores"),
            Self::Pattern => ("pattern", "attn.hook_pattern"),
            Self::Z => ("z", "attn.hook_z"),
            Self::Result => ("result", "attn.hook_result"),
            Self::AttnOut => ("attn_out", "hook_attn_out"),
            Self::ResidMid => ("resid_mid", "hook_resid_mid"),
            Self::Ln2Scale => ("ln2.scale", "ln2.hook_scale"),
            Self::Ln2Normalized => ("ln2.normalized", "ln2.hook_normalized"),
            Self::MlpPre => ("mlp_pre", "mlp.hook_pre"),
            Self::MlpPost => ("mlp_post", "mlp.hook_post"),
            Self::MlpOut => ("mlp_out", "hook_mlp_out"),
            Self::ResidPost => ("resid_post", "hook_resid_post"),
            Self::LnFinalScale => ("ln_final.scale", "ln_final.hook_scale"),
            Self::LnFinalNormalized => ("ln_final.normalized", "ln_final.hook_normalized"),
            Self::FinalNorm => ("final_norm", "unembed.hook_in"),
            Self::Logits => ("logits", "unembed.hook_out"),
        }
    }
}

impl Site {
    /// A place outside the blocks.
    pub const fn outside(kind: SiteKind) -> Self {
        Self { layer: None, kind }
    }

    /// A place in a block.
    pub const fn in_block(layer: usize, kind: SiteKind) -> Self {
        Self { layer: Some(layer), kind }
    }

    /// Every place of a model of so many blocks, in the order of computation.
    pub fn all(n_layer: usize) -> Vec<Self> {
        let inside = || SiteKind::ALL.into_iter().filter(|kind| kind.is_in_blocks());
        let outside = |is_after: bool| {
            let kinds = SiteKind::ALL.into_iter().filter(|kind| !kind.is_in_blocks());
            kinds.filter(move |kind| (*kind > SiteKind::ResidPost) == is_after).map(Self::outside)
        };
        let blocks = (0..n_layer).flat_map(|layer| inside().map(move |kind| Self::in_block(layer, kind)));
        outside(false).chain(blocks).chain(outside(true)).collect()
    }
}

/// TransformerLens' name.
impl Display for Site {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blocks.{layer}.{}", self.kind.hook()),
            None => f.write_str(self.kind.hook()),
        }
    }
}
