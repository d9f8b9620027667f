//! Attribution graphs: contributions add up, and edges match interventions and PyTorch's autograd.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{
    Activation, ByOutput, Gpt2Config, Gpt2LMHeadModel, LogitsFor, Observer, Site, SiteKind,
    expected_parameters,
};
use candle_gpt2_interpret::{
    AttributionGraph, Chain, Dictionary, DictionaryConfig, Edit, FeatureAtPosition, FeatureChange, GraphNode,
    GraphOptions, Record, Replace, ReplacementModel, Run, TranscoderInput, TranscoderLayer, Transcoders,
    TranscodersConfig,
};
use candle_gpt2_testing::{Fixture, fixture_path, json_fixture, pattern, values, worst};
use candle_gpt2_weights::TensorFile;
use serde_json::Value;

use crate::common::{Case, ids};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Tensors = BTreeMap<String, Tensor>;

/// Tolerance for sums of a few hundred products, relative to the sum of their magnitudes.
const SINGLE: f64 = 1e-4;
const DOUBLE: f64 = 1e-12;
/// Tolerance against autograd in f64, relative to the largest edge.
const AUTOGRAD: f64 = 2e-5;
const IDS: [u32; 6] = [3, 1, 4, 1, 5, 9];

/// A model in which every parameter matters, with the same values in each dtype.
pub(crate) fn seeded(config: &Gpt2Config, dtype: DType) -> Gpt2LMHeadModel {
    let parameters = expected_parameters(config).into_iter().enumerate().map(|(index, one)| {
        let is_norm = one.name.contains("ln_");
        let scale = if is_norm { 0.8 } else { 1.2 };
        let values = pattern(&one.shape, scale, 10_000 * index as u64);
        let values = if is_norm && one.name.ends_with("weight") { (values + 1.0).unwrap() } else { values };
        (one.name, values.to_dtype(dtype).unwrap())
    });
    let vb = candle_nn::VarBuilder::from_tensors(parameters.collect(), dtype, &Device::Cpu);
    Gpt2LMHeadModel::load(config, ByOutput(vb)).unwrap()
}

pub(crate) fn small() -> Gpt2Config {
    Gpt2Config { vocab_size: 23, n_positions: 9, n_embd: 12, n_layer: 3, n_head: 3, ..Gpt2Config::gpt2() }
}

/// Configurations that cover the architectural variants of a model.
fn configurations() -> Vec<Gpt2Config> {
    vec![
        small(),
        Gpt2Config { scale_attn_weights: false, activation_function: Activation::Gelu, ..small() },
        Gpt2Config {
            scale_attn_by_inverse_layer_idx: true,
            activation_function: Activation::Relu,
            ..small()
        },
        Gpt2Config { tie_word_embeddings: false, n_inner: Some(17), layer_norm_epsilon: 0.05, ..small() },
    ]
}

/// Kinds of transcoders: one per layer, one per layer with a skip connection, and cross-layer.
const KINDS: [&str; 3] = ["set", "skip", "cross-layer"];
/// Scale and offset of the skip matrices.
const SKIP_SCALE: f64 = 0.4;
const SKIP_OFFSET: u64 = 6;
const INPUTS: [TranscoderInput; 3] =
    [TranscoderInput::ResidMid, TranscoderInput::Ln2Normalized, TranscoderInput::MlpIn];

/// Random transcoders with a different number of latents in each layer.
fn transcoders(kind: &str, input: TranscoderInput, n_layer: usize, width: usize) -> Transcoders {
    let config = TranscodersConfig { is_cross_layer: kind == "cross-layer", input, k: None };
    let layers = (0..n_layer).map(|layer| {
        let latents = 5 + 2 * layer;
        let random = |name: &str, shape: &[usize], scale: f64, offset: u64| {
            let name = if config.is_cross_layer { format!("{name}_{layer}") } else { name.to_owned() };
            (name, pattern(shape, scale, offset + 1000 * layer as u64))
        };
        let mut tensors = Tensors::from([
            random("W_enc", &[latents, width], 1.5, 1),
            random("b_enc", &[latents], 0.5, 2),
            random("b_dec", &[width], 0.5, 3),
        ]);
        if config.is_cross_layer {
            tensors.extend([
                random("W_dec", &[latents, n_layer - layer, width], 1.0, 4),
                random("threshold", &[latents], 0.5, 5),
            ]);
            return TranscoderLayer::cross_layer(&tensors, &config, layer, n_layer).unwrap();
        }
        tensors.extend([random("W_dec", &[latents, width], 1.0, 4)]);
        if kind == "skip" {
            tensors.extend([random("W_skip", &[width, width], SKIP_SCALE, SKIP_OFFSET)]);
        }
        TranscoderLayer::per_layer(&tensors, &config).unwrap()
    });
    Transcoders::new(input, layers.collect()).unwrap()
}

