//! Attribution graphs as pages and pictures: tokens from left to right, layers from the bottom up.
//!
//! A picture shows the strongest edges. A page shows the edges of the selected node, and the pinned nodes as
//! a separate graph.

use candle_gpt2_web::{FEATURE_CSS, FEATURE_HTML, GRAPH_CSS, GRAPH_HTML, script};
use serde::Serialize;

use crate::page::fill_template;
use crate::report::shortened;
use crate::svg::{Align, Drawing, FONT, INK, MARGIN, document, hexadecimal, signed_color};
use crate::{FeatureCard, PictureError, Report, Token, Width};

/// Maximum number of points in a picture; more would be unreadable.
const MAX_POINTS: usize = 3000;
/// Maximum number of edges in a picture; the strongest are drawn.
const MAX_LINES: usize = 400;
/// Distance between two points in a cell.
const STEP: f64 = 9.0;
const RADIUS: f64 = 3.2;
/// Width reserved for row names.
const SIDE: f64 = 46.0;
const LONGEST_TOKEN: usize = 12;

/// An attribution graph to draw, with a [`Report`] that supplies the title, tokens and notes.
///
/// ```
/// use candle_gpt2_pictures::{AttributionGraph, GraphLine, GraphPoint, PointKind, Report, Token, Width, graph_page, graph_svg};
///
/// let tokens = vec![Token::new(0, 5, b"One"), Token::new(1, 6, b" day")];
/// let report = Report::new("graph", "a graph".into(), "gpt2".into(), tokens, false);
/// let point = |id: &str, kind, row, column| GraphPoint {
///     id: id.into(), name: id.into(), kind, row, column, influence: 0.5, share: 0.5, activation: None, zeroed: None, card: None,
///     command: None,
/// };
/// let graph = AttributionGraph {
///     rows: vec!["embeddings".into(), "logits".into()],
///     points: vec![point("E_5_0", PointKind::Embedding, 0, 0), point("2_7_1", PointKind::Logit, 1, 1)],
///     lines: vec![GraphLine { source: 0, target: 1, weight: 0.8 }],
/// };
/// assert!(graph_page(&report, &graph).contains("<title>a graph"));
/// assert_eq!(graph_svg(&report, &graph, Width::OneColumn)?.matches("<circle").count(), 2);
/// # Ok::<(), candle_gpt2_pictures::PictureError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttributionGraph {
    /// Names of the rows, lowest first.
    pub rows: Vec<String>,
    /// Nodes.
    pub points: Vec<GraphPoint>,
    /// Edges.
    pub lines: Vec<GraphLine>,
}

/// A node of an [`AttributionGraph`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GraphPoint {
    /// Identifier in files and options.
    pub id: String,
    /// Human-readable description.
    pub name: String,
    /// Kind of node.
    pub kind: PointKind,
    /// Row index, from 0.
    pub row: usize,
    /// Token index, from 0.
    pub column: usize,
    /// Influence on the prediction.
    pub influence: f64,
    /// Cumulative influence fraction of this node and all more influential ones.
    pub share: f64,
    /// Activation of a feature.
    pub activation: Option<f64>,
    /// Predicted and actual change in the prediction if a feature is set to 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zeroed: Option<[f64; 2]>,
    /// Tokens that a feature makes more probable, and texts in which it is active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<FeatureCard>,
    /// Command that shows more about a feature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Kind of a node in an [`AttributionGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PointKind {
    /// A feature.
    Feature,
    /// Reconstruction error, the part that no feature explains.
    Error,
    /// Embedding of a token.
    Embedding,
    /// Embedding of a position.
    Position,
    /// A logit.
    Logit,
}

/// An edge of an [`AttributionGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GraphLine {
    /// Index of the source point.
    pub source: usize,
    /// Index of the target point.
    pub target: usize,
    /// Contribution of the source to the target.
    pub weight: f32,
}

/// Data for the page's script.
#[derive(Serialize)]
struct Data<'a> {
    title: &'a str,
    model: &'a str,
    tokens: &'a [Token],
    bos: bool,
    notes: &'a [String],
    #[serde(flatten)]
    graph: &'a AttributionGraph,
}

/// Renders a graph as one self-contained HTML file.
///
/// A node that is clicked, or selected with the arrow keys, shows its edges. Nodes can be pinned (`p`), and
/// pinned nodes can be grouped under a name. The URL fragment holds the selection.
///
/// See [`AttributionGraph`] for an example.
pub fn graph_page(report: &Report, graph: &AttributionGraph) -> String {
    let elements = [GRAPH_HTML, FEATURE_HTML].concat();
    let style = [GRAPH_CSS, FEATURE_CSS].concat();
    fill_template(
        &report.title,
        &elements,
        &style,
        &script("parts/graph-page.js"),
        &graph_data(report, graph),
    )
}

/// Serializes a graph as the JSON that `drawGraph` in `parts/graph.js` expects.
///
/// The keys are `title`, `model`, `tokens`, `bos` and `notes` of the report, and `rows`, `points` and
/// `lines`.
///
/// See [`AttributionGraph`] for an example.
pub fn graph_data(report: &Report, graph: &AttributionGraph) -> String {
    let Report { title, model, tokens, bos, notes, .. } = report;
    let data = Data { title, model, tokens, bos: *bos, notes, graph };
    serde_json::to_string(&data).unwrap_or_default()
}

