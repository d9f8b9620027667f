//! Tests of SVG pictures: well-formed XML, one rectangle per cell, real text and clear errors.

use candle_gpt2_pictures::{Axis, PictureError, Report, Scale, Width, graph_svg, svg};

use crate::samples;

/// Checks that a picture is well-formed XML, and returns its tags and texts.
///
/// Expects elements, attributes in double quotes and no comments. Tags include their attributes.
fn parsed(xml: &str) -> (Vec<String>, Vec<String>) {
    let (mut open, mut tags, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = xml;
    assert!(rest.starts_with('<'));
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>'), "{text:?}");
        texts.push(plain(text));
        let (tag, after) = after.split_once('>').expect("every tag ends");
        let body = tag.trim_end_matches('/');
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
        } else {
            let name = body.split(' ').next().unwrap();
            assert!(!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()), "{tag}");
            let pieces: Vec<&str> = body[name.len()..].split('"').collect();
            assert_eq!(pieces.len() % 2, 1, "quotes come in pairs: {tag}");
            for attribute in pieces.chunks_exact(2) {
                assert!(attribute[0].starts_with(' ') && attribute[0].ends_with('='), "{tag}");
                plain(attribute[1]);
            }
            if !tag.ends_with('/') {
                open.push(name.to_owned());
            }
            tags.push(body.to_owned());
        }
        rest = after;
    }
    assert!(open.is_empty() && rest.trim().is_empty());
    texts.retain(|text| !text.trim().is_empty());
    (tags, texts)
}

/// Text with its entities replaced.
fn plain(text: &str) -> String {
    assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text:?}");
    let mut plain = String::new();
    for (index, piece) in text.split('&').enumerate() {
        let (entity, after) =
            if index == 0 { ("", piece) } else { piece.split_once(';').expect("an entity ends") };
        plain.push_str(match entity {
            "" => "",
            "amp" => "&",
            "lt" => "<",
            "gt" => ">",
            "quot" => "\"",
            "#39" => "'",
            other => panic!("&{other};"),
        });
        plain.push_str(after);
    }
    plain
}

fn fills(tags: &[String], fill: &str) -> usize {
    tags.iter().filter(|tag| tag.starts_with("rect") && tag.contains(&format!("fill=\"{fill}\""))).count()
}

/// Number of rectangles except the background, the panels' backgrounds and the color bar.
fn cells(tags: &[String], panels: usize) -> usize {
    const COLOR_BAR: usize = 40;
    let rectangles = tags.iter().filter(|tag| tag.starts_with("rect")).count();
    let missing_value_key = fills(tags, "#dcdee3") - panels;
    rectangles - 1 - panels - COLOR_BAR - missing_value_key
}

#[test]
fn pictures_are_well_formed_and_make_no_requests() {
    let wide = samples::bars(Axis::tokens("token", &samples::repeated(300)), samples::repeated(300));
    for report in [
        samples::attention(3, 4, samples::sentence()),
        samples::attention(1, 1, samples::hostile()),
        samples::lens(4, samples::hostile()),
        samples::layers_by_heads(12, 12),
        samples::bars(Axis::tokens("token", &samples::hostile()), samples::hostile()),
        wide,
        samples::three_axes(),
    ] {
        for width in [Width::OneColumn, Width::TwoColumns] {
            let svg = svg(&report, width).unwrap();
            let (tags, _) = parsed(&svg);
            assert!(tags[0].starts_with("svg xmlns=\"http://www.w3.org/2000/svg\""));
            let inches = tags[0].split("width=\"").nth(1).and_then(|rest| rest.split_once("in\"")).unwrap().0;
            let widest = if width == Width::OneColumn { 3.3 } else { 6.8 };
            assert!(inches.parse::<f64>().unwrap() <= widest, "{inches} of {widest} inches");
            assert!(tags[0].contains("viewBox=\"0 0 "));
            assert_eq!(svg.matches("http").count(), 1);
            assert!(!tags.iter().any(|tag| tag.starts_with("script") || tag.starts_with("image")));
            assert!(!svg.contains("NaN") && !svg.contains("inf\""));
        }
    }
}