fn targets(replacement: &ReplacementModel) -> Vec<usize> {
    (0..replacement.features()).chain(replacement.logits()).collect()
}

/// Largest relative error between a target's value and the sum of its contributions.
fn gap(replacement: &ReplacementModel) -> f64 {
    let targets = targets(replacement);
    let edges = replacement.edges(&targets).unwrap();
    worst(targets.iter().zip(edges.rows.iter().zip(&edges.biases)).map(|(target, (row, bias))| {
        let sum = row.iter().sum::<f64>() + bias;
        let size = row.iter().map(|value| value.abs()).sum::<f64>() + bias.abs();
        (sum - replacement.value(*target)).abs() / size
    }))
}

#[test]
fn nodes_and_biases_sum_to_every_target() {
    let mut checked = 0;
    for (index, config) in configurations().into_iter().enumerate() {
        for (dtype, tolerance) in [(DType::F64, DOUBLE), (DType::F32, SINGLE)] {
            let model = seeded(&config, dtype);
            let run = Run::new(&model, &IDS).unwrap();
            for kind in KINDS {
                for input in INPUTS {
                    let transcoders = transcoders(kind, input, config.n_layer, config.n_embd);
                    let options = GraphOptions { skips_first: index % 2 == 1, ..GraphOptions::default() };
                    let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
                    let gap = gap(&replacement);
                    assert!(gap < tolerance, "configuration {index}, {dtype:?}, {kind} {input:?}: {gap}");
                    checked += targets(&replacement).len();
                }
            }
        }
    }
    assert!(checked > 1000, "{checked} targets");
}

/// Live skip connections of [`transcoders`]: an MLP output moves with the transcoder's input.
struct Skips {
    /// Transcoder input in the run, `(1, T, C)`, and skip matrix, `(C, C)`, of each layer.
    layers: Vec<(Tensor, Tensor)>,
    moved: Option<Tensor>,
}

impl Skips {
    fn new(run: &Run, mids: &[Site]) -> Result<Self> {
        let read = run.record(mids.iter().copied())?;
        let layers = mids.iter().enumerate().map(|(layer, site)| {
            let read = read.get(*site)?.clone();
            let width = read.dim(2)?;
            let skip = pattern(&[width, width], SKIP_SCALE, SKIP_OFFSET + 1000 * layer as u64);
            Ok((read, skip.to_dtype(DType::F32)?.t()?))
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, moved: None })
    }
}

impl Observer for Skips {
    fn wants(&self, site: Site) -> bool {
        matches!(site.kind, SiteKind::ResidMid | SiteKind::MlpOut)
    }

    fn observe(&mut self, site: Site, value: Tensor) -> candle_core::Result<Tensor> {
        let (read, skip) = &self.layers[site.layer.unwrap()];
        match site.kind {
            SiteKind::ResidMid => {
                self.moved = Some((&value - read)?.broadcast_matmul(skip)?);
                Ok(value)
            }
            _ => value + self.moved.take().unwrap(),
        }
    }
}

