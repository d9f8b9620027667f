//! Renders a report as an SVG picture for a paper: real text, white background, color bar, no script.
//!
//! Lengths are in points, 72 per inch. One axis becomes bars, or a line if it is long. Two axes become a
//! heatmap, and more become a panel for each combination of the leading axes. Cells without a value are gray.
//! A graph replaces the values.

use std::fmt::Write;

use crate::report::{escaped, printable, short, shortened};
use crate::{Axis, Graph, PictureError, Report, Scale};

/// Width of the picture.
///
/// ```
/// use candle_gpt2_pictures::{Axis, Report, Width, svg};
///
/// let mut report = Report::new("example", "a row".into(), "gpt2".into(), Vec::new(), false);
/// report.axes = vec![Axis::numbers("layer", 0..2)];
/// report.values = vec![Some(1.0), Some(-1.0)];
/// assert!(svg(&report, Width::OneColumn)?.contains(r#"width="3.3in""#));
/// assert!(svg(&report, Width::TwoColumns)?.contains(r#"width="6.8in""#));
/// # Ok::<(), candle_gpt2_pictures::PictureError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One column of a two-column page: 3.3 inches.
    OneColumn,
    /// Full width of the page: 6.8 inches.
    TwoColumns,
}

impl Width {
    pub(crate) fn points(self) -> f64 {
        match self {
            Self::OneColumn => 3.3 * POINTS_PER_INCH,
            Self::TwoColumns => 6.8 * POINTS_PER_INCH,
        }
    }
}

const POINTS_PER_INCH: f64 = 72.0;
const MAX_PANELS: usize = 160;
const MAX_CELLS: usize = 20_000;
const MAX_LINKS: usize = 4_000;
/// Maximum number of values drawn as bars instead of a line.
const MAX_BARS: usize = 60;
/// Maximum number of values drawn without their running mean.
const MAX_PLAIN_CURVE: usize = 400;
/// Maximum number of panels with labels along both axes.
const MAX_LABELED_PANELS: usize = 4;
const MAX_LABEL: usize = 18;

pub(crate) const FONT: f64 = 7.0;
const SMALLEST_FONT: f64 = 4.5;
/// Letter width as a fraction of the font size, generous because the reader's font is unknown.
const LETTER: f64 = 0.57;
const NARROW_LETTER: f64 = 0.3;
const WIDE_LETTER: f64 = 0.9;
pub(crate) const MARGIN: f64 = 4.0;
/// Total gap on both sides of a label.
const LABEL_GAP: f64 = 5.0;
/// Space on the left for the rotated name of the row axis.
const NAME_ROOM: f64 = FONT + 3.0;
/// Space on the right for the color bar and its numbers.
const BAR_ROOM: f64 = 40.0;
const MAX_HEIGHT: f64 = 620.0;
const BARS_HEIGHT: f64 = 110.0;
/// Minimum width of cells with printed values.
const PRINTED_CELL: f64 = 16.0;

const NONE: &str = "#dcdee3";
pub(crate) const INK: &str = "#1a1d23";
const QUIET: &str = "#565d6b";
const ZERO: [f64; 3] = [255.0, 255.0, 255.0];
const BLUE: [[f64; 3]; 2] = [[98.0, 163.0, 214.0], [12.0, 48.0, 110.0]];
const RED: [[f64; 3]; 2] = [[232.0, 132.0, 108.0], [146.0, 18.0, 38.0]];

/// Renders a report as an SVG picture.
///
/// Layers over tokens, and layers with texts in their cells, have the lowest layer at the bottom.
///
/// # Errors
/// If the report fails [`Report::check`], has neither values nor a graph, or needs more than 160 panels,
/// 20,000 cells or 4,000 links.
pub fn svg(report: &Report, width: Width) -> Result<String, PictureError> {
    report.check()?;
    let mut drawing = Drawing::default();
    let size = match &report.graph {
        Some(graph) => [width.points(), draw_graph(&mut drawing, report, graph, width.points())?],
        None => draw_values(&mut drawing, report, width.points())?,
    };
    Ok(document(report, size, &drawing))
}

