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
#[doc(alias("hook name", "get_act_name"))]
pub struct Site {
    /// Index of the block, counted from 0; `None` outside the blocks.
    pub layer: Option<usize>,
    /// What is seen there.
    pub kind: SiteKind,
}

/// Declares the kinds, each with its two names: ours, and TransformerLens'.
macro_rules! site_kinds {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $hook:literal;)*) => {
        /// What can be seen, in the order of computation. `B` batch, `T` tokens of the pass, `S` keys, `H` heads, `D` width of a head, `C`
        /// width of the model. A [`Site`] is one of these in a block or outside of the blocks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum SiteKind {
            $($(#[$doc])* $kind),*
        }

        impl SiteKind {
            /// All kinds, in the order of computation.
            pub const ALL: [Self; [$(Self::$kind),*].len()] = [$(Self::$kind),*];

            /// Our name, which is TransformerLens' without `hook_`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name),*
                }
            }

            /// TransformerLens' name, below `blocks.N.` if the kind is inside the blocks.
            pub fn hook(self) -> &'static str {
                match self {
                    $(Self::$kind => $hook),*
                }
            }
        }
    };
}

site_kinds! {
    /// Token embeddings, `(B, T, C)`; before the blocks.
    Embed: "embed", "hook_embed";
    /// Position embeddings, `(B, T, C)`; before the blocks.
    PosEmbed: "pos_embed", "hook_pos_embed";
    /// Input of a block, `(B, T, C)`; of the first one the sum of both embeddings.
    ResidPre: "resid_pre", "hook_resid_pre";
    /// `sqrt(variance + ε)` of the first layer norm, `(B, T, 1)`.
    Ln1Scale: "ln1.scale", "ln1.hook_scale";
    /// Its input less the mean, over the scale, `(B, T, C)`; before weight and bias.
    Ln1Normalized: "ln1.normalized", "ln1.hook_normalized";
    /// Queries, `(B, T, H, D)`.
    Q: "q", "attn.hook_q";
    /// Keys of the pass' own tokens, `(B, T, H, D)`.
    K: "k", "attn.hook_k";
    /// Values of the pass' own tokens, `(B, T, H, D)`.
    V: "v", "attn.hook_v";
    /// Scaled products of queries and keys, `(B, H, T, S)`; minus infinity where the mask hides a key.
    AttnScores: "attn_scores", "attn.hook_attn_scores";
    /// Attention weights, `(B, H, T, S)`: the softmax of the scores, before dropout.
    Pattern: "pattern", "attn.hook_pattern";
    /// Sums of values by attention weights, `(B, T, H, D)`.
    Z: "z", "attn.hook_z";
    /// What each head adds, `(B, T, H, C)`, without the output projection's bias. It is `H` times as large as the rest.
    Result: "result", "attn.hook_result";
    /// What attention adds, `(B, T, C)`, before dropout.
    AttnOut: "attn_out", "hook_attn_out";
    /// Between attention and MLP, `(B, T, C)`; after cross-attention, if a pass attends to encoder hidden states. Cross-attention has
    /// no places of its own.
    ResidMid: "resid_mid", "hook_resid_mid";
    /// As [`SiteKind::Ln1Scale`], of the second layer norm.
    Ln2Scale: "ln2.scale", "ln2.hook_scale";
    /// As [`SiteKind::Ln1Normalized`], of the second layer norm.
    Ln2Normalized: "ln2.normalized", "ln2.hook_normalized";
    /// Input of the activation function, `(B, T, n_inner)`.
    MlpPre: "mlp_pre", "mlp.hook_pre";
    /// Its output, `(B, T, n_inner)`.
    MlpPost: "mlp_post", "mlp.hook_post";
    /// What the MLP adds, `(B, T, C)`, before dropout.
    MlpOut: "mlp_out", "hook_mlp_out";
    /// Output of a block, `(B, T, C)`.
    ResidPost: "resid_post", "hook_resid_post";
    /// As [`SiteKind::Ln1Scale`], of the final layer norm; after the blocks.
    LnFinalScale: "ln_final.scale", "ln_final.hook_scale";
    /// As [`SiteKind::Ln1Normalized`], of the final layer norm; after the blocks.
    LnFinalNormalized: "ln_final.normalized", "ln_final.hook_normalized";
    /// Output of the final layer norm, `(B, T, C)`; after the blocks.
    FinalNorm: "final_norm", "unembed.hook_in";
    /// Logits of the tokens that they are wanted of, `(B, T, V)`; after the blocks.
    Logits: "logits", "unembed.hook_out";
}

impl SiteKind {
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

    /// The axis of the tokens of the pass: of queries, if there are keys too.
    pub fn token_axis(self) -> usize {
        if matches!(self, Self::AttnScores | Self::Pattern) { 2 } else { 1 }
    }

    /// The axis of the heads, if there is one.
    pub fn head_axis(self) -> Option<usize> {
        match self {
            Self::AttnScores | Self::Pattern => Some(1),
            Self::Q | Self::K | Self::V | Self::Z | Self::Result => Some(2),
            _ => None,
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
