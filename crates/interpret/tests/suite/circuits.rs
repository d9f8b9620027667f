//! Edge graphs, edge scores and circuit metrics.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{ByOutput, Gpt2Config, Gpt2LMHeadModel, Parameter, RandomStream, expected_parameters};
use candle_gpt2_interpret::{
    Circuit, CircuitMetric, CircuitTask, EDGE_SHARES, Edge, EdgeGraph, EdgeMethod, EdgeSpans, InterpretError,
    PromptPair, Selection,
};
use candle_gpt2_testing::{Fixture, values};
use candle_nn::VarBuilder;
use serde_json::Value;

use crate::common::{CASES, Case, ids};
use crate::plain_circuits::Plain;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const METRICS: [(&str, CircuitMetric); 3] = [
    ("logit_difference", CircuitMetric::LogitDifference),
    ("probability_difference", CircuitMetric::ProbabilityDifference),
    ("divergence", CircuitMetric::Divergence),
];
const METHODS: [(&str, EdgeMethod); 3] = [
    ("eap", EdgeMethod::Eap),
    ("eap_ig", EdgeMethod::EapIg { steps: 5 }),
    ("clean_corrupted", EdgeMethod::CleanCorrupted),
];

/// Reads the prompt pairs of a circuit fixture.
fn recorded_pairs(fixture: &Fixture) -> Vec<PromptPair> {
    let pair = |pair: &Value| {
        let [clean, corrupted, correct, incorrect] =
            ["clean", "corrupted", "correct", "incorrect"].map(|name| ids(&pair[name]));
        PromptPair { clean, corrupted, correct, incorrect, spans: Vec::new() }
    };
    fixture.recorded()["pairs"].as_array().unwrap().iter().map(pair).collect()
}

/// Checks that every value is within `tolerance` times the largest expected magnitude.
#[track_caller]
fn assert_near(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(*found) - expected).abs();
        assert!(difference <= tolerance * largest, "{what}, {index}: {found} for {expected}, of {largest}");
    }
}

#[test]
fn graph_contains_every_edge_once() {
    for (layers, heads, expected) in [(12, 12, 32_491), (24, 16, 231_877), (1, 1, 8), (2, 3, 75), (6, 3, 703)]
    {
        let graph = EdgeGraph::new(layers, heads);
        // Every head reads all earlier outputs three times (query, key, value). An MLP also reads its own
        // layer's heads.
        let before = |layer: usize| 1 + layer * (heads + 1);
        let counted: usize = (0..layers).map(|layer| 3 * heads * before(layer) + before(layer) + heads).sum();
        assert_eq!(graph.edge_count(), counted + before(layers));
        assert_eq!(graph.edge_count(), expected);
        let names: Vec<String> = graph.edges().map(|edge| edge.to_string()).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), expected, "edge names are unique");
        assert_eq!((names.len(), graph.sources().count()), (expected, graph.source_count()));
        assert_eq!(names[expected - 1], format!("m{}->logits", layers - 1));
        for edge in graph.edges() {
            let sources: Vec<_> = graph.sources().collect();
            let place = |source| sources.iter().position(|other| *other == source).unwrap();
            let end = edge.destination.source().map_or(sources.len(), place);
            assert!(place(edge.source) < end, "{edge}");
        }
    }
}