/// Creates the SVG document for a drawing.
pub(crate) fn document(report: &Report, [width, height]: [f64; 2], drawing: &Drawing) -> String {
    let [inches, high_inches] = [width, height].map(|points| number(points / POINTS_PER_INCH));
    let front = report.bos_in_words();
    // Without a model there is no BOS note either.
    let of = if report.model.is_empty() { String::new() } else { format!(", {}, {front}", report.model) };
    let title = escaped(&format!("{}{of}", report.title));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{inches}in\" height=\"{high_inches}in\" viewBox=\"0 0 {wide} {high}\" \
         font-family=\"Helvetica, Arial, sans-serif\" fill=\"{INK}\">\n<title>{title}</title>\n\
         <rect width=\"{wide}\" height=\"{high}\" fill=\"#fff\"/>\n{body}</svg>\n",
        wide = number(width),
        high = number(height),
        body = drawing.body
    )
}

/// Draws the values and returns the picture's size; its width is at most `width`.
fn draw_values(drawing: &mut Drawing, report: &Report, width: f64) -> Result<[f64; 2], PictureError> {
    let cells = (0..report.values.len()).filter(|place| report.at(*place).is_some()).count();
    if cells == 0 {
        return Err(PictureError::Nothing);
    }
    if cells > MAX_CELLS {
        let axes = report.axes.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(PictureError::TooManyCells { cells, limit: MAX_CELLS, axes });
    }
    match report.axes.as_slice() {
        [axis] => Ok([width, draw_bars(drawing, report, axis, width)]),
        _ => draw_panels(drawing, report, width),
    }
}

/// Draws a graph from the bottom up and returns the height of the picture.
fn draw_graph(
    drawing: &mut Drawing,
    report: &Report,
    graph: &Graph,
    width: f64,
) -> Result<f64, PictureError> {
    const ROW: f64 = 34.0;
    const NODE: f64 = 11.0;
    if graph.nodes.is_empty() {
        return Err(PictureError::Nothing);
    }
    if graph.links.len() > MAX_LINKS {
        return Err(PictureError::TooManyLinks { links: graph.links.len(), limit: MAX_LINKS });
    }
    let title = fitted(&report.title, width - 2.0 * MARGIN, FONT);
    drawing.text([MARGIN, MARGIN + FONT / 2.0], Align::Start, FONT, INK, &title);
    let widths: Vec<f64> = graph.nodes.iter().map(|node| text_width(&node.label, FONT) + LABEL_GAP).collect();
    let widest = widths.iter().copied().fold(0.0, f64::max);
    let top_row = graph.nodes.iter().map(|node| node.row).max().unwrap_or(0);
    let first = MARGIN + FONT + 6.0 + NODE / 2.0;
    // Center of a node.
    let place = |node: usize| {
        let node = &graph.nodes[node];
        let x = MARGIN + widest / 2.0 + node.column * (width - 2.0 * MARGIN - widest);
        [x, first + (top_row - node.row) as f64 * ROW]
    };
    let strongest = graph.links.iter().map(|link| link.weight.abs()).fold(f32::MIN_POSITIVE, f32::max);
    let mut links: Vec<_> = graph.links.iter().collect();
    links.sort_by(|one, other| one.weight.abs().total_cmp(&other.weight.abs()));
    drawing.push(format_args!("<g fill=\"none\">"));
    for link in links {
        let ([x, y], [above, end]) = (place(link.from), place(link.to));
        let side = match link.port {
            Some('q') => -0.3,
            Some('v') => 0.3,
            _ => 0.0,
        };
        let above = above + side * widths[link.to];
        let (y, end) = (y - NODE / 2.0, end + NODE / 2.0);
        let middle = (y + end) / 2.0;
        let others = (0..widths.len()).filter(|node| ![link.from, link.to].contains(node));
        let boxes: Vec<_> = others.map(|node| (place(node), widths[node] / 2.0)).collect();
        let bow = bow_around(&boxes, [x, y], [above, end], NODE / 2.0);
        let share = f64::from(link.weight.abs() / strongest);
        let stroke = hexadecimal(if link.weight < 0.0 { RED } else { BLUE }[usize::from(share > 0.4)]);
        let [begin_x, end_x] = [x + bow, above + bow].map(number);
        let [x, y, above, end, middle] = [x, y, above, end, middle].map(number);
        let [thick, solid] = [0.4 + 2.0 * share, 0.4 + 0.6 * share].map(number);
        drawing.push(format_args!(
            "<path d=\"M{x} {y}C{begin_x} {middle} {end_x} {middle} {above} {end}\" stroke=\"{stroke}\" \
             stroke-width=\"{thick}\" stroke-opacity=\"{solid}\"/>"
        ));
    }
    drawing.push(format_args!("</g>"));
    for (node, wide) in widths.iter().enumerate() {
        let [x, y] = place(node);
        let [left, right, high, low] = [x - wide / 2.0, x + wide / 2.0, y - NODE / 2.0, y + NODE / 2.0];
        drawing.rect([left, high], [*wide, NODE], "#fff");
        drawing.line(&[[left, high], [right, high], [right, low], [left, low], [left, high]], "#8a909c");
        drawing.text([x, y], Align::Middle, FONT, INK, &graph.nodes[node].label);
    }
    Ok(first + top_row as f64 * ROW + NODE / 2.0 + MARGIN)
}

