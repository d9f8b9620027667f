//! Attribution graphs: the MLP features that carry a prediction, and their effects on each other.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::path::PathBuf;
use std::str::FromStr;

use candle_core::DType;
use candle_gpt2::{LogitsFor, Observer};
use candle_gpt2_engine::{Reporter, Silent, Unit};
use candle_gpt2_interpret::{
    AttributionGraph, Chain, Edit, FeatureAtPosition, FeatureChange, GraphNode, GraphOptions, PrunedGraph,
    ReplacementModel, Run, TranscoderInput, TranscoderLayer, Transcoders,
};
use candle_gpt2_pictures::{
    AttributionGraph as GraphPicture, Axis, FeatureCard, GraphLine, GraphPoint, Metric as ReportMetric,
    PointKind, Report, Scale,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Result, invalid_option};
use crate::features::{check_examples, usual_examples};
use crate::files::TextFile;
use crate::frontend::cantor_pair;
use crate::graph_features::{Meanings, command};
use crate::metric::logits_and_mean;
use crate::{Analysis, Look, LookSubject, Reader, Text, read_transcoders};

/// Fraction of active positions above which circuit-tracer's frontend hides a feature.
const COMMON: f64 = 2.0 / 3.0;
/// Number of neurons per MLP and token that serve as features if there are no transcoders.
const NEURONS: usize = 32;

/// Attribution graph for a prediction: the features that carry it, and their direct effects.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Graph, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let text = Text::Words("One day, Mia was".into());
/// let found = Graph { max_feature_nodes: 100, ..Graph::new(text) }.at(&subject, &Silent)?;
/// let graph = found.graph.as_ref().ok_or("no graph")?;
/// assert!(graph.points.iter().any(|point| point.id.starts_with("E_")), "embeddings are nodes");
/// assert!(found.page().contains("attribution graph"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Graph {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Folder with transcoders for every layer: circuit-tracer's (config.yaml), or one SAELens folder
    /// (cfg.json) per layer; built-in: the built-in model's transcoders [default: the neurons of the MLPs]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub transcoders: Option<PathBuf>,
    /// Compute the edges of the N features with the most influence on the prediction
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Graph::default().max_feature_nodes))]
    pub max_feature_nodes: usize,
    /// Memory limit for the graph, in MiB
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = Graph::default().max_memory))]
    pub max_memory: u64,
    /// Keep the most influential nodes that together account for this share of all influence
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = Graph::default().node_threshold))]
    pub node_threshold: f64,
    /// Keep the most influential edges that together account for this share of all influence
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = Graph::default().edge_threshold))]
    pub edge_threshold: f64,
    /// Set a feature, active or not, to a value, such as 3_1201_4=0 (layer, feature, position),
    /// and compare the predicted effect with the actual one (repeatable)
    #[cfg_attr(feature = "clap", arg(long, value_name = "FEATURE=VALUE"))]
    pub set: Vec<FeatureSetting>,
    /// Number of nodes listed in the table; the effect of zeroing each listed feature is also
    /// computed
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Graph::default().top))]
    pub top: usize,
    /// Collect examples of the features from this file: one text per line, or in a .jsonl file
    /// JSON objects with `text` or `ids` [default: the text itself]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompts_file: Option<PathBuf>,
    /// Number of top-activating texts per feature, and number of texts sampled from each quarter of the
    /// texts that activate it
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Graph::default().examples))]
    pub examples: usize,
}

impl Default for Graph {
    fn default() -> Self {
        let GraphOptions { max_feature_nodes, max_bytes, .. } = GraphOptions::default();
        Self {
            text: Text::default(),
            transcoders: None,
            max_feature_nodes,
            max_memory: max_bytes >> 20,
            node_threshold: 0.8,
            edge_threshold: 0.98,
            set: Vec::new(),
            top: 20,
            prompts_file: None,
            examples: usual_examples(),
        }
    }
}

