//! The graph of a model: which part's output is part of which part's input, and circuits, which are some of its edges.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::{Display, Formatter};
use std::ops::Range;

use candle_gpt2::Gpt2Config;

use crate::error::Result;
use crate::{Head, InterpretError};

/// What writes to the residual stream. Biases of output projections and position embeddings are part of no source: they reach every
/// destination, in every circuit.
///
/// ```
/// use candle_gpt2_interpret::{EdgeSource, Head};
///
/// assert_eq!(EdgeSource::Head(Head { layer: 9, head: 6 }).to_string(), "a9.h6");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EdgeSource {
    /// The token embeddings.
    Input,
    /// A head.
    Head(Head),
    /// The MLP of this layer.
    Mlp(usize),
}

impl Display for EdgeSource {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Input => f.write_str("input"),
            Self::Head(Head { layer, head }) => write!(f, "a{layer}.h{head}"),
            Self::Mlp(layer) => write!(f, "m{layer}"),
        }
    }
}

/// What reads the residual stream.
///
/// ```
/// use candle_gpt2_interpret::{EdgeDestination, Head};
///
/// assert_eq!(EdgeDestination::Query(Head { layer: 11, head: 10 }).to_string(), "a11.h10<q>");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EdgeDestination {
    /// The queries of a head, before the block's first norm.
    Query(Head),
    /// Its keys.
    Key(Head),
    /// Its values.
    Value(Head),
    /// The MLP of this layer, before the block's second norm.
    Mlp(usize),
    /// The end of the residual stream, before the final norm.
    Logits,
}

impl EdgeDestination {
    /// The source that is computed from it; `None` for the logits.
    pub fn source(self) -> Option<EdgeSource> {
        match self {
            Self::Query(head) | Self::Key(head) | Self::Value(head) => Some(EdgeSource::Head(head)),
            Self::Mlp(layer) => Some(EdgeSource::Mlp(layer)),
            Self::Logits => None,
        }
    }

    /// The name of the node that it belongs to: `a11.h10`, `m3` or `logits`.
    pub fn node(self) -> String {
        self.source().map_or_else(|| "logits".into(), |source| source.to_string())
    }
}

impl Display for EdgeDestination {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let part = match self {
            Self::Query(_) => "<q>",
            Self::Key(_) => "<k>",
            Self::Value(_) => "<v>",
            Self::Mlp(_) | Self::Logits => "",
        };
        write!(f, "{}{part}", self.node())
    }
}

/// One part's output as one part of another's input. [`EdgeGraph::edges`] lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Edge {
    /// Where it begins.
    pub source: EdgeSource,
    /// Where it ends.
    pub destination: EdgeDestination,
}

/// As the Mechanistic Interpretability Benchmark writes it: `a9.h9->a11.h10<q>`.
impl Display for Edge {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}->{}", self.source, self.destination)
    }
}

/// The edges into a destination: they begin at the first so many sources.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) destination: EdgeDestination,
    pub(super) edges: Range<usize>,
}

/// All edges of a model: from every source to every destination that is computed after it.
///
/// Source: "Attribution Patching Outperforms Automated Circuit Discovery" (arXiv:2310.10348), with the nodes of "Have Faith in
/// Faithfulness" (arXiv:2403.17806).
///
/// ```
/// use candle_gpt2_interpret::EdgeGraph;
///
/// let gpt2 = EdgeGraph::new(12, 12);
/// assert_eq!((gpt2.source_count(), gpt2.edge_count()), (157, 32_491));
/// let first = gpt2.edges().next().ok_or("there are edges")?;
/// assert_eq!(first.to_string(), "input->a0.h0<q>");
/// # Ok::<(), &str>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeGraph {
    n_layer: usize,
    n_head: usize,
}

impl EdgeGraph {
    /// That of a model with so many layers of so many heads.
    pub fn new(n_layer: usize, n_head: usize) -> Self {
        Self { n_layer, n_head }
    }