/// Sideways shift of a curve's middle that best avoids the boxes between its ends.
fn bow_around(boxes: &[([f64; 2], f64)], [x, y]: [f64; 2], [end_x, end]: [f64; 2], half_height: f64) -> f64 {
    const STEP: f64 = 12.0;
    const POINTS: i32 = 24;
    const GAP: f64 = 2.0;
    let middle = (y + end) / 2.0;
    let crossed = |bow: f64| {
        let inside = |point: i32| {
            let t = f64::from(point) / f64::from(POINTS);
            let at = |[a, b, c, d]: [f64; 4]| {
                let s = 1.0 - t;
                s * s * s * a + 3.0 * s * s * t * b + 3.0 * s * t * t * c + t * t * t * d
            };
            let [px, py] = [at([x, x + bow, end_x + bow, end_x]), at([y, middle, middle, end])];
            boxes.iter().any(|([left, top], half)| {
                (px - left).abs() < half + GAP && (py - top).abs() < half_height + GAP
            })
        };
        (0..=POINTS).filter(|point| inside(*point)).count()
    };
    let bows = (0..12).flat_map(|step| [f64::from(step) * STEP, -f64::from(step) * STEP]);
    bows.min_by_key(|bow| crossed(*bow)).unwrap_or(0.0)
}

/// Text anchor, and whether it is rotated to read upward.
#[derive(Clone, Copy)]
pub(crate) enum Align {
    Start,
    Middle,
    End,
    /// Rotated to read upward, with its end at the position.
    Upwards,
    /// Rotated to read upward, with its middle at the position.
    Turned,
}

/// SVG elements drawn so far.
#[derive(Default)]
pub(crate) struct Drawing {
    body: String,
}

impl Drawing {
    fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], fill: &str) {
        let [x, y, width, height] = [x, y, width, height].map(number);
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>"
        ));
    }

    pub(crate) fn line(&mut self, points: &[[f64; 2]], stroke: &str) {
        let points: Vec<String> =
            points.iter().map(|[x, y]| format!("{},{}", number(*x), number(*y))).collect();
        self.push(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"0.8\"/>",
            points.join(" ")
        ));
    }

    pub(crate) fn stroke(&mut self, from: [f64; 2], to: [f64; 2], color: &str, width: f64) {
        let [x1, y1, x2, y2, width] = [from[0], from[1], to[0], to[1], width].map(number);
        self.push(format_args!(
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{color}\" stroke-width=\"{width}\"/>"
        ));
    }

    pub(crate) fn circle(&mut self, [x, y]: [f64; 2], radius: f64, fill: &str) {
        let [x, y, radius] = [x, y, radius].map(number);
        self.push(format_args!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{fill}\" stroke=\"#fff\" stroke-width=\"0.5\"/>"
        ));
    }

    /// Draws text, vertically centered at `y`.
    pub(crate) fn text(&mut self, [x, y]: [f64; 2], align: Align, font: f64, fill: &str, text: &str) {
        let (anchor, turn) = match align {
            Align::Start => ("start", false),
            Align::Middle => ("middle", false),
            Align::End => ("end", false),
            Align::Upwards => ("end", true),
            Align::Turned => ("middle", true),
        };
        // A letter's middle is about a third of the font size above its baseline.
        let (x, y) = if turn { (x + font * 0.35, y) } else { (x, y + font * 0.35) };
        let turn = if turn {
            format!(" transform=\"rotate(-90 {} {})\"", number(x), number(y))
        } else {
            String::new()
        };
        let fill = if fill == INK { String::new() } else { format!(" fill=\"{fill}\"") };
        self.push(format_args!(
            "<text x=\"{}\" y=\"{}\" font-size=\"{}\" text-anchor=\"{anchor}\"{fill}{turn}>{}</text>",
            number(x),
            number(y),
            number(font),
            ordered(&escaped(text))
        ));
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        writeln!(self.body, "{element}").expect("writing to a String never fails");
    }
}

