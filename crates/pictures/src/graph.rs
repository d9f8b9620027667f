//! A graph of a model's parts: what a report has beside its values where the parts are connected.

/// Nodes in rows, and links upwards between them. [`Report::graph`](crate::Report::graph) holds one; it is in pages and pictures.
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
    /// The nodes.
    pub nodes: Vec<GraphNode>,
    /// The links, each from a node to one above it.
    pub links: Vec<GraphLink>,
}

/// A node of a [`Graph`].
#[derive(Clone, Debug, PartialEq)]
pub struct GraphNode {
    /// What is written in it.
    pub label: String,
    /// Its row, counted from 0 at the bottom.
    pub row: usize,
    /// Its place in the row, from 0 at the left to 1 at the right.
    pub column: f64,
}

/// A link of a [`Graph`].
#[derive(Clone, Debug, PartialEq)]
pub struct GraphLink {
    /// The place of the node where it begins.
    pub from: usize,
    /// That of the node where it ends.
    pub to: usize,
    /// Where on that node: `q` at its left, `k` in the middle, `v` at its right.
    pub port: Option<char>,
    /// Its width and colour: blue above 0, red below.
    pub weight: f32,
}
