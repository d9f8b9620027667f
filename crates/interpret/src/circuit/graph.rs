//! Edge graph between a model's component outputs and inputs, and circuits as subsets of its edges.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::{Display, Formatter};
use std::ops::Range;

use candle_gpt2::Gpt2Config;

use crate::error::Result;
use crate::{Head, InterpretError};

/// A component that writes to the residual stream.
///
/// Position embeddings and the biases of output projections belong to no source. They reach every destination
/// in every circuit.
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
    /// An attention head.
    Head(Head),
    /// The MLP of the layer with this index.
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

/// A component input that reads the residual stream.
///
/// ```
/// use candle_gpt2_interpret::{EdgeDestination, Head};
///
/// assert_eq!(EdgeDestination::Query(Head { layer: 11, head: 10 }).to_string(), "a11.h10<q>");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EdgeDestination {
    /// Query input of a head, before the block's first norm.
    Query(Head),
    /// Key input of a head.
    Key(Head),
    /// Value input of a head.
    Value(Head),
    /// Input of the MLP in the layer with this index, before the block's second norm.
    Mlp(usize),
    /// End of the residual stream, before the final norm.
    Logits,
}

impl EdgeDestination {
    /// Returns the component that reads this input, as a source; `None` for the logits.
    pub fn source(self) -> Option<EdgeSource> {
        match self {
            Self::Query(head) | Self::Key(head) | Self::Value(head) => Some(EdgeSource::Head(head)),
            Self::Mlp(layer) => Some(EdgeSource::Mlp(layer)),
            Self::Logits => None,
        }
    }

    /// Returns the name of the destination's node: `a11.h10`, `m3` or `logits`.
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

/// Token spans at the two ends of an edge, counted from 0.
///
/// Only keys and values cross between spans: they are computed at the source's position and used by a query
/// at the destination's position. [`EdgeGraph::in_spans`] takes the pairs of spans with crossing edges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EdgeSpans {
    /// Span in which the source writes its output.
    pub source: usize,
    /// Span in which the destination uses the source's output.
    pub destination: usize,
}

impl EdgeSpans {
    /// Places both ends in the same span.
    pub fn within(span: usize) -> Self {
        Self { source: span, destination: span }
    }
}

/// One component's output as part of another's input. [`EdgeGraph::edges`] lists all edges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Edge {
    /// Source of the edge.
    pub source: EdgeSource,
    /// Destination of the edge.
    pub destination: EdgeDestination,
    /// Spans of the two ends; both are 0 in a graph without spans.
    pub spans: EdgeSpans,
}

/// Formats an edge as in the Mechanistic Interpretability Benchmark: `a9.h9->a11.h10<q>`.
///
/// The format does not include spans.
impl Display for Edge {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}->{}", self.source, self.destination)
    }
}

/// Edges into one destination, from the first `sources` sources.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) destination: EdgeDestination,
    pub(super) sources: usize,
    /// Index of the row's first edge among the edges within a span.
    within: usize,
    /// Index of the row's first edge among the edges between two spans, if the row has any.
    crossing: Option<usize>,
}

/// All edges of a model, from each source to every destination computed after it.
///
/// With spans, each edge exists once for each pair of spans that it can connect.
///
/// Source: "Attribution Patching Outperforms Automated Circuit Discovery" (arXiv:2310.10348). The nodes
/// come from "Have Faith in Faithfulness" (arXiv:2403.17806), and the positions from
/// "Position-aware Automatic Circuit Discovery" (arXiv:2502.04577).
///
/// ```
/// use candle_gpt2_interpret::{EdgeGraph, EdgeSpans};
///
/// let gpt2 = EdgeGraph::new(12, 12);
/// assert_eq!((gpt2.source_count(), gpt2.edge_count()), (157, 32_491));
/// let first = gpt2.edges().next().ok_or("no edges")?;
/// assert_eq!(first.to_string(), "input->a0.h0<q>");
///
/// // Only edges into keys and values connect two spans.
/// let small = EdgeGraph::new(1, 1);
/// assert_eq!(small.edge_count(), 8);
/// assert_eq!(small.in_spans(2, [EdgeSpans { source: 0, destination: 1 }])?.edge_count(), 8 + 8 + 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeGraph {
    n_layer: usize,
    n_head: usize,
    span_count: usize,
    /// Pairs of different spans, sorted.
    crossings: Vec<EdgeSpans>,
}

