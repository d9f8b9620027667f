//! Compares fine-tuning on labels and answers with PyTorch and PEFT.
//!
//! `scripts/reference/training.py` writes the fixtures.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2Config, HeadKind, Pass};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_testing::{Fixture, assert_close_absolute, values};
use candle_gpt2_training::{
    Data, Examples, Hyperparameters, Lora, LoraConfig, Parameters, Row, Rows, Schedule, Share, Trainer,
};

/// Relative tolerance for losses.
const LOSS_TOLERANCE: f64 = 1e-4;

/// Rows in their original order, repeated cyclically.
struct InOrder {
    rows: Vec<Row>,
    label_weights: Option<Vec<f32>>,
}

impl InOrder {
    fn cyclic_rows(&self, first: u64, count: usize) -> impl Iterator<Item = &Row> {
        let first = usize::try_from(first).unwrap();
        (first..first + count).map(|index| &self.rows[index % self.rows.len()])
    }
}

impl Data for InOrder {
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples> {
        Box::new(Rows::new(self.cyclic_rows(first, count), self.label_weights.as_deref()))
    }

    fn tokens(&self, first: u64, count: usize) -> usize {
        self.cyclic_rows(first, count).map(|row| row.inputs.len()).sum()
    }
}

fn whole_numbers(fixture: &Fixture, name: &str) -> Vec<u32> {
    fixture.tensor(name).to_dtype(DType::U32).unwrap().to_vec1().unwrap()
}

/// Returns the rows from a fixture.
fn rows(fixture: &Fixture, config: &Gpt2Config) -> InOrder {
    let mut ids = &whole_numbers(fixture, "ids")[..];
    let lengths = whole_numbers(fixture, "lengths");
    let mut rows = Vec::new();
    for (length, target) in lengths.into_iter().zip(whole_numbers(fixture, "targets")) {
        let (row, rest) = ids.split_at(length as usize);
        ids = rest;
        rows.push(match config.head {
            HeadKind::SequenceClassification => Row { inputs: row.into(), targets: [target].into() },
            // For answers, the target is the prompt's length.
            _ => Row { inputs: row[..row.len() - 1].into(), targets: row[target as usize..].into() },
        });
    }
    let weights = fixture.tensors_below("class_weights").remove("");
    InOrder { rows, label_weights: weights.map(|weights| weights.to_vec1().unwrap()) }
}

/// Returns the trainer for a fixture, with the fixture's rows.
fn case(name: &str) -> (Fixture, Trainer, InOrder) {
    let fixture = Fixture::open(&format!("training/{name}"));
    let recorded = fixture.recorded();
    let number = |key: &str| recorded[key].as_u64().map(|number| usize::try_from(number).unwrap());
    let config = Gpt2Config::from_json(&recorded["config"].to_string()).unwrap();
    let parameters = Parameters::from_tensors(&config, &fixture.tensors_below("parameter.")).unwrap();
    let numbers = Hyperparameters {
        steps: 10,
        warmup_steps: 3,
        learning_rate: 1e-2,
        schedule: Schedule::Cosine,
        weight_decay: 0.1,
        grad_clip: Some(1.0),
        batch_size: number("batch_size").unwrap(),
        accumulate: number("accumulate").unwrap(),
        context: config.n_positions,
        ..Hyperparameters::default()
    };
    let trainer = match recorded["targets"].as_array() {
        None => {
            let (trained, fixed) = parameters.split(&config, number("trained"));
            Trainer::with_fixed(&config, trained, fixed, numbers).unwrap()
        }
        Some(targets) => {
            let targets = targets.iter().map(|target| target.as_str().unwrap().to_owned()).collect();
            let lora = LoraConfig {
                rank: number("rank").unwrap(),
                alpha: recorded["alpha"].as_f64().unwrap(),
                targets,
            };
            let (lora, adapters) = Lora::new(&config, lora, &parameters, 1).unwrap();
            let stored = fixture.tensors_below("adapter.");
            let trained: Vec<&str> = adapters.iter().map(|(name, _)| name).collect();
            assert_eq!(trained.len(), stored.len() + usize::from(config.num_labels() > 0), "{trained:?}");
            for (name, tensor) in &stored {
                adapters.get(name).unwrap().set(tensor).unwrap();
            }
            Trainer::with_adapters(&config, lora, adapters, numbers).unwrap()
        }
    };
    let rows = rows(&fixture, &config);
    (fixture, trainer, rows)
}

