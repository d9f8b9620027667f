//! Places in a model where an intermediate can be seen and replaced, by the names that TransformerLens gave them.
//!
//! A place is written as TransformerLens' hook (`blocks.3.attn.hook_z`; the names of its version 4, `blocks.3.attn.o.hook_in`, too),
//! as its shorthand (`z3`), or with the layer in front (`3.z`). Shapes are TransformerLens' as well: `(B, T, …)`, heads before their
//! width. Source of names and definitions: TransformerLens 4.3.0.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// A place in a model where an intermediate can be seen.
///
/// ```
/// use candle_gpt2_attention::{Site, SiteKind};
///
/// let site: Site = "blocks.3.attn.hook_z".parse()?;
/// assert_eq!(site, Site::in_block(3, SiteKind::Z));
/// assert_eq!(Site::matching("pattern", 12)?.len(), 12, "those of all blocks");
/// # Ok::<(), candle_gpt2_attention::SiteError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// Index of the block, counted from 0; `None` outside the blocks.
    pub layer: Option<usize>,
    /// What is seen there.
    pub kind: SiteKind,
}

/// The longest name or pattern that is looked at: those of all places are shorter by far.
const LONGEST_NAME: usize = 100;

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

/// The names of a kind.
struct Names {
    /// Ours.
    own: &'static str,
    /// TransformerLens', below `blocks.N.` where the kind is inside the blocks.
    hook: &'static str,
    /// Others of TransformerLens for the same place.
    others: &'static [&'static str],
    /// What TransformerLens takes with the layer after it.
    shorthand: &'static [&'static str],
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
        self.names().own
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

    fn names(self) -> Names {
        let names = |own, hook, others, shorthand| Names { own, hook, others, shorthand };
        match self {
            Self::Embed => names("embed", "hook_embed", &["embed.hook_out"], &[]),
            Self::PosEmbed => names("pos_embed", "hook_pos_embed", &["pos_embed.hook_out"], &[]),
            Self::ResidPre => names("resid_pre", "hook_resid_pre", &["hook_in"], &["resid_pre"]),
            Self::Ln1Scale => names("ln1.scale", "ln1.hook_scale", &[], &[]),
            Self::Ln1Normalized => names("ln1.normalized", "ln1.hook_normalized", &[], &[]),
            Self::Q => names("q", "attn.hook_q", &["attn.q.hook_out"], &["q", "query"]),
            Self::K => names("k", "attn.hook_k", &["attn.k.hook_out"], &["k", "key"]),
            Self::V => names("v", "attn.hook_v", &["attn.v.hook_out"], &["v", "value"]),
            Self::AttnScores => {
                names("attn_scores", "attn.hook_attn_scores", &[], &["attn_scores", "attn_logits"])
            }
            Self::Pattern => names("pattern", "attn.hook_pattern", &[], &["pattern", "attn"]),
            Self::Z => names("z", "attn.hook_z", &["attn.o.hook_in"], &["z"]),
            Self::Result => names("result", "attn.hook_result", &[], &["result"]),
            Self::AttnOut => names("attn_out", "hook_attn_out", &["attn.hook_out"], &["attn_out"]),
            Self::ResidMid => names("resid_mid", "hook_resid_mid", &["ln2.hook_in"], &["resid_mid"]),
            Self::Ln2Scale => names("ln2.scale", "ln2.hook_scale", &[], &[]),
            Self::Ln2Normalized => names("ln2.normalized", "ln2.hook_normalized", &[], &[]),
            Self::MlpPre => names("mlp_pre", "mlp.hook_pre", &["mlp.in.hook_out"], &["pre", "mlp_pre"]),
            Self::MlpPost => names("mlp_post", "mlp.hook_post", &["mlp.out.hook_in"], &["post", "mlp_post"]),
            Self::MlpOut => names("mlp_out", "hook_mlp_out", &["mlp.hook_out"], &["mlp_out"]),
            Self::ResidPost => names("resid_post", "hook_resid_post", &["hook_out"], &["resid_post"]),
            Self::LnFinalScale => names("ln_final.scale", "ln_final.hook_scale", &["scale"], &[]),
            Self::LnFinalNormalized => {
                names("ln_final.normalized", "ln_final.hook_normalized", &["normalized"], &[])
            }
            Self::FinalNorm => names("final_norm", "unembed.hook_in", &[], &[]),
            Self::Logits => names("logits", "unembed.hook_out", &["hook_unembed"], &[]),
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

    /// All names by which it is known, TransformerLens' own first.
    pub fn names(self) -> Vec<String> {
        let Names { own, hook, others, shorthand } = self.kind.names();
        let Some(layer) = self.layer else {
            return [hook, own].into_iter().chain(others.iter().copied()).map(str::to_owned).collect();
        };
        let mut names = vec![format!("blocks.{layer}.{hook}"), format!("{layer}.{own}")];
        names.extend(others.iter().map(|other| format!("blocks.{layer}.{other}")));
        names.extend(shorthand.iter().map(|name| format!("{name}{layer}")));
        if let Some((norm, what)) = own.split_once('.') {
            names.push(format!("{what}{layer}{norm}"));
        }
        if self == Self::in_block(0, SiteKind::ResidPre) {
            names.push("embeddings".to_owned());
        }
        names
    }

    /// The places of a model of so many blocks that a list names: names and patterns with `*`, separated by commas. A name
    /// without its layer (`z`, `attn.hook_z`) stands for that of every block.
    ///
    /// # Errors
    /// When a name is none, with the nearest one, or a block is not there.
    pub fn matching(list: &str, n_layer: usize) -> Result<Vec<Self>, SiteError> {
        let all = Self::all(n_layer);
        let mut found = Vec::new();
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            if name.len() > LONGEST_NAME {
                return Err(SiteError::unknown(name));
            }
            let fits = |site: &&Self| {
                let Names { own, hook, shorthand, .. } = site.kind.names();
                let is_kind = [own, hook].contains(&name) || shorthand.contains(&name);
                is_kind || site.names().iter().any(|known| is_like(name, known))
            };
            let before = found.len();
            found.extend(all.iter().filter(fits));
            if found.len() == before {
                if let Ok(Self { layer: Some(layer), .. }) = name.parse() {
                    return Err(SiteError::NoSuchBlock { name: name.to_owned(), layer, n_layer });
                }
                return Err(SiteError::unknown(name));
            }
        }
        if found.is_empty() {
            return Err(SiteError::NoName);
        }
        found.sort_by_key(|site| all.iter().position(|other| other == site));
        found.dedup();
        Ok(found)
    }
}