/// A heatmap: its values, position and cell size.
struct Panel<'a> {
    report: &'a Report,
    /// Index of the panel's first value.
    start: usize,
    top: f32,
    corner: [f64; 2],
    cell: [f64; 2],
}

/// Draws heatmaps of the last two axes and returns the size of the picture.
fn draw_panels(drawing: &mut Drawing, report: &Report, width: f64) -> Result<[f64; 2], PictureError> {
    let (leading, last) = report.axes.split_at(report.axes.len() - 2);
    let [rows, columns] = [&last[0], &last[1]];
    let panel_len = rows.labels.len() * columns.labels.len();
    let visible: Vec<usize> = report
        .values
        .chunks(panel_len)
        .enumerate()
        .filter_map(|(panel, values)| values.iter().any(Option::is_some).then_some(panel))
        .collect();
    if visible.len() > MAX_PANELS {
        let axes = leading.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(PictureError::TooManyPanels { panels: visible.len(), limit: MAX_PANELS, axes });
    }
    let is_whole = visible.len() * panel_len == report.values.len();
    let across = match leading {
        [.., _, inner] if is_whole => inner.labels.len(),
        _ => columns_of_panels(visible.len()),
    };
    let is_labeled = visible.len() <= MAX_LABELED_PANELS;
    let is_captioned = !leading.is_empty();

    let gap = if is_labeled { 8.0 } else { 3.0 };
    let outer = (width - 2.0 * MARGIN - BAR_ROOM + gap) / across as f64 - gap;
    let side = if is_labeled { NAME_ROOM + room_for(rows, FONT).min(outer * 0.4) } else { 0.0 };
    let room = outer - side;
    let cell = cell_size(report, rows, columns, room);
    let is_turned = columns.labels.iter().any(|label| text_width(label, FONT) > cell[0] * 0.95);
    let foot = match (is_labeled, is_turned) {
        (false, _) => 0.0,
        (true, true) => room_for(columns, cell[0].clamp(SMALLEST_FONT, FONT)) + FONT + 3.0,
        (true, false) => 2.0 * FONT + 5.0,
    };
    let caption = if is_captioned { FONT + 1.0 } else { 0.0 };
    let body = [cell[0] * columns.labels.len() as f64, cell[1] * rows.labels.len() as f64];
    // If there are few rows, the axis name does not fit next to them and gets a line above.
    let name = if is_labeled && text_width(&rows.name, FONT) > body[1] { FONT + 2.0 } else { 0.0 };
    let step = [side + body[0].max(room.min(body[0] + 1.0)) + gap, caption + name + body[1] + foot + gap];
    let begin = [MARGIN, MARGIN];

    for (place, panel) in visible.iter().enumerate() {
        let [x, y] =
            [begin[0] + (place % across) as f64 * step[0], begin[1] + (place / across) as f64 * step[1]];
        let corner = [x + side, y + caption + name];
        if is_captioned {
            let font = if is_labeled { FONT } else { FONT.min(body[0] / 2.6).max(SMALLEST_FONT) };
            let text = caption_of(leading, *panel, is_labeled);
            drawing.text([corner[0], y + caption / 2.0 - 0.5], Align::Start, font, INK, &text);
        }
        let panel = Panel { report, start: panel * panel_len, top: report.top(), corner, cell };
        draw_heatmap(drawing, &panel, rows, columns);
        if is_labeled {
            draw_labels(drawing, &panel, rows, columns, [body, [side, foot]], is_turned);
        }
    }
    let panel_rows = visible.len().div_ceil(across) as f64;
    let mut height = begin[1] + panel_rows * step[1] - gap + MARGIN;
    let right = begin[0] + across as f64 * step[0] - gap + 8.0;
    let has_none = report.values.iter().any(Option::is_none);
    let bar_end = draw_color_bar(
        drawing,
        report,
        [right, begin[1] + caption + name],
        (height - 30.0).clamp(30.0, 90.0),
        has_none,
    );
    height = height.max(bar_end + MARGIN);
    // The picture is no wider than its contents.
    let mut used = right + BAR_ROOM;
    if !is_labeled {
        let names = leading.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(".");
        let legend = format!("panels: {names}; rows: {}; columns: {}", rows.name, columns.name);
        drawing.text([begin[0], height + FONT / 2.0 - 1.0], Align::Start, FONT, INK, &legend);
        height += FONT + MARGIN;
        used = used.max(begin[0] + text_width(&legend, FONT) + MARGIN);
        if columns.labels == rows.labels {
            let names = format!("{}, {}", rows.name, columns.name);
            height = draw_legend(drawing, &names, rows, width, height);
        } else {
            height = draw_legend(drawing, &rows.name, rows, width, height);
            height = draw_legend(drawing, &columns.name, columns, width, height);
        }
    }
    Ok([used.min(width), height])
}

