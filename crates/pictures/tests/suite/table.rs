//! Tests of tables for the terminal.

use candle_gpt2_pictures::{Axis, table};

use crate::samples;

/// Maximum width of a line.
const WIDTH: usize = 100;

fn line<'a>(text: &'a str, start: &str) -> &'a str {
    let line = text.lines().find(|line| line.trim_start().starts_with(start));
    line.unwrap_or_else(|| panic!("no line starts with {start:?} in\n{text}"))
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn table_starts_with_title_model_and_tokens() {
    let text = table(&samples::attention(1, 2, samples::sentence()));
    assert!(text.starts_with(
        "attention\nmodel: gpt2\ntokens (with a BOS token):\n  0 <|endoftext|>  1 When  2 ·John"
    ));
    assert!(text.ends_with("\n  A head's shares add up to 1.\n"));
}

#[test]
fn attention_has_a_line_for_each_head() {
    let text = table(&samples::attention(1, 3, samples::tokens([b"a".as_slice(), b" b", b" c"])));
    // Head 0 has the weights (2), (2, 1), (2, 1/2, 1), divided by their sums.
    let expected = ["0.0", "0.619", "0.310", "0.405", "·b", "1", "->", "·b", "1", "0.333"];
    assert_eq!(words(line(&text, "0.0")), expected);
    // Head 2 has the weights (2), (2, 1/3), (2, 1/2, 1/3).
    assert_eq!(words(line(&text, "0.2"))[..4], ["0.2", "0.782", "0.130", "0.517"]);
}

#[test]
fn missing_heads_have_no_line() {
    let mut report = samples::attention(1, 2, samples::sentence());
    let len = report.tokens.len();
    report.values[..len * len].fill(None);
    let text = table(&report);
    assert!(!text.contains(" 0.0  ") && text.contains(" 0.1  "), "{text}");
}

#[test]
fn two_axes_become_a_matrix_if_it_fits() {
    let text = table(&samples::layers_by_heads(12, 12));
    assert!(text.contains("logit difference: 3.25000 → -0.50000"));
    assert_eq!(words(line(&text, "rows:")), ["rows:", "layer,", "columns:", "head"]);
    let row = ["0", "-2", "-0.840", "0.320", "1.48", "-1.40", "-0.240", "0.920", "-", "-0.800"];
    assert_eq!(words(text.lines().nth(9).unwrap())[..10], row);
}

#[test]
fn wide_matrix_is_reduced_to_its_strongest_cells() {
    let text = table(&samples::layers_by_heads(12, 16));
    assert!(text.contains("the 30 strongest of 191 values (layer, head):"));
    let first = text.lines().position(|line| line.starts_with("the 30")).unwrap() + 1;
    let cells: Vec<&str> = text.lines().skip(first).collect();
    assert_eq!(cells.len(), 30);
    assert_eq!(words(cells[0]), ["-2", "layer", "0", "head", "0"]);
}

#[test]
fn one_axis_has_one_line_per_label_up_to_forty() {
    let text = table(&samples::bars(Axis::new("layer", ["0", "0_mid", "1"]), samples::sentence()));
    assert_eq!(words(line(&text, "0_mid")), ["0_mid", "0.500"]);
    let text = table(&samples::bars(Axis::numbers("layer", 0..100), samples::sentence()));
    let first = text.lines().position(|line| line == "the 40 strongest of 100:").unwrap() + 1;
    let lines: Vec<&str> = text.lines().skip(first).collect();
    assert_eq!(lines.len(), 40);
    assert_eq!(words(lines[0]), ["0", "-1.25"]);
    assert_eq!(words(lines[1]), ["3", "1.25"]);
}

#[test]
fn lens_lists_the_last_layer_first() {
    let text = table(&samples::lens(3, samples::sentence()));
    let lines: Vec<&str> =
        text.lines().skip_while(|line| *line != "rows: layer, columns: token").skip(1).collect();
    let layers: Vec<&str> = lines[1..4].iter().map(|line| words(line)[0]).collect();
    assert_eq!(layers, ["2", "1", "0"]);
    assert_eq!(words(lines[3])[..7], ["0", "·is", "0", "<|endoftext…", "0.370", "↵", "0.740"], "{text}");
    // Cells are below the headings of their columns.
    let second = lines[3].find("<|endoftext…").unwrap();
    let is_after_spaces = |line: &str, column: usize| {
        line.char_indices().nth(column).map(|(start, _)| line[..start].ends_with("  "))
    };
    let column = lines[3][..second].chars().count();
    assert!(lines[..4].iter().all(|line| is_after_spaces(line, column) == Some(true)), "{text}");
}

#[test]
fn lens_without_texts_prints_integers_in_full() {
    let mut report = samples::lens(3, samples::sentence());
    report.texts.clear();
    report.values = (0..report.values.len()).map(|rank| Some(rank as f32 * 337.0)).collect();
    let text = table(&report);
    let lines: Vec<&str> =
        text.lines().skip_while(|line| *line != "rows: layer, columns: token").skip(1).collect();
    assert_eq!(words(lines[3])[..4], ["0", "0", "337", "674"], "{text}");
    assert_eq!(lines[1..4].iter().map(|line| words(line)[0]).collect::<Vec<_>>(), ["2", "1", "0"]);
}

#[test]
fn bar_texts_are_not_truncated() {
    let mut report = samples::bars(Axis::new("node", ["5_80_9"]), samples::sentence());
    let text = "feature at ·red 9, says ·ball ·cup; zeroed: predicted −2.145, actual −1.261";
    report.texts = vec![text.into()];
    assert!(table(&report).contains(text));
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let mut report = samples::lens(4, samples::hostile());
    report.title = "a\x1b[31mb\rc".into();
    report.notes = vec!["\u{202e}note\n".into()];
    report.tokens[0].text = "\x07".into();
    for text in [table(&report), table(&samples::attention(2, 2, samples::hostile()))] {
        assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text:?}");
        assert!(!text.contains('\u{202e}'));
    }
}

#[test]
fn lines_are_at_most_a_hundred_characters() {
    for report in [
        samples::attention(12, 12, samples::repeated(64)),
        samples::lens(13, samples::hostile()),
        samples::lens(13, samples::sentence()),
        samples::layers_by_heads(12, 12),
        samples::three_axes(),
        samples::bars(Axis::tokens("token", &samples::hostile()), samples::hostile()),
    ] {
        for line in table(&report).lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
    }
}

#[test]
fn table_reports_a_size_mismatch() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values.pop();
    assert!(table(&report).contains("(layer 2, head 3) cannot have 5 values"));
}
