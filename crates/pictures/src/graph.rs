//! Graphs of connected parts of a model, shown with a report's values.

/// Nodes in rows, and upward links between them.
///
/// [`Report::graph`](crate::Report::graph) holds one, and pages and pictures show it.
///
/// ```
/// use candle_gpt2_pictures::{Graph, GraphLink, GraphNode, Report, Width, svg};
///
/// let node = |label: &str, row, column| GraphNode { label: label.into(), row, column };
/// let link = |from, to, weight| GraphLink { from, to, port: None, weight };
/// let graph = Graph {
///     nodes: vec![node("input", 0, 0.5), node("a0.h1", 1, 0.3), node("logits", 2, 0.5)],
///     links: vec![link(0, 1, 0.5), GraphLink { port: Some('v'), ..link(1, 2, -2.0) }],
/// };
/// let report = Report { graph: Some(graph), ..Report::new("example", "a circuit".into(), "gpt2".into(), Vec::new(), false) };
/// let picture = svg(&report, Width::OneColumn)?;
/// assert_eq!(picture.matches("<path").count(), 2);
/// assert!(picture.contains(">a0.h1</text>"));
/// # Ok::<(), candle_gpt2_pictures::PictureError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Nodes.
    pub nodes: Vec<GraphNode>,
    /// Links, each from a node to one above it.
    pub links: Vec<GraphLink>,
}

/// A node of a [`Graph`].
#[derive(Clone, Debug, PartialEq)]
pub struct GraphNode {
    /// Text in the node.
    pub label: String,
    /// Row, counted from 0 at the bottom.
    pub row: usize,
    /// Position in the row, from 0 at the left to 1 at the right.
    pub column: f64,
}

/// A link of a [`Graph`].
#[derive(Clone, Debug, PartialEq)]
pub struct GraphLink {
    /// Index of the source node.
    pub from: usize,
    /// Index of the target node.
    pub to: usize,
    /// Port on the target node: `q` at the left, `k` in the middle, `v` at the right.
    pub port: Option<char>,
    /// Weight, drawn as width and color: blue above 0, red below.
    pub weight: f32,
}