impl EdgeGraph {
    /// Creates the graph of a model with `n_layer` layers of `n_head` heads.
    pub fn new(n_layer: usize, n_head: usize) -> Self {
        Self { n_layer, n_head, span_count: 1, crossings: Vec::new() }
    }

    /// Creates the graph of a model with this configuration.
    pub fn of(config: &Gpt2Config) -> Self {
        Self::new(config.n_layer, config.n_head)
    }

    /// Splits the edges by token spans.
    ///
    /// Each edge exists in each of `span_count` spans. Edges into keys and values also exist between each of
    /// these pairs of different spans.
    ///
    /// # Errors
    /// If `span_count` is 0, or if a pair has equal ends or an end that is out of range.
    pub fn in_spans(self, span_count: usize, crossings: impl IntoIterator<Item = EdgeSpans>) -> Result<Self> {
        let mut crossings: Vec<EdgeSpans> = crossings.into_iter().collect();
        crossings.sort_unstable();
        crossings.dedup();
        let is_none = |pair: &EdgeSpans| {
            pair.source == pair.destination || pair.source.max(pair.destination) >= span_count
        };
        if span_count == 0 || crossings.iter().any(is_none) {
            return Err(InterpretError::Mismatch(format!(
                "expected at least 1 span, and pairs of different span indices below {span_count}"
            )));
        }
        Ok(Self { span_count, crossings, ..self })
    }

    /// Number of sources: the input, plus the heads and the MLP of each layer.
    pub fn source_count(&self) -> usize {
        self.sources_before(self.n_layer)
    }

    /// Number of spans; 1 without spans.
    pub fn span_count(&self) -> usize {
        self.span_count
    }

    /// Number of edges.
    pub fn edge_count(&self) -> usize {
        self.first_within(self.span_count) + self.crossings.len() * self.first_crossing(self.n_layer)
    }

    /// Returns the sources in the order of computation.
    pub fn sources(&self) -> impl Iterator<Item = EdgeSource> + use<> {
        let n_head = self.n_head;
        let of_layer = move |layer| {
            let heads = (0..n_head).map(move |head| EdgeSource::Head(Head { layer, head }));
            heads.chain([EdgeSource::Mlp(layer)])
        };
        std::iter::once(EdgeSource::Input).chain((0..self.n_layer).flat_map(of_layer))
    }

    /// Returns the edges in the order used by scores and circuits.
    ///
    /// Edges within the first span come first, then those within the second, and so on, then those between
    /// spans. Each group is ordered by destination in the order of computation, then by source. Within a
    /// layer, the destinations are the queries of all heads, then keys, then values, then the MLP.
    pub fn edges(&self) -> impl Iterator<Item = Edge> + use<> {
        let (sources, rows): (Vec<EdgeSource>, _) = (self.sources().collect(), self.rows());
        let within = (0..self.span_count).map(EdgeSpans::within);
        let pairs: Vec<EdgeSpans> = within.chain(self.crossings.iter().copied()).collect();
        pairs.into_iter().flat_map(move |spans| {
            let is_there = |row: &&Row| row.crossing.is_some() || spans.source == spans.destination;
            let into = |row: &Row| {
                let destination = row.destination;
                let edge = |source: &EdgeSource| Edge { source: *source, destination, spans };
                sources[..row.sources].iter().map(edge).collect::<Vec<_>>()
            };
            rows.iter().filter(is_there).flat_map(into).collect::<Vec<_>>()
        })
    }

    /// Index range of a row's edges between two spans, if the row has any.
    pub(super) fn edges_of(&self, row: &Row, spans: EdgeSpans) -> Option<Range<usize>> {
        let first = if spans.source == spans.destination {
            self.first_within(spans.source) + row.within
        } else {
            let place = self.crossings.binary_search(&spans).ok()?;
            self.first_within(self.span_count) + place * self.first_crossing(self.n_layer) + row.crossing?
        };
        Some(first..first + row.sources)
    }

