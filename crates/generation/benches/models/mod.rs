//! The models that benches measure.

use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::WeightFormat;
use candle_gpt2_testing::MadeUpWeights;

/// GPT-2's 124M parameters in q8, with made-up weights: speed does not depend on the values.
pub(crate) fn gpt2_124m() -> Gpt2LMHeadModel {
    let config = Gpt2Config::preset("gpt2").expect("a published model");
    Gpt2LMHeadModel::load(&config, MadeUpWeights::new(WeightFormat::Q8)).expect("a model")
}