    /// That of a model with this configuration.
    pub fn of(config: &Gpt2Config) -> Self {
        Self::new(config.n_layer, config.n_head)
    }

    /// Number of sources: the input, and the heads and the MLP of each layer.
    pub fn source_count(&self) -> usize {
        self.sources_before(self.n_layer)
    }

    /// Number of edges.
    pub fn edge_count(&self) -> usize {
        self.first_edge(self.n_layer) + self.source_count()
    }

    /// The sources, in the order of computation.
    pub fn sources(&self) -> impl Iterator<Item = EdgeSource> + use<> {
        let n_head = self.n_head;
        let of_layer = move |layer| {
            let heads = (0..n_head).map(move |head| EdgeSource::Head(Head { layer, head }));
            heads.chain([EdgeSource::Mlp(layer)])
        };
        std::iter::once(EdgeSource::Input).chain((0..self.n_layer).flat_map(of_layer))
    }

    /// The edges, in the order in which scores and circuits have them: by destination in the order of computation (of a layer the queries
    /// of all heads, then keys, then values, then the MLP), then by source.
    pub fn edges(&self) -> impl Iterator<Item = Edge> + use<> {
        let sources: Vec<EdgeSource> = self.sources().collect();
        self.rows().into_iter().flat_map(move |row| {
            let into = |source: &EdgeSource| Edge { source: *source, destination: row.destination };
            sources[..row.edges.len()].iter().map(into).collect::<Vec<_>>()
        })
    }

    /// Sources before the heads of a layer.
    pub(super) fn sources_before(&self, layer: usize) -> usize {
        1 + layer * (self.n_head + 1)
    }

    /// The first edge into a layer, the logits being one: layer `i` has `3 H` destinations for `1 + i (H + 1)` sources, and one for `H` more.
    fn first_edge(&self, layer: usize) -> usize {
        let (heads, before) = (self.n_head, layer * layer.saturating_sub(1) / 2);
        layer * (4 * heads + 1) + before * (heads + 1) * (3 * heads + 1)
    }

    /// The queries of all heads of a layer, then their keys, then their values.
    pub(super) fn rows_of_heads(&self, layer: usize) -> Vec<Row> {
        let (sources, first) = (self.sources_before(layer), self.first_edge(layer));
        let parts = [EdgeDestination::Query, EdgeDestination::Key, EdgeDestination::Value];
        let destinations =
            parts.into_iter().flat_map(|part| (0..self.n_head).map(move |head| part(Head { layer, head })));
        let row = |(place, destination): (usize, EdgeDestination)| Row {
            destination,
            edges: first + place * sources..first + (place + 1) * sources,
        };
        destinations.enumerate().map(row).collect()
    }

    pub(super) fn row_of_mlp(&self, layer: usize) -> Row {
        let sources = self.sources_before(layer);
        let first = self.first_edge(layer) + 3 * self.n_head * sources;
        Row { destination: EdgeDestination::Mlp(layer), edges: first..first + sources + self.n_head }
    }

    pub(super) fn row_of_logits(&self) -> Row {
        Row { destination: EdgeDestination::Logits, edges: self.first_edge(self.n_layer)..self.edge_count() }
    }

    /// The destinations with their edges, in the order of computation.
    pub(super) fn rows(&self) -> Vec<Row> {
        let of_layer = |layer| [self.rows_of_heads(layer), vec![self.row_of_mlp(layer)]].concat();
        (0..self.n_layer).flat_map(of_layer).chain([self.row_of_logits()]).collect()
    }

    /// The place of the node that a destination belongs to: that of its source, the logits behind them.
    fn node_of(&self, destination: EdgeDestination) -> usize {
        match destination.source() {
            Some(EdgeSource::Head(Head { layer, head })) => self.sources_before(layer) + head,
            Some(EdgeSource::Mlp(layer)) => self.sources_before(layer) + self.n_head,
            Some(EdgeSource::Input) => 0,
            None => self.source_count(),
        }
    }
}