#[test]
fn edge_scores_match_the_reference() -> Result<()> {
    for name in CASES {
        let (model, fixture) = (Case::open(name).model, Fixture::open(&format!("circuits/{name}")));
        let pairs = recorded_pairs(&fixture);
        for (metric_name, metric) in METRICS {
            let task = CircuitTask::new(&model, &pairs, metric)?;
            for (method_name, method) in METHODS {
                let expected = values(&fixture.tensor(&format!("{metric_name}.{method_name}")));
                let what = format!("{name}: {metric_name}, {method_name}");
                match task.scores(method, &|_| ()) {
                    Ok(found) => assert_near(&found, &expected, 1e-4, &what),
                    Err(error) => {
                        assert_eq!((metric_name, method_name), ("divergence", "eap"), "{error}");
                        assert!(
                            error.to_string().contains("the gradient of the divergence is zero"),
                            "{error}"
                        );
                        assert!(
                            expected.iter().all(|score| score.abs() < 1e-9),
                            "the expected scores are zero"
                        );
                    }
                }
            }
        }
        // Sums over the query positions give the scores by source position.
        let mut pairs = pairs[..12].to_vec();
        for pair in &mut pairs {
            pair.spans = (0..pair.clean.len()).collect();
        }
        let task = CircuitTask::new(&model, &pairs, CircuitMetric::LogitDifference)?;
        let scores = task.scores(EdgeMethod::Eap, &|_| ())?;
        let names: Vec<String> = EdgeGraph::of(model.config()).edges().map(|edge| edge.to_string()).collect();
        let places: BTreeMap<&str, usize> = names.iter().map(String::as_str).zip(0..).collect();
        let mut found = vec![0.0; pairs[0].clean.len() * names.len()];
        for (edge, score) in task.graph().edges().zip(scores) {
            found[edge.spans.source * names.len() + places[edge.to_string().as_str()]] += score;
        }
        let expected = values(&fixture.tensor("by_position.eap"));
        assert_near(&found, &expected, 1e-4, &format!("{name}: by position"));
    }
    Ok(())
}

#[test]
fn circuit_metrics_match_the_reference() -> Result<()> {
    for name in CASES {
        let (model, fixture) = (Case::open(name).model, Fixture::open(&format!("circuits/{name}")));
        let pairs = recorded_pairs(&fixture);
        for (metric_name, metric) in METRICS {
            let task = CircuitTask::new(&model, &pairs, metric)?;
            let masks = fixture.tensor("masks").to_vec2::<f32>()?;
            let kept = masks.into_iter().map(|mask| mask.into_iter().map(|kept| kept == 1.0).collect());
            let circuits = kept.map(|kept| Circuit::new(task.graph(), kept));
            let found = task.values(&circuits.collect::<std::result::Result<Vec<_>, _>>()?, &|_| ())?;
            let expected = values(&fixture.tensor(&format!("{metric_name}.values")));
            assert_near(&found, &expected, 1e-4, &format!("{name}: {metric_name}"));
        }
    }
    Ok(())
}

/// Returns a case's prompt pair, which compares the answer with the wrong answer.
fn pair_of(case: &Case) -> PromptPair {
    PromptPair {
        clean: case.clean.clone(),
        corrupted: case.corrupted.clone(),
        correct: vec![case.id("answer")],
        incorrect: vec![case.id("wrong")],
        spans: Vec::new(),
    }
}

#[test]
fn whole_circuit_equals_clean_and_empty_equals_corrupted() -> Result<()> {
    for case in Case::all() {
        let mut pairs = [pair_of(&case)];
        let of = |run| case.metric().of_run(&run, &mut candle_gpt2_interpret::Chain(Vec::new()));
        let (clean, corrupted) = (of(case.clean())?, of(case.corrupted())?);
        let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
        let graph = task.graph();
        let found = task.values(&[Circuit::whole(graph), Circuit::empty(graph)], &|_| ())?;
        assert_near(&found, &[clean, corrupted].map(f64::from), 1e-4, case.name);
        let divergence = CircuitTask::new(&case.model, &pairs, CircuitMetric::Divergence)?;
        let found = divergence.values(&[Circuit::whole(graph), Circuit::empty(graph)], &|_| ())?;
        assert!(found[0].abs() < 1e-5 && found[1] > 1e-3, "{}: {found:?}", case.name);
        // With spans: all edges, no edges, and the edges of a single span. The first span contains the last
        // token and one of the two tokens that differ.
        let middle = case.clean.len() / 2;
        pairs[0].spans = (0..case.clean.len())
            .map(|token| usize::from(token <= middle) + usize::from(token == 0))
            .collect();
        let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
        let graph = task.graph();
        let of_spans = |spans: [bool; 3]| {
            let is_kept = |edge: Edge| spans[edge.spans.source] && spans[edge.spans.destination];
            Circuit::new(graph, graph.edges().map(is_kept).collect())
        };
        let spans = [of_spans([true; 3])?, of_spans([false; 3])?, of_spans([true, false, false])?];
        let found = task.values(&spans, &|_| ())?;
        assert_near(&found[..2], &[clean, corrupted].map(f64::from), 1e-4, case.name);
        assert!(found[2] != found[0] && found[2] != found[1], "{}: {found:?}", case.name);
    }
    Ok(())
}

