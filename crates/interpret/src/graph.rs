//! Attribution graphs: the nodes and edges of a local replacement model that matter for its prediction.
//!
//! Rows of the graph are targets, columns are sources. Let `Ā` be `|A|` with each row normalized to sum 1,
//! and `w` the probabilities of the logits. The influence of the nodes is `I = w·Ā + w·Ā² + …`. No edge leads
//! to the same layer or an earlier one, so a single pass over the targets from last to first computes the
//! whole series. Source: decoderesearch/circuit-tracer, `circuit_tracer/graph.py` at 0968d11. Unlike
//! circuit-tracer, this module has nodes for position embeddings, treated like those for token embeddings.

use std::cmp::Reverse;

use crate::error::Result;
use crate::replacement::BATCH;
use crate::run::rounded;
use crate::{FeatureChange, GraphNode, ReplacementModel};

/// Number of batches between rankings of the features.
const BATCHES_OF_A_RANKING: usize = 4;
/// Lower bound of a row sum before division.
const LEAST_SUM: f64 = 1e-10;

/// Attribution graph of a run: nodes and their contributions to each other.
///
/// ```
/// use candle_gpt2_interpret::{AttributionGraph, GraphOptions, ReplacementModel, Run, Transcoders};
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let random = |one: candle_gpt2::Parameter| Ok((one.name, Tensor::randn(0f32, 1., one.shape, &Device::Cpu)?));
/// # let tensors = candle_gpt2::expected_parameters(&sizes).into_iter().map(random).collect::<candle_core::Result<_>>()?;
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_gpt2::ByOutput(candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let transcoders = Transcoders::of_neurons(&model, 5)?; // the neurons of the MLPs as features
/// let replacement = ReplacementModel::new(&run, &transcoders, &GraphOptions::default())?;
/// let graph = AttributionGraph::trace(&replacement, &|_, _| ())?;
/// let pruned = graph.pruned(0.8, 0.98);
/// assert!(pruned.edges.iter().all(|edge| pruned.nodes[edge.source] && pruned.nodes[edge.target]));
/// assert!((0.0..=1.0).contains(&graph.replacement_score()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct AttributionGraph {
    /// Features with incoming edges, errors, embeddings and logits.
    ///
    /// The order is the same as in [`ReplacementModel::nodes`].
    pub nodes: Vec<GraphNode>,
    /// Index of each node in the replacement model.
    pub origins: Vec<usize>,
    /// Number of active features, including those without a node.
    pub active_features: usize,
    /// Target nodes, from the latest in the model to the earliest.
    targets: Vec<usize>,
    /// Contribution of each node to each target, in row-major order.
    values: Vec<f32>,
    /// Row index of each node's incoming edges.
    rows: Vec<Option<usize>>,
    /// Contributions to each row from biases, and from active features without a node.
    remainders: Vec<(f64, f64)>,
    influence: Vec<f64>,
}

/// A pruned graph, from [`AttributionGraph::pruned`].
#[derive(Debug, Clone, PartialEq)]
pub struct PrunedGraph {
    /// One flag for each node; true if the node is kept.
    pub nodes: Vec<bool>,
    /// Edges between kept nodes, sorted by target and source.
    pub edges: Vec<AttributionEdge>,
    /// Cumulative fraction of the total influence for each node, in descending order of influence.
    pub shares: Vec<f64>,
}

/// An edge: the contribution of one node to another. Part of a pruned [`AttributionGraph`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttributionEdge {
    /// Source node.
    pub source: usize,
    /// Target node.
    pub target: usize,
    /// Contribution to the target's pre-activation or logit.
    pub weight: f32,
}

