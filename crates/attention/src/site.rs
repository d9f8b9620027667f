//! Hook points: intermediates of a model that can be observed and replaced.
//!
//! Names, definitions and shapes follow TransformerLens 4.3.0: `(B, T, …)`, with the heads before their
//! width. `candle-gpt2-interpret` parses other spellings and lists of names.

use std::fmt::{Display, Formatter};

/// Hook point of a model, where an intermediate can be observed.
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
    /// Index of the block, starting at 0; `None` outside the blocks.
    pub layer: Option<usize>,
    /// Kind of hook point.
    pub kind: SiteKind,
}

/// Declares the kinds with two names each: one for this project and one for TransformerLens.
macro_rules! site_kinds {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $hook:literal;)*) => {
        /// Kinds of hook points, in the order of computation.
        ///
        /// In the shapes, `B` is the batch size, `T` the tokens of the pass, `S` the keys, `H` the heads, `D`
        /// the width of a head, and `C` the hidden size. A [`Site`] is one of these kinds in a block or
        /// outside the blocks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum SiteKind {
            $($(#[$doc])* $kind),*
        }

        impl SiteKind {
            /// All kinds, in the order of computation.
            pub const ALL: [Self; [$(Self::$kind),*].len()] = [$(Self::$kind),*];

            /// Name in this project, usually the TransformerLens name without `hook_`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name),*
                }
            }

            /// Name in TransformerLens, without the prefix `blocks.N.` of kinds inside the blocks.
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
    /// Input of a block, `(B, T, C)`; for the first block, the sum of both embeddings.
    ResidPre: "resid_pre", "hook_resid_pre";
    /// `sqrt(variance + ε)` of the first layer norm, `(B, T, 1)`.
    Ln1Scale: "ln1.scale", "ln1.hook_scale";
    /// Normalized input of the first layer norm, `(B, T, C)`: `(x - mean) / scale`, before weight and bias.
    Ln1Normalized: "ln1.normalized", "ln1.hook_normalized";
    /// Queries, `(B, T, H, D)`.
    Q: "q", "attn.hook_q";
    /// Keys of the new tokens in the pass, `(B, T, H, D)`.
    K: "k", "attn.hook_k";
    /// Values of the new tokens in the pass, `(B, T, H, D)`.
    V: "v", "attn.hook_v";
    /// Scaled products of queries and keys, `(B, H, T, S)`; minus infinity where the mask hides a key.
    AttnScores: "attn_scores", "attn.hook_attn_scores";
    /// Attention weights, `(B, H, T, S)`: the softmax of the scores, before dropout.
    Pattern: "pattern", "attn.hook_pattern";
    /// Attention-weighted sums of the values, `(B, T, H, D)`.
    Z: "z", "attn.hook_z";
    /// Output of each head, `(B, T, H, C)`, without the output projection's bias.
    ///
    /// It is `H` times as large as the residual stream.
    Result: "result", "attn.hook_result";
    /// Output of attention, `(B, T, C)`, before dropout.
    AttnOut: "attn_out", "hook_attn_out";
    /// Residual stream between attention and MLP, `(B, T, C)`.
    ///
    /// If a pass attends to encoder hidden states, this is after cross-attention, which has no hook points of
    /// its own.
    ResidMid: "resid_mid", "hook_resid_mid";
    /// Scale of the second layer norm; see [`SiteKind::Ln1Scale`].
    Ln2Scale: "ln2.scale", "ln2.hook_scale";
    /// Normalized input of the second layer norm; see [`SiteKind::Ln1Normalized`].
    Ln2Normalized: "ln2.normalized", "ln2.hook_normalized";
    /// Input of the activation function, `(B, T, n_inner)`.
    MlpPre: "mlp_pre", "mlp.hook_pre";
    /// Output of the activation function, `(B, T, n_inner)`.
    MlpPost: "mlp_post", "mlp.hook_post";
    /// Output of the MLP, `(B, T, C)`, before dropout.
    MlpOut: "mlp_out", "hook_mlp_out";
    /// Output of a block, `(B, T, C)`.
    ResidPost: "resid_post", "hook_resid_post";
    /// Scale of the final layer norm, after the blocks; see [`SiteKind::Ln1Scale`].
    LnFinalScale: "ln_final.scale", "ln_final.hook_scale";
    /// Normalized input of the final layer norm, after the blocks; see [`SiteKind::Ln1Normalized`].
    LnFinalNormalized: "ln_final.normalized", "ln_final.hook_normalized";
    /// Output of the final layer norm, `(B, T, C)`; after the blocks.
    FinalNorm: "final_norm", "unembed.hook_in";
    /// Logits of the requested tokens, `(B, T, V)`; after the blocks.
    Logits: "logits", "unembed.hook_out";
}

impl SiteKind {
    /// Whether every block has this hook point.
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

    /// Whether the value is the residual stream or a term added to it.
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

    /// Token axis; the query axis of kinds that also have a key axis.
    pub fn token_axis(self) -> usize {
        if matches!(self, Self::AttnScores | Self::Pattern) { 2 } else { 1 }
    }

    /// Head axis, if the kind has one.
    pub fn head_axis(self) -> Option<usize> {
        match self {
            Self::AttnScores | Self::Pattern => Some(1),
            Self::Q | Self::K | Self::V | Self::Z | Self::Result => Some(2),
            _ => None,
        }
    }
}

impl Site {
    /// Creates a hook point outside the blocks.
    pub const fn outside(kind: SiteKind) -> Self {
        Self { layer: None, kind }
    }

    /// Creates a hook point in block `layer`.
    pub const fn in_block(layer: usize, kind: SiteKind) -> Self {
        Self { layer: Some(layer), kind }
    }

    /// Lists all hook points of a model with `n_layer` blocks, in the order of computation.
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

/// Formats the TransformerLens name.
impl Display for Site {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blocks.{layer}.{}", self.kind.hook()),
            None => f.write_str(self.kind.hook()),
        }
    }
}
