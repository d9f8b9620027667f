//! Which features of the MLPs carry a prediction, and how they act on each other: an attribution graph.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::path::PathBuf;
use std::str::FromStr;

use candle_core::DType;
use candle_gpt2::{LogitsFor, Observer};
use candle_gpt2_engine::{Reporter, Silent, Unit};
use candle_gpt2_interpret::{
    AttributionGraph, Chain, Edit, FeatureChange, GraphNode, GraphOptions, PlacedFeature, PrunedGraph,
    ReplacementModel, Run, TranscoderInput, TranscoderLayer, Transcoders,
};
use candle_gpt2_pictures::{
    AttributionGraph as DrawnGraph, Axis, FeatureCard, GraphLine, GraphPoint, Metric as Shown, PointKind,
    Report, Scale,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Result, wrong};
use crate::features::{check_examples, usual_examples};
use crate::files::TextFile;
use crate::frontend::paired;
use crate::graph_features::{Meanings, command};
use crate::metric::logits_and_mean;
use crate::{Found, Look, LookSubject, Reader, Text, read_transcoders};

/// circuit-tracer's frontend leaves features out that are active at more than this share of the positions.
const COMMON: f64 = 2.0 / 3.0;
/// Of so many neurons of each MLP a token has features if there are no transcoders.
const NEURONS: usize = 32;

/// The features that carry a prediction, and what they add to each other.
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
/// let graph = found.graph.as_ref().ok_or("it is drawn")?;
/// assert!(graph.points.iter().any(|point| point.id.starts_with("E_")), "the embeddings are nodes");
/// assert!(found.page().contains("attribution graph"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Graph {
    /// The text.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Transcoders of every layer: a folder of circuit-tracer (config.yaml), or with a SAELens folder (cfg.json) for each layer; built-in: those of the built-in model [default: the neurons of the MLPs]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub transcoders: Option<PathBuf>,
    /// Compute the edges of up to N features, those with the most influence on the prediction
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Graph::default().max_feature_nodes))]
    pub max_feature_nodes: usize,
    /// Memory that the graph may take, in MiB
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = Graph::default().max_memory))]
    pub max_memory: u64,
    /// Keep the most influential nodes that together have this share of all influence
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = Graph::default().node_threshold))]
    pub node_threshold: f64,
    /// Keep the most influential edges that together have this share of all influence
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = Graph::default().edge_threshold))]
    pub edge_threshold: f64,
    /// Set a feature, active or not, to a value, such as 3_1201_4=0 (layer, feature, position), and compare the predicted effect with the actual one (repeatable)
    #[cfg_attr(feature = "clap", arg(long, value_name = "FEATURE=VALUE"))]
    pub set: Vec<FeatureSetting>,
    /// How many nodes the table lists; of the features among them the effect of zeroing each is computed
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Graph::default().top))]
    pub top: usize,
    /// Collect examples of the features from this file: one text per line, or in a .jsonl file JSON objects with `text` or `ids` [default: the text itself]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompts_file: Option<PathBuf>,
    /// Number of top-activating texts per feature, and of texts from each quarter of those in which it is active
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
    /// Of a text, by the neurons of the MLPs.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

/// A feature at a position, and the value that it is set to.
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
    /// The layer that it reads.
    pub layer: usize,
    /// Its number in the layer.
    pub feature: usize,
    /// The token, counted from 0.
    pub position: usize,
    /// What it is set to.
    pub value: f64,
}

/// Reads `3_1201_4=0`.
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
            format!("`{text}` is not a setting; write LAYER_FEATURE_POSITION=VALUE, such as 3_1201_4=0")
        })
    }
}

impl TryFrom<String> for FeatureSetting {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

/// The node.
impl Display for FeatureSetting {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}_{}_{}", self.layer, self.feature, self.position)
    }
}

