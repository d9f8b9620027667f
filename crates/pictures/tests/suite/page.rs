//! Tests of page files: packed values, no requests, escaped text and size.

use base64::{Engine, engine::general_purpose::STANDARD};
use candle_gpt2_pictures::{Axis, PARTS_CSS, Report, feature_page, page};
use serde_json::Value;

use crate::samples;

/// Data of a page, as its script reads it.
fn data(page: &str) -> Value {
    let (_, after) = page.split_once("id=\"report\">").unwrap();
    serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
}

/// Unpacked values of one head; `None` for values that the form drops.
fn unpacked(pattern: &Value, head: usize, len: usize) -> Vec<Option<f32>> {
    let bytes = STANDARD.decode(pattern["heads"][head].as_str().unwrap()).unwrap();
    let mut bytes = bytes.into_iter();
    let mut values = vec![None; len * len];
    for query in 0..len {
        for entry in 0..=query {
            let (key, weight) = match pattern["form"].as_str().unwrap() {
                "u16" => {
                    let pair = [bytes.next().unwrap(), bytes.next().unwrap()];
                    (entry, f32::from(u16::from_le_bytes(pair)) / 65535.0)
                }
                "u8" => (entry, f32::from(bytes.next().unwrap()) / 255.0),
                _ if entry >= 8 => break,
                _ => {
                    let key = u16::from_le_bytes([bytes.next().unwrap(), bytes.next().unwrap()]);
                    (usize::from(key), f32::from(bytes.next().unwrap()) / 255.0)
                }
            };
            values[query * len + key] = Some(weight);
        }
    }
    assert_eq!(bytes.next(), None, "unread bytes");
    values
}

fn assert_near(report: &Report, pattern: &Value, step: f32) {
    let len = report.tokens.len();
    for head in 0..report.axes[0].labels.len() * report.axes[1].labels.len() {
        let values = unpacked(pattern, head, len);
        let expected = &report.values[head * len * len..(head + 1) * len * len];
        for (index, (value, expected)) in values.iter().zip(expected).enumerate() {
            assert_eq!(value.is_some(), expected.is_some(), "head {head}, index {index}");
            let difference = (value.unwrap_or(0.0) - expected.unwrap_or(0.0)).abs();
            assert!(
                difference <= 0.51 * step,
                "head {head}, index {index}: {value:?}, expected {expected:?}"
            );
        }
    }
}

#[test]
fn short_patterns_are_packed_as_u16() {
    let report = samples::attention(2, 3, samples::sentence());
    let data = data(&page(&report));
    assert_eq!(data["pattern"]["about"], "rounded to 0.002 %");
    assert!(data.get("values").is_none());
    assert_near(&report, &data["pattern"], 1.0 / 65535.0);
}

#[test]
fn medium_patterns_are_packed_as_u8() {
    let report = samples::attention(5, 12, samples::repeated(200));
    let data = data(&page(&report));
    assert_eq!(data["pattern"]["about"], "rounded to 0.4%");
    assert_near(&report, &data["pattern"], 1.0 / 255.0);
}

#[test]
fn few_heads_of_a_long_text_keep_all_values() {
    let report = samples::attention(1, 2, samples::repeated(300));
    assert_eq!(data(&page(&report))["pattern"]["form"], "u16");
    let report = samples::attention(1, 1, samples::repeated(1500));
    assert_eq!(data(&page(&report))["pattern"]["form"], "u8");
}

#[test]
fn long_patterns_keep_the_strongest_sources() {
    let report = samples::attention(8, 6, samples::repeated(300));
    let data = data(&page(&report));
    assert_eq!(data["pattern"]["about"], "the 8 strongest sources of each token, rounded to 0.4%");
    for head in [0, 47] {
        let values = unpacked(&data["pattern"], head, 300);
        for query in 0..300 {
            let row = &report.values[(head * 300 + query) * 300..][..=query];
            let kept: Vec<usize> = (0..300).filter(|key| values[query * 300 + key].is_some()).collect();
            assert_eq!(kept.len(), 8.min(query + 1));
            let weakest = kept.iter().map(|key| row[*key].unwrap()).fold(1.0, f32::min);
            let left = (0..=query).filter(|key| !kept.contains(key)).map(|key| row[key].unwrap());
            assert!(left.fold(0.0, f32::max) <= weakest, "head {head}, query {query}");
            for key in kept {
                let difference = (values[query * 300 + key].unwrap() - row[key].unwrap()).abs();
                assert!(difference <= 0.51 / 255.0, "head {head}, query {query}, key {key}");
            }
        }
    }
}