impl AttributionGraph {
    /// Computes the incoming edges of the logits, and of the features with the most influence on them.
    ///
    /// The options limit the number of features. Calls `progress` with the number of finished rows and their
    /// total.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn trace(replacement: &ReplacementModel, progress: &dyn Fn(usize, usize)) -> Result<Self> {
        let (nodes, features) = (replacement.nodes(), replacement.features());
        let wanted = features.min(replacement.options().max_feature_nodes);
        let logits: Vec<usize> = replacement.logits().collect();
        let total = logits.len() + wanted;
        let values = Vec::with_capacity(total * nodes.len());
        let mut builder = GraphBuilder { nodes, targets: Vec::new(), values, biases: Vec::new() };
        builder.add(replacement, &logits)?;
        let mut is_visited = vec![false; features];
        let mut visited = 0;
        while visited < wanted {
            progress(builder.targets.len(), total);
            let count = match wanted == features {
                true => wanted,
                false => (BATCH * BATCHES_OF_A_RANKING).min(wanted - visited),
            };
            let influence = builder.influence();
            let mut next: Vec<usize> = (0..features).filter(|node| !is_visited[*node]).collect();
            next.sort_by(|a, b| influence[*b].total_cmp(&influence[*a]).then(a.cmp(b)));
            next.truncate(count);
            // Rows for early positions are short, and a batch is as long as its longest row.
            next.sort_by_key(|node| position(&nodes[*node]));
            for batch in next.chunks(BATCH) {
                builder.add(replacement, batch)?;
                progress(builder.targets.len(), total);
            }
            next.iter().for_each(|node| is_visited[*node] = true);
            visited += next.len();
        }
        Ok(builder.graph(&is_visited))
    }

    /// Returns the contribution of one node to another; 0 if `target` has no incoming edges.
    pub fn edge(&self, target: usize, source: usize) -> f32 {
        self.rows[target].map_or(0.0, |row| self.values[row * self.nodes.len() + source])
    }

    /// Returns the contributions to a target from biases, and from active features without a node.
    ///
    /// Together with the target's edges, the contributions add up to the target's value.
    pub fn remainders(&self, target: usize) -> (f64, f64) {
        self.rows[target].map_or((0.0, 0.0), |row| self.remainders[row])
    }

    /// Returns the influence of each node on the logits.
    pub fn influence(&self) -> &[f64] {
        &self.influence
    }

    /// Prunes the graph by influence.
    ///
    /// 1. Keeps the nodes with the most influence up to the fraction `node_share` of the total, plus
    ///    embeddings and logits.
    /// 2. Keeps the most influential edges between these nodes, up to the fraction `edge_share`.
    /// 3. Repeatedly drops features and errors without outgoing edges, and features without incoming
    ///    edges.
    pub fn pruned(&self, node_share: f64, edge_share: f64) -> PrunedGraph {
        let mut nodes = self.influential(node_share);
        let mut candidates: Vec<AttributionEdge> = Vec::new();
        for target in self.targets.iter().copied().filter(|target| nodes[*target]) {
            let sources = (0..self.nodes.len()).filter(|source| nodes[*source]);
            candidates.extend(sources.filter_map(|source| {
                let weight = self.edge(target, source);
                (weight != 0.0).then_some(AttributionEdge { source, target, weight })
            }));
        }
        let scores = edge_scores(&self.nodes, &candidates);
        let least = least_kept(scores.clone(), edge_share);
        let kept = candidates.into_iter().zip(scores).filter(|(_, score)| *score >= least);
        let mut edges: Vec<AttributionEdge> = kept.map(|(edge, _)| edge).collect();
        loop {
            let mut has_out = vec![false; nodes.len()];
            let mut has_in = vec![false; nodes.len()];
            for edge in &edges {
                has_out[edge.source] = true;
                has_in[edge.target] = true;
            }
            let before = nodes.iter().filter(|kept| **kept).count();
            for (node, kept) in nodes.iter_mut().enumerate() {
                *kept &= match self.nodes[node] {
                    GraphNode::Feature { .. } => has_out[node] && has_in[node],
                    GraphNode::Error { .. } => has_out[node],
                    _ => true,
                };
            }
            edges.retain(|edge| nodes[edge.source] && nodes[edge.target]);
            if nodes.iter().filter(|kept| **kept).count() == before {
                break;
            }
        }
        edges.sort_by_key(|edge| (edge.target, edge.source));
        PrunedGraph { nodes, edges, shares: self.shares() }
    }

    /// Maximum memory of [`AttributionGraph::pruned`] beyond the graph, in bytes.
    ///
    /// Pruning scores every edge between the remaining nodes.
    pub fn pruning_bytes(&self, node_share: f64) -> u64 {
        /// Bytes for an edge, its score, its index in an ordering, and a sorted copy of the score.
        const OF_EDGE: usize = size_of::<AttributionEdge>() + 2 * size_of::<f64>() + size_of::<usize>();
        let nodes = self.influential(node_share);
        let sources = nodes.iter().filter(|kept| **kept).count();
        let targets = self.targets.iter().filter(|target| nodes[**target]).count();
        (sources * targets * OF_EDGE) as u64
    }

    /// Flags all embeddings and logits, and the top features and errors by influence, up to `share`.
    fn influential(&self, share: f64) -> Vec<bool> {
        let least = least_kept(self.influence.clone(), share);
        let is_free = |node: usize| match self.nodes[node] {
            GraphNode::Feature { .. } | GraphNode::Error { .. } => self.influence[node] >= least,
            _ => true,
        };
        (0..self.nodes.len()).map(is_free).collect()
    }

    /// Cumulative fraction of the total influence for each node, in descending order of influence.
    fn shares(&self) -> Vec<f64> {
        let total: f64 = self.influence.iter().sum();
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.sort_by(|a, b| self.influence[*b].total_cmp(&self.influence[*a]).then(a.cmp(b)));
        let (mut shares, mut sum) = (vec![0.0; self.nodes.len()], 0.0);
        for node in order {
            sum += self.influence[node];
            shares[node] = (sum / total).min(1.0);
        }
        shares
    }

    /// Embeddings' fraction of the combined influence of embeddings and errors.
    pub fn replacement_score(&self) -> f64 {
        let sum = |is_error: bool| {
            let nodes = self.nodes.iter().zip(&self.influence).filter(|(node, _)| match node {
                GraphNode::Error { .. } => is_error,
                GraphNode::Embedding { .. } | GraphNode::Position { .. } => !is_error,
                _ => false,
            });
            nodes.map(|(_, influence)| influence).sum::<f64>()
        };
        let (embeddings, errors) = (sum(false), sum(true));
        embeddings / (embeddings + errors)
    }

    /// Fraction of incoming edges that do not come from errors, averaged over nodes by influence.
    pub fn completeness_score(&self) -> f64 {
        let (mut complete, mut total) = (0.0, 0.0);
        for target in &self.targets {
            let weight = self.influence[*target] + probability(&self.nodes[*target]);
            let (mut errors, mut all) = (0.0, 0.0);
            for (source, node) in self.nodes.iter().enumerate() {
                let edge = f64::from(self.edge(*target, source).abs());
                all += edge;
                if matches!(node, GraphNode::Error { .. }) {
                    errors += edge;
                }
            }
            complete += weight * (1.0 - errors / all.max(LEAST_SUM));
            total += weight;
        }
        // Nodes without incoming edges count as complete, since no error contributes to them.
        let others = self.nodes.iter().zip(&self.influence).filter(|(node, _)| !node.is_target());
        let others: f64 = others.map(|(_, influence)| influence).sum();
        (complete + others) / (total + others)
    }

    /// Returns the targets (features and logits) as indices in the replacement model.
    pub fn targets(&self) -> Vec<usize> {
        self.targets.iter().map(|target| self.origins[*target]).collect()
    }

    /// Predicts from the edges how setting the given features changes all node values.
    ///
    /// Changes propagate through every feature that has incoming edges and is not set itself. Each of them is
    /// assumed to stay active. `added` is the direct effect of set features without edges on each of
    /// [`Self::targets`]; it is empty if there are none.
    pub fn predicted(&self, changes: &[FeatureChange], added: &[f64]) -> Vec<f64> {
        let mut moved = vec![0.0; self.nodes.len()];
        // Relative change in each node's activation; 0 for everything but features.
        let mut grown = vec![0.0; self.nodes.len()];
        for (row, target) in self.targets.iter().enumerate().rev() {
            let change =
                (0..self.nodes.len()).map(|source| grown[source] * f64::from(self.edge(*target, source)));
            moved[*target] = change.sum::<f64>() + added.get(row).copied().unwrap_or(0.0);
            if let GraphNode::Feature { activation, .. } = self.nodes[*target] {
                let set = changes.iter().find(|change| change.node == self.origins[*target]);
                let added = set.map_or(moved[*target], |change| change.value - activation);
                grown[*target] = added / activation;
            }
        }
        moved
    }
}

