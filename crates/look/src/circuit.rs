//! Circuit for a task: the edges that carry a model's behavior on prompt pairs.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_interpret::{
    Circuit, CircuitMetric, CircuitTask, Edge, EdgeDestination, EdgeMethod, EdgeSource, FaithfulnessCurve,
    Selection,
};
use candle_gpt2_pictures::{Axis, Graph, GraphLink, GraphNode, Metric as ReportMetric};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{Result, invalid_option};
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::pairs::{ReadPairs, read_pairs};
use crate::{Analysis, CircuitMethod, Look, LookSubject, PairData, Reader};

/// Maximum number of steps for integrated gradients.
const MOST_STEPS: usize = 1000;
/// Number of edges listed in a table.
const NAMED_EDGES: usize = 10;

/// Circuit size, as a number of edges or a fraction of all edges.
///
/// ```
/// use candle_gpt2_look::EdgeAmount;
///
/// assert_eq!("5%".parse::<EdgeAmount>()?.of(703), 35);
/// assert_eq!("200".parse::<EdgeAmount>()?.of(703), 200);
/// assert!("many".parse::<EdgeAmount>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "JsonAmount")]
pub enum EdgeAmount {
    /// Number of edges.
    Count(usize),
    /// Fraction of all edges, from 0 to 1.
    Share(f64),
}

/// JSON form of an amount: a number, or a string such as `5%`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "invalid type: expected a number of edges, or a percentage such as \"5%\"")]
enum JsonAmount {
    Count(usize),
    Text(String),
}

impl TryFrom<JsonAmount> for EdgeAmount {
    type Error = String;

    fn try_from(written: JsonAmount) -> std::result::Result<Self, String> {
        match written {
            JsonAmount::Count(count) => Ok(Self::Count(count)),
            JsonAmount::Text(text) => text.parse(),
        }
    }
}

impl FromStr for EdgeAmount {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let other = || format!("`{text}` is neither a number of edges nor a percentage from 0% to 100%");
        match text.strip_suffix('%') {
            None => text.parse().map(Self::Count).map_err(|_| other()),
            Some(percent) => match percent.trim().parse::<f64>() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Share(percent / 100.0)),
                _ => Err(other()),
            },
        }
    }
}

impl Display for EdgeAmount {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Share(share) => write!(f, "{}", percent(*share)),
        }
    }
}

impl EdgeAmount {
    /// Returns the circuit size as a number of edges, out of `edges`, rounded down.
    #[expect(clippy::cast_possible_truncation, reason = "a fraction of a count fits into usize")]
    #[expect(clippy::cast_sign_loss, reason = "fractions are positive")]
    pub fn of(self, edges: usize) -> usize {
        match self {
            Self::Count(count) => count.min(edges),
            Self::Share(share) => (share * edges as f64) as usize,
        }
    }
}

fn percent(share: f64) -> String {
    // Rounding to four decimal places hides binary floating-point noise.
    format!("{}%", (share * 1e6).round() / 1e4)
}

/// Circuit search for a task.
///
/// Scores edges on pairs of prompts, selects the strongest as a circuit, and compares circuits of all sizes
/// with the model.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{CircuitSearch, DataTask, EdgeAmount, Look, LookSubject, PairData, Reader, TaskData};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let pairs = TaskData { task: DataTask::Ioi, count: 4, seed: 0 }.pairs(&reader)?;
/// let search = CircuitSearch { edges: Some(EdgeAmount::Share(0.1)), ..CircuitSearch::new(PairData::Pairs(pairs)) };
/// let found = search.at(&subject, &Silent)?;
/// assert_eq!(found.report.values.len(), 10, "faithfulness at ten circuit sizes");
/// assert!(found.details.to_json()["edges"]["input->m0"]["score"].is_number());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct CircuitSearch {
    /// JSON Lines file of prompt pairs: clean, corrupt, answer, against; `gpt2 look data` writes such files
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub data: PairData,
    /// Edge scoring method
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "METHOD", default_value = "eap-ig", value_parser = choices::<CircuitMethod>()))]
    pub method: CircuitMethod,
    /// Metric for each prediction
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "METRIC", default_value = "logit-diff", value_parser = choices::<CircuitMetric>()))]
    pub metric: CircuitMetric,
    /// Circuit size: a number of edges, or a percentage such as 5%
    /// [default: 5%; with --method acdc, --threshold decides]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub edges: Option<EdgeAmount>,
    /// Method for selecting edges by score
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOW", default_value = "greedy", value_parser = choices::<Selection>()))]
    pub select: Selection,
    /// Number of steps for --method eap-ig
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = CircuitSearch::default().steps))]
    pub steps: usize,
    /// With --method acdc: leave an edge out if the KL divergence rises by less than this, in nats
    #[cfg_attr(feature = "clap", arg(long, value_name = "X", default_value_t = CircuitSearch::default().threshold))]
    pub threshold: f64,
    /// Use only the first N pairs [default: all]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub pairs: Option<usize>,
}

