//! Tests windows that start at a position other than 0, and training with growing windows.

use candle_core::Device;
use candle_gpt2::{Gpt2Config, Pass};
use candle_gpt2_training::{Batch, Hyperparameters, Parameters, Trainer, Windows};

fn config() -> Gpt2Config {
    let text = r#"{"vocab_size": 53, "n_positions": 21, "n_embd": 12, "n_layer": 2, "n_head": 3,
        "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}"#;
    Gpt2Config::from_json(text).unwrap()
}

fn trainer(numbers: Hyperparameters) -> Trainer {
    let parameters = Parameters::initialize(&config(), 3, &Device::Cpu).unwrap();
    Trainer::new(&config(), parameters, numbers).unwrap()
}

#[test]
fn gradients_reach_only_the_positions_of_the_window() {
    let trainer = trainer(Hyperparameters { context: 5, ..Hyperparameters::default() });
    let batch = |first_position| Batch {
        inputs: (1..11).collect(),
        targets: (2..12).collect(),
        rows: 2,
        first_position,
    };
    let trained = |first_position| {
        let (_, gradients) = trainer.gradients(&batch(first_position), &mut Pass::inference(), 1).unwrap();
        let place = trainer.parameters().iter().position(|(name, _)| name.ends_with("wpe.weight")).unwrap();
        let rows = gradients[place].to_vec2::<f32>().unwrap();
        rows.iter().map(|row| row.iter().any(|value| *value != 0.0)).collect::<Vec<_>>()
    };
    for first in [0, 7, 16] {
        let expected: Vec<bool> = (0..21).map(|position| (first..first + 5).contains(&position)).collect();
        assert_eq!(trained(first), expected, "from position {first}");
    }
    let beyond = trainer.gradients(&batch(17), &mut Pass::inference(), 1).unwrap_err().to_string();
    assert!(beyond.contains("21"), "{beyond}");
}

#[test]
fn each_step_of_a_ramp_uses_its_own_window_size() {
    let numbers = Hyperparameters {
        steps: 4,
        context: 16,
        batch_size: 4,
        context_ramp: "0:4,1:8,3:16".parse().ok(),
        batch_ramp: "0:2,2:4".parse().ok(),
        random_positions: true,
        beta_2_half_life: Some(500.0),
        ..Hyperparameters::default()
    };
    let tokens: Vec<u32> = (0..900).map(|place| place * place % 53).collect();
    let windows = Windows::of_training(&tokens, &numbers, 21, None).unwrap();
    let mut trainer = trainer(numbers);
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(trainer.tokens_of_step(&windows));
        trainer.step(&windows).unwrap();
    }
    assert_eq!(seen, [2 * 4, 2 * 8, 4 * 8, 4 * 16]);
}