/// A graph under construction, with columns for all nodes of the replacement model.
struct GraphBuilder<'a> {
    nodes: &'a [GraphNode],
    targets: Vec<usize>,
    values: Vec<f32>,
    biases: Vec<f64>,
}

impl GraphBuilder<'_> {
    fn add(&mut self, replacement: &ReplacementModel, targets: &[usize]) -> Result<()> {
        let edges = replacement.edges(targets)?;
        self.targets.extend(targets);
        self.biases.extend(edges.biases);
        self.values.extend(edges.rows.iter().flatten().map(|value| rounded(*value)));
        Ok(())
    }

    fn influence(&self) -> Vec<f64> {
        let rows: Vec<&[f32]> = self.values.chunks(self.nodes.len()).collect();
        influence(self.nodes, &self.targets, &rows)
    }

    /// Builds the graph of the features that have rows.
    fn graph(self, is_visited: &[bool]) -> AttributionGraph {
        let is_kept = |node: &usize| is_visited.get(*node).copied().unwrap_or(true);
        let origins: Vec<usize> = (0..self.nodes.len()).filter(is_kept).collect();
        let mut places = vec![0; self.nodes.len()];
        origins.iter().enumerate().for_each(|(place, node)| places[*node] = place);
        let nodes: Vec<GraphNode> = origins.iter().map(|node| self.nodes[*node]).collect();
        let mut order: Vec<usize> = (0..self.targets.len()).collect();
        order.sort_by_key(|row| (Reverse(height(&self.nodes[self.targets[*row]])), self.targets[*row]));
        let (mut targets, mut values, mut remainders) = (Vec::new(), Vec::new(), Vec::new());
        let mut rows = vec![None; nodes.len()];
        for row in order {
            let target = places[self.targets[row]];
            rows[target] = Some(targets.len());
            targets.push(target);
            let row_values = &self.values[row * self.nodes.len()..][..self.nodes.len()];
            values.extend(origins.iter().map(|node| row_values[*node]));
            let left_out = is_visited.iter().zip(row_values).filter(|(is_visited, _)| !**is_visited);
            remainders.push((self.biases[row], left_out.map(|(_, value)| f64::from(*value)).sum()));
        }
        let all: Vec<&[f32]> = values.chunks(nodes.len()).collect();
        let influence = influence(&nodes, &targets, &all);
        AttributionGraph {
            active_features: is_visited.len(),
            nodes,
            origins,
            targets,
            values,
            rows,
            remainders,
            influence,
        }
    }
}

