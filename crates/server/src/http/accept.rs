//! `Accept` header: media types and their weights, RFC 9110, section 12.5.1.

use hyper::header::{ACCEPT, HeaderMap};

/// Whether a client prefers `kind` to the default `usual`.
///
/// The header must name `kind` with a weight above 0 and at least the weight of `usual`.
pub(crate) fn prefers(headers: &HeaderMap, kind: &str, usual: &str) -> bool {
    let values = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let ranges: Vec<(&str, f32)> = values.flat_map(|value| value.split(',')).filter_map(range).collect();
    // Several ranges may name the same type with different parameters; the largest weight counts.
    let named = |kind: &str| {
        let weights = ranges.iter().filter(|(range, _)| range.eq_ignore_ascii_case(kind));
        weights.map(|(_, weight)| *weight).max_by(f32::total_cmp)
    };
    let all = usual.split_once('/').map_or(String::new(), |(kind, _)| format!("{kind}/*"));
    let of_usual = named(usual).or_else(|| named(&all)).or_else(|| named("*/*")).unwrap_or(0.0);
    named(kind).is_some_and(|weight| weight > 0.0 && weight >= of_usual)
}

/// Media type and weight; `None` if the weight is not a number from 0 to 1.
fn range(written: &str) -> Option<(&str, f32)> {
    let mut parts = written.split(';').map(str::trim);
    let kind = parts.next()?;
    let mut parameters = parts.filter_map(|part| part.split_once('='));
    let weight = match parameters.find(|(name, _)| name.trim().eq_ignore_ascii_case("q")) {
        Some((_, weight)) => weight.trim().parse().ok()?,
        None => 1.0,
    };
    (0.0..=1.0).contains(&weight).then_some((kind, weight))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn media_type_is_chosen_by_name_and_weight() {
        let prefers_file = |values: &[&'static str]| {
            let values = values.iter().map(|value| (ACCEPT, HeaderValue::from_static(value)));
            prefers(&values.collect(), "application/octet-stream", "application/json")
        };
        for preferred in [
            &["application/octet-stream"][..],
            &["APPLICATION/Octet-Stream"],
            &["application/json, application/octet-stream"],
            &["application/octet-stream;q=0.5, */*;q=0.1"],
            &["text/html", "application/json;q=0.2,application/octet-stream; version=1 ; Q=0.2"],
            &["application/octet-stream, application/octet-stream;q=0"],
            &["application/json;q=high, application/octet-stream;q=0.1"],
        ] {
            assert!(prefers_file(preferred), "{preferred:?}");
        }
        for other in [
            &[][..],
            &["*/*"],
            &["application/*"],
            &["application/octet-stream;q=0"],
            &["application/octet-stream;q=0.000"],
            &["application/octet-stream ; q = 0"],
            &["application/json, application/octet-stream;q=0.9"],
            &["application/*;q=0.8, application/octet-stream;q=0.7"],
            &["*/*, application/octet-stream;q=0.7"],
            &["application/octet-stream;q=2"],
            &["application/octet-stream;q=NaN"],
            &["application/octet-stream-2"],
            &[""],
        ] {
            assert!(!prefers_file(other), "{other:?}");
        }
    }
}