/// Checks that the scores of the input's edges sum to the metric difference between the runs.
///
/// Everything that differs flows through these edges.
#[test]
fn input_edge_scores_sum_to_the_metric_difference() -> Result<()> {
    for case in Case::all() {
        let pairs = [pair_of(&case)];
        for metric in
            [CircuitMetric::LogitDifference, CircuitMetric::ProbabilityDifference, CircuitMetric::Divergence]
        {
            let task = CircuitTask::new(&case.model, &pairs, metric)?;
            let graph = task.graph();
            let sum = |method| -> Result<f32> {
                let scores = task.scores(method, &|_| ())?;
                let of_input =
                    graph.edges().zip(&scores).filter(|(edge, _)| edge.source.to_string() == "input");
                Ok(of_input.map(|(_, score)| *score).sum())
            };
            let values = task.values(&[Circuit::whole(graph), Circuit::empty(graph)], &|_| ())?;
            // EAP-IG is a left Riemann sum. Weighting both endpoints by half turns it into the trapezoidal
            // rule.
            let (steps, start) = (40, sum(EdgeMethod::EapIg { steps: 1 })?);
            let ends = sum(EdgeMethod::CleanCorrupted)? - start;
            let (found, expected) =
                (sum(EdgeMethod::EapIg { steps })? + ends / steps as f32, values[1] - values[0]);
            let scale = expected.abs().max(0.2);
            assert!(
                (found - expected).abs() < 0.02 * scale,
                "{}: {metric:?}: {found} for {expected}",
                case.name
            );
        }
    }
    Ok(())
}

#[test]
fn scores_average_over_pairs_and_sum_over_spans() -> Result<()> {
    let case = Case::open("gelu");
    let mut random = RandomStream::new(7);
    let mut draw = |tokens: usize| -> Vec<u32> {
        (0..tokens).map(|_| u32::try_from(random.below(53)).unwrap()).collect()
    };
    // Three lengths, and more pairs than a batch holds.
    let pairs: Vec<PromptPair> = (0..60)
        .map(|place| PromptPair {
            clean: draw(5 + place % 3),
            corrupted: draw(5 + place % 3),
            correct: draw(1),
            incorrect: draw(1),
            spans: Vec::new(),
        })
        .collect();
    let scores = |pairs: &[PromptPair], method| -> Result<Vec<f32>> {
        Ok(CircuitTask::new(&case.model, pairs, CircuitMetric::LogitDifference)?.scores(method, &|_| ())?)
    };
    let whole = scores(&pairs, EdgeMethod::EapIg { steps: 3 })?;
    let mut mean = vec![0.0; whole.len()];
    for pair in &pairs {
        let alone = scores(std::slice::from_ref(pair), EdgeMethod::EapIg { steps: 3 })?;
        mean.iter_mut().zip(alone).for_each(|(sum, score)| *sum += f64::from(score) / pairs.len() as f64);
    }
    assert_near(&whole, &mean, 1e-5, "one by one");
    let mut spanned = pairs.clone();
    for pair in &mut spanned {
        pair.spans = (0..pair.clean.len()).map(|token| usize::from(token > 2)).collect();
    }
    let divided = scores(&spanned, EdgeMethod::EapIg { steps: 3 })?;
    let graph = CircuitTask::new(&case.model, &spanned, CircuitMetric::LogitDifference)?.graph().clone();
    let mut sums: BTreeMap<String, f32> = BTreeMap::new();
    let mut largest_by_spans: BTreeMap<EdgeSpans, f32> = BTreeMap::new();
    for (edge, score) in graph.edges().zip(&divided) {
        *sums.entry(edge.to_string()).or_default() += score;
        let largest = largest_by_spans.entry(edge.spans).or_default();
        *largest = largest.max(score.abs());
    }
    let found: Vec<f32> =
        EdgeGraph::of(case.model.config()).edges().map(|edge| sums[&edge.to_string()]).collect();
    assert_near(&found, &whole.iter().copied().map(f64::from).collect::<Vec<_>>(), 1e-5, "in two spans");
    let ends = [EdgeSpans::within(0), EdgeSpans { source: 0, destination: 1 }, EdgeSpans::within(1)];
    assert_eq!(largest_by_spans.keys().copied().collect::<Vec<_>>(), ends, "no query sees later tokens");
    assert!(largest_by_spans.values().all(|largest| *largest > 1e-3), "{largest_by_spans:?}");
    Ok(())
}

