//! What a terminal shows.

use candle_gpt2_pictures::{Axis, table};

use crate::samples;

/// The widest line that a terminal is asked for.
const WIDTH: usize = 100;

fn line<'a>(text: &'a str, start: &str) -> &'a str {
    let line = text.lines().find(|line| line.trim_start().starts_with(start));
    line.unwrap_or_else(|| panic!("no line starts with {start:?} in\n{text}"))
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn every_table_names_tokens_model_and_what_was_in_front() {
    let text = table(&samples::attention(1, 2, samples::sentence()));
    assert!(text.starts_with(
        "attention\nmodel: gpt2\ntokens (with a BOS token):\n  0 <|endoftext|>  1 When  2 ·John"
    ));
    assert!(text.ends_with("\n  A head's shares add up to 1.\n"));
}

#[test]
fn attention_has_a_line_for_each_head() {
    let text = table(&samples::attention(1, 3, samples::tokens([b"a".as_slice(), b" b", b" c"])));
    // Head 0: weights (2), (2, 1), (2, 1/2, 1) over their sums.
    let expected = ["0.0", "0.619", "0.310", "0.405", "·b", "1", "->", "·b", "1", "0.333"];
    assert_eq!(words(line(&text, "0.0")), expected);
    // Head 2: weights (2), (2, 1/3), (2, 1/2, 1/3).
    assert_eq!(words(line(&text, "0.2"))[..4], ["0.2", "0.782", "0.130", "0.517"]);
}

#[test]
fn heads_that_were_not_asked_for_have_no_line() {
    let mut report = samples::attention(1, 2, samples::sentence());
    let len = report.tokens.len();
    report.values[..len * len].fill(None);
    let text = table(&report);
    assert!(!text.contains(" 0.0  ") && text.contains(" 0.1  "), "{text}");
}

#[test]
fn two_axes_are_a_matrix_where_it_fits() {
    let text = table(&samples::layers_by_heads(12, 12));
    assert!(text.contains("logit difference: 3.25000 → -0.50000"));
    assert_eq!(words(line(&text, "rows:")), ["rows:", "layer,", "columns:", "head"]);
    let row = ["0", "-2", "-0.840", "0.320", "1.48", "-1.40", "-0.240", "0.920", "-", "-0.800"];
    assert_eq!(words(text.lines().nth(9).unwrap())[..10], row);
}

#[test]
fn a_matrix_that_is_too_wide_becomes_its_strongest_cells() {
    let text = table(&samples::layers_by_heads(12, 16));
    assert!(text.contains("the 30 strongest of 191 values (layer, head):"));
    let first = text.lines().position(|line| line.starts_with("the 30")).unwrap() + 1;
    let cells: Vec<&str> = text.lines().skip(first).collect();
    assert_eq!(cells.len(), 30);
    assert_eq!(words(cells[0]), ["-2", "layer", "0", "head", "0"]);
}

#[test]
fn one_axis_is_a_line_for_each_label_up_to_forty() {
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
fn a_lens_shows_its_texts_from_the_last_layer_down() {
    let text = table(&samples::lens(3, samples::sentence()));
    let lines: Vec<&str> =
        text.lines().skip_while(|line| *line != "rows: layer, columns: token").skip(1).collect();
    let layers: Vec<&str> = lines[1..4].iter().map(|line| words(line)[0]).collect();
    assert_eq!(layers, ["2", "1", "0"]);
    assert_eq!(words(lines[3])[..7], ["0", "·is", "0", "<|endoftext…", "0.370", "↵", "0.740"], "{text}");
    // Cells stand below the headings of their columns.
    let second = lines[3].find("<|endoftext…").unwrap();
    let before = |line: &str, place: usize| {
        line.char_indices().nth(place).map(|(place, _)| line[..place].ends_with("  "))
    };
    let place = lines[3][..second].chars().count();
    assert!(lines[..4].iter().all(|line| before(line, place) == Some(true)), "{text}");
}

#[test]
fn a_lens_of_numbers_alone_is_the_same_grid_with_integers_in_full() {
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
fn the_text_beside_a_bar_has_the_rest_of_the_line() {
    let mut report = samples::bars(Axis::new("node", ["5_80_9"]), samples::sentence());
    let text = "feature at ·red 9, says ·ball ·cup; zeroed: predicted −2.145, actual −1.261";
    report.texts = vec![text.into()];
    assert!(table(&report).contains(text));
}

#[test]
fn nothing_reaches_the_terminal_that_it_would_obey() {
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
        samples::attention(12, 12, samples::many(64)),
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
fn a_report_that_does_not_multiply_up_is_named() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values.pop();
    assert!(table(&report).contains("(layer 2, head 3) cannot have 5 values"));
}