/// Lists an axis's labels below panels that are too small for them, and returns the new height.
///
/// Consecutive numbers from 0 need no list.
fn draw_legend(drawing: &mut Drawing, name: &str, axis: &Axis, width: f64, mut height: f64) -> f64 {
    if axis.labels.iter().enumerate().all(|(place, label)| *label == place.to_string()) {
        return height;
    }
    let mut lines = vec![format!("{name}:")];
    for label in &axis.labels {
        let label = shortened(label, MAX_LABEL);
        match lines.last_mut() {
            Some(line) if text_width(line, FONT) + text_width(&label, FONT) < width - 4.0 * MARGIN => {
                // An em space, because SVG collapses ordinary spaces.
                *line += &format!("\u{2003}{label}");
            }
            _ => lines.push(label),
        }
    }
    for line in lines {
        drawing.text([MARGIN, height + FONT / 2.0 - 1.0], Align::Start, FONT, INK, &line);
        height += FONT + 2.0;
    }
    height + MARGIN
}

/// Number of panels per row, if the axes do not determine the layout.
fn columns_of_panels(panels: usize) -> usize {
    (1..=panels).find(|columns| columns * columns >= panels).unwrap_or(1)
}

fn caption_of(leading: &[Axis], mut panel: usize, is_long: bool) -> String {
    let mut parts = Vec::new();
    for axis in leading.iter().rev() {
        let label = &axis.labels[panel % axis.labels.len()];
        parts.push(if is_long { format!("{} {label}", axis.name) } else { label.clone() });
        panel /= axis.labels.len();
    }
    parts.reverse();
    parts.join(if is_long { ", " } else { "." })
}

/// Width and height of a cell: square if the axes have equal lengths, wide if there are texts.
fn cell_size(report: &Report, rows: &Axis, columns: &Axis, room: f64) -> [f64; 2] {
    let wide = (room / columns.labels.len() as f64).min(if report.texts.is_empty() { 24.0 } else { 60.0 });
    let high = if !report.texts.is_empty() {
        11.0
    } else if rows.labels.len() == columns.labels.len() {
        wide
    } else {
        wide.clamp(8.0, 16.0)
    };
    [wide, high.min(MAX_HEIGHT / rows.labels.len() as f64)]
}

fn draw_heatmap(drawing: &mut Drawing, panel: &Panel<'_>, rows: &Axis, columns: &Axis) {
    let Panel { report, start, top, corner, cell } = panel;
    let count = [columns.labels.len(), rows.labels.len()];
    let size = [cell[0] * count[0] as f64, cell[1] * count[1] as f64];
    drawing.push(format_args!("<g shape-rendering=\"crispEdges\">"));
    drawing.rect(*corner, size, NONE);
    for row in 0..count[1] {
        for column in 0..count[0] {
            if let Some(value) = report.at(start + row * count[0] + column) {
                let fill = hexadecimal(color(value, report.scale, *top));
                drawing.rect(
                    [corner[0] + column as f64 * cell[0], row_top(panel, row, count[1])],
                    *cell,
                    &fill,
                );
            }
        }
    }
    drawing.push(format_args!("</g>"));
    if report.texts.is_empty() && (cell[0] < PRINTED_CELL || cell[1] < FONT) {
        return;
    }
    for row in 0..count[1] {
        for column in 0..count[0] {
            let place = start + row * count[0] + column;
            let Some(value) = report.texts.get(place).cloned().or_else(|| report.at(place).map(three_digits))
            else {
                continue;
            };
            let text = &value;
            let longest = text.chars().count().clamp(1, MAX_LABEL) as f64;
            let font = (cell[0] * 0.94 / (longest * LETTER)).min(cell[1] * 0.75).clamp(SMALLEST_FONT, FONT);
            let text = fitted(text, cell[0] * 0.96, font);
            let fill = report.at(place).map_or(INK, |value| ink_on(color(value, report.scale, *top)));
            let middle =
                [corner[0] + (column as f64 + 0.5) * cell[0], row_top(panel, row, count[1]) + cell[1] / 2.0];
            drawing.text(middle, Align::Middle, font, fill, &text);
        }
    }
}