/// Runs the model with the same activations frozen as in the local replacement model.
fn frozen_run(run: &Run, others: Vec<&mut dyn Observer>, sites: &[Site]) -> Result<(Record, Vec<f64>)> {
    let n_layer = run.model.config().n_layer;
    let inside = [SiteKind::Ln1Scale, SiteKind::Pattern, SiteKind::Ln2Scale, SiteKind::MlpOut];
    let frozen = (0..n_layer).flat_map(|layer| inside.map(|kind| Site::in_block(layer, kind)));
    let record = run.record(frozen.chain([Site::outside(SiteKind::LnFinalScale)]))?;
    let mut frozen_edits: Vec<Edit> =
        record.values.iter().map(|(site, value)| Replace::new(*site, value.clone())).collect();
    let mut seen = Record::new(sites.iter().copied());
    let mut observers: Vec<&mut dyn Observer> = Vec::new();
    observers.extend(frozen_edits.iter_mut().map(|edit| edit as &mut dyn Observer));
    observers.extend(others.into_iter().map(|other| other as &mut dyn Observer));
    observers.push(&mut seen);
    let logits = values(&run.logits(LogitsFor::LastToken, &mut Chain(observers))?);
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    Ok((seen, logits.iter().map(|logit| logit - mean).collect()))
}

/// Checks that doubling a feature changes each target by the edge's weight if all else is frozen.
#[test]
fn doubling_a_feature_moves_every_target_by_its_edge() -> Result<()> {
    const MOVED: f64 = 5e-4;
    for (index, config) in configurations().into_iter().enumerate() {
        let model = seeded(&config, DType::F32);
        let run = Run::new(&model, &IDS)?;
        for kind in KINDS {
            let transcoders = transcoders(kind, TranscoderInput::ResidMid, config.n_layer, config.n_embd);
            let replacement = ReplacementModel::new(&run, &transcoders, &GraphOptions::default())?;
            let edges = replacement.edges(&targets(&replacement))?;
            let largest = edges.rows.iter().flatten().fold(0.0f64, |most, edge| most.max(edge.abs()));
            let mids: Vec<Site> =
                (0..config.n_layer).map(|layer| Site::in_block(layer, SiteKind::ResidMid)).collect();
            let (before, logits_before) = frozen_run(&run, Vec::new(), &mids)?;
            let mut skips = Skips::new(&run, &mids)?;
            for source in (0..replacement.features()).step_by(7) {
                let GraphNode::Feature { activation, .. } = replacement.nodes()[source] else {
                    unreachable!()
                };
                let change = FeatureChange { node: source, value: 2.0 * activation };
                let mut edits = replacement.edits(&[change])?;
                let mut others: Vec<&mut dyn Observer> =
                    edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect();
                if kind == "skip" {
                    others.push(&mut skips);
                }
                let (after, logits_after) = frozen_run(&run, others, &mids)?;
                for (target, row) in targets(&replacement).iter().zip(&edges.rows) {
                    let moved = match replacement.nodes()[*target] {
                        GraphNode::Logit { token, .. } => {
                            logits_after[token as usize] - logits_before[token as usize]
                        }
                        GraphNode::Feature { layer, position, feature, .. } => {
                            let read = |record: &Record| {
                                let x = record.get(mids[layer]).unwrap().get(0).unwrap();
                                encoded(layer, feature, &x.get(position).unwrap())
                            };
                            read(&after) - read(&before)
                        }
                        _ => unreachable!(),
                    };
                    let difference = (moved - row[source]).abs();
                    assert!(
                        difference < MOVED * largest,
                        "configuration {index}, {kind}: {source} to {target} moved {moved} for {}",
                        row[source]
                    );
                }
            }
        }
    }
    Ok(())
}

/// Pre-activation minus its bias, from the values of [`transcoders`].
fn encoded(layer: usize, feature: usize, x: &Tensor) -> f64 {
    let width = x.elem_count();
    let encoder = values(&pattern(&[5 + 2 * layer, width], 1.5, 1 + 1000 * layer as u64));
    values(x).iter().zip(&encoder[feature * width..]).map(|(x, weight)| x * weight).sum()
}

