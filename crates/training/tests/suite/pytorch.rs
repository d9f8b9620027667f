//! Compares gradients and optimizers with PyTorch (`scripts/reference/training.py`).
//!
//! `GPT2_TEST_DEVICE` selects the device.

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Pass};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_testing::{Fixture, device, values, worst};
use candle_gpt2_training::{Batch, Hyperparameters, OptimizerKind, Parameters, Schedule, Trainer};

/// Tolerance for gradients, relative to the largest value in the tensor.
const GRADIENT_TOLERANCE: f64 = 1e-4;
/// Relative tolerance for losses.
const LOSS_TOLERANCE: f64 = 1e-4;

/// Returns a fixture with its model and batch.
fn case(name: &str, numbers: Hyperparameters) -> (Fixture, Trainer, Batch) {
    let fixture = Fixture::open(&format!("training/{name}"));
    let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
    let tensors = fixture.tensors_below("parameter.").into_iter();
    let tensors = tensors.map(|(name, tensor)| (name, tensor.to_device(&device()).unwrap())).collect();
    let parameters = Parameters::from_tensors(&config, &tensors).unwrap();
    let (rows, length) = fixture.tensor("ids").dims2().unwrap();
    let part = |start: usize| {
        let ids = fixture.tensor("ids").narrow(1, start, length - 1).unwrap();
        ids.flatten_all().unwrap().to_dtype(DType::U32).unwrap().to_vec1().unwrap()
    };
    let batch = Batch { inputs: part(0), targets: part(1), rows, first_position: 0 };
    let numbers = Hyperparameters { context: length - 1, batch_size: rows, ..numbers };
    let trainer = Trainer::new(&config, parameters, numbers).unwrap();
    (fixture, trainer, batch)
}

#[test]
fn gradients_of_every_parameter_match_pytorch() {
    for name in ["tied", "untied", "scaled"] {
        let (fixture, trainer, batch) = case(name, Hyperparameters::default());
        // Training pass with dropout rates of zero.
        let mut generator = RandomStream::new(1);
        let (loss, gradients) = trainer.gradients(&batch, &mut Pass::training(&mut generator), 1).unwrap();
        let expected = values(&fixture.tensor("loss"))[0];
        assert!((loss / expected - 1.0).abs() < 1e-6, "{name}: loss {loss}, expected {expected}");
        for ((parameter, _), gradient) in trainer.parameters().iter().zip(&gradients) {
            let expected = fixture.tensor(&format!("gradient.{parameter}"));
            assert_eq!(gradient.dims(), expected.dims(), "{name}: {parameter}");
            let (found, expected) = (values(gradient), values(&expected));
            let largest = worst(expected.iter().map(|value| value.abs()));
            let differences = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
            let worst = worst(differences);
            assert!(largest > 0.0, "{name}: {parameter} has no gradient in the fixture");
            assert!(
                worst <= GRADIENT_TOLERANCE * largest,
                "{name}: {parameter} is off by {worst}, its largest value is {largest}"
            );
        }
    }
}

#[test]
fn ten_adamw_steps_match_pytorch() {
    ten_steps("optimizer", OptimizerKind::AdamW);
}

#[test]
fn ten_muon_steps_match_pytorch() {
    ten_steps("muon", OptimizerKind::Muon);
}

fn ten_steps(name: &str, optimizer: OptimizerKind) {
    let numbers = Hyperparameters {
        steps: 10,
        optimizer,
        warmup_steps: 3,
        learning_rate: 1e-2,
        schedule: Schedule::Cosine,
        weight_decay: 0.1,
        grad_clip: Some(1.0),
        ..Hyperparameters::default()
    };
    let (fixture, mut trainer, batch) = case(name, numbers);
    let expected = |name: &str| values(&fixture.tensor(name));
    let expected: Vec<_> =
        expected("losses").into_iter().zip(expected("norms")).zip(expected("rates")).collect();
    assert_eq!(expected.len(), 10);
    for (index, ((loss, norm), rate)) in expected.into_iter().enumerate() {
        let (found, gradients) = trainer.gradients(&batch, &mut Pass::inference(), 1).unwrap();
        let report = trainer.apply(&gradients, found).unwrap();
        assert_eq!(report.step, index as u64 + 1);
        assert!((found / loss - 1.0).abs() < LOSS_TOLERANCE, "step {index}: loss {found}, expected {loss}");
        let norm_error = (report.gradient_norm / norm - 1.0).abs();
        assert!(norm_error < 1e-3, "step {index}: norm {}, expected {norm}", report.gradient_norm);
        assert!(index > 5 || norm > 1.0, "clipping takes effect in step {index}");
        assert!((report.learning_rate / rate - 1.0).abs() < 1e-9, "step {index}: rate");
    }
}

#[test]
fn accumulated_batches_have_the_gradient_of_one_large_batch() {
    let (_, trainer, batch) = case("tied", Hyperparameters::default());
    let row = |index: usize| {
        let length = batch.inputs.len() / batch.rows;
        let part = |tokens: &[u32]| tokens[index * length..(index + 1) * length].to_vec();
        Batch { inputs: part(&batch.inputs), targets: part(&batch.targets), rows: 1, first_position: 0 }
    };
    let (_, whole) = trainer.gradients(&batch, &mut Pass::inference(), 1).unwrap();
    let mut sums: Vec<Tensor> = whole.iter().map(|gradient| gradient.zeros_like().unwrap()).collect();
    for index in 0..batch.rows {
        let (_, part) = trainer.gradients(&row(index), &mut Pass::inference(), batch.rows).unwrap();
        sums = sums.iter().zip(&part).map(|(sum, part)| (sum + part).unwrap()).collect();
    }
    for (sum, whole) in sums.iter().zip(&whole) {
        candle_gpt2_testing::assert_close_absolute(sum, whole, 1e-6, "accumulated gradient");
    }
}

#[test]
fn initial_weights_have_gpt2_standard_deviations() {
    let config = Gpt2Config { vocab_size: 300, n_positions: 64, n_embd: 96, n_head: 4, ..Gpt2Config::gpt2() };
    let parameters = Parameters::initialize(&config, 7, &Device::Cpu).unwrap();
    let deviation = |name: &str| {
        let values = values(parameters.get(name).unwrap());
        (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
    };
    // Each tensor has at least 9,216 values, so the standard error of its deviation is below 0.8 percent.
    for (name, expected) in [
        ("wte.weight", 0.02),
        ("wpe.weight", 0.02),
        ("h.3.attn.c_attn.weight", 0.02),
        ("h.3.mlp.c_fc.weight", 0.02),
        ("h.3.attn.c_proj.weight", 0.02 / 24f64.sqrt()),
        ("h.11.mlp.c_proj.weight", 0.02 / 24f64.sqrt()),
    ] {
        let found = deviation(name);
        assert!((found / expected - 1.0).abs() < 0.04, "{name}: {found}, expected {expected}");
    }
    assert_eq!(deviation("ln_f.weight"), 1.0);
    assert_eq!(deviation("h.0.mlp.c_fc.bias"), 0.0);
}