impl Graph {
    /// Creates options that use the neurons of the MLPs as features.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

/// A feature at a position, and the value to set it to.
///
/// ```
/// use candle_gpt2_look::FeatureSetting;
///
/// let setting: FeatureSetting = "3_1201_4=0".parse()?;
/// assert_eq!((setting.layer, setting.feature, setting.position, setting.value), (3, 1201, 4, 0.0));
/// assert!("3_1201=0".parse::<FeatureSetting>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct FeatureSetting {
    /// Layer whose input the feature reads.
    pub layer: usize,
    /// Index of the feature in its layer.
    pub feature: usize,
    /// Token position, counted from 0.
    pub position: usize,
    /// Value to set.
    pub value: f64,
}

/// Parses `3_1201_4=0`.
impl FromStr for FeatureSetting {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let read = || {
            let (node, value) = text.split_once('=')?;
            let value: f64 = value.trim().parse().ok().filter(|value: &f64| value.is_finite())?;
            let numbers: Option<Vec<usize>> = node.trim().split('_').map(|part| part.parse().ok()).collect();
            match numbers?[..] {
                [layer, feature, position] => Some(Self { layer, feature, position, value }),
                _ => None,
            }
        };
        read().ok_or_else(|| {
            format!(
                "`{text}` is not a feature setting; write LAYER_FEATURE_POSITION=VALUE, such as 3_1201_4=0"
            )
        })
    }
}

impl TryFrom<String> for FeatureSetting {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

/// Formats the node without the value: `3_1201_4`.
impl Display for FeatureSetting {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}_{}_{}", self.layer, self.feature, self.position)
    }
}

/// Validated options of an attribution graph: the text, the transcoders and the example texts.
///
/// Returned by `check` of [`Graph`].
#[derive(Debug)]
pub struct CheckedGraph {
    ids: Vec<u32>,
    /// Transcoders; `None` uses neurons as features.
    transcoders: Option<Transcoders>,
    texts: Option<TextFile>,
}

impl Look for Graph {
    type Checked = CheckedGraph;

    fn check(&self, reader: &Reader) -> Result<CheckedGraph> {
        for (option, share) in
            [("node_threshold", self.node_threshold), ("edge_threshold", self.edge_threshold)]
        {
            if !(0.0..=1.0).contains(&share) {
                return Err(invalid_option(format!("`{option}` {share}: expected a fraction from 0 to 1")));
            }
        }
        let ids = reader.text(&self.text)?;
        let config = reader.config();
        let read = self.transcoders.as_ref().map(|folder| read_transcoders(folder, config));
        let transcoders = read.transpose()?;
        for (place, setting) in self.set.iter().enumerate() {
            let node = setting.to_string();
            if self.set[..place].iter().any(|before| before.to_string() == node) {
                return Err(invalid_option(format!("`set` {node}: set more than once; pass one value")));
            }
            let features = match &transcoders {
                Some(transcoders) => {
                    transcoders.layers().get(setting.layer).map_or(0, TranscoderLayer::latents)
                }
                None => config.inner_width(),
            };
            let FeatureSetting { layer, feature, position, .. } = *setting;
            let (layers, tokens) = (config.n_layer, ids.len());
            let problem = if layer >= layers {
                format!("layer {layer} is out of range; the model has {layers} layers")
            } else if feature >= features {
                format!("feature {feature} is out of range; layer {layer} has {features} features")
            } else if position >= tokens {
                format!("position {position} is out of range; the text has {tokens} tokens")
            } else if position == 0 && reader.bos().is_some() {
                "position 0 is the BOS token, whose features are left out; choose another position".into()
            } else {
                continue;
            };
            return Err(invalid_option(format!("`set` {setting}: {problem} (all counted from 0)")));
        }
        let texts = match &self.prompts_file {
            Some(path) => {
                check_examples(self.examples, self.max_feature_nodes)?;
                Some(TextFile::read(path)?)
            }
            None => None,
        };
        Ok(CheckedGraph { ids, transcoders, texts })
    }