/// Loads the transcoders of a fixture.
fn read_transcoders(name: &str, recorded: &Value, n_layer: usize) -> Transcoders {
    let folder = fixture_path(&format!("graphs/{name}/transcoders"));
    let read = |path: String| TensorFile::read(&folder.join(path)).unwrap().tensors;
    if recorded["kind"] == "saelens-skip" {
        let layers = (0..n_layer).rev().map(|layer| {
            let config = std::fs::read_to_string(folder.join(format!("layer_{layer}/cfg.json"))).unwrap();
            let tensors = read(format!("layer_{layer}/sae_weights.safetensors"));
            Dictionary::from_tensors(&tensors, &DictionaryConfig::from_json(&config).unwrap()).unwrap()
        });
        let transcoders = Transcoders::of_dictionaries(layers.collect()).unwrap();
        assert_eq!(recorded["input"], transcoders.input().hook());
        return transcoders;
    }
    let is_cross_layer = recorded["kind"].as_str().unwrap().starts_with("clt");
    let kind = if is_cross_layer { "cross_layer_transcoder" } else { "transcoder_set" };
    let activation = if recorded["topk"].is_null() { "relu" } else { "topk" };
    let config = serde_json::json!({
        "model_kind": kind, "feature_input_hook": recorded["input"], "feature_output_hook": "hook_mlp_out",
        "activation": activation, "k": recorded["topk"],
    });
    let config = TranscodersConfig::from_json(&config.to_string()).unwrap();
    let layers = (0..n_layer).map(|layer| match is_cross_layer {
        true => {
            let mut tensors = read(format!("W_enc_{layer}.safetensors"));
            tensors.extend(read(format!("W_dec_{layer}.safetensors")));
            TranscoderLayer::cross_layer(&tensors, &config, layer, n_layer).unwrap()
        }
        false => TranscoderLayer::per_layer(&read(format!("layer_{layer}.safetensors")), &config).unwrap(),
    });
    Transcoders::new(config.input, layers.collect()).unwrap()
}

const GRAPHS: [&str; 6] =
    ["set-relu", "cross-layer", "cross-layer-skip", "set-skip", "set-topk", "saelens-skip"];

/// Runs a check on every graph in the fixtures.
fn with_graphs(check: impl Fn(&str, &ReplacementModel, &Fixture, &Value)) {
    for name in GRAPHS {
        let recorded = json_fixture(&format!("graphs/{name}/expected"));
        let case = recorded["checkpoint"].as_str().unwrap();
        let case = Case::open(crate::common::CASES.into_iter().find(|known| *known == case).unwrap());
        let text = ids(&recorded["ids"]);
        let run = Run::new(&case.model, &text).unwrap();
        let transcoders = read_transcoders(name, &recorded, case.layers());
        let skips_first = recorded["skips_first"].as_bool().unwrap();
        let options = GraphOptions { skips_first, ..GraphOptions::default() };
        let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
        check(name, &replacement, &Fixture::open(&format!("graphs/{name}/expected")), &recorded);
    }
}

#[track_caller]
fn assert_near(found: impl IntoIterator<Item = f64>, expected: &[f64], tolerance: f64, what: &str) {
    let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let found: Vec<f64> = found.into_iter().collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    let difference = worst(found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()));
    assert!(difference <= tolerance * largest, "{what}: {difference} of {largest}");
}

#[test]
fn nodes_and_edges_match_autograd() {
    with_graphs(|name, replacement, expected, recorded| {
        let features: Vec<Vec<u64>> = serde_json::from_value(recorded["features"].clone()).unwrap();
        let activations: Vec<f64> = serde_json::from_value(recorded["activations"].clone()).unwrap();
        let nodes = replacement.nodes();
        assert_eq!(replacement.features(), features.len(), "{name}");
        for (node, (at, expected)) in nodes.iter().zip(features.iter().zip(&activations)) {
            let GraphNode::Feature { layer, position, feature, activation } = *node else { unreachable!() };
            assert_eq!(&[layer as u64, position as u64, feature as u64], at.as_slice(), "{name}");
            assert!((activation - expected).abs() < 1e-4, "{name}: {activation} for {expected}");
        }
        let probabilities: Vec<f64> = serde_json::from_value(recorded["probabilities"].clone()).unwrap();
        let logits = &nodes[replacement.logits()];
        assert_eq!(logits.len(), probabilities.len(), "{name}");
        for (node, (id, expected)) in logits.iter().zip(ids(&recorded["tokens"]).iter().zip(&probabilities)) {
            let GraphNode::Logit { token, probability } = node else { unreachable!() };
            assert_eq!(token, id, "{name}");
            assert!((probability - expected).abs() < 1e-5, "{name}: {probability} for {expected}");
        }
        let all = targets(replacement);
        let inner = nodes.len() - logits.len();
        let edges = replacement.edges(&all).unwrap();
        let found = edges.rows.iter().flat_map(|row| row[..inner].iter().copied());
        assert_near(found, &values(&expected.tensor("edges")), AUTOGRAD, &format!("{name}: edges"));
        let found = all.iter().map(|target| replacement.value(*target));
        assert_near(found, &values(&expected.tensor("values")), AUTOGRAD, &format!("{name}: values"));
    });
}

