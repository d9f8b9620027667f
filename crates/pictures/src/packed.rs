//! Packs attention patterns for pages: keys up to the query, few bytes per value, base64 per head.
//!
//! A page with all values as JSON numbers would take 14 bytes for each, or 2 GB for 144 heads and 1,024
//! tokens. Of three forms, the most precise one that stays small is used:
//! - `u16`: the causal triangle row by row, each value as value * 65535, little endian;
//! - `u8`: the same with value * 255;
//! - `strongest`: the strongest sources of each row by ascending key, each as key (u16, little endian) and
//!   value * 255 (u8).

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;

use crate::{Report, Scale};

/// Maximum number of tokens for the most precise form, regardless of the number of heads.
const MAX_FINE_TOKENS: usize = 128;
/// Maximum number of tokens for keeping all values, regardless of the number of heads.
const MAX_WHOLE_TOKENS: usize = 256;
/// Size limit in bytes for using these forms on longer texts, if few heads are selected.
const MAX_BYTES: usize = 2_000_000;
/// Number of sources kept per token in the `strongest` form.
const STRONGEST: usize = 8;

/// Patterns of all heads in a report.
#[derive(Serialize)]
pub(crate) struct Pattern {
    form: Form,
    strongest: usize,
    /// Description of the form's precision, shown on the page.
    about: String,
    /// Packed pattern of each layer and head, with the head varying fastest; `None` without values.
    heads: Vec<Option<String>>,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    U16,
    U8,
    Strongest,
}

/// Packs the patterns of an attention report.
///
/// Returns `None` for reports of another kind, and if a head with values is not a causal pattern of
/// fractions. The values of such reports stay unpacked.
pub(crate) fn pack(report: &Report) -> Option<Pattern> {
    let len = report.axes.last()?.labels.len();
    if !report.is_attention() || report.scale != Scale::Share || len == 0 || len > usize::from(u16::MAX) {
        return None;
    }
    let heads: Vec<Option<&[Option<f32>]>> = report
        .values
        .chunks(len * len)
        .map(|head| head.iter().any(Option::is_some).then_some(head))
        .collect();
    if !heads.iter().flatten().all(|head| is_causal(head, len)) {
        return None;
    }
    let values = heads.iter().flatten().count() * len * (len + 1) / 2;
    let form = if len <= MAX_FINE_TOKENS || values * 2 <= MAX_BYTES {
        Form::U16
    } else if len <= MAX_WHOLE_TOKENS || values <= MAX_BYTES {
        Form::U8
    } else {
        Form::Strongest
    };
    let about = match form {
        Form::U16 => "rounded to 0.002 %".into(),
        Form::U8 => "rounded to 0.4%".into(),
        Form::Strongest => format!("the {STRONGEST} strongest sources of each token, rounded to 0.4%"),
    };
    let heads =
        heads.into_iter().map(|head| head.map(|head| STANDARD.encode(bytes(head, len, form)))).collect();
    Some(Pattern { form, strongest: STRONGEST, about, heads })
}

/// Whether each query has fractions for all keys up to itself, and nothing for later keys.
fn is_causal(head: &[Option<f32>], len: usize) -> bool {
    head.chunks(len).enumerate().all(|(query, row)| {
        row[..=query].iter().all(|value| value.is_some_and(|value| (0.0..=1.0).contains(&value)))
            && row[query + 1..].iter().all(|value| value.is_none_or(|value| value == 0.0))
    })
}

/// Packs the pattern of one head.
///
/// # Shapes
/// `head`: (queries, keys), both `len`.
fn bytes(head: &[Option<f32>], len: usize, form: Form) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (query, row) in head.chunks(len).enumerate() {
        let shares: Vec<f32> = row[..=query].iter().map(|value| value.unwrap_or(0.0)).collect();
        match form {
            Form::U16 => bytes.extend(shares.iter().flat_map(|share| rounded(share * 65535.0).to_le_bytes())),
            Form::U8 => bytes.extend(shares.iter().map(|share| rounded(share * 255.0).to_le_bytes()[0])),
            Form::Strongest => {
                let mut keys: Vec<usize> = (0..shares.len()).collect();
                if keys.len() > STRONGEST {
                    keys.select_nth_unstable_by(STRONGEST, |a, b| shares[*b].total_cmp(&shares[*a]));
                    keys.truncate(STRONGEST);
                    keys.sort_unstable();
                }
                for key in keys {
                    let place = u16::try_from(key).expect("`pack` rejects longer texts");
                    bytes.extend(place.to_le_bytes());
                    bytes.push(rounded(shares[key] * 255.0).to_le_bytes()[0]);
                }
            }
        }
    }
    bytes
}

#[expect(clippy::cast_possible_truncation, reason = "fractions are between 0 and 1")]
fn rounded(value: f32) -> u16 {
    value.round() as u16
}