    fn look(
        &self,
        checked: CheckedGraph,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis> {
        let CheckedGraph { ids, transcoders, texts } = checked;
        let run = subject.run(&ids)?;
        // Transcoders are trained without the BOS token.
        let options = GraphOptions { skips_first: subject.has_bos(), ..self.options() };
        let of_neurons = || Transcoders::of_neurons(subject.model(), NEURONS);
        let transcoders = transcoders.map_or_else(of_neurons, Ok)?;
        let replacement = ReplacementModel::new(&run, &transcoders, &options)?;
        let (graph, pruned) = self.trace(&replacement, reporter)?;
        let (model, reader) = (subject.name(), subject.reader());
        let mut named_graph = NamedGraph {
            graph: &graph,
            pruned: &pruned,
            model,
            reader,
            ids: &ids,
            facts: FeatureFacts::default(),
        };
        let texts = (&ids[..], texts.as_ref(), self.examples);
        let placed = transcoders.cast(DType::F32, subject.model().device())?;
        let meanings = Meanings::new(&named_graph.features(), &placed, subject, texts, reporter)?;
        named_graph.facts.zeroed = self.zeroed(&run, &replacement, &named_graph)?;
        named_graph.facts.meanings = Some(meanings);
        named_graph.facts.transcoders = self.transcoders.as_ref().map(|folder| (folder, transcoders.input()));
        let mut report = self.report(&named_graph);
        if self.transcoders.is_none() {
            report.notes.push(format!(
                "features are neurons: the {NEURONS} most active of each MLP at each token; pass `transcoders` for trained features"
            ));
        }
        let mut details = named_graph.frontend(self);
        if !self.set.is_empty() {
            details["interventions"] = self.intervene(&run, &replacement, &named_graph, &mut report)?;
        }
        Ok(Analysis { graph: Some(named_graph.picture()), ..Analysis::new(report, details) })
    }
}

fn trace_graph(replacement: &ReplacementModel, reporter: &dyn Reporter) -> Result<AttributionGraph> {
    let bar = std::cell::OnceCell::new();
    let reported = std::cell::Cell::new(0);
    let progress = |done: usize, total: usize| {
        let bar = bar.get_or_init(|| reporter.start("tracing", total as u64, Unit::Items("nodes")));
        bar.advance((done - reported.replace(done)) as u64);
    };
    Ok(AttributionGraph::trace(replacement, &progress)?)
}

impl Graph {
    /// Returns options for a replacement model with these limits.
    pub fn options(&self) -> GraphOptions {
        GraphOptions {
            max_feature_nodes: self.max_feature_nodes,
            max_bytes: self.max_memory.saturating_mul(1 << 20),
            ..GraphOptions::default()
        }
    }

    /// Creates the report and the picture of a replacement model's graph, without interventions.
    ///
    /// The model itself is no longer needed. `model` is the model's display name.
    ///
    /// # Errors
    /// If pruning the edges needs more memory than `max_memory`.
    pub fn of_replacement(
        &self,
        replacement: &ReplacementModel,
        ids: &[u32],
        model: &str,
        reader: &Reader,
    ) -> Result<(Report, GraphPicture)> {
        let (graph, pruned) = self.trace(replacement, &Silent)?;
        let named_graph =
            NamedGraph { graph: &graph, pruned: &pruned, model, reader, ids, facts: FeatureFacts::default() };
        Ok((self.report(&named_graph), named_graph.picture()))
    }

    fn trace(
        &self,
        replacement: &ReplacementModel,
        reporter: &dyn Reporter,
    ) -> Result<(AttributionGraph, PrunedGraph)> {
        let graph = trace_graph(replacement, reporter)?;
        let (needed, limit) = (graph.pruning_bytes(self.node_threshold), self.options().max_bytes);
        if needed > limit {
            return Err(invalid_option(format!(
                "`node_threshold` {}: pruning the edges of this many nodes needs about {} MiB, more than the \
                 {} MiB of `max_memory`; lower `node_threshold`, or raise `max_memory`",
                self.node_threshold,
                needed.div_ceil(1 << 20),
                limit >> 20
            )));
        }
        let pruned = graph.pruned(self.node_threshold, self.edge_threshold);
        Ok((graph, pruned))
    }

    fn report(&self, named_graph: &NamedGraph) -> Report {
        let mut report =
            named_graph.reader.report("graph", named_graph.title(), named_graph.model, named_graph.ids);
        self.list_nodes(&mut report, named_graph);
        named_graph.add_notes(&mut report);
        report
    }