#[test]
fn influence_pruning_and_scores_match_plain_loops() {
    with_graphs(|name, replacement, expected, recorded| {
        let graph = AttributionGraph::trace(replacement, &|_, _| ()).unwrap();
        assert_eq!(graph.nodes, replacement.nodes(), "{name}: every feature has a row");
        let influence = values(&expected.tensor("influence"));
        assert_near(graph.influence().iter().copied(), &influence, 1e-4, &format!("{name}: influence"));
        for (found, key) in
            [(graph.replacement_score(), "replacement"), (graph.completeness_score(), "completeness")]
        {
            let expected = recorded[key].as_f64().unwrap();
            assert!((found - expected).abs() < 1e-4, "{name}: {key} {found} for {expected}");
        }
        let pruned = graph.pruned(0.8, 0.98);
        let kept: Vec<f64> = pruned.nodes.iter().map(|kept| f64::from(u8::from(*kept))).collect();
        assert_eq!(kept, values(&expected.tensor("nodes")), "{name}: nodes");
        let edges: Vec<f64> =
            pruned.edges.iter().flat_map(|edge| [edge.target as f64, edge.source as f64]).collect();
        assert_eq!(edges, values(&expected.tensor("kept")), "{name}: edges");
        assert!(pruned.shares.iter().all(|share| (0.0..=1.0).contains(share)));
        let least = graph.influence().iter().zip(&pruned.shares).min_by(|a, b| a.0.total_cmp(b.0)).unwrap();
        assert!((least.1 - 1.0).abs() < 1e-9, "{name}: the last node completes the sum");
    });
}

/// Checks that transcoders that reproduce the MLPs leave no error and have scores of 1.
#[test]
fn exact_transcoders_have_scores_of_one() -> Result<()> {
    let config = Gpt2Config { activation_function: Activation::Relu, n_inner: Some(19), ..small() };
    let model = seeded(&config, DType::F64);
    // An MLP with ReLU is itself a transcoder.
    let own = TranscodersConfig { is_cross_layer: false, input: TranscoderInput::MlpIn, k: None };
    let layers = model.transformer().blocks().iter().map(|block| {
        let (expand, contract) = (block.mlp().expand(), block.mlp().contract());
        let tensors = [
            ("W_enc", expand.weight().to_tensor()?),
            ("b_enc", expand.bias().ok_or("a bias")?.clone()),
            ("W_dec", contract.weight().to_tensor()?.t()?.contiguous()?),
            ("b_dec", contract.bias().ok_or("a bias")?.clone()),
        ];
        let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
        Ok(TranscoderLayer::per_layer(&tensors, &own)?)
    });
    let transcoders = Transcoders::new(own.input, layers.collect::<Result<_>>()?)?;
    let run = Run::new(&model, &IDS)?;
    let replacement = ReplacementModel::new(&run, &transcoders, &GraphOptions::default())?;
    let graph = AttributionGraph::trace(&replacement, &|_, _| ())?;
    assert!((graph.replacement_score() - 1.0).abs() < 1e-6, "{}", graph.replacement_score());
    assert!((graph.completeness_score() - 1.0).abs() < 1e-6, "{}", graph.completeness_score());
    Ok(())
}