fn row_top(panel: &Panel<'_>, row: usize, rows: usize) -> f64 {
    let line = if panel.report.is_bottom_up() { rows - 1 - row } else { row };
    panel.corner[1] + line as f64 * panel.cell[1]
}

/// Draws the labels of rows and columns, and the names of the axes.
fn draw_labels(
    drawing: &mut Drawing,
    panel: &Panel<'_>,
    rows: &Axis,
    columns: &Axis,
    [body, [side, foot]]: [[f64; 2]; 2],
    is_turned: bool,
) {
    let [x, y] = panel.corner;
    let [wide, high] = panel.cell;
    let row_font = high.clamp(SMALLEST_FONT, FONT);
    for row in (0..rows.labels.len()).step_by(stride(row_font, high)) {
        let label = fitted(&rows.labels[row], side - NAME_ROOM - 3.0, row_font);
        let middle = row_top(panel, row, rows.labels.len()) + high / 2.0;
        drawing.text([x - 2.5, middle], Align::End, row_font, INK, &label);
    }
    let column_font = if is_turned { wide.clamp(SMALLEST_FONT, FONT) } else { FONT };
    let every = if is_turned { stride(column_font, wide) } else { 1 };
    for column in (0..columns.labels.len()).step_by(every) {
        let middle = x + (column as f64 + 0.5) * wide;
        if is_turned {
            let label = fitted(&columns.labels[column], foot - FONT - 5.0, column_font);
            drawing.text([middle, y + body[1] + 2.5], Align::Upwards, column_font, INK, &label);
        } else {
            let label = shortened(&columns.labels[column], MAX_LABEL);
            drawing.text([middle, y + body[1] + FONT / 2.0 + 2.0], Align::Middle, FONT, INK, &label);
        }
    }
    if text_width(&rows.name, FONT) > body[1] {
        drawing.text([x - 2.5, y - FONT / 2.0 - 1.0], Align::End, FONT, QUIET, &rows.name);
    } else {
        let middle = [x - side + NAME_ROOM / 2.0, y + body[1] / 2.0];
        drawing.text(middle, Align::Turned, FONT, QUIET, &rows.name);
    }
    drawing.text(
        [x + body[0] / 2.0, y + body[1] + foot - FONT / 2.0],
        Align::Middle,
        FONT,
        QUIET,
        &columns.name,
    );
}

/// Draws the color bar and returns its lower end.
fn draw_color_bar(
    drawing: &mut Drawing,
    report: &Report,
    [x, y]: [f64; 2],
    length: f64,
    has_none: bool,
) -> f64 {
    const STEPS: usize = 40;
    let top = report.top();
    let bottom = if report.scale == Scale::Signed { -top } else { 0.0 };
    let high = length / STEPS as f64;
    drawing.push(format_args!("<g shape-rendering=\"crispEdges\">"));
    for step in 0..STEPS {
        let share = 1.0 - (step as f32 + 0.5) / STEPS as f32;
        let fill = hexadecimal(color(bottom + (top - bottom) * share, report.scale, top));
        drawing.rect([x, y + step as f64 * high], [7.0, high], &fill);
    }
    drawing.push(format_args!("</g>"));
    let frame = [[x, y], [x + 7.0, y], [x + 7.0, y + length], [x, y + length], [x, y]];
    drawing.line(&frame, "#8a909c");
    let ticks = if report.scale == Scale::Signed { vec![top, 0.0, bottom] } else { vec![top, 0.0] };
    let last = (ticks.len() - 1) as f64;
    for (place, tick) in ticks.iter().enumerate() {
        let middle = y + length * place as f64 / last;
        drawing.text([x + 9.5, middle], Align::Start, FONT, INK, &tick_text(*tick));
    }
    if !has_none {
        return y + length + FONT / 2.0;
    }
    drawing.rect([x, y + length + 8.0], [7.0, 7.0], NONE);
    let is_attention =
        matches!(report.axes.as_slice(), [.., query, key] if query.name == "query" && key.name == "key");
    let name = if is_attention { "masked" } else { "no value" };
    drawing.text([x + 9.5, y + length + 11.5], Align::Start, FONT, INK, name);
    y + length + 16.0
}