#[test]
fn ten_steps_of_each_kind_match_pytorch() {
    let names = "classify_all classify_weighted classify_blocks classify_adapters answer_all answer_blocks \
        answer_adapters";
    for name in names.split(' ') {
        let (fixture, mut trainer, rows) = case(name);
        let expected = |name: &str| values(&fixture.tensor(name));
        let steps = expected("losses").into_iter().zip(expected("norms")).zip(expected("rates"));
        for (index, ((loss, norm), rate)) in steps.enumerate() {
            let report = trainer.step(&rows).unwrap();
            assert_eq!(report.step, index as u64 + 1);
            let error = (report.loss / loss - 1.0).abs();
            assert!(error < LOSS_TOLERANCE, "{name}, step {index}: loss {}, expected {loss}", report.loss);
            let norm_error = (report.gradient_norm / norm - 1.0).abs();
            assert!(
                norm_error < 1e-3,
                "{name}, step {index}: norm {}, expected {norm}",
                report.gradient_norm
            );
            assert!((report.learning_rate / rate - 1.0).abs() < 1e-9, "{name}, step {index}: rate");
        }
        assert_eq!(trainer.steps_done(), 10);
    }
}

/// Rows that share a pass have the same gradients as separate rows.
#[test]
fn packed_rows_have_the_gradients_of_separate_rows() {
    for name in ["classify_weighted", "answer_all"] {
        let (_, trainer, rows) = case(name);
        let all = Rows::new(&rows.rows, rows.label_weights.as_deref());
        let (loss, packed) = trainer.gradients(&all, &mut Pass::inference(), 1).unwrap();
        let mut sums: Vec<Tensor> = packed.iter().map(|gradient| gradient.zeros_like().unwrap()).collect();
        let mut total = 0.0;
        for row in &rows.rows {
            let alone = Rows::new([row], rows.label_weights.as_deref());
            let (loss, gradients) = trainer.gradients(&alone, &mut Pass::inference(), 1).unwrap();
            let share = alone.weight() / all.weight();
            total += loss * share;
            sums = sums
                .iter()
                .zip(&gradients)
                .map(|(sum, one)| (sum + (one * share).unwrap()).unwrap())
                .collect();
        }
        assert!((total / loss - 1.0).abs() < 1e-6, "{name}: {total} and {loss}");
        for (sum, packed) in sums.iter().zip(&packed) {
            assert_close_absolute(sum, packed, 1e-5, name);
        }
        // Recomputing blocks leaves the gradients bit-identical.
        let recomputing = trainer.recomputing(true);
        let again = recomputing.gradients(&all, &mut Pass::inference().recomputing(true), 1).unwrap().1;
        for (again, packed) in again.iter().zip(&packed) {
            assert_eq!(values(again), values(packed), "{name}");
        }
    }
}

/// Splits every batch among two or four processes; their sums equal a single-process step.
#[test]
fn shares_sum_to_the_whole_step() {
    for name in ["classify_weighted", "answer_all"] {
        let (_, mut trainer, rows) = case(name);
        let (loss, whole) = trainer.share_of_step(&rows, Share::WHOLE).unwrap();
        for count in [2, 4] {
            let mut total = 0.0;
            let mut sums: Vec<Tensor> = whole.iter().map(|gradient| gradient.zeros_like().unwrap()).collect();
            for index in 0..count {
                let (part, gradients) = trainer.share_of_step(&rows, Share { index, count }).unwrap();
                total += part;
                sums = sums.iter().zip(&gradients).map(|(sum, one)| (sum + one).unwrap()).collect();
            }
            assert!((total / loss - 1.0).abs() < 1e-6, "{name}: {total} of {count} shares and {loss}");
            for (sum, whole) in sums.iter().zip(&whole) {
                assert_close_absolute(sum, whole, 1e-5, name);
            }
        }
    }
}

#[test]
fn frozen_parameters_are_unchanged_and_have_no_gradients() {
    let (fixture, mut trainer, rows) = case("classify_blocks");
    let before: HashMap<String, Tensor> = fixture.tensors_below("parameter.");
    let trained: Vec<String> = trainer.parameters().iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(trained.len(), 12 + 2 + 1, "one block, the final norm, the head: {trained:?}");
    let mut generator = RandomStream::new(1);
    let all = Rows::new(&rows.rows, None);
    let (_, gradients) = trainer.gradients(&all, &mut Pass::training(&mut generator), 1).unwrap();
    assert_eq!(gradients.len(), trained.len());
    for _ in 0..3 {
        trainer.step(&rows).unwrap();
    }
    for (name, tensor) in &before {
        let is_same = values(&trainer.parameter(name).unwrap()) == values(tensor);
        assert_eq!(is_same, !trained.contains(name), "{name}");
    }
}