/// How the edges of a circuit are chosen by their scores, of which the size counts. [`Circuit::selected`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Selection {
    /// From the logits back: again and again the strongest edge into a node that is in already.
    #[default]
    Greedy,
    /// The strongest edges, wherever they are.
    Strongest,
}

/// Some of the edges of a model, at all positions or, in a circuit with spans, each at some of them.
///
/// ```
/// use candle_gpt2_interpret::{Circuit, EdgeGraph, Selection};
///
/// let graph = EdgeGraph::new(1, 1); // input and a0.h0 and m0, logits
/// let names: Vec<String> = graph.edges().map(|edge| edge.to_string()).collect();
/// assert_eq!(names[3..], ["input->m0", "a0.h0->m0", "input->logits", "a0.h0->logits", "m0->logits"]);
/// let scores = [0., 0., -3., 1., 0., 0.5, 2., 0.];
/// let circuit = Circuit::selected(graph, &scores, 2, Selection::Greedy)?;
/// let kept: Vec<String> = circuit.edges().map(|edge| edge.to_string()).collect();
/// assert_eq!(kept, ["input->a0.h0<v>", "a0.h0->logits"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Circuit {
    graph: EdgeGraph,
    /// Of each span every edge.
    kept: Vec<bool>,
}

impl Circuit {
    /// Every edge: the model itself.
    pub fn whole(graph: EdgeGraph) -> Self {
        Self { graph, kept: vec![true; graph.edge_count()] }
    }

    /// No edge.
    pub fn empty(graph: EdgeGraph) -> Self {
        Self { graph, kept: vec![false; graph.edge_count()] }
    }

    /// Whether each edge is kept, in the order of [`EdgeGraph::edges`]; with spans all edges in the first one, then all in the second, …
    ///
    /// # Errors
    /// When these are not whole lists of edges.
    pub fn new(graph: EdgeGraph, kept: Vec<bool>) -> Result<Self> {
        let count = graph.edge_count();
        match kept.is_empty() || !kept.len().is_multiple_of(count) {
            true => Err(InterpretError::Mismatch(format!("{} values for {count} edges", kept.len()))),
            false => Ok(Self { graph, kept }),
        }
    }

    /// Up to `count` edges by the size of their scores, which are in the order of [`Circuit::new`]; then those without a connection to both
    /// input and logits are dropped.
    ///
    /// # Errors
    /// When the scores are not whole lists of edges.
    pub fn selected(graph: EdgeGraph, scores: &[f32], count: usize, selection: Selection) -> Result<Self> {
        let mut circuit = Self::new(graph, vec![false; scores.len()])?;
        // Sizes of numbers in the order of their bits; of equal ones the first.
        let ranked = |place: usize| (scores[place].abs().to_bits(), Reverse(place));
        match selection {
            Selection::Strongest => {
                let mut places: Vec<usize> = (0..scores.len()).collect();
                places.sort_unstable_by_key(|place| Reverse(ranked(*place)));
                places.iter().take(count).for_each(|place| circuit.kept[*place] = true);
            }
            Selection::Greedy => circuit.take_greedily(count, ranked),
        }
        Ok(circuit.connected())
    }

