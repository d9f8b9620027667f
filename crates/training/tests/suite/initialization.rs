//! Tests the fresh weights of both initializations.

use candle_core::{DType, Device};
use candle_gpt2::{ByOutput, Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_interpret::{head_scores, random_rows};
use candle_gpt2_testing::values;
use candle_gpt2_training::{Initialization, Parameters};
use candle_nn::VarBuilder;

#[test]
fn mimetic_weights_change_positions_heads_and_mlps() {
    let text = r#"{"vocab_size": 30, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;
    let config = Gpt2Config::from_json(text).unwrap();
    let of = |initialization| Parameters::initialize_as(initialization, &config, 7, &Device::Cpu).unwrap();
    let (usual, mimetic) = (of(Initialization::Gpt2), of(Initialization::Mimetic));
    for ((name, usual), (_, mimetic)) in usual.iter().zip(mimetic.iter()) {
        let is_changed =
            name == "wpe.weight" || name.ends_with("c_proj.weight") || name.ends_with("c_attn.weight");
        assert_eq!(values(usual) != values(mimetic), is_changed, "{name}");
    }
    let positions = mimetic.get("wpe.weight").unwrap().to_vec2::<f32>().unwrap();
    // There are four frequencies, each a factor of 1000^(1/4) below the previous one; sines come first. The
    // mean square matches weights with a standard deviation of 0.02.
    for (position, row) in positions.iter().enumerate() {
        for frequency in 0..4 {
            let angle = position as f64 * 3.0 / 1000f64.powf(frequency as f64 / 4.0);
            for (place, expected) in [(frequency, angle.sin()), (4 + frequency, angle.cos())] {
                let found = f64::from(row[place]);
                assert!((found - 0.02 * 2f64.sqrt() * expected).abs() < 1e-8, "{position}, {place}: {found}");
            }
        }
    }
    for (block, part) in [(0, 0.15), (1, 1.0)] {
        let weight = |name| {
            let weight = mimetic.get(&format!("h.{block}.attn.{name}.weight")).unwrap();
            weight.to_vec2::<f32>().unwrap()
        };
        let (c_attn, c_proj) = (weight("c_attn"), weight("c_proj"));
        let mlp = mimetic.get(&format!("h.{block}.mlp.c_proj.weight")).unwrap();
        assert!(values(mlp).iter().all(|value| *value == 0.0), "block {block}");
        // The columns of the previous-token head match the induction head's keys, which the next test covers.
        let first_column = if block == 0 { 4 } else { 0 };
        for (row, column) in (0..8).flat_map(|row| (first_column..8).map(move |column| (row, column))) {
            // The rows are outputs; the values follow 8 queries and 8 keys.
            let expected = f64::from(c_attn[16 + column][row]) * part;
            assert!((f64::from(c_proj[row][column]) - expected).abs() < 1e-9, "block {block}");
        }
    }
}

#[test]
fn mimetic_weights_contain_previous_token_and_induction_heads() {
    let text = r#"{"vocab_size": 512, "n_positions": 96, "n_embd": 256, "n_layer": 3, "n_head": 4, "initializer_range": 0.05}"#;
    let config = Gpt2Config::from_json(text).unwrap();
    let scores = |initialization| {
        let parameters = Parameters::initialize_as(initialization, &config, 3, &Device::Cpu).unwrap();
        let tensors =
            parameters.iter().map(|(name, variable)| (name.to_owned(), variable.as_tensor().clone()));
        let weights = ByOutput(VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu));
        let model = Gpt2LMHeadModel::load(&config, weights).unwrap();
        head_scores(&model, &random_rows(5, 8, 32, 1, 512), None).unwrap()
    };
    let (usual, mimetic) = (scores(Initialization::Gpt2), scores(Initialization::Mimetic));
    let message = format!("previous {:?}, induction {:?}", mimetic.previous, mimetic.induction);
    assert!(mimetic.previous[0][0] > 0.8 && mimetic.induction[1][0] > 0.12, "{message}");
    // Uniform attention over all tokens assigns at most a twentieth to each.
    assert!(usual.previous[0][0] < 0.1 && usual.induction[1][0] < 0.06);
}