    /// Returns all index ranges of a row's edges, with their spans.
    fn all_edges_of(&self, row: &Row) -> impl Iterator<Item = (EdgeSpans, Range<usize>)> {
        let pairs = (0..self.span_count).map(EdgeSpans::within).chain(self.crossings.iter().copied());
        pairs.filter_map(move |spans| Some((spans, self.edges_of(row, spans)?)))
    }

    /// Number of sources before the heads of a layer.
    pub(super) fn sources_before(&self, layer: usize) -> usize {
        1 + layer * (self.n_head + 1)
    }

    /// Index of the first edge within a span.
    fn first_within(&self, span: usize) -> usize {
        span * (self.first_edge(self.n_layer) + self.source_count())
    }

    /// Index of the first edge into a layer, relative to its span.
    ///
    /// The logits count as the layer after the last. In layer `i`, `3 H` destinations have `1 + i (H + 1)`
    /// sources each, and the MLP has `H` more.
    fn first_edge(&self, layer: usize) -> usize {
        let (heads, before) = (self.n_head, layer * layer.saturating_sub(1) / 2);
        layer * (4 * heads + 1) + before * (heads + 1) * (3 * heads + 1)
    }

    /// Index of the first crossing edge into a layer, relative to its pair of spans.
    ///
    /// Layer `i` has `2 H (1 + i (H + 1))` crossing edges.
    fn first_crossing(&self, layer: usize) -> usize {
        let (heads, before) = (self.n_head, layer * layer.saturating_sub(1) / 2);
        2 * heads * (layer + before * (heads + 1))
    }

    /// Rows for the queries of all heads of a layer.
    pub(super) fn rows_of_queries(&self, layer: usize) -> Vec<Row> {
        let (sources, first) = (self.sources_before(layer), self.first_edge(layer));
        let row = |head| Row {
            destination: EdgeDestination::Query(Head { layer, head }),
            sources,
            within: first + head * sources,
            crossing: None,
        };
        (0..self.n_head).map(row).collect()
    }

    /// Rows for the keys of all heads of a layer, then for their values.
    pub(super) fn rows_of_keys_and_values(&self, layer: usize) -> Vec<Row> {
        let sources = self.sources_before(layer);
        let (within, crossing) = (self.first_edge(layer) + self.n_head * sources, self.first_crossing(layer));
        let parts = [EdgeDestination::Key, EdgeDestination::Value];
        let destinations =
            parts.into_iter().flat_map(|part| (0..self.n_head).map(move |head| part(Head { layer, head })));
        let row = |(place, destination): (usize, EdgeDestination)| Row {
            destination,
            sources,
            within: within + place * sources,
            crossing: Some(crossing + place * sources),
        };
        destinations.enumerate().map(row).collect()
    }

    pub(super) fn row_of_mlp(&self, layer: usize) -> Row {
        let sources = self.sources_before(layer);
        let within = self.first_edge(layer) + 3 * self.n_head * sources;
        Row {
            destination: EdgeDestination::Mlp(layer),
            sources: sources + self.n_head,
            within,
            crossing: None,
        }
    }

    pub(super) fn row_of_logits(&self) -> Row {
        Row {
            destination: EdgeDestination::Logits,
            sources: self.source_count(),
            within: self.first_edge(self.n_layer),
            crossing: None,
        }
    }

    /// Returns the rows of all destinations, in the order of computation.
    pub(super) fn rows(&self) -> Vec<Row> {
        let of_layer = |layer| {
            let queries = self.rows_of_queries(layer);
            [queries, self.rows_of_keys_and_values(layer), vec![self.row_of_mlp(layer)]].concat()
        };
        (0..self.n_layer).flat_map(of_layer).chain([self.row_of_logits()]).collect()
    }

    /// Index of a destination's node: its source's index, or `source_count` for the logits.
    fn node_of(&self, destination: EdgeDestination) -> usize {
        match destination.source() {
            Some(EdgeSource::Head(Head { layer, head })) => self.sources_before(layer) + head,
            Some(EdgeSource::Mlp(layer)) => self.sources_before(layer) + self.n_head,
            Some(EdgeSource::Input) => 0,
            None => self.source_count(),
        }
    }