    fn take_greedily(&mut self, count: usize, ranked: impl Fn(usize) -> (u32, Reverse<usize>)) {
        let (edges, rows) = (self.graph.edge_count(), self.graph.rows());
        let mut into: Vec<Vec<&Row>> = vec![Vec::new(); self.graph.source_count() + 1];
        rows.iter().for_each(|row| into[self.graph.node_of(row.destination)].push(row));
        let mut source_of = vec![0; edges];
        for row in &rows {
            row.edges.clone().enumerate().for_each(|(source, edge)| source_of[edge] = source);
        }
        let mut candidates = BinaryHeap::new();
        // All edges into a node, in all spans, once.
        let mut open = |node: usize, candidates: &mut BinaryHeap<_>| {
            for edge in std::mem::take(&mut into[node]).into_iter().flat_map(|row| row.edges.clone()) {
                candidates.extend((edge..self.kept.len()).step_by(edges).map(&ranked));
            }
        };
        open(self.graph.source_count(), &mut candidates);
        let mut taken = Vec::new();
        while taken.len() < count
            && let Some((_, Reverse(place))) = candidates.pop()
        {
            taken.push(place);
            open(source_of[place % edges], &mut candidates);
        }
        taken.into_iter().for_each(|place| self.kept[place] = true);
    }

    /// The edges on the paths from the input to the logits; a head's queries, keys and values count as one node.
    pub fn connected(mut self) -> Self {
        let (rows, logits) = (self.graph.rows(), self.graph.source_count());
        let mut is_reached = vec![false; logits + 1];
        is_reached[0] = true;
        for row in &rows {
            for (source, edge) in row.edges.clone().enumerate() {
                if !is_reached[source] {
                    self.drop_edge(edge);
                } else if self.keeps(edge) {
                    is_reached[self.graph.node_of(row.destination)] = true;
                }
            }
        }
        let mut is_used = vec![false; logits + 1];
        is_used[logits] = true;
        for row in rows.iter().rev() {
            for (source, edge) in row.edges.clone().enumerate() {
                if !is_used[self.graph.node_of(row.destination)] {
                    self.drop_edge(edge);
                } else if self.keeps(edge) {
                    is_used[source] = true;
                }
            }
        }
        self
    }

    fn drop_edge(&mut self, edge: usize) {
        let edges = self.graph.edge_count();
        (edge..self.kept.len()).step_by(edges).for_each(|place| self.kept[place] = false);
    }

    /// Whether an edge, by its place in [`EdgeGraph::edges`], is kept in any span.
    pub fn keeps(&self, edge: usize) -> bool {
        self.kept[edge..].iter().step_by(self.graph.edge_count()).any(|is_kept| *is_kept)
    }

    /// Whether each edge is kept, as [`Circuit::new`] takes them.
    pub fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// The graph that it is a part of.
    pub fn graph(&self) -> EdgeGraph {
        self.graph
    }

    /// Spans that edges are kept in; 1 without any.
    pub fn span_count(&self) -> usize {
        self.kept.len() / self.graph.edge_count()
    }

    /// Edges that are kept; with spans, in each span.
    pub fn edge_count(&self) -> usize {
        self.kept.iter().filter(|is_kept| **is_kept).count()
    }

    /// The edges that are kept in any span.
    pub fn edges(&self) -> impl Iterator<Item = Edge> {
        self.graph.edges().enumerate().filter(|(edge, _)| self.keeps(*edge)).map(|(_, edge)| edge)
    }

    /// Whether anything reads what is computed from a destination.
    pub(super) fn is_used(&self, destination: EdgeDestination) -> bool {
        let node = self.graph.node_of(destination);
        let reads = |row: &Row| node < row.edges.len() && self.keeps(row.edges.start + node);
        destination == EdgeDestination::Logits || self.graph.rows().iter().any(reads)
    }

    pub(super) fn set(&mut self, edge: usize, is_kept: bool) {
        self.kept[edge] = is_kept;
    }

    /// 1 for each edge that is left out in a span, `(rows, sources)` row-major; `None` if none is.
    pub(super) fn left_out(&self, span: usize, rows: &[Row]) -> Option<Vec<f32>> {
        let first = span * self.graph.edge_count();
        let edges = rows.iter().flat_map(|row| row.edges.clone());
        let mask: Vec<f32> = edges.map(|edge| if self.kept[first + edge] { 0.0 } else { 1.0 }).collect();
        mask.contains(&1.0).then_some(mask)
    }
}
