//! Names of hook points, as users write them.
//!
//! A name is TransformerLens' hook name (`blocks.3.attn.hook_z`, or `blocks.3.attn.o.hook_in` in its version
//! 4), its shorthand (`z3`), or this project's name with the layer in front (`3.z`). Source: TransformerLens
//! 4.3.0.

use candle_gpt2::{Site, SiteKind, bounded_message, excerpt};

/// Maximum length of a name or pattern; the names of all hook points are far shorter.
const LONGEST_NAME: usize = 100;
/// Minimum similarity at which a name is suggested.
const NEAR: f64 = 0.5;

/// TransformerLens' alternative names for a kind, and the shorthands that take a layer number.
///
/// [`SiteKind::hook`] is the main name.
fn alternative_names(kind: SiteKind) -> (&'static [&'static str], &'static [&'static str]) {
    match kind {
        SiteKind::Embed => (&["embed.hook_out"], &[]),
        SiteKind::PosEmbed => (&["pos_embed.hook_out"], &[]),
        SiteKind::ResidPre => (&["hook_in"], &["resid_pre"]),
        SiteKind::Q => (&["attn.q.hook_out"], &["q", "query"]),
        SiteKind::K => (&["attn.k.hook_out"], &["k", "key"]),
        SiteKind::V => (&["attn.v.hook_out"], &["v", "value"]),
        SiteKind::AttnScores => (&[], &["attn_scores", "attn_logits"]),
        SiteKind::Pattern => (&[], &["pattern", "attn"]),
        SiteKind::Z => (&["attn.o.hook_in"], &["z"]),
        SiteKind::Result => (&[], &["result"]),
        SiteKind::AttnOut => (&["attn.hook_out"], &["attn_out"]),
        SiteKind::ResidMid => (&["ln2.hook_in"], &["resid_mid"]),
        SiteKind::MlpPre => (&["mlp.in.hook_out"], &["pre", "mlp_pre"]),
        SiteKind::MlpPost => (&["mlp.out.hook_in"], &["post", "mlp_post"]),
        SiteKind::MlpOut => (&["mlp.hook_out"], &["mlp_out"]),
        SiteKind::ResidPost => (&["hook_out"], &["resid_post"]),
        SiteKind::LnFinalScale => (&["scale"], &[]),
        SiteKind::LnFinalNormalized => (&["normalized"], &[]),
        SiteKind::Logits => (&["hook_unembed"], &[]),
        _ => (&[], &[]),
    }
}

/// Returns every name of a hook point, TransformerLens' main name first.
fn names(site: Site) -> Vec<String> {
    let (own, hook) = (site.kind.name(), site.kind.hook());
    let (others, shorthand) = alternative_names(site.kind);
    let Some(layer) = site.layer else {
        return [hook, own].into_iter().chain(others.iter().copied()).map(str::to_owned).collect();
    };
    let mut names = vec![format!("blocks.{layer}.{hook}"), format!("{layer}.{own}")];
    names.extend(others.iter().map(|other| format!("blocks.{layer}.{other}")));
    names.extend(shorthand.iter().map(|name| format!("{name}{layer}")));
    if let Some((norm, what)) = own.split_once('.') {
        names.push(format!("{what}{layer}{norm}"));
    }
    if site == Site::in_block(0, SiteKind::ResidPre) {
        names.push("embeddings".to_owned());
    }
    names
}