    /// Index of a node in a span, among the nodes in all spans.
    fn spanned(&self, node: usize, span: usize) -> usize {
        span * (self.source_count() + 1) + node
    }

    /// Returns the indices of a node in every span.
    fn in_every_span(&self, node: usize) -> impl Iterator<Item = usize> {
        (0..self.span_count).map(move |span| self.spanned(node, span))
    }
}

/// Method for selecting a circuit's edges by score magnitude. See [`Circuit::selected`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Selection {
    /// Backward from the logits: repeatedly adds the strongest edge into a node already in the circuit.
    #[default]
    Greedy,
    /// The strongest edges in the whole graph.
    Strongest,
}

/// A subset of a model's edges.
///
/// ```
/// use candle_gpt2_interpret::{Circuit, EdgeGraph, Selection};
///
/// let graph = EdgeGraph::new(1, 1); // input and a0.h0 and m0, logits
/// let names: Vec<String> = graph.edges().map(|edge| edge.to_string()).collect();
/// assert_eq!(names[3..], ["input->m0", "a0.h0->m0", "input->logits", "a0.h0->logits", "m0->logits"]);
/// let scores = [0., 0., -3., 1., 0., 0.5, 2., 0.];
/// let circuit = Circuit::selected(&graph, &scores, 2, Selection::Greedy)?;
/// let kept: Vec<String> = circuit.edges().map(|edge| edge.to_string()).collect();
/// assert_eq!(kept, ["input->a0.h0<v>", "a0.h0->logits"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Circuit {
    graph: EdgeGraph,
    kept: Vec<bool>,
}

impl Circuit {
    /// Returns the circuit with every edge, equivalent to the model.
    pub fn whole(graph: &EdgeGraph) -> Self {
        Self { graph: graph.clone(), kept: vec![true; graph.edge_count()] }
    }

    /// Returns the circuit without edges.
    pub fn empty(graph: &EdgeGraph) -> Self {
        Self { graph: graph.clone(), kept: vec![false; graph.edge_count()] }
    }

    /// Creates a circuit from flags in the order of [`EdgeGraph::edges`].
    ///
    /// # Errors
    /// If the number of flags does not equal the number of edges.
    pub fn new(graph: &EdgeGraph, kept: Vec<bool>) -> Result<Self> {
        let count = graph.edge_count();
        match kept.len() == count {
            true => Ok(Self { graph: graph.clone(), kept }),
            false => Err(InterpretError::Mismatch(format!(
                "expected {count} values (one per edge), found {}",
                kept.len()
            ))),
        }
    }

    /// Selects up to `count` edges by score magnitude; `scores` is ordered as in [`EdgeGraph::edges`].
    ///
    /// Then drops the edges that do not connect to both the input and the logits.
    ///
    /// # Errors
    /// If the number of scores does not equal the number of edges, or if a score is not finite.
    pub fn selected(graph: &EdgeGraph, scores: &[f32], count: usize, selection: Selection) -> Result<Self> {
        let mut circuit = Self::new(graph, vec![false; scores.len()])?;
        if let Some((edge, score)) = graph.edges().zip(scores).find(|(_, score)| !score.is_finite()) {
            return Err(InterpretError::Mismatch(format!(
                "edge {edge}: expected a finite score, found {score}; check the model's weights"
            )));
        }
        // The bit patterns of absolute values sort in the same order as the values. Ties go to the lower
        // index.
        let ranked = |edge: usize| (scores[edge].abs().to_bits(), Reverse(edge));
        match selection {
            Selection::Strongest => {
                let mut edges: Vec<usize> = (0..scores.len()).collect();
                edges.sort_unstable_by_key(|edge| Reverse(ranked(*edge)));
                edges.iter().take(count).for_each(|edge| circuit.kept[*edge] = true);
            }
            Selection::Greedy => circuit.take_greedily(count, ranked),
        }
        Ok(circuit.connected())
    }

