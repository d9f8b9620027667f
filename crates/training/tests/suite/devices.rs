//! Training where the CPU's kernels are not, on the device that `GPT2_TEST_DEVICE` names, and on the CPU without them: the losses
//! are those of the kernels.

use candle_core::{DType, Device};
use candle_gpt2::{Activation, Gpt2Config, HeadKind};
use candle_gpt2_kernels::composed;
use candle_gpt2_testing::{device, skipped};
use candle_gpt2_training::{
    ComputeDType, Data, Examples, Hyperparameters, Lora, LoraConfig, Parameters, Row, RowSet, Trainer,
    Windows,
};

const STEPS: u64 = 50;
/// Of the losses, which are near 3: roundings of f32, and what fifty steps of AdamW make of them.
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

/// Words of a made-up grammar: there is something to learn.
fn tokens() -> Vec<u32> {
    (0..3000u32).map(|place| (place * place / 3 + place % 7 * 5) % 53).collect()
}

/// The loss of each step; before them that of the first model on some examples, and after them that of the last one.
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
    // Of a model that says something, or there would be next to no gradients.
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
fn fifty_steps_have_the_losses_of_the_kernels() {
    let (tokens, numbers) = (tokens(), numbers());
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let accumulated = Hyperparameters { accumulate: 2, ..numbers.clone() };
    for (what, numbers, dropout, recomputes, make) in [
        ("plain", &accumulated, 0.0, false, trainer as fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer),
        ("with dropout", &numbers, 0.1, false, trainer),
        ("computed again, with dropout", &numbers, 0.1, true, trainer),
        ("adapters", &numbers, 0.0, false, adapted),
    ] {
        if dropout > 0.0 && device().is_metal() {
            skipped("an Apple GPU draws masks of its own");
            continue;
        }
        let config = config(dropout);
        let run = |device: &Device| {
            losses(make(&config, numbers, device).recomputing(recomputes), &windows, &batch)
        };
        let expected = run(&Device::Cpu);
        let [before, .., after] = expected[..] else { panic!("{what}: no losses") };
        assert!((after - before).abs() > 1e-3, "{what}: from {before} to {after} says nothing");
        let found = composed(|| run(&device()));
        assert_ne!(found, expected, "{what}: another path rounds otherwise");
        assert_near(what, &found, &expected, TOLERANCE);
    }
}

/// The targets of a row of inputs, of tokens and those that follow them.
type Targets<'a> = &'a dyn Fn(&[u32], &[u32]) -> Vec<u32>;

/// Rows of all lengths up to the context, with labels and with answers; all weights, those of the last block, and adapters.
#[test]
fn fifty_steps_on_rows_have_the_losses_of_the_kernels() {
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
    let labelled: Vec<Row> = rows(&|inputs, _| vec![inputs[0] % 3]);
    let answers: Vec<Row> = rows(&|inputs, next| {
        let start = inputs.len() / 2;
        next[start..inputs.len()].to_vec()
    });
    let last_block = |config: &Gpt2Config, numbers: &Hyperparameters, device: &Device| {
        let (trained, fixed) = Parameters::initialize(config, 5, device).unwrap().split(config, Some(1));
        Trainer::with_fixed(config, trained, fixed, numbers.clone()).unwrap()
    };
    if device().is_metal() {
        return skipped("an Apple GPU draws masks of its own");
    }
    let numbers = Hyperparameters { batch_size: 4, ..numbers() };
    type Make<'a> = &'a dyn Fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer;
    for (what, config, set, make) in [
        ("labels", &classifier, RowSet::new(labelled.clone(), None, 3), &trainer as Make),
        (
            "weighted labels, last block",
            &classifier,
            RowSet::new(labelled.clone(), Some(vec![1.0, 2.5, 0.5]), 3),
            &last_block,
        ),
        ("labels, adapters", &classifier, RowSet::new(labelled, None, 3), &adapted),
        ("answers", &language_model, RowSet::new(answers.clone(), None, 3), &trainer),
        ("answers, adapters", &language_model, RowSet::new(answers, None, 3), &adapted),
    ] {
        let some = set.examples(7, 6);
        let run = |device: &Device| losses(make(config, &numbers, device), &set, &*some);
        let (expected, found) = (run(&Device::Cpu), composed(|| run(&device())));
        let [before, .., after] = expected[..] else { panic!("{what}: no losses") };
        assert!((after - before).abs() > 1e-3, "{what}: from {before} to {after} says nothing");
        assert_ne!(found, expected, "{what}: another path rounds otherwise");
        assert_near(what, &found, &expected, TOLERANCE);
    }
}

/// candle computes SiLU, between operations of ours.
#[test]
fn blocks_that_are_computed_again_have_the_same_losses_to_the_last_bit() {
    let tokens = tokens();
    let numbers = Hyperparameters { accumulate: 2, ..numbers() };
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let makes = [trainer as fn(&Gpt2Config, &Hyperparameters, &Device) -> Trainer, trainer, adapted];
    for (activation_function, make) in
        [Activation::GeluTanh, Activation::Silu, Activation::Relu].into_iter().zip(makes)
    {
        let config = Gpt2Config { activation_function, ..config(0.2) };
        let run = |again| losses(make(&config, &numbers, &Device::Cpu).recomputing(again), &windows, &batch);
        assert_eq!(run(false), run(true), "{activation_function:?}");
    }
}

/// In bf16 a logit near 1 is 2^-9 off, and so is about what a loss may be; the weights, which are f32, lose nothing of small steps.
#[test]
fn fifty_steps_in_bf16_follow_those_in_f32() {
    let (tokens, numbers) = (tokens(), numbers());
    let windows = Windows::new(&tokens, numbers.context, numbers.seed).unwrap();
    let batch = windows.batch(0, 4);
    let config = config(0.0);
    for make in [trainer, adapted] {
        let expected = losses(make(&config, &numbers, &Device::Cpu), &windows, &batch);
        let halved = Hyperparameters { compute_dtype: ComputeDType::Bf16, ..numbers.clone() };
        let found = losses(make(&config, &halved, &device()), &windows, &batch);
        let again = losses(make(&config, &halved, &device()).recomputing(true), &windows, &batch);
        // The same forwards; backwards, gradients in bf16 are added up in another order.
        assert_eq!(again[..2], found[..2], "bf16, computed again");
        assert_near("bf16, computed again", &again, &found, 2e-3);
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst > 1e-5, "bf16 rounds: {worst}");
        assert_near("bf16", &found, &expected, 0.02);
        let one = make(&config, &halved, &device());
        assert!(one.parameters().iter().all(|(_, parameter)| parameter.dtype() == DType::F32));
    }
}