/// Returns the hook point with this name.
///
/// ```
/// use candle_gpt2::{Site, SiteKind};
/// use candle_gpt2_interpret::named_site;
///
/// for name in ["blocks.3.attn.hook_z", "blocks.3.attn.o.hook_in", "z3", "3.z"] {
///     assert_eq!(named_site(name)?, Site::in_block(3, SiteKind::Z));
/// }
/// # Ok::<(), candle_gpt2_interpret::SiteError>(())
/// ```
///
/// # Errors
/// If no hook point has this name (the error suggests the nearest), or if every block has a hook point with
/// this name.
pub fn named_site(name: &str) -> Result<Site, SiteError> {
    if name.len() > LONGEST_NAME {
        return Err(SiteError::unknown(name));
    }
    let kind = SiteKind::ALL.into_iter().find(|kind| kind.is_in_blocks() && kind.name() == name);
    if let Some(kind) = kind {
        let (name, example) = (name.to_owned(), Site::in_block(0, kind).to_string());
        return Err(SiteError::NoBlock { name, example });
    }
    let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok());
    let mut layers: Vec<usize> = numbers.chain([0]).collect();
    layers.sort_unstable();
    layers.dedup();
    let inside = layers.iter().flat_map(|layer| {
        let kinds = SiteKind::ALL.into_iter().filter(|kind| kind.is_in_blocks());
        kinds.map(|kind| Site::in_block(*layer, kind))
    });
    let outside = SiteKind::ALL.into_iter().filter(|kind| !kind.is_in_blocks()).map(Site::outside);
    let is_named = |site: &Site| names(*site).iter().any(|known| known == name);
    inside.chain(outside).find(is_named).ok_or_else(|| SiteError::unknown(name))
}

/// Returns the hook points that a comma-separated list of names and patterns selects.
///
/// Patterns contain `*`. A name without its layer (`z`, `attn.hook_z`) selects that hook point in every
/// block. The result is in the order of computation, for a model of `n_layer` blocks.
///
/// ```
/// use candle_gpt2_interpret::named_sites;
///
/// assert_eq!(named_sites("pattern", 12)?.len(), 12, "one in each block");
/// assert_eq!(named_sites("z3, blocks.*.hook_resid_post", 12)?.len(), 1 + 12);
/// # Ok::<(), candle_gpt2_interpret::SiteError>(())
/// ```
///
/// # Errors
/// If a name is unknown (the error suggests the nearest), or if a block is out of range.
pub fn named_sites(list: &str, n_layer: usize) -> Result<Vec<Site>, SiteError> {
    let all = Site::all(n_layer);
    let mut found = Vec::new();
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if name.len() > LONGEST_NAME {
            return Err(SiteError::unknown(name));
        }
        let fits = |site: &&Site| {
            let (kind, (_, shorthand)) = (site.kind, alternative_names(site.kind));
            let is_kind = [kind.name(), kind.hook()].contains(&name) || shorthand.contains(&name);
            is_kind || names(**site).iter().any(|known| is_like(name, known))
        };
        let before = found.len();
        found.extend(all.iter().filter(fits));
        if found.len() == before {
            if let Ok(Site { layer: Some(layer), .. }) = named_site(name) {
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

/// Error returned by [`named_site`] and [`named_sites`] for an invalid hook point name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SiteError {
    /// No hook point has this name.
    #[error("unknown hook point `{name}`; {hint}", name = excerpt(.name), hint = suggestion(.nearest.as_deref()))]
    Unknown {
        /// The name.
        name: String,
        /// The most similar name, if any name is similar.
        nearest: Option<String>,
    },
    /// Every block has a hook point with this name, but the caller needs exactly one.
    #[error("every block has a hook point `{name}`; choose one of them, such as `{example}`", name = excerpt(.name), example = bounded_message(.example))]
    NoBlock {
        /// The name.
        name: String,
        /// Name of the first block's hook point.
        example: String,
    },
    /// The list contains no names.
    #[error("no hook points given; use comma-separated names such as `resid_post` or `blocks.*.attn.hook_z`")]
    NoName,
    /// The block is out of range.
    #[error("`{name}`: block {layer} is out of range; the model has {n_layer} blocks, counted from 0", name = excerpt(.name))]
    NoSuchBlock {
        /// The name.
        name: String,
        /// The block index in the name.
        layer: usize,
        /// Number of blocks in the model.
        n_layer: usize,
    },
}

impl SiteError {
    fn unknown(name: &str) -> Self {
        let name = &name.chars().take(LONGEST_NAME).collect::<String>();
        // Suggest names with the layer of the unknown name, if it has one.
        let layer = name.split(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse().ok());
        let site = |kind: SiteKind| Site { layer: kind.is_in_blocks().then_some(layer.unwrap_or(0)), kind };
        let known = SiteKind::ALL.into_iter().flat_map(|kind| {
            let names = names(site(kind));
            names.into_iter().chain(kind.is_in_blocks().then(|| kind.name().to_owned()))
        });
        let near = known
            .map(|known| (strsim::normalized_damerau_levenshtein(name, &known), known))
            .filter(|(similarity, _)| *similarity >= NEAR);
        let nearest = near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, known)| known);
        Self::Unknown { name: name.to_owned(), nearest }
    }
}