/// TransformerLens' name.
impl Display for Site {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blocks.{layer}.{}", self.kind.names().hook),
            None => f.write_str(self.kind.names().hook),
        }
    }
}

impl FromStr for Site {
    type Err = SiteError;

    fn from_str(text: &str) -> Result<Self, SiteError> {
        if text.len() > LONGEST_NAME {
            return Err(SiteError::unknown(text));
        }
        let kind = SiteKind::ALL.into_iter().find(|kind| kind.is_in_blocks() && kind.name() == text);
        if let Some(kind) = kind {
            let (name, example) = (text.to_owned(), Self::in_block(0, kind).to_string());
            return Err(SiteError::NoBlock { name, example });
        }
        let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok());
        let mut layers: Vec<usize> = numbers.chain([0]).collect();
        layers.sort_unstable();
        layers.dedup();
        let inside = layers.iter().flat_map(|layer| {
            let kinds = SiteKind::ALL.into_iter().filter(|kind| kind.is_in_blocks());
            kinds.map(|kind| Self::in_block(*layer, kind))
        });
        let outside = SiteKind::ALL.into_iter().filter(|kind| !kind.is_in_blocks()).map(Self::outside);
        let is_named = |site: &Self| site.names().iter().any(|name| name == text);
        inside.chain(outside).find(is_named).ok_or_else(|| SiteError::unknown(text))
    }
}

/// Why a name is no place of a model. What parsing a [`Site`] and [`Site::matching`] return.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SiteError {
    /// No place has it.
    #[error("`{name}` is no place in a model; the nearest name is `{nearest}`")]
    Unknown {
        /// The name.
        name: String,
        /// The one that is most like it.
        nearest: String,
    },
    /// It is a name of every block, and one is wanted.
    #[error("`{name}` is in every block; name one, such as `{example}`")]
    NoBlock {
        /// The name.
        name: String,
        /// That of the first block.
        example: String,
    },
    /// No name is given.
    #[error(
        "no place is named; write names such as `resid_post` or `blocks.*.attn.hook_z`, separated by commas"
    )]
    NoName,
    /// The block is not there.
    #[error("`{name}`: there is no block {layer}; the model's {n_layer} blocks are counted from 0")]
    NoSuchBlock {
        /// The name.
        name: String,
        /// The block that it names.
        layer: usize,
        /// Blocks of the model.
        n_layer: usize,
    },
}

impl SiteError {
    fn unknown(name: &str) -> Self {
        let name = &name.chars().take(LONGEST_NAME).collect::<String>();
        // With the layer that the name has, if it has one.
        let layer = name.split(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse().ok());
        let site = |kind: SiteKind| Site { layer: kind.is_in_blocks().then_some(layer.unwrap_or(0)), kind };
        let known = SiteKind::ALL.into_iter().flat_map(|kind| {
            let names = site(kind).names();
            names.into_iter().chain(kind.is_in_blocks().then(|| kind.name().to_owned()))
        });
        let distance = |known: &String| strsim::damerau_levenshtein(name, known);
        let nearest = known.min_by_key(distance).unwrap_or_default();
        Self::Unknown { name: name.to_owned(), nearest }
    }
}