/// Prompt pair of five tokens with these spans.
fn short_pair(vocab: u64, spans: [usize; 5]) -> PromptPair {
    let mut random = RandomStream::new(11);
    let mut draw = |count: usize| -> Vec<u32> {
        (0..count).map(|_| u32::try_from(random.below(vocab)).unwrap()).collect()
    };
    let (clean, other) = (draw(5), draw(2));
    let mut corrupted = clean.clone();
    (corrupted[1], corrupted[3]) = (other[0], other[1]);
    PromptPair { clean, corrupted, correct: draw(1), incorrect: draw(1), spans: spans.to_vec() }
}

/// Checks that the score of an edge between two positions is the metric's slope along that edge.
///
/// Only this edge, between these positions, moves to its corrupted value.
#[test]
fn position_scores_equal_finite_differences() -> Result<()> {
    for (name, spans) in [("plain", [0, 1, 2, 3, 4]), ("inverse_layer", [1, 0, 0, 1, 0])] {
        let case = Case::open(name);
        let pair = short_pair(case.model.config().vocab_size as u64, spans);
        let pairs = [pair.clone()];
        let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
        let scores = task.scores(EdgeMethod::Eap, &|_| ())?;
        let plain = Plain { model: &case.model, spans: &pair.spans };
        let step = 1e-4;
        let mut expected = Vec::new();
        // For the larger model, check only every seventh edge.
        let stride = if name == "plain" { 1 } else { 7 };
        let edges: Vec<Edge> = task.graph().edges().collect();
        for edge in edges.iter().step_by(stride) {
            let of = |share| plain.value(&pair, &|other| if other == *edge { share } else { 0.0 });
            expected.push((of(step) - of(-step)) / (2.0 * step));
        }
        let found: Vec<f32> = scores.iter().copied().step_by(stride).collect();
        assert_near(&found, &expected, 1e-4, name);
        // This includes edges between different positions.
        let crossing = edges.iter().step_by(stride).zip(&found);
        let crossing = crossing.filter(|(edge, _)| edge.spans.source != edge.spans.destination);
        assert!(crossing.filter(|(_, score)| score.abs() > 1e-3).count() > 10, "{name}");
    }
    Ok(())
}

#[test]
fn position_circuits_equal_brute_force() -> Result<()> {
    for (name, spans) in [("plain", [0, 1, 2, 3, 4]), ("inverse_layer", [1, 0, 0, 1, 0])] {
        let case = Case::open(name);
        let pair = short_pair(case.model.config().vocab_size as u64, spans);
        let pairs = [pair.clone()];
        let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
        let plain = Plain { model: &case.model, spans: &pair.spans };
        let edges: Vec<Edge> = task.graph().edges().collect();
        let mut random = RandomStream::new(5);
        let (mut circuits, mut expected) = (Vec::new(), Vec::new());
        for keeps_of_4 in [1, 2, 3] {
            let kept: Vec<bool> = edges.iter().map(|_| random.below(4) < keeps_of_4).collect();
            let is_kept: HashMap<Edge, bool> = edges.iter().copied().zip(kept.iter().copied()).collect();
            expected.push(plain.value(&pair, &|edge| f64::from(!is_kept[&edge])));
            circuits.push(Circuit::new(task.graph(), kept)?);
        }
        // A circuit that omits only keys and values that cross between spans.
        let is_within = |edge: &Edge| edge.spans.source == edge.spans.destination;
        circuits.push(Circuit::new(task.graph(), edges.iter().map(is_within).collect())?);
        expected.push(plain.value(&pair, &|edge| f64::from(!is_within(&edge))));
        assert_near(&task.values(&circuits, &|_| ())?, &expected, 1e-4, name);
        assert!((expected[3] - plain.value(&pair, &|_| 0.0)).abs() > 1e-3, "{name}");
    }
    Ok(())
}