#[test]
fn heatmap_has_one_colored_rectangle_per_value() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values = vec![Some(2.0), Some(-2.0), Some(0.0), None, Some(1.0), Some(-1.0)];
    let (tags, texts) = parsed(&svg(&report, Width::OneColumn).unwrap());
    assert_eq!(cells(&tags, 1), 5);
    // Strongest blue and red, white in the middle, and halfway. The background is white too.
    for (fill, count) in [("#921226", 1), ("#0c306e", 1), ("#ffffff", 1), ("#e8846c", 1), ("#62a3d6", 1)] {
        assert_eq!(fills(&tags, fill), count, "{fill}");
    }
    for text in ["layer", "head", "0", "1", "2", "−2", "no value"] {
        assert!(texts.iter().any(|found| found == text), "{text} in {texts:?}");
    }
}

#[test]
fn attention_has_one_panel_per_present_head() {
    let mut report = samples::attention(2, 3, samples::sentence());
    let len = report.tokens.len();
    report.values[..len * len].fill(None);
    let (tags, texts) = parsed(&svg(&report, Width::TwoColumns).unwrap());
    assert_eq!(cells(&tags, 5), 5 * len * (len + 1) / 2);
    let captions: Vec<&String> = texts.iter().filter(|text| text.contains('.')).take(6).collect();
    assert_eq!(
        captions,
        ["0.1", "0.2", "1.0", "1.1", "1.2", "panels: layer.head; rows: query; columns: key"]
    );
    // The panels are too small for labels, so the tokens are listed once below them.
    assert!(
        texts.iter().any(|text| text.starts_with("query, key:\u{2003}<|endoftext|> 0\u{2003}When 1")),
        "{texts:?}"
    );
}

/// Position of a text, and whether it is rotated.
fn position(svg: &str, text: &str) -> (f64, f64, bool) {
    let line = svg.lines().find(|line| line.ends_with(&format!(">{text}</text>"))).unwrap();
    let number = |name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap();
        rest.split('"').next().unwrap().parse().unwrap()
    };
    (number("x"), number("y"), line.contains("rotate(-90"))
}

#[test]
fn row_axis_name_does_not_overlap_the_panel_title() {
    let svg = svg(&samples::attention(1, 2, samples::sentence()), Width::TwoColumns).unwrap();
    let (query, caption) = (position(&svg, "query"), position(&svg, "layer 0, head 0"));
    assert!(query.2 && query.0 < caption.0 && query.1 > caption.1 + 20.0, "{query:?} {caption:?}");
    // Next to a single row, there is no space for the axis name.
    let mut report = samples::layers_by_heads(1, 5);
    report.axes[0].name = "a long name".into();
    let picture = candle_gpt2_pictures::svg(&report, Width::TwoColumns).unwrap();
    assert!(!position(&picture, "a long name").2);
}

#[test]
fn token_values_color_the_text() {
    let report =
        Report::of_tokens("surprise".into(), &["One", " day", "\n"], &[2.0, f32::NAN, -1.0], Scale::Signed);
    let (tags, texts) = parsed(&svg(&report, Width::OneColumn).unwrap());
    for text in ["One", "·day", "↵", "One 0"] {
        assert!(texts.iter().any(|found| found == text), "{text} in {texts:?}");
    }
    // A token without a value is gray, and so is its bar.
    assert_eq!((fills(&tags, "#0c306e"), fills(&tags, "#e8846c") > 0, fills(&tags, "#dcdee3")), (1, true, 2));
}