/// Whether `name` is like `pattern`, in which each `*` stands for any characters.
fn is_like(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let Some(mut rest) = pieces.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        let Some(place) = rest.find(piece) else { return false };
        rest = &rest[place + piece.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back_to_its_site() {
        for site in Site::all(13) {
            for name in site.names() {
                assert_eq!(name.parse(), Ok(site), "{name}");
                assert_eq!(Site::matching(&name, 13), Ok(vec![site]), "{name}");
            }
            assert_eq!(site.to_string(), site.names()[0]);
        }
        assert_eq!(Site::all(13).len(), 6 + 13 * 18);
    }

    #[test]
    fn names_are_those_of_transformer_lens() {
        for (name, layer, kind) in [
            ("blocks.3.attn.hook_z", 3, SiteKind::Z),
            ("z3", 3, SiteKind::Z),
            ("blocks.11.ln1.hook_scale", 11, SiteKind::Ln1Scale),
            ("scale4ln1", 4, SiteKind::Ln1Scale),
            ("normalized0ln2", 0, SiteKind::Ln2Normalized),
            ("k6", 6, SiteKind::K),
            ("pre5", 5, SiteKind::MlpPre),
            ("attn12", 12, SiteKind::Pattern),
            ("blocks.2.hook_in", 2, SiteKind::ResidPre),
            ("embeddings", 0, SiteKind::ResidPre),
            ("7.mlp_post", 7, SiteKind::MlpPost),
        ] {
            assert_eq!(name.parse(), Ok(Site::in_block(layer, kind)), "{name}");
        }
        assert_eq!("scale".parse(), Ok(Site::outside(SiteKind::LnFinalScale)));
        assert_eq!("hook_unembed".parse(), Ok(Site::outside(SiteKind::Logits)));
    }

    #[test]
    fn lists_name_sites_in_the_order_of_computation() {
        let blocks = |kind| (0..3).map(|layer| Site::in_block(layer, kind)).collect::<Vec<_>>();
        assert_eq!(Site::matching("blocks.*.attn.hook_z", 3), Ok(blocks(SiteKind::Z)));
        for name in ["z", "attn.hook_z", "*.z", "z*"] {
            assert_eq!(Site::matching(name, 3), Ok(blocks(SiteKind::Z)), "{name}");
        }
        let sites = Site::matching("logits, resid_post1,hook_embed, 1.resid_post", 3);
        let expected = [
            Site::outside(SiteKind::Embed),
            Site::in_block(1, SiteKind::ResidPost),
            Site::outside(SiteKind::Logits),
        ];
        assert_eq!(sites, Ok(expected.to_vec()));
        assert_eq!(Site::matching("*", 3), Ok(Site::all(3)));
        assert_eq!(Site::matching("blocks.1.*", 3).map(|sites| sites.len()), Ok(18));
    }

    #[test]
    fn an_unknown_name_says_the_nearest() {
        let nearest = |name: &str| match Site::matching(name, 3) {
            Err(SiteError::Unknown { nearest, .. }) => nearest,
            other => panic!("{other:?}"),
        };
        assert_eq!(nearest("blocks.2.attn.hok_z"), "blocks.2.attn.hook_z");
        assert_eq!(nearest("patern"), "pattern");
        assert_eq!(nearest("attn_scored1"), "attn_scores1");
        let error = Site::matching("z7", 3).unwrap_err().to_string();
        assert_eq!(error, "`z7`: there is no block 7; the model's 3 blocks are counted from 0");
    }

    #[test]
    fn names_of_any_length_are_answered_at_once() {
        let numbers = "1.".repeat(30_000);
        for name in [&"x".repeat(3_000_000), &numbers] {
            assert!(name.parse::<Site>().unwrap_err().to_string().len() < 300);
            assert!(Site::matching(name, 12).is_err());
        }
        let error = "resid_pre".parse::<Site>().unwrap_err().to_string();
        assert_eq!(error, "`resid_pre` is in every block; name one, such as `blocks.0.hook_resid_pre`");
        assert_eq!(Site::matching(" , ", 3), Err(SiteError::NoName));
    }

    #[test]
    fn stars_stand_for_anything() {
        assert!(is_like("a*c*e", "abcde") && is_like("*", "") && is_like("ab", "ab"));
        assert!(!is_like("a*c", "ab") && !is_like("ab", "abc") && !is_like("ab*b", "ab"));
    }
}