    fn take_greedily(&mut self, count: usize, ranked: impl Fn(usize) -> (u32, Reverse<usize>)) {
        let graph = &self.graph;
        let (nodes, logits) = (graph.spanned(0, graph.span_count), graph.source_count());
        let mut into: Vec<Vec<Range<usize>>> = vec![Vec::new(); nodes];
        let mut source_of = vec![0; self.kept.len()];
        for row in &graph.rows() {
            for (spans, edges) in graph.all_edges_of(row) {
                let node = graph.spanned(graph.node_of(row.destination), spans.destination);
                for (source, edge) in edges.clone().enumerate() {
                    source_of[edge] = graph.spanned(source, spans.source);
                }
                into[node].push(edges);
            }
        }
        let mut candidates = BinaryHeap::new();
        // Adds all edges into a node to the candidates, at most once per node.
        let mut open = |node: usize, candidates: &mut BinaryHeap<_>| {
            candidates.extend(std::mem::take(&mut into[node]).into_iter().flatten().map(&ranked));
        };
        graph.in_every_span(logits).for_each(|node| open(node, &mut candidates));
        let mut taken = Vec::new();
        while taken.len() < count
            && let Some((_, Reverse(edge))) = candidates.pop()
        {
            taken.push(edge);
            open(source_of[edge], &mut candidates);
        }
        taken.into_iter().for_each(|edge| self.kept[edge] = true);
    }

    /// Keeps only the edges on paths from the input to the logits.
    ///
    /// A head's queries, keys and values in a span count as one node.
    pub fn connected(mut self) -> Self {
        let graph = &self.graph;
        let (rows, logits) = (graph.rows(), graph.source_count());
        let mut is_reached = vec![false; graph.spanned(0, graph.span_count)];
        let mut is_used = is_reached.clone();
        graph.in_every_span(0).for_each(|node| is_reached[node] = true);
        graph.in_every_span(logits).for_each(|node| is_used[node] = true);
        for row in &rows {
            for (spans, edges) in graph.all_edges_of(row) {
                let node = graph.spanned(graph.node_of(row.destination), spans.destination);
                for (source, edge) in edges.enumerate() {
                    self.kept[edge] &= is_reached[graph.spanned(source, spans.source)];
                    is_reached[node] |= self.kept[edge];
                }
            }
        }
        for row in rows.iter().rev() {
            for (spans, edges) in graph.all_edges_of(row) {
                let node = graph.spanned(graph.node_of(row.destination), spans.destination);
                for (source, edge) in edges.enumerate() {
                    self.kept[edge] &= is_used[node];
                    is_used[graph.spanned(source, spans.source)] |= self.kept[edge];
                }
            }
        }
        self
    }

    /// Returns one flag per edge, true if the edge is kept, in the order of [`EdgeGraph::edges`].
    pub fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// Returns the graph that this circuit is a subset of.
    pub fn graph(&self) -> &EdgeGraph {
        &self.graph
    }

    /// Number of kept edges.
    pub fn edge_count(&self) -> usize {
        self.kept.iter().filter(|is_kept| **is_kept).count()
    }

    /// Returns the kept edges.
    pub fn edges(&self) -> impl Iterator<Item = Edge> {
        self.graph.edges().zip(&self.kept).filter(|(_, is_kept)| **is_kept).map(|(edge, _)| edge)
    }

    /// Whether a kept edge starts at the destination's node; the graph must not have spans.
    pub(super) fn is_used(&self, destination: EdgeDestination) -> bool {
        let node = self.graph.node_of(destination);
        let reads = |row: &Row| node < row.sources && self.kept[row.within + node];
        destination == EdgeDestination::Logits || self.graph.rows().iter().any(reads)
    }

    pub(super) fn set(&mut self, edge: usize, is_kept: bool) {
        self.kept[edge] = is_kept;
    }

    /// Returns a row-major mask `(rows, sources)` with 1 for each omitted edge between two spans.
    ///
    /// Returns `None` if no edge is omitted.
    pub(super) fn omitted_mask(&self, spans: EdgeSpans, rows: &[Row]) -> Option<Vec<f32>> {
        let edges = rows.iter().filter_map(|row| self.graph.edges_of(row, spans)).flatten();
        let mask: Vec<f32> = edges.map(|edge| if self.kept[edge] { 0.0 } else { 1.0 }).collect();
        mask.contains(&1.0).then_some(mask)
    }
}