#[test]
fn lens_has_cell_texts_and_layer_0_at_the_bottom() {
    let svg = svg(&samples::lens(3, samples::sentence()), Width::TwoColumns).unwrap();
    let (_, texts) = parsed(&svg);
    assert_eq!(texts.iter().filter(|text| *text == "·Mary").count(), 4);
    assert!(texts.iter().any(|text| text == "·John 10"));
    let height = |label: &str| -> f64 {
        let line = svg.lines().find(|line| line.ends_with(&format!(">{label}</text>"))).unwrap();
        line.split("y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
    };
    assert!(height("0") > height("2"));
}

#[test]
fn one_axis_is_drawn_as_bars_or_as_a_line_if_long() {
    let report = samples::bars(Axis::numbers("layer", 0..12), samples::sentence());
    let (tags, _) = parsed(&svg(&report, Width::OneColumn).unwrap());
    assert_eq!(tags.iter().filter(|tag| tag.starts_with("rect")).count(), 1 + 12);
    let mut report = samples::bars(Axis::numbers("position", 0..100), samples::sentence());
    report.values[50] = None;
    let (tags, _) = parsed(&svg(&report, Width::OneColumn).unwrap());
    let points = |tag: &String| {
        tag.split("points=\"").nth(1).map_or(0, |points| points.split('"').next().unwrap().split(' ').count())
    };
    let runs: Vec<usize> = tags.iter().map(points).filter(|points| *points > 2).collect();
    assert_eq!(runs, [50, 49]);
}

#[test]
fn noisy_curve_has_a_running_mean() {
    let mut report = samples::bars(Axis::numbers("step", 0..1000), samples::sentence());
    report.values = (0..1000).map(|step| Some(if step % 2 == 0 { 1.0 } else { 3.0 })).collect();
    let drawn = svg(&report, Width::TwoColumns).unwrap();
    let curves: Vec<&str> = drawn.lines().filter(|line| line.matches(',').count() == 1000).collect();
    assert_eq!(curves.len(), 2);
    let spread = |curve: &str| {
        let (_, points) = curve.split_once("points=\"").unwrap();
        let heights = points.split('"').next().unwrap().split(' ').skip(50).take(900);
        let heights: Vec<f64> =
            heights.map(|point| point.split_once(',').unwrap().1.parse().unwrap()).collect();
        heights.iter().copied().fold(0.0, f64::max) - heights.iter().copied().fold(f64::MAX, f64::min)
    };
    assert!(spread(curves[1]) < 0.1 * spread(curves[0]), "{} {}", spread(curves[1]), spread(curves[0]));
}

#[test]
fn small_grids_show_values_without_empty_space() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values = vec![Some(2.0), Some(-1.234), Some(0.0), None, Some(0.5), Some(100.4)];
    let drawn = svg(&report, Width::TwoColumns).unwrap();
    let (_, texts) = parsed(&drawn);
    for text in ["2", "−1.23", "0", "0.5", "100"] {
        assert!(texts.iter().any(|found| found == text), "{text} in {texts:?}");
    }
    let (_, width) = drawn.split_once("width=\"").unwrap();
    let width: f64 = width.split_once("in\"").unwrap().0.parse().unwrap();
    assert!(width < 3.0, "{width} inches for three columns");
}

#[test]
fn oversized_and_empty_pictures_are_rejected() {
    let too_many = |report: &Report| svg(report, Width::TwoColumns).unwrap_err();
    let error = too_many(&samples::attention(14, 12, samples::tokens([b"a".as_slice(), b"b"])));
    assert_eq!(error, PictureError::TooManyPanels { panels: 168, limit: 160, axes: "layer, head".into() });
    assert!(error.to_string().ends_with("select fewer entries on these axes: layer, head"));
    let error = too_many(&samples::attention(1, 1, samples::repeated(256)));
    assert!(matches!(error, PictureError::TooManyCells { cells: 32_896, limit: 20_000, .. }));
    let mut nothing = samples::layers_by_heads(2, 3);
    nothing.values.fill(None);
    assert_eq!(too_many(&nothing), PictureError::Nothing);
    nothing.values.pop();
    assert!(matches!(too_many(&nothing), PictureError::Values { .. }));
}

#[test]
fn non_finite_values_are_drawn_as_missing() {
    let mut report = samples::layers_by_heads(2, 2);
    report.values = vec![Some(f32::NAN), Some(f32::NEG_INFINITY), Some(1.0), Some(0.5)];
    report.scale = Scale::Amount;
    let (tags, _) = parsed(&svg(&report, Width::OneColumn).unwrap());
    assert_eq!(cells(&tags, 1), 2);
    assert_eq!(fills(&tags, "#0c306e"), 1);
}

/// Checks that a link from the lowest node to the highest avoids the box between them.
#[test]
fn links_run_around_boxes() {
    let mut report = samples::graph();
    let graph = report.graph.as_mut().unwrap();
    graph.nodes.truncate(3);
    for (row, node) in graph.nodes.iter_mut().enumerate() {
        (node.row, node.column) = (row, 0.5);
    }
    graph.links.truncate(1);
    (graph.links[0].from, graph.links[0].to, graph.links[0].port) = (0, 2, None);
    let drawn = svg(&report, Width::OneColumn).unwrap();
    let (_, path) = drawn.split_once("<path d=\"M").unwrap();
    let numbers: Vec<f64> =
        path.split('"').next().unwrap().split(['C', ' ']).map(|number| number.parse().unwrap()).collect();
    assert!((numbers[2] - numbers[0]).abs() > 15.0, "{numbers:?}");
    assert_eq!(numbers[0], numbers[6], "the link ends in the column in which it starts");
}