impl Default for CircuitSearch {
    fn default() -> Self {
        Self {
            data: PairData::Pairs(Vec::new()),
            method: CircuitMethod::default(),
            metric: CircuitMetric::default(),
            edges: None,
            select: Selection::default(),
            steps: 5,
            threshold: 0.01,
            pairs: None,
        }
    }
}

impl CircuitSearch {
    /// Creates options that score edges on these pairs with EAP-IG.
    pub fn new(data: impl Into<PairData>) -> Self {
        Self { data: data.into(), ..Self::default() }
    }
}

/// Validated prompt pairs.
///
/// Returned by [`CircuitSearch`]'s `check`.
#[derive(Debug)]
pub struct CheckedCircuit(ReadPairs);

impl Look for CircuitSearch {
    type Checked = CheckedCircuit;

    fn check(&self, reader: &Reader) -> Result<CheckedCircuit> {
        if !(1..=MOST_STEPS).contains(&self.steps) {
            return Err(invalid_option(format!(
                "`steps`: expected a number from 1 to {MOST_STEPS}, found {}",
                self.steps
            )));
        }
        if self.pairs == Some(0) {
            return Err(invalid_option("`pairs`: expected at least 1"));
        }
        let is_acdc = self.method == CircuitMethod::Acdc;
        if is_acdc && self.edges.is_some() {
            return Err(invalid_option(
                "`edges` cannot be used with `method` acdc; `threshold` sets the size",
            ));
        }
        if is_acdc && !(self.threshold >= 0.0 && self.threshold.is_finite()) {
            return Err(invalid_option(format!(
                "`threshold`: expected at least 0, found {}",
                self.threshold
            )));
        }
        let is_local = matches!(self.method, CircuitMethod::Eap | CircuitMethod::PositionAware);
        if is_local && self.metric == CircuitMetric::Divergence {
            return Err(invalid_option(
                "`metric` kl: its gradient at the clean prompt is zero; use `method` eap-ig, clean-corrupted \
                 or acdc",
            ));
        }
        let most = self.pairs.unwrap_or(usize::MAX);
        Ok(CheckedCircuit(read_pairs(&self.data, most, reader, self.method == CircuitMethod::PositionAware)?))
    }

    fn look(
        &self,
        checked: CheckedCircuit,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis> {
        let CheckedCircuit(ReadPairs { pairs, spans }) = checked;
        if let Some(pair) = pairs.first() {
            // Rejects a model whose logits are not finite.
            subject.run(&pair.clean)?;
        }
        let task = CircuitTask::new(subject.model(), &pairs, self.metric)?;
        let graph = task.graph();
        let over_pairs = |what: &str| reporter.start(what, pairs.len() as u64, Unit::Items("pairs"));
        // Fails before hours are spent on edges that explain nothing.
        let range = task.range()?;
        let (scores, found) = match self.edge_method() {
            None => {
                let bar = reporter.start("removing", graph.edge_count() as u64, Unit::Items("edges"));
                #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
                let (circuit, rises) = task.acdc(self.threshold as f32, &|| bar.advance(1))?;
                (rises, Some(circuit))
            }
            Some(method) => {
                let bar = over_pairs("scoring edges");
                (task.scores(method, &|done| bar.advance(done as u64))?, None)
            }
        };
        let circuit = match found {
            Some(circuit) => circuit,
            None => {
                let count = self.edges.unwrap_or(EdgeAmount::Share(0.05)).of(scores.len());
                Circuit::selected(graph, &scores, count, self.select)?
            }
        };
        let bar = over_pairs("running circuits");
        let curve = task.curve(range, &scores, self.select, &|done| bar.advance(done as u64))?;
        drop(bar);
        let value = task.values(std::slice::from_ref(&circuit), &|_| ())?[0];

        let metric = self.metric.title();
        let in_words = |count: usize| {
            if spans.is_empty() { format!("{count} edges") } else { format!("{count} edges in spans") }
        };
        let title = format!("circuit of {}: {metric}", in_words(circuit.edge_count()));
        let mut report = subject.report("circuit", title, &[]);
        report.axes =
            vec![Axis::new("share of edges", curve.points.iter().map(|point| percent(point.share)))];
        report.values = curve.points.iter().map(|point| Some(point.faithfulness)).collect();
        report.metric = Some(ReportMetric {
            name: format!("{metric}, mean of {} pairs, {}", pairs.len(), subject.in_front()),
            before: f64::from(curve.model),
            after: Some(f64::from(value)),
        });
        report.notes = vec![
            "metric: model first, then circuit".into(),
            format!("values: faithfulness; 0 = corrupted prompts ({:.4}), 1 = the whole model", curve.empty),
            format!(
                "the circuit keeps {} of {}: faithfulness {:.4}",
                circuit.edge_count(),
                in_words(scores.len()),
                curve.faithfulness(value)
            ),
            format!(
                "CPR {:.4} (area under the curve; perfect: 0.999), CMD {:.4} (area between the curve and 1; perfect: 0)",
                curve.cpr(),
                curve.cmd()
            ),
            strongest(&circuit, &scores, &spans, self.method),
        ];
        let graph_of_circuit = picture(&circuit, &scores, self.metric);
        report.graph = (!graph_of_circuit.nodes.is_empty()).then_some(graph_of_circuit);
        let details = self.details(subject, &circuit, &scores, &spans, &curve);
        Ok(Analysis::new(report, details))
    }
}

impl CircuitSearch {
    /// Gradient method that scores the edges; `None` for ACDC, which needs no gradients.
    fn edge_method(&self) -> Option<EdgeMethod> {
        match self.method {
            CircuitMethod::Eap | CircuitMethod::PositionAware => Some(EdgeMethod::Eap),
            CircuitMethod::EapIg => Some(EdgeMethod::EapIg { steps: self.steps }),
            CircuitMethod::CleanCorrupted => Some(EdgeMethod::CleanCorrupted),
            CircuitMethod::Acdc => None,
        }
    }