/// Computes the influence of each node from the rows of the given targets.
fn influence(nodes: &[GraphNode], targets: &[usize], rows: &[&[f32]]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..targets.len()).collect();
    order.sort_by_key(|row| Reverse(height(&nodes[targets[*row]])));
    let mut influence = vec![0.0; nodes.len()];
    for row in order {
        let weight = influence[targets[row]] + probability(&nodes[targets[row]]);
        let sum: f64 = rows[row].iter().map(|value| f64::from(value.abs())).sum();
        let share = weight / sum.max(LEAST_SUM);
        for (influence, value) in influence.iter_mut().zip(rows[row]) {
            *influence += share * f64::from(value.abs());
        }
    }
    influence
}

/// Computes each edge's share of the influence in a graph with only the given edges.
fn edge_scores(nodes: &[GraphNode], edges: &[AttributionEdge]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..edges.len()).collect();
    order.sort_by_key(|edge| (Reverse(height(&nodes[edges[*edge].target])), edges[*edge].target));
    let mut influence = vec![0.0; nodes.len()];
    let mut scores = vec![0.0; edges.len()];
    for row in order.chunk_by(|a, b| edges[*a].target == edges[*b].target) {
        let target = edges[row[0]].target;
        let weight = influence[target] + probability(&nodes[target]);
        let sum: f64 = row.iter().map(|edge| f64::from(edges[*edge].weight.abs())).sum();
        for edge in row {
            let score = weight * f64::from(edges[*edge].weight.abs()) / sum.max(LEAST_SUM);
            scores[*edge] = score;
            influence[edges[*edge].source] += score;
        }
    }
    scores
}

/// Largest threshold that keeps the fraction `share` of the total; always positive.
fn least_kept(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.retain(|number| *number > 0.0);
    numbers.sort_by(|a, b| b.total_cmp(a));
    let total: f64 = numbers.iter().sum();
    let mut sum = 0.0;
    for number in &numbers {
        sum += number;
        if sum >= share * total {
            return *number;
        }
    }
    numbers.last().copied().unwrap_or(f64::MIN_POSITIVE)
}

/// Depth of a target. Every edge leads to a greater depth.
fn height(node: &GraphNode) -> usize {
    match node {
        GraphNode::Feature { layer, .. } => *layer,
        _ => usize::MAX,
    }
}

fn position(node: &GraphNode) -> usize {
    match node {
        GraphNode::Feature { position, .. } => *position,
        _ => usize::MAX,
    }
}

/// Initial weight of a node: the token's probability for a logit, otherwise 0.
fn probability(node: &GraphNode) -> f64 {
    match node {
        GraphNode::Logit { probability, .. } => *probability,
        _ => 0.0,
    }
}
