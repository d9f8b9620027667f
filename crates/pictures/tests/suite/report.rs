//! How tokens are shown, what a report is as JSON, and which reports are refused.

use candle_gpt2_pictures::{Axis, PictureError, Report, Token, shown};

use crate::samples;

#[test]
fn tokens_are_shown_byte_for_byte_where_they_cannot_be_read() {
    assert_eq!(shown(b" Mary"), "·Mary");
    assert_eq!(shown(b"\n\n"), "↵↵");
    assert_eq!(shown(b"\t\r\x00\x7f"), "\\x09\\x0D\\x00\\x7F");
    assert_eq!(shown(b"\xe2\x82"), "\\xE2\\x82");
    assert_eq!(shown(b"a\xff b"), "a\\xFF·b");
    assert_eq!(shown("€ é東".as_bytes()), "€·é東");
    // An override of direction would turn what stands after it.
    assert_eq!(shown("\u{202e}x".as_bytes()), "\\xE2\\x80\\xAEx");
    assert_eq!(shown("\u{85}".as_bytes()), "\\xC2\\x85");
    assert_eq!(shown(b"</script>"), "</script>");
}

#[test]
fn labels_keep_equal_tokens_apart() {
    let tokens = [Token::new(2, 1757, b" John"), Token::new(10, 1757, b" John")];
    assert_eq!(Axis::tokens("key", &tokens).labels, ["·John 2", "·John 10"]);
}

#[test]
fn json_reads_back_to_the_same_report() {
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
fn values_that_are_not_finite_are_null() {
    let mut report = samples::layers_by_heads(1, 3);
    report.values = vec![Some(f32::NEG_INFINITY), Some(f32::NAN), Some(1.0)];
    let json = serde_json::to_string(&report).unwrap();
    let back: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(back.values, [None, None, Some(1.0)]);
}

#[test]
fn lengths_that_do_not_multiply_up_are_refused() {
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