/// Names of the kept edges.
fn kept(circuit: &Circuit) -> Vec<String> {
    circuit.edges().map(|edge| edge.to_string()).collect()
}

#[test]
fn selection_keeps_the_largest_connected_scores() -> Result<()> {
    let graph = EdgeGraph::new(2, 1);
    let names: Vec<String> = graph.edges().map(|edge| edge.to_string()).collect();
    let scores_of = |scores: &[(&str, f32)]| {
        let mut all = vec![0.0; names.len()];
        scores
            .iter()
            .for_each(|(name, score)| all[names.iter().position(|other| other == name).unwrap()] = *score);
        all
    };
    let scores = scores_of(&[
        ("input->a0.h0<q>", 9.0), // into a head that no strong edge reads
        ("input->m0", 3.0),
        ("m0->a1.h0<k>", -5.0),
        ("a1.h0->m1", 0.1),
        ("a1.h0->logits", -2.0),
        ("m1->logits", 1.0),
    ]);
    let of =
        |count, selection| Circuit::selected(&graph, &scores, count, selection).map(|circuit| kept(&circuit));
    assert_eq!(of(3, Selection::Greedy)?, ["input->m0", "m0->a1.h0<k>", "a1.h0->logits"]);
    // The edge into the unread head is among the four strongest and is dropped.
    assert_eq!(of(4, Selection::Strongest)?, ["input->m0", "m0->a1.h0<k>", "a1.h0->logits"]);
    assert_eq!(of(2, Selection::Greedy)?, [""; 0], "nothing reaches the logits");
    assert_eq!(of(4, Selection::Greedy)?, ["input->m0", "m0->a1.h0<k>", "a1.h0->logits"]);
    assert_eq!(of(usize::MAX, Selection::Greedy)?.len(), names.len());
    assert_eq!(of(0, Selection::Strongest)?, [""; 0]);
    // With spans, each span has its own nodes, and only edges into keys and values cross.
    let crossing = EdgeSpans { source: 0, destination: 1 };
    let spanned = graph.clone().in_spans(2, [crossing])?;
    assert_eq!((spanned.span_count(), spanned.edge_count()), (2, 2 * names.len() + 2 * (1 + 3)));
    let of_spans = |scores: &[(&str, EdgeSpans, f32)]| -> Vec<f32> {
        let score = |edge: Edge| {
            let is = |(name, spans, _): &&(&str, EdgeSpans, f32)| {
                *name == edge.to_string() && *spans == edge.spans
            };
            scores.iter().find(is).map_or(0.0, |(_, _, score)| *score)
        };
        spanned.edges().map(score).collect()
    };
    let [first, second] = [EdgeSpans::within(0), EdgeSpans::within(1)];
    let scores = of_spans(&[
        ("a1.h0->logits", second, 5.0),
        ("a0.h0->a1.h0<v>", crossing, 4.0),
        ("input->a0.h0<v>", second, 3.0), // into the head in a span where it is not read
        ("input->a0.h0<v>", first, 2.0),
    ]);
    let circuit = Circuit::selected(&spanned, &scores, 3, Selection::Greedy)?;
    let ends: Vec<_> = circuit.edges().map(|edge| (edge.to_string(), edge.spans)).collect();
    let expected = [("input->a0.h0<v>", first), ("a1.h0->logits", second), ("a0.h0->a1.h0<v>", crossing)];
    assert_eq!(ends, expected.map(|(name, spans)| (name.to_owned(), spans)));
    assert_eq!(Circuit::selected(&spanned, &scores, 4, Selection::Strongest)?, circuit);
    assert!(Circuit::selected(&graph, &scores[1..], 2, Selection::Greedy).is_err());
    for damaged in [f32::NAN, f32::NEG_INFINITY] {
        let mut scores = vec![0.0; names.len()];
        scores[3] = damaged;
        let message = Circuit::selected(&graph, &scores, 2, Selection::Strongest).unwrap_err().to_string();
        assert!(
            message.contains(&format!("edge {}: expected a finite score, found {damaged}", names[3])),
            "{message}"
        );
    }
    Ok(())
}