    /// Circuit in the Mechanistic Interpretability Benchmark's format, with its faithfulness curve.
    fn details(
        &self,
        subject: &LookSubject,
        circuit: &Circuit,
        scores: &[f32],
        spans: &[String],
        curve: &FaithfulnessCurve,
    ) -> Value {
        let (graph, config) = (circuit.graph(), subject.config());
        let mut nodes: Map<String, Value> =
            graph.sources().map(|source| (source.to_string(), json!({ "in_graph": false }))).collect();
        for edge in circuit.edges() {
            nodes.insert(edge.source.to_string(), json!({ "in_graph": true }));
            nodes.insert(edge.destination.node(), json!({ "in_graph": true }));
        }
        nodes.entry("logits").or_insert_with(|| json!({ "in_graph": false }));
        // For each edge: the sum of its scores over all spans, whether any span keeps it, and each span's
        // entry.
        let mut found: BTreeMap<String, (f32, bool, Vec<Value>)> = BTreeMap::new();
        for ((edge, score), is_kept) in graph.edges().zip(scores).zip(circuit.kept()) {
            let (sum, is_kept_anywhere, of_spans) = found.entry(edge.to_string()).or_default();
            *sum += score;
            *is_kept_anywhere |= is_kept;
            if let Some((source, destination)) = ends(edge, spans)
                && (*is_kept || *score != 0.0)
            {
                of_spans.push(json!({
                    "source": source, "destination": destination, "score": score, "in_graph": is_kept,
                }));
            }
        }
        let edge = |(name, (score, is_kept, of_spans)): (String, (f32, bool, Vec<Value>))| {
            let mut entry = json!({ "score": score, "in_graph": is_kept });
            if !spans.is_empty() {
                entry["spans"] = of_spans.into();
            }
            (name, entry)
        };
        let point = |point: &candle_gpt2_interpret::CurvePoint| {
            json!({
                "share": point.share, "chosen": point.chosen, "edges": point.edges, "metric": point.value,
                "faithfulness": point.faithfulness,
            })
        };
        json!({
            "cfg": { "n_layers": config.n_layer, "n_heads": config.n_head, "d_model": config.n_embd, "parallel_attn_mlp": false },
            "nodes": nodes,
            "edges": found.into_iter().map(edge).collect::<Map<_, _>>(),
            "clean": curve.model,
            "corrupted": curve.empty,
            "curve": curve.points.iter().map(point).collect::<Vec<_>>(),
            "cpr": curve.cpr(),
            "cmd": curve.cmd(),
        })
    }
}

/// Names of an edge's source and destination spans; `None` without spans.
fn ends(edge: Edge, spans: &[String]) -> Option<(&str, &str)> {
    Some((&spans.get(edge.spans.source)?[..], &spans.get(edge.spans.destination)?[..]))
}

/// Edges of a circuit, strongest first.
fn ranked(circuit: &Circuit, scores: &[f32]) -> Vec<(Edge, f32)> {
    let edges = circuit.graph().edges().zip(scores.iter().copied()).zip(circuit.kept());
    let mut found: Vec<_> = edges.filter(|(_, is_kept)| **is_kept).map(|(edge, _)| edge).collect();
    found.sort_by(|one, other| other.1.abs().total_cmp(&one.1.abs()));
    found
}

fn strongest(circuit: &Circuit, scores: &[f32], spans: &[String], method: CircuitMethod) -> String {
    let in_words = |(edge, score): (Edge, f32)| match ends(edge, spans) {
        None => format!("{edge} {score:.4}"),
        Some((source, destination)) if source == destination => format!("{edge} ({source}) {score:.4}"),
        Some((source, destination)) => format!("{edge} ({source} to {destination}) {score:.4}"),
    };
    let named: Vec<String> = ranked(circuit, scores).into_iter().take(NAMED_EDGES).map(in_words).collect();
    match named.is_empty() {
        true if method == CircuitMethod::Acdc => "no edges remain; lower `threshold`".into(),
        true => "the chosen edges do not connect the input to the logits; choose more `edges`".into(),
        false => format!("strongest edges: {}", named.join(", ")),
    }
}

/// Draws the circuit with the input at the bottom and the logits at the top; blue edges help the task.
fn picture(circuit: &Circuit, scores: &[f32], metric: CircuitMetric) -> Graph {
    // Corrupting a helpful edge lowers a difference metric, so its score is negative.
    let sign = if metric == CircuitMetric::Divergence { 1.0 } else { -1.0 };
    let heads = circuit.edges().flat_map(|edge| [Some(edge.source), edge.destination.source()]);
    let width = heads.flatten().fold(0, |width, source| match source {
        EdgeSource::Head(head) => width.max(head.head + 1),
        _ => width,
    });
    // Row numbers before empty rows are removed: two rows for each layer, heads and MLP.
    let row_of = |source: Option<EdgeSource>| match source {
        Some(EdgeSource::Input) => 0,
        Some(EdgeSource::Head(head)) => 1 + 2 * head.layer,
        Some(EdgeSource::Mlp(layer)) => 2 + 2 * layer,
        None => usize::MAX,
    };
    let mut nodes: BTreeMap<(usize, usize), (String, usize)> = BTreeMap::new();
    for edge in circuit.edges() {
        for source in [Some(edge.source), edge.destination.source()] {
            let head = if let Some(EdgeSource::Head(head)) = source { head.head } else { 0 };
            let label = source.map_or_else(|| edge.destination.node(), |source| source.to_string());
            nodes.insert((row_of(source), head), (label, 0));
        }
    }
    let mut rows: Vec<usize> = nodes.keys().map(|(row, _)| *row).collect();
    rows.dedup();
    for (place, (_, index)) in nodes.values_mut().enumerate() {
        *index = place;
    }
    // Heads are side by side with the MLP to their right; input and logits are in the middle.
    let column = |row: usize, head: usize| match row {
        0 | usize::MAX => 0.5,
        _ if row % 2 == 1 => (head as f64 + 0.5) / (width + 1) as f64,
        _ => (width as f64 + 0.5) / (width + 1) as f64,
    };
    let node = |((row, head), (label, _)): (&(usize, usize), &(String, usize))| GraphNode {
        label: label.clone(),
        row: rows.binary_search(row).unwrap_or_default(),
        column: column(*row, *head),
    };
    let index = |source: Option<EdgeSource>| {
        let head = if let Some(EdgeSource::Head(head)) = source { head.head } else { 0 };
        nodes.get(&(row_of(source), head)).map_or(0, |(_, index)| *index)
    };
    // Sum of the scores of the edges between two nodes over all spans.
    let mut links: BTreeMap<(usize, usize, Option<char>), f32> = BTreeMap::new();
    for (edge, score) in ranked(circuit, scores) {
        let port = match edge.destination {
            EdgeDestination::Query(_) => Some('q'),
            EdgeDestination::Key(_) => Some('k'),
            EdgeDestination::Value(_) => Some('v'),
            EdgeDestination::Mlp(_) | EdgeDestination::Logits => None,
        };
        let ends = (index(Some(edge.source)), index(edge.destination.source()), port);
        *links.entry(ends).or_default() += sign * score;
    }
    let link = |((from, to, port), weight)| GraphLink { from, to, port, weight };
    Graph { links: links.into_iter().map(link).collect(), nodes: nodes.iter().map(node).collect() }
}