/// Draws one axis as bars or as a line, and returns the height of the picture.
fn draw_bars(drawing: &mut Drawing, report: &Report, axis: &Axis, width: f64) -> f64 {
    let values = || (0..report.values.len()).map(|place| report.at(place));
    let [low, high] = [values().flatten().fold(0.0, f32::min), values().flatten().fold(0.0, f32::max)];
    let high = if low == high { low + 1.0 } else { high };
    let ticks: Vec<f32> = if low < 0.0 && high > 0.0 { vec![high, 0.0, low] } else { vec![high, low] };
    let tick_room = ticks.iter().map(|tick| text_width(&tick_text(*tick), FONT)).fold(0.0, f64::max) + 4.0;
    let line = MARGIN + FONT + 4.0;
    let text_end = if report.is_text(axis) { draw_tokens(drawing, report, width, line) } else { line };
    let [x, y] = [MARGIN + tick_room, text_end];
    let room = width - x - MARGIN;
    let step = room / axis.labels.len() as f64;
    let level = |value: f32| y + BARS_HEIGHT * f64::from((high - value) / (high - low));

    drawing.text(
        [MARGIN, MARGIN + FONT / 2.0],
        Align::Start,
        FONT,
        INK,
        &fitted(&report.title, width - 2.0 * MARGIN, FONT),
    );
    for tick in &ticks {
        drawing.line(&[[x, level(*tick)], [x + room, level(*tick)]], "#c9cdd6");
        drawing.text([x - 3.0, level(*tick)], Align::End, FONT, INK, &tick_text(*tick));
    }
    let middle = |place: usize| x + (place as f64 + 0.5) * step;
    if axis.labels.len() > MAX_BARS {
        let all: Vec<Option<f32>> = values().collect();
        let mut curve = |values: &dyn Fn(usize) -> Option<f32>, stroke: &str| {
            let points: Vec<Option<[f64; 2]>> =
                (0..all.len()).map(|place| Some([middle(place), level(values(place)?)])).collect();
            for run in points.split(Option::is_none) {
                drawing.line(&run.iter().flatten().copied().collect::<Vec<_>>(), stroke);
            }
        };
        if all.len() > MAX_PLAIN_CURVE {
            curve(&|place| all[place], "#b9d3ea");
            curve(&|place| running_mean(&all, place), &hexadecimal(BLUE[1]));
        } else {
            curve(&|place| all[place], &hexadecimal(BLUE[1]));
        }
    } else {
        for (place, value) in values().enumerate() {
            let left = middle(place) - step * 0.4;
            let Some(value) = value else {
                drawing.rect([left, level(0.0) - 1.0], [step * 0.8, 2.0], NONE);
                continue;
            };
            let ends = [level(value), level(0.0)];
            let from = ends[0].min(ends[1]);
            let fill = hexadecimal(if value < 0.0 { RED[0] } else { BLUE[0] });
            drawing.rect([left, from], [step * 0.8, (ends[0] - ends[1]).abs()], &fill);
        }
    }
    let is_turned = axis.labels.iter().any(|label| text_width(label, FONT) > step * 0.95);
    let below = y + BARS_HEIGHT + 4.0;
    let font = if is_turned { step.clamp(SMALLEST_FONT, FONT) } else { FONT };
    let foot = if is_turned { room_for(axis, font) } else { FONT + 2.0 };
    let every = if is_turned { stride(font, step) } else { 1 };
    for place in (0..axis.labels.len()).step_by(every) {
        if is_turned {
            let label = fitted(&axis.labels[place], foot - 2.0, font);
            drawing.text([middle(place), below], Align::Upwards, font, INK, &label);
        } else {
            drawing.text([middle(place), below + FONT / 2.0], Align::Middle, font, INK, &axis.labels[place]);
        }
    }
    let name = below + foot + FONT / 2.0;
    drawing.text([x + room / 2.0, name], Align::Middle, FONT, INK, &axis.name);
    name + FONT / 2.0 + MARGIN
}

/// Draws the text, each token on the color of its value, and returns its lower end.
fn draw_tokens(drawing: &mut Drawing, report: &Report, width: f64, mut y: f64) -> f64 {
    const LINE: f64 = FONT + 5.0;
    let mut x = MARGIN;
    for (place, token) in report.tokens.iter().enumerate() {
        let wide = text_width(&printable(&token.text), FONT) + 2.0;
        if x + wide > width - MARGIN && x > MARGIN {
            (x, y) = (MARGIN, y + LINE);
        }
        let fill = report.at(place).map(|value| color(value, report.scale, report.top()));
        drawing.rect([x, y], [wide, LINE - 1.0], &fill.map_or_else(|| NONE.to_owned(), hexadecimal));
        let ink = fill.map_or(INK, ink_on);
        drawing.text([x + wide / 2.0, y + LINE / 2.0], Align::Middle, FONT, ink, &token.text);
        x += wide;
    }
    y + LINE + 6.0
}