/// Compares ACDC with its literal definition: one run per edge, from the logits backward.
#[test]
fn acdc_drops_edges_below_the_threshold() -> Result<()> {
    for (name, threshold) in [("plain", 0.02), ("untied", 0.003)] {
        let case = Case::open(name);
        let pairs = [pair_of(&case)];
        let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
        let divergences = CircuitTask::new(&case.model, &pairs, CircuitMetric::Divergence)?;
        let graph = task.graph();
        let divergence = |kept: &[bool]| -> Result<f32> {
            Ok(divergences.values(&[Circuit::new(graph, kept.to_vec())?], &|_| ())?[0])
        };
        let edges: Vec<_> = graph.edges().collect();
        let (circuit, rises) = task.acdc(threshold, &|| ())?;
        let mut kept = vec![true; edges.len()];
        let mut before = divergence(&kept)?;
        for edge in (0..edges.len()).rev() {
            let node = edges[edge].destination.source();
            let is_used = node.is_none()
                || edges.iter().zip(&kept).any(|(other, kept)| *kept && Some(other.source) == node);
            kept[edge] = false;
            if !is_used {
                continue;
            }
            let after = divergence(&kept)?;
            let rise = after - before;
            assert!((rise - rises[edge]).abs() < 1e-4, "{name}: {}: {rise} for {}", edges[edge], rises[edge]);
            // Rounding must not decide whether a rise exceeds the threshold.
            assert!((rise - threshold).abs() > 1e-5, "{name}: {}: {rise}", edges[edge]);
            match rise < threshold {
                true => before = after,
                false => kept[edge] = true,
            }
        }
        assert_eq!(circuit, Circuit::new(graph, kept)?.connected(), "{name}");
        let count = circuit.edge_count();
        assert!(count > 1 && count < graph.edge_count() / 2, "{name}: {count} edges");
        assert_eq!(task.acdc(f32::INFINITY, &|| ())?.0, Circuit::empty(graph));
        assert_eq!(task.acdc(f32::NEG_INFINITY, &|| ())?.0, Circuit::whole(graph));
    }
    Ok(())
}

#[test]
fn faithfulness_curve_ends_at_the_whole_model() -> Result<()> {
    let case = Case::open("relu_inner");
    let pairs = [pair_of(&case)];
    let task = CircuitTask::new(&case.model, &pairs, CircuitMetric::LogitDifference)?;
    let scores = task.scores(EdgeMethod::EapIg { steps: 5 }, &|_| ())?;
    let curve = task.curve(task.range()?, &scores, Selection::Greedy, &|_| ())?;
    assert_eq!(curve.points.iter().map(|point| point.share).collect::<Vec<_>>(), EDGE_SHARES);
    let last = curve.points.last().unwrap();
    assert_eq!((last.chosen, last.edges, last.faithfulness), (scores.len(), scores.len(), 1.0));
    for point in &curve.points {
        let circuit = Circuit::selected(task.graph(), &scores, point.chosen, Selection::Greedy)?;
        assert_eq!(circuit.edge_count(), point.edges);
        assert_eq!(task.values(&[circuit], &|_| ())?, [point.value]);
    }
    let area: f64 = curve
        .points
        .windows(2)
        .map(|pair| {
            (pair[1].share - pair[0].share) * f64::from(pair[0].faithfulness + pair[1].faithfulness) / 2.0
        })
        .sum();
    assert!((f64::from(curve.cpr()) - area).abs() < 1e-5, "{} for {area}", curve.cpr());
    Ok(())
}