#[test]
fn graph_is_drawn_from_bottom_to_top() {
    let report = samples::graph();
    let (tags, texts) = parsed(&svg(&report, Width::OneColumn).unwrap());
    for label in ["input", "a0.h0", "a0.h2", "m0", "logits"] {
        assert_eq!(texts.iter().filter(|text| *text == label).count(), 1, "{label}");
    }
    let attribute = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!(" {name}=\"")).unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let heights: Vec<f64> = tags
        .iter()
        .filter(|tag| tag.starts_with("text") && attribute(tag, "text-anchor") == "middle")
        .map(|tag| attribute(tag, "y").parse().unwrap())
        .collect();
    // Nodes in order: rows 0, 1, 1, 2 and 3.
    assert!(
        heights[0] > heights[1]
            && heights[1] == heights[2]
            && heights[2] > heights[3]
            && heights[3] > heights[4]
    );
    let paths: Vec<&String> = tags.iter().filter(|tag| tag.starts_with("path")).collect();
    assert_eq!(paths.len(), 5);
    let thickness: Vec<f64> =
        paths.iter().map(|tag| attribute(tag, "stroke-width").parse().unwrap()).collect();
    assert!(thickness.is_sorted() && thickness[4] == 2.4, "the strongest is drawn last: {thickness:?}");
    // Blue above 0, red below, and pale for weak links.
    let colors: Vec<String> = paths.iter().map(|tag| attribute(tag, "stroke")).collect();
    assert_eq!(colors, ["#62a3d6", "#62a3d6", "#e8846c", "#921226", "#0c306e"]);
    // Queries are at the left, keys in the middle and values at the right.
    let ends: Vec<f64> =
        ["q", "k", "v"].iter().map(|port| end_of(&samples::graph_with_port(port.chars().next()))).collect();
    assert!(ends[0] < ends[1] && ends[1] < ends[2], "{ends:?}");
    let mut large = report.clone();
    let graph = large.graph.as_mut().unwrap();
    graph.links = vec![graph.links[0].clone(); 4001];
    assert_eq!(svg(&large, Width::TwoColumns), Err(PictureError::TooManyLinks { links: 4001, limit: 4000 }));
    large.graph = Some(candle_gpt2_pictures::Graph::default());
    assert_eq!(svg(&large, Width::TwoColumns), Err(PictureError::Nothing));
    // The report's JSON contains only the values, not the graph.
    let json = serde_json::to_value(&report).unwrap();
    assert!(json.get("graph").is_none() && json["values"].is_array());
    assert!(candle_gpt2_pictures::page(&report).contains(">a0.h2</text>"));
}

/// Horizontal position at which a report's only link ends.
fn end_of(report: &Report) -> f64 {
    let picture = svg(report, Width::OneColumn).unwrap();
    let (_, path) = picture.split_once(" d=\"").unwrap();
    let numbers: Vec<&str> = path.split('"').next().unwrap().split([' ', 'M', 'C']).collect();
    numbers[numbers.len() - 2].parse().unwrap()
}

#[test]
fn graph_has_a_circle_per_node_and_a_line_per_edge() {
    let (report, graph) = samples::attribution_graph();
    for width in [Width::OneColumn, Width::TwoColumns] {
        let (tags, texts) = parsed(&graph_svg(&report, &graph, width).unwrap());
        assert_eq!(tags.iter().filter(|tag| tag.starts_with("circle")).count(), 5);
        assert_eq!(tags.iter().filter(|tag| tag.starts_with("line ")).count(), 4);
        for text in ["embeddings", "layer 0", "logits", "·John 2"] {
            assert!(texts.iter().any(|found| found == text), "{text}");
        }
    }
    let (mut report, mut graph) = samples::attribution_graph();
    report.tokens = samples::hostile();
    parsed(&graph_svg(&report, &graph, Width::TwoColumns).unwrap());
    graph.lines = vec![graph.lines[0]; 500];
    let (tags, texts) = parsed(&graph_svg(&report, &graph, Width::TwoColumns).unwrap());
    assert_eq!(tags.iter().filter(|tag| tag.starts_with("line ")).count(), 400);
    assert!(texts.iter().any(|text| text == "the 400 strongest of 500 edges"));
    graph.points = vec![graph.points[0].clone(); 3001];
    let refused = graph_svg(&report, &graph, Width::TwoColumns).unwrap_err().to_string();
    assert!(refused.contains("3001 cells are too many for one picture (at most 3000)"), "{refused}");
    graph.points.clear();
    assert_eq!(graph_svg(&report, &graph, Width::TwoColumns), Err(PictureError::Nothing));
}