/// Running mean over a fiftieth of the values around an index; `None` if the index has no value.
fn running_mean(values: &[Option<f32>], place: usize) -> Option<f32> {
    values[place]?;
    let reach = values.len() / 100;
    let near = &values[place.saturating_sub(reach)..(place + reach + 1).min(values.len())];
    let known: Vec<f32> = near.iter().flatten().copied().collect();
    Some(known.iter().sum::<f32>() / known.len() as f32)
}

/// Width of an axis's longest label, with a gap.
fn room_for(axis: &Axis, font: f64) -> f64 {
    let widths = axis.labels.iter().map(|label| text_width(&shortened(label, MAX_LABEL), font));
    widths.fold(0.0, f64::max) + LABEL_GAP
}

/// Smallest interval between drawn labels at which they do not overlap.
#[expect(clippy::cast_possible_truncation, reason = "a small number, because cells have a minimum size")]
fn stride(font: f64, cell: f64) -> usize {
    (font / cell).ceil().max(1.0) as usize
}

/// Keeps the index at the end of right-to-left text.
fn ordered(text: &str) -> String {
    let is_leftward =
        |letter| matches!(letter, '\u{590}'..='\u{8ff}' | '\u{fb1d}'..='\u{fdff}' | '\u{fe70}'..='\u{fefc}');
    match text.rsplit_once(' ') {
        Some((text, index)) if text.contains(is_leftward) => format!("{text}\u{200e} {index}"),
        _ => text.to_owned(),
    }
}

/// Shortens a label to a width.
fn fitted(label: &str, width: f64, font: f64) -> String {
    // No letter is narrower than a quarter of the font size.
    let most = (4.0 * width / font).max(1.0);
    let lengths = (1..=label.chars().count()).rev().filter(|length| (*length as f64) <= most);
    let cut = lengths.map(|length| shortened(label, length)).find(|cut| text_width(cut, font) <= width);
    cut.unwrap_or_else(|| shortened(label, 1))
}

/// Estimated text width; East Asian letters are square.
fn text_width(text: &str, font: f64) -> f64 {
    let width = |character| match character {
        'f' | 'i' | 'j' | 'l' | 'r' | 't' | 'I' | '|' | '.' | ',' | ':' | ';' | '\'' | '!' | '·' | ' '
        | '(' | ')' => NARROW_LETTER,
        'm' | 'w' | 'M' | 'W' | '@' => WIDE_LETTER,
        '\u{1100}'.. => 1.0,
        _ => LETTER,
    };
    text.chars().map(|character| font * width(character)).sum()
}

/// Returns blue above 0 and red below, stronger toward `top`.
pub(crate) fn signed_color(value: f32, top: f32) -> [f64; 3] {
    color(value, Scale::Signed, top)
}

fn color(value: f32, scale: Scale, top: f32) -> [f64; 3] {
    let ends = if scale == Scale::Signed && value < 0.0 { RED } else { BLUE };
    let magnitude = if scale == Scale::Signed { value.abs() } else { value };
    let way = f64::from(magnitude / top).clamp(0.0, 1.0) * 2.0;
    let (from, to, part) = if way < 1.0 { (ZERO, ends[0], way) } else { (ends[0], ends[1], way - 1.0) };
    std::array::from_fn(|channel| from[channel] + (to[channel] - from[channel]) * part)
}

pub(crate) fn hexadecimal(color: [f64; 3]) -> String {
    format!("#{}", color.map(|channel| format!("{:02x}", byte(channel))).concat())
}

#[expect(clippy::cast_possible_truncation, reason = "color components are at most 255")]
fn byte(channel: f64) -> u8 {
    channel.round() as u8
}

/// Returns the readable text color on a background: black or white.
fn ink_on([red, green, blue]: [f64; 3]) -> &'static str {
    if 0.3 * red + 0.59 * green + 0.11 * blue > 118.0 { INK } else { "#fff" }
}

/// Formats a value to fit into a cell.
fn three_digits(value: f32) -> String {
    let text = if value.abs() >= 99.95 { format!("{value:.0}") } else { format!("{value:.2}") };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".into() } else { text.replace('-', "−") }
}

fn tick_text(value: f32) -> String {
    let text = short(value);
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').replace('-', "−")
    } else {
        text.replace('-', "−")
    }
}

/// Formats a length with at most two decimal places.
fn number(length: f64) -> String {
    let text = format!("{length:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