    /// Lists the most influential kept nodes as the report's values.
    fn list_nodes(&self, report: &mut Report, named_graph: &NamedGraph) {
        let order = self.listed(named_graph);
        report.axes = vec![Axis::new("node", order.iter().map(|node| named_graph.id(*node)))];
        report.values =
            order.iter().map(|node| Some(rounded(named_graph.graph.influence()[*node]))).collect();
        report.texts = order.iter().map(|node| named_graph.short_name(*node)).collect();
        report.scale = Scale::Amount;
    }

    /// Nodes to list in the table, most influential first.
    fn listed(&self, named_graph: &NamedGraph) -> Vec<usize> {
        let influence = named_graph.graph.influence();
        let mut order: Vec<usize> = named_graph.kept().collect();
        order.retain(|node| !matches!(named_graph.graph.nodes[*node], GraphNode::Logit { .. }));
        order.sort_by(|a, b| influence[*b].total_cmp(&influence[*a]).then(a.cmp(b)));
        order.truncate(self.top.max(1));
        order
    }

    /// Predicted and actual effect on the top logit of setting each listed feature to 0.
    ///
    /// Logits are relative to the mean of all logits.
    fn zeroed(
        &self,
        run: &Run,
        replacement: &ReplacementModel,
        named_graph: &NamedGraph,
    ) -> Result<BTreeMap<usize, [f64; 2]>> {
        let Some((token, best)) = named_graph.best() else { return Ok(BTreeMap::new()) };
        let before = centered_logits(run, Chain(Vec::new()))?[token as usize];
        let mut effects = BTreeMap::new();
        for node in self.listed(named_graph) {
            if !matches!(named_graph.graph.nodes[node], GraphNode::Feature { .. }) {
                continue;
            }
            let changes = [FeatureChange { node: named_graph.graph.origins[node], value: 0.0 }];
            let predicted = named_graph.graph.predicted(&changes, &[])[best];
            let after = edited_logits(run, replacement.edits(&changes)?)?[token as usize];
            effects.insert(node, [predicted, after - before]);
        }
        Ok(effects)
    }