/// A text, and the transcoders that explain the model on it.
///
/// Given by `check` of a [`Graph`].
#[derive(Debug)]
pub struct CheckedGraph {
    ids: Vec<u32>,
    /// `None` for the neurons.
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
                return Err(wrong(format!("`{option}` {share}: expected a share from 0 to 1")));
            }
        }
        let ids = reader.text(&self.text)?;
        let config = reader.config();
        let read = self.transcoders.as_ref().map(|folder| read_transcoders(folder, config));
        let transcoders = read.transpose()?;
        for (place, setting) in self.set.iter().enumerate() {
            let node = setting.to_string();
            if self.set[..place].iter().any(|before| before.to_string() == node) {
                return Err(wrong(format!("`set` {node}: it is set twice; give one value")));
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
                format!("there is no layer {layer}; the model has {layers}")
            } else if feature >= features {
                format!("there is no feature {feature} in layer {layer}, which has {features}")
            } else if position >= tokens {
                format!("there is no position {position}; the text has {tokens} tokens")
            } else if position == 0 && reader.bos().is_some() {
                "position 0 is the BOS token, whose features are left out; choose another position".into()
            } else {
                continue;
            };
            return Err(wrong(format!("`set` {setting}: {problem} (all counted from 0)")));
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

    fn look(&self, checked: CheckedGraph, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Found> {
        let CheckedGraph { ids, transcoders, texts } = checked;
        let run = subject.run(&ids)?;
        // Transcoders are trained without the token in front.
        let options = GraphOptions { skips_first: subject.has_bos(), ..self.options() };
        let of_neurons = || Transcoders::of_neurons(subject.model(), NEURONS);
        let transcoders = transcoders.map_or_else(of_neurons, Ok)?;
        let replacement = ReplacementModel::new(&run, &transcoders, &options)?;
        let (graph, pruned) = self.traced(&replacement, reporter)?;
        let (model, reader) = (subject.name(), subject.reader());
        let mut drawn =
            Drawn { graph: &graph, pruned: &pruned, model, reader, ids: &ids, known: Known::default() };
        let texts = (&ids[..], texts.as_ref(), self.examples);
        let placed = transcoders.cast(DType::F32, subject.model().device())?;
        let meanings = Meanings::new(&drawn.features(), &placed, subject, texts, reporter)?;
        drawn.known.zeroed = self.zeroed(&run, &replacement, &drawn)?;
        drawn.known.meanings = Some(meanings);
        drawn.known.transcoders = self.transcoders.as_ref().map(|folder| (folder, transcoders.input()));
        let mut report = self.report(&drawn);
        if self.transcoders.is_none() {
            report.notes.push(format!(
                "features are neurons: the {NEURONS} most active of each MLP at each token; pass `transcoders` for trained features"
            ));
        }
        let mut details = drawn.frontend(self);
        if !self.set.is_empty() {
            details["interventions"] = self.intervene(&run, &replacement, &drawn, &mut report)?;
        }
        Ok(Found { graph: Some(drawn.picture()), ..Found::new(report, details) })
    }
}

fn traced(replacement: &ReplacementModel, reporter: &dyn Reporter) -> Result<AttributionGraph> {
    let bar = std::cell::OnceCell::new();
    let heard = std::cell::Cell::new(0);
    let progress = |done: usize, total: usize| {
        let bar = bar.get_or_init(|| reporter.start("tracing", total as u64, Unit::Items("nodes")));
        bar.advance((done - heard.replace(done)) as u64);
    };
    Ok(AttributionGraph::trace(replacement, &progress)?)
}

impl Graph {
    /// What limits the replacement model of its text.
    pub fn options(&self) -> GraphOptions {
        GraphOptions {
            max_feature_nodes: self.max_feature_nodes,
            max_bytes: self.max_memory.saturating_mul(1 << 20),
            ..GraphOptions::default()
        }
    }

    /// The graph of a replacement model of a text, with nothing set, which needs no model any more; `model` is what the user calls it.
    ///
    /// # Errors
    /// When choosing among the edges takes more memory than it may.
    pub fn of_replacement(
        &self,
        replacement: &ReplacementModel,
        ids: &[u32],
        model: &str,
        reader: &Reader,
    ) -> Result<(Report, DrawnGraph)> {
        let (graph, pruned) = self.traced(replacement, &Silent)?;
        let drawn = Drawn { graph: &graph, pruned: &pruned, model, reader, ids, known: Known::default() };
        Ok((self.report(&drawn), drawn.picture()))
    }

    fn traced(
        &self,
        replacement: &ReplacementModel,
        reporter: &dyn Reporter,
    ) -> Result<(AttributionGraph, PrunedGraph)> {
        let graph = traced(replacement, reporter)?;
        let (needed, limit) = (graph.pruning_bytes(self.node_threshold), self.options().max_bytes);
        if needed > limit {
            return Err(wrong(format!(
                "`node_threshold` {}: to choose among the edges of so many nodes takes about {} MiB, more than the {} MiB of `max_memory`; \
                 lower the one, or raise the other",
                self.node_threshold,
                needed.div_ceil(1 << 20),
                limit >> 20
            )));
        }
        let pruned = graph.pruned(self.node_threshold, self.edge_threshold);
        Ok((graph, pruned))
    }

    fn report(&self, drawn: &Drawn) -> Report {
        let mut report = drawn.reader.report("graph", drawn.title(), drawn.model, drawn.ids);
        self.list_nodes(&mut report, drawn);
        drawn.add_notes(&mut report);
        report
    }

    /// The nodes that are kept with the most influence, as values of the report.
    fn list_nodes(&self, report: &mut Report, drawn: &Drawn) {
        let order = self.listed(drawn);
        report.axes = vec![Axis::new("node", order.iter().map(|node| drawn.id(*node)))];
        report.values = order.iter().map(|node| Some(rounded(drawn.graph.influence()[*node]))).collect();
        report.texts = order.iter().map(|node| drawn.short_name(*node)).collect();
        report.scale = Scale::Amount;
    }

    /// The nodes of the table, the most influential first.
    fn listed(&self, drawn: &Drawn) -> Vec<usize> {
        let influence = drawn.graph.influence();
        let mut order: Vec<usize> = drawn.kept().collect();
        order.retain(|node| !matches!(drawn.graph.nodes[*node], GraphNode::Logit { .. }));
        order.sort_by(|a, b| influence[*b].total_cmp(&influence[*a]).then(a.cmp(b)));
        order.truncate(self.top.max(1));
        order
    }

    /// The predicted and the actual change of the most probable logit, less the mean of all, if a listed feature is set to 0.
    fn zeroed(
        &self,
        run: &Run,
        replacement: &ReplacementModel,
        drawn: &Drawn,
    ) -> Result<BTreeMap<usize, [f64; 2]>> {
        let Some((token, best)) = drawn.best() else { return Ok(BTreeMap::new()) };
        let before = centred_logits(run, Chain(Vec::new()))?[token as usize];
        let mut effects = BTreeMap::new();
        for node in self.listed(drawn) {
            if !matches!(drawn.graph.nodes[node], GraphNode::Feature { .. }) {
                continue;
            }
            let changes = [FeatureChange { node: drawn.graph.origins[node], value: 0.0 }];
            let predicted = drawn.graph.predicted(&changes, &[])[best];
            let after = edited_logits(run, replacement.edits(&changes)?)?[token as usize];
            effects.insert(node, [predicted, after - before]);
        }
        Ok(effects)
    }

    /// Sets features, and compares the logits that the graph predicts with those of the model.
    fn intervene(
        &self,
        run: &Run,
        replacement: &ReplacementModel,
        drawn: &Drawn,
        report: &mut Report,
    ) -> Result<Value> {
        let graph = drawn.graph;
        let targets = graph.targets();
        let (mut changes, mut edits, mut set) = (Vec::new(), Vec::new(), Vec::new());
        let mut added = vec![0.0; targets.len()];
        for setting in &self.set {
            let FeatureSetting { layer, feature, position, value } = *setting;
            let is_it = |node: &GraphNode| {
                matches!(node, GraphNode::Feature { layer: l, position: p, feature: f, .. }
                    if (*l, *p, *f) == (layer, position, feature))
            };
            let from = match replacement.nodes().iter().find(|node| is_it(node)) {
                Some(GraphNode::Feature { activation, .. }) => *activation,
                _ => 0.0,
            };
            let placed = PlacedFeature { layer, position, feature };
            match graph.nodes.iter().position(is_it) {
                Some(node) => changes.push(FeatureChange { node: graph.origins[node], value }),
                // Inactive, or not among the features with the most influence: the graph has no edges from it.
                None => {
                    let effects = replacement.unit_effects(placed, &targets)?;
                    added.iter_mut().zip(effects).for_each(|(sum, effect)| *sum += (value - from) * effect);
                }
            }
            edits.extend(replacement.addition(placed, value - from)?);
            set.push(json!({ "node_id": setting.to_string(), "from": from, "to": value }));
            let named = drawn.known.name((layer, feature), drawn.reader);
            report.notes.push(format!("{setting}{named} set from {} to {value}", three(from)));
        }
        let moved = graph.predicted(&changes, &added);
        let before = centred_logits(run, Chain(Vec::new()))?;
        let after = edited_logits(run, edits)?;
        let mut logits = Vec::new();
        for node in (0..graph.nodes.len()).rev() {
            let GraphNode::Logit { token, .. } = graph.nodes[node] else { break };
            let (before, after) = (before[token as usize], after[token as usize]);
            let (predicted, text) = (before + moved[node], drawn.reader.shown(token));
            report
                .notes
                .push(format!("logit of {text:?}: {before:.3}; predicted {predicted:.3}, actual {after:.3}"));
            logits.push(json!({
                "id": token, "text": text, "before": before, "predicted": predicted, "actual": after,
            }));
            report.metric = Some(Shown { name: drawn.logit_name(token), before, after: Some(after) });
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

/// The logits of a run with edits, as [`centred_logits`].
fn edited_logits(run: &Run, mut edits: Vec<Edit>) -> Result<Vec<f64>> {
    centred_logits(run, Chain(edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect()))
}

/// The logits after the last token, less their mean.
fn centred_logits(run: &Run, observer: Chain) -> Result<Vec<f64>> {
    let (logits, mean) = logits_and_mean(run, LogitsFor::LastToken, observer)?;
    Ok(logits.into_iter().map(|logit| logit - mean).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "reports are of f32")]
fn rounded(value: f64) -> f32 {
    value as f32
}

/// A number in three digits.
fn three(value: f64) -> String {
    format!("{value:.3}").replace('-', "−")
}

/// Facts about the features besides the graph.
#[derive(Default)]
struct Known<'a> {
    meanings: Option<Meanings>,
    /// Effects of zeroing listed features, see [`Graph::zeroed`].
    zeroed: BTreeMap<usize, [f64; 2]>,
    /// The folder of trained transcoders, and what they read.
    transcoders: Option<(&'a PathBuf, TranscoderInput)>,
}

impl Known<'_> {
    /// `, says …` of a feature.
    fn name(&self, feature: (usize, usize), reader: &Reader) -> String {
        let name = self.meanings.as_ref().and_then(|meanings| meanings.name(feature, reader));
        name.map_or(String::new(), |name| format!(", {name}"))
    }
}

/// A graph with what is needed to name its nodes.
struct Drawn<'a> {
    graph: &'a AttributionGraph,
    pruned: &'a PrunedGraph,
    /// What the user calls it.
    model: &'a str,
    reader: &'a Reader,
    ids: &'a [u32],
    known: Known<'a>,
}

impl Drawn<'_> {
    /// The features that are kept, by layer.
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

    /// The layer and number of a feature.
    fn feature(&self, node: usize) -> Option<(usize, usize)> {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, feature, .. } => Some((layer, feature)),
            _ => None,
        }
    }

    fn card(&self, node: usize) -> Option<&FeatureCard> {
        self.known.meanings.as_ref()?.cards.get(&self.feature(node)?)
    }

    /// The tokens that a feature makes most probable: `says ·ball ·cup ·sled`.
    fn meaning(&self, node: usize) -> Option<String> {
        self.known.meanings.as_ref()?.name(self.feature(node)?, self.reader)
    }

    /// The command that shows more of a feature.
    fn command(&self, node: usize) -> Option<String> {
        let ((folder, input), (layer, feature)) = self.known.transcoders.zip(self.feature(node))?;
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

    /// The token at a position as it is shown, with its place.
    fn token(&self, position: usize) -> String {
        format!("{} {position}", self.reader.shown(self.ids[position]))
    }

    /// What a node is called in files and options.
    fn id(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, .. } => format!("{layer}_{feature}_{position}"),
            GraphNode::Error { layer, position } => format!("err_{layer}_{position}"),
            GraphNode::Embedding { position, token } => format!("E_{token}_{position}"),
            GraphNode::Position { position } => format!("P_{position}_{position}"),
            GraphNode::Logit { token, .. } => format!("{}_{token}_{}", self.n_layer() + 1, self.last()),
        }
    }

    /// What a node is, in words.
    fn name(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, activation } => {
                let (token, named) = (self.token(position), self.known.name((layer, feature), self.reader));
                format!("feature {feature} of layer {layer} at {token}{named}, active {activation:.3}")
            }
            GraphNode::Error { layer, position } => {
                format!("error of layer {layer} at {}", self.token(position))
            }
            GraphNode::Embedding { position, .. } => format!("embedding of {}", self.token(position)),
            GraphNode::Position { position } => format!("embedding of position {position}"),
            GraphNode::Logit { token, probability } => {
                format!("logit of {}, probability {probability:.3}", self.reader.shown(token))
            }
        }
    }

    /// The same where the id is beside it.
    fn short_name(&self, node: usize) -> String {
        match self.graph.nodes[node] {
            GraphNode::Feature { layer, position, feature, .. } => {
                let named = self.known.name((layer, feature), self.reader);
                let effect = self.known.zeroed.get(&node).map_or(String::new(), |[predicted, actual]| {
                    format!(", zeroed: predicted {}, actual {}", three(*predicted), three(*actual))
                });
                format!("feature at {}{effect}{named}", self.token(position))
            }
            GraphNode::Error { position, .. } => format!("error at {}", self.token(position)),
            _ => self.name(node),
        }
    }

    fn logit_name(&self, token: u32) -> String {
        format!("logit of {:?} minus the mean of all", self.reader.shown(token))
    }

    /// The most probable token, and its node.
    fn best(&self) -> Option<(u32, usize)> {
        let logit = |(node, kind): (usize, &GraphNode)| match kind {
            GraphNode::Logit { token, .. } => Some((*token, node)),
            _ => None,
        };
        self.graph.nodes.iter().enumerate().find_map(logit)
    }

    fn title(&self) -> String {
        let best = self.best().map_or(String::new(), |(token, _)| self.reader.shown(token));
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
            report.metric = Some(Shown { name: self.logit_name(token), before, after: None });
        }
        if !self.known.zeroed.is_empty() {
            let name = self.best().map_or(String::new(), |(token, _)| self.logit_name(token));
            report.notes.push(format!(
                "says: the tokens that a feature makes most probable by itself; zeroed: the change of the {name} if the feature is set to 0, \
                 as the edges predict it and as the model computes it"
            ));
        }
        let first = self.known.zeroed.keys().find_map(|node| self.command(*node));
        report.notes.extend(first.map(|command| format!("examples of a feature: {command}")));
        let common = self.common();
        if common > 0 {
            report.notes.push(format!(
                "{common} nodes belong to features that are active at more than 2/3 of the positions; circuit-tracer's frontend hides them"
            ));
        }
    }

    /// What nodes of each kind and biases add to a target.
    fn parts(&self, target: usize) -> Vec<(&'static str, f64)> {
        let of = |kind: fn(&GraphNode) -> bool| {
            let sources = (0..self.graph.nodes.len()).filter(|source| kind(&self.graph.nodes[*source]));
            sources.map(|source| f64::from(self.graph.edge(target, source))).sum::<f64>()
        };
        let (biases, left_out) = self.graph.rest(target);
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

    /// Nodes that are kept of features that are active nearly everywhere.
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

    /// The graph as circuit-tracer's frontend reads it.
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
                "feature": paired(layer, feature), "layer": layer.to_string(), "ctx_idx": position,
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
                // The page takes the probability out of this text.
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
        if let Some([predicted, actual]) = self.known.zeroed.get(&node) {
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

    /// The nodes that are kept, as they are drawn.
    fn picture(&self) -> DrawnGraph {
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
            let (card, zeroed) = (self.card(node).cloned(), self.known.zeroed.get(&node).copied());
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
        DrawnGraph { rows, points, lines: self.pruned.edges.iter().filter_map(line).collect() }
    }
}