/// Checks that a limited graph has the whole graph's rows for the most influential features.
#[test]
fn limited_graph_has_the_edges_of_the_whole_graph() {
    with_graphs(|name, replacement, _, _| {
        let whole = AttributionGraph::trace(replacement, &|_, _| ()).unwrap();
        let case = json_fixture(&format!("graphs/{name}/expected"));
        let checkpoint = case["checkpoint"].as_str().unwrap();
        let checkpoint =
            Case::open(crate::common::CASES.into_iter().find(|known| *known == checkpoint).unwrap());
        let text = ids(&case["ids"]);
        let run = Run::new(&checkpoint.model, &text).unwrap();
        let transcoders = read_transcoders(name, &case, checkpoint.layers());
        let options = GraphOptions {
            max_feature_nodes: 20,
            skips_first: case["skips_first"].as_bool().unwrap(),
            ..GraphOptions::default()
        };
        let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
        let progress = std::cell::RefCell::new(Vec::new());
        let few =
            AttributionGraph::trace(&replacement, &|done, total| progress.borrow_mut().push((done, total)))
                .unwrap();
        let logits = replacement.logits().len();
        assert_eq!(progress.borrow().last(), Some(&(20 + logits, 20 + logits)));
        assert_eq!(few.active_features, replacement.features());
        let features = few.nodes.iter().filter(|node| matches!(node, GraphNode::Feature { .. })).count();
        assert_eq!(features, 20, "{name}");
        for target in (0..few.nodes.len()).filter(|node| few.nodes[*node].is_target()) {
            let (biases, omitted) = few.remainders(target);
            let sum: f64 = (0..few.nodes.len()).map(|source| f64::from(few.edge(target, source))).sum();
            let value = replacement.value(few.origins[target]);
            assert!((sum + biases + omitted - value).abs() < 1e-3, "{name}: {sum} and the rest for {value}");
            for source in 0..few.nodes.len() {
                let [found, expected] =
                    [few.edge(target, source), whole.edge(few.origins[target], few.origins[source])];
                assert!(
                    (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                    "{name}: {found} for {expected}"
                );
            }
        }
    });
}

/// Compares the predicted effects of setting a feature to 0 with a manual sum over paths.
#[test]
fn predictions_flow_through_features_that_are_not_set() -> Result<()> {
    let model = seeded(&small(), DType::F64);
    let run = Run::new(&model, &IDS)?;
    let transcoders = transcoders("cross-layer", TranscoderInput::ResidMid, 3, 12);
    let replacement = ReplacementModel::new(&run, &transcoders, &GraphOptions::default())?;
    let graph = AttributionGraph::trace(&replacement, &|_, _| ())?;
    let GraphNode::Feature { activation, layer: 0, .. } = graph.nodes[0] else {
        panic!("expected a feature of layer 0 as the first node")
    };
    let moved = graph.predicted(&[FeatureChange { node: 0, value: 0.0 }], &[]);
    // Manual computation over paths through features, each scaled with its pre-activation.
    let mut change = vec![0.0; graph.nodes.len()];
    change[0] = -activation;
    for target in 1..replacement.features() {
        let GraphNode::Feature { .. } = graph.nodes[target] else { unreachable!() };
        for source in 0..target {
            let GraphNode::Feature { activation, .. } = graph.nodes[source] else { unreachable!() };
            change[target] += f64::from(graph.edge(target, source)) / activation * change[source];
        }
    }
    for logit in replacement.logits() {
        let sum: f64 = (0..replacement.features())
            .map(|source| {
                let GraphNode::Feature { activation, .. } = graph.nodes[source] else { unreachable!() };
                f64::from(graph.edge(logit, source)) / activation * change[source]
            })
            .sum();
        assert!((moved[logit] - sum).abs() < 1e-6 * sum.abs().max(1.0), "{} for {sum}", moved[logit]);
    }
    let all: Vec<FeatureChange> =
        (0..replacement.features()).map(|node| FeatureChange { node, value: 0.0 }).collect();
    let moved = graph.predicted(&all, &[]);
    for logit in replacement.logits() {
        let direct: f64 =
            (0..replacement.features()).map(|source| -f64::from(graph.edge(logit, source))).sum();
        assert!((moved[logit] - direct).abs() < 1e-6, "setting all features leaves only direct edges");
    }
    // The effects of one unit match the feature's edges, and predict the same logits as setting the feature.
    let targets = graph.targets();
    let edges = replacement.edges(&targets)?;
    for (node, kind) in graph.nodes[..replacement.features()].iter().enumerate().step_by(7) {
        let GraphNode::Feature { layer, position, feature, activation } = *kind else { unreachable!() };
        let units = replacement.unit_effects(FeatureAtPosition { layer, position, feature }, &targets)?;
        for (unit, row) in units.iter().zip(&edges.rows) {
            assert!(
                (unit * activation - row[node]).abs() < 1e-9,
                "{unit} times {activation} for {}",
                row[node]
            );
        }
    }
    let GraphNode::Feature { layer, position, feature, activation } = graph.nodes[0] else { unreachable!() };
    let units = replacement.unit_effects(FeatureAtPosition { layer, position, feature }, &targets)?;
    let added: Vec<f64> = units.iter().map(|unit| -activation * unit).collect();
    let [by_edges, by_units] =
        [graph.predicted(&[FeatureChange { node: 0, value: 0.0 }], &[]), graph.predicted(&[], &added)];
    for logit in replacement.logits() {
        assert!((by_edges[logit] - by_units[logit]).abs() < 1e-6);
    }
    assert!(
        replacement.unit_effects(FeatureAtPosition { layer: 3, position: 0, feature: 0 }, &targets).is_err()
    );
    Ok(())
}

/// Checks the memory estimate in the error, which depends on the number of active features.
///
/// The estimate covers two copies of the rows, the directions that nodes write, and a batch of 64 targets.
#[test]
fn graph_over_the_memory_limit_is_rejected_with_its_size() {
    let model = seeded(&small(), DType::F32);
    let run = Run::new(&model, &IDS).unwrap();
    let usual = transcoders("set", TranscoderInput::ResidMid, 3, 12);
    for max_feature_nodes in [4096, 3] {
        let with = |max_bytes| {
            let options = GraphOptions { max_bytes, max_feature_nodes, ..GraphOptions::default() };
            ReplacementModel::new(&run, &usual, &options)
        };
        let whole = with(u64::MAX).unwrap();
        let features = whole.features();
        let sources = whole.logits().start;
        assert_eq!(sources, features + (3 + 2) * 6, "errors of 3 layers and both embeddings, at 6 positions");
        let rows = features.min(max_feature_nodes) + 10;
        let written = (features + 3 * 6) * 12 * 4;
        let batch = 64 * (8 * sources + 8 * 6 * 12 * 4);
        let needed = (2 * rows * sources * 4 + written + batch) as u64;
        assert!(with(needed).is_ok());
        let message = with(needed - 1).err().unwrap().to_string();
        let expected = format!("{features} active features takes about {} MiB", needed.div_ceil(1 << 20));
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn invalid_graphs_are_rejected() {
    let model = seeded(&small(), DType::F32);
    let run = Run::new(&model, &IDS).unwrap();
    let error_message = |transcoders: &Transcoders, options: &GraphOptions| {
        ReplacementModel::new(&run, transcoders, options).err().unwrap().to_string()
    };
    let usual = transcoders("set", TranscoderInput::ResidMid, 3, 12);
    let options = GraphOptions::default();
    let message = error_message(&usual, &GraphOptions { max_bytes: 1 << 16, ..options });
    assert!(message.contains("active features takes about 1 MiB, more than the limit of 1 MiB"), "{message}");
    let message = error_message(&transcoders("set", TranscoderInput::ResidMid, 2, 12), &options);
    assert!(message.contains("transcoders for 2 layers, but the model has 3 layers"), "{message}");
    let message = error_message(&transcoders("set", TranscoderInput::ResidMid, 3, 10), &options);
    assert!(message.contains("width 10, but the model has width 12"), "{message}");

    let config = TranscodersConfig { is_cross_layer: false, input: TranscoderInput::MlpIn, k: None };
    let tensor = |name: &str, shape: &[usize], value: f64| {
        (name.to_owned(), Tensor::full(value, shape, &Device::Cpu).unwrap())
    };
    let silent = Tensors::from([
        tensor("W_enc", &[4, 12], 0.0),
        tensor("b_enc", &[4], -1.0),
        tensor("W_dec", &[4, 12], 1.0),
        tensor("b_dec", &[12], 0.0),
    ]);
    let layer = TranscoderLayer::per_layer(&silent, &config).unwrap();
    let silent = Transcoders::new(config.input, vec![layer; 3]).unwrap();
    assert!(error_message(&silent, &options).contains("no transcoder feature is active"));

    let replacement = ReplacementModel::new(&run, &usual, &options).unwrap();
    let message = replacement.edges(&[replacement.features()]).unwrap_err().to_string();
    assert!(message.contains("is neither a feature nor a logit"), "{message}");
}

#[test]
fn invalid_transcoder_configs_and_layers_are_reported() {
    for (text, expected) in [
        ("[1]", "`model_kind`: expected \"transcoder_set\""),
        (
            r#"{"model_kind": "sae"}"#,
            "`model_kind`: expected \"transcoder_set\" or \"cross_layer_transcoder\"; found \"sae\"",
        ),
        (r#"{"model_kind": "transcoder_set"}"#, "`feature_input_hook`: expected \"hook_resid_mid\""),
        (
            r#"{"model_kind": "cross_layer_transcoder", "feature_input_hook": "hook_resid_pre"}"#,
            "`feature_input_hook`: expected \"hook_resid_mid\"",
        ),
        (
            r#"{"model_kind": "cross_layer_transcoder", "feature_output_hook": "hook_resid_post"}"#,
            "`feature_output_hook`: expected \"hook_mlp_out\"",
        ),
        (
            r#"{"model_kind": "cross_layer_transcoder", "activation": "topk"}"#,
            "`k`: expected a positive integer",
        ),
        (
            r#"{"model_kind": "cross_layer_transcoder", "activation": "tanh"}"#,
            "`activation`: expected \"relu\"",
        ),
        ("{", "invalid JSON configuration"),
    ] {
        let message = TranscodersConfig::from_json(text).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    // Both names refer to the norm's output after the weight and bias.
    for hook in ["mlp.hook_in", "ln2.hook_normalized"] {
        let text = serde_json::json!({
            "model_kind": "transcoder_set", "feature_input_hook": hook, "feature_output_hook": "hook_mlp_out",
        });
        let config = TranscodersConfig::from_json(&text.to_string()).unwrap();
        assert_eq!(config.input, TranscoderInput::MlpIn);
    }
    let defaults = TranscodersConfig::from_json(r#"{"model_kind": "cross_layer_transcoder"}"#).unwrap();
    assert_eq!((defaults.is_cross_layer, defaults.input), (true, TranscoderInput::ResidMid));

    let layers = |width| transcoders("set", TranscoderInput::ResidMid, 2, width).layers().to_vec();
    let mixed = vec![layers(12)[0].clone(), layers(10)[1].clone()];
    let message = Transcoders::new(TranscoderInput::ResidMid, mixed).unwrap_err().to_string();
    assert!(message.contains("layer 1: expected width 12"), "{message}");
    assert!(Transcoders::new(TranscoderInput::ResidMid, Vec::new()).is_err());

    let dictionary = |layer: usize, keys: &str| {
        let text = format!(
            r#"{{"architecture": "transcoder", "hook_name": "blocks.{layer}.hook_resid_mid", "d_in": 12, "d_sae": 4,
                 "hook_name_out": "blocks.{layer}.hook_mlp_out", "model_from_pretrained_kwargs": {{}}{keys}}}"#
        );
        let tensors =
            [("W_enc", vec![12, 4]), ("b_enc", vec![4]), ("W_dec", vec![4, 12]), ("b_dec", vec![12])];
        let tensors = tensors.map(|(name, shape)| (name.to_owned(), pattern(&shape, 1.0, 1))).into();
        Dictionary::from_tensors(&tensors, &DictionaryConfig::from_json(&text).unwrap()).unwrap()
    };
    let error_message = |dictionaries| Transcoders::of_dictionaries(dictionaries).unwrap_err().to_string();
    for (message, expected) in [
        (
            error_message(vec![dictionary(0, ""), dictionary(0, "")]),
            "layer 0: expected one transcoder, found two",
        ),
        (
            error_message(vec![dictionary(0, ""), dictionary(2, "")]),
            "layer 1: expected a transcoder that reads hook_resid_mid, found none",
        ),
        (
            error_message(vec![dictionary(0, r#", "normalize_activations": "layer_norm""#)]),
            "`normalize_activations`: expected \"none\"",
        ),
        (
            error_message(vec![dictionary(0, r#", "hook_name_out": "blocks.1.hook_mlp_out""#)]),
            "`hook_name_out`: expected \"blocks.0.hook_mlp_out\"",
        ),
        (
            error_message(vec![dictionary(0, r#", "hook_name": "blocks.0.hook_resid_pre""#)]),
            "`hook_name`: expected \"hook_resid_mid\" or \"ln2.hook_normalized\"",
        ),
    ] {
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
}
