//! Compares the losses from training with and without the CPU kernels.
//!
//! The tests run on the device that `GPT2_TEST_DEVICE` selects.

use candle_core::{DType, Device};
use candle_gpt2::{Activation, Gpt2Config, HeadKind};
use candle_gpt2_kernels::composed;
use candle_gpt2_testing::{device, skipped};
use candle_gpt2_training::{
    ComputeDType, Data, Examples, Hyperparameters, Lora, LoraConfig, Parameters, Row, RowSet, Trainer,
    Windows,
};

const STEPS: u64 = 50;
/// Tolerance for losses near 3: f32 rounding that accumulates over fifty steps of AdamW.
const TOLERANCE: f64 = 1e-5;

fn config(dropout: f64) -> Gpt2Config {
    let text =
        r#"{"vocab_size": 53, "n_positions": 21, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 40}"#;
    let config = Gpt2Config::from_json(text).unwrap();
    Gpt2Config { embd_pdrop: dropout, attn_pdrop: dropout, resid_pdrop: dropout, ..config }
}

fn numbers() -> Hyperparameters {
    Hyperparameters {
        steps: STEPS,
        batch_size: 3,
        context: 17,
        learning_rate: 3e-3,
        warmup_steps: 5,
        seed: 8,
        ..Hyperparameters::default()
    }
}

/// Returns tokens of a synthetic, learnable sequence.
fn tokens() -> Vec<u32> {
    (0..3000u32).map(|place| (place * place / 3 + place % 7 * 5) % 53).collect()
}

/// Returns the loss of each step, preceded and followed by an evaluation.
///
/// The evaluations are the losses of the initial and final model on `batch`.
fn losses(mut trainer: Trainer, data: &dyn Data, batch: &dyn Examples) -> Vec<f64> {
    let mut losses = vec![trainer.evaluate(batch).unwrap()];
    losses.extend((0..STEPS).map(|_| trainer.step(data).unwrap().loss));
    losses.push(trainer.evaluate(batch).unwrap());
    losses
}

fn trainer(config: &Gpt2Config, numbers: &Hyperparameters, device: &Device) -> Trainer {
    let parameters = Parameters::initialize(config, 5, device).unwrap();
    Trainer::new(config, parameters, numbers.clone()).unwrap()
}

fn adapted(config: &Gpt2Config, numbers: &Hyperparameters, device: &Device) -> Trainer {
    // The base model has larger weights, because gradients would otherwise be close to zero.
    let config = &Gpt2Config { initializer_range: 0.2, ..config.clone() };
    let base = Parameters::initialize(config, 5, device).unwrap();
    let lora = LoraConfig { rank: 2, alpha: 5.0, targets: ["c_attn", "c_fc"].map(str::to_owned).to_vec() };
    let (lora, adapters) = Lora::new(config, lora, &base, 6).unwrap();
    let numbers = Hyperparameters { learning_rate: 0.01, ..numbers.clone() };
    Trainer::with_adapters(config, lora, adapters, numbers).unwrap()
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= tolerance, "{what}: step {step} has the loss {found}, expected {expected}");
    }
}

#[test]
fn fifty_steps_match_the_cpu_kernels() {
    let (tokens, numbers) = (tokens(), numbers());
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let accumulated = Hyperparameters { accumulate: 2, ..numbers.clone() };
    for (what, numbers, dropout, recomputes, make) in [
        ("plain", &accumulated, 0.0, false, trainer as fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer),
        ("with dropout", &numbers, 0.1, false, trainer),
        ("recomputed, with dropout", &numbers, 0.1, true, trainer),
        ("adapters", &numbers, 0.0, false, adapted),
    ] {
        if dropout > 0.0 && device().is_metal() {
            skipped("an Apple GPU samples different masks");
            continue;
        }
        let config = config(dropout);
        let run = |device: &Device| {
            losses(make(&config, numbers, device).recomputing(recomputes), &windows, &batch)
        };
        let expected = run(&Device::Cpu);
        let [before, .., after] = expected[..] else { panic!("{what}: no losses") };
        assert!(
            (after - before).abs() > 1e-3,
            "{what}: the change from {before} to {after} is too small to compare"
        );
        let found = composed(|| run(&device()));
        assert_ne!(found, expected, "{what}: a different path rounds differently");
        assert_near(what, &found, &expected, TOLERANCE);
    }
}

/// Function that returns a row's targets from its input tokens and the tokens that follow.
type Targets<'a> = &'a dyn Fn(&[u32], &[u32]) -> Vec<u32>;