/// Advice for an unknown name.
fn suggestion(nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!("did you mean `{}`?", bounded_message(nearest)),
        None => "valid names include `resid_post` and `blocks.3.attn.hook_z`".to_owned(),
    }
}

/// Whether `name` matches `pattern`, in which each `*` matches any sequence of characters.
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
    fn every_name_parses_to_its_hook_point() {
        for site in Site::all(13) {
            for name in names(site) {
                assert_eq!(named_site(&name), Ok(site), "{name}");
                assert_eq!(named_sites(&name, 13), Ok(vec![site]), "{name}");
            }
            assert_eq!(site.to_string(), names(site)[0]);
        }
        assert_eq!(Site::all(13).len(), 6 + 13 * 18);
    }

    #[test]
    fn transformer_lens_names_are_accepted() {
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
            assert_eq!(named_site(name), Ok(Site::in_block(layer, kind)), "{name}");
        }
        assert_eq!(named_site("scale"), Ok(Site::outside(SiteKind::LnFinalScale)));
        assert_eq!(named_site("hook_unembed"), Ok(Site::outside(SiteKind::Logits)));
    }

    #[test]
    fn site_lists_follow_computation_order() {
        let blocks = |kind| (0..3).map(|layer| Site::in_block(layer, kind)).collect::<Vec<_>>();
        assert_eq!(named_sites("blocks.*.attn.hook_z", 3), Ok(blocks(SiteKind::Z)));
        for name in ["z", "attn.hook_z", "*.z", "z*"] {
            assert_eq!(named_sites(name, 3), Ok(blocks(SiteKind::Z)), "{name}");
        }
        let sites = named_sites("logits, resid_post1,hook_embed, 1.resid_post", 3);
        let expected = [
            Site::outside(SiteKind::Embed),
            Site::in_block(1, SiteKind::ResidPost),
            Site::outside(SiteKind::Logits),
        ];
        assert_eq!(sites, Ok(expected.to_vec()));
        assert_eq!(named_sites("*", 3), Ok(Site::all(3)));
        assert_eq!(named_sites("blocks.1.*", 3).map(|sites| sites.len()), Ok(18));
    }

    #[test]
    fn unknown_name_suggests_the_nearest() {
        let nearest = |name: &str| match named_sites(name, 3) {
            Err(SiteError::Unknown { nearest, .. }) => nearest.unwrap_or_default(),
            other => panic!("{other:?}"),
        };
        assert_eq!(nearest("blocks.2.attn.hok_z"), "blocks.2.attn.hook_z");
        assert_eq!(nearest("patern"), "pattern");
        assert_eq!(nearest("attn_scored1"), "attn_scores1");
        let error = named_sites("z7", 3).unwrap_err().to_string();
        assert_eq!(error, "`z7`: block 7 is out of range; the model has 3 blocks, counted from 0");
    }

    #[test]
    fn very_long_names_have_short_error_messages() {
        let numbers = "1.".repeat(30_000);
        for name in [&"x".repeat(3_000_000), &numbers] {
            assert!(named_site(name).unwrap_err().to_string().len() < 300);
            assert!(named_sites(name, 12).is_err());
        }
        let error = named_site("resid_pre").unwrap_err().to_string();
        assert_eq!(
            error,
            "every block has a hook point `resid_pre`; choose one of them, such as `blocks.0.hook_resid_pre`"
        );
        assert_eq!(named_sites(" , ", 3), Err(SiteError::NoName));
    }

    #[test]
    fn asterisk_matches_any_substring() {
        assert!(is_like("a*c*e", "abcde") && is_like("*", "") && is_like("ab", "ab"));
        assert!(!is_like("a*c", "ab") && !is_like("ab", "abc") && !is_like("ab*b", "ab"));
    }
}