#[test]
fn invalid_tasks_are_rejected() -> Result<()> {
    let case = Case::open("plain");
    let pair = pair_of(&case);
    let assert_rejected = |pairs: &[PromptPair], message: &str| {
        let error = CircuitTask::new(&case.model, pairs, CircuitMetric::LogitDifference).err().unwrap();
        assert!(error.is_usage() && error.to_string().contains(message), "{error}");
    };
    assert_rejected(&[], "at least one pair of prompts");
    assert_rejected(&[PromptPair { corrupted: vec![1], ..pair.clone() }], "the texts have 8 and 1 tokens");
    assert_rejected(
        &[PromptPair { clean: vec![], corrupted: vec![], ..pair.clone() }],
        "the text has 0 tokens",
    );
    assert_rejected(
        &[PromptPair { incorrect: vec![61], ..pair.clone() }],
        "token 61 is outside the vocabulary of 61",
    );
    assert_rejected(&[PromptPair { correct: vec![], ..pair.clone() }], "has no correct answer");
    assert_rejected(
        &[pair.clone(), PromptPair { spans: vec![0; 8], ..pair.clone() }],
        "expected 0 token spans",
    );
    assert_rejected(
        &[PromptPair { spans: vec![19; 8], ..pair.clone() }],
        "span 19 is out of range; expected a number below 19",
    );
    // One layer with one head has 8 edges in each of 2,048 spans, and 2 for each pair of spans.
    let sizes = Gpt2Config {
        vocab_size: 3,
        n_positions: 2048,
        n_embd: 2,
        n_layer: 1,
        n_head: 1,
        ..Gpt2Config::gpt2()
    };
    let long = Gpt2LMHeadModel::load(&sizes, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    let apart = PromptPair {
        clean: vec![0; 2048],
        corrupted: vec![1; 2048],
        correct: vec![1],
        incorrect: vec![2],
        spans: (0..2048).collect(),
    };
    let error = CircuitTask::new(&long, &[apart], CircuitMetric::LogitDifference).err().unwrap();
    assert!(error.to_string().contains("create 4208640 edges, more than 2097152"), "{error}");
    for (spans, pair) in [(0, None), (1, Some((0, 1))), (2, Some((1, 1)))] {
        let crossings = pair.map(|(source, destination)| EdgeSpans { source, destination });
        let error = EdgeGraph::new(1, 1).in_spans(spans, crossings).unwrap_err();
        assert!(error.to_string().contains("pairs of different span indices below"), "{error}");
    }
    let same = [PromptPair { corrupted: pair.clean.clone(), ..pair.clone() }];
    let task = CircuitTask::new(&case.model, &same, CircuitMetric::LogitDifference)?;
    let scores = task.scores(EdgeMethod::Eap, &|_| ())?;
    assert!(scores.iter().all(|score| *score == 0.0), "nothing differs");
    let error = task.range().unwrap_err();
    assert!(matches!(error, InterpretError::NoDifference { .. }), "{error}");
    assert!(task.scores(EdgeMethod::EapIg { steps: 0 }, &|_| ()).is_err());
    // Pairs with a NaN metric have no difference to explain either.
    let sizes =
        Gpt2Config { vocab_size: 61, n_positions: 8, n_embd: 6, n_layer: 1, n_head: 2, ..Gpt2Config::gpt2() };
    let damaged = |one: Parameter| {
        let value = if one.name.ends_with("ln_f.weight") { f32::NAN } else { 0.5 };
        (one.name, Tensor::full(value, one.shape, &Device::Cpu).unwrap())
    };
    let damaged = expected_parameters(&sizes).into_iter().map(damaged).collect();
    let damaged = VarBuilder::from_tensors(damaged, DType::F32, &Device::Cpu);
    let damaged = Gpt2LMHeadModel::load(&sizes, ByOutput(damaged))?;
    let pairs = [pair.clone()];
    let error = CircuitTask::new(&damaged, &pairs, CircuitMetric::LogitDifference)?.range().unwrap_err();
    assert!(matches!(&error, InterpretError::NoDifference { value } if value == "NaN"), "{error}");
    let other = Circuit::whole(&EdgeGraph::new(1, 3));
    let message = task.values(&[other], &|_| ()).unwrap_err().to_string();
    assert!(
        message.contains("the circuit has 18 edges in 1 spans, but the task's graph has 75 edges in 1 spans"),
        "{message}"
    );
    let spanned = [PromptPair { spans: vec![0, 0, 0, 0, 1, 1, 1, 1], ..pair }];
    let task = CircuitTask::new(&case.model, &spanned, CircuitMetric::LogitDifference)?;
    assert!(task.acdc(0.1, &|| ()).unwrap_err().to_string().contains("by position"));
    Ok(())
}
