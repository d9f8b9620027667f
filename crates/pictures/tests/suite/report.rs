//! Tests of printable tokens, report JSON and validation.

use candle_gpt2_pictures::{Axis, PictureError, Report, Token, printable_token};

use crate::samples;

#[test]
fn unprintable_bytes_are_escaped() {
    assert_eq!(printable_token(b" Mary"), "·Mary");
    assert_eq!(printable_token(b"\n\n"), "↵↵");
    assert_eq!(printable_token(b"\t\r\x00\x7f"), "\\x09\\x0D\\x00\\x7F");
    assert_eq!(printable_token(b"\xe2\x82"), "\\xE2\\x82");
    assert_eq!(printable_token(b"a\xff b"), "a\\xFF·b");
    assert_eq!(printable_token("€ é東".as_bytes()), "€·é東");
    // A direction override would reverse the text after it.
    assert_eq!(printable_token("\u{202e}x".as_bytes()), "\\xE2\\x80\\xAEx");
    assert_eq!(printable_token("\u{85}".as_bytes()), "\\xC2\\x85");
    assert_eq!(printable_token(b"</script>"), "</script>");
}

#[test]
fn labels_distinguish_equal_tokens() {
    let tokens = [Token::new(2, 1757, b" John"), Token::new(10, 1757, b" John")];
    assert_eq!(Axis::tokens("key", &tokens).labels, ["·John 2", "·John 10"]);
}

#[test]
fn json_round_trip_preserves_the_report() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values =
        vec![Some(0.1), Some(f32::MIN_POSITIVE), None, Some(16_777_217.0 / 3.0), Some(-0.0), Some(f32::MAX)];
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["schema"], "gpt2.look.ablate/1");
    assert_eq!(value["tokens"][2]["text"], "·John");
    assert_eq!(value["bos"], true);
    assert_eq!(value["axes"][1]["name"], "head");
    assert!(json.contains("\"values\":[0.1,"), "values are the shortest numbers that read back: {json}");
    assert!(value["values"][2].is_null());
    assert_eq!(value["scale"], "signed");
    assert!(value.get("texts").is_none());
}

#[test]
fn non_finite_values_become_null() {
    let mut report = samples::layers_by_heads(1, 3);
    report.values = vec![Some(f32::NEG_INFINITY), Some(f32::NAN), Some(1.0)];
    let json = serde_json::to_string(&report).unwrap();
    let back: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(back.values, [None, None, Some(1.0)]);
}

#[test]
fn mismatched_lengths_are_rejected() {
    let mut report = samples::layers_by_heads(2, 3);
    assert_eq!(report.check(), Ok(()));
    report.values.pop();
    let error = report.check().unwrap_err();
    assert_eq!(error, PictureError::Values { axes: "layer 2, head 3".into(), found: 5 });
    report = samples::layers_by_heads(2, 3);
    report.texts = vec!["a".into()];
    assert_eq!(report.check().unwrap_err(), PictureError::Texts { expected: 6, found: 1 });
    report.axes = vec![Axis::numbers("a", 0..1 << 16); 5];
    assert!(matches!(report.check(), Err(PictureError::Values { .. })));
}
