//! Circuits of the published GPT-2 of 124M: the figures of "Have Faith in Faithfulness" (arXiv:2403.17806).
//!
//! They run if `GPT2_PUBLISHED` names a folder with `gpt2` and with a clone of the authors' repository `hannamw/eap-ig-faithfulness`
//! (commit c75cc882), whose prompts they read; they take an hour on two cores. The figures are those of its
//! `results/pareto/gpt2/csv`: circuits of so many edges, chosen greedily by EAP, and by EAP-IG with 5 steps.

use std::path::{Path, PathBuf};

use candle_gpt2_interpret::{
    Circuit, CircuitMetric, CircuitTask, EdgeDestination, EdgeMethod, EdgeSource, Head, PromptPair, Selection,
};
use candle_gpt2_testing::skipped;

use crate::published::{Compared, PUBLISHED_VARIABLE, Published, published};

/// The metric of prompts is published with four digits.
const METRIC: f64 = 0.002;
/// What a circuit keeps of the way from corrupted to clean: edges of nearly equal scores may change places.
const FAITHFULNESS: f64 = 0.03;
/// Numbers of edges of the circuits.
const EDGES: [usize; 3] = [100, 400, 1000];
const METHODS: [(&str, EdgeMethod); 2] =
    [("EAP", EdgeMethod::Eap), ("EAP-IG", EdgeMethod::EapIg { steps: 5 })];

/// A task as it is published.
struct Figures {
    /// Its folder among the data.
    name: &'static str,
    metric: CircuitMetric,
    /// Of the model on clean and on corrupted prompts.
    clean: f64,
    corrupted: f64,
    /// Of the circuits, by method.
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

/// The rows of a table by the names of its columns.
fn table(path: &Path) -> Vec<std::collections::HashMap<String, String>> {
    let mut reader = csv::Reader::from_path(path).unwrap();
    reader.deserialize().map(|row| row.unwrap()).collect()
}

impl Figures {
    /// The authors' pairs of prompts.
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

    fn compare(&self, gpt2: &Published, data: &Path, compared: &mut Compared) {
        let pairs = self.pairs(gpt2, data);
        let task = CircuitTask::new(&gpt2.model, &pairs, self.metric).unwrap();
        let (clean, corrupted) = task.range().unwrap();
        compared.near(&format!("{}, clean", self.name), clean, self.clean, METRIC);
        compared.near(&format!("{}, corrupted", self.name), corrupted, self.corrupted, METRIC);
        let share = |value: f64| (value - self.corrupted) / (self.clean - self.corrupted);
        for ((method, how), expected) in METHODS.into_iter().zip(self.circuits) {
            let scores = task.scores(how, &|_| ()).unwrap();
            let circuits = EDGES
                .map(|count| Circuit::selected(task.graph(), &scores, count, Selection::Greedy).unwrap());
            let found = task.values(&circuits, &|_| ()).unwrap();
            for ((count, found), expected) in EDGES.into_iter().zip(found).zip(expected) {
                let what = format!("{}, {method}, faithfulness of {count} edges", self.name);
                compared.near(&what, share(f64::from(found)), share(expected), FAITHFULNESS);
            }
            if self.name == "ioi" && method == "EAP-IG" {
                strongest_into_logits(&task, &scores, compared);
            }
        }
    }
}

/// Of the edges into the logits that of the strongest name mover is first, and that of the strongest negative one works against it: the
/// signs of the Mechanistic Interpretability Benchmark's file of the task (arXiv:2504.13151).
fn strongest_into_logits(task: &CircuitTask, scores: &[f32], compared: &mut Compared) {
    let edges = task.graph().edges().zip(scores.iter().copied());
    let into: Vec<_> = edges.filter(|(edge, _)| edge.destination == EdgeDestination::Logits).collect();
    let of = |layer, head| {
        let source = EdgeSource::Head(Head { layer, head });
        into.iter().find(|(edge, _)| edge.source == source).map_or(0.0, |(_, score)| *score)
    };
    let first = into.iter().max_by(|one, other| one.1.abs().total_cmp(&other.1.abs())).unwrap();
    if first.0.to_string() != "a9.h9->logits" || of(9, 9) >= 0.0 || of(10, 7) <= 0.0 {
        compared.0.push(format!("into logits: {} is first; 9.9 {}, 10.7 {}", first.0, of(9, 9), of(10, 7)));
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
    let mut compared = Compared::default();
    figures.compare(&gpt2, &data, &mut compared);
    compared.finish();
}

#[test]
fn circuits_of_indirect_objects() {
    compare(&IOI);
}

#[test]
fn circuits_of_greater_than() {
    compare(&GREATER_THAN);
}

#[test]
fn circuits_of_gender() {
    compare(&GENDER);
}