    /// Sets features, and compares the logits predicted by the graph with the model's logits.
    fn intervene(
        &self,
        run: &Run,
        replacement: &ReplacementModel,
        named_graph: &NamedGraph,
        report: &mut Report,
    ) -> Result<Value> {
        let graph = named_graph.graph;
        let targets = graph.targets();
        let (mut changes, mut edits, mut set) = (Vec::new(), Vec::new(), Vec::new());
        let mut added = vec![0.0; targets.len()];
        for setting in &self.set {
            let FeatureSetting { layer, feature, position, value } = *setting;
            let is_feature = |node: &GraphNode| {
                matches!(node, GraphNode::Feature { layer: l, position: p, feature: f, .. }
                    if (*l, *p, *f) == (layer, position, feature))
            };
            let from = match replacement.nodes().iter().find(|node| is_feature(node)) {
                Some(GraphNode::Feature { activation, .. }) => *activation,
                _ => 0.0,
            };
            let placed = FeatureAtPosition { layer, position, feature };
            match graph.nodes.iter().position(is_feature) {
                Some(node) => changes.push(FeatureChange { node: graph.origins[node], value }),
                // The graph has no edges from features that are inactive or have too little influence.
                None => {
                    let effects = replacement.unit_effects(placed, &targets)?;
                    added.iter_mut().zip(effects).for_each(|(sum, effect)| *sum += (value - from) * effect);
                }
            }
            edits.extend(replacement.addition(placed, value - from)?);
            set.push(json!({ "node_id": setting.to_string(), "from": from, "to": value }));
            let named = named_graph.facts.name((layer, feature), named_graph.reader);
            report.notes.push(format!("{setting}{named} set from {} to {value}", three_decimals(from)));
        }
        let moved = graph.predicted(&changes, &added);
        let before = centered_logits(run, Chain(Vec::new()))?;
        let after = edited_logits(run, edits)?;
        let mut logits = Vec::new();
        for node in (0..graph.nodes.len()).rev() {
            let GraphNode::Logit { token, .. } = graph.nodes[node] else { break };
            let (before, after) = (before[token as usize], after[token as usize]);
            let (predicted, text) = (before + moved[node], named_graph.reader.printable(token));
            report
                .notes
                .push(format!("logit of {text:?}: {before:.3}; predicted {predicted:.3}, actual {after:.3}"));
            logits.push(json!({
                "id": token, "text": text, "before": before, "predicted": predicted, "actual": after,
            }));
            report.metric =
                Some(ReportMetric { name: named_graph.logit_name(token), before, after: Some(after) });
        }
        report.notes.push(
            "logits are relative to their mean; predicted: from the edges, with attention patterns, norms and the set of active features frozen; \
             actual: the model run with the change"
                .into(),
        );
        logits.reverse();
        Ok(json!({ "set": set, "logits": logits }))
    }
}

/// Logits of a run with edits, centered by [`centered_logits`].
fn edited_logits(run: &Run, mut edits: Vec<Edit>) -> Result<Vec<f64>> {
    centered_logits(run, Chain(edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect()))
}

/// Logits after the last token, minus their mean.
fn centered_logits(run: &Run, observer: Chain) -> Result<Vec<f64>> {
    let (logits, mean) = logits_and_mean(run, LogitsFor::LastToken, observer)?;
    Ok(logits.into_iter().map(|logit| logit - mean).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "report values are f32")]
fn rounded(value: f64) -> f32 {
    value as f32
}

/// Formats a number with three decimal places.
fn three_decimals(value: f64) -> String {
    format!("{value:.3}").replace('-', "−")
}

/// Feature data that the graph itself does not contain.
#[derive(Default)]
struct FeatureFacts<'a> {
    meanings: Option<Meanings>,
    /// Effects of zeroing the listed features, from [`Graph::zeroed`].
    zeroed: BTreeMap<usize, [f64; 2]>,
    /// Folder and input type of the trained transcoders.
    transcoders: Option<(&'a PathBuf, TranscoderInput)>,
}

impl FeatureFacts<'_> {
    /// Suffix of a node's description with the feature's name: `, says …`.
    fn name(&self, feature: (usize, usize), reader: &Reader) -> String {
        let name = self.meanings.as_ref().and_then(|meanings| meanings.name(feature, reader));
        name.map_or(String::new(), |name| format!(", {name}"))
    }
}

/// A graph with the data needed to name its nodes.
struct NamedGraph<'a> {
    graph: &'a AttributionGraph,
    pruned: &'a PrunedGraph,
    /// Display name of the model.
    model: &'a str,
    reader: &'a Reader,
    ids: &'a [u32],
    facts: FeatureFacts<'a>,
}