/// Trains on rows of all lengths up to the context, with labels and answers.
///
/// Covers training of all weights, of the last block only, and of adapters.
#[test]
fn fifty_steps_on_rows_match_the_cpu_kernels() {
    let tokens = tokens();
    let language_model = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.1, resid_pdrop: 0.1, ..config(0.0) };
    let labels = ["one", "two", "three"].map(str::to_owned).to_vec();
    let head = HeadKind::SequenceClassification;
    let classifier = Gpt2Config { head, id2label: labels, ..language_model.clone() };
    let row = |index: usize, targets: Targets| {
        let (inputs, next) = (&tokens[index * 22..][..1 + index * 7 % 21], &tokens[index * 22 + 1..]);
        Row { inputs: inputs.into(), targets: targets(inputs, next).into() }
    };
    let rows = |targets: Targets| (0..40).map(|index| row(index, targets)).collect();
    let labeled: Vec<Row> = rows(&|inputs, _| vec![inputs[0] % 3]);
    let answers: Vec<Row> = rows(&|inputs, next| {
        let start = inputs.len() / 2;
        next[start..inputs.len()].to_vec()
    });
    let last_block = |config: &Gpt2Config, numbers: &Hyperparameters, device: &Device| {
        let (trained, fixed) = Parameters::initialize(config, 5, device).unwrap().split(config, Some(1));
        Trainer::with_fixed(config, trained, fixed, numbers.clone()).unwrap()
    };
    if device().is_metal() {
        return skipped("an Apple GPU samples different masks");
    }
    let numbers = Hyperparameters { batch_size: 4, ..numbers() };
    type Make<'a> = &'a dyn Fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer;
    for (what, config, set, make) in [
        ("labels", &classifier, RowSet::new(labeled.clone(), None, 3), &trainer as Make),
        (
            "weighted labels, last block",
            &classifier,
            RowSet::new(labeled.clone(), Some(vec![1.0, 2.5, 0.5]), 3),
            &last_block,
        ),
        ("labels, adapters", &classifier, RowSet::new(labeled, None, 3), &adapted),
        ("answers", &language_model, RowSet::new(answers.clone(), None, 3), &trainer),
        ("answers, adapters", &language_model, RowSet::new(answers, None, 3), &adapted),
    ] {
        let some = set.examples(7, 6);
        let run = |device: &Device| losses(make(config, &numbers, device), &set, &*some);
        let (expected, found) = (run(&Device::Cpu), composed(|| run(&device())));
        let [before, .., after] = expected[..] else { panic!("{what}: no losses") };
        assert!(
            (after - before).abs() > 1e-3,
            "{what}: the change from {before} to {after} is too small to compare"
        );
        assert_ne!(found, expected, "{what}: a different path rounds differently");
        assert_near(what, &found, &expected, TOLERANCE);
    }
}

/// Covers SiLU, which candle computes between this project's operations.
#[test]
fn recomputed_blocks_have_bit_identical_losses() {
    let tokens = tokens();
    let numbers = Hyperparameters { accumulate: 2, ..numbers() };
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let makes = [trainer as fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer, trainer, adapted];
    for (activation_function, make) in
        [Activation::GeluTanh, Activation::Silu, Activation::Relu].into_iter().zip(makes)
    {
        let config = Gpt2Config { activation_function, ..config(0.2) };
        let run = |recomputes| {
            losses(make(&config, &numbers, &Device::Cpu).recomputing(recomputes), &windows, &batch)
        };
        assert_eq!(run(false), run(true), "{activation_function:?}");
    }
}

/// In bf16, a logit near 1 has an error of 2^-9, and losses have a similar one.
///
/// The weights are f32, so small steps are not lost.
#[test]
fn fifty_steps_in_bf16_follow_f32() {
    let (tokens, numbers) = (tokens(), numbers());
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let config = config(0.0);
    for make in [trainer, adapted] {
        let expected = losses(make(&config, &numbers, &Device::Cpu), &windows, &batch);
        let halved = Hyperparameters { compute_dtype: ComputeDType::BF16, ..numbers.clone() };
        let found = losses(make(&config, &halved, &device()), &windows, &batch);
        let recomputed = losses(make(&config, &halved, &device()).recomputing(true), &windows, &batch);
        // The forward passes are equal. The backward pass adds bf16 gradients in a different order.
        assert_eq!(recomputed[..2], found[..2], "bf16, recomputed");
        assert_near("bf16, recomputed", &recomputed, &found, 2e-3);
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst > 1e-5, "bf16 rounds: {worst}");
        assert_near("bf16", &found, &expected, 0.02);
        let one = make(&config, &halved, &device());
        assert!(one.parameters().iter().all(|(_, parameter)| parameter.dtype() == DType::F32));
    }
}