/// Renders a graph as an SVG picture of its nodes and its strongest edges.
///
/// See [`AttributionGraph`] for an example.
///
/// # Errors
/// If the graph has no nodes, or more than 3,000.
pub fn graph_svg(report: &Report, graph: &AttributionGraph, width: Width) -> Result<String, PictureError> {
    let points = graph.points.len();
    if points == 0 {
        return Err(PictureError::Nothing);
    }
    if points > MAX_POINTS {
        let axes = "node (lower the node threshold)".into();
        return Err(PictureError::TooManyCells { cells: points, limit: MAX_POINTS, axes });
    }
    let columns =
        graph.points.iter().map(|point| point.column + 1).max().unwrap_or(1).max(report.tokens.len());
    let step = (width.points() - SIDE - 2.0 * MARGIN) / columns as f64;
    let layout = Layout::new(graph, columns, step);
    let mut drawing = Drawing::default();
    for (row, name) in graph.rows.iter().enumerate() {
        let (top, height) = layout.row(row);
        drawing.line(&[[MARGIN + SIDE, top], [width.points() - MARGIN, top]], "#e3e5ea");
        drawing.text([MARGIN + SIDE - 4.0, top + height / 2.0], Align::End, FONT, INK, name);
    }
    let mut lines: Vec<&GraphLine> = graph.lines.iter().collect();
    lines.sort_by(|a, b| b.weight.abs().total_cmp(&a.weight.abs()));
    let top = lines.first().map_or(1.0, |line| line.weight.abs()).max(f32::MIN_POSITIVE);
    for line in lines.iter().take(MAX_LINES).rev() {
        let color = hexadecimal(signed_color(line.weight, top));
        let [from, to] = [line.source, line.target].map(|point| layout.places[point]);
        drawing.stroke(from, to, &color, 0.3 + 1.7 * f64::from(line.weight.abs() / top));
    }
    for (point, place) in graph.points.iter().zip(&layout.places) {
        let fill = match point.kind {
            PointKind::Feature => "#1f5fae",
            PointKind::Error => "#dcdee3",
            PointKind::Embedding | PointKind::Position => "#8c96a8",
            PointKind::Logit => "#b83a00",
        };
        drawing.circle(*place, RADIUS, fill);
    }
    for (point, [x, y]) in
        labeled(graph).into_iter().map(|point| (&graph.points[point], layout.places[point]))
    {
        let isolated = [x - RADIUS - 1.0, y - RADIUS];
        drawing.text(isolated, Align::End, FONT, INK, &label_of(point));
    }
    let foot = layout.bottom + 3.0;
    for token in &report.tokens {
        let label = shortened(&token.label(), LONGEST_TOKEN);
        let middle = MARGIN + SIDE + (token.index as f64 + 0.5) * step;
        drawing.text([middle, foot], Align::Upwards, FONT, INK, &label);
    }
    let room = FONT * 0.6 * LONGEST_TOKEN as f64;
    let mut height = foot + room;
    if graph.lines.len() > MAX_LINES {
        let text = format!("the {MAX_LINES} strongest of {} edges", graph.lines.len());
        drawing.text([MARGIN, height + FONT / 2.0], Align::Start, FONT, INK, &text);
        height += FONT;
    }
    Ok(document(report, [width.points(), height + MARGIN], &drawing))
}

/// Points with labels: the most probable logit and the most influential features.
fn labeled(graph: &AttributionGraph) -> Vec<usize> {
    const FEATURES: usize = 5;
    let of_kind = |kind| (0..graph.points.len()).filter(move |point| graph.points[*point].kind == kind);
    let mut features: Vec<usize> = of_kind(PointKind::Feature).collect();
    features.sort_by(|a, b| graph.points[*b].influence.total_cmp(&graph.points[*a].influence));
    of_kind(PointKind::Logit).take(1).chain(features.into_iter().take(FEATURES)).collect()
}

/// Label of a point: the token of a logit, or the layer and index of a feature.
fn label_of(point: &GraphPoint) -> String {
    match point.name.strip_prefix("logit of ") {
        Some(name) => name.rsplit_once(", probability").map_or(name, |(token, _)| token).to_owned(),
        None => point.id.rsplit_once('_').map_or(&*point.id, |(feature, _)| feature).replace('_', "·"),
    }
}

/// Positions of points and rows in the picture.
struct Layout {
    places: Vec<[f64; 2]>,
    /// Top and height of each row, lowest first.
    rows: Vec<(f64, f64)>,
    bottom: f64,
}

impl Layout {
    /// Arranges the points of each cell side by side, in as many lines as needed.
    fn new(graph: &AttributionGraph, columns: usize, step: f64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a picture is less than a thousand points wide")]
        let across = ((step / STEP) as usize).max(1);
        let mut counts = vec![vec![0usize; columns]; graph.rows.len()];
        let indices: Vec<usize> = graph
            .points
            .iter()
            .map(|point| {
                let count = &mut counts[point.row][point.column];
                *count += 1;
                *count - 1
            })
            .collect();
        let lines = counts.iter().map(|row| row.iter().max().copied().unwrap_or(0).div_ceil(across).max(1));
        let heights: Vec<f64> = lines.map(|lines| (lines as f64 + 0.8) * STEP).collect();
        let mut rows = Vec::new();
        let mut top = MARGIN;
        for height in heights.iter().rev() {
            rows.push((top, *height));
            top += height;
        }
        rows.reverse();
        let place = |(point, index): (&GraphPoint, &usize)| {
            let (row_top, _) = rows[point.row];
            let left = MARGIN + SIDE + point.column as f64 * step;
            let inside = counts[point.row][point.column].min(across) as f64;
            let start = left + (step - (inside - 1.0) * STEP) / 2.0;
            [start + (index % across) as f64 * STEP, row_top + ((index / across) as f64 + 0.9) * STEP]
        };
        let places = graph.points.iter().zip(&indices).map(place).collect();
        Self { places, rows, bottom: top }
    }

    fn row(&self, row: usize) -> (f64, f64) {
        self.rows[row]
    }
}