impl NamedGraph<'_> {
    /// Kept features, by layer.
    fn features(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut features: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for node in self.kept() {
            if let GraphNode::Feature { layer, feature, .. } = self.graph.nodes[node] {
                features.entry(layer).or_default().push(feature);
            }
        }
        for numbers in features.values_mut() {
            numbers.sort_unstable();
            numbers.dedup();
        }
        features
    }

    /// Layer and index of a feature node.
    fn feature(&self, node: usize) -> Option<(usize, usize)> {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, feature, .. } => Some((layer, feature)),
            _ => None,
        }
    }

    fn card(&self, node: usize) -> Option<&FeatureCard> {
        self.facts.meanings.as_ref()?.cards.get(&self.feature(node)?)
    }

    /// Tokens that a feature makes most probable: `says ·ball ·cup ·sled`.
    fn meaning(&self, node: usize) -> Option<String> {
        self.facts.meanings.as_ref()?.name(self.feature(node)?, self.reader)
    }

    /// Command that shows more about a feature.
    fn command(&self, node: usize) -> Option<String> {
        let ((folder, input), (layer, feature)) = self.facts.transcoders.zip(self.feature(node))?;
        command(folder.to_str()?, layer, feature, input.hook())
    }

    fn kept(&self) -> impl Iterator<Item = usize> {
        self.pruned.nodes.iter().enumerate().filter(|(_, kept)| **kept).map(|(node, _)| node)
    }

    fn n_layer(&self) -> usize {
        self.reader.config().n_layer
    }

    fn last(&self) -> usize {
        self.ids.len() - 1
    }

    /// Printable form of the token at a position, with the position.
    fn token(&self, position: usize) -> String {
        format!("{} {position}", self.reader.printable(self.ids[position]))
    }

    /// Identifier of a node in files and options.
    fn id(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, .. } => format!("{layer}_{feature}_{position}"),
            GraphNode::Error { layer, position } => format!("err_{layer}_{position}"),
            GraphNode::Embedding { position, token } => format!("E_{token}_{position}"),
            GraphNode::Position { position } => format!("P_{position}_{position}"),
            GraphNode::Logit { token, .. } => format!("{}_{token}_{}", self.n_layer() + 1, self.last()),
        }
    }

    /// Description of a node.
    fn name(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, activation } => {
                let (token, named) = (self.token(position), self.facts.name((layer, feature), self.reader));
                format!("feature {feature} of layer {layer} at {token}{named}, active {activation:.3}")
            }
            GraphNode::Error { layer, position } => {
                format!("error of layer {layer} at {}", self.token(position))
            }
            GraphNode::Embedding { position, .. } => format!("embedding of {}", self.token(position)),
            GraphNode::Position { position } => format!("embedding of position {position}"),
            GraphNode::Logit { token, probability } => {
                format!("logit of {}, probability {probability:.3}", self.reader.printable(token))
            }
        }
    }

    /// Short description of a node, for use next to its identifier.
    fn short_name(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, .. } => {
                let named = self.facts.name((layer, feature), self.reader);
                let effect = self.facts.zeroed.get(&node).map_or(String::new(), |[predicted, actual]| {
                    format!(
                        ", zeroed: predicted {}, actual {}",
                        three_decimals(*predicted),
                        three_decimals(*actual)
                    )
                });
                format!("feature at {}{effect}{named}", self.token(position))
            }
            GraphNode::Error { position, .. } => format!("error at {}", self.token(position)),
            _ => self.name(node),
        }
    }

    fn logit_name(&self, token: u32) -> String {
        format!("logit of {:?} minus the mean of all", self.reader.printable(token))
    }

    /// Most probable token, and its node.
    fn best(&self) -> Option<(u32, usize)> {
        let logit = |(node, kind): (usize, &GraphNode)| match kind {
            GraphNode::Logit { token, .. } => Some((*token, node)),
            _ => None,
        };
        self.graph.nodes.iter().enumerate().find_map(logit)
    }

    fn title(&self) -> String {
        let best = self.best().map_or(String::new(), |(token, _)| self.reader.printable(token));
        format!("attribution graph of the prediction {best:?}")
    }

    fn add_notes(&self, report: &mut Report) {
        let (graph, pruned) = (self.graph, self.pruned);
        report.notes.push(format!(
            "replacement score {:.3} (share of the influence on the logits that comes from embeddings rather than errors), \
             completeness score {:.3} (share of the edges, weighted by influence, that do not come from errors)",
            graph.replacement_score(),
            graph.completeness_score()
        ));
        let features = graph.nodes.iter().filter(|node| matches!(node, GraphNode::Feature { .. })).count();
        let left = match features == graph.active_features {
            true => String::new(),
            false => format!(" ({features} traced)"),
        };
        report.notes.push(format!(
            "{} active features{left}; pruned to {} nodes and {} edges",
            graph.active_features,
            self.kept().count(),
            pruned.edges.len()
        ));
        if let Some((token, node)) = self.best() {
            report.notes.push(self.sum(token, node));
            let before = self.parts(node).iter().map(|(_, value)| value).sum();
            report.metric = Some(ReportMetric { name: self.logit_name(token), before, after: None });
        }
        if !self.facts.zeroed.is_empty() {
            let name = self.best().map_or(String::new(), |(token, _)| self.logit_name(token));
            report.notes.push(format!(
                "says: the tokens that a feature makes most probable by itself; zeroed: the change of the {name} if the feature is set to 0, \
                 as the edges predict it and as the model computes it"
            ));
        }
        let first = self.facts.zeroed.keys().find_map(|node| self.command(*node));
        report.notes.extend(first.map(|command| format!("examples of a feature: {command}")));
        let common = self.common();
        if common > 0 {
            report.notes.push(format!(
                "{common} nodes belong to features that are active at more than 2/3 of the positions; circuit-tracer's frontend hides them"
            ));
        }
    }

    /// Contributions to a target from each kind of node and from biases.
    fn parts(&self, target: usize) -> Vec<(&'static str, f64)> {
        let of = |kind: fn(&GraphNode) -> bool| {
            let sources = (0..self.graph.nodes.len()).filter(|source| kind(&self.graph.nodes[*source]));
            sources.map(|source| f64::from(self.graph.edge(target, source))).sum::<f64>()
        };
        let (biases, left_out) = self.graph.remainders(target);
        vec![
            ("features", of(|node| matches!(node, GraphNode::Feature { .. }))),
            ("untraced features", left_out),
            ("errors", of(|node| matches!(node, GraphNode::Error { .. }))),
            ("token embeddings", of(|node| matches!(node, GraphNode::Embedding { .. }))),
            ("position embeddings", of(|node| matches!(node, GraphNode::Position { .. }))),
            ("biases", biases),
        ]
    }

    fn sum(&self, token: u32, node: usize) -> String {
        let parts = self.parts(node);
        let sum: f64 = parts.iter().map(|(_, value)| value).sum();
        let shown = parts.iter().filter(|(_, value)| *value != 0.0);
        let shown: Vec<String> = shown.map(|(name, value)| format!("{name} {value:.4}")).collect();
        format!("{} {sum:.4} = {}", self.logit_name(token), shown.join(" + "))
    }

    /// Number of kept nodes whose feature is active at more than [`COMMON`] of the positions.
    fn common(&self) -> usize {
        let place = |node: &GraphNode| match node {
            GraphNode::Feature { layer, feature, .. } => Some((*layer, *feature)),
            _ => None,
        };
        let mut counts = BTreeMap::new();
        let kept: Vec<_> = self.kept().filter_map(|node| place(&self.graph.nodes[node])).collect();
        kept.iter().for_each(|place| *counts.entry(place).or_insert(0usize) += 1);
        let most = COMMON * self.ids.len() as f64;
        counts.values().filter(|count| **count as f64 > most).sum()
    }

    /// Graph in the JSON format of circuit-tracer's frontend.
    fn frontend(&self, options: &Graph) -> Value {
        let text = |id: u32| self.reader.token_text(id);
        let tokens: Vec<String> = self.ids.iter().map(|id| text(*id)).collect();
        let prompt = tokens.concat();
        let slug: Vec<String> = prompt
            .split(|character: char| !character.is_ascii_alphanumeric())
            .filter(|word| !word.is_empty())
            .map(str::to_lowercase)
            .collect();
        let slug: String = slug.join("-").chars().take(60).collect();
        let links = self.pruned.edges.iter().map(|edge| {
            json!({ "source": self.id(edge.source), "target": self.id(edge.target), "weight": edge.weight })
        });
        json!({
            "metadata": {
                "slug": if slug.is_empty() { "graph".to_owned() } else { slug },
                "scan": self.model,
                "transcoder_list": [],
                "prompt_tokens": tokens,
                "prompt": prompt,
                "node_threshold": options.node_threshold,
                "schema_version": 1,
                "info": { "generator": { "name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION") } },
                "generation_settings": { "max_feature_nodes": options.max_feature_nodes },
                "pruning_settings": {
                    "node_threshold": options.node_threshold, "edge_threshold": options.edge_threshold,
                },
            },
            "qParams": { "pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": "" },
            "nodes": self.kept().map(|node| self.frontend_node(node, &text)).collect::<Vec<_>>(),
            "links": links.collect::<Vec<_>>(),
            "replacement_score": self.graph.replacement_score(),
            "completeness_score": self.graph.completeness_score(),
        })
    }

    fn frontend_node(&self, node: usize, text: &dyn Fn(u32) -> String) -> Value {
        let (n_layer, best) = (self.n_layer(), self.best());
        let mut value = match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, activation } => json!({
                "feature": cantor_pair(layer, feature), "layer": layer.to_string(), "ctx_idx": position,
                "feature_type": "cross layer transcoder", "jsNodeId": format!("{layer}_{feature}-0"),
                "clerp": self.meaning(node).unwrap_or_default(), "activation": activation,
            }),
            GraphNode::Error { layer, position } => json!({
                "feature": -1, "layer": layer.to_string(), "ctx_idx": position,
                "feature_type": "mlp reconstruction error", "jsNodeId": format!("err_{layer}-{position}"), "clerp": "",
            }),
            GraphNode::Embedding { position, token } => json!({
                "feature": position, "layer": "E", "ctx_idx": position, "feature_type": "embedding",
                "jsNodeId": format!("E_{token}-{position}"), "clerp": "",
            }),
            GraphNode::Position { position } => json!({
                "feature": position, "layer": "E", "ctx_idx": position, "feature_type": "embedding",
                "jsNodeId": format!("P_{position}-{position}"), "clerp": format!("Position {position}"),
            }),
            GraphNode::Logit { token, probability } => json!({
                "feature": token, "layer": (n_layer + 1).to_string(), "ctx_idx": self.last(),
                "feature_type": "logit", "token_prob": probability,
                "is_target_logit": best.is_some_and(|(best, _)| best == token),
                "jsNodeId": format!("L_{token}-{}", self.last()),
                // circuit-tracer's page parses the probability from this text.
                "clerp": format!("Output \"{}\" (p={probability:.3})", text(token)),
            }),
        };
        value["node_id"] = self.id(node).into();
        if let Some(card) = self.card(node) {
            for (key, part) in [
                ("top_logits", json!(card.top_logits)),
                ("bottom_logits", json!(card.bottom_logits)),
                ("examples_quantiles", json!(card.examples_quantiles)),
            ] {
                value[key] = part;
            }
        }
        if let Some([predicted, actual]) = self.facts.zeroed.get(&node) {
            value["zeroed"] = json!({ "predicted": predicted, "actual": actual });
        }
        if let Some(command) = self.command(node) {
            value["command"] = command.into();
        }
        if !matches!(self.graph.nodes[node], GraphNode::Logit { .. }) {
            value["influence"] = self.pruned.shares[node].into();
        }
        value
    }

    /// Kept nodes and edges, for pages and pictures.
    fn picture(&self) -> GraphPicture {
        let n_layer = self.n_layer();
        let layers = (0..n_layer).map(|layer| format!("layer {layer}"));
        let rows =
            std::iter::once("embeddings".to_owned()).chain(layers).chain(["logits".to_owned()]).collect();
        let mut places = vec![None; self.graph.nodes.len()];
        let mut points = Vec::new();
        for node in self.kept() {
            let (kind, row, column, activation) = match self.graph.nodes[node] {
                GraphNode::Feature { layer, position, activation, .. } => {
                    (PointKind::Feature, layer + 1, position, Some(activation))
                }
                GraphNode::Error { layer, position } => (PointKind::Error, layer + 1, position, None),
                GraphNode::Embedding { position, .. } => (PointKind::Embedding, 0, position, None),
                GraphNode::Position { position } => (PointKind::Position, 0, position, None),
                GraphNode::Logit { .. } => (PointKind::Logit, n_layer + 1, self.last(), None),
            };
            places[node] = Some(points.len());
            let (influence, share) = (self.graph.influence()[node], self.pruned.shares[node]);
            let (card, zeroed) = (self.card(node).cloned(), self.facts.zeroed.get(&node).copied());
            points.push(GraphPoint {
                id: self.id(node),
                name: self.name(node),
                kind,
                row,
                column,
                influence,
                share,
                activation,
                zeroed,
                card,
                command: self.command(node),
            });
        }
        let line = |edge: &candle_gpt2_interpret::AttributionEdge| {
            let (source, target) = places[edge.source].zip(places[edge.target])?;
            Some(GraphLine { source, target, weight: edge.weight })
        };
        GraphPicture { rows, points, lines: self.pruned.edges.iter().filter_map(line).collect() }
    }
}
