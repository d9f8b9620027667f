//! Circuits in the published GPT-2 124M.
//!
//! The expected values come from "Have Faith in Faithfulness" (arXiv:2403.17806). The tests require
//! `GPT2_PUBLISHED` to name a folder with `gpt2` and a clone of the authors' repository
//! `hannamw/eap-ig-faithfulness` (commit c75cc882), which contains the prompts. The tests take an hour on two
//! cores. The circuits in the repository's `results/pareto/gpt2/csv` have fixed numbers of edges and are
//! selected greedily, by EAP and by EAP-IG with 5 steps.

use std::path::{Path, PathBuf};

use candle_gpt2_interpret::{
    Circuit, CircuitMetric, CircuitTask, EdgeDestination, EdgeMethod, EdgeSource, Head, PromptPair, Selection,
};
use candle_gpt2_testing::skipped;

use crate::published::{Comparison, PUBLISHED_VARIABLE, Published, published};

/// Tolerance for the metrics on prompts, which are published with four digits.
const METRIC: f64 = 0.002;
/// Tolerance for faithfulness, which changes if edges with nearly equal scores swap.
const FAITHFULNESS: f64 = 0.03;
/// Circuit sizes, in edges.
const EDGES: [usize; 3] = [100, 400, 1000];
const METHODS: [(&str, EdgeMethod); 2] =
    [("EAP", EdgeMethod::Eap), ("EAP-IG", EdgeMethod::EapIg { steps: 5 })];

/// Published results for a task.
struct Figures {
    /// Name of the task's folder in the data.
    name: &'static str,
    metric: CircuitMetric,
    /// The whole model's metric on clean prompts.
    clean: f64,
    corrupted: f64,
    /// Metrics of the circuits, by method.
    circuits: [[f64; 3]; 2],
}

const IOI: Figures = Figures {
    name: "ioi",
    metric: CircuitMetric::LogitDifference,
    clean: 3.8065,
    corrupted: 0.0319,
    circuits: [[0.032, 2.590, 2.500], [0.995, 1.770, 2.434]],
};
const GREATER_THAN: Figures = Figures {
    name: "greater-than",
    metric: CircuitMetric::ProbabilityDifference,
    clean: 0.8143,
    corrupted: -0.4566,
    circuits: [[0.436, 0.743, 0.769], [0.584, 0.794, 0.822]],
};
const GENDER: Figures = Figures {
    name: "gender-bias",
    metric: CircuitMetric::LogitDifference,
    clean: 0.8809,
    corrupted: -3.2206,
    circuits: [[-0.874, -0.081, 0.691], [-0.347, 0.401, 0.520]],
};

/// Rows of a CSV file, keyed by column name.
fn table(path: &Path) -> Vec<std::collections::HashMap<String, String>> {
    let mut reader = csv::Reader::from_path(path).unwrap();
    reader.deserialize().map(|row| row.unwrap()).collect()
}

impl Figures {
    /// Reads the authors' pairs of prompts.
    fn pairs(&self, gpt2: &Published, data: &Path) -> Vec<PromptPair> {
        let years: Vec<u32> = (0..100).map(|year| gpt2.plain(&format!("{year:02}"))[0]).collect();
        let rows = table(&data.join(self.name).join("gpt2.csv"));
        let pair = |row: &std::collections::HashMap<String, String>| {
            let number = |column: &str| row[column].parse::<u32>().unwrap();
            let (correct, incorrect) = match self.name {
                "ioi" => (vec![number("correct_idx")], vec![number("incorrect_idx")]),
                "greater-than" => {
                    let (low, high) = years.split_at(number("correct_idx") as usize + 1);
                    (high.to_vec(), low.to_vec())
                }
                _ => (vec![number("clean_answer_idx")], vec![number("corrupted_answer_idx")]),
            };
            let [clean, corrupted] = ["clean", "corrupted"].map(|column| gpt2.with_bos(&row[column]));
            PromptPair { clean, corrupted, correct, incorrect, spans: Vec::new() }
        };
        rows.iter().map(pair).collect()
    }

    fn compare(&self, gpt2: &Published, data: &Path, comparison: &mut Comparison) {
        let pairs = self.pairs(gpt2, data);
        let task = CircuitTask::new(&gpt2.model, &pairs, self.metric).unwrap();
        let (clean, corrupted) = task.range().unwrap();
        comparison.near(&format!("{}, clean", self.name), clean, self.clean, METRIC);
        comparison.near(&format!("{}, corrupted", self.name), corrupted, self.corrupted, METRIC);
        let share = |value: f64| (value - self.corrupted) / (self.clean - self.corrupted);
        for ((method, how), expected) in METHODS.into_iter().zip(self.circuits) {
            let scores = task.scores(how, &|_| ()).unwrap();
            let circuits = EDGES
                .map(|count| Circuit::selected(task.graph(), &scores, count, Selection::Greedy).unwrap());
            let found = task.values(&circuits, &|_| ()).unwrap();
            for ((count, found), expected) in EDGES.into_iter().zip(found).zip(expected) {
                let what = format!("{}, {method}, faithfulness of {count} edges", self.name);
                comparison.near(&what, share(f64::from(found)), share(expected), FAITHFULNESS);
            }
            if self.name == "ioi" && method == "EAP-IG" {
                strongest_into_logits(&task, &scores, comparison);
            }
        }
    }
}

/// Checks that name mover 9.9 has the strongest edge into the logits, and the signs of two edges.
///
/// The edge of the strongest negative name mover works against the task. The signs are those of the
/// Mechanistic Interpretability Benchmark's file for the task (arXiv:2504.13151).
fn strongest_into_logits(task: &CircuitTask, scores: &[f32], comparison: &mut Comparison) {
    let edges = task.graph().edges().zip(scores.iter().copied());
    let into: Vec<_> = edges.filter(|(edge, _)| edge.destination == EdgeDestination::Logits).collect();
    let of = |layer, head| {
        let source = EdgeSource::Head(Head { layer, head });
        into.iter().find(|(edge, _)| edge.source == source).map_or(0.0, |(_, score)| *score)
    };
    let first = into.iter().max_by(|one, other| one.1.abs().total_cmp(&other.1.abs())).unwrap();
    if first.0.to_string() != "a9.h9->logits" || of(9, 9) >= 0.0 || of(10, 7) <= 0.0 {
        comparison.0.push(format!("into logits: {} is first; 9.9 {}, 10.7 {}", first.0, of(9, 9), of(10, 7)));
    }
}

fn compare(figures: &Figures) {
    let what = format!("circuits of {}", figures.name);
    let Some(gpt2) = published(&what) else { return };
    let repository =
        std::env::var_os(PUBLISHED_VARIABLE).map(|folder| PathBuf::from(folder).join("eap-ig-faithfulness"));
    let Some(data) = repository.map(|folder| folder.join("data")).filter(|data| data.is_dir()) else {
        return skipped(&format!(
            "{what}: {PUBLISHED_VARIABLE} does not name a folder with eap-ig-faithfulness"
        ));
    };
    let mut comparison = Comparison::default();
    figures.compare(&gpt2, &data, &mut comparison);
    comparison.finish();
}

#[test]
fn ioi_circuits_match_published_figures() {
    compare(&IOI);
}

#[test]
fn greater_than_circuits_match_published_figures() {
    compare(&GREATER_THAN);
}

#[test]
fn gender_circuits_match_published_figures() {
    compare(&GENDER);
}