#[test]
fn missing_heads_are_null() {
    let mut report = samples::attention(2, 2, samples::sentence());
    let len = report.tokens.len();
    report.values[len * len..2 * len * len].fill(None);
    let data = data(&page(&report));
    let heads = data["pattern"]["heads"].as_array().unwrap();
    assert_eq!(heads.iter().map(Value::is_null).collect::<Vec<_>>(), [false, true, false, false]);
}

#[test]
fn values_other_than_patterns_are_not_packed() {
    let mut differences = samples::attention(1, 2, samples::sentence());
    differences.values[0] = Some(-0.25);
    let mut incomplete = samples::attention(1, 2, samples::sentence());
    incomplete.values[0] = None;
    for report in
        [differences, incomplete, samples::lens(3, samples::sentence()), samples::layers_by_heads(12, 12)]
    {
        let data = data(&page(&report));
        assert!(data.get("pattern").is_none());
        assert_eq!(
            serde_json::from_value::<Vec<Option<f32>>>(data["values"].clone()).unwrap(),
            report.values
        );
    }
}

#[test]
fn pages_make_no_requests() {
    let (report, cards) = samples::features(&samples::sentence());
    let reports = [
        samples::attention(2, 2, samples::sentence()),
        samples::lens(3, samples::sentence()),
        samples::layers_by_heads(3, 2),
        samples::bars(Axis::numbers("layer", 0..3), samples::sentence()),
        samples::graph(),
    ];
    for page in reports.iter().map(page).chain([feature_page(&report, &cards)]) {
        let html = page.replace("http-equiv", "");
        for request in ["http", "src=", "import", "url(", "fetch", "XMLHttpRequest", "@font-face", "://"] {
            assert!(!html.contains(request), "{request}");
        }
        assert!(page.contains(
            "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\""
        ));
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</script>").count(), 2);
    }
}

#[test]
fn tokens_cannot_inject_markup() {
    for mut report in [samples::attention(1, 1, samples::hostile()), samples::lens(2, samples::hostile())] {
        report.title = "</title><script>alert(1)</script>".into();
        report.notes = vec!["<!--<script>".into()];
        let page = page(&report);
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</script>").count(), 2);
        assert_eq!(page.matches("<!--").count(), 0);
        assert!(page.contains("<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>"));
        let data = data(&page);
        let texts: Vec<&str> =
            data["tokens"].as_array().unwrap().iter().map(|token| token["text"].as_str().unwrap()).collect();
        let expected: Vec<&str> = report.tokens.iter().map(|token| token.text.as_str()).collect();
        assert_eq!(texts, expected);
    }
}

#[test]
fn feature_page_contains_the_cards_unchanged() {
    let (report, cards) = samples::features(&samples::hostile());
    let page = feature_page(&report, &cards);
    assert_eq!((page.matches("<script").count(), page.matches("<!--").count()), (2, 0));
    let data = data(&page);
    assert_eq!(data["features"], serde_json::to_value(&cards).unwrap());
    assert_eq!(data["report"]["axes"][0]["labels"][1], "40");
    let text = &data["features"][0]["examples_quantiles"][0]["examples"][0];
    assert_eq!(text["tokens"][0], "</script><script>alert(1)</script>");
    assert_eq!(
        (&text["tokens_acts_list"][4], &text["train_token_ind"]),
        (&Value::from(3.0), &Value::from(4))
    );
}

#[test]
fn style_and_script_are_below_40_kilobytes() {
    let page = page(&samples::attention(1, 1, samples::sentence()));
    let between = |start: &str, end: &str| page.split_once(start).unwrap().1.split_once(end).unwrap().0.len();
    let size = between("<style>", "</style>") + between("<script>", "</script>");
    assert!(size < 40_000, "{size} bytes");
    assert!(PARTS_CSS.contains(".heatmap"));
}

#[test]
fn pages_of_144_heads_stay_small() {
    let size = page(&samples::attention(12, 12, samples::repeated(64))).len();
    assert!(size < 1_000_000, "64 tokens: {size} bytes");
    // A page with all 144 heads over 1,024 tokens would need over a gigabyte, so the size is extrapolated.
    let [four, eight] =
        [4, 8].map(|heads| page(&samples::attention(1, heads, samples::repeated(1024))).len());
    let size = eight + (eight - four) / 4 * (144 - 8);
    assert!(size < 6_000_000, "1,024 tokens: {size} bytes, {eight} for 8 heads");
}

#[test]
fn page_reports_a_size_mismatch() {
    let mut report = samples::attention(1, 1, samples::sentence());
    report.values.pop();
    let data = data(&page(&report));
    assert_eq!(data["axes"].as_array().unwrap().len(), 0);
    let note = data["notes"][1].as_str().unwrap();
    assert!(note.contains("cannot have 143 values"), "{note}");
}
